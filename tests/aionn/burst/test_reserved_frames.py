"""Frames of reservations in a burst: their packets, the reservation they are executed under, and the reports about them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aionn.burst.packets import (
    LIMITS_BYTES,
    RESERVATION_MAX,
    BurstResult,
    FailureTexts,
    MalformedPacket,
    decode_request,
    decode_result,
    encode_limits,
    encode_request,
    encode_reserved_limits,
    encode_result,
    plain_limits,
    split_limits,
)
from aionn.errors import ErrorStatus, InvalidArgument, MissedDeadline
from aionn.hal import NO_TIMING, DataLocation, ExecutionResult, Memory, OutputShape, Request, RequestArgument
from aionn.hal.callers import FrameReport, frame_of_launch
from tests.aionn.burst.both_ends import Ends, doubling

ARGUMENT = RequestArgument(False, DataLocation(0, 0, 4))
REQUEST = Request((ARGUMENT,), (ARGUMENT,), ())
REPORT = FrameReport("overran", 2**40, True, 2**62, 2**62 + 1, 2**62 + 2, 3, 2**40)
LATER_NS = 2**62


@pytest.mark.parametrize("deadline_ns", [None, 0, 2**63 - 1])
@pytest.mark.parametrize("loop_timeout_ns", [None, 1_000])
@pytest.mark.parametrize("reservation", [1, RESERVATION_MAX])
def test_number_survives_the_wire_in_five_bytes(
    deadline_ns: int | None, loop_timeout_ns: int | None, reservation: int
) -> None:
    head = encode_request(REQUEST, (), measure=False, with_limits=True)
    packet = head + encode_reserved_limits(deadline_ns, loop_timeout_ns, reservation)
    asked = decode_request(packet)
    assert (asked.deadline_ns, asked.loop_timeout_ns, asked.reservation) == (
        deadline_ns,
        loop_timeout_ns,
        reservation,
    )
    assert split_limits(packet) == (head, deadline_ns, loop_timeout_ns, reservation)
    plain = head + encode_limits(deadline_ns, loop_timeout_ns)
    assert len(plain) == len(head) + LIMITS_BYTES and len(packet) == len(plain) + 5
    assert decode_request(plain).reservation is None and plain_limits(head) == head + encode_limits(
        None, None
    )


def test_bytes_that_could_be_both_kinds_of_limits_are_read_as_the_packet_that_they_are() -> None:
    """A deadline that looks like the beginning of limits: splitting takes the shorter ones, whose head no packet has."""
    head = encode_request(REQUEST, (), measure=False, with_limits=True)
    deadline_ns = int.from_bytes(bytes([0x00, 0x00, 0x93, 0x07, 0xCF, 1, 2, 3]), "big")
    loop_timeout_ns = int.from_bytes(bytes([0x00, 0x00, 0x00, 0x00, 0xCF, 1, 2, 3]), "big")
    packet = head + encode_reserved_limits(deadline_ns, loop_timeout_ns, 7)
    split = split_limits(packet)
    assert split is not None and split[0] != head
    asked = decode_request(packet)
    assert (asked.deadline_ns, asked.loop_timeout_ns, asked.reservation) == (deadline_ns, loop_timeout_ns, 7)


def test_number_beyond_its_bits_is_malformed() -> None:
    head = encode_request(REQUEST, (), measure=False, with_limits=True)
    limits = b"\x94\x08\xcf" + b"\xff" * 8 + b"\xcf" + b"\xff" * 8
    for number in (b"\xcf" + (2**32).to_bytes(8, "big"), b"\xff"):
        with pytest.raises(MalformedPacket, match="reservation of 32 bits"):
            decode_request(head + limits + number)
    with pytest.raises(MalformedPacket, match="63 bits"):
        split_limits(head + b"\x94\x08\xcf" + b"\x80" + bytes(7) + b"\xcf" + b"\xff" * 8 + b"\xce\0\0\0\1")


@pytest.mark.parametrize(
    "result",
    [
        BurstResult(ErrorStatus.NONE, (OutputShape((1,)),), NO_TIMING, report=REPORT),
        BurstResult(ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING, FailureTexts("late"), REPORT),
        BurstResult(ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING, None, REPORT),
    ],
)
def test_report_survives_the_wire(result: BurstResult) -> None:
    assert decode_result(encode_result(result)) == result


class Frame:
    """A frame of an application."""

    def __init__(self, reservation: int = 3) -> None:
        self.reservation = reservation
        self.reports: list[FrameReport] = []

    def sent(self, now_ns: int) -> None:
        assert now_ns <= time.monotonic_ns()

    def reported(self, report: FrameReport, now_ns: int) -> None:
        self.reports.append(report)


class Reservations:
    """The reservations of a device's process, of which the first three exist.

    Attributes:
        numbers: Those that frames were executed under.
        report: The report about each frame.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.report: FrameReport | None = None

    @contextmanager
    def executing(self, number: int) -> Iterator[Callable[[], FrameReport | None]]:
        if number > 3:
            raise InvalidArgument(f"no reservation {number}")
        self.numbers.append(number)
        yield lambda: self.report


@pytest.fixture
async def reserved() -> AsyncIterator[tuple[Ends, Reservations]]:
    both, reservations = Ends(), Reservations()
    both.server._reserving = reservations.executing
    yield both, reservations
    await both.controller.aclose()
    both.server.stop()


async def execute(ends: Ends, memory: Memory, frame: Frame | None, **limits: Any) -> ExecutionResult:
    token = frame_of_launch.set(frame)
    try:
        launch = ends.controller.launch(doubling(memory), [0], **limits)
    finally:
        frame_of_launch.reset(token)
    return await launch


async def test_frame_is_executed_under_its_reservation_and_best_effort_under_none(
    reserved: tuple[Ends, Reservations], memory: Memory
) -> None:
    ends, reservations = reserved
    request = doubling(memory)
    for frame, limits in ((Frame(), {}), (None, {}), (Frame(2), {"deadline_ns": LATER_NS}), (None, {})):
        token = frame_of_launch.set(frame)
        launch = ends.controller.launch(request, [0], **limits)
        frame_of_launch.reset(token)
        assert (await launch).output_sufficient_size
    assert reservations.numbers == [3, 2]
    assert ends.limits == [(None, None), (None, None), (LATER_NS, None), (None, None)]
    # The packet of a frame differs from that of best effort with limits in its last bytes alone: it was learnt once.
    assert ends.asked == [[0]] and ends.turns.succeeded == 2


async def test_each_frame_has_its_own_report_also_where_the_bytes_repeat(
    reserved: tuple[Ends, Reservations], memory: Memory
) -> None:
    ends, reservations = reserved
    frames = [Frame() for _ in range(5)]
    for frame, report in zip(frames, (None, REPORT, REPORT, None, REPORT), strict=True):
        reservations.report = report
        assert await execute(ends, memory, frame) == ExecutionResult(True, (OutputShape((1,)),))
    assert [frame.reports for frame in frames] == [[], [REPORT], [REPORT], [], [REPORT]]


async def test_report_comes_with_a_failure(reserved: tuple[Ends, Reservations], memory: Memory) -> None:
    ends, reservations = reserved
    reservations.report, frame = REPORT, Frame()

    def late(request: Request, measure: bool) -> ExecutionResult:
        raise MissedDeadline("late", transient=True)

    double, ends.execute = ends.execute, late
    with pytest.raises(MissedDeadline):
        await execute(ends, memory, frame)
    assert frame.reports == [REPORT]
    ends.execute = double
    assert (await execute(ends, memory, None)).output_sufficient_size
    assert frame.reports == [REPORT]


async def test_number_that_nobody_has_is_an_error_of_that_execution_alone(
    reserved: tuple[Ends, Reservations], ends: Ends, memory: Memory
) -> None:
    with pytest.raises(InvalidArgument, match="no reservation 4"):
        await execute(reserved[0], memory, Frame(4))
    with pytest.raises(InvalidArgument, match="keeps no reservations, got a frame of reservation 3"):
        await execute(ends, memory, Frame())
    for each in (reserved[0], ends):
        assert (await execute(each, memory, None)).output_sufficient_size
