"""Claims about random graphs: what is drawn is legal and repeatable, differences are found and made small.

And the claim that they are for: the reference agrees with the plain definitions.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn.conformance.random_graphs.graphs as random_graphs
from aionn.conformance.random_graphs.graphs import (
    Case,
    Plan,
    PlannedOperation,
    check,
    draw_case,
    draw_plan,
    interpret,
    make_case,
)
from aionn.conformance.random_graphs.plain import PlainCall
from aionn.conformance.random_graphs.plain_evaluation import DEFINITIONS, evaluate_plainly
from aionn.conformance.random_graphs.sets import (
    GRAPH_TESTS,
    NOT_COVERED,
    SEEDS,
    SIGNATURES,
    SINGLE_OPERATION_TESTS,
    TESTS,
)
from aionn.errors import GeneralFailure
from aionn.hal import (
    DataLocation,
    Model,
    OperandLifeTime,
    OperandType,
    OperationType,
    constant_array,
    is_scalar_type,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.ops import validate_operation

Array = npt.NDArray[Any]
SEEDS_QUICK = 1

SETS: dict[str, list[str]] = {}
"""The sets by operation, or size of the graphs: one test each costs less than one a set."""
for _name, _test in TESTS.items():
    SETS.setdefault(_name.split("_")[0] if _test.operation is None else _test.operation.name, []).append(
        _name
    )

every_set = pytest.mark.parametrize("subject", sorted(SETS))


def case_of(test: str, seed: int) -> Case:
    case = make_case(draw_plan(TESTS[test], seed))
    assert case is not None
    return case


known_case = functools.cache(case_of)
"""The same for tests that change nothing of a case: drawing one takes longer than running it."""


def level_of(case: Case) -> int:
    model = case.model
    return max(
        validate_operation(model, model.main.operands, operation, where=f"operation {position}")
        for position, operation in enumerate(model.main.operations)
    )


def test_sets_are_those_of_the_original() -> None:
    assert len(SINGLE_OPERATION_TESTS) == 179
    assert len(GRAPH_TESTS) == 32
    assert len(TESTS) == len({test.name for test in TESTS.values()})


def test_every_operation_has_signatures_or_a_reason() -> None:
    covered = {signature.operation for signature in SIGNATURES}
    assert covered.isdisjoint(NOT_COVERED)
    assert covered | set(NOT_COVERED) == set(OperationType)


def test_every_signature_belongs_to_a_set_and_has_a_plain_definition() -> None:
    drawn = {signature.name for test in TESTS.values() for signature, _, _ in test.candidates()}
    assert drawn == {signature.name for signature in SIGNATURES}
    assert {signature.operation for signature in SIGNATURES} == set(DEFINITIONS)
    assert all(f"{s.operation.name}_{s.level}" in TESTS for s in SIGNATURES)


def test_plain_definitions_share_nothing_with_the_kernels() -> None:
    folder = Path(random_graphs.__file__).parent
    for path in folder.glob("plain*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                )
                assert not any(name.startswith("aionn.ops") for name in names), path


@pytest.mark.sampled(9)
@every_set
def test_drawn_models_are_legal_and_of_their_level(subject: str) -> None:
    for test in SETS[subject]:
        for seed in range(SEEDS_QUICK):
            case = known_case(test, seed)
            level = level_of(case)
            stated = TESTS[test].level
            assert stated is None or level <= stated
            graph = case.model.main
            assert len(case.inputs) == len(graph.input_indexes) >= 1
            assert len(case.is_checked) == len(graph.output_indexes) >= 1
            for array, operand in zip(case.inputs, graph.inputs, strict=True):
                assert array.shape == operand.dimensions
            for operand in graph.operands:
                assert all(extent >= 1 for extent in operand.dimensions)
                if TESTS[test].extent_max > 10:
                    assert math.prod(operand.dimensions) <= 10_000
                if is_scalar_type(operand.type) and operand.lifetime == OperandLifeTime.SUBGRAPH_INPUT:
                    assert test == "FILL_4", "scalars are constants where there is a tensor"


@pytest.mark.parametrize("test", ["CONV_2D_4", "STRIDED_SLICE_2", "LARGE_TENSOR_FLOAT32_4"])
def test_a_seed_repeats_everything(test: str) -> None:
    first, second = case_of(test, 3), case_of(test, 3)
    assert first.plan == second.plan
    assert first.model == second.model
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first.inputs, second.inputs, strict=True))
    assert case_of(test, 4).model != first.model


def test_case_that_is_drawn_is_the_one_of_its_plan() -> None:
    """Kept plans and numbers mean the same graphs."""
    for test in (
        "ADD_1",
        "CONV_2D_4",
        "SMALL_TENSOR_FLOAT32_2",
        "LARGE_TENSOR_FLOAT32_4",
        "CHAIN_TENSOR_QUANT8_ASYMM",
    ):
        for seed in range(3):
            drawn, made = draw_case(TESTS[test], seed), case_of(test, seed)
            assert (drawn.plan, drawn.model) == (made.plan, made.model)
            assert [array.tobytes() for array in drawn.inputs] == [array.tobytes() for array in made.inputs]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("extent_max", [1, 2, 3])
def test_smaller_extents_make_a_legal_case_or_none(extent_max: int) -> None:
    """A failure is made smaller so: a plan that asks for larger extents than there are must not end the search."""
    made = 0
    for test in (
        "CHAIN_TENSOR_FLOAT16",
        "CHAIN_TENSOR_FLOAT32",
        "SMALL_TENSOR_INT32_2",
        "SMALL_TENSOR_FLOAT16_4",
    ):
        for seed in range(6):
            plan = draw_plan(TESTS[test], seed)
            case = make_case(msgspec.structs.replace(plan, extent_max=extent_max))
            if case is not None:
                made += 1
                assert level_of(case) > 0
    assert made


def test_inputs_that_have_to_be_positive_are() -> None:
    """With the greatest zero point there is no positive number: this plan was drawn with one of them before."""
    plan = Plan(
        "CHAIN_TENSOR_QUANT8_ASYMM_SIGNED",
        565875,
        (PlannedOperation(1, "RSQRT_quantized_7", OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 1),),
        (),
        1,
    )
    assert make_case(plan) is None
    case = make_case(msgspec.structs.replace(plan, seed=565876))
    assert case is not None
    (number,) = case.inputs[0]
    assert number > case.model.main.operands[0].zero_point


@pytest.mark.thorough
def test_large_graphs_are_linked() -> None:
    for test in GRAPH_TESTS:
        if test.operation_count > 5:
            links = [len(draw_plan(test, seed).links) for seed in range(3)]
            assert sum(links) >= 3 * 5, test.name


def test_half_of_the_inputs_are_constants() -> None:
    arguments = constants = 0
    for seed in range(SEEDS):
        graph = case_of("ADD_1", seed).model.main
        lifetimes = [graph.operands[index].lifetime for index in graph.operations[0].inputs[:2]]
        arguments += lifetimes.count(OperandLifeTime.SUBGRAPH_INPUT)
        constants += lifetimes.count(OperandLifeTime.CONSTANT_COPY)
    # One of two is an argument even where both were to be constants: 5 of 8 on average.
    assert 0.2 < constants / (arguments + constants) < 0.55


def test_quantized_filters_are_per_channel_at_times() -> None:
    quantized = [
        operand.channel_quant
        for seed in range(20)
        for operand in case_of("CONV_2D_4", seed).model.main.operands
    ]
    assert any(quant is not None for quant in quantized)


@every_set
def test_reference_agrees_with_the_plain_definitions(subject: str) -> None:
    for test in SETS[subject]:
        for seed in range(SEEDS_QUICK):
            failure = check(TESTS[test], seed, evaluate_plainly, interpret)
            assert failure is None, str(failure)


@pytest.mark.long
@every_set
def test_reference_agrees_with_the_plain_definitions_for_all_seeds(subject: str) -> None:
    for test in SETS[subject]:
        for seed in range(SEEDS_QUICK, SEEDS):
            failure = check(TESTS[test], seed, evaluate_plainly, interpret)
            assert failure is None, str(failure)


def with_unknown_extents(model: Model) -> Model:
    """The same model with every extent of every result unknown."""
    written = {index for operation in model.main.operations for index in operation.outputs}
    operands = tuple(
        msgspec.structs.replace(operand, dimensions=(0,) * len(operand.dimensions))
        if i in written
        else operand
        for i, operand in enumerate(model.main.operands)
    )
    return msgspec.structs.replace(model, main=msgspec.structs.replace(model.main, operands=operands))


def with_arguments_only(case: Case) -> tuple[Model, list[Array]]:
    """The same model with all constant tensors as arguments."""
    graph, arrays = case.model.main, dict(zip(case.model.main.input_indexes, case.inputs, strict=True))
    operands = list(graph.operands)
    for index, operand in enumerate(operands):
        if operand.is_constant and not is_scalar_type(operand.type):
            arrays[index] = constant_array(case.model, operand)
            operands[index] = msgspec.structs.replace(
                operand, lifetime=OperandLifeTime.SUBGRAPH_INPUT, location=DataLocation()
            )
    changed = msgspec.structs.replace(graph, operands=tuple(operands), input_indexes=tuple(arrays))
    return msgspec.structs.replace(case.model, main=changed), list(arrays.values())


def assert_equal(expected: Sequence[Array], got: Sequence[Array]) -> None:
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.sampled(4)
@every_set
def test_reference_finds_unknown_extents_itself(subject: str) -> None:
    for test in SETS[subject]:
        case = known_case(test, 0)
        unknown = with_unknown_extents(case.model)
        for position, operation in enumerate(unknown.main.operations):
            validate_operation(unknown, unknown.main.operands, operation, where=f"operation {position}")
        assert_equal(interpret(case.model, case.inputs), interpret(unknown, case.inputs))


@pytest.mark.sampled(16)
@every_set
def test_reference_treats_constants_and_arguments_alike(subject: str) -> None:
    for test in SETS[subject]:
        case = known_case(test, 1)
        model, arrays = with_arguments_only(case)
        assert_equal(interpret(case.model, case.inputs), interpret(model, arrays))


@pytest.mark.sampled(4)
@every_set
def test_reference_keeps_nothing_but_what_is_constant(subject: str) -> None:
    for test in SETS[subject]:
        first, again = known_case(test, 0), case_of(test, 0)
        interpreter = Interpreter(first.model)
        given = [array.copy() for array in first.inputs]
        expected = [array.copy() for array in interpreter.run(first.inputs, RunControl())]
        assert_equal(expected, interpreter.run(again.inputs, RunControl()))
        assert_equal(given, first.inputs)


def wrongly_multiplied(call: PlainCall) -> list[Array]:
    return [call.tensor(0) * call.tensor(1) + 0.5]


def test_wrong_operation_is_found_in_a_large_graph_and_left_alone_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(DEFINITIONS, OperationType.MUL, wrongly_multiplied)
    test = TESTS["LARGE_TENSOR_FLOAT32_2"]
    found = None
    for seed in range(20):
        if any(operation.signature == "MUL_1" for operation in draw_plan(test, seed).operations):
            found = check(test, seed, interpret, evaluate_plainly)
        if found is not None:
            break
    assert found is not None
    assert [operation.signature for operation in found.plan.operations] == ["MUL_1"]
    assert found.plan.links == ()
    assert found.plan.extent_max <= 2
    assert f"repeat with: {found.command}" in str(found)


def test_failure_names_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEFINITIONS, OperationType.MUL, wrongly_multiplied)
    failure = check(TESTS["MUL_1"], 0, evaluate_plainly, interpret)
    assert failure is not None
    module, test, seed = failure.command.split()[-3:]
    assert module == "aionn.conformance.random_graphs"
    assert random_graphs.main([test, seed]) == 1
    assert str(failure) in capsys.readouterr().out
    monkeypatch.undo()
    assert random_graphs.main([test, seed]) == 0


@pytest.mark.parametrize("arguments", [[], ["ADD_1"], ["NO_SUCH_SET", "0"], ["ADD_1", "x"]])
def test_wrong_arguments_end_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert random_graphs.main(arguments) == 2
    assert "SET SEED" in capsys.readouterr().err


def test_executor_that_raises_is_a_failure_and_made_small() -> None:
    def broken(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
        if any(operation.type == OperationType.TANH for operation in model.main.operations):
            raise GeneralFailure("no TANH here")
        return interpret(model, inputs)

    test = TESTS["LARGE_TENSOR_FLOAT32_1"]
    failures = [check(test, seed, interpret, broken) for seed in range(8)]
    found = [failure for failure in failures if failure is not None]
    assert found
    for failure in found:
        assert failure.error == "GeneralFailure: no TANH here"
        assert [operation.signature for operation in failure.plan.operations] in (["TANH_1"], ["TANH_3"])


def test_executor_that_cannot_run_a_model_is_no_failure() -> None:
    assert check(TESTS["ADD_1"], 0, interpret, lambda model, inputs: None) is None


def test_small_error_in_float16_is_found() -> None:
    def off(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
        return [(array + np.float16(0.125)).astype(np.float16) for array in interpret(model, inputs)]

    found = [check(TESTS["PAD_3"], seed, interpret, off, shrunk=False) for seed in range(5)]
    assert all(failure is not None for failure in found)


def test_unchecked_output_is_not_compared() -> None:
    def other_places(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
        values, places = interpret(model, inputs)
        return [values, places + 1]

    assert check(TESTS["TOPK_V2_3"], 0, interpret, other_places) is None
