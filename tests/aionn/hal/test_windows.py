"""Claims about the places and values of window arguments, and about SAME padding."""

from __future__ import annotations

import itertools

import pytest

from aionn.hal import OperandType, OperationType, Padding
from aionn.hal.windows import (
    Window,
    WindowArguments,
    read_window,
    same_padding,
    window_arguments,
    window_values,
)

TENSOR, LIST, NUMBER, FLAG = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_INT32,
    OperandType.INT32,
    OperandType.BOOL,
)
WEIGHTED = [TENSOR, TENSOR, TENSOR]
# Every legal form: the inputs before the window arguments, the number of extras, is padding explicit, is there a layout, dilations.
FORMS = [
    *(
        (operation, WEIGHTED, extras, explicit, layout, dilation)
        for operation, extras in ((OperationType.CONV_2D, 0), (OperationType.DEPTHWISE_CONV_2D, 1))
        for explicit in (False, True)
        for layout, dilation in ((False, False), (True, False), (True, True))
    ),
    (OperationType.GROUPED_CONV_2D, WEIGHTED, 1, False, True, False),
    (OperationType.GROUPED_CONV_2D, WEIGHTED, 1, True, True, False),
    (OperationType.TRANSPOSE_CONV_2D, [*WEIGHTED, LIST], 0, False, True, False),
    (OperationType.TRANSPOSE_CONV_2D, WEIGHTED, 0, True, True, False),
    *(
        (operation, [TENSOR], 2, explicit, layout, False)
        for operation in (
            OperationType.AVERAGE_POOL_2D,
            OperationType.L2_POOL_2D,
            OperationType.MAX_POOL_2D,
        )
        for explicit in (False, True)
        for layout in (False, True)
    ),
]


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_padding_gives_one_output_per_stride(stride: int, dilation: int) -> None:
    for extent, window in itertools.product(range(1, 12), range(1, 6)):
        before, after = same_padding(extent, window, stride, dilation)
        span = (window - 1) * dilation + 1
        assert 0 <= after - before <= 1
        assert (before + extent + after - span) // stride + 1 == -(-extent // stride)


def test_window_arguments_stand_in_the_order_of_the_spec() -> None:
    implicit = WindowArguments.consecutive(3, 0, is_explicit=False, has_layout=True, has_dilation=True)
    assert (implicit.padding, implicit.stride, implicit.activation) == ((3,), (4, 5), 6)
    assert (implicit.is_nchw, implicit.dilation) == (7, (8, 9))
    explicit = WindowArguments.consecutive(3, 1, is_explicit=True, has_layout=True, has_dilation=True)
    assert (explicit.padding, explicit.stride, explicit.extra) == ((3, 4, 5, 6), (7, 8), (9,))
    assert (explicit.activation, explicit.is_nchw, explicit.dilation) == (10, 11, (12, 13))
    assert explicit.indexes == tuple(range(3, 14))


@pytest.mark.parametrize(("operation", "before", "extras", "explicit", "layout", "dilation"), FORMS)
def test_types_of_inputs_select_the_form(
    operation: OperationType,
    before: list[OperandType],
    extras: int,
    explicit: bool,
    layout: bool,
    dilation: bool,
) -> None:
    types = [
        *before,
        *[NUMBER] * ((4 if explicit else 1) + 2 + extras + 1),
        *[FLAG] * layout,
        *[NUMBER] * 2 * dilation,
    ]
    expected = WindowArguments.consecutive(
        len(before), extras, is_explicit=explicit, has_layout=layout, has_dilation=dilation
    )
    assert window_arguments(operation, types) == expected
    assert expected.indexes[-1] == len(types) - 1


@pytest.mark.parametrize(("operation", "before", "extras", "explicit", "layout", "dilation"), FORMS)
def test_values_that_are_written_are_read_again(
    operation: OperationType,
    before: list[OperandType],
    extras: int,
    explicit: bool,
    layout: bool,
    dilation: bool,
) -> None:
    window = Window(
        scheme=None if explicit else Padding.VALID,
        explicit=(1, 2, 3, 4) if explicit else (0, 0, 0, 0),
        strides=(5, 6),
        extra=(7, 8)[:extras],
        activation=3,
        is_nchw=layout,
        dilations=(2, 9) if dilation else (1, 1),
    )
    values = [*[None] * len(before), *window_values(operation, window)]
    types = [*before, *(FLAG if isinstance(v, bool) else NUMBER for v in values[len(before) :])]
    assert read_window(window_arguments(operation, types), values.__getitem__) == window


def test_values_leave_out_the_optional_arguments_that_have_their_default() -> None:
    assert window_values(OperationType.CONV_2D, Window(Padding.SAME)) == [1, 1, 1, 0]
    assert window_values(OperationType.CONV_2D, Window(Padding.SAME, dilations=(2, 1))) == [
        *(1, 1, 1, 0),
        *(False, 2, 1),
    ]
    assert window_values(OperationType.GROUPED_CONV_2D, Window(Padding.SAME, extra=(2,)))[-1] is False
