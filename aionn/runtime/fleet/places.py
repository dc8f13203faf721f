"""The device of each stream of a fleet, as it is decided before anything is sent, and after each answer and each loss.

Owns the order in which devices are asked for a stream: the plan (``aionn.scheduler.fleet.plan``) names one, and the ledger that
holds the time of that device has the last word, since other applications reserve there too. Pure: ``now`` is an argument.

Invariants:
1. A stream has one place at most, and none on a device that was lost.
2. A device that has refused a stream is not asked for it again in the same search, so a search ends after each was asked once.
3. Streams of a lost device get their new places in one decision, the largest first: none waits for the frames of another.
4. A stream without a place has a reason, until it is asked for anew, or there is more room than when it was refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from aionn.errors import NotAdmitted
from aionn.runtime.fleet.measured import DeviceTime
from aionn.scheduler.admission import SlotCost, StreamTerms
from aionn.scheduler.fleet.plan import FleetNode, FleetPlan, FleetStream, NodeState

__all__ = ["Drained", "StreamPlaces"]


ALIKE: Final = 2.0
"""Devices whose durations differ by no more than this factor are alike: measurements of equal ones on busy machines differ by
less."""


class Drained(NamedTuple):
    """The streams of a device that gets no further ones.

    Attributes:
        placed: The streams that have a place elsewhere, each with the device.
        refused: Those that stay until they end, each with the reason.
    """

    placed: dict[str, str]
    refused: dict[str, NotAdmitted]


class StreamPlaces:
    """See the module."""

    def __init__(self) -> None:
        self._plan = FleetPlan()
        # Shared by all streams: a device that joins later is open to those that were placed before.
        self._costs: dict[str, SlotCost] = {}
        self._kinds: dict[str, int] = {}
        self._sizes = 0, 0
        self._asked: dict[str, StreamTerms] = {}
        self._refusing: dict[str, dict[str, NotAdmitted]] = {}
        self._reasons: dict[str, NotAdmitted] = {}

    # --- Devices ---

    def join(self, device: str, time: DeviceTime, *, slots: int, sizes: tuple[int, int]) -> None:
        """A device can be used; or can be used again, after it was lost or drained: with the cost and the network of now.

        Args:
            device: Its name.
            time: The time of a frame there.
            slots: Its device slots.
            sizes: Of the inputs and of the outputs of a frame, in bytes.
        """
        self._sizes = sizes
        self._reasons.clear()
        known = device in self._costs
        self._costs[device] = time.cost
        if known:
            self._plan.restore(device, kind=self._kind_of(device, time.cost), link=time.link)
            return
        node = FleetNode(
            name=device,
            kind=self._kind_of(device, time.cost),
            costs_as=device,
            slots=slots,
            link=time.link,
            can_preempt=False,
        )
        self._plan.add(node)

    def _kind_of(self, device: str, cost: SlotCost) -> str:
        """The kind of a device: streams are spread over those of one kind, and the kinds are tried by their durations."""
        for kind, duration_ns in self._kinds.items():
            if max(duration_ns, cost.duration_ns) <= ALIKE * min(duration_ns, cost.duration_ns):
                return kind
        kind = f"as {device} with {cost.duration_ns} ns"
        self._kinds[kind] = cost.duration_ns
        self._costs[kind] = cost
        return kind

    def state(self, device: str) -> NodeState | None:
        """The state of a device; None where it has not joined."""
        return self._plan.state(device) if device in self._costs else None

    def restore(self, device: str) -> None:
        """A device that was draining gets streams again."""
        if self.state(device) is NodeState.DRAINING:
            self._reasons.clear()
            self._plan.restore(device)

    def lose(self, device: str, now_ns: int) -> None:
        """A device is lost. Its streams get new places or reasons. Idempotent."""
        if self.state(device) in (None, NodeState.LOST):
            return
        self._reasons.update(self._plan.lose(device, now_ns=now_ns).refused)

    def drain(self, device: str, now_ns: int) -> Drained:
        """A device gets no further streams; those that it has get other places, where there are any."""
        if self.state(device) is not NodeState.UP:
            return Drained({}, {})
        moves = self._plan.drain(device, now_ns=now_ns)
        return Drained({name: place.node for name, place in moves.placed.items()}, moves.refused)

    # --- Streams ---

    def begin(self, terms: StreamTerms) -> None:
        """A search for a place begins; earlier answers of devices do not count any more. A stream with a place keeps it."""
        self._asked[terms.name] = terms
        self._refusing[terms.name] = {}

    def next(self, name: str, now_ns: int) -> str:
        """The device that is to be asked for a stream: the one where its place is, or a new place.

        Raises:
            NotAdmitted: No device is left; with the reason of the last one that has refused it, or of the plan.
        """
        place = self._plan.places.get(name)
        if place is not None:
            return place.node
        reason = self._reasons.pop(name, None)
        refusing = self._refusing[name]
        if reason is None or refusing:
            up_bytes, down_bytes = self._sizes
            stream = FleetStream(
                terms=self._asked[name], costs=self._costs, up_bytes=up_bytes, down_bytes=down_bytes
            )
            try:
                return self._plan.place(stream, now_ns=now_ns, without=refusing).node
            except NotAdmitted as e:
                reason = e
        raise next(reversed(refusing.values())) if refusing else reason

    def refused(self, name: str, error: NotAdmitted) -> None:
        """The ledger of the device at the stream's place has refused it."""
        place = self._plan.release(name)
        if place is not None:
            self._refusing[name][place.node] = error

    def release(self, name: str) -> None:
        """A stream has ended, or was refused everywhere. Idempotent."""
        if self._plan.release(name) is not None:
            self._reasons.clear()
        for table in (self._asked, self._refusing, self._reasons):
            table.pop(name, None)

    def device_of(self, name: str) -> str | None:
        """The device at a stream's place; None without one."""
        place = self._plan.places.get(name)
        return None if place is None else place.node

    @property
    def devices(self) -> Mapping[str, str]:
        """The device of each stream."""
        return {name: place.node for name, place in self._plan.places.items()}
