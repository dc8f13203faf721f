"""Device memories: memory that a driver manages itself and that a request names by a token.

Owns tokens, what each memory is for, its state, its shape now, and the copies to and from shared memory. ``arguments`` binds
memories to executions.

Invariants:
1. Tokens start at 1; freed ones are used again, the last freed first. A token is unique among the live memories of its table.
2. A memory is initialised by a successful write and uninitialised by a failed one; it can be read only while it is initialised.
3. The bytes of all memories of a table never exceed ``bytes_max``, those of a client never its account, and of the processes that
   share a device one has a quarter at most, and one user half (``platform.shares``). Arrays that an execution still reads or
   writes outlive the memory, so that a race with a free or a write has undefined values, never a crash.

Source: ``allocate`` and ``IBuffer`` of the NN HAL 1.3, and the buffer tracker of its sample driver.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    RANK_MAX,
    BufferDefaults,
    Memory,
    MemoryKind,
    Operand,
    OperandType,
    combine_dimensions,
    dimensions_are_known,
    is_extension_operand_type,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
)
from aionn.hal.callers import Sharer, account_of_call, client_of_call, sharer_of_call
from aionn.platform.shares import Shares
from aionn.scheduler.worker_turns import BESIDE_MAX, WorkerTurns
from fmq.available import MemoryShortage, check_available

__all__ = ["DeviceBuffer", "DeviceMemory", "MemoryState", "MemoryTable", "Role"]

_logger = logging.getLogger("aionn.memory")

Bytes = npt.NDArray[np.uint8]

COPY_ON_LOOP_BYTES_MAX = 1 << 20
"""Copies up to this size are made immediately: some 100 us, which is about what handing them to a thread and back costs."""

EXTENT_MAX = 2**32 - 1

_copies = WorkerTurns("copies of device memories", BESIDE_MAX)


class Role(NamedTuple):
    """One use that a memory is meant for.

    Attributes:
        prepared: Identity of the prepared model; never used again for another.
        is_output: Whether it is an output.
        io_index: Which input or output.
    """

    prepared: int
    is_output: bool
    io_index: int


class MemoryState(enum.Enum):
    """Whether a memory holds a value."""

    UNINITIALIZED = "uninitialised"
    INITIALIZED = "initialised"


_NEXT = {
    (MemoryState.UNINITIALIZED, "written"): MemoryState.INITIALIZED,
    (MemoryState.UNINITIALIZED, "failed"): MemoryState.UNINITIALIZED,
    (MemoryState.INITIALIZED, "written"): MemoryState.INITIALIZED,
    (MemoryState.INITIALIZED, "failed"): MemoryState.UNINITIALIZED,
}


class DeviceMemory:
    """One memory.

    Attributes:
        token: Its name in requests.
        operand: Type and quantisation; its dimensions are those of the allocation, 0 or empty where unknown.
        roles: Its intended uses.
        size_bytes: Of the allocation; 0 while the shape is not wholly known, in which case every write makes room for itself.
    """

    def __init__(self, table: MemoryTable, token: int, operand: Operand, roles: frozenset[Role]) -> None:
        self._table = table
        self._lock = threading.RLock()
        self.token = token
        self.operand = operand
        self.roles = roles
        self.size_bytes = operand_size_bytes(operand.type, operand.dimensions)
        # The client that allocates counts a size that is known; the memory of a later write is counted here.
        self._account = None if self.size_bytes else account_of_call.get()
        self._sharer = sharer_of_call.get()
        self._state = MemoryState.UNINITIALIZED
        self._dimensions = operand.dimensions
        self._array = self._take(self.size_bytes)
        self._is_freed = False

    def _take(self, size_bytes: int) -> Bytes:
        if self._account is not None:
            self._account.take_memory(size_bytes)
        try:
            return self._table.take(size_bytes, self._sharer)
        except BaseException:
            if self._account is not None:
                self._account.give_back_memory(size_bytes)
            raise

    def _give_back(self, size_bytes: int) -> None:
        self._table.give_back(size_bytes, self._sharer)
        if self._account is not None:
            self._account.give_back_memory(size_bytes)

    @property
    def state(self) -> MemoryState:
        """Whether it holds a value."""
        return self._state

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The shape of the last write; that of the allocation while uninitialised."""
        return self._dimensions

    def readable(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The value as a read-only array.

        Args:
            shape: The shape that the reader assumes; static here: it must be the shape of the last write.

        Raises:
            GeneralFailure: Uninitialised.
            InvalidArgument: Another shape than the last write's.
        """
        with self._lock:
            if self._state != MemoryState.INITIALIZED:
                raise GeneralFailure(f"{self}: read before a successful write")
            if shape != self._dimensions:
                raise InvalidArgument(
                    f"{self}: expected the shape of its last write {list(self._dimensions)}, got {list(shape)}"
                )
            size_bytes = operand_size_bytes(self.operand.type, shape)
            flat = self._array[:size_bytes].view(operand_dtype(self.operand.type))
        array = flat.reshape(() if is_scalar_type(self.operand.type) else shape)
        array.flags.writeable = False
        return array

    def check_output(self, shape: tuple[int, ...]) -> None:
        """Checks a request's shape of an output against the allocation.

        Raises:
            InvalidArgument: They conflict.
        """
        if combine_dimensions(self.operand.dimensions, shape) is None:
            raise InvalidArgument(
                f"{self}: expected a shape that fits {list(self.operand.dimensions)}, got {list(shape)}"
            )

    def writable(self, size_bytes: int) -> Bytes:
        """Where an execution may write ``size_bytes``: the allocation, or new memory where the shape was not known.

        Raises:
            ResourceExhausted: No memory is left for it.
        """
        return self._array if self.size_bytes else self._take(size_bytes)

    def written(self, array: Bytes, dimensions: tuple[int, ...]) -> None:
        """A write of that shape succeeded; ``array`` came from ``writable``.

        Raises:
            GeneralFailure: The shape does not fit the allocation; the memory is uninitialised then.
        """
        if combine_dimensions(self.operand.dimensions, dimensions) is None:
            self.failed(array)
            raise GeneralFailure(
                f"{self}: expected a result that fits {list(self.operand.dimensions)}, got {list(dimensions)}"
            )
        with self._lock:
            self._replace(array)
            self._state = _NEXT[self._state, "written"]
            self._dimensions = dimensions

    def failed(self, array: Bytes | None = None) -> None:
        """A write failed: what the memory holds means nothing any more. ``array`` came from ``writable``, if that was called."""
        with self._lock:
            if array is not None and not self.size_bytes and array is not self._array:
                self._give_back(array.nbytes)
            self._state = _NEXT[self._state, "failed"]
            self._dimensions = self.operand.dimensions

    def unused(self, array: Bytes) -> None:
        """Nothing was written: ``array``, which came from ``writable``, is given back, and the memory is as it was."""
        with self._lock:
            if not self.size_bytes and array is not self._array:
                self._give_back(array.nbytes)

    def _replace(self, array: Bytes) -> None:
        if self.size_bytes or array is self._array:
            return
        if self._is_freed:
            self._give_back(array.nbytes)
        else:
            self._give_back(self._array.nbytes)
            self._array = array

    def check_copy_to(self, size_bytes: int) -> None:
        """Checks a copy into ``size_bytes`` of shared memory: the size first, then the state.

        Raises:
            InvalidArgument: Another size than the value's.
            GeneralFailure: Uninitialised.
        """
        expected = operand_size_bytes(self.operand.type, self._dimensions)
        if expected and size_bytes != expected:
            raise InvalidArgument(f"{self}, copy to: expected {expected} bytes, got {size_bytes}")
        if self._state != MemoryState.INITIALIZED:
            raise GeneralFailure(f"{self}, copy to: nothing was written into it")

    def check_copy_from(self, size_bytes: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
        """Checks a copy from ``size_bytes`` of shared memory, and returns the value's shape.

        Raises:
            InvalidArgument: Size and shape do not fit each other or the allocation, or the shape stays unknown.
        """
        where = f"{self}, copy from"
        if len(dimensions) > RANK_MAX:
            raise InvalidArgument(f"{where}: expected at most {RANK_MAX} dimensions, got {len(dimensions)}")
        if self.size_bytes and size_bytes != self.size_bytes:
            raise InvalidArgument(f"{where}: expected {self.size_bytes} bytes, got {size_bytes}")
        if any(not 0 <= extent <= EXTENT_MAX for extent in dimensions):
            raise InvalidArgument(f"{where}: expected extents from 0 to {EXTENT_MAX}, got {list(dimensions)}")
        if is_scalar_type(self.operand.type) and dimensions:
            raise InvalidArgument(f"{where}: expected no dimensions for a scalar, got {list(dimensions)}")
        shape = combine_dimensions(self.operand.dimensions, dimensions)
        if shape is None or not dimensions_are_known(self.operand.type, shape):
            raise InvalidArgument(
                f"{where}: expected a whole shape that fits {list(self.operand.dimensions)}, got {list(dimensions)}"
            )
        expected = operand_size_bytes(self.operand.type, shape)
        if size_bytes != expected:
            raise InvalidArgument(f"{where}: expected {expected} bytes for {list(shape)}, got {size_bytes}")
        return shape

    def free(self) -> None:
        """Gives its memory back, when no execution or copy uses it any more: those may wait for fences of a client without end."""
        with self._lock:
            if not self._is_freed:
                self._is_freed = True
                weakref.finalize(self._array, self._give_back, self._array.nbytes).atexit = False
                self._array = np.empty(0, dtype=np.uint8)  # A view of no bytes would keep all of them.
                self._state = _NEXT[self._state, "failed"]

    def __str__(self) -> str:
        return f"device memory {self.token}"


class DeviceBuffer(BufferDefaults):
    """The client's side of a memory: a ``hal.Buffer``. The memory is freed when this is closed or dropped.

    Attributes:
        token: Its name in requests; positive.
        size_bytes: Of the allocation; 0 while its shape is not wholly known.
    """

    def __init__(self, memory: DeviceMemory, table: MemoryTable) -> None:
        self._memory = memory
        self.token = memory.token
        self.size_bytes = memory.size_bytes
        self._finalizer = weakref.finalize(self, table.free, memory.token)

    def _open(self) -> DeviceMemory:
        if not self._finalizer.alive:
            raise InvalidArgument(f"{self._memory}: the buffer is closed")
        return self._memory

    async def copy_to(self, destination: Memory) -> None:
        """Copies the value into shared memory of exactly its size.

        Raises:
            InvalidArgument: Another size, an image, or memory that cannot be written.
            GeneralFailure: The memory is uninitialised.
        """
        memory = self._open()
        _check_no_image(destination, f"{memory}, copy to")
        memory.check_copy_to(destination.size_bytes)
        target = destination.array
        if not target.flags.writeable:
            raise InvalidArgument(
                f"{memory}, copy to: expected memory that can be written, got a read-only one"
            )
        source = memory.readable(memory.dimensions)
        flat = np.frombuffer(source, dtype=np.uint8)
        await _copy(target, flat)

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None:
        """Copies a value from shared memory of exactly its size. Any failure leaves the memory uninitialised.

        Args:
            source: The bytes.
            dimensions: The value's shape; empty where the allocation's is whole.

        Raises:
            InvalidArgument: Size and shape do not fit each other or the allocation, or it is an image.
            ResourceExhausted: No memory is left for it.
        """
        memory = self._open()
        array = None
        try:
            _check_no_image(source, f"{memory}, copy from")
            shape = memory.check_copy_from(source.size_bytes, tuple(dimensions))
            array = memory.writable(source.size_bytes)
            await _copy(array, source.array)
        except BaseException:
            memory.failed(array)
            raise
        memory.written(array, shape)

    async def aclose(self) -> None:
        """Frees the memory. Idempotent."""
        self._finalizer()


def _check_no_image(memory: Memory, where: str) -> None:
    # An image has gaps; its values come and go by executions alone.
    if memory.kind == MemoryKind.HARDWARE_BUFFER:
        raise InvalidArgument(f"{where}: expected memory without rows, got an image")


async def _copy(target: Bytes, source: Bytes) -> None:
    if source.nbytes <= COPY_ON_LOOP_BYTES_MAX:
        np.copyto(target, source)
    else:
        await _copies.run(client_of_call.get(), np.copyto, target, source)


class MemoryTable:
    """All memories of one device.

    Args:
        bytes_max: Limit of all of them together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._shares = Shares(bytes_max)
        # Reentrant: a buffer that the garbage collector drops is freed wherever the collector happens to run.
        self._lock = threading.RLock()
        self._by_token: list[DeviceMemory | None] = [None]  # Token 0 means no memory.
        self._free_tokens: list[int] = []

    @property
    def used_bytes(self) -> int:
        """Present size of all memories."""
        return self._shares.taken

    def __len__(self) -> int:
        """Number of present memories."""
        return len(self._by_token) - 1 - len(self._free_tokens)

    def allocate(self, operand: Operand, roles: frozenset[Role]) -> DeviceBuffer:
        """Makes a memory for values of ``operand``'s type and shape.

        Raises:
            GeneralFailure: An extension's or a vendor's type, whose size is unknown here.
            ResourceExhausted: No memory is left.
        """
        if is_extension_operand_type(operand.type) or operand.type == OperandType.OEM:
            raise GeneralFailure(
                "allocate: the size of an extension's or a vendor's values is not known here"
            )
        with self._lock:
            token = self._free_tokens.pop() if self._free_tokens else len(self._by_token)
            if token == len(self._by_token):
                self._by_token.append(None)
        try:
            memory = DeviceMemory(self, token, operand, roles)
        except BaseException:
            self._free_token(token)
            raise
        with self._lock:
            self._by_token[token] = memory
        _logger.debug("device memory %d: %d bytes for %d uses", token, memory.size_bytes, len(roles))
        return DeviceBuffer(memory, self)

    def memory(self, token: int) -> DeviceMemory:
        """The memory of a token.

        Raises:
            InvalidArgument: No memory has this token.
        """
        with self._lock:
            memory = self._by_token[token] if 0 < token < len(self._by_token) else None
        if memory is None:
            raise InvalidArgument(f"request: expected the token of a device memory, got {token}")
        return memory

    def free(self, token: int) -> None:
        """Frees a memory and its token; called once per memory."""
        memory = self.memory(token)
        memory.free()
        self._free_token(token)

    def _free_token(self, token: int) -> None:
        with self._lock:
            self._by_token[token] = None
            self._free_tokens.append(token)

    def _left_for(self, sharer: Sharer | None) -> int:
        if sharer is None:
            return self._shares.amount_max - self._shares.taken
        return self._shares.left_for(sharer.user, sharer)

    def _count(self, size_bytes: int, sharer: Sharer | None) -> None:
        if sharer is None:
            self._shares.taken += size_bytes
        else:
            self._shares.add(sharer.user, sharer, size_bytes)

    def take(self, size_bytes: int, sharer: Sharer | None = None) -> Bytes:
        """New memory, zeroed, counted.

        Args:
            size_bytes: Its size.
            sharer: The process that it is for, which leaves some for others; None for one that may have all.

        Raises:
            ResourceExhausted: The table's limit or the machine's memory is reached; persistent where it alone is too large.
        """
        with self._lock:
            left = self._left_for(sharer)
            if size_bytes > left:
                most = self._shares.amount_max if sharer is None else self._shares.amount_max // 4
                raise ResourceExhausted(
                    f"device memory: expected at most {left} bytes, got {size_bytes}",
                    transient=size_bytes <= most,
                )
            self._count(size_bytes, sharer)
        try:
            # Its pages are allocated when they are written, where a shortage cannot be reported.
            check_available(size_bytes)
            return np.zeros(size_bytes, dtype=np.uint8)
        except MemoryShortage as e:
            self.give_back(size_bytes, sharer)
            raise ResourceExhausted(
                f"device memory: cannot allocate {size_bytes} bytes: {e.strerror}", transient=e.transient
            ) from e
        except MemoryError as e:
            self.give_back(size_bytes, sharer)
            raise ResourceExhausted(f"device memory: no {size_bytes} bytes are left", transient=True) from e

    def give_back(self, size_bytes: int, sharer: Sharer | None = None) -> None:
        """Counts memory that was taken as free again."""
        with self._lock:
            self._count(-size_bytes, sharer)
