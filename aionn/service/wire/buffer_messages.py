"""Messages about device memories; ``protocol`` has all others."""

from __future__ import annotations

import msgspec

from aionn.hal import BufferDesc, BufferRole, Memory

__all__ = ["Allocate", "AllocateReply", "CopyFrom", "CopyTo", "FreeBuffer"]


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """``Device.allocate``, with handles of prepared models."""

    description: BufferDesc
    prepared: tuple[int, ...]
    input_roles: tuple[BufferRole, ...]
    output_roles: tuple[BufferRole, ...]


class AllocateReply(msgspec.Struct, frozen=True, tag=True):
    """The buffer's handle, and the token that requests name it by."""

    buffer: int
    token: int


class CopyTo(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.copy_to``."""

    buffer: int
    destination: Memory


class CopyFrom(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.copy_from``."""

    buffer: int
    source: Memory
    dimensions: tuple[int, ...]


class FreeBuffer(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.aclose``."""

    buffer: int
