"""The jobs that wait for several slots: each planned on one of them, or on standby until there is room.

Owns the choice of a slot by expected finish and by the harm done to others, displacement of others, early abort, ageing,
the bound on what may wait, and the reasons of every decision. Pure: no clock, no waiting; the same calls give the same plans.

Invariants:
1. A waiting job is in exactly one plan, or on standby.
2. With exact durations every planned job ends in time, unless a later arrival of a higher class takes its place.
3. A job whose deadline no slot could meet, even idle, is rejected immediately; expired jobs are rejected before anything is sorted.
4. A job that has run is preempted by one of its own class only on its slot, and only if its remaining part is far longer than that
   job and than its completed part.
5. A LOW job goes before a MEDIUM one only where it would be lost otherwise, and all MEDIUM ones still end in time; never before
one without a deadline, and it preempts none. Nothing goes before HIGH.
6. Nothing waits longer than ``age_ns`` behind jobs that came later, but behind HIGH ones.

Source: Moore and Hodgson 1968 (rejecting the longest saves the most), with classes; early abort as in deadline-aware serving.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush

from aionn.errors import InvalidArgument
from aionn.hal import Priority, duration_text
from aionn.scheduler.job import NEVER_NS, DeviceSlot, Job, JobState, Reason, job_text
from aionn.scheduler.ready_queue import QueueStatistics
from aionn.scheduler.reserved import ReservedQueue
from aionn.scheduler.slot_plan import PLAN_MAX, Displacement, Key, Place, Price, SlotPlan, place_text

__all__ = ["AGE_NS", "WAITING_MAX", "PlannedQueue"]

WAITING_MAX = 1 << 17
"""Most jobs that may wait: a flood of 10^5 executions still fits, at some 500 bytes each."""

AGE_NS = 2_000_000_000
"""Wait after which a job goes ahead of the MEDIUM ones that came later."""

VICTIMS_MAX = 16
"""Number of jobs of a slot that are tried as victims of a displacement."""

RETRIES_MAX = 4
"""Number of jobs on standby that are tried at one decision."""

LONG_RATIO = 2
"""Multiple of a job's duration from which a running job of its class is aborted for it, where only one of both can end in
time and less than half is done. At 1, or whatever is done, more device time is lost to jobs that never end."""

NOTES_MAX = 256
"""Of how many jobs the last decision is remembered: most of those that an explanation is asked for wait, or have just ended."""

LOW, HIGH = int(Priority.LOW), int(Priority.HIGH)
_PREEMPTION = 1 << 62
"""Added to a slot's cost where the job that runs would be preempted: any other slot is better."""


class PlannedQueue:
    """Jobs that wait for slots.

    Args:
        slots: All slots of all devices.
        waiting_max: Most jobs that may wait.
        on_full: ``refuse`` turns a new job away; ``displace`` rejects the last in the order, if the new one goes before it.
        age_ns: After how long a waiting job goes ahead.

    Attributes:
        slots: As given.
        plans: One per slot.
        standby: Those without a plan, in order.
        slot_of: The index of the slot that each waiting job is planned on, by its number; -1 for standby.
        displaced: Jobs that lost their place because too many wait, until ``too_late`` returns them.
        age_ns: As given.
        may_have_room: Whether there may be room for a job on standby.
        low_left: Number of LOW jobs that may still be started, where a shell keeps slots from them. It does not concern a job that
            has aged, or to which a higher class was lent.
        reserved: The frames of reserved streams; None until the first one comes.
    """

    def __init__(
        self,
        slots: Sequence[DeviceSlot],
        *,
        waiting_max: int = WAITING_MAX,
        on_full: str = "refuse",
        age_ns: int = AGE_NS,
    ) -> None:
        if waiting_max < 1:
            raise InvalidArgument(f"ready queue: waiting_max must be at least 1, got {waiting_max}")
        if on_full not in ("refuse", "displace"):
            raise InvalidArgument(f"ready queue: on_full must be refuse or displace, got {on_full!r}")
        self.slots = slots
        self.plans = [SlotPlan() for _ in slots]
        self.standby: list[tuple[Key, Job]] = []
        self.displaced: list[Job] = []
        self.may_have_room = False
        self.slot_of: dict[int, int] = {}
        self._latest: list[tuple[int, int, Job]] = []
        self._ages: deque[tuple[int, Job]] = deque()  # In the order in which they come of age.
        self._waiting_max = waiting_max
        self._on_full = on_full
        self.age_ns = age_ns
        self.low_left = NEVER_NS
        self.reserved: ReservedQueue | None = None
        self._notes: OrderedDict[int, tuple[int, str, int]] = OrderedDict()
        self._counts = dict.fromkeys(
            ("entered", "rejected", "started", "moved", "displaced", "retried", "aged"), 0
        )
        self._aborted: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.slot_of) if self.reserved is None else len(self.slot_of) + len(self.reserved)

    # --- In and out ---

    def add(self, job: Job, now_ns: int) -> Reason | None:
        """Admits a job and plans it; returns the reason for a rejection. A job that comes back from a slot is never rejected."""
        if job.rank > HIGH:
            if job.frame is not None and job.frame.is_reserved:
                return self._add_reserved(job, now_ns)
            job.leave_reserved()
        if not job.has_run:
            self._counts["entered"] += 1
            reason = self._rejection_of(job, now_ns)
            if reason is not None:
                self._rejected(job, reason, now_ns)
                return reason
            self._ages.append((job.arrival_ns + self.age_ns, job))
        self._insert(job, now_ns)
        return None

    def _insert(self, job: Job, now_ns: int) -> None:
        if job.deadline_ns != NEVER_NS:
            if len(self._latest) > 2 * len(self.slot_of) + 1:  # Most do not wait any more.
                waiting = {number: job for _, number, job in self._latest if number in self.slot_of}
                self._latest = sorted((j.deadline_ns - j.shortest_ns, n, j) for n, j in waiting.items())
            heappush(self._latest, (job.deadline_ns - job.shortest_ns, job.number, job))
        self._place(job, now_ns, may_displace=True)

    def _add_reserved(self, job: Job, now_ns: int) -> Reason | None:
        if self.reserved is None:
            self.reserved = ReservedQueue(self.slots)
        self._counts["entered"] += not job.has_run
        reason = self.reserved.add(job, now_ns)
        if reason is not None:
            self._rejected(job, reason, now_ns)
            return reason
        self._repair(self.reserved.slot_of(job), now_ns, 0)
        return None

    def _rejected(self, job: Job, reason: Reason, now_ns: int) -> None:
        self._counts["rejected"] += 1
        self.note(job, now_ns, f"rejected: {reason.value}")

    def withdraw(self, slot: DeviceSlot, now_ns: int) -> None:
        """Makes the frames that wait for a slot best effort: its reservations have ended."""
        for job in self.reserved.withdraw(slot) if self.reserved is not None else ():
            self._insert(job, now_ns)

    def pass_through(self, job: Job, slot: DeviceSlot, now_ns: int) -> None:
        """Counts a job that starts on arrival, without a wait."""
        self._counts["entered"] += 1
        self._counts["started"] += 1
        self._ages.append((job.arrival_ns + self.age_ns, job))
        self.note(job, now_ns, "the first in its plan starts, on slot", slot.index)

    def _rejection_of(self, job: Job, now_ns: int) -> Reason | None:
        if job.deadline_ns <= now_ns:
            return Reason.EXPIRED
        if now_ns + job.shortest_ns > job.deadline_ns:
            return Reason.IMPOSSIBLE
        if job.frame is not None and job.frame.is_rejected:
            return Reason.UNRESERVED
        if len(self.slot_of) < self._waiting_max:
            return None
        last = self._last()
        if self._on_full == "refuse" or last is None or last.key < job.key:
            return Reason.FULL
        self.displaced.append(last)
        self._take(last)
        return None

    def _last(self) -> Job | None:
        # A plan's last job is not always the lowest: one that was let ahead may be before it.
        ends = [job for plan in self.plans for job in plan.jobs if not job.has_run]
        if self.standby and not self.standby[-1][1].has_run:
            ends.append(self.standby[-1][1])
        return max(ends, key=lambda job: job.key_in(job.rank), default=None)

    def remove(self, job: Job) -> None:
        """Removes a waiting job, to a slot or permanently. One that was removed already is ignored."""
        if job.number in self.slot_of:
            index = self.slot_of[job.number]
            # A planned start of the first changes nothing for the rest; anything else makes room.
            if index < 0 or self.plans[index].jobs[0] is not job or self.slots[index].job is not None:
                self.may_have_room = True
            self._take(job)
        elif job.rank > HIGH and self.reserved is not None:
            self.reserved.remove(job)

    def _take(self, job: Job) -> None:
        index = self.slot_of.pop(job.number)
        if index >= 0:
            self.plans[index].remove(job)
            if job.key[0] != -job.rank:
                job.key = job.key_in(job.rank)
        else:
            del self.standby[bisect_left(self.standby, (job.key,))]

    def sort_into(self, job: Job, now_ns: int, *, rank: int, urgent_ns: int) -> None:
        """Gives a waiting job another place in the order."""
        self._take(job)
        job.sort_into(rank, urgent_ns)
        self._place(job, now_ns, may_displace=True)

    def is_planned_on(self, job: Job, slot: DeviceSlot) -> bool:
        """Whether a job waits in a slot's plan."""
        return self.slot_of.get(job.number) == slot.index

    def replan(self, job: Job, now_ns: int) -> None:
        """Plans a waiting job anew: what it was planned behind took longer than expected."""
        self._take(job)
        self._place(job, now_ns, may_displace=True)

    def change_priority(self, job: Job, priority: Priority, now_ns: int) -> bool:
        """Changes the class of a waiting job; False if it does not wait any more."""
        if job.number not in self.slot_of:
            return False
        job.priority = priority
        self.sort_into(job, now_ns, rank=int(priority), urgent_ns=job.urgent_ns)
        self.note(job, now_ns, f"priority changed to {priority.name}")
        return True

    # --- What time brings ---

    def too_late(self, now_ns: int) -> list[tuple[Job, Reason]]:
        """Those that wait and cannot end in time any more on any slot; and those displaced because too many wait."""
        latest = self._latest
        if not self.displaced and (not latest or latest[0][0] >= now_ns):
            return []
        found = [(job, Reason.FULL) for job in self.displaced]
        self.displaced.clear()
        seen: set[int] = set()  # A job that was displaced and came back is listed here twice.
        while latest and (latest[0][0] < now_ns or latest[0][2].state is not JobState.WAITING):
            job = heappop(latest)[2]
            if job.number in seen:
                continue
            seen.add(job.number)
            if job.number in self.slot_of and now_ns + job.shortest_ns > job.deadline_ns:
                found.append((job, Reason.EXPIRED if job.deadline_ns <= now_ns else Reason.TOO_LATE))
        for job, reason in found:
            self._aborted[reason.name] = self._aborted.get(reason.name, 0) + 1
            self.note(job, now_ns, f"aborted: {reason.value}")
        return found

    def is_due(self, now_ns: int) -> bool:
        """Whether ``too_late`` or ``age`` have something to do."""
        ages = self._ages
        while ages and ages[0][1].state is JobState.ENDED:
            ages.popleft()
        latest = self._latest
        while latest and latest[0][0] < now_ns and latest[0][2].state is not JobState.WAITING:
            heappop(latest)
        return bool(self.displaced or (latest and latest[0][0] < now_ns) or (ages and ages[0][0] <= now_ns))

    def age(self, now_ns: int) -> None:
        """Lets those that waited long go ahead of what came later, but for HIGH."""
        ages = self._ages
        while ages and (ages[0][0] <= now_ns or ages[0][1].state is JobState.ENDED):
            job = ages.popleft()[1]
            # As urgent as if it should have ended when it came: before everything of its class that came later.
            rank, urgent_ns = max(job.rank, HIGH - 1), min(job.urgent_ns, job.arrival_ns)
            if job.state is JobState.RUNNING and job.rank <= HIGH:
                job.sort_into(rank, urgent_ns)
            elif job.number in self.slot_of and job.rank < HIGH:
                self._counts["aged"] += 1
                self.sort_into(job, now_ns, rank=rank, urgent_ns=urgent_ns)
                self.note(job, now_ns, "goes ahead because of its age")

    def next_wake_ns(self) -> int:
        """When something may have to be decided though nothing happens; ``NEVER_NS`` for never."""
        latest = self._latest
        while latest and latest[0][2].state is not JobState.WAITING:
            heappop(latest)
        reserved_ns = NEVER_NS if self.reserved is None else self.reserved.next_wake_ns()
        return min(latest[0][0] + 1, reserved_ns) if latest else reserved_ns

    def retry(self, now_ns: int) -> None:
        """Plans some of the jobs on standby, where there is room now."""
        if not self.standby:
            return
        if not self.may_have_room and all(len(plan) > PLAN_MAX // 2 for plan in self.plans):
            return
        self.may_have_room = False
        for key, job in self.standby[:RETRIES_MAX]:
            self._expect_least(job, now_ns)
            slot, place = self._find_place(job, now_ns)
            if slot is not None and place is not None:
                del self.standby[bisect_left(self.standby, (key,))]
                self._counts["retried"] += 1
                self._plan(job, slot, place)

    # --- Where ---

    def place_on(self, job: Job, slot: DeviceSlot, now_ns: int) -> Place | None:
        """The result of planning a job on a slot; None where it could not end in time, or not run."""
        duration_ns = job.durations_ns[slot.device]
        if duration_ns == NEVER_NS or not slot.is_up:
            return None
        plan = self.plans[slot.index]
        count = len(plan.keys)
        running = slot.job
        position = bisect_left(plan.keys, job.key) if count else 0
        before_ns = plan.before_ns(position) if position else 0  # Mostly the first: a call less.
        turns_ns = rest_ns = begins_ns = now_ns + slot.backlog_ns
        preempts = False
        is_harmless = True
        if running is not None and running.state is not JobState.ENDED:
            # A job that runs longer than expected may end at any moment: the slot counts as free from now on, not from the past.
            rest_ns = slot.ends_ns + slot.backlog_ns if slot.ends_ns > now_ns else begins_ns
            turns_ns = rest_ns
            if job.key < running.key and slot.can_preempt:
                # HIGH always preempts lower classes. Others do so only where they would be late otherwise. EDF preempts in any
                # case: that delays a started job for one that could wait, and the device time of the started one is lost if it ends
                # late.
                must = job.rank == HIGH > running.rank
                if must or slot.is_stopping or rest_ns + before_ns + duration_ns > job.deadline_ns:
                    turns_ns = begins_ns
                    preempts = not slot.is_stopping
                    # The preempted job continues behind all of those.
                    is_harmless = running.deadline_ns - rest_ns >= before_ns + duration_ns
        end_ns = turns_ns + before_ns + duration_ns
        if end_ns > job.deadline_ns:
            return None
        if is_harmless and position < count:
            urgent = self._urgent_count(slot, plan)
            # Two sums: the HIGH jobs in front preempt, so they start now, and those behind them when the running job has ended.
            if position < urgent:
                is_harmless = plan.slack_ns(position, urgent) - duration_ns >= begins_ns
                position_rest = urgent
            else:
                position_rest = position
            if is_harmless and position_rest < count:
                is_harmless = plan.slack_ns(position_rest, count) - duration_ns >= rest_ns
        return Place(end_ns, is_harmless, position, duration_ns, preempts)

    def _urgent_count(self, slot: DeviceSlot, plan: SlotPlan) -> int:
        """Number of the plan's first jobs that preempt the running one: the HIGH ones, if it is of a lower class."""
        running = slot.job
        if running is None or running.rank >= HIGH or not slot.can_preempt or plan.keys[0][0] != -HIGH:
            return 0
        return bisect_left(plan.keys, (1 - HIGH,))

    def _find_place(self, job: Job, now_ns: int) -> tuple[DeviceSlot | None, Place | None]:
        """The best place in the order; for a LOW job that finds none, one among the MEDIUM jobs that have time to spare."""
        slot, place = self._best_place(job, now_ns)
        if slot is not None or job.rank >= HIGH - 1 or job.deadline_ns == NEVER_NS:
            return slot, place
        # Classes are strict only where it matters: a LOW job that would be lost behind MEDIUM ones which all have time to spare is
        # planned among them. To lose it would serve no job. A LOW job without a deadline is never lost, so it does not ask.
        job.key = job.key_in(HIGH - 1)
        slot, place = self._best_place(job, now_ns)
        if slot is not None and place is not None:
            running = slot.job
            # A job without a deadline always has time to spare, and would wait behind LOW ones without a limit.
            waits = any(
                other.rank > job.rank and other.deadline_ns == NEVER_NS
                for other in self.plans[slot.index].jobs[place.position :]
            )
            if not waits and not (place.preempts and running is not None and running.rank > job.rank):
                self.note(job, now_ns, "goes before MEDIUM jobs that have time to spare, on slot", slot.index)
                return slot, place
        job.key = job.key_in(job.rank)
        return None, None

    def _best_place(self, job: Job, now_ns: int) -> tuple[DeviceSlot | None, Place | None]:
        """The slot that ends a job first without making another late, preferably one that preempts nothing."""
        best: tuple[DeviceSlot | None, Place | None] = (None, None)
        least = NEVER_NS
        for slot in self.slots:
            keys = self.plans[slot.index].keys
            if not keys and slot.job is None:
                # A free slot with nothing planned, the usual case: the result of place_on, in half the time.
                duration_ns = job.durations_ns[slot.device]
                end_ns = now_ns + duration_ns
                if slot.is_up and duration_ns != NEVER_NS and end_ns < least and end_ns <= job.deadline_ns:
                    least = end_ns
                    best = (slot, Place(end_ns, True, 0, duration_ns, False))
                continue
            if len(keys) >= PLAN_MAX and keys[-1] < job.key:
                continue  # It would be the first to leave a full plan again.
            place = self.place_on(job, slot, now_ns)
            if place is not None and place.is_harmless:
                cost = place.end_ns + _PREEMPTION if place.preempts else place.end_ns
                if cost < least:
                    least = cost
                    best = (slot, place)
        return best

    def _plan(self, job: Job, slot: DeviceSlot, place: Place) -> None:
        plan = self.plans[slot.index]
        plan.insert(place.position, job, place.duration_ns)
        self.slot_of[job.number] = slot.index
        if len(plan.keys) > PLAN_MAX:
            last = plan.jobs[-1]
            plan.remove(last)
            self._stand_by(last)

    def _stand_by(self, job: Job) -> None:
        self.slot_of[job.number] = -1
        job.key = job.key_in(job.rank)
        insort(self.standby, (job.key, job))

    def _place(self, job: Job, now_ns: int, *, may_displace: bool) -> None:
        self._expect_least(job, now_ns)
        slot, place = self._find_place(job, now_ns)
        if slot is not None and place is not None:
            self._plan(job, slot, place)
        # A victim may not displace in its turn: chains of displacement would have no bound.
        elif not may_displace or self._is_crowded(job) or not self._displace(job, now_ns):
            self._stand_by(job)

    def _expect_least(self, job: Job, now_ns: int) -> None:
        """Plans a job with its shortest duration if the expected one is too long: an idle device loses nothing by trying."""
        if job.least_ns is not None and now_ns + min(job.durations_ns) > job.deadline_ns:
            job.durations_ns, job.least_ns = job.least_ns, None

    def _is_crowded(self, job: Job) -> bool:
        """Whether a job comes after all jobs that some slot plans ahead: then it waits for its turn to be planned."""
        return any(len(plan) >= PLAN_MAX and plan.keys[-1] < job.key for plan in self.plans)

    # --- Displacement ---

    def _displace(self, job: Job, now_ns: int) -> bool:
        """Plans a job at the cost of other jobs: one moves to another slot, a longer or lower one loses its plan, or several lower
        ones do. Returns whether it did.
        """
        # All slots before one is chosen: the first slot with a victim, the simpler rule, loses a MEDIUM job where the next one has
        # a LOW job, or a job that only has to move.
        best: Displacement | None = None
        for slot in self.slots:
            if now_ns + job.durations_ns[slot.device] > job.deadline_ns or not slot.is_up:
                continue
            for option in self._options(job, slot, now_ns):
                if best is None or option.price < best.price:
                    best = option
        if best is None:
            return False
        _, slot, victim, other = best
        if victim is not None:
            self._take(victim)
            self._counts["moved" if other is not None else "displaced"] += 1
        place = self.place_on(job, slot, now_ns)
        assert place is not None, "the option was found a moment ago"
        self._plan(job, slot, place)
        if victim is not None:
            self.note(victim, now_ns, "displaced by job", job.number)
            self._place(victim, now_ns, may_displace=False)
        else:
            self._repair(slot, now_ns, place.position + 1 if place.preempts else 0)
        return True

    def _options(self, job: Job, slot: DeviceSlot, now_ns: int) -> list[Displacement]:
        """The jobs of one slot that could be displaced, each with its price."""
        found: list[Displacement] = []
        plan = self.plans[slot.index]
        duration_ns = job.durations_ns[slot.device]
        for victim in plan.jobs[:VICTIMS_MAX]:
            saved_ns = victim.durations_ns[slot.device]
            # Of equals the longer one loses its plan (Moore and Hodgson: to leave out the longest job keeps the most). One that has
            # run does not: its device time would be lost as well.
            may_lose = victim.rank < job.rank or (
                victim.rank == job.rank and not victim.has_run and saved_ns > duration_ns
            )
            other = self._elsewhere(victim, slot, now_ns)
            if other is None and not may_lose:
                continue
            plan.remove(victim)
            place = self.place_on(job, slot, now_ns)
            plan.insert(bisect_left(plan.keys, victim.key), victim, saved_ns)
            if place is None or not place.is_harmless:
                continue
            if other is not None:
                extra_ns = victim.durations_ns[other.device] - saved_ns
                price = Price(False, 0, False, 0, duration_ns + extra_ns)
                found.append(Displacement(price, slot, victim, other))
            elif may_lose:
                count = 1000 if victim.has_run else 1
                price = Price(True, victim.rank, False, count, duration_ns - saved_ns)
                found.append(Displacement(price, slot, victim, None))
        forced = self._force_price(job, slot, now_ns)
        if forced is not None:
            found.append(Displacement(forced, slot, None, None))
        return found

    def _elsewhere(self, job: Job, slot: DeviceSlot, now_ns: int) -> DeviceSlot | None:
        """The slot that ends a job soonest without making another late."""
        best, best_ns = None, NEVER_NS
        for other in self.slots:
            if other is not slot and len(self.plans[other.index]) < PLAN_MAX:
                place = self.place_on(job, other, now_ns)
                if place is not None and place.is_harmless and place.end_ns < best_ns:
                    best, best_ns = other, place.end_ns
        return best

    def _force_price(self, job: Job, slot: DeviceSlot, now_ns: int) -> Price | None:
        """The cost of placing a job on a slot if others become late; None if one of its own class or above would."""
        place = self.place_on(job, slot, now_ns)
        if place is None:
            return None
        duration_ns = place.duration_ns
        plan = self.plans[slot.index]
        running = slot.job if slot.job is not None and slot.job.state is not JobState.ENDED else None
        rest_ns = slot.rest_ns(now_ns)
        losses = highest = 0
        for position in range(place.position, len(plan)):
            if plan.slack_ns(position, position + 1) - duration_ns < rest_ns:
                if plan.jobs[position].rank >= job.rank:
                    return None
                losses += 1
                highest = max(highest, plan.jobs[position].rank)
        started = 0
        if running is not None and place.preempts and running.deadline_ns - rest_ns < duration_ns:
            if running.rank > job.rank:
                return None
            if running.rank == job.rank:
                # See LONG_RATIO: two equals would otherwise preempt each other for every small gain.
                left_ns = rest_ns - now_ns
                done_ns = running.durations_ns[slot.device] - left_ns
                if left_ns < max(done_ns, LONG_RATIO * duration_ns):
                    return None
            started = 1
            highest = max(highest, running.rank)
        return Price(True, highest, losses + started > 1, started * 1000 + losses, duration_ns)

    def _repair(self, slot: DeviceSlot, now_ns: int, urgent_count: int) -> None:
        """Takes jobs out of a slot's plan until the rest ends in time: of the least class up to the late one, the longest.

        The first ``urgent_count`` preempt the job that runs.
        """
        plan = self.plans[slot.index]
        begins_ns, rest_ns = now_ns + slot.backlog_ns, slot.rest_ns(now_ns)
        out = []
        while plan.jobs:
            late = plan.first_late(max(urgent_count, self._urgent_count(slot, plan)), begins_ns, rest_ns)
            if late < 0:
                break
            least = plan.jobs[late].rank
            # Not those behind the late one, though they may be of a lower class: without them it would be as late.
            candidates = [p for p in range(late + 1) if plan.jobs[p].rank == least]
            position = min(candidates, key=lambda p: (plan.jobs[p].has_run, -plan.duration_ns(p), p))
            victim = plan.jobs[position]
            urgent_count -= position < urgent_count
            self._take(victim)
            self._counts["displaced"] += 1
            self.note(victim, now_ns, "displaced by jobs of a higher class")
            out.append(victim)
        for victim in out:
            self._place(victim, now_ns, may_displace=False)

    # --- Why ---

    def started(self, job: Job, slot: DeviceSlot, now_ns: int, why: str) -> None:
        """Remembers a start."""
        self._counts["started"] += 1
        self.note(job, now_ns, why, slot.index)

    def note(self, job: Job, now_ns: int, text: str, number: int = -1) -> None:
        """Stores the last decision about a job; the number of a slot or of another job is part of the text."""
        notes = self._notes
        notes[job.number] = (now_ns, text, number)
        if len(notes) > NOTES_MAX:
            notes.popitem(last=False)

    def explain(self, job: Job, now_ns: int) -> str:
        """The state of a job with the reason, in some lines: its place in the order, the result on each slot, the last decision."""
        lines = [job_text(job, now_ns)]
        index = self.slot_of.get(job.number)
        if index is not None:
            ahead = sum(key < job.key for plan in self.plans for key in plan.keys)
            ahead += bisect_left(self.standby, (job.key,))
            where = "it is on standby, no slot has room for it" if index < 0 else f"planned on slot {index}"
            lines.append(f"{ahead} of {len(self)} go before it; {where}")
            for slot in self.slots:
                place = self.place_on(job, slot, now_ns)
                lines.append(f"slot {slot.index} (device {slot.device}): {place_text(place, now_ns)}")
        if (noted := self._notes.get(job.number)) is not None:
            when = duration_text(max(0, now_ns - noted[0]))
            lines.append(f"{when} ago: {noted[1]}" + (f" {noted[2]}" if noted[2] >= 0 else ""))
        return "\n".join(lines)

    def statistics(self) -> QueueStatistics:
        """Counts since the beginning, and what waits now."""
        return QueueStatistics(
            waiting=len(self),
            planned=len(self) - len(self.standby),
            aborted=dict(self._aborted),
            **self._counts,
        )
