"""Files of functions: one or a few operators each, control flow, several signatures, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from cases import BOOL, F32, I32, I64, case, function, spec, weight

# Functions

function("gelu_exact", lambda x: tf.nn.gelu(x, approximate=False), spec((3, 40)), ranges=[(-6, 6)])
function("gelu_approximate", lambda x: tf.nn.gelu(x, approximate=True), spec((3, 40)), ranges=[(-6, 6)])
function("erf", lambda x: tf.math.erf(x), spec((3, 40)), custom=True)
function(
    "unary", lambda x: [tf.abs(x), tf.exp(x), tf.sin(x), tf.cos(x), tf.floor(x), tf.math.ceil(x), tf.round(x), tf.sign(x), -x,
                         tf.square(x)],
    spec((4, 9)),
)  # fmt: skip
function(
    "roots",
    lambda x: [tf.sqrt(x), tf.math.rsqrt(x), tf.math.log(x), tf.pow(x, 1.7), 1 / x],
    spec((4, 9)),
    ranges=[(0.1, 9)],
)
function(
    "binary",
    lambda x, y: [
        x + y,
        x - y,
        x * y,
        x / y,
        tf.maximum(x, y),
        tf.minimum(x, y),
        tf.math.squared_difference(x, y),
    ],
    spec((3, 5)),
    spec((5,)),
    ranges=[(-3, 3), (1, 3)],
)
function(
    "integers",
    lambda x, y: [x + y, x - y, x * y, x // y, x % y, tf.maximum(x, y), tf.abs(x), -x],
    spec((3, 5), I32),
    spec((5,), I32),
    ranges=[(-30, 30), (1, 9)],
)
function(
    "floor_mod",
    lambda x, y: [tf.math.floormod(x, y), tf.math.floordiv(x, y)],
    spec((4, 30)),
    spec((30,)),
    ranges=[(-20, 20), (0.5, 7)],
)
function("floor_mod_negative", lambda x: tf.math.floormod(x, -3.7), spec((120,)), ranges=[(-20, 20)])
function(
    "comparisons",
    lambda x, y: [x < y, x <= y, x > y, x >= y, tf.equal(x, y), tf.not_equal(x, y)],
    spec((6, 7), I32),
    spec((7,), I32),
    ranges=[(-2, 2), (-2, 2)],
)
function(
    "logic",
    lambda x, y: [x & y, x | y, ~x, tf.reduce_any(x, 1), tf.reduce_all(x, 0)],
    spec((5, 6), BOOL),
    spec((5, 6), BOOL),
)
function(
    "select",
    lambda c, x, y: [tf.where(c, x, y), tf.where(c[:, :1], x, 0.0)],
    spec((4, 5), BOOL),
    spec((4, 5)),
    spec((4, 5)),
)
function(
    "casts",
    lambda x, y: [tf.cast(x, I32), tf.cast(y, F32), tf.cast(y, BOOL), tf.cast(x > 0, F32)],
    spec((5, 5)),
    spec((5, 5), I32),
    ranges=[(-9, 9), (-1, 1)],
)
function("int64_add", lambda x: [x + 1, x * 3], spec((6,), I64), ranges=[(-50, 50)])
function(
    "int64_gather", lambda x, i: tf.gather(x, i), spec((6, 3)), spec((4,), I64), ranges=[(-1, 1), (0, 5)]
)
function("int64_argmax", lambda x: [tf.argmax(x, 1), tf.argmin(x, 0)], spec((4, 5)))
function("int64_embedding", lambda i: tf.gather(weight((12, 4)), i), spec((1, 5), I64), ranges=[(0, 11)])
function(
    "reductions",
    lambda x: [
        tf.reduce_sum(x, [1]),
        tf.reduce_mean(x, [0, 2], keepdims=True),
        tf.reduce_max(x, -1),
        tf.reduce_min(x),
        tf.reduce_prod(x, 1),
    ],
    spec((2, 3, 4)),
)
function("variance", lambda x: tf.nn.moments(x, [1]), spec((3, 8)))
function(
    "logsumexp", lambda x: [tf.reduce_logsumexp(x, 1), tf.nn.log_softmax(x), tf.nn.softmax(x)], spec((3, 8))
)
function(
    "norms",
    lambda x: [tf.nn.l2_normalize(x, -1), tf.nn.local_response_normalization(x, 2), tf.norm(x)],
    spec((1, 3, 3, 6)),
)
function(
    "gather",
    lambda x, i: [tf.gather(x, i, axis=1), tf.gather(x, 2, axis=2)],
    spec((2, 5, 3)),
    spec((4,), I32),
    ranges=[(-1, 1), (0, 4)],
)
function(
    "gather_batched",
    lambda x, i: tf.gather(x, i, axis=1, batch_dims=1),
    spec((3, 5, 2)),
    spec((3, 4), I32),
    ranges=[(-1, 1), (0, 4)],
)
function(
    "gather_batched_later",
    lambda x, i: tf.gather(x, i, axis=2, batch_dims=1),
    spec((2, 3, 5, 2)),
    spec((2, 4), I32),
    ranges=[(-1, 1), (0, 4)],
)
function(
    "gather_nd", lambda x, i: tf.gather_nd(x, i), spec((4, 5, 3)), spec((6, 2), I32), ranges=[(-1, 1), (0, 3)]
)
function(
    "gather_nd_batched",
    lambda x, i: tf.gather_nd(x, i, batch_dims=1),
    spec((2, 5, 3)),
    spec((2, 4, 1), I32),
    ranges=[(-1, 1), (0, 4)],
)
function(
    "scatter_nd",
    lambda i, x: tf.scatter_nd(i, x, [8, 3]),
    spec((4, 1), I32),
    spec((4, 3)),
    ranges=[(0, 7), (-2, 2)],
)
function("scatter_nd_constant", lambda x: tf.scatter_nd([[4], [1], [7], [1]], x, [8]), spec((4,)))
function(
    "tensor_update", lambda x, u: tf.tensor_scatter_nd_update(x, [[1], [4]], u), spec((6, 3)), spec((2, 3))
)
function("where", lambda x: tf.where(x > 0), spec((4, 5)))
function("where_one_axis", lambda x: tf.gather(x, tf.where(x > 0)[:, 0]), spec((9,)))
function("boolean_mask", lambda x, m: tf.boolean_mask(x, m), spec((7, 2)), spec((7,), BOOL))
function(
    "slices",
    lambda x: [x[1:, :2], x[:, ::2], x[0], x[..., 1], x[:, tf.newaxis, 1:3], tf.reverse(x, [1])],
    spec((4, 6)),
)
function("slices_of_bools", lambda x: [x[1:, 2:4], x[0], x[:, ::2]], spec((4, 6), BOOL))
function("slices_of_integers", lambda x: [x[1:, 2:4], x[0], x[:, ::2], x[::-1]], spec((4, 6), I32))
function(
    "slice_at", lambda x, b: tf.slice(x, b, [2, 3]), spec((5, 6)), spec((2,), I32), ranges=[(-1, 1), (0, 3)]
)
function(
    "layout",
    lambda x: [
        tf.transpose(x, [0, 2, 1]),
        tf.reshape(x, [4, 6]),
        tf.expand_dims(x, 1),
        tf.tile(x, [1, 2, 1]),
        tf.pad(x, [[0, 0], [1, 2], [0, 1]]),
    ],
    spec((2, 3, 4)),
)
function(
    "padding",
    lambda x: [
        tf.pad(x, [[1, 1], [2, 0]], "REFLECT"),
        tf.pad(x, [[1, 1], [2, 1]], "SYMMETRIC"),
        tf.pad(x, [[1, 0], [0, 1]], constant_values=3.0),
    ],
    spec((4, 5)),
)
function(
    "joins",
    lambda x, y: [tf.concat([x, y], 0), tf.stack([x, y], 1), *tf.split(x, [1, 2, 3], 1), *tf.unstack(y)],
    spec((2, 6)),
    spec((2, 6)),
)
function(
    "joins_of_integers",
    lambda x, y: [tf.concat([x, y], 1), tf.stack([x, y], 0)],
    spec((2, 3), I32),
    spec((2, 3), I32),
)
function("joins_of_bools", lambda x, y: tf.concat([x, y], 1), spec((2, 3), BOOL), spec((2, 2), BOOL))
function(
    "space",
    lambda x: [
        tf.nn.space_to_depth(x, 2),
        tf.nn.depth_to_space(x, 2),
        tf.space_to_batch_nd(x, [2, 2], [[0, 0], [0, 0]]),
    ],
    spec((1, 4, 6, 4)),
)
function(
    "resize",
    lambda x: [tf.image.resize(x, (9, 11)), tf.image.resize(x, (3, 3), "nearest")],
    spec((1, 5, 6, 2)),
)
function(
    "resize_corners",
    lambda x: [
        tf.compat.v1.image.resize_bilinear(x, (9, 11), align_corners=True),
        tf.compat.v1.image.resize_nearest_neighbor(x, (9, 11), align_corners=True),
    ],
    spec((1, 5, 6, 2)),
)
function(
    "resize_at_run_time",
    lambda x, s: tf.compat.v1.image.resize_bilinear(x, s),
    spec((1, 5, 6, 2)),
    spec((2,), I32),
    ranges=[(0, 1), (3, 9)],
)
function(
    "resize_like",
    lambda x, y: tf.image.resize(x, tf.shape(y)[1:3], "nearest"),
    spec((1, 5, 6, 2)),
    spec((1, 10, 12, 1)),
)
function(
    "matmul",
    lambda x, y: [tf.matmul(x, y), tf.matmul(x, x, transpose_b=True)],
    spec((2, 3, 4)),
    spec((2, 4, 5)),
)
function("matmul_unequal_rank", lambda x, y: tf.matmul(x, y), spec((2, 3, 4)), spec((4, 5)))
function("matmul_broadcast", lambda x, y: tf.matmul(x, y), spec((3, 1, 2, 4)), spec((5, 4, 3)))
function("einsum", lambda x, y: tf.einsum("bhqd,bhkd->bhqk", x, y), spec((1, 2, 3, 4)), spec((1, 2, 5, 4)))
function("five_axes", lambda x, y: x * y + 1.0, spec((2, 3, 2, 2, 3)), spec((2, 3, 2, 2, 3)))
function("five_axes_broadcast", lambda x, y: x * y, spec((2, 3, 2, 2, 3)), spec((3,)))
function(
    "five_axes_moved",
    lambda x: tf.transpose(tf.reshape(x, [1, 2, 3, 2, 4]), [0, 1, 3, 2, 4]),
    spec((1, 6, 8)),
)
function(
    "five_axes_reduced", lambda x: [tf.reduce_mean(x, [2, 3]), tf.reduce_sum(x, 4)], spec((2, 3, 2, 2, 3))
)
function(
    "five_axes_joined",
    lambda x, y: [tf.concat([x, y], 2), x[:, :, 1], tf.tile(x, [1, 1, 1, 1, 2])],
    spec((2, 3, 2, 2, 3)),
    spec((2, 3, 2, 2, 3)),
)
function(
    "channel_shuffle",
    lambda x: tf.reshape(tf.transpose(tf.reshape(x, [1, 4, 4, 2, 3]), [0, 1, 2, 4, 3]), [1, 4, 4, 6]),
    spec((1, 4, 4, 6)),
)
function(
    "nearest_by_reshape",
    lambda x: tf.reshape(tf.tile(tf.reshape(x, [1, 4, 1, 4, 1, 3]), [1, 1, 2, 1, 2, 1]), [1, 8, 8, 3]),
    spec((1, 4, 4, 3)),
)
function("one_hot", lambda i: tf.one_hot(i, 6), spec((4,), I32), ranges=[(0, 5)])
function("top_k", lambda x: tf.math.top_k(x, 3), spec((2, 9)))
function("cumsum", lambda x: [tf.cumsum(x, 1), tf.cumsum(x, 0, exclusive=True, reverse=True)], spec((3, 6)))
function(
    "range_and_fill",
    lambda x: x + tf.cast(tf.range(5), F32) + tf.fill([3, 5], 2.0) + tf.zeros_like(x),
    spec((3, 5)),
)
function(
    "shape_arithmetic", lambda x: tf.reshape(x, [tf.shape(x)[0], -1]), spec((None, 2, 3)), shapes=[(4, 2, 3)]
)
function(
    "suppression_v4",
    lambda b, s: tf.raw_ops.NonMaxSuppressionV4(
        boxes=b,
        scores=s,
        max_output_size=4,
        iou_threshold=0.5,
        score_threshold=0.1,
        pad_to_max_output_size=True,
    ),
    spec((8, 4)),
    spec((8,)),
    ranges=[(0, 1), (0, 1)],
)
function(
    "suppression_v5",
    lambda b, s: tf.raw_ops.NonMaxSuppressionV5(
        boxes=b,
        scores=s,
        max_output_size=4,
        iou_threshold=0.5,
        score_threshold=0.1,
        soft_nms_sigma=0.0,
        pad_to_max_output_size=True,
    ),
    spec((8, 4)),
    spec((8,)),
    ranges=[(0, 1), (0, 1)],
)
function(
    "reverse_sequence", lambda x: tf.reverse_sequence(x, [2, 4, 1], seq_axis=1, batch_axis=0), spec((3, 5, 2))
)
function("matrix_diag", lambda x: tf.linalg.diag(x), spec((2, 4)))
function("matrix_set_diag", lambda x, d: tf.linalg.set_diag(x, d), spec((2, 4, 4)), spec((2, 4)))
function("segment_sum", lambda x: tf.math.segment_sum(x, [0, 0, 1, 2, 2]), spec((5, 3)))
function("unsorted_segment_sum", lambda x: tf.math.unsorted_segment_sum(x, [2, 0, 1, 0], 4), spec((4, 3)))
function("unsorted_segment_max", lambda x: tf.math.unsorted_segment_max(x, [2, 0, 1, 0], 3), spec((4, 3)))
function("bucketize", lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 0.5]), spec((4, 5)))
function("atan2", lambda x, y: tf.atan2(x, y), spec((4, 9)), spec((4, 9)))
function("bitwise_xor", lambda x, y: tf.bitwise.bitwise_xor(x, y), spec((4, 5), I32), spec((4, 5), I32))
function("right_shift", lambda x: tf.bitwise.right_shift(x, 2), spec((4, 5), I32), ranges=[(-99, 99)])
function("fake_quant", lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1, 1) * 2.0, spec((4, 5)))
function("broadcast_to", lambda x: [tf.broadcast_to(x, [3, 4, 5])], spec((4, 1)))
function("unique", lambda x: tf.unique(x), spec((9,), I32))
function("rfft", lambda x: tf.abs(tf.signal.rfft(x)), spec((1, 16)))
function("random", lambda x: x + tf.random.normal([4]), spec((4,)))
function("strings", lambda x: tf.strings.length(tf.strings.as_string(x)), spec((4,)), custom=True)
function("custom", lambda x: tf.linalg.det(x), spec((3, 3)), custom=True)

# Control flow, signatures, state

function("branch", lambda c, x: tf.cond(c, lambda: x * 2.0, lambda: x - 1.0), spec((), BOOL), spec((3, 4)))
function(
    "loop",
    lambda n, x: tf.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, y * 1.5 + 1.0), (0, x))[1],
    spec((), I32),
    spec((4,)),
    ranges=[(0, 5), (-1, 1)],
)
function(
    "nested_control",
    lambda x: tf.while_loop(
        lambda i, _: i < 4,
        lambda i, y: (i + 1, tf.cond(tf.reduce_sum(y) > 0, lambda: y - 1.0, lambda: y + 2.0)),
        (0, x),
    )[1],
    spec((4,)),
)


@case("signatures")
def _() -> Any:
    class Two(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.constant(weight((4, 3)))

        @tf.function(input_signature=[tf.TensorSpec((2, 4), F32, "features")])
        def encode(self, features: Any) -> Any:
            return {"code": tf.tanh(features @ self.table), "sum": tf.reduce_sum(features, 1)}

        @tf.function(input_signature=[tf.TensorSpec((2, 3), F32, "code"), tf.TensorSpec((3,), F32, "bias")])
        def decode(self, code: Any, bias: Any) -> Any:
            return {"features": (code + bias) @ tf.transpose(self.table)}

    return Two()


@case("variable")
def _() -> Any:
    class Counter(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = tf.Variable(np.zeros(4, np.float32))

        @tf.function(input_signature=[tf.TensorSpec((4,), F32, "x")])
        def add(self, x: Any) -> Any:
            return {"total": self.total.assign_add(x)}

    return Counter()


@case("hash_table", custom=True)
def _() -> Any:
    class Lookup(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2], I64), tf.constant(["a", "b"]))
            self.table = tf.lookup.StaticHashTable(pairs, "-")

        @tf.function(input_signature=[tf.TensorSpec((3,), I64, "x")])
        def look(self, x: Any) -> Any:
            return {"y": self.table.lookup(x)}

    return Lookup()
