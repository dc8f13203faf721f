"""Draws a model's graph as Graphviz text.

Owns the form of the drawing: an ellipse per operand with its type, place, small values and shape; a box per operation; numbered
edges where an operation has several inputs or outputs. Lays nothing out: that is Graphviz's work.

Invariant: only the main subgraph is drawn; a comment gives the number of further ones.

Source: the NN HAL's graph dump.
"""

from __future__ import annotations

import logging
from typing import TextIO

from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    constant_array,
    is_extension_operand_type,
    operand_type_name,
)
from aionn.models.operation_names import operation_name

__all__ = ["graph_text", "write_graph"]

_logger = logging.getLogger("aionn.model")

_SHORT_NAMES = {
    OperandType.FLOAT32: "F32",
    OperandType.INT32: "I32",
    OperandType.UINT32: "U32",
    OperandType.TENSOR_FLOAT32: "TF32",
    OperandType.TENSOR_INT32: "TI32",
    OperandType.TENSOR_QUANT8_ASYMM: "TQ8A",
    OperandType.OEM: "OEM",
    OperandType.TENSOR_OEM_BYTE: "TOEMB",
}
_KINDS = {
    OperandLifeTime.CONSTANT_COPY: "COPY",
    OperandLifeTime.CONSTANT_REFERENCE: "REF",
    OperandLifeTime.NO_VALUE: "NO",
    OperandLifeTime.SUBGRAPH: "SUBGRAPH",
}


def graph_text(model: Model, *, name: str = "model") -> str:
    """The main subgraph of a validated model as Graphviz text.

    Args:
        model: The model to draw.
        name: Shown in the first line.
    """
    main = model.main
    lines = [f"// {' '.join(name.split())}", "digraph {"]
    if model.referenced:
        lines.append(f"// {len(model.referenced)} referenced subgraphs are not drawn")
    roles = {index: f"input[{i}]" for i, index in enumerate(main.input_indexes)}
    roles |= {index: f"output[{i}]" for i, index in enumerate(main.output_indexes)}
    for index, operand in enumerate(main.operands):
        lines.append(_operand_line(model, index, operand, roles.get(index)))
    for index, operation in enumerate(main.operations):
        lines += _operation_lines(model, index, operation)
    lines.append("}")
    return "\n".join(lines) + "\n"


def write_graph(model: Model, stream: TextIO | None = None, *, name: str = "model") -> None:
    """Writes ``graph_text`` to a stream, or line by line to the logger ``aionn.model`` at level INFO where none is given."""
    text = graph_text(model, name=name)
    if stream is not None:
        stream.write(text)
        return
    for line in text.splitlines():
        _logger.info("%s", line)


def _operand_line(model: Model, index: int, operand: Operand, role: str | None) -> str:
    style = "style=filled fillcolor=black fontcolor=white " if role is not None else ""
    label = str(index)
    if role is not None:
        label += f" = {role}"
    if operand.lifetime in _KINDS:
        label += f": {_KINDS[operand.lifetime]}"
    code = operand.type
    label += r"\n" + (_SHORT_NAMES[OperandType(code)] if code in _SHORT_NAMES else operand_type_name(code))
    label += _value(model, operand)
    if operand.dimensions:
        label += f"({'x'.join(map(str, operand.dimensions))})"
    return f'    d{index} [{style}label="{label}"]'


def _value(model: Model, operand: Operand) -> str:
    """`` = value`` for a constant of one element of a type that has numbers."""
    if not operand.is_constant or is_extension_operand_type(operand.type):
        return ""
    if operand.type in (OperandType.OEM, OperandType.TENSOR_OEM_BYTE):
        return ""
    array = constant_array(model, operand)
    return f" = {array.reshape(-1)[0]}" if array.size == 1 else ""


def _operation_lines(model: Model, index: int, operation: Operation) -> list[str]:
    inputs, outputs = operation.inputs, operation.outputs
    arity = max(len(inputs), len(outputs))
    ordering = "" if arity <= 1 else " ordering=in" if arity == len(inputs) else " ordering=out"
    lines = [f'    n{index} [shape=box{ordering} label="{index}: {operation_name(model, operation.type)}"]']
    for position, operand in enumerate(inputs):
        lines.append(f"    d{operand} -> n{index}{_edge_label(position, len(inputs))}")
    for position, operand in enumerate(outputs):
        lines.append(f"    n{index} -> d{operand}{_edge_label(position, len(outputs))}")
    return lines


def _edge_label(position: int, count: int) -> str:
    return f" [label={position}]" if count > 1 else ""
