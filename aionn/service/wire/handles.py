"""Parts of messages that are more than values: descriptors, and what is made of them.

Owns duplicates of descriptors on their way, and the travelling forms of requests and cache files. How they become bytes is in
``protocol``.

Invariant: a descriptor in here is a duplicate of its own, close-on-exec, and closed when the last object that holds it is dropped.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import secrets
import weakref
from collections.abc import Callable, Hashable, Sequence

import msgspec

import fmq
from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    CACHE_FILES_MAX,
    CACHE_TOKEN_BYTES,
    BufferToken,
    CacheFiles,
    HardwareBufferDesc,
    Memory,
    MemoryKind,
    Request,
    RequestArgument,
)
from aionn.platform.descriptors import QUICK_COUNT_MAX, close_apart, close_memory, is_quick
from aionn.service.wire.quotas import Account
from fences import FenceState, FenceStatus, SyncFence
from fmq.descriptor import FDS_MAX, check_descriptor
from fmq.region import has_huge_pages

__all__ = [
    "CacheOnWire",
    "Descriptor",
    "FileHandle",
    "PoolOnWire",
    "QueueHandle",
    "RequestOnWire",
    "cache_key",
    "close_gently",
    "close_quick",
    "fence_from_wire",
    "memory_from_wire",
    "memory_on_wire",
]

DESCRIPTORS_OF_MEMORY = 2
"""Descriptors of a received memory: a duplicate of its own, and that of its mapping."""


class Descriptor:
    """A descriptor that is closed when this object is dropped."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int, close: Callable[[int], object] = os.close) -> None:
        self.fd = fd
        weakref.finalize(self, close, fd)


def close_quick(fds: Sequence[int]) -> list[int]:
    """Closes those descriptors of a message whose closing takes no time. Returns the rest."""
    # Each call releases the interpreter's lock, and may wait for a switch interval until it has it again: where another
    # thread computes, closing 240 descriptors one by one would keep the event loop for a second.
    if len(fds) > QUICK_COUNT_MAX:
        return list(fds)
    slow = []
    for fd in fds:
        if is_quick(fd):
            os.close(fd)
        else:
            slow.append(fd)
    return slow


def close_gently(fds: Sequence[int]) -> None:
    """Closes descriptors that came with one message, those whose closing can take long in a thread."""
    slow = close_quick(fds)
    if slow:
        close_apart(slow)


def _close_one(fd: int) -> None:
    close_gently((fd,))


def _close_memory(over: Callable[[], object], fd: int, array: object) -> None:
    """Ends a memory of a client: see ``Memory.from_fd``."""
    close_memory(fd, array, lambda _: over())


def memory_on_wire(memory: Memory) -> tuple[int, str, int, bool, HardwareBufferDesc | None]:
    """The form of a memory in a message, beside its descriptor."""
    is_writable = bool(memory.array.flags.writeable)
    return memory.size_bytes, str(memory.kind), memory.offset, is_writable, memory.image


def memory_from_wire(fd: int, fields: object, *, sealed_only: bool, account: Account | None = None) -> Memory:
    """The memory of a descriptor, which is duplicated.

    Args:
        fd: The descriptor.
        fields: The fields that came beside it; see ``memory_on_wire``.
        sealed_only: Refuses files that the peer can shorten, or whose pages it can take away.
        account: The peer's quota; the memory counts until it is dropped and closed. None counts nothing.

    Raises:
        GeneralFailure: It cannot be mapped, is not sealed, or has huge pages.
        InvalidArgument: It does not agree with the fields.
        ResourceExhausted: No descriptor or memory is left here.
        msgspec.ValidationError: The fields do not describe a memory.
    """
    size_bytes, kind, offset, is_writable, image = msgspec.convert(fields, _MEMORY_FIELDS)
    if sealed_only and not _is_sealed(fd):
        raise GeneralFailure("memory: a device that is shared takes sealed memory alone, got a file")
    if sealed_only and has_huge_pages(fd):
        raise GeneralFailure("memory: a device that is shared takes memory of ordinary pages, got huge ones")

    def make(over: Callable[[], object] | None = None) -> Memory:
        return Memory.from_fd(
            fd,
            size_bytes=size_bytes,
            offset=offset,
            kind=MemoryKind(kind),
            writable=is_writable,
            image=image,
            closing=None if over is None else functools.partial(_close_memory, over),
        )

    if account is None:
        return make()
    return account.receive_until_over(make, DESCRIPTORS_OF_MEMORY, max(0, size_bytes))


def fence_from_wire(
    fd: int | None, state: FenceState, *, sealed_only: bool, account: Account | None = None
) -> SyncFence:
    """The fence of a descriptor, which is duplicated.

    Args:
        fd: The descriptor; None for a fence that has finished.
        state: The state that came beside it.
        sealed_only: The peer is not trusted: no record is read, and the fence is closed by a thread, since a network socket in an
            unread message of it may linger.
        account: The peer's quota; the fence counts until it is dropped and closed. None counts nothing.

    Raises:
        NotAFenceError: Descriptor and state do not belong to a fence.
        OSError: No descriptor is left here.
        ResourceExhausted: None is left for the peer.
    """

    def make(over: Callable[[], object] | None = None) -> SyncFence:
        closing = functools.partial(_close_fence, over) if sealed_only else None
        return SyncFence.from_state(state, fd, reads_record=not sealed_only, closing=closing)

    if account is None:
        return make()
    count = int(fd is not None and state.status == FenceStatus.PENDING.value)
    if sealed_only and count:
        return account.receive_until_over(make, count, 0)
    return account.receive(make, count)


def _close_fence(over: Callable[[], object] | None, fd: int) -> None:
    close_apart([fd], lambda _: None if over is None else over())


_MEMORY_FIELDS = tuple[int, str, int, bool, HardwareBufferDesc | None]


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # A file in a file system, which has no seals.


class QueueHandle:
    """A message queue on its way to the peer: its descriptor, and descriptors of files that this object owns.

    Attributes:
        descriptor: The places of the queue's parts.
        fds: Duplicates; closed when this object is dropped.
    """

    __slots__ = ("__weakref__", "_owned", "descriptor")

    def __init__(self, descriptor: fmq.MQDescriptor, fds: Sequence[int]) -> None:
        if len(fds) > FDS_MAX:
            raise InvalidArgument(
                f"message: expected a queue of at most {FDS_MAX} descriptors, got {len(fds)}"
            )
        self.descriptor = descriptor
        self._owned = [Descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), _close_one) for fd in fds]

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(owned.fd for owned in self._owned)

    @property
    def is_small(self) -> bool:
        """Whether the files behind the descriptors are small, whatever their parts in the queue are, and remain so."""
        return all(map(is_quick, self.fds))

    @property
    def size_bytes(self) -> int:
        """The parts that ``attach`` maps.

        Raises:
            InvalidArgument: The descriptor does not belong to a queue.
        """
        return sum(self._mapped().values())

    @property
    def attached_descriptors(self) -> int:
        """Descriptors of what ``attach`` returns: a duplicate of each, and one of each mapping. Raises as ``size_bytes``."""
        return len(self._owned) + len(self._mapped())

    def _mapped(self) -> dict[int, int]:
        try:
            return check_descriptor(self.descriptor, len(self._owned))
        except fmq.Error as e:
            raise InvalidArgument(f"burst: the queue cannot be used: {e}") from e

    def attach(self, *, spin_ns: int = 0) -> fmq.MessageQueue:
        """The queue itself, mapped.

        Raises:
            InvalidArgument: The descriptor or its files are not a queue.
            ResourceExhausted: It cannot be mapped.
        """
        try:
            return fmq.MessageQueue.attach(self.descriptor, self.fds, spin_ns=spin_ns)
        except fmq.Error as e:
            raise InvalidArgument(f"burst: the queue cannot be used: {e}") from e
        except OSError as e:
            raise ResourceExhausted(f"burst: the queue cannot be mapped: {e.strerror}") from e


class FileHandle:
    """A file on its way to the peer. The descriptor is a duplicate, closed when this object is dropped.

    Attributes:
        fd: The duplicate.
    """

    __slots__ = ("__weakref__", "_owned")

    def __init__(self, fd: int) -> None:
        self._owned = Descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), _close_one)

    @property
    def fd(self) -> int:
        return self._owned.fd


class CacheOnWire(msgspec.Struct, frozen=True, array_like=True):
    """``CacheFiles`` as they travel."""

    model: tuple[FileHandle, ...]
    data: tuple[FileHandle, ...]
    token: bytes

    @classmethod
    def of(cls, cache: CacheFiles) -> CacheOnWire:
        """The form that travels.

        Raises:
            InvalidArgument: Too many files, or a descriptor that is not open.
        """
        if max(len(cache.model), len(cache.data)) > CACHE_FILES_MAX:
            raise InvalidArgument(f"cache: expected at most {CACHE_FILES_MAX} files of a kind")
        try:
            model, data = ([FileHandle(fd) for fd in files] for files in (cache.model, cache.data))
        except (OSError, OverflowError, TypeError, ValueError) as e:
            raise InvalidArgument(f"cache: expected open descriptors: {e}") from e
        return cls(tuple(model), tuple(data), bytes(cache.token))

    def __post_init__(self) -> None:
        if max(len(self.model), len(self.data)) > CACHE_FILES_MAX:
            raise ValueError(f"cache: expected at most {CACHE_FILES_MAX} files of a kind")

    @property
    def size_bytes(self) -> int:
        """Of all files together, now."""
        return sum(os.fstat(f.fd).st_size for f in (*self.model, *self.data))

    def files(self, bytes_max: int | None = None, key: bytes | None = None) -> CacheFiles:
        """The files themselves; valid while this object lives.

        Args:
            bytes_max: Most bytes to read of all of them; None means no limit.
            key: A secret to which they are bound, see ``cache_key``. A client could write files of any content, since it knows the
                token, the key of their digest; with a secret beside it the driver restores only files that it has saved with both.
                None leaves the token.
        """
        token = self.token
        if key is not None and len(token) == CACHE_TOKEN_BYTES:  # The driver rejects others.
            token = hashlib.blake2b(token, key=key, digest_size=CACHE_TOKEN_BYTES).digest()
        return CacheFiles([f.fd for f in self.model], [f.fd for f in self.data], token, bytes_max)


@functools.cache
def cache_secret() -> bytes:
    """A secret of this process."""
    return secrets.token_bytes(CACHE_TOKEN_BYTES)


def cache_key(user: Hashable) -> bytes:
    """The key of a user's cache files where this process serves several clients, for ``CacheOnWire.files``."""
    return hashlib.blake2b(str(user).encode(), key=cache_secret()).digest()


class PoolOnWire(msgspec.Struct, frozen=True, array_like=True):
    """A request's pool: a memory, or else a device memory's token, or the identifier of a remembered memory alone.

    msgspec decodes no union of a class of ours with anything but None.

    Attributes:
        memory: The memory, where it comes along.
        token: Of a device memory; 0 for none.
        identifier: Under which the memory is, or is to be, remembered; -1 for not at all. See ``repetition``.
    """

    memory: Memory | None
    token: int = 0
    identifier: int = -1


class RequestOnWire(msgspec.Struct, frozen=True, array_like=True):
    """A ``Request`` as it travels."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[PoolOnWire, ...]

    @classmethod
    def of(cls, request: Request, on_wire: Callable[[Memory], PoolOnWire] = PoolOnWire) -> RequestOnWire:
        """The form that travels; ``on_wire`` gives the form of a memory, by default always along with the request."""
        pools = tuple(
            PoolOnWire(None, pool.token) if isinstance(pool, BufferToken) else on_wire(pool)
            for pool in request.pools
        )
        return cls(request.inputs, request.outputs, pools)

    def request(self, memories: Sequence[Memory | None] | None = None) -> Request:
        """The request itself; ``memories`` stand for its pools where they are not None, by default those that came along."""
        if memories is None:
            memories = [pool.memory for pool in self.pools]
        pools = tuple(
            BufferToken(pool.token) if memory is None else memory
            for pool, memory in zip(self.pools, memories, strict=True)
        )
        return Request(self.inputs, self.outputs, pools)
