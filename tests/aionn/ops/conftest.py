"""One operation at a time, by its contract alone: what its validator says, and what its shape rule and kernel give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops import CONTRACTS, Array, Call, Tensor
from tests.support.contracts import level_of


class OperationBench:
    """Validates and runs single operations."""

    def level(
        self,
        operation: OperationType,
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand],
        constants: Mapping[int, object] | None = None,
    ) -> int:
        """The level that the validator finds; None is an input that is left out, ``constants`` has values by input."""
        operands = [
            Operand(OperandType.TENSOR_INT32, lifetime=OperandLifeTime.NO_VALUE)
            if operand is None
            else Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point)
            for operand in inputs
        ]
        values = {index: np.asarray(value, dtype=np.int32) for index, value in (constants or {}).items()}
        return level_of(operation, operands, outputs, values)

    def run_all(
        self,
        operation: OperationType,
        inputs: Sequence[tuple[Operand, Any] | None],
        outputs: Sequence[Operand],
        *,
        kept: dict[str, Any] | None = None,
    ) -> list[Array]:
        """The outputs; checks the shape rule against the kernel and that no input was written."""
        tensors = [
            None if pair is None else Tensor(pair[0], np.asarray(pair[1]), is_constant=kept is not None)
            for pair in inputs
        ]
        before = [None if t is None else t.array.tobytes() for t in tensors]
        call = Call(tensors, outputs, kept=kept)
        contract = CONTRACTS[operation]
        with np.errstate(all="ignore"):
            assert contract.shapes is not None
            shapes = contract.shapes(call)
            results = list(contract.execute(call))
        assert [r.shape for r in results] == [tuple(shape) for shape in shapes]
        assert [None if t is None else t.array.tobytes() for t in tensors] == before
        return results

    def run(
        self,
        operation: OperationType,
        inputs: Sequence[tuple[Operand, Any] | None],
        output: Operand,
        *,
        kept: dict[str, Any] | None = None,
    ) -> Array:
        """The only output."""
        (result,) = self.run_all(operation, inputs, [output], kept=kept)
        return result

    def fixed_point_product(self, x: int, multiplier: int, shift: int) -> int:
        """The fixed-point product as C computes it, one number at a time, for shifts that are not positive."""
        product = x * multiplier
        nudged = product + (2**30 if product >= 0 else 1 - 2**30)
        high = abs(nudged) // 2**31 * (1 if nudged >= 0 else -1)
        exponent = -shift
        remainder, threshold = high % 2**exponent, (2**exponent - 1) // 2 + (high < 0)
        return high // 2**exponent + (remainder > threshold)


@pytest.fixture
def bench() -> OperationBench:
    return OperationBench()
