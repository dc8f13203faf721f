"""The delay that admission counts with: its variable, and that each ledger has it."""

import pytest

import aionn
from aionn.errors import InvalidArgument, NotAdmitted
from aionn.realtime.delay import DELAY_VARIABLE, reserved_delay_ns
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.admission import StreamTerms
from aionn.service.host.asked_time import checked
from aionn.service.host.reservations import ServedReservations
from aionn.service.wire.peers import Peer
from aionn.service.wire.scheduling_messages import AskedTime
from tests.aionn.runtime.guarantees.trial import npu

MS = 1_000_000


def test_delay_is_a_number_of_microseconds():
    assert reserved_delay_ns({}) == reserved_delay_ns({DELAY_VARIABLE: ""}) == 0
    assert reserved_delay_ns({DELAY_VARIABLE: "4000"}) == 4 * MS
    for text in ("-1", "4 ms", "0.004", "1000001", "٤"):
        with pytest.raises(
            InvalidArgument, match=rf"{DELAY_VARIABLE}: expected from 0 to 1000000 microseconds"
        ):
            reserved_delay_ns({DELAY_VARIABLE: text})


def test_device_of_an_application_refuses_with_the_delay():
    terms = StreamTerms(name="gate", period_ns=20 * MS, deadline_ns=10 * MS)
    for delay_ns in (4 * MS, 4 * MS + 1):
        device = RuntimeDevice("npu", "given", npu(), delay_ns=delay_ns)
        measured = Measured(6 * MS, 16)
        if delay_ns == 4 * MS:
            assert device.reservations.admit(terms, measured, "m", now_ns=0).reservation.verdict.slack_ns == 0
            continue
        with pytest.raises(
            NotAdmitted, match=r"this one 6 ms, and the machine may delay it by 4 ms: 1 ns too much"
        ):
            device.reservations.admit(terms, measured, "m", now_ns=0)


def test_served_device_refuses_with_the_delay():
    shared = ServedReservations("npu", 1, share=1.0, delay_ns=5 * MS)
    client = shared.client("pid 1", Peer(), 1)
    asked = AskedTime(name="gate", period_ns=20 * MS, deadline_ns=12 * MS, jitter_ns=0, duration_ns=7 * MS)
    with pytest.raises(NotAdmitted, match="the machine may delay it by 5 ms"):
        shared.reserve(client, checked(asked, 1), None)


async def test_runtime_takes_the_delay_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "2500")
    async with aionn.open(drivers=["reference"]) as runtime:
        ledger = runtime.devices[0].reservations.ledger
        assert ledger._slots[0].delay_ns == 2_500_000
    monkeypatch.setenv(DELAY_VARIABLE, "soon")
    with pytest.raises(InvalidArgument, match=DELAY_VARIABLE):
        async with aionn.open(drivers=["reference"]):
            pass
