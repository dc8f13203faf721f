"""LiteRT reads and writes the client's memory where it lies, where that is safe, and gives the interpreter's bytes in any case."""

from __future__ import annotations

import gc
import importlib.metadata
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.drivers.kit.arguments import OutputArea
from aionn.hal import Memory, Model, Operand, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from aionn.drivers.kit.engines.bound import BOUND_MAX
from aionn.drivers.litert import in_place
from aionn.drivers.litert.engine import Engine, make_engines
from aionn.drivers.litert.in_place import InPlaceEngine, is_known_version
from aionn.drivers.litert.lowering import Lowered, lower

Array = npt.NDArray[Any]

FLOAT = OperandType.TENSOR_FLOAT32
SHAPE = (1, 96, 96, 3)
INPUT_BYTES = 4 * 96 * 96 * 3


@pytest.fixture
def engine(example_data: Path) -> InPlaceEngine:
    if not is_known_version():
        pytest.skip("the C interface of this version of LiteRT is not known")
    model = load_tflite(example_data / "shapes_float.tflite").model
    made = made_for(model)
    assert isinstance(made, InPlaceEngine)
    return made


def made_for(model: Model) -> Engine | InPlaceEngine:
    (made,) = make_engines(lower(model), 1, [tuple(o.dimensions) for o in model.main.outputs], 1)
    return made


def area(buffer: Array, shape: Sequence[int]) -> OutputArea:
    return OutputArea(Operand(type=FLOAT, dimensions=tuple(shape)), tuple(shape), buffer)


def drawn(seed: int) -> Array:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


def pool_with(value: Array, offset: int = 0, behind_bytes: int = 4096) -> tuple[Array, Array, Memory]:
    """Views of an input and of the 20 bytes of an output behind it, in a pool."""
    pool = Memory.create(offset + value.nbytes + behind_bytes)
    x = pool.array[offset : offset + value.nbytes].view(np.float32).reshape(value.shape)
    x[...] = value
    start = -(-(offset + value.nbytes) // 64) * 64
    return x, pool.array[start : start + 20], pool


def wanted(example_data: Path, value: Array) -> bytes:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(example_data / "shapes_float.tflite"), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], value)
    interpreter.invoke()
    answer: bytes = interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).tobytes()
    return answer


def test_frames_slots_are_used_in_place_and_known_again(engine: InPlaceEngine, example_data: Path) -> None:
    slots = [pool_with(drawn(seed)) for seed in (1, 2)]
    for turn in range(3):
        for seed, (x, y, _) in enumerate(slots, start=1):
            x[...] = drawn(10 * turn + seed)
            (shape,) = engine.run([x], [area(y, (1, 5))])
            assert shape.dimensions == (1, 5)
            assert y.tobytes() == wanted(example_data, drawn(10 * turn + seed))
    assert len(engine._bound) == 2
    assert not any(b.copied_in or b.copied_out for b in engine._bound.values())


@pytest.mark.parametrize("offset", [4, 16, 60])
def test_memory_that_is_not_aligned_is_copied(engine: InPlaceEngine, example_data: Path, offset: int) -> None:
    x, _, pool = pool_with(drawn(3), offset)
    y = pool.array[pool.size_bytes - 21 : pool.size_bytes - 1]
    engine.run([x], [area(y, (1, 5))])
    (bound,) = engine._bound.values()
    assert (bound.copied_in, bound.copied_out) == ([0], [0])
    assert y.tobytes() == wanted(example_data, drawn(3))


def test_input_at_the_end_of_a_mapping_is_copied(engine: InPlaceEngine, example_data: Path) -> None:
    assert INPUT_BYTES % mmap.PAGESIZE == 0, "its end is its mapping's end"
    x, _, _ = pool_with(drawn(4), behind_bytes=0)
    y = np.zeros(20, dtype=np.uint8)
    engine.run([x], [area(y, (1, 5))])
    (bound,) = engine._bound.values()
    assert bound.copied_in == [0]
    assert y.tobytes() == wanted(example_data, drawn(4))


def test_output_that_is_too_small_is_told(engine: InPlaceEngine) -> None:
    x, y, _ = pool_with(drawn(5))
    y[:] = 7
    (shape,) = engine.run([x], [area(y[:16], (1, 5))])
    assert not shape.is_sufficient
    assert shape.dimensions == (1, 5)
    assert set(y.tolist()) == {7}


def test_memory_that_has_gone_is_not_remembered(engine: InPlaceEngine, example_data: Path) -> None:
    for seed in range(BOUND_MAX + 10):
        x, y, pool = pool_with(drawn(seed % 3))
        engine.run([x], [area(y, (1, 5))])
        if seed < 3:
            assert y.tobytes() == wanted(example_data, drawn(seed))
        del x, y
        pool.close()
    assert len(engine._bound) <= BOUND_MAX


def test_engine_frees_what_litert_made(
    engine: InPlaceEngine, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[list[str]] = []
    model = load_tflite(example_data / "shapes_float.tflite").model
    destroy = in_place._destroy

    def watched(functions: Any, handles: list[tuple[str, Any]], *rest: Any) -> None:
        ended.append([name for name, _ in handles])
        destroy(functions, handles, *rest)

    monkeypatch.setattr(in_place, "_destroy", watched)
    one = made_for(model)
    x, y, _ = pool_with(drawn(1))
    one.run([x], [area(y, (1, 5))])
    del one
    gc.collect()
    assert [sorted(set(names)) for names in ended] == [
        [
            "LiteRtDestroyCompiledModel",
            "LiteRtDestroyModel",
            "LiteRtDestroyOptions",
            "LiteRtDestroyTensorBuffer",
        ]
    ]


def lowered_chain(kind: OperationType, arguments: Sequence[Any], *, first: Sequence[int] = (1, 4)) -> Lowered:
    graph = GraphBuilder()
    x = graph.input(FLOAT, first)
    value = graph.result(kind, [x, *(graph.constant(a) for a in arguments)], x, (1, 4))
    return lower(graph.build([graph.result(OperationType.RELU, [value], x, (1, 4))]))


def test_client_s_memory_is_read_only_by_arithmetic() -> None:
    assert lowered_chain(OperationType.RELU6, ()).is_input_in_place == (True,)
    # The largest number is looked for, and then relied upon.
    assert lowered_chain(OperationType.SOFTMAX, (1.0,)).is_input_in_place == (False,)
    reshaped = lowered_chain(OperationType.RESHAPE, (np.array([1, 4], np.int32),), first=(2, 2))
    assert reshaped.is_input_in_place == (True,)


def test_indexes_are_copied_before_they_are_looked_at() -> None:
    graph = GraphBuilder()
    table, rows = graph.input(FLOAT, (3, 2)), graph.input(OperandType.TENSOR_INT32, (2,))
    picked = graph.result(OperationType.GATHER, [table, graph.constant(0), rows], table, (2, 2))
    lowered = lower(graph.build([picked]))
    assert lowered.is_input_in_place == (False, False)
    assert lowered.is_output_in_place == (True,)


def test_unknown_version_runs_in_the_interpreter(example_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0")
    made = made_for(load_tflite(example_data / "shapes_float.tflite").model)
    assert isinstance(made, Engine)
    x, y, _ = pool_with(drawn(6))
    made.run([x], [area(y, (1, 5))])
    assert y.tobytes() == wanted(example_data, drawn(6))
