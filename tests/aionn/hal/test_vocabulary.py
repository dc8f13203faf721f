"""Numbers and small rules of the HAL's vocabulary."""

from __future__ import annotations

import msgspec
import pytest

from aionn import hal
from aionn.errors import InvalidArgument
from aionn.hal import (
    LOOP_TIMEOUT_MAX_NS,
    NO_PERFORMANCE,
    OPERAND_TYPE_PROPERTIES,
    Capabilities,
    Operand,
    OperandPerformance,
    OperandType,
    Operation,
    OperationType,
    PerformanceInfo,
    Priority,
    check_deadline_ns,
    combine_dimensions,
    dimensions_are_known,
    effective_loop_timeout_ns,
    operand_size_bytes,
    uniform_capabilities,
)


def test_operations_are_numbered_without_a_gap() -> None:
    codes = sorted(int(o) for o in OperationType if o != OperationType.OEM_OPERATION)
    assert codes == list(range(106))
    assert (OperationType.IF, OperationType.WHILE, OperationType.REVERSE) == (96, 97, 105)


def test_every_operand_type_has_its_properties() -> None:
    assert set(OPERAND_TYPE_PROPERTIES) == set(OperandType)
    assert OPERAND_TYPE_PROPERTIES[OperandType.TENSOR_QUANT8_ASYMM_SIGNED].zero_point_min == -128


def test_codes_from_the_wire_become_enumerators() -> None:
    operand = msgspec.msgpack.decode(
        msgspec.msgpack.encode(Operand(OperandType.TENSOR_INT32, (2,))), type=Operand
    )
    assert operand.type is OperandType.TENSOR_INT32
    assert Operand(0x10001).type == 0x10001
    assert Operation(3, (0,), (1,)).type is OperationType.CONV_2D


@pytest.mark.parametrize(
    ("a", "b", "combined"),
    [
        ((), (2, 3), (2, 3)),
        ((2, 0), (0, 3), (2, 3)),
        ((2, 3), (2, 3), (2, 3)),
        ((2,), (2, 3), None),
        ((2, 3), (2, 4), None),
        ((), (), ()),
    ],
)
def test_dimensions_combine(a: tuple[int, ...], b: tuple[int, ...], combined: tuple[int, ...] | None) -> None:
    assert combine_dimensions(a, b) == combine_dimensions(b, a) == combined


def test_size_is_zero_where_unknown() -> None:
    assert operand_size_bytes(OperandType.FLOAT32, ()) == 4
    assert operand_size_bytes(OperandType.TENSOR_FLOAT16, (2, 3)) == 12
    assert operand_size_bytes(OperandType.TENSOR_FLOAT16, (2, 0)) == 0
    assert operand_size_bytes(OperandType.TENSOR_FLOAT16, ()) == 0
    assert dimensions_are_known(OperandType.INT32, ())
    assert not dimensions_are_known(OperandType.TENSOR_INT32, ())


def test_performance_lookup_checks_equality() -> None:
    info = PerformanceInfo(0.5, 0.5)
    gap = Capabilities(info, info, (OperandPerformance(OperandType.TENSOR_BOOL8, info),), info, info)
    assert gap.performance(OperandType.TENSOR_FLOAT32) == NO_PERFORMANCE
    assert gap.performance(OperandType.TENSOR_BOOL8) == info
    assert gap.performance(OperandType.TENSOR_FLOAT32, is_relaxed=True) == info
    entries = [e.type for e in uniform_capabilities(1, 1).operand_performance]
    assert entries == sorted(set(entries)) and OperandType.SUBGRAPH not in entries


def test_deadlines_are_64_bit_and_not_negative() -> None:
    assert check_deadline_ns(None, where="here") is None
    assert check_deadline_ns(2**63 - 1, where="here") == 2**63 - 1
    for illegal in (-1, 2**63):
        with pytest.raises(InvalidArgument, match="here: deadline: expected nanoseconds"):
            check_deadline_ns(illegal, where="here")


def test_loop_timeout_is_clamped() -> None:
    assert effective_loop_timeout_ns(None) == 2_000_000_000
    assert effective_loop_timeout_ns(2**62) == LOOP_TIMEOUT_MAX_NS == 15_000_000_000


def test_priorities_are_ordered() -> None:
    assert Priority.LOW < Priority.MEDIUM < Priority.HIGH


def test_vocabulary_is_exported_once() -> None:
    assert hal.Memory.__module__ == "aionn.hal.memory"
    assert (
        len({id(getattr(hal, n)) for n in ("Device", "PreparedModel", "Burst", "Buffer", "Execution")}) == 5
    )
