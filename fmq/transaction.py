"""A begun write or read: the one or two stretches of the ring it covers, without a copy.

Owns the views and their release. Refuses to own the counters: committing goes through the queue that began it.

Invariants:
1. The views are released when the transaction ends, so a late access raises instead of touching memory that the peer owns by then;
   a view exported further (to a numpy array) cannot be released, and the caller must drop it.
2. A slot index is checked against the count, `index == count` included (libfmq's check lets that one through).

Source: libfmq's MemTransaction.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from fmq.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Transaction"]


class Transaction:
    """One or two regions of a ring, in order; the second is there only where the first ends at the ring's end.

    Attributes:
        regions: The views as bytes; writable for a write, read-only for a read.
        count: Elements covered (bytes, for a message).
        quantum_bytes: Size of one element (1 for a message).
    """

    __slots__ = ("count", "quantum_bytes", "regions")

    def __init__(self, regions: tuple[memoryview, ...], count: int, quantum_bytes: int) -> None:
        self.regions = regions
        self.count = count
        self.quantum_bytes = quantum_bytes

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled: its regions are memory of the queue."""
        raise TypeError("transaction: cannot be copied or pickled; bytes(region) copies a region")

    def __repr__(self) -> str:
        return f"<fmq.Transaction of {self.count} x {self.quantum_bytes} bytes>"

    @property
    def first(self) -> memoryview:
        """The first region; all of the transaction unless it wraps."""
        return self.regions[0]

    @property
    def second(self) -> memoryview | None:
        """The region after the wrap, from the start of the ring; None where there is no wrap."""
        return self.regions[1] if len(self.regions) > 1 else None

    def slot(self, index: int) -> memoryview:
        """The bytes of one element.

        Raises:
            InvalidArgument: `index` is not from 0 to `count - 1`.
        """
        if not 0 <= index < self.count:
            raise InvalidArgument(f"transaction: expected a slot from 0 to {self.count - 1}, got {index}")
        quantum = self.quantum_bytes
        start = index * quantum
        first = self.regions[0]
        if start < len(first):
            return first[start : start + quantum]
        start -= len(first)
        return self.regions[1][start : start + quantum]

    def copy_to(self, elements: Buffer, start: int = 0) -> None:
        """Copies whole elements into a begun write, from slot `start` on.

        Raises:
            InvalidArgument: They are not within the transaction.
        """
        source = memoryview(elements).cast("B")
        offset = self._offset(start, len(source))
        first = self.regions[0]
        split = max(0, min(len(source), len(first) - offset))
        if split:
            first[offset : offset + split] = source[:split]
        if split < len(source):
            at = max(0, offset - len(first))
            self.regions[1][at : at + len(source) - split] = source[split:]

    def copy_from(self, start: int = 0, count: int | None = None) -> bytes:
        """The bytes of `count` elements (None: all the rest) from slot `start` on.

        Of an unsynchronized queue they may be trusted only after `commit_read` has succeeded.

        Raises:
            InvalidArgument: They are not within the transaction.
        """
        size = (self.count - start if count is None else count) * self.quantum_bytes
        offset = self._offset(start, size)
        first = self.regions[0]
        if offset + size <= len(first):
            return bytes(first[offset : offset + size])
        if offset >= len(first):
            return bytes(self.regions[1][offset - len(first) : offset - len(first) + size])
        return bytes(first[offset:]) + bytes(self.regions[1][: offset + size - len(first)])

    def release(self) -> None:
        """Releases the views; later access to them raises ValueError. Idempotent."""
        for region in self.regions:
            with contextlib.suppress(BufferError):
                region.release()

    def _offset(self, start: int, size_bytes: int) -> int:
        offset = start * self.quantum_bytes
        if (
            start < 0
            or size_bytes < 0
            or size_bytes % self.quantum_bytes
            or offset + size_bytes > self._size_bytes
        ):
            raise InvalidArgument(
                f"transaction of {self.count} elements of {self.quantum_bytes} bytes: expected whole elements within "
                f"it, got {size_bytes} bytes from slot {start} on"
            )
        return offset

    @property
    def _size_bytes(self) -> int:
        return self.count * self.quantum_bytes
