"""The admission test: whether a stream's frames fit on a device slot beside those that are reserved there.

Owns the test of one slot under earliest deadline first with preemption at boundaries. Pure, in integers of nanoseconds: no clock,
no durations of its own, no state between calls but a cache of points. ``aionn.scheduler.reservations.offers`` owns the result in
words, and the counter-offers.

For each time t at which a deadline may come after all streams began together, the test compares with t the sum of

1. the demand: of each stream, the frames whose deadlines come by t, ``floor((t + J - D) / T) + 1`` of them, each with its duration
   C;
2. the blocking: the longest piece without a boundary of a job that need not end by t and has begun just before;
3. the delay of the slot: the longest time for which the machine may not run what the slot needs, once.

Invariants:
1. A set of streams that passes loses no frame, whatever the phases, as long as durations, jitters and periods are as declared.
2. The times up to the end of the longest busy period suffice; where these are too many, the set does not pass.
3. Longer periods or deadlines, shorter durations or pieces, and less jitter never make a set fail that passes, as long as no
   stream has a phase.
4. Streams with phases pass if they pass without; otherwise ``aionn.scheduler.reservations.phases`` bounds their demand.

Source: demand bound of sporadic streams (Baruah, Mok, Rosier 1990), with blocking (George, Rivierre, Spuri 1996; Baruah 2005), with
release jitter (Spuri 1996); the share that may be reserved is limited as in the kernel's SCHED_DEADLINE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal import TIME_MAX_NS
from aionn.scheduler.reservations.phases import Windows, demand_by_phases

__all__ = [
    "CAP_PPM",
    "DAY_NS",
    "SHARE_PPM",
    "STREAM_NAME_CHARACTERS_MAX",
    "Demand",
    "Piece",
    "SlotCost",
    "SlotTest",
    "StreamTerms",
    "Verdict",
    "with_piece_of",
]

DAY_NS = 86_400 * 10**9
"""Longest period and deadline: more is a mistake in the unit. It also keeps all sums within 64 bits."""

SHARE_PPM = 1_000_000
"""A whole slot, in the unit of shares."""

CAP_PPM = 950_000
"""Share of a slot that may be reserved unless stated otherwise: the rest is for what durations do not include, as in the kernel."""

STREAM_NAME_CHARACTERS_MAX = 80
"""Longest name of an application's stream: it is a part of messages."""

POINTS_MAX = 50_000
"""Most times that one test examines: some milliseconds. Sets of streams whose periods differ by less than a thousandfold need some
hundreds."""

BUSY_STEPS_MAX = 256
"""Most steps towards the length of the longest busy period: each takes some microseconds, and few sets need more than 30."""

BUSY_NS_MAX = 1000 * DAY_NS
"""Longest busy period that is looked for: far more than ``POINTS_MAX`` allows, and sums stay within 64 bits."""

SHARE_BITS = 40
"""Precision of the shares in the bounds: a nanosecond in a period of 18 minutes."""

_Times = npt.NDArray[np.int64]


def _check_ns(field: str, value: Any, least_ns: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        advice = ""
        if isinstance(value, float):
            advice = (
                f"; {value!r} looks like seconds, which are {round(value * 1e9)} ns"
                if abs(value) < 1e5
                else ""
            )
        raise InvalidArgument(
            f"reservation, {field}: expected an integer of nanoseconds, got {value!r}{advice}"
        )
    if not least_ns <= value <= DAY_NS:
        raise InvalidArgument(
            f"reservation, {field}: expected from {least_ns} to {DAY_NS} ns (a day), got {value}"
        )


class StreamTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a reservation: the arrivals that a stream promises, and the deadline that it is promised.

    Attributes:
        name: Named in messages.
        period_ns: Least time between the captures of two frames.
        deadline_ns: From a frame's capture to the end of its execution.
        jitter_ns: The longest time from a frame's capture to its arrival at the scheduler.
        phase_ns: The time of one capture, from which all others are whole periods away; None means that a frame may come at any
            time that is a period after the one before.
        tolerance_ns: With a phase, the most that a capture is before or after its time.

    Raises:
        InvalidArgument: A time is not an integer, is not positive (the jitter, the tolerance: negative), is longer than a day, or
            jitter and tolerance leave nothing of the deadline, or with a phase of the period.
    """

    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int = 0
    phase_ns: int | None = None
    tolerance_ns: int = 0

    def __post_init__(self) -> None:
        _check_ns("period_ns", self.period_ns, 1)
        _check_ns("deadline_ns", self.deadline_ns, 1)
        _check_ns("jitter_ns", self.jitter_ns, 0)
        if self.jitter_ns >= self.deadline_ns:
            raise InvalidArgument(
                f"reservation, jitter_ns: expected less than the deadline of {self.deadline_ns} ns, got {self.jitter_ns}"
            )
        _check_ns("tolerance_ns", self.tolerance_ns, 0)
        if self.phase_ns is None:
            if self.tolerance_ns:
                raise InvalidArgument("reservation, tolerance_ns: expected 0 without a phase")
            return
        if isinstance(self.phase_ns, bool) or not isinstance(self.phase_ns, int):
            raise InvalidArgument(
                f"reservation, phase_ns: expected an integer of nanoseconds, got {self.phase_ns!r}"
            )
        if not 0 <= self.phase_ns <= TIME_MAX_NS:
            raise InvalidArgument(
                f"reservation, phase_ns: expected a time of the monotonic clock, got {self.phase_ns}"
            )
        shorter_ns = min(self.deadline_ns, self.period_ns)
        if self.width_ns >= shorter_ns:
            raise InvalidArgument(
                f"reservation, jitter_ns and tolerance_ns: expected a window of less than {shorter_ns} ns, the shorter of period"
                f" and deadline, got {self.jitter_ns} + 2 * {self.tolerance_ns}"
            )

    @property
    def width_ns(self) -> int:
        """The time from the first to the last moment at which a frame may arrive."""
        return self.jitter_ns + 2 * self.tolerance_ns


class SlotCost(msgspec.Struct, frozen=True, kw_only=True):
    """The device time of one frame on a slot.

    Attributes:
        duration_ns: The longest duration that counts as expected; a longer one overruns. It includes what two preemptions
            cost.
        piece_ns: The longest time in it without a boundary; ``duration_ns`` where the device cannot preempt.

    Raises:
        InvalidArgument: A time is not an integer, is not positive (the piece: negative), or is longer than a day, or the piece is
            longer than the duration.
    """

    duration_ns: int
    piece_ns: int

    def __post_init__(self) -> None:
        _check_ns("duration_ns", self.duration_ns, 1)
        _check_ns("piece_ns", self.piece_ns, 0)
        if self.piece_ns > self.duration_ns:
            raise InvalidArgument(
                f"reservation, piece_ns: expected at most the duration of {self.duration_ns} ns, got {self.piece_ns}"
            )


class Demand(msgspec.Struct, frozen=True):
    """A stream on a slot."""

    terms: StreamTerms
    cost: SlotCost

    @property
    def first_ns(self) -> int:
        """The least time from a frame's arrival to its deadline."""
        return self.terms.deadline_ns - self.terms.width_ns

    @property
    def windows(self) -> Windows:
        """The times at which its frames may arrive; without a phase, as if one window opened at 0."""
        terms, cost = self.terms, self.cost
        opens_ns = 0 if terms.phase_ns is None else (terms.phase_ns - terms.tolerance_ns) % terms.period_ns
        return Windows(
            opens_ns, terms.period_ns, terms.width_ns, terms.deadline_ns, cost.duration_ns, cost.piece_ns
        )

    @property
    def share_ppm(self) -> int:
        """The share of the slot that it takes, in millionths, rounded up."""
        return -(-self.cost.duration_ns * SHARE_PPM // self.terms.period_ns)


class Piece(msgspec.Struct, frozen=True):
    """The longest time without a boundary of best-effort jobs of one model.

    Attributes:
        name: The model.
        duration_ns: That time.
    """

    name: str
    duration_ns: int


class Verdict(msgspec.Struct, frozen=True):
    """The result of a test.

    Attributes:
        fits: Whether no frame can be lost.
        limit: The deciding limit: ``demand``; ``share`` where more than the cap would be reserved; ``points`` where the test has no
            result within its bounds.
        share_ppm: The share of all streams together, in millionths of the slot.
        own_ppm: That of the new one.
        cap_ppm: The share that may be reserved.
        at_ns: The tightest time; 0 where the share decides.
        held_ns: The demand of the streams that were there, up to that time; where phases decide and the streams fit, of all.
        own_ns: The demand of the new one.
        blocking_ns: The blocking at that time.
        blocker: Name of the stream or model that blocks; empty where none does.
        slack_ns: The time that is left; negative: the time that is missing.
        room_ns: The longest piece of a best-effort job that no deadline of these streams would be missed by.
        delay_ns: The delay of the slot.
    """

    fits: bool
    limit: str
    share_ppm: int
    own_ppm: int
    cap_ppm: int
    at_ns: int = 0
    held_ns: int = 0
    own_ns: int = 0
    blocking_ns: int = 0
    blocker: str = ""
    slack_ns: int = 0
    room_ns: int = 0
    delay_ns: int = 0


class SlotTest:
    """The test of one slot, for several candidates beside the same streams.

    Args:
        held: The streams that are there.
        cap_ppm: The share that may be reserved, in millionths.
        lower: The pieces of best-effort jobs that the slot may run.
        delay_ns: The longest time for which the machine may not run what the slot needs.
    """

    def __init__(
        self,
        held: Sequence[Demand],
        *,
        cap_ppm: int = CAP_PPM,
        lower: Iterable[Piece] = (),
        delay_ns: int = 0,
    ) -> None:
        self.delay_ns = delay_ns
        self.held = tuple(held)
        self.cap_ppm = cap_ppm
        self.lower = tuple(lower)
        self._sums_of_held = _Sums.of(self.held)
        # By rising first deadline: for each position the longest piece from there on, or of a best-effort job.
        firsts = self._sums_of_held.columns[3]
        order = np.argsort(firsts, kind="stable")
        lower_ns = max((piece.duration_ns for piece in self.lower), default=0)
        pieces = np.array([demand.cost.piece_ns for demand in self.held], np.int64)[order]
        self._firsts = firsts[order]
        self._longest = np.maximum.accumulate(np.append(pieces, lower_ns)[::-1])[::-1]
        self._horizon_ns = -1
        self._of_held: Verdict | None = None
        self._of_new: tuple[Demand, Verdict] | None = None
        self._times: _Times = np.empty(0, np.int64)
        self._sums: _Times = np.empty(0, np.int64)

    def verdict(self, new: Demand | None = None) -> Verdict:
        """The result for the streams that are there, with a new one beside them. Where they do not fit in all phases, those with
        phases are tested again with these."""
        found = self._in_all_phases(new)
        if found.fits or found.limit == "share":
            return found
        return self._with_phases(new, found)

    def _in_all_phases(self, new: Demand | None) -> Verdict:
        # An admission asks for the streams that are there, and for the same new one, several times.
        if new is None:
            if self._of_held is None:
                self._of_held = self._tested(None)
            return self._of_held
        if self._of_new is None or self._of_new[0] != new:
            self._of_new = new, self._tested(new)
        return self._of_new[1]

    def _tested(self, new: Demand | None) -> Verdict:
        sums = self._sums_of_held if new is None else self._sums_of_held.plus(new)
        own_ppm = 0 if new is None else new.share_ppm
        share_ppm = sums.share_ppm
        if share_ppm > self.cap_ppm:
            return Verdict(False, "share", share_ppm, own_ppm, self.cap_ppm)
        horizon_ns = self._busy_ns(sums)
        if horizon_ns is None or sums.points(horizon_ns) > POINTS_MAX:
            return Verdict(False, "points", share_ppm, own_ppm, self.cap_ppm)
        self._list_points(horizon_ns)
        count = int(np.searchsorted(self._times, horizon_ns, side="right"))
        times, held = self._times[:count], self._sums[:count]
        own = _demand_at(times, new)
        if new is not None:
            more = np.arange(new.first_ns, horizon_ns + 1, new.terms.period_ns, dtype=np.int64)
            before = np.searchsorted(times, more, side="right")
            held = np.concatenate((held, np.concatenate(([0], held))[before]))
            own = np.concatenate((own, _demand_at(more, new)))
            times = np.concatenate((times, more))
        if not times.size:
            return Verdict(True, "demand", share_ppm, own_ppm, self.cap_ppm, room_ns=DAY_NS)
        blocking = self._blocking(times, new)
        room = times - held - own - self.delay_ns
        slack = room - blocking
        tightest = int(np.argmin(slack))
        slack_ns = int(slack[tightest])
        return Verdict(
            slack_ns >= 0,
            "demand",
            share_ppm,
            own_ppm,
            self.cap_ppm,
            int(times[tightest]),
            int(held[tightest]),
            int(own[tightest]),
            int(blocking[tightest]),
            self._blocker(int(times[tightest]), new),
            slack_ns,
            max(0, int(room.min())),
            self.delay_ns,
        )

    def _by_phases(
        self, demands: Sequence[Demand], at_ns: int | None = None
    ) -> tuple[_Times, _Times, _Times] | None:
        """The times, the demand, and the blocking with the delay; None where phases are of no use."""
        phased = [demand.windows for demand in demands if demand.terms.phase_ns is not None]
        if len(phased) < 2:
            return None
        found = demand_by_phases(
            phased,
            [demand.windows for demand in demands if demand.terms.phase_ns is None],
            lower_ns=max((piece.duration_ns for piece in self.lower), default=0),
            busy_ns=self._busy_ns(_Sums.of(demands)),
            points_max=POINTS_MAX,
            at_ns=at_ns,
        )
        return None if found is None else (found[0], found[1], found[2] + self.delay_ns)

    def _with_phases(self, new: Demand | None, otherwise: Verdict) -> Verdict:
        demands = self.held if new is None else (*self.held, new)
        found = self._by_phases(demands)
        if found is None:
            return otherwise
        times, demand, blocking = found
        slack = times - demand - blocking
        tightest = int(np.argmin(slack))
        at_ns, slack_ns = int(times[tightest]), int(slack[tightest])
        all_ns = int(demand[tightest])
        held_ns = all_ns if new is None or slack_ns >= 0 else self._held_ns(at_ns)
        blocking_ns = int(blocking[tightest]) - self.delay_ns
        pieces = [
            *self.lower,
            *(Piece(d.terms.name, d.cost.piece_ns) for d in demands if d.terms.deadline_ns > at_ns),
        ]
        longer = [piece for piece in pieces if piece.duration_ns >= blocking_ns]
        return Verdict(
            slack_ns >= 0,
            "demand",
            otherwise.share_ppm,
            otherwise.own_ppm,
            self.cap_ppm,
            at_ns,
            held_ns,
            all_ns - held_ns,
            blocking_ns,
            min(longer, key=lambda piece: piece.duration_ns, default=Piece("", 0)).name,
            slack_ns,
            max(0, int((times - demand).min()) - self.delay_ns),
            self.delay_ns,
        )

    def _held_ns(self, at_ns: int) -> int:
        """The demand of the streams that are there up to one time."""
        found = self._by_phases(self.held, at_ns)
        if found is not None:
            return int(found[1][0])
        times = np.array([at_ns], np.int64)
        return sum(int(_demand_at(times, held)[0]) for held in self.held)

    def fits(self, new: Demand) -> bool:
        """Whether a new stream fits, without the reason: half the time where streams have phases."""
        return self.shortage(new) is None

    def shortage(self, new: Demand | None = None) -> Verdict | None:
        """The result where a new stream, or those that are there, do not fit; None where they do.

        The limit is ``phases`` where these count: then no single time shows that other terms lack time as well.
        """
        found = self._in_all_phases(new)
        if found.fits or found.limit == "share":
            return None if found.fits else found
        by_phases = self._by_phases(self.held if new is None else (*self.held, new))
        if by_phases is None:
            return found
        if bool((by_phases[0] - by_phases[1] >= by_phases[2]).all()):
            return None
        return msgspec.structs.replace(found, limit="phases")

    def with_piece(self, name: str, piece_ns: int) -> SlotTest:
        """The same with no longer pieces than ``piece_ns`` of one stream or model."""
        held = [with_piece_of(demand, name, piece_ns) for demand in self.held]
        lower = [Piece(p.name, min(p.duration_ns, piece_ns)) if p.name == name else p for p in self.lower]
        return SlotTest(held, cap_ppm=self.cap_ppm, lower=lower, delay_ns=self.delay_ns)

    def curve(self, new: Demand | None = None) -> list[tuple[int, int, int]]:
        """``(t, demand, blocking with the delay)`` at each time that the test examines, ascending; empty where it has no result by
        demand."""
        demands = self.held if new is None else (*self.held, new)
        if not self._in_all_phases(new).fits and (found := self._by_phases(demands)) is not None:
            return list(zip(*(values.tolist() for values in found), strict=True))
        sums = self._sums_of_held if new is None else self._sums_of_held.plus(new)
        horizon_ns = self._busy_ns(sums) if sums.share_ppm <= self.cap_ppm else None
        if horizon_ns is None or sums.points(horizon_ns) > POINTS_MAX:
            return []
        times, demand = sums.listed(horizon_ns)
        blocking = self._blocking(times, new) + self.delay_ns
        return list(zip(times.tolist(), demand.tolist(), blocking.tolist(), strict=True))

    def _busy_ns(self, sums: _Sums) -> int | None:
        """A time up to which it suffices to test: the end of the longest busy period, or where the demand's line meets the time."""
        if not sums.columns.size:
            return 0
        piece_ns = max(int(self._longest[0]), sums.piece_ns) + self.delay_ns
        durations, periods, jitters, firsts = sums.columns
        # Longer than that by the least first deadline, so that the least slack is among the times, not only the first lack of it.
        more_ns = int(firsts.min())
        rest = (1 << SHARE_BITS) - sums.share
        line_ns = None if rest <= 0 else ((piece_ns << SHARE_BITS) + sums.ahead) // rest + 1
        busy_ns = piece_ns + int(durations.sum())
        if sums.share_ppt < 10**12:
            # No busy period ends before its work does at the rate of the shares.
            busy_ns = max(busy_ns, piece_ns * 10**12 // (10**12 - sums.share_ppt))
        for _ in range(BUSY_STEPS_MAX):
            if (line_ns is not None and busy_ns >= line_ns) or busy_ns > BUSY_NS_MAX:
                break
            next_ns = piece_ns + int((-(-(busy_ns + jitters) // periods) * durations).sum())
            if next_ns == busy_ns:
                return busy_ns + more_ns
            busy_ns = next_ns
        return None if line_ns is None else line_ns + more_ns

    def _list_points(self, horizon_ns: int) -> None:
        if horizon_ns > self._horizon_ns:
            self._times, self._sums = self._sums_of_held.listed(horizon_ns)
            self._horizon_ns = horizon_ns

    def _blocking(self, times: _Times, new: Demand | None) -> _Times:
        """The blocking at each time: all streams with a later deadline can block, and all best-effort jobs."""
        blocking: _Times = self._longest[np.searchsorted(self._firsts, times, side="right")]
        if new is not None:
            blocking = np.maximum(blocking, np.where(times < new.first_ns, new.cost.piece_ns, 0))
        return blocking

    def _blocker(self, at_ns: int, new: Demand | None) -> str:
        """The name of the longest piece that blocks at a time; best-effort jobs go first among equals."""
        longest_ns, name = -1, ""
        for piece in self.lower:
            if piece.duration_ns > longest_ns:
                longest_ns, name = piece.duration_ns, piece.name
        for demand in self.held if new is None else (*self.held, new):
            if demand.cost.piece_ns > longest_ns and demand.first_ns > at_ns:
                longest_ns, name = demand.cost.piece_ns, demand.terms.name
        return name


class _Sums(NamedTuple):
    """The sums over some streams that the bounds of the test need.

    Attributes:
        columns: Duration, period, jitter and least time from arrival to deadline, each of all streams.
        share: Of the slot, in ``2 ** -SHARE_BITS``, rounded up: bounds become longer by that, never shorter.
        share_ppt: The same in ``10 ** -12``, rounded down: a full slot is not more than that.
        ahead: Sum of the shares times what the first deadlines come earlier than the first periods end.
        piece_ns: The longest piece.
    """

    columns: _Times
    share: int
    share_ppt: int
    ahead: int
    piece_ns: int

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> _Sums:
        rows = []
        share = share_ppt = ahead = piece_ns = 0
        for demand in demands:
            terms, cost = demand.terms, demand.cost
            period_ns, width_ns, duration_ns = terms.period_ns, terms.width_ns, cost.duration_ns
            first_ns = terms.deadline_ns - width_ns
            own = -(-(duration_ns << SHARE_BITS) // period_ns)
            rows.append((duration_ns, period_ns, width_ns, first_ns))
            share += own
            share_ppt += duration_ns * 10**12 // period_ns
            ahead += own * max(0, period_ns - first_ns)
            piece_ns = max(piece_ns, cost.piece_ns)
        return cls(np.array(rows, np.int64).reshape(-1, 4).T, share, share_ppt, ahead, piece_ns)

    def plus(self, demand: Demand) -> _Sums:
        one = _Sums.of([demand])
        return _Sums(
            np.concatenate((self.columns, one.columns), axis=1),
            self.share + one.share,
            self.share_ppt + one.share_ppt,
            self.ahead + one.ahead,
            max(self.piece_ns, one.piece_ns),
        )

    @property
    def share_ppm(self) -> int:
        return self.share_ppt * SHARE_PPM // 10**12

    def points(self, horizon_ns: int) -> int:
        """Number of times up to one at which a deadline may come."""
        return int(self._counts(horizon_ns).sum())

    def listed(self, horizon_ns: int) -> tuple[_Times, _Times]:
        """The times at which deadlines may come, ascending, and the demand up to each; the last of equal times has the whole of
        it."""
        durations, periods, _, firsts = self.columns
        counts = self._counts(horizon_ns)
        numbers = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        times = np.repeat(firsts, counts) + numbers * np.repeat(periods, counts)
        order = np.argsort(times, kind="stable")
        return times[order], np.cumsum(np.repeat(durations, counts)[order])

    def _counts(self, horizon_ns: int) -> _Times:
        _, periods, _, firsts = self.columns
        counts: _Times = np.maximum(0, (horizon_ns - firsts) // periods + 1)
        return counts


def _demand_at(times: _Times, demand: Demand | None) -> _Times:
    """The demand of one stream up to each time."""
    if demand is None:
        return np.zeros_like(times)
    frames = (times - demand.first_ns) // demand.terms.period_ns + 1
    return np.maximum(frames, 0) * demand.cost.duration_ns


def with_piece_of(demand: Demand, name: str, piece_ns: int) -> Demand:
    """A stream with no longer pieces than ``piece_ns``, if it has that name."""
    cost = demand.cost
    if demand.terms.name != name or cost.piece_ns <= piece_ns:
        return demand
    return Demand(demand.terms, SlotCost(duration_ns=cost.duration_ns, piece_ns=piece_ns))
