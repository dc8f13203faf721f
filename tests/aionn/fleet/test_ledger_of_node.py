"""The ledger of a node in processes of its own: clients compete in it, and frames of its reservations are reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import aionn
from aionn.errors import InvalidArgument, NotAdmitted
from aionn.fleet.addresses import parse_node
from aionn.fleet.control import ControlConnection
from aionn.fleet.device import NodeDevice
from aionn.fleet.reported import report_here
from aionn.hal.callers import FrameReport
from aionn.service.client.reservations import ServedLedger
from aionn.service.wire.scheduling_messages import AskedTime
from aionn.testing import models
from tests.aionn.fleet.conftest import START_S_MAX, Served

pytestmark = pytest.mark.forked("any")

MS = 1_000_000

HALF = AskedTime(name="gate", period_ns=100 * MS, deadline_ns=100 * MS, jitter_ns=0, duration_ns=45 * MS)
"""Two of these do not fit on one slot: at most 75 % of it is for clients of the node."""


def ledger_of(device: NodeDevice) -> ServedLedger:
    assert device.ledger is not None
    return device.ledger


async def another(served: Served) -> NodeDevice:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    await device.connect()
    return device


async def test_clients_of_a_node_compete_in_its_ledger(
    served: Served, device: NodeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlConnection, "way_ns", MS)  # Measured on a busy machine, it leaves no time.
    other = await another(served)
    with anyio.fail_after(START_S_MAX):
        held = await ledger_of(device).reserve(HALF, slot_count=1)
        assert held.reserved.slot == 0 and not held.end
        with pytest.raises(NotAdmitted) as refused:
            await ledger_of(other).reserve(msgspec.structs.replace(HALF, name="hall"), slot_count=1)
        assert '"gate"' not in str(refused.value), "names of other clients are left out"
        ledger_of(device).release(held)
        found = None
        while found is None:
            try:
                found = await ledger_of(other).reserve(HALF, slot_count=1)
            except NotAdmitted:
                await anyio.sleep(0.01)  # The release is on its way.
        assert not found.end
    await other.aclose()
    assert found.end == "withdrawn"


async def test_reservations_end_with_the_client_that_holds_them(
    served: Served, device: NodeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlConnection, "way_ns", MS)
    other = await another(served)
    ended: list[str] = []
    with anyio.fail_after(START_S_MAX):
        held = await ledger_of(other).reserve(HALF, slot_count=1)
        held.on_end = ended.append
        await other.aclose()
        assert ended == ["withdrawn"]
        while True:
            try:
                ledger_of(device).release(await ledger_of(device).reserve(HALF, slot_count=1))
                break
            except NotAdmitted:
                await anyio.sleep(0.01)


async def test_terms_that_change_keep_or_replace_the_reservation(
    device: NodeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.fail_after(START_S_MAX):
        ledger = ledger_of(device)
        monkeypatch.setattr(ControlConnection, "way_ns", MS)
        held = await ledger.reserve(HALF, slot_count=1)
        shorter = msgspec.structs.replace(HALF, duration_ns=10 * MS)
        for way_ns in (2 * MS, MS // 2, MS):
            monkeypatch.setattr(ControlConnection, "way_ns", way_ns)
            assert await ledger.reserve(shorter, held, slot_count=1) is held
        monkeypatch.setattr(ControlConnection, "way_ns", 5 * MS)
        farther = await ledger.reserve(shorter, held, slot_count=1)
        assert farther is not held, "the way has become longer"
        ledger.release(farther)
        longer = msgspec.structs.replace(HALF, duration_ns=20 * MS)
        changed = await ledger.reserve(longer, held, slot_count=1)
        assert changed is not held and changed.reserved.reservation != held.reserved.reservation
        with pytest.raises(NotAdmitted):
            await ledger.reserve(msgspec.structs.replace(HALF, duration_ns=90 * MS), changed, slot_count=1)
        for one in (held, changed):
            ledger.release(one)
        with pytest.raises(InvalidArgument, match="period"):
            await ledger.reserve(msgspec.structs.replace(HALF, period_ns=0), slot_count=1)


async def frames(count: int, period_s: float) -> AsyncIterator[np.ndarray[Any, Any]]:
    for index in range(count):
        yield np.full(4, index, np.float32)
        await anyio.sleep(period_s)


async def test_frames_of_a_reservation_are_ordered_and_reported_by_the_node(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[FrameReport] = []

    def seen(report: FrameReport, **times: Any) -> FrameReport:
        reports.append(report_here(report, **times))
        assert times["sent_ns"] <= reports[-1].arrived_ns <= reports[-1].answered_ns <= times["read_ns"]
        return reports[-1]

    monkeypatch.setattr("aionn.fleet.data_connection.report_here", seen)
    async with aionn.open(drivers=[], fleet=[f"{served.address}?silence_ms=30000"]) as runtime:
        net = await runtime.compile(models.identity((4,)))
        async with net.burst(slots=11) as burst:
            stream = burst.stream(frames(3, 0.2), guarantee=True, period=0.2, deadline=2.0)
            await stream.admit()
            count = len([result async for result in stream])
            assert count == 3
            assert len(reports) >= 1 and all(report.held_ns > 0 for report in reports if report.ended_ns)
