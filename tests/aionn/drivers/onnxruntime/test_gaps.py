"""Operators that ONNX Runtime computes otherwise than ONNX defines them are not supported, and are without the condition for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType, ValueInfo
from tests.aionn.models.onnx.building import file, info

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.kit.engines.support import is_exhausted
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.gaps import gap_of

Q = info("q", np.zeros((1, 2, 3, 4), np.float32))
IMAGE = info("x", np.zeros((1, 1, 3, 3), np.uint8))
SMALL = info("x", np.zeros((1, 1, 2, 4), np.float32))
PLACES = info("i", np.zeros((1, 1, 2, 4), np.int64))


def supports(made: Any, inputs: list[ValueInfo], opset: int = 23, **constants: Any) -> bool:
    outputs = [name for name in made.outputs if name]
    model = load_onnx(file([made], inputs, outputs, constants, opset=opset)).model
    return all(OrtDevice().supports(model))


@pytest.mark.parametrize("is_causal", [0, 1])
def test_products_of_a_causal_attention(is_causal: int) -> None:
    one = node("Attention", ["q", "q", "q"], ["y", "", "", "p"], is_causal=is_causal, qk_matmul_output_mode=1)
    assert supports(one, [Q]) == (not is_causal)


@pytest.mark.parametrize("count", [1, 2])
def test_zero_points_of_each_channel(count: int) -> None:
    one = node("ConvInteger", ["x", "w", "a", "b"], ["y"])
    weights = np.ones((2, 1, 2, 2), np.uint8)
    zero_points = np.arange(count, dtype=np.uint8)
    assert supports(one, [IMAGE], w=weights, a=np.uint8(1), b=zero_points) == (count == 1)


@pytest.mark.parametrize("has_shape", [False, True])
def test_unpooling_to_a_shape(has_shape: bool) -> None:
    names = ["x", "i", "s"] if has_shape else ["x", "i"]
    one = node("MaxUnpool", names, ["y"], kernel_shape=[2, 2], strides=[2, 2])
    constants = {"s": np.array([1, 1, 5, 9])} if has_shape else {}
    assert supports(one, [SMALL, PLACES], **constants) == (not has_shape)


@pytest.mark.parametrize("mode", ["asymmetric", "align_corners"])
def test_corners_by_scales_that_only_the_execution_knows(mode: str) -> None:
    one = node("Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode=mode)
    scales = info("s", np.zeros(4, np.float32))
    assert supports(one, [SMALL, scales]) == (mode == "asymmetric")


@pytest.mark.parametrize(("scale", "is_whole"), [(0.5, True), (2.0, True), (0.6, False)])
def test_corners_by_constant_scales(scale: float, is_whole: bool) -> None:
    kinds = (ValueType(1, (1, 1, 2, 4)), None, ValueType(1, (4,)))
    record = Record(19, {"coordinate_transformation_mode": "align_corners"}, kinds, (ValueType(1, None),))
    assert (gap_of("Resize", record, lambda place: np.float32([1, 1, scale, scale])) is None) == is_whole


@pytest.mark.parametrize("kind", [DataType.BFLOAT16, DataType.FLOAT8E4M3FN, DataType.INT4])
def test_types_that_numpy_lacks_are_not_supported(kind: DataType) -> None:
    assert not supports(node("Cast", ["x"], ["y"], to=int(kind)), [SMALL])


def test_quantisation_without_a_zero_point_is_no_fault_of_the_driver() -> None:
    one = node("QuantizeLinear", ["x", "s"], ["y"], axis=3, block_size=2, output_dtype=int(DataType.INT16))
    supports(one, [SMALL], s=np.ones((1, 1, 2, 2), np.float32))


@pytest.mark.parametrize("count", [1, 2])
def test_zero_points_of_each_row(count: int) -> None:
    one = node("MatMulInteger", ["a", "b", "z"], ["y"])
    left, right = info("a", np.zeros((2, 3), np.uint8)), info("b", np.zeros((3, 2), np.uint8))
    assert supports(one, [left, right], z=np.arange(count, dtype=np.uint8)) == (count == 1)


U8 = int(DataType.UINT8)


@pytest.mark.parametrize(("zero_points", "is_one"), [([3, 3], True), ([3, 4], False), (None, False)])
def test_zero_points_of_the_weights_of_a_quantised_convolution(
    zero_points: list[int] | None, is_one: bool
) -> None:
    kinds = [ValueType(U8, (1, 2, 3, 3))] * 5 + [ValueType(U8, (2,))]
    record = Record(10, {}, tuple(kinds), (ValueType(U8, None),))
    array = None if zero_points is None else np.uint8(zero_points)
    assert (gap_of("QLinearConv", record, lambda place: array) is None) == is_one


def attention(mask: DataType | None, *, has_past: bool, outputs: int) -> Record:
    kind = ValueType(1, (1, 2, 3, 4))
    inputs = [kind, kind, kind, None if mask is None else ValueType(int(mask), (3, 3))]
    return Record(23, {}, (*inputs, *[kind] * (2 * has_past)), (kind, None, None, kind)[:outputs])


def test_products_of_an_attention_with_a_mask_of_truth_values() -> None:
    for mask, is_gap in [(DataType.BOOL, True), (DataType.FLOAT, False), (None, False)]:
        record = attention(mask, has_past=False, outputs=4)
        assert (gap_of("Attention", record, lambda place: None) is not None) == is_gap, mask


@pytest.mark.parametrize("has_past", [False, True])
def test_attention_with_past_keys_needs_present_ones(has_past: bool) -> None:
    record = attention(None, has_past=has_past, outputs=1)
    assert (gap_of("Attention", record, lambda place: None) is not None) == has_past


@pytest.mark.parametrize(
    ("shape", "is_gap"), [((2, 3), False), ((2, 0), True), ((2, -1), True), (None, True)]
)
def test_truth_values_that_may_have_no_elements(shape: tuple[int, ...] | None, is_gap: bool) -> None:
    record = Record(20, {}, (ValueType(int(DataType.BOOL), shape),), (ValueType(int(DataType.BOOL), None),))
    assert (gap_of("ReduceMax", record, lambda place: None) is not None) == is_gap


def test_corners_by_scales_of_unknown_shape() -> None:
    kinds = (ValueType(1, (1, 1, 2, 4)), None, ValueType(1, None))
    record = Record(19, {"coordinate_transformation_mode": "align_corners"}, kinds, (ValueType(1, None),))
    assert gap_of("Resize", record, lambda place: None) is not None


ROW = info("x", np.zeros((1, 1, 7), np.float32))
BYTES = info("x", np.zeros((1, 1, 7), np.uint8))
WINDOW = {"w": np.ones((1, 1, 2), np.float32)}
BYTE_WINDOW = {"w": np.ones((1, 1, 2), np.uint8)}
SCALES = {"s": np.float32(1), "z": np.uint8(0)}
WINDOWED: dict[str, tuple[ValueInfo, list[str], dict[str, Any]]] = {
    "AveragePool": (ROW, ["x"], {}),
    "Conv": (ROW, ["x", "w"], WINDOW),
    "ConvInteger": (BYTES, ["x", "w"], BYTE_WINDOW),
    "ConvTranspose": (ROW, ["x", "w"], WINDOW),
    "LpPool": (ROW, ["x"], {}),
    "MaxPool": (ROW, ["x"], {}),
    "QLinearConv": (BYTES, ["x", "s", "z", "w", "s", "z", "s", "z"], BYTE_WINDOW | SCALES),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("op_type", WINDOWED)
async def test_padding_that_is_supported_has_the_shape_of_onnx(op_type: str, auto_pad: str) -> None:
    row, names, constants = WINDOWED[op_type]
    supported = []
    async with aionn.open(drivers=["ort-cpu"], isolation="in_process") as runtime:
        for stride, dilation in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
            attributes: dict[str, Any] = {"strides": [stride], "dilations": [dilation], "auto_pad": auto_pad}
            if op_type.endswith("Pool"):
                attributes["kernel_shape"] = [2]
            one = node(op_type, names, ["y"], **attributes)
            model = load_onnx(file([one], [row], ["y"], constants, opset=22)).model
            if not all(OrtDevice().supports(model)):
                continue
            supported.append((stride, dilation))
            net = await runtime.compile(model, devices="ort-cpu")
            result = await net.execute([np.ones(net.inputs[0].dimensions, net.inputs[0].dtype)])
            window = dilation + 1
            if op_type == "ConvTranspose":
                expected = 7 * stride if auto_pad != "VALID" else 6 * stride + window
            else:
                expected = -(-7 // stride) if auto_pad != "VALID" else (7 - window) // stride + 1
            assert result.outputs[0].size == expected, (stride, dilation)
    assert {(1, 1), (2, 1)} <= set(supported)
    assert auto_pad != "VALID" or len(supported) == 5


@pytest.mark.parametrize(
    ("text", "is_shortage"),
    [
        (
            "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824",
            True,
        ),
        ("Available memory of 2951424 is smaller than requested bytes of 16777216", True),
        ("CUDA failure 2: out of memory ; GPU=0", True),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", True),
        ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA failure 3: initialization error ; GPU=-1", False),
        ("std::bad_alloc", True),
        ("[GPU] Exceeded max size of memory object allocation: requested 4831838208 bytes", True),
        ("L0 zeMemAllocHost result: ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY, code 0x70000002", True),
        ("src/inference/src/dev/plugin.cpp:54: Resource temporarily unavailable", True),
        ("the pre-allocated shapes must match; either supply unallocated output OrtValues", False),
        ("do not pre-allocate outputs of a model with dynamic shapes", False),
    ],
)
def test_only_exhausted_memory_and_threads_are_a_shortage(text: str, is_shortage: bool) -> None:
    assert is_exhausted(RuntimeError(text)) == is_shortage
