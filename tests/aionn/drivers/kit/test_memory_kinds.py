"""Pools of every kind, as constants and as arguments, in this process and through a driver process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.drivers.kit import caching
from aionn.errors import InvalidArgument
from aionn.hal import (
    CacheFiles,
    DataLocation,
    Device,
    Memory,
    MemoryKind,
    OperandLifeTime,
    OperandType,
    OperationType,
)
from aionn.models.builder import GraphBuilder

A = np.arange(6, dtype=np.float32).reshape(2, 3)
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def file_pool(tmp_path: Path) -> Iterator[Any]:
    """Makes pools of an ordinary file: ``file_pool(flags, offset)``, filled with bytes that tell their place."""
    fds: list[int] = []

    def make(flags: int = os.O_RDWR, offset: int = 0) -> Memory:
        path = tmp_path / "pool"
        content = np.zeros(3 * PAGE, np.uint8)
        content[:] = np.arange(3 * PAGE) // PAGE + 1
        path.write_bytes(content.tobytes())
        fds.append(os.open(path, flags))
        return Memory.from_fd(
            fds[-1],
            size_bytes=PAGE,
            offset=offset,
            kind=MemoryKind.MMAP_FD,
            writable=flags == os.O_RDWR,
        )

    yield make
    for fd in fds:
        os.close(fd)


def made(kind: MemoryKind) -> Memory:
    return Memory.create(PAGE, kind=kind)


def fill(memory: Memory) -> None:
    memory.array[: A.nbytes] = np.frombuffer(A.tobytes(), np.uint8)


@pytest.mark.parametrize("which", ["ashmem", "hardware_buffer_blob", "mmap_fd", "mmap_fd at an offset"])
async def test_arguments_of_every_mapped_kind(device: Device, small: Any, file_pool: Any, which: str) -> None:
    pool = file_pool(os.O_RDWR, PAGE * ("offset" in which)) if "mmap" in which else made(MemoryKind(which))
    fill(pool)
    prepared = await device.prepare_model(small.sum_model())
    request = small.request([A, A], [(A.nbytes, (2, 3))])
    await prepared.execute_synchronously(msgspec.structs.replace(request, pools=(pool, *request.pools[1:])))
    np.testing.assert_array_equal(small.output(request), 2 * A.ravel())
    back = msgspec.structs.replace(request, pools=(*request.pools[:2], pool))
    await prepared.execute_synchronously(back)
    np.testing.assert_array_equal(pool.array[: A.nbytes].view(np.float32), 2 * A.ravel())


async def test_constants_in_a_file_that_may_only_be_read(device: Device, small: Any, file_pool: Any) -> None:
    pool = file_pool(os.O_RDONLY, 2 * PAGE)
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    b = graph.constant(np.zeros((2, 3), np.float32))
    model = graph.build([graph.result(OperationType.ADD, [a, b, graph.constant(0)], a)])
    index = next(i for i, o in enumerate(model.main.operands) if o.dimensions and o.is_constant)
    operands = list(model.main.operands)
    operands[index] = msgspec.structs.replace(
        operands[index], lifetime=OperandLifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 0, A.nbytes)
    )
    main = msgspec.structs.replace(model.main, operands=tuple(operands))
    prepared = await device.prepare_model(msgspec.structs.replace(model, main=main, pools=(pool,)))
    request = small.request([A], [(A.nbytes, (2, 3))])
    await prepared.execute_synchronously(request)
    constant = np.frombuffer(b"\x03" * 4, np.float32)[0]
    np.testing.assert_array_equal(small.output(request), A.ravel() + constant)


async def test_output_into_memory_that_may_only_be_read_is_refused(
    device: Device, small: Any, file_pool: Any
) -> None:
    pool = file_pool(os.O_RDONLY)
    before = pool.array.copy()
    prepared = await device.prepare_model(small.sum_model())
    request = small.request([A, A], [(A.nbytes, (2, 3))])
    with pytest.raises(InvalidArgument, match="can be written"):
        await prepared.execute_synchronously(
            msgspec.structs.replace(request, pools=(*request.pools[:2], pool))
        )
    np.testing.assert_array_equal(pool.array, before)


async def test_copies_take_every_mapped_kind(device: Device, small: Any, file_pool: Any) -> None:
    from aionn.hal import BufferDesc, BufferRole

    prepared = await device.prepare_model(small.sum_model((PAGE // 4,)))
    buffer = await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    for pool in (
        file_pool(os.O_RDWR, PAGE),
        made(MemoryKind.ASHMEM),
        made(MemoryKind.HARDWARE_BUFFER_BLOB),
    ):
        pool.array[:] = np.arange(PAGE) % 251
        await buffer.copy_from(pool, [])
        pool.array[:] = 0
        await buffer.copy_to(pool)
        np.testing.assert_array_equal(pool.array, np.arange(PAGE) % 251)
    read_only = file_pool(os.O_RDONLY, PAGE)
    await buffer.copy_from(read_only, [])
    with pytest.raises(InvalidArgument):
        await buffer.copy_to(read_only)


async def test_burst_keeps_the_memory_that_came_with_an_identifier_first(device: Device, small: Any) -> None:
    prepared = await device.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    request = small.request([A, A], [(A.nbytes, (2, 3))])
    other = small.request([A + 1, A], [(A.nbytes, (2, 3))])
    await burst.execute_synchronously(request, [0, 1, 2])
    # Another memory under a known identifier is not looked at.
    mixed = msgspec.structs.replace(request, pools=(other.pools[0], *request.pools[1:]))
    await burst.execute_synchronously(mixed, [0, 1, 2])
    np.testing.assert_array_equal(small.output(request), 2 * A.ravel())
    await burst.release_memory_resource(0)
    await burst.release_memory_resource(0)
    await burst.release_memory_resource(99)
    with pytest.raises(InvalidArgument):
        await burst.release_memory_resource(-2)
    await burst.execute_synchronously(mixed, [3, 1, 2])
    np.testing.assert_array_equal(small.output(request), 2 * A.ravel() + 1)
    await burst.aclose()


@pytest.mark.parametrize("left", [0, 1, caching.STEP_BYTES, 3 * caching.STEP_BYTES - 1])
def test_pool_that_became_shorter_leaves_no_saving(left: int) -> None:
    pool_fd, *files = fds = [os.memfd_create(name) for name in ("pool", "model", "data")]
    os.ftruncate(pool_fd, 3 * caching.STEP_BYTES)
    pool = Memory.from_fd(pool_fd, kind=MemoryKind.MMAP_FD)
    os.ftruncate(pool_fd, left)
    contents = caching.CacheContents([b"model"], [caching.Parts((b"values", pool))])
    with pytest.raises(OSError, match="became shorter"):
        caching.save(CacheFiles(files[:1], files[1:], bytes(32)), contents, driver="one")
    assert [os.fstat(fd).st_size for fd in files] == [0, 0]
    for fd in fds:
        os.close(fd)
