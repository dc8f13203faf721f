"""Claims about values at the edges of their types: they are drawn where results are defined, and differences there are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.conformance.random_graphs.edges import edges_of_floats, edges_of_integers
from aionn.conformance.random_graphs.graphs import compare, draw_case, interpret
from aionn.conformance.random_graphs.plain_evaluation import evaluate_plainly
from aionn.conformance.random_graphs.sets import EDGE_TESTS, TESTS
from aionn.conformance.random_graphs.suite import graph_name, locate
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    operand_dtype,
)

Array = npt.NDArray[Any]
Executor = Callable[[Model, Sequence[Array | None]], list[Array]]
SEEDS = 60

INT32, FLOAT32 = TESTS["EDGE_TENSOR_INT32"], TESTS["EDGE_TENSOR_FLOAT32"]


def found(name: str, change: Callable[[Array], Array]) -> set[str]:
    """The graphs of a set, by name, on which an executor differs that changes the results of the reference."""

    def changed(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
        return [change(array) for array in interpret(model, inputs)]

    names = set()
    for seed in range(SEEDS):
        case = draw_case(TESTS[name], seed)
        if compare(case, interpret, changed) is not None:
            names.add(graph_name(case.plan))
    return names


@pytest.mark.parametrize("test", EDGE_TESTS, ids=lambda test: test.name)
@pytest.mark.parametrize("seeds", [12, pytest.param(4_000, marks=pytest.mark.long)])
@pytest.mark.sampled(2)
def test_reference_agrees_with_the_plain_definitions_at_the_edges(test: Any, seeds: int) -> None:
    for seed in range(seeds):
        failure = compare(draw_case(test, seed), evaluate_plainly, interpret, undetermined=[])
        assert failure is None, str(failure)


def one_operation(type: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Model:
    operands = (*inputs, *outputs)
    given = tuple(range(len(inputs)))
    made = tuple(range(len(inputs), len(operands)))
    return Model(main=Subgraph(operands, (Operation(type, given, made),), given, made))


def input_of(type: OperandType, shape: tuple[int, ...]) -> Operand:
    return Operand(type, shape, lifetime=OperandLifeTime.SUBGRAPH_INPUT)


def output_of(type: OperandType, shape: tuple[int, ...]) -> Operand:
    scale = 1.0 if type == OperandType.TENSOR_QUANT8_ASYMM else 0.0
    return Operand(type, shape, scale, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT)


@pytest.mark.parametrize("execute", [evaluate_plainly, interpret])
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (OperandType.TENSOR_INT32, [0, 2**31 - 1, -(2**31), -2, 255]),
        (OperandType.TENSOR_QUANT8_ASYMM, [0, 255, 0, 0, 255]),
    ],
    ids=["int32", "quant8"],
)
@pytest.mark.parametrize(
    "source", [OperandType.TENSOR_FLOAT16, OperandType.TENSOR_FLOAT32], ids=lambda t: t.name
)
def test_nan_and_infinities_become_integers_alike_on_each_processor(
    execute: Executor, source: OperandType, target: OperandType, expected: list[int]
) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -2.5, 255.5], operand_dtype(source))
    model = one_operation(OperationType.CAST, [input_of(source, (5,))], [output_of(target, (5,))])
    assert execute(model, [values])[0].tolist() == expected


@pytest.mark.parametrize("execute", [evaluate_plainly, interpret])
@pytest.mark.parametrize(
    "type", [OperandType.TENSOR_FLOAT16, OperandType.TENSOR_FLOAT32], ids=lambda t: t.name
)
def test_nan_is_larger_than_infinity_among_the_largest(execute: Executor, type: OperandType) -> None:
    values = np.array([np.inf, 1.0, np.nan, -np.inf, np.inf], operand_dtype(type))
    model = one_operation(
        OperationType.TOPK_V2,
        [input_of(type, (5,)), input_of(OperandType.INT32, ())],
        [output_of(type, (4,)), output_of(OperandType.TENSOR_INT32, (4,))],
    )
    largest = execute(model, [values, np.array(4, np.int32)])[0]
    np.testing.assert_array_equal(largest, [np.nan, np.inf, np.inf, 1.0])


def test_integers_of_the_whole_range_and_infinities_are_drawn() -> None:
    info = np.iinfo(np.int32)
    whole = np.concatenate(
        [a.ravel() for s in range(SEEDS) for a in draw_case(INT32, s).inputs if a.dtype == np.int32]
    )
    assert {info.min, info.max} <= set(whole.tolist())
    assert np.median(np.abs(whole.astype(np.int64))) > 2**20
    real = [a.ravel() for s in range(SEEDS) for a in draw_case(FLOAT32, s).inputs if a.dtype == np.float32]
    drawn = np.concatenate(real)
    assert np.isnan(drawn).any() and {np.inf, -np.inf} <= set(drawn.tolist())
    assert (np.signbit(drawn) & (drawn == 0)).any()
    assert not ((drawn != 0) & (np.abs(drawn) < np.finfo(np.float32).tiny)).any()


def test_sums_get_no_infinities_and_extrema_no_nan() -> None:
    dtype = np.dtype(np.float32)
    assert np.isfinite(edges_of_floats(OperationType.REDUCE_SUM, dtype)).all()
    assert np.isfinite(edges_of_floats(OperationType.CONV_2D, dtype)).all()
    extrema = edges_of_floats(OperationType.REDUCE_MAX, dtype)
    assert np.isinf(extrema).any() and not np.isnan(extrema).any()
    assert np.isnan(edges_of_floats(OperationType.MAXIMUM, dtype)).any()


def test_ends_and_zero_point_of_quantised_types_are_edges() -> None:
    assert set(edges_of_integers(np.dtype(np.int8), 3).tolist()) == {-128, -127, 3, 126, 127}


def test_integer_that_is_off_by_one_is_found() -> None:
    assert found("EDGE_TENSOR_INT32", lambda a: a ^ 1 if a.dtype == np.int32 else a)


def test_integer_that_passed_through_float32_is_found() -> None:
    names = found("EDGE_TENSOR_INT32", lambda a: a.astype(np.float32).astype(np.int64).astype(a.dtype))
    assert any(name.startswith("edges/ADD") or "RESHAPE" in name for name in names)


def test_nan_that_became_a_number_is_found() -> None:
    assert found("EDGE_TENSOR_FLOAT32", lambda a: np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf))


def test_edge_sets_have_numbers_and_names_of_their_own() -> None:
    assert {locate(n)[0].name for n in range(0, 200, 2)} >= {test.name for test in EDGE_TESTS}
    assert graph_name(draw_case(INT32, 0).plan).startswith("edges/")
    assert INT32.type == OperandType.TENSOR_INT32
