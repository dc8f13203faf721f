"""The device ``onnx-reference``: files with operators that need ``ai.onnx``, and operations that break the extension's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import OperandType
from aionn.models.builder import ExtensionCode, GraphBuilder
from aionn.models.dot import graph_text
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.extension import (
    EXTENSION_NAME,
    ElementType,
    ValueType,
    encode_attributes,
    number_of,
)
from aionn.runtime.introspection import summarize_model
from aionn.testing.models import identity
from tests.aionn.models.onnx.building import file, info

X = np.array([[1.0, -2.0, 3.0], [4.0, 0.0, -6.0]], np.float32)

FLOAT, INT64 = 1, 7


async def results(path: Path, data: bytes, *arrays: Any, **options: Any) -> tuple[np.ndarray, ...]:
    path.write_bytes(data)
    async with (
        aionn.open(drivers=["onnx-reference", "reference"], isolation="in_process") as runtime,
        await runtime.compile(path, **options) as net,
    ):
        return tuple((await net.execute(list(arrays))).outputs)


async def test_a_model_of_both_kinds_of_operations_is_divided(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Det", ["a"], ["d"]), node("Add", ["d", "c"], ["y"])]
    square = np.array([[[2.0, -1.0], [3.0, 4.0]]], np.float32)
    path = tmp_path / "m.onnx"
    path.write_bytes(file(nodes, [info("x", square)], ["y"], {"c": np.float32([1])}, opset=22))
    async with aionn.open(drivers=["onnx-reference", "reference"]) as runtime:
        net = await runtime.compile(path)
        placed = {place.type: place.device for place in net.placement}
        assert placed["ai.onnx.Det"] == "onnx-reference" and placed["ADD"] == "reference"
        (y,) = (await net.execute([square])).outputs
    assert y.tolist() == [9]


async def test_results_of_unknown_extents_are_returned(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], ["i"]), node("Transpose", ["i"], ["t"]), node("Shape", ["t"], ["s"])]
    t, s = await results(tmp_path / "m.onnx", file(nodes, [info("x", X)], ["t", "s"]), X)
    assert t.dtype == s.dtype == np.int64
    assert t.tolist() == np.argwhere(X).tolist() and s.tolist() == [5, 2]


async def test_results_without_elements_are_returned(tmp_path: Path) -> None:
    (y,) = await results(
        tmp_path / "m.onnx", file([node("NonZero", ["x"], ["y"])], [info("x", X)], ["y"]), X * 0
    )
    assert y.shape == (2, 0)


async def test_whole_numbers_of_64_bits_are_exact_or_an_error(tmp_path: Path) -> None:
    x = np.array([3, 50_000], np.int64)
    nodes = [node("Mul", ["x", "x"], ["m"]), node("Sub", ["m", "m2"], ["y"])]
    data = file(nodes, [info("x", x), info("m2", x)], ["y"])
    # The product does not fit 32 bits, but it stays within the device.
    (y,) = await results(tmp_path / "m.onnx", data, x, np.array([1, 2_000_000_000]))
    assert y.tolist() == [8, 500_000_000]
    with pytest.raises(InvalidArgument, match="fit int32"):
        await results(tmp_path / "m.onnx", data, x, np.array([1, 0]))


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.uint32, np.uint64, np.int8])
async def test_types_that_the_hal_lacks_wrap_around_in_their_own_width(tmp_path: Path, dtype: type) -> None:
    most = min(np.iinfo(dtype).max, 2**31 - 1)
    x = np.array([most, 1], dtype)
    data = file([node("Add", ["x", "x"], ["s"]), node("Sub", ["s", "x"], ["y"])], [info("x", x)], ["y"])
    (y,) = await results(tmp_path / "m.onnx", data, x)
    assert y.dtype == dtype and y.tolist() == x.tolist()


async def test_values_of_rank_0_and_of_six_axes_keep_their_shapes(tmp_path: Path) -> None:
    x = np.arange(64, dtype=np.uint16).reshape((2,) * 6)
    data = file(
        [node("BitwiseNot", ["x"], ["y"]), node("BitwiseAnd", ["z", "one"], ["w"])],
        [info("x", x), info("z", np.uint16(3))],
        ["y", "w"],
        {"one": np.uint16(1)},
    )
    y, w = await results(tmp_path / "m.onnx", data, x, np.uint16(3))
    np.testing.assert_array_equal(y, ~x)
    assert w.shape == () and w == 1


async def test_illegal_numbers_are_errors_of_the_execution(tmp_path: Path) -> None:
    nodes = [node("ScatterND", ["x", "i", "u"], ["y"])]
    places, updates = np.array([[5, 0]], np.int64), np.ones(1, np.float32)
    data = file(nodes, [info("x", X), info("i", places), info("u", updates)], ["y"])
    with pytest.raises(InvalidArgument, match=r"ai.onnx.ScatterND.*indices"):
        await results(tmp_path / "m.onnx", data, X, places, updates)


async def test_activations_after_the_operation_are_applied(tmp_path: Path) -> None:
    x = np.array([-3, 9], np.int16)
    data = file([node("Add", ["x", "x"], ["s"]), node("Relu", ["s"], ["y"])], [info("x", x)], ["y"])
    assert (await results(tmp_path / "m.onnx", data, x))[0].tolist() == [0, 18]


def test_extensions_can_be_refused() -> None:
    data = file([node("NonZero", ["x"], ["y"])], [info("x", X)], ["y"])
    assert load_onnx(data).model.extension_name_to_prefix[0].name == "ai.onnx"
    with pytest.raises(InvalidModel, match="NonZero"):
        load_onnx(data, extensions="none")
    with pytest.raises(InvalidArgument, match="extensions"):
        load_onnx(data, extensions="all")


# Operations that break the rules


def model(op_type: str | int, data: bytes, *, inputs: int = 1, omits: int = 0, outputs: int = 1):
    g = GraphBuilder()
    x = [g.input(OperandType.TENSOR_FLOAT32, (2, 3)) for _ in range(inputs)]
    gone = [g.omitted(OperandType.TENSOR_FLOAT32) for _ in range(omits)]
    record = g.constant(data, ExtensionCode(EXTENSION_NAME, ElementType.ATTRIBUTES), dimensions=(len(data),))
    y = [g.variable(OperandType.TENSOR_FLOAT32, (2, 3)) for _ in range(outputs)]
    number = number_of(op_type) if isinstance(op_type, str) else op_type
    g.operation(ExtensionCode(EXTENSION_NAME, number), [*x, *gone, record], y)
    return g.build(y)


VALUE = ValueType(FLOAT, (2, 3))


def supported(model) -> bool:
    (answer,) = OnnxReferenceDevice().supports(model)
    return answer


def test_operations_with_their_own_forms_are_supported() -> None:
    assert supported(model("Erf", encode_attributes(13, {}, [VALUE], [VALUE])))
    assert supported(model("Clip", encode_attributes(13, {}, [VALUE, None], [VALUE]), omits=1))


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda: model("Erf", b"\xc1" * 9), "MessagePack"),
        (lambda: model(60_000, encode_attributes(13, {}, [VALUE], [VALUE])), "operation from 0"),
        (lambda: model("Erf", encode_attributes(13, {}, [], [VALUE])), "1 inputs"),
        (lambda: model("Erf", encode_attributes(13, {}, [None], [VALUE])), "input 0"),
        (lambda: model("Max", encode_attributes(13, {}, [VALUE, None], [VALUE]), inputs=2), "got none"),
        (
            lambda: model("Erf", encode_attributes(13, {}, [VALUE, VALUE], [VALUE]), inputs=2),
            "number of inputs",
        ),
        (lambda: model("Erf", encode_attributes(13, {}, [VALUE], [VALUE, VALUE]), outputs=2), "outputs"),
        (lambda: model("Erf", encode_attributes(13, {"x": 1}, [VALUE], [VALUE])), "attributes"),
        (lambda: model("Erf", encode_attributes(13, {}, [ValueType(INT64, (2, 3))], [VALUE])), "INT64"),
        (lambda: model("Erf", encode_attributes(13, {}, [VALUE], [ValueType(INT64, (2, 3))])), "INT64"),
        (lambda: model("Erf", encode_attributes(13, {}, [ValueType(FLOAT, (7,))], [VALUE])), "shape"),
        (lambda: model("Cast", encode_attributes(13, {"to": 99}, [VALUE], [VALUE])), "element type"),
        (lambda: model("If", encode_attributes(13, {}, [VALUE], [VALUE])), "contract"),
    ],
)
def test_operations_that_break_the_rules_are_rejected(broken, what) -> None:
    with pytest.raises(InvalidModel, match=what):
        supported(broken())


def test_attributes_must_be_constant() -> None:
    whole = model("Erf", encode_attributes(13, {}, [VALUE], [VALUE]))
    (operation,) = whole.main.operations
    changed = msgspec.structs.replace(operation, inputs=operation.inputs[:1])
    main = msgspec.structs.replace(whole.main, operations=(changed,))
    with pytest.raises(InvalidModel, match="constant attributes"):
        supported(msgspec.structs.replace(whole, main=main))


async def test_compilations_are_cached(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.onnx", tmp_path / "cache"
    cache.mkdir()
    path.write_bytes(file([node("NonZero", ["x"], ["y"])], [info("x", X)], ["y"]))
    async with aionn.open(drivers=["onnx-reference", "reference"], isolation="in_process") as runtime:
        found = []
        for _ in range(2):
            async with await runtime.compile(path, cache_dir=cache) as net:
                found.append((net.from_cache, (await net.execute([X])).outputs[0].tolist()))
    assert found == [(False, np.array(np.nonzero(X)).tolist()), (True, np.array(np.nonzero(X)).tolist())]


def test_inspect_names_the_operations(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(file([node("NonZero", ["x"], ["y"])], [info("x", X)], ["y"]))
    model = load_onnx(path).model
    assert [operation.type for operation in summarize_model(model).operations] == ["ai.onnx.NonZero"]
    assert '0: ai.onnx.NonZero"' in graph_text(model)


async def test_model_without_extensions_starts_no_process_of_it() -> None:
    async with aionn.open(drivers=["onnx-reference", "reference"]) as runtime:
        await runtime.compile(identity())
        assert runtime.device("onnx-reference").pid is None
        assert runtime.device("reference").pid is not None
