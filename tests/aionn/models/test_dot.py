"""The Graphviz text of a model."""

import io
import logging

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.dot import graph_text, write_graph

F32 = OperandType.TENSOR_FLOAT32


def _model():
    g = GraphBuilder()
    x = g.input(F32, (2, 40))
    y = g.result(OperationType.ADD, [x, g.constant(np.ones(40, np.float32)), 1], x)
    model = g.build([g.result(OperationType.ABS, [y], y)])
    for pool in model.pools:
        pool.close()
    return model


EXPECTED = """\
// a name
digraph {
    d0 [style=filled fillcolor=black fontcolor=white label="0 = input[0]\\nTF32(2x40)"]
    d1 [label="1: REF\\nTF32(40)"]
    d2 [label="2: COPY\\nI32 = 1"]
    d3 [label="3\\nTF32(2x40)"]
    d4 [style=filled fillcolor=black fontcolor=white label="4 = output[0]\\nTF32(2x40)"]
    n0 [shape=box ordering=in label="0: ADD"]
    d0 -> n0 [label=0]
    d1 -> n0 [label=1]
    d2 -> n0 [label=2]
    n0 -> d3
    n1 [shape=box label="1: ABS"]
    d3 -> n1
    n1 -> d4
}
"""


def test_graph_text_shows_operands_operations_and_edges():
    assert graph_text(_model(), name="a\nname") == EXPECTED


def test_several_outputs_are_numbered():
    g = GraphBuilder()
    x = g.input(F32, (2, 6))
    parts = [g.variable(F32, (2, 1)) for _ in range(6)]
    g.operation(OperationType.SPLIT, [x, 1, 6], parts)
    text = graph_text(g.build(parts))
    assert 'n0 [shape=box ordering=out label="0: SPLIT"]' in text
    assert "n0 -> d8 [label=5]" in text


def test_referenced_subgraphs_are_mentioned():
    branch = GraphBuilder()
    v = branch.input(F32, (2,))
    branch.finish([branch.result(OperationType.ABS, [v], v)])
    g = GraphBuilder()
    flag, x = g.input(OperandType.TENSOR_BOOL8, (1,)), g.input(F32, (2,))
    y = g.result(OperationType.IF, [flag, g.graph(branch), g.graph(branch), x], x)
    text = graph_text(g.build([y]))
    assert "// 1 referenced subgraphs are not drawn" in text
    assert "SUBGRAPH" in text


def test_destination_is_the_stream_or_else_the_log(caplog):
    stream = io.StringIO()
    write_graph(_model(), stream, name="a\nname")
    assert stream.getvalue() == EXPECTED
    with caplog.at_level(logging.INFO, logger="aionn.model"):
        write_graph(_model(), name="a\nname")
    assert [r.getMessage() for r in caplog.records] == EXPECTED.splitlines()
