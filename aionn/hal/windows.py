"""The window arguments of convolutions and pooling: their places among an operation's inputs, their values, and SAME padding.

Owns the forms of these arguments (implicit or explicit padding, with or without a layout flag and dilations). The contracts in
``aionn.ops`` check the values.

Source: the operations' definitions in the NN HAL's ``OperationType``; ``calculateExplicitPadding`` of its CPU operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aionn.hal.operand import OperandType
from aionn.hal.operation import FusedActivation, OperationType, Padding

__all__ = ["Window", "WindowArguments", "read_window", "same_padding", "window_arguments", "window_values"]


class _Form(NamedTuple):
    """The window arguments of one operation.

    Attributes:
        start: Index of the first in the explicit form.
        extras: Number of the operation's own arguments between strides and activation.
        has_dilation: Whether dilations may follow the layout flag. An INT32 at the flag's place then means explicit padding.
        has_layout: Whether the layout flag is always there.
        has_shape: Whether the implicit form has the output's shape before the padding.
    """

    start: int
    extras: int
    has_dilation: bool = False
    has_layout: bool = False
    has_shape: bool = False


_POOLING = _Form(1, 2)
_FORMS: Mapping[int, _Form] = {
    OperationType.CONV_2D: _Form(3, 0, has_dilation=True),
    OperationType.DEPTHWISE_CONV_2D: _Form(3, 1, has_dilation=True),
    OperationType.GROUPED_CONV_2D: _Form(3, 1, has_layout=True),
    OperationType.TRANSPOSE_CONV_2D: _Form(3, 0, has_layout=True, has_shape=True),
    OperationType.AVERAGE_POOL_2D: _POOLING,
    OperationType.L2_POOL_2D: _POOLING,
    OperationType.MAX_POOL_2D: _POOLING,
}


@dataclass(frozen=True, slots=True)
class WindowArguments:
    """The input index of each of an operation's window arguments.

    Attributes:
        padding: One index (implicit scheme), or four: left, right, top, bottom.
        stride: Width, height.
        extra: The operation's own INT32 arguments between strides and activation.
        activation: The fused activation.
        is_nchw: The layout flag, or None without one: then the layout is NHWC.
        dilation: Width, height; or None without them: then 1, 1.
    """

    padding: tuple[int, ...]
    stride: tuple[int, int]
    extra: tuple[int, ...]
    activation: int
    is_nchw: int | None
    dilation: tuple[int, int] | None

    @classmethod
    def consecutive(
        cls, start: int, extras: int, *, is_explicit: bool, has_layout: bool, has_dilation: bool
    ) -> WindowArguments:
        """The arguments in the spec's order: padding, strides, ``extras`` arguments, activation, layout, dilations.

        Args:
            start: Index of the first.
            extras: Number of arguments between strides and activation.
            is_explicit: Whether padding is given as four numbers.
            has_layout: Whether there is a layout flag.
            has_dilation: Whether there are dilations; they come after a layout flag.
        """
        after = start + (4 if is_explicit else 1)
        activation = after + 2 + extras
        return cls(
            padding=tuple(range(start, after)),
            stride=(after, after + 1),
            extra=tuple(range(after + 2, activation)),
            activation=activation,
            is_nchw=activation + 1 if has_layout else None,
            dilation=(activation + 2, activation + 3) if has_dilation else None,
        )

    @property
    def indexes(self) -> tuple[int, ...]:
        """All of them."""
        layout = () if self.is_nchw is None else (self.is_nchw,)
        return (*self.padding, *self.stride, *self.extra, self.activation, *layout, *(self.dilation or ()))


def window_arguments(operation: int, types: Sequence[int]) -> WindowArguments:
    """The places of an operation's window arguments.

    Args:
        operation: A convolution or pooling.
        types: The operand types of the operation's inputs; -1 for one that is left out.

    Returns:
        The places of the form that the number and the types of the inputs select. For a number of inputs that no form has, some may
        be beyond the last input.

    Raises:
        KeyError: The operation has no window.
    """
    form, count = _FORMS[operation], len(types)
    explicit = count >= form.start + 7 + form.extras
    if form.has_dilation:
        explicit = explicit and types[form.start + 4 + form.extras] == OperandType.INT32
    start = form.start + (form.has_shape and not explicit)
    beyond = count - (start + (7 if explicit else 4) + form.extras)
    return _consecutive(
        start,
        form.extras,
        is_explicit=explicit,
        has_layout=form.has_layout or beyond >= 1,
        has_dilation=form.has_dilation and beyond >= 3,
    )


@functools.cache
def _consecutive(
    start: int, extras: int, *, is_explicit: bool, has_layout: bool, has_dilation: bool
) -> WindowArguments:
    """The arguments of a form, of which there are some dozens, made once: each convolution of a model asks several times."""
    return WindowArguments.consecutive(
        start, extras, is_explicit=is_explicit, has_layout=has_layout, has_dilation=has_dilation
    )


class Window(NamedTuple):
    """The values of an operation's window arguments.

    Attributes:
        scheme: SAME or VALID, or None for explicit padding.
        explicit: Left, right, top, bottom; zeros with a scheme.
        strides: Along width and height.
        extra: The arguments between strides and activation: window width and height, depth multiplier or number of groups.
        activation: The fused activation.
        is_nchw: The layout.
        dilations: Along width and height.
    """

    scheme: Padding | None
    explicit: tuple[int, int, int, int] = (0, 0, 0, 0)
    strides: tuple[int, int] = (1, 1)
    extra: tuple[int, ...] = ()
    activation: int = FusedActivation.NONE
    is_nchw: bool = False
    dilations: tuple[int, int] = (1, 1)


def read_window(arguments: WindowArguments, scalar: Callable[[int], Any]) -> Window:
    """The values at the places of window arguments.

    Args:
        arguments: The places.
        scalar: Returns the value of an input by its index.

    Raises:
        ValueError: The padding scheme is neither SAME nor VALID.
    """
    padding = [scalar(i) for i in arguments.padding]
    is_implicit = len(padding) == 1
    return Window(
        scheme=Padding(padding[0]) if is_implicit else None,
        explicit=(0, 0, 0, 0) if is_implicit else (padding[0], padding[1], padding[2], padding[3]),
        strides=(scalar(arguments.stride[0]), scalar(arguments.stride[1])),
        extra=tuple(scalar(i) for i in arguments.extra),
        activation=scalar(arguments.activation),
        is_nchw=arguments.is_nchw is not None and bool(scalar(arguments.is_nchw)),
        dilations=(1, 1)
        if arguments.dilation is None
        else (scalar(arguments.dilation[0]), scalar(arguments.dilation[1])),
    )


def window_values(operation: int, window: Window) -> list[int | bool]:
    """The values of a window in the order of the operation's inputs, without the optional ones that have their default.

    Raises:
        KeyError: The operation has no window.
    """
    form = _FORMS[operation]
    values: list[int | bool] = [*window.explicit] if window.scheme is None else [int(window.scheme)]
    values += [*window.strides, *window.extra, window.activation]
    is_dilated = form.has_dilation and window.dilations != (1, 1)
    if form.has_layout or window.is_nchw or is_dilated:
        values.append(window.is_nchw)
    return [*values, *window.dilations] if is_dilated else values


def same_padding(extent: int, window: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Padding before and after an axis so that there are ``ceil(extent / stride)`` outputs; the odd pixel goes behind."""
    count = -(-extent // stride)
    needed = max((count - 1) * stride + (window - 1) * dilation + 1 - extent, 0)
    return needed // 2, needed - needed // 2
