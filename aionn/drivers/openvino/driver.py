"""The drivers ``openvino-cpu``, ``openvino-gpu`` and ``openvino-npu``: models on OpenVINO's plugins, in the driver's process.

Owns the devices. ``kit.onnx`` lowers models and has the prepared ones, ``engine`` compiles and runs them, ``terms`` decides from a
device's description. Nothing of OpenVINO is imported before a model comes, so that clients can call ``info_for`` at no cost; a GPU
or NPU is described in its own process, when it is made.

Invariants:
1. An operation is supported when it was lowered and OpenVINO has kernels for the result.
2. A prepared model has a request for each slot, which is run by one thread at a time.

Source: the NN HAL's driver contract; OpenVINO's Python package.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from aionn.drivers.kit.caching import KeptFile
from aionn.drivers.kit.engines.device import LoweredModel, measured_capabilities
from aionn.drivers.kit.engines.installed import check_version, version_of
from aionn.drivers.kit.engines.support import Unsupported, part_of, single_operation_model
from aionn.drivers.kit.onnx.device import OnnxDevice, OnnxPreparedModel
from aionn.drivers.kit.onnx.lowered import OPSET, Dialect, Lowered
from aionn.drivers.openvino.expectations import EXPECTED_DIFFERENCES, EXPECTED_FAILURES, UNSUPPORTED
from aionn.drivers.openvino.gaps import gap_of
from aionn.drivers.openvino.hardware import CPU, openvino_name
from aionn.drivers.openvino.terms import SLOTS_MAX, Description, properties_for, terms_of
from aionn.errors import DeviceUnavailable
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    FeatureLevel,
    Model,
    Priority,
)
from aionn.hal.operand import is_extension_operand_type, operand_type_name
from aionn.models.onnx.extension import EXTENSION

if TYPE_CHECKING:
    from aionn.drivers.openvino.engine import CompiledModel

__all__ = [
    "EXPECTED_DIFFERENCES",
    "EXPECTED_FAILURES",
    "INFO",
    "UNSUPPORTED",
    "OpenvinoDevice",
    "factory_for",
    "info_for",
]

DISTRIBUTION = "openvino"
VERSION_MIN = (2025, 0)

THREADS_VARIABLE = "AIONN_OPENVINO_THREADS"
"""Environment variable with the number of threads of an execution on the CPU; 1 without it."""

FLOAT_TIME, SIGNED_TIME = 0.26, 0.08
"""Execution time over the reference device's on mobilenet_v2_1.0_224 in float32 and int8, on one thread each. Types without a
figure of their own take the larger one, and energy follows time. GPUs and NPUs have not been measured, and state the same."""

INFO = DeviceInfo(
    name=CPU,
    type=DeviceType.CPU,
    version="10",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=measured_capabilities(FLOAT_TIME, SIGNED_TIME),
    cache_files=CacheFileCounts(1, 1),
    slots=SLOTS_MAX,
    cancel=CancelCapability.BETWEEN_OPERATIONS,
    extensions=(EXTENSION,),
)


def _checked_name(driver: str) -> str:
    """OpenVINO's name of a driver's device, where the package and the plugin for it are installed.

    Raises:
        DeviceUnavailable: There is no such device, or the package or its plugin is missing or too old.
    """
    device = openvino_name(driver)
    if device is None:
        raise DeviceUnavailable(
            f"{driver}: expected openvino-cpu, openvino-gpu, openvino-gpu1 and so on, or openvino-npu"
        )
    check_version(DISTRIBUTION, version_of(DISTRIBUTION), VERSION_MIN, "openvino")
    plugin = f"libopenvino_intel_{device.partition('.')[0].lower()}_plugin.so"
    # The list of its files as text: to parse it takes as long as the rest of a runtime's opening.
    record = importlib.metadata.distribution(DISTRIBUTION).read_text("RECORD")
    if record and f"/{plugin}," not in record:
        raise DeviceUnavailable(
            f"{DISTRIBUTION}: the installed package lacks {plugin}, the plugin for {device}"
        )
    return device


def _version(driver_version: str = "") -> str:
    parts = [INFO.version, "OpenVINO", version_of(DISTRIBUTION) or "", driver_version, "opset", str(OPSET)]
    return " ".join(part for part in parts if part)


def info_for(name: str, driver: str = INFO.name) -> DeviceInfo | None:
    """The DeviceInfo of the device of this name; None where the device has to be asked, which only its own process does.

    Args:
        name: The device's name.
        driver: The driver's, which decides the device of OpenVINO.

    Raises:
        DeviceUnavailable: OpenVINO is not installed, too old, or lacks the plugin, or there is no such device.
    """
    if _checked_name(driver) != "CPU":
        return None
    return msgspec.structs.replace(INFO, name=name, version=_version())


def described_info(name: str, description: Description) -> DeviceInfo:
    """The DeviceInfo of a device that was described."""
    terms = terms_of(description)
    return msgspec.structs.replace(
        INFO,
        name=name,
        type=terms.type,
        version=_version(description.driver_version),
        slots=terms.slots,
        cancel=terms.cancel,
        cache_files=CacheFileCounts(1, 1) if terms.is_cached else CacheFileCounts(),
    )


class OpenvinoDevice(OnnxDevice):
    """A device of OpenVINO. On the CPU two concurrent executions, each on the number of threads in ``AIONN_OPENVINO_THREADS`` (1
    without).

    Raises:
        DeviceUnavailable: OpenVINO or the device cannot be used, or the number of threads makes no sense.
    """

    # Its plugins hold numbers of 64 bits in 32, give zeros for an index out of range, subtract the zero point of weights in 8 bits,
    # which overflows, and round a zero point's product with the scale. The processor's kernels for convolutions read outside of an
    # image that is smaller than the window, and compute some groups of 8-bit numbers and some strides wrongly; those for
    # transposed ones of 8-bit numbers lose the layer behind them. Readers of a Concat of vectors write over them. The kernel for
    # products has one product for each lane of a vector, and multiplies these in the end; those that compare, sort, reduce and
    # clamp make integers floats. Its passes make one constant of two, and of quantised sums they lose one of two. A Reshape and a
    # Transpose of one value lose each other's memory, and one of a reduced value is lost itself.
    dialect = Dialect(
        has_wide_numbers=False,
        reports_indexes=False,
        has_lrn_bias=False,
        has_zero_points=False,
        has_all_windows=False,
        has_transposed_integers=False,
        has_computed_slopes=False,
        has_joined_vectors=False,
        has_exact_reals=False,
        has_exact_integers=False,
        has_products_in_turn=False,
        has_separate_constants=False,
        has_views_beside_transposes=False,
        has_moved_reductions=False,
        gap_of=gap_of,
    )

    def __init__(self, name: str = INFO.name, driver: str = INFO.name) -> None:
        self.openvino_device = _checked_name(driver)
        self._description: Description | None = None
        info = info_for(name, driver)
        super().__init__(described_info(name, self.description) if info is None else info, THREADS_VARIABLE)

    def load_engine(self) -> None:
        """See the base class. OpenVINO loads its plugin for the device to describe it."""
        assert self.description is not None

    @property
    def description(self) -> Description:
        """OpenVINO's description of the device, which it is asked for once."""
        from aionn.drivers.openvino import engine

        if self._description is None:
            self._description = engine.describe(self.openvino_device)
        return self._description

    def _properties(self, is_relaxed: bool, priority: Priority) -> dict[str, str]:
        chosen = properties_for(
            self.description, is_relaxed=is_relaxed, thread_count=self.thread_count, priority=priority
        )
        return dict(chosen)

    def supports(self, model: Model) -> Sequence[bool]:
        """True for every operation that could be lowered and that OpenVINO has kernels for, by one question for all of them. A
        device without float32 supports only models that allow float16.
        """
        count = len(model.main.operations)
        if terms_of(self.description).needs_relaxed and not model.relax_computation_float32_to_float16:
            return [False] * count
        indexes: Sequence[int] = range(count)
        try:
            lowered = self.lower(model)
        except Unsupported:
            indexes = [i for i in range(count) if self._is_lowered(single_operation_model(model, i))]
            if len(indexes) in (0, count):  # Each by itself, but not together: nothing is sure.
                return [False] * count
            try:
                lowered = self.lower(part_of(model, indexes))
            except Unsupported:
                return self.support_in_parts(model)
        try:
            rejected = self._rejected(lowered)
        except Unsupported:
            return self.support_in_parts(model)
        if len(indexes) == count and not rejected:
            self.keep_lowered(model, lowered)
        supported = {index for position, index in enumerate(indexes) if position not in rejected}
        return [i in supported for i in range(count)]

    def make(
        self, model: Model, lowered: LoweredModel, priority: Priority, deadline_ns: int | None
    ) -> OnnxPreparedModel:
        """See the base class. A model with quantised values is computed in float32 where the device has it: with float16 a quotient
        by a scale may become another integer.
        """
        if _has_quantised_values(model) and not terms_of(self.description).needs_relaxed:
            model = msgspec.structs.replace(model, relax_computation_float32_to_float16=False)
        return super().make(model, lowered, priority, deadline_ns)

    def _is_lowered(self, part: Model) -> bool:
        try:
            self.lower(part)
        except Unsupported:
            return False
        return True

    def _rejected(self, lowered: Lowered) -> frozenset[int]:
        """The operations that OpenVINO has no kernels for, by their index. Raises as ``check_new``."""
        from aionn.drivers.openvino import engine

        if self.is_accepted(lowered):
            return frozenset()
        properties = self._properties(False, Priority.MEDIUM)
        rejected = engine.rejected_operations(lowered, self.openvino_device, properties)
        if not rejected:
            self.accept(lowered)
        return rejected

    def check_new(self, lowered: Lowered) -> None:
        """See the base class."""
        rejected = self._rejected(lowered)
        if rejected:
            raise Unsupported(
                f"OpenVINO has no kernels on {self.openvino_device} for operations {sorted(rejected)}"
            )

    def compile(
        self, lowered: Lowered, *, is_relaxed: bool, priority: Priority, deadline_ns: int | None
    ) -> CompiledModel:
        """See the base class. A compilation cannot be stopped."""
        from aionn.drivers.openvino import engine

        properties = self._properties(is_relaxed, priority)
        return engine.compiled_model(lowered, self.description, properties, is_native=self.is_native)

    def load_compiled(
        self,
        file: KeptFile,
        form: str,
        *,
        is_relaxed: bool,
        priority: Priority,
        deadline_ns: int | None,
    ) -> CompiledModel:
        """See the base class."""
        from aionn.drivers.openvino import engine

        properties = self._properties(is_relaxed, priority)
        return engine.loaded_model(file.take(), form, self.description, properties, is_native=self.is_native)


def _has_quantised_values(model: Model) -> bool:
    """Whether a value is quantised, or of an extension's type, which may have 8 bits. Engines get only main subgraphs."""
    return any(
        is_extension_operand_type(operand.type) or operand_type_name(operand.type).startswith("TENSOR_QUANT")
        for operand in model.main.operands
    )


def factory_for(driver: str) -> Callable[[str], OpenvinoDevice]:
    """The device of a driver's name; see ``aionn.drivers.registry``."""

    def make(name: str = driver) -> OpenvinoDevice:
        return OpenvinoDevice(name, driver)

    return make
