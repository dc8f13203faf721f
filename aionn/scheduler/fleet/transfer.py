"""The way of a frame to a node and back, as the admission test of the node counts it.

Owns two decisions: the terms that a stream has at a node, and whether the network between has room for its frames. Pure, in
integers of nanoseconds.

A frame is at the node at the earliest when latency and transmission allow; the node counts captures from there. All that may be
added to it on the way is jitter; the longest way back shortens the deadline. Transfers of all streams of a node share one link in
each direction, in the order in which they begin; so one waits at most for a frame of each stream, and for what jitter brings
together.

Invariants:
1. A frame that meets the deadline of the terms at the node is back by the stream's own deadline, as long as latency, jitter and
   bandwidth are as declared.
2. The waits of the streams of a node do not change when another is added: each counts with ``wait_ns``, and no more streams are
   added than that allows.

Source: the delay of a server in order of arrival is at most the sum of the bursts of its inputs (Cruz 1991).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from aionn.errors import InvalidArgument
from aionn.scheduler.admission import CAP_PPM, DAY_NS, SHARE_PPM, StreamTerms

__all__ = ["WAIT_NS", "LinkLoad", "NodeLink", "Way"]

WAIT_NS = 5_000_000
"""Longest wait for the link that is counted with unless stated otherwise: eight frames of 75 KB at a gigabit a second."""


class NodeLink(msgspec.Struct, frozen=True, kw_only=True):
    """The network between the sources of streams and a node.

    Attributes:
        latency_ns: The least time of a small message, one way.
        jitter_ns: The most that one takes longer.
        bytes_per_s: Of each direction; 0 means that a transmission takes no time.
        wait_ns: The longest time that a frame may take to be sent, with the wait for those before it; in each direction.

    Raises:
        InvalidArgument: A value is negative, not an integer, or a time longer than a day.
    """

    latency_ns: int = 0
    jitter_ns: int = 0
    bytes_per_s: int = 0
    wait_ns: int = WAIT_NS

    def __post_init__(self) -> None:
        for field in ("latency_ns", "jitter_ns", "wait_ns"):
            _check(field, getattr(self, field), DAY_NS)
        _check("bytes_per_s", self.bytes_per_s, 1 << 50)

    def transmission_ns(self, size_bytes: int) -> int:
        """The time that bytes occupy the link, rounded up."""
        return -(-size_bytes * 10**9 // self.bytes_per_s) if self.bytes_per_s else 0


def _check(field: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidArgument(f"link, {field}: expected an integer from 0 to {most}, got {value!r}")


class Way(NamedTuple):
    """The way of a stream's frames over a link.

    Attributes:
        there_ns: The least time from a capture to the node.
        varies_ns: The most that it takes longer.
        back_ns: The longest time of the outputs.
        up_ns: The transmission of a frame's inputs.
        down_ns: That of its outputs.
    """

    there_ns: int
    varies_ns: int
    back_ns: int
    up_ns: int
    down_ns: int

    @classmethod
    def over(cls, link: NodeLink, up_bytes: int, down_bytes: int) -> Way:
        """The way of frames with inputs and outputs of these sizes."""
        up_ns, down_ns = link.transmission_ns(up_bytes), link.transmission_ns(down_bytes)
        return cls(
            link.latency_ns + up_ns,
            link.jitter_ns + max(0, link.wait_ns - up_ns if up_ns else 0),
            link.latency_ns + link.jitter_ns + (link.wait_ns if down_ns else 0),
            up_ns,
            down_ns,
        )

    @property
    def constant_ns(self) -> int:
        """The part of the deadline that the network takes, whatever the jitter."""
        return self.there_ns + self.back_ns

    def terms(self, own: StreamTerms) -> StreamTerms | None:
        """The terms at the node; None where the way takes the whole deadline."""
        deadline_ns = own.deadline_ns - self.there_ns - self.back_ns
        jitter_ns = own.jitter_ns + self.varies_ns
        if jitter_ns >= deadline_ns:
            return None
        return msgspec.structs.replace(own, deadline_ns=deadline_ns, jitter_ns=jitter_ns)


class LinkLoad:
    """The transmissions of the streams of a node, in both directions.

    Args:
        link: Their link.
    """

    __slots__ = ("_bursts_ns", "_link", "_shares_ppm")

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._bursts_ns = [0, 0]
        self._shares_ppm = [0, 0]

    @property
    def bursts_ns(self) -> tuple[int, int]:
        """Of each direction, the longest time that all its transmissions take that may come together."""
        return self._bursts_ns[0], self._bursts_ns[1]

    @property
    def shares_ppm(self) -> tuple[int, int]:
        """Of each direction, the share that is used, in millionths."""
        return self._shares_ppm[0], self._shares_ppm[1]

    @property
    def free_ppm(self) -> int:
        """The part of the link that is free, in millionths: of the wait or of the share, in the direction with less of it."""
        wait_ns = self._link.wait_ns
        if not self._link.bytes_per_s:
            return SHARE_PPM
        if not wait_ns:
            return 0
        waits_ppm = (wait_ns - max(self._bursts_ns)) * SHARE_PPM // wait_ns
        return min(waits_ppm, (CAP_PPM - max(self._shares_ppm)) * SHARE_PPM // CAP_PPM)

    def has_room(self, way: Way, terms: StreamTerms) -> bool:
        """Whether the link bears another stream.

        Args:
            way: Its way.
            terms: Its terms at the node.
        """
        wait_ns, period_ns = self._link.wait_ns, terms.period_ns
        for direction, (own_ns, spread_ns) in enumerate(
            _transmissions(way, terms.deadline_ns, terms.jitter_ns)
        ):
            if own_ns and (
                self._bursts_ns[direction] + own_ns - (-own_ns * spread_ns // period_ns) > wait_ns
                or self._shares_ppm[direction] - (-own_ns * SHARE_PPM // period_ns) > CAP_PPM
            ):
                return False
        return True

    def add(self, way: Way, terms: StreamTerms) -> None:
        """Another stream uses it."""
        self._bursts_ns, self._shares_ppm = self._with(way, terms, 1)

    def remove(self, way: Way, terms: StreamTerms) -> None:
        """A stream has left it."""
        self._bursts_ns, self._shares_ppm = self._with(way, terms, -1)

    def clear(self) -> None:
        """All streams have left it."""
        self._bursts_ns, self._shares_ppm = [0, 0], [0, 0]

    def _with(self, way: Way, terms: StreamTerms, sign: int) -> tuple[list[int], list[int]]:
        bursts_ns, shares_ppm = list(self._bursts_ns), list(self._shares_ppm)
        for direction, (own_ns, spread_ns) in enumerate(
            _transmissions(way, terms.deadline_ns, terms.jitter_ns)
        ):
            bursts_ns[direction] += sign * (own_ns + -(-own_ns * spread_ns // terms.period_ns))
            shares_ppm[direction] += sign * -(-own_ns * SHARE_PPM // terms.period_ns)
        return bursts_ns, shares_ppm


def _transmissions(way: Way, deadline_ns: int, jitter_ns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of each direction, the transmission of a frame, and the time within which frames come together: inputs by the jitter of the
    source, outputs by all of the time that the node has for a frame."""
    return (way.up_ns, jitter_ns - way.varies_ns), (way.down_ns, deadline_ns)
