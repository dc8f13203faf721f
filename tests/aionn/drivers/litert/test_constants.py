"""What depends on no input: outputs that are known beforehand, constants that are computed, and inputs that nothing reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.drivers.kit import caching
from aionn.drivers.kit.caching import CacheContents
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import CacheFiles, Memory, Model, OperandType, OperationType, Request
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder, Value
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from ai_edge_litert import interpreter as litert

from aionn.drivers.kit.engines import known
from aionn.drivers.litert.driver import LitertDevice
from aionn.drivers.litert.flatbuffer_writer import FileWriter
from aionn.drivers.litert.lowering import lower

Array = npt.NDArray[Any]
T, O = OperandType, OperationType  # noqa: E741 - as short as what they stand beside

THREE = np.array([1, 2.5, -3], np.float32)
INPUT = np.array([[0.5, -2, 4]], np.float32)


def numbers(*values: int) -> Array:
    return np.array(values, np.int32)


CONSTANTS_ALONE: dict[str, tuple[OperationType, Sequence[Any], OperandType, tuple[int, ...]]] = {
    "REDUCE_PROD": (O.REDUCE_PROD, (THREE, numbers(0), False), T.TENSOR_FLOAT32, (1,)),
    "REDUCE_PROD of unknown shape": (O.REDUCE_PROD, (THREE, numbers(0), True), T.TENSOR_FLOAT32, ()),
    "TILE": (O.TILE, (THREE, numbers(2)), T.TENSOR_FLOAT32, (6,)),
    "TILE of unknown shape": (O.TILE, (THREE, numbers(2)), T.TENSOR_FLOAT32, (0,)),
    "GATHER": (O.GATHER, (THREE, 0, numbers(2, 0)), T.TENSOR_FLOAT32, (2,)),
    "CAST": (O.CAST, (THREE,), T.TENSOR_INT32, (3,)),
    "CAST to float16": (O.CAST, (THREE,), T.TENSOR_FLOAT16, (3,)),
    "EXP": (O.EXP, (THREE,), T.TENSOR_FLOAT32, (3,)),
    "FILL": (O.FILL, (numbers(2, 2), 7), T.TENSOR_INT32, (2, 2)),
    "LESS": (O.LESS, (THREE, THREE[::-1].copy()), T.TENSOR_BOOL8, (3,)),
    "RESHAPE": (O.RESHAPE, (numbers(1, 2, 3), numbers(3, 1)), T.TENSOR_INT32, (3, 1)),
}  # fmt: skip


def model_of(form: str, *names: str) -> Model:
    """A model with these outputs of constants alone: nothing else, before or after a computed output."""
    g = GraphBuilder()
    x = g.input(T.TENSOR_FLOAT32, (1, 3))
    fixed = []
    for name in names:
        kind, arguments, type_, shape = CONSTANTS_ALONE[name]
        result = g.variable(type_, shape)
        g.operation(kind, [g.constant(a) for a in arguments], [result])
        fixed.append(result)
    computed = [] if form == "alone" else [g.result(O.RELU, [x], x)]
    return g.build([*computed, *fixed] if form == "after" else [*fixed, *computed])


async def run(device: LitertDevice, model: Model, inputs: Sequence[Array], small: Any) -> None:
    """Two executions give what the reference gives, to the byte."""
    assert all(await device.supported_operations(model))
    prepared = await device.prepare_model(model)
    wanted = Interpreter(model).run(inputs, RunControl())
    await same_twice(prepared, inputs, wanted, small)
    await prepared.aclose()


async def same_twice(prepared: Any, inputs: Sequence[Array], wanted: Sequence[Array], small: Any) -> None:
    for _ in range(2):
        request = small.request(inputs, [(y.nbytes, y.shape) for y in wanted])
        result = await prepared.execute_synchronously(request)
        assert [s.dimensions for s in result.output_shapes] == [y.shape for y in wanted]
        assert [output_bytes(request, i) for i in range(len(wanted))] == [y.tobytes() for y in wanted]


def output_bytes(request: Request, index: int) -> bytes:
    location = request.outputs[index].location
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    return pool.array[location.offset : location.offset + location.length].tobytes()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONSTANTS_ALONE)
@pytest.mark.parametrize("form", ["alone", "before", "after"])
async def test_output_of_constants_alone_is_given_in_every_execution(
    small: Any, name: str, form: str
) -> None:
    async with LitertDevice() as device:
        await run(device, model_of(form, name), [INPUT], small)


async def test_small_buffer_for_an_output_of_constants_is_reported(small: Any) -> None:
    model = model_of("before", "TILE of unknown shape")
    async with LitertDevice() as device:
        prepared = await device.prepare_model(model)
        request = small.request([INPUT], [(8, ()), (12, (1, 3))])
        result = await prepared.execute_synchronously(request)
        assert not result.output_sufficient_size
        assert [(s.dimensions, s.is_sufficient) for s in result.output_shapes] == [
            ((6,), False),
            ((1, 3), True),
        ]
        await prepared.aclose()


async def test_chain_over_constants_alone_is_computed_beforehand(small: Any) -> None:
    g = GraphBuilder()
    x = g.input(T.TENSOR_FLOAT32, (1, 3))
    stored = g.constant(
        np.array([[1, -2, 3]], np.int8), type=T.TENSOR_QUANT8_ASYMM_SIGNED, scale=0.5, zero_point=1
    )
    weights = g.result(O.DEQUANTIZE, [stored], x)
    bias = g.result(O.NEG, [g.constant(np.array([2], np.float32))], x, (1,))
    y = g.result(O.FULLY_CONNECTED, [x, weights, bias, 0], x, (1, 1))
    model = g.build([y])
    assert len(known.Known(model, infers_shapes=False).operations) == 2
    async with LitertDevice() as device:
        await run(device, model, [INPUT], small)


def test_large_result_is_left_to_the_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("before", "TILE")
    monkeypatch.setattr(known, "COMPUTED_BYTES_MAX", 23)
    lowered = lower(model)
    assert lowered.fixed == (None, None)
    assert not lowered.is_static


async def test_output_of_constants_that_is_too_large_to_keep_is_computed(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "COMPUTED_BYTES_MAX", 0)
    async with LitertDevice() as device:
        for name in ("REDUCE_PROD", "TILE", "GATHER"):
            await run(device, model_of("after", name), [INPUT], small)


async def test_what_a_kernel_refuses_fails_in_the_execution(small: Any) -> None:
    g = GraphBuilder()
    x = g.input(T.TENSOR_FLOAT32, (1, 3))
    taken = g.result(O.GATHER, [g.constant(THREE), g.constant(0), g.constant(numbers(3))], x, (1,))
    model = g.build([g.result(O.RELU, [x], x), taken])
    async with LitertDevice() as device:
        with pytest.raises((GeneralFailure, InvalidArgument)):
            prepared = await device.prepare_model(model)
            await prepared.execute_synchronously(small.request([INPUT], [(12, (1, 3)), (4, (1,))]))


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_input_that_nothing_reads_costs_nothing(small: Any, place: int) -> None:
    def build(g: GraphBuilder) -> Value:
        values = [g.input(*kind) for kind in kinds]
        x, y = values[order.index(0)], values[order.index(1)]
        return g.result(O.ADD, [x, y, 0], x)

    order = [0, 1]
    order.insert(place, 2)
    kinds = [((T.TENSOR_FLOAT32, (1, 3)), (T.TENSOR_FLOAT32, (3,)), (T.TENSOR_INT32, (2,)))[i] for i in order]
    g = GraphBuilder()
    model = g.build([build(g)])
    inputs = [(INPUT, THREE, numbers(4, 5))[i] for i in order]
    lowered = lower(model)
    assert lowered.is_read == tuple(i != 2 for i in order)
    assert len(lowered.is_input_in_place) == 2
    async with LitertDevice() as device:
        await run(device, model, inputs, small)


def file_with(outputs: Sequence[str]) -> bytes:
    """A file that gives its input, its input's shape, a constant or a RELU, each as often as it is named."""
    writer = FileWriter()
    file = writer.subgraph()
    tensors = {
        "input": file.tensor("float32", (1, 3)),
        "shape": file.tensor("int32", (2,)),
        "constant": file.tensor("float32", (3,), None, THREE),
        "relu": file.tensor("float32", (1, 3)),
    }
    file.operator("SHAPE", [tensors["input"]], [tensors["shape"]], "ShapeOptions", {"outType": 2})
    file.operator("RELU", [tensors["input"]], [tensors["relu"]], None, {})
    file.inputs = [tensors["input"]]
    file.outputs = [tensors[name] for name in outputs]
    return writer.finish()


@pytest.mark.parametrize(
    "outputs",
    [
        ("shape",),
        ("constant",),
        ("input",),
        ("relu", "shape"),
        ("constant", "relu"),
        ("input", "relu"),
        ("relu", "relu"),
        ("constant", "constant"),
        ("input", "input"),
    ],
    ids="-".join,
)
async def test_imported_file_gives_what_litert_gives(
    tmp_path: Path, small: Any, outputs: tuple[str, ...]
) -> None:
    path = tmp_path / "outputs.tflite"
    path.write_bytes(file_with(outputs))
    peer = litert.Interpreter(model_path=str(path), num_threads=1)
    peer.allocate_tensors()
    peer.set_tensor(peer.get_input_details()[0]["index"], INPUT)
    peer.invoke()
    wanted = [peer.get_tensor(details["index"]) for details in peer.get_output_details()]
    model = load_tflite(path).model
    async with LitertDevice() as device:
        assert all(await device.supported_operations(model))
        prepared = await device.prepare_model(model)
        await same_twice(prepared, [INPUT], wanted, small)
        await prepared.aclose()


@pytest.mark.parametrize(
    ("form", "names"), [("alone", ("TILE", "CAST to float16")), ("before", ("RESHAPE", "EXP"))]
)
async def test_cache_keeps_outputs_of_constants(
    tmp_path: Path, small: Any, form: str, names: tuple[str, ...]
) -> None:
    files = [(tmp_path / name).open("w+b") for name in ("model", "data")]
    cache = CacheFiles([files[0].fileno()], [files[1].fileno()], bytes(32))
    model = model_of(form, *names)
    wanted = Interpreter(model).run([INPUT], RunControl())
    async with LitertDevice() as device:
        first = await device.prepare_model(model, cache=cache)
        second = await device.prepare_model_from_cache(cache)
        for prepared in (first, second):
            await same_twice(prepared, [INPUT], wanted, small)
        contents = first.cached()
        wrong = contents.model[0].replace(wanted[0].tobytes(), wanted[0].tobytes()[:-1] + b"")
        assert wrong != contents.model[0]
        caching.save(cache, CacheContents([wrong], contents.data), driver=device._driver)
        with pytest.raises(GeneralFailure, match="compilation cache"):
            await device.prepare_model_from_cache(cache)
        for prepared in (first, second):
            await prepared.aclose()
    for file in files:
        file.close()
