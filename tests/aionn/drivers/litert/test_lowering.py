"""What LiteRT has no operator for, in one form or another, computes what the reference device computes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.hal import ChannelQuant, Model, OperandType, OperationType, operand_dtype
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder, Value

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert import flatbuffer_writer
from aionn.drivers.litert.engine import Engine
from aionn.drivers.litert.lowering import lower

Array = npt.NDArray[Any]
FLOAT, SIGNED, UNSIGNED = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT8_ASYMM,
)


def drawn(shape: Sequence[int], dtype: str = "float32", seed: int = 7) -> Array:
    generator = np.random.default_rng(seed)
    if dtype == "float32":
        return generator.uniform(-2, 2, shape).astype(np.float32)
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max + 1, shape).astype(dtype)


def compare(model: Model, inputs: Sequence[Array], *, steps: int = 0) -> None:
    """Both devices' outputs: equal, but for rounding of floats, or of so many steps of stored numbers."""
    wanted = Interpreter(model).run(inputs, RunControl())
    engine = Engine(lower(model), 1)  # Its results are views of its memory.
    got = engine.compute(inputs)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert int(np.abs(a.astype(np.int32) - b.astype(np.int32)).max()) <= steps
        assert len(np.unique(b)) > 2, "an example that says something"


def convolution(
    kind: OperationType, numbers: Sequence[Any], out: Sequence[int], filter_: Sequence[int]
) -> Model:
    graph = GraphBuilder()
    image = graph.input(FLOAT, (1, 6, 5, 4) if numbers[-1] is not True else (1, 4, 6, 5))
    depth = filter_[3] if kind == OperationType.DEPTHWISE_CONV_2D else filter_[0]
    weights, bias = graph.constant(drawn(filter_, seed=1)), graph.constant(drawn((depth,), seed=2))
    arguments = [graph.constant(n) for n in numbers]
    return graph.build([graph.result(kind, [image, weights, bias, *arguments], image, out)])


@pytest.mark.parametrize(
    ("kind", "numbers", "out", "filter_"),
    [
        # Left, right, top, bottom; strides; what the operation adds; activation; layout.
        (OperationType.CONV_2D, (1, 1, 1, 1, 1, 1, 0), (1, 6, 5, 3), (3, 3, 3, 4)),
        (OperationType.CONV_2D, (2, 0, 1, 2, 2, 1, 1), (1, 7, 3, 3), (3, 3, 3, 4)),
        (OperationType.CONV_2D, (0, 1, 2, 0, 1, 1, 0, True), (1, 3, 6, 4), (3, 3, 3, 4)),
        (OperationType.DEPTHWISE_CONV_2D, (1, 0, 0, 2, 1, 1, 2, 3), (1, 6, 4, 8), (1, 3, 3, 8)),
        (OperationType.DEPTHWISE_CONV_2D, (1, 1, 1, 2, 0, True), (1, 8, 6, 5), (1, 3, 3, 8)),
        (OperationType.GROUPED_CONV_2D, (2, 1, 1, 2, 0, False), (1, 4, 3, 6), (6, 3, 3, 2)),
        (OperationType.GROUPED_CONV_2D, (1, 0, 0, 1, 1, 1, 4, 1, True), (1, 4, 5, 4), (4, 3, 3, 1)),
        (OperationType.TRANSPOSE_CONV_2D, (1, 0, 0, 2, 2, 2, 0, False), (1, 11, 10, 3), (3, 3, 3, 4)),
        (OperationType.TRANSPOSE_CONV_2D, (1, -1, 1, -1, 2, 2, 0, True), (1, 3, 13, 11), (3, 3, 3, 4)),
    ],
)
def test_paddings_and_layouts_of_convolutions(
    kind: OperationType, numbers: tuple[Any, ...], out: tuple[int, ...], filter_: tuple[int, ...]
) -> None:
    model = convolution(kind, numbers, out, filter_)
    compare(model, [drawn(model.main.inputs[0].dimensions)])


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (0, 2, 1, 3)])
def test_transposed_matrix_times_itself(order: tuple[int, ...]) -> None:
    graph = GraphBuilder()
    data = graph.input(FLOAT, (1, 3, 3, 3))
    turned = graph.result(
        OperationType.TRANSPOSE, [data, graph.constant(np.array(order, np.int32))], data, (1, 3, 3, 3)
    )
    no = graph.constant(False)
    product = graph.result(OperationType.BATCH_MATMUL, [turned, turned, no, no], data, (1, 3, 3, 3))
    compare(graph.build([product]), [drawn((1, 3, 3, 3))])


def test_max_pooling_pads_with_what_is_never_the_largest() -> None:
    graph = GraphBuilder()
    image = graph.input(FLOAT, (1, 4, 4, 2))
    numbers = [graph.constant(n) for n in (1, 0, 0, 1, 1, 1, 2, 2, 0)]
    model = graph.build([graph.result(OperationType.MAX_POOL_2D, [image, *numbers], image, (1, 4, 4, 2))])
    compare(model, [drawn((1, 4, 4, 2)) - 5])


@pytest.mark.parametrize("kind", [OperationType.AVERAGE_POOL_2D, OperationType.L2_POOL_2D])
def test_other_pooling_with_odd_padding_is_unsupported(kind: OperationType) -> None:
    graph = GraphBuilder()
    image = graph.input(FLOAT, (1, 4, 4, 2))
    numbers = [graph.constant(n) for n in (1, 0, 0, 1, 1, 1, 2, 2, 0)]
    model = graph.build([graph.result(kind, [image, *numbers], image, (1, 4, 4, 2))])
    with pytest.raises(Unsupported, match=f"{kind.name}: explicit padding that is neither SAME nor VALID"):
        lower(model)


@pytest.mark.parametrize(
    ("data", "filter_type", "zero_point"),
    [
        (SIGNED, SIGNED, 0),
        (SIGNED, SIGNED, 17),
        (UNSIGNED, UNSIGNED, 120),
        (UNSIGNED, None, 0),
        (SIGNED, None, 0),
    ],
)
def test_mixed_8_bit_convolutions(
    data: OperandType, filter_type: OperandType | None, zero_point: int
) -> None:
    graph = GraphBuilder()
    dtype = "int8" if data == SIGNED else "uint8"
    image = graph.input(data, (1, 5, 5, 2), scale=0.5, zero_point=3)
    if filter_type is None:
        weights = graph.constant(
            drawn((3, 2, 2, 2), "int8", 1).clip(-127, 127),
            type=OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
            channel_quant=ChannelQuant((0.25, 0.5, 0.125), 0),
        )
        bias = graph.constant(drawn((3,), "int8", 2).astype(np.int32), type=OperandType.TENSOR_INT32)
    else:
        kind = "int8" if filter_type == SIGNED else "uint8"
        weights = graph.constant(
            drawn((3, 2, 2, 2), kind, 1), type=filter_type, scale=0.25, zero_point=zero_point
        )
        bias = graph.constant(
            drawn((3,), "int8", 2).astype(np.int32), type=OperandType.TENSOR_INT32, scale=0.125
        )
    like = graph.variable(data, (1, 4, 4, 3), scale=40.0, zero_point=5)
    numbers = [graph.constant(n) for n in (2, 1, 1, 0)]
    result = graph.result(OperationType.CONV_2D, [image, weights, bias, *numbers], like, (1, 4, 4, 3))
    compare(graph.build([result]), [drawn((1, 5, 5, 2), dtype)], steps=1)


Build = Callable[[GraphBuilder, Value], Value]


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.result(OperationType.SOFTMAX, [x, g.constant(0.5), g.constant(1)], x),
        lambda g, x: g.result(OperationType.LOG_SOFTMAX, [x, g.constant(2.0), g.constant(0)], x),
        lambda g, x: g.result(OperationType.L2_NORMALIZATION, [x, g.constant(-2)], x),
        lambda g, x: g.result(OperationType.ELU, [x, g.constant(0.25)], x),
        lambda g, x: g.result(OperationType.CHANNEL_SHUFFLE, [x, g.constant(2), g.constant(2)], x),
        lambda g, x: g.result(
            OperationType.LOCAL_RESPONSE_NORMALIZATION,
            [x, g.constant(1), g.constant(1.0), g.constant(0.5), g.constant(0.75), g.constant(1)],
            x,
        ),
    ],
    ids=["softmax", "log_softmax", "l2", "elu", "shuffle", "lrn"],
)
def test_other_axes_and_parameters(build: Build) -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (3, 5, 4))
    compare(graph.build([build(graph, x)]), [drawn((3, 5, 4))])


def test_integers_are_divided_downwards() -> None:
    graph = GraphBuilder()
    a, b = (graph.input(OperandType.TENSOR_INT32, (4,)) for _ in range(2))
    model = graph.build([graph.result(OperationType.DIV, [a, b, graph.constant(0)], a)])
    compare(model, [np.array([7, -7, 9, -1], np.int32), np.array([2, 2, -2, 5], np.int32)])


def test_quantised_values_are_compared_as_real_numbers() -> None:
    graph = GraphBuilder()
    a = graph.input(SIGNED, (256,), scale=1.0, zero_point=0)
    b = graph.input(SIGNED, (256,), scale=100.0, zero_point=-127)
    wanted = graph.variable(OperandType.TENSOR_BOOL8, (256,))
    model = graph.build([graph.result(OperationType.LESS, [a, b], wanted)])
    values = [np.arange(-128, 128).astype(np.int8), drawn((256,), "int8") // 32 - 123]
    engine = Engine(lower(model), 1)
    (ours,) = engine.compute(values)
    (theirs,) = Interpreter(model).run(values, RunControl())
    assert ours.tolist() == theirs.tolist()
    assert 0 < ours.sum() < 256


@pytest.mark.parametrize("kind", [SIGNED, UNSIGNED])
def test_nearest_pixel_is_taken_in_images_of_every_size(kind: OperandType) -> None:
    generator = np.random.default_rng(4)
    sizes = [(167, 516), (100, 541), (14, 28), *generator.integers(5, 700, (12, 2)).tolist()]
    for wide, wanted in sizes:
        graph = GraphBuilder()
        x = graph.input(kind, (1, wide, 2, 1), scale=0.5, zero_point=3)
        numbers = [graph.constant(n) for n in (3, wanted, False)]
        result = graph.result(OperationType.RESIZE_NEAREST_NEIGHBOR, [x, *numbers], x, (1, wanted, 3, 1))
        pixels = drawn((1, wide, 2, 1), "int8" if kind == SIGNED else "uint8")
        compare(graph.build([result]), [pixels])


@pytest.mark.parametrize("kind", [FLOAT, SIGNED, UNSIGNED, OperandType.TENSOR_INT32])
def test_larger_index_of_equal_values_comes_first(kind: OperandType) -> None:
    graph = GraphBuilder()
    is_quantized = kind in (SIGNED, UNSIGNED)
    quantization: dict[str, Any] = {"scale": 0.5, "zero_point": 3} if is_quantized else {}
    x = graph.input(kind, (3, 20), **quantization)
    best = graph.variable(kind, (3, 6), **quantization)
    places = graph.variable(OperandType.TENSOR_INT32, (3, 6))
    graph.operation(OperationType.TOPK_V2, [x, graph.constant(6)], [best, places])
    values = np.random.default_rng(4).integers(0, 6, (3, 20)).astype(operand_dtype(kind))
    compare(graph.build([best, places]), [values])


@pytest.mark.parametrize("is_shared", [False, True])
def test_formula_is_an_operator_unless_others_read_its_parts(is_shared: bool) -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (2, 3))
    below = graph.result(OperationType.NEG, [x], x)
    floor = graph.result(OperationType.FLOOR, [below], x)
    ceiling = graph.result(OperationType.NEG, [floor], x)
    compare(graph.build([ceiling, floor] if is_shared else [ceiling]), [drawn((2, 3)) * 4])


def counting_loop(step: int, *, bound_changes: bool = False) -> Model:
    """While i < n: i, x = i + step, x + x; n is a state of its own."""
    count = OperandType.TENSOR_INT32

    def state(graph: GraphBuilder) -> list[Value]:
        return [graph.input(count, (1,)), graph.input(FLOAT, (2,)), graph.input(count, (1,))]

    condition, body, main = GraphBuilder(), GraphBuilder(), GraphBuilder()
    i, _, n = state(condition)
    flag = condition.variable(OperandType.TENSOR_BOOL8, (1,))
    condition.finish([condition.result(OperationType.LESS, [i, n], flag)])
    i, x, n = state(body)
    none, one = body.constant(0), body.constant(np.array([step], np.int32))
    results = [
        body.result(OperationType.ADD, [i, one, none], i),
        body.result(OperationType.ADD, [x, x, none], x),
    ]
    if bound_changes:
        results.append(body.result(OperationType.ADD, [n, one, none], n))
    body.finish(results)
    values = state(main)
    outputs = [main.variable(v.operand.type, v.operand.dimensions) for v in values[: len(results)]]
    main.operation(OperationType.WHILE, [main.graph(condition), main.graph(body), *values], outputs)
    return main.build(outputs)


def test_loop_that_is_sure_to_end_is_run() -> None:
    model = counting_loop(2)
    inputs = [np.array([0], np.int32), np.array([0.5, 3], np.float32), np.array([9], np.int32)]
    engine = Engine(lower(model), 1)
    for _ in range(2):
        count, x = engine.compute(inputs)
        assert count.tolist() == [10]
        assert x.tolist() == [16, 96]


@pytest.mark.parametrize(("step", "bound_changes"), [(0, False), (-1, False), (1, True)])
def test_loop_that_may_go_on_for_ever_is_unsupported(step: int, bound_changes: bool) -> None:
    with pytest.raises(Unsupported, match="WHILE: a loop that is not sure to end"):
        lower(counting_loop(step, bound_changes=bound_changes))


def sum_of(kind: OperationType, scale: float) -> Model:
    """A sum or layer whose terms have scale 0.125 and whose result has another."""
    g = GraphBuilder()
    y = g.variable(SIGNED, (1, 64), scale=scale, zero_point=0)
    if kind == OperationType.FULLY_CONNECTED:
        x = g.input(SIGNED, (1, 64), scale=0.25, zero_point=3)
        weights = g.constant(drawn((64, 64), "int8", seed=1), SIGNED, scale=0.5)
        bias = g.constant(np.zeros(64, np.int32), OperandType.TENSOR_INT32, scale=0.125)
        inputs = [x, weights, bias, g.constant(0)]
    else:
        half = g.input(SIGNED, (1, 64), scale=0.125, zero_point=-5)
        inputs = [half, half, g.constant(0)]
    g.operation(kind, inputs, [y])
    return g.build([y])


@pytest.mark.parametrize("kind", [OperationType.ADD, OperationType.SUB, OperationType.FULLY_CONNECTED])
def test_terms_whose_scale_is_256_times_the_result_s_are_not_for_xnnpack(kind: OperationType) -> None:
    with pytest.raises(Unsupported, match=r"terms of scale 0\.125"):
        lower(sum_of(kind, 0.125 / 256))
    lower(sum_of(kind, 0.125 / 255))


def test_sum_of_terms_whose_scale_is_255_times_the_result_s_saturates_to_the_right_side() -> None:
    model = sum_of(OperationType.ADD, 0.125 / 255)
    compare(model, [np.arange(-37, 27, dtype=np.int8).reshape(1, 64)])


@pytest.mark.parametrize("room", [16, 700, 1 << 20])
def test_file_is_the_same_however_much_memory_its_tables_were_given(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = GraphBuilder()
    x = g.input(FLOAT, (3, 5))
    value = x
    for seed in range(40):
        value = g.result(OperationType.MUL, [value, g.constant(drawn((3, 5), seed=seed)), 0], x)
    model = g.build([value])
    usual = lower(model).file
    monkeypatch.setattr(flatbuffer_writer, "_STRUCTURE_BYTES", room)
    assert lower(model).file == usual


def test_file_without_memory_or_descriptors_for_it_is_an_error_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(MemoryError, match="too many open files"):
        lower(sum_of(OperationType.ADD, 1.0))


def test_memory_of_a_file_is_allocated_before_it_is_written() -> None:
    with flatbuffer_writer._Scratch(1 << 20) as scratch:
        assert os.fstat(scratch._fd).st_blocks * 512 >= 1 << 20
