"""Runs a subgraph over numpy arrays: operations in order, IF and WHILE with their subgraphs.

Owns the order of work, the life of temporaries, the loop time-out and the checks of deadline and cancellation between operations.
``aionn.ops`` computes operations; ``aionn.validation`` checks models beforehand.

Invariants:
1. A temporary is dropped after its last use, so memory is bounded by what is alive.
2. Deadline and cancellation are looked at before every operation; the loop time-out after each condition and before the body.
3. Several runs of one interpreter may overlap: what is kept between them depends on constants alone.
4. Results are the same in every process: products of matrices use one thread.

Source: ``CpuExecutor`` of the NN HAL's runtime; loop time-out: NN HAL 1.3.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.errors import Error, GeneralFailure, InvalidArgument, InvalidModel, MissedDeadline, named
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    constant_array,
    dimensions_are_known,
    effective_loop_timeout_ns,
    is_extension_operand_type,
    is_scalar_type,
    operand_dtype,
    operation_type_name,
)
from aionn.hal.pieces import between_pieces
from aionn.ops import CONTRACTS, PRODUCTS, Array, Call, Tensor
from aionn.ops.numerics.blas import one_thread
from aionn.ops.signature import Shape, ShapeFunction

__all__ = ["Interpreter", "RunControl", "check_stated_shapes"]

_logger = logging.getLogger("aionn.cpuexe")


class RunControl:
    """The conditions that may end a run early.

    Attributes:
        deadline_ns: Absolute, on ``now``'s clock; None means no deadline.
        loop_timeout_ns: Limit of each WHILE.
    """

    __slots__ = ("deadline_ns", "is_cancelled", "loop_timeout_ns", "now")

    def __init__(
        self,
        *,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.deadline_ns = deadline_ns
        self.loop_timeout_ns = effective_loop_timeout_ns(loop_timeout_ns)
        self.is_cancelled = is_cancelled
        self.now = now

    def check(self) -> None:
        """Ends the run when its time is up.

        Raises:
            MissedDeadline: The deadline has passed; transient, since the run had begun.
            GeneralFailure: The run was cancelled.
        """
        if self.deadline_ns is not None and self.now() >= self.deadline_ns:
            raise MissedDeadline("execution: the deadline passed between two operations", transient=True)
        if self.is_cancelled is not None and self.is_cancelled():
            raise GeneralFailure("execution: cancelled")


class _Step:
    """The prepared form of an operation.

    Attributes:
        operation: As the model has it.
        contract: Its meaning; None for control flow, and for what only extensions know.
        outputs: Its output operands.
        kept: Values that are derived from constants alone.
        drops: Temporaries that are not used after it.
    """

    __slots__ = (
        "_allowed",
        "_looks_at_values",
        "_varying",
        "contract",
        "drops",
        "kept",
        "operation",
        "outputs",
    )

    def __init__(self, subgraph: Subgraph, operation: Operation) -> None:
        self.operation = operation
        # Tuples, here and for ``drops``: unlike lists, the garbage collector looks at one of numbers once and not again.
        self._varying = tuple(
            [
                place
                for place, index in enumerate(operation.inputs)
                if not subgraph.operands[index].is_constant
            ]
        )
        # Inputs' shapes that the shape rule has allowed, and the results' shapes: one entry, the last.
        self._allowed: tuple[list[Shape | None], list[Shape]] | None = None
        self._looks_at_values = False
        self.outputs = tuple(subgraph.operands[index] for index in operation.outputs)
        self.contract = CONTRACTS.get(operation.type)  # type: ignore[call-overload]
        if operation.type in (OperationType.IF, OperationType.WHILE):
            self.contract = None
        self.kept: dict[str, Any] = {}
        self.drops: tuple[int, ...] = ()

    def shapes(self, rule: ShapeFunction, call: Call) -> list[Shape]:
        """The result of the shape rule, cached by the shapes of the inputs if it depends on nothing else.

        Raises:
            InvalidArgument: The inputs are illegal.
        """
        if self._looks_at_values:
            return [tuple(shape) for shape in rule(call)]
        inputs = call.inputs
        given = [None if (t := inputs[place]) is None else t.array.shape for place in self._varying]
        allowed = self._allowed
        if allowed is not None and allowed[0] == given:
            return allowed[1]
        shapes = [tuple(shape) for shape in rule(call)]
        blind = [
            tensor if tensor is None or place not in self._varying else _Shaped(tensor.operand, tensor.shape)
            for place, tensor in enumerate(inputs)
        ]
        try:
            rule(Call(blind, call.outputs, is_relaxed=call.is_relaxed))
        except Exception:  # Any use of a value by a rule makes it depend on the value.
            self._looks_at_values = True
        else:
            self._allowed = given, shapes
        return shapes


class _LookedAtValues(Exception):
    """A shape rule has asked for a value."""


class _Shaped(Tensor):
    """A value that has a type and a shape, and cannot be looked at."""

    __slots__ = ("_shape",)

    def __init__(self, operand: Operand, shape: Shape) -> None:
        self.operand = operand
        self.is_constant = False
        self._shape = shape

    @property
    def array(self) -> Array:  # type: ignore[override]
        raise _LookedAtValues

    @property
    def shape(self) -> Shape:
        return self._shape


class _Plan:
    """The prepared form of a subgraph.

    Attributes:
        values: By operand: a constant, else None.
        steps: Its operations.
    """

    __slots__ = ("steps", "subgraph", "values")

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self.subgraph = subgraph
        self.values: list[Tensor | None] = []
        for operand in subgraph.operands:
            if operand.is_constant and not is_extension_operand_type(operand.type):
                self.values.append(Tensor(operand, constant_array(model, operand), is_constant=True))
                between_pieces()
            else:
                self.values.append(None)
        self.steps: list[_Step] = []
        for operation in subgraph.operations:
            self.steps.append(_Step(subgraph, operation))
            between_pieces()
        last_use: dict[int, _Step] = {}
        for step in self.steps:
            for index in (*step.operation.inputs, *step.operation.outputs):
                last_use[index] = step
        for index, step in last_use.items():
            if subgraph.operands[index].lifetime == OperandLifeTime.TEMPORARY_VARIABLE:
                step.drops += (index,)


class Interpreter:
    """Runs one model.

    The model must have been validated; its pools must stay unchanged as long as the interpreter lives.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_relaxed = model.relax_computation_float32_to_float16
        self._plans = [_Plan(model, subgraph) for subgraph in (model.main, *model.referenced)]
        self._multiplies = any(step.operation.type in PRODUCTS for plan in self._plans for step in plan.steps)

    def run(self, inputs: Sequence[Array | None], control: RunControl) -> list[Array]:
        """Computes the outputs of the main subgraph.

        Args:
            inputs: One array per input of the operand's element type, rank 0 for scalars; None for one that is left out.
            control: Deadline, loop time-out and cancellation.

        Returns:
            One array per output. They may be views of inputs or constants: copy before writing either.

        Raises:
            MissedDeadline: Deadline or loop time-out passed.
            InvalidArgument: A run-time value is illegal.
            GeneralFailure: An operation failed, or an output's shape contradicts the model's.
        """
        # Overflow to infinity and division by zero have defined results in every operation's contract.
        with np.errstate(all="ignore"):
            if not self._multiplies:
                return [tensor.array for tensor in self._run_subgraph(0, inputs, control)]
            with one_thread:
                return [tensor.array for tensor in self._run_subgraph(0, inputs, control)]

    def _run_subgraph(
        self, subgraph_index: int, inputs: Sequence[Array | None], control: RunControl
    ) -> list[Tensor]:
        plan = self._plans[subgraph_index]
        subgraph = plan.subgraph
        operands = subgraph.operands
        values = plan.values.copy()
        for index, array in zip(subgraph.input_indexes, inputs, strict=True):
            # A value keeps its array and takes the type and quantisation that this subgraph declares for it.
            values[index] = None if array is None else Tensor(operands[index], array)
        is_logged = _logger.isEnabledFor(logging.DEBUG)
        for position, step in enumerate(plan.steps):
            control.check()
            try:
                self._run_step(step, operands, values, control)
                if is_logged:
                    _logger.debug("%s: %s", _where(subgraph_index, position, step), _shapes(step, values))
            except Error as e:
                if not (e.args and str(e.args[0]).startswith("subgraph ")):
                    e.args = (f"{_where(subgraph_index, position, step)}: {e}",)
                raise
            except (ArithmeticError, ValueError, TypeError, IndexError, MemoryError) as e:
                raise GeneralFailure(f"{_where(subgraph_index, position, step)}: {named(e)}") from e
            for index in step.drops:
                values[index] = None
        outputs = []
        for position, index in enumerate(subgraph.output_indexes):
            value = values[index]
            if value is None:
                raise GeneralFailure(f"subgraph {subgraph_index}, output {position}: never written")
            outputs.append(value)
        return outputs

    def _run_step(
        self,
        step: _Step,
        operands: tuple[Operand, ...],
        values: list[Tensor | None],
        control: RunControl,
    ) -> None:
        operation = step.operation
        contract = step.contract
        if contract is None:
            arrays = self._run_control_flow(operands, operation, values, control)
        else:
            call = Call(
                [values[index] for index in operation.inputs],
                step.outputs,
                is_relaxed=self._is_relaxed,
                kept=step.kept,
            )
            if contract.shapes is None:
                arrays = contract.execute(call)
            else:
                shapes = step.shapes(contract.shapes, call)
                arrays = contract.execute(call)
                assert [array.shape for array in arrays] == shapes, (
                    f"{contract.type.name}: shape rule gives {shapes}, kernel gives {[a.shape for a in arrays]}"
                )
        for index, operand, array in zip(operation.outputs, step.outputs, arrays, strict=True):
            if operand.dimensions != array.shape:
                _check_shape(operation.outputs.index(index), operand, array)
            values[index] = Tensor(operand, array)

    def _run_control_flow(
        self,
        operands: tuple[Operand, ...],
        operation: Operation,
        values: list[Tensor | None],
        control: RunControl,
    ) -> list[Array]:
        if operation.type == OperationType.IF:
            return self._run_if(operands, operation, values, control)
        if operation.type == OperationType.WHILE:
            return self._run_while(operands, operation, values, control)
        raise GeneralFailure("expected an operation of the spec; its meaning is unknown here")

    def _run_if(
        self,
        operands: tuple[Operand, ...],
        operation: Operation,
        values: list[Tensor | None],
        control: RunControl,
    ) -> list[Array]:
        condition = values[operation.inputs[0]]
        if condition is None or condition.array.size != 1:
            raise InvalidArgument("input 0: expected one boolean")
        branch = operands[operation.inputs[1 if bool(condition.array.reshape(())) else 2]]
        given = [_array_of(values[i]) for i in operation.inputs[3:]]
        return [t.array for t in self._run_subgraph(branch.location.offset + 1, given, control)]

    def _run_while(
        self,
        operands: tuple[Operand, ...],
        operation: Operation,
        values: list[Tensor | None],
        control: RunControl,
    ) -> list[Array]:
        condition_index = operands[operation.inputs[0]].location.offset + 1
        body_index = operands[operation.inputs[1]].location.offset + 1
        state = [_array_of(values[i]) for i in operation.inputs[2:]]
        started_ns = control.now()
        while True:
            (condition,) = self._run_subgraph(condition_index, state, control)
            if condition.array.size != 1:
                raise InvalidArgument(
                    f"condition: expected one boolean, got shape {list(condition.array.shape)}"
                )
            if not bool(condition.array.reshape(())):
                break
            if control.now() - started_ns >= control.loop_timeout_ns:
                raise MissedDeadline(
                    f"the loop took longer than its time-out of {control.loop_timeout_ns / 1e9:g} s",
                    transient=True,
                )
            results = self._run_subgraph(body_index, state, control)
            # State beyond the body's outputs is constant through the loop.
            state[: len(results)] = [tensor.array for tensor in results]
        kept = [array for array in state[: len(operation.outputs)] if array is not None]
        if len(kept) != len(operation.outputs):
            raise InvalidArgument("state: a value that is left out cannot be an output")
        return kept


def _array_of(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else tensor.array


def _shapes(step: _Step, values: Sequence[Tensor | None]) -> str:
    """The shapes of what an operation gave."""
    written = [values[index] for index in step.operation.outputs]
    return ", ".join("none" if tensor is None else str(list(tensor.array.shape)) for tensor in written)


def _where(subgraph_index: int, position: int, step: _Step) -> str:
    return f"subgraph {subgraph_index}, operation {position} ({operation_type_name(step.operation.type)})"


def _check_shape(output: int, operand: Operand, array: Array) -> None:
    """Rejects a result whose shape differs from the model's, as far as the model has one."""
    if _differs(operand.dimensions, array.shape):
        raise GeneralFailure(
            f"output {output}: the model has shape {list(operand.dimensions)}, got {list(array.shape)}"
        )


def _differs(declared: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a shape contradicts a declared one, whose extents of 0, and all of an empty one, are open."""
    return bool(declared) and (
        len(declared) != len(shape) or any(d and d != got for d, got in zip(declared, shape, strict=True))
    )


def check_stated_shapes(model: Model) -> None:
    """Checks the shapes that a valid model states for the outputs of its main subgraph's operations, where the shapes of their
    inputs determine them. A model of a file is as its converter wrote it; in one that is made by hand such a mistake is common.

    Raises:
        InvalidModel: An output has another shape than its operation gives it.
    """
    operands = model.main.operands
    for position, operation in enumerate(model.main.operations):
        step = _Step(model.main, operation)
        rule = None if step.contract is None else step.contract.shapes
        known = [operands[index] for index in operation.inputs]
        if rule is None or not all(
            dimensions_are_known(operand.type, operand.dimensions) for operand in known
        ):
            continue
        inputs = [_stated(model, operand) for operand in known]
        try:
            shapes = [tuple(shape) for shape in rule(Call(inputs, step.outputs))]
        except Exception:
            continue  # The shape depends on a value; or the rule rejects the inputs, which devices do as well.
        for output, (operand, shape) in enumerate(zip(step.outputs, shapes, strict=False)):
            if _differs(operand.dimensions, shape):
                raise InvalidModel(
                    f"{_where(0, position, step)}, output {output}: expected shape {list(shape)}, which its inputs give, "
                    f"got {list(operand.dimensions)}"
                )


_INDEXING = (OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8)
"""Types of tensors whose values may determine shapes."""


def _stated(model: Model, operand: Operand) -> Tensor | None:
    if operand.lifetime == OperandLifeTime.NO_VALUE:
        return None
    if operand.is_constant:
        return Tensor(operand, constant_array(model, operand), is_constant=True)
    if operand.type in _INDEXING or is_scalar_type(operand.type):
        return _Shaped(operand, operand.dimensions)  # Its values may be extents, axes or paddings.
    zero = np.zeros((), operand_dtype(operand.type))
    return Tensor(operand, np.broadcast_to(zero, operand.dimensions))
