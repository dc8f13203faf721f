"""Queues that must not come about: sizes, descriptors and memory that are refused, and nothing left behind by it."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import fmq
from fmq.descriptor import EXTENT_MAX, OFFSET_MAX
from fmq.region import create_memory

COUNT = 2048
HUGE_BYTES = 2 << 20
"""Size of a huge page of most machines."""


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def replaced(descriptor: fmq.MQDescriptor, index: int, **changes: int) -> fmq.MQDescriptor:
    grantors = list(descriptor.grantors)
    grantors[index] = msgspec.structs.replace(grantors[index], **changes)
    return msgspec.structs.replace(descriptor, grantors=tuple(grantors))


@pytest.fixture
def good(make: Callable[..., fmq.MessageQueue]) -> fmq.MessageQueue:
    return make(1, COUNT)


@pytest.fixture
def memory() -> Iterator[Callable[[int], int]]:
    fds: list[int] = []

    def create(size_bytes: int) -> int:
        fds.append(create_memory("test ring", size_bytes))
        return fds[-1]

    yield create
    for fd in fds:
        os.close(fd)


def refused(descriptor: fmq.MQDescriptor, fds: Any, match: str, **options: Any) -> None:
    before = open_descriptors()
    with pytest.raises(fmq.InvalidDescriptor, match=match):
        fmq.MessageQueue.attach(descriptor, fds, **options)
    assert open_descriptors() == before


# The suites BadQueueConfig, HidlOnlyBadQueueConfig and AidlOnlyBadQueueConfig of the original.


@pytest.mark.parametrize(
    ("quantum_bytes", "count"),
    [(1, 2**31), (2, 2**63), (2**32, 2**32), (8, EXTENT_MAX // 8 + 1), (2**64, 2**64)],
)
def test_queue_size_too_large(quantum_bytes: int, count: int) -> None:
    with pytest.raises(fmq.InvalidArgument, match="at most"):
        fmq.MessageQueue.create(quantum_bytes, count)


@pytest.mark.parametrize(("quantum_bytes", "count"), [(0, 16), (16, 0), (-1, 16), (16, -1), (-4, -4)])
def test_empty_and_negative_sizes_are_refused(quantum_bytes: int, count: int) -> None:
    with pytest.raises(fmq.InvalidArgument, match="at least 1"):
        fmq.MessageQueue.create(quantum_bytes, count)


def test_sanity_check(memory: Callable[[int], int]) -> None:
    place = fmq.GrantorDescriptor
    descriptor = fmq.MQDescriptor(
        (place(0, 0, 8), place(0, 8, 8), place(0, 16, COUNT)), 1, fmq.Flavour.SYNCHRONIZED
    )
    with fmq.MessageQueue.attach(descriptor, [memory(4096)], reset=True) as queue:
        assert queue.write_many(bytes(range(100)))
        assert queue.read_many(100) == bytes(range(100))


@pytest.mark.parametrize("index", range(6))
def test_bad_fd_index(good: fmq.MessageQueue, index: int) -> None:
    refused(replaced(good.descriptor, index, fd_index=5), good.fds, "fd index: expected 0 to 2, got 5")


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("extent", [0xFFFFF041, 2**64 - 1, EXTENT_MAX + 1, 0])
def test_extent_too_large(good: fmq.MessageQueue, index: int, extent: int) -> None:
    refused(replaced(good.descriptor, index, extent=extent), good.fds, "extent: expected")


def test_extent_beyond_the_file(good: fmq.MessageQueue) -> None:
    refused(
        replaced(good.descriptor, 2, extent=1 << 20), good.fds, "expected at least 1052672 bytes, got 8192"
    )


def test_look_for_leaked_fds(good: fmq.MessageQueue) -> None:
    before = open_descriptors()
    bad = replaced(good.descriptor, 2, extent=1 << 20)
    for _ in range(2000):  # beyond a usual limit of 1024 descriptors
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.MessageQueue.attach(bad, good.fds)
    assert open_descriptors() == before


def test_queue_size_too_large_for_aidl(good: fmq.MessageQueue) -> None:
    refused(replaced(good.descriptor, 1, offset=OFFSET_MAX + 1), good.fds, "offset: expected")


@pytest.mark.parametrize("field", ["quantum_bytes", "flavour", "version"])
def test_negative_aidl_descriptor(good: fmq.MessageQueue, field: str) -> None:
    refused(msgspec.structs.replace(good.descriptor, **{field: -1}), good.fds, r"expected .* got -1")


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("field", ["fd_index", "offset", "extent", "flags"])
def test_negative_aidl_descriptor_grantor(good: fmq.MessageQueue, index: int, field: str) -> None:
    refused(replaced(good.descriptor, index, **{field: -1}), good.fds, r"expected .* got -1")


def test_mismatched_payload_size(good: fmq.MessageQueue) -> None:
    refused(good.descriptor, good.fds, "quantum: expected 4 bytes, got 1", quantum_bytes=4)
    refused(replaced(msgspec.structs.replace(good.descriptor, quantum_bytes=3), 2), good.fds, "multiple of 3")
    with pytest.raises(fmq.InvalidArgument, match="dtype: expected 1 bytes an item"):
        fmq.MessageQueue.attach(good.descriptor, good.fds, dtype="<i4")


def test_mismatched_flavour(good: fmq.MessageQueue) -> None:
    refused(good.descriptor, good.fds, "flavour: expected 2, got 1", flavour=fmq.Flavour.UNSYNCHRONIZED)
    refused(msgspec.structs.replace(good.descriptor, flavour=3), good.fds, "flavour: expected 1 or 2, got 3")


# More of the same kind.


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_too_few_grantors(good: fmq.MessageQueue, count: int) -> None:
    cut = msgspec.structs.replace(good.descriptor, grantors=good.descriptor.grantors[:count])
    refused(cut, good.fds, f"grantors: expected 3, 4 or 6, got {count}")


@pytest.mark.parametrize("index", range(6))
def test_misaligned_offset(good: fmq.MessageQueue, index: int) -> None:
    offset = good.descriptor.grantors[index].offset + 4
    refused(replaced(good.descriptor, index, offset=offset), good.fds, "offset: expected a multiple of 8")


def test_overlapping_grantors(good: fmq.MessageQueue) -> None:
    offset = good.descriptor.grantors[fmq.Grantor.WRITEPTR].offset
    refused(replaced(good.descriptor, 0, offset=offset), good.fds, "grantors: expected no overlap")


def test_unsynchronized_write_counter_needs_room_for_its_claim(make: Callable[..., fmq.MessageQueue]) -> None:
    queue = make(1, COUNT, flavour=fmq.Flavour.UNSYNCHRONIZED)
    refused(replaced(queue.descriptor, 1, extent=8), queue.fds, "extent: expected 16")


@pytest.mark.parametrize("events", [(0, 1), (1, 1), (-1, 1), (1, 7), (-2, -2)])
def test_bad_event_indices(good: fmq.MessageQueue, events: tuple[int, int]) -> None:
    bad = msgspec.structs.replace(good.descriptor, reader_event_index=events[0], writer_event_index=events[1])
    refused(bad, good.fds, "event indices")


def test_unsealed_memory(good: fmq.MessageQueue) -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8192)
        refused(
            good.descriptor,
            [fd, *good.fds[1:]],
            r"sealed against shrinking and growing \(0x6\), got seals 0x0",
        )
    finally:
        os.close(fd)


def test_memory_of_huge_pages(good: fmq.MessageQueue) -> None:
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        refused(good.descriptor, [fd, *good.fds[1:]], "expected memory of ordinary pages, got huge ones")
    finally:
        os.close(fd)


def test_descriptors_that_are_not_memory(good: fmq.MessageQueue) -> None:
    read_end, write_end = os.pipe()
    one, other = socket.socketpair()
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    with tempfile.TemporaryFile() as file, one, other:
        file.truncate(8192)
        for fd in (read_end, write_end, one.fileno(), directory, file.fileno(), good.fds[1]):
            refused(good.descriptor, [fd, *good.fds[1:]], "expected sealed memory")
    for fd in (read_end, write_end, directory):
        os.close(fd)


def test_memory_in_the_place_of_an_eventfd(good: fmq.MessageQueue) -> None:
    refused(good.descriptor, [good.fds[0], good.fds[0], good.fds[2]], "expected an eventfd, got /memfd")


@pytest.mark.parametrize("fds", [[], [0] * 5])
def test_wrong_number_of_descriptors(good: fmq.MessageQueue, fds: list[int]) -> None:
    refused(good.descriptor, fds, f"file descriptors: expected 1 to 4, got {len(fds)}")


@pytest.mark.parametrize("fd", [-1, 100_000, 2**40])
def test_descriptors_that_are_not_open(good: fmq.MessageQueue, fd: int) -> None:
    refused(good.descriptor, [fd, *good.fds[1:]], "expected an open file descriptor")


def test_descriptor_limit_leaves_nothing_behind(good: fmq.MessageQueue) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    free = os.dup(0)
    os.close(free)
    failures = 0
    for room in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, hard))
        try:
            for call in (
                lambda: fmq.MessageQueue.create(1, COUNT),
                lambda: fmq.MessageQueue.attach(good.descriptor, good.fds),
            ):
                try:
                    call().close()
                except OSError:
                    failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_descriptors() == before
    assert failures > 0


# The suite DoubleFdFailures: the ring in memory of the caller's own.


def test_invalid_fd() -> None:
    before = open_descriptors()
    with pytest.raises(fmq.InvalidDescriptor, match="expected an open file descriptor"):
        fmq.MessageQueue.create(64, 16, ring_fd=3000)
    assert open_descriptors() == before


def test_invalid_fd_size(memory: Callable[[int], int]) -> None:
    before = memory(16 * 64 - 1), open_descriptors()
    with pytest.raises(fmq.InvalidDescriptor, match="expected at least 1024 bytes, got 1023"):
        fmq.MessageQueue.create(64, 16, ring_fd=before[0])
    assert open_descriptors() == before[1]


def test_larger_fd_size(memory: Callable[[int], int]) -> None:
    with fmq.MessageQueue.create(64, 16, ring_fd=memory(16 * 64 * 3)) as queue:
        assert queue.count == 16
        assert queue.write_many(bytes(1024))
        assert not queue.write(bytes(64))


# The form in bytes.


def test_bytes_keep_every_field(good: fmq.MessageQueue) -> None:
    assert fmq.MQDescriptor.from_bytes(good.descriptor.to_bytes()) == good.descriptor


def test_grantors_in_bytes_have_the_original_layout() -> None:
    grantor = fmq.GrantorDescriptor(fd_index=2, offset=3, extent=4, flags=1)
    tail = fmq.MQDescriptor((grantor,), 1, 1).to_bytes()[-24:]
    assert tail == bytes.fromhex("01000000 02000000 03000000 00000000 0400000000000000")


def test_every_cut_and_every_flipped_byte_is_refused_or_still_a_queue(good: fmq.MessageQueue) -> None:
    data = good.descriptor.to_bytes()
    before = open_descriptors()
    for length in range(len(data)):
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.MQDescriptor.from_bytes(data[:length])
    survivors = 0
    for index in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[index] ^= flip
            try:
                descriptor = fmq.MQDescriptor.from_bytes(bytes(changed))
                with fmq.MessageQueue.attach(descriptor, good.fds) as queue:
                    survivors += 1
                    queue.write_many(bytes(queue.quantum_bytes))
            except (fmq.InvalidDescriptor, fmq.CorruptQueue):
                pass
    assert open_descriptors() == before
    assert 0 < survivors < 3 * len(data)


def test_fields_too_large_for_bytes_are_refused() -> None:
    grantor = fmq.GrantorDescriptor(fd_index=0, offset=-1, extent=4)
    with pytest.raises(fmq.InvalidDescriptor, match="does not fit its width"):
        fmq.MQDescriptor((grantor,), 1, 1).to_bytes()


def test_negative_spin_window_is_refused() -> None:
    before = open_descriptors()
    with pytest.raises(fmq.InvalidArgument, match="spin_ns: expected at least 0, got -1"):
        fmq.MessageQueue.create(1, 16, spin_ns=-1)
    assert open_descriptors() == before


def test_element_types_with_python_objects_are_refused() -> None:
    with pytest.raises(fmq.InvalidArgument, match="no Python objects"):
        fmq.MessageQueue.create(8, 16, dtype=object)
