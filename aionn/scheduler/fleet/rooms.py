"""The room that the slots of a fleet have left, in arrays: one look finds all nodes that may take a stream.

Owns a necessary condition of the whole test of a link and a slot, for all slots together: the share of the slot, the first frames
of its streams beside those of the new one, and the link. Pure.

Invariants:
1. A node that the whole test would take is found by a look; one that is found may fail the test.
2. A look takes some dozens of array operations over at most ``ROWS_MAX`` slots, and no step of Python for each of them. Those over
   the first frames of the streams cover the best slots first, and more of them only where more nodes are requested.
3. A node that is not offered is not found.

Source: the demand of streams that begin together, as in ``aionn.scheduler.admission``, at the deadlines of their first frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.scheduler.admission import CAP_PPM, SHARE_PPM, Demand, SlotCost, StreamTerms
from aionn.scheduler.fleet.candidates import Group
from aionn.scheduler.fleet.transfer import LinkLoad, NodeLink

__all__ = ["Found", "Rooms"]

ROWS_MAX = 4096
"""Most slots that one look covers: some hundred microseconds. In a larger fleet the next look covers the next ones."""

ROWS_AT_FIRST = 64
"""Slots whose first frames are looked at together at first; each further time twice as many."""

FRAMES_MAX = 4
"""Frames of each stream that count: most sets of streams that do not fit lack time for one of the first."""

POINTS_MAX = 64
"""Most deadlines of a slot that count: the first frames of sixteen streams. Of a slot with more streams fewer frames count, and
of one with more than this only the share does."""

FAR_NS = 1 << 60
"""Later than all times, and longer than all durations."""

ROUNDING_NS = 4.0
"""More than the error of a sum of times of a link: they are rounded up there, and not here."""

_Rows = npt.NDArray[np.int64]

_COLUMNS = (
    "node",
    "group",
    "cost",
    "can_preempt",
    "is_offered",
    "share_ppm",  # The free share, and a millionth for each stream, whose share was rounded up.
    "free_ppm",
    "latency_ns",
    "jitter_ns",
    "wait_ns",
    "bytes_per_s",
    "burst_up_ns",
    "burst_down_ns",
    "share_up_ppm",
    "share_down_ppm",
)

_TABLES = {
    "points_ns": POINTS_MAX,
    "needs_ns": POINTS_MAX + 1,
    "slacks_ns": POINTS_MAX + 1,
    "borne_ns": POINTS_MAX + 1,
}
"""Of each slot: the deadlines that count, ascending; and for a frame before each of them or behind all: the time of the frames
before it with the longest later piece, the least slack from there on, and the longest piece that makes no frame before it late."""


class Found(NamedTuple):
    """A node that may take a stream.

    Attributes:
        rank: That of its group.
        free_ppm: Its free share.
        node: Its number.
    """

    rank: int
    free_ppm: int
    node: int


class Rooms:
    """See the module.

    Attributes:
        looked_at: Number of nodes that the last look has covered.
        found: Number of nodes that the last look has given so far.
    """

    def __init__(self) -> None:
        self.looked_at = self.found = 0
        self._of_node: list[slice] = []
        self._columns: dict[str, _Rows] = {name: np.zeros(0, np.int64) for name in _COLUMNS}
        self._tables: dict[str, _Rows] = {
            name: np.zeros((0, width), np.int64) for name, width in _TABLES.items()
        }
        self._costs: dict[str, int] = {}
        self._groups: dict[Group, int] = {}
        self._rows = 0
        self._begin = 0

    # --- Nodes ---

    def add(self, group: Group, costs_as: str, link: NodeLink, *, slots: int, can_preempt: bool) -> int:
        """A node joins. It is not offered yet; call ``hold`` for each of its slots first.

        Returns:
            Its number, one more than that of the node before.
        """
        rows = slice(self._rows, self._rows + slots)
        self._rows = rows.stop
        self._grow(rows.stop)
        number = len(self._of_node)
        self._of_node.append(rows)
        values = {
            "node": number,
            "cost": self._costs.setdefault(costs_as, len(self._costs)),
            "can_preempt": can_preempt,
        }
        for name, value in values.items():
            self._columns[name][rows] = value
        self.describe(number, group, link)
        return number

    def describe(self, number: int, group: Group, link: NodeLink) -> None:
        """A node belongs to this group, and is reached by this link, which carries nothing."""
        rows = self._of_node[number]
        values = {
            "group": self._groups.setdefault(group, len(self._groups)),
            "latency_ns": link.latency_ns,
            "jitter_ns": link.jitter_ns,
            "wait_ns": link.wait_ns,
            "bytes_per_s": link.bytes_per_s,
        }
        for name, value in values.items():
            self._columns[name][rows] = value
        self.carry(number, LinkLoad(link))

    def _grow(self, rows: int) -> None:
        size = len(self._columns["node"])
        if rows <= size:
            return
        for arrays in (self._columns, self._tables):
            for name, array in arrays.items():
                more = max(rows, 2 * size) - size
                arrays[name] = np.concatenate((array, np.zeros((more, *array.shape[1:]), np.int64)))

    def offer(self, number: int, free_ppm: int) -> None:
        """A node can be found from now on, those with the largest free share first."""
        self._columns["is_offered"][self._of_node[number]] = 1
        self._columns["free_ppm"][self._of_node[number]] = free_ppm

    def withdraw(self, number: int) -> None:
        """A node is not found any more. Idempotent."""
        self._columns["is_offered"][self._of_node[number]] = 0

    def carry(self, number: int, load: LinkLoad) -> None:
        """The link of a node carries this."""
        rows, columns = self._of_node[number], self._columns
        columns["burst_up_ns"][rows], columns["burst_down_ns"][rows] = load.bursts_ns
        columns["share_up_ppm"][rows], columns["share_down_ppm"][rows] = load.shares_ppm

    def hold(self, number: int, slot: int, held: Sequence[Demand], free_ppm: int) -> None:
        """A slot of a node has these streams."""
        row = self._of_node[number].start + slot
        self._columns["share_ppm"][row] = free_ppm + len(held) + 1
        frames = min(FRAMES_MAX, POINTS_MAX // len(held)) if held else 0
        for name, values in _front(held, frames).items():
            into = self._tables[name][row]
            into[: len(values)] = values
            into[len(values) :] = FAR_NS

    # --- Looks ---

    def look(
        self,
        terms: StreamTerms,
        costs: Mapping[str, SlotCost],
        sizes: tuple[int, int],
        ranks: Mapping[Group, int],
    ) -> Iterator[Found]:
        """The nodes that may take a stream, by the rank of their group and then by free share, the largest first. They are looked
        for as they are requested, and nothing may be changed before the last one that is needed.

        Args:
            terms: Of the stream, at the application.
            costs: The device time of a frame, by the names that nodes were added with.
            sizes: Of the inputs and of the outputs of a frame, in bytes.
            ranks: The groups that are looked at.
        """
        self.found = 0
        if not self._rows:
            return iter(())
        begin = self._begin if self._begin < self._rows else 0
        self._begin = begin + ROWS_MAX
        window = slice(begin, min(begin + ROWS_MAX, self._rows))
        period_ns, columns = terms.period_ns, self._columns
        self.looked_at = int(columns["node"][window.stop - 1] - columns["node"][begin]) + 1
        known = [costs.get(name) for name in self._costs]
        needed_ppm = _table(
            None if cost is None else cost.duration_ns * SHARE_PPM // period_ns for cost in known
        )
        rank_of = np.full(len(self._groups), -1, np.int64)
        for group, rank in ranks.items():
            rank_of[self._groups[group]] = rank
        rows = begin + np.flatnonzero(
            (columns["is_offered"][window] > 0)
            & (columns["share_ppm"][window] >= needed_ppm[columns["cost"][window]])
            & (rank_of[columns["group"][window]] >= 0)
        )
        ranked = rank_of[columns["group"][rows]]
        rows = rows[np.lexsort((rows, -columns["free_ppm"][rows], ranked))]
        return self._in_order(rows, rank_of, lambda some: self._in_time(some, terms, known, sizes))

    def _in_order(self, rows: _Rows, rank_of: _Rows, in_time: Callable[[_Rows], _Rows]) -> Iterator[Found]:
        """The nodes of those of the rows that are in time, each once, in the order of the rows."""
        columns, given = self._columns, set[int]()
        begin, size = 0, ROWS_AT_FIRST
        while begin < rows.size:
            fitting = in_time(rows[begin : begin + size])
            begin, size = begin + size, 2 * size
            ranks = rank_of[columns["group"][fitting]].tolist()
            shares, nodes = columns["free_ppm"][fitting].tolist(), columns["node"][fitting].tolist()
            for one in map(Found, ranks, shares, nodes):
                if one.node not in given:
                    given.add(one.node)
                    self.found += 1
                    yield one

    def _in_time(
        self, rows: _Rows, terms: StreamTerms, known: list[SlotCost | None], sizes: tuple[int, int]
    ) -> _Rows:
        """Those of the rows whose link and first frames leave the time that a stream needs."""
        columns = self._columns
        codes = columns["cost"][rows]
        durations = _table(None if cost is None else cost.duration_ns for cost in known)[codes]
        pieces = _table(None if cost is None else cost.piece_ns for cost in known)[codes]
        pieces = np.where(columns["can_preempt"][rows] > 0, pieces, durations)
        # The least time to its deadline, as in its terms at the node: a link whose wait a transfer exceeds has no room for it.
        waits = np.where(columns["bytes_per_s"][rows] > 0, columns["wait_ns"][rows], 0)
        ways = 2 * (columns["latency_ns"][rows] + columns["jitter_ns"][rows])
        firsts = terms.deadline_ns - terms.jitter_ns - ways - waits * sum(size > 0 for size in sizes)
        for frame in range(FRAMES_MAX):
            fits = self._is_in_time(rows, frame, firsts, durations, pieces, terms.period_ns)
            if frame == 0:
                fits &= self._bears(rows, terms, sizes)
            if not fits.all():
                rows, firsts, durations, pieces = rows[fits], firsts[fits], durations[fits], pieces[fits]
            if not rows.size:
                break
        return rows

    def _is_in_time(
        self, rows: _Rows, frame: int, firsts: _Rows, durations: _Rows, pieces: _Rows, period_ns: int
    ) -> npt.NDArray[np.bool_]:
        """Whether all frames of each slot are in time with those of one more stream up to one of them, from 0 on."""
        tables = self._tables
        times, own = firsts + frame * period_ns, (frame + 1) * durations
        before = (tables["points_ns"][rows] < times[:, None]).sum(axis=1)
        fits: npt.NDArray[np.bool_] = (tables["needs_ns"][rows, before] + own <= times) & (
            tables["slacks_ns"][rows, before] >= own
        )
        if frame == 0:
            fits &= pieces <= tables["borne_ns"][rows, before]
        return fits

    def _bears(self, rows: _Rows, terms: StreamTerms, sizes: tuple[int, int]) -> npt.NDArray[np.bool_]:
        """Whether the way of each link leaves a part of the deadline, and the link has room."""
        columns = self._columns
        rates = columns["bytes_per_s"][rows]
        is_limited = rates > 0
        ns_per_byte = np.where(is_limited, 1e9 / np.maximum(rates, 1), 0.0)
        up, down = (size * ns_per_byte for size in sizes)
        latencies, jitters = columns["latency_ns"][rows], columns["jitter_ns"][rows]
        waits = np.where(is_limited, columns["wait_ns"][rows], 0)
        back = latencies + jitters + (waits if sizes[1] else 0)
        deadlines = terms.deadline_ns - latencies - up - back
        varies = jitters + (np.maximum(0.0, waits - up) if sizes[0] else 0.0)
        fits: npt.NDArray[np.bool_] = terms.jitter_ns + varies < deadlines + ROUNDING_NS
        for own, spread, burst, share in (
            (up, float(terms.jitter_ns), "burst_up_ns", "share_up_ppm"),
            (down, deadlines, "burst_down_ns", "share_down_ppm"),
        ):
            bursts = columns[burst][rows] + own + own * (spread / terms.period_ns)
            shares = columns[share][rows] + own * (SHARE_PPM / terms.period_ns)
            has_room = (bursts <= columns["wait_ns"][rows] + ROUNDING_NS) & (shares <= CAP_PPM + 1)
            fits &= has_room | ~is_limited
        return fits


def _table(values: Iterable[int | None]) -> _Rows:
    """An array of values, ``FAR_NS`` for None."""
    return np.array([FAR_NS if value is None else min(value, FAR_NS) for value in values], np.int64)


def _front(held: Sequence[Demand], frames: int) -> dict[str, _Rows]:
    """The values of a slot in each table, for so many frames of each of its streams."""
    if not frames:
        nothing, far = np.zeros(1, np.int64), np.array([FAR_NS])
        return {"points_ns": far, "needs_ns": nothing, "slacks_ns": far, "borne_ns": far}
    rows = np.array(
        [(d.first_ns, d.terms.period_ns, d.cost.duration_ns, d.cost.piece_ns) for d in held], np.int64
    )
    points = (rows[:, :1] + rows[:, 1:2] * np.arange(frames)).ravel()
    durations = np.repeat(rows[:, 2], frames)
    pieces = np.zeros_like(points)
    pieces[::frames] = rows[:, 3]  # A stream delays others until its first deadline.
    order = np.argsort(points, kind="stable")
    points = points[order]
    sums = np.concatenate(([0], np.cumsum(durations[order])))
    later = np.append(np.maximum.accumulate(pieces[order][::-1])[::-1], 0)
    left = points - sums[1:]
    slacks = np.append(np.minimum.accumulate((left - later[1:])[::-1])[::-1], FAR_NS)
    borne = np.concatenate(([FAR_NS], np.minimum.accumulate(left)))
    return {"points_ns": points, "needs_ns": sums + later, "slacks_ns": slacks, "borne_ns": borne}
