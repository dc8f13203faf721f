"""Telemetry: every compilation and execution is told once, without data, and a listener cannot do harm."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.errors import ErrorStatus
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime import telemetry
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.telemetry import Report, data_class, session_id, session_number, structure_digest
from aionn.testing.models import chain
from fences import SyncFence
from tests.support.split import SplitDevice

Values = npt.NDArray[np.float32]


@pytest.fixture
def reports() -> list[Report]:
    return []


@pytest.fixture
async def runtime(reports: list[Report]) -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(
        drivers=["reference"], isolation="in_process", telemetry=[reports.append]
    ) as opened:
        yield opened


async def test_compilations_and_executions_are_told(
    runtime: aionn.Runtime, reports: list[Report], digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    await net.execute([silence], measure=True)
    async with net.burst() as burst:
        await burst.execute([silence])
    compiled, executed, in_burst = reports
    assert [r.kind for r in reports] == ["compilation", "execution", "execution"]
    assert compiled.devices == ("reference=1",) and compiled.input_class == "float32"
    assert compiled.model == structure_digest(net.model) and len(compiled.model) == 64
    assert executed.on_device_ns is not None and executed.took_ns >= executed.on_device_ns
    assert in_burst.on_device_ns is None and in_burst.status == ErrorStatus.NONE
    assert len({r.session for r in reports}) == 1


async def test_failures_are_told_with_their_status(
    runtime: aionn.Runtime, reports: list[Report], digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits, devices="reference")
    with pytest.raises(aionn.MissedDeadline):
        await net.execute([silence], deadline=1)
    fenced = net.execute_fenced([silence], wait_for=[SyncFence("never")])
    fenced.cancel()
    with pytest.raises(aionn.GeneralFailure):
        await fenced
    await runtime.aclose()  # A report comes when its execution has ended, a turn after its fence.
    assert reports[0].chosen_devices
    statuses = [r.status for r in reports[1:]]
    assert (
        ErrorStatus.MISSED_DEADLINE_PERSISTENT in statuses
        or ErrorStatus.MISSED_DEADLINE_TRANSIENT in statuses
    )
    assert len(statuses) == 2 and ErrorStatus.NONE not in statuses


async def test_compilations_that_fail_are_told(reports: list[Report], digits: Path, tmp_path: Path) -> None:
    broken = SplitDevice(0, 1, fail_at="prepare", failure=lambda: aionn.DeadObject("planted"))
    async with aionn.open(
        devices=[broken], drivers=["reference"], isolation="in_process", telemetry=[reports.append]
    ) as runtime:
        with pytest.raises(aionn.DeadObject):
            await runtime.compile(digits)
        with pytest.raises(aionn.InvalidArgument):
            await runtime.compile(tmp_path / "missing.tflite")
        with pytest.raises(aionn.InvalidArgument, match="no device supports"):
            await runtime.compile(chain([OperationType.OEM_OPERATION]), devices="reference")
        net = await runtime.compile(digits, devices="reference")
    dead, missing, homeless, good = reports
    assert [r.kind for r in reports] == ["compilation"] * 4
    assert dead.status == ErrorStatus.DEAD_OBJECT and dead.model == structure_digest(net.model) == good.model
    assert dead.devices == ("reference=1", "split-quick=1") and dead.input_class == "float32"
    assert missing.status == ErrorStatus.INVALID_ARGUMENT and missing.model == ""
    assert homeless.status == ErrorStatus.INVALID_ARGUMENT and homeless.chosen_devices
    assert good.status == ErrorStatus.NONE and all(r.took_ns > 0 for r in reports)


async def test_fallback_and_cache_are_told(
    reports: list[Report], digits: Path, silence: Values, tmp_path: Path
) -> None:
    broken = SplitDevice(0, 1, fail_at="prepare", failure=lambda: aionn.GeneralFailure("planted"))
    async with aionn.open(
        devices=[broken], drivers=["reference"], isolation="in_process", telemetry=[reports.append]
    ) as runtime:
        await runtime.compile(digits, allow_fallback=True)
        for _ in range(2):
            await runtime.compile(digits, devices="reference", cache_dir=tmp_path)
    assert [(r.fallback, r.from_cache) for r in reports] == [(True, False), (False, False), (False, True)]


async def test_listener_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def raises(report: Report) -> None:
        raise RuntimeError("planted")

    async with aionn.open(drivers=["reference"], isolation="in_process", telemetry=[raises]) as runtime:
        net = await runtime.compile(chain([OperationType.RELU]))
        await net.execute([np.zeros(1, np.float32)])
    assert [r.levelno for r in caplog.records] == [logging.ERROR] * 2


@pytest.mark.parametrize("has_if", [True, False])
async def test_control_flow_is_told_whatever_stands_beside_it(
    runtime: aionn.Runtime, reports: list[Report], has_if: bool
) -> None:
    inner = GraphBuilder()
    given = inner.input(OperandType.TENSOR_FLOAT32, (2,))
    inner.finish([inner.result(OperationType.ABS, [given], given)])
    graph = GraphBuilder()
    condition = graph.input(OperandType.TENSOR_BOOL8, (1,))
    value = graph.input(OperandType.TENSOR_FLOAT32, (2,))
    result = graph.result(OperationType.RELU, [value], value)
    if has_if:
        branch = graph.graph(inner)
        result = graph.result(OperationType.IF, [condition, branch, branch, result], value)
    net = await runtime.compile(graph.build([result]))
    await net.execute([np.array([True]), np.ones(2, np.float32)])
    await runtime.aclose()
    assert [r.control_flow for r in reports] == [has_if] * 2


def test_digest_is_of_the_structure_alone() -> None:
    relu = structure_digest(chain([OperationType.RELU]))
    assert relu == structure_digest(chain([OperationType.RELU]))
    assert relu != structure_digest(chain([OperationType.ABS]))
    assert relu != structure_digest(chain([OperationType.RELU], (2,)))


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ((), "unknown"),
        ((OperandType.TENSOR_FLOAT32, OperandType.FLOAT32), "float32"),
        ((OperandType.TENSOR_FLOAT16,), "float16"),
        ((OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED), "quant"),
        ((OperandType.TENSOR_BOOL8,), "other"),
        ((OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32), "mixed"),
    ],
)
def test_kind_of_numbers(types: tuple[OperandType, ...], expected: str) -> None:
    assert data_class([TensorSpec("x", t, (1,)) for t in types]) == expected


def test_session_is_the_originals_number() -> None:
    assert session_number(1000, 10**12) == (1000 * 123 + 10**12) % 999983
    telemetry._session_of.cache_clear()
    begin_ms = time.time_ns() // 1_000_000
    found = session_id()
    end_ms = time.time_ns() // 1_000_000
    assert found in {session_number(os.getpid(), ms) for ms in range(begin_ms, end_ms + 1)}


async def test_all_compilations_of_a_process_are_of_one_session(
    runtime: aionn.Runtime, reports: list[Report], digits: Path
) -> None:
    telemetry._session_of.cache_clear()
    await runtime.compile(digits)
    begin_ns = time.time_ns()
    while time.time_ns() - begin_ns < 2_000_000:  # The clock's milliseconds are part of the number.
        pass
    await runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument):
        await runtime.compile(digits.with_name("absent.tflite"))
    assert [report.session for report in reports] == [session_id()] * 3
