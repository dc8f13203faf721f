"""Comparisons of 8-bit values: every pair of stored numbers gives what the reference gives, and what LiteRT gives with a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.hal import Memory, OperandType, OperationType
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder, Value
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from ai_edge_litert import interpreter as litert

from aionn.drivers.litert.engine import Engine, check
from aionn.drivers.litert.flatbuffer_writer import FileWriter, Quantization
from aionn.drivers.litert.lowering import lower

Array = npt.NDArray[Any]

KINDS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
TYPES = {"int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED, "uint8": OperandType.TENSOR_QUANT8_ASYMM}
SCALES = (0.1, 0.5, 1 / 255, 0.3, 2.5, 1e-4)
ZERO_POINTS = (-128, -7, 127)


def stored(dtype: str) -> Array:
    """All 256 numbers."""
    info = np.iinfo(dtype)
    return np.arange(info.min, info.max + 1).astype(dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("zero_point", ZERO_POINTS)
def test_all_values_compare_with_a_constant_as_in_the_reference(
    dtype: str, scale: float, zero_point: int
) -> None:
    offset = 128 if dtype == "uint8" else 0
    numbers, kind = stored(dtype), TYPES[dtype]
    g = GraphBuilder()
    x = g.input(kind, (256, 1), scale=scale, zero_point=zero_point + offset)
    constants = [
        g.constant(numbers.reshape(1, 256), type=kind, scale=other, zero_point=point + offset)
        for other, point in ((scale, zero_point), (scale, 5), (scale * 3, zero_point))
    ]
    outputs: list[Value] = []
    for constant in constants:
        for name in KINDS:
            for pair in ((x, constant), (constant, x)):
                truth = g.variable(OperandType.TENSOR_BOOL8, (256, 256))
                outputs.append(g.result(OperationType[name], pair, truth))
    model = g.build(outputs)
    inputs = [numbers.reshape(256, 1)]
    lowered = lower(model)
    check(lowered)
    wanted = Interpreter(model).run(inputs, RunControl())
    engine = Engine(lowered, 1)  # Its results are views of its memory.
    got = engine.compute(inputs)
    assert [int((a != b).sum()) for a, b in zip(got, wanted, strict=True)] == [0] * len(outputs)
    assert all(0 < b.sum() < b.size for b in wanted[:12])


@pytest.mark.parametrize("scale", [0.1, 0.5, 1 / 255, 0.3])
@pytest.mark.parametrize("dtype", TYPES)
def test_imported_comparison_with_a_constant_is_litert_s(tmp_path: Any, dtype: str, scale: float) -> None:
    numbers = stored(dtype)
    offset = 128 if dtype == "uint8" else 0
    quantization = Quantization((scale,), 3 + offset)
    path = tmp_path / "compared.tflite"
    writer = FileWriter()
    file = writer.subgraph()
    x = file.tensor(dtype, (256,), quantization)
    drawn = np.random.default_rng(3).permutation(numbers)
    constant = file.tensor(dtype, (256,), quantization, np.where(drawn % 2 == 0, drawn, drawn[::-1]))
    file.inputs = [x]
    for name in KINDS:
        for pair in ((x, constant), (constant, x)):
            truth = file.tensor("bool", (256,))
            file.operator(name, pair, [truth], None, {})
            file.outputs.append(truth)
    path.write_bytes(writer.finish())
    peer = litert.Interpreter(model_path=str(path), num_threads=1)
    peer.allocate_tensors()
    model = load_tflite(path).model
    engine = Engine(lower(model), 1)
    for value in (drawn, drawn[::-1].copy()):
        peer.set_tensor(peer.get_input_details()[0]["index"], value)
        peer.invoke()
        got = engine.compute([value])
        for ours, details in zip(got, peer.get_output_details(), strict=True):
            theirs = peer.get_tensor(details["index"])
            assert np.array_equal(ours, theirs)
            assert 0 < theirs.sum() < 256
    for pool in model.pools:
        assert isinstance(pool, Memory)
        pool.close()
