"""ONNX Runtime without Python: the bytes of Python's executions, brief models alone, calls that outlive their model, failures."""

from __future__ import annotations

import ctypes
import gc
import logging
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import numpy as np
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.drivers.kit.arguments import engine_memory
from aionn.drivers.kit.engines.bound import BOUND_MAX
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowered import Argument
from aionn.errors import InvalidArgument
from aionn.hal import Memory, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import load_onnx
from aionn.models.tflite import load_tflite
from benchmarks.engines.networks import small_cnn

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed", exc_type=ImportError)

from aionn.drivers.onnxruntime import c_interface
from aionn.drivers.onnxruntime import engine as engine_module
from aionn.drivers.onnxruntime import native as native_module
from aionn.drivers.onnxruntime.c_interface import Interface, interface
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.engine import Loading
from aionn.drivers.onnxruntime.native import KeptCall, NativeModel, NativeSession
from aionn.drivers.onnxruntime.providers import Provider, provider_named
from tests.aionn.burst.native_device import NativeBurst
from tests.aionn.drivers.engines.native_calls import answered, drawn, output_bytes, python_bytes

FILES = ("shapes_float.tflite", "shapes_int8.tflite", "small_cnn.onnx")

_Function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 6)


@pytest.fixture(autouse=True)
def known() -> None:
    try:
        interface()
    except Unsupported as e:
        pytest.skip(str(e))


@pytest.fixture
async def device(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OrtDevice]:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    # On a machine that is busy, an execution may take any time.
    monkeypatch.setattr(native_module, "BRIEF_NS", 1 << 62)
    monkeypatch.setattr(native_module, "TRIED_NS", 1 << 62)
    async with OrtDevice() as made:
        yield made


def model_of(name: str, folder: Path, tmp_path: Path) -> Model:
    if name.endswith(".tflite"):
        return load_tflite(folder / name).model
    path = tmp_path / name
    path.write_bytes(small_cnn())
    return load_onnx(path).model


async def checked_bytes(prepared: Any, model: Model) -> None:
    """Checks that a burst gives the bytes of Python in every buffer, and that it did not use Python."""
    requests = [request_for(model, drawn(model, seed)) for seed in range(3)]
    wanted = []
    for request in requests:
        wanted.append(await python_bytes(prepared, request))
    burst = NativeBurst(prepared)
    for _ in range(4):
        for number, request in enumerate(requests):
            await burst.execute(request, number)
            assert output_bytes(request) == wanted[number]
    assert answered(burst) == 9
    # The values of this frame, by the native call.
    replaced, source = requests[0].pools[0], requests[1].pools[0]
    assert isinstance(replaced, Memory) and isinstance(source, Memory)
    replaced.array[:] = source.array
    await burst.execute(requests[0], 0)
    assert output_bytes(requests[0]) == wanted[1] and answered(burst) == 10
    await burst.controller.aclose()


async def test_native_calls_of_an_onnx_file_give_the_bytes_of_python_in_every_buffer(
    device: OrtDevice, example_data: Path, tmp_path: Path
) -> None:
    model = model_of("small_cnn.onnx", example_data, tmp_path)
    prepared = await device.prepare_model(model)
    await checked_bytes(prepared, model)
    await prepared.aclose()


@pytest.mark.parametrize("name", FILES)
async def test_a_model_from_the_cache_has_native_calls_of_the_same_bytes(
    device: OrtDevice, example_data: Path, tmp_path: Path, name: str
) -> None:
    model = model_of(name, example_data, tmp_path)
    prepared = await device.prepare_model(model)
    restored = device.restore(prepared.cached(), priority=prepared.priority, deadline_ns=None)
    await checked_bytes(restored, model)
    await restored.aclose()
    await prepared.aclose()


async def test_a_native_call_outlives_the_sets_that_python_forgets(
    device: OrtDevice, example_data: Path
) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    await burst.execute(request)
    wanted = output_bytes(request)
    values = drawn(model, 2)
    for _ in range(BOUND_MAX + 8):
        await prepared.execute_synchronously(request_for(model, values))
    gc.collect()
    while device.gate._slots.held_count:  # A job is released after its answer.
        await anyio.lowlevel.checkpoint()
    for _ in range(3):
        await burst.execute(request)
        assert output_bytes(request) == wanted
    assert answered(burst) == 3
    await burst.controller.aclose()
    await prepared.aclose()


async def test_the_session_of_a_closed_model_ends_when_its_bursts_forget_it(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[NativeSession]] = []
    released: list[str] = []
    make, release = NativeModel._made, Interface.release

    def noting(self: NativeModel, source: Any) -> NativeSession | None:
        session = make(self, source)
        assert session is not None
        made.append(weakref.ref(session))
        return session

    def counting(self: Interface, name: str, handle: int) -> None:
        released.append(name)
        release(self, name, handle)

    model = load_tflite(example_data / "shapes_int8.tflite").model
    monkeypatch.setattr(NativeModel, "_made", noting)
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    for _ in range(2):
        await burst.execute(request)
    assert answered(burst) == 1
    await prepared.aclose()
    gc.collect()
    assert [reference() is None for reference in made] == [False], "the burst has calls of it"
    with pytest.raises(aionn.Error, match="closed"):
        await burst.execute(request)
    monkeypatch.setattr(Interface, "release", counting)
    await burst.controller.aclose()
    gc.collect()
    assert [reference() is None for reference in made] == [True]
    # A binding and two values for each slot, and the session behind them.
    slots = device.info.slots
    assert sorted(released[: 3 * slots]) == ["ReleaseIoBinding"] * slots + ["ReleaseValue"] * 2 * slots
    assert released[3 * slots :] == ["ReleaseRunOptions", "ReleaseSession"]


async def test_a_call_that_runs_keeps_all_that_it_uses(device: OrtDevice, example_data: Path) -> None:
    """The thread of a burst holds the call while it runs, whatever is closed, abandoned and collected meanwhile."""
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    await prepared.execute_synchronously(request)
    wanted = output_bytes(request)
    assert prepared.native is not None
    call = prepared.native(prepared.bind(request))
    assert call is not None
    prepared.abandon()
    await prepared.aclose()
    del prepared
    gc.collect()
    for words in call.words:
        assert _Function(call.function)(*words) == 0
        assert output_bytes(request) == wanted
    assert call.permit.is_withdrawn


def test_both_sessions_leave_out_the_same_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that rounds the float weights of a layer between quantised values changes its result, with both sessions or none."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    helper, source = onnx.helper, np.random.default_rng(7)
    constants = {
        "w": source.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "b": source.standard_normal(4).astype(np.float32),
        "s": np.float32(0.1),
        "z": np.int8(0),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["xf"]),
        helper.make_node("Conv", ["xf", "w", "b"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    shapes = {"x": (1, 3, 8, 8), "y": (1, 4, 6, 6)}
    (x, y) = (
        helper.make_tensor_value_info(name, onnx.TensorProto.INT8, shape) for name, shape in shapes.items()
    )
    initializers = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "layer", [x], [y], initializers)
    file = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    ).SerializeToString()
    plain = compute_twice(file, shapes, seed=1)
    assert plain[0] == plain[1]
    monkeypatch.setattr(engine_module, "_INEXACT_OPTIMIZERS", ())
    rounded = compute_twice(file, shapes, seed=1)
    assert rounded[0] == rounded[1] != plain[0]


def compute_twice(file: bytes, shapes: dict[str, tuple[int, ...]], seed: int) -> list[bytes]:
    """The result of a model by the Python package and by the C interface."""
    loading = Loading(provider_named("ort-cpu"), 1, is_native=True)
    x = engine_memory("int8", shapes["x"])
    x[:] = np.random.default_rng(seed).integers(-128, 128, shapes["x"])
    (y,) = loading.make(file).run(None, {"x": x})
    arguments = [Argument(name, "int8", shape, True) for name, shape in shapes.items()]
    session = NativeSession(loading.source(file), arguments, 1)
    found = engine_memory("int8", shapes["y"])
    call = session.bind([x, found])
    assert _Function(interface().call_address)(*call.words) == 0
    return [y.tobytes(), found.tobytes()]


# Which executions have a call


async def test_indexes_are_copied_and_stay_in_python(device: OrtDevice) -> None:
    """An index could be changed behind the check of it: it is never read in the client's memory."""
    graph = GraphBuilder()
    values = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    indexes = graph.input(OperandType.TENSOR_INT32, (2,))
    axis = graph.constant(0)
    model = graph.build([graph.result(OperationType.GATHER, [values, axis, indexes], values, (2,))])
    prepared = await device.prepare_model(model)
    request = request_for(model, [np.arange(4, dtype=np.float32), np.array([3, 1], np.int32)])
    burst = NativeBurst(prepared)
    for _ in range(3):
        await burst.execute(request)
        assert np.frombuffer(output_bytes(request)[:8], np.float32).tolist() == [3, 1]
    assert answered(burst) == 0
    await burst.controller.aclose()
    await prepared.aclose()


@pytest.mark.parametrize("limit", ["BRIEF_NS", "TRIED_NS"])
async def test_a_model_that_is_not_brief_stays_in_python(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(native_module, limit, 0)
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    for _ in range(3):
        await burst.execute(request)
    assert answered(burst) == 0
    await burst.controller.aclose()
    await prepared.aclose()


async def test_a_large_file_is_not_kept(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FILE_BYTES_MAX", 100)
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    assert all(slot._native is None for slot in prepared._idle)
    restored = device.restore(prepared.cached(), priority=prepared.priority, deadline_ns=None)
    assert all(slot._native is None for slot in restored._idle)
    await restored.aclose()
    await prepared.aclose()


async def test_a_model_with_a_check_or_an_unknown_shape_stays_in_python(
    device: OrtDevice, example_data: Path
) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    lowered = device.lower(model)
    (output,) = lowered.outputs
    for changed in (
        msgspec.structs.replace(lowered, check=output),
        msgspec.structs.replace(lowered, outputs=(msgspec.structs.replace(output, shape=None),)),
        lowered,
    ):
        compiled = device.compile(lowered, is_relaxed=False, priority=aionn.Priority.MEDIUM, deadline_ns=None)
        (slot,) = compiled.make_slots(changed, 1)
        assert (slot._native is None) == (changed is not lowered)


def test_other_providers_have_no_native_calls() -> None:
    assert Loading(provider_named("ort-cpu"), 1, is_native=True).is_native
    assert not Loading(Provider("CUDAExecutionProvider"), 1, is_native=True).is_native


async def test_the_session_is_tried_once(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def failing(self: NativeModel, source: Any) -> None:
        tries.append(len(source.file))

    monkeypatch.setattr(NativeModel, "_made", failing)
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    assert prepared.native is not None
    request = request_for(model, drawn(model, 1))
    arguments = prepared.bind(request)
    assert tries == [], "none was asked for"
    for _ in range(3):
        assert prepared.native(arguments) is None
    assert len(tries) == 1 and tries[0] > 0
    await prepared.aclose()


def test_waiting_for_a_processor_is_not_counted() -> None:
    """An execution of one thread is measured by its processor time; one of several threads, which wait for each other, is not."""
    source = Loading(provider_named("ort-cpu"), 1, is_native=True).source(b"")
    clocks = [NativeModel(source._replace(thread_count=count), (), 0).clock for count in (1, 2)]
    assert clocks == [time.thread_time_ns, time.monotonic_ns]


# Failures


async def test_a_call_that_fails_is_answered_with_the_message_and_its_status_is_released(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    release = Interface.release

    def without_arguments(self: NativeSession, arrays: Any) -> KeptCall:
        binding = self.interface.make("CreateIoBinding", self.words[0])
        return KeptCall(self, binding, ctypes.c_void_p(), [("ReleaseIoBinding", binding)], arrays)

    def counting(self: Interface, name: str, handle: int) -> None:
        released.append(name)
        release(self, name, handle)

    monkeypatch.setattr(NativeSession, "quickest_ns", lambda self, clock: 0)
    monkeypatch.setattr(NativeSession, "bind", without_arguments)
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    await burst.execute(request)
    while not burst.server._answers.count:  # The burst asks for the call after it has answered.
        await anyio.lowlevel.checkpoint()
    monkeypatch.setattr(Interface, "release", counting)
    message = r"ONNX Runtime: \[ONNXRuntimeError\] : 2 : INVALID_ARGUMENT : At least one output"
    for count in (1, 2):
        with pytest.raises(InvalidArgument, match=message):
            await burst.execute(request)
        assert released == ["ReleaseStatus"] * count
    await burst.controller.aclose()
    await prepared.aclose()


def test_a_status_that_nobody_asks_for_is_released_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    api, release = interface(), Interface.release

    def counting(self: Interface, name: str, handle: int) -> None:
        released.append(name)
        release(self, name, handle)

    class Session:
        interface = api
        words = 1, 2

    place = ctypes.c_void_p(api._calls["CreateStatus"](1, b"lost"))
    call = KeptCall(Session(), 3, place, [], [])  # type: ignore[arg-type]
    monkeypatch.setattr(Interface, "release", counting)
    del call
    gc.collect()
    assert released == ["ReleaseStatus"] and place.value is None


def test_a_status_is_never_cut_to_a_number() -> None:
    """The pointer goes to its place, all of its bits; the number of the call is 1."""
    given: list[tuple[int, ...]] = []
    answers = [None, 1 << 32, 0xFFFF_FFFF_0000_0000]
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_size_t] * 4)

    @kind
    def function(*words: int) -> int | None:
        given.append(words)
        return answers[len(given) - 1]

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    place = ctypes.c_void_p()
    call = _Function(interface().call_address)
    found = [(call(address, ctypes.addressof(place), 1, 2, 3, 1 << 63), place.value) for _ in answers]
    assert found == [(0, None), (1, answers[1]), (1, answers[2])]
    assert given == [(1, 2, 3, 1 << 63)] * 3


def test_the_messages_are_those_of_the_python_package() -> None:
    import onnxruntime as ort

    api = interface()
    options = api.make("CreateSessionOptions")
    with pytest.raises(Unsupported) as ours:
        api.make_session(b"no model", options)
    api.release("ReleaseSessionOptions", options)
    with pytest.raises(Exception, match="ONNXRuntimeError") as theirs:
        ort.InferenceSession(b"no model")
    assert str(ours.value) == f"CreateSessionFromArray: {theirs.value}"


# The interface


def test_unknown_versions_are_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_interface, "VERSIONS_KNOWN", ("0.9.",))
    monkeypatch.setattr(Interface, "_registered", lambda self: pytest.fail("it was asked for the interface"))
    with pytest.raises(Unsupported, match="is not known"):
        Interface()


def test_a_library_that_was_not_built_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(c_interface, "_ENTRY", tmp_path / "none.so")
    with pytest.raises(Unsupported, match=r"none\.so"):
        Interface()


def test_a_table_that_the_runtime_has_not_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(c_interface, "API_VERSION", 100_000)
    with pytest.raises(Unsupported, match="no table 100000"):
        Interface()
    assert "100000" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["CreateStatus", "GetBuildInfoString"])
def test_a_table_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As far as calls without an effect show it."""
    text = ctypes.create_string_buffer(b"something else")
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p)
    other = kind(lambda: ctypes.addressof(text))
    # The status of another function has another message.
    places = {"CreateStatus": 0, "GetBuildInfoString": 254}
    at, create = Interface._at, interface()._calls["CreateStatus"]
    status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda _, __: create(2, b"other")
    )
    replaced = ctypes.cast(status if name == "CreateStatus" else other, ctypes.c_void_p).value

    def changed(self: Interface, place: int) -> int:
        return replaced if place == places[name] and replaced is not None else at(self, place)

    monkeypatch.setattr(Interface, "_at", changed)
    with pytest.raises(Unsupported, match=r"lost its message|build's description, got b'something else'"):
        Interface()


async def test_without_the_interface_bursts_call_python(
    device: OrtDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Interface:
        raise Unsupported("ONNX Runtime's C interface: version 9.9 is not known")

    monkeypatch.setattr(native_module, "interface", missing)
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    with caplog.at_level(logging.INFO, "aionn.driver"):
        for _ in range(3):
            await burst.execute(request)
    assert answered(burst) == 0
    assert [r.getMessage() for r in caplog.records if "by Python" in r.getMessage()] == [
        "ONNX Runtime: bursts call it by Python: ONNX Runtime's C interface: version 9.9 is not known"
    ]
    await burst.controller.aclose()
    await prepared.aclose()
