"""Every misuse has its error, said in one sentence, and changes nothing: the next right call works.

The misuses that the NN HAL's runtime names, and where they are tried:

- a model that is finished twice, changed afterwards, or used before: ``aionn/models/test_builder.py``;
- a device that is missing, null or named twice; a setting that makes no sense: ``test_compile``, ``test_open``;
- a compilation that is set after it was finished: cannot be said, its settings are arguments of ``compile``;
- a wrong index, count, length, type or shape: ``test_inputs``, ``memory/test_memory.py`` (outputs, roles, offsets);
- a second computation of a one-shot execution: ``test_execution_runs_once_however_often_it_is_awaited``;
- a computation while a reusable one is under way: ``executions/test_page_and_reuse.py``;
- a burst of another compilation: cannot be said, a burst executes its own; of a closed one: ``test_burst_of_a_closed_compilation``;
- a busy burst: ``aionn/burst/test_ends.py`` at the driver's side; the runtime's waits for a slot: ``executions/test_burst.py``;
- a deadline with several devices: works here, ``test_deadline_holds_over_several_devices``;
- a fence that is null, failed or none, a duration that is no time: ``test_fences``;
- a memory that is closed, too small, read-only, or used beyond its roles: ``memory/test_memory.py``;
- anything of what has been closed: ``test_what_belongs_to_a_closed_runtime_refuses``.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Model, Operand, OperandLifeTime, OperandType, Operation, OperationType, Subgraph
from aionn.runtime.memory.arguments import TensorSpec, _check_input
from aionn.testing.models import chain
from fences import SyncFence

X = np.ones(3, np.float32)
TURNS_MAX = 3000
WAIT_S_MAX = 30.0


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process") as opened:
        yield opened


@pytest.fixture
async def net(runtime: aionn.Runtime) -> aionn.Compilation:
    return await runtime.compile(chain([OperationType.RELU], (3,)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": []}, "at least one"),
        ({"devices": ["reference", "reference"]}, "different names"),
        ({"devices": ["reference", None]}, "expected one of reference; got None"),
        ({"devices": "none"}, "expected one of reference; got 'none'"),
        ({"devices": "referense"}, r"got 'referense'; did you mean reference\?$"),
        ({"devices": 3}, "devices: expected a name or a list of names, got 3"),
        ({"preference": "quick"}, "preference: expected one of"),
        ({"preference": 7}, "preference: expected one of"),
        ({"priority": "urgent"}, "priority: expected one of"),
        ({"deadline": -1}, "compile"),
        ({"deadline": 1.5}, "compile"),
        (
            {"deadline": 0.05},
            r"compile: deadline: expected nanoseconds .*, got 0.05, which looks like seconds .* aionn.after\(0.05\)\?$",
        ),
        ({"cache_dir": 7}, "cache_dir: expected a path, got 7"),
        ({"cache_dir": ""}, "cache_dir: expected a path, got an empty text"),
    ],
)
async def test_compile(runtime: aionn.Runtime, options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await runtime.compile(chain([OperationType.RELU]), **options)


async def test_device_in_the_place_of_its_name(runtime: aionn.Runtime) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"expected a name, got a RuntimeDevice; write device.name"
    ):
        await runtime.compile(chain([OperationType.RELU]), devices=[runtime.devices[0]])  # type: ignore[list-item]


@pytest.mark.parametrize("model", [None, 5, b"model", ["a"]])
async def test_what_is_no_model(runtime: aionn.Runtime, model: Any) -> None:
    with pytest.raises(aionn.InvalidArgument, match="expected a path or a Model"):
        await runtime.compile(model)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (X, "expected a list with 1 array"),
        ([], "expected 1 array, got 0"),
        ([X, X], "expected 1 array, got 2"),
        ([X.astype(np.float64)], "element type float32, got float64"),
        ([np.ones((3, 1), np.float32)], r"expected shape \[3\]"),
        ([np.ones(4, np.float32)], r"expected shape \[3\]"),
        ([np.ones(0, np.float32)], r"expected"),
        ([object()], "expected an array or a buffer, got an object"),
        (["text"], "expected an array or a buffer, got a str"),
    ],
)
async def test_inputs(net: aionn.Compilation, inputs: Any, words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.execute(inputs)
    with pytest.raises(aionn.InvalidArgument, match=words):
        net.execute_fenced(inputs)
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline": -1}, "execute"),
        ({"deadline": "soon"}, "execute"),
        ({"priority": "urgent"}, "priority"),
        ({"loop_timeout": -0.5}, "loop_timeout"),
        ({"loop_timeout": float("nan")}, "loop_timeout"),
        ({"loop_timeout": 2_000_000_000}, r"loop_timeout: .* at most 86400 \(a day\), got .*mean 2\?"),
    ],
)
async def test_options_of_an_execution(net: aionn.Compilation, options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.execute([X], **options)
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


async def test_fences(net: aionn.Compilation) -> None:
    failed = SyncFence("failed")
    failed.fail(RuntimeError("planted"))
    with pytest.raises(aionn.InvalidArgument, match="fence 1: has failed already"):
        net.execute_fenced([X], wait_for=[SyncFence("open"), failed])
    with pytest.raises(aionn.InvalidArgument, match="fence 0: expected a SyncFence, got an int"):
        net.execute_fenced([X], wait_for=[3])  # type: ignore[list-item]
    coroutine = net.execute([X])
    with pytest.raises(
        aionn.InvalidArgument, match=r"got a coroutine; write net.execute_fenced\(...\).fence$"
    ):
        net.execute_fenced([X], wait_for=[coroutine])  # type: ignore[list-item]
    coroutine.close()
    with pytest.raises(aionn.InvalidArgument, match="duration"):
        net.execute_fenced([X], duration=-1.0)
    with pytest.raises(
        aionn.InvalidArgument,
        match=r"duration: expected a number of seconds .*, got 33000000; did you mean 0.033\?",
    ):
        net.execute_fenced([X], duration=33_000_000)
    with pytest.raises(
        aionn.InvalidArgument, match=r"duration: .*; a deadline, which aionn.after.* is not a duration$"
    ):
        net.execute_fenced([X], duration=aionn.after(1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_object_of_a_runtime_is_not_copied(
    runtime: aionn.Runtime, net: aionn.Compilation, duplicate: Any
) -> None:
    words = (
        "cannot be copied or pickled; open a runtime in the other process, or share a device by aionn serve"
    )
    execution = net.execute_fenced([X])
    async with net.burst() as burst:
        for owner in (runtime, runtime.devices[0], net, burst, execution):
            with pytest.raises(TypeError, match=f"^{type(owner).__name__}: {words}$"):
                duplicate(owner)
    await execution
    with pytest.raises(TypeError, match=f"^Runtime: {words}$"):
        duplicate(aionn.blocking.open(drivers=[]))


async def test_input_that_must_not_be_left_out(net: aionn.Compilation) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"^input 0 \(\w+\): missing; it cannot be left out \(it takes"
    ):
        await net.execute([None])
    with pytest.raises(
        aionn.InvalidArgument, match=r"^input 0 \(\w+\): missing; it cannot be left out \(it takes"
    ):
        net.execute_fenced([None])
    async with net.burst() as burst:
        with pytest.raises(
            aionn.InvalidArgument, match=r"^input 0 \(\w+\): missing; it cannot be left out \(it takes"
        ):
            await burst.execute([None])
    with aionn.SharedMemory.from_array(X) as memory:  # Of the application's own: it is not missing.
        await net.execute([memory])


async def test_empty_value_is_no_input(runtime: aionn.Runtime) -> None:
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    model = aionn.Model(Subgraph(operands, (Operation(OperationType.RELU, (0,), (1,)),), (0,), (1,)))
    net = await runtime.compile(model)
    with pytest.raises(aionn.InvalidArgument, match="at least one element"):
        await net.execute([np.ones(0, np.float32)])
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


async def test_burst_is_entered_once_and_used_inside(net: aionn.Compilation) -> None:
    burst = net.burst()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        await burst.execute([X])
    async with burst:
        await burst.execute([X])
        with pytest.raises(aionn.InvalidArgument, match="entered once"):
            await burst.__aenter__()
    with pytest.raises(aionn.InvalidArgument, match="burst: closed"):
        await burst.execute([X])


async def test_what_belongs_to_a_closed_runtime_refuses() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
    await runtime.aclose()
    for call in (lambda: net.execute([X]), lambda: runtime.compile(chain([OperationType.RELU]))):
        with pytest.raises(aionn.InvalidArgument, match=r"closed|not open"):
            await call()
    for refused in (lambda: net.execute_fenced([X]), net.burst, net.reusable):
        with pytest.raises(aionn.InvalidArgument, match="closed"):
            refused()
    await net.aclose()


class Only(ReferenceDevice):
    """Supports one kind of operation."""

    def __init__(self, name: str, kind: OperationType) -> None:
        super().__init__(name)
        self._kind = kind

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type == self._kind for operation in model.main.operations]


async def test_deadline_holds_over_several_devices() -> None:
    devices = [Only("a", OperationType.RELU), Only("b", OperationType.ABS)]
    async with aionn.open(devices=devices) as runtime:
        net = await runtime.compile(
            chain([OperationType.RELU, OperationType.ABS], (3,)), devices=["a", "b"], deadline=aionn.after(60)
        )
        assert net.devices == ("a", "b")
        result = await net.execute([X], deadline=aionn.after(60), measure=True)
        assert result.outputs[0].tolist() == [1.0] * 3 and result.timing.time_on_device_ns is not None
        with pytest.raises(aionn.MissedDeadline):
            await net.execute([X], deadline=1)
        with pytest.raises(aionn.MissedDeadline):
            await net.execute_fenced([X], wait_for=[SyncFence("never")], deadline=aionn.after(0.01))


async def test_execution_runs_once_however_often_it_is_awaited(runtime: aionn.Runtime) -> None:
    reports: list[object] = []
    async with aionn.open(devices=[ReferenceDevice("a")], telemetry=[reports.append]) as counted:
        net = await counted.compile(chain([OperationType.RELU], (3,)))
        execution = net.execute_fenced([X])
        assert await execution is await execution
        failed = net.execute_fenced([X])
        failed.cancel()
        for _ in range(2):
            with pytest.raises(aionn.ExecutionCancelled, match="cancelled"):
                await failed
    assert len(reports) == 3  # a compilation and two executions


async def test_burst_of_a_closed_compilation(runtime: aionn.Runtime, net: aionn.Compilation) -> None:
    async with net.burst() as burst:
        await burst.execute([X])
        await net.aclose()
        with pytest.raises(aionn.InvalidArgument, match=r"not open|closed"):
            await burst.execute([X])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("isolation", ["process", "in_process"])
@pytest.mark.parametrize("way", ["execute", "fenced", "reusable", "burst"])
async def test_cancelled_at_any_await_leaves_nothing(isolation: str, way: str) -> None:
    """Cancelled after 0, 1, 2 .. turns of the loop, until it is too late to cancel; afterwards all is as before."""
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:  # type: ignore[arg-type]
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        burst = await net.burst().__aenter__()
        again = net.reusable()
        again.inputs[0][:] = X

        async def once() -> None:
            if way == "execute":
                await net.execute([X])
            elif way == "fenced":
                await net.execute_fenced([X])
            elif way == "reusable":
                await again.execute()
            else:
                await burst.execute([X])

        await once()
        dispatcher = runtime.devices[0].dispatcher
        cancelled = completed = 0
        for turns in range(TURNS_MAX):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def cancel(scope: anyio.CancelScope = scope, turns: int = turns) -> None:
                        for _ in range(turns):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    tasks.start_soon(cancel)
                    await once()
                    completed += 1
                    tasks.cancel_scope.cancel()
            cancelled += scope.cancelled_caught
            # What still runs at the device keeps its slot, and nobody is told that it is free.
            with anyio.fail_after(WAIT_S_MAX):
                while any(slot.job is not None for slot in dispatcher._slots):
                    await anyio.sleep(0.001)
            assert dispatcher.statistics().waiting == 0
            if completed:
                break
        assert cancelled
        await once()
        assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3
        await burst.aclose()


class Gated(ReferenceDevice):
    """Runs only when it is let."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_run, self.runs = threading.Event(), threading.Semaphore(0)

    def prepare(self, model: Model, **options: Any) -> Any:
        prepared = super().prepare(model, **options)
        run = prepared.run

        def gated(*arguments: Any) -> Any:
            self.runs.release()
            assert self.may_run.wait(WAIT_S_MAX)
            return run(*arguments)

        prepared.run = gated  # type: ignore[method-assign]
        return prepared


@pytest.mark.parametrize("way", ["execute", "burst"])
async def test_slot_is_held_until_the_device_is_done(way: str) -> None:
    device = Gated("slow")
    async with aionn.open(devices=[device]) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        async with net.burst() as burst:
            execute = net.execute if way == "execute" else burst.execute
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(execute, [X])
                assert await anyio.to_thread.run_sync(device.runs.acquire, True, WAIT_S_MAX)
                tasks.cancel_scope.cancel()
            second = net.execute_fenced([X])
            await anyio.sleep(0.02)
            assert not device.runs.acquire(blocking=False), "the device is still busy with the first"
            assert second.fence.status.name == "PENDING"
            device.may_run.set()
            assert (await second).outputs[0].tolist() == [1.0] * 3


async def test_cancelled_caller_leaves_nothing(net: aionn.Compilation) -> None:
    for _ in range(20):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await net.execute([X])
        assert scope.cancelled_caught
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"isolation": "thread"}, "isolation"),
        ({"drivers": ["reference", "reference"]}, "different names"),
        ({"drivers": {"": "reference"}}, "not empty"),
        (
            {"drivers": "reference"},
            "drivers: expected a list or a mapping, got the string 'reference'; write .'reference'.",
        ),
        ({"drivers": {"x": 3}}, "drivers: expected names, got 3"),
        ({"drivers": {3: "reference"}}, "drivers: expected names, got 3"),
        ({"drivers": [None]}, "drivers: expected names, got None"),
        ({"drivers": 3}, "drivers: expected a list or a mapping, got 3"),
        (
            {"devices": ["litert-cpu"]},
            "got the name 'litert-cpu'; names belong in drivers= or enabled_devices=",
        ),
        ({"devices": "litert-cpu"}, "devices: expected a list of devices, got 'litert-cpu'"),
        ({"devices": 3}, "devices: expected a list of devices, got 3"),
        ({"devices": [3]}, "devices: expected devices, got 3"),
        ({"sockets": 3}, "sockets: expected a list of paths, got 3"),
        ({"sockets": [3]}, "sockets: expected paths, got 3"),
        ({"enabled_devices": 3}, "enabled_devices: expected a text, got 3"),
        ({"enabled_devices": ["a", "b"]}, r"expected a text, got \['a', 'b'\]; write names as 'a\|b'$"),
        ({"realtime": True}, "realtime: expected one of required, if_permitted, off, got True"),
        ({"partition": 3}, "partition: expected a text, got 3"),
        ({"log": 3}, "log: expected a text, got 3"),
        ({"cpu_only": "yes"}, "cpu_only: expected 0 or 1, got 'yes'"),
        ({"hang_after_s": 0}, "hang_after_s: expected a number of seconds above 0"),
        ({"hang_after_s": "1"}, "hang_after_s: expected a number of seconds above 0"),
        ({"enabled_devices": "("}, "enabled_devices"),
        ({"partition": "some"}, "partition"),
        ({"execution_path": "fast"}, "execution_path"),
    ],
)
def test_open(options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        aionn.open(**options)


ODD = {
    "array without dimensions": np.array(3),
    "array": np.array([1, 2]),
    "empty array": np.zeros(0),
    "object": object(),
    "bytes": b"x",
    "mapping": {},
    "nothing in a list": [None],
    "lone surrogate": "\ud800",
    "no number": float("nan"),
    "negative": -1,
    "huge": 10**30,
    "function": lambda: 1,
}


@pytest.mark.parametrize("option", inspect.signature(aionn.open).parameters)
def test_open_judges_any_value_itself(option: str) -> None:
    for name, value in ODD.items():
        try:
            # Named drivers: without them each call looks through the metadata of all installed packages.
            aionn.open(**{"drivers": ["reference"], option: value})
        except aionn.InvalidArgument as e:
            assert option in str(e), name


@pytest.mark.parametrize("value", ["1", b"abc", None, object(), 1j], ids=lambda value: type(value).__name__)
def test_scalar_that_is_no_number_is_refused(value: Any) -> None:
    spec = TensorSpec("x", OperandType.FLOAT32, ())
    with pytest.raises(aionn.InvalidArgument, match="input 0"):
        _check_input(0, spec, value, lambda: {0})
    for number in (True, 2, 0.5):
        assert _check_input(0, spec, number, lambda: {0}) == np.float32(number)


def test_number_is_no_tensor() -> None:
    for dimensions in ((), (1,), (2, 3)):
        spec = TensorSpec("x", OperandType.TENSOR_FLOAT32, dimensions)
        with pytest.raises(aionn.InvalidArgument, match=r"input 0.*expected an array or a buffer"):
            _check_input(0, spec, 2.0, lambda: {0})


async def test_name_where_there_is_no_device() -> None:
    async with aionn.open(drivers=[]) as runtime:
        with pytest.raises(aionn.InvalidArgument, match="device: no device is available; got 'x'"):
            runtime.device("x")
