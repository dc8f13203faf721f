"""Optional arguments at the end of an operation that are equal to their defaults.

Owns the table of such arguments and the count of those that can be dropped, which lets older drivers run the operation.

Invariant: an operation means the same with and without what is counted here.

Source: the trailing arguments that the NN API's model builder removes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aionn.hal import OperandType, OperationType

__all__ = ["droppable_count"]

Constant = Callable[[int], tuple[int, object] | None]
"""Type and value of an input that is a constant scalar, else None."""

_FALSE = (OperandType.BOOL, False)
_ONE = (OperandType.INT32, 1)
_MINUS_ONE = (OperandType.INT32, -1)

_LAYOUT_AND_DILATION = (_FALSE, _ONE, _ONE)

_TAILS: dict[OperationType, tuple[tuple[int, int, tuple[tuple[OperandType, object], ...]], ...]] = {
    OperationType.AVERAGE_POOL_2D: ((7, 8, (_FALSE,)), (10, 11, (_FALSE,))),
    OperationType.L2_POOL_2D: ((7, 8, (_FALSE,)), (10, 11, (_FALSE,))),
    OperationType.MAX_POOL_2D: ((7, 8, (_FALSE,)), (10, 11, (_FALSE,))),
    OperationType.CONV_2D: ((10, 13, _LAYOUT_AND_DILATION), (7, 10, _LAYOUT_AND_DILATION)),
    OperationType.DEPTHWISE_CONV_2D: ((11, 14, _LAYOUT_AND_DILATION), (8, 11, _LAYOUT_AND_DILATION)),
    OperationType.DEPTH_TO_SPACE: ((2, 3, (_FALSE,)),),
    OperationType.SPACE_TO_DEPTH: ((2, 3, (_FALSE,)),),
    OperationType.BATCH_TO_SPACE_ND: ((2, 3, (_FALSE,)),),
    OperationType.SPACE_TO_BATCH_ND: ((3, 4, (_FALSE,)),),
    OperationType.L2_NORMALIZATION: ((1, 2, (_MINUS_ONE,)),),
    OperationType.LOCAL_RESPONSE_NORMALIZATION: ((5, 6, (_MINUS_ONE,)),),
    OperationType.SOFTMAX: ((2, 3, (_MINUS_ONE,)),),
    OperationType.RESIZE_BILINEAR: ((3, 6, (_FALSE, _FALSE, _FALSE)),),
    OperationType.RESIZE_NEAREST_NEIGHBOR: ((4, 6, (_FALSE, _FALSE)),),
}
"""For each operation its forms: number of inputs without the tail, at most with it, and the tail's defaults."""

_PADDING_FORMS = {
    OperationType.AVERAGE_POOL_2D: 7,
    OperationType.L2_POOL_2D: 7,
    OperationType.MAX_POOL_2D: 7,
    OperationType.CONV_2D: 7,
    OperationType.DEPTHWISE_CONV_2D: 8,
}
"""The input whose type distinguishes implicit padding (BOOL, or absent) from explicit padding (INT32)."""


def droppable_count(operation_type: int, input_types: Sequence[int], constant: Constant) -> int:
    """Number of inputs at the end of an operation that can be dropped.

    Args:
        operation_type: The operation's code.
        input_types: The types of its inputs.
        constant: Gives an input's value, by position.
    """
    count = len(input_types)
    for form, most, tail in _TAILS.get(operation_type, ()):  # type: ignore[call-overload]
        if not form < count <= most or not _is_form(operation_type, input_types, form):
            continue
        dropped = 0
        for position in range(count - 1, form - 1, -1):
            if constant(position) != tail[position - form]:
                break
            dropped += 1
        # Both dilation factors come together.
        if tail is _LAYOUT_AND_DILATION and count - dropped == form + 2:
            return 0
        return dropped
    return 0


def _is_form(operation_type: int, input_types: Sequence[int], form: int) -> bool:
    telling = _PADDING_FORMS.get(operation_type)  # type: ignore[call-overload]
    if telling is None or telling >= len(input_types):
        return True
    is_explicit = input_types[telling] == OperandType.INT32
    return bool(is_explicit == (form > telling))
