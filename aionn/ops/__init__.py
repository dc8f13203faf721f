"""The definition of each operation: documented contract, validator, shape rule and numpy kernel together, one file per family.

Related families share a folder; ``numerics`` holds what all of them use.
``CONTRACTS`` joins the families' tables; each operation is in exactly one of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from aionn.errors import InvalidModel
from aionn.hal import Model, Operand, Operation, OperationType, constant_array, operation_type_name
from aionn.ops.remembered import Parts, checked_level
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, Tensor, stand_in

__all__ = [
    "CONTRACTS",
    "FAMILIES",
    "PRODUCTS",
    "PRODUCT_FAMILIES",
    "Array",
    "Call",
    "Check",
    "OperationContract",
    "Shape",
    "Tensor",
    "stand_in",
    "validate_operation",
]

FAMILIES = (
    "elementwise.activation",
    "elementwise.arithmetic",
    "elementwise.comparison",
    "control_flow",
    "elementwise.conversion",
    "images.convolution",
    "images.detection",
    "elementwise.unary",
    "elementwise.logical",
    "tensors.lookup",
    "recurrent.lstm",
    "tensors.matmul",
    "elementwise.normalization",
    "tensors.padding",
    "images.pooling",
    "recurrent.quantized_lstm",
    "tensors.reduction",
    "images.resize",
    "recurrent.rnn",
    "images.roi",
    "tensors.sampling",
    "tensors.shape",
    "tensors.slicing",
    "elementwise.softmax",
    "images.space",
    "recurrent.svdf",
)
"""The family modules of this package, by their names inside of it; each has a tuple ``OPERATIONS`` of contracts."""


def _join() -> dict[OperationType, OperationContract]:
    contracts: dict[OperationType, OperationContract] = {}
    for family in FAMILIES:
        for contract in importlib.import_module(f"aionn.ops.{family}").OPERATIONS:
            if contract.type in contracts:
                raise RuntimeError(
                    f"operation {contract.type.name} is defined twice, the second time in {family}"
                )
            contracts[contract.type] = contract
    missing = [t.name for t in OperationType if t not in contracts and t != OperationType.OEM_OPERATION]
    if missing:
        raise RuntimeError(f"operations without a definition: {', '.join(missing)}")
    return contracts


CONTRACTS: Mapping[OperationType, OperationContract] = MappingProxyType(_join())
"""Every operation's contract by its type."""

PRODUCT_FAMILIES = (
    "images.convolution",
    "recurrent.lstm",
    "tensors.matmul",
    "recurrent.quantized_lstm",
    "recurrent.rnn",
    "recurrent.svdf",
)
"""The families whose kernels multiply matrices, which numpy leaves to a library with threads of its own (``numerics.blas``)."""

PRODUCTS = frozenset(
    contract.type
    for family in PRODUCT_FAMILIES
    for contract in importlib.import_module(f"aionn.ops.{family}").OPERATIONS
)
"""Their operations."""


def validate_operation(
    model: Model,
    operands: tuple[Operand, ...],
    operation: Operation,
    *,
    where: str,
    read: dict[int, Array] | None = None,
    parts: Parts | None = None,
) -> int:
    """Checks one operation of a model against its contract.

    The operand indexes must be in range, and constants must be inside the model's memory.

    Args:
        model: Gives the values of constants.
        operands: The operands of the operation's subgraph.
        operation: The operation to check.
        where: Begins every message, such as ``subgraph 0, operation 4``.
        read: The values of the constants that were read so far, by the identity of their operands, which many operations share;
            None to read them here.
        parts: The parts of keys of these operands that were made so far (``remembered``); None to make them here.

    Returns:
        The lowest feature level that can express the operation.

    Raises:
        InvalidModel: The contract is broken, or there is no such operation.
    """
    contract = CONTRACTS.get(operation.type)  # type: ignore[call-overload]
    if contract is None:
        raise InvalidModel(
            f"{where}: expected an operation of the spec, got {operation_type_name(operation.type)}"
        )

    values = {} if read is None else read

    def constant(operand: Operand) -> Array | None:
        if not operand.is_constant:
            return None
        found = values.get(id(operand))
        if found is None:
            found = values[id(operand)] = constant_array(model, operand)
        return found

    return checked_level(
        contract,
        [operands[i] for i in operation.inputs],
        [operands[i] for i in operation.outputs],
        constant,
        where=where,
        parts={} if parts is None else parts,
    )
