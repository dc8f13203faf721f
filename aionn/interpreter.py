"""Runs a subgraph over numpy arrays: operations in order, IF and WHILE with their subgraphs.

Owns the order of work, the life of temporaries, the loop time-out and the checks of deadline and cancellation between operations.
What an operation computes is in ``aionn.ops``; whether a model is legal is for ``aionn.validation`` to say beforehand.

Invariants:
1. A temporary is dropped after its last use, so memory is bounded by what is alive.
2. Deadline and cancellation are looked at before every operation; the loop time-out after each condition and before the body.
3. Several runs of one interpreter may overlap: what is kept between them depends on constants alone.

Source: ``CpuExecutor`` of the NN HAL's runtime; loop time-out: NN HAL 1.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.errors import Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    Operation,
    OperationType,
    Subgraph,
    constant_array,
    effective_loop_timeout_ns,
    is_extension_operand_type,
    operation_type_name,
)
from aionn.ops import CONTRACTS, Array, Call, Tensor

__all__ = ["Interpreter", "RunControl"]


class RunControl:
    """What may end a run before its end.

    Attributes:
        deadline_ns: Absolute, on ``now``'s clock; None for none.
        loop_timeout_ns: What each WHILE may take.
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


class _Plan:
    """What is known of a subgraph before it runs."""

    __slots__ = ("constants", "drops", "kept", "subgraph")

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self.subgraph = subgraph
        self.constants = {
            index: Tensor(operand, constant_array(model, operand), is_constant=True)
            for index, operand in enumerate(subgraph.operands)
            if operand.is_constant and not is_extension_operand_type(operand.type)
        }
        last_use: dict[int, int] = {}
        for position, operation in enumerate(subgraph.operations):
            for index in (*operation.inputs, *operation.outputs):
                last_use[index] = position
        self.drops: list[list[int]] = [[] for _ in subgraph.operations]
        for index, position in last_use.items():
            if subgraph.operands[index].lifetime == OperandLifeTime.TEMPORARY_VARIABLE:
                self.drops[position].append(index)
        self.kept: list[dict[str, Any]] = [{} for _ in subgraph.operations]


class Interpreter:
    """Runs one model.

    The model must have been validated; its pools must stay unchanged as long as the interpreter lives.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._plans = [_Plan(model, subgraph) for subgraph in (model.main, *model.referenced)]

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
        subgraph = self._model.main
        tensors = [
            None if array is None else Tensor(subgraph.operands[index], array)
            for index, array in zip(subgraph.input_indexes, inputs, strict=True)
        ]
        # Overflow to infinity and division by zero have defined results in every operation's contract.
        with np.errstate(all="ignore"):
            return [tensor.array for tensor in self._run_subgraph(0, tensors, control)]

    def _run_subgraph(
        self, subgraph_index: int, inputs: Sequence[Tensor | None], control: RunControl
    ) -> list[Tensor]:
        plan = self._plans[subgraph_index]
        subgraph = plan.subgraph
        values: dict[int, Tensor | None] = dict(plan.constants)
        for index, tensor in zip(subgraph.input_indexes, inputs, strict=True):
            # The value keeps its array and takes the type and quantisation that this subgraph declares for it.
            values[index] = None if tensor is None else Tensor(subgraph.operands[index], tensor.array)
        for position, operation in enumerate(subgraph.operations):
            control.check()
            where = f"subgraph {subgraph_index}, operation {position} ({operation_type_name(operation.type)})"
            try:
                results = self._run_operation(plan, position, operation, values, control)
            except Error as e:
                if not (e.args and str(e.args[0]).startswith("subgraph ")):
                    e.args = (f"{where}: {e}",)
                raise
            except (ArithmeticError, ValueError, TypeError, IndexError, MemoryError) as e:
                raise GeneralFailure(f"{where}: {type(e).__name__}: {e}") from e
            for output, (index, tensor) in enumerate(zip(operation.outputs, results, strict=True)):
                _check_result(where, output, subgraph.operands[index], tensor.array)
                values[index] = tensor
            for index in plan.drops[position]:
                values.pop(index, None)
        outputs = []
        for position, index in enumerate(subgraph.output_indexes):
            value = values.get(index)
            if value is None:
                raise GeneralFailure(f"subgraph {subgraph_index}, output {position}: never written")
            outputs.append(value)
        return outputs

    def _run_operation(
        self,
        plan: _Plan,
        position: int,
        operation: Operation,
        values: dict[int, Tensor | None],
        control: RunControl,
    ) -> list[Tensor]:
        operands = plan.subgraph.operands
        if operation.type == OperationType.IF:
            return self._run_if(operands, operation, values, control)
        if operation.type == OperationType.WHILE:
            return self._run_while(operands, operation, values, control)
        contract = CONTRACTS.get(operation.type)  # type: ignore[call-overload]
        if contract is None:
            raise GeneralFailure("expected an operation of the spec; its meaning is unknown here")
        outputs = [operands[index] for index in operation.outputs]
        call = Call(
            [values.get(index) for index in operation.inputs],
            outputs,
            is_relaxed=self._model.relax_computation_float32_to_float16,
            kept=plan.kept[position],
        )
        if contract.shapes is None:
            arrays = contract.execute(call)
        else:
            shapes = contract.shapes(call)
            arrays = contract.execute(call)
            assert [a.shape for a in arrays] == [tuple(s) for s in shapes], (
                f"{contract.type.name}: shape rule says {shapes}, kernel gives {[a.shape for a in arrays]}"
            )
        return [Tensor(operand, array) for operand, array in zip(outputs, arrays, strict=True)]

    def _run_if(
        self,
        operands: tuple[Operand, ...],
        operation: Operation,
        values: dict[int, Tensor | None],
        control: RunControl,
    ) -> list[Tensor]:
        condition = values.get(operation.inputs[0])
        if condition is None or condition.array.size != 1:
            raise InvalidArgument("input 0: expected one boolean")
        branch = operands[operation.inputs[1 if bool(condition.array.reshape(())) else 2]]
        results = self._run_subgraph(
            branch.location.offset + 1, [values.get(i) for i in operation.inputs[3:]], control
        )
        return _as_outputs(operands, operation, results)

    def _run_while(
        self,
        operands: tuple[Operand, ...],
        operation: Operation,
        values: dict[int, Tensor | None],
        control: RunControl,
    ) -> list[Tensor]:
        condition_index = operands[operation.inputs[0]].location.offset + 1
        body_index = operands[operation.inputs[1]].location.offset + 1
        state = [values.get(i) for i in operation.inputs[2:]]
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
            state[: len(results)] = results
        kept = state[: len(operation.outputs)]
        if any(tensor is None for tensor in kept):
            raise InvalidArgument("state: a value that is left out cannot be an output")
        return _as_outputs(operands, operation, [tensor for tensor in kept if tensor is not None])


def _as_outputs(
    operands: tuple[Operand, ...], operation: Operation, results: Sequence[Tensor]
) -> list[Tensor]:
    return [Tensor(operands[i], t.array) for i, t in zip(operation.outputs, results, strict=True)]


def _check_result(where: str, output: int, operand: Operand, array: Array) -> None:
    declared = operand.dimensions
    if declared and (
        len(declared) != array.ndim
        or any(d and d != got for d, got in zip(declared, array.shape, strict=True))
    ):
        raise GeneralFailure(
            f"{where}, output {output}: the model says shape {list(declared)}, got {list(array.shape)}"
        )
