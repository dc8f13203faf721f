"""Claims about the plain definitions: the public conformance data hold for them too, results are rounded as stated."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from aionn.conformance import cts
from aionn.conformance.random_graphs.plain import PlainCall, Stored, activated, stored_numbers
from aionn.conformance.random_graphs.plain_evaluation import DEFINITIONS, evaluate_plainly
from aionn.errors import InvalidArgument
from aionn.hal import (
    ChannelQuant,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)

DATA = Path(__file__).resolve().parents[4].parent / "shared" / "cts"
T = OperandType
STEP = 30
"""Of the tests of a file, the first and every so many-th after it."""

SLOW = ("avg_pool_float_2", "avg_pool_float_4")
"""Their windows are so large that each takes a second in Python; ``--long`` has them."""


def is_covered(test: cts.CtsTest) -> bool:
    types = {OperationType[operation.type] for operation in test.main.operations}
    return not test.referenced and not test.expect_failure and types <= set(DEFINITIONS)


@pytest.mark.sampled(6)
@pytest.mark.skipif(not DATA.is_dir(), reason="the shared conformance data are not here")
@pytest.mark.parametrize("version", ["V1_0", "V1_1", "V1_2", "V1_3", "AIDL_V2", "AIDL_V3"])
@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.long)])
def test_conformance_data_hold(version: str, step: int) -> None:
    count = 0
    for path in cts.test_files(DATA / version):
        for test in itertools.islice(filter(is_covered, cts.load_tests(path)), 0, None, step):
            if step > 1 and test.name.startswith(SLOW):
                continue
            model = cts.build_model(test)
            try:
                mismatch = cts.compare(test, evaluate_plainly(model, cts.main_inputs(test)))
            finally:
                for pool in model.pools:
                    pool.close()
            assert mismatch is None, f"{test.name}: {mismatch}"
            count += 1
    assert count > 0


def test_operation_without_a_definition_is_refused() -> None:
    operands = (
        Operand(T.TENSOR_FLOAT32, (1, 2), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(T.TENSOR_INT32, (1, 2), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    operations = (Operation(OperationType.RANDOM_MULTINOMIAL, (0,), (1,)),)
    model = Model(main=Subgraph(operands, operations, (0,), (1,)))
    with pytest.raises(InvalidArgument, match="operation 0: RANDOM_MULTINOMIAL has no plain definition"):
        evaluate_plainly(model, [np.zeros((1, 2), np.float32)])


def test_quantised_results_are_rounded_half_away_from_zero_and_saturate() -> None:
    operand = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, 3)
    stored = stored_numbers(np.array([0.25, -0.25, 0.2, 1e9, -1e9, np.nan]), operand)
    assert stored.tolist() == [4, 2, 3, 127, -128, 3]
    assert stored.dtype == np.int8


def test_stored_results_are_taken_as_they_are() -> None:
    operand = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 3)
    assert stored_numbers(Stored(np.array([0, 7])), operand).tolist() == [0, 7]


def test_integers_wrap() -> None:
    operand = Operand(T.TENSOR_INT32)
    assert stored_numbers(np.array([2**31, -(2**31) - 1]), operand).tolist() == [-(2**31), 2**31 - 1]


def test_inputs_are_real_numbers() -> None:
    operands = [
        Operand(T.TENSOR_QUANT8_ASYMM, (2,), 0.5, 128),
        Operand(T.TENSOR_QUANT8_SYMM_PER_CHANNEL, (2, 1), channel_quant=ChannelQuant((0.5, 2.0), 0)),
        Operand(T.TENSOR_BOOL8, (1,)),
    ]
    stored = [np.array([128, 130], np.uint8), np.array([[3], [-3]], np.int8), np.array([True])]
    call = PlainCall(OperationType.SELECT, operands, [*stored], [])
    assert call.tensor(0).tolist() == [0.0, 1.0]
    assert call.tensor(1).tolist() == [[1.5], [-6.0]]
    assert call.tensor(2).dtype == np.bool_


@pytest.mark.parametrize(
    ("activation", "expected"), [(0, [-2, 0.5, 7]), (1, [0, 0.5, 7]), (2, [-1, 0.5, 1]), (3, [0, 0.5, 6])]
)
def test_activations(activation: int, expected: list[float]) -> None:
    assert activated(np.array([-2, 0.5, 7]), activation).tolist() == expected
