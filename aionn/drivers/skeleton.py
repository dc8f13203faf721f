"""A driver to clone: replace what is marked, and keep the rest.

It runs three elementwise operations on float32: enough to show every place that a driver defines. Read
``docs/drivers/writing-a-driver.md`` beside it. Try yours with ``aionn conformance YOUR_MODULE:YourDevice --suite vts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.errors import InvalidArgument
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    FeatureLevel,
    FusedActivation,
    Model,
    OperandType,
    Operation,
    OperationType,
    OutputShape,
    Priority,
    constant_array,
    uniform_capabilities,
)
from aionn.interpreter import RunControl

__all__ = ["SkeletonDevice"]

MEMORY_BYTES_MAX = 256 << 20
"""Limit of all device memories together. Replace: None in ``__init__`` for a device without."""


OPERATIONS: Mapping[OperationType, Callable[[Array, Array], Array]] = {
    OperationType.ADD: np.add,
    OperationType.MUL: np.multiply,
    OperationType.MAXIMUM: np.maximum,
}
"""The computation; numpy broadcasts like the spec. Replace."""


class SkeletonDevice(BlockingDevice):
    """Runs ``OPERATIONS``. Replace: everything in ``__init__`` that describes the device."""

    def __init__(self, name: str) -> None:
        super().__init__(
            DeviceInfo(
                name=name,
                type=DeviceType.OTHER,
                # Another text for every change that changes results or cache files.
                version="1",
                feature_level=FeatureLevel.LEVEL_4,
                # Ratios to the reference device, measured; lower is better.
                capabilities=uniform_capabilities(0.9, 0.9),
                cache_files=CacheFileCounts(1, 1),
                slots=1,
                cancel=CancelCapability.BETWEEN_OPERATIONS,
            ),
            memory_bytes_max=MEMORY_BYTES_MAX,
        )

    def supports(self, model: Model) -> Sequence[bool]:
        """One answer per operation of the main subgraph. If unsure: False."""
        return [_is_ours(model, operation) for operation in model.main.operations]

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> SkeletonModel:
        """Makes a model ready: here belongs what takes long, such as compiling."""
        return SkeletonModel(self, model, priority)


class SkeletonModel(BlockingPreparedModel):
    """A model made ready. Replace: what it keeps, and how it computes."""

    def __init__(self, device: SkeletonDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        main = model.main
        self._constants: dict[int, Array] = {
            index: constant_array(model, operand)
            for index, operand in enumerate(main.operands)
            if operand.is_constant
        }

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        """Computes the outputs on a thread of its own; may take its time, and may raise what ``aionn.errors`` has."""
        main = self.model.main
        values: dict[int, Array] = dict(self._constants)
        for index, array in zip(main.input_indexes, inputs, strict=True):
            if array is None:
                raise InvalidArgument("skeleton: no input can be left out")
            values[index] = array
        for operation in main.operations:
            control.check()  # Ends the run here when its deadline has passed or it was cancelled.
            a, b = (values[index] for index in operation.inputs[:2])
            try:
                values[operation.outputs[0]] = OPERATIONS[OperationType(operation.type)](a, b)
            except ValueError as e:
                # Shapes that the model leaves open are known only now.
                raise InvalidArgument(f"skeleton: {e}") from e
        # An output that does not fit is reported by ``store``, not raised.
        return [area.store(values[index]) for area, index in zip(outputs, main.output_indexes, strict=True)]

    def release(self) -> None:
        """Frees what the model holds; called once."""
        self._constants.clear()


def _is_ours(model: Model, operation: Operation) -> bool:
    if operation.type not in OPERATIONS:
        return False
    a, b, *activation = (model.main.operands[index] for index in operation.inputs)
    return (
        a.type == b.type == OperandType.TENSOR_FLOAT32
        # Computing an activation is left out here.
        and all(o.is_constant and int(constant_array(model, o)) == FusedActivation.NONE for o in activation)
    )
