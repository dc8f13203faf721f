"""``guarantee="phased"`` in virtual time: more streams than in all phases, kept as long as their sources keep their phases."""

import contextlib
import random

import anyio
import pytest

import aionn
from aionn.scheduler.reservations.windows import REVIEW_NS
from tests.aionn.runtime.guarantees.trial import Frame, Trial, X, camera, gate, npu, read

PERIOD, DEADLINE = 0.040, 0.012
MS = 1_000_000


async def phased_camera(trial, stream, count, *, off_s=0.0, drift_ppm=0.0, jitter_s=0.0, seed=0):
    """Frames at the phase of the stream's reservation, with an offset, a clock of their own, and late deliveries."""
    source = random.Random(seed)
    first_ns = stream.reservation.phase_ns
    for index in range(count):
        captured_s = first_ns / 1e9 + off_s + index * PERIOD * (1 + drift_ppm / 1e6)
        await anyio.sleep_until(captured_s + source.uniform(0, jitter_s))
        frame = Frame(trial.clock)
        frame.captured_at_ns = round(captured_s * 1e9)
        yield frame


class Later:
    """A source that is made when the stream is read first."""

    def __init__(self, make):
        self._make = make

    def __aiter__(self):
        return self._make(self.stream)

    def of(self, stream):
        self.stream = stream
        return stream


def phased(burst, source, **options):
    options = {"period": PERIOD, "deadline": DEADLINE, "guarantee": "phased", **options}
    options.setdefault("into", lambda item, view: None)
    found = gate(burst, source, **options)
    if isinstance(source, Later):
        source.of(found)
    return found


async def opened(trial, stack, **options):
    """A phased stream whose camera follows the phase of its reservation."""
    moves = {key: options.pop(key) for key in ("off_s", "drift_ppm", "jitter_s", "count") if key in options}
    moves.setdefault("count", 30)
    burst = await stack.enter_async_context(trial.net.burst(slots=3))
    source = Later(lambda stream: phased_camera(trial, stream, **moves))
    return await stack.enter_async_context(phased(burst, source, **options))


def test_twice_as_many_streams_are_admitted_and_lose_no_frame():
    async def main(trial):
        plain = 0
        async with contextlib.AsyncExitStack() as stack:
            with contextlib.suppress(aionn.NotAdmitted):
                while True:
                    burst = await stack.enter_async_context(trial.net.burst(slots=3))
                    await stack.enter_async_context(
                        gate(burst, camera(0, 1), period=PERIOD, deadline=DEADLINE, jitter=0)
                    )
                    plain += 1
        streams = []
        async with contextlib.AsyncExitStack() as stack:
            with contextlib.suppress(aionn.NotAdmitted):
                while True:
                    streams.append(await opened(trial, stack, jitter=0.0005, jitter_s=0.0004))
            assert plain == 2 and len(streams) >= 7
            phases = {stream.reservation.phase_ns % (40 * MS) for stream in streams}
            assert len(phases) == len(streams)
            seen = []

            async def watch(stream):
                seen.extend(await read(stream))

            async with anyio.create_task_group() as group:
                for stream in streams:
                    group.start_soon(watch, stream)
            assert seen == [("on_time", None)] * (30 * len(streams))
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_stated_phase_is_that_of_the_reservation_and_another_is_offered():
    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            burst = await stack.enter_async_context(trial.net.burst(slots=16))
            at_ns = trial.clock.now_ns + 500 * MS
            first = await stack.enter_async_context(phased(burst, camera(0, 1), phase_ns=at_ns, jitter=0))
            found = first.reservation
            assert found.phase_ns >= trial.clock.now_ns and (found.phase_ns - at_ns) % (40 * MS) == 0
            assert found.tolerance_ns > 0 and "of their phase" in str(found)
            for shift in (0, 3 * MS):
                with contextlib.suppress(aionn.NotAdmitted):
                    await stack.enter_async_context(
                        phased(burst, camera(0, 1), phase_ns=at_ns + shift, jitter=0)
                    )
            refused = phased(burst, camera(0, 1), phase_ns=at_ns, jitter=0, name="door")
            with pytest.raises(aionn.NotAdmitted, match="with captures") as e:
                await refused.admit()
            moved = at_ns + e.value.would_fit.shift_ns
            await stack.enter_async_context(phased(burst, camera(0, 1), phase_ns=moved, jitter=0))

    Trial(npu()).play(main)


def test_first_frame_moves_a_reservation_whose_phase_was_chosen():
    """A camera that runs freely is where it is; the reservation follows."""

    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            stream = await opened(trial, stack, off_s=0.011)
            chosen_ns = stream.reservation.phase_ns
            assert await read(stream) == [("on_time", None)] * 30
            assert (stream.reservation.phase_ns - chosen_ns) % (40 * MS) == 11 * MS

    Trial(npu()).play(main)


@pytest.mark.parametrize("drift_ppm", [150.0, -150.0])
@pytest.mark.thorough
def test_reservation_follows_a_drift(drift_ppm):
    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            stream = await opened(trial, stack, drift_ppm=drift_ppm, count=500)
            before_ns = stream.reservation.phase_ns
            assert await read(stream) == [("on_time", None)] * 500
            moved_ns = (stream.reservation.phase_ns - before_ns + 20 * MS) % (40 * MS) - 20 * MS
            expected_ns = drift_ppm * 500 * PERIOD * 1e3
            assert moved_ns == pytest.approx(expected_ns, abs=150 * REVIEW_NS * 2 / 1e6)
            assert trial.held.count == 0 or stream.reservation.end == ""

    Trial(npu()).play(main)


SHORT = {"deadline": 0.008, "jitter": 0.0002}


async def neighbours(trial, stack, count, *, moving_ms=21.5, **moves):
    """Three streams that keep their phases, and one between two of them that moves."""
    base_ns = trial.clock.now_ns + 1000 * MS
    still = [
        await opened(trial, stack, phase_ns=base_ns + at * MS, count=count, **SHORT) for at in (0, 13, 26)
    ]
    phase_ns = base_ns + round(moving_ms * MS)
    return still, await opened(trial, stack, phase_ns=phase_ns, count=count, **SHORT, **moves)


@pytest.mark.thorough
def test_drift_into_another_stream_ends_the_reservation_that_moves_and_no_other():
    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            still, moving = await neighbours(trial, stack, 500, drift_ppm=190.0)
            seen = {}

            async def watch(stream):
                seen[stream] = await read(stream)

            async with anyio.create_task_group() as group:
                for stream in (*still, moving):
                    group.start_soon(watch, stream)
            assert moving.reservation.end == "astray" and "astray" in moving.explain()
            labels = [label for _, label in seen[moving]]
            assert labels[0] is None and labels[-1] == "withdrawn"
            assert moving.statistics().withdrawn > 10
            for stream in still:
                assert seen[stream] == [("on_time", None)] * 500
            assert trial.held.counts()["withdrawn"] == 1
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_change_asks_again_at_the_phase_of_the_source():
    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            # Its first frame comes while another stream's runs: the deadline is too near for both.
            still, moving = await neighbours(trial, stack, 60, off_s=0.0065)
            labels = []
            async for result in moving:
                labels.append(result.label)
                if len(labels) == 20:
                    assert moving.reservation.end == "astray"
                    with pytest.raises(aionn.NotAdmitted):
                        await moving.change()
                    still[2].cancel()
                    found = await moving.change()
                    assert (found.phase_ns - result.item.captured_at_ns) % (40 * MS) == 0
            assert labels == ["withdrawn"] * 20 + [None] * 40

    Trial(npu()).play(main)


def test_change_of_terms_keeps_the_phase():
    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            stream = await opened(trial, stack, count=60)
            phase_ns = stream.reservation.phase_ns
            labels = []
            async for result in stream:
                labels.append(result.label)
                if len(labels) == 20:
                    changed = await stream.change(deadline=0.015)
                    assert changed.deadline_ns == 15 * MS
                    assert (changed.phase_ns - phase_ns) % (40 * MS) == 0
            assert labels == [None] * 60 and trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


@pytest.mark.thorough
def test_floods_take_nothing_from_streams_with_phases():
    async def main(trial):
        seen = []
        best_effort = await trial.runtime.compile(aionn.testing.models.identity((4,), operations=2))
        await best_effort.execute([X])

        async def flood(priority):
            while True:
                with contextlib.suppress(aionn.Error):
                    await best_effort.execute([X], priority=priority, deadline=trial.clock.after(0.05))
                await anyio.sleep(0.003)

        async def watch(stream):
            seen.extend(await read(stream))

        async with contextlib.AsyncExitStack() as stack:
            streams = []
            with contextlib.suppress(aionn.NotAdmitted):
                while True:
                    streams.append(
                        await opened(trial, stack, deadline=0.025, jitter=0.001, jitter_s=0.0009, count=50)
                    )
            assert len(streams) >= 4
            async with anyio.create_task_group() as floods:
                for priority in ("low", "high", "high"):
                    floods.start_soon(flood, priority)
                async with anyio.create_task_group() as group:
                    for stream in streams:
                        group.start_soon(watch, stream)
                floods.cancel_scope.cancel()
        assert seen == [("on_time", None)] * (50 * len(streams))

    Trial(npu()).play(main)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"guarantee": True, "phase_ns": 5}, 'phase_ns is a term of guarantee="phased"'),
        ({"guarantee": "phased", "phase_ns": 0.5}, "captured_at_ns of a frame, got 0.5"),
        ({"guarantee": "phased", "phase_ns": -1}, "captured_at_ns of a frame, got -1"),
        ({"guarantee": "phased", "phase_ns": 10**5000}, "got a number of 19 digits or more"),
        ({"guarantee": "phased", "phase_ns": True}, "captured_at_ns of a frame, got True"),
        ({"guarantee": "phased", "jitter": 0.011}, "its frames may come within"),
        ({"guarantee": "phased", "period": None}, "a guarantee needs the least seconds"),
        ({"guarantee": "spread"}, 'expected True, False, "best" or "phased"'),
    ],
)
def test_mistakes_are_named(options, message):
    async def main(trial):
        async with trial.net.burst(slots=4) as burst:
            with pytest.raises(aionn.InvalidArgument, match=message):
                phased(burst, camera(0, 1), **options)
            assert burst.statistics().streams == 0

    Trial(npu()).play(main)
