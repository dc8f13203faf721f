"""A fleet in virtual time: streams that ask for places, nodes that die and come back, and every frame on its way there and back.

Owns the drawn fleet, the order of its events, and the links. The decisions are those of ``aionn.scheduler.fleet.plan``, the slots
of each node those of ``Engine`` under the application's policy. A stream starts when it has a place. Captures until a death is
noticed go to the dead node; they are ``withdrawn``, as frames are that the node had.

Invariants:
1. Same numbers of nodes and streams and same seed, same run: no wall clock decides, and the ``timer`` is for figures alone.
2. Each frame that was captured while its stream had a place has one outcome: ``on_time``, ``withdrawn`` or ``lost``.

Source: the links follow ``aionn.testing.SimulatedLink``: transmissions in order, then latency with jitter, in order per stream.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from aionn.drivers.simulated.profiles import (
    PROFILES,
    DeviceProfile,
    operation_durations_ns,
    unsupported_reason,
)
from aionn.errors import NotAdmitted
from aionn.hal import CancelCapability
from aionn.scheduler.admission import SlotCost, StreamTerms
from aionn.scheduler.fleet.plan import FleetNode, FleetPlan, FleetStream, Moves, NodeState, Place
from aionn.scheduler.fleet.transfer import NodeLink
from aionn.scheduler.job import NEVER_NS
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation.core import Core
from aionn.simulation.engine import Engine
from aionn.simulation.reservations import Admission, cost_of
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import READY_MODELS, Arrival, Stream, Workload

__all__ = ["DrawnFleet", "FleetRun", "draw_fleet"]

MS = 1_000_000

KINDS = ("phone-cpu", "phone-cpu", "edge-cpu", "edge-cpu", "phone-dsp", "edge-accelerator")
"""The profiles that nodes are drawn from: most of a fleet are slow machines, and ten streams a node nearly fill it."""

MODELS = (
    "classify-int8",
    "classify-int8",
    "classify-int8",
    "detect-int8",
    "detect-int8",
    "segment-int8",
    "embed-int8",
)
PERIODS_MS = (33, 40, 50, 66, 100, 200)

NOTICED_NS = 200 * MS
"""Time after which a silent node is lost, as in ``aionn.fleet.liveness``."""

DOWN_NS = 300 * MS
"""Time until a node that died is back."""

JOIN_SHARE = 0.25
"""The part of a run in which streams ask for places; nodes die after it."""


class DrawnFleet(NamedTuple):
    """A fleet and the streams that ask for places in it.

    Attributes:
        nodes: The nodes.
        streams: The streams.
        models: By stream, the model.
        costs: By model and kind of device, the durations of its operations.
    """

    nodes: list[FleetNode]
    streams: list[FleetStream]
    models: dict[str, str]
    costs: dict[str, dict[str, tuple[int, ...]]]


def draw_fleet(nodes: int, streams: int, seed: int) -> DrawnFleet:
    """Nodes of several kinds behind links of several qualities, and cameras of several models and rates."""
    source = random.Random(f"fleet/{seed}")
    durations = _durations()
    costs = {
        model: {
            kind: cost for kind, row in by_kind.items() if (cost := cost_of(row, PROFILES[kind])) is not None
        }
        for model, by_kind in durations.items()
    }
    drawn_nodes = [_node(f"n{number}", source) for number in range(nodes)]
    drawn_streams, models = [], {}
    for number in range(streams):
        name, model = f"s{number}", source.choice(MODELS)
        models[name] = model
        drawn_streams.append(_stream(name, costs[model], source))
    return DrawnFleet(drawn_nodes, drawn_streams, models, durations)


def _durations() -> dict[str, dict[str, tuple[int, ...]]]:
    described = {name: READY_MODELS[name].cost(Path()) for name in MODELS}
    return {
        name: {
            kind: operation_durations_ns(PROFILES[kind], cost)
            for kind in dict.fromkeys(KINDS)
            if unsupported_reason(PROFILES[kind], cost) is None
        }
        for name, cost in described.items()
    }


def _node(name: str, source: random.Random) -> FleetNode:
    profile = PROFILES[source.choice(KINDS)]
    link = NodeLink(
        latency_ns=round(0.1 * MS * math.exp(source.uniform(0, math.log(80)))),
        jitter_ns=source.randrange(MS // 20, 2 * MS),
        bytes_per_s=source.choice((60_000_000, 125_000_000, 1_250_000_000)),
        wait_ns=10 * MS,
    )
    can_preempt = profile.cancel != CancelCapability.NONE
    return FleetNode(name=name, kind=profile.name, slots=profile.slots, link=link, can_preempt=can_preempt)


def _stream(name: str, costs: dict[str, SlotCost], source: random.Random) -> FleetStream:
    period_ms = source.choice(PERIODS_MS)
    deadline_ns = round(max(40, period_ms * source.uniform(0.8, 1.5)) * MS)
    terms = StreamTerms(
        name=name,
        period_ns=period_ms * MS,
        deadline_ns=deadline_ns,
        jitter_ns=source.randrange(deadline_ns // 10),
    )
    up_bytes, down_bytes = source.randrange(10_000, 150_000), source.randrange(100, 8_000)
    return FleetStream(terms=terms, costs=costs, up_bytes=up_bytes, down_bytes=down_bytes)


class _Stay(msgspec.Struct):
    """The time of a stream on a node."""

    stream: FleetStream
    place: Place
    from_ns: int
    until_ns: int
    is_ended: bool = False


class _Life(msgspec.Struct):
    """The time from a node's start to its death."""

    stays: list[_Stay]
    death_ns: int = NEVER_NS


class FleetRun:
    """One run of a fleet.

    Args:
        fleet: The nodes and streams.
        span_ns: No frame is captured later.
        seed: Of the times of events, the phases and the jitter.
        deaths: Number of nodes that die.
        timer: Measures decisions, in nanoseconds; None measures nothing.

    Attributes:
        plan: The plan.
        decisions_ns: The time of each decision.
        tests_max: The most nodes that one decision tested.
        refused: The last refusal of each stream that has no place.
        moved: Number of streams that were admitted elsewhere.
        outcomes: Number of frames with each outcome.
        labelled: Number of frames that a node did not count as reserved.
    """

    def __init__(
        self,
        fleet: DrawnFleet,
        *,
        span_ns: int,
        seed: int,
        deaths: int = 0,
        timer: Callable[[], int] | None = None,
    ) -> None:
        self.plan = FleetPlan(fleet.nodes)
        self.decisions_ns: list[int] = []
        self.tests_max = 0
        self.refused: dict[str, NotAdmitted] = {}
        self.moved = 0
        self.outcomes: Counter[str] = Counter()
        self.labelled = 0
        self._fleet = fleet
        self._span_ns = span_ns
        self._seed = seed
        self._timer: Callable[[], int] = _untimed if timer is None else timer
        self._core = Core()
        self._streams = {stream.terms.name: stream for stream in fleet.streams}
        self._nodes = {node.name: node for node in fleet.nodes}
        self._lives: dict[str, list[_Life]] = {node.name: [_Life([])] for node in fleet.nodes}
        self._open: dict[str, _Stay] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}
        source = random.Random(f"run/{seed}")
        joined_ns = round(span_ns * JOIN_SHARE)
        for stream in fleet.streams:
            self._core.at(source.randrange(joined_ns), self._join, stream)
        for name in source.sample(sorted(self._nodes), deaths):
            self._core.at(source.randrange(joined_ns, 2 * joined_ns), self._die, name)

    def run(self) -> None:
        """Plans, and then runs every frame."""
        self.run_plan()
        self.run_frames()

    # --- The plan ---

    def run_plan(self) -> None:
        """All decisions, in the order of their times."""
        self._core.run(self._span_ns)
        for stay in self._open.values():
            stay.until_ns = self._span_ns

    def _join(self, stream: FleetStream) -> None:
        name, now_ns = stream.terms.name, self._core.now_ns
        start = self._timer()
        try:
            place = self.plan.place(stream, now_ns=now_ns)
        except NotAdmitted as e:
            self.refused[name] = e
        else:
            self.refused.pop(name, None)
            self._begin(stream, place)
        self._decided(self._timer() - start, 1)

    def _decided(self, taken_ns: int, count: int) -> None:
        self.decisions_ns += [taken_ns // count] * count
        self.tests_max = max(self.tests_max, self.plan.tests)

    def _begin(self, stream: FleetStream, place: Place) -> None:
        stay = _Stay(stream, place, self._core.now_ns, NEVER_NS)
        self._open[stream.terms.name] = stay
        self._lives[place.node][-1].stays.append(stay)

    def _die(self, name: str) -> None:
        self._lives[name][-1].death_ns = self._core.now_ns
        self._core.after(NOTICED_NS, self._notice, name)

    def _notice(self, name: str) -> None:
        now_ns = self._core.now_ns
        for held in self.plan.streams(name):
            self._open.pop(held).until_ns = now_ns
        start = self._timer()
        moves: Moves = self.plan.lose(name, now_ns=now_ns)
        if count := len(moves.placed) + len(moves.refused):
            self._decided(self._timer() - start, count)
        for moved, place in moves.placed.items():
            self._begin(self._streams[moved], place)
        self.moved += len(moves.placed)
        self.refused.update(moves.refused)
        self._waiting[name] = tuple(moves.refused)
        self._core.after(DOWN_NS - NOTICED_NS, self._return, name)

    def _return(self, name: str) -> None:
        assert self.plan.state(name) is NodeState.LOST, "it died"
        self._lives[name].append(_Life([]))
        self.plan.restore(name)
        # Those that it had: all that wait would be asked again and again by each node that is back.
        for waiting in self._waiting.pop(name, ()):
            if waiting in self.refused:
                self._join(self._streams[waiting])

    # --- The frames ---

    def delay_links(self, links: Sequence[NodeLink]) -> None:
        """Gives the nodes other links than they were planned with, in their order: for a network that is slower than declared."""
        for node, link in zip(self._fleet.nodes, links, strict=True):
            self._nodes[node.name] = msgspec.structs.replace(node, link=link)

    def run_frames(self) -> None:
        """Every frame of every stay, node by node: given the plan, nodes do not affect each other."""
        for name, lives in self._lives.items():
            for number, life in enumerate(lives):
                if life.stays:
                    self._run_life(self._nodes[name], life, random.Random(f"{self._seed}/{name}/{number}"))

    def _run_life(self, node: FleetNode, life: _Life, source: random.Random) -> None:
        frames = list(_sent(life.stays, source))
        arrivals = _over_link(node.link, frames, source)
        order = sorted(range(len(frames)), key=lambda index: (arrivals[index], index))
        engine = self._engine(node, life, [(frames[index], arrivals[index]) for index in order])
        engine.run()
        self.labelled += sum(frame.label is not None for frame in engine.frames.values())
        done = [
            (outcome.at_ns, order[number], outcome.kind)
            for number, outcome in enumerate(engine.outcomes)
            if outcome is not None
        ]
        ended = [_Frame(at_ns, frames[index].stay, frames[index].deadline_ns, 1) for at_ns, index, _ in done]
        back = _over_link(node.link, ended, source, is_back=True)
        for (at_ns, index, kind), back_ns in zip(done, back, strict=True):
            frame = frames[index]
            # The node has noticed nothing yet when it dies: all that has not left it is gone.
            if at_ns > life.death_ns or arrivals[index] > life.death_ns:
                self.outcomes["withdrawn"] += 1
            elif kind == "on_time" and back_ns <= frame.deadline_ns:
                self.outcomes["on_time"] += 1
            else:
                self.outcomes["lost"] += 1

    def _engine(self, node: FleetNode, life: _Life, frames: list[tuple[_Frame, int]]) -> Engine:
        profile: DeviceProfile = PROFILES[node.kind]
        durations: list[tuple[tuple[int, ...] | None, ...]] = []
        streams, reservations = [], {}
        for index, stay in enumerate(life.stays):
            terms = stay.stream.terms
            model = self._fleet.models[terms.name]
            streams.append(
                Stream(
                    name=f"{terms.name}#{index}",
                    model=model,
                    rate_per_s=1e9 / terms.period_ns,
                    deadline_s=terms.deadline_ns / 1e9,
                    guarantee=True,
                )
            )
            durations.append((self._fleet.costs[model][node.kind],))
            reservations[index] = stay.place.reservation
        workload = Workload(
            name=node.name,
            duration_s=1.0,
            devices=(profile.name,),
            stream=tuple(streams),
        )
        by_stay = {id(stay): index for index, stay in enumerate(life.stays)}
        arrivals = [
            Arrival(at_ns, by_stay[id(frame.stay)], frame.deadline_ns - frame.stay.place.way.back_ns)
            for frame, at_ns in frames
        ]
        return Engine(
            Scenario(workload, (profile,), arrivals, durations, self._seed),
            PlanPolicy(),
            is_clock_held=True,
            admission=Admission(reservations, {}),
        )


def _untimed() -> int:
    return 0


class _Frame(NamedTuple):
    """A frame that is sent.

    Attributes:
        begins_ns: When its transmission may begin.
        stay: The stay of its stream.
        deadline_ns: That of the application.
        number: Its number in the stay, from 0.
    """

    begins_ns: int
    stay: _Stay
    deadline_ns: int
    number: int


def _sent(stays: list[_Stay], source: random.Random) -> Iterator[_Frame]:
    """The frames of all stays: from a drawn phase on, each as late as the terms allow or less."""
    for stay in stays:
        terms = stay.stream.terms
        captured_ns, number, last_ns = stay.from_ns + source.randrange(terms.period_ns), 0, 0
        while captured_ns < stay.until_ns:
            late_ns = terms.jitter_ns if number == 0 else source.randrange(terms.jitter_ns + 1)
            last_ns = max(last_ns, captured_ns + late_ns)
            yield _Frame(last_ns, stay, captured_ns + terms.deadline_ns, number)
            captured_ns, number = captured_ns + terms.period_ns, number + 1


def _over_link(
    link: NodeLink, frames: list[_Frame], source: random.Random, *, is_back: bool = False
) -> list[int]:
    """When each frame is at the other end."""
    found = [0] * len(frames)
    free_ns = 0
    last_ns: dict[int, int] = {}
    for index in sorted(range(len(frames)), key=lambda index: (frames[index].begins_ns, index)):
        begins_ns, stay, _, _ = frames[index]
        way = stay.place.way
        free_ns = max(free_ns, begins_ns) + (way.down_ns if is_back else way.up_ns)
        at_ns = free_ns + link.latency_ns + source.randrange(link.jitter_ns + 1)
        found[index] = last_ns[id(stay)] = max(last_ns.get(id(stay), 0), at_ns)
    return found
