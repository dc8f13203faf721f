"""Sockets of which a forked child keeps no copy.

Owns their closing in the child. A copy would keep a port in use, and would hide the end of this process from the process at the
other end, which ends with it.

Invariants:
1. In a child they are closed before any other code runs; those of the parent stay open.
"""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["close_at_fork"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_at_fork(*sockets: socket.socket) -> None:
    """Has forked children close these sockets. They may be closed before."""
    _sockets.update(sockets)


def _close_in_child() -> None:
    for each in list(_sockets):
        each.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)
