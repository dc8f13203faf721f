"""Images as arguments of executions: pixels in rows with gaps on one side, a tensor without gaps on the other.

Owns the rule by which an image is a tensor, and the copies between them. ``aionn.hal.memory`` defines the layout of images.

The rule: a pixel's bytes are the values of a TENSOR_QUANT8_ASYMM operand, as they are, in the order layer, row, pixel, channel; the
operand's shape is ``[layers, height, width, channels]``, in which extents of 1 may be left out or put in. Bytes between rows, and
the X byte of a pixel that has one, are neither read nor written.

Invariants:
1. An image is read once per execution: the tensor is a private copy, unless the image has no gaps.
2. An image is written after the execution has succeeded, and not at all by one that failed.

Source: non-blob hardware buffers of the NN HAL 1.2, which leaves the rule to the driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal import Memory, Operand, OperandType, dimensions_are_known, operand_type_name

__all__ = ["check_image", "read_image", "write_image"]


def check_image(image: Memory, operand: Operand, shape: tuple[int, ...], where: str) -> None:
    """Refuses an image that is not the operand's tensor by the rule above.

    Args:
        image: Memory of kind ``hardware_buffer``.
        operand: The model's.
        shape: Its shape according to model and request.
        where: Begins the message.

    Raises:
        InvalidArgument: Another type, or a shape that is not the image's.
    """
    assert image.image is not None, "memory of this kind has a description"
    if operand.type != OperandType.TENSOR_QUANT8_ASYMM:
        raise InvalidArgument(
            f"{where}: expected TENSOR_QUANT8_ASYMM for an image, got {operand_type_name(operand.type)}"
        )
    has = image.image.shape
    is_known = dimensions_are_known(operand.type, shape)
    if not is_known or [e for e in shape if e != 1] != [e for e in has if e != 1]:
        raise InvalidArgument(f"{where}: expected the shape {list(has)} of its image, got {list(shape)}")


def read_image(image: Memory, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The image as a read-only tensor without gaps, of a shape that ``check_image`` took."""
    array = np.ascontiguousarray(image.pixels).reshape(shape)
    array.flags.writeable = False
    return array


def write_image(image: Memory, tensor: npt.NDArray[Any]) -> None:
    """Writes a tensor, of a shape that ``check_image`` took, into the image's pixels."""
    pixels = image.pixels
    np.copyto(pixels, tensor.reshape(pixels.shape))
