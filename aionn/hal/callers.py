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
    """From a device's process to the client: a frame of a reservation has broken a promise, or was lost by a measured cause.

    Attributes:
        label: The label, one of ``aionn.scheduler.bandwidth.Label``.
        held_ns: The time for which the frame had its slot.
        is_by_other: Whether an execution of another client has blocked it.
    """

    label: str
    held_ns: int
    is_by_other: bool = False


class ReservedFrame(Protocol):
    """A launch as a frame of a stream whose time a served device has reserved.

    Attributes:
        reservation: The number of the reservation on the connection to that device.
    """

    @property
    def reservation(self) -> int: ...

    def reported(self, report: FrameReport) -> None:
        """Called with the report of the device, if it sends one, before the launch is done."""
        ...


frame_of_launch: ContextVar[ReservedFrame | None] = ContextVar("frame_of_launch", default=None)
"""The frame that a call of ``launch`` is for; None for best effort. A launch that begins later, in another context, is best effort:
its reservation has ended with the process that it was made in."""
