"""MQDescriptor: the places of a queue's parts in shared memory, and the checks of one that came from a peer.

Owns the record, its form as bytes, and every rule about its numbers that can be checked without touching memory. Refuses
to own descriptors of files (region.py) and the shared words (`_native.c`).

Invariants of a checked descriptor:
1. It has 3 grantors (counters and data), 4 (and an event flag word) or 6 (and a parking word for either side).
2. Every grantor is 8-byte aligned below 2 GiB in one of the memories sent along, and no two overlap.
3. The data extent is a positive whole number of quanta.

Source: libfmq's MQDescriptor and GrantorDescriptor (24 bytes: flags u32 @0, fd index u32 @4, offset u32 @8, extent
u64 @16; read counter, write counter, data, event flag). The two parking grantors are ours, and so is a second counter
beside the write counter of an unsynchronized queue, which announces what is about to be overwritten.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

from fmq.errors import InvalidArgument, InvalidDescriptor

__all__ = ["Flavour", "Grantor", "GrantorDescriptor", "MQDescriptor", "check_descriptor", "plan_layout"]

VERSION: Final = 1
LINE_BYTES: Final = 128
"""Two cache lines: processors fetch lines in pairs, so a line alone still shares its neighbour's traffic."""
DATA_OFFSET_BYTES: Final = 4096
"""The ring starts on a page of its own."""
PAGE_BYTES: Final = 4096
OFFSET_MAX: Final = 2**31 - 1
EXTENT_MAX: Final = 2**31 - 1 - PAGE_BYTES
"""libfmq's limit, which also bounds what a peer can make this process map."""
FDS_MAX: Final = 4
"""Ring, the caller's own ring, and an eventfd for either side."""

_MAGIC: Final = b"FMQ1"
_HEADER: Final = struct.Struct("<4sIIIii")
_GRANTOR: Final = struct.Struct("<IIIxxxxQ")


class Flavour(enum.IntEnum):
    """The synchronization of the two sides, with libfmq's numbers."""

    SYNCHRONIZED = 1
    """One writer, one reader; a full queue refuses writes and nothing is lost."""
    UNSYNCHRONIZED = 2
    """One writer, any number of readers; writes always succeed and overwrite the oldest data."""


class Grantor(enum.IntEnum):
    """The part of a queue whose place the grantor at this index gives."""

    READPTR = 0
    WRITEPTR = 1
    DATA = 2
    EVFLAG = 3
    READER_PARK = 4
    WRITER_PARK = 5


class GrantorDescriptor(msgspec.Struct, frozen=True):
    """The place of one part: `extent` bytes at `offset` of the memory sent as descriptor number `fd_index`."""

    fd_index: int
    offset: int
    extent: int
    flags: int = 0


class MQDescriptor(msgspec.Struct, frozen=True):
    """The form of a queue for another process; the file descriptors are sent beside it, in order.

    Attributes:
        grantors: One per part, in the order of `Grantor`.
        quantum_bytes: Size of one element.
        flavour: `Flavour` as a number; a peer's may be any number until checked.
        reader_event_index: Which descriptor is the eventfd that wakes the reader's event loop; -1 without.
        writer_event_index: The same for the writer.
        version: Of this record.
    """

    grantors: tuple[GrantorDescriptor, ...]
    quantum_bytes: int
    flavour: int
    reader_event_index: int = -1
    writer_event_index: int = -1
    version: int = VERSION

    @property
    def count(self) -> int:
        """Capacity in elements, of a checked descriptor."""
        return self.grantors[Grantor.DATA].extent // self.quantum_bytes

    def to_bytes(self) -> bytes:
        """The record as bytes, grantors in libfmq's layout.

        Raises:
            InvalidDescriptor: A field does not fit its width.
        """
        try:
            head = _HEADER.pack(
                _MAGIC,
                self.quantum_bytes,
                self.flavour,
                len(self.grantors),
                self.reader_event_index,
                self.writer_event_index,
            )
            return head + b"".join(
                _GRANTOR.pack(g.flags, g.fd_index, g.offset, g.extent) for g in self.grantors
            )
        except struct.error as error:
            raise InvalidDescriptor(
                f"descriptor: a field does not fit its width in bytes: {error}"
            ) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> MQDescriptor:
        """Parses what `to_bytes` made; numbers are not checked here but when attaching.

        Raises:
            InvalidDescriptor: Not such bytes: wrong magic, or a length that does not fit the number of grantors.
        """
        if len(data) < _HEADER.size or data[:4] != _MAGIC:
            raise InvalidDescriptor(
                f"descriptor: expected at least {_HEADER.size} bytes starting with {_MAGIC!r}, "
                f"got {len(data)} bytes starting with {bytes(data[:4])!r}"
            )
        _, quantum_bytes, flavour, grantor_count, reader_event, writer_event = _HEADER.unpack_from(data)
        expected = _HEADER.size + grantor_count * _GRANTOR.size
        if grantor_count > len(Grantor) or len(data) != expected:
            raise InvalidDescriptor(
                f"descriptor: expected at most {len(Grantor)} grantors and their bytes, "
                f"got {grantor_count} grantors in {len(data)} bytes"
            )
        grantors = tuple(
            GrantorDescriptor(fd_index=fd_index, offset=offset, extent=extent, flags=flags)
            for flags, fd_index, offset, extent in _GRANTOR.iter_unpack(data[_HEADER.size :])
        )
        return cls(grantors, quantum_bytes, flavour, reader_event, writer_event)


def plan_layout(
    quantum_bytes: int, count: int, flavour: Flavour, *, event_flag: bool, own_ring: bool
) -> tuple[MQDescriptor, int]:
    """Lays out a new queue; every word that one side writes gets a line of its own.

    Args:
        quantum_bytes: Size of one element, at least 1.
        count: Capacity in elements, at least 1.
        flavour: Of the queue.
        event_flag: Whether to include the event flag word and, for the synchronized flavour, the parking words.
        own_ring: Whether the ring is in memory of the caller, sent as the second descriptor.

    Returns:
        The descriptor and the bytes of the queue's own memory.

    Raises:
        InvalidArgument: A size of zero or less, or more bytes than a grantor can express.
    """
    if quantum_bytes < 1 or count < 1 or quantum_bytes * count > EXTENT_MAX:
        raise InvalidArgument(
            "queue: expected a quantum and a count of at least 1 whose product is at most "
            f"{EXTENT_MAX} bytes, got {quantum_bytes} x {count}"
        )
    parked = event_flag and flavour is Flavour.SYNCHRONIZED
    data = GrantorDescriptor(int(own_ring), 0 if own_ring else DATA_OFFSET_BYTES, quantum_bytes * count)
    grantors = [
        GrantorDescriptor(0, LINE_BYTES, 8),
        GrantorDescriptor(0, 0, 8 if flavour is Flavour.SYNCHRONIZED else 16),
        data,
    ]
    if event_flag:
        grantors.append(GrantorDescriptor(0, 4 * LINE_BYTES, 4))
    if parked:
        grantors += [GrantorDescriptor(0, 2 * LINE_BYTES, 4), GrantorDescriptor(0, 3 * LINE_BYTES, 4)]
    first_event = 1 + int(own_ring)
    descriptor = MQDescriptor(
        tuple(grantors),
        quantum_bytes,
        int(flavour),
        first_event if parked else -1,
        first_event + 1 if parked else -1,
    )
    needed = DATA_OFFSET_BYTES if own_ring else DATA_OFFSET_BYTES + data.extent
    return descriptor, (needed + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def check_descriptor(descriptor: MQDescriptor, fd_count: int) -> dict[int, int]:
    """Checks every number of a descriptor from outside against every other.

    Args:
        descriptor: As it came.
        fd_count: Number of file descriptors that came with it.

    Returns:
        For each descriptor index that is memory, how many bytes of it the queue uses.

    Raises:
        InvalidDescriptor: With the field, what was expected and what came.
    """
    if descriptor.version != VERSION:
        raise _refused("version", VERSION, descriptor.version)
    if descriptor.flavour not in (Flavour.SYNCHRONIZED, Flavour.UNSYNCHRONIZED):
        raise _refused("flavour", "1 or 2", descriptor.flavour)
    if not 1 <= descriptor.quantum_bytes <= EXTENT_MAX:
        raise _refused("quantum", f"1 to {EXTENT_MAX}", descriptor.quantum_bytes)
    if not 1 <= fd_count <= FDS_MAX:
        raise _refused("file descriptors", f"1 to {FDS_MAX}", fd_count)
    if len(descriptor.grantors) not in (3, 4, 6):
        raise _refused("grantors", "3, 4 or 6", len(descriptor.grantors))
    for index, grantor in enumerate(descriptor.grantors):
        _check_grantor(Grantor(index), grantor, descriptor, fd_count)
    _check_overlap(descriptor.grantors)
    _check_events(descriptor, fd_count)
    needed: dict[int, int] = {}
    for grantor in descriptor.grantors:
        needed[grantor.fd_index] = max(needed.get(grantor.fd_index, 0), grantor.offset + grantor.extent)
    return needed


def _refused(what: str, expected: object, got: object) -> InvalidDescriptor:
    return InvalidDescriptor(f"descriptor: {what}: expected {expected}, got {got}")


def _check_grantor(
    which: Grantor, grantor: GrantorDescriptor, descriptor: MQDescriptor, fd_count: int
) -> None:
    name = f"grantor {int(which)} ({which.name})"
    if not 0 <= grantor.fd_index < fd_count:
        raise _refused(f"{name} fd index", f"0 to {fd_count - 1}", grantor.fd_index)
    if not 0 <= grantor.offset <= OFFSET_MAX or grantor.offset % 8:
        raise _refused(f"{name} offset", f"a multiple of 8 from 0 to {OFFSET_MAX}", grantor.offset)
    if not 0 <= grantor.flags < 2**32:
        raise _refused(f"{name} flags", "32 bits", grantor.flags)
    quantum = descriptor.quantum_bytes
    if which is Grantor.DATA:
        if not 0 < grantor.extent <= EXTENT_MAX or grantor.extent % quantum:
            raise _refused(
                f"{name} extent", f"a positive multiple of {quantum} up to {EXTENT_MAX}", grantor.extent
            )
        return
    least = 4
    if which is Grantor.READPTR:
        least = 8
    elif which is Grantor.WRITEPTR:
        least = 8 if descriptor.flavour == Flavour.SYNCHRONIZED else 16
    if not least <= grantor.extent <= EXTENT_MAX:
        raise _refused(f"{name} extent", f"{least} to {EXTENT_MAX}", grantor.extent)


def _check_overlap(grantors: tuple[GrantorDescriptor, ...]) -> None:
    places = sorted((g.fd_index, g.offset, g.extent) for g in grantors)
    end_fd, end = -1, 0
    for fd, offset, extent in places:
        if fd == end_fd and offset < end:
            raise _refused("grantors", "no overlap", f"{extent} bytes at {offset} in what reaches to {end}")
        end_fd, end = fd, offset + extent


def _check_events(descriptor: MQDescriptor, fd_count: int) -> None:
    events = (descriptor.reader_event_index, descriptor.writer_event_index)
    if events == (-1, -1):
        return
    memory = {grantor.fd_index for grantor in descriptor.grantors}
    parked = len(descriptor.grantors) == len(Grantor)
    if not parked or len(set(events)) != 2 or any(not 0 <= e < fd_count or e in memory for e in events):
        raise _refused(
            "event indices", "none, or two of the descriptors that are not memory, and 6 grantors", events
        )
