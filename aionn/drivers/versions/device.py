"""Drivers of HAL 1.0, 1.1 and 1.2: they see the types of their version and nothing newer.

Owns the translation in both directions: models, capabilities, statuses, times; parts that a version cannot express are refused or
removed before the driver is asked.

Invariants:
1. ``supports_old`` and ``prepare_old`` see models that are compliant with the declared version.
2. Operations that the version cannot express count as unsupported; the driver is queried about a slice without them.
3. Requests and results have only forms that the version can express.

Source: the version adapters of the NN HAL's support code.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence

from aionn.drivers.kit.arguments import Arguments, Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.versions.conversion import (
    HalVersion,
    OldCapabilities,
    OldModel,
    convert_model,
    convert_status,
    convert_timing,
    noncompliant_operations,
    request_breach,
    upgrade_capabilities,
    upgrade_timing,
)
from aionn.errors import Error, ErrorStatus, InvalidArgument, error_for_status
from aionn.hal import (
    NO_TIMING,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    ExecutionResult,
    Extension,
    FeatureLevel,
    Model,
    OutputShape,
    Priority,
    Request,
)
from aionn.hal.slicing import slice_model
from aionn.interpreter import RunControl
from aionn.ops import CONTRACTS, validate_operation

__all__ = ["VersionedDevice", "VersionedPreparedModel", "operation_levels"]

UNKNOWN_VERSION = "UNKNOWN"
"""The version text of a driver before HAL 1.2, which has none."""

_logger = logging.getLogger("aionn.driver")


def operation_levels(model: Model) -> list[int]:
    """The lowest feature level of each operation of a valid model's main subgraph; extension and OEM operations count as 1."""
    return [
        validate_operation(model, model.main.operands, operation, where=f"operation {index}")
        if operation.type in CONTRACTS
        else 1
        for index, operation in enumerate(model.main.operations)
    ]


class VersionedPreparedModel(BlockingPreparedModel):
    """A model made ready by an older driver. Implement ``run_old``."""

    device: VersionedDevice

    @abc.abstractmethod
    def run_old(self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea]) -> Sequence[OutputShape]:
        """Computes the outputs; see ``BlockingPreparedModel.run``. A driver of these versions knows no deadline."""

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        try:
            return self.run_old(inputs, outputs)
        except Error as e:
            status = convert_status(e.status, self.device.hal_version)
            if status == e.status:
                raise
            raise error_for_status(status, str(e)) from e

    def bind(
        self, request: Request, *, allow_unspecified_outputs: bool = True, is_ready: bool = True
    ) -> Arguments:
        """See the base class. Rejects arguments that the version's requests cannot express."""
        version = self.device.hal_version
        why = request_breach(request, version)
        if why is not None:
            raise InvalidArgument(f"request, {why}")
        return super().bind(
            request,
            allow_unspecified_outputs=allow_unspecified_outputs and version >= HalVersion.V1_2,
            is_ready=is_ready,
        )

    def run_bound(self, arguments: Arguments, *, measure: bool, **more: object) -> ExecutionResult:
        """See the base class. Reports the times that the version can express."""
        version = self.device.hal_version
        is_timed = measure and version >= HalVersion.V1_2
        result = super().run_bound(arguments, measure=is_timed, **more)  # type: ignore[arg-type]
        timing = upgrade_timing(convert_timing(result.timing)) if is_timed else NO_TIMING
        return ExecutionResult(result.output_sufficient_size, result.output_shapes, timing)


class VersionedDevice(BlockingDevice):
    """A driver of HAL 1.0, 1.1 or 1.2. Implement ``supports_old`` and ``prepare_old``.

    Args:
        name: The device's name.
        hal_version: Below 1.3.
        capabilities: In that version's type.
        type: The kind of hardware; HAL 1.0 and 1.1 cannot report it, so that it is OTHER there.
        version: The driver's version; HAL 1.0 and 1.1 cannot report it.
        extensions: Vendor extensions, from HAL 1.2 on.
        slots: Number of executions that it can run concurrently.

    Attributes:
        hal_version: See above.
    """

    def __init__(
        self,
        name: str,
        hal_version: HalVersion,
        capabilities: OldCapabilities,
        *,
        type: DeviceType = DeviceType.OTHER,
        version: str = UNKNOWN_VERSION,
        extensions: tuple[Extension, ...] = (),
        slots: int = 1,
    ) -> None:
        if hal_version >= HalVersion.V1_3:
            raise InvalidArgument("versioned device: a driver of HAL 1.3 is a BlockingDevice")
        can_say = hal_version >= HalVersion.V1_2
        super().__init__(
            DeviceInfo(
                name=name,
                type=type if can_say else DeviceType.OTHER,
                version=version if can_say else UNKNOWN_VERSION,
                feature_level=FeatureLevel(hal_version),
                capabilities=upgrade_capabilities(capabilities),
                extensions=extensions if can_say else (),
                slots=slots,
                cancel=CancelCapability.NONE,
            )
        )
        self.hal_version = hal_version

    @abc.abstractmethod
    def supports_old(self, model: OldModel) -> Sequence[bool]:
        """Whether the device can run each operation of the graph. If unsure: False."""

    @abc.abstractmethod
    def prepare_old(
        self, model: OldModel, original: Model, *, preference: ExecutionPreference, priority: Priority
    ) -> VersionedPreparedModel:
        """Makes a model ready.

        Args:
            model: The model in the version's type.
            original: The same, for the prepared model's own argument checks; the driver has no use for it.
            preference: FAST_SINGLE_ANSWER before HAL 1.1, which has none.
            priority: Relative to other prepared models.
        """

    def supports(self, model: Model) -> Sequence[bool]:
        """See ``BlockingDevice``."""
        breaches = noncompliant_operations(model, self.hal_version, operation_levels(model))
        count = len(model.main.operations)
        part = slice_model(model, [i for i in range(count) if i not in breaches])
        answer = [False] * count
        if part is None:
            return answer
        # A cut may have opened an interface that the version cannot express: then nothing is certain, and so nothing is supported.
        if noncompliant_operations(part.model, self.hal_version, operation_levels(part.model)):
            return answer
        old, _ = convert_model(part.model, self.hal_version)
        supported = self.supports_old(old)
        assert len(supported) == len(part.operation_indexes), "one answer per operation"
        for index, is_supported in zip(part.operation_indexes, supported, strict=True):
            answer[index] = bool(is_supported)
        return answer

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> VersionedPreparedModel:
        """See ``BlockingDevice``."""
        old, warnings = convert_model(model, self.hal_version)
        for warning in warnings:
            _logger.warning("%s: %s", self.info.name, warning)
        if self.hal_version < HalVersion.V1_1:
            preference = ExecutionPreference.FAST_SINGLE_ANSWER
        try:
            return self.prepare_old(old, model, preference=preference, priority=priority)
        except Error as e:
            status = convert_status(e.status, self.hal_version)
            raise e if status == e.status else error_for_status(ErrorStatus(status), str(e)) from e
