"""Memory pools: sealed, allocated, imported only when they are what they are said to be."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.hal import Memory, MemoryKind


def test_created_memory_is_zeroed_writable_and_sealed() -> None:
    memory = Memory.create(1000)
    assert memory.size_bytes == 1000 and not memory.array.any()
    memory.array[999] = 7
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 10)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 10_000)
    assert not os.get_inheritable(memory.fileno())


def test_import_shares_the_bytes_and_owns_its_own_descriptor() -> None:
    memory = Memory.create(64)
    other = Memory.from_fd(memory.fileno())
    memory.close()
    other.array[:4] = (1, 2, 3, 4)
    assert memory.array[:4].tolist() == [1, 2, 3, 4], "the mapping outlives the descriptor"
    assert memory.is_closed and not other.is_closed
    with pytest.raises(ValueError, match="closed"):
        memory.fileno()


def test_read_only_import_cannot_be_written() -> None:
    memory = Memory.create(64)
    other = Memory.from_fd(memory.fileno(), writable=False)
    with pytest.raises(ValueError, match="read-only"):
        other.array[0] = 1


def test_dropping_the_last_reference_gives_everything_back() -> None:
    memory = Memory.create(64)
    fd = memory.fileno()
    view = memory.array[:10]
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    view[0] = 1  # the pages live as long as somebody looks at them


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_illegal_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="at least 1 byte"):
        Memory.create(size_bytes)


def test_unsealed_memory_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(InvalidArgument, match="sealed against shrinking and growing"):
            Memory.from_fd(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(InvalidArgument, match="sealed"):
            Memory.from_fd(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert Memory.from_fd(fd).size_bytes == 4096
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("size_bytes", "offset"), [(65, 0), (64, 4096), (0, 0), (-1, 0), (64, 1), (64, -4096), (2**62, 4096)]
)
def test_memory_smaller_than_declared_is_refused(size_bytes: int, offset: int) -> None:
    memory = Memory.create(64)
    with pytest.raises(InvalidArgument):
        Memory.from_fd(memory.fileno(), size_bytes=size_bytes, offset=offset)


def test_descriptor_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    try:
        with pytest.raises(InvalidArgument):
            Memory.from_fd(read)
    finally:
        os.close(read)
    with pytest.raises(InvalidArgument, match="cannot be used"):
        Memory.from_fd(read)


def test_plain_file_can_be_mapped_as_mmap_fd(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as file:
        memory = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD, writable=False)
        with pytest.raises(InvalidArgument, match="sealed"):
            Memory.from_fd(file.fileno())
    np.testing.assert_array_equal(memory.array, np.arange(200, dtype=np.uint8))


@pytest.mark.parametrize("spare", [8, 9, 10])
def test_descriptor_limit_is_a_clean_error_and_leaks_nothing(spare: int) -> None:
    # A pool takes two descriptors (its own and mmap's): with odd and even room the limit is met at either of them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = Memory.create(64)
    before = len(os.listdir("/proc/self/fd"))
    held: list[Memory] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
    try:
        with pytest.raises(ResourceExhausted):
            while True:
                held.append(Memory.create(64))
        with pytest.raises(ResourceExhausted):
            while True:
                held.append(Memory.from_fd(memory.fileno()))
        held.clear()
        assert len(os.listdir("/proc/self/fd")) == before
        assert Memory.create(64).size_bytes == 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
