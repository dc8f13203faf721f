"""Drivers of older versions: they see their version's types and nothing newer, and the newest contract holds around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.versions.conversion import (
    CapabilitiesV1_0,
    CapabilitiesV1_1,
    CapabilitiesV1_2,
    HalVersion,
    ModelV1_0,
    ModelV1_1,
    ModelV1_2,
    OldModel,
    upgrade_model,
)
from aionn.drivers.versions.device import VersionedDevice, VersionedPreparedModel
from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline, ResourceExhausted
from aionn.hal import (
    NO_TIMING,
    BufferToken,
    DeviceType,
    ExecutionPreference,
    Memory,
    MemoryKind,
    Model,
    OperandType,
    OperationType,
    OutputShape,
    PerformanceInfo,
    Priority,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder

V1_0, V1_1, V1_2, V1_3 = HalVersion
INFO = PerformanceInfo(0.5, 0.5)
CAPABILITIES = {
    V1_0: CapabilitiesV1_0(INFO, INFO),
    V1_1: CapabilitiesV1_1(INFO, INFO, INFO),
    V1_2: CapabilitiesV1_2(INFO, INFO, ()),
}
MODEL_TYPES = {V1_0: ModelV1_0, V1_1: ModelV1_1, V1_2: ModelV1_2}


class Old(VersionedDevice):
    """Computes by the interpreter; remembers what it saw."""

    def __init__(self, version: HalVersion) -> None:
        super().__init__("old", version, CAPABILITIES[version], type=DeviceType.GPU, version="7")
        self.seen: list[OldModel] = []
        self.preferences: list[ExecutionPreference] = []
        self.error: Exception | None = None

    def supports_old(self, model: OldModel) -> Sequence[bool]:
        self.seen.append(model)
        return [True] * len(model.operations)

    def prepare_old(
        self, model: OldModel, original: Model, *, preference: ExecutionPreference, priority: Priority
    ) -> VersionedPreparedModel:
        self.seen.append(model)
        self.preferences.append(preference)
        return OldPrepared(self, model, original, priority)


class OldPrepared(VersionedPreparedModel):
    def __init__(self, device: Old, model: OldModel, original: Model, priority: Priority) -> None:
        super().__init__(device, original, priority)
        self._old = device
        self._interpreter = Interpreter(upgrade_model(model))

    def run_old(self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea]) -> Sequence[OutputShape]:
        if self._old.error is not None:
            raise self._old.error
        results = self._interpreter.run(inputs, RunControl())
        return [area.store(array) for area, array in zip(outputs, results, strict=True)]


A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)


def unary(*operations: OperationType) -> Model:
    graph = GraphBuilder()
    value = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    for operation in operations:
        value = graph.result(operation, [value], value)
    return graph.build([value])


@pytest.fixture(params=[V1_0, V1_1, V1_2], ids=lambda v: v.name)
async def old(request: pytest.FixtureRequest) -> Any:
    async with Old(request.param) as device:
        yield device


async def test_driver_says_what_its_version_can_say(old: Old) -> None:
    assert old.info.feature_level == old.hal_version
    is_new = old.hal_version == V1_2
    assert old.info.type == (DeviceType.GPU if is_new else DeviceType.OTHER)
    assert old.info.version == ("7" if is_new else "UNKNOWN")


async def test_driver_of_1_3_is_none_of_these() -> None:
    with pytest.raises(InvalidArgument):
        VersionedDevice.__init__(Old.__new__(Old), "new", V1_3, CAPABILITIES[V1_2])


async def test_driver_sees_its_versions_model_and_computes(old: Old, small: Any) -> None:
    model = unary(OperationType.RELU, OperationType.FLOOR)
    prepared = await old.prepare_model(model, preference=ExecutionPreference.LOW_POWER)
    assert {type(seen) for seen in old.seen} == {MODEL_TYPES[old.hal_version]}
    expected = (
        ExecutionPreference.FAST_SINGLE_ANSWER if old.hal_version == V1_0 else ExecutionPreference.LOW_POWER
    )
    assert old.preferences == [expected]
    request = small.request([A], [(A.nbytes, (2, 3))])
    result = await prepared.execute_synchronously(request, measure=True)
    np.testing.assert_array_equal(small.output(request).reshape(2, 3), np.floor(np.maximum(A, 0)))
    if old.hal_version < V1_2:
        assert result.timing == NO_TIMING
    else:
        assert result.timing.time_on_device_ns is not None and result.timing.time_on_device_ns % 1000 == 0


async def test_newer_operations_are_sliced_away_before_the_driver_is_asked(old: Old) -> None:
    model = unary(OperationType.RELU, OperationType.ABS, OperationType.FLOOR, OperationType.HARD_SWISH)
    supported = await old.supported_operations(model)
    assert supported == (True, old.hal_version >= V1_2, True, False)
    (seen,) = old.seen
    assert len(seen.operations) == sum(supported)
    with pytest.raises(InvalidArgument, match="does not support"):
        await old.prepare_model(model)


async def test_newer_requests_are_refused(old: Old, small: Any) -> None:
    prepared = await old.prepare_model(unary(OperationType.RELU))
    request = small.request([A], [(A.nbytes, (2, 3))])
    token = msgspec.structs.replace(request, pools=(BufferToken(1), request.pools[1]))
    with pytest.raises(InvalidArgument, match="device memories"):
        await prepared.execute_synchronously(token)
    blob = Memory.create(A.nbytes, kind=MemoryKind.HARDWARE_BUFFER_BLOB)
    by_blob = msgspec.structs.replace(request, pools=(blob, request.pools[1]))
    if old.hal_version < V1_2:
        with pytest.raises(InvalidArgument, match="hardware_buffer_blob"):
            await prepared.execute_synchronously(by_blob)
    else:
        await prepared.execute_synchronously(by_blob)


async def test_newer_statuses_do_not_come_from_an_old_driver(old: Old, small: Any) -> None:
    prepared = await old.prepare_model(unary(OperationType.RELU))
    request = small.request([A], [(A.nbytes, (2, 3))])
    for error in (ResourceExhausted("no"), MissedDeadline("late")):
        old.error = error
        with pytest.raises(GeneralFailure):
            await prepared.execute_synchronously(request)
    old.error = InvalidArgument("mine")
    with pytest.raises(InvalidArgument, match="mine"):
        await prepared.execute_synchronously(request)
    # Deadlines are kept around the driver, which knows none.
    old.error = None
    with pytest.raises(MissedDeadline) as caught:
        await prepared.execute_synchronously(request, deadline_ns=1)
    assert caught.value.status == ErrorStatus.MISSED_DEADLINE_PERSISTENT
