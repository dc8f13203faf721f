"""IF and WHILE: the operators that refer to other subgraphs of the file.

Owns which outputs of a referenced subgraph are kept. Whether the subgraphs fit the operation is for ``aionn.validation`` to say.

Source: the TensorFlow Lite operators' documentation; IF and WHILE of the NN HAL 1.3.
"""

from __future__ import annotations

from aionn.hal import OperationType
from aionn.models.tflite_graph import SubgraphWriter
from aionn.models.tflite_schema import TfliteOperator

__all__ = ["if_", "while_"]


def if_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """IF; both branches are imported as referenced subgraphs."""
    count = len(op.outputs)
    branches = [
        g.subgraph(op, op.integer("IfOptions", name), count)
        for name in ("then_subgraph_index", "else_subgraph_index")
    ]
    condition = g.input(op, 0)
    inputs = [g.input(op, position) for position in range(1, len(op.inputs))]
    outputs = [g.output(op, position) for position in range(count)]
    g.emit(OperationType.IF, [condition, *branches, *inputs], outputs)


def while_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """WHILE; values that the body hands on unchanged at its end are constant through the loop and are no outputs."""
    body_index = op.integer("WhileOptions", "body_subgraph_index")
    if not 0 < body_index < len(g.model.file.subgraphs):
        g.refuse(op, "subgraph index", f"from 1 to {len(g.model.file.subgraphs) - 1}", body_index)
    body = g.model.file.subgraphs[body_index]
    if not len(op.inputs) == len(op.outputs) == len(body.inputs) == len(body.outputs):
        counts = [len(op.inputs), len(op.outputs), len(body.inputs), len(body.outputs)]
        g.refuse(op, "inputs and outputs", "as many as the body has", counts)
    kept = len(body.outputs)
    while kept > 1 and body.outputs[kept - 1] == body.inputs[kept - 1]:
        kept -= 1
    condition = g.subgraph(op, op.integer("WhileOptions", "cond_subgraph_index"), 1)
    state = g.inputs(op)
    inputs = [condition, g.subgraph(op, body_index, kept), *state]
    outputs = [g.output(op, position) for position in range(kept)]
    for position in range(kept, len(op.outputs)):
        g.bind(op, position, state[position])
    g.emit(OperationType.WHILE, inputs, outputs)
