"""The plan of a fleet: the node of each stream, moves when a node is lost or drains, and the reason where a stream has no place.

Owns which node is asked, and the ledger of each. The test is that of ``aionn.scheduler.admission``, with the transfer in the
terms; the plan is one application's, as the ledgers of devices of nodes are. Pure: ``now`` is an argument, nothing waits.

Invariants:
1. The streams of each node's slots pass the admission test together, and its link bears their frames.
2. A decision looks at no more than ``LOOKS_MAX`` nodes, and tests the slots of at most ``TESTS_MAX``, however many there
   are; a refusal may therefore overlook a node.
3. A stream has at most one place. On a node that is lost it has none; on one that drains it keeps its place until another has
   admitted it.
4. A call that raises changes nothing.

Source: partitioned scheduling, each stream on the node with the most room (worst fit); those of a lost node by falling share
(Lopez et al. 2004).
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.hal import duration_text
from aionn.scheduler.admission import CAP_PPM, DAY_NS, SHARE_PPM, Piece, SlotCost, StreamTerms
from aionn.scheduler.fleet.candidates import Candidates, Group, Walk
from aionn.scheduler.fleet.transfer import LinkLoad, NodeLink, Way
from aionn.scheduler.ledger import Ledger, ReservableSlot, Reservation
from aionn.scheduler.reservations.offers import offers_text

__all__ = ["FleetNode", "FleetPlan", "FleetStream", "Moves", "NodeState", "Place"]

TESTS_MAX = 16
"""Most nodes whose slots one decision tests: each takes some 100 microseconds, and the first has the most room of all that are
alike."""

TESTS_PER_GROUP_MAX = 2
"""Most of them that are alike while the quickest are tried: the emptiest has the most room."""

LOOKS_MAX = 256
"""Most nodes whose link and free share one decision looks at: each takes some ten microseconds, and those that have no room there
use up no test."""

LOOKS_PER_GROUP_MAX = 4
"""Most of them that are alike while the quickest are tried, as for tests."""

SLOTS_MAX = 64
"""Most slots of a node's device."""


class NodeState(enum.Enum):
    """Whether a node gets streams."""

    UP = "up"
    DRAINING = "draining"
    LOST = "lost"


_NEXT: dict[tuple[NodeState, str], NodeState] = {
    (NodeState.UP, "drain"): NodeState.DRAINING,
    (NodeState.UP, "lose"): NodeState.LOST,
    (NodeState.DRAINING, "lose"): NodeState.LOST,
    (NodeState.DRAINING, "restore"): NodeState.UP,
    (NodeState.LOST, "restore"): NodeState.UP,
}
"""The state after an event; others leave it as it is."""


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a node, as the plan sees it.

    Attributes:
        name: As ``edge1/npu``.
        kind: Names the devices that take equally long for a frame.
        slots: Its device slots.
        link: The network between.
        can_preempt: Whether the device stops at boundaries.
        cap_ppm: The share of a slot that may be reserved, in millionths.
        lower: The longest pieces of best-effort jobs that each slot may run.
        costs_as: Names its costs in those of streams, where they are not exactly those of the kind; empty for the kind.
    """

    name: str
    kind: str
    slots: int = 1
    link: NodeLink = NodeLink()
    can_preempt: bool = True
    cap_ppm: int = CAP_PPM
    lower: tuple[Piece, ...] = ()
    costs_as: str = ""


class FleetStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that asks for a place.

    Attributes:
        terms: From a frame's capture to its outputs at the application; the name is the stream's in the plan.
        costs: The device time of a frame by kind of device, and by ``FleetNode.costs_as``; kinds that cannot run it are absent.
        up_bytes: Size of a frame's inputs.
        down_bytes: Size of its outputs.
    """

    terms: StreamTerms
    costs: Mapping[str, SlotCost]
    up_bytes: int = 0
    down_bytes: int = 0


class Place(NamedTuple):
    """The place of a stream.

    Attributes:
        node: Name of the node.
        reservation: The time on one of its slots, with the terms at the node.
        way: The way of its frames.
    """

    node: str
    reservation: Reservation
    way: Way


class Moves(NamedTuple):
    """The streams that a node had.

    Attributes:
        placed: Their new places by name, in the order of the decisions.
        refused: The reasons of those that have none.
    """

    placed: dict[str, Place]
    refused: dict[str, NotAdmitted]


class _Node:
    """A node with its ledger; ``streams`` has the streams by name."""

    def __init__(self, node: FleetNode) -> None:
        self.node = node
        self.group = Group.of(node.kind, node.link)
        self.costs_as = node.costs_as or node.kind
        self.state = NodeState.UP
        self.ledger = Ledger(
            [ReservableSlot(f"{node.name}/{n}", node.can_preempt, node.cap_ppm) for n in range(node.slots)]
        )
        for slot in range(node.slots):
            for piece in node.lower:
                self.ledger.allow_lower(slot, piece.name, piece.duration_ns)
        self.load = LinkLoad(node.link)
        self.streams: dict[str, FleetStream] = {}
        self.free_ppm = [node.cap_ppm] * node.slots
        self.fronts = [_Front([]) for _ in range(node.slots)]
        link = node.link
        self._latencies_ns = 2 * (link.latency_ns + link.jitter_ns)
        self._wait_ns = link.wait_ns if link.bytes_per_s else 0

    def costs(self, stream: FleetStream) -> dict[int, SlotCost]:
        """By slot, the emptiest first."""
        cost = stream.costs[self.costs_as]
        return dict.fromkeys(sorted(range(self.node.slots), key=lambda slot: -self.free_ppm[slot]), cost)

    def changed(self, slot: int) -> None:
        self.free_ppm[slot] = self.node.cap_ppm - self.ledger.share_ppm(slot)
        self.fronts[slot] = _Front(
            (held.demand.first_ns, held.cost.duration_ns, held.cost.piece_ns)
            for held in self.ledger.reservations(slot)
        )

    def may_take(self, stream: FleetStream) -> bool:
        """Whether way, link, share and time are free for a stream, with one frame of each; where they are not, the test would fail.
        Most nodes of a full fleet end here, so nothing is made for it."""
        terms, cost, node = stream.terms, stream.costs[self.costs_as], self.node
        duration_ns, period_ns = cost.duration_ns, terms.period_ns
        if duration_ns * SHARE_PPM > max(self.free_ppm) * period_ns:
            return False
        # The least time to its deadline, as in its terms at the node: a link whose wait a transfer exceeds has no room for it.
        waits_ns = self._wait_ns * ((stream.up_bytes > 0) + (stream.down_bytes > 0))
        first_ns = terms.deadline_ns - terms.jitter_ns - self._latencies_ns - waits_ns
        piece_ns = cost.piece_ns if node.can_preempt else duration_ns
        share_ppm = -(-duration_ns * SHARE_PPM // period_ns)
        for free_ppm, front in zip(self.free_ppm, self.fronts, strict=True):
            if share_ppm <= free_ppm and front.is_in_time_with(first_ns, duration_ns, piece_ns):
                break
        else:
            return False
        way = Way.over(node.link, stream.up_bytes, stream.down_bytes)
        times_ns = way.times_ns(terms)
        return times_ns is not None and self.load.bears(way, period_ns, *times_ns)


class _Front:
    """The first frames of a slot's streams, if all of these begin together: each has to end by its time, behind the longest piece
    of those with more time.

    Args:
        frames: Of each stream, the least time to its deadline, its duration and its piece.
    """

    __slots__ = ("_blocked_ns", "_firsts_ns", "_later_ns", "_needs_ns", "_slacks_ns")

    def __init__(self, frames: Iterable[tuple[int, int, int]]) -> None:
        ordered = sorted(frames)
        count = len(ordered)
        self._firsts_ns = [first_ns for first_ns, _, _ in ordered]
        self._needs_ns = list(itertools.accumulate((duration_ns for _, duration_ns, _ in ordered), initial=0))
        # Up to each: the longest piece after it that all can wait for.
        left_ns = (
            first_ns - need_ns for first_ns, need_ns in zip(self._firsts_ns, self._needs_ns[1:], strict=True)
        )
        self._blocked_ns = list(itertools.accumulate(left_ns, min, initial=DAY_NS))
        # From each on: the longest piece, and the least time that is left behind the frames up to it and the pieces after it.
        self._later_ns = [0] * (count + 1)
        for index in range(count - 1, -1, -1):
            self._later_ns[index] = max(self._later_ns[index + 1], ordered[index][2])
        self._slacks_ns = [DAY_NS] * (count + 1)
        for index in range(count - 1, -1, -1):
            slack_ns = self._firsts_ns[index] - self._needs_ns[index + 1] - self._later_ns[index + 1]
            self._slacks_ns[index] = min(self._slacks_ns[index + 1], slack_ns)

    def is_in_time_with(self, first_ns: int, duration_ns: int, piece_ns: int) -> bool:
        """Whether all are in time with the frame of one more stream."""
        index = bisect.bisect_left(self._firsts_ns, first_ns)
        if self._needs_ns[index] + duration_ns + self._later_ns[index] > first_ns:
            return False
        if self._slacks_ns[index] < duration_ns:
            return False
        return piece_ns <= self._blocked_ns[index]


def _push(heap: list[tuple[int, int]], index: int, walk: Walk) -> None:
    """Puts a walk that has a next node on the heap, by its free share and its place in the order."""
    if (free_ppm := walk.free_ppm) is not None:
        heapq.heappush(heap, (-free_ppm, index))


class FleetPlan:
    """See the module.

    Args:
        nodes: The nodes; more can be added.

    Attributes:
        tests: Number of nodes whose slots the last decision has tested.
    """

    def __init__(self, nodes: Iterable[FleetNode] = ()) -> None:
        self._nodes: dict[str, _Node] = {}
        self._places: dict[str, Place] = {}
        self._candidates = Candidates()
        self._mixed: set[Group] = set()  # Those with nodes whose costs are not exactly those of their kind.
        self.tests = 0
        for node in nodes:
            self.add(node)

    # --- Nodes ---

    def add(self, node: FleetNode) -> None:
        """A node joins.

        Raises:
            InvalidArgument: Another one has its name, or a number is out of range.
        """
        if node.name in self._nodes:
            raise InvalidArgument(f"fleet: expected different names of nodes, got {node.name!r} again")
        if not 1 <= node.slots <= SLOTS_MAX:
            raise InvalidArgument(f"fleet, {node.name}: expected 1 to {SLOTS_MAX} slots, got {node.slots}")
        self._nodes[node.name] = held = _Node(node)
        if held.costs_as != node.kind:
            self._mixed.add(held.group)
        self._offer(held)

    def state(self, name: str) -> NodeState:
        """The state of a node."""
        return self._node(name).state

    def lose(self, name: str, *, now_ns: int) -> Moves:
        """A node is lost: its streams are admitted anew, elsewhere. Nothing is placed there until ``restore``."""
        node = self._node(name)
        if not self._enters(node, "lose"):
            return Moves({}, {})
        streams = self._by_falling_share(node)
        for slot in range(node.node.slots):
            node.ledger.withdraw(slot)
            node.ledger.restore(slot)
            node.changed(slot)
        node.load.clear()
        node.streams.clear()
        for stream in streams:
            del self._places[stream.terms.name]
        moves = Moves({}, {})
        for stream in streams:
            try:
                moves.placed[stream.terms.name] = self.place(stream, now_ns=now_ns)
            except NotAdmitted as e:
                moves.refused[stream.terms.name] = e
        return moves

    def drain(self, name: str, *, now_ns: int) -> Moves:
        """A node gets no further streams; those that it has are admitted elsewhere, or stay until it is lost or they end."""
        node = self._node(name)
        if not self._enters(node, "drain"):
            return Moves({}, {})
        moves = Moves({}, {})
        for stream in self._by_falling_share(node):
            own = stream.terms.name
            try:
                place = self._found(stream, now_ns)
            except NotAdmitted as e:
                moves.refused[own] = e
                continue
            self.release(own)
            self._take(stream, place)
            moves.placed[own] = place
        return moves

    def restore(self, name: str) -> None:
        """A node is back; it has no streams of before unless it was draining."""
        node = self._node(name)
        if self._enters(node, "restore"):
            self._offer(node)

    def _enters(self, node: _Node, event: str) -> bool:
        state = _NEXT.get((node.state, event))
        if state is None:
            return False
        node.state = state
        self._candidates.withdraw(node.node.name)
        return True

    def _offer(self, node: _Node) -> None:
        if node.state is NodeState.UP:
            slot_ppm = max(node.free_ppm)
            self._candidates.offer(node.node.name, node.group, min(slot_ppm, node.load.free_ppm), slot_ppm)

    def _by_falling_share(self, node: _Node) -> list[FleetStream]:
        shares = {name: self._places[name].reservation.demand.share_ppm for name in node.streams}
        return [node.streams[name] for name in sorted(shares, key=lambda name: (-shares[name], name))]

    def _node(self, name: str) -> _Node:
        try:
            return self._nodes[name]
        except KeyError:
            raise InvalidArgument(f"fleet: there is no node {name!r}") from None

    # --- Streams ---

    @property
    def places(self) -> Mapping[str, Place]:
        """The places of all streams, by name."""
        return self._places

    def streams(self, name: str) -> tuple[str, ...]:
        """The names of the streams of a node, in the order of their admission."""
        return tuple(self._node(name).streams)

    def place(self, stream: FleetStream, *, now_ns: int, without: Collection[str] = ()) -> Place:
        """Reserves time for a stream on a node.

        Args:
            stream: The stream.
            now_ns: The time.
            without: Nodes that are not looked at, such as those whose own ledgers have refused it.

        Raises:
            NotAdmitted: None of the nodes that were tested has room, with the reason and what would fit on the closest.
            InvalidArgument: A stream of this name has a place, or it has a phase.
        """
        name = stream.terms.name
        if name in self._places:
            raise InvalidArgument(f'fleet: stream "{name}" has a place on {self._places[name].node}')
        if stream.terms.phase_ns is not None:
            raise InvalidArgument(
                f'fleet, stream "{name}": expected no phase: the times of its frames at a node are not known'
            )
        place = self._found(stream, now_ns, without)
        self._take(stream, place)
        return place

    def release(self, name: str) -> Place | None:
        """Ends the reservation of a stream; None where it has none. The caller sees to it that none of its frames is in
        progress."""
        place = self._places.pop(name, None)
        if place is None:
            return None
        node = self._nodes[place.node]
        node.ledger.release(place.reservation.number)
        node.load.remove(place.way, place.reservation.terms)
        del node.streams[name]
        node.changed(place.reservation.slot)
        self._offer(node)
        return place

    def _take(self, stream: FleetStream, place: Place) -> None:
        node = self._nodes[place.node]
        node.streams[stream.terms.name] = stream
        node.load.add(place.way, place.reservation.terms)
        self._places[stream.terms.name] = place
        self._offer(node)

    def _found(self, stream: FleetStream, now_ns: int, without: Collection[str] = ()) -> Place:
        """A new reservation on the first node that takes a stream."""
        held_back = [self._node(name) for name in without]
        for node in held_back:
            self._candidates.withdraw(node.node.name)
        try:
            return self._found_among_candidates(stream, now_ns)
        finally:
            for node in held_back:
                self._offer(node)

    def _found_among_candidates(self, stream: FleetStream, now_ns: int) -> Place:
        order = self._order(stream)
        self.tests = 0
        if not order or order[0][0] > stream.terms.deadline_ns:
            raise self._unreachable(stream, order)
        groups = [group for least_ns, group in order if least_ns <= stream.terms.deadline_ns]
        asked: list[_Node] = []
        is_first_tested = False
        for node in self._chosen([group for group in groups if self._has_share(group, stream)]):
            asked.append(node)
            place = self._tested(node, stream, now_ns)
            is_first_tested |= len(asked) == 1 and self.tests == 1
            if place is not None:
                return place
        if not asked:
            name = self._candidates.walk(groups[0]).next()
            assert name is not None, "groups have a node"
            asked.append(self._nodes[name])
        # Its free share may be too small by rounding alone; and it states what is missing.
        if not is_first_tested:
            place = self._tested(asked[0], stream, now_ns, looks=False)
            if place is not None:
                return place
        raise self._refusal(stream, asked[0], len(asked), now_ns)

    def _has_share(self, group: Group, stream: FleetStream) -> bool:
        """Whether a node of a group may have the share of a stream free. In a full fleet most groups end here, without a look."""
        if group in self._mixed:
            return True
        share_ns = self._candidates.slot_ppm(group) * stream.terms.period_ns
        return stream.costs[group.kind].duration_ns * SHARE_PPM <= share_ns

    def _chosen(self, groups: list[Group]) -> Iterator[_Node]:
        """The nodes to be looked at: the emptiest of the quickest groups for half of the looks and tests, so that frames go short
        ways; then the emptiest of all, so that a fleet is used whatever its size.

        Args:
            groups: The groups, the quickest first.
        """
        looks = 0
        walks: list[Walk] = []
        for group in groups:
            if looks >= LOOKS_MAX // 2 or self.tests >= TESTS_MAX // 2:
                break
            walk = self._candidates.walk(group)
            walks.append(walk)
            before = self.tests
            for _ in range(LOOKS_PER_GROUP_MAX):
                if looks >= LOOKS_MAX // 2 or self.tests >= min(before + TESTS_PER_GROUP_MAX, TESTS_MAX // 2):
                    break
                if (name := walk.next()) is None:
                    break
                looks += 1
                yield self._nodes[name]
        walks += (self._candidates.walk(group) for group in groups[len(walks) :])
        heap: list[tuple[int, int]] = []
        for index, walk in enumerate(walks):
            _push(heap, index, walk)
        while heap and looks < LOOKS_MAX and self.tests < TESTS_MAX - 1:
            index = heapq.heappop(heap)[1]
            name = walks[index].next()
            assert name is not None, "walks on the heap have a node"
            looks += 1
            yield self._nodes[name]
            _push(heap, index, walks[index])

    def _order(self, stream: FleetStream) -> list[tuple[int, Group]]:
        """The groups that can run a stream, those with the shortest way and execution first."""
        return sorted(
            (group.least_ns(stream.up_bytes, stream.down_bytes) + cost.duration_ns, group)
            for group in self._candidates.groups
            if (cost := stream.costs.get(group.kind)) is not None
        )

    def _tested(self, node: _Node, stream: FleetStream, now_ns: int, *, looks: bool = True) -> Place | None:
        if looks and not node.may_take(stream):
            return None
        way = Way.over(node.node.link, stream.up_bytes, stream.down_bytes)
        terms = way.terms(stream.terms)
        if terms is None or not node.load.has_room(way, terms):
            return None
        self.tests += 1
        costs = node.costs(stream)
        slot = node.ledger.slot_that_fits(terms, costs)
        if slot is None:
            return None
        reservation = node.ledger.admit(terms, {slot: costs[slot]}, now_ns=now_ns)
        node.changed(slot)
        return Place(node.node.name, reservation, way)

    # --- Refusals ---

    def _unreachable(self, stream: FleetStream, order: list[tuple[int, Group]]) -> NotAdmitted:
        name = stream.terms.name
        if not order:
            kinds = ", ".join(sorted(stream.costs)) or "none"
            return NotAdmitted(f'stream "{name}": no node is up whose device can run it ({kinds})')
        least, most = duration_text(order[0][0]), duration_text(stream.terms.deadline_ns)
        return NotAdmitted(
            f'stream "{name}": a frame takes at least {least} with its way over the network, and its deadline is {most}'
        )

    def _refusal(self, stream: FleetStream, closest: _Node, asked: int, now_ns: int) -> NotAdmitted:
        name = stream.terms.name
        way = Way.over(closest.node.link, stream.up_bytes, stream.down_bytes)
        tried = f"{asked} of {len(self._candidates)} nodes were tested"
        terms = way.terms(stream.terms)
        if terms is None:
            lost = duration_text(way.constant_ns + way.varies_ns)
            return NotAdmitted(
                f'stream "{name}" on {closest.node.name}: its way over the network may take {lost}, which with the jitter is the'
                f" whole deadline of {duration_text(stream.terms.deadline_ns)}; {tried}"
            )
        if not closest.load.has_room(way, terms):
            return NotAdmitted(
                f'stream "{name}" on {closest.node.name}: the link has no room: with this stream a frame may wait longer than '
                f"{duration_text(closest.node.link.wait_ns)} to be sent, or it would be used for more than"
                f" {CAP_PPM / SHARE_PPM:.0%}; {tried}"
            )
        try:
            reservation = closest.ledger.admit(terms, closest.costs(stream), now_ns=now_ns)
        except NotAdmitted as e:
            offers = e.would_fit
            if offers.deadline_ns is not None:
                offers = offers._replace(deadline_ns=offers.deadline_ns + way.constant_ns)
            message = f"{e.reason}. {offers_text(offers)}; {tried}."
            return NotAdmitted(message, reason=f"{e.reason}; {tried}", would_fit=offers)
        closest.ledger.release(reservation.number)
        raise AssertionError("the closest node was tested, and has no room")
