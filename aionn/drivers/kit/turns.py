"""Slots of a device for the tasks of an event loop: the holders, the waiters and the preempted ones.

Owns the order (priority, then earliest deadline, then turns of the clients, then arrival) and the request to a running execution of
lower priority to give way where its device can stop. The counterpart of ``gate``, which serves threads. The order is fixed here and
not asked of the scheduler's policy: described devices are what that policy is judged on, so they must not plan themselves.

Invariants:
1. No more than ``count`` turns have a slot concurrently.
2. A free slot goes to the first in the order; work that gave way keeps its place among its equals.
3. The queue is bounded: more than ``WAITING_MAX`` are refused with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable

import anyio

from aionn.drivers.kit.gate import WAITING_MAX
from aionn.errors import MissedDeadline, ResourceExhausted
from aionn.hal import TIME_MAX_NS, Priority
from aionn.interpreter import RunControl

__all__ = ["Slots", "Turn", "left_s", "loop_now_ns"]


ROUNDS_MAX = 1024
"""Number of clients and classes whose round is remembered; those that are behind need not be."""


def loop_now_ns() -> int:
    """The running loop's time in nanoseconds: CLOCK_MONOTONIC, or a virtual clock's."""
    return round(anyio.current_time() * 1e9)


def left_s(time_ns: int | None) -> float | None:
    """Seconds until then, as anyio's time-outs want them; None means no limit."""
    return None if time_ns is None else max(0.0, (time_ns - loop_now_ns()) / 1e9)


class Turn(RunControl):
    """One execution's claim on a slot, and what may interrupt it while it has one.

    Attributes:
        priority: Against other turns.
        owner: Whose it is, where several clients share the device; equals take turns.
        slot: Which slot it has; None while it waits.
    """

    __slots__ = (
        "_has_begun",
        "_interrupt",
        "_is_cancelled",
        "_sequence",
        "_slots",
        "_turn_came",
        "owner",
        "priority",
        "slot",
    )

    def __init__(
        self,
        slots: Slots,
        *,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        owner: Hashable = None,
    ) -> None:
        super().__init__(
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=lambda: self._is_cancelled,
            now=loop_now_ns,
        )
        self.priority = priority
        self.owner = owner
        self.slot: int | None = None
        self._slots = slots
        self._has_begun = False
        self._is_cancelled = False
        self._interrupt = anyio.Event()
        self._turn_came = anyio.Event()
        self._sequence = (0, 0)

    @property
    def is_given_up(self) -> bool:
        """Whether the caller was cancelled. May be read by any thread."""
        return self._is_cancelled

    @property
    def is_wanted_back(self) -> bool:
        """Whether the slot is needed soon: the caller was cancelled, or a higher priority waits for it."""
        return self._is_cancelled or self._slots.highest_waiting > self.priority

    def cancel(self) -> None:
        """The caller was cancelled. The work ends where the device can stop."""
        self._is_cancelled = True
        self._interrupt.set()
        if self.slot is None:
            self._turn_came.set()

    def interrupt(self) -> None:
        """Makes the work look at ``is_wanted_back``."""
        self._interrupt.set()

    async def sleep_until(self, time_ns: int) -> bool:
        """Sleeps until then and returns True; returns False as soon as the slot is wanted back."""
        if self.is_wanted_back:
            return False
        self._interrupt = anyio.Event()
        with anyio.move_on_after(left_s(time_ns)) as scope:
            await self._interrupt.wait()
        return scope.cancelled_caught

    async def give_way(self) -> None:
        """Lets a higher priority that waits have the slot, and waits for the next turn.

        Raises:
            MissedDeadline: The deadline passed while waiting.
            GeneralFailure: The caller was cancelled.
        """
        if self._slots.highest_waiting > self.priority:
            self._slots.give_back(self)
            await self._slots.take(self)


class Slots:
    """A device's slots, for the tasks of one event loop.

    Args:
        count: Number of executions that run concurrently.
        name: Names the device in errors.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._free = list(range(count))
        self._running: dict[int, Turn] = {}
        self._waiting: list[tuple[int, int, tuple[int, int], Turn]] = []
        self._sequence = itertools.count(1)
        self._round = 0
        self._rounds: dict[tuple[Hashable, Priority], int] = {}

    @property
    def highest_waiting(self) -> int:
        """The highest waiting priority; below all of them if none waits."""
        self._drop_those_who_left()
        return -self._waiting[0][0] if self._waiting else -1

    def _drop_those_who_left(self) -> None:
        while self._waiting and self._waiting[0][3]._turn_came.is_set():
            heapq.heappop(self._waiting)

    async def take(self, turn: Turn) -> None:
        """Waits for a slot. The caller gives it back with ``give_back``.

        Raises:
            MissedDeadline: The deadline passed: persistent if the execution has not begun, transient if it had.
            GeneralFailure: The caller was cancelled.
            ResourceExhausted: Too much waits already.
        """
        self._check(turn)
        if len(self._waiting) >= WAITING_MAX:
            raise ResourceExhausted(f"{self._name}: {WAITING_MAX} executions wait already", transient=True)
        turn._turn_came = anyio.Event()
        if turn._sequence == (0, 0):
            turn._sequence = self._next_round(turn), next(self._sequence)
        deadline_ns = TIME_MAX_NS if turn.deadline_ns is None else turn.deadline_ns
        heapq.heappush(self._waiting, (-turn.priority, deadline_ns, turn._sequence, turn))
        self._dispatch()
        try:
            if turn.slot is None:
                self._ask_a_lower_one(turn)
                with anyio.move_on_after(left_s(turn.deadline_ns)):
                    await turn._turn_came.wait()
            self._check(turn)
            assert turn.slot is not None, "each waiter is cancelled, late, or has its turn"
        except BaseException:
            turn._turn_came.set()
            if turn.slot is not None:
                self.give_back(turn)
            raise
        turn._has_begun = True

    def _next_round(self, turn: Turn) -> int:
        """The round of all clients' turns that this one is in: each client has one of a class in each round, in any order of
        arrival.
        """
        group = (turn.owner, turn.priority)
        number = max(self._round, self._rounds.get(group, 0)) + 1
        if len(self._rounds) >= ROUNDS_MAX:
            self._rounds = {g: n for g, n in self._rounds.items() if n > self._round}
        self._rounds[group] = number
        return number

    def _check(self, turn: Turn) -> None:
        if not turn._has_begun and turn.deadline_ns is not None and turn.now() >= turn.deadline_ns:
            raise MissedDeadline(
                f"{self._name}: the deadline passed before the execution's turn", transient=False
            )
        turn.check()

    def _ask_a_lower_one(self, turn: Turn) -> None:
        lower = [t for t in self._running.values() if t.priority < turn.priority]
        for other in sorted(lower, key=lambda t: (t.priority, -t._sequence[1]))[:1]:
            other.interrupt()

    def _dispatch(self) -> None:
        self._drop_those_who_left()
        while self._free and self._waiting:
            turn = heapq.heappop(self._waiting)[3]
            self._round = max(self._round, turn._sequence[0] - 1)
            turn.slot = heapq.heappop(self._free)
            self._running[turn.slot] = turn
            turn._turn_came.set()
            self._drop_those_who_left()

    def give_back(self, turn: Turn) -> None:
        """Gives a slot back; the next in the order gets it."""
        assert turn.slot is not None, "only who has a slot gives it back"
        heapq.heappush(self._free, turn.slot)
        del self._running[turn.slot]
        turn.slot = None
        self._dispatch()

    def __repr__(self) -> str:
        return f"<Slots of {self._name}: {len(self._running)} in use, {len(self._waiting)} waiting>"
