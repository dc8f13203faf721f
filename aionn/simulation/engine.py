"""The simulator at scale: arrivals, slots and faults on a heap of callbacks, around any policy.

Owns what really happens: when operations end, where running jobs can stop, what faults do, and the record of events. Refuses to own
decisions: it asks the policy and applies its actions. Boundaries between operations are lazy: one is an event only when a
job waits for it.

Invariants:
1. A slot runs one job at a time; a job runs on one slot at a time.
2. Every request has exactly one outcome; the first answer wins.
3. The record of events depends on workload, seed and policy alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from aionn.drivers.simulated.profiles import (
    ClockState,
    FailureRates,
    Fault,
    clock_share_at,
    draws,
    run_operations,
)
from aionn.hal import Priority
from aionn.scheduler.bandwidth import BandwidthServer, Frame, Label
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.job import NEVER_NS, Abort, DeviceSlot, Job, JobState, Preempt, Start
from aionn.scheduler.planned_queue import PlannedQueue
from aionn.scheduler.ready_queue import Policy
from aionn.simulation.core import Core
from aionn.simulation.reservations import Admission, admit_streams
from aionn.simulation.scenario import Scenario, prepare, slots_of
from aionn.simulation.workload import PRIORITIES

__all__ = ["Engine", "Event", "Outcome", "Scenario", "slots_of", "prepare"]

RESTART_NS = 20_000_000
"""Time for which a device that died or hung is unavailable: the order of a driver process's start."""

HANG_TIMEOUT_NS = 250_000_000
"""After how long without an answer a device counts as hung where its job has no deadline."""


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a request.

    Attributes:
        number: Its index in the arrivals.
        kind: ``on_time``, ``late``, ``aborted``, ``refused``, ``failed``.
        at_ns: The time at which its caller was notified.
        device: Index of the device that ended it; -1 if none did.
        why: A reason in words; empty where it ended on time.
    """

    number: int
    kind: str
    at_ns: int
    device: int
    why: str


Event = tuple[int, str, int, int]
"""``(at_ns, kind, number of the job or -1, slot or -1)``; kinds: arrive, start, ask (to stop), stop, end, abort, fault,
lost (by a fault), up, and the outcomes."""


class _Run:
    """The state of a slot, which only the engine knows: operation ``first + i`` ends at ``origin_ns + ends[i]``."""

    __slots__ = ("ends", "epoch", "first", "origin_ns", "started_ns", "struck_ns")

    def __init__(self) -> None:
        self.epoch = 0
        self.started_ns = 0
        self.first = 0
        self.origin_ns = 0
        self.ends: Sequence[int] = ()
        self.struck_ns = NEVER_NS


class Engine:
    """One run of a scenario under a policy.

    Args:
        scenario: The scenario to run.
        policy: The policy that decides.
        estimates: Estimates of durations, learnt while running; None for the exact ones.
        is_clock_held: Whether open bursts keep the devices' clocks at their full rate.
        record: Whether to keep the events.
        answers_twice: Whether devices repeat their answers, as a broken driver may.
        admission: The reservations; None means that the scenario's streams ask for them.
        keeps_reservations: Whether the policy plan enforces the reservations; the other policies know none.

    Attributes:
        outcomes: One per request, None until it has ended.
        events: The record.
        busy_ns: Device time used, per slot.
        wasted_ns: Device time of jobs that did not end on time.
        admission: The reservations of the scenario's streams with a guarantee.
        frames: The requests of reserved streams, by number, as their servers judge them; empty where the policy knows no
            reservations.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        *,
        estimates: Estimates | None = None,
        is_clock_held: bool = False,
        record: bool = False,
        answers_twice: bool = False,
        admission: Admission | None = None,
        keeps_reservations: bool = True,
    ) -> None:
        self.core = Core()
        self.scenario = scenario
        self.policy = policy
        self.slots = slots_of(scenario.devices)
        self.queue = policy.make_queue(self.slots)
        self._ask_policy = policy.decide
        self.outcomes: list[Outcome | None] = [None] * len(scenario.arrivals)
        self.events: list[Event] = []
        self.busy_ns = [0] * len(self.slots)
        self.wasted_ns = 0
        self._used_ns: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._is_clock_held = is_clock_held
        self._record = record
        self._answers_twice = answers_twice
        self._estimates = estimates
        self._runs = [_Run() for _ in self.slots]
        self._draws = [draws(device, scenario.seed) for device in scenario.devices]
        self._clocks: list[ClockState | None] = [None] * len(self.slots)
        self._is_plain = [
            not device.noise
            and (is_clock_held or device.clock.cold_share == 1.0)
            and device.failures == FailureRates()
            for device in scenario.devices
        ]
        self._prefixes = [
            tuple(None if d is None else tuple(accumulate(d)) for d in row) for row in scenario.durations_ns
        ]
        self._expected = [scenario.expected_ns(index) for index in range(len(scenario.durations_ns))]
        streams = scenario.workload.stream
        self._priorities = [PRIORITIES[stream.priority] for stream in streams]
        self._models = [stream.model for stream in streams]
        self._urgency, self._followers = _chains(scenario, self._expected)
        if admission is None:
            admission = admit_streams(scenario, is_clock_held=is_clock_held)
        self.admission = admission
        self.frames: dict[int, Frame] = {}
        self._servers: dict[int, BandwidthServer] = {}
        if keeps_reservations and isinstance(self.queue, PlannedQueue):
            self._servers = {index: held.server() for index, held in self.admission.reservations.items()}
            for index, server in self._servers.items():
                server.may_run_lower = index in self.admission.with_lower
        self._next = 0
        self._wake_ns = NEVER_NS

    def run(self) -> None:
        """Runs to the end of the last request."""
        self._schedule_arrival()
        self.core.run()
        assert all(outcome is not None for outcome in self.outcomes), "every request has an outcome"

    def digest(self) -> str:
        """The record's SHA-256 in hexadecimal."""
        lines = "".join(f"{at} {kind} {number} {slot}\n" for at, kind, number, slot in self.events)
        return hashlib.sha256(lines.encode()).hexdigest()

    # --- Arrivals ---

    def _schedule_arrival(self) -> None:
        arrivals = self.scenario.arrivals
        number = self._next
        if self._followers:
            while number < len(arrivals) and arrivals[number].after_index is not None:
                number += 1
        if number < len(arrivals):
            self.core.at(arrivals[number].at_ns, self._arrive, number)
        self._next = number + 1

    def _arrive(self, number: int) -> None:
        self._schedule_arrival()
        self._enter(number)

    def _enter(self, number: int) -> None:
        now_ns = self.core.now_ns
        arrival = self.scenario.arrivals[number]
        stream = arrival.stream_index
        if self._record:
            self.events.append((now_ns, "arrive", number, -1))
        priority, urgent_ns = self._priorities[stream], None
        if self._urgency and number in self._urgency:
            priority, urgent_ns = self._urgency[number]
        job = Job(
            number,
            priority=priority,
            deadline_ns=arrival.deadline_ns,
            arrival_ns=now_ns,
            durations_ns=self._expected[stream] if self._estimates is None else self._learnt(stream),
            urgent_ns=urgent_ns,
        )
        if stream in self._servers:
            frame = self.frames[number] = self._servers[stream].arrive(now_ns, arrival.deadline_ns)
            job.reserve(frame)
        reason = self.queue.add(job, now_ns)
        if reason is not None:
            job.state = JobState.ENDED
            self._report(number, "refused", -1, reason.value)
            return
        self._decide()

    def _stream_of(self, job: Job) -> int:
        return self.scenario.arrivals[job.number].stream_index

    def _learnt(self, stream: int) -> tuple[int, ...]:
        assert self._estimates is not None
        model = self._models[stream]
        return tuple(
            NEVER_NS if full == NEVER_NS else self._estimates.duration_ns((model, device), full)
            for device, full in enumerate(self._expected[stream])
        )

    # --- Decisions ---

    def _decide(self) -> None:
        for action in self._ask_policy(self.core.now_ns, self.queue, self.slots):
            if type(action) is Start:
                self._start(action.job, action.slot)
            elif type(action) is Preempt:
                self._ask_to_stop(action.slot)
            elif type(action) is Abort:
                self._abort(action)
        if len(self.queue):
            wake_ns = self.queue.next_wake_ns()
            if wake_ns < self._wake_ns:
                self._wake_ns = wake_ns
                self.core.at(wake_ns, self._wake, wake_ns)

    def _wake(self, wake_ns: int) -> None:
        if wake_ns == self._wake_ns:
            self._wake_ns = NEVER_NS
            self._decide()

    def _abort(self, action: Abort) -> None:
        job = action.job
        if job.state is JobState.ENDED:
            return
        if self._record:
            self.events.append((self.core.now_ns, "abort", job.number, -1))
        if job.state is JobState.WAITING:
            self.queue.remove(job)
            self._leave(job)
        else:
            self._ask_to_stop(next(slot for slot in self.slots if slot.job is job))
        job.state = JobState.ENDED
        self._report(job.number, "aborted", -1, action.reason.value)

    # --- Running ---

    def _start(self, job: Job, slot: DeviceSlot) -> None:
        assert slot.job is None and slot.is_up, "a slot runs one job at a time"
        assert job.state is JobState.WAITING, "only what waits can start"
        now_ns = self.core.now_ns
        self.queue.remove(job)
        run = self._runs[slot.index]
        device = slot.device
        prefix = self._prefixes[self._stream_of(job)][device]
        assert prefix is not None, "the device can run the model"
        done = self._done.get(job.number, 0) if job.device == device else 0
        job.device = device
        job.state = JobState.RUNNING
        job.has_run = True
        slot.job = job
        if job.frame is not None:
            job.frame.start(now_ns)
        slot.ends_ns = now_ns + job.durations_ns[device]
        slot.is_stopping = False
        run.epoch += 1
        run.started_ns = now_ns
        if self._record:
            self.events.append((now_ns, "start", job.number, slot.index))
        if self._is_plain[device]:
            run.first = 0
            run.ends = prefix
            run.origin_ns = now_ns - (prefix[done - 1] if done else 0)
            end_ns = run.origin_ns + prefix[-1]
            self.core.at(end_ns, self._end, (slot, run.epoch))
        else:
            end_ns = self._start_uncertain(job, slot, run, done)
        if end_ns > job.deadline_ns:
            self.core.at(job.deadline_ns, self._deadline, (slot, run.epoch))

    def _start_uncertain(self, job: Job, slot: DeviceSlot, run: _Run, done: int) -> int:
        """Starts on a device with noise, faults or a rising clock; returns when it really ends, ``NEVER_NS`` where it does not."""
        now_ns = self.core.now_ns
        profile = self.scenario.devices[slot.device]
        durations = self.scenario.durations_ns[self._stream_of(job)][slot.device]
        assert durations is not None, "the device can run the model"
        draw = next(self._draws[slot.device])
        share = 1.0
        if not self._is_clock_held:
            share = clock_share_at(profile.clock, self._clocks[slot.index], now_ns)
        ends, self._clocks[slot.index] = run_operations(profile, durations[done:], now_ns, share, draw.factor)
        run.first = done
        run.origin_ns = 0
        run.ends = ends
        run.struck_ns = NEVER_NS
        if draw.fault is Fault.NONE:
            self.core.at(ends[-1], self._end, (slot, run.epoch))
            return ends[-1]
        run.struck_ns = now_ns + int((ends[-1] - now_ns) * draw.at_share)
        self.core.at(run.struck_ns, self._strike, (slot, run.epoch, draw.fault))
        return NEVER_NS - 1

    def _deadline(self, run: tuple[DeviceSlot, int]) -> None:
        slot, epoch = run
        if self._runs[slot.index].epoch == epoch and slot.job is not None:
            self._decide()

    def _ask_to_stop(self, slot: DeviceSlot) -> None:
        if slot.is_stopping or not slot.can_preempt:
            return
        assert slot.job is not None, "only what runs can be asked to stop"
        slot.is_stopping = True
        run = self._runs[slot.index]
        now_ns = self.core.now_ns
        if self._record:
            self.events.append((now_ns, "ask", slot.job.number, slot.index))
        index = bisect_left(run.ends, now_ns - run.origin_ns)
        if index < len(run.ends) - 1 and (stops_ns := run.origin_ns + run.ends[index]) < run.struck_ns:
            self.core.at(stops_ns, self._stop, (slot, run.epoch, index))

    def _stop(self, what: tuple[DeviceSlot, int, int]) -> None:
        """A slot reached the boundary that it was asked to stop at."""
        slot, epoch, index = what
        run = self._runs[slot.index]
        if run.epoch != epoch or slot.job is None:
            return
        job = self._free(slot)
        now_ns = self.core.now_ns
        if self._record:
            self.events.append((now_ns, "stop", job.number, slot.index))
        if job.state is JobState.ENDED:
            self._leave(job)
        else:
            prefix = self._prefixes[self._stream_of(job)][slot.device]
            assert prefix is not None
            done = run.first + index + 1
            self._done[job.number] = done
            stream = self._stream_of(job)
            durations = list(self._expected[stream] if self._estimates is None else self._learnt(stream))
            rest = prefix[-1] - prefix[done - 1]
            whole = durations[slot.device]
            durations[slot.device] = rest if self._estimates is None else max(1, whole * rest // prefix[-1])
            job.durations_ns = durations
            job.shortest_ns = min(durations)
            job.state = JobState.WAITING
            reason = self.queue.add(job, now_ns)
            assert reason is None, "a job that ran is never rejected"
        self._decide()

    def _free(self, slot: DeviceSlot) -> Job:
        job = slot.job
        assert job is not None
        run = self._runs[slot.index]
        used_ns = self.core.now_ns - run.started_ns
        self.busy_ns[slot.index] += used_ns
        if job.number in self._used_ns:
            used_ns += self._used_ns[job.number]
        self._used_ns[job.number] = used_ns
        if job.frame is not None:
            job.frame.stop(self.core.now_ns, can_preempt=slot.has_boundaries)
        slot.job = None
        slot.is_stopping = False
        run.struck_ns = NEVER_NS
        return job

    def _leave(self, job: Job) -> None:
        """A job that did not end on time has left its slot: its device time is lost."""
        self.wasted_ns += self._used_ns.pop(job.number, 0)
        self._done.pop(job.number, None)

    def _end(self, what: tuple[DeviceSlot, int]) -> None:
        slot, epoch = what
        run = self._runs[slot.index]
        if run.epoch != epoch or slot.job is None:
            return  # It was stopped, or the device answers a second time.
        job = self._free(slot)
        now_ns = self.core.now_ns
        if self._record:
            self.events.append((now_ns, "end", job.number, slot.index))
        if self._answers_twice:
            self.core.after(1, self._end, what)
        if self._estimates is not None and not self._done.get(job.number):
            self._estimates.observe(
                (self._models[self._stream_of(job)], slot.device), now_ns - run.started_ns
            )
        is_on_time = now_ns <= job.deadline_ns
        if job.state is not JobState.ENDED:
            job.state = JobState.ENDED
            self._report(
                job.number, "on_time" if is_on_time else "late", slot.device, "" if is_on_time else "late"
            )
        else:
            is_on_time = False
        if is_on_time:
            if self._done:
                self._done.pop(job.number, None)
            self._used_ns.pop(job.number, None)
        else:
            self._leave(job)
        if len(self.queue):
            # Nothing else can be decided here: a running job past its deadline has an event of its own.
            self._decide()

    # --- Faults ---

    def _strike(self, what: tuple[DeviceSlot, int, Fault]) -> None:
        slot, epoch, fault = what
        if self._runs[slot.index].epoch != epoch or slot.job is None:
            return
        if self._record:
            self.events.append((self.core.now_ns, "fault", slot.job.number, slot.index))
        if fault is Fault.HANG:
            # It does not answer any more; the supervisor ends the device after a while.
            self.core.after(HANG_TIMEOUT_NS, self._die, (slot, epoch))
        elif fault is Fault.DEATH:
            self._die((slot, epoch))
        else:
            self._fail(slot, "the device failed")
            self._decide()

    def _fail(self, slot: DeviceSlot, why: str) -> None:
        job = self._free(slot)
        if job.frame is not None:
            job.frame.leave_class(Label.WITHDRAWN)
        if self._record:
            self.events.append((self.core.now_ns, "lost", job.number, slot.index))
        if job.state is not JobState.ENDED:
            job.state = JobState.ENDED
            self._report(job.number, "failed", slot.device, why)
        self._leave(job)

    def _die(self, what: tuple[DeviceSlot, int]) -> None:
        slot, epoch = what
        if self._runs[slot.index].epoch != epoch or slot.job is None:
            return
        for other in self.slots:
            if other.device == slot.device:
                if other.job is not None:
                    self._fail(other, "the device died")
                other.is_up = False
                self._clocks[other.index] = None
                self._withdraw(other, is_withdrawn=True)
        self.core.after(RESTART_NS, self._restart, slot.device)
        self._decide()

    def _restart(self, device: int) -> None:
        for slot in self.slots:
            if slot.device == device:
                slot.is_up = True
                self._withdraw(slot, is_withdrawn=False)
                if self._record:
                    self.events.append((self.core.now_ns, "up", -1, slot.index))
        self._decide()

    def _withdraw(self, slot: DeviceSlot, *, is_withdrawn: bool) -> None:
        """The reservations of a slot end with its device, and are admitted anew when it is back."""
        for server in self._servers.values():
            if server.slot == slot.index:
                server.is_withdrawn = is_withdrawn
        if is_withdrawn and isinstance(self.queue, PlannedQueue):
            self.queue.withdraw(slot, self.core.now_ns)

    # --- Answers ---

    def _report(self, number: int, kind: str, device: int, why: str) -> None:
        assert self.outcomes[number] is None, "the first answer wins"
        self.outcomes[number] = Outcome(number, kind, self.core.now_ns, device, why)
        if self._record:
            self.events.append((self.core.now_ns, kind, number, device))
        if not self._followers:
            return
        for follower in self._followers.get(number, ()):
            if kind == "on_time":
                self.core.after(0, self._enter, follower)
            else:
                self._report(follower, "failed", -1, "the request that it follows failed")


def _chains(
    scenario: Scenario, expected: Sequence[Sequence[int]]
) -> tuple[dict[int, tuple[Priority, int | None]], dict[int, list[int]]]:
    """Inheritance of priority and urgency by requests from their followers, and the links between requests."""
    streams = scenario.workload.stream
    urgency: dict[int, tuple[Priority, int | None]] = {}
    followers: dict[int, list[int]] = {}
    # Followers are after the requests that they follow: from the end, every request is final before it is passed on.
    for number in range(len(scenario.arrivals) - 1, -1, -1):
        arrival = scenario.arrivals[number]
        own = PRIORITIES[streams[arrival.stream_index].priority]
        priority, urgent_ns = urgency.get(number, (own, None))
        if arrival.after_index is None:
            continue
        followers.setdefault(arrival.after_index, []).insert(0, number)
        before = scenario.arrivals[arrival.after_index]
        limit_ns = min(
            NEVER_NS if arrival.deadline_ns is None else arrival.deadline_ns,
            NEVER_NS if urgent_ns is None else urgent_ns,
        )
        inherited_ns = limit_ns if limit_ns == NEVER_NS else limit_ns - min(expected[arrival.stream_index])
        first = PRIORITIES[streams[before.stream_index].priority]
        known, known_ns = urgency.get(arrival.after_index, (first, None))
        urgency[arrival.after_index] = (
            max(known, priority),
            inherited_ns if known_ns is None else min(known_ns, inherited_ns),
        )
    return urgency, followers
