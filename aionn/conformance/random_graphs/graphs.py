"""Random graphs: drawn from the operations' signatures, run by two executors, compared, and made smaller where they differ.

Owns how a set and a seed become a plan, a plan a model with its inputs, and a failure the smallest plan that still fails. Which
sets there are is in ``sets``, how close results must be in ``accuracy``, what operations look like in ``signatures``.

Invariants:
1. A set and a seed determine everything: plan, model and inputs. A failure's text ends with the command that repeats it.
2. An operation draws from a generator of its own, so that taking others out of the plan leaves it as it was.
3. Every graph is a legal model: an operation comes after those whose outputs it takes; at least one input is an argument.
4. All searches are bounded: attempts to draw a graph, guesses for extents, trials of making a failure smaller.

Source: the NN HAL's random graph generator.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.conformance.accuracy import Difference, judge
from aionn.conformance.random_graphs.extents import Extents
from aionn.conformance.random_graphs.plain_evaluation import Disturbance, evaluate_plainly
from aionn.conformance.random_graphs.sets import MOVING, SIGNATURES, TESTS, GraphTest
from aionn.conformance.random_graphs.signatures import Draft, Guarantee, Role, Value
from aionn.errors import InvalidArgument
from aionn.hal import (
    ChannelQuant,
    DataLocation,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    Subgraph,
    is_scalar_type,
)
from aionn.interpreter import Interpreter, RunControl

__all__ = [
    "Case",
    "Executor",
    "Failure",
    "Link",
    "Plan",
    "PlannedOperation",
    "check",
    "compare",
    "draw_case",
    "draw_plan",
    "interpret",
    "make_case",
    "shrink",
    "without",
]

ATTEMPTS_MAX = 30
"""Graphs drawn for one seed until one has a solution for its extents. Later attempts link less."""

LINK_PROBABILITY = 0.1
"""Of each output and later input that fit together, in a large graph."""

LINKS_PER_OPERATION = 2.0
"""In a small graph the probability is as much higher as gives about this many tries an operation; with 0.1 hardly any would be
linked."""

CONSTANT_PROBABILITY = 0.5
"""Of each input tensor to be part of the model."""

DISTURBANCES = 8
"""Ways of rounding tried before an output counts as determined."""

SHRINK_TRIALS_MAX = 200
"""Runs that making a failure smaller may take."""

Array = npt.NDArray[Any]
Executor = Callable[[Model, Sequence[Array | None]], "list[Array] | None"]
"""Runs a model on inputs; None if it cannot run this model, which is not a failure."""

_SIGNATURE_BY_NAME = {signature.name: signature for signature in SIGNATURES}


class PlannedOperation(msgspec.Struct, frozen=True, array_like=True):
    """One operation of a plan.

    Attributes:
        key: Its number, which stays when others are taken out; seeds all that is random in it.
        signature: The signature's name.
        type: The primary type.
        rank: The primary rank.
    """

    key: int
    signature: str
    type: OperandType
    rank: int


class Link(msgspec.Struct, frozen=True, array_like=True):
    """An output that is the input of a later operation, both by key and position."""

    source: int
    output: int
    target: int
    input: int


class Plan(msgspec.Struct, frozen=True):
    """A graph before its extents and values are drawn.

    Attributes:
        test: The set's name.
        seed: Seeds everything.
        operations: In execution order.
        links: Between operations that are there.
        extent_max: Largest free extent.
    """

    test: str
    seed: int
    operations: tuple[PlannedOperation, ...]
    links: tuple[Link, ...]
    extent_max: int

    def __str__(self) -> str:
        lines = [f"{self.test}, seed {self.seed}, extents up to {self.extent_max}:"]
        for operation in self.operations:
            sources = ", ".join(
                f"input {link.input} = output {link.output} of {link.source}"
                for link in self.links
                if link.target == operation.key
            )
            kind = f"{OperandType(operation.type).name} rank {operation.rank}"
            lines.append(
                f"  {operation.key}: {operation.signature} {kind}" + (f", {sources}" if sources else "")
            )
        return "\n".join(lines)


class Case(msgspec.Struct, frozen=True):
    """A model with inputs.

    Attributes:
        plan: The plan that it was made from.
        model: The model.
        inputs: One array an argument.
        is_checked: For each output, whether its values are determined.
    """

    plan: Plan
    model: Model
    inputs: tuple[Array, ...]
    is_checked: tuple[bool, ...]


class Failure(msgspec.Struct, frozen=True):
    """A case on which two executors differ, or one of them failed.

    Attributes:
        plan: The plan.
        difference: The difference; None where an executor raised.
        error: The exception of an executor, as text; None where results differ.
    """

    plan: Plan
    difference: Difference | None
    error: str | None

    @property
    def command(self) -> str:
        """The command that repeats the failure against the reference."""
        return f"python -m aionn.conformance.random_graphs {self.plan.test} {self.plan.seed}"

    def __str__(self) -> str:
        what = self.error if self.difference is None else str(self.difference)
        return f"{what}\n{self.plan}\nrepeat with: {self.command}"


# --- from a seed to a plan


def _stream(test: str, seed: int, part: int, use: int) -> np.random.Generator:
    """A generator for one use in one part of one case: what is drawn elsewhere does not move it."""
    return np.random.default_rng([zlib.crc32(test.encode()), seed, part, use])


def draw_plan(test: GraphTest, seed: int) -> Plan:
    """Draws operations and links until their extents have a solution.

    Raises:
        InvalidArgument: The set has no signatures.
        RuntimeError: No attempt had a solution, which makes the set unusable for this seed.
    """
    return _drawn(test, seed).plan


def draw_case(test: GraphTest, seed: int) -> Case:
    """The model and inputs of ``draw_plan``'s plan, as ``make_case`` makes them, without solving its extents again."""
    return _case_of(_drawn(test, seed))


def _drawn(test: GraphTest, seed: int) -> _Graph:
    """A plan's graph with its extents solved."""
    candidates = test.candidates()
    if not candidates:
        raise InvalidArgument(f"random graphs: set {test.name} has no signatures")
    probability = max(LINK_PROBABILITY, LINKS_PER_OPERATION / test.operation_count)
    for attempt in range(ATTEMPTS_MAX):
        rng = _stream(test.name, seed, attempt, 1)
        operations = []
        for position in range(test.operation_count):
            signature, types, ranks = candidates[int(rng.integers(len(candidates)))]
            kind, rank = types[int(rng.integers(len(types)))], ranks[int(rng.integers(len(ranks)))]
            key = attempt * test.operation_count + position
            operations.append(PlannedOperation(key, signature.name, kind, rank))
        plan = Plan(test.name, seed, tuple(operations), (), test.extent_max)
        graph = _Graph(plan)
        links = graph.draw_links(rng, probability * (1 - attempt / ATTEMPTS_MAX))
        if graph.solve():
            graph.plan = msgspec.structs.replace(plan, links=tuple(links))
            return graph
    raise RuntimeError(f"random graphs: set {test.name}, seed {seed}: no graph in {ATTEMPTS_MAX} attempts")


class _Graph:
    """A plan's operations with their network of extents."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.extents = Extents(plan.extent_max)
        self.drafts = {
            operation.key: Draft(
                _SIGNATURE_BY_NAME[operation.signature],
                OperandType(operation.type),
                operation.rank,
                _stream(plan.test, plan.seed, operation.key, 2),
                self.extents,
                has_edges=TESTS[plan.test].has_edges,
            )
            for operation in plan.operations
        }
        # The outputs that are inputs of others, by identity.
        self.linked: set[int] = set()
        for link in plan.links:
            self.link(link)

    def draw_links(self, rng: np.random.Generator, probability: float) -> list[Link]:
        """Tries to link each output to each later input with the given probability."""
        links = []
        keys = list(self.drafts)
        for place, source in enumerate(keys):
            for target in keys[place + 1 :]:
                for output in range(len(self.drafts[source].outputs)):
                    for position in range(len(self.drafts[target].inputs)):
                        link = Link(source, output, target, position)
                        if rng.random() < probability and self.link(link):
                            links.append(link)
        return links

    def link(self, link: Link) -> bool:
        """Makes an output the input of a later operation, where types, quantisation, guarantees and extents allow it."""
        output = self.drafts[link.source].outputs[link.output]
        inputs = self.drafts[link.target].inputs
        taken = inputs[link.input]
        if not (
            taken.role is Role.INPUT
            and output.is_linkable
            and taken.is_linkable
            and output.type == taken.type
            and len(output.dimensions) == len(taken.dimensions) > 0
            and (output.scale, output.zero_point) == (taken.scale, taken.zero_point)
            and not taken.guarantee & ~output.guarantee & (Guarantee.NON_NEGATIVE | Guarantee.NON_ZERO)
            and self.extents.try_equal(zip(output.dimensions, taken.dimensions, strict=True))
        ):
            return False
        inputs[link.input] = output
        self.linked.add(id(output))
        return True

    def solve(self) -> bool:
        inputs = (value for draft in self.drafts.values() for value in draft.inputs)
        if not all(value.has_guaranteed_numbers for value in inputs):
            return False
        return self.extents.solve(_stream(self.plan.test, self.plan.seed, self.plan.extent_max, 3))


# --- from a plan to a model


def make_case(plan: Plan) -> Case | None:
    """The model and inputs of a plan; None where the extents have no solution that the search finds, or an operation cannot have
    the inputs that it needs.
    """
    graph = _Graph(plan)
    return _case_of(graph) if graph.solve() else None


def _case_of(graph: _Graph) -> Case:
    plan = graph.plan
    for draft in graph.drafts.values():
        draft.fill_values()
    values = _values_in_order(graph)
    arguments = _arguments(plan, graph, values)
    indexes = {id(value): index for index, value in enumerate(values)}
    constants = bytearray()
    operands = [_operand(value, graph, arguments, constants) for value in values]
    operations = tuple(
        Operation(
            draft.signature.operation,
            tuple(indexes[id(value)] for value in draft.inputs),
            tuple(indexes[id(value)] for value in draft.outputs),
        )
        for draft in graph.drafts.values()
    )
    results = [v for v in values if v.role is Role.OUTPUT and id(v) not in graph.linked]
    given = [value for value in values if id(value) in arguments]
    subgraph = Subgraph(
        tuple(operands),
        operations,
        tuple(indexes[id(value)] for value in given),
        tuple(indexes[id(value)] for value in results),
    )
    model = Model(main=subgraph, operand_values=bytes(constants))
    arrays = []
    for value in given:
        assert value.array is not None, "an argument has been filled"
        arrays.append(value.array)
    return Case(plan, model, tuple(arrays), tuple(value.is_checked for value in results))


def _values_in_order(graph: _Graph) -> list[Value]:
    """Every value once, in the order of first use."""
    seen: dict[int, Value] = {}
    for draft in graph.drafts.values():
        for value in (*draft.inputs, *draft.outputs):
            seen.setdefault(id(value), value)
    return list(seen.values())


def _arguments(plan: Plan, graph: _Graph, values: Sequence[Value]) -> set[int]:
    """The inputs that are the model's arguments, by identity: at least one, and no scalar where there is a tensor."""
    chosen, tensors, scalars = set(), [], []
    for operation in plan.operations:
        rng = _stream(plan.test, plan.seed, operation.key, 4)
        for value in graph.drafts[operation.key].inputs:
            is_constant = bool(rng.random() < CONSTANT_PROBABILITY)
            if value.role is not Role.INPUT:
                continue
            if is_scalar_type(value.type):
                scalars.append(id(value))
                continue
            tensors.append(id(value))
            # A per-channel filter is constant in practice, and many devices demand it.
            if not is_constant and value.channel_dim is None:
                chosen.add(id(value))
    return chosen or set((tensors or scalars)[:1])


def _operand(value: Value, graph: _Graph, arguments: set[int], constants: bytearray) -> Operand:
    location = DataLocation()
    if value.role is Role.OUTPUT:
        is_linked = id(value) in graph.linked
        lifetime = OperandLifeTime.TEMPORARY_VARIABLE if is_linked else OperandLifeTime.SUBGRAPH_OUTPUT
    elif value.role is Role.OMITTED:
        lifetime = OperandLifeTime.NO_VALUE
    elif id(value) in arguments:
        lifetime = OperandLifeTime.SUBGRAPH_INPUT
    else:
        assert value.array is not None, "a constant has been filled"
        lifetime = OperandLifeTime.CONSTANT_COPY
        data = value.array.tobytes()
        constants.extend(b"\0" * (-len(constants) % 64))
        location = DataLocation(0, len(constants), len(data))
        constants.extend(data)
    quant = None
    if value.channel_dim is not None:
        quant = ChannelQuant(value.channel_scales, value.channel_dim)
    return Operand(
        type=value.type,
        dimensions=value.shape,
        scale=value.scale,
        zero_point=value.zero_point,
        lifetime=lifetime,
        location=location,
        channel_quant=quant,
    )


# --- running and comparing


def interpret(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
    """The reference: the interpreter over the operations' kernels."""
    return Interpreter(model).run(inputs, RunControl())


def compare(
    case: Case, expected: Executor, got: Executor, *, undetermined: list[Difference] | None = None
) -> Failure | None:
    """Runs a case with two executors; None where they agree, or one of them cannot run it.

    Args:
        case: The model and its inputs.
        expected: Computes the expected results.
        got: The results to judge.
        undetermined: Takes the differences of outputs that rounding decides, which are not failures; None counts those as
            failures like all others.
    """
    test = TESTS[case.plan.test]
    try:
        wanted = expected(case.model, case.inputs)
        results = None if wanted is None else got(case.model, case.inputs)
    except Exception as e:  # whatever an executor raises is the finding
        return Failure(case.plan, None, f"{type(e).__name__}: {e}")
    if wanted is None or results is None:
        return None
    outputs = case.model.main.outputs
    for index, (operand, is_checked) in enumerate(zip(outputs, case.is_checked, strict=True)):
        if not is_checked:
            continue
        is_moved = test.has_edges and all(o.type in MOVING for o in case.model.main.operations)
        difference = judge(
            index, OperandType(operand.type), wanted[index], results[index], test.criteria,
            is_exact=test.has_edges, is_zero_signed=is_moved,
        )  # fmt: skip
        if difference is None:
            continue
        if undetermined is None or _is_determined(case, index, test):
            return Failure(case.plan, difference, None)
        undetermined.append(difference)
    return None


def _is_determined(case: Case, output: int, test: GraphTest) -> bool:
    """Whether an output stays within its criteria when the results before it are rounded a little differently.

    A comparison, a floor, or the place of a maximum, of nearly equal numbers has no single right answer.
    """
    type = OperandType(case.model.main.outputs[output].type)
    wanted = evaluate_plainly(case.model, case.inputs)[output]
    for trial in range(DISTURBANCES):
        disturb = Disturbance(_stream(case.plan.test, case.plan.seed, trial, 5))
        disturbed = evaluate_plainly(case.model, case.inputs, disturb=disturb)[output]
        if judge(output, type, wanted, disturbed, test.criteria, is_exact=test.has_edges) is not None:
            return False
    return True


def check(
    test: GraphTest, seed: int, expected: Executor, got: Executor, *, shrunk: bool = True
) -> Failure | None:
    """Draws the case of a set and a seed and compares two executors on it.

    Args:
        test: The set.
        seed: Usually 0 to 49.
        expected: Computes the expected results.
        got: The results to judge.
        shrunk: Whether a failure is made smaller before it is returned.

    Returns:
        None where they agree.
    """
    failure = compare(draw_case(test, seed), expected, got)
    if failure is None or not shrunk:
        return failure
    return shrink(failure, expected, got)


def shrink(
    failure: Failure,
    expected: Executor,
    got: Executor,
    *,
    trials_max: int = SHRINK_TRIALS_MAX,
    determined: bool = False,
) -> Failure:
    """The smallest graph that still fails in the same way: fewer operations, fewer links, smaller extents.

    Args:
        failure: Where to start.
        expected: As ``check``.
        got: As ``check``.
        trials_max: Number of smaller graphs that are tried.
        determined: Whether outputs that rounding decides count as equal.
    """
    trials = 0
    is_shrinking = True
    while is_shrinking:
        is_shrinking = False
        for smaller in _smaller(failure.plan):
            trials += 1
            if trials > trials_max:
                return failure
            case = make_case(smaller)
            found = (
                None
                if case is None
                else compare(case, expected, got, undetermined=[] if determined else None)
            )
            if found is not None and (found.error is None) == (failure.error is None):
                failure = found
                is_shrinking = True
                break
    return failure


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are one step smaller, the largest steps first."""
    count = len(plan.operations)
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            dropped = {operation.key for operation in plan.operations[start : start + size]}
            if len(dropped) < count:
                yield without(plan, dropped)
        size //= 2
    for extent_max in (1, 2, 3, 4, 6, 10, 30, 100, 300):
        if extent_max < plan.extent_max:
            yield msgspec.structs.replace(plan, extent_max=extent_max)
    for unlinked in plan.links:
        yield msgspec.structs.replace(plan, links=tuple(link for link in plan.links if link != unlinked))


def without(plan: Plan, keys: Collection[int]) -> Plan:
    """The plan without the operations that have these keys, and without their links; the rest is unchanged."""
    kept = tuple(operation for operation in plan.operations if operation.key not in keys)
    links = tuple(link for link in plan.links if link.source not in keys and link.target not in keys)
    return msgspec.structs.replace(plan, operations=kept, links=links)


def main(arguments: Sequence[str]) -> int:
    """Repeats one case: the reference against the plain definitions. Returns the exit status."""
    if len(arguments) != 2 or arguments[0] not in TESTS or not arguments[1].isdecimal():
        sys.stderr.write("usage: python -m aionn.conformance.random_graphs SET SEED\n")
        return 2
    failure = check(TESTS[arguments[0]], int(arguments[1]), evaluate_plainly, interpret)
    sys.stdout.write("the results agree\n" if failure is None else f"{failure}\n")
    return 0 if failure is None else 1
