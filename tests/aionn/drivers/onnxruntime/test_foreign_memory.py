"""Providers with memory of their own, on the CPU's kernels: as with CUDA, ONNX Runtime copies an input when it is bound."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from aionn.drivers.kit.arguments import OutputArea, engine_memory
from aionn.drivers.kit.onnx.lowering import lower
from aionn.drivers.onnxruntime import driver, providers
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.gaps import foreign_gap_of
from aionn.drivers.onnxruntime.providers import Provider
from aionn.hal import Operand, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

import onnxruntime as ort

from aionn.drivers.onnxruntime.engine import Loading, compile_session
from tests.aionn.drivers.engines.indexes import check_index_out_of_range


class CopyingBinding:
    """A binding that copies an input when it is bound, and not when the session runs."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._copies: dict[str, Any] = {}

    def bind_input(
        self, name: str, kind: str, number: int, dtype: Any, shape: list[int], address: int
    ) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        copy = np.frombuffer(ctypes.string_at(address, size), np.uint8).copy()
        self._copies[name] = copy
        self._binding.bind_input(name, kind, number, dtype, shape, copy.ctypes.data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)


class CopyingSession:
    """A session whose bindings copy."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def io_binding(self) -> CopyingBinding:
        return CopyingBinding(self._session.io_binding())

    def run_with_iobinding(self, binding: CopyingBinding, options: Any) -> None:
        self._session.run_with_iobinding(binding._binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Foreign(Provider, frozen=True):
    """A provider that is not the CPU, on the CPU's kernels."""

    is_cpu = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The device's provider has memory of its own; the sessions that are made."""
    make, sessions = ort.InferenceSession, []

    def copying(file: bytes, options: Any, **ignored: Any) -> CopyingSession:
        session = CopyingSession(make(file, providers=["CPUExecutionProvider"]))
        sessions.append(session)
        return session

    monkeypatch.setattr(ort, "InferenceSession", copying)
    monkeypatch.setattr(driver, "provider_named", lambda name: Foreign("CPUExecutionProvider"))
    return sessions


def test_memory_that_was_bound_before_is_read_at_each_run(made: list[Any]) -> None:
    """A burst's slots come again and again."""
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (16, 64))
    lowered = lower(graph.build([graph.result(OperationType.NEG, [x], x, (16, 64))]))
    loading = Loading(Foreign("CPUExecutionProvider"), 1)
    (slot,) = compile_session(lowered, loading).make_slots(lowered, 1)
    given = engine_memory("float32", (16, 64))
    area = OutputArea(
        Operand(OperandType.TENSOR_FLOAT32, (16, 64)), (16, 64), engine_memory("uint8", (4 * 16 * 64,))
    )
    for number in (1.0, 2.0, 3.0):
        given[...] = number
        slot.run([given], [area])
        assert set(area.buffer.view(np.float32).tolist()) == {-number}
    assert len(slot._bound) == 1


@pytest.mark.parametrize("index", [3, -1])
async def test_index_out_of_range_is_found_by_the_model(made: list[Any], small: Any, index: int) -> None:
    async with OrtDevice() as device:
        await check_index_out_of_range(device, small, index, match="an index is out of range")


async def test_each_model_is_asked_about_and_run_once_before_its_first_execution(
    made: list[Any], small: Any
) -> None:
    async with OrtDevice() as device:
        for _ in range(2):
            made.clear()
            prepared = await device.prepare_model(small.sum_model())
            assert len(made) == 2
            await prepared.aclose()


def test_floats_are_exact_unless_the_model_is_relaxed_or_the_options_say_otherwise() -> None:
    cuda = Provider(providers.CUDA)
    assert cuda.options_for(is_relaxed=False) == {"use_tf32": "0"}
    assert cuda.options_for(is_relaxed=True) == {}
    assert Provider(providers.CUDA, {"use_tf32": "1"}).options_for(is_relaxed=False) == {"use_tf32": "1"}
    assert Provider("X", {"a": "b"}).options_for(is_relaxed=False) == {"a": "b"}


def test_computed_indexes_are_left_to_other_devices() -> None:
    kinds = (ValueType(DataType.FLOAT, (3,)), ValueType(DataType.INT64, (2,)))
    record = Record(21, {}, kinds, kinds[:1])
    assert foreign_gap_of("GatherElements", record, lambda place: None) is not None
    assert foreign_gap_of("GatherElements", record, lambda place: np.zeros(2, np.int64)) is None


def test_normalisation_of_one_element_for_each_channel_is_left_to_other_devices() -> None:
    """CUDA's kernel of several images gives NaN."""
    vector = ValueType(DataType.FLOAT, (4,))
    for shape, is_left in (
        ((8, 4, 1, 1), True),
        ((8, 4, -1, 1), True),
        ((1, 4, 1, 1), False),
        ((8, 4, 1, 2), False),
    ):
        record = Record(21, {}, (ValueType(DataType.FLOAT, shape), vector, vector), ())
        reason = foreign_gap_of("InstanceNormalization", record, lambda place: None)
        assert (reason is not None) == is_left, shape


@pytest.mark.parametrize("is_nchw", [False, True])
@pytest.mark.parametrize("kind", [OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16])
def test_normalisation_of_one_element_for_each_channel_needs_no_variance(
    kind: OperandType, is_nchw: bool
) -> None:
    shape = (8, 4, 1, 1) if is_nchw else (8, 1, 1, 4)
    dtype = "float32" if kind == OperandType.TENSOR_FLOAT32 else "float16"
    scalar = OperandType.FLOAT32 if dtype == "float32" else OperandType.FLOAT16
    graph = GraphBuilder()
    x = graph.input(kind, shape)
    numbers = [graph.constant(number, scalar) for number in (1.5, -4.75, 0.001)]
    model = graph.build([graph.result(OperationType.INSTANCE_NORMALIZATION, [x, *numbers, is_nchw], x)])
    lowered = lower(model, OrtDevice().dialect)
    assert not any("InstanceNormalization" in kernel for kernel in lowered.kernels)
    (slot,) = compile_session(lowered, Loading(Provider("CPUExecutionProvider"), 1)).make_slots(lowered, 1)
    given = engine_memory(dtype, shape)
    given[...] = np.arange(32, dtype=dtype).reshape(shape)
    area = OutputArea(Operand(kind, shape), shape, engine_memory("uint8", (given.nbytes,)))
    slot.run([given], [area])
    assert set(area.buffer.view(dtype).tolist()) == {-4.75}


def test_signed_numbers_need_no_bitwise_kernel(made: list[Any]) -> None:
    """CUDA has none."""
    kind, shape = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (16, 16)
    graph = GraphBuilder()
    x = graph.input(kind, shape, scale=0.5, zero_point=3)
    y = graph.variable(kind, shape, scale=0.5, zero_point=3)
    graph.operation(OperationType.RELU, [x], [y])
    lowered = lower(graph.build([y]), OrtDevice().dialect)
    assert not any("BitwiseXor" in kernel for kernel in lowered.kernels)
    (slot,) = compile_session(lowered, Loading(Foreign("CPUExecutionProvider"), 1)).make_slots(lowered, 1)
    given = engine_memory("int8", shape)
    given[...] = np.arange(-128, 128, dtype=np.int8).reshape(shape)
    area = OutputArea(Operand(kind, shape, scale=0.5, zero_point=3), shape, engine_memory("uint8", (256,)))
    slot.run([given], [area])
    assert area.buffer.view(np.int8).tolist() == np.maximum(given, 3).reshape(-1).tolist()
