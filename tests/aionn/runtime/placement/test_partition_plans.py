"""Plans over devices: what goes where, by which scores, which memories serve which steps, and what names a step in the cache.

``test_original_cases`` says which of these are counterparts of which case of the original runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.hal import (
    NO_PERFORMANCE,
    Capabilities,
    ExecutionPreference,
    Model,
    Operand,
    OperandLifeTime,
    OperandPerformance,
    OperandType,
    Operation,
    OperationType,
    PerformanceInfo,
    Subgraph,
    uniform_capabilities,
)
from aionn.models.builder import GraphBuilder, Value
from aionn.runtime.placement.partition import Candidate, choose_devices, make_steps
from tests.support.split import PickyDevice

Op, T = OperationType, OperandType
FLOAT = T.TENSOR_FLOAT32
X = np.array([0.25, -2.0, 3.5], np.float32)
Y = np.array([1.0, -1.0, 4.0], np.float32)
SHAPE = (3,)


def open_over(*devices: PickyDevice, reference: bool = True, **options: Any) -> aionn.Runtime:
    return aionn.open(
        devices=devices, drivers=["reference"] if reference else [], isolation="in_process", **options
    )


def two(kind: OperationType, graph: GraphBuilder, left: Value, right: Value) -> Value:
    return graph.result(kind, [left, right], left)


# Where operations go


async def test_what_only_the_reference_device_does_stands_between_two_steps_of_a_device() -> None:
    """Device, reference device, the same device again: three steps, with every crossing value right."""
    graph = GraphBuilder()
    a, b, c = (graph.input(FLOAT, SHAPE) for _ in range(3))
    d = two(Op.MAXIMUM, graph, a, b)
    e = two(Op.MAXIMUM, graph, a, d)
    f = two(Op.MINIMUM, graph, a, e)
    g = two(Op.MINIMUM, graph, d, f)
    h = two(Op.MAXIMUM, graph, e, g)
    last = two(Op.MAXIMUM, graph, c, h)
    model = graph.build([f, last])
    async with open_over(PickyDevice("npu", {Op.MAXIMUM})) as runtime:
        net = await runtime.compile(model)
        assert [(device, len(operations)) for device, operations in net.steps] == [
            ("npu", 2),
            ("reference", 2),
            ("npu", 2),
        ]
        expected = await (await runtime.compile(model, devices="reference")).execute([X, Y, X - Y])
        for got, want in zip((await net.execute([X, Y, X - Y])).outputs, expected.outputs, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [("none", ("reference",)), ("with_fallback", ("reference",)), ("without_fallback", None)],
)
async def test_failing_partition_by_mode(partition: str, expected: tuple[str, ...] | None) -> None:
    """Not even tried; made good by the reference device as a whole; told."""

    class Refusing(PickyDevice):
        def prepare(self, model: Model, **options: Any) -> Any:
            raise aionn.GeneralFailure("planted")

    graph = GraphBuilder()
    a, b = graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    model = graph.build([two(Op.MINIMUM, graph, two(Op.MAXIMUM, graph, a, b), b)])
    async with open_over(Refusing("npu", {Op.MAXIMUM}), partition=partition) as runtime:
        if expected is None:
            with pytest.raises(aionn.GeneralFailure, match="planted"):
                await runtime.compile(model, allow_fallback=True)
        else:
            net = await runtime.compile(model, allow_fallback=True)
            assert net.devices == expected and len(net.steps) == 1


TYPES = [kind for kind in OperandType if kind != OperandType.SUBGRAPH]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("ratio", "expected"), [(0.25, 1), (0.75, 0)])
def test_score_is_of_the_first_inputs_type(kind: OperandType, ratio: float, expected: int) -> None:
    """A device that is better, or worse, at that type alone than one that is the same at all types."""

    def with_entry(capabilities: Capabilities) -> Capabilities:
        entries = tuple(
            msgspec.structs.replace(entry, info=PerformanceInfo(ratio, ratio))
            if entry.type == kind
            else entry
            for entry in capabilities.operand_performance
        )
        return msgspec.structs.replace(capabilities, operand_performance=entries)

    operand = Operand(kind, (), lifetime=OperandLifeTime.SUBGRAPH_INPUT)
    result = Operand(kind, (), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT)
    main = Subgraph((operand, result), (Operation(Op.OEM_OPERATION, (0,), (1,)),), (0,), (1,))
    uniform = uniform_capabilities(0.5, 0.5)
    candidates = [Candidate("same", uniform, (True,)), Candidate("other", with_entry(uniform), (True,))]
    for preference in ExecutionPreference:
        (choice,) = choose_devices(Model(main), candidates, preference)
        assert choice.candidate == expected


@pytest.mark.parametrize(
    ("operation", "kinds", "counts"),
    [
        (Op.ADD, (FLOAT, FLOAT, T.INT32), FLOAT),
        (Op.GATHER, (T.TENSOR_INT32, T.INT32, FLOAT), T.TENSOR_INT32),
        (Op.SELECT, (T.TENSOR_BOOL8, FLOAT, T.TENSOR_INT32), FLOAT),
    ],
)
def test_score_is_of_one_input_whatever_stands_beside_it(
    operation: OperationType, kinds: tuple[OperandType, ...], counts: OperandType
) -> None:
    """The first; of SELECT the one behind its condition."""
    inputs = tuple(Operand(kind, (1,), lifetime=OperandLifeTime.SUBGRAPH_INPUT) for kind in kinds)
    result = Operand(FLOAT, (1,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT)
    main = Subgraph((*inputs, result), (Operation(operation, (0, 1, 2), (3,)),), (0, 1, 2), (3,))
    uniform = uniform_capabilities(0.5, 0.5)
    entries = tuple(
        msgspec.structs.replace(entry, info=PerformanceInfo(0.125, 0.25)) if entry.type == counts else entry
        for entry in uniform.operand_performance
    )
    candidate = Candidate("a", msgspec.structs.replace(uniform, operand_performance=entries), (True,))
    for preference, score in (
        (ExecutionPreference.FAST_SINGLE_ANSWER, 0.125),
        (ExecutionPreference.LOW_POWER, 0.25),
    ):
        (choice,) = choose_devices(Model(main), [candidate], preference)
        assert choice.scores == (score,)


def test_performance_is_looked_up_by_type() -> None:
    """Each type has its own entry, relaxed float32 another one; a type that is missing is the worst there is."""
    infos = {kind: PerformanceInfo(float(kind), 0.5 + kind) for kind in sorted(TYPES)}
    relaxed = PerformanceInfo(0.125, 0.25), PerformanceInfo(0.375, 0.625)
    entries = tuple(OperandPerformance(kind, info) for kind, info in infos.items())
    capabilities = Capabilities(*relaxed, entries, relaxed[0], relaxed[0])
    assert {kind: capabilities.performance(kind) for kind in TYPES} == infos
    assert capabilities.performance(T.FLOAT32, is_relaxed=True) == relaxed[0]
    assert capabilities.performance(FLOAT, is_relaxed=True) == relaxed[1]
    for kind in TYPES:
        rest = msgspec.structs.replace(
            capabilities, operand_performance=tuple(e for e in entries if e.type != kind)
        )
        assert rest.performance(kind) == NO_PERFORMANCE


def constant_first() -> Model:
    """MAXIMUM of two constants, then MINIMUM with an input: the first step has nothing to read."""
    graph = GraphBuilder()
    a, b = graph.constant(X), graph.constant(Y)
    like = graph.input(FLOAT, SHAPE)
    return graph.build([two(Op.MINIMUM, graph, two(Op.MAXIMUM, graph, a, b), like)])


def dead_end() -> Model:
    """MAXIMUM whose result nobody reads, beside MINIMUM: the first step has nothing to give."""
    operands = (
        Operand(FLOAT, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(FLOAT, SHAPE),
        Operand(FLOAT, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(Op.MAXIMUM, (0, 0), (1,)), Operation(Op.MINIMUM, (0, 0), (2,)))
    return Model(Subgraph(operands, operations, (0,), (2,)))


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        (constant_first(), "has no inputs", np.minimum(np.maximum(X, Y), X)),
        (dead_end(), "has no outputs", X),
    ],
    ids=["no inputs", "no outputs"],
)
async def test_step_that_no_driver_can_be_given_puts_the_whole_model_on_the_reference_device(
    model: Model, words: str, expected: Any
) -> None:
    async with open_over(PickyDevice("npu", {Op.MAXIMUM})) as runtime:
        with pytest.raises(aionn.GeneralFailure, match=words):
            await runtime.compile(model)
        net = await runtime.compile(model, allow_fallback=True)
        assert net.devices == ("reference",) and len(net.steps) == 1
        np.testing.assert_array_equal((await net.execute([X])).outputs[0], expected)


# Control flow of unknown size: somewhere, anywhere


def with_if(main: tuple[int, ...], then: tuple[int, ...], otherwise: tuple[int, ...]) -> Model:
    def branch(shape: tuple[int, ...]) -> GraphBuilder:
        graph = GraphBuilder()
        a, b = graph.input(FLOAT, shape), graph.input(FLOAT, shape)
        return graph.finish([two(Op.MAXIMUM, graph, a, b)])

    graph = GraphBuilder()
    condition = graph.input(T.TENSOR_BOOL8, (1,))
    a, b = graph.input(FLOAT, main), graph.input(FLOAT, main)
    branches = [graph.graph(branch(shape)) for shape in (then, otherwise)]
    return graph.build([graph.result(Op.IF, [condition, *branches, a, b], a)])


def with_while(main: tuple[int, ...], condition: tuple[int, ...], body: tuple[int, ...]) -> Model:
    """While EQUAL(a, b): a = a + 1 in all extents of 1."""
    test = GraphBuilder()
    a, b = test.input(FLOAT, condition), test.input(FLOAT, condition)
    answer = test.variable(T.TENSOR_BOOL8, (1,))
    test.operation(Op.EQUAL, [a, b], [answer])
    test.finish([answer])
    step = GraphBuilder()
    a, b = step.input(FLOAT, body), step.input(FLOAT, body)
    step.finish([step.result(Op.ADD, [a, step.constant(np.ones(1, np.float32)), 0], a)])
    graph = GraphBuilder()
    a, b = graph.input(FLOAT, main), graph.input(FLOAT, main)
    out = graph.variable(FLOAT, main)
    graph.operation(Op.WHILE, [graph.graph(test), graph.graph(step), a, b], [out])
    return graph.build([out])


WHERE = [where for where in itertools.product([(1,), ()], repeat=3) if () in where]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [with_if, with_while])
@pytest.mark.parametrize("shapes", WHERE, ids=str)
async def test_control_flow_with_any_unknown_size_is_the_reference_devices(
    make: Any, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Outside, in the first subgraph, in the second, in several: no other device is given it, whatever it supports."""
    model = make(*shapes)
    one = np.ones(1, np.float32)
    inputs = [np.array([True]), one, one] if make is with_if else [one, one]
    async with open_over(PickyDevice("all", set(Op))) as runtime:
        net = await runtime.compile(model, preference="low_power")
        assert net.steps == (("reference", (0,)),)
        assert (await net.execute(inputs)).outputs[0] == (1 if make is with_if else 2)


@pytest.mark.parametrize("make", [with_if, with_while])
async def test_control_flow_of_known_size_is_the_best_devices(make: Any) -> None:
    async with open_over(PickyDevice("all", set(Op))) as runtime:
        assert (await runtime.compile(make((1,), (1,), (1,)))).steps == (("all", (0,)),)


# Which memory serves which steps


def roles(net: aionn.Compilation, key: int) -> set[tuple[str, bool]]:
    """Devices that meet a value, and whether they write it; the runtime itself is the interpreter."""
    return {(step.device.name, writes) for step, writes, _ in net._plan.uses(key)}


def inputs_of(net: aionn.Compilation) -> list[set[tuple[str, bool]]]:
    return [roles(net, key) for key in net.model.main.input_indexes]


def outputs_of(net: aionn.Compilation) -> list[set[tuple[str, bool]]]:
    return [roles(net, key) for key in net.model.main.output_indexes]


async def test_roles_of_values_between_steps() -> None:
    graph = GraphBuilder()
    a, b, d = (graph.input(FLOAT, SHAPE) for _ in range(3))
    c = two(Op.MAXIMUM, graph, a, b)
    e = two(Op.MINIMUM, graph, b, d)
    f = two(Op.POW, graph, c, e)
    devices = [PickyDevice("A", {Op.MAXIMUM}), PickyDevice("B", {Op.MINIMUM}), PickyDevice("C", {Op.POW})]
    async with open_over(*devices) as runtime:
        net = await runtime.compile(graph.build([c, f]))
        assert [device for device, _ in net.steps] == ["B", "A", "C"]
        assert inputs_of(net) == [{("A", False)}, {("A", False), ("B", False)}, {("B", False)}]
        assert outputs_of(net) == [{("A", True), ("C", False)}, {("C", True)}]
        (between,) = net._plan.temporaries
        assert roles(net, between) == {("B", True), ("C", False)}


def branch(kind: OperationType) -> GraphBuilder:
    graph = GraphBuilder()
    a, b = graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    return graph.finish([two(kind, graph, a, b)])


async def test_roles_of_values_of_an_interpreted_if() -> None:
    """The condition is the runtime's to read; all else is read and written by the branches where it lies."""
    graph = GraphBuilder()
    condition, a, b = graph.input(T.TENSOR_BOOL8, (1,)), graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    branches = [graph.graph(branch(Op.MAXIMUM)), graph.graph(branch(Op.MINIMUM))]
    model = graph.build([graph.result(Op.IF, [condition, *branches, a, b], a)])
    devices = [PickyDevice("A", {Op.MAXIMUM}), PickyDevice("B", {Op.MINIMUM})]
    async with open_over(*devices) as runtime:
        net = await runtime.compile(model)
        both = {("A", False), ("B", False)}
        assert inputs_of(net) == [{("interpreter", False)}, both, both]
        assert outputs_of(net) == [{("A", True), ("B", True)}]
        assert not net._plan.temporaries


def loop(body: GraphBuilder, states: Sequence[OperandType], outputs: int = 1) -> Model:
    """While the first value is below its own magnitude; the condition reads all states."""
    condition = GraphBuilder()
    values = [condition.input(kind, (1,)) for kind in states]
    answer = condition.variable(T.TENSOR_BOOL8, (1,))
    condition.operation(Op.LESS, [values[0], condition.result(Op.ABS, [values[0]], values[0])], [answer])
    condition.finish([answer])
    graph = GraphBuilder()
    inputs = [graph.input(kind, (1,)) for kind in states]
    made = [graph.variable(FLOAT, (1,)) for _ in range(outputs)]
    graph.operation(Op.WHILE, [graph.graph(condition), graph.graph(body), *inputs], made)
    return graph.build(made)


async def test_roles_of_values_of_an_interpreted_while() -> None:
    """What the loop gives is the runtime's to write, and so is what it gives without a round; the rest is the subgraphs'."""
    body = GraphBuilder()
    a, b, c = (body.input(FLOAT, (1,)) for _ in range(3))
    body.finish([two(Op.MAXIMUM, body, a, b), two(Op.MAXIMUM, body, a, c)])
    devices = [PickyDevice("A", {Op.LESS, Op.ABS}), PickyDevice("B", {Op.MAXIMUM})]
    async with open_over(*devices) as runtime:
        net = await runtime.compile(loop(body, [FLOAT] * 3))
        assert [p.device for p in net.placement] == ["interpreter", "A", "A", "B", "B"]
        assert inputs_of(net) == [{("interpreter", False)}, {("B", False)}, {("B", False)}]
        assert outputs_of(net) == [{("interpreter", True)}]
        x = [np.array([v], np.float32) for v in (-3, 2, 1)]
        assert (await net.execute(x)).outputs[0] == 2


async def test_value_that_a_loop_changes_and_reads_unchanged_is_the_runtimes_to_read() -> None:
    body = GraphBuilder()
    a, b = body.input(FLOAT, (1,)), body.input(FLOAT, (1,))
    body.finish([two(Op.MAXIMUM, body, a, b)])
    condition = GraphBuilder()
    state, _ = condition.input(FLOAT, (1,)), condition.input(FLOAT, (1,))
    answer = condition.variable(T.TENSOR_BOOL8, (1,))
    condition.operation(Op.LESS, [state, condition.constant(np.array([0], np.float32))], [answer])
    condition.finish([answer])
    graph = GraphBuilder()
    value, made = graph.input(FLOAT, (1,)), graph.variable(FLOAT, (1,))
    graph.operation(Op.WHILE, [graph.graph(condition), graph.graph(body), value, value], [made])
    async with open_over(PickyDevice("A", {Op.LESS}), PickyDevice("B", {Op.MAXIMUM})) as runtime:
        net = await runtime.compile(graph.build([made]))
        assert inputs_of(net) == [{("interpreter", False)}]
        assert (await net.execute([np.array([3], np.float32)])).outputs[0] == 3


async def test_roles_of_values_of_nested_interpreted_control_flow() -> None:
    """An IF in the body of a WHILE: values go through both to the devices of the branches."""

    def inside(kind: OperationType) -> GraphBuilder:
        graph = GraphBuilder()
        a, b = graph.input(FLOAT, (1,)), graph.input(FLOAT, (1,))
        return graph.finish([two(kind, graph, a, b)])

    body = GraphBuilder()
    a, b, c = body.input(FLOAT, (1,)), body.input(FLOAT, (1,)), body.input(T.TENSOR_BOOL8, (1,))
    branches = [body.graph(inside(Op.MAXIMUM)), body.graph(inside(Op.MINIMUM))]
    body.finish([body.result(Op.IF, [c, *branches, a, b], a)])
    devices = [
        PickyDevice("A", {Op.LESS, Op.ABS}),
        PickyDevice("B", {Op.MAXIMUM}),
        PickyDevice("C", {Op.MINIMUM}),
    ]
    async with open_over(*devices) as runtime:
        net = await runtime.compile(loop(body, [FLOAT, FLOAT, T.TENSOR_BOOL8]))
        assert sorted({p.device for p in net.placement}) == ["A", "B", "C", "interpreter"]
        assert inputs_of(net) == [
            {("interpreter", False)},
            {("B", False), ("C", False)},
            {("interpreter", False)},
        ]
        assert outputs_of(net) == [{("interpreter", True)}]
        x = [np.array([-3], np.float32), np.array([2], np.float32), np.array([True])]
        assert (await net.execute(x)).outputs[0] == 2


# What names a step in the cache


class Noting(PickyDevice):
    """Remembers the tokens that its models were to be kept by."""

    def __init__(self, name: str, kinds: set[OperationType], **options: Any) -> None:
        super().__init__(name, kinds, **options)
        self.tokens: list[bytes] = []

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        cache = options.get("cache")
        if cache is not None:
            self.tokens.append(cache.token)
        return await super().prepare_model(model, **options)


class Choice(msgspec.Struct, frozen=True):
    """How a model is compiled, to see what its steps are called."""

    name: str = "deviceA"
    version: str = "1"
    preference: str = "fast_single_answer"
    priority: str = "medium"
    token: bytes | None = bytes(32)
    model: Model = msgspec.field(default_factory=lambda: two_kinds())
    kinds: tuple[OperationType, ...] = (Op.MAXIMUM, Op.MINIMUM)


def two_kinds() -> Model:
    graph = GraphBuilder()
    a, b = graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    return graph.build([two(Op.MINIMUM, graph, two(Op.MAXIMUM, graph, a, b), b)])


async def tokens_of(folder: Path, choice: Choice) -> list[bytes]:
    found = []
    for number in range(2):
        device = Noting(choice.name, set(choice.kinds), time=0.5)
        device.info = msgspec.structs.replace(device.info, version=choice.version)
        async with open_over(device) as runtime:
            await runtime.compile(
                choice.model,
                preference=choice.preference,
                priority=choice.priority,
                cache_dir=None if choice.token is None else folder / str(number),
                cache_token=choice.token,
            )
        found.append(device.tokens)
    assert found[0] == found[1], "the same compilation has the same names"
    return found[0]


WHOLE, PART = (Op.MAXIMUM, Op.MINIMUM), (Op.MAXIMUM,)


@pytest.mark.parametrize("kinds", [WHOLE, PART], ids=["simple", "compound"])
async def test_no_token_no_cache(tmp_path: Path, kinds: tuple[OperationType, ...]) -> None:
    assert await tokens_of(tmp_path, Choice(token=None, kinds=kinds)) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kinds", [WHOLE, PART], ids=["simple", "compound"])
@pytest.mark.parametrize(
    "change",
    [
        {"name": "deviceB"},
        {"version": "2"},
        {"preference": "low_power"},
        {"priority": "high"},
        {"token": bytes(31) + b"\1"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_token_of_a_step_depends_on(
    tmp_path: Path, kinds: tuple[OperationType, ...], change: dict[str, Any]
) -> None:
    choice = Choice(kinds=kinds)
    one = await tokens_of(tmp_path / "one", choice)
    other = await tokens_of(tmp_path / "other", msgspec.structs.replace(choice, **change))
    assert len(one) == len(other) == 1 and one != other


async def test_token_of_a_step_depends_on_the_partition(tmp_path: Path) -> None:
    found = [
        await tokens_of(tmp_path / str(number), Choice(kinds=kinds))
        for number, kinds in enumerate((WHOLE, (Op.MAXIMUM,), (Op.MINIMUM,)))
    ]
    assert [len(tokens) for tokens in found] == [1, 1, 1]
    assert len({tokens[0] for tokens in found}) == 3


async def test_token_of_a_step_depends_on_its_subgraph(tmp_path: Path) -> None:
    """Both branches have one operation, number 0, on the same device."""
    graph = GraphBuilder()
    condition, a, b = graph.input(T.TENSOR_BOOL8, (1,)), graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    branches = [graph.graph(branch(Op.MAXIMUM)), graph.graph(branch(Op.MINIMUM))]
    model = graph.build([graph.result(Op.IF, [condition, *branches, a, b], a)])
    tokens = await tokens_of(tmp_path, Choice(model=model))
    assert len(tokens) == 2 and len(set(tokens)) == 2


async def test_steps_inside_of_control_flow_come_from_the_cache(tmp_path: Path) -> None:
    graph = GraphBuilder()
    condition, a, b = graph.input(T.TENSOR_BOOL8, (1,)), graph.input(FLOAT, SHAPE), graph.input(FLOAT, SHAPE)
    branches = [graph.graph(branch(Op.MAXIMUM)), graph.graph(branch(Op.MINIMUM))]
    model = graph.build([graph.result(Op.IF, [condition, *branches, a, b], a)])
    async with open_over(PickyDevice("npu")) as runtime:
        first = await runtime.compile(model, cache_dir=tmp_path)
        second = await runtime.compile(model, cache_dir=tmp_path)
        assert (first.from_cache, second.from_cache) == (False, True)
        for net in (first, second):
            for held, expected in ((True, np.maximum(X, Y)), (False, np.minimum(X, Y))):
                result = await net.execute([np.array([held]), X, Y])
                np.testing.assert_array_equal(result.outputs[0], expected)


def test_steps_do_not_depend_on_more_than_their_arguments() -> None:
    model = two_kinds()
    candidates = [
        Candidate("a", uniform_capabilities(0.5, 0.5), (True, False)),
        Candidate("b", uniform_capabilities(0.5, 0.5), (True, True)),
    ]
    plans = [make_steps(model, choose_devices(model, candidates, p)) for p in (*ExecutionPreference,) * 2]
    assert len(set(plans)) == 1
