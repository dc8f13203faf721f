"""Which operation goes where, how the work is cut, and that a cut model gives the whole model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.kit.engines.device import measured_capabilities
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    Capabilities,
    ExecutionPreference,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    PerformanceInfo,
    Subgraph,
    uniform_capabilities,
)
from aionn.models.tflite import load_tflite
from aionn.runtime.placement.partition import (
    Candidate,
    choose_devices,
    make_steps,
    may_be_chosen,
    step_model,
)
from aionn.validation import validate_model

FAST = ExecutionPreference.FAST_SINGLE_ANSWER
SHAPE = (2, 3)


def chain(*types: OperationType) -> Model:
    """One input through element-wise operations, each reading the one before."""
    tensor = OperandType.TENSOR_FLOAT32
    lifetimes = [OperandLifeTime.SUBGRAPH_INPUT, *[OperandLifeTime.TEMPORARY_VARIABLE] * (len(types) - 1)]
    operands = [Operand(tensor, SHAPE, lifetime=lifetime) for lifetime in lifetimes]
    operands.append(Operand(tensor, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT))
    operations = tuple(Operation(t, (i,), (i + 1,)) for i, t in enumerate(types))
    return Model(Subgraph(tuple(operands), operations, (0,), (len(types),)))


def candidate(
    name: str, supported: Sequence[bool], time: float = 1.0, power: float = 1.0, *, is_reference: bool = False
) -> Candidate:
    return Candidate(name, uniform_capabilities(time, power), tuple(supported), is_reference)


MODEL = chain(OperationType.RELU, OperationType.ABS, OperationType.RELU, OperationType.ABS)
ALL = (True,) * 4


def test_lowest_time_wins_and_power_where_that_is_preferred() -> None:
    candidates = [candidate("quick", ALL, time=0.5, power=2.0), candidate("frugal", ALL, time=0.9, power=0.1)]
    assert {c.candidate for c in choose_devices(MODEL, candidates, FAST)} == {0}
    assert {c.candidate for c in choose_devices(MODEL, candidates, ExecutionPreference.LOW_POWER)} == {1}
    assert choose_devices(MODEL, candidates, FAST)[0].scores == (0.5, 0.9)


def test_ties_go_to_the_reference_device_then_to_the_earlier_one() -> None:
    first, second = candidate("a", ALL), candidate("b", ALL)
    reference = candidate("reference", ALL, is_reference=True)
    choice = choose_devices(MODEL, [first, second], FAST)[0]
    assert choice.candidate == 0 and choice.reason == "first of equals (a 1, b 1)"
    choice = choose_devices(MODEL, [first, second, reference], FAST)[0]
    assert choice.candidate == 2
    assert choice.reason == "the reference device wins ties (a 1, b 1, reference 1)"
    choice = choose_devices(MODEL, [reference, candidate("b", ALL, time=2.0)], FAST)[0]
    assert choice.candidate == 0 and choice.reason == "lowest score (reference 1, b 2)"


def test_device_is_asked_unless_another_one_is_better_for_every_operation() -> None:
    quick, slow = candidate("quick", ALL, time=0.5, power=2.0), candidate("slow", ALL, time=0.6, power=0.1)
    part = candidate("part", (True, True, True, False), time=0.1)
    assert not may_be_chosen(MODEL, slow.capabilities, [part, quick], FAST)
    assert may_be_chosen(MODEL, slow.capabilities, [quick], ExecutionPreference.LOW_POWER)
    assert may_be_chosen(MODEL, quick.capabilities, [quick], FAST), "an equal may win"
    assert may_be_chosen(MODEL, slow.capabilities, [part], FAST), "it may take the rest"
    assert may_be_chosen(MODEL, slow.capabilities, [], FAST)


def test_device_is_asked_that_is_better_for_one_type() -> None:
    signed = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    other = measured_capabilities(0.6, 0.1)
    quick = candidate("quick", (True,) * 2, time=0.5)
    operands = tuple(
        Operand(kind, SHAPE, lifetime=lifetime, scale=scale)
        for kind, scale in ((OperandType.TENSOR_FLOAT32, 0.0), (signed, 1.0))
        for lifetime in (OperandLifeTime.SUBGRAPH_INPUT, OperandLifeTime.SUBGRAPH_OUTPUT)
    )
    relu = OperationType.RELU
    both = Model(
        Subgraph(operands, (Operation(relu, (0,), (1,)), Operation(relu, (2,), (3,))), (0, 2), (1, 3))
    )
    floats = Model(Subgraph(operands[:2], (Operation(relu, (0,), (1,)),), (0,), (1,)))
    assert may_be_chosen(both, other, [quick], FAST)
    assert not may_be_chosen(floats, other, [quick], FAST)


def test_reason_names_the_devices_that_were_not_asked() -> None:
    quick = candidate("quick", ALL, time=0.5)
    unasked = msgspec.structs.replace(candidate("slow", (False,) * 4), is_asked=False)
    choice = choose_devices(MODEL, [quick, unasked], FAST)[0]
    assert choice.candidate == 0 and choice.reason == "lowest score (quick 0.5; slower and not asked: slow)"


async def test_process_that_would_get_no_work_is_not_started() -> None:
    class Timed(ReferenceDevice):
        def __init__(self, name: str, time: float) -> None:
            super().__init__(name)
            self.info = msgspec.structs.replace(self.info, capabilities=uniform_capabilities(time, time))

    class Unasked(Timed):
        async def supported_operations(self, model: Model) -> tuple[bool, ...]:
            raise aionn.GeneralFailure("it is not asked")

    devices = [Timed("better", 0.2), Unasked("worse", 0.3)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(MODEL)
        assert net.devices == ("better",)
        assert "not asked: worse" in net.placement[0].reason
        with pytest.raises(aionn.GeneralFailure, match="it is not asked"):
            await runtime.compile(MODEL, devices=["worse"])


def test_operation_that_nobody_supports_is_named_with_all_others() -> None:
    none = candidate("a", (False, True, False, False))
    with pytest.raises(InvalidArgument, match=r"no device supports ABS, RELU \(asked: a\)"):
        choose_devices(MODEL, [none], FAST)


def test_one_device_gives_one_step() -> None:
    (step,) = make_steps(MODEL, choose_devices(MODEL, [candidate("a", ALL)], FAST))
    assert step.operations == (0, 1, 2, 3) and step.inputs == (0,) and step.outputs == (4,)


def test_alternating_support_gives_a_step_each() -> None:
    relu = candidate("relu", (True, False, True, False))
    rest = candidate("abs", (False, True, False, True))
    steps = make_steps(MODEL, choose_devices(MODEL, [relu, rest], FAST))
    assert [(s.candidate, s.operations, s.inputs, s.outputs) for s in steps] == [
        (0, (0,), (0,), (1,)),
        (1, (1,), (1,), (2,)),
        (0, (2,), (2,), (3,)),
        (1, (3,), (3,), (4,)),
    ]


def test_last_device_is_drained_first() -> None:
    """Two independent operations: the one on the later device runs first."""
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(tensor, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
        Operand(tensor, SHAPE, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(OperationType.RELU, (0,), (1,)), Operation(OperationType.ABS, (0,), (2,)))
    model = Model(Subgraph(operands, operations, (0,), (1, 2)))
    candidates = [candidate("a", (True, False)), candidate("b", (False, True))]
    steps = make_steps(model, choose_devices(model, candidates, FAST))
    assert [s.candidate for s in steps] == [1, 0]


def test_step_without_inputs_is_refused() -> None:
    """An operation on constants alone cannot be a step of its own."""
    tensor = OperandType.TENSOR_FLOAT32
    constant = Operand(tensor, (1,), lifetime=OperandLifeTime.CONSTANT_COPY)
    operands = (
        constant,
        Operand(tensor, (1,)),
        Operand(tensor, (1,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(OperationType.RELU, (0,), (1,)), Operation(OperationType.ABS, (1,), (2,)))
    model = Model(Subgraph(operands, operations, (), (2,)), operand_values=bytes(4))
    candidates = [candidate("a", (True, False)), candidate("b", (False, True))]
    with pytest.raises(GeneralFailure, match="RELU has no inputs"):
        make_steps(model, choose_devices(model, candidates, FAST))


def test_relaxed_models_use_the_relaxed_entries() -> None:
    import msgspec

    relaxed = msgspec.structs.replace(MODEL, relax_computation_float32_to_float16=True)
    slow, quick = PerformanceInfo(2.0, 2.0), PerformanceInfo(0.1, 0.1)
    capabilities = Capabilities(quick, quick, uniform_capabilities(2.0, 2.0).operand_performance, slow, slow)
    candidates = [Candidate("half", capabilities, ALL), candidate("other", ALL)]
    assert choose_devices(MODEL, candidates, FAST)[0].candidate == 1
    assert choose_devices(relaxed, candidates, FAST)[0].candidate == 0


@pytest.mark.parametrize("name", ["shapes_int8", "digits_float"])
def test_models_of_steps_are_valid_and_cover_every_operation(example_data: Path, name: str) -> None:
    model = load_tflite(example_data / f"{name}.tflite").model
    random = Random(name)
    supported = [tuple(random.random() < 0.5 for _ in model.main.operations) for _ in range(2)]
    candidates = [candidate(str(i), s, time=0.5) for i, s in enumerate(supported)]
    candidates.append(candidate("reference", (True,) * len(model.main.operations), is_reference=True))
    steps = make_steps(model, choose_devices(model, candidates, FAST))
    assert len(steps) > 2
    assert sorted(o for s in steps for o in s.operations) == list(range(len(model.main.operations)))
    for step in steps:
        validate_model(step_model(model, step))


class Partial(ReferenceDevice):
    """The reference device, made to support a pseudo-random subset of the operations, and to seem quicker."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        import msgspec

        self.info = msgspec.structs.replace(self.info, capabilities=uniform_capabilities(0.5, 0.5))

    def supports(self, model: Model) -> Sequence[bool]:
        if len(model.main.operations) < 8:  # a step of ours: what was promised for the whole model holds
            return [True] * len(model.main.operations)
        random = Random(f"{self.info.name} {len(model.main.operations)}")
        return [random.random() < 0.5 for _ in model.main.operations]


async def test_cut_model_gives_the_whole_models_answer(
    example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aionn.drivers import registry

    def factory(name: str) -> object:
        return (lambda device: Partial(device)) if name == "partial" else ReferenceDevice

    monkeypatch.setattr(registry, "load_factory", factory)
    drivers = {"left": "partial", "right": "partial", "reference": "reference"}
    async with aionn.open(drivers=drivers, isolation="in_process") as runtime:
        path = example_data / "shapes_int8.tflite"
        whole = await runtime.compile(path, devices="reference")
        cut = await runtime.compile(path)
        assert len(cut.devices) == 3
        assert {p.device for p in cut.placement} == set(cut.devices)
        generator = np.random.default_rng(5)
        for _ in range(3):
            value = generator.integers(-128, 128, (1, 96, 96, 3)).astype(np.int8)
            expected = (await whole.execute([value])).outputs[0]
            np.testing.assert_array_equal((await cut.execute([value])).outputs[0], expected)
            async with cut.burst() as burst:
                result = await burst.execute([value], measure=True)
            np.testing.assert_array_equal(result.outputs[0], expected)
            assert result.timing.time_on_device_ns is not None
            assert result.device == ", ".join(cut.devices)
