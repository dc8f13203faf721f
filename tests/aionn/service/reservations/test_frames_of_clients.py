"""Frames of clients in the queue of a served device: each runs under the reservation that it names, if its client has it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

from aionn.errors import InvalidArgument, MissedDeadline, NotAdmitted
from aionn.hal import Launch, Priority
from aionn.hal.callers import FrameReport, frame_of_launch
from aionn.scheduler.reservations.ways import WAY_NS
from aionn.service.host.admission import ClientLimits
from aionn.service.wire.protocol import Done
from aionn.service.wire.scheduling_messages import AskedTime, Release
from tests.aionn.service.reservations.held_device import LIMIT_S, HeldDevice
from tests.support.loop_reference import LoopReferenceDevice

MS = 1_000_000
SECOND = 1000 * MS

TERMS = AskedTime(
    name="gate", period_ns=10 * SECOND, deadline_ns=10 * SECOND, jitter_ns=0, duration_ns=2 * SECOND
)


class Frame:
    """A frame of a stream of an application."""

    def __init__(self, reservation: int) -> None:
        self.reservation = reservation
        self.reports: list[FrameReport] = []
        self.sent_ns = 0

    def sent(self, now_ns: int) -> None:
        self.sent_ns = now_ns

    def reported(self, report: FrameReport, now_ns: int) -> None:
        self.reports.append(report)
        times = [
            self.sent_ns,
            report.arrived_ns,
            report.ended_ns or report.arrived_ns,
            report.answered_ns,
            now_ns,
        ]
        assert times == sorted(times), "both ends have one clock"

    @property
    def labels(self) -> list[str]:
        return [report.label for report in self.reports if report.label]


class Application:
    """A client with a prepared model, which executes through a burst or without one."""

    def __init__(self, client: Any, prepared: Any, small: Any) -> None:
        self.client = client
        self.prepared = prepared
        self._small = small
        self._bursts: list[Any] = []

    async def reserved(self, **terms: Any) -> int:
        """The number of a new reservation, and the reservation."""
        found = await self.client.ledger.reserve(msgspec.structs.replace(TERMS, **terms), slot_count=1)
        number: int = found.reserved.reservation
        return number

    async def launch(
        self,
        value: float,
        frame: Frame | None = None,
        *,
        deadline_ns: int | None = None,
        by_burst: bool = True,
        priority: Priority = Priority.HIGH,
    ) -> Launch:
        work = self._small.Sum()
        work.values[0] = value
        target, arguments, options = self.prepared, [], {"priority": priority}
        if by_burst:
            target, arguments, options = await self.prepared.configure_execution_burst(), [[-1]], {}
            self._bursts.append(target)
        token = frame_of_launch.set(frame)
        try:
            launch: Launch = target.launch(work.request, *arguments, deadline_ns=deadline_ns, **options)
        finally:
            frame_of_launch.reset(token)
        return launch

    async def aclose(self) -> None:
        for burst in self._bursts:
            await burst.aclose()
        await self.client.aclose()


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
async def applications(serving: Any, device: HeldDevice, small: Any) -> AsyncIterator[list[Application]]:
    """Two, whose process may reserve everything."""
    served = await serving(device, limits=ClientLimits(reserved_share=1.0, reserved_share_per_user=1.0))
    made = []
    for _ in range(2):
        client = served.client()
        prepared = await client.prepare_model(small.sum_model(), priority=Priority.HIGH)
        made.append(Application(client, prepared, small))
    yield made
    for application in made:
        await application.aclose()


async def ended(*launches: Launch) -> None:
    with anyio.fail_after(LIMIT_S):
        for launch in launches:
            await launch


@pytest.mark.parametrize("by_burst", [True, False])
async def test_frame_goes_before_best_effort_of_any_priority_and_application(
    applications: list[Application], device: HeldDevice, by_burst: bool
) -> None:
    first, second = applications
    device.hold(1)
    launches = [await first.launch(1)]
    await device.has_begun(1)
    soon_ns = time.monotonic_ns() + 60 * SECOND
    launches += [await first.launch(value, deadline_ns=soon_ns) for value in (2, 3)]
    await device.waits(2)
    frame = Frame(await second.reserved())
    launches.append(await second.launch(4, frame, by_burst=by_burst))
    await device.waits(3)
    device.let_go(1)
    await ended(*launches)
    assert device.began[:2] == [1, 4] and sorted(device.began) == [1, 2, 3, 4]
    assert [report.label for report in frame.reports] == [""]


async def test_frames_of_two_applications_go_by_the_deadlines_of_their_reservations(
    applications: list[Application], device: HeldDevice
) -> None:
    first, second = applications
    device.hold(1)
    launches = [await first.launch(1)]
    await device.has_begun(1)
    for value, application, deadline_s in ((2, first, 30), (3, second, 20), (4, first, 40)):
        number = await application.reserved(
            period_ns=40 * SECOND, deadline_ns=deadline_s * SECOND, duration_ns=SECOND
        )
        launches.append(await application.launch(value, Frame(number)))
        await device.waits(len(launches) - 1)
    device.let_go(1)
    await ended(*launches)
    assert device.began == [1, 3, 2, 4]


@pytest.mark.parametrize("by_burst", [True, False])
async def test_frame_that_takes_longer_than_reserved_is_reported_and_the_next_one_pays(
    applications: list[Application], device: HeldDevice, by_burst: bool
) -> None:
    first, second = applications
    number = await first.reserved(period_ns=40 * MS, deadline_ns=40 * MS, duration_ns=5 * MS)
    frames = [Frame(number) for _ in range(3)]
    device.hold(1)
    launch = await first.launch(1, frames[0], by_burst=by_burst)
    await device.has_begun(1)
    await anyio.sleep(0.012)
    device.let_go(1)
    await ended(launch)
    assert frames[0].labels == ["overran"] and frames[0].reports[0].held_ns >= 12 * MS
    device.hold(2)
    await anyio.sleep(0.04)
    blocking = await second.launch(2)
    await device.has_begun(2)
    launches = [await first.launch(3, frames[1], by_burst=by_burst)]
    await device.waits(1)
    theirs = Frame(await second.reserved(duration_ns=1000))
    launches.append(await second.launch(4, theirs))
    await device.waits(2)
    device.let_go(2)
    await ended(blocking, *launches)
    assert device.began == [1, 2, 4, 3], "a frame that pays goes after those that are reserved"
    assert frames[1].labels == ["overran"] and theirs.labels in ([], ["overran"])


@pytest.mark.parametrize("by_burst", [True, False])
async def test_driver_on_the_event_loop_has_its_frames_from_the_context_of_the_call(
    serving: Any, small: Any, by_burst: bool
) -> None:
    client = (await serving(LoopReferenceDevice())).client()
    prepared = await client.prepare_model(small.sum_model())
    application = Application(client, prepared, small)
    number = await application.reserved(period_ns=40 * SECOND, deadline_ns=40 * SECOND, duration_ns=1)
    frames = [Frame(number) for _ in range(2)]
    for frame in (frames[0], None, frames[1]):
        await ended(await application.launch(1, frame, by_burst=by_burst))
    # Where the machine did not run the loop for most of the time, it is the machine's fault.
    assert frames[0].labels in (["overran"], ["stalled"]) and frames[1].labels == ["early"]
    await application.aclose()


async def test_frame_that_another_application_blocks_says_so(
    applications: list[Application], device: HeldDevice
) -> None:
    first, second = applications
    # The jitter is the time that this machine may take to the queue of the device.
    number = await first.reserved(deadline_ns=300 * MS, jitter_ns=250 * MS, duration_ns=5 * MS)
    device.hold(1)
    blocking = await second.launch(1)
    await device.has_begun(1)
    frame = Frame(number)
    launch = await first.launch(2, frame, deadline_ns=time.monotonic_ns() + 300 * MS)
    await device.waits(1)
    await anyio.sleep(0.31)
    device.let_go(1)
    await ended(blocking)
    with pytest.raises(MissedDeadline):
        await ended(launch)
    # Both are connections of this process.
    assert [(report.label, report.is_by_other) for report in frame.reports] == [("blocked", False)]
    assert device.began == [1]


@pytest.mark.parametrize("by_burst", [True, False])
async def test_number_that_the_client_never_had_is_an_error_and_a_released_one_is_best_effort(
    applications: list[Application], device: HeldDevice, by_burst: bool
) -> None:
    first, second = applications
    numbers = [await first.reserved(duration_ns=SECOND) for _ in range(2)]
    assert await second.reserved(duration_ns=SECOND) == numbers[0]
    for wrong in (numbers[1], 2**32 - 1, 0):
        launch = await second.launch(1, Frame(wrong), by_burst=by_burst)
        with pytest.raises(InvalidArgument, match=f"this client has no reservation {wrong}"):
            await ended(launch)
    assert device.began == []
    await second.client._connection.channel.call(Release(numbers[0]), Done)
    released = Frame(numbers[0])
    await ended(await second.launch(2, released, by_burst=by_burst))
    assert released.labels == ["withdrawn"]
    kept = Frame(numbers[0])
    await ended(await first.launch(3, kept, by_burst=by_burst))
    assert kept.labels == [] and device.began == [2, 3]


async def test_early_frame_is_best_effort_or_missed_where_others_cannot_wait_for_it(
    applications: list[Application], device: HeldDevice
) -> None:
    first, second = applications
    number = await first.reserved(duration_ns=SECOND)
    frames = [Frame(number) for _ in range(3)]
    later_ns = time.monotonic_ns() + 60 * SECOND
    for value, frame in enumerate(frames[:2]):
        await ended(await first.launch(value, frame, deadline_ns=later_ns))
    await second.reserved(duration_ns=8200 * MS)
    with pytest.raises(MissedDeadline, match="reserved no time"):
        await ended(await first.launch(2, frames[2], deadline_ns=later_ns))
    assert [frame.labels for frame in frames] == [[], ["early"], ["early"]] and device.began == [0, 1]


async def test_time_of_a_released_reservation_is_kept_while_a_frame_of_it_runs(
    applications: list[Application], device: HeldDevice
) -> None:
    first, second = applications
    number = await first.reserved(duration_ns=8 * SECOND)
    device.hold(1)
    launch = await first.launch(1, Frame(number))
    await device.has_begun(1)
    await first.client._connection.channel.call(Release(number), Done)
    with pytest.raises(NotAdmitted, match=r"hold a share of 0\.800"):
        await second.reserved(duration_ns=8 * SECOND)
    device.let_go(1)
    await ended(launch)
    with anyio.fail_after(LIMIT_S):
        while True:
            try:
                await second.reserved(duration_ns=8 * SECOND)
            except NotAdmitted:
                await anyio.sleep(0.002)
            else:
                break


async def test_admission_counts_with_the_way_to_the_device(applications: list[Application]) -> None:
    found = await applications[0].client.ledger.reserve(TERMS, slot_count=1)
    assert found.reserved.slack_ns == TERMS.deadline_ns - TERMS.duration_ns - WAY_NS
