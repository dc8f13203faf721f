"""The older versions' types: what they can express, and that converting there and back changes nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aionn.drivers.versions.conversion import (
    NO_TIME_US,
    CapabilitiesV1_0,
    CapabilitiesV1_1,
    HalVersion,
    ModelV1_0,
    ModelV1_1,
    ModelV1_2,
    OperandV1_2,
    TimingV1_2,
    capabilities_are_compliant,
    convert_capabilities,
    convert_model,
    convert_request,
    convert_status,
    convert_timing,
    noncompliant_operations,
    request_breach,
    upgrade_capabilities,
    upgrade_model,
    upgrade_timing,
)
from aionn.drivers.versions.device import operation_levels
from aionn.errors import ErrorStatus, InvalidArgument, InvalidModel
from aionn.hal import (
    NO_PERFORMANCE,
    BufferToken,
    Capabilities,
    Memory,
    MemoryKind,
    Model,
    OperandPerformance,
    OperandType,
    OperationType,
    PerformanceInfo,
    Request,
    Timing,
    uniform_capabilities,
)
from aionn.hal.slicing import slice_model
from aionn.models.builder import GraphBuilder
from aionn.validation import check_capabilities, validate_model

V1_0, V1_1, V1_2, V1_3 = HalVersion
OLD = (V1_0, V1_1, V1_2)


def chain(*operations: OperationType, dimensions: tuple[int, ...] = (2, 3), relaxed: bool = False) -> Model:
    """Unary operations one after the other; ADD takes its input twice."""
    graph = GraphBuilder(relaxed=relaxed)
    value = graph.input(OperandType.TENSOR_FLOAT32, dimensions)
    for operation in operations:
        inputs = [value, value, graph.constant(0)] if operation == OperationType.ADD else [value]
        value = graph.result(operation, inputs, value)
    return graph.build([value])


def breaches(model: Model, version: HalVersion) -> set[int]:
    validate_model(model)
    return set(noncompliant_operations(model, version, operation_levels(model)))


def test_operations_are_compliant_from_their_level_on() -> None:
    model = chain(
        OperationType.ADD, OperationType.ABS, OperationType.HARD_SWISH, OperationType.FLOOR, OperationType.EXP
    )
    assert breaches(model, V1_0) == breaches(model, V1_1) == {1, 2, 4}
    assert breaches(model, V1_2) == {2}
    assert breaches(model, V1_3) == set()


@pytest.mark.parametrize(
    ("kind", "since"),
    [
        (OperandType.TENSOR_FLOAT32, V1_0),
        (OperandType.TENSOR_QUANT8_ASYMM, V1_0),
        (OperandType.TENSOR_FLOAT16, V1_2),
        (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, V1_3),
    ],
)
def test_types_are_compliant_from_their_level_on(kind: OperandType, since: HalVersion) -> None:
    graph = GraphBuilder()
    quantized = {"scale": 0.5} if "QUANT" in kind.name else {}
    a = graph.input(kind, (2, 3), **quantized)  # type: ignore[arg-type]
    model = graph.build([graph.result(OperationType.RELU, [a], a)])
    assert [bool(breaches(model, version)) for version in HalVersion] == [v < since for v in HalVersion]


@pytest.mark.parametrize("dimensions", [(), (0, 3)])
def test_open_shapes_are_compliant_from_1_2_on(dimensions: tuple[int, ...]) -> None:
    model = chain(OperationType.RELU, dimensions=dimensions)
    assert [bool(breaches(model, version)) for version in HalVersion] == [True, True, False, False]


def test_relaxed_model_is_compliant_with_1_0_and_loses_the_flag_with_a_warning() -> None:
    model = chain(OperationType.ADD, relaxed=True)
    assert breaches(model, V1_0) == set()
    old, warnings = convert_model(model, V1_0)
    assert type(old) is ModelV1_0 and len(warnings) == 1
    assert not upgrade_model(old).relax_computation_float32_to_float16
    for version, type_ in ((V1_1, ModelV1_1), (V1_2, ModelV1_2)):
        old, warnings = convert_model(model, version)
        assert type(old) is type_ and warnings == ()
        assert upgrade_model(old) == model


@pytest.mark.parametrize("version", OLD)
def test_compliant_model_comes_back_as_it_was(version: HalVersion) -> None:
    model = chain(OperationType.ADD, OperationType.FLOOR)
    old, warnings = convert_model(model, version)
    assert warnings == () and upgrade_model(old) == model
    assert [operand.consumer_count for operand in old.operands] == [
        sum(list(o.inputs).count(i) for o in model.main.operations) for i in range(len(model.main.operands))
    ]
    assert all(isinstance(o, OperandV1_2) == (version == V1_2) for o in old.operands)
    assert not hasattr(old.operands[0], "extension_data") or version == V1_2


def test_wrong_consumer_count_is_refused_on_the_way_in() -> None:
    old, _ = convert_model(chain(OperationType.ADD), V1_0)
    first = msgspec.structs.replace(old.operands[0], consumer_count=1)
    with pytest.raises(InvalidModel, match="consumer count: expected 2, got 1"):
        upgrade_model(msgspec.structs.replace(old, operands=(first, *old.operands[1:])))


def test_what_a_version_cannot_express_is_not_converted() -> None:
    with pytest.raises(InvalidModel, match="unknown rank"):
        convert_model(chain(OperationType.RELU, dimensions=()), V1_1)
    model = chain(OperationType.RELU)
    with pytest.raises(InvalidModel, match="flat graph"):
        convert_model(msgspec.structs.replace(model, referenced=(model.main,)), V1_2)


def test_requests_by_kind_of_pool() -> None:
    ashmem, blob = Memory.create(8), Memory.create(8, kind=MemoryKind.HARDWARE_BUFFER_BLOB)
    since = {ashmem: V1_0, blob: V1_2, BufferToken(1): V1_3}
    for pool, first in since.items():
        request = Request((), (), (pool,))
        for version in HalVersion:
            assert (request_breach(request, version) is None) == (version >= first)
            if version < V1_3 and version >= first:
                assert convert_request(request, version).pools == (pool,)
            else:
                with (
                    pytest.raises(InvalidArgument)
                    if version < first
                    else pytest.raises((InvalidArgument, AssertionError))
                ):
                    convert_request(request, version)
                    assert version == V1_3 and not isinstance(pool, Memory)
                    raise AssertionError


@pytest.mark.parametrize("status", list(ErrorStatus))
def test_statuses_before_1_3_end_at_invalid_argument(status: ErrorStatus) -> None:
    for version in HalVersion:
        got = convert_status(status, version)
        if status <= 4 or (version == V1_3 and status <= 8):
            assert got == status
        else:
            assert got == ErrorStatus.GENERAL_FAILURE


def test_times_are_whole_microseconds() -> None:
    assert convert_timing(Timing()) == TimingV1_2(NO_TIME_US, NO_TIME_US)
    assert convert_timing(Timing(1999, 2000)) == TimingV1_2(1, 2)
    assert convert_timing(Timing(2**80, None)) == TimingV1_2(NO_TIME_US - 1, NO_TIME_US)
    assert upgrade_timing(TimingV1_2(3, NO_TIME_US)) == Timing(3000, None)


P, Q, R = (PerformanceInfo(x, x) for x in (0.5, 0.25, 0.75))


@pytest.mark.parametrize("old", [CapabilitiesV1_0(P, Q), CapabilitiesV1_1(P, Q, R)])
def test_old_capabilities_come_back_as_they_were(old: CapabilitiesV1_0) -> None:
    new = upgrade_capabilities(old)
    check_capabilities(new)
    version = V1_1 if isinstance(old, CapabilitiesV1_1) else V1_0
    assert capabilities_are_compliant(new, version)
    assert convert_capabilities(new, version) == (old, ())
    assert new.if_performance == new.while_performance == NO_PERFORMANCE
    assert new.performance(OperandType.TENSOR_INT32) == Q
    assert new.performance(OperandType.TENSOR_FLOAT32, is_relaxed=True) == (R if version == V1_1 else P)
    assert new.performance(OperandType.TENSOR_FLOAT16) == NO_PERFORMANCE


def _with(capabilities: Capabilities, kind: OperandType) -> Capabilities:
    entries = tuple(
        OperandPerformance(e.type, R if e.type == kind else e.info) for e in capabilities.operand_performance
    )
    return msgspec.structs.replace(capabilities, operand_performance=entries)


def test_capabilities_that_differ_between_types_are_not_compliant() -> None:
    same = uniform_capabilities(1.0, 1.0)
    assert all(capabilities_are_compliant(same, version) for version in HalVersion)
    for kind in (
        OperandType.FLOAT32, OperandType.TENSOR_FLOAT32, OperandType.INT32, OperandType.UINT32,
        OperandType.TENSOR_INT32, OperandType.OEM, OperandType.TENSOR_OEM_BYTE, OperandType.TENSOR_QUANT8_ASYMM,
    ):  # fmt: skip
        changed = _with(same, kind)
        assert [capabilities_are_compliant(changed, v) for v in HalVersion] == [False, False, True, True]
        assert len(convert_capabilities(changed, V1_1)[1]) == 1
    newer = _with(same, OperandType.TENSOR_FLOAT16)
    assert capabilities_are_compliant(newer, V1_0)
    relaxed = msgspec.structs.replace(
        same, relaxed_float32_to_float16_scalar=R, relaxed_float32_to_float16_tensor=R
    )
    assert [capabilities_are_compliant(relaxed, v) for v in HalVersion] == [False, True, True, True]
    one = msgspec.structs.replace(same, relaxed_float32_to_float16_scalar=R)
    assert [capabilities_are_compliant(one, v) for v in HalVersion] == [False, False, True, True]


def test_capabilities_of_1_2_lose_newer_types_and_control_flow() -> None:
    old, warnings = convert_capabilities(uniform_capabilities(1.0, 1.0), V1_2)
    new = upgrade_capabilities(old)
    check_capabilities(new)
    assert warnings == ()
    assert new.performance(OperandType.TENSOR_QUANT8_ASYMM_SIGNED) == NO_PERFORMANCE
    assert new.performance(OperandType.TENSOR_FLOAT16).exec_time == 1.0
    assert new.if_performance == NO_PERFORMANCE


def test_every_slice_of_a_model_is_a_valid_model() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        graph = GraphBuilder()
        values = [graph.input(OperandType.TENSOR_FLOAT32, (2, 3)) for _ in range(2)]
        for _ in range(int(rng.integers(1, 8))):
            a, b = (values[int(i)] for i in rng.integers(0, len(values), 2))
            values.append(graph.result(OperationType.ADD, [a, b, graph.constant(0)], a))
        model = graph.build(values[2:])
        count = len(model.main.operations)
        removed = {int(i) for i in np.flatnonzero(rng.random(count) < 0.4)}
        kept = tuple(i for i in range(count) if i not in removed)
        part = slice_model(model, kept)
        if part is None:
            assert not kept
            continue
        assert part.operation_indexes == kept
        validate_model(part.model)
        for index, operation in zip(part.operation_indexes, part.model.main.operations, strict=True):
            assert operation.type == model.main.operations[index].type
    assert slice_model(model, range(len(model.main.operations))) is not None
