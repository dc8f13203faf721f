"""Clients that give files whose reading or closing takes long: the server's event loop neither reads them nor waits for them.
Clients that write cache files themselves: the server restores only what it has saved for their user."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aionn.drivers.kit.caching import encode_model, load, save
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure
from aionn.hal import CacheFiles, Priority
from aionn.platform import descriptors
from aionn.service.host.admission import FOREIGN_PID, Credentials
from aionn.service.wire.handles import CacheOnWire, cache_secret, close_gently, memory_from_wire
from aionn.service.wire.protocol import Call, Failed, Ping, PrepareModelFromCache, Reply, decode, encode
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.received import close_unread
from tests.aionn.service.hostile.file_server import FLUSH, GETATTR, READ, FileServer

ANSWER_S_MAX = 10.0


class Recording(ReferenceDevice):
    """Notes the files that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    async def prepare_model_from_cache(self, cache: CacheFiles, **options: Any) -> Any:
        self.files += [os.readlink(f"/proc/self/fd/{fd}") for fd in (*cache.model, *cache.data)]
        return await super().prepare_model_from_cache(cache, **options)


def opened(folder: Path) -> CacheFiles:
    fds = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("model", "data")]
    return CacheFiles(fds[:1], fds[1:], bytes(32))


@pytest.fixture
def file_server(tmp_path: Path) -> Iterator[FileServer]:
    folder = tmp_path / "mount"
    folder.mkdir()
    try:
        server = FileServer(folder)
    except OSError as e:
        pytest.skip(f"a file system in user space cannot be mounted here: {e}")
    yield server
    server.close()


async def test_cache_files_of_a_file_server_are_no_cache(
    serving: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Recording()
    served = await serving(device)
    client = served.client()
    cache = opened(tmp_path)
    prepared = await client.prepare_model(small.sum_model(), cache=cache)
    await prepared.aclose()
    await (await client.prepare_model_from_cache(cache)).aclose()
    device.files.clear()
    with monkeypatch.context() as patched:
        patched.setattr(descriptors, "LOCAL_TYPES", frozenset())
        with pytest.raises(GeneralFailure, match="expected an ordinary file"):
            await client.prepare_model_from_cache(cache)
        assert device.files == ["/dev/null", "/dev/null"]
        prepared = await client.prepare_model(small.sum_model(), cache=cache)
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    # The files of before were not written.
    await client.prepare_model_from_cache(cache)
    await client.aclose()
    close_gently([*cache.model, *cache.data])


async def test_only_cache_files_that_the_server_has_saved_for_the_user_are_restored(
    serving: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Recording()
    served = await serving(device)
    client = served.client()
    cache = opened(tmp_path)
    model = small.sum_model()
    # A client knows all that it needs to write such files: the token, and the name and version of the driver.
    save(cache, encode_model(model), driver=device._driver)
    assert load(cache, driver=device._driver).model
    with pytest.raises(GeneralFailure, match="expected the files as they were saved with this token"):
        await client.prepare_model_from_cache(cache)
    assert device.files, "the device has looked at them"
    await (await client.prepare_model(model, cache=cache)).aclose()
    again = served.client()
    restored = await again.prepare_model_from_cache(cache)
    work = small.Sum()
    await restored.execute_synchronously(work.request)
    assert work.is_right
    user = Credentials(FOREIGN_PID, os.getuid() + 1)
    with monkeypatch.context() as patched:
        patched.setattr(Credentials, "of", lambda sock: user)
        stranger = served.client()
        await stranger.connect()
    with pytest.raises(GeneralFailure, match="expected the files as they were saved with this token"):
        await stranger.prepare_model_from_cache(cache)
    cache_secret.cache_clear()  # As in the next process of the server.
    with pytest.raises(GeneralFailure, match="expected the files as they were saved with this token"):
        await client.prepare_model_from_cache(cache)
    await stranger.aclose()
    await again.aclose()
    await client.aclose()
    close_gently([*cache.model, *cache.data])


async def test_a_file_that_answers_nothing_keeps_nobody_waiting_but_its_owner(
    served: Any, small: Any, file_server: FileServer
) -> None:
    fd = os.open(file_server.file, os.O_RDWR | os.O_CLOEXEC)
    other = served.client("other")
    await other.connect()
    owner = await served.raw().hello()
    file_server.withheld = {GETATTR, READ, FLUSH}
    cache = CacheOnWire.of(CacheFiles([fd], [fd], bytes(32)))
    payload, fds, _ = encode(Call(2, PrepareModelFromCache(cache, Priority.MEDIUM, None)))
    socket.send_fds(owner.sock, [payload], fds)
    with anyio.fail_after(ANSWER_S_MAX):
        while FLUSH not in file_server.seen:
            await anyio.sleep(0.001)
        prepared = await other.prepare_model(small.sum_model())
        work = small.Sum()
        await prepared.execute_synchronously(work.request)
    assert work.is_right
    file_server.release()
    reply = decode(await owner.receive(), [])
    assert isinstance(reply, Reply) and isinstance(reply.body, Failed)
    assert READ not in file_server.seen
    owner.close()
    await other.aclose()
    await anyio.to_thread.run_sync(os.close, fd)


async def test_an_unread_file_that_answers_nothing_does_not_wait_for_its_closing(
    file_server: FileServer,
) -> None:
    fd = os.open(file_server.file, os.O_RDWR | os.O_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(theirs, [b"unread"], [fd])
    file_server.withheld = {GETATTR, FLUSH}
    closing = threading.Thread(target=close_unread, args=[ours], daemon=True)
    closing.start()
    await anyio.to_thread.run_sync(closing.join, ANSWER_S_MAX)
    assert not closing.is_alive()
    file_server.release()
    theirs.close()
    await anyio.to_thread.run_sync(os.close, fd)


def recorded(monkeypatch: pytest.MonkeyPatch, slow: set[int]) -> list[bool]:
    """Whether each closing of a slow file was in the event loop's thread. Slow files are known by their numbers of inodes."""
    loop_thread = threading.get_ident()
    found: list[bool] = []
    close, close_range = os.close, os.closerange

    def note(fd: int) -> None:
        try:
            is_slow = os.fstat(fd).st_ino in slow
        except OSError:
            return
        if is_slow:
            found.append(threading.get_ident() == loop_thread)

    def noted_close(fd: int) -> None:
        note(fd)
        close(fd)

    def noted_close_range(first: int, end: int) -> None:
        for fd in range(first, end):
            note(fd)
        close_range(first, end)

    monkeypatch.setattr(os, "close", noted_close)
    monkeypatch.setattr(os, "closerange", noted_close_range)
    return found


def large(size_bytes: int = 4 << 20) -> int:
    fd = os.memfd_create("large", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def directory() -> int:
    return os.open("/", os.O_RDONLY | os.O_CLOEXEC)


def watching() -> int:
    return ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC)


@pytest.mark.parametrize("make", [large, directory, watching])
async def test_descriptors_that_belong_to_nothing_end_their_connection_and_are_closed_by_a_thread(
    served: Any, small: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], int]
) -> None:
    other = served.client("other")
    await other.connect()
    raw = await served.raw().hello()
    fd = make()
    with monkeypatch.context() as patched:
        payload, _, _ = encode(Call(2, Ping()))
        socket.send_fds(raw.sock, [payload], [fd] * 3)
        slow = {os.fstat(fd).st_ino}
        os.close(fd)
        found = recorded(patched, slow)
        assert await raw.receive() == b""
        with anyio.fail_after(ANSWER_S_MAX):
            while len(found) < 3:
                await anyio.sleep(0.001)
    assert not any(found)
    raw.close()
    prepared = await other.prepare_model(small.sum_model())
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await other.aclose()


async def test_large_memories_of_a_client_that_leaves_are_closed_by_a_thread_and_count_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = Account(Quotas())
    fd = large()
    fields = (4 << 20, "ashmem", 0, True, None)
    memory = memory_from_wire(fd, fields, sealed_only=True, account=account)
    small_fd = large(4096)
    small_memory = memory_from_wire(small_fd, (4096, *fields[1:]), sealed_only=True, account=account)
    begun, may_go_on = threading.Event(), threading.Event()

    def occupied(_: int) -> None:
        begun.set()
        assert may_go_on.wait(ANSWER_S_MAX)

    descriptors.close_apart([large(4096)], occupied)
    assert await anyio.to_thread.run_sync(begun.wait, ANSWER_S_MAX)
    with monkeypatch.context() as patched:
        found = recorded(patched, {os.fstat(fd).st_ino})
        del memory, small_memory
        assert account.taken("descriptors") == 2  # The small one is closed in place.
        may_go_on.set()
        with anyio.fail_after(ANSWER_S_MAX):
            while account.taken("descriptors"):
                await anyio.sleep(0.001)
    assert found == [False]
    os.close(fd)
    os.close(small_fd)
