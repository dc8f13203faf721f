"""Claims about the convolutions: kernels against a plain loop over pixels and taps, and what the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.errors import InvalidArgument, InvalidModel, ResourceExhausted
from aionn.hal import ChannelQuant, Operand, OperandType, OperationType
from aionn.ops import CONTRACTS, Call, Check, Tensor
from aionn.ops.images import convolution
from aionn.ops.numerics import geometry
from aionn.ops.numerics.fixed_point import multiply_by_quantized_multiplier, quantize_multiplier

T = OperandType
O = OperationType  # noqa: E741
SCALAR, FLAG = Operand(T.INT32), Operand(T.BOOL)
Array = npt.NDArray[Any]
Pair = tuple[Operand, Any]


def plain_windows(
    image: Array,
    filter_: Array,
    padding: tuple[int, int, int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
) -> Array:
    """sums[b, y, x, o, c] of [batch, height, width, depth] with filter [o, i, j, c], tap by tap; c is not summed over."""
    left, right, top, bottom = padding
    (across, down), (wide, high) = stride, dilation
    batch, height, width, depth = image.shape
    channels, rows, columns, _ = filter_.shape
    out_height = (height + top + bottom - (rows - 1) * high - 1) // down + 1
    out_width = (width + left + right - (columns - 1) * wide - 1) // across + 1
    sums = np.zeros((batch, out_height, out_width, channels, depth), image.dtype)
    for y in range(out_height):
        for x in range(out_width):
            for i in range(rows):
                for j in range(columns):
                    row, column = y * down + i * high - top, x * across + j * wide - left
                    if 0 <= row < height and 0 <= column < width:
                        sums[:, y, x] += image[:, row, column, None, :] * filter_[:, i, j]
    return sums


class Case:
    """Random data for one convolution of a type, and the way from exact sums to outputs."""

    def __init__(self, kind: OperandType, seed: int, *, per_channel: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.kind = kind
        self.per_channel = per_channel
        self.is_quantized = kind in (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
        self.low = -128 if kind == T.TENSOR_QUANT8_ASYMM_SIGNED else 0
        self.zero = self.low + 131 if self.is_quantized else 0
        self.scale = 0.5 if self.is_quantized else 0.0
        self.output = Operand(kind, (), 41.5, self.low + 100) if self.is_quantized else Operand(kind)

    def data(self, shape: tuple[int, ...]) -> Pair:
        return Operand(self.kind, shape, self.scale, self.zero), self._values(shape)

    def filter(self, shape: tuple[int, ...], channel_dim: int) -> Pair:
        if self.per_channel:
            scales = tuple(float(np.float32(s)) for s in self.rng.uniform(0.1, 0.4, shape[channel_dim]))
            operand = Operand(
                T.TENSOR_QUANT8_SYMM_PER_CHANNEL, shape, channel_quant=ChannelQuant(scales, channel_dim)
            )
            return operand, self.rng.integers(-127, 128, shape).astype(np.int8)
        return Operand(self.kind, shape, 0.25 if self.is_quantized else 0.0, self.zero), self._values(shape)

    def bias(self, count: int) -> Pair:
        if self.is_quantized:
            operand = Operand(T.TENSOR_INT32, (count,), 0.0 if self.per_channel else 0.125)
            return operand, self.rng.integers(-3000, 3000, count).astype(np.int32)
        return Operand(self.kind, (count,)), self.rng.normal(size=count).astype(self.dtype)

    @property
    def dtype(self) -> Any:
        return {
            T.TENSOR_FLOAT16: np.float16,
            T.TENSOR_QUANT8_ASYMM: np.uint8,
            T.TENSOR_QUANT8_ASYMM_SIGNED: np.int8,
        }.get(self.kind, np.float32)

    def _values(self, shape: tuple[int, ...]) -> Array:
        if self.is_quantized:
            return self.rng.integers(self.low, self.low + 256, shape).astype(self.dtype)
        return self.rng.normal(size=shape).astype(self.dtype)

    def centred(self, pair: Pair) -> Array:
        """Real values over their scale, in a type that sums exactly."""
        operand, values = pair
        return (
            values.astype(np.int64) - operand.zero_point if self.is_quantized else values.astype(np.float64)
        )

    def expected(self, sums: Array, filter_: Operand, bias: Array, activation: int) -> Array:
        sums = sums + bias
        bounds = {0: (-np.inf, np.inf), 1: (0, np.inf), 2: (-1, 1), 3: (0, 6)}[activation]
        if not self.is_quantized:
            return sums.clip(*bounds).astype(self.dtype)
        scales = filter_.channel_quant.scales if filter_.channel_quant else [filter_.scale] * len(bias)
        result = np.empty(sums.shape, np.int64)
        for channel, scale in enumerate(scales):
            pair = quantize_multiplier(self.scale * scale / self.output.scale)
            result[..., channel] = multiply_by_quantized_multiplier(sums[..., channel], *pair)
        steps = [
            np.clip(np.round(b / self.output.scale) + self.output.zero_point, self.low, self.low + 255)
            for b in bounds
        ]
        return (result + self.output.zero_point).clip(*steps).astype(self.dtype)

    def assert_equal(self, got: Array, expected: Array) -> None:
        assert got.dtype == expected.dtype
        if self.is_quantized:
            np.testing.assert_array_equal(got, expected)
        else:
            tolerance = 2e-3 if self.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(
                got.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance
            )


def explicit(
    padding: tuple[int, ...],
    stride: tuple[int, int],
    extra: tuple[int, ...],
    activation: int,
    nchw: bool,
    dilation: tuple[int, int] | None = None,
) -> list[Pair]:
    numbers = [*padding, *stride, *extra, activation]
    pairs: list[Pair] = [(SCALAR, np.int32(n)) for n in numbers]
    pairs.append((FLAG, np.bool_(nchw)))
    pairs.extend((SCALAR, np.int32(n)) for n in dilation or ())
    return pairs


def to_nchw(pair: Pair) -> Pair:
    operand, values = pair
    return operand, np.ascontiguousarray(values.transpose(0, 3, 1, 2))


KINDS = [
    (T.TENSOR_FLOAT32, False),
    (T.TENSOR_FLOAT16, False),
    (T.TENSOR_QUANT8_ASYMM, False),
    (T.TENSOR_QUANT8_ASYMM_SIGNED, False),
    (T.TENSOR_QUANT8_ASYMM, True),
    (T.TENSOR_QUANT8_ASYMM_SIGNED, True),
]
WINDOWS = [
    # filter (height, width), padding, stride (width, height), dilation (width, height)
    ((1, 1), (0, 0, 0, 0), (1, 1), (1, 1)),
    ((1, 1), (0, 0, 0, 0), (2, 3), (1, 1)),
    ((3, 3), (1, 1, 1, 1), (1, 1), (1, 1)),
    ((3, 2), (1, 0, 2, 1), (2, 1), (1, 1)),
    ((2, 3), (4, 3, 0, 2), (3, 2), (2, 3)),
    ((7, 6), (0, 0, 0, 0), (1, 1), (1, 1)),
]


@pytest.fixture(params=[1 << 16, 64], ids=["whole", "blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the test in one block, and in as many as there are."""
    monkeypatch.setattr(geometry, "BLOCK_ELEMENTS", request.param)
    monkeypatch.setattr(convolution, "BLOCK_ELEMENTS", request.param if request.param > 64 else -1)
    size: int = request.param
    return size


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "per_channel"), KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("nchw", [False, True])
def test_conv_2d_equals_the_plain_loop(
    bench: Any, block: int, kind: OperandType, per_channel: bool, window: Any, nchw: bool
) -> None:
    case = Case(kind, 5, per_channel=per_channel)
    (rows, columns), padding, stride, dilation = window
    image, filter_, bias = case.data((2, 7, 6, 3)), case.filter((5, rows, columns, 3), 0), case.bias(5)
    arguments = explicit(padding, stride, (), 3, nchw, dilation)
    got = bench.run(O.CONV_2D, [to_nchw(image) if nchw else image, filter_, bias, *arguments], case.output)
    sums = plain_windows(case.centred(image), case.centred(filter_), padding, stride, dilation).sum(axis=-1)
    expected = case.expected(sums, filter_[0], case.centred(bias), 3)
    case.assert_equal(got.transpose(0, 2, 3, 1) if nchw else got, expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "per_channel"), KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_conv_2d_equals_the_plain_loop(
    bench: Any, block: int, kind: OperandType, per_channel: bool, window: Any, multiplier: int
) -> None:
    case = Case(kind, 6, per_channel=per_channel)
    (rows, columns), padding, stride, dilation = window
    image, bias = case.data((2, 7, 6, 4)), case.bias(4 * multiplier)
    filter_ = case.filter((1, rows, columns, 4 * multiplier), 3)
    arguments = explicit(padding, stride, (multiplier,), 1, False, dilation)
    got = bench.run(O.DEPTHWISE_CONV_2D, [image, filter_, bias, *arguments], case.output)
    # Output channel c * multiplier + q sees input channel c alone.
    spread = case.centred(filter_).reshape(rows, columns, 4, multiplier).transpose(3, 0, 1, 2)
    sums = plain_windows(case.centred(image), spread, padding, stride, dilation)
    sums = sums.swapaxes(-1, -2).reshape(*sums.shape[:3], -1)
    case.assert_equal(got, case.expected(sums, filter_[0], case.centred(bias), 1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "per_channel"), KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_conv_2d_is_conv_2d_in_each_group(
    bench: Any, block: int, kind: OperandType, per_channel: bool, groups: int
) -> None:
    case = Case(kind, 7, per_channel=per_channel)
    image, filter_, bias = case.data((2, 6, 5, 8)), case.filter((8, 3, 2, 8 // groups), 0), case.bias(8)
    got = bench.run(
        O.GROUPED_CONV_2D,
        [image, filter_, bias, *explicit((1, 0, 1, 1), (1, 2), (groups,), 0, False)],
        case.output,
    )
    data, weights = np.split(case.centred(image), groups, 3), np.split(case.centred(filter_), groups)
    parts = [
        plain_windows(d, w, (1, 0, 1, 1), (1, 2), (1, 1)).sum(axis=-1)
        for d, w in zip(data, weights, strict=True)
    ]
    case.assert_equal(got, case.expected(np.concatenate(parts, -1), filter_[0], case.centred(bias), 0))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "per_channel"), KINDS)
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 0, 2, 1), (0, -2, 1, -1)])
def test_transpose_conv_2d_spreads_every_pixel(
    bench: Any, block: int, kind: OperandType, per_channel: bool, padding: tuple[int, int, int, int]
) -> None:
    case = Case(kind, 8, per_channel=per_channel)
    image, filter_, bias = case.data((2, 4, 3, 5)), case.filter((2, 3, 4, 5), 0), case.bias(2)
    got = bench.run(
        O.TRANSPOSE_CONV_2D, [image, filter_, bias, *explicit(padding, (3, 2), (), 0, False)], case.output
    )
    left, right, top, bottom = padding
    data, weights = case.centred(image), case.centred(filter_)
    canvas = np.zeros((2, 40, 40, 2), data.dtype)
    for y in range(4):
        for x in range(3):
            for i in range(3):
                for j in range(4):
                    canvas[:, 10 + y * 2 + i, 10 + x * 3 + j] += data[:, y, x] @ weights[:, i, j].T
    height, width = 3 * 2 + 3 - top - bottom, 2 * 3 + 4 - left - right
    sums = canvas[:, 10 + top : 10 + top + height, 10 + left : 10 + left + width]
    case.assert_equal(got, case.expected(sums, filter_[0], case.centred(bias), 0))


def test_transpose_conv_2d_takes_its_extents_from_the_given_shape_with_same_padding(bench: Any) -> None:
    case = Case(T.TENSOR_FLOAT32, 9)
    for extent in (5, 6):
        shape = (Operand(T.TENSOR_INT32, (4,)), np.array([1, extent, extent, 2], np.int32))
        arguments = [shape, *((SCALAR, np.int32(n)) for n in (1, 2, 2, 0)), (FLAG, np.False_)]
        inputs = [case.data((1, 3, 3, 1)), case.filter((2, 3, 3, 1), 0), case.bias(2), *arguments]
        assert bench.run(O.TRANSPOSE_CONV_2D, inputs, case.output).shape == (1, extent, extent, 2)


def test_quantised_sums_are_exact_beyond_the_digits_of_float32(bench: Any) -> None:
    # The sum of the stored products is odd and needs 25 bits; float32 has 24.
    depth = 1200
    image = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (1, 1, 1, depth), 1.0, 127)
    filter_ = Operand(
        T.TENSOR_QUANT8_SYMM_PER_CHANNEL, (1, 1, 1, depth), channel_quant=ChannelQuant((1.0,), 0)
    )
    values = np.full((1, 1, 1, depth), -127, np.int8)
    weights = np.full((1, 1, 1, depth), 127, np.int8)
    weights[0, 0, 0, -1] = 126
    # What the sum comes to with the zero point taken out, taken off again but for 3.
    bias = np.array([254 * (1199 * 127 + 126) + 3], np.int32)
    arguments = explicit((0, 0, 0, 0), (1, 1), (), 0, False)
    got = bench.run(
        O.CONV_2D,
        [(image, values), (filter_, weights), (Operand(T.TENSOR_INT32, (1,)), bias), *arguments],
        Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1.0, 0),
    )
    assert got.tolist() == [[[[3]]]]


@pytest.mark.parametrize("operation", [O.CONV_2D, O.DEPTHWISE_CONV_2D])
def test_empty_batch_gives_an_empty_batch(bench: Any, operation: OperationType) -> None:
    case = Case(T.TENSOR_QUANT8_ASYMM, 10)
    is_dense = operation == O.CONV_2D
    filter_ = case.filter((4, 2, 2, 4) if is_dense else (1, 2, 2, 4), 0)
    arguments = explicit((0, 0, 0, 0), (1, 1), () if is_dense else (1,), 0, True)
    got = bench.run(operation, [case.data((0, 4, 5, 6)), filter_, case.bias(4), *arguments], case.output)
    assert got.shape == (0, 4, 4, 5)
    assert got.dtype == np.uint8


def test_kept_plan_serves_the_declared_shape_alone(bench: Any) -> None:
    case = Case(T.TENSOR_FLOAT32, 11)
    filter_, bias = case.filter((2, 2, 2, 3), 0), case.bias(2)
    arguments = explicit((0, 0, 0, 0), (1, 1), (), 0, False)
    kept: dict[str, Any] = {}
    declared, values = case.data((1, 4, 4, 3))
    first = bench.run(O.CONV_2D, [(declared, values), filter_, bias, *arguments], case.output, kept=kept)
    assert kept
    again = bench.run(O.CONV_2D, [(declared, values), filter_, bias, *arguments], case.output, kept=kept)
    np.testing.assert_array_equal(first, again)
    larger = bench.run(
        O.CONV_2D, [case.data((1, 6, 5, 3)), filter_, bias, *arguments], case.output, kept=kept
    )
    assert larger.shape == (1, 5, 4, 2)
    unknown = Operand(T.TENSOR_FLOAT32, (0, 0, 0, 3))
    got = bench.run(O.CONV_2D, [(unknown, values), filter_, bias, *arguments], case.output, kept=kept)
    np.testing.assert_array_equal(got, first)


@pytest.mark.parametrize(
    "operation", [O.CONV_2D, O.DEPTHWISE_CONV_2D, O.GROUPED_CONV_2D, O.TRANSPOSE_CONV_2D]
)
def test_shape_is_known_without_reading_the_weights(
    operation: OperationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*given: Any, **options: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(convolution, "weight_values", read)
    case = Case(T.TENSOR_QUANT8_ASYMM, 13)
    filter_shape = {O.DEPTHWISE_CONV_2D: (1, 2, 2, 4), O.GROUPED_CONV_2D: (4, 2, 2, 2)}.get(
        operation, (4, 2, 2, 4)
    )
    extra = {O.DEPTHWISE_CONV_2D: (1,), O.GROUPED_CONV_2D: (2,)}.get(operation, ())
    pairs = [
        case.data((1, 5, 6, 4)),
        case.filter(filter_shape, 0),
        case.bias(4),
        *explicit((0, 0, 0, 0), (1, 1), extra, 0, False),
    ]
    call = Call([Tensor(*pair, is_constant=i > 0) for i, pair in enumerate(pairs)], [case.output])
    shapes = CONTRACTS[operation].shapes
    assert shapes is not None
    grown = 1 if operation == O.TRANSPOSE_CONV_2D else -1
    assert list(shapes(call)) == [(1, 5 + grown, 6 + grown, 4)]
    with pytest.raises(AssertionError, match="weights are read"):
        CONTRACTS[operation].execute(call)


def test_result_is_written_into_fresh_memory(bench: Any) -> None:
    case = Case(T.TENSOR_FLOAT32, 12)
    image = case.data((1, 3, 3, 2))
    arguments = explicit((0, 0, 0, 0), (1, 1), (), 0, False)
    got = bench.run(O.CONV_2D, [image, case.filter((2, 1, 1, 2), 0), case.bias(2), *arguments], case.output)
    assert got.flags.writeable and not np.shares_memory(got, image[1])


# What the validator says


def level(
    operation: OperationType, inputs: list[Operand], output: Operand, constants: dict[int, Any] | None = None
) -> int:
    # Operands are told apart by identity, so every scalar is one of its own.
    operands = [Operand(o.type) if o in (SCALAR, FLAG) else o for o in inputs]
    values = {id(operands[i]): np.asarray(v) for i, v in (constants or {}).items()}
    check = Check(operation, operands, [output], where="operation 0", constant=lambda o: values.get(id(o)))
    CONTRACTS[operation].validate(check)
    return check.level


F32_INPUTS = [
    Operand(T.TENSOR_FLOAT32, (1, 8, 8, 3)),
    Operand(T.TENSOR_FLOAT32, (4, 3, 3, 3)),
    Operand(T.TENSOR_FLOAT32, (4,)),
]
F32_OUTPUT = Operand(T.TENSOR_FLOAT32, (1, 0, 0, 4))
IMPLICIT, EXPLICIT = [SCALAR] * 4, [SCALAR] * 7


def quant_inputs(
    kind: OperandType, *, per_channel: bool = False, channel_dim: int = 0, bias_scale: float = 0.125
) -> list[Operand]:
    filter_ = Operand(kind, (4, 3, 3, 3), 0.25, 0)
    if per_channel:
        filter_ = Operand(
            T.TENSOR_QUANT8_SYMM_PER_CHANNEL,
            (4, 3, 3, 3),
            channel_quant=ChannelQuant((0.5,) * 4, channel_dim),
        )
    return [Operand(kind, (1, 8, 8, 3), 0.5, 0), filter_, Operand(T.TENSOR_INT32, (4,), bias_scale)]


def quant_output(kind: OperandType, scale: float = 1.0) -> Operand:
    return Operand(kind, (), scale, 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (IMPLICIT, 1),
        (EXPLICIT, 1),
        ([*IMPLICIT, FLAG], 3),
        ([*EXPLICIT, FLAG], 3),
        ([*IMPLICIT, FLAG, SCALAR, SCALAR], 3),
        ([*EXPLICIT, FLAG, SCALAR, SCALAR], 3),
    ],
)
def test_conv_2d_level_follows_its_arguments(arguments: list[Operand], expected: int) -> None:
    assert level(O.CONV_2D, [*F32_INPUTS, *arguments], F32_OUTPUT) == expected


@pytest.mark.parametrize(
    ("kind", "per_channel", "scale", "expected"),
    [
        (T.TENSOR_QUANT8_ASYMM, False, 1.0, 1),
        (T.TENSOR_QUANT8_ASYMM, False, 0.125, 3),
        (T.TENSOR_QUANT8_ASYMM, True, 1.0, 3),
        (T.TENSOR_QUANT8_ASYMM_SIGNED, False, 1.0, 4),
        (T.TENSOR_QUANT8_ASYMM_SIGNED, True, 1.0, 4),
    ],
)
def test_conv_2d_level_follows_its_types(
    kind: OperandType, per_channel: bool, scale: float, expected: int
) -> None:
    inputs = quant_inputs(kind, per_channel=per_channel)
    assert level(O.CONV_2D, [*inputs, *IMPLICIT], quant_output(kind, scale)) == expected


@pytest.mark.parametrize(
    ("inputs", "output", "constants", "message"),
    [
        (
            [*F32_INPUTS, *IMPLICIT, FLAG, SCALAR],
            F32_OUTPUT,
            {},
            "number of inputs: expected 7 or 8 or 10 or 11 or 13, got 9",
        ),
        ([*F32_INPUTS, *EXPLICIT, SCALAR], F32_OUTPUT, {}, "input 10: expected BOOL, got INT32"),
        (
            [*F32_INPUTS, *EXPLICIT],
            Operand(T.TENSOR_FLOAT16),
            {},
            "output 0: expected TENSOR_FLOAT32, got TENSOR_FLOAT16",
        ),
        (
            [*F32_INPUTS, *IMPLICIT],
            F32_OUTPUT,
            {3: 0},
            r"input 3: expected an implicit padding of 1 \(SAME\) or 2 \(VALID\), got 0",
        ),
        ([*F32_INPUTS, *IMPLICIT], F32_OUTPUT, {4: 0}, "input 4: expected a stride of at least 1, got 0"),
        (
            [*F32_INPUTS, *IMPLICIT],
            F32_OUTPUT,
            {6: 4},
            "input 6: expected a fused activation from 0 to 3, got 4",
        ),
        ([*F32_INPUTS, *EXPLICIT], F32_OUTPUT, {5: -1}, "input 5: expected padding of at least 0, got -1"),
        (
            [*F32_INPUTS, *IMPLICIT, FLAG, SCALAR, SCALAR],
            F32_OUTPUT,
            {9: 0},
            "input 9: expected a dilation of at least 1, got 0",
        ),
        (
            [F32_INPUTS[0], Operand(T.TENSOR_FLOAT32, (4, 3, 3, 2)), F32_INPUTS[2], *IMPLICIT],
            F32_OUTPUT,
            {},
            r"input 0: expected extent 2 on axis 3, got shape \[1, 8, 8, 3\]",
        ),
        (
            [*F32_INPUTS[:2], Operand(T.TENSOR_FLOAT32, (5,)), *IMPLICIT],
            F32_OUTPUT,
            {},
            r"input 2: expected extent 4 on axis 0, got shape \[5\]",
        ),
        (
            [Operand(T.TENSOR_FLOAT32, (8, 8, 3)), *F32_INPUTS[1:], *IMPLICIT],
            F32_OUTPUT,
            {},
            r"input 0: expected rank 4, got shape \[8, 8, 3\]",
        ),
        (
            [*quant_inputs(T.TENSOR_QUANT8_ASYMM, bias_scale=0.5), *IMPLICIT],
            quant_output(T.TENSOR_QUANT8_ASYMM),
            {},
            "input 2: expected scale 0.125 of input times weights, got 0.5",
        ),
        (
            [*quant_inputs(T.TENSOR_QUANT8_ASYMM, per_channel=True, channel_dim=3), *IMPLICIT],
            quant_output(T.TENSOR_QUANT8_ASYMM),
            {},
            "input 1: expected per-channel scales on axis 0",
        ),
    ],
)
def test_conv_2d_refuses_with_the_place(
    inputs: list[Operand], output: Operand, constants: dict[int, int], message: str
) -> None:
    with pytest.raises(InvalidModel, match=rf"^operation 0 \(CONV_2D\), {message}"):
        level(O.CONV_2D, inputs, output, constants)


def test_unknown_extents_are_left_to_the_execution() -> None:
    inputs = [Operand(T.TENSOR_FLOAT32, d) for d in ((0, 0, 0, 0), (0, 3, 3, 0), (0,))]
    assert level(O.CONV_2D, [*inputs, *IMPLICIT], F32_OUTPUT) == 1
    unranked = [Operand(T.TENSOR_FLOAT32)] * 3
    assert level(O.CONV_2D, [*unranked, *IMPLICIT], Operand(T.TENSOR_FLOAT32)) == 1


def test_depthwise_filter_belongs_to_one_image() -> None:
    inputs = [F32_INPUTS[0], Operand(T.TENSOR_FLOAT32, (2, 3, 3, 6)), Operand(T.TENSOR_FLOAT32, (6,))]
    with pytest.raises(InvalidModel, match="input 1: expected extent 1 on axis 0"):
        level(O.DEPTHWISE_CONV_2D, [*inputs, *[SCALAR] * 5], Operand(T.TENSOR_FLOAT32))


@pytest.mark.parametrize(
    ("multiplier", "message"), [(0, "a depth multiplier of at least 1, got 0"), (3, "extent 9 on axis 3")]
)
def test_depthwise_filter_has_depth_times_multiplier(multiplier: int, message: str) -> None:
    inputs = [
        F32_INPUTS[0],
        Operand(T.TENSOR_FLOAT32, (1, 3, 3, 6)),
        Operand(T.TENSOR_FLOAT32, (6,)),
        *[SCALAR] * 5,
    ]
    assert level(O.DEPTHWISE_CONV_2D, inputs, Operand(T.TENSOR_FLOAT32), {6: 2}) == 1
    with pytest.raises(InvalidModel, match=message):
        level(O.DEPTHWISE_CONV_2D, inputs, Operand(T.TENSOR_FLOAT32), {6: multiplier})


@pytest.mark.parametrize(
    ("operation", "shapes", "extra", "message"),
    [
        (O.CONV_2D, ((1, 4, 4, 3), (2, 2, 2, 4), (2,)), (), "input 1: expected 3 on axis 3"),
        (O.CONV_2D, ((1, 4, 4, 3), (2, 2, 2, 3), (3,)), (), r"input 2: expected shape \[2\], got \[3\]"),
        (O.CONV_2D, ((1, 0, 4, 3), (2, 2, 2, 3), (2,)), (), "input 0: expected only the batch to be 0"),
        (O.CONV_2D, ((1, 1, 4, 3), (2, 2, 2, 3), (2,)), (), "window: expected a height of at most 1, got 2"),
        (
            O.DEPTHWISE_CONV_2D,
            ((1, 4, 4, 3), (1, 2, 2, 5), (5,)),
            (2,),
            "depth 3 times multiplier 2 on axis 3",
        ),
        (O.GROUPED_CONV_2D, ((1, 4, 4, 6), (4, 2, 2, 2), (4,)), (2,), "input 1: expected 3 on axis 3"),
        (O.GROUPED_CONV_2D, ((1, 4, 4, 6), (3, 2, 2, 3), (3,)), (2,), "a multiple of 2 on axis 0"),
        (
            O.GROUPED_CONV_2D,
            ((1, 4, 4, 6), (3, 2, 2, 3), (3,)),
            (0,),
            "input 9: expected at least 1 group, got 0",
        ),
        (O.TRANSPOSE_CONV_2D, ((1, 4, 4, 3), (2, 2, 2, 4), (2,)), (), "input 1: expected 3 on axis 3"),
    ],
)
def test_operands_that_do_not_fit_are_refused_at_run_time(
    bench: Any, operation: OperationType, shapes: Any, extra: tuple[int, ...], message: str
) -> None:
    pairs = [(Operand(T.TENSOR_FLOAT32), np.zeros(shape, np.float32)) for shape in shapes]
    with pytest.raises(InvalidArgument, match=message):
        bench.run(
            operation, [*pairs, *explicit((0, 0, 0, 0), (1, 1), extra, 0, False)], Operand(T.TENSOR_FLOAT32)
        )


def test_padding_out_of_proportion_is_refused_before_it_is_allocated(bench: Any) -> None:
    case = Case(T.TENSOR_FLOAT32, 13)
    inputs = [case.data((1, 3, 3, 1)), case.filter((1, 2, 2, 1), 0), case.bias(1)]
    dilation, stride = (2**30, 2**30), (2**30, 2**30)
    arguments = explicit((2**30, 2**30, 2**30, 2**30), stride, (), 0, False, dilation)
    with pytest.raises(ResourceExhausted, match="padded image: expected at most"):
        bench.run(O.CONV_2D, [*inputs, *arguments], case.output)
    crop = explicit((2**30 - 2, 0, 2**30 - 2, 0), (2**30, 2**30), (), 0, False)
    inputs[0] = case.data((1, 2, 2, 1))
    with pytest.raises(ResourceExhausted, match="output before cropping: expected at most"):
        bench.run(O.TRANSPOSE_CONV_2D, [*inputs, *crop], case.output)


def test_outputs_beyond_32_bits_of_bytes_are_refused(bench: Any) -> None:
    case = Case(T.TENSOR_FLOAT32, 14)
    inputs = [case.data((1, 2, 2, 1)), case.filter((1, 2, 2, 1), 0), case.bias(1)]
    with pytest.raises(InvalidArgument, match="at most 4294967295 bytes"):
        bench.run(
            O.TRANSPOSE_CONV_2D, [*inputs, *explicit((0, 0, 0, 0), (2**30, 2**30), (), 0, False)], case.output
        )
