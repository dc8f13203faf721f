"""What the builder makes of calls, and what it refuses."""

import gc
import weakref

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import OperandLifeTime, OperandType, OperationType, constant_array
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import COMPARED_MAX, ExtensionCode, GraphBuilder
from aionn.validation import validate_model

F32 = OperandType.TENSOR_FLOAT32


def run(model, *inputs):
    try:
        return [np.array(a) for a in Interpreter(model).run(list(inputs), RunControl())]
    finally:
        for pool in model.pools:
            pool.close()


def close(model):
    for pool in model.pools:
        pool.close()


def test_simple_graph_computes():
    g = GraphBuilder()
    x = g.input(F32, (2, 3))
    y = g.result(OperationType.ADD, [x, g.constant([1.0, 2.0, 3.0]), 1], x)
    model = g.build([y])
    assert validate_model(model) == 1
    (out,) = run(model, np.full((2, 3), -2, np.float32))
    np.testing.assert_array_equal(out, [[0, 0, 1]] * 2)


def test_constants_are_released_with_their_graph_and_not_by_the_collector():
    array = np.ones((1, 64), np.float32)
    given = weakref.ref(array)
    gc.disable()
    try:
        g = GraphBuilder()
        x = g.input(F32, (1, 64))
        constant = g.constant(array)
        model = g.build([g.result(OperationType.ADD, [x, constant, 0], x)])
        del array, constant, g, x
        assert given() is None
    finally:
        gc.enable()
    close(model)


def test_constants_of_128_bytes_are_copied_when_they_are_given():
    g = GraphBuilder()
    x = g.input(F32, (32,))
    small, large = np.ones(32, np.float32), np.ones(33, np.float32)
    y = g.result(OperationType.ADD, [x, g.constant(small), 0], x)
    wide = g.input(F32, (33,))
    z = g.result(OperationType.ADD, [wide, g.constant(large), 0], wide)
    small[:] = 5
    large[:] = 7
    model = g.build([y, z])
    lifetimes = {o.location.length: o.lifetime for o in model.main.operands if o.is_constant}
    assert lifetimes[128] == OperandLifeTime.CONSTANT_COPY
    assert lifetimes[132] == OperandLifeTime.CONSTANT_REFERENCE
    first, second = run(model, np.zeros(32, np.float32), np.zeros(33, np.float32))
    assert first[0] == 1
    assert second[0] == 7


def test_large_constants_share_one_aligned_pool_and_equal_ones_their_bytes():
    g = GraphBuilder()
    x = g.input(F32, (40,))
    a = g.result(OperationType.ADD, [x, g.constant(np.ones(40, np.float32)), 0], x)
    b = g.result(OperationType.MUL, [a, g.constant(np.arange(40, dtype=np.float32)), 0], x)
    c = g.result(OperationType.ADD, [b, g.constant(np.ones(40, np.float32)), 0], x)
    model = g.build([c])
    offsets = [
        o.location.offset for o in model.main.operands if o.lifetime == OperandLifeTime.CONSTANT_REFERENCE
    ]
    assert offsets == [0, 192, 0]
    assert len(model.pools) == 1
    close(model)


def test_constants_that_differ_in_one_byte_have_bytes_of_their_own():
    """Nothing is compared beyond a few of them: a file may have any number that are alike where they are sampled."""
    g = GraphBuilder()
    value = x = g.input(F32, (COUNT := 1000,))
    arrays = [np.zeros(COUNT, np.float32) for _ in range(COMPARED_MAX + 2)]
    for index, array in enumerate(arrays):
        array.view(np.uint8)[1 + 4 * index] = 1
    for array in (*arrays, *arrays):
        value = g.result(OperationType.ADD, [value, g.constant(array.copy()), 0], x)
    model = g.build([value])
    constants = [o for o in model.main.operands if o.lifetime == OperandLifeTime.CONSTANT_REFERENCE]
    for operand, array in zip(constants, (*arrays, *arrays), strict=True):
        np.testing.assert_array_equal(constant_array(model, operand), array)
    places = [o.location.offset for o in constants]
    assert places[: len(arrays)] == sorted(set(places[: len(arrays)]))
    assert places[len(arrays) :][:COMPARED_MAX] == places[:COMPARED_MAX], (
        "those that are compared share bytes"
    )
    close(model)


def test_operations_may_be_added_in_any_order():
    g = GraphBuilder()
    x = g.input(F32, (2,))
    middle, out = g.variable(F32, (2,)), g.variable(F32, (2,))
    g.operation(OperationType.NEG, [middle], [out])
    g.operation(OperationType.ABS, [x], [middle])
    model = g.build([out])
    assert [o.type for o in model.main.operations] == [OperationType.ABS, OperationType.NEG]
    validate_model(model)
    np.testing.assert_array_equal(run(model, np.float32([1, -2]))[0], [-1, -2])


def test_free_operations_keep_the_order_of_the_calls():
    g = GraphBuilder()
    x = g.input(F32, (2,))
    kinds = [OperationType.NEG, OperationType.ABS, OperationType.EXP, OperationType.FLOOR]
    model = g.build([g.result(kind, [x], x) for kind in kinds])
    assert [o.type for o in model.main.operations] == kinds


def test_circle_is_refused_and_named():
    g = GraphBuilder()
    a, b, out = (g.variable(F32, (2,)) for _ in range(3))
    x = g.input(F32, (2,))
    g.operation(OperationType.ABS, [x], [out])
    g.operation(OperationType.ABS, [a], [b])
    g.operation(OperationType.NEG, [b], [a])
    with pytest.raises(InvalidModel, match=r"operations \[1, 2\]: expected no circle"):
        g.build([out])


def test_value_without_a_writer_is_refused():
    g = GraphBuilder()
    with pytest.raises(InvalidModel, match="graph output 0: expected a value that an operation writes"):
        g.build([g.variable(F32, (2,))])


def test_value_with_two_writers_is_refused():
    g = GraphBuilder()
    x, out = g.input(F32, (2,)), g.variable(F32, (2,))
    g.operation(OperationType.ABS, [x], [out])
    g.operation(OperationType.NEG, [x], [out])
    with pytest.raises(InvalidModel, match="operation 1: expected values that no other operation writes"):
        g.build([out])


def test_broken_contract_is_refused_where_the_operation_is_added():
    g = GraphBuilder()
    x = g.input(F32, (2,))
    with pytest.raises(InvalidModel, match=r"operation 0 \(ADD\), number of inputs: expected 3, got 2"):
        g.operation(OperationType.ADD, [x, x], [g.variable(F32, (2,))])


def test_values_of_another_graph_are_refused():
    g, h = GraphBuilder(), GraphBuilder()
    with pytest.raises(InvalidArgument, match="operation 0, input 0: expected a value of this graph"):
        g.operation(OperationType.ABS, [h.input(F32, (2,))], [g.variable(F32, (2,))])


def test_constants_that_do_not_fit_their_type_are_refused():
    g = GraphBuilder()
    with pytest.raises(InvalidArgument, match="some that do not fit"):
        g.constant([300], OperandType.TENSOR_QUANT8_ASYMM, scale=1.0)
    with pytest.raises(InvalidArgument, match="whole numbers"):
        g.constant(np.float32([1.5]), OperandType.TENSOR_INT32)
    with pytest.raises(InvalidArgument, match="expected a type for elements of uint8"):
        g.constant(np.uint8([1]))


def _conv(g, *tail):
    x = g.input(F32, (1, 1, 1, 1))
    arguments = [x, g.constant(np.ones((1, 1, 1, 1), np.float32)), g.constant([0.0]), 1, 1, 1, 0, *tail]
    return g.result(OperationType.CONV_2D, arguments, x)


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ((False,), 7),
        ((False, 1, 1), 7),
        ((True,), 8),
        ((False, 2, 1), 10),
        ((False, 1, 2), 10),
        ((True, 1, 1), 8),
    ],
)
def test_trailing_defaults_are_trimmed(tail, kept):
    g = GraphBuilder()
    model = g.build([_conv(g, *tail)])
    assert len(model.main.operations[0].inputs) == kept
    assert validate_model(model) == (1 if kept == 7 else 3)
    # What was trimmed is not there any more.
    assert len(model.main.operands) == len(
        {i for o in model.main.operations for i in (*o.inputs, *o.outputs)}
    )


def test_unused_constants_are_dropped_and_unused_inputs_are_not():
    g = GraphBuilder()
    x, unused = g.input(F32, (2,)), g.input(F32, (3,))
    g.constant(np.ones(1000, np.float32))
    g.variable(F32, (9,))
    model = g.build([g.result(OperationType.ABS, [x], x)])
    assert model.pools == ()
    assert [o.dimensions for o in model.main.operands] == [(2,), (3,), (2,)]
    assert unused.operand.dimensions == (3,)


def _branch(kind):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    return g.finish([g.result(kind, [x], x)])


def test_nested_graphs_become_referenced_subgraphs_once():
    negate = _branch(OperationType.NEG)
    g = GraphBuilder()
    flag, x = g.input(OperandType.TENSOR_BOOL8, (1,)), g.input(F32, (2,))
    absolute = _branch(OperationType.ABS)
    y = g.result(OperationType.IF, [flag, g.graph(negate), g.graph(absolute), x], x)
    # The same graph again, and an equal one.
    z = g.result(OperationType.IF, [flag, g.graph(negate), g.graph(_branch(OperationType.ABS)), y], x)
    model = g.build([z])
    assert len(model.referenced) == 2
    assert validate_model(model) == 4
    value = np.float32([1, -2])
    np.testing.assert_array_equal(run(model, np.array([True]), value)[0], value)
    np.testing.assert_array_equal(run(model, np.array([False]), value)[0], [1, 2])


def test_views_of_one_memory_share_their_bytes_without_a_comparison(monkeypatch):
    """A file may have thousands of forms of a large constant: reading it whole for each would take minutes."""
    compared = []
    equal = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda a, b: compared.append(a.size) or equal(a, b))
    large = np.arange(1000, dtype=np.float32)
    g = GraphBuilder()
    value = x = g.input(F32, (1000,))
    for shape in ((1000,), (10, 100), (100, 10)):
        view = g.constant(large.reshape(shape).reshape(1000))
        value = g.result(OperationType.ADD, [value, view, 0], x)
    model = g.build([value])
    assert model.pools[0].size_bytes == large.nbytes
    assert large.size not in compared and large.nbytes not in compared
    close(model)


def test_loop_runs_until_its_condition_fails():
    condition = GraphBuilder()
    c = condition.input(OperandType.TENSOR_INT32, (1,))
    condition.input(F32, (2,))
    flag = condition.variable(OperandType.TENSOR_BOOL8, (1,))
    condition.operation(OperationType.LESS, [c, condition.constant([5])], [flag])
    condition.finish([flag])
    body = GraphBuilder()
    i, v = body.input(OperandType.TENSOR_INT32, (1,)), body.input(F32, (2,))
    after = [
        body.result(OperationType.ADD, [i, body.constant([1]), 0], i),
        body.result(OperationType.ADD, [v, v, 0], v),
    ]
    body.finish(after)
    g = GraphBuilder()
    x = g.input(F32, (2,))
    count, out = g.variable(OperandType.TENSOR_INT32, (1,)), g.variable(F32, (2,))
    g.operation(OperationType.WHILE, [g.graph(condition), g.graph(body), g.constant([2]), x], [count, out])
    model = g.build([out, count])
    assert validate_model(model) == 4
    result, steps = run(model, np.float32([1, 3]))
    np.testing.assert_array_equal(result, [8, 24])
    assert steps == 5


def test_nested_graph_must_be_finished():
    g, inner = GraphBuilder(), GraphBuilder()
    with pytest.raises(InvalidArgument, match="without finish"):
        g.graph(inner)


def test_finished_graph_cannot_change():
    g = _branch(OperationType.ABS)
    with pytest.raises(InvalidArgument, match="not finished yet"):
        g.input(F32, (2,))
    with pytest.raises(InvalidArgument, match="not finished yet"):
        g.constant(1)
    with pytest.raises(InvalidArgument, match="not finished yet"):
        g.finish([])
    with pytest.raises(InvalidArgument, match="outputs, or a graph that is finished"):
        GraphBuilder().build()


def test_relaxed_graph_needs_level_2():
    g = GraphBuilder(relaxed=True)
    x = g.input(F32, (2,))
    model = g.build([g.result(OperationType.FLOOR, [x], x)])
    assert model.relax_computation_float32_to_float16
    assert validate_model(model) == 2


def test_extension_prefixes_count_from_1_in_order_of_first_use():
    g = GraphBuilder()
    x = g.input(ExtensionCode("org.example.second", 7), (2,))
    y = g.result(ExtensionCode("org.example.first", 3), [x], x)
    z = g.variable(ExtensionCode("org.example.second", 8), (2,))
    g.operation(
        ExtensionCode("org.example.second", 1),
        [y, g.constant(b"abc", ExtensionCode("org.example.first", 9))],
        [z],
    )
    model = g.build([z])
    assert [(e.name, e.prefix) for e in model.extension_name_to_prefix] == [
        ("org.example.second", 1),
        ("org.example.first", 2),
    ]
    assert [o.type for o in model.main.operations] == [0x20003, 0x10001]
    assert model.main.operands[model.main.output_indexes[0]].type == 0x10008
    assert validate_model(model) == 3


def test_left_out_inputs_have_no_value():
    g = GraphBuilder()
    x = g.input(F32, (2, 3))
    y = g.result(OperationType.TRANSPOSE, [x, g.omitted(OperandType.TENSOR_INT32)], x, (3, 2))
    model = g.build([y])
    assert model.main.operands[1].lifetime == OperandLifeTime.NO_VALUE
    validate_model(model)
    assert run(model, np.zeros((2, 3), np.float32))[0].shape == (3, 2)
