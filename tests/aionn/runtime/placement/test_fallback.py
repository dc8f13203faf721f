"""Fallback: only where allowed, never for the caller's own mistake, always told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers import registry
from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.hal import (
    ExecutionResult,
    Model,
    OperandType,
    OperationType,
    OutputShape,
    TaskLaunch,
    Timing,
    uniform_capabilities,
)
from aionn.interpreter import RunControl
from aionn.models.builder import GraphBuilder
from aionn.observability.tracing import start_tracing, stop_tracing
from aionn.testing.models import chain
from tests.support.split import PickyDevice

Values = npt.NDArray[np.float32]


class Broken(ReferenceDevice):
    """Seems quicker than the reference device, and fails where it is told to.

    Attributes:
        failure: Makes what it raises; a fresh one each time, since a raised exception keeps the frames that it passed.
        where: ``prepare`` or ``run``.
    """

    failure: Callable[[], Exception] = staticmethod(lambda: aionn.GeneralFailure("broken"))
    where = "run"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.info = msgspec.structs.replace(self.info, capabilities=uniform_capabilities(0.5, 0.5))

    def prepare(self, model: Model, **options: Any) -> ReferencePreparedModel:
        if self.where == "prepare":
            raise self.failure()
        return BrokenPreparedModel(self, model, options["priority"])


class BrokenPreparedModel(ReferencePreparedModel):
    def run(
        self, inputs: Sequence[Any], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        device = self.device
        assert isinstance(device, Broken)
        raise device.failure()


@pytest.fixture
async def runtime(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aionn.Runtime]:
    def factory(name: str) -> Callable[[str], ReferenceDevice]:
        return Broken if name == "broken" else ReferenceDevice

    monkeypatch.setattr(registry, "load_factory", factory)
    drivers = {"npu": "broken", "reference": "reference"}
    async with aionn.open(drivers=drivers, isolation="in_process") as opened:
        yield opened


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture
def silence() -> Values:
    return np.full((1, 49, 40, 1), np.log(1e-6), dtype=np.float32)


async def test_failing_step_runs_on_the_reference_device_and_the_result_says_so(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits, allow_fallback=True)
    assert net.devices == ("npu",)
    result = await net.execute([silence])
    assert int(result.outputs[0].argmax()) == 0
    (told,) = result.fallback
    assert "npu failed (broken); ran on reference" in told
    async with net.burst() as burst:
        assert (await burst.execute([silence])).fallback == result.fallback


async def test_without_leave_the_failure_is_the_callers_to_see(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    with pytest.raises(aionn.GeneralFailure, match="broken"):
        await net.execute([silence])


async def test_compile_failure_puts_the_whole_model_on_the_reference_device(
    runtime: aionn.Runtime, digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "where", "prepare")
    with pytest.raises(aionn.GeneralFailure, match="broken"):
        await runtime.compile(digits)
    net = await runtime.compile(digits, allow_fallback=True)
    assert net.devices == ("reference",)
    assert all("compiling failed (broken)" in p.reason for p in net.placement)
    assert (await net.execute([silence])).fallback == ()


@pytest.mark.parametrize(
    "failure",
    [
        aionn.InvalidArgument,
        aionn.MissedDeadline,
        aionn.OutputInsufficientSize,
    ],
)
async def test_mistakes_and_missed_deadlines_never_fall_back(
    runtime: aionn.Runtime,
    digits: Path,
    silence: Values,
    monkeypatch: pytest.MonkeyPatch,
    failure: type[aionn.Error],
) -> None:
    monkeypatch.setattr(Broken, "failure", staticmethod(lambda: failure("planted")))
    net = await runtime.compile(digits, allow_fallback=True)
    with pytest.raises(failure, match="planted"):
        await net.execute([silence])


async def test_chosen_devices_are_not_replaced(runtime: aionn.Runtime, digits: Path) -> None:
    with pytest.raises(aionn.InvalidArgument, match="devices that are asked for are not replaced"):
        await runtime.compile(digits, devices="npu", allow_fallback=True)


# Values in a device's memory

X = np.array([1.5, -2.5, 3.0], np.float32)


def broken(after: int = 0) -> Callable[[], None]:
    """Fails from one execution on."""
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise aionn.GeneralFailure("planted")

    return fail


async def test_step_with_device_memory_falls_back_through_ordinary_memory() -> None:
    """Read from the device before, written to it after: what follows on the device sees the reference device's result."""
    npu = PickyDevice("npu", fail=broken())
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.FLOOR], (3,)), allow_fallback=True)
        source, target = (
            await runtime.allocate(inputs=[(net, 0)]),
            await runtime.allocate(outputs=[(net, 0)]),
        )
        assert isinstance(source, aionn.DeviceMemory) and isinstance(target, aionn.DeviceMemory)
        async with source, target:
            with pytest.raises(aionn.GeneralFailure):
                await net.execute([source], outputs=[target])  # Nothing was written to it yet.
            await source.write(X)
            for _ in range(2):
                result = await net.execute([source], outputs=[target])
                assert "npu failed (planted); ran on reference" in result.fallback[0]
                np.testing.assert_array_equal(await target.read(), np.floor(X))
            np.testing.assert_array_equal(await source.read(), X)
            npu.fail = lambda: None
            await source.write(X + 1)
            assert not (await net.execute([source], outputs=[target])).fallback
            np.testing.assert_array_equal(await target.read(), np.floor(X + 1))


async def test_later_step_on_the_device_reads_what_the_reference_device_wrote_there() -> None:
    """An output of the model that a later step reads, in the memory of the device of both."""
    npu = PickyDevice("npu", {OperationType.FLOOR, OperationType.MAXIMUM}, fail=broken(after=1))
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (3,))
    first = graph.result(OperationType.FLOOR, [x], x)
    between = graph.result(OperationType.TANH, [first], first)
    last = graph.result(OperationType.MAXIMUM, [first, between], first)
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(graph.build([first, last]), allow_fallback=True)
        assert [device for device, _ in net.steps] == ["npu", "reference", "npu"]
        held = await runtime.allocate(outputs=[(net, 1)])
        assert isinstance(held, aionn.DeviceMemory)
        async with held:
            result = await net.execute([X], outputs=[None, held])
            assert len(result.fallback) == 1 and result.fallback[0].startswith("step 2 of 3")
            np.testing.assert_array_equal(await held.read(), np.maximum(np.floor(X), np.tanh(np.floor(X))))


async def test_device_memory_of_unknown_size_cannot_fall_back() -> None:
    npu = PickyDevice("npu", fail=broken())
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (0,))
    model = graph.build([graph.result(OperationType.FLOOR, [x], x)])
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model, allow_fallback=True)
        target = await runtime.allocate(outputs=[(net, 0)])
        assert isinstance(target, aionn.DeviceMemory)
        async with target:
            with pytest.raises(aionn.GeneralFailure, match="cannot be moved"):
                await net.execute([X], outputs=[target])


async def test_memory_of_a_dead_device_is_lost() -> None:
    """Its values are nowhere else: the caller hears that the device is gone."""
    drivers = {"mortal": "tests.support.split:dies_at_run", "reference": "reference"}
    async with aionn.open(drivers=drivers) as runtime:
        net = await runtime.compile(chain([OperationType.FLOOR], (3,)), allow_fallback=True)
        if net.devices != ("mortal",):
            net = await runtime.compile(chain([OperationType.RELU], (3,)), allow_fallback=True)
        assert net.devices == ("mortal",)
        source = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(source, aionn.DeviceMemory)
        await source.write(X)
        with pytest.raises(aionn.DeadObject):
            await net.execute([source])


def refuse_parts(runtime: aionn.Runtime) -> None:
    """The reference device fails to prepare models of one operation."""
    reference: Any = runtime.device("reference").hal
    prepare = reference.prepare_model

    async def only_whole(part: Model, **options: Any) -> Any:
        if len(part.main.operations) < 2:
            raise aionn.GeneralFailure("not in parts")
        return await prepare(part, **options)

    reference.prepare_model = only_whole


async def execute(net: aionn.Compilation) -> aionn.Result:
    return await net.execute([X])


async def execute_fenced(net: aionn.Compilation) -> aionn.Result:
    return await net.execute_fenced([X])


async def execute_again(net: aionn.Compilation) -> aionn.Result:
    again = net.reusable()
    again.inputs[0][...] = X
    return await again.execute()


async def execute_in_a_burst(net: aionn.Compilation) -> aionn.Result:
    async with net.burst() as burst:
        return await burst.execute([X])


@pytest.mark.parametrize(
    "way", [execute, execute_fenced, execute_again, execute_in_a_burst], ids=lambda way: way.__name__
)
async def test_whole_model_is_rescued_on_every_way(
    way: Callable[[aionn.Compilation], Awaitable[aionn.Result]],
) -> None:
    npu = PickyDevice("npu", [OperationType.FLOOR], fail=broken())
    model = chain([OperationType.FLOOR, OperationType.TANH], (3,))
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model, allow_fallback=True)
        assert net.devices == ("npu", "reference")
        refuse_parts(runtime)
        result = await way(net)
        np.testing.assert_array_equal(result.outputs[0], np.tanh(np.floor(X)))
        assert result.fallback == ("the whole model: not in parts; ran on the reference device",)


async def test_whole_model_with_device_memory_is_rescued() -> None:
    """The step fails on its device and on the reference device; the whole model does not."""

    class Once(PickyDevice):
        def supports(self, model: Model) -> Sequence[bool]:
            return [operation.type == OperationType.FLOOR for operation in model.main.operations]

    npu = Once("npu", fail=broken())
    model = chain([OperationType.FLOOR, OperationType.TANH], (3,))
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model, allow_fallback=True)
        source = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(source, aionn.DeviceMemory)
        refuse_parts(runtime)
        async with source:
            await source.write(X)
            result = await net.execute([source])
        np.testing.assert_array_equal(result.outputs[0], np.tanh(np.floor(X)))
        assert result.fallback == ("the whole model: not in parts; ran on the reference device",)


# Drivers that say what is wrong


class Answering(PickyDevice):
    """Answers as it is told where the reference device would be asked.

    Attributes:
        answers: By name of the call, what it gives instead; an exception is raised.
    """

    def __init__(self, **answers: Any) -> None:
        super().__init__("npu")
        self.answers = answers

    def _answer(self, call: str) -> Any:
        answer = self.answers[call]
        if isinstance(answer, Exception):
            raise type(answer)(
                *answer.args
            )  # A fresh one: a raised exception keeps the frames that it passed.
        return answer

    async def supported_operations(self, model: Model) -> Any:
        if "supported" in self.answers:
            return self._answer("supported")
        return await super().supported_operations(model)

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        if "prepare" in self.answers:
            return self._answer("prepare")
        prepared = await super().prepare_model(model, **options)
        if "execute" in self.answers:

            async def execute(*_: Any, **__: Any) -> Any:
                return self._answer("execute")

            monkey: Any = prepared
            monkey.launch = lambda *_, **__: TaskLaunch(execute(), "planted")
        return prepared


TWO = chain([OperationType.FLOOR, OperationType.ABS], (3,))
EXPECTED = np.abs(np.floor(X))


@pytest.mark.parametrize(
    "answer",
    [(), (True,), (True,) * 3, None, 5, RuntimeError("planted"), aionn.GeneralFailure("planted")],
    ids=["none", "one less", "one more", "None", "a number", "foreign exception", "error"],
)
async def test_wrong_list_of_supported_operations_leaves_the_device_out(answer: Any) -> None:
    """Then it supports nothing, as the HAL has it; where nobody else is asked, the failure is the caller's to see."""
    async with aionn.open(
        devices=[Answering(supported=answer)], drivers=["reference"], isolation="in_process"
    ) as runtime:
        net = await runtime.compile(TWO)
        assert net.devices == ("reference",)
        result = await net.execute([X])
        np.testing.assert_array_equal(result.outputs[0], EXPECTED)
        with pytest.raises(aionn.GeneralFailure):
            await runtime.compile(TWO, devices="npu")


@pytest.mark.parametrize(
    "answer", [None, RuntimeError("planted"), aionn.DeadObject("planted")], ids=["None", "foreign", "dead"]
)
async def test_prepare_that_gives_nothing_puts_the_whole_model_on_the_reference_device(answer: Any) -> None:
    async with aionn.open(
        devices=[Answering(prepare=answer)], drivers=["reference"], isolation="in_process"
    ) as runtime:
        with pytest.raises(aionn.Error, match=r"planted|gives none") as e:
            await runtime.compile(TWO)
        kind = aionn.DeadObject if isinstance(answer, aionn.DeadObject) else aionn.GeneralFailure
        assert type(e.value) is kind
        net = await runtime.compile(TWO, allow_fallback=True)
        assert net.devices == ("reference",) and "compiling failed" in net.placement[0].reason
        np.testing.assert_array_equal((await net.execute([X])).outputs[0], EXPECTED)


WRONG_RESULTS = {
    "nothing": None,
    "foreign exception": ValueError("planted"),
    "negative extent": ExecutionResult(True, (OutputShape((-3,)),)),
    "other shape": ExecutionResult(True, (OutputShape((4,)),)),
    "shapes of two outputs": ExecutionResult(True, (OutputShape((3,)), OutputShape((3,)))),
    "contradicting flags": ExecutionResult(True, (OutputShape((3,), False),)),
    "sufficient, yet too small": ExecutionResult(False, (OutputShape((3,), True),)),
    "times that nobody asked for": ExecutionResult(True, (OutputShape((3,)),), Timing(1, 2)),
    "died": aionn.DeadObject("planted"),
    "overloaded": aionn.ResourceExhausted("planted"),
}


@contextlib.asynccontextmanager
async def executing(net: aionn.Compilation, way: str) -> AsyncIterator[Callable[[], Awaitable[aionn.Result]]]:
    """Executes once, alone or in a burst."""
    if way == "alone":
        yield lambda: net.execute([X])
        return
    async with net.burst() as burst:
        yield lambda: burst.execute([X])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["alone", "burst"])
@pytest.mark.parametrize("answer", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
async def test_wrong_result_is_made_good_or_told(answer: Any, way: str) -> None:
    async with aionn.open(
        devices=[Answering(execute=answer)], drivers=["reference"], isolation="in_process"
    ) as runtime:
        kind = type(answer) if isinstance(answer, aionn.Error) else aionn.GeneralFailure
        async with executing(await runtime.compile(TWO), way) as execute:
            for _ in range(2):
                with pytest.raises(kind):
                    await execute()
        async with executing(await runtime.compile(TWO, allow_fallback=True), way) as execute:
            result = await execute()
            np.testing.assert_array_equal(result.outputs[0], EXPECTED)
            assert len(result.fallback) == 1 and "npu failed" in result.fallback[0]


async def test_trace_of_a_step_that_falls_back_says_where_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with aionn.open(
        devices=[Answering(execute=None)], drivers=["reference"], isolation="in_process"
    ) as runtime:
        net = await runtime.compile(TWO, allow_fallback=True)
        start_tracing(path, process="the test")
        try:
            assert (await net.execute([X])).fallback
        finally:
            stop_tracing()
    names = [event["name"] for event in msgspec.json.decode(path.read_text().rstrip().rstrip(",") + "]")]
    told = [name.split("]")[-1] for name in names if "LI_PE" in name]
    assert told == ["npu", "reference"], names


async def test_device_that_dies_between_two_steps_of_one_execution() -> None:
    """Its first step is done, its second is not: that one alone runs elsewhere."""
    npu = PickyDevice("npu", {OperationType.FLOOR}, fail=broken(after=1))
    model = chain([OperationType.FLOOR, OperationType.TANH, OperationType.FLOOR], (3,))
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model, allow_fallback=True)
        assert len(net.steps) == 3
        result = await net.execute([X])
        np.testing.assert_array_equal(result.outputs[0], np.floor(np.tanh(np.floor(X))))
        assert [told.split(":")[0] for told in result.fallback] == ["step 2 of 3"]
        strict = await runtime.compile(model)
        with pytest.raises(aionn.GeneralFailure, match="planted"):
            await strict.execute([X])
