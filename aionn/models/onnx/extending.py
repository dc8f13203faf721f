"""Writes operations of the extension ``ai.onnx`` for the operators that HAL operations cannot express.

Owns the record of an operation, the types and shapes of its results, and an activation after it.

Source: ``aionn.models.onnx.extension``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aionn.errors import InvalidModel
from aionn.hal import FusedActivation
from aionn.models.onnx.encoding import DATA_TYPES
from aionn.models.onnx.extension import AttributeTensor, ValueType, encode_attributes
from aionn.models.onnx.extension.application import Application
from aionn.models.onnx.extension.attributes import ATTRIBUTE_NAMES
from aionn.models.onnx.extension.contracts import CONTRACTS, output_types
from aionn.models.onnx.extension.narrow import CARRIERS, KINDS, NAMES, carrier_of
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import AttributeType, DataType
from aionn.models.onnx.tensors import OPERAND_TYPES, Inexpressible, OpenTensor, Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = ["AnyTensor", "extended", "needs_extension"]

AnyTensor = Tensor | OpenTensor

_DATA_TYPES = DATA_TYPES | KINDS

SHAPED = {"Shape", "Size"}
"""Operators that HAL conversions can express for values of every type, since they read only the shape."""

UNROUNDED = {
    "Cast", "CastLike", "CenterCropPad", "Concat", "DepthToSpace", "Dropout", "Equal", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Pad", "Reshape", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that HAL conversions can express for values of BFLOAT16 in float32, since they move, compare or convert them; the
results of all others would have to be rounded."""

ACTIVATION_VERSION = 14
"""The version of Relu and Clip that apply an activation."""


def needs_extension(op_type: str, inputs: Sequence[AnyTensor | None]) -> bool:
    """Whether an operator has an input that only extension operations can read."""
    if any(isinstance(tensor, OpenTensor) for tensor in inputs):
        return True
    if op_type in SHAPED:
        return False
    types = {tensor.dtype for tensor in inputs if tensor is not None and _is_computed(tensor)}
    return not types <= OPERAND_TYPES.keys() or ("bfloat16" in types and op_type not in UNROUNDED)


def _is_computed(tensor: AnyTensor) -> bool:
    return isinstance(tensor, OpenTensor) or tensor.array is None


def extended(g: GraphWriter, op: Operator, inputs: Sequence[AnyTensor | None]) -> list[AnyTensor]:
    """Write the operation of an operator, and return its outputs.

    Raises:
        Inexpressible: The extension has no such operation, or it does not depend on inputs of the model.
        InvalidModel: The operator breaks its contract.
    """
    if op.node.domain or op.type not in CONTRACTS:
        raise Inexpressible("the extension has no such operation")
    if not any(tensor is not None and _is_computed(tensor) for tensor in inputs):
        raise Inexpressible("inputs that are all constants")
    if set(op.node.attributes) - ATTRIBUTE_NAMES.get(op.type, frozenset()):
        raise Inexpressible("attributes that the operator does not have")
    if op.type == "BitCast" and op.has(0) and op.input(0).dtype == "float64":
        raise Inexpressible("the bits of a DOUBLE, whose value is held in float32")
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    count = max((i + 1 for i, name in enumerate(op.node.outputs) if name), default=1)
    results = _written(g, op.type, op.version, _attributes(op), given, count)
    if op.activation:
        results[0] = _activated(g, results[0], op.activation)
    return results


def _written(
    g: GraphWriter,
    op_type: str,
    version: int,
    attributes: dict[str, Any],
    inputs: Sequence[AnyTensor | None],
    count: int,
) -> list[AnyTensor]:
    types = [None if t is None else ValueType(int(_DATA_TYPES[t.dtype]), t.shape) for t in inputs]
    constants = [t.array if isinstance(t, Tensor) else None for t in inputs]
    application = Application(op_type, version, attributes, types, constants, count)
    try:
        outputs = output_types(application)
    except InvalidModel as e:
        raise InvalidModel(f"onnx, {g.source}: {e}") from e
    names = []
    for output in outputs:
        name = NAMES.get(DataType(output.data_type))
        if name is None:
            raise Inexpressible(f"values of type {DataType(output.data_type).name}")
        names.append(name)
    record = encode_attributes(version, attributes, types, outputs)
    described = [(name, output.shape) for name, output in zip(names, outputs, strict=True)]
    values = g.emit_extension(op_type, [g.extension_value(t) for t in inputs], record, described)
    results: list[AnyTensor] = []
    for value, name, output in zip(values, names, outputs, strict=True):
        if output.shape is not None and all(extent > 0 for extent in output.shape):
            results.append(g.tensor(value, name, output.shape))
        elif output.shape is not None and 0 in output.shape and output.is_known:
            # A value without elements has one possible content.
            array = np.zeros(output.shape, carrier_of(output.data_type))
            results.append(Tensor(name, output.shape, array=array))
        else:
            results.append(OpenTensor(name, output.shape, value))
    return results


def _attributes(op: Operator) -> dict[str, Any]:
    """The attributes as a record has them."""
    found: dict[str, Any] = {}
    for name, attribute in op.node.attributes.items():
        match attribute.type:
            case AttributeType.INT:
                found[name] = int(attribute.value)
            case AttributeType.FLOAT:
                found[name] = float(attribute.value)
            case AttributeType.STRING:
                found[name] = op.text(name, "")
            case AttributeType.INTS:
                found[name] = op.integers(name)
            case AttributeType.FLOATS:
                found[name] = op.reals(name)
            case AttributeType.STRINGS:
                found[name] = op.texts(name)
            case AttributeType.TENSOR:
                tensor = op.tensor(name)
                assert tensor is not None and tensor.array is not None, "the attribute is given"
                if tensor.dtype in CARRIERS:
                    raise Inexpressible(f"attribute {name} with values of type {tensor.dtype}")
                found[name] = AttributeTensor.of(tensor.array)
            case _:
                raise Inexpressible(f"attribute {name} of type {AttributeType(attribute.type).name}")
    return found


def _activated(g: GraphWriter, tensor: AnyTensor, activation: FusedActivation) -> AnyTensor:
    """The tensor after the activation that the importer fused with the operator."""
    if activation == FusedActivation.RELU:
        return _written(g, "Relu", ACTIVATION_VERSION, {}, [tensor], 1)[0]
    low, high = {FusedActivation.RELU1: (-1, 1), FusedActivation.RELU6: (0, 6)}[activation]
    carrier = CARRIERS.get(tensor.dtype, tensor.dtype)
    limits = [g.constant(np.array(limit, carrier), tensor.dtype) for limit in (low, high)]
    return _written(g, "Clip", ACTIVATION_VERSION, {}, [tensor, *limits], 1)[0]
