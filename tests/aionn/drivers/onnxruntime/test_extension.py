"""Operations of the extension `ai.onnx` on `ort-cpu`: ONNX's operators with their own versions, types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.errors import Error
from aionn.hal import FusedActivation, Model, OperandType, OperationType
from aionn.models.builder import ExtensionCode, GraphBuilder, Value
from aionn.models.onnx.encoding import DATA_TYPES
from aionn.models.onnx.extension import (
    EXTENSION_NAME,
    ElementType,
    ValueType,
    encode_attributes,
    number_of,
)

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowering import lower
from aionn.drivers.kit.onnx.operator_sets import Application, needed_version, upgraded
from aionn.drivers.onnxruntime.driver import OrtDevice

Array = npt.NDArray[Any]

_OPERAND_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float64": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "int64": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}


def kind(dtype: str, shape: Sequence[int] | None) -> ValueType:
    return ValueType(int(DATA_TYPES[dtype]), None if shape is None else tuple(shape))


def operand(graph: GraphBuilder, dtype: str, shape: Sequence[int]) -> Value:
    stored = [n if n > 0 else 0 for n in shape] or [1]
    if len(stored) > 4:
        stored = [int(np.prod(stored[:-3])), *stored[-3:]]
    return graph.variable(_OPERAND_TYPES[dtype], stored, scale=1.0 if dtype in ("uint8", "int8") else 0.0)


def applied(
    graph: GraphBuilder,
    op_type: str,
    version: int,
    inputs: Sequence[tuple[Value, ValueType]],
    outputs: Sequence[tuple[str, Sequence[int]]],
    **attributes: Any,
) -> list[Value]:
    """An operation of the extension."""
    kinds = [kind(dtype, shape) for dtype, shape in outputs]
    raw = encode_attributes(version, attributes, [k for _, k in inputs], kinds)
    record = graph.constant(
        raw, ExtensionCode(EXTENSION_NAME, ElementType.ATTRIBUTES), dimensions=(len(raw),)
    )
    results = [operand(graph, dtype, shape) for dtype, shape in outputs]
    code = ExtensionCode(EXTENSION_NAME, number_of(op_type))
    graph.operation(code, [*[v for v, _ in inputs], record], results)
    return results


def one(
    op_type: str,
    version: int,
    arrays: Sequence[Array],
    outputs: Sequence[tuple[str, Sequence[int]]],
    *,
    constants: Sequence[int] = (),
    **attributes: Any,
) -> Model:
    """The model of one operator; ``constants`` are the inputs whose arrays are part of it."""
    graph = GraphBuilder()
    inputs = []
    for position, array in enumerate(arrays):
        type_, scale = _OPERAND_TYPES[array.dtype.name], 1.0 if array.dtype.itemsize == 1 else 0.0
        if array.dtype == np.bool_:
            scale = 0.0
        stored = array.astype(np.int32) if array.dtype == np.int64 else array
        shape = stored.shape or (1,)
        if position in constants:
            value = graph.constant(stored.reshape(shape), type_, scale=scale)
        else:
            value = graph.input(type_, shape, scale=scale)
        inputs.append((value, kind(array.dtype.name, array.shape)))
    return graph.build(applied(graph, op_type, version, inputs, outputs, **attributes))


async def computed(model: Model, *arrays: Array) -> list[Array]:
    import aionn

    async with OrtDevice() as device, aionn.open(devices=[device], drivers=[]) as runtime:
        net = await runtime.compile(model)
        given = [a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays]
        result = await net.execute([a.reshape(a.shape or (1,)) for a in given])
        return list(result.outputs)


X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)


async def test_operator_that_the_hal_has_not_is_computed() -> None:
    (got,) = await computed(one("Erf", 13, [X], [("float32", X.shape)]), X)
    import math

    np.testing.assert_allclose(got, np.vectorize(math.erf)(X), atol=1e-6)


async def test_whole_numbers_of_64_bits_are_converted_at_the_edges() -> None:
    index = np.array([[[0, 1, 2, 0]]], np.int64)
    model = one("GatherElements", 13, [X, index], [("float32", (1, 1, 4))], axis=1)
    (got,) = await computed(model, X, index)
    np.testing.assert_array_equal(got, np.take_along_axis(X[:1], index, axis=1))


async def test_result_that_does_not_fit_is_an_error() -> None:
    a = np.array([1 << 20, 3], np.int64)
    model = one("Mul", 14, [a, a], [("int64", (2,))])
    with pytest.raises(Error):
        await computed(model, a, a)
    small = np.array([1 << 10, 3], np.int64)
    (got,) = await computed(model, small, small)
    assert got.tolist() == [1 << 20, 9]


async def test_values_between_two_operations_keep_their_type() -> None:
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_INT32, (2,))
    whole = kind("int64", (2,))
    (squares,) = applied(graph, "Mul", 14, [(a, whole), (a, whole)], [("int64", (2,))])
    (shifted,) = applied(
        graph,
        "Div",
        14,
        [(squares, whole), (graph.constant(np.array([1 << 30, 4], np.int32)), whole)],
        [("int64", (2,))],
    )
    big = np.array([1 << 20, 6], np.int32)
    (got,) = await computed(graph.build([shifted]), big)
    assert got.tolist() == [1 << 10, 9]


async def test_shape_that_only_the_execution_knows() -> None:
    x = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    model = one("NonZero", 13, [x], [("int64", (2, -1))])
    for value in (x, np.eye(2, 3, dtype=np.float32), x):
        (got,) = await computed(model, value)
        np.testing.assert_array_equal(got, np.array(np.nonzero(value)))


async def test_hal_operations_before_and_after_it() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, X.shape)
    doubled = graph.result(OperationType.ADD, [x, x, graph.constant(int(FusedActivation.NONE))], x, X.shape)
    (signs,) = applied(graph, "Sign", 13, [(doubled, kind("float32", X.shape))], [("float32", X.shape)])
    result = graph.result(OperationType.RELU, [signs], x, X.shape)
    (got,) = await computed(graph.build([result]), X)
    np.testing.assert_array_equal(got, (X > 0).astype(np.float32))


async def test_numbers_of_rank_0_and_of_8_bits() -> None:
    x = np.array([-100, 50, 100], np.int8)
    shift = np.array(27, np.int8)
    (got,) = await computed(one("Sub", 14, [x, shift], [("int8", (3,))]), x, shift)
    np.testing.assert_array_equal(got, x - shift)


async def test_values_of_more_axes_than_the_hal_has() -> None:
    x = np.arange(32, dtype=np.float32).reshape(2, 2, 2, 2, 2)
    graph = GraphBuilder()
    stored = graph.input(OperandType.TENSOR_FLOAT32, (4, 2, 2, 2))
    (result,) = applied(
        graph,
        "Transpose",
        13,
        [(stored, kind("float32", x.shape))],
        [("float32", x.shape)],
        perm=[4, 3, 2, 1, 0],
    )
    (got,) = await computed(graph.build([result]), x.reshape(4, 2, 2, 2))
    np.testing.assert_array_equal(got, x.transpose(4, 3, 2, 1, 0).reshape(4, 2, 2, 2))


OLD = {
    "Clip": (one, ("Clip", 6, [X], [("float32", X.shape)]), {"min": -1.0, "max": 2.0}, np.clip(X, -1, 2)),
    "ReduceMean": (
        one, ("ReduceMean", 11, [X], [("float32", (2, 4))]), {"axes": [1], "keepdims": 0}, X.mean(axis=1),
    ),
    "ReduceSum": (one, ("ReduceSum", 11, [X], [("float32", (2, 3, 1))]), {"axes": [-1]}, X.sum(-1, keepdims=True)),
    "Slice": (one, ("Slice", 9, [X], [("float32", (2, 2, 4))]), {"starts": [0, 1], "ends": [9, 9]}, X[:, 1:]),
    "Unsqueeze": (one, ("Unsqueeze", 11, [X], [("float32", (1, 2, 3, 4))]), {"axes": [0]}, X[None]),
    "Pad": (
        one, ("Pad", 2, [X], [("float32", (2, 3, 6))]), {"pads": [0, 0, 1, 0, 0, 1], "value": 5.0},
        np.pad(X, [(0, 0), (0, 0), (1, 1)], constant_values=5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
async def test_older_version_keeps_its_meaning(name: str) -> None:
    make, arguments, attributes, expected = OLD[name]
    (got,) = await computed(make(*arguments, **attributes), X)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


async def test_split_without_sizes_is_in_equal_parts() -> None:
    parts = [("float32", (2, 3, 2))] * 2
    got = await computed(one("Split", 13, [X], parts, axis=2), X)
    for part, expected in zip(got, np.split(X, 2, axis=2), strict=True):
        np.testing.assert_array_equal(part, expected)


async def test_newer_operator_raises_the_version_of_the_model() -> None:
    scale = np.full(4, 2, np.float32)
    model = one("RMSNormalization", 23, [X, scale], [("float32", X.shape)])
    (got,) = await computed(model, X, scale)
    expected = X / np.sqrt(np.square(X).mean(-1, keepdims=True) + 1e-5) * 2
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert needed_version("RMSNormalization", {}) == 23


@pytest.mark.parametrize(
    ("op_type", "version", "attributes"),
    [
        ("Softmax", 11, {}),
        ("GroupNormalization", 18, {"num_groups": 1}),
        ("Resize", 10, {}),
        ("Upsample", 9, {}),
        ("RandomNormalLike", 1, {}),
        ("Mod", 13, {}),
        ("SwiGLU", 28, {}),
    ],
)
async def test_operator_that_cannot_be_written_is_not_supported(
    op_type: str, version: int, attributes: dict[str, Any]
) -> None:
    async with OrtDevice() as device:
        model = one(op_type, version, [X], [("float32", X.shape)], **attributes)
        assert await device.supported_operations(model) == (False,)


def test_upgrade_changes_nothing_that_is_new_enough() -> None:
    application = Application("Clip", {}, ["x", "low", "high"])
    assert upgraded(application, 13, 1, lambda array: "c") == application


async def test_operation_that_breaks_its_contract_is_not_supported() -> None:
    async with OrtDevice() as device:
        model = one("Erf", 13, [X], [("int32", X.shape)])
        assert await device.supported_operations(model) == (False,)
        with pytest.raises(Error):
            await device.prepare_model(model)


def test_lowering_names_the_broken_contract() -> None:
    with pytest.raises(Unsupported, match="Erf, output 0: expected FLOAT, got INT32"):
        lower(one("Erf", 13, [X], [("int32", X.shape)]))
