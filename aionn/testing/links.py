"""Network connections in virtual time: latency, jitter, bandwidth, loss, partitions, and clocks that disagree.

Owns the transports; the protocols at both ends are those of the product. A ``SimulatedLink`` joins two of them:

    link = SimulatedLink(latency_s=0.005, jitter_s=0.02, clock_offset_s=1.0, seed=1)
    link.join(client_protocol, node_protocol)

Invariants:
1. As in TCP, bytes of a direction arrive in order and once, or not at all; a lost packet is late, and so is all behind it.
2. All times are the event loop's, all chances the seed's: a run repeats.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

__all__ = ["SimulatedLink", "SimulatedTransport"]

PACKET_BYTES = 64 << 10
"""Bytes that are lost, delayed or swallowed together: the largest piece that a kernel hands to its network card."""

RETRANSMIT_S = 0.2
"""Delay of a lost packet: the least retransmission time-out of Linux. It doubles with each further loss."""


class SimulatedLink:
    """A network between two machines. All attributes may be changed at any time, for what is sent from then on.

    Args:
        latency_s: One way.
        jitter_s: Most that a packet takes longer than that, evenly distributed.
        bytes_per_s: Of each direction; None means no limit.
        loss: Probability that a packet is lost, and comes by a retransmission.
        clock_offset_s: By how much the node's clock is ahead.
        drift_ppm: By how many millionths the node's clock is fast.
        seed: Of all chances.

    Attributes:
        latency_s: See above.
        jitter_s: See above.
        bytes_per_s: See above.
        loss: See above.
        is_partitioned: Nothing arrives, and what is sent waits until ``heal``.
        swallows_above_bytes: Larger packets never arrive, as on a path whose largest packet is smaller than both ends believe;
            None swallows nothing.
        tamper: Changes what is sent to the client, or None.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0001,
        jitter_s: float = 0.0,
        bytes_per_s: float | None = None,
        loss: float = 0.0,
        clock_offset_s: float = 0.0,
        drift_ppm: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.bytes_per_s = bytes_per_s
        self.loss = loss
        self.is_partitioned = False
        self.swallows_above_bytes: int | None = None
        self.tamper: Callable[[bytes], bytes] | None = None
        self._random = random.Random(seed)
        self._offset_s = clock_offset_s
        self._rate = 1 + drift_ppm / 1e6
        self._loop = asyncio.get_running_loop()
        self._ends: list[SimulatedTransport] = []

    def client_now(self) -> int:
        """The client's clock, in nanoseconds."""
        return round(self._loop.time() * 1e9)

    def node_now(self) -> int:
        """The node's clock, in nanoseconds."""
        return round((self._loop.time() * self._rate + self._offset_s) * 1e9)

    def client_time(self, node_ns: int) -> int:
        """The time of the client's clock at a time of the node's, in nanoseconds."""
        return round((node_ns / 1e9 - self._offset_s) / self._rate * 1e9)

    def join(self, client: asyncio.BufferedProtocol, node: asyncio.BufferedProtocol) -> None:
        """Connects two protocols."""
        at_client = SimulatedTransport(self, client, to_client=False)
        at_node = SimulatedTransport(self, node, to_client=True)
        at_client.peer, at_node.peer = at_node, at_client
        self._ends += (at_client, at_node)
        for transport in (at_client, at_node):
            transport.protocol.connection_made(transport)

    def heal(self) -> None:
        """The end of a partition: what was sent during it arrives after a retransmission."""
        self.is_partitioned = False
        for end in self._ends:
            end.resend(RETRANSMIT_S)

    def cut(self) -> None:
        """All connections break, at both ends."""
        for end in self._ends:
            end.lose(ConnectionResetError("the connection was reset"))
        self._ends.clear()

    def delay_s(self, size_bytes: int) -> float | None:
        """The delay of a packet behind its departure; None if it never arrives."""
        if self.swallows_above_bytes is not None and size_bytes > self.swallows_above_bytes:
            return None
        delay_s, wait_s = self.latency_s + self.jitter_s * self._random.random(), RETRANSMIT_S
        while self._random.random() < self.loss:
            delay_s, wait_s = delay_s + wait_s, 2 * wait_s
        return delay_s


class SimulatedTransport(asyncio.Transport):
    """One end of a connection.

    Args:
        link: The network.
        protocol: The owner of this end.
        to_client: Whether what is sent here goes to the client.

    Attributes:
        protocol: See above.
        peer: The other end.
    """

    peer: SimulatedTransport

    def __init__(self, link: SimulatedLink, protocol: asyncio.BufferedProtocol, *, to_client: bool) -> None:
        super().__init__()
        self.protocol = protocol
        self._link = link
        self._to_client = to_client
        self._loop = asyncio.get_running_loop()
        self._free_s = self._arrival_s = 0.0
        self._returned: list[bytes] = []  # Was under way when a partition began.
        self._held: list[bytes] = []
        self._unread: list[bytes] = []
        self._is_reading = True
        self._is_closing = False
        self._is_stuck = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes."""
        if self._is_closing:
            return
        sent = bytes(data)
        if self._to_client and self._link.tamper is not None:
            sent = self._link.tamper(sent)
        for start in range(0, len(sent), PACKET_BYTES):
            self._send(sent[start : start + PACKET_BYTES])

    def _send(self, packet: bytes, extra_s: float = 0.0) -> None:
        link = self._link
        if link.is_partitioned:
            self._held.append(packet)
            return
        delay_s = link.delay_s(len(packet))
        if delay_s is None or self._is_stuck:
            self._is_stuck = True  # All behind it waits for it, without end.
            return
        duration_s = 0.0 if link.bytes_per_s is None else len(packet) / link.bytes_per_s
        self._free_s = max(self._free_s, self._loop.time()) + duration_s
        self._arrival_s = max(self._arrival_s, self._free_s + delay_s + extra_s)
        self._loop.call_at(self._arrival_s, self.peer.arrive, packet)

    def resend(self, extra_s: float) -> None:
        """Sends what a partition held back."""
        held, self._returned, self._held = [*self._returned, *self._held], [], []
        for packet in held:
            self._send(packet, extra_s)

    def arrive(self, packet: bytes) -> None:
        """Bytes of the other end are here."""
        if self._is_closing:
            return
        if self._link.is_partitioned:
            self.peer.hold(packet)  # It was under way when the partition began.
            return
        self._unread.append(packet)
        self._read()

    def hold(self, packet: bytes) -> None:
        """Keeps a packet that was under way until the partition ends."""
        self._returned.append(packet)

    def _read(self) -> None:
        while self._unread and self._is_reading and not self._is_closing:
            data = self._unread.pop(0)
            buffer = memoryview(self.protocol.get_buffer(-1))
            count = min(len(data), buffer.nbytes)
            buffer[:count] = data[:count]
            if data[count:]:
                self._unread.insert(0, data[count:])
            self.protocol.buffer_updated(count)

    def is_reading(self) -> bool:
        """See ``asyncio.ReadTransport``."""
        return self._is_reading

    def pause_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._is_reading = True
        self._loop.call_soon(self._read)

    def is_closing(self) -> bool:
        """See ``asyncio.BaseTransport``."""
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        """See ``asyncio.WriteTransport``: nothing waits to leave."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See ``asyncio.BaseTransport``: nothing is known."""
        return default

    def close(self) -> None:
        """Ends the connection: the other end reads what was sent, and then its end."""
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon(self.protocol.connection_lost, None)
        if not self._link.is_partitioned and not self._is_stuck:
            at_s = max(self._loop.time() + self._link.latency_s, self._arrival_s)
            self._loop.call_at(at_s, self.peer.lose, None)

    def abort(self) -> None:
        """See ``asyncio.WriteTransport``."""
        self.close()

    def lose(self, error: Exception | None) -> None:
        """The other end has ended the connection, or the network has."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.protocol.connection_lost, error)
