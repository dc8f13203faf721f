"""Conformance tests made by hand, and data files to hold them: for testing the suite itself, and for a driver's own small cases;
and the public ones, read once.

Owns the making of tests of one operation over vectors. The format is ``aionn.conformance.cts``'s.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aionn.conformance.cts import (
    CtsOperand,
    CtsOperation,
    CtsSubgraph,
    CtsTest,
    CtsTolerance,
    iterate_tests,
)
from aionn.conformance.vts.run import load_sample
from aionn.hal import OperandType, operand_dtype

__all__ = ["all_tests", "small_sample", "vector_test", "write_tests"]

_WITH_ACTIVATION = {"ADD", "SUB", "MUL", "DIV"}
"""Operations that take a fused activation behind their tensors; here it is always none."""


@functools.cache
def all_tests(folder: Path) -> tuple[CtsTest, ...]:
    """All tests below a folder: reading and checking the public ones takes the better part of a second."""
    return tuple(iterate_tests(folder))


@functools.cache
def small_sample(folder: Path) -> tuple[CtsTest, ...]:
    """What the driver suite chooses of them, after it has read all."""
    return tuple(load_sample(folder))


def vector_test(
    operation: str,
    inputs: Sequence[Sequence[float]],
    output: Sequence[float],
    *,
    name: str = "by_hand",
    kind: OperandType = OperandType.TENSOR_FLOAT32,
    **fields: Any,
) -> CtsTest:
    """A test of one operation over vectors, all of one type.

    Args:
        operation: Its name; one that takes tensors, and perhaps a fused activation, and gives one tensor.
        inputs: Real values of each input.
        output: Real values that are expected.
        name: The test's name.
        kind: Type of the tensors. Quantised ones have the scale 1, unsigned 8-bit ones the zero point 128.
        **fields: Fields of ``CtsTest`` that shall have other values.
    """
    scale = 1.0 if kind.name.startswith("TENSOR_QUANT") else 0.0
    zero_point = 128 if kind == OperandType.TENSOR_QUANT8_ASYMM else 0

    def operand(lifetime: str, row: Sequence[float]) -> CtsOperand:
        data = (np.array(row) + zero_point).astype(operand_dtype(kind)).tobytes()
        return CtsOperand(None, kind.name, (len(row),), scale, zero_point, None, lifetime, False, data)

    operands = [operand("SUBGRAPH_INPUT", row) for row in inputs]
    if operation in _WITH_ACTIVATION:
        operands.append(CtsOperand(None, "INT32", (), 0.0, 0, None, "CONSTANT_COPY", False, bytes(4)))
    count = len(operands)
    operands.append(operand("SUBGRAPH_OUTPUT", output))
    main = CtsSubgraph(
        name=None,
        operands=tuple(operands),
        operations=(CtsOperation(operation, tuple(range(count)), (count,)),),
        input_indexes=tuple(range(len(inputs))),
        output_indexes=(count,),
    )
    test = CtsTest(
        name=name,
        spec=name,
        version="V1_3",
        min_feature_level="V1_3",
        is_relaxed=False,
        expect_failure=False,
        tolerance=CtsTolerance("single", 1),
        main=main,
        referenced=(),
    )
    return msgspec.structs.replace(test, **fields)


def write_tests(path: Path, tests: Iterable[CtsTest]) -> None:
    """Writes a data file; its name must end in ``.msgpack.gz``."""
    path.write_bytes(gzip.compress(msgspec.msgpack.encode(list(tests))))
