"""Models: subgraphs of operations over operands, with the values of their constants.

Owns the data, no rule: ``aionn.validation`` checks a model.

Invariants kept by ``Subgraph.operations``' contract: they are listed in an order in which they can be executed.

Source: ``Model`` and ``Subgraph`` of the NN HAL 1.3.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.hal.capabilities import ExtensionNameAndPrefix
from aionn.hal.memory import Memory
from aionn.hal.operand import Operand, OperandLifeTime, OperandType, is_scalar_type, operand_dtype
from aionn.hal.operation import Operation

__all__ = ["Model", "Subgraph", "constant_array", "constant_bytes"]


class Subgraph(msgspec.Struct, frozen=True, array_like=True):
    """Operations over operands.

    Attributes:
        operands: All values; operations name them by index.
        operations: In execution order.
        input_indexes: The operands that the caller supplies, in the order of its arguments.
        output_indexes: The operands that the caller receives, in the order of its results.
    """

    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    input_indexes: tuple[int, ...]
    output_indexes: tuple[int, ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The input operands in the order of the arguments."""
        return tuple(self.operands[i] for i in self.input_indexes)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The output operands in the order of the results."""
        return tuple(self.operands[i] for i in self.output_indexes)


class Model(msgspec.Struct, frozen=True):
    """The model that a device prepares.

    Attributes:
        main: The subgraph that an execution runs.
        referenced: Subgraphs that IF and WHILE refer to.
        operand_values: Bytes of the CONSTANT_COPY operands of all subgraphs.
        pools: Memory of the CONSTANT_REFERENCE operands.
        relax_computation_float32_to_float16: Whether float32 may be computed with the range and precision of float16.
        extension_name_to_prefix: This model's numbers of the extensions that it uses.
    """

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    operand_values: bytes = b""
    pools: tuple[Memory, ...] = ()
    relax_computation_float32_to_float16: bool = False
    extension_name_to_prefix: tuple[ExtensionNameAndPrefix, ...] = ()


def constant_bytes(model: Model, operand: Operand) -> memoryview:
    """The bytes of a constant, a view of the model's own memory.

    The location must have been validated.

    Raises:
        ValueError: ``operand`` is not a constant.
    """
    location = operand.location
    end = location.offset + location.length
    if operand.lifetime == OperandLifeTime.CONSTANT_COPY:
        return memoryview(model.operand_values)[location.offset : end]
    if operand.lifetime == OperandLifeTime.CONSTANT_REFERENCE:
        return model.pools[location.pool_index].array[location.offset : end].data.toreadonly()
    raise ValueError(f"operand is not a constant: lifetime {operand.lifetime.name}")


def constant_array(model: Model, operand: Operand) -> npt.NDArray[np.generic]:
    """A constant of a base type as a read-only array of the operand's shape: rank 0 for a scalar, bytes for an OEM value."""
    flat = np.frombuffer(constant_bytes(model, operand), dtype=operand_dtype(operand.type))
    if operand.type == OperandType.OEM:
        return flat  # Only the vendor knows its size.
    return flat.reshape(() if is_scalar_type(operand.type) else operand.dimensions)
