"""The client whose call a device is answering: a device that several clients share gives equals their turns, and counts the memory
that it makes for each.

Owns the words alone. A prepared model has an ``owner``; a call of the device itself (whether it supports a model, or to prepare
one) belongs to the client whose task calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

__all__ = ["Connection", "MemoryAccount", "Sharer", "account_of_call", "client_of_call", "sharer_of_call"]


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
