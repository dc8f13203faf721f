"""Partitioning, continued: what lower levels are shown, control flow, roles of step memories, sizes that only executions know.

Together with ``test_partition`` these are the counterparts of the original runtime's partitioning tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure, InvalidArgument, InvalidModel
from aionn.hal import (
    DataLocation,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    FeatureLevel,
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
from aionn.ops.document import document
from aionn.runtime.placement import planning
from aionn.runtime.placement.levels import expressed_at, expressible_part, operation_levels
from aionn.runtime.placement.partition import Candidate, Step, choose_devices, make_steps, step_model
from aionn.runtime.placement.planning import LEVEL_OF_ALL
from aionn.testing.models import chain
from aionn.validation import validate_model

Op, L, T = OperationType, OperandLifeTime, OperandType
FAST = ExecutionPreference.FAST_SINGLE_ANSWER
FLOAT = T.TENSOR_FLOAT32
Written = tuple[OperationType, tuple[int, ...], tuple[int, ...]]


def graph(
    operations: Sequence[Written],
    inputs: Sequence[int],
    outputs: Sequence[int],
    shapes: dict[int, tuple[int, ...]] | None = None,
) -> Model:
    """Float tensors of shape [2], or as said; whatever is no argument is a temporary."""
    count = 1 + max(index for _, read, written in operations for index in (*read, *written))
    operands = []
    for index in range(count):
        lifetime = L.TEMPORARY_VARIABLE
        lifetime = L.SUBGRAPH_INPUT if index in inputs else lifetime
        lifetime = L.SUBGRAPH_OUTPUT if index in outputs else lifetime
        operands.append(Operand(FLOAT, (shapes or {}).get(index, (2,)), lifetime=lifetime))
    made = tuple(Operation(*operation) for operation in operations)
    return Model(Subgraph(tuple(operands), made, tuple(inputs), tuple(outputs)))


def supporting(name: str, supported: str, time: float = 1.0, **more: bool) -> Candidate:
    return Candidate(name, uniform_capabilities(time, time), tuple(c == "1" for c in supported), **more)


def steps_of(model: Model, *candidates: Candidate) -> list[Step]:
    steps = make_steps(model, choose_devices(model, candidates, FAST))
    for step in steps:
        validate_model(step_model(model, step))
    return list(steps)


# Levels

LEVELS = chain([Op.RELU, Op.ABS, Op.HARD_SWISH, Op.RSQRT, Op.RELU])  # levels 1, 3, 4, 3, 1


def test_no_operation_needs_more_than_the_level_of_all() -> None:
    known = re.findall(r"level (\d)", document())
    assert len(known) > 100 and max(map(int, known)) <= LEVEL_OF_ALL


@pytest.mark.parametrize("level", [FeatureLevel.LEVEL_3, LEVEL_OF_ALL])
async def test_file_is_validated_here_only_for_devices_of_older_levels(
    level: FeatureLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The importer has checked its operations, and each driver validates what it gets."""
    validated: list[Model] = []

    def noted(model: Model) -> int:
        validated.append(model)
        return validate_model(model)

    monkeypatch.setattr(planning, "validate_model", noted)
    device = ReferenceDevice()
    device.info = msgspec.structs.replace(device.info, feature_level=level)
    async with aionn.open(devices=[device], drivers=[]) as runtime:
        async with await runtime.compile("examples/data/digits_float.tflite") as net:
            assert net.devices == ("reference",)
        assert len(validated) == (level < LEVEL_OF_ALL)


def test_level_of_an_operation_is_the_least_that_can_express_it() -> None:
    assert operation_levels(LEVELS) == (1, 3, 4, 3, 1)


@pytest.mark.parametrize(
    ("level", "kept"), [(1, (0, 4)), (2, (0, 4)), (3, (0, 1, 3, 4)), (4, (0, 1, 2, 3, 4))]
)
def test_slice_has_what_the_level_can_express(level: int, kept: tuple[int, ...]) -> None:
    part = expressible_part(LEVELS, operation_levels(LEVELS), level)
    assert part is not None and part.operation_indexes == kept
    assert validate_model(part.model) <= level
    types = [operation.type for operation in part.model.main.operations]
    assert types == [LEVELS.main.operations[i].type for i in kept]


def test_slice_makes_inputs_and_outputs_of_what_was_cut() -> None:
    part = expressible_part(LEVELS, operation_levels(LEVELS), 1)
    assert part is not None
    assert len(part.model.main.input_indexes) == 2  # the model's, and what RSQRT would have written
    assert len(part.model.main.output_indexes) == 2


def test_nothing_is_left_of_a_model_above_the_level() -> None:
    model = chain([Op.HARD_SWISH])
    assert expressible_part(model, operation_levels(model), 3) is None


def test_value_of_unknown_size_needs_level_3() -> None:
    model = graph([(Op.RELU, (0,), (1,)), (Op.RELU, (1,), (2,))], [0], [2], {1: (0,)})
    assert operation_levels(model) == (3, 3)


def test_control_flow_needs_the_level_of_what_it_contains() -> None:
    assert operation_levels(conditional(Op.RELU)) == (4, 4)
    assert operation_levels(conditional(Op.RELU))[0] >= FeatureLevel.LEVEL_4


def test_relaxed_models_are_exact_to_who_does_not_know_the_word() -> None:
    model = msgspec.structs.replace(chain([Op.RELU]), relax_computation_float32_to_float16=True)
    assert validate_model(model) == 2
    assert validate_model(expressed_at(model, 1)) == 1
    assert expressed_at(model, 2) is model


def test_step_names_only_the_extensions_that_it_uses() -> None:
    model = chain([Op.RELU, Op.ABS])
    operands = list(model.main.operands)
    foreign = Operation(0x20001, (1,), (2,))
    main = Subgraph(tuple(operands), (model.main.operations[0], foreign), (0,), (2,))
    named = (ExtensionNameAndPrefix("com.example.a", 1), ExtensionNameAndPrefix("com.example.b", 2))
    model = Model(main, extension_name_to_prefix=named)
    first, second = steps_of(model, supporting("a", "10"), supporting("b", "01"))
    assert step_model(model, first).extension_name_to_prefix == ()
    assert step_model(model, second).extension_name_to_prefix == named[1:]


class Leveled(ReferenceDevice):
    """Refuses to see anything above its level; it is quicker than the reference device."""

    def __init__(self, level: int, *, failure: Callable[[], Exception] | None = None) -> None:
        super().__init__(f"level{level}")
        self.info = msgspec.structs.replace(
            self.info, feature_level=FeatureLevel(level), capabilities=uniform_capabilities(0.5, 0.5)
        )
        self.failure = failure

    def supports(self, model: Model) -> Sequence[bool]:
        if self.failure is not None:
            raise self.failure()
        assert validate_model(model) <= self.info.feature_level
        return super().supports(model)


@pytest.mark.parametrize(("level", "quick"), [(1, "X  X"), (3, "X XX"), (4, "XXXX")])
async def test_device_gets_the_operations_of_its_level(level: int, quick: str) -> None:
    model = chain([Op.RELU, Op.HARD_SWISH, Op.ABS, Op.RELU], (3,))
    x = np.array([-4.0, 0.5, 3.0], np.float32)
    async with aionn.open(devices=[Leveled(level)], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(model)
        assert "".join("X" if p.device.startswith("level") else " " for p in net.placement) == quick
        expected = await (await runtime.compile(model, devices="reference")).execute([x])
        np.testing.assert_array_equal((await net.execute([x])).outputs[0], expected.outputs[0])


async def test_device_that_fails_to_answer_is_left_out() -> None:
    broken = Leveled(4, failure=lambda: GeneralFailure("planted"))
    async with aionn.open(devices=[broken], drivers=["reference"], isolation="in_process") as runtime:
        assert (await runtime.compile(chain([Op.RELU]))).devices == ("reference",)
        with pytest.raises(GeneralFailure, match="planted"):
            await runtime.compile(chain([Op.RELU]), devices="level4")


async def test_illegal_model_is_refused_before_any_device_is_asked() -> None:
    broken = Leveled(4, failure=lambda: GeneralFailure("planted"))
    bad = graph([(Op.ADD, (0,), (1,))], [0], [1])
    async with aionn.open(devices=[broken], isolation="in_process") as runtime:
        with pytest.raises(InvalidModel, match="operation 0"):
            await runtime.compile(bad)


# The cut


def test_output_that_a_later_step_reads_is_the_callers_as_well() -> None:
    """An output of the model is the input of another device's step: one place, written once."""
    model = graph([(Op.RELU, (0,), (1,)), (Op.ABS, (1,), (2,))], [0], [1, 2])
    first, second = steps_of(model, supporting("a", "10"), supporting("b", "01"))
    assert first.outputs == (1,) and second.inputs == (1,)


def test_value_that_nobody_else_reads_stays_inside() -> None:
    model = graph([(Op.RELU, (0,), (1,)), (Op.ABS, (1,), (2,)), (Op.RELU, (2,), (3,))], [0], [3])
    first, second = steps_of(model, supporting("a", "110"), supporting("b", "001"))
    assert first.outputs == (2,)
    lifetimes = [operand.lifetime for operand in step_model(model, first).main.operands]
    assert lifetimes.count(L.TEMPORARY_VARIABLE) == 1
    assert second.inputs == (2,)


def test_input_of_the_model_goes_to_every_step_that_reads_it() -> None:
    model = graph([(Op.MAXIMUM, (0, 1), (2,)), (Op.MINIMUM, (0, 2), (3,))], [0, 1], [3])
    first, second = steps_of(model, supporting("a", "10"), supporting("b", "01"))
    assert first.inputs == (0, 1) and second.inputs == (0, 2)


def test_step_without_outputs_is_refused() -> None:
    """What one device writes is read by nobody else and is not the caller's."""
    model = graph([(Op.RELU, (0,), (1,)), (Op.ABS, (0,), (2,))], [0], [2])
    with pytest.raises(GeneralFailure, match="RELU has no outputs"):
        steps_of(model, supporting("a", "10"), supporting("b", "01"))


def test_ready_operations_of_a_device_join_its_step() -> None:
    """Two branches over two devices that meet: three steps, not four."""
    model = graph(
        [
            (Op.RELU, (0,), (1,)),
            (Op.ABS, (0,), (2,)),
            (Op.RELU, (1,), (3,)),
            (Op.MAXIMUM, (2, 3), (4,)),
        ],
        [0],
        [4],
    )
    steps = steps_of(model, supporting("a", "1010"), supporting("b", "0101"))
    assert [(s.candidate, s.operations) for s in steps] == [(1, (1,)), (0, (0, 2)), (1, (3,))]


def test_oem_operation_goes_to_who_knows_it_or_nobody() -> None:
    model = graph([(Op.RELU, (0,), (1,)), (Op.OEM_OPERATION, (1,), (2,))], [0], [2])
    assert [s.candidate for s in steps_of(model, supporting("reference", "10"), supporting("oem", "01"))] == [
        0,
        1,
    ]
    with pytest.raises(InvalidArgument, match="no device supports OEM_OPERATION"):
        steps_of(model, supporting("reference", "10", is_reference=True))


# Control flow


def conditional(inside: OperationType, shape: tuple[int, ...] = (2,)) -> Model:
    """RELU, then IF the first input: ``inside``, else RELU."""
    tensor = Operand(FLOAT, shape, lifetime=L.SUBGRAPH_INPUT)
    result = Operand(FLOAT, shape, lifetime=L.SUBGRAPH_OUTPUT)

    def branch(kind: OperationType) -> Subgraph:
        return Subgraph((tensor, result), (Operation(kind, (0,), (1,)),), (0,), (1,))

    def refer(index: int) -> Operand:
        return Operand(T.SUBGRAPH, (), lifetime=L.SUBGRAPH, location=DataLocation(0, index, 0))

    operands = (
        Operand(T.TENSOR_BOOL8, (1,), lifetime=L.SUBGRAPH_INPUT),
        tensor,
        refer(0),
        refer(1),
        result,
        Operand(FLOAT, shape, lifetime=L.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(Op.IF, (0, 2, 3, 1), (4,)), Operation(Op.HARD_SWISH, (1,), (5,)))
    return Model(Subgraph(operands, operations, (0, 1), (4, 5)), (branch(inside), branch(Op.RELU)))


def test_if_is_scored_with_half_of_both_branches() -> None:
    model = conditional(Op.ABS)
    own = PerformanceInfo(0.25, 0.25)
    capabilities = msgspec.structs.replace(uniform_capabilities(2.0, 2.0), if_performance=own)
    choice = choose_devices(model, [Candidate("a", capabilities, (True, True))], FAST)[0]
    assert choice.scores == (0.25 + (2.0 + 2.0) / 2,)


def test_if_goes_as_a_whole_with_its_branches() -> None:
    model = conditional(Op.ABS)
    validate_model(model)
    steps = steps_of(model, supporting("a", "10"), supporting("b", "01"))
    parts = {step.candidate: step_model(model, step) for step in steps}
    assert parts[0].referenced == model.referenced and parts[1].referenced == ()
    assert validate_model(parts[0]) == 4


@pytest.mark.parametrize("reference", [True, False])
def test_control_flow_of_unknown_size_goes_to_the_reference_device_alone(reference: bool) -> None:
    model = conditional(Op.ABS, shape=(0,))
    quick = supporting("quick", "11", time=0.1)
    if reference:
        choices = choose_devices(model, [quick, supporting("reference", "11", is_reference=True)], FAST)
        assert [c.candidate for c in choices] == [1, 0]
    else:
        with pytest.raises(InvalidArgument, match="no device supports IF with values of unknown size"):
            choose_devices(model, [quick], FAST)


@pytest.mark.parametrize("condition", [True, False])
async def test_control_flow_between_two_devices_gives_the_whole_models_answer(condition: bool) -> None:
    model = conditional(Op.ABS)
    inputs = [np.array([condition]), np.array([-4.0, 3.0], np.float32)]
    async with aionn.open(devices=[Leveled(3)], drivers=["reference"], isolation="in_process") as runtime:
        whole = await runtime.compile(model, devices="reference")
        with pytest.raises(InvalidArgument, match="no device supports HARD_SWISH"):
            await runtime.compile(model, devices="level3")
        net = await runtime.compile(model)
        expected = (await whole.execute(inputs)).outputs
        for got, want in zip((await net.execute(inputs)).outputs, expected, strict=True):
            np.testing.assert_array_equal(got, want)


# Sizes that only an execution knows


class Alternating(ReferenceDevice):
    """Supports one kind of operation."""

    def __init__(self, name: str, kind: OperationType) -> None:
        super().__init__(name)
        self.kind = kind

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type == self.kind for operation in model.main.operations]


@pytest.mark.parametrize("shape", [(), (0, 0), (3, 0)])
@pytest.mark.parametrize("rows", [3, 3000])
async def test_value_of_unknown_size_goes_from_device_to_device(shape: tuple[int, ...], rows: int) -> None:
    """Its room is a guess at first and grows to what the device asks for; the next execution knows."""
    if shape == (3, 0):
        rows, columns = 3, rows
    else:
        columns = 4
    unknown = {0: (0, 0), 1: shape, 2: (0, 0), 3: (0, 0)}
    model = graph([(Op.RELU, (0,), (1,)), (Op.ABS, (1,), (2,)), (Op.RELU, (2,), (3,))], [0], [3], unknown)
    devices = [Alternating("a", Op.RELU), Alternating("b", Op.ABS)]
    async with aionn.open(devices=devices, isolation="in_process") as runtime:
        net = await runtime.compile(model)
        assert net.devices == ("a", "b")
        for size in (rows, 3 if shape == (3, 0) else rows * 2, rows):
            x = np.linspace(-1, 1, size * columns, dtype=np.float32).reshape(size, columns)
            (got,) = (await net.execute([x])).outputs
            np.testing.assert_array_equal(got, np.maximum(x, 0))
        with pytest.raises(InvalidArgument, match="expected known shapes"):
            net.burst()


async def test_empty_value_between_devices_needs_the_whole_model_on_the_reference_device() -> None:
    """A request cannot say "no elements": an extent of 0 is an unknown one there."""
    begin = Operand(T.TENSOR_INT32, (1,), lifetime=L.CONSTANT_COPY, location=DataLocation(0, 0, 4))
    size = Operand(T.TENSOR_INT32, (1,), lifetime=L.SUBGRAPH_INPUT)
    operands = (
        Operand(FLOAT, (4,), lifetime=L.SUBGRAPH_INPUT),
        begin,
        size,
        Operand(FLOAT, (0,)),
        Operand(FLOAT, (0,), lifetime=L.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(Op.SLICE, (0, 1, 2), (3,)), Operation(Op.RELU, (3,), (4,)))
    model = Model(Subgraph(operands, operations, (0, 2), (4,)), operand_values=bytes(4))
    devices = [Alternating("a", Op.SLICE), Alternating("b", Op.RELU)]
    inputs = [np.arange(4, dtype=np.float32), np.array([0], np.int32)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        strict = await runtime.compile(model, devices=["a", "b"])
        assert (await strict.execute([inputs[0], np.array([2], np.int32)])).outputs[0].shape == (2,)
        try:
            result = await strict.execute(inputs)
        except GeneralFailure as e:
            assert "no device can be given an empty value" in str(e)
        else:
            pytest.fail(f"expected a failure, got {result}")
