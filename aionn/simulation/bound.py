"""An upper bound, which no scheduler can exceed, on the requests that end on time, with all arrivals known beforehand.

Owns the linear program and its lexicographic order over priorities. Time is cut at every release and deadline. ``x[j, i, k]`` is
the time that request j spends on device i in interval k, ``z[j]`` in [0, 1] how much of it is served. The program maximises the
sum of z where a device has no more time than there is, and a request is at no moment on two devices. With whole z this is
preemptive scheduling with free migration; so the rounded-down optimum bounds every schedule without batching.

Invariants:
1. The bound holds for every policy: preemption, migration and knowledge of the future are all allowed to it.
2. Requests that follow others are released no earlier than their forerunners can end, and are served no more than those are.

Source: Lawler and Labetoulle 1978 for unrelated devices; solved by HiGHS as shipped with scipy.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.hal import Priority
from aionn.simulation.engine import Scenario
from aionn.simulation.workload import PRIORITIES

__all__ = ["Bound", "BoundRequest", "fluid_rate", "on_time_bound", "requests_of", "total_bound"]

_ROUNDING = 1e-6
"""Tolerance of a solver's optimum against a whole number, summed over some hundred requests."""


class BoundRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request, as the bound sees it.

    Attributes:
        release_ns: Not before; for one that follows another: not before that could have ended.
        deadline_ns: When it must have ended.
        durations_ns: Per device; None where it cannot run.
        priority: Its class.
        after_index: The request that it follows; None means no such request.
    """

    release_ns: int
    deadline_ns: int
    durations_ns: tuple[int | None, ...]
    priority: Priority
    after_index: int | None = None


class Bound(msgspec.Struct, frozen=True):
    """The most requests that can end on time.

    Attributes:
        by_priority: HIGH alone, then MEDIUM with HIGH at its most, then LOW with both at theirs.
        total: Their sum.
    """

    by_priority: dict[Priority, int]
    total: int


def _scipy() -> Any:
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as e:
        raise DeviceUnavailable("bound: scipy is missing: pip install 'aionn[bound]'") from e
    return scipy


def requests_of(scenario: Scenario) -> list[BoundRequest]:
    """A scenario's requests as the bound sees them: one that follows another comes when that could have ended at the soonest.

    Raises:
        InvalidArgument: A request has no deadline: then nothing bounds how many can end.
    """
    found: list[BoundRequest] = []
    for arrival in scenario.arrivals:
        stream = scenario.workload.stream[arrival.stream_index]
        if arrival.deadline_ns is None:
            raise InvalidArgument(f"bound: stream {stream.name} has no deadline")
        durations = tuple(None if d is None else sum(d) for d in scenario.durations_ns[arrival.stream_index])
        release_ns = arrival.at_ns
        if arrival.after_index is not None:
            before = found[arrival.after_index]
            release_ns = before.release_ns + min(d for d in before.durations_ns if d is not None)
        deadline_ns = max(arrival.deadline_ns, release_ns + 1)
        found.append(
            BoundRequest(release_ns, deadline_ns, durations, PRIORITIES[stream.priority], arrival.after_index)
        )
    return found


def on_time_bound(requests: Sequence[BoundRequest], slots: Sequence[int], *, migrates: bool = True) -> Bound:
    """The most requests that can end on time, HIGH first, then MEDIUM, then LOW.

    Args:
        requests: All of them.
        slots: Number of executions that each device runs concurrently.
        migrates: Whether a request may continue elsewhere with what it has done. Where it may not, no schedule uses a device on
            which a request cannot end in time, and the bound is tighter.

    Raises:
        DeviceUnavailable: scipy is not installed.
    """
    requests = _possible(requests, migrates)
    by_priority: dict[Priority, int] = {}
    fixed: dict[Priority, float] = {}
    for priority in sorted(Priority, reverse=True):
        chosen = [index for index, r in enumerate(requests) if r.priority >= priority]
        if not any(requests[index].priority == priority for index in chosen):
            by_priority[priority] = 0
            continue
        value = _solve(requests, chosen, slots, {priority}, fixed)
        by_priority[priority] = math.floor(value + _ROUNDING * len(requests))
        # The whole number, not the fraction: a schedule that serves it exists or not, but none serves the fraction.
        fixed[priority] = by_priority[priority]
    return Bound(by_priority, sum(by_priority.values()))


def total_bound(
    requests: Sequence[BoundRequest],
    slots: Sequence[int],
    *,
    migrates: bool = True,
    least: Mapping[Priority, int] | None = None,
) -> int:
    """The most requests that can end on time where priorities do not count.

    Args:
        requests: As for ``on_time_bound``.
        slots: As for ``on_time_bound``.
        migrates: As for ``on_time_bound``.
        least: Number of jobs of some priorities that must end on time all the same, no more than can; None means no such condition.

    Raises:
        DeviceUnavailable: scipy is not installed.
    """
    requests = _possible(requests, migrates)
    if not requests:
        return 0
    fixed = {priority: float(count) for priority, count in (least or {}).items()}
    value = _solve(requests, range(len(requests)), slots, set(Priority), fixed)
    return math.floor(value + _ROUNDING * len(requests))


def _possible(requests: Sequence[BoundRequest], migrates: bool) -> list[BoundRequest]:
    """Without what no schedule can serve whole, though the program could serve a part of it."""
    kept: list[BoundRequest] = []
    new_index: dict[int, int] = {}
    for index, request in enumerate(requests):
        window_ns = request.deadline_ns - request.release_ns
        fits = tuple(p if p is not None and p <= window_ns else None for p in request.durations_ns)
        after = request.after_index
        if not any(fits) or (after is not None and after not in new_index):
            continue
        new_index[index] = len(kept)
        kept.append(
            msgspec.structs.replace(
                request,
                durations_ns=request.durations_ns if migrates else fits,
                after_index=None if after is None else new_index[after],
            )
        )
    return kept


def _solve(
    requests: Sequence[BoundRequest],
    chosen: Sequence[int],
    slots: Sequence[int],
    counted: set[Priority],
    fixed: dict[Priority, float],
) -> float:
    """The most requests of the counted priorities, with those above held at their own most."""
    program = _Program()
    cuts = sorted({t for j in chosen for t in (requests[j].release_ns, requests[j].deadline_ns)})
    served = {j: program.variable(1.0, -1.0 if requests[j].priority in counted else 0.0) for j in chosen}
    capacity: dict[tuple[int, int], int] = {}
    kinds: dict[tuple[tuple[int | None, ...], int], tuple[int, int]] = {}
    for j in chosen:
        request = requests[j]
        whole = program.equal()
        program.entry(whole, served[j], -1.0, is_equal=True)
        quickest = min(p for p in request.durations_ns if p is not None)
        first = bisect.bisect_left(cuts, request.release_ns)
        last = bisect.bisect_left(cuts, request.deadline_ns)
        for k in range(first, last):
            length = cuts[k + 1] - cuts[k]
            kind = kinds.get((request.durations_ns, k))
            if kind is None:
                # Requests with equal durations share their device time in an interval.
                kind = kinds[request.durations_ns, k] = (program.equal(), program.at_most(0.0))
                for i, duration in enumerate(request.durations_ns):
                    if duration is None:
                        continue
                    row = capacity.get((i, k))
                    if row is None:
                        row = capacity[i, k] = program.at_most(float(slots[i]))
                    # In units of the interval: keeps the matrix near 1, whatever the times.
                    share = program.variable(math.inf, 0.0)
                    program.entry(row, share, 1.0)
                    program.entry(kind[1], share, 1.0)
                    program.entry(kind[0], share, length / duration, is_equal=True)
            program.limits[kind[1]] += 1.0
            # A request is at one moment on one device at most: the quickest bounds what it gets of the interval.
            part = program.variable(length / quickest, 0.0)
            program.entry(kind[0], part, -1.0, is_equal=True)
            program.entry(whole, part, 1.0, is_equal=True)
    for j in chosen:
        after = requests[j].after_index
        if after is not None and after in served:
            row = program.at_most(0.0)
            program.entry(row, served[j], 1.0)
            program.entry(row, served[after], -1.0)
    for above, value in fixed.items():
        row = program.at_most(-value)
        for j in chosen:
            if requests[j].priority == above:
                program.entry(row, served[j], -1.0)
    return program.solve()


class _Program:
    """A linear program under construction, as triples."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._equal_count = 0
        self._entries: list[tuple[int, int, float]] = []
        self._equal_entries: list[tuple[int, int, float]] = []
        self._upper: list[float] = []
        self._cost: list[float] = []

    def variable(self, upper: float, cost: float) -> int:
        self._upper.append(upper)
        self._cost.append(cost)
        return len(self._cost) - 1

    def at_most(self, limit: float) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1

    def equal(self) -> int:
        self._equal_count += 1
        return self._equal_count - 1

    def entry(self, row: int, column: int, value: float, *, is_equal: bool = False) -> None:
        (self._equal_entries if is_equal else self._entries).append((row, column, value))

    def solve(self) -> float:
        """The largest sum of what is counted."""
        scipy = _scipy()
        width = len(self._cost)

        def matrix(entries: list[tuple[int, int, float]], height: int) -> Any:
            rows, columns, values = zip(*entries, strict=True)
            return scipy.sparse.csr_array((values, (rows, columns)), shape=(height, width))

        solved = scipy.optimize.linprog(
            self._cost,
            A_ub=matrix(self._entries, len(self.limits)),
            b_ub=self.limits,
            A_eq=matrix(self._equal_entries, self._equal_count),
            b_eq=[0.0] * self._equal_count,
            bounds=[(0, upper) for upper in self._upper],
            method=METHOD,
        )
        assert solved.status == 0, f"the program always has the solution 0, and is bounded: {solved.message}"
        return float(-solved.fun)


METHOD = "highs-ipm"


def fluid_rate(
    fixed: Sequence[tuple[float, tuple[int | None, ...]]],
    scaled: Sequence[tuple[float, tuple[int | None, ...]]],
    slots: Sequence[int],
    load: float,
) -> float:
    """By what the rates of some streams must be multiplied for a load: device time per time over what the best division could do.

    Args:
        fixed: Rates per second and durations per device of streams that stay as they are.
        scaled: The same of streams that are scaled.
        slots: Number of executions that each device runs concurrently.
        load: The wanted load; 1 is as much as the devices can do at all.

    Returns:
        The factor; 0 where the fixed streams alone are more than the load.

    Raises:
        DeviceUnavailable: scipy is not installed.
    """
    scipy = _scipy()
    streams = [*((rate, durations, False) for rate, durations in fixed)]
    streams += [(rate, durations, True) for rate, durations in scaled]
    count = 1
    capacity: list[dict[int, float]] = [{} for _ in slots]
    equal: list[dict[int, float]] = []
    wanted: list[float] = []
    for rate, durations, is_scaled in streams:
        row: dict[int, float] = {}
        for i, duration in enumerate(durations):
            if duration is not None:
                row[count] = 1.0
                capacity[i][count] = duration / 1e9
                count += 1
        if is_scaled:
            row[0] = -rate
        equal.append(row)
        wanted.append(0.0 if is_scaled else rate)
    dense_equal = [[row.get(column, 0.0) for column in range(count)] for row in equal]
    dense_capacity = [[row.get(column, 0.0) for column in range(count)] for row in capacity]
    solved = scipy.optimize.linprog(
        [-1.0] + [0.0] * (count - 1),
        A_ub=dense_capacity,
        b_ub=[load * slot_count for slot_count in slots],
        A_eq=dense_equal,
        b_eq=wanted,
        method="highs",
    )
    return float(-solved.fun) if solved.status == 0 else 0.0
