"""The event loop of an application as a second resource of admission, beside the slots of its devices.

Each frame has two parts on the thread of the event loop: before the device (its source, the copy into a buffer, the dispatch), and
after it (the answer, the result, the body of ``async for``). Owns the streams that have these parts on one loop, whatever their
devices and runtimes, and the demand that they are for each slot. Pure and synchronous; the measurement is its caller's.

A slot with reservations gets its next frame from the loop, so that it is idle while the loop does something else. So in the worst
case the work of the loop and the work of the slot never overlap, and the test of each slot counts both: its own frames, and the
parts of all frames of the loop. The loop runs callbacks in their order. That is the order of deadlines of parts that all have the
same time, for which the shortest time of any stream from an arrival to a deadline is taken. A callback that is not a part of a
frame may precede each of the two parts; the longest known one counts as a delay, twice.

Invariants:
1. No stream is added with which the streams of any slot of the loop would not fit, also on devices that it does not use.
2. At most ``LOOP_CAP_PPM`` of the loop's time is reserved.
3. A call that raises changes nothing.
4. A stream is added only beside what the frames of other streams take by now, and not less than they were admitted with. That
   counts until the next stream is added: what one window shows ends no stream that was admitted.

Source: a server in order of arrival is one by deadlines if all jobs have the same relative deadline; two resources that are
never busy together, as the worst case, are one (holistic analysis: Tindell, Clark 1994).
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from aionn.errors import NotAdmitted, WouldFit
from aionn.hal import duration_text
from aionn.scheduler.admission import DAY_NS, SHARE_PPM, Demand, SlotCost, SlotTest, StreamTerms, Verdict
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.ledger import Ledger
from aionn.scheduler.reservations.offers import (
    Changing,
    counter_offers,
    frames_by,
    least_that_fits,
    least_that_may_fit,
    most_offered_ns,
    offers_text,
)

__all__ = [
    "FACTOR",
    "LOOP_CAP_PPM",
    "NO_LOOP_COST",
    "USUAL_LOOP_COST",
    "LoopCost",
    "LoopLedger",
    "LoopUser",
    "loop_parts",
]

LOOP_CAP_PPM = 600_000
"""Share of the loop's time that may be reserved. The rest is for best effort on the same loop, for what an application does beside
its streams, and for the loop's own work; a loop that is busy for most of the time falls behind and does not recover."""

FACTOR = 3.0
"""By how much a frame of a stream takes more of the loop than an execution alone, as long as no stream has shown that: the wake-ups
of the source, of the task that executes and of the consumer, and the copy. With small frames it is 2.0 to 3.3."""

FACTOR_MAX = 8.0
"""The most by which frames count more than they were measured with: beyond that, other work of the loop is the reason."""

WINDOW_FRAMES = 64
"""Frames after which the time of the loop's thread is compared with what was counted for them."""

WINDOW_NS = 500_000_000
"""Least time of such a comparison: half a second has frames of each stream of usual rates, each with all that belongs to it."""

CALLBACKS_MIN = 16
"""Callbacks from which on their quantile counts: a single slow one would keep streams out for long."""

BUSY_SHARE = 0.9
"""From this share of a window on, nothing is learnt of it: best effort fills the loop, and takes what frames leave."""

PARTS_KEPT_MAX = 1024
"""Most demands of periods that are kept: some 300 KB."""

_T = TypeVar("_T")


class LoopCost(NamedTuple):
    """The processor time of the loop's thread for a frame.

    Attributes:
        before_ns: Before the device has it.
        after_ns: After that.
    """

    before_ns: int
    after_ns: int

    @property
    def total_ns(self) -> int:
        """Both parts."""
        return self.before_ns + self.after_ns

    def times(self, factor: float) -> LoopCost:
        """The parts with what was not in the measurement, rounded up."""
        return LoopCost(math.ceil(self.before_ns * factor), math.ceil(self.after_ns * factor))


NO_LOOP_COST = LoopCost(0, 0)
"""Of frames on a loop whose time is not measured: under a virtual clock."""

USUAL_LOOP_COST = LoopCost(100_000, 100_000)
"""Of an execution that was not measured on the loop: what small models take."""


class LoopUser(Protocol):
    """Reservations of a device whose frames the loop sends."""

    @property
    def ledger(self) -> Ledger:
        """The reservations, which count with what the loop does."""
        ...

    def loop_changed(self) -> None:
        """The last demands hold from now on."""
        ...


_Lack = Sequence[tuple[SlotCost | None, Verdict]]
"""Of each slot that lacks time, the result of its test, with the time of a frame of the new stream there; None in place of that
where streams that are there would be late."""


class _Member(NamedTuple):
    """A stream on the loop.

    Attributes:
        terms: Its terms.
        cost: The parts of a frame that count.
        allowance_ns: See ``LoopLedger.reserve``.
        admitted: The parts of a frame that it was admitted with: no less counts later.
        measured: An execution as it was measured.
    """

    terms: StreamTerms
    cost: LoopCost
    allowance_ns: int | None
    admitted: LoopCost
    measured: LoopCost

    def by(self, factor: float) -> _Member:
        """It with what its frames take by now."""
        cost = max(self.admitted, self.measured.times(factor), key=_total_ns)
        return self if cost == self.cost else self._replace(cost=cost)


_total_ns = operator.attrgetter("total_ns")


def loop_parts(members: Iterable[tuple[StreamTerms, LoopCost]]) -> tuple[Demand, ...]:
    """The demand of the loop's parts of all frames: one for each period, with the sum of the parts of its streams.

    Args:
        members: The terms of each stream, and the parts of its frames.
    """
    sums: dict[int, int] = {}
    first_ns = DAY_NS
    for terms, cost in members:
        if cost.total_ns > 0:
            sums[terms.period_ns] = sums.get(terms.period_ns, 0) + cost.total_ns
            first_ns = min(first_ns, terms.deadline_ns - terms.width_ns)
    return tuple(
        _part(period_ns, first_ns, min(sum_ns, DAY_NS)) for period_ns, sum_ns in sorted(sums.items())
    )


@lru_cache(maxsize=PARTS_KEPT_MAX)
def _part(period_ns: int, first_ns: int, sum_ns: int) -> Demand:
    """The demand of the streams of one period: with another stream, most of them are as before."""
    return Demand(
        StreamTerms(name="the event loop", period_ns=period_ns, deadline_ns=first_ns),
        SlotCost(duration_ns=sum_ns, piece_ns=0),
    )


def _refusal(reason: str, offers: WouldFit) -> NotAdmitted:
    text = f"{reason}. {offers_text(offers)}."
    return NotAdmitted(text, reason=reason, would_fit=offers, is_by_event_loop=True)


def _with_deadline(new: _Member, rest: Iterable[_Member], cost: SlotCost | None) -> Changing:
    """The demand on a slot that depends on the deadline of a stream: the frames of its own there, and with the shortest time from
    an arrival to a deadline the parts of all.

    Args:
        new: The stream.
        rest: The others on the loop.
        cost: The time of its frames on the slot; None where it is on another one.
    """
    terms, members = new.terms, [new, *(m for m in rest if m.cost.total_ns)]
    periods, parts = np.array([(m.terms.period_ns, m.cost.total_ns) for m in members], np.int64).T
    others_ns = min((m.terms.deadline_ns - m.terms.width_ns for m in members[1:]), default=DAY_NS)
    duration_ns = 0 if cost is None else cost.duration_ns

    def demand_at(at_ns: int, deadline_ns: int) -> int:
        own_ns = duration_ns * frames_by(at_ns, deadline_ns - terms.width_ns, terms.period_ns)
        if not new.cost.total_ns:
            return own_ns
        first_ns = min(deadline_ns - terms.width_ns, others_ns)
        return own_ns + int((np.maximum(0, (at_ns - first_ns) // periods + 1) * parts).sum())

    return Changing(demand_at, 0, most_offered_ns(terms.deadline_ns))


def _with_period(new: _Member, rest: Iterable[_Member], cost: SlotCost | None) -> Changing:
    """The demand on a slot that depends on the period of a stream: its own frames there, and its parts. See ``_with_deadline``."""
    terms, part_ns = new.terms, new.cost.total_ns
    own_first_ns = terms.deadline_ns - terms.width_ns
    first_ns = min((m.terms.deadline_ns - m.terms.width_ns for m in rest if m.cost.total_ns), default=DAY_NS)
    first_ns = min(first_ns, own_first_ns)
    duration_ns = 0 if cost is None else cost.duration_ns

    def demand_at(at_ns: int, period_ns: int) -> int:
        own_ns = duration_ns * frames_by(at_ns, own_first_ns, period_ns)
        return own_ns + part_ns * frames_by(at_ns, first_ns, period_ns)

    return Changing(demand_at, duration_ns + part_ns, most_offered_ns(terms.period_ns))


class LoopLedger:
    """The streams with a guarantee whose frames one event loop handles.

    Args:
        cap_ppm: The share of the loop that may be reserved, in millionths.

    Attributes:
        factor: By how much a frame of a stream takes more of the loop than an execution alone: ``FACTOR``, or what running streams
            have shown.
        longest_ns: The longest known callback: of the bodies of ``async for`` that do not wait, the 0.99 quantile. It counts from
            the next admission on.
    """

    def __init__(self, *, cap_ppm: int = LOOP_CAP_PPM) -> None:
        self.cap_ppm = cap_ppm
        self.factor = FACTOR
        self.longest_ns = 0
        self._numbers = itertools.count(1)
        self._held: dict[int, _Member] = {}
        self._delay_ns = 0
        # In the order of their first streams, so that a refusal names the same slot on every run.
        self._users: weakref.WeakKeyDictionary[LoopUser, None] = weakref.WeakKeyDictionary()
        self._counted_ns = self._count = 0
        self._since: tuple[int, int] | None = None
        self._callbacks = Estimates()

    # --- What is held ---

    @property
    def count(self) -> int:
        """Number of streams."""
        return len(self._held)

    @property
    def burst_ns(self) -> int:
        """The time that the loop needs for one frame of each stream."""
        return sum(member.cost.total_ns for member in self._held.values())

    @property
    def share(self) -> float:
        """The share of the loop that is reserved."""
        return sum(member.cost.total_ns / member.terms.period_ns for member in self._held.values())

    @property
    def delay_ns(self) -> int:
        """The time that other callbacks may take from a frame, as the last admission has counted: one before each of its parts."""
        return self._delay_ns if self._held else 0

    def _parts(self) -> tuple[Demand, ...]:
        return loop_parts((member.terms, member.cost) for member in self._held.values())

    # --- Admission ---

    def reserve(
        self,
        user: LoopUser,
        terms: StreamTerms,
        cost: LoopCost,
        admit: Callable[[], _T],
        *,
        costs: Mapping[int, SlotCost],
        allowance_ns: int | None = None,
        measured: LoopCost = NO_LOOP_COST,
    ) -> tuple[int, _T]:
        """Adds a stream, if its device admits it beside what the loop does then. The others count with what their frames take by
        now, by ``factor``.

        Args:
            user: The reservations of its device.
            terms: The stream.
            cost: The parts of its frames.
            admit: Has the device admit it.
            costs: The device time of a frame by slot of the device, in the order in which ``admit`` tries them.
            allowance_ns: On a served device, the longest burst of the loop that its frames bear; None on others.
            measured: An execution as it was measured, by which later admissions count; without it they count with ``cost``.

        Returns:
            The number of the stream on the loop, and the result of ``admit``.

        Raises:
            NotAdmitted: There is too little time on the device or on the loop, for this stream or for another one.
        """
        self._users[user] = None
        number = next(self._numbers)
        before = self._held, self._delay_ns
        self._held = {other: member.by(self.factor) for other, member in self._held.items()}
        self._delay_ns = 2 * self.longest_ns
        old = self._parts()
        self._held[number] = _Member(terms, cost, allowance_ns, cost, measured)
        try:
            self._spread()
            self._check_share(terms, cost, old, user.ledger, costs)
            self._check_others(number, user.ledger, costs)
            try:
                found = admit()
            except NotAdmitted as e:
                lack = user.ledger.shortages(terms, costs)
                if lack is None:
                    raise  # A quota is the reason.
                user.ledger.count_beside((), 0)
                if user.ledger.slot_that_fits(terms, costs) is None:
                    raise
                text = f"{e.reason}; of that {self._loop_text(cost)}, and without the event loop it would fit"
                offers = self._offers(number, lack, user.ledger, costs)
                raise _refusal(text, offers) from e
        except BaseException:
            self._held, self._delay_ns = before
            self._spread()
            raise
        self._commit()
        return number, found

    def _loop_text(self, cost: LoopCost) -> str:
        more_ns = self.burst_ns - sum(member.admitted.total_ns for member in self._held.values())
        more = f" ({duration_text(more_ns)} more than they were admitted with)" if more_ns else ""
        return (
            f"the event loop needs {duration_text(self.burst_ns)} for a frame of each of {len(self._held)} streams{more},"
            f" {duration_text(cost.total_ns)} of it for this one ({duration_text(cost.before_ns)} before the device,"
            f" {duration_text(cost.after_ns)} after it)"
        )

    def _check_share(
        self,
        terms: StreamTerms,
        cost: LoopCost,
        held: tuple[Demand, ...],
        ledger: Ledger,
        costs: Mapping[int, SlotCost],
    ) -> None:
        """Refuses a stream that the loop alone has no time for."""
        if not cost.total_ns:
            return
        own = loop_parts([(terms, cost)])[0]
        test = SlotTest(held, cap_ppm=self.cap_ppm)
        verdict = test.verdict(own)
        if verdict.fits:
            return
        offers = WouldFit()
        if verdict.limit == "share":
            period_ns = counter_offers(test, own, verdict).period_ns
            if period_ns is not None:
                longer = msgspec.structs.replace(terms, period_ns=period_ns)
                if ledger.slot_that_fits(longer, costs) is not None:
                    offers = WouldFit(period_ns=period_ns)
            limit = (
                f"its frames take {verdict.own_ppm / SHARE_PPM:.3f} of the loop's time, those of the other streams"
                f" {(verdict.share_ppm - verdict.own_ppm) / SHARE_PPM:.3f}, and at most {self.cap_ppm / SHARE_PPM:.3f} may be"
                " reserved"
            )
        else:
            limit = (
                f"a frame of each of {len(self._held)} streams takes {duration_text(self.burst_ns)} of the loop, and the shortest"
                f" deadline leaves {duration_text(min(verdict.at_ns, own.terms.deadline_ns))}"
            )
        reason = (
            f'stream "{terms.name}" on the event loop: {limit}; a frame of this one takes {duration_text(cost.total_ns)}'
            f" ({duration_text(cost.before_ns)} before the device, {duration_text(cost.after_ns)} after it)"
        )
        raise _refusal(reason, offers)

    def _check_others(self, number: int, ledger: Ledger, costs: Mapping[int, SlotCost]) -> None:
        """Refuses a stream whose parts would have frames of other streams late."""
        member, where = self._held[number], "a served device"
        lack: _Lack | None = None
        if not self._exceeds_an_allowance():
            late = self._late()
            if late is None:
                return
            where, own = late[0], ledger.late()
            is_own = own is not None and own[0] == where
            # The slot that the stream itself has no room on gives the better reason.
            if is_own and ledger.slot_that_fits(member.terms, costs) is None:
                return
            lack = [(None, late[1])]
        text = self._loop_text(member.cost)
        offers = self._offers(number, lack, ledger, costs)
        reason = (
            f'stream "{member.terms.name}" on the event loop: streams on {where} would be late, since {text}'
        )
        raise _refusal(reason, offers)

    def _offers(
        self, number: int, lack: _Lack | None, ledger: Ledger, costs: Mapping[int, SlotCost]
    ) -> WouldFit:
        """The longer deadline, or period, with which a stream would fit and no other one would be late; ``lack`` has the tests
        that fail with its own terms. Changes what is counted with; the caller restores that."""
        member = self._held[number]
        terms = member.terms
        if lack is None:
            return WouldFit()  # A served device bears no longer burst of the loop, whatever the terms.

        def offer(field: str, by_field: Callable[[SlotCost | None], Changing]) -> int | None:
            asked_ns: int = getattr(terms, field)

            def least(value_ns: int) -> int:
                found = lack if value_ns == asked_ns else lack_with(**{field: value_ns})
                if found is None:
                    return value_ns
                bounds = [least_that_may_fit(value_ns, short, by_field(cost)) for cost, short in found]
                return min(bounds, default=DAY_NS + 1)

            return least_that_fits(asked_ns, least)

        def lack_with(**field: int) -> _Lack | None:
            changed = msgspec.structs.replace(terms, **field)
            self._held[number] = member._replace(terms=changed)
            self._spread()
            late = self._late()
            return ledger.shortages(changed, costs) if late is None else [(None, late[1])]

        rest = [held for other, held in self._held.items() if other != number]
        deadline_ns = offer("deadline_ns", lambda cost: _with_deadline(member, rest, cost))
        period_ns = None
        if terms.phase_ns is None:  # With another period it has no place among the phases.
            period_ns = offer("period_ns", lambda cost: _with_period(member, rest, cost))
        return WouldFit(deadline_ns, period_ns)

    def _exceeds_an_allowance(self) -> bool:
        """Whether frames on a served device bear less than the burst of the loop."""
        burst_ns = self.burst_ns
        return any(m.allowance_ns is not None and m.allowance_ns < burst_ns for m in self._held.values())

    def _late(self) -> tuple[str, Verdict] | None:
        """A slot whose streams do not fit beside the parts: see ``Ledger.late``."""
        return next((late for user in self._users if (late := user.ledger.late()) is not None), None)

    def change(self, number: int, terms: StreamTerms) -> None:
        """A stream has other terms, which demand no more."""
        member = self._held.get(number)
        if member is not None:
            self._held[number] = member._replace(terms=terms)
            self._spread()
            self._commit()

    def release(self, number: int) -> None:
        """A stream has ended. Idempotent."""
        if self._held.pop(number, None) is not None:
            self._spread()
            self._commit()

    def _spread(self) -> None:
        parts, delay_ns = self._parts(), self.delay_ns
        for user in self._users:
            user.ledger.count_beside(parts, delay_ns)

    def _commit(self) -> None:
        for user in self._users:
            user.loop_changed()

    # --- What running streams show ---

    def ran(self, cost: LoopCost, now_ns: int, ran: Callable[[], int]) -> None:
        """A frame has come. From time to time the processor time of the thread is compared with that of the executions of all
        frames since: sources, tasks and the application take the rest.

        Args:
            cost: An execution of its stream, as it was measured.
            now_ns: The time.
            ran: Reads the processor time of the loop's thread.
        """
        self._counted_ns += cost.total_ns
        self._count += 1
        if self._since is None:
            self.restart(now_ns, ran())
            return
        then_ns, ran_then_ns = self._since
        if self._count < WINDOW_FRAMES or now_ns - then_ns < WINDOW_NS:
            return
        ran_ns = ran() - ran_then_ns
        if self._counted_ns > 0 and ran_ns < BUSY_SHARE * (now_ns - then_ns):
            self.factor = min(FACTOR_MAX, max(1.0, ran_ns / self._counted_ns))
        if self._callbacks.count("") >= CALLBACKS_MIN:
            self.longest_ns = self._callbacks.duration_ns("", 1)
        self.restart(now_ns, ran_then_ns + ran_ns)

    def restart(self, now_ns: int, ran_ns: int) -> None:
        """Begins a comparison anew: other work came before."""
        self._since = (now_ns, ran_ns)
        self._counted_ns = self._count = 0

    def blocked(self, callback_ns: int) -> None:
        """A callback took that much of the thread, without a pause."""
        self._callbacks.observe("", callback_ns)
