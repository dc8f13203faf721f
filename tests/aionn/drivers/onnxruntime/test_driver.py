"""What `ort-cpu` takes and refuses, how its executions end, and what its cache keeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.drivers.kit.caching import CacheContents, KeptFile
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.providers import provider_named
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import Error, InvalidArgument, MissedDeadline
from aionn.hal import CacheFiles, FusedActivation, Memory, Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import encode_model, load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import (
    DataType,
    FunctionProto,
    GraphProto,
    ModelProto,
    OpsetImport,
    TensorProto,
    ValueInfo,
    read_model,
)
from fences import now_ns

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.kit.onnx import lowering
from aionn.drivers.onnxruntime import engine
from tests.aionn.drivers.engines.indexes import check_index_out_of_range

WAIT_S = 20.0


def chain_of(*steps: tuple[OperationType, Sequence[Any]], shape: Sequence[int] = (1, 4)) -> Model:
    """Float32 operations one after the other; a step's further arguments are constants."""
    graph = GraphBuilder()
    value = first = graph.input(OperandType.TENSOR_FLOAT32, shape)
    for kind, arguments in steps:
        value = graph.result(kind, [value, *(graph.constant(a) for a in arguments)], first, shape)
    return graph.build([value])


async def test_support_is_answered_per_operation() -> None:
    model = chain_of((OperationType.RELU, ()), (OperationType.ELU, (-1.0,)), (OperationType.RELU6, ()))
    async with OrtDevice() as device:
        assert await device.supported_operations(model) == (True, False, True)
        with pytest.raises(InvalidArgument, match="ort-cpu does not support ELU"):
            await device.prepare_model(model)


async def test_kernels_that_were_found_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = chain_of((OperationType.HARD_SWISH, ())), []
    make = engine.Loading.make

    def counted(self: engine.Loading, file: bytes, *weights: Any) -> Any:
        made.append(file)
        return make(self, file, *weights)

    monkeypatch.setattr(engine.Loading, "make", counted)
    async with OrtDevice() as device:
        await device.supported_operations(model)
        made.clear()
        assert await device.supported_operations(model) == (True,)
        assert made == []
        prepared = await device.prepare_model(model)
        assert len(made) == 1
        assert device._found is None
        await prepared.aclose()


async def test_model_that_onnx_runtime_has_no_kernel_for_is_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def relu(g: Any, op: Any) -> None:
        g.set(g.output(op), g.emit("Relu", [g.cast(g.input(op, 0).forms[(0, 1)], "bool")]))

    monkeypatch.setitem(lowering.RULES, OperationType.RELU, relu)  # type: ignore[arg-type]
    async with OrtDevice() as device:
        assert await device.supported_operations(chain_of((OperationType.RELU, ()))) == (False,)


async def test_shape_that_the_model_does_not_state_is_inferred(small: Any) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    none = graph.constant(int(FusedActivation.NONE))
    model = graph.build([graph.result(OperationType.ADD, [x, x, none], x, (0, 0))])
    async with OrtDevice() as device:
        prepared = await device.prepare_model(model)
        request = small.request([np.ones((2, 3), np.float32)], [(24, (0, 0))])
        result = await prepared.execute_synchronously(request)
        assert [shape.dimensions for shape in result.output_shapes] == [(2, 3)]
        assert set(small.output(request).tolist()) == {2.0}
        await prepared.aclose()


@pytest.mark.parametrize("index", [3, -1])
async def test_index_out_of_range_is_an_error_and_the_model_goes_on(small: Any, index: int) -> None:
    async with OrtDevice() as device:
        await check_index_out_of_range(device, small, index, match="ONNX Runtime")


@pytest.mark.parametrize("signed", [False, True])
async def test_halves_are_rounded_away_from_zero(small: Any, signed: bool) -> None:
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED if signed else OperandType.TENSOR_QUANT8_ASYMM
    zero_point = -3 if signed else 125
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (160,))
    result = graph.variable(kind, (160,), scale=0.1, zero_point=zero_point)
    graph.operation(OperationType.QUANTIZE, [x], [result])
    model = graph.build([result])
    halves = np.arange(-80, 80, dtype=np.float32) + np.float32(0.5)
    values = (halves.astype(np.float64) * np.float32(0.1)).astype(np.float32)
    # Those whose quotient is a half indeed.
    exact = values / np.float32(0.1) == halves
    assert exact.sum() > 100
    async with OrtDevice() as device:
        prepared = await device.prepare_model(model)
        request = small.request([values], [(160, (160,))])
        await prepared.execute_synchronously(request)
        pool = request.pools[-1]
        assert isinstance(pool, Memory)
        got = np.frombuffer(pool.array.tobytes(), np.int8 if signed else np.uint8)[:160].astype(int)
        away = np.trunc(halves + np.copysign(0.5, halves)).astype(int) + zero_point
        assert got[exact].tolist() == away[exact].tolist()
        await prepared.aclose()


async def test_deadline_ends_the_loading_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    make, begun = engine.Loading.make, threading.Event()

    def slow(self: engine.Loading, file: bytes, *weights: Any) -> Any:
        # ONNX Runtime looks at the flag while it loads; here the deadline has passed by then.
        begun.set()
        while now_ns() < deadline_ns + 50_000_000:
            threading.Event().wait(0.005)
        return make(self, file, *weights)

    model = chain_of((OperationType.RELU, ()))
    async with OrtDevice() as device:
        await device.supported_operations(model)
        monkeypatch.setattr(engine.Loading, "make", slow)
        for delay_ms in (200, 2000, 20_000):  # On a busy machine a deadline may pass before the engine loads.
            deadline_ns = now_ns() + delay_ms * 1_000_000
            with pytest.raises(MissedDeadline) as missed:
                await device.prepare_model(model, deadline_ns=deadline_ns)
            if begun.is_set():
                break
        assert "while preparing" in str(missed.value) and begun.is_set()


async def test_engine_gets_nothing_of_a_file_but_what_was_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names of other files, of functions and of the file's maker stay behind, also those of unused values."""
    (tmp_path / "c.bin").write_bytes(np.ones(6, "<f4").tobytes())
    entries = {"location": "c.bin", "offset": "0", "length": "24"}
    constant = TensorProto("c", DataType.FLOAT, (2, 3), external=entries)
    main = OpsetImport("", 21)
    inner = (node("Neg", ["a"], ["b"]),)
    function = FunctionProto("Planted", "my.ops", "", ("a",), ("b",), (), (), inner, (main,))
    graph = GraphProto(
        (node("Planted", ["x"], ["h"], domain="my.ops"), node("Add", ["h", "c"], ["y"])),
        (ValueInfo("x", DataType.FLOAT, (2, 3)),),
        (ValueInfo("y"),),
        (constant,),
        name="planted",
    )
    opsets = (main, OpsetImport("my.ops", 1))
    path = tmp_path / "model.onnx"
    path.write_bytes(encode_model(ModelProto(10, opsets, graph, (function,), producer_name="planted")))
    given = []
    make = engine.Loading.make

    def seen(self: engine.Loading, file: bytes, *weights: Any) -> Any:
        given.append(file)
        return make(self, file, *weights)

    monkeypatch.setattr(engine.Loading, "make", seen)
    async with OrtDevice() as device:
        prepared = await device.prepare_model(load_onnx(path).model)
        await prepared.aclose()
    assert given
    for file in given:
        written = read_model(file)
        assert {one.domain for one in written.opsets} == {""} and not written.functions
        assert all(one.external is None for one in written.graph.initializers)
        assert not any(word in file for word in (b"planted", b"Planted", b"c.bin", b"my.ops"))


async def test_cache_keeps_the_optimised_model(small: Any, tmp_path: Path) -> None:
    model = small.sum_model()
    ones = np.ones((2, 3), np.float32)
    with open(tmp_path / "model", "w+b") as first, open(tmp_path / "data", "w+b") as second:
        files = CacheFiles((first.fileno(),), (second.fileno(),), bytes(32))
        async with OrtDevice() as device:
            saved = await device.prepare_model(model, cache=files)
            await saved.aclose()
            restored = await device.prepare_model_from_cache(files)
            request = small.request([ones, ones], [(24, (2, 3))])
            await restored.execute_synchronously(request)
            assert set(small.output(request).tolist()) == {2.0}
            await restored.aclose()


@pytest.mark.parametrize("has_path", [True, False])
async def test_optimised_model_is_read_from_the_memory_in_which_it_was_verified(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_path: bool
) -> None:
    given: list[bytes | str] = []
    make, ones = engine.Loading.make, np.ones((2, 3), np.float32)

    def noting(loading: engine.Loading, file: bytes | str) -> Any:
        given.append(file)
        return make(loading, file)

    with open(tmp_path / "model", "w+b") as first, open(tmp_path / "data", "w+b") as second:
        files = CacheFiles((first.fileno(),), (second.fileno(),), bytes(32))
        async with OrtDevice() as device:
            await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
            monkeypatch.setattr(engine.Loading, "make", noting)
            if not has_path:
                monkeypatch.setattr(KeptFile, "path", None)
            restored = await device.prepare_model_from_cache(files)
            # Nothing that happens to the files matters any more.
            os.ftruncate(second.fileno(), 0)
            request = small.request([ones, ones], [(24, (2, 3))])
            await restored.execute_synchronously(request)
            assert set(small.output(request).tolist()) == {2.0}
            await restored.aclose()
    (source,) = given
    if has_path:
        assert isinstance(source, str) and source.startswith("/proc/self/fd/")
    else:
        assert isinstance(source, bytes)


@pytest.mark.parametrize(
    "form, driver",
    [
        (engine.Form.PLAIN, "ort-cpu"),
        (engine.Form.OPTIMIZABLE, "ort-cpu"),
        (engine.Form.OPTIMIZED, "ort-tensorrt"),
    ],
)
def test_model_that_could_name_other_files_is_given_as_bytes(form: engine.Form, driver: str) -> None:
    given: list[bytes | str] = []

    class Noting(engine.Loading):
        def make(self, file: bytes | str) -> Any:
            given.append(file)

    class WithPath(KeptFile):
        path = "/proc/self/fd/0"  # type: ignore[assignment]

    file = WithPath(CacheContents([], [b"a model"]))
    engine.restore_session(file, form, Noting(provider_named(driver), 1))
    assert given == [b"a model"]


async def test_model_that_the_optimiser_spoils_runs_without_it(small: Any) -> None:
    # ONNX Runtime moves the first operation's Transpose behind the Resize, for which it has no kernel then.
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 8, 3, 5))
    wide = graph.result(
        OperationType.DEPTH_TO_SPACE, [x, graph.constant(2), graph.constant(True)], x, (1, 2, 6, 10)
    )
    size = [graph.constant(4), graph.constant(7), graph.constant(False)]
    model = graph.build([graph.result(OperationType.RESIZE_BILINEAR, [wide, *size], x, (1, 7, 4, 10))])
    values = np.random.default_rng(1).random((1, 8, 3, 5), dtype=np.float32)
    found = []
    for make in (OrtDevice, ReferenceDevice):
        async with make() as device:
            prepared = await device.prepare_model(model)
            if make is OrtDevice:
                assert prepared.compiled.form == engine.Form.PLAIN
            for again in (
                prepared,
                device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None),
            ):
                request = small.request([values], [(4 * 280, (1, 7, 4, 10))])
                await again.execute_synchronously(request)
                found.append(small.output(request))
                await again.aclose()
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, atol=1e-6)


@pytest.mark.parametrize("has_transpose", [False, True])
async def test_model_is_tried_out_where_the_optimiser_could_move_a_transpose(
    monkeypatch: pytest.MonkeyPatch, has_transpose: bool
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(engine.Session, "runs", lambda session, lowered: not tried.append(session))
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    y = graph.result(OperationType.TANH, [x], x, (2, 3))
    if has_transpose:
        order = graph.constant(np.array([1, 0], np.int32))
        y = graph.result(OperationType.TRANSPOSE, [y, order], x, (3, 2))
    async with OrtDevice() as device:
        prepared = await device.prepare_model(graph.build([y]))
        assert len(tried) == has_transpose
        await prepared.aclose()


def _restore(device: OrtDevice, contents: CacheContents) -> Any:
    return device.restore(contents, priority=Priority.MEDIUM, deadline_ns=None)


async def test_damaged_cache_fails_and_nothing_else(small: Any) -> None:
    async with OrtDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        whole = prepared.cached()  # type: ignore[attr-defined]
        await prepared.aclose()
        for contents in (
            CacheContents([b"\xc1"], whole.data),
            CacheContents(whole.model, [b"damaged"]),
            CacheContents(whole.model, [bytes(whole.data[0])[:-40]]),
            CacheContents(whole.model, []),
        ):
            with pytest.raises(Error):
                _restore(device, contents)
        _restore(device, whole).release()


@pytest.mark.thorough
def test_use_is_not_reported_to_the_makers_of_the_engine(tmp_path: Path) -> None:
    code = (
        "import anyio, aionn\n"
        "from aionn.testing.models import identity\n"
        "async def main():\n"
        "    async with aionn.open(drivers=['ort-cpu'], isolation='in_process') as runtime:\n"
        "        await runtime.compile(identity())\n"
        "anyio.run(main)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert not list(tmp_path.rglob("*onnxruntime*"))
