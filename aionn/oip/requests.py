"""A request and its answer as both transports have them, and the descriptions of models; pure.

Owns the words of the protocol that mean the same in gRPC and in REST. ``grpc_messages`` and ``rest_messages`` read and write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

import aionn
from aionn.oip.tensors import Array

__all__ = [
    "EXTENSIONS",
    "NAME_BYTES_MAX",
    "PARAMETERS_MAX",
    "RANK_MAX",
    "SERVER_NAME",
    "TENSORS_MAX",
    "VERSION",
    "Answer",
    "InputTensor",
    "ModelDescription",
    "Parameter",
    "Request",
    "TensorDescription",
    "WantedOutput",
    "check_count",
    "check_name",
]

SERVER_NAME: Final = "aionn"

VERSION: Final = "1"
"""The version of every model: a file has no other one, and a request may leave it out."""

EXTENSIONS: Final = ("binary_tensor_data", "model_configuration")

NAME_BYTES_MAX: Final = 1024
"""Bytes of a name, an id or the text of a parameter: tools make identifiers of a hundred letters."""

TENSORS_MAX: Final = 1024
"""Inputs or outputs of one request: models of states have some hundreds."""

PARAMETERS_MAX: Final = 64
"""Parameters of a request or a tensor: Triton's clients send five at most."""

RANK_MAX: Final = 32
"""Axes of a tensor; numpy has had this limit, and no model comes near it."""

Parameter = bool | int | float | str | None

_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,128}")


class InputTensor(msgspec.Struct, frozen=True):
    """One input of a request.

    Attributes:
        name: Which input.
        datatype: The protocol's name of its element type.
        shape: Its extents.
        load: Makes the array, of an element type and a shape that the model has accepted. Raises ``InvalidArgument``.
        work_bytes: Bytes that it has to convert one by one: 0 for raw ones.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    load: Callable[[np.dtype[Any]], Array]
    work_bytes: int = 0


class WantedOutput(msgspec.Struct, frozen=True):
    """An output that a request asks for.

    Attributes:
        name: Which output.
        is_binary: Whether REST is to send its raw bytes; gRPC always does.
    """

    name: str
    is_binary: bool = False


class Request(msgspec.Struct, frozen=True):
    """A request for one inference.

    Attributes:
        model: Name of the model.
        version: Its version; empty for the one there is.
        id: The client's name of the request, which the answer repeats.
        parameters: See ``terms``.
        inputs: The inputs.
        outputs: The outputs that are wanted; empty for all.
        is_binary: Whether REST sends raw bytes for outputs where the request does not name them.
    """

    model: str
    version: str
    id: str
    parameters: Mapping[str, Parameter]
    inputs: tuple[InputTensor, ...]
    outputs: tuple[WantedOutput, ...]
    is_binary: bool = False


class TensorDescription(msgspec.Struct, frozen=True):
    """One input or output of a model.

    Attributes:
        name: Its name.
        datatype: The protocol's name of its element type.
        shape: Its extents; -1 where unknown.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelDescription(msgspec.Struct, frozen=True):
    """The metadata of a model.

    Attributes:
        name: Its name.
        platform: The form of its file.
        inputs: Its inputs.
        outputs: Its outputs.
    """

    name: str
    platform: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request.

    Attributes:
        model: Name of the model.
        id: That of the request.
        outputs: Description and value of each output that was wanted, and whether REST sends its raw bytes.
        parameters: Of the answer.
    """

    model: str
    id: str
    outputs: tuple[tuple[TensorDescription, Array, bool], ...]
    parameters: dict[str, Parameter] = {}


def check_name(name: str, where: str) -> str:
    """A name of a model that can be part of an address of REST.

    Raises:
        InvalidArgument: It cannot.
    """
    if not _NAME.fullmatch(name) or set(name) <= {"."}:
        raise aionn.InvalidArgument(
            f"{where}: expected a name of at most 128 letters, digits and . _ + -, got {name!r:.160}"
        )
    return name


def check_count(count: int, most: int, where: str) -> None:
    """Raises ``InvalidArgument`` where there are more than ``most``."""
    if count > most:
        raise aionn.InvalidArgument(f"{where}: expected at most {most}, got {count}")
