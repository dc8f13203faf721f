"""IF and WHILE: the operators that refer to other subgraphs of the file.

Owns which outputs of a referenced subgraph are kept. ``aionn.validation`` checks that the subgraphs fit the operation.

Source: the TensorFlow Lite operators' documentation; IF and WHILE of the NN HAL 1.3.
"""

from __future__ import annotations

from aionn.hal import OperationType
from aionn.models.tflite.graph import SubgraphWriter
from aionn.models.tflite.schema import TfliteOperator, TfliteSubgraph

__all__ = ["if_", "while_"]


def _subgraph(g: SubgraphWriter, op: TfliteOperator, index: int) -> TfliteSubgraph:
    subgraphs = g.model.file.subgraphs
    if not 0 < index < len(subgraphs):
        g.refuse(op, "subgraph index", f"from 1 to {len(subgraphs) - 1}", index)
    return subgraphs[index]


def _check_outputs(g: SubgraphWriter, op: TfliteOperator, index: int, count: int) -> None:
    got = len(_subgraph(g, op, index).outputs)
    if got != count:
        g.refuse(op, f"subgraph {index}", f"{count} outputs", got)


def if_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """IF; both branches are imported as referenced subgraphs."""
    count = len(op.outputs)
    for name in ("then_subgraph_index", "else_subgraph_index"):
        _check_outputs(g, op, op.integer("IfOptions", name), count)
    branches = [
        g.subgraph(op.integer("IfOptions", name), count)
        for name in ("then_subgraph_index", "else_subgraph_index")
    ]
    condition = g.input(op, 0)
    inputs = [g.input(op, position) for position in range(1, len(op.inputs))]
    outputs = [g.output(op, position) for position in range(count)]
    g.emit(OperationType.IF, [condition, *branches, *inputs], outputs)


def while_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """WHILE; values that the body hands on unchanged at its end are constant through the loop and are not outputs."""
    body_index = op.integer("WhileOptions", "body_subgraph_index")
    body = _subgraph(g, op, body_index)
    if not len(op.inputs) == len(op.outputs) == len(body.inputs) == len(body.outputs):
        counts = [len(op.inputs), len(op.outputs), len(body.inputs), len(body.outputs)]
        g.refuse(op, "inputs and outputs", "as many as the body has", counts)
    kept = len(body.outputs)
    while kept > 1 and body.outputs[kept - 1] == body.inputs[kept - 1]:
        kept -= 1
    condition_index = op.integer("WhileOptions", "cond_subgraph_index")
    _check_outputs(g, op, condition_index, 1)
    condition = g.subgraph(condition_index, 1)
    state = g.inputs(op)
    inputs = [condition, g.subgraph(body_index, kept), *state]
    outputs = [g.output(op, position) for position in range(kept)]
    for position in range(kept, len(op.outputs)):
        g.bind(op, position, state[position])
    g.emit(OperationType.WHILE, inputs, outputs)
