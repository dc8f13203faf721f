"""Faults of the table in docs/production/faults.md that no other test plants, and the table itself."""

from __future__ import annotations

import ast
import errno
import functools
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aionn.errors import DeadObject, Error, GeneralFailure, InvalidArgument
from aionn.hal import BufferDesc, BufferRole, Memory, MemoryKind, OperandType, OperationType, Request
from aionn.models.builder import GraphBuilder
from aionn.service.client.device import RemoteDevice
from fences import FenceError, FenceStatus, SyncFence
from fmq.descriptor import Grantor

NOTICED_S_MAX = 10.0
SEED = 16


async def gone(device: RemoteDevice) -> None:
    with anyio.fail_after(NOTICED_S_MAX):
        while device.pid is not None:
            await anyio.sleep(0.002)


def kill(device: RemoteDevice) -> None:
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_driver_killed_while_idle_fails_every_call_at_once(background: Any, small: Any) -> None:
    device = RemoteDevice("reference", "reference", background.tasks)
    prepared = await device.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    execution = await prepared.create_reusable_execution(small.Sum().request)
    await burst.execute_synchronously(small.Sum().request, [0])
    kill(device)
    await gone(device)
    with anyio.fail_after(NOTICED_S_MAX):
        for _ in range(2):
            for call in (
                lambda: burst.execute_synchronously(small.Sum().request, [0]),
                lambda: prepared.execute_synchronously(small.Sum().request),
                lambda: prepared.execute_fenced(small.Sum().request, []),
                execution.execute_synchronously,
                prepared.configure_execution_burst,
            ):
                with pytest.raises(DeadObject):
                    await call()
        await burst.aclose()
    await device.aclose()


async def test_fences_of_a_killed_driver_stay_failed_and_pools_stay_readable(
    background: Any, small: Any
) -> None:
    device = RemoteDevice("reference", "reference", background.tasks)
    prepared = await device.prepare_model(small.sum_model())
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    with SyncFence("start") as start:
        launched = await prepared.execute_fenced(work.request, [start])
        kill(device)
        with launched.fence, anyio.fail_after(NOTICED_S_MAX):
            for _ in range(3):
                with pytest.raises(FenceError):
                    await launched.fence
                assert launched.fence.status == FenceStatus.FAILED
            with pytest.raises(DeadObject):
                await launched.get_execution_info()
    assert work.is_right
    await device.aclose()


async def test_objects_of_a_dead_process_mean_nothing_to_the_next(background: Any, small: Any) -> None:
    device = RemoteDevice("reference", "reference", background.tasks)
    old = await device.prepare_model(small.sum_model())
    buffer = await device.allocate(BufferDesc(), [old], [BufferRole(0, 0)], [])
    work = small.Sum()
    for _ in range(3):  # The process remembers its memory, by an identifier.
        await old.execute_synchronously(work.request)
    kill(device)
    await gone(device)
    new = await device.prepare_model(small.sum_model(8))
    assert new.handle == old.handle  # The same number, of another process.
    with pytest.raises(DeadObject):
        await old.execute_synchronously(work.request)
    with pytest.raises(DeadObject):
        await buffer.copy_to(Memory.create(16))
    with pytest.raises(DeadObject, match="prepared it is gone"):
        await device.allocate(BufferDesc(), [old], [BufferRole(0, 0)], [])
    del old, buffer  # Freeing what was the dead one's frees nothing of the new one's.
    larger = small.Sum(8)
    for _ in range(3):
        await new.execute_synchronously(larger.request)
        assert larger.is_right
    with pytest.raises(InvalidArgument):
        await new.execute_synchronously(work.request)
    await device.aclose()


@contextmanager
def flipping(queue: Any) -> Iterator[Callable[[], int]]:
    """Another holder of the queue's memory writes random bytes into its ring, as fast as it can."""
    place = queue.descriptor.grantors[Grantor.DATA]
    fd = queue.fds[place.fd_index]
    over, count = threading.Event(), 0
    rng = random.Random(SEED)
    with mmap.mmap(fd, os.fstat(fd).st_size) as memory:

        def flip() -> None:
            nonlocal count
            while not over.is_set():
                memory[place.offset + rng.randrange(400)] = rng.randrange(256)
                count += 1

        thread = threading.Thread(target=flip)
        thread.start()
        try:
            yield lambda: count
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.thorough
async def test_packets_that_change_while_they_are_read_are_results_or_errors(
    served: Any, small: Any, count: int
) -> None:
    hostile, other = served.client(), served.client()
    prepared = await hostile.prepare_model(small.sum_model())
    answered = failed = flips = 0
    with anyio.fail_after(60):
        while answered + failed < count or not failed:
            burst = await prepared.configure_execution_burst()
            with flipping(burst._requests) as flipped:
                for _ in range(40):
                    try:
                        with anyio.fail_after(NOTICED_S_MAX):
                            await burst.execute_synchronously(small.Sum().request, [-1])
                        answered += 1
                    except DeadObject:
                        failed += 1
                        break  # The ring itself cannot be read any more: the burst is over, nothing else.
                    except Error:
                        failed += 1
            flips += flipped()
            await burst.aclose()
    assert flips > 10 * count and answered + failed >= count
    work = small.Sum()
    await (await other.prepare_model(small.sum_model())).execute_synchronously(work.request)
    assert work.is_right
    await hostile.aclose()
    await other.aclose()


async def test_more_memories_than_a_message_carries_are_refused(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    request = Request(
        work.request.inputs, work.request.outputs, (work.memory, *(Memory.create(1) for _ in range(300)))
    )
    with pytest.raises(InvalidArgument, match="at most 240 memories and fences"):
        await prepared.execute_synchronously(request)
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await client.aclose()


async def test_file_that_is_shortened_ends_the_driver_of_its_own_application_alone(
    background: Any, small: Any, tmp_path: Path
) -> None:
    device, other = (RemoteDevice("reference", name, background.tasks) for name in ("mine", "theirs"))
    prepared, theirs = [await each.prepare_model(small.sum_model()) for each in (device, other)]
    work = small.Sum()
    path = tmp_path / "pool"
    path.write_bytes(work.memory.array.tobytes())
    with path.open("r+b") as file:
        pool = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD)
        request = Request(work.request.inputs, work.request.outputs, (pool,))
        for _ in range(3):
            await prepared.execute_synchronously(request)
        file.truncate(0)
        with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeadObject):
            await prepared.execute_synchronously(request)
    await theirs.execute_synchronously(work.request)
    assert work.is_right
    again = await device.prepare_model(small.sum_model())
    await again.execute_synchronously(work.request)
    await device.aclose()
    await other.aclose()


async def test_file_that_could_be_shortened_is_refused_by_a_shared_device(
    served: Any, small: Any, tmp_path: Path
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    path = tmp_path / "pool"
    path.write_bytes(work.memory.array.tobytes())
    with path.open("r+b") as file:
        pool = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD)
    request = Request(work.request.inputs, work.request.outputs, (pool,))
    for _ in range(3):  # Each time, also when it might have been remembered; and the connection goes on.
        with pytest.raises(GeneralFailure, match="sealed memory alone"):
            await prepared.execute_synchronously(request)
    sealed = Memory.from_fd(work.memory.fileno(), kind=MemoryKind.MMAP_FD)
    await prepared.execute_synchronously(Request(request.inputs, request.outputs, (sealed,)))
    assert work.is_right
    await client.aclose()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2000])
async def test_model_in_a_file_that_could_be_shortened_is_refused_by_a_shared_device(
    served: Any, tmp_path: Path, count: int
) -> None:
    graph = GraphBuilder()
    first = value = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    for _ in range(count):
        value = graph.result(OperationType.ADD, [value, first, graph.constant(0)], first)
    path = tmp_path / "pool"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        pool = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD)
    model = graph.build([value])
    client = served.client()
    with pytest.raises(GeneralFailure, match="sealed memory alone"):
        await client.supported_operations(msgspec.structs.replace(model, pools=(pool,)))
    assert await client.supported_operations(model) == (True,) * count
    await client.aclose()
    pool.close()


def test_memory_beyond_the_address_space_is_an_error_when_it_is_made(repository: Path) -> None:
    script = textwrap.dedent(
        """
        import os, resource
        from aionn.errors import ResourceExhausted
        from aionn.hal import Memory

        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        before = sorted(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))
        for _ in range(3):
            try:
                Memory.create(64 << 20)
            except ResourceExhausted as e:
                assert "cannot allocate" in str(e), e
            else:
                raise SystemExit("64 MiB were mapped")
        assert sorted(os.listdir("/proc/self/fd")) == before
        Memory.create(1 << 20).array[:] = 1
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_memory_beyond_the_size_of_files_is_an_error_when_it_is_made() -> None:
    from aionn.errors import ResourceExhausted

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ResourceExhausted, match=os.strerror(errno.EFBIG)):
            Memory.create(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Memory.create(2 << 20).close()


# The table


@functools.cache
def functions_of(path: Path) -> set[str]:
    """The names of all functions of a module: several rows name tests of one module."""
    defined = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, defined)}


def test_every_row_of_the_table_names_tests_that_are_there(repository: Path) -> None:
    page = (repository / "docs" / "production" / "faults.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \|(.*)\|$", page)
    assert [int(number) for number, _ in rows] == [*range(1, 9), *range(16, 33), *range(49, 81)]
    for number, row in rows:
        named = re.findall(r"`(?:([\w/]+\.py)::)?(\w+)`", row.rpartition("|")[2])
        assert named, f"row {number} names no test"
        path = ""
        for own, name in named:
            path = own or path
            assert name in functions_of(repository / "tests" / path), f"row {number}: {path} has no {name}"
