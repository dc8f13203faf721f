"""Compilation caches: what was saved comes back; what was changed, or was saved under another token, never does."""

from __future__ import annotations

import contextvars
import fcntl
import mmap
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.drivers.kit import caching
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import (
    CacheFileCounts,
    CacheFiles,
    DataLocation,
    Device,
    Memory,
    Model,
    OperandLifeTime,
    OperandType,
    OperationType,
)
from aionn.hal.pieces import pausing
from aionn.models.builder import GraphBuilder

TOKEN = bytes(range(32))
A = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def binary(operation: OperationType, constant: float = 3.0) -> Model:
    """``a OP constant``, elementwise, with a constant large enough not to be dropped."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    b = graph.constant(np.full((2, 3), constant, np.float32))
    return graph.build([graph.result(operation, [a, b, graph.constant(0)], a)])


class Files:
    """One model file and one data file in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.paths = [directory / f"{name}.model", directory / f"{name}.data"]
        self._open: list[int] = []

    def cache(self, flags: int = os.O_RDWR | os.O_CREAT, token: bytes = TOKEN) -> CacheFiles:
        fds = [os.open(path, flags, 0o600) for path in self.paths]
        self._open += fds
        return CacheFiles(fds[:1], fds[1:], token)

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    def contents(self) -> list[bytes]:
        return [path.read_bytes() for path in self.paths]

    def put(self, contents: list[bytes]) -> None:
        for path, content in zip(self.paths, contents, strict=True):
            path.write_bytes(content)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    made: list[Files] = []

    def make(name: str) -> Files:
        made.append(Files(tmp_path, name))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def computed(prepared: Any, small: Any) -> np.ndarray:
    request = small.request([A], [(A.nbytes, (2, 3))])
    await prepared.execute_synchronously(request)
    return np.asarray(small.output(request)).reshape(2, 3)


async def saved(device: Device, files: Any, name: str, model: Model) -> Files:
    own: Files = files(name)
    await device.prepare_model(model, cache=own.cache())
    own.close()
    return own


async def test_saved_compilation_comes_back(device: Device, files: Any, small: Any) -> None:
    assert device.info.cache_files == CacheFileCounts(1, 1)
    own = await saved(device, files, "mul", binary(OperationType.MUL))
    prepared = await device.prepare_model_from_cache(own.cache(os.O_RDONLY))
    own.close()  # The files are the call's alone.
    np.testing.assert_array_equal(await computed(prepared, small), A * 3)


async def test_constants_in_pools_come_back(device: Device, files: Any, small: Any) -> None:
    model = binary(OperationType.MUL)
    pool = Memory.create(4096)
    pool.array[64 : 64 + 24] = np.frombuffer(np.full(6, 7, np.float32).tobytes(), np.uint8)
    index = next(i for i, o in enumerate(model.main.operands) if o.dimensions and o.is_constant)
    operands = list(model.main.operands)
    operands[index] = msgspec.structs.replace(
        operands[index], lifetime=OperandLifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 64, 24)
    )
    main = msgspec.structs.replace(model.main, operands=tuple(operands))
    own = await saved(device, files, "pools", msgspec.structs.replace(model, main=main, pools=(pool,)))
    pool.array[:] = 0
    prepared = await device.prepare_model_from_cache(own.cache())
    np.testing.assert_array_equal(await computed(prepared, small), A * 7)


async def test_files_may_hold_old_content_and_stand_at_any_offset(
    device: Device, files: Any, small: Any
) -> None:
    own: Files = files("old")
    own.put([b"old content " * 1000] * 2)
    cache = own.cache()
    for fd in (*cache.model, *cache.data):
        os.lseek(fd, 777, os.SEEK_SET)
    await device.prepare_model(binary(OperationType.ADD), cache=cache)
    assert all(len(content) < 2000 for content in own.contents())
    prepared = await device.prepare_model_from_cache(cache)
    np.testing.assert_array_equal(await computed(prepared, small), A + 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("magic", [caching._BLAKE2, caching._SHA256])
@pytest.mark.parametrize("is_data", [False, True])
async def test_every_changed_byte_and_length_is_noticed(
    device: Device, files: Any, is_data: bool, magic: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "_chosen", lambda: magic)
    own = await saved(device, files, "mul", binary(OperationType.MUL))
    whole = own.contents()
    content = whole[is_data]
    rng = np.random.default_rng(1)
    changed = [b"", content[:-1], content + b"\0", content[: len(content) // 2], b"\xff" * len(content)]
    positions = {0, 7, 8, 23, 24, 55, 56, len(content) - 1, *rng.integers(0, len(content), 16).tolist()}
    for position in sorted(p for p in positions if p < len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(rng.integers(8))
        changed.append(bytes(flipped))
    for each in changed:
        own.put([whole[0], each] if is_data else [each, whole[1]])
        with pytest.raises(GeneralFailure):
            await device.prepare_model_from_cache(own.cache())
        own.close()
    own.put(whole)
    await device.prepare_model_from_cache(own.cache())


async def test_another_token_is_a_general_failure(device: Device, files: Any) -> None:
    own = await saved(device, files, "mul", binary(OperationType.MUL))
    for token in (bytes(32), TOKEN[::-1], TOKEN[:-1] + b"\xff"):
        with pytest.raises(GeneralFailure):
            await device.prepare_model_from_cache(own.cache(token=token))


async def test_files_of_two_savings_do_not_fit_together(device: Device, files: Any) -> None:
    # The same operation twice, too: without a number of its own per saving, its files would be interchangeable.
    savings = [
        await saved(device, files, "add", binary(OperationType.ADD)),
        await saved(device, files, "mul", binary(OperationType.MUL)),
        await saved(device, files, "again", binary(OperationType.MUL)),
    ]
    contents = [each.contents() for each in savings]
    mixed: Files = files("mixed")
    for i in range(3):
        for j in range(3):
            mixed.put([contents[i][0], contents[j][1]])
            if i == j:
                await device.prepare_model_from_cache(mixed.cache())
            else:
                with pytest.raises(GeneralFailure):
                    await device.prepare_model_from_cache(mixed.cache())
    mixed.put(contents[0][::-1])
    with pytest.raises(GeneralFailure):
        await device.prepare_model_from_cache(mixed.cache())


async def test_bad_arguments_never_fail_a_preparation_and_save_nothing(
    device: Device, files: Any, small: Any
) -> None:
    def wrongs(own: Files) -> Iterator[CacheFiles]:
        good = own.cache()
        (model,), (data,) = good.model, good.data
        yield CacheFiles([], [data], TOKEN)
        yield CacheFiles([model, data], [data], TOKEN)
        yield CacheFiles([model], [], TOKEN)
        yield CacheFiles([model], [data, data], TOKEN)
        yield CacheFiles([model], [data], TOKEN[:-1])
        yield CacheFiles([model], [data], b"")
        yield CacheFiles([model], [-1], TOKEN)
        yield CacheFiles([1 << 30], [data], TOKEN)
        yield CacheFiles([model] * 40, [data] * 40, TOKEN)
        yield CacheFiles([], [], bytes(32))
        yield own.cache(os.O_RDONLY)

    own: Files = files("bad")
    for wrong in wrongs(own):
        prepared = await device.prepare_model(binary(OperationType.MUL), cache=wrong)
        np.testing.assert_array_equal(await computed(prepared, small), A * 3)
        with pytest.raises((GeneralFailure, InvalidArgument)):
            await device.prepare_model_from_cache(own.cache())


async def test_what_is_no_ordinary_file_is_neither_written_nor_read(device: Device) -> None:
    read_end, write_end = os.pipe()
    try:
        for fd in (read_end, write_end):
            cache = CacheFiles([fd], [fd], TOKEN)
            await device.prepare_model(binary(OperationType.MUL), cache=cache)
            with pytest.raises(GeneralFailure):
                await device.prepare_model_from_cache(cache)
        zero = os.open("/dev/zero", os.O_RDWR)
        try:
            with pytest.raises(GeneralFailure):
                await device.prepare_model_from_cache(CacheFiles([zero], [zero], TOKEN))
        finally:
            os.close(zero)
    finally:
        os.close(read_end)
        os.close(write_end)


async def test_wrong_counts_and_tokens_are_refused_when_loading(device: Device, files: Any) -> None:
    own = await saved(device, files, "mul", binary(OperationType.MUL))
    good = own.cache()
    for wrong in (
        CacheFiles([], good.data, TOKEN),
        CacheFiles(good.model, [], TOKEN),
        CacheFiles([*good.model, *good.model], good.data, TOKEN),
        CacheFiles(good.model, [*good.data, *good.data], TOKEN),
        CacheFiles(good.model, good.data, TOKEN + b"\0"),
        CacheFiles(good.model, good.data, b""),
        CacheFiles([-1], good.data, TOKEN),
    ):
        with pytest.raises(InvalidArgument):
            await device.prepare_model_from_cache(wrong)
    with pytest.raises(GeneralFailure, match="cannot be read"):
        await device.prepare_model_from_cache(own.cache(os.O_WRONLY))
    with pytest.raises(MissedDeadline):
        await device.prepare_model_from_cache(good, deadline_ns=1)


async def test_files_that_change_while_they_are_read_give_the_saved_model_or_none(
    reference: ReferenceDevice, files: Any, small: Any
) -> None:
    own = await saved(reference, files, "mul", binary(OperationType.MUL))
    other = await saved(reference, files, "add", binary(OperationType.ADD))
    mine, theirs = own.contents()[0], other.contents()[0]
    over = threading.Event()

    def swap() -> None:
        fd = os.open(own.paths[0], os.O_WRONLY)
        while not over.is_set():
            os.pwrite(fd, theirs, 0)
            os.pwrite(fd, mine, 0)
        os.close(fd)

    thread = threading.Thread(target=swap)
    thread.start()
    restored = refused = 0
    try:
        cache = own.cache(os.O_RDONLY)
        for _ in range(100):
            try:
                prepared = await reference.prepare_model_from_cache(cache)
            except GeneralFailure:
                refused += 1
                continue
            restored += 1
            np.testing.assert_array_equal(await computed(prepared, small), A * 3)
    finally:
        over.set()
        thread.join()
    assert restored + refused == 100


@pytest.mark.thorough
async def test_files_that_are_written_by_two_are_never_a_mixture(
    reference: ReferenceDevice, files: Any, small: Any
) -> None:
    own: Files = files("contended")
    other = await saved(reference, files, "add", binary(OperationType.ADD))
    theirs = other.contents()[0]
    over = threading.Event()

    def write() -> None:
        fd = os.open(own.paths[0], os.O_WRONLY | os.O_CREAT, 0o600)
        while not over.is_set():
            os.pwrite(fd, theirs, 0)
        os.close(fd)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        cache = own.cache()
        for _ in range(50):
            prepared = await reference.prepare_model(binary(OperationType.MUL), cache=cache)
            np.testing.assert_array_equal(await computed(prepared, small), A * 3)
            try:
                again = await reference.prepare_model_from_cache(cache)
            except GeneralFailure:
                continue
            np.testing.assert_array_equal(await computed(again, small), A * 3)
    finally:
        over.set()
        thread.join()


async def test_another_version_of_the_driver_does_not_read_it(files: Any) -> None:
    own: Files = files("version")
    contents = caching.CacheContents([b"model"], [b"data"])
    caching.save(own.cache(), contents, driver="driver 1")
    assert caching.load(own.cache(), driver="driver 1")[:2] == contents[:2]
    with pytest.raises(GeneralFailure):
        caching.load(own.cache(), driver="driver 2")


async def test_cancelled_preparation_does_not_write_into_files_opened_since(
    reference: ReferenceDevice, files: Any, tmp_path: Path
) -> None:
    own: Files = files("cancelled")
    cache = own.cache()
    held = caching.HeldFiles(cache)
    own.close()
    with open(tmp_path / "innocent", "wb") as innocent:
        assert innocent.fileno() in (*cache.model, *cache.data)
        caching.save(held.files, caching.CacheContents([b"m"], [b"d"]), driver="d")
    assert (tmp_path / "innocent").read_bytes() == b""
    assert caching.load(own.cache(), driver="d").model == [b"m"]


async def test_errors_of_a_device_without_caching(files: Any, small: Any) -> None:
    async with ReferenceDevice() as device:
        device.info = msgspec.structs.replace(device.info, cache_files=CacheFileCounts())
        own: Files = files("none")
        await device.prepare_model(small.sum_model(), cache=own.cache())
        with pytest.raises(GeneralFailure, match="does not cache"):
            await device.prepare_model_from_cache(own.cache())
        with pytest.raises(Error):
            await device.prepare_model_from_cache(own.cache(token=b"short"))


def test_files_that_are_large_or_none_of_ours_are_not_read(tmp_path: Path) -> None:
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(2)]
    files = CacheFiles(fds[:1], fds[1:], bytes(32))
    caching.save(files, caching.CacheContents([b"model"], [bytes(1000)]), driver="one")
    assert caching.load(files, driver="one").model[0] == b"model"
    assert caching.load(files._replace(bytes_max=2000), driver="one").data[0] == bytes(1000)
    with pytest.raises(GeneralFailure, match="cannot be read"):
        caching.load(files._replace(bytes_max=1000), driver="one")
    os.ftruncate(fds[1], 0)
    os.ftruncate(fds[1], caching.FILE_BYTES_MAX)  # Without a page of its own.
    tracemalloc.start()
    try:
        with pytest.raises(GeneralFailure, match="cannot be read"):
            caching.load(files, driver="one")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        for fd in fds:
            os.close(fd)


LARGE_BYTES = 32 << 20


def sparse(size_bytes: int) -> int:
    """A sealed memory without pages."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Sizes:
    """The sizes of what is read, written, hashed and allocated from here on.

    Attributes:
        largest: The most bytes of one step.
        created: Sizes of the shared memories.
        all_read: Bytes that were read in all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = self.all_read = 0
        self.created: list[int] = []
        pwrite, preadv, create, add = os.pwrite, os.preadv, Memory.create, caching._Saving.add

        def counted_pwrite(fd: int, data: memoryview, offset: int) -> int:
            self.largest = max(self.largest, len(data))
            return pwrite(fd, data, offset)

        def counted_preadv(fd: int, places: list[memoryview], offset: int) -> int:
            count = preadv(fd, places, offset)
            self.largest, self.all_read = max(self.largest, count), self.all_read + count
            return count

        def counted_add(saving: Any, block: memoryview) -> list[tuple[int, int]]:
            self.largest = max(self.largest, len(block))
            return add(saving, block)

        def counted_create(size_bytes: int, **arguments: Any) -> Memory:
            self.created.append(size_bytes)
            return create(size_bytes, **arguments)

        monkeypatch.setattr(os, "pwrite", counted_pwrite)
        monkeypatch.setattr(os, "preadv", counted_preadv)
        monkeypatch.setattr(caching._Saving, "add", counted_add)
        monkeypatch.setattr(Memory, "create", counted_create)


@pytest.fixture
def memfds() -> Iterator[CacheFiles]:
    fds = [os.memfd_create(name) for name in ("model", "data")]
    yield CacheFiles(fds[:1], fds[1:], TOKEN)
    for fd in fds:
        os.close(fd)


def test_large_sparse_pool_is_saved_and_restored_in_blocks(
    memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = sparse(LARGE_BYTES)
    os.pwrite(fd, b"last", LARGE_BYTES - 4)
    own = msgspec.structs.replace(binary(OperationType.MUL), pools=(Memory.from_fd(fd),))
    pages = os.fstat(fd).st_blocks
    sizes = Sizes(monkeypatch)
    tracemalloc.start()
    try:
        caching.save(memfds, caching.encode_model(own), driver="one")
        assert os.fstat(fd).st_blocks == pages  # Reading its holes adds no pages.
        assert os.fstat(memfds.data[0]).st_blocks * 512 < 3 * caching.BLOCK_BYTES
        assert not sizes.created
        again = caching.decode_model(caching.load(memfds, driver="one"))
        assert tracemalloc.get_traced_memory()[1] < 2 * caching.STEP_BYTES
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert sizes.largest == caching.STEP_BYTES
    assert sum(sizes.created) <= sum(os.fstat(fd).st_size for fd in (*memfds.model, *memfds.data))
    assert again.operand_values == own.operand_values
    assert bytes(again.pools[0].array[-4:]) == b"last"
    assert not again.pools[0].array[:-4].any()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_parts_of_any_length_come_back(memfds: CacheFiles, is_loaded: bool) -> None:
    rng = np.random.default_rng(2)
    own = msgspec.structs.replace(binary(OperationType.MUL), operand_values=rng.bytes(5001))
    lengths = (1, caching.BLOCK_BYTES - 1, 2 * caching.STEP_BYTES + caching.BLOCK_BYTES + 77, 4096)
    pools = [Memory.create(length) for length in lengths]
    for pool in pools:
        pool.array[:] = rng.integers(0, 256, pool.size_bytes, np.uint8)
    pools[2].array[caching.BLOCK_BYTES : 3 * caching.BLOCK_BYTES] = 0
    pools[2].array[caching.STEP_BYTES : -500] = 0
    contents = caching.encode_model(msgspec.structs.replace(own, pools=tuple(pools)))
    if is_loaded:
        caching.save(memfds, contents, driver="one")
        contents = caching.load(memfds, driver="one")
    again = caching.decode_model(contents)
    assert again.operand_values == own.operand_values
    for pool, same in zip(pools, again.pools, strict=True):
        np.testing.assert_array_equal(pool.array, same.array)
        same.array[0] ^= 1  # New memory.
        assert pool.array[0] != same.array[0]


@pytest.mark.parametrize("is_of_another_length", [False, True])
def test_large_file_without_a_right_head_is_not_read(
    memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch, is_of_another_length: bool
) -> None:
    caching.save(memfds, caching.CacheContents([b"model"], [b"data"]), driver="one")
    if not is_of_another_length:
        magic = os.pread(memfds.data[0], 8, 0)
        os.ftruncate(memfds.data[0], 0)
        os.pwrite(memfds.data[0], magic, 0)
    os.ftruncate(memfds.data[0], LARGE_BYTES)
    sizes = Sizes(monkeypatch)
    with pytest.raises(GeneralFailure, match="as they were saved"):
        caching.load(memfds, driver="one")
    assert not sizes.all_read
    assert not sizes.created


def test_saving_and_restoring_end_between_two_steps(memfds: CacheFiles) -> None:
    contents = caching.CacheContents([b"model"], [bytes(5 * caching.STEP_BYTES)])
    blocks = 0

    def pause() -> None:
        nonlocal blocks
        blocks += 1
        if blocks == 3:
            raise GeneralFailure("cancelled")

    def ended(call: Any) -> None:
        nonlocal blocks
        blocks = 0
        pausing(pause)
        with pytest.raises(GeneralFailure, match="cancelled"):
            call()

    caching.save(memfds, contents, driver="one")
    contextvars.copy_context().run(ended, lambda: caching.load(memfds, driver="one"))
    contextvars.copy_context().run(ended, lambda: caching.save(memfds, contents, driver="one"))
    assert [os.fstat(fd).st_size for fd in (*memfds.model, *memfds.data)] == [0, 0]


def test_model_whose_pools_are_closed_or_many_is_not_saved(memfds: CacheFiles) -> None:
    model = binary(OperationType.MUL)
    pool = Memory.create(4096)
    with pytest.raises(ValueError, match="at most 256 pools"):
        caching.encode_model(msgspec.structs.replace(model, pools=(pool,) * 257))
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        caching.save(memfds, caching.encode_model(msgspec.structs.replace(model, pools=(pool,))), driver="d")


@pytest.mark.parametrize("lengths", [(24, (-1,)), (24, (0,)), (-1, ()), (25, ()), (0, (1,) * 300)])
def test_lengths_that_no_model_has_are_refused(lengths: tuple[int, tuple[int, ...]]) -> None:
    model = binary(OperationType.MUL)
    bare = msgspec.structs.replace(model, operand_values=b"")
    on_disk = msgspec.msgpack.encode(caching._ModelOnDisk(bare, *lengths))
    with pytest.raises(GeneralFailure, match="not those of the model"):
        caching.decode_model(caching.CacheContents([on_disk], [bytes(24)]))


def test_long_structures_are_neither_saved_nor_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = caching.encode_model(binary(OperationType.MUL))
    monkeypatch.setattr(caching, "STRUCTURE_BYTES_MAX", len(contents.model[0]) - 1)
    with pytest.raises(ValueError, match="a structure of at most"):
        caching.encode_model(binary(OperationType.MUL))
    with pytest.raises(GeneralFailure, match="a structure of at most"):
        caching.decode_model(contents)


async def test_prepared_model_is_released_if_its_saving_is_ended(
    reference: ReferenceDevice, memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []

    def ended(*_: Any, **__: Any) -> None:
        raise GeneralFailure("cancelled")

    prepared_class = type(await reference.prepare_model(binary(OperationType.MUL)))
    monkeypatch.setattr(prepared_class, "release", lambda prepared: released.append(1))
    monkeypatch.setattr(caching, "save", ended)
    with pytest.raises(GeneralFailure, match="cancelled"):
        await reference.prepare_model(binary(OperationType.MUL), cache=memfds)
    assert len(released) == 1


def test_large_restored_memory_is_freed_by_a_thread(
    memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop drops it, with the model or with the error that a changed file gives."""
    pool = Memory.create(2 * caching.BLOCK_BYTES)
    own = msgspec.structs.replace(binary(OperationType.MUL), pools=(pool,))
    caching.save(memfds, caching.encode_model(own), driver="one")
    freed: list[int] = []
    closing, has_closed = os.closerange, threading.Semaphore(0)

    def noted(begin: int, end: int) -> None:
        freed.extend([threading.get_ident()] * (end - begin))
        closing(begin, end)
        has_closed.release(end - begin)

    monkeypatch.setattr(os, "closerange", noted)

    def check_freed(count: int) -> None:
        for _ in range(count):
            assert has_closed.acquire(timeout=10)
        assert len(freed) == count and threading.get_ident() not in freed
        freed.clear()

    again = caching.decode_model(caching.load(memfds, driver="one"))
    check_freed(1)  # Of the whole content; the pool has its own.
    del again
    check_freed(1)
    os.pwrite(memfds.data[0], b"x", 3 * mmap.PAGESIZE)
    with pytest.raises(GeneralFailure):
        caching.load(memfds, driver="one")
    check_freed(1)
