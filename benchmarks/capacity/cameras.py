"""The cameras of a run, and its count: when each frame is due, which frames count, how many were on time. Pure.

All contenders have the same cameras: 30 frames/s with phases that do not depend on their number, and a deadline of one period after
the capture.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "KEPT",
    "PERIOD_NS",
    "Camera",
    "Tally",
    "captures",
    "is_kept",
    "kept_count",
    "largest",
    "make_cameras",
]

PERIOD_NS = 1_000_000_000 // 30
"""Between two captures of a camera, and from a capture to its deadline."""

KEPT = 0.995
"""The share of frames on time from which on a stream counts as kept."""


class Camera(NamedTuple):
    """One camera.

    Attributes:
        model: The index of its model.
        begin_ns: Its first capture.
        count_ns: Captures from then on count: before, processors and caches warm up.
        end_ns: No capture from then on.
    """

    model: int
    begin_ns: int
    count_ns: int
    end_ns: int

    def due_ns(self, index: int) -> int:
        """The time of a capture."""
        return self.begin_ns + index * PERIOD_NS

    def newest(self, now_ns: int, index: int) -> int:
        """The newest frame that was captured, at least ``index``: a camera keeps no older one."""
        return max(index, (now_ns - self.begin_ns) // PERIOD_NS)

    def counts(self, captured_ns: int) -> bool:
        """Whether a frame is counted."""
        return self.count_ns <= captured_ns < self.end_ns

    def counted(self) -> int:
        """The number of frames that are counted."""
        first, end = (-(-(t - self.begin_ns) // PERIOD_NS) for t in (self.count_ns, self.end_ns))
        return end - max(0, first)


class Tally(NamedTuple):
    """The count of one stream.

    Attributes:
        due: Frames that count.
        on_time: Those with a result before their deadline.
        is_admitted: Whether the stream had a guarantee, or none was asked for.
    """

    due: int
    on_time: int
    is_admitted: bool = True


def make_cameras(
    count: int, models: int, begin_ns: int, *, warm_ns: int, seconds: float, first: int = 0
) -> list[Camera]:
    """The cameras of a run, which take the models in turn.

    Args:
        count: Their number.
        models: The number of models.
        begin_ns: When the run begins.
        warm_ns: Time from there until frames count.
        seconds: Time during which frames count.
        first: The number of the first, by which its phase is drawn.
    """
    count_ns = begin_ns + warm_ns
    end_ns = count_ns + round(seconds * 1e9)
    found = []
    for number in range(first, first + count):
        phase_ns = int(random.Random(f"camera/{number}").random() * PERIOD_NS)
        found.append(Camera(number % models, begin_ns + phase_ns, count_ns, end_ns))
    return found


def captures(cameras: Sequence[Camera]) -> Iterator[tuple[int, int]]:
    """``(captured_ns, number of the camera)`` of all frames of all cameras, in the order of time."""
    order = sorted((camera.begin_ns, number) for number, camera in enumerate(cameras))
    index = 0
    while order:
        # All cameras have the same period, so that one turn is as the next.
        for begin_ns, number in order:
            captured_ns = begin_ns + index * PERIOD_NS
            if captured_ns < cameras[number].end_ns:
                yield captured_ns, number
        index += 1
        order = [(b, n) for b, n in order if b + index * PERIOD_NS < cameras[n].end_ns]


def is_kept(tallies: Sequence[Tally]) -> bool:
    """Whether all streams together have ``KEPT`` of their frames on time, and each was admitted."""
    due = sum(tally.due for tally in tallies)
    on_time = sum(tally.on_time for tally in tallies)
    return all(tally.is_admitted for tally in tallies) and on_time >= KEPT * due


def kept_count(tallies: Sequence[Tally]) -> int:
    """The number of streams that have ``KEPT`` of their frames on time."""
    return sum(tally.on_time >= KEPT * tally.due for tally in tallies)


def largest(keeps: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number from 0 to ``most`` for which ``keeps`` is true, if it is true for all below it.

    Doubles the distance from the guess until the limit is between two numbers, then halves. Asks for no number twice.

    Args:
        keeps: Asks for a number from 1 on; 0 is true without asking.
        guess: Where it begins.
        most: The largest number that is asked for.
    """
    low, high = 0, most + 1  # True, or not asked for; false.
    at, step = min(max(1, guess), most), 1
    while high - low > 1:
        if keeps(at):
            low = at
            at = at + step if high > most else (low + high) // 2
        else:
            high = at
            at = at - step if low == 0 else (low + high) // 2
        step *= 2
        # The limit is bracketed once the next number is on the other side of it.
        if not low < at < high:
            at = (low + high) // 2
    return low
