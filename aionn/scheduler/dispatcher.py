"""The event loop's shell around the policy: wait for a slot of a device, hold it, give it back.

Owns the waiting of tasks and the learning of durations; who gets a slot is for ``aionn.scheduler.policy`` to say.

Invariants:
1. No more than ``slot_count`` slots are held at once.
2. A waiter is told that it will be late as soon as that is certain, not when its turn comes.
3. A cancelled waiter leaves the room; a cancelled holder gives its slot back only by ``release``.
4. A slot is held until its holder gives it back, also by work that runs past its deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import anyio

from aionn.errors import InvalidArgument, MissedDeadline, ResourceExhausted
from aionn.hal import Priority
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.policy import PlanPolicy
from aionn.scheduler.queue import WAITING_MAX, WaitingRoomStatistics
from aionn.scheduler.work import NEVER_NS, Abort, Action, Lane, Reason, Start, Work, WorkState

__all__ = ["Dispatcher"]

EXPLAINED_MAX = 16
"""How many waiting works ``explain`` tells of."""


class _Turn:
    """What a work means to the task that waits for it."""

    __slots__ = ("event", "model", "reason", "started_ns")

    def __init__(self, model: Hashable) -> None:
        self.event = anyio.Event()
        self.model = model
        self.reason: Reason | None = None
        self.started_ns = 0


class Dispatcher:
    """The slots of one device, for the tasks of one event loop.

    Args:
        slot_count: How many executions the device can run at once.
        now: The clock of the deadlines, the same as the loop's.
        estimates: Where durations are learnt; None for a new place.
        waiting_max: Most that may wait.
        on_full: ``refuse`` or ``displace``: what happens to a new one, or to the last in the order, when too many wait.
        trace: Called with the time and every action.
    """

    def __init__(
        self,
        slot_count: int,
        *,
        now: Callable[[], int],
        estimates: Estimates | None = None,
        waiting_max: int = WAITING_MAX,
        on_full: str = "refuse",
        trace: Callable[[int, Action], None] | None = None,
    ) -> None:
        self._now = now
        # The shell cannot interrupt a device; drivers that can do so between operations look at the deadline themselves.
        self._lanes = [Lane(index, 0, can_preempt=False) for index in range(slot_count)]
        self._policy = PlanPolicy(waiting_max=waiting_max, on_full=on_full)
        self._room = self._policy.make_queue(self._lanes)
        self._estimates = Estimates() if estimates is None else estimates
        self._trace = trace
        self._numbers = itertools.count()
        self._works: dict[int, Work] = {}

    def enter(
        self,
        *,
        priority: Priority,
        deadline_ns: int | None,
        model: Hashable = None,
        urgent_ns: int | None = None,
    ) -> Work:
        """Asks for a slot; ``turn`` waits for it.

        Args:
            priority: Its class.
            deadline_ns: Absolute; None for none.
            model: What to learn durations by; None to learn nothing and to expect no duration.
            urgent_ns: The deadline that one who waits for this work leaves it, where that is sooner than its own.

        Raises:
            InvalidArgument: There is no such priority.
            MissedDeadline: The deadline has passed, or even an idle device could not keep it (both persistent).
            ResourceExhausted: Too many wait already.
        """
        if not isinstance(priority, Priority):
            raise InvalidArgument(f"scheduler: expected a Priority, got {priority!r}")
        now_ns = self._now()
        expected_ns = 1 if model is None else self._estimates.duration_ns(model, 1)
        work = Work(
            next(self._numbers),
            priority=priority,
            deadline_ns=deadline_ns,
            arrival_ns=now_ns,
            durations_ns=(expected_ns,),
            urgent_ns=urgent_ns,
            item=_Turn(model),
        )
        reason = self._room.add(work, now_ns)
        if reason is not None:
            raise _error(reason, expected_ns, has_waited=False)
        self._works[work.number] = work
        self._decide(now_ns)
        return work

    async def turn(self, work: Work) -> None:
        """Waits for the slot that ``enter`` asked for. The caller must give it back with ``release``; a cancelled one never has it.

        Raises:
            MissedDeadline: It became certain that the deadline will be missed, or it passed (transient).
            ResourceExhausted: Others displaced it because too many wait.
        """
        turn: _Turn = work.item
        try:
            while work.state is WorkState.WAITING:
                now_ns = self._now()
                if work.deadline_ns == NEVER_NS:
                    await turn.event.wait()
                else:
                    # One nanosecond after the last moment at which it could start; at least a turn of the loop.
                    limit_ns = work.deadline_ns - work.shortest_ns + 1
                    with anyio.move_on_after(max(0.0, (limit_ns - now_ns) / 1e9)):
                        await turn.event.wait()
                    if work.state is WorkState.WAITING:
                        self._decide(max(self._now(), limit_ns))
        except BaseException:
            # The turn may have come in the same turn of the loop as the cancellation: then the slot is given back here.
            self.leave(work)
            raise
        if turn.reason is not None:
            raise _error(turn.reason, work.shortest_ns, has_waited=True)

    async def acquire(
        self,
        *,
        priority: Priority,
        deadline_ns: int | None,
        model: Hashable = None,
        urgent_ns: int | None = None,
    ) -> Work:
        """Waits for a slot: ``enter`` and ``turn`` in one. Returns what ``release`` takes.

        Raises:
            MissedDeadline: See ``enter`` and ``turn``.
            ResourceExhausted: Too many wait.
            InvalidArgument: There is no such priority.
        """
        work = self.enter(priority=priority, deadline_ns=deadline_ns, model=model, urgent_ns=urgent_ns)
        await self.turn(work)
        return work

    def leave(self, work: Work) -> None:
        """Gives up what ``enter`` asked for, whether it waits or has its slot. Idempotent."""
        if work.state is WorkState.RUNNING:
            self.release(work)
        elif work.state is WorkState.WAITING:
            self._room.note(work, self._now(), "cancelled by its caller")
            self._room.remove(work)
            self._end(work)
            self._decide(self._now())

    def release(self, work: Work | None = None, *, is_representative: bool = True) -> None:
        """Gives a slot back; the next in the order gets it.

        Args:
            work: Whose slot; None for the one that is held longest.
            is_representative: Whether the time that it was held says how long its model takes.
        """
        now_ns = self._now()
        lane = self._lane_of(work)
        held = lane.work
        assert held is not None, "a slot is given back once"
        turn: _Turn = held.item
        if turn.model is not None and is_representative and held.number in self._works:
            self._estimates.observe(turn.model, max(0, now_ns - turn.started_ns))
        lane.work = None
        self._end(held)
        self._decide(now_ns)

    def _lane_of(self, work: Work | None) -> Lane:
        held = [lane for lane in self._lanes if lane.work is not None and (work is None or lane.work is work)]
        if not held:
            raise InvalidArgument("scheduler: a slot was given back that is not held")
        return min(held, key=_held_since)

    def change_priority(self, work: Work, priority: Priority) -> bool:
        """Changes the class of a work that waits; False if it does not wait any more."""
        now_ns = self._now()
        changed = self._room.change_priority(work, priority, now_ns)
        self._decide(now_ns)
        return changed

    def _decide(self, now_ns: int) -> None:
        for action in self._policy.decide(now_ns, self._room, self._lanes):
            if self._trace is not None:
                self._trace(now_ns, action)
            if isinstance(action, Start):
                work, lane = action.work, action.lane
                self._room.remove(work)
                work.state = WorkState.RUNNING
                work.has_run = True
                work.device = 0
                lane.work = work
                lane.ends_ns = now_ns + work.durations_ns[0]
                work.item.started_ns = now_ns
                work.item.event.set()
            elif isinstance(action, Abort) and action.work.state is WorkState.WAITING:
                # Of one that runs the caller hears from the execution, and its slot stays held until the device is done.
                self._room.remove(action.work)
                action.work.item.reason = action.reason
                self._end(action.work)
                action.work.item.event.set()

    def _end(self, work: Work) -> None:
        work.state = WorkState.ENDED
        self._works.pop(work.number, None)

    def statistics(self) -> WaitingRoomStatistics:
        """Counts of the waiting room."""
        return self._room.statistics()

    def explain(self, work: Work | None = None) -> str:
        """Why a work is where it is, or what holds the slots and who waits first, in lines of text."""
        now_ns = self._now()
        if work is not None:
            return self._room.explain(work, now_ns)
        lines = [f"slot {lane.index}: {lane.work or 'free'}" for lane in self._lanes]
        waiting = [w for w in self._works.values() if w.state is WorkState.WAITING]
        waiting.sort(key=lambda w: w.key)
        lines += [self._room.explain(w, now_ns) for w in waiting[:EXPLAINED_MAX]]
        return "\n".join(lines)


def _held_since(lane: Lane) -> tuple[int, int]:
    assert lane.work is not None
    return lane.work.item.started_ns, lane.index


def _error(reason: Reason, expected_ns: int, *, has_waited: bool) -> MissedDeadline | ResourceExhausted:
    if reason is Reason.FULL:
        return ResourceExhausted(f"scheduler: {reason.value}", transient=True)
    if reason is Reason.IMPOSSIBLE:
        told = f"scheduler: even an idle device would need {expected_ns} ns, longer than the deadline allows"
        return MissedDeadline(told, transient=False)
    if reason is Reason.EXPIRED and not has_waited:
        told = "scheduler: the deadline had passed before the execution was asked for"
        return MissedDeadline(told, transient=False)
    return MissedDeadline(f"scheduler: {reason.value}", transient=True)
