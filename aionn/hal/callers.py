"""The client whose call a device is answering: a device that several clients share gives equals their turns.

Owns the words alone. A prepared model has an ``owner``; what is asked of the device itself, whether it supports a model, and to
prepare one, belongs to the client whose task asks.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["Connection", "client_of_call"]


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
