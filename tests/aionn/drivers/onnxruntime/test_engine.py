"""ONNX Runtime reads and writes the client's memory where it lies, where that is safe; bindings, run options and stopping."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.drivers.kit.arguments import OutputArea
from aionn.errors import Error, ResourceExhausted
from aionn.hal import Memory, Model, Operand, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx.encoding import DATA_TYPES, encode_model, node, tensor
from aionn.models.onnx.schema import GraphProto, ModelProto, OpsetImport, ValueInfo

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

import onnxruntime as ort

from aionn.drivers.kit.engines.bound import BOUND_MAX
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowering import lower
from aionn.drivers.onnxruntime.engine import Form, Loading, Slot, check, compile_session
from aionn.drivers.onnxruntime.providers import provider_named

Array = npt.NDArray[Any]

FLOAT = OperandType.TENSOR_FLOAT32
SHAPE = (16, 64)
INPUT_BYTES = 4 * 16 * 64


def slot_for(model: Model) -> Slot:
    lowered = lower(model)
    compiled = compile_session(lowered, Loading(provider_named("ort-cpu"), 1))
    assert compiled.form == Form.OPTIMIZABLE
    return Slot(compiled.session, lowered)


def sines() -> Model:
    graph = GraphBuilder()
    x = graph.input(FLOAT, SHAPE)
    return graph.build([graph.result(OperationType.SIN, [x], x, SHAPE)])


def test_chain_of_reshapes_of_any_length_is_lowered() -> None:
    """Each may be its input's memory, so that an input is followed through all of them."""
    graph = GraphBuilder()
    value = graph.input(FLOAT, SHAPE)
    for index in range(1200):
        shape = SHAPE[::-1] if index % 2 == 0 else SHAPE
        target = graph.constant(np.array(shape, np.int32))
        value = graph.result(OperationType.RESHAPE, [value, target], value, shape)
    lowered = lower(graph.build([graph.result(OperationType.SIN, [value], value, SHAPE)]))
    assert lowered.inputs[0].is_in_place and lowered.outputs[0].is_in_place


def area(buffer: Array) -> OutputArea:
    return OutputArea(Operand(type=FLOAT, dimensions=SHAPE), SHAPE, buffer)


def drawn(seed: int) -> Array:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


def pool_with(value: Array, offset: int = 0, behind_bytes: int = 8192) -> tuple[Array, Array, Memory]:
    """Views of an input and of an output behind it, in a pool."""
    pool = Memory.create(offset + value.nbytes + behind_bytes)
    x = pool.array[offset : offset + value.nbytes].view(np.float32).reshape(value.shape)
    x[...] = value
    start = -(-(offset + value.nbytes) // 64) * 64
    return x, pool.array[start : start + INPUT_BYTES], pool


def test_slots_of_a_burst_are_used_in_place_and_known_again() -> None:
    slot = slot_for(sines())
    pairs = [pool_with(drawn(seed)) for seed in (1, 2)]
    for turn in range(3):
        for seed, (x, y, _) in enumerate(pairs, start=1):
            x[...] = drawn(10 * turn + seed)
            (shape,) = slot.run([x], [area(y)])
            assert shape.dimensions == SHAPE
            np.testing.assert_allclose(y.view(np.float32).reshape(SHAPE), np.sin(x), atol=1e-6)
    assert len(slot._bound) == 2
    assert not any(b.copied_in or b.copied_out for b in slot._bound.values())


def test_values_bound_in_place_are_the_client_s_addresses() -> None:
    slot = slot_for(sines())
    x, y, _ = pool_with(drawn(1))
    slot.run([x], [area(y)])
    (bound,) = slot._bound.values()
    (output,) = bound.arguments.bound.get_outputs()
    assert output.data_ptr() == y.ctypes.data
    # The kernel reads what is there when it runs, and not what was there when it was bound.
    x[...] = 0.5
    slot.run([x], [area(y)])
    assert set(y.view(np.float32).tolist()) == {float(y.view(np.float32)[0])}


@pytest.mark.parametrize("offset", [4, 16, 60])
def test_memory_that_is_not_aligned_is_copied(offset: int) -> None:
    slot = slot_for(sines())
    x, _, pool = pool_with(drawn(3), offset)
    y = pool.array[pool.size_bytes - INPUT_BYTES - 1 : pool.size_bytes - 1]
    slot.run([x], [area(y)])
    (bound,) = slot._bound.values()
    assert (bound.copied_in, bound.copied_out) == ([0], [0])
    np.testing.assert_allclose(np.frombuffer(y, np.float32).reshape(SHAPE), np.sin(x), atol=1e-6)


def test_input_at_the_end_of_a_mapping_is_copied() -> None:
    assert INPUT_BYTES % mmap.PAGESIZE == 0, "its end is its mapping's end"
    slot = slot_for(sines())
    x, _, _ = pool_with(drawn(4), behind_bytes=0)
    y = np.zeros(INPUT_BYTES, dtype=np.uint8)
    slot.run([x], [area(y)])
    (bound,) = slot._bound.values()
    assert bound.copied_in == [0]


def test_output_that_is_too_small_is_told() -> None:
    slot = slot_for(sines())
    x, y, _ = pool_with(drawn(5))
    y[:] = 7
    (shape,) = slot.run([x], [area(y[: INPUT_BYTES - 4])])
    assert not shape.is_sufficient
    assert set(y.tolist()) == {7}


def test_memory_that_has_gone_is_not_remembered() -> None:
    slot = slot_for(sines())
    for seed in range(BOUND_MAX + 10):
        x, y, pool = pool_with(drawn(seed % 3))
        slot.run([x], [area(y)])
        del x, y
        pool.close()
    assert len(slot._bound) <= BOUND_MAX


def _in_place(model: Model) -> tuple[list[bool], list[bool]]:
    lowered = lower(model)
    return [a.is_in_place for a in lowered.inputs], [a.is_in_place for a in lowered.outputs]


def test_indexes_and_what_is_compared_twice_are_copied() -> None:
    graph = GraphBuilder()
    table, rows = graph.input(FLOAT, (3, 2)), graph.input(OperandType.TENSOR_INT32, (2,))
    scores = graph.input(FLOAT, (2, 8))
    taken = graph.result(OperationType.GATHER, [table, graph.constant(0), rows], table, (2, 2))
    best = graph.result(OperationType.ARGMAX, [scores, graph.constant(1)], rows, (2,))
    inputs, outputs = _in_place(graph.build([taken, best]))
    assert inputs == [False, False, False]
    assert outputs == [True, True]


def test_output_that_becomes_an_index_is_copied() -> None:
    graph = GraphBuilder()
    x, table = graph.input(FLOAT, (2, 4)), graph.input(FLOAT, (4, 2))
    like = graph.input(OperandType.TENSOR_INT32, (2,))
    places = graph.result(OperationType.ARGMAX, [x, graph.constant(1)], like, (2,))
    taken = graph.result(OperationType.GATHER, [table, graph.constant(0), places], table, (2, 2))
    _, outputs = _in_place(graph.build([places, taken]))
    assert outputs == [False, True]


def test_stopped_run_fails_and_the_next_one_does_not() -> None:
    slot = slot_for(sines())
    x, y, _ = pool_with(drawn(6))
    slot.begin()
    slot.stop()
    with pytest.raises(Error, match="terminate"):
        slot.run([x], [area(y)])
    slot.begin()
    slot.run([x], [area(y)])


@pytest.mark.thorough
def test_run_options_cost_nothing() -> None:
    slot = slot_for(sines())
    x, y, _ = pool_with(np.zeros(SHAPE, np.float32))
    slot.run([x], [area(y)])
    (bound,) = slot._bound.values()

    def taken_ns(call: Callable[[], object]) -> int:
        before = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - before

    import onnxruntime as ort

    plain = ort.RunOptions()
    # By turns, and the quickest of each: other load comes and goes.
    pairs = [
        [
            taken_ns(lambda: slot._session.run_with_iobinding(bound.arguments.bound, options))  # noqa: B023
            for options in (slot._options, plain)
        ]
        for _ in range(2000)
    ]
    with_entry, without = (min(times) for times in zip(*pairs, strict=True))
    # A version that has mended this makes both equal.
    assert with_entry < 1.2 * without


def _types(steps: Sequence[str]) -> dict[str, int]:
    return {step: steps.count(step) for step in steps}


def nodes_of(model: Model) -> dict[str, int]:
    from aionn.models.onnx.schema import read_model

    return _types([node.op_type for node in read_model(lower(model).file).graph.nodes])


def test_transpositions_between_layers_cancel() -> None:
    graph = GraphBuilder()
    value = first = graph.input(FLOAT, (1, 8, 8, 4))
    weights = graph.constant(np.zeros((4, 3, 3, 4), np.float32), FLOAT)
    bias = graph.constant(np.zeros(4, np.float32), FLOAT)
    numbers = [graph.constant(n) for n in (1, 1, 1, 1)]
    for _ in range(3):
        value = graph.result(OperationType.CONV_2D, [value, weights, bias, *numbers], first, (1, 8, 8, 4))
        value = graph.result(OperationType.HARD_SWISH, [value], first, (1, 8, 8, 4))
        value = graph.result(OperationType.ADD, [value, first, graph.constant(0)], first, (1, 8, 8, 4))
    found = nodes_of(graph.build([value]))
    assert found["Conv"] == 3
    assert found["Transpose"] == 2


def test_transpositions_of_a_chain_are_two() -> None:
    graph = GraphBuilder()
    value = first = graph.input(FLOAT, (1, 8, 8, 4))
    weights = graph.constant(np.zeros((4, 3, 3, 4), np.float32), FLOAT)
    bias = graph.constant(np.zeros(4, np.float32), FLOAT)
    numbers = [graph.constant(n) for n in (1, 1, 1, 1)]
    for _ in range(5):
        value = graph.result(OperationType.CONV_2D, [value, weights, bias, *numbers], first, (1, 8, 8, 4))
    assert nodes_of(graph.build([value]))["Transpose"] == 2


def test_mean_of_an_image_needs_no_transposition() -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (1, 4, 8, 8))
    image = graph.result(
        OperationType.TRANSPOSE, [x, graph.constant(np.array([0, 2, 3, 1], np.int32))], x, (1, 8, 8, 4)
    )
    axes = graph.constant(np.array([1, 2], np.int32))
    mean = graph.result(OperationType.MEAN, [image, axes, graph.constant(0)], x, (1, 4))
    assert "Transpose" not in nodes_of(graph.build([mean]))


def test_axes_of_extent_1_need_no_transposition() -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (1, 8, 8, 4))
    weights = graph.constant(np.zeros((4, 1, 1, 4), np.float32), FLOAT)
    bias = graph.constant(np.zeros(4, np.float32), FLOAT)
    numbers = [graph.constant(n) for n in (1, 1, 1, 0)]
    image = graph.result(OperationType.CONV_2D, [x, weights, bias, *numbers], x, (1, 8, 8, 4))
    axes = graph.constant(np.array([1, 2], np.int32))
    mean = graph.result(OperationType.MEAN, [image, axes, graph.constant(1)], x, (1, 1, 1, 4))
    shape = graph.constant(np.array([1, 4], np.int32))
    found = nodes_of(graph.build([graph.result(OperationType.RESHAPE, [mean, shape], x, (1, 4))]))
    assert found["Transpose"] == 1, "that of the input alone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: std::bad_alloc", ResourceExhausted),
        ("[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model.", Unsupported),
    ],
    ids=["memory", "model"],
)  # fmt: skip
def test_session_for_which_there_is_no_memory_makes_no_model_unsupported(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: type[Exception]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(ort, "InferenceSession", fail)
    lowered, provider = lower(sines()), provider_named("ort-cpu")
    with pytest.raises(expected):
        check(lowered, provider)
    with pytest.raises(expected):
        compile_session(lowered, Loading(provider, 1))


def test_messages_of_onnx_runtime_are_records(caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(ort, "set_default_logger_callback"):
        pytest.skip("this version of ONNX Runtime has no callback for messages")
    name = ValueInfo("x", DATA_TYPES["float32"], (2,))
    unused = (tensor("unused", np.zeros(2, np.float32)),)
    graph = GraphProto(
        (node("Neg", ["x"], ["y"]),), (name,), (ValueInfo("y", name.data_type, name.shape),), unused, name="g"
    )
    loading = Loading(provider_named("ort-cpu"), 1)
    loading.options.log_severity_level = 2
    with caplog.at_level(logging.WARNING, "aionn.driver"):
        loading.make(encode_model(ModelProto(8, (OpsetImport("", 17),), graph)))
    (record,) = [r for r in caplog.records if "unused" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("ONNX Runtime: ")
