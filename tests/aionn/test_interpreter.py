"""What the interpreter keeps from one run to the next, and what it says when an operation fails."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aionn.errors import GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import Model, OperandType, OperationType
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32


def sum_model() -> Model:
    """``a + b`` of any shapes."""
    g = GraphBuilder()
    a, b = g.input(F32, (0, 0)), g.input(F32, (0, 0))
    y = g.variable(F32, (0, 0))
    g.operation(OperationType.ADD, [a, b, g.constant(0)], [y])
    return g.build([y])


def reshape_model() -> Model:
    """RESHAPE to a shape that is known at run time alone."""
    g = GraphBuilder()
    x, shape = g.input(F32, (6,)), g.input(I32, (2,))
    y = g.variable(F32, (0, 0))
    g.operation(OperationType.RESHAPE, [x, shape], [y])
    return g.build([y])


def counting(interpreter: Interpreter, changed: Callable[[Any], Any] = lambda shapes: shapes) -> list[int]:
    """Counts how often the only operation's shape rule sees values."""
    (step,) = interpreter._plans[0].steps
    rule, calls = step.contract.shapes, []

    def shapes(call: Any) -> Any:
        calls.append(1)
        return changed(rule(call))

    step.contract = dataclasses.replace(step.contract, shapes=shapes)
    return calls


def test_shape_rule_is_asked_once_for_the_same_shapes():
    interpreter = Interpreter(sum_model())
    calls = counting(interpreter)
    one, row, column = np.ones((2, 2), np.float32), np.ones((1, 2), np.float32), np.ones((2, 1), np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(interpreter.run([one, one], RunControl())[0], 2 * one)
    asked = len(calls)
    assert asked == 2, "once with the values and once without"
    np.testing.assert_array_equal(interpreter.run([row, column], RunControl())[0], 2 * one)
    assert len(calls) == 2 * asked
    with pytest.raises(InvalidArgument, match="broadcasts"):
        interpreter.run([one, np.ones((3, 3), np.float32)], RunControl())
    np.testing.assert_array_equal(interpreter.run([row, column], RunControl())[0], 2 * one)


def test_shape_rule_that_looks_at_values_is_asked_every_time():
    interpreter = Interpreter(reshape_model())
    x = np.arange(6, dtype=np.float32)
    for shape in ((2, 3), (3, 2), (6, 1), (2, 3)):
        (y,) = interpreter.run([x, np.array(shape, np.int32)], RunControl())
        assert y.shape == shape
    for illegal in ((4, 2), (0, 3)):
        with pytest.raises(InvalidArgument, match="RESHAPE"):
            interpreter.run([x, np.array(illegal, np.int32)], RunControl())


def test_kernel_that_contradicts_its_shape_rule_is_found_out():
    interpreter = Interpreter(sum_model())
    counting(interpreter, lambda shapes: [(9, 9)])
    one = np.ones((2, 2), np.float32)
    with pytest.raises(AssertionError, match="shape rule gives"):
        interpreter.run([one, one], RunControl())


def test_failure_names_the_operation():
    interpreter = Interpreter(sum_model())
    (step,) = interpreter._plans[0].steps

    def fail(call: Any) -> Any:
        raise ValueError("bad luck")

    step.contract = dataclasses.replace(step.contract, execute=fail)
    one = np.ones((2, 2), np.float32)
    with pytest.raises(GeneralFailure, match=r"subgraph 0, operation 0 \(ADD\): ValueError: bad luck"):
        interpreter.run([one, one], RunControl())


def test_deadline_is_looked_at_before_every_operation():
    g = GraphBuilder()
    value = x = g.input(F32, (1,))
    for _ in range(3):
        value = g.result(OperationType.ADD, [value, x, g.constant(0)], x)
    times = iter(range(10))
    control = RunControl(deadline_ns=2, now=lambda: next(times))
    with pytest.raises(MissedDeadline, match="between two operations") as missed:
        Interpreter(g.build([value])).run([np.ones(1, np.float32)], control)
    assert missed.value.transient and next(times) == 3


def chain_model(length: int) -> Model:
    """A chain of sums."""
    g = GraphBuilder()
    a = g.input(F32, (4,))
    none, last = g.constant(0), a
    for _ in range(length):
        last = g.result(OperationType.ADD, [last, a, none], a)
    return g.build([last])


def test_garbage_collector_looks_at_one_object_for_each_operation() -> None:
    """A device keeps models of many thousands of operations, and nothing else runs in its process during a collection."""
    count = 500
    gc.collect()
    before = len(gc.get_objects())
    interpreter = Interpreter(chain_model(count))
    gc.collect()
    more = len(gc.get_objects()) - before
    assert more < 1.2 * count, f"{more} objects for {count} operations of {interpreter!r}"
