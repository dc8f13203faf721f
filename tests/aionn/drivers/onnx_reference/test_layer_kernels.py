"""Kernels of layers, quantised numbers, sequences, images and signals: values by hand or by an independent formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from tests.aionn.drivers.onnx_reference.building import compute, same

RANDOM = np.random.default_rng(3)


def values(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def test_products() -> None:
    a, b = values(2, 3), values(3, 4)
    expected = [[sum(a[i, k] * b[k, j] for k in range(3)) for j in range(4)] for i in range(2)]
    same(compute("MatMul", a, b), expected, rtol=1e-5)
    same(
        compute("Gemm", a.T, b, values(4) * 0 + 1, alpha=2.0, beta=3.0, transA=1),
        2 * np.array(expected) + 3,
        rtol=1e-5,
    )
    same(compute("Einsum", a, b, equation="ij, jk -> ki"), np.array(expected).T, rtol=1e-5)
    same(compute("Einsum", np.eye(3, dtype=np.float32), equation="ii"), 3)
    same(compute("Det", [[[1.0, 2.0], [3.0, 4.0]]]), [-2])


def direct_conv(x, w, group=1, pads=(0, 0), stride=1, dilation=1):
    """A convolution of one axis, element by element."""
    x = np.pad(x, [(0, 0), (0, 0), pads])
    batch, _, length = x.shape
    filters, depth, size = w.shape
    count = (length - (size - 1) * dilation - 1) // stride + 1
    result = np.zeros((batch, filters, count))
    for n, f, i in np.ndindex(batch, filters, count):
        first = f // (filters // group) * depth
        for c, k in np.ndindex(depth, size):
            result[n, f, i] += x[n, first + c, i * stride + k * dilation] * w[f, c, k]
    return result


def test_convolutions() -> None:
    x, w = values(2, 4, 9), values(6, 2, 3)
    got = compute("Conv", x, w, values(6) * 0 + 1, group=2, pads=[1, 2], strides=[2], dilations=[2])
    same(got, direct_conv(x, w, 2, (1, 2), 2, 2) + 1, rtol=1e-4)
    padded = compute("Conv", x, w, group=2, auto_pad="SAME_UPPER", strides=[2])
    same(padded, direct_conv(x, w, 2, (1, 1), 2), rtol=1e-4)
    with pytest.raises(InvalidArgument):
        compute("Conv", x, values(6, 3, 3))


def test_transposed_convolutions_spread_each_element() -> None:
    x, w = values(1, 2, 3), values(2, 1, 2)
    expected = np.zeros((1, 1, 7))
    for i in range(3):
        expected[0, 0, 2 * i : 2 * i + 2] += np.einsum("c,ck->k", x[0, :, i], w[:, 0])
    got = compute("ConvTranspose", x, w, strides=[2], output_padding=[1])
    same(got, expected, rtol=1e-5)
    same(compute("ConvTranspose", x, w, strides=[2], pads=[1, 0]), expected[..., 1:6], rtol=1e-5)


def test_transposed_convolutions_of_padding_same_have_as_many_outputs_as_inputs_times_strides() -> None:
    """The specification says so for any window; those that are smaller than their strides leave zeros at the end."""
    x, w = values(1, 1, 3), values(1, 1, 1)
    for mode in ("SAME_UPPER", "SAME_LOWER"):
        expected = np.zeros((1, 1, 12))
        expected[0, 0, ::4] = x[0, 0] * w[0, 0, 0]
        same(compute("ConvTranspose", x, w, strides=[4], auto_pad=mode), expected, rtol=1e-5)


def test_deformed_convolutions_without_offsets_are_convolutions() -> None:
    x, w = values(1, 2, 5, 5), values(3, 2, 2, 2)
    offset = np.zeros((1, 8, 4, 4), np.float32)
    same(compute("DeformConv", x, w, offset), compute("Conv", x, w)[0], rtol=1e-4)
    moved = offset.copy()
    moved[:, 1::2] = 1
    shifted = np.pad(x, [(0, 0), (0, 0), (0, 0), (0, 1)])[..., 1:]
    same(compute("DeformConv", x, w, moved), compute("Conv", shifted, w)[0], rtol=1e-4)


def test_pools() -> None:
    x = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5)
    settings = {"kernel_shape": [2], "strides": [2], "pads": [1, 0]}
    same(compute("AveragePool", x, **settings), [[[1, 2.5, 4.5]]])
    same(compute("AveragePool", x, **settings, count_include_pad=1), [[[0.5, 2.5, 4.5]]])
    best, places = compute("MaxPool", x, outputs=2, **settings)
    same(best, [[[1, 3, 5]]])
    assert places.tolist() == [[[0, 2, 4]]]
    same(compute("MaxPool", x, kernel_shape=[2], strides=[2], ceil_mode=1), [[[2, 4, 5]]])
    same(compute("LpPool", x, kernel_shape=[2]), [[[math.hypot(i, i + 1) for i in range(1, 5)]]])
    same(compute("GlobalAveragePool", x), [[[3]]])
    same(compute("GlobalMaxPool", x), [[[5]]])
    same(compute("GlobalLpPool", x, p=1), [[[15]]])
    same(
        compute("MaxUnpool", [[[7.0, 8.0]]], np.array([[[1, 2]]]), kernel_shape=[2], strides=[2]),
        [[[0, 7, 8, 0]]],
    )
    columns = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
    same(compute("Col2Im", columns, np.array([1, 3]), np.array([1, 2])), [[[[0, 3, 3]]]])


def test_normalisations() -> None:
    x = values(2, 4, 3)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)

    def normal(part):
        return (part - part.mean()) / math.sqrt(part.var() + 1e-5)

    by_place = np.stack([np.stack([normal(c) for c in n]) for n in x])
    same(compute("InstanceNormalization", x, ones, zeros), by_place, rtol=1e-4)
    by_group = np.concatenate([np.stack([normal(n[:2]), normal(n[2:])]).reshape(1, 4, 3) for n in x])
    same(compute("GroupNormalization", x, ones, zeros, num_groups=2), by_group, rtol=1e-4)
    halves = compute("GroupNormalization", x, ones[:2] * 2, zeros[:2], num_groups=2, version=18)
    same(halves, 2 * by_group, rtol=1e-4)
    rows, mean, inverse = compute("LayerNormalization", x, np.ones(3, np.float32), outputs=3)
    same(rows, by_place, rtol=1e-4)
    same(mean, x.mean(-1, keepdims=True), rtol=1e-4)
    same(inverse, 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5), rtol=1e-4)
    rms = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    same(compute("RMSNormalization", x, np.ones(3, np.float32)), rms, rtol=1e-4)
    given = compute("BatchNormalization", x, ones, zeros, zeros, ones * 4)
    same(given, x / math.sqrt(4 + 1e-5), rtol=1e-4)
    own = compute("BatchNormalization", x, ones, zeros, zeros, ones, outputs=3, training_mode=1, momentum=0.5)
    same(own[1], x.mean((0, 2)) * 0.5, rtol=1e-4)
    same(own[2], x.var((0, 2)) * 0.5 + 0.5, rtol=1e-4)
    same(compute("LpNormalization", [[3.0, 4.0], [0.0, 0.0]]), [[0.6, 0.8], [0, 0]])
    deep = np.ones((1, 4, 1, 1), np.float32)
    same(compute("LRN", deep, size=3, alpha=3.0, beta=1.0)[0][0, :, 0, 0], [1 / 3, 1 / 4, 1 / 4, 1 / 3])
    image = values(2, 3, 2, 2)
    moments = (image - image.mean((0, 2, 3), keepdims=True)) / image.std((0, 2, 3), keepdims=True)
    same(compute("MeanVarianceNormalization", image), moments, rtol=1e-4)
    same(compute("Dropout", x)[0], x)
    with pytest.raises(InvalidArgument, match="training"):
        compute("Dropout", x, np.float32(0.5), np.bool_(True))


def test_attention() -> None:
    q, k, v = values(1, 2, 3, 4), values(1, 2, 3, 4), values(1, 2, 3, 4)
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / 2
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    same(compute("Attention", q, k, v), np.einsum("bhqk,bhkd->bhqd", shares, v), rtol=1e-4)
    causal = np.where(np.tri(3) > 0, np.exp(scores), 0)
    causal = causal / causal.sum(-1, keepdims=True)
    same(compute("Attention", q, k, v, is_causal=1), np.einsum("bhqk,bhkd->bhqd", causal, v), rtol=1e-4)
    nothing = np.zeros((3, 3), np.bool_)
    same(compute("Attention", q, k, v, nothing), np.zeros((1, 2, 3, 4)))
    result, keys, _ = compute("Attention", q, k[:, :1], v[:, :1], None, k[:, 1:], v[:, 1:], outputs=3)
    assert result.shape == (1, 2, 3, 4) and keys.shape == (1, 1, 6, 4)


def test_attention_that_is_linear_is_a_sum_of_outer_products() -> None:
    q, k, v = values(1, 3, 2), values(1, 3, 2), values(1, 3, 2)
    state, expected = np.zeros((2, 2)), []
    for i in range(3):
        state = state + np.outer(k[0, i], v[0, i])
        expected.append(q[0, i] @ state)
    got = compute(
        "LinearAttention", q, k, v, outputs=2, q_num_heads=1, kv_num_heads=1, scale=1.0, update_rule="linear"
    )
    same(got[0], [expected], rtol=1e-5)
    same(got[1], [[state]], rtol=1e-5)


def test_rotations_keep_lengths() -> None:
    x, angle = values(1, 2, 1, 4), np.array([[0.1, 0.2]], np.float32)
    (got,) = compute(
        "RotaryEmbedding", x.transpose(0, 2, 1, 3), np.cos(angle), np.sin(angle), np.array([[0, 0]])
    )
    (got,) = [got.transpose(0, 2, 1, 3)]
    plane = x[0, 0, 0, ::2]
    turned = [
        math.cos(0.1) * plane[0] - math.sin(0.1) * plane[1],
        math.sin(0.1) * plane[0] + math.cos(0.1) * plane[1],
    ]
    same(got[0, 0, 0, ::2], turned, rtol=1e-5)


def test_causal_convolutions_continue_from_their_state() -> None:
    x, w = values(1, 2, 6), values(2, 1, 3)
    whole, _ = compute("CausalConvWithState", x, w, outputs=2)
    first, state = compute("CausalConvWithState", x[..., :4], w, outputs=2)
    second, _ = compute("CausalConvWithState", x[..., 4:], w, None, state, outputs=2)
    same(np.concatenate([first, second], 2), whole, rtol=1e-5)


def test_quantised_numbers_are_rounded_to_even() -> None:
    assert compute("QuantizeLinear", [0.5, 1.5, 2.5, 999.0], 1.0, np.uint8(3))[0].tolist() == [3, 5, 5, 255]
    assert compute("QuantizeLinear", [[1.0, 4.0]], [1.0, 2.0], axis=1, output_dtype=3)[0].dtype == np.int8
    blocks = compute(
        "QuantizeLinear",
        [[2.0, 2.0, 8.0, 8.0]],
        [[1.0, 4.0]],
        np.array([[0, 1]], np.uint16),
        axis=1,
        block_size=2,
    )
    assert blocks[0].tolist() == [[2, 2, 3, 3]] and blocks[0].dtype == np.uint16
    same(compute("DequantizeLinear", np.array([1, 255], np.uint8), 0.5, np.uint8(3)), [-1, 126])
    numbers, scale, zero = compute("DynamicQuantizeLinear", [-1.0, 0.0, 1.55], outputs=3)
    same(scale, 0.01)
    assert zero == 100 and numbers.tolist() == [0, 100, 255]


def test_products_of_quantised_numbers() -> None:
    a, b = np.array([[1, 2]], np.uint8), np.array([[3], [5]], np.uint8)
    assert compute("MatMulInteger", a, b, np.uint8(1), np.uint8(3))[0].tolist() == [[2]]
    x, w = np.arange(6, dtype=np.uint8).reshape(1, 1, 6), np.array([[[1, 2]]], np.uint8)
    expected = direct_conv(x.astype(float) - 2, w.astype(float))
    assert compute("ConvInteger", x, w, np.uint8(2))[0].tolist() == expected.tolist()
    half, zero = np.float32(0.5), np.uint8(0)
    got = compute("QLinearMatMul", a, half, zero, b, half, zero, np.float32(1), np.uint8(10))
    assert got[0].tolist() == [[round(13 / 4) + 10]]
    got = compute("QLinearConv", x, half, np.uint8(2), w, half, zero, np.float32(1), np.uint8(10))
    assert got[0].tolist() == (np.rint(expected / 4) + 10).tolist()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_recurrent_steps() -> None:
    x, w, r, b = values(1, 1, 2), values(1, 3, 2), values(1, 3, 3), values(1, 6)
    h = values(1, 1, 3)
    expected = np.tanh(x[0] @ w[0].T + h[0] @ r[0].T + b[0, :3] + b[0, 3:])
    same(compute("RNN", x, w, r, b, None, h)[0][0, 0], expected, rtol=1e-5)
    relu = compute("RNN", x, w, r, b, None, h, activations=["Relu"], clip=0.5)[0]
    same(relu[0, 0], np.clip(np.arctanh(expected), 0, 0.5), rtol=1e-4)
    w, r = values(1, 9, 2), values(1, 9, 3)
    gates = x[0] @ w[0].T, h[0] @ r[0].T
    z, reset = (sigmoid(gates[0][:, s] + gates[1][:, s]) for s in (slice(0, 3), slice(3, 6)))
    for before, hidden in ((1, reset * gates[1][:, 6:]), (0, (reset * h[0]) @ r[0, 6:].T)):
        state = (1 - z) * np.tanh(gates[0][:, 6:] + hidden) + z * h[0]
        same(compute("GRU", x, w, r, None, None, h, linear_before_reset=before)[0][0, 0], state, rtol=1e-5)
    w, r, c, p = values(1, 12, 2), values(1, 12, 3), values(1, 1, 3), values(1, 9)
    i, o, f, g = np.split(x[0] @ w[0].T + h[0] @ r[0].T, 4, -1)
    cell = sigmoid(f + p[:, 6:] * c[0]) * c[0] + sigmoid(i + p[:, :3] * c[0]) * np.tanh(g)
    shown = sigmoid(o + p[:, 3:6] * cell) * np.tanh(cell)
    _, last_h, last_c = compute("LSTM", x, w, r, None, None, h, c, p, outputs=3)
    same(last_h[0], shown, rtol=1e-5)
    same(last_c[0], cell, rtol=1e-5)


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_recurrent_directions_lengths_and_layouts(op_type, gates) -> None:
    x, w, r = values(3, 2, 2), values(2, 3 * gates, 2), values(2, 3 * gates, 3)
    both, end = compute(op_type, x, w, r, outputs=2, direction="bidirectional")
    same(both[:, :1], compute(op_type, x, w[:1], r[:1])[0])
    same(both[:, 1:], compute(op_type, x[::-1], w[1:], r[1:])[0][::-1])
    same(end[1], both[0, 1])
    first, last = compute(op_type, x.transpose(1, 0, 2), w[:1], r[:1], outputs=2, layout=1)
    same(first, both[:, :1].transpose(2, 0, 1, 3))
    same(last[:, 0], both[-1, 0])
    short, ends = compute(op_type, x, w[:1], r[:1], None, np.array([3, 1], np.int32), outputs=2)
    assert not short[1:, :, 1].any()
    same(ends[0, 1], both[0, 0, 1])
    backwards = compute(op_type, x, w[1:], r[1:], None, np.array([3, 1], np.int32), direction="reverse")[0]
    same(backwards[0, 0, 1], compute(op_type, x[:1, 1:], w[1:], r[1:])[0][0, 0, 0])


def test_images_are_resized() -> None:
    x = np.array([[[[1.0, 2.0], [3.0, 4.0]]]], np.float32)
    sizes = np.array([1, 1, 4, 4])
    corners = compute(
        "Resize", x, None, None, sizes, mode="linear", coordinate_transformation_mode="align_corners"
    )[0]
    same(corners[0, 0, 0], [1, 4 / 3, 5 / 3, 2])
    same(compute("Resize", x, None, None, sizes, mode="linear")[0][0, 0, 0], [1, 1.25, 1.75, 2])
    nearest = compute(
        "Resize",
        x,
        None,
        [1.0, 1.0, 2.0, 2.0],
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )
    same(nearest, np.repeat(np.repeat(x, 2, 2), 2, 3))
    same(compute("Upsample", x, [1.0, 1.0, 2.0, 2.0], version=9), np.repeat(np.repeat(x, 2, 2), 2, 3))
    row = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8)
    cubic = compute("Resize", row, None, None, np.array([1, 1, 1, 16]), mode="cubic", cubic_coeff_a=-0.5)[0]
    same(cubic[0, 0, 0, 5:11], np.arange(5, 11) / 2 - 0.25, rtol=1e-5)
    halved = compute("Resize", row, None, None, np.array([1, 1, 1, 4]), mode="linear", antialias=1)[0]
    same(halved[0, 0, 0, 1:3], [2.5, 4.5], rtol=1e-2)
    kept = compute(
        "Resize", x, None, None, np.array([4, 6]), axes=[2, 3], keep_aspect_ratio_policy="not_larger"
    )
    assert kept[0].shape == (1, 1, 4, 4)


def test_images_are_sampled() -> None:
    x = np.array([[[[1.0, 2.0], [3.0, 4.0]]]], np.float32)
    grid = np.array([[[[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [3.0, 3.0]]]], np.float32)
    same(compute("GridSample", x, grid, align_corners=1, version=20), [[[[1, 2.5, 4, 0]]]])
    border = compute("GridSample", x, grid, padding_mode="border", version=20)
    same(border, [[[[1, 2.5, 4, 4]]]])
    mirrored = compute(
        "GridSample", x, grid, align_corners=1, padding_mode="reflection", mode="nearest", version=20
    )
    same(mirrored[0][0, 0, 0, 3], 1)
    theta = np.array([[[1.0, 0, 0], [0, 1, 0]]], np.float32)
    same(
        compute("AffineGrid", theta, np.array([1, 1, 2, 2])),
        [[[[-0.5, -0.5], [0.5, -0.5]], [[-0.5, 0.5], [0.5, 0.5]]]],
    )


def test_regions_are_pooled() -> None:
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    roi, batch = np.array([[0.5, 0.5, 2.5, 2.5]], np.float32), np.array([0])
    settings = {"output_height": 1, "output_width": 1, "sampling_ratio": 1}
    same(compute("RoiAlign", x, roi, batch, **settings), [[[[x[0, 0, 1, 1]]]]])
    whole = np.array([[0, 0, 0, 3, 3]], np.float32)
    same(compute("MaxRoiPool", x, whole, pooled_shape=[2, 2]), [[[[5, 7], [13, 15]]]])
    with pytest.raises(InvalidArgument, match="batches"):
        compute("RoiAlign", x, roi, np.array([1]), **settings)


def test_fourier_transforms() -> None:
    signal = values(1, 8, 1)
    angle = -2 * np.pi * np.outer(np.arange(8), np.arange(8)) / 8
    real, imaginary = np.cos(angle) @ signal[0, :, 0], np.sin(angle) @ signal[0, :, 0]
    (got,) = compute("DFT", signal, None, np.int64(1))
    same(got[0], np.stack([real, imaginary], 1), rtol=1e-4)
    same(compute("DFT", got, None, np.int64(1), inverse=1)[0][..., :1], signal, rtol=1e-4)
    (half,) = compute("DFT", signal, None, np.int64(1), onesided=1)
    assert half.shape == (1, 5, 2)
    same(compute("DFT", half, None, np.int64(1), onesided=1, inverse=1), signal, rtol=1e-4)
    (frames,) = compute("STFT", signal, np.int64(4), None, np.int64(4))
    same(frames[0, 1, :, 0], np.fft.rfft(signal[0, 4:, 0]).real, rtol=1e-4)
    with pytest.raises(InvalidArgument):
        compute("STFT", signal, np.int64(0), None, np.int64(4))


def test_windows() -> None:
    same(compute("HannWindow", np.int64(4)), [0, 0.5, 1, 0.5])
    same(compute("HammingWindow", np.int64(3), periodic=0), [2 / 23, 1, 2 / 23])
    same(compute("BlackmanWindow", np.int64(2)), [0, 1])
    matrix = compute("MelWeightMatrix", *(np.int64(n) for n in (2, 8, 8)), np.float32(0), np.float32(4))[0]
    assert matrix.shape == (5, 2) and matrix.max() == 1 and matrix.min() == 0


def test_n_grams_are_counted() -> None:
    settings = {
        "max_gram_length": 2, "max_skip_count": 0, "min_gram_length": 1, "mode": "TF",
        "ngram_counts": [0, 2], "ngram_indexes": [0, 1, 2], "pool_int64s": [5, 7, 5, 7],
    }  # fmt: skip
    same(compute("TfIdfVectorizer", np.array([5, 7, 5, 7]), **settings), [2, 2, 2])
    weighted = settings | {"mode": "IDF", "weights": [1.0, 2.0, 3.0]}
    same(compute("TfIdfVectorizer", np.array([[5, 5, 5]]), **weighted), [[1, 0, 0]])
