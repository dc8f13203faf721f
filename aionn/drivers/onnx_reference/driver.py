"""The device ``onnx-reference``: operations of the extension ``ai.onnx``, each by a function of numpy.

It defines the results that other devices with the extension are compared with, and runs models that need it on a machine without an
engine that has it. It takes no HAL operations: the partitioner gives those to other devices.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.onnx_reference.operations import Step, called, empty_value, read_step, stored, value_of
from aionn.errors import InvalidModel
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    FeatureLevel,
    Model,
    OutputShape,
    Priority,
    constant_array,
    constant_bytes,
    is_extension_operand_type,
    uniform_capabilities,
)
from aionn.interpreter import RunControl
from aionn.models.onnx.extension import EXTENSION
from aionn.observability.tracing import section

__all__ = ["INFO", "OnnxReferenceDevice", "info_for"]

MEMORY_BYTES_MAX = 1 << 30
"""Limit of all device memories together, the same as that of the reference device."""

INFO = DeviceInfo(
    name="onnx-reference",
    type=DeviceType.CPU,
    version="1",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=uniform_capabilities(1.0, 1.0),
    extensions=(EXTENSION,),
    cache_files=CacheFileCounts(1, 1),
    cancel=CancelCapability.BETWEEN_OPERATIONS,
)


def info_for(name: str) -> DeviceInfo:
    """The DeviceInfo of the device of this name."""
    return msgspec.structs.replace(INFO, name=name)


class OnnxReferenceDevice(BlockingDevice):
    """Runs operations of the extension, one execution at a time."""

    is_preemptible = True
    prepares_beside = True

    def __init__(self, name: str = INFO.name) -> None:
        super().__init__(info_for(name), memory_bytes_max=MEMORY_BYTES_MAX)

    def supports(self, model: Model) -> Sequence[bool]:
        """True for each operation of the extension that has a kernel for its inputs and attributes.

        Raises:
            InvalidModel: An operation breaks the extension's rules.
        """
        steps = [read_step(model, index, operation) for index, operation in enumerate(model.main.operations)]
        return [step is not None and step.kernel is not None for step in steps]

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> OnnxReferencePreparedModel:
        return OnnxReferencePreparedModel(self, model, priority)


class OnnxReferencePreparedModel(BlockingPreparedModel):
    """A model with its records and constants decoded."""

    def __init__(self, device: OnnxReferenceDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        steps = [read_step(model, index, operation) for index, operation in enumerate(model.main.operations)]
        if any(step is None or step.kernel is None for step in steps):
            raise InvalidModel("model: expected operations that the device supports")
        self._steps: list[Step] = [step for step in steps if step is not None]
        self._constants = {
            index: self._constant(index)
            for index, operand in enumerate(model.main.operands)
            if operand.is_constant
        }

    def _constant(self, index: int) -> Array:
        operand = self.model.main.operands[index]
        if is_extension_operand_type(operand.type):
            return np.frombuffer(constant_bytes(self.model, operand), np.uint8)
        return constant_array(self.model, operand)

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        main = self.model.main
        # Inputs are copied, since the client can change them while they are read.
        held: dict[int, Array | None] = {
            index: None if array is None else array.copy()
            for index, array in zip(main.input_indexes, inputs, strict=True)
        }
        held |= self._constants
        values: dict[int, Array] = {}
        with section("LC_PCO", "onnx-reference"):
            for step in self._steps:
                control.check()
                results = called(step, [self._input(step, i, held, values) for i in range(len(step.inputs))])
                values.update(zip(step.outputs, results, strict=True))
        kinds = {
            index: kind
            for step in self._steps
            for index, kind in zip(step.outputs, step.record.outputs, strict=True)
        }
        return [
            area.store(stored(self.model, main.operands[index], values[index], kinds[index], f"output {i}"))
            for i, (area, index) in enumerate(zip(outputs, main.output_indexes, strict=True))
        ]

    def _input(
        self, step: Step, position: int, held: dict[int, Array | None], values: dict[int, Array]
    ) -> Array | None:
        """ONNX's value of an input of an operation; None for an omitted one."""
        index, kind = step.inputs[position], step.record.inputs[position]
        if kind is None:
            return None
        if index < 0:
            return empty_value(kind)
        if index in values:
            return values[index]
        array = held[index]
        return None if array is None else value_of(self.model, self.model.main.operands[index], array, kind)
