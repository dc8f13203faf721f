"""The demand of periodic streams whose phases are known: the most that they can ask for in any interval of a length.

Owns the bounds over all positions of an interval, and the phases that a new stream may be offered. Pure, in integers of
nanoseconds.

Streams whose periods have a short common multiple form a group: their captures repeat with that multiple, and so do the positions
that have to be examined. An interval begins at the last moment at which one of its frames may arrive, and ends with a deadline.
Groups, and streams of other periods, may move against each other: each counts with the worst of its own positions.

Invariants:
1. No bound is below what frames in their windows can demand, wherever the interval begins.
2. A bound is never above the demand of the same streams with unknown phases.

Source: processor demand of periodic tasks with given offsets (Baruah, Rosier, Howell 1990: for all intervals, the work that arrives
and is due within it), with blocking by one piece as in ``aionn.scheduler.admission``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Bound", "Windows", "bound_of", "demand_by_phases", "grouped", "phases_to_try"]

MULTIPLE_MAX = 16
"""Longest common multiple of a group, in its longest period: cameras of one trigger have rates that differ by small factors."""

EVENTS_MAX = 40_000
"""Most deadlines that one bound examines, over all positions: some ten milliseconds. A hundred streams of one period need
20,000."""

PHASES_TRIED_MAX = 12
"""Most phases that are tried for a stream on a slot: each is a test of some milliseconds at worst."""

_Times = npt.NDArray[np.int64]


class Windows(NamedTuple):
    """A periodic stream with a phase.

    Attributes:
        opens_ns: The time at which a frame can arrive at the earliest, and from which its deadline counts.
        period_ns: From there to the next one.
        width_ns: The time from there to the last moment at which it may arrive.
        deadline_ns: Its deadline.
        duration_ns: Its device time.
        piece_ns: The longest part of that without a boundary.
    """

    opens_ns: int
    period_ns: int
    width_ns: int
    deadline_ns: int
    duration_ns: int
    piece_ns: int


class Bound(NamedTuple):
    """The most that a group demands in an interval, by its length.

    Attributes:
        lengths: The lengths at which a bound grows, ascending, from 0 on.
        demand: The bound from that length on.
        blocked: The same, if a frame of the group that is due later began before the interval and is counted with its piece.
        repeats_ns: From this length on both bounds grow by ``rise_ns`` in each ``period_ns``.
        period_ns: The group's common multiple.
        rise_ns: Device time of all frames within it.
    """

    lengths: _Times
    demand: _Times
    blocked: _Times
    repeats_ns: int
    period_ns: int
    rise_ns: int

    def at(self, lengths: _Times) -> tuple[_Times, _Times]:
        """Both bounds for some lengths."""
        periods = np.maximum(0, -((self.repeats_ns + self.period_ns - lengths) // self.period_ns))
        places = np.searchsorted(self.lengths, lengths - periods * self.period_ns, side="right") - 1
        more = periods * self.rise_ns
        return self.demand[places] + more, self.blocked[places] + more

    def points(self, until_ns: int) -> _Times:
        """The lengths up to one at which the demand may grow."""
        first = self.lengths[1:]
        repeated = first[first > self.repeats_ns]
        count = max(0, (until_ns - self.repeats_ns) // self.period_ns)
        later = np.arange(1, count + 1, dtype=np.int64)[:, None] * self.period_ns + repeated[None, :]
        found = np.concatenate((first, later.ravel()))
        return found[found <= until_ns]

    def count(self, until_ns: int) -> int:
        """An upper limit for the number of ``points``."""
        return len(self.lengths) * (1 + max(0, until_ns // self.period_ns))


def grouped(streams: Sequence[Windows]) -> list[list[int]]:
    """The indexes of streams by group, longest period first: each joins the group with the shortest common multiple."""
    groups: list[tuple[int, int, list[int]]] = []
    for index in sorted(range(len(streams)), key=lambda i: (-streams[i].period_ns, i)):
        period_ns = streams[index].period_ns
        joined = [(math.lcm(multiple_ns, period_ns), i) for i, (_, multiple_ns, _) in enumerate(groups)]
        common_ns, position = min(joined, default=(0, 0))
        if joined and common_ns <= MULTIPLE_MAX * groups[position][0]:
            longest_ns, _, members = groups[position]
            groups[position] = longest_ns, common_ns, [*members, index]
        else:
            groups.append((period_ns, period_ns, [index]))
    return [members for _, _, members in groups]


def bound_of(group: Sequence[Windows]) -> Bound | None:
    """The bounds of a group; None where they would take more than ``EVENTS_MAX`` deadlines."""
    multiple_ns = math.lcm(*(stream.period_ns for stream in group))
    count = sum(multiple_ns // stream.period_ns for stream in group)
    repeats_ns = max(stream.deadline_ns for stream in group)
    rounds = repeats_ns // multiple_ns + 2
    if count * count * rounds > EVENTS_MAX:
        return None
    # Each frame within the common multiple, as a stream of that period.
    frames = [
        stream._replace(opens_ns=stream.opens_ns + number * stream.period_ns)
        for stream in group
        for number in range(multiple_ns // stream.period_ns)
    ]
    opens, _, widths, deadlines, durations, pieces = np.array(frames, np.int64).T
    begins = opens + widths
    # By position (row) and frame (column): the first frame that can still arrive at the begin of the interval, and its deadline.
    firsts = _at_or_after(begins[:, None] - widths[None, :], opens[None, :], multiple_ns)
    ends = firsts + deadlines[None, :] - begins[:, None]
    later = np.arange(rounds, dtype=np.int64) * multiple_ns
    lengths = (ends[:, :, None] + later[None, None, :]).reshape(count, -1)
    order = np.argsort(lengths, axis=1, kind="stable")
    lengths = np.take_along_axis(lengths, order, axis=1)
    demand = np.cumsum(np.repeat(durations, rounds)[order], axis=1)
    # A frame that came before blocks as long as the interval ends before its deadline.
    since = (begins[:, None] - opens[None, :] - 1) % multiple_ns + 1
    blocked = demand + _longest_pieces(deadlines[None, :] - since, pieces, lengths)
    return _envelope(
        lengths, demand, blocked, int(pieces.max()), repeats_ns, multiple_ns, int(durations.sum())
    )


def _at_or_after(times: _Times, opens: _Times, period_ns: int) -> _Times:
    """When the first window opens at or after each time, of those that open whole periods away from ``opens``."""
    return opens + -((opens - times) // period_ns) * period_ns


def _longest_pieces(limits: _Times, pieces: _Times, lengths: _Times) -> _Times:
    """By position and length, the longest of the pieces whose limit is above the length; lengths ascend."""
    order = np.argsort(-pieces, kind="stable")
    # From the longest piece on, only a later limit adds lengths at which a piece is the longest.
    until = np.maximum.accumulate(limits[:, order], axis=1)
    longest = np.append(pieces[order], 0)
    found = np.zeros_like(lengths)
    for row in range(len(lengths)):
        first = np.searchsorted(until[row], lengths[row], side="right")
        found[row] = longest[first]
    return found


def _envelope(
    lengths: _Times,
    demand: _Times,
    blocked: _Times,
    piece_ns: int,
    repeats_ns: int,
    period_ns: int,
    rise_ns: int,
) -> Bound:
    """The greatest demand of any position by length. The demand of each position grows with the length, so the greatest value so
    far is that of all positions. A piece that blocks is no longer than its frame, which is demand from the length on at which it
    cannot block any more."""
    times = lengths.ravel()
    order = np.argsort(times, kind="stable")
    times = np.concatenate(([0], times[order]))
    most = np.maximum.accumulate(np.concatenate(([0], demand.ravel()[order])))
    with_piece = np.maximum(most, np.maximum.accumulate(np.concatenate(([piece_ns], blocked.ravel()[order]))))
    last = np.append(times[1:] != times[:-1], True)
    times, most, with_piece = times[last], most[last], with_piece[last]
    grows = np.concatenate(([True], (np.diff(most) > 0) | (np.diff(with_piece) > 0)))
    kept = grows & (times <= repeats_ns + period_ns)
    return Bound(times[kept], most[kept], with_piece[kept], repeats_ns, period_ns, rise_ns)


def phases_to_try(held: Sequence[Windows], new: Windows) -> list[int]:
    """Times at which the windows of a new stream may open, the best first: amid the longest idle times of the streams that are
    there, if each frame begins when its window opens, then at the beginnings of idle times.

    Args:
        held: The streams with phases on the slot; those of other periods than the new one's are of no use here.
        new: The stream; its own time does not count.
    """
    period_ns = new.period_ns
    busy = sorted(
        (stream.opens_ns % period_ns, stream.duration_ns)
        for stream in held
        if stream.period_ns % period_ns == 0 or period_ns % stream.period_ns == 0
    )
    if not busy:
        return [new.opens_ns]
    idle = _idle_times(busy, period_ns)
    amid = [begin + max(0, length - new.duration_ns) // 2 for begin, length in idle]
    found = [*amid[:1], *(begin for begin, _ in idle), *amid[1:]]
    return list(dict.fromkeys(time % period_ns for time in found))[:PHASES_TRIED_MAX]


def _idle_times(busy: Sequence[tuple[int, int]], period_ns: int) -> list[tuple[int, int]]:
    """``(begin, length)`` of the idle times within a period, the longest first; without any, the begin of the work."""
    # Twice around, so that work from the end of the period delays the work at its beginning.
    free_ns = 0
    gaps: list[tuple[int, int]] = []
    for turn in range(2):
        gaps.clear()
        for opens_ns, duration_ns in busy:
            at_ns = opens_ns + turn * period_ns
            if at_ns > free_ns:
                gaps.append((free_ns, at_ns - free_ns))
            free_ns = max(free_ns, at_ns) + duration_ns
    return sorted(gaps, key=lambda gap: (-gap[1], gap[0])) or [(busy[0][0], 0)]


def demand_by_phases(
    streams: Sequence[Windows],
    rest: Sequence[Windows],
    *,
    lower_ns: int,
    busy_ns: int | None,
    points_max: int,
    at_ns: int | None = None,
) -> tuple[_Times, _Times, _Times] | None:
    """The lengths that have to be examined, ascending, with the demand and the blocking at each.

    Args:
        streams: Those with phases.
        rest: Those whose frames may come at any time, a period apart; when a window opens does not matter.
        lower_ns: The longest piece of a best-effort job.
        busy_ns: A length up to which it suffices to look where groups and others are together; None means no such length.
        points_max: The most lengths.
        at_ns: Looks at this length alone.

    Returns:
        None where no two streams are in a group, or there would be too many lengths.
    """
    others = list(rest)
    bounds: list[Bound] = []
    for members in grouped(streams):
        group = [streams[index] for index in members]
        bound = bound_of(group) if len(group) > 1 else None
        if bound is None:
            others += group  # A phase alone has no use.
        else:
            bounds.append(bound)
    if not bounds:
        return None
    if at_ns is not None:
        lengths = np.array([at_ns], np.int64)
    else:
        # A group repeats: what holds for one period after its longest deadline holds from then on.
        until_ns = busy_ns if others or len(bounds) > 1 else bounds[0].repeats_ns + bounds[0].period_ns
        if until_ns is None:
            return None
        count = sum(bound.count(until_ns) for bound in bounds)
        count += sum(max(0, until_ns - _first_ns(s)) // s.period_ns + 1 for s in others)
        if count > points_max:
            return None
        parts = [bound.points(until_ns) for bound in bounds]
        parts += [np.arange(_first_ns(s), until_ns + 1, s.period_ns, dtype=np.int64) for s in others]
        lengths = np.unique(np.concatenate(parts))
    demand = np.zeros_like(lengths)
    blocking = np.full_like(lengths, lower_ns)
    for stream in others:
        first_ns = _first_ns(stream)
        frames = np.maximum((lengths - first_ns) // stream.period_ns + 1, 0)
        demand += frames * stream.duration_ns
        blocking = np.maximum(blocking, np.where(lengths < first_ns, stream.piece_ns, 0))
    for bound in bounds:
        own, with_piece = bound.at(lengths)
        demand += own
        blocking = np.maximum(blocking, with_piece - own)
    return lengths, demand, blocking


def _first_ns(stream: Windows) -> int:
    return stream.deadline_ns - stream.width_ns
