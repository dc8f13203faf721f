"""Sums over axes: reductions, running sums, softmax, losses.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, numbers, single, wide
from aionn.errors import InvalidArgument

__all__ = ["KERNELS", "softmax"]


def _reduction(
    function: Callable[..., Any], each: Callable[[Array], Array] | None = None
) -> Callable[..., Array]:
    """A kernel of a reduction.

    Args:
        function: Reduces an array over axes.
        each: The function that a reduction of no axes applies to each element; None means none.
    """

    def kernel(
        x: Array,
        axes_input: Array | None = None,
        *,
        axes: Any = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Array:
        given = axes if axes is not None else None if axes_input is None else numbers(axes_input)
        if not given:
            if noop_with_empty_axes:
                return x if each is None else each(wide(x))
            given = range(x.ndim)
        along = tuple(axis_of(axis, x.ndim) for axis in given)
        return np.asarray(
            function(x if x.dtype == np.bool_ else wide(x), axis=along, keepdims=bool(keepdims))
        )

    return kernel


def _sum(x: Array, **where: Any) -> Array:
    # numpy would widen whole numbers of less than 64 bits.
    return np.asarray(np.sum(x, dtype=x.dtype, **where))


def _product(x: Array, **where: Any) -> Array:
    return np.asarray(np.prod(x, dtype=x.dtype, **where))


def _largest(x: Array, **where: Any) -> Array:
    return np.asarray(np.max(x, initial=_least(x.dtype), **where))


def _smallest(x: Array, **where: Any) -> Array:
    return np.asarray(np.min(x, initial=_most(x.dtype), **where))


def _least(dtype: np.dtype[Any]) -> Any:
    return False if dtype == np.bool_ else -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _most(dtype: np.dtype[Any]) -> Any:
    return True if dtype == np.bool_ else np.inf if dtype.kind == "f" else np.iinfo(dtype).max


def _mean(x: Array, **where: Any) -> Array:
    if x.dtype.kind in "iu":
        total = np.sum(x, dtype=np.int64, **where)
        count = x.size // max(1, np.asarray(total).size)
        return np.asarray(total // max(1, count))
    return np.asarray(np.mean(x, **where))


def _log_sum_exp(x: Array, **where: Any) -> Array:
    y = x.astype(np.float64)
    shift = np.max(y, initial=-np.inf, axis=where["axis"], keepdims=True)
    shift = np.where(np.isfinite(shift), shift, 0)
    total = np.log(np.sum(np.exp(y - shift), axis=where["axis"], keepdims=True)) + shift
    return np.asarray(total if where["keepdims"] else np.squeeze(total, where["axis"]))


def softmax(x: Array, axis: int) -> Array:
    """The shares of the exponentials along an axis; NaN where all of them are infinitely small."""
    shifted = np.exp(x - np.max(x, axis, keepdims=True))
    return np.asarray(shifted / np.sum(shifted, axis, keepdims=True))


def log_softmax(x: Array, axis: int) -> Array:
    shifted = x - np.max(x, axis, keepdims=True)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis, keepdims=True)))


def _softmax(function: Callable[[Array, int], Array]) -> Callable[..., Array]:
    def kernel(x: Array, *, axis: int | None = None, version: int) -> Array:
        if version < 13:
            # Before version 13 the axes from ``axis`` on are one.
            first = axis_of(1 if axis is None else axis, x.ndim)
            rows = wide(x).reshape(int(np.prod(x.shape[:first])), -1)
            return function(rows, 1).reshape(x.shape)
        return function(wide(x), axis_of(-1 if axis is None else axis, x.ndim))

    return kernel


def _running(function: Any) -> Callable[..., Array]:
    def kernel(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
        along = axis_of(single(axis, "axis"), x.ndim)
        source = np.flip(x, along) if reverse else x
        result = function.accumulate(source, axis=along, dtype=x.dtype)
        if exclusive:
            first = np.full_like(np.take(result, [0], along), function.identity)
            result = np.concatenate([first, np.take(result, range(x.shape[along] - 1), along)], along)
        return np.flip(result, along) if reverse else result

    return kernel


def loss_of(
    logs: Array, target: Array, weights: Array | None, ignore_index: int | None, reduction: str
) -> Array:
    """The negative logarithms of the probabilities of the targets, with a weight for each class."""
    classes = logs.shape[1]
    labels = target.astype(np.int64)
    is_ignored = labels == ignore_index if ignore_index is not None else np.zeros(labels.shape, bool)
    labels = np.where(is_ignored, 0, labels)
    if ((labels < 0) | (labels >= classes)).any():
        raise InvalidArgument(f"targets: expected classes from 0 to {classes - 1}, got others")
    picked = np.squeeze(np.take_along_axis(logs, np.expand_dims(labels, 1), 1), 1)
    factor = np.ones(labels.shape, logs.dtype) if weights is None else weights[labels]
    factor = np.where(is_ignored, 0, factor)
    losses = -picked * factor
    if reduction == "none":
        return losses
    if reduction == "sum":
        return np.asarray(losses.sum())
    if reduction != "mean":
        raise InvalidArgument(f"attribute 'reduction': expected none, sum or mean, got {reduction!r:.40}")
    return np.asarray(losses.sum() / factor.sum())


def negative_log_likelihood(
    x: Array,
    target: Array,
    weights: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Array:
    return loss_of(wide(x), target, weights, ignore_index, reduction)


def softmax_cross_entropy(
    x: Array,
    target: Array,
    weights: Array | None = None,
    *,
    count: int,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Array, ...]:
    logs = log_softmax(wide(x), 1)
    return (loss_of(logs, target, weights, ignore_index, reduction), logs)[:count]


KERNELS: dict[str, Callable[..., Any]] = {
    "CumProd": _running(np.multiply),
    "CumSum": _running(np.add),
    "LogSoftmax": _softmax(log_softmax),
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
    "ReduceL1": _reduction(lambda x, **w: _sum(np.abs(x), **w), np.abs),
    "ReduceL2": _reduction(lambda x, **w: np.sqrt(_sum(np.square(x), **w)), np.abs),
    "ReduceLogSum": _reduction(lambda x, **w: np.log(_sum(x, **w)), np.log),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceMax": _reduction(_largest),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(_smallest),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(lambda x, **w: _sum(np.square(x), **w), np.square),
    "Softmax": _softmax(softmax),
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
}
"""The kernels by operator."""
