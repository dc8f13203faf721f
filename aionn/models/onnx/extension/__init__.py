"""The vendor extension ``ai.onnx``: operations for the ONNX operators that HAL operations cannot express.

The importer writes these operations, drivers execute them. To import this package does not import the importer.

An operation of the extension has the inputs of the ONNX operator in their order, where an operand with lifetime NO_VALUE is an
omitted one, and then one constant of type ATTRIBUTES: the record of ``records``. Its outputs are those of the operator, without
omitted ones at the end. Values have ONNX's order of axes. The record states ONNX's element type and shape of each value:

- FLOAT, FLOAT16, INT32, BOOL: the HAL's own types. UINT8 and INT8: TENSOR_QUANT8_ASYMM and TENSOR_QUANT8_ASYMM_SIGNED, of which the
  operation sees the bytes, not the scale; or the types UINT8 and INT8 of the extension.
- INT64, UINT64, UINT32, INT16, UINT16: TENSOR_INT32, or the type of the extension. With TENSOR_INT32 a driver converts inputs to
  ONNX's type, computes with that, and converts results back; a result that does not fit 32 bits is an error of the execution.
- DOUBLE, BFLOAT16: TENSOR_FLOAT32, or the type of the extension. With TENSOR_FLOAT32 a driver converts as above; a result that
  float32 cannot hold becomes an infinity.
- An operand has the stored shape of the value: [1] for rank 0, and the leading axes merged if there are more than four. A driver
  converts the shape as well. An extent of 0 in an operand and of -1 in the record is unknown.
- An omitted operand whose record has a shape with an extent of 0 is a value without elements.

Signatures: ``encode_attributes`` takes the types and shapes of the values as well; ``decode_attributes`` returns version and
attributes, and ``decode_record`` the whole record.
"""

from __future__ import annotations

from aionn.models.onnx.extension.numbers import (
    DTYPES,
    EXTENSION,
    EXTENSION_NAME,
    OPERATORS,
    ElementType,
    number_of,
    op_type_of,
)
from aionn.models.onnx.extension.records import (
    AttributeTensor,
    Record,
    ValueType,
    decode_attributes,
    decode_record,
    encode_attributes,
)

__all__ = [
    "DTYPES",
    "EXTENSION",
    "EXTENSION_NAME",
    "OPERATORS",
    "AttributeTensor",
    "ElementType",
    "Record",
    "ValueType",
    "decode_attributes",
    "decode_record",
    "encode_attributes",
    "number_of",
    "op_type_of",
]
