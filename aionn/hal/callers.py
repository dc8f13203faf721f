"""The client whose call a device is answering: a device that several clients share gives equals their turns.

Owns the word alone. A prepared model has an ``owner``; what is asked of the device itself, whether it supports a model, and to
prepare one, belongs to the client whose task asks.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar

__all__ = ["client_of_call"]

client_of_call: ContextVar[Hashable] = ContextVar("client_of_call", default=None)
"""The client; None where there is but one."""
