"""Memory pools: sealed, allocated, imported only when they are what they are said to be."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import HardwareBufferDesc, HardwareBufferFormat, Memory, MemoryKind
from fmq.available import Available


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


@pytest.mark.parametrize("size_bytes", [1 << 45, 1 << 62, 1 << 70])
def test_memory_larger_than_the_machine_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("pages were asked for"))
    with pytest.raises(ResourceExhausted, match=rf"{size_bytes} bytes: only \d+ bytes") as told:
        Memory.create(size_bytes)
    assert not told.value.transient


def test_memory_that_may_fit_later_is_refused_as_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("pages were asked for"))
    monkeypatch.setattr("fmq.available.available", lambda: Available(0, 1 << 30))
    with pytest.raises(ResourceExhausted, match="only 0 bytes") as told:
        Memory.create(1 << 30)
    assert told.value.transient
    image = HardwareBufferDesc(1 << 14, 1 << 14)
    with pytest.raises(ResourceExhausted):
        Memory.create_hardware_buffer(image)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_illegal_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="at least 1 byte"):
        Memory.create(size_bytes)


@pytest.mark.parametrize("size_bytes", ["x", 1.5, None])
def test_size_that_is_not_a_whole_number_is_refused(size_bytes: Any) -> None:
    with pytest.raises(InvalidArgument, match="memory, size: expected a whole number, got"):
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


# Images


@pytest.mark.parametrize("format", [f for f in HardwareBufferFormat if f != HardwareBufferFormat.BLOB])
def test_pixels_lie_in_rows_of_the_stride(format: HardwareBufferFormat) -> None:
    description = HardwareBufferDesc(3, 2, 2, format, 5)
    with contextlib.closing(Memory.create_hardware_buffer(description)) as image:
        assert image.kind == MemoryKind.HARDWARE_BUFFER and image.size_bytes == description.size_bytes
        image.array[:] = np.arange(image.size_bytes) % 251
        size = description.pixel_bytes
        for layer, row, column, channel in np.ndindex(image.pixels.shape):
            place = ((layer * 2 + row) * 5 + column) * size + channel
            assert image.pixels[layer, row, column, channel] == place % 251
        image.pixels[1, 1, 2, 0] = 255
        assert image.array[((2 + 1) * 5 + 2) * size] == 255


def test_image_of_a_descriptor_shares_its_pixels() -> None:
    description = HardwareBufferDesc(3, 2, 1, HardwareBufferFormat.R8G8B8X8_UNORM, 4)
    own = Memory.create_hardware_buffer(description)
    other = Memory.from_fd(own.fileno(), kind=MemoryKind.HARDWARE_BUFFER, image=description)
    own.pixels[...] = 7
    assert (other.pixels == 7).all() and other.pixels.shape == (1, 2, 3, 3)


def test_blob_is_bytes_without_a_description() -> None:
    blob = Memory.create_hardware_buffer(HardwareBufferDesc(40, 1, 1, HardwareBufferFormat.BLOB))
    assert (blob.kind, blob.size_bytes, blob.image) == (MemoryKind.HARDWARE_BUFFER_BLOB, 40, None)
    with pytest.raises(ValueError, match="expected an image"):
        _ = blob.pixels


@pytest.mark.parametrize(
    "description",
    [
        HardwareBufferDesc(0, 1),
        HardwareBufferDesc(1, -1),
        HardwareBufferDesc(1, 1, 0),
        HardwareBufferDesc(4, 1, stride=3),
        HardwareBufferDesc(4, 1, stride=-4),
        HardwareBufferDesc(4, 2, 1, HardwareBufferFormat.BLOB),
        HardwareBufferDesc(4, 1, 1, HardwareBufferFormat.BLOB, 8),
        HardwareBufferDesc(1 << 20, 1 << 20),
    ],
)
def test_buffer_that_cannot_be_is_refused(description: HardwareBufferDesc) -> None:
    with pytest.raises(InvalidArgument, match="hardware buffer"):
        Memory.create_hardware_buffer(description)


def test_image_needs_a_description_and_all_of_its_bytes() -> None:
    memory = Memory.create(4096)
    description = HardwareBufferDesc(32, 32)
    with pytest.raises(InvalidArgument, match="description"):
        Memory.from_fd(memory.fileno(), kind=MemoryKind.HARDWARE_BUFFER)
    with pytest.raises(InvalidArgument, match="description"):
        Memory.from_fd(memory.fileno(), image=description)
    with pytest.raises(InvalidArgument, match="the file has 4096"):
        Memory.from_fd(
            memory.fileno(), kind=MemoryKind.HARDWARE_BUFFER, image=HardwareBufferDesc(32, 32, stride=33)
        )
    with pytest.raises(InvalidArgument, match="expected 4096 bytes"):
        Memory.from_fd(memory.fileno(), size_bytes=4095, kind=MemoryKind.HARDWARE_BUFFER, image=description)
    blob = HardwareBufferDesc(4096, 1, 1, HardwareBufferFormat.BLOB)
    with pytest.raises(InvalidArgument, match="hardware_buffer_blob"):
        Memory.from_fd(memory.fileno(), kind=MemoryKind.HARDWARE_BUFFER, image=blob)


def test_memory_of_constants_cannot_be_written() -> None:
    parts = [(0, np.arange(100, dtype=np.uint8)), (128, np.full(5000, 7, np.uint8))]
    memory = Memory.of_constants(5128, parts)
    assert memory.array[:100].tolist() == list(range(100))
    assert not memory.array[100:128].any() and (memory.array[128:] == 7).all()
    assert memory.is_unchanging
    with pytest.raises(ValueError, match="read-only"):
        memory.array[0] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(memory.fileno(), b"1", 0)
    with pytest.raises(GeneralFailure, match="cannot map"):
        Memory.from_fd(memory.fileno())
    other = Memory.from_fd(memory.fileno(), writable=False)
    assert other.is_unchanging and other.file == memory.file
    memory.close()
    assert not memory.is_unchanging and other.array[128] == 7


def test_memory_that_can_be_written_is_not_unchanging(tmp_path: Path) -> None:
    assert not Memory.create(64).is_unchanging
    (tmp_path / "file").write_bytes(bytes(64))
    with open(tmp_path / "file", "rb") as file:
        memory = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD, writable=False)
    assert not memory.is_unchanging


def test_constants_that_are_too_large_are_refused() -> None:
    with pytest.raises(ResourceExhausted, match="bytes"):
        Memory.of_constants(1 << 60, [(0, np.zeros(1, np.uint8))])
