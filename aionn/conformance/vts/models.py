"""Models and requests that the driver suite works on: small ones made by hand, and a sample of the conformance data.

Owns the models' making and the choice of the sample. The cases use them.

Invariant: the sample holds every operation that occurs in the data, in the smallest models that have it; the same each time.

Source: the models of the NN HAL's VTS for memory domains, caching and quality of service, by what they are for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.conformance.cts import CtsTest, build_model, iterate_tests, operation_types
from aionn.conformance.requests import GuardedRequest
from aionn.hal import (
    MemoryKind,
    Model,
    OperandType,
    OperationType,
    operand_dtype,
    operand_size_bytes,
)
from aionn.models.builder import GraphBuilder, Value

__all__ = [
    "DATA_VARIABLE",
    "MEMORY_TYPES",
    "RequestPools",
    "add_model",
    "chain_model",
    "conv_model",
    "default_data",
    "endless_model",
    "has_definite_outputs",
    "model_of",
    "sample_tests",
    "split_model",
]

Array = npt.NDArray[Any]

DATA_VARIABLE = "AIONN_CONFORMANCE_DATA"
"""Environment variable that names the folder of the conformance data."""

MEMORY_TYPES = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
)
"""The types that memory domains are tried with; the VTS's."""

LONG_MODELS = 8
"""Models of several operations in a sample: the smallest model with an operation has hardly ever another."""


def default_data() -> Path | None:
    """The default folder of the conformance data: that of ``DATA_VARIABLE``, else beside the source tree; None where neither is."""
    named = os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named)
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "cts"
    return beside if beside.is_dir() else None


def sample_tests(folder: Path, *, per_operation: int | None, operations_max: int = 12) -> list[CtsTest]:
    """Models of the conformance data: legal ones, and behind them those that must fail in one way or another.

    Args:
        folder: Where the data are.
        per_operation: Number of models with each operation, at least; None for all models.
        operations_max: Models with more operations are left out of a sample.
    """
    every = sorted(iterate_tests(folder), key=_effort)
    tests = [test for test in every if not test.expect_failure]
    failing = [test for test in every if test.expect_failure]
    if per_operation is None:
        return [*tests, *failing]
    failing = [next(group) for _, group in itertools.groupby(failing, key=operation_types)]
    counts: dict[str, int] = {}
    chosen = []
    for test in tests:
        if len(test.main.operations) > operations_max:
            continue
        types = operation_types(test)
        if any(counts.get(name, 0) < per_operation for name in types):
            chosen.append(test)
            for name in types:
                counts[name] = counts.get(name, 0) + 1
    names = {test.name for test in chosen}
    long = (t for t in tests if 3 <= len(t.main.operations) <= operations_max)
    others = itertools.islice((t for t in long if t.name not in names), LONG_MODELS)
    return [*chosen, *others, *failing]


def _effort(test: CtsTest) -> tuple[int, int, str]:
    subgraphs = (test.main, *test.referenced)
    size_bytes = sum(len(o.data or b"") for s in subgraphs for o in s.operands)
    return sum(len(s.operands) for s in subgraphs), size_bytes, test.name


@contextlib.contextmanager
def model_of(test: CtsTest) -> Iterator[Model]:
    """The model of a conformance test; its memories are closed at the end."""
    model = build_model(test)
    try:
        yield model
    finally:
        for pool in model.pools:
            pool.close()


def has_definite_outputs(test: CtsTest) -> bool:
    """Whether every output has elements, and these have values that do not depend on chance."""
    outputs = (test.main.operands[i] for i in test.main.output_indexes)
    return test.tolerance.multinomial is None and all(0 not in o.dimensions for o in outputs)


def quantization(kind: OperandType) -> dict[str, Any]:
    """Scale and zero point that suit the type."""
    if kind in (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED):
        return {"scale": 1.0, "zero_point": 0}
    return {}


def add_model(
    kind: OperandType = OperandType.TENSOR_FLOAT32,
    dimensions: Sequence[int] = (1, 4),
    *,
    operation: OperationType = OperationType.ADD,
    constant: float = 1.0,
) -> Model:
    """One input, one operation with a constant (ADD adds it, MUL multiplies by it), one output of the input's shape.

    Quantised tensors have scale 1 and zero point 0: their values are the real ones.
    """
    return chain_model(1, kind, dimensions, operation=operation, constant=constant)


def chain_model(
    length: int,
    kind: OperandType = OperandType.TENSOR_FLOAT32,
    dimensions: Sequence[int] = (1, 4),
    *,
    operation: OperationType = OperationType.ADD,
    constant: float = 1.0,
) -> Model:
    """As ``add_model``, the operation ``length`` times one after the other."""
    g = GraphBuilder()
    parameters: dict[str, Any] = quantization(kind)
    value = g.input(kind, dimensions, **parameters)
    factor: dict[str, Any] = dict(parameters)
    if operation == OperationType.MUL and parameters:
        # A product's scale must be larger than the factors' scales multiplied.
        factor["scale"], constant = 0.5, constant * 2
    other = g.constant(np.full(1, constant, operand_dtype(kind)), kind, **factor)
    for _ in range(length):
        result = g.variable(kind, dimensions, **parameters)
        g.operation(operation, [value, other, 0], [result])
        value = result
    return g.build([value])


def conv_model(
    kind: OperandType, *, has_dynamic_output: bool = False, scale: float = 1.0, zero_point: int = 0
) -> Model:
    """CONV_2D of ``[1, 2, 2, 1]`` by a 1x1 filter that multiplies by 1: input and output can be the same memory's roles."""
    g = GraphBuilder()
    is_quantized = bool(quantization(kind))
    parameters: dict[str, Any] = {"scale": scale, "zero_point": zero_point} if is_quantized else {}
    x = g.input(kind, (1, 2, 2, 1), **parameters)
    dtype = operand_dtype(kind)
    filter_parameters: dict[str, Any] = {"scale": 0.5, "zero_point": 0} if is_quantized else {}
    weights = g.constant(np.full((1, 1, 1, 1), 2 if is_quantized else 1, dtype), kind, **filter_parameters)
    bias_type = OperandType.TENSOR_INT32 if is_quantized else kind
    bias = g.constant(
        np.zeros(1, operand_dtype(bias_type)), bias_type, scale=0.5 * scale if is_quantized else 0.0
    )
    y = g.variable(kind, (0, 0, 0, 0) if has_dynamic_output else (1, 2, 2, 1), **parameters)
    g.operation(OperationType.CONV_2D, [x, weights, bias, 0, 0, 0, 0, 1, 1, 0], [y])
    return g.build([y])


def endless_model() -> Model:
    """A WHILE that never ends by itself: counts a number up for as long as it is 0 or more."""
    condition = GraphBuilder()
    c = condition.input(OperandType.TENSOR_FLOAT32, (1,))
    verdict = condition.variable(OperandType.TENSOR_BOOL8, (1,))
    condition.operation(
        OperationType.GREATER_EQUAL, [c, condition.constant(np.zeros(1, np.float32))], [verdict]
    )
    condition.finish([verdict])
    body = GraphBuilder()
    b = body.input(OperandType.TENSOR_FLOAT32, (1,))
    more = body.result(OperationType.ADD, [b, body.constant(np.ones(1, np.float32)), 0], b)
    body.finish([more])
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1,))
    y = g.variable(OperandType.TENSOR_FLOAT32, (1,))
    g.operation(OperationType.WHILE, [g.graph(condition), g.graph(body), x], [y])
    return g.build([y])


def split_model(count: int, rank: int = 4) -> Model:
    """SPLIT into ``count`` outputs: a model whose results have many shapes."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (count, *(1,) * (rank - 1)))
    parts: list[Value] = [g.variable(OperandType.TENSOR_FLOAT32, (1,) * rank) for _ in range(count)]
    g.operation(OperationType.SPLIT, [x, 0, count], parts)
    return g.build(parts)


class RequestPools(GuardedRequest):
    """Pools and the request for one execution of a model whose shapes are all known.

    Args:
        model: The model.
        inputs: Values of its inputs.
        kind: Of both pools.
    """

    def __init__(
        self, model: Model, inputs: Sequence[Array], *, kind: MemoryKind = MemoryKind.ASHMEM
    ) -> None:
        self._operands = model.main.outputs
        sizes = [operand_size_bytes(o.type, o.dimensions) for o in self._operands]
        super().__init__([array.tobytes() for array in inputs], sizes, kind)

    def output(self, index: int = 0) -> Array:
        """A copy of one output."""
        operand = self._operands[index]
        return self.written(index).copy().view(operand_dtype(operand.type)).reshape(operand.dimensions)
