"""IF and WHILE over devices: taken as a whole where a device can, interpreted where none can; the same answers on every path."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.conformance import cts
from aionn.conformance.cts import CtsTest
from aionn.drivers.kit.launching import DirectBurst
from aionn.errors import DeadObject, Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import ExecutionResult, FeatureLevel, Launch, Memory, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.placement.control_flow import InterpretedModel
from fences import FenceStatus, SyncFence
from tests.support.split import PickyDevice

Op, T = OperationType, OperandType
Array = npt.NDArray[Any]
FLOAT, BOOL = T.TENSOR_FLOAT32, T.TENSOR_BOOL8
SHAPE = (3,)
X, YES, NO = np.array([1.5, -2.25, 3.0], np.float32), np.array([True]), np.array([False])


def open_over(*devices: PickyDevice, reference: bool = False, **options: Any) -> aionn.Runtime:
    drivers = ["reference"] if reference else []
    return aionn.open(devices=devices, drivers=drivers, isolation="in_process", **options)


def inner(*kinds: OperationType, shape: Sequence[int] = SHAPE) -> GraphBuilder:
    """One value through operations of one input."""
    graph = GraphBuilder()
    value = graph.input(FLOAT, shape)
    for kind in kinds:
        value = graph.result(kind, [value], value)
    return graph.finish([value])


def choice(
    then: Sequence[OperationType] = (Op.ABS,),
    otherwise: Sequence[OperationType] = (Op.FLOOR,),
    shape: Sequence[int] = SHAPE,
) -> Model:
    """IF the first input: the second through ``then``, else through ``otherwise``; and RELU after that."""
    graph = GraphBuilder()
    condition, value = graph.input(BOOL, (1,)), graph.input(FLOAT, shape)
    branches = [graph.graph(inner(*kinds, shape=shape)) for kinds in (then, otherwise)]
    result = graph.result(Op.IF, [condition, *branches, value], value)
    return graph.build([graph.result(Op.RELU, [result], result)])


def below(limit: float) -> GraphBuilder:
    """Whether the first of three values is below a limit; the other two are passed through the loop."""
    graph = GraphBuilder()
    count = graph.input(FLOAT, (1,))
    for _ in range(2):
        graph.input(FLOAT, SHAPE)
    answer = graph.variable(BOOL, (1,))
    graph.operation(Op.LESS, [count, graph.constant(np.array([limit], np.float32))], [answer])
    return graph.finish([answer])


def rounds(limit: float, *, nested: bool = False) -> Model:
    """The model that is ``loop`` and nothing else."""
    graph, outputs = loop(limit, nested=nested)
    return graph.build(outputs)


def loop(limit: float, *, nested: bool = False) -> tuple[GraphBuilder, list[int]]:
    """WHILE count < limit: count += 1, value = value + step, or its magnitude after an IF where nested. Gives count and value."""
    body = GraphBuilder()
    count, value, step = body.input(FLOAT, (1,)), body.input(FLOAT, SHAPE), body.input(FLOAT, SHAPE)
    one = body.constant(np.array([1], np.float32))
    more = body.result(Op.ADD, [count, one, 0], count)
    added = body.result(Op.ADD, [value, step, 0], value)
    if nested:
        is_odd = body.variable(BOOL, (1,))
        body.operation(Op.LESS, [count, body.constant(np.array([2], np.float32))], [is_odd])
        branches = [body.graph(inner(Op.ABS)), body.graph(inner(Op.FLOOR))]
        added = body.result(Op.IF, [is_odd, *branches, added], added)
    body.finish([more, added])
    graph = GraphBuilder()
    inputs = [graph.input(FLOAT, (1,)), graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)]
    outputs = [graph.variable(FLOAT, (1,)), graph.variable(FLOAT, SHAPE)]
    graph.operation(Op.WHILE, [graph.graph(below(limit)), graph.graph(body), *inputs], outputs)
    return graph, outputs


def choice_of_loop(limit: float) -> Model:
    """IF the first input: the others through the loop of ``rounds``; the same where not."""
    graph = GraphBuilder()
    condition = graph.input(BOOL, (1,))
    branches = [graph.graph(branch.finish(results)) for branch, results in (loop(limit), loop(limit))]
    inputs = [graph.input(FLOAT, (1,)), graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)]
    outputs = [graph.variable(FLOAT, (1,)), graph.variable(FLOAT, SHAPE)]
    graph.operation(Op.IF, [condition, *branches, *inputs], outputs)
    return graph.build(outputs)


def start(count: float = 0.0) -> list[Array]:
    return [np.array([count], np.float32), X, np.full(3, 0.5, np.float32)]


async def whole(model: Model, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """What the reference device gives for the model in one piece."""
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model)
        assert net.devices == ("reference",)
        return (await net.execute(list(inputs))).outputs


def assert_equal(got: Sequence[Array], expected: Sequence[Array]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def placed(net: aionn.Compilation) -> list[tuple[int, str, str]]:
    return [(p.subgraph, p.type, p.device) for p in net.placement]


# Who takes it


async def test_if_is_interpreted_where_devices_support_only_its_branches() -> None:
    async with open_over(PickyDevice("npu")) as runtime:
        net = await runtime.compile(choice())
        assert placed(net) == [
            (0, "IF", "interpreter"),
            (0, "RELU", "npu"),
            (1, "ABS", "npu"),
            (2, "FLOOR", "npu"),
        ]
        assert "inside of it: npu" in net.placement[0].reason
        assert net.devices == ("npu",) and net.steps == (("interpreter", (0,)), ("npu", (1,)))
        assert "interpreter" in net.page()
        for condition in (YES, NO):
            result = await net.execute([condition, X])
            assert_equal(result.outputs, await whole(choice(), [condition, X]))
            assert result.device == "npu" and not result.fallback


async def test_while_is_interpreted_and_its_condition_goes_where_it_is_supported() -> None:
    """The body on a device, the condition on the reference device."""
    async with open_over(PickyDevice("npu", {Op.ADD}), reference=True) as runtime:
        net = await runtime.compile(rounds(4))
        assert placed(net) == [
            (0, "WHILE", "interpreter"),
            (1, "LESS", "reference"),
            (2, "ADD", "npu"),
            (2, "ADD", "npu"),
        ]
        assert_equal((await net.execute(start())).outputs, await whole(rounds(4), start()))


@pytest.mark.parametrize("model", [choice(), rounds(3)], ids=["if", "while"])
async def test_device_that_supports_all_gets_it_as_a_whole(model: Model) -> None:
    async with open_over(PickyDevice("all", set(Op)), reference=True) as runtime:
        net = await runtime.compile(model)
        assert net.devices == ("all",) and len(net.steps) == 1
        assert {p.subgraph for p in net.placement} == {0}


async def test_reference_device_keeps_what_nobody_does_better() -> None:
    async with open_over(PickyDevice("npu", {Op.TANH}), reference=True) as runtime:
        net = await runtime.compile(rounds(3))
        assert net.devices == ("reference",) and len(net.steps) == 1


async def test_reference_device_alone_interprets_nothing() -> None:
    async with open_over(PickyDevice("npu"), reference=True) as runtime:
        net = await runtime.compile(choice(), devices="reference")
        assert net.steps == (("reference", (0, 1)),)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("model", [choice(shape=(0,)), choice(shape=())], ids=["extent", "rank"])
async def test_unknown_sizes_go_to_the_reference_device_or_are_interpreted(
    model: Model, reference: bool
) -> None:
    """A device that supports all of it is not given it; without the reference device the values grow as they must."""
    async with open_over(PickyDevice("all", set(Op)), reference=reference) as runtime:
        net = await runtime.compile(model)
        assert net.placement[0].device == ("reference" if reference else "interpreter")
        for size in (3, 5000, 4):
            x = np.linspace(-2, 2, size, dtype=np.float32)
            (got,) = (await net.execute([NO, x])).outputs
            np.testing.assert_array_equal(got, np.maximum(np.floor(x), 0))


async def test_operation_inside_that_nobody_supports_is_named_with_where_it_is() -> None:
    async with open_over(PickyDevice("npu", {Op.RELU, Op.ABS})) as runtime:
        with pytest.raises(InvalidArgument, match=r"no device supports FLOOR .*inside of IF"):
            await runtime.compile(choice())


async def test_branch_above_a_devices_level_goes_elsewhere() -> None:
    old = PickyDevice("old", level=FeatureLevel.LEVEL_1, time=0.1)
    async with open_over(old, PickyDevice("new")) as runtime:
        net = await runtime.compile(choice(then=[Op.ABS], otherwise=[Op.FLOOR, Op.TANH]))
        assert placed(net)[2:] == [(1, "ABS", "new"), (2, "FLOOR", "old"), (2, "TANH", "old")]
        assert_equal((await net.execute([YES, X])).outputs, [np.abs(X)])


# What it gives


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
@pytest.mark.parametrize("nested", [False, True])
async def test_loop_gives_the_whole_models_answer(limit: float, nested: bool) -> None:
    """No round, one, two, and many: the values lie in two memories by turns. Cut inside as well, and nested."""
    model = rounds(limit, nested=nested)
    devices = [PickyDevice("a", {Op.LESS, Op.ABS}), PickyDevice("b", {Op.ADD, Op.FLOOR})]
    async with open_over(*devices) as runtime:
        net = await runtime.compile(model)
        assert net.placement[0].device == "interpreter"
        assert ("IF", "interpreter") in {(p.type, p.device) for p in net.placement} or not nested
        for _ in range(2):
            assert_equal((await net.execute(start())).outputs, await whole(model, start()))


async def test_same_branch_may_be_used_twice() -> None:
    model = choice(then=[Op.ABS], otherwise=[Op.ABS])
    assert len(model.referenced) == 1
    async with open_over(PickyDevice("npu")) as runtime:
        net = await runtime.compile(model)
        assert [p.subgraph for p in net.placement] == [0, 0, 1]
        for condition in (YES, NO):
            assert_equal((await net.execute([condition, X])).outputs, [np.abs(X)])


@pytest.mark.parametrize("condition", [True, False])
async def test_constants_of_the_outer_graph_go_into_branches(condition: bool) -> None:
    """Condition and value from constants: nothing but the runtime has them in memory."""
    branch = GraphBuilder()
    values = [branch.input(FLOAT, SHAPE), branch.input(FLOAT, SHAPE)]
    branch.finish([branch.result(Op.SUB, [*values, 0], values[0])])
    graph = GraphBuilder()
    value = graph.input(FLOAT, SHAPE)
    constant = graph.constant(np.array([3, 2, 1], np.float32))
    branches = [graph.graph(branch), graph.graph(branch)]
    held = graph.constant(np.array([condition]))
    model = graph.build([graph.result(Op.IF, [held, *branches, value, constant], value)])
    async with open_over(PickyDevice("npu")) as runtime:
        net = await runtime.compile(model)
        assert_equal((await net.execute([X])).outputs, [X - np.array([3, 2, 1], np.float32)])


async def test_growing_state_gets_the_room_that_it_needs() -> None:
    """Each round the value is twice as long; no memory was made for that, and the next execution knows."""
    condition = GraphBuilder()
    count, _ = condition.input(FLOAT, (1,)), condition.input(FLOAT, (0,))
    answer = condition.variable(BOOL, (1,))
    condition.operation(Op.LESS, [count, condition.constant(np.array([12], np.float32))], [answer])
    condition.finish([answer])
    body = GraphBuilder()
    count, value = body.input(FLOAT, (1,)), body.input(FLOAT, (0,))
    more = body.result(Op.ADD, [count, body.constant(np.array([1], np.float32)), 0], count)
    longer = body.result(Op.CONCATENATION, [value, value, 0], value)
    body.finish([more, longer])
    graph = GraphBuilder()
    inputs = [graph.input(FLOAT, (1,)), graph.input(FLOAT, (0,))]
    outputs = [graph.variable(FLOAT, (1,)), graph.variable(FLOAT, (0,))]
    graph.operation(Op.WHILE, [graph.graph(condition), graph.graph(body), *inputs], outputs)
    model = graph.build(outputs)
    async with open_over(PickyDevice("npu")) as runtime:
        net = await runtime.compile(model)
        for _ in range(2):
            result = await net.execute([np.zeros(1, np.float32), X])
            np.testing.assert_array_equal(result.outputs[1], np.tile(X, 4096))


async def test_executions_at_the_same_time_do_not_meet() -> None:
    async with open_over(PickyDevice("a", {Op.LESS}), PickyDevice("b", {Op.ADD})) as runtime:
        net = await runtime.compile(rounds(5))
        executions = [net.execute_fenced([np.array([n], np.float32), X + n, X]) for n in range(6)]
        for n, execution in enumerate(executions):
            assert_equal(
                (await execution).outputs, await whole(rounds(5), [np.array([n], np.float32), X + n, X])
            )


# Every path


@pytest.mark.parametrize("execution_path", ["sync", "async"])
@pytest.mark.parametrize("model", [choice(), rounds(4, nested=True)], ids=["if", "while"])
async def test_every_path_gives_the_same_answer(model: Model, execution_path: str) -> None:
    inputs = [NO, X] if len(model.main.input_indexes) == 2 else start()
    expected = await whole(model, inputs)
    async with open_over(PickyDevice("npu"), execution_path=execution_path) as runtime:
        net = await runtime.compile(model)
        timing = (await net.execute(inputs, measure=True)).timing
        assert timing.time_on_device_ns is not None and timing.time_in_driver_ns is not None
        assert 0 < timing.time_on_device_ns <= timing.time_in_driver_ns
        gate = SyncFence("gate")
        fenced = net.execute_fenced(inputs, wait_for=[gate])
        gate.signal()
        assert_equal((await fenced).outputs, expected)
        async with net.burst() as burst:
            for _ in range(3):
                result = await burst.execute(inputs, measure=True)
                assert_equal(result.outputs, expected)
                assert result.timing.time_on_device_ns is not None
        reusable = net.reusable()
        for view, value in zip(reusable.inputs, inputs, strict=True):
            view[...] = value
        for _ in range(2):
            assert_equal((await reusable.execute()).outputs, expected)


async def test_paths_over_driver_processes() -> None:
    drivers = {"npu": "tests.support.split:picky_about_control_flow"}
    model = rounds(6, nested=True)
    expected = await whole(model, start())
    async with aionn.open(drivers=drivers) as runtime:
        net = await runtime.compile(model)
        for _ in range(2):
            assert_equal((await net.execute(start())).outputs, expected)
        async with net.burst() as burst:
            for _ in range(4):
                assert_equal((await burst.execute(start())).outputs, expected)


async def test_steps_inside_take_turns_at_their_device() -> None:
    """Others get the device between two rounds: a long loop does not hold it."""
    npu = PickyDevice("npu")
    async with open_over(npu) as runtime:
        loop = await runtime.compile(rounds(10_000))
        other = await runtime.compile(choice())
        running = loop.execute_fenced(start(), loop_timeout=10)
        while npu.executions < 20:
            await anyio.lowlevel.checkpoint()
        seen = npu.executions
        await other.execute([YES, X], priority="high")
        assert running.fence.status is FenceStatus.PENDING
        assert npu.executions - seen < 200
        running.cancel()
        with pytest.raises(GeneralFailure, match="cancelled"):
            await running


# Time


async def test_loop_ends_with_its_time_out_and_never_falls_back() -> None:
    async with open_over(PickyDevice("npu"), reference=True) as runtime:
        net = await runtime.compile(rounds(1e9), allow_fallback=True)
        assert net.placement[0].device == "interpreter"
        with pytest.raises(MissedDeadline, match=r"longer than its time-out of 0\.05 s") as e:
            await net.execute(start(), loop_timeout=0.05)
        assert e.value.transient
        assert (await net.execute(start(1e9))).outputs[0] == 1e9


@pytest.mark.parametrize("where", ["interpreter", "device"])
async def test_time_out_of_a_loop_holds_in_a_burst(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own loop ends, and one that a device runs inside of an IF, which is told with the frame."""
    told: list[int | None] = []
    limits_ns = [50_000_000]
    direct, interpreted = DirectBurst.launch, InterpretedModel.interpret

    def noted(self: DirectBurst, *args: Any, **options: Any) -> Launch:
        told.append(options["loop_timeout_ns"])
        return direct(self, *args, **options)

    async def limited(self: InterpretedModel, request: Any, job: Any, burst: Any) -> ExecutionResult:
        job.loop_timeout_ns = limits_ns[-1]
        return await interpreted(self, request, job, burst)

    monkeypatch.setattr(DirectBurst, "launch", noted)
    monkeypatch.setattr(InterpretedModel, "interpret", limited)
    is_inside = where == "device"
    model, before = (choice_of_loop(1e9), [YES]) if is_inside else (rounds(1e9), [])
    kinds = [kind for kind in OperationType if kind != (Op.IF if is_inside else Op.WHILE)]
    async with open_over(PickyDevice("npu", kinds)) as runtime:
        net = await runtime.compile(model)
        assert net.placement[0].device == "interpreter"
        async with net.burst() as burst:
            with pytest.raises(MissedDeadline) as e:
                await burst.execute([*before, *start()])
            assert e.value.transient
            assert told and set(told) == set(limits_ns)
            limits_ns.append(15_000_000_000)
            assert (await burst.execute([*before, *start(1e9)])).outputs[0] == 1e9
    assert set(told) == set(limits_ns)


async def test_deadline_ends_a_loop() -> None:
    npu = PickyDevice("npu")
    async with open_over(npu) as runtime:
        net = await runtime.compile(rounds(1e9))
        with pytest.raises(MissedDeadline):
            await net.execute(start(), deadline=aionn.after(0.05))
        ended = npu.executions
        await net.execute(start(1e9))
        assert npu.executions - ended <= 3, "the loop that was given up went on"


# Failures inside


async def test_failing_step_inside_runs_on_the_reference_device_and_the_result_says_so() -> None:
    def broken() -> None:
        raise GeneralFailure("planted")

    npu = PickyDevice("npu", {Op.ADD}, fail=broken)
    async with open_over(npu, reference=True) as runtime:
        model = rounds(5)
        net = await runtime.compile(model, allow_fallback=True)
        result = await net.execute(start())
        assert_equal(result.outputs, await whole(model, start()))
        assert result.fallback == ("subgraph 2, step 0 of 1: npu failed (planted); ran on reference",), (
            "told once, not in every round"
        )
        strict = await runtime.compile(model)
        with pytest.raises(GeneralFailure, match="planted"):
            await strict.execute(start())
        async with net.burst() as burst:
            result = await burst.execute(start())
            assert_equal(result.outputs, await whole(model, start()))
            assert result.fallback


async def test_empty_value_inside_is_for_the_reference_device_alone() -> None:
    """No device can be given an empty value, so the branch cannot be run in two steps."""
    branch = GraphBuilder()
    value, size = branch.input(FLOAT, (4,)), branch.input(T.TENSOR_INT32, (1,))
    part = branch.result(Op.SLICE, [value, branch.constant(np.zeros(1, np.int32)), size], value, (0,))
    joined = branch.result(Op.CONCATENATION, [branch.result(Op.RELU, [part], part), value, 0], value, (0,))
    total = branch.result(Op.REDUCE_SUM, [joined, branch.constant(np.zeros(1, np.int32)), True], value, (1,))
    branch.finish([total])
    graph = GraphBuilder()
    condition, outer, extent = (
        graph.input(BOOL, (1,)),
        graph.input(FLOAT, (4,)),
        graph.input(T.TENSOR_INT32, (1,)),
    )
    branches = [graph.graph(branch), graph.graph(branch)]
    model = graph.build([graph.result(Op.IF, [condition, *branches, outer, extent], outer, (1,))])

    def devices() -> list[PickyDevice]:
        return [PickyDevice("a", {Op.SLICE}), PickyDevice("b", {Op.RELU, Op.CONCATENATION, Op.REDUCE_SUM})]

    x = np.arange(4, dtype=np.float32)
    async with open_over(*devices()) as runtime:
        strict = await runtime.compile(model)
        assert (await strict.execute([YES, x, np.array([2], np.int32)])).outputs[0] == 7
        with pytest.raises(GeneralFailure, match="no device can be given an empty value"):
            await strict.execute([YES, x, np.array([0], np.int32)])
    async with open_over(*devices(), reference=True) as runtime:
        net = await runtime.compile(model)
        assert net.steps == (("reference", (0,)),), "only what is of unknown size can be empty"
        assert (await net.execute([YES, x, np.array([0], np.int32)])).outputs[0] == 6


async def test_death_of_a_device_between_two_rounds_is_told() -> None:
    def dies() -> None:
        if npu.executions == 3:
            raise DeadObject("planted")

    npu = PickyDevice("npu", {Op.ADD}, fail=dies)
    async with open_over(npu, reference=True) as runtime:
        model = rounds(5)
        net = await runtime.compile(model)
        with pytest.raises(DeadObject, match="planted"):
            await net.execute(start())
        npu.executions = 0
        net = await runtime.compile(model, allow_fallback=True)
        result = await net.execute(start())
        assert_equal(result.outputs, await whole(model, start()))
        assert len(result.fallback) == 1 and npu.executions == 5


async def test_device_that_fails_to_prepare_a_branch_fails_the_compilation_and_leaves_nothing() -> None:
    class Refusing(PickyDevice):
        def prepare(self, model: Model, **options: Any) -> Any:
            if any(o.type == Op.FLOOR for o in model.main.operations):
                raise GeneralFailure("planted")
            return super().prepare(model, **options)

    async with open_over(Refusing("npu"), reference=True) as runtime:
        with pytest.raises(GeneralFailure, match="planted"):
            await runtime.compile(choice())
        net = await runtime.compile(choice(), allow_fallback=True)
        assert net.devices == ("reference",)


# Memory of devices


async def test_memories_inside_of_control_flow() -> None:
    """A device's memory goes in and out of an IF where it lies; what the runtime itself reads or writes is shared memory."""
    async with open_over(PickyDevice("npu")) as runtime:
        branch_only = GraphBuilder()
        condition, value = branch_only.input(BOOL, (1,)), branch_only.input(FLOAT, SHAPE)
        branches = [branch_only.graph(inner(Op.ABS)), branch_only.graph(inner(Op.FLOOR))]
        net = await runtime.compile(
            branch_only.build([branch_only.result(Op.IF, [condition, *branches, value], value)])
        )
        source = await runtime.allocate(inputs=[(net, 1)])
        target = await runtime.allocate(outputs=[(net, 0)])
        assert isinstance(source, aionn.DeviceMemory) and isinstance(target, aionn.DeviceMemory)
        async with source, target:
            await source.write(X)
            for held, expected in ((YES, np.abs(X)), (NO, np.floor(X))):
                await net.execute([held, source], outputs=[target])
                np.testing.assert_array_equal(await target.read(), expected)
        read_here = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(read_here, aionn.SharedMemory)
        with read_here:
            read_here.array[...] = True
            assert_equal((await net.execute([read_here, X])).outputs, [np.abs(X)])


async def test_interpreted_operations_hold_their_devices_roles() -> None:
    """Inputs of an IF are its branches', its condition nobody's; of a WHILE what it gives is the runtime's to write."""
    async with open_over(PickyDevice("npu")) as runtime:
        for model, expected in ((choice(), [None, True]), (rounds(2), [None, None, True])):
            net = await runtime.compile(model)
            interpreted = net._plan.steps[0].prepared
            assert isinstance(interpreted, InterpretedModel)
            roles = [interpreted.uses(i, is_output=False) for i in range(len(expected))]
            assert [role is not None or None for role in roles] == expected
            writes = interpreted.uses(0, is_output=True)
            assert (writes is None) == (model.main.operations[0].type == Op.WHILE)


# The public data


@functools.cache
def control_flow_tests(data: Path) -> list[CtsTest]:
    return [
        test
        for name in ("if", "while")
        for test in cts.iterate_tests(data, contains=f"{name}_")
        if test.referenced
    ]


async def run_all(tests: Sequence[CtsTest], *devices: PickyDevice) -> int:
    refused = 0
    async with open_over(*devices) as runtime:
        for test in tests:
            model = cts.build_model(test)
            is_endless = "infinite_loop" in test.name
            try:
                async with await runtime.compile(model) as net:
                    assert any(p.device == "interpreter" for p in net.placement), test.name
                    result = await net.execute(
                        cts.main_inputs(test), loop_timeout=0.02 if is_endless else None
                    )
                assert not test.expect_failure, test.name
                mismatch = cts.compare(test, result.outputs)
                assert mismatch is None, f"{test.name}: {mismatch}"
            except Error:
                assert test.expect_failure, test.name
                refused += 1
            finally:
                for pool in model.pools:
                    assert isinstance(pool, Memory)
                    pool.close()
    return refused


def evenly() -> list[PickyDevice]:
    """Two devices that share all kinds of operations but IF and WHILE."""
    kinds = [kind for kind in Op if kind not in (Op.IF, Op.WHILE)]
    return [PickyDevice("even", set(kinds[::2])), PickyDevice("odd", set(kinds[1::2]))]


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    if not (shared / "cts").is_dir():
        pytest.skip("the conformance data are not beside the repository")
    return shared / "cts"


@pytest.mark.thorough
@pytest.mark.parametrize("step", [31, pytest.param(7, marks=pytest.mark.long)])
async def test_share_of_the_control_flow_data_passes_interpreted(data: Path, step: int) -> None:
    tests = control_flow_tests(data)
    assert len(tests) == 682
    refused = await run_all(tests[::step], *evenly())
    assert refused == sum(test.expect_failure for test in tests[::step])


@pytest.mark.long
async def test_all_control_flow_data_pass_interpreted(data: Path) -> None:
    tests = control_flow_tests(data)
    assert await run_all(tests, *evenly()) == sum(test.expect_failure for test in tests)
