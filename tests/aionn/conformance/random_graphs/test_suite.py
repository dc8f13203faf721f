"""Claims about random graphs on devices: numbers mean graphs, unsupported operations are left out, differences are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import aionn.conformance.random_graphs.graphs as random_graphs
from aionn.conformance.expectations import Expectations, Subject, driver_expectations
from aionn.conformance.random_graphs.graphs import Plan, compare, draw_plan, interpret, make_case
from aionn.conformance.random_graphs.plain import PlainCall
from aionn.conformance.random_graphs.plain_evaluation import Disturbance, evaluate_plainly
from aionn.conformance.random_graphs.sets import TESTS
from aionn.conformance.random_graphs.suite import (
    NUMBER_MAX,
    TOO_LARGE,
    RandomSettings,
    chosen_sets,
    graph_name,
    load_plan,
    locate,
    operations_of,
    run_graph,
    run_plan,
)
from aionn.conformance.suite import DeviceUnderTest, Outcome
from aionn.conformance.workers import run_random_suite
from aionn.drivers import registry
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import InvalidArgument
from aionn.hal import Device, Model, Operand, OperandType, OperationType
from aionn.ops.numerics import geometry

KEPT = sorted((Path(__file__).parent / "failures").glob("*.json"))
"""Graphs on which a driver once failed, as small as they got."""


class WrongPrepared(ReferencePreparedModel):
    """Adds one to the first output of a model with TANH in it, and gives no answer to one with FLOOR."""

    def run(self, inputs: Any, outputs: Any, control: Any) -> Any:
        result = super().run(inputs, outputs, control)
        if any(operation.type == OperationType.TANH for operation in self.model.main.operations):
            outputs[0][...] += 1
        if any(operation.type == OperationType.FLOOR for operation in self.model.main.operations):
            raise ValueError("no FLOOR here")
        return result


class WrongDevice(ReferenceDevice):
    """Computes TANH wrongly and does not support RELU."""

    def prepare(self, model: Model, **arguments: Any) -> Any:
        return WrongPrepared(self, model, arguments["priority"])

    def supports(self, model: Model) -> Any:
        return tuple(operation.type != OperationType.RELU for operation in model.main.operations)


def under_test(device: Device) -> DeviceUnderTest:
    async def make() -> Device:
        return device

    return DeviceUnderTest(make)


async def outcome_of(plan: Plan, **settings: Any) -> Outcome:
    device = under_test(WrongDevice("wrong"))
    try:
        return await run_plan(device, "planned", plan, RandomSettings(**settings), kept_as="planned.json")
    finally:
        await device.aclose()


def plan_with(*signatures: str, test: str = "LARGE_TENSOR_FLOAT32_2") -> Plan:
    """A plan of the first operations of a set's plans that have these signatures."""
    for seed in range(200):
        plan = draw_plan(TESTS[test], seed)
        chosen = [next((o for o in plan.operations if o.signature == s), None) for s in signatures]
        if all(chosen):
            small = msgspec.structs.replace(plan, operations=tuple(o for o in chosen if o), links=())
            if make_case(small) is not None:
                return small
    raise AssertionError(f"no plan with {signatures}")


def test_numbers_go_by_turns_through_graphs_and_single_operations() -> None:
    graphs, single = chosen_sets("")
    assert {t.name for t in graphs} | {t.name for t in single} == set(TESTS)
    count = 2 * len(graphs) * len(single)
    located = {(test.name, seed) for test, seed in map(locate, range(count))}
    assert len(located) == count
    assert {name for name, _ in located} == set(TESTS)
    assert all(locate(n)[0] in graphs for n in range(0, 10, 2))
    assert all(locate(n)[0] in single for n in range(1, 10, 2))


def test_filter_leaves_numbers_for_its_sets_alone() -> None:
    assert locate(5, "MEAN_2") == (TESTS["MEAN_2"], 5)
    assert {locate(n, "CHAIN")[0].name[:5] for n in range(20)} == {"CHAIN"}


@pytest.mark.parametrize("number", [-1, NUMBER_MAX])
def test_number_outside_of_its_range_is_rejected(number: int) -> None:
    with pytest.raises(InvalidArgument, match="expected a number from 0"):
        locate(number)


def test_filter_that_no_set_has_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="NO_SUCH_SET"):
        locate(0, "NO_SUCH_SET")


async def test_graph_that_agrees_passes_and_counts_its_operations() -> None:
    outcome = await outcome_of(plan_with("ABS_3", "LOGISTIC_1"))
    assert (outcome.verdict, outcome.operations) == ("passed", ("ABS", "LOGISTIC"))


async def test_unsupported_operations_are_left_out() -> None:
    assert (await outcome_of(plan_with("RELU_1", "ABS_3"))).operations == ("ABS",)
    assert (await outcome_of(plan_with("RELU_1"))).verdict == "skipped"


async def test_wrong_operation_is_named_and_its_smallest_plan_kept(tmp_path: Path) -> None:
    outcome = await outcome_of(plan_with("ABS_3", "TANH_1", "LOGISTIC_1"), keep=str(tmp_path))
    assert outcome.verdict == "failed" and outcome.failure is not None
    assert outcome.failure.operation.startswith("TANH_1.TENSOR_FLOAT32, kept as")
    plan = load_plan(tmp_path / "planned.json")
    assert operations_of(plan) == ("TANH",)
    assert (await outcome_of(plan)).verdict == "failed"


async def test_driver_that_raises_is_a_failure_with_its_words() -> None:
    outcome = await outcome_of(plan_with("FLOOR_1"))
    assert outcome.failure is not None
    assert "no FLOOR here" in outcome.failure.got


async def test_difference_on_the_drivers_list_is_expected_only_alone() -> None:
    lists = Expectations(expected_differences={"TANH": "rough"})
    both = plan_with("ABS_3", "TANH_1")
    outcome = await outcome_of(both, expectations=lists)
    assert (outcome.verdict, outcome.reason) == ("expected_failure", "rough")
    name, operations = graph_name(both), frozenset(operations_of(both))
    assert name == "ABS_3.TENSOR_FLOAT32+TANH_1.TENSOR_FLOAT32"
    assert lists.why_different(Subject(name, operations, frozenset())) is None
    chosen = Expectations(expected_differences={"ABS_*+TANH_*": "together"})
    assert chosen.why_different(Subject(name, operations, frozenset())) == "together"


@pytest.mark.parametrize("is_reference", [False, True])
async def test_graph_that_the_reference_rejects_for_its_memory_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, is_reference: bool
) -> None:
    plan = plan_with("CONV_2D_implicit_1", test="SMALL_TENSOR_FLOAT32_4")
    device = under_test(ReferenceDevice("reference"))
    try:
        passed = await run_plan(device, "planned", plan, RandomSettings(is_reference=is_reference))
        monkeypatch.setattr(geometry, "WORKING_BYTES_MAX", 0)
        monkeypatch.setattr(geometry, "WORKING_RATIO_MAX", 0)
        skipped = await run_plan(device, "planned", plan, RandomSettings(is_reference=is_reference))
    finally:
        await device.aclose()
    assert passed.verdict == "passed"
    assert (skipped.verdict, skipped.reason) == ("skipped", TOO_LARGE)


async def test_difference_that_rounding_decides_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step function of a sum: a device that sums in another order gets another step here and there."""
    halves = plan_with("ADD_1")
    case = make_case(halves)
    assert case is not None
    test = TESTS[halves.test]

    def floor(disturb: float) -> list[Any]:
        return [
            np.floor((array + np.float32(disturb)) * 4096) for array in interpret(case.model, case.inputs)
        ]

    monkeypatch.setattr(
        random_graphs,
        "evaluate_plainly",
        lambda model, inputs, disturb=None: floor(1e-3 * (disturb is not None)),
    )
    found: list[Any] = []
    assert compare(case, lambda m, i: floor(0), lambda m, i: floor(2e-3), undetermined=found) is None
    assert len(found) == 1
    assert compare(case, lambda m, i: floor(0), lambda m, i: floor(2e-3)) is not None, test.name
    monkeypatch.setattr(random_graphs, "evaluate_plainly", lambda model, inputs, disturb=None: floor(0))
    assert compare(case, lambda m, i: floor(0), lambda m, i: floor(2e-3), undetermined=[]) is not None


def test_disturbance_leaves_alone_what_only_moves() -> None:
    for seed in range(5):
        case = make_case(draw_plan(TESTS["TRANSPOSE_2"], seed))
        assert case is not None
        disturb = Disturbance(np.random.default_rng(seed))
        for a, b in zip(
            evaluate_plainly(case.model, case.inputs),
            evaluate_plainly(case.model, case.inputs, disturb=disturb),
        ):
            np.testing.assert_array_equal(a, b)
    case = make_case(draw_plan(TESTS["LOGISTIC_1"], 0))
    assert case is not None
    disturb = Disturbance(np.random.default_rng(0))
    (a,), (b,) = (evaluate_plainly(case.model, case.inputs, disturb=d) for d in (None, disturb))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("large_first", [True, False])
def test_product_whose_order_decides_whether_it_overflows_is_not_determined(large_first: bool) -> None:
    large, small = np.full(600, 1e3, np.float32), np.full(600, 1e-4, np.float32)
    elements = np.concatenate([large, small] if large_first else [small, large])
    call = PlainCall(
        OperationType.REDUCE_PROD,
        [Operand(OperandType.TENSOR_FLOAT32, (1200,)), Operand(OperandType.TENSOR_INT32, (1,))],
        [elements, np.zeros(1, np.int32)],
        [Operand(OperandType.TENSOR_FLOAT32, (1,))],
    )
    results = set()
    for seed in range(8):
        disturb = Disturbance(np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            results.add(float(disturb(call, call.outputs[0], np.zeros(1, np.float32))[0]))
    assert results == {0.0, np.inf}
    near = PlainCall(
        call.operation, call.operands, [np.full(1200, 1.001, np.float32), call.stored[1]], call.outputs
    )
    product = np.full(1, 1.001**1200, np.float32)
    np.testing.assert_allclose(disturb(near, near.outputs[0], product), product, rtol=1e-3)


def test_disturbance_makes_numbers_equal_that_are_nearly_equal() -> None:
    operand = Operand(OperandType.TENSOR_FLOAT32, (4,))
    call = PlainCall(OperationType.LOG_SOFTMAX, [operand], [np.zeros(4, np.float32)], [operand])
    given = np.array([-1e-11, -50, 1.25, np.float32(1.25) + np.float32(1e-7)], np.float32)
    results = [Disturbance(np.random.default_rng(seed))(call, operand, given) for seed in range(8)]
    for result in results:
        np.testing.assert_allclose(result, given, atol=1e-4)
    assert {(bool(r[0] == 0), bool(r[2] == r[3])) for r in results} >= {(True, True), (False, False)}


def test_disturbance_leaves_infinities_alone() -> None:
    case = make_case(draw_plan(TESTS["LOGISTIC_1"], 0))
    assert case is not None
    operand = case.model.main.outputs[0]
    call = PlainCall(OperationType.LOGISTIC, [operand], [np.zeros(3, np.float32)], [operand])
    disturb = Disturbance(np.random.default_rng(0))
    got = disturb(call, operand, np.array([np.inf, -np.inf, 1], np.float32))
    assert got[0] == np.inf and got[1] == -np.inf and np.isfinite(got[2])


async def test_device_that_hangs_is_replaced_and_its_graph_fails() -> None:
    class HangingDevice(ReferenceDevice):
        def supports(self, model: Model) -> Any:
            return (True,) * len(model.main.operations)

        async def prepare_model(self, *arguments: Any, **options: Any) -> Any:
            await anyio.sleep_forever()

    made = []

    async def make() -> Device:
        made.append(HangingDevice("hanging"))
        return made[-1]

    device = DeviceUnderTest(make)
    outcome = await run_plan(device, "planned", plan_with("ABS_3"), RandomSettings(time_limit_s=0.05))
    assert outcome.failure is not None and "within 0.05 s" in outcome.failure.got
    assert (await run_graph(device, 0, RandomSettings(time_limit_s=0.05))).verdict == "failed"
    assert len(made) > 1
    await device.aclose()
    for one in made:
        await one.aclose()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"test": "ADD_1"}',
        '{"test":"?","seed":0,"operations":[],"links":[],"extent_max":1}',
        '{"other":' + "[" * 5000,
    ],
    ids=["empty", "cut off", "no object", "without fields", "no test", "deep"],
)
def test_file_that_is_no_plan_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("count", [30, pytest.param(60, marks=pytest.mark.long)])
async def test_reference_agrees_on_graphs_of_all_kinds(count: int) -> None:
    report = await run_random_suite("reference", range(count), isolation="in_process")
    assert (report.failed, report.passed) == (0, count), report.failures


@pytest.mark.parametrize("count", [24, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.thorough
async def test_graphs_are_shared_by_processes(count: int) -> None:
    seen, seeds = [], range(40, 40 + count)
    report = await run_random_suite("reference", seeds, jobs=2, progress=lambda t, n: seen.append(n))
    assert (report.failed, report.passed) == (0, count), report.failures
    assert seen == [count] * count


@pytest.mark.sampled(4)
@pytest.mark.parametrize("driver", ["reference", "litert-cpu"])
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
async def test_graph_that_once_failed_passes(driver: str, path: Path) -> None:
    if driver == "litert-cpu":
        pytest.importorskip("ai_edge_litert")
    device = under_test(registry.make_device(driver, driver))
    settings = RandomSettings(expectations=driver_expectations(driver))
    try:
        outcome = await run_plan(device, path.stem, load_plan(path), settings)
    finally:
        await device.aclose()
    assert outcome.verdict != "failed", str(outcome.failure)


def test_kept_plans_still_make_graphs() -> None:
    for path in KEPT:
        case = make_case(load_plan(path))
        assert case is not None, path.name
        assert all(isinstance(array, np.ndarray) for array in case.inputs)
