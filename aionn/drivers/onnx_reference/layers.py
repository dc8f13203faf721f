"""Normalisation, attention and other layers of neural networks.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, wide
from aionn.drivers.onnx_reference.elementwise import swish
from aionn.drivers.onnx_reference.indexing import checked_indices
from aionn.drivers.onnx_reference.linear import convolved
from aionn.errors import InvalidArgument
from aionn.models.onnx.constants import DTYPE_NAMES
from aionn.models.onnx.extension.narrow import rounded
from aionn.models.onnx.schema import DataType

__all__ = ["KERNELS"]


def _channels(values: Array, rank: int) -> Array:
    return wide(values).reshape((-1, *[1] * (rank - 2)))


def batch_normalization(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    variance: Array,
    *,
    count: int,
    version: int,
    consumed_inputs: Any = None,
    epsilon: float = 1e-5,
    is_test: int = 0,
    momentum: float = 0.9,
    spatial: int = 1,
    training_mode: int = 0,
) -> tuple[Array, ...]:
    y = wide(x)
    statistics: tuple[Array, ...] = ()
    used_mean, used_variance = wide(mean), wide(variance)
    if training_mode or (version < 7 and not is_test) or count > 1:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        used_mean, used_variance = y.mean(axes), y.var(axes)
        running = [
            own * momentum + used * (1 - momentum)
            for own, used in ((wide(mean), used_mean), (wide(variance), used_variance))
        ]
        statistics = (*running, used_mean, used_variance)
    shift, spread = _channels(used_mean, x.ndim), _channels(used_variance, x.ndim)
    result = _channels(scale, x.ndim) * (y - shift) / np.sqrt(spread + epsilon) + _channels(bias, x.ndim)
    return (result, *statistics)[:count]


def instance_normalization(
    x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5, consumed_inputs: Any = None
) -> Array:
    y = wide(x)
    axes = tuple(range(2, x.ndim))
    mean, variance = y.mean(axes, keepdims=True), y.var(axes, keepdims=True)
    return np.asarray(
        _channels(scale, x.ndim) * (y - mean) / np.sqrt(variance + epsilon) + _channels(bias, x.ndim)
    )


def group_normalization(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    num_groups: int,
    version: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Array:
    if num_groups < 1 or x.shape[1] % num_groups:
        raise InvalidArgument(
            f"GroupNormalization: expected groups of {x.shape[1]} channels, got {num_groups}"
        )
    parts = wide(x).reshape(x.shape[0], num_groups, -1)
    mean, variance = parts.mean(2, keepdims=True), parts.var(2, keepdims=True)
    result = ((parts - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
    if version < 21:
        # Before version 21 each group has one scale and one bias.
        size = x.shape[1] // num_groups
        scale, bias = np.repeat(scale, size), np.repeat(bias, size)
    return np.asarray(_channels(scale, x.ndim) * result + _channels(bias, x.ndim))


def layer_normalization(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    count: int,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Array, ...]:
    y = wide(x)
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    mean = y.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(np.square(y - mean).mean(axes, keepdims=True) + epsilon)
    # The normalised values have the type of the input before they are scaled.
    result = ((y - mean) * inverse).astype(x.dtype) * scale
    return (result if bias is None else result + bias, mean, inverse)[:count]


def rms_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    y = wide(x)
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    return np.asarray((y / np.sqrt(np.square(y).mean(axes, keepdims=True) + epsilon)).astype(x.dtype) * scale)


def mean_variance_normalization(x: Array, *, axes: Any = (0, 2, 3)) -> Array:
    y, along = wide(x), tuple(axis_of(axis, x.ndim) for axis in axes)
    return np.asarray((y - y.mean(along, keepdims=True)) / (y.std(along, keepdims=True) + 1e-9))


def lp_normalization(x: Array, *, axis: int = -1, p: int = 2) -> Array:
    y = wide(x)
    norm = np.sum(np.abs(y) ** p, axis, keepdims=True) ** (1 / p)
    return np.where(norm == 0, 0, y / np.where(norm == 0, 1, norm))


def lrn(x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Array:
    squares = np.square(wide(x))
    before, after = (size - 1) // 2, -(-(size - 1) // 2)
    sums = np.zeros_like(squares)
    for channel in range(x.shape[1]):
        sums[:, channel] = squares[:, max(0, channel - before) : channel + after + 1].sum(1)
    return wide(x) / (bias + alpha / size * sums) ** beta


def dropout(
    x: Array,
    ratio_input: Array | None = None,
    training: Array | None = None,
    *,
    count: int,
    is_test: int = 0,
    ratio: float = 0.5,
    seed: int = 0,
) -> tuple[Array, ...]:
    if training is not None and training.any():
        raise InvalidArgument("Dropout: expected no training, whose results are random")
    return (x, np.ones(x.shape, np.bool_))[:count]


def rotary_embedding(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Array:
    is_flat = x.ndim == 3
    parts = x.reshape(*x.shape[:2], num_heads, -1) if is_flat else x.transpose(0, 2, 1, 3)
    size = rotary_embedding_dim or parts.shape[-1]
    turned, rest = parts[..., :size], parts[..., size:]
    if positions is not None:
        cos, sin = (table[checked_indices(positions, table.shape[0])] for table in (cos, sin))
    cos, sin = np.expand_dims(cos, 2), np.expand_dims(sin, 2)
    one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else np.split(turned, 2, -1)
    halves = [cos * one - sin * two, sin * one + cos * two]
    turned = np.stack(halves, -1).reshape(turned.shape) if interleaved else np.concatenate(halves, -1)
    result = np.concatenate([turned, rest], -1)
    return result.reshape(x.shape) if is_flat else result.transpose(0, 2, 1, 3)


def _heads(x: Array, count: int) -> Array:
    """[batch, heads, length, size] of [batch, length, heads * size]."""
    if x.ndim == 4:
        return x
    if count < 1 or x.shape[2] % count:
        raise InvalidArgument(f"heads: expected a divisor of {x.shape[2]}, got {count}")
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def _allowed(shape: tuple[int, int], offset: Array, is_causal: int, left: int, right: int) -> Array:
    """Whether each query may attend to each key: [batch or 1, 1, queries, keys]."""
    distance = np.arange(shape[0])[:, None] + offset.reshape(-1, 1, 1, 1) - np.arange(shape[1])
    allowed = np.ones(distance.shape, np.bool_)
    if is_causal:
        allowed &= distance >= 0
    if left >= 0:
        allowed &= distance <= left
    if right >= 0:
        allowed &= -distance <= right
    return allowed


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    lengths: Array | None = None,
    *,
    count: int,
    kind: DataType,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    left_window_size: int = -1,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, ...]:
    """Rows in which no key may be attended to give 0. Results in between are rounded to BFLOAT16 if that is the type."""

    def fit(array: Array) -> Array:
        return rounded(array, kind) if kind == DataType.BFLOAT16 else array

    queries, keys, values = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if past_key is not None and past_value is not None:
        keys, values = np.concatenate([past_key, keys], 2), np.concatenate([past_value, values], 2)
    present = (keys, values)
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = np.repeat(keys, repeats, 1), np.repeat(values, repeats, 1)
    factor = fit(np.asarray(math.sqrt(1 / math.sqrt(queries.shape[-1]) if scale is None else scale), q.dtype))
    products = fit(np.matmul(fit(queries * factor), fit(keys.swapaxes(2, 3) * factor)))
    shown = products
    if softcap > 0:
        products = np.tanh(products / softcap) * softcap
        shown = products if qk_matmul_output_mode == 1 else shown
    bias = _bias(products, mask, past_key, lengths, is_causal, left_window_size, right_window_size)
    with_bias = fit(products + bias)
    if qk_matmul_output_mode in (1, 2) and not (qk_matmul_output_mode == 1 and softcap > 0):
        shown = with_bias if qk_matmul_output_mode == 2 else shown
    inner = with_bias.dtype
    if softmax_precision and softmax_precision != DataType.BFLOAT16:
        inner = np.dtype(DTYPE_NAMES[DataType(softmax_precision)])
    is_narrow = kind == DataType.BFLOAT16 and softmax_precision in (None, DataType.BFLOAT16)
    shares = fit(
        _masked_softmax(with_bias.astype(inner), bias, fit if is_narrow else np.asarray).astype(q.dtype)
    )
    if qk_matmul_output_mode == 3:
        shown = shares
    result = np.matmul(shares, values)
    if q.ndim == 3:
        result = result.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1)
    return (result, *present, shown)[:count]


def _bias(
    products: Array, mask: Array | None, past: Array | None, lengths: Array | None, is_causal: int, left: int, right: int
) -> Array:  # fmt: skip
    """The numbers that are added to the products: a mask's, and an infinity where a key may not be attended to."""
    queries, keys = products.shape[-2:]
    bias = np.zeros((1, 1, queries, keys), products.dtype)
    if mask is not None:
        own = (
            np.where(mask, 0, -np.inf).astype(products.dtype)
            if mask.dtype == np.bool_
            else mask.astype(products.dtype)
        )
        missing = keys - own.shape[-1]
        if missing > 0:
            own = np.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, missing)], constant_values=-np.inf)
        bias = bias + own
    if past is not None:
        offset = np.array([past.shape[2]])
    elif lengths is not None:
        offset = lengths.reshape(-1).astype(np.int64) - queries
    else:
        offset = np.array([0])
    allowed = _allowed((queries, keys), offset, is_causal, left, right)
    if lengths is not None:
        allowed = allowed & (np.arange(keys) < lengths.reshape(-1, 1, 1, 1))
    return np.asarray(bias + np.where(allowed, 0, -np.inf).astype(products.dtype))


def _masked_softmax(x: Array, bias: Array, fit: Callable[[Array], Array]) -> Array:
    most = np.max(x, -1, keepdims=True)
    shares = fit(np.exp(fit(x - np.where(np.isneginf(most), np.zeros((), x.dtype), most))))
    if fit is np.asarray:
        total = shares.sum(-1, keepdims=True)
    else:
        total = np.zeros_like(most)
        for place in range(shares.shape[-1]):
            total = fit(total + shares[..., place : place + 1])
    shares = shares / np.where(total == 0, 1, total)
    return np.where(np.isneginf(np.max(bias, -1, keepdims=True)), 0, shares)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    past: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    count: int,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Array, ...]:
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise InvalidArgument(f"attribute 'update_rule': expected a known rule, got {update_rule!r:.40}")
    queries, keys, values = (
        _heads(x, n).astype(np.float32) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
    )
    batch, _, length, size = queries.shape
    shape = (batch, kv_num_heads, size, values.shape[-1])
    state = np.zeros(shape, np.float32) if past is None else past.astype(np.float32)
    factor = scale or 1 / math.sqrt(size)
    decays = None if decay is None else _heads(decay, kv_num_heads).astype(np.float32)
    betas = None if beta is None else beta.astype(np.float32).transpose(0, 2, 1)[..., None]
    results = []
    for place in range(length):
        key, value = keys[:, :, place], values[:, :, place]
        if decays is not None:
            state = state * np.exp(decays[:, :, place])[..., None]
        if betas is not None:
            value = betas[:, :, place] * (value - np.einsum("bhdm,bhd->bhm", state, key))
        state = state + key[..., None] * value[..., None, :]
        shared = np.repeat(state, q_num_heads // kv_num_heads, 1)
        results.append(factor * np.einsum("bhd,bhdm->bhm", queries[:, :, place], shared))
    result = np.stack(results, 1).reshape(batch, length, -1)
    return (result, state)[:count]


def causal_conv_with_state(
    x: Array,
    weights: Array,
    bias: Array | None = None,
    past: Array | None = None,
    *,
    count: int,
    activation: str = "none",
) -> tuple[Array, ...]:
    if activation not in ("none", "silu", "swish"):
        raise InvalidArgument(f"attribute 'activation': expected none, silu or swish, got {activation!r:.40}")
    kept = weights.shape[2] - 1
    before = np.zeros((*x.shape[:2], kept), x.dtype) if past is None else past
    padded = np.concatenate([before, x], 2)
    result = convolved(wide(padded), wide(weights), x.shape[1], {})
    result = result if bias is None else result + wide(bias)[:, None]
    if activation != "none":
        result = swish(result.astype(x.dtype))
    return (result, padded[:, :, padded.shape[2] - kept :])[:count]


KERNELS: dict[str, Callable[..., Any]] = {
    "Attention": attention,
    "BatchNormalization": batch_normalization,
    "CausalConvWithState": causal_conv_with_state,
    "Dropout": dropout,
    "GroupNormalization": group_normalization,
    "InstanceNormalization": instance_normalization,
    "LRN": lrn,
    "LayerNormalization": layer_normalization,
    "LinearAttention": linear_attention,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
    "RMSNormalization": rms_normalization,
    "RotaryEmbedding": rotary_embedding,
}
"""The kernels by operator."""
