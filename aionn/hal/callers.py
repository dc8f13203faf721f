"""The client whose call a device is answering, and the reservation that an execution belongs to.

A device that several clients share gives equals their turns, counts the memory that it makes for each, and keeps the time that
streams have reserved.

Owns the words alone. A prepared model has an ``owner``; a call of the device itself (whether it supports a model, or to prepare
one) belongs to the client whose task calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import msgspec

__all__ = [
    "Connection",
    "FrameReport",
    "MemoryAccount",
    "ReservedFrame",
    "Sharer",
    "account_of_call",
    "client_of_call",
    "frame_of_launch",
    "sharer_of_call",
]


class Connection(NamedTuple):
    """A client that has its turns together with others: clients in one process have as many as a process with one client.

    Attributes:
        process: Has turns beside other processes, and beside other clients.
        client: Has turns beside other clients of the process.
    """

    process: Hashable
    client: Hashable


client_of_call: ContextVar[Hashable] = ContextVar("client_of_call", default=None)
"""The client, or its ``Connection``; None where there is but one."""


class MemoryAccount(Protocol):
    """The account of a client's device memory. May be used from any thread, at any time."""

    def take_memory(self, size_bytes: int) -> None:
        """Counts memory before it is made. Raises ``ResourceExhausted``: the limit would be exceeded."""
        ...

    def give_back_memory(self, size_bytes: int) -> None:
        """Counts it as free again; also where the garbage collector runs."""
        ...


account_of_call: ContextVar[MemoryAccount | None] = ContextVar("account_of_call", default=None)
"""The account of the growth of a device memory without a whole shape, whose ``Buffer.size_bytes`` is 0. None: no account."""


class Sharer(NamedTuple):
    """A process with which others share the memory of a device.

    Attributes:
        user: Its user.
        process: Its identity.
    """

    user: Hashable
    process: Hashable


sharer_of_call: ContextVar[Sharer | None] = ContextVar("sharer_of_call", default=None)
"""The process for which device memory is allocated; None where there is but one, which may have all of it."""


class FrameReport(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """From a device's process to the client, with the answer of each frame of a reservation: its label and its times.

    Attributes:
        label: The promise that it broke, or the cause of its loss that was measured there, one of
            ``aionn.scheduler.bandwidth.Label``; empty for neither.
        held_ns: The time for which the frame had its slot.
        is_by_other: Whether an execution of another client has blocked it.
        arrived_ns: When it came to the queue of the device, on the monotonic clock, which both processes have.
        ended_ns: When it left its slot; 0 for one that never had it.
        answered_ns: When its answer was ready to be written.
        blocked_ns: The time for which executions before it have kept its slot for longer than was counted with.
        missing_ns: The time that it lacked when it was rejected while it waited; 0 for one that was not.
    """

    label: str
    held_ns: int
    is_by_other: bool = False
    arrived_ns: int = 0
    ended_ns: int = 0
    answered_ns: int = 0
    blocked_ns: int = 0
    missing_ns: int = 0


class ReservedFrame(Protocol):
    """A launch as a frame of a stream whose time a served device has reserved.

    Attributes:
        reservation: The number of the reservation on the connection to that device.
    """

    @property
    def reservation(self) -> int: ...

    def sent(self, now_ns: int) -> None:
        """Called when it has been sent."""
        ...

    def reported(self, report: FrameReport, now_ns: int) -> None:
        """Called with the report of the device, and the time at which that was read, before the launch is done. A launch that the
        device did not answer has none, nor has one whose queue knows no reservations."""
        ...


frame_of_launch: ContextVar[ReservedFrame | None] = ContextVar("frame_of_launch", default=None)
"""The frame that a call of ``launch`` is for; None for best effort. A launch that begins later, in another context, is best effort:
its reservation has ended with the process that it was made in."""
