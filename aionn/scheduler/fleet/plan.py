"""The plan of a fleet: the node of each stream, moves when a node is lost or drains, and the reason where a stream has no place.

Owns which node is asked, and the ledger of each. The test is that of ``aionn.scheduler.admission``, with the transfer in the
terms; the plan is one application's, as the ledgers of devices of nodes are. Pure: ``now`` is an argument, nothing waits.

Invariants:
1. The streams of each node's slots pass the admission test together, and its link bears their frames.
2. A decision looks once at the room of all slots (``aionn.scheduler.fleet.rooms``), and tests those of at most ``TESTS_MAX`` nodes,
   however many there are; a refusal may therefore overlook a node.
3. A stream has at most one place. On a node that is lost it has none; on one that drains it keeps its place until another has
   admitted it.
4. A call that raises changes nothing.

Source: partitioned scheduling, each stream on the node with the most room (worst fit); those of a lost node by falling share
(Lopez et al. 2004).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.hal import duration_text
from aionn.scheduler.admission import CAP_PPM, SHARE_PPM, Piece, SlotCost, StreamTerms
from aionn.scheduler.fleet.candidates import Candidates, Group
from aionn.scheduler.fleet.rooms import Found, Rooms
from aionn.scheduler.fleet.transfer import LinkLoad, NodeLink, Way
from aionn.scheduler.ledger import Ledger, ReservableSlot, Reservation
from aionn.scheduler.reservations.offers import offers_text

__all__ = ["FleetNode", "FleetPlan", "FleetStream", "Moves", "NodeState", "Place"]

TESTS_MAX = 16
"""Most nodes whose slots one decision tests: each takes some 100 microseconds, and nearly all that a look finds pass."""

TESTS_PER_GROUP_MAX = 2
"""Most of them that are alike while the quickest are tried: the emptiest has the most room."""

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

    def __init__(self, node: FleetNode, rooms: Rooms) -> None:
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
        self._rooms = rooms
        self.number = rooms.add(
            self.group, self.costs_as, node.link, slots=node.slots, can_preempt=node.can_preempt
        )
        for slot in range(node.slots):
            self.changed(slot)

    def describe(self, kind: str, link: NodeLink) -> None:
        """Its devices are of this kind, and it is reached by this link. Only without streams."""
        assert not self.streams, "their ways are those of the link before"
        self.node = msgspec.structs.replace(self.node, kind=kind, costs_as=self.costs_as, link=link)
        self.group = Group.of(kind, link)
        self.load = LinkLoad(link)
        self._rooms.describe(self.number, self.group, link)

    def costs(self, stream: FleetStream) -> dict[int, SlotCost]:
        """By slot, the emptiest first."""
        cost = stream.costs[self.costs_as]
        return dict.fromkeys(sorted(range(self.node.slots), key=lambda slot: -self.free_ppm[slot]), cost)

    def changed(self, slot: int) -> None:
        held = [reservation.demand for reservation in self.ledger.reservations(slot)]
        self.free_ppm[slot] = self.node.cap_ppm - sum(demand.share_ppm for demand in held)
        self._rooms.hold(self.number, slot, held, self.free_ppm[slot])


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
        self._in_order: list[_Node] = []  # By number.
        self._candidates = Candidates()
        self._rooms = Rooms()
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
        self._nodes[node.name] = held = _Node(node, self._rooms)
        self._in_order.append(held)
        self._note_costs(held)
        self._offer(held)

    def _note_costs(self, node: _Node) -> None:
        if node.costs_as != node.node.kind:
            self._mixed.add(node.group)

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
        self._rooms.carry(node.number, node.load)
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

    def restore(self, name: str, *, kind: str | None = None, link: NodeLink | None = None) -> None:
        """A node is back; it has no streams of before unless it was draining.

        Args:
            name: The node.
            kind: The kind of its devices now; None where that is the same.
            link: The network to it now; None where that is the same. A node that has streams keeps the link and the kind of their
                admission.
        """
        node = self._node(name)
        if self._enters(node, "restore"):
            if not node.streams and (kind is not None or link is not None):
                node.describe(kind or node.node.kind, link or node.node.link)
                self._note_costs(node)
            self._offer(node)

    def _enters(self, node: _Node, event: str) -> bool:
        state = _NEXT.get((node.state, event))
        if state is None:
            return False
        node.state = state
        self._withdraw(node)
        return True

    def _offer(self, node: _Node) -> None:
        if node.state is NodeState.UP:
            slot_ppm = max(node.free_ppm)
            free_ppm = min(slot_ppm, node.load.free_ppm)
            self._candidates.offer(node.node.name, node.group, free_ppm, slot_ppm)
            self._rooms.offer(node.number, free_ppm)

    def _withdraw(self, node: _Node) -> None:
        self._candidates.withdraw(node.node.name)
        self._rooms.withdraw(node.number)

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
        self._rooms.carry(node.number, node.load)
        del node.streams[name]
        node.changed(place.reservation.slot)
        self._offer(node)
        return place

    def _take(self, stream: FleetStream, place: Place) -> None:
        node = self._nodes[place.node]
        node.streams[stream.terms.name] = stream
        node.load.add(place.way, place.reservation.terms)
        self._rooms.carry(node.number, node.load)
        self._places[stream.terms.name] = place
        self._offer(node)

    def _found(self, stream: FleetStream, now_ns: int, without: Collection[str] = ()) -> Place:
        """A new reservation on the first node that takes a stream."""
        held_back = [self._node(name) for name in without]
        for node in held_back:
            self._withdraw(node)
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
        # The emptiest of the quickest: it mostly takes the stream, and states what is missing where no node does.
        closest = self._nodes[self._emptiest(groups, stream)]
        place = self._tested(closest, stream, now_ns)
        if place is not None:
            return place
        ranks = {group: rank for rank, group in enumerate(groups)}
        found = self._rooms.look(stream.terms, stream.costs, (stream.up_bytes, stream.down_bytes), ranks)
        tried = 0
        for node in self._chosen(found):
            tried += 1
            if node is not closest:
                place = self._tested(node, stream, now_ns)
                if place is not None:
                    return place
        looked_at = min(self._rooms.looked_at, len(self._candidates))
        raise self._refusal(stream, closest, looked_at - (self._rooms.found - tried), now_ns)

    def _emptiest(self, groups: list[Group], stream: FleetStream) -> str:
        """The emptiest node of the first group that may have the share of a stream free; of the first, if none has."""
        group = next((group for group in groups if self._has_share(group, stream)), groups[0])
        name = self._candidates.emptiest(group)
        assert name is not None, "groups have a node"
        return name

    def _has_share(self, group: Group, stream: FleetStream) -> bool:
        if group in self._mixed:
            return True
        share_ns = self._candidates.slot_ppm(group) * stream.terms.period_ns
        return stream.costs[group.kind].duration_ns * SHARE_PPM <= share_ns

    def _chosen(self, found: Iterable[Found]) -> Iterator[_Node]:
        """The nodes to be tested: the emptiest of the quickest groups for half of the tests, so that frames go short ways; then the
        emptiest of all, so that a fleet is used whatever its size.

        Args:
            found: Those that a look has found, the quickest groups first.
        """
        of_group: Counter[int] = Counter()
        left = []
        for one in found:
            if self.tests < TESTS_MAX // 2 and of_group[one.rank] < TESTS_PER_GROUP_MAX:
                of_group[one.rank] += 1
                yield self._in_order[one.node]
            else:
                left.append(one)
        for one in sorted(left, key=lambda one: -one.free_ppm):
            if self.tests >= TESTS_MAX:
                break
            yield self._in_order[one.node]

    def _order(self, stream: FleetStream) -> list[tuple[int, Group]]:
        """The groups that can run a stream, those with the shortest way and execution first."""
        return sorted(
            (group.least_ns(stream.up_bytes, stream.down_bytes) + cost.duration_ns, group)
            for group in self._candidates.groups
            if (cost := stream.costs.get(group.kind)) is not None
        )

    def _tested(self, node: _Node, stream: FleetStream, now_ns: int) -> Place | None:
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
