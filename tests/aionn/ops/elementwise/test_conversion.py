"""Claims about QUANTIZE, DEQUANTIZE and CAST that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.hal import ChannelQuant, Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32, F16, I32 = (Operand(t) for t in (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32))
UNSIGNED = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 128)
SIGNED = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, 0)
DTYPES = {
    T.TENSOR_FLOAT32: np.float32,
    T.TENSOR_FLOAT16: np.float16,
    T.TENSOR_INT32: np.int32,
    T.TENSOR_QUANT8_ASYMM: np.uint8,
}


@pytest.mark.parametrize("data", [F32, F16])
def test_quantize_then_dequantize_is_within_half_a_step(bench: Any, data: Operand) -> None:
    values = np.random.default_rng(1).uniform(-60, 60, (5, 7)).astype(DTYPES[OperandType(data.type)])
    for operand in (UNSIGNED, SIGNED):
        stored = bench.run(O.QUANTIZE, [(data, values)], operand)
        back = bench.run(O.DEQUANTIZE, [(operand, stored)], data)
        assert back.dtype == values.dtype
        assert np.abs(back.astype(float) - values.astype(float)).max() <= 0.25


def test_dequantize_uses_the_scale_of_each_channel(bench: Any) -> None:
    quant = ChannelQuant((0.5, 2.0, 4.0), 1)
    operand = Operand(T.TENSOR_QUANT8_SYMM_PER_CHANNEL, (2, 3, 2), channel_quant=quant)
    stored = np.arange(-6, 6, dtype=np.int8).reshape(2, 3, 2)
    got = bench.run(O.DEQUANTIZE, [(operand, stored)], F32)
    np.testing.assert_array_equal(got, stored * np.array([0.5, 2, 4], np.float32)[:, None])


def test_dequantize_of_symmetric_data_has_no_zero_point(bench: Any) -> None:
    operand = Operand(T.TENSOR_QUANT8_SYMM, (), 0.25, 0)
    assert bench.run(O.DEQUANTIZE, [(operand, np.array([-128, 4], np.int8))], F32).tolist() == [-32, 1]


@pytest.mark.parametrize("operation", [O.QUANTIZE, O.CAST])
def test_empty_tensors_stay_empty(bench: Any, operation: OperationType) -> None:
    assert bench.run(operation, [(F32, np.zeros((0, 3), np.float32))], UNSIGNED).shape == (0, 3)


@pytest.mark.parametrize(
    ("data", "output", "given", "expected"),
    [
        (F32, I32, [1.9, -1.9, 3e9, -3e9, np.nan], [1, -1, 2**31 - 1, -(2**31), 0]),
        (F32, UNSIGNED, [1.9, -0.9, -5, 255.9, 300], [1, 0, 0, 255, 255]),
        (I32, UNSIGNED, [-1, 0, 255, 256], [0, 0, 255, 255]),
        (UNSIGNED, I32, [0, 200, 255], [0, 200, 255]),
        (I32, F16, [0, 2049, 70000], [0, 2048, np.inf]),
        (F16, F32, [0.5, -2], [0.5, -2]),
    ],
)
def test_cast_truncates_and_saturates(
    bench: Any, data: Operand, output: Operand, given: Any, expected: Any
) -> None:
    values = np.array(given).astype(DTYPES[OperandType(data.type)])
    got = bench.run(O.CAST, [(data, values)], output)
    assert got.dtype == DTYPES[OperandType(output.type)]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "kind", [T.TENSOR_BOOL8, T.TENSOR_QUANT16_ASYMM, T.TENSOR_QUANT16_SYMM, T.TENSOR_QUANT8_SYMM]
)
def test_cast_of_other_types_is_a_copy_at_level_4(bench: Any, kind: OperandType) -> None:
    operand = Operand(kind, (3,), 0.0 if kind == T.TENSOR_BOOL8 else 1.0)
    assert bench.level(O.CAST, [operand], [operand]) == 4
    with pytest.raises(InvalidModel, match=f"output 0: expected {kind.name}, got TENSOR_FLOAT32"):
        bench.level(O.CAST, [operand], [F32])


@pytest.mark.parametrize(
    ("operation", "data", "output", "expected"),
    [
        (O.QUANTIZE, F32, UNSIGNED, 3),
        (O.QUANTIZE, F16, SIGNED, 4),
        (O.DEQUANTIZE, UNSIGNED, F32, 1),
        (O.DEQUANTIZE, UNSIGNED, F16, 3),
        (O.DEQUANTIZE, Operand(T.TENSOR_QUANT8_SYMM, (), 1.0), F32, 3),
        (O.DEQUANTIZE, SIGNED, F32, 4),
        (O.CAST, F32, I32, 3),
    ],
)
def test_level_follows_the_types(
    bench: Any, operation: OperationType, data: Operand, output: Operand, expected: int
) -> None:
    assert bench.level(operation, [data], [output]) == expected


@pytest.mark.parametrize(
    ("operation", "data", "output", "message"),
    [
        (O.QUANTIZE, I32, UNSIGNED, "input 0: expected TENSOR_FLOAT32 or TENSOR_FLOAT16"),
        (O.QUANTIZE, F32, I32, "output 0: expected TENSOR_QUANT8_ASYMM or TENSOR_QUANT8_ASYMM_SIGNED"),
        (O.DEQUANTIZE, F32, F32, "input 0: expected TENSOR_QUANT8_ASYMM"),
        (O.DEQUANTIZE, Operand(T.TENSOR_QUANT8_ASYMM, (1,) * 5, 1.0), F32, "rank of at most 4, got 5"),
        (
            O.CAST,
            Operand(T.TENSOR_INT32, (2, 3)),
            Operand(T.TENSOR_INT32, (3, 2)),
            r"output 0: expected shape \[2, 3\]",
        ),
        (O.CAST, F32, SIGNED, "output 0: expected TENSOR_FLOAT16"),
    ],
)
def test_conversions_refuse_with_the_place(
    bench: Any, operation: OperationType, data: Operand, output: Operand, message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(operation, [data], [output])
