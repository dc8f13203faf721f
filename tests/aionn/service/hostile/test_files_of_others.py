"""Clients that give files whose reading waits for a process of theirs: the server neither reads them nor waits for them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure
from aionn.hal import CacheFiles, Priority
from aionn.platform import descriptors
from aionn.service.wire.handles import CacheOnWire, close_all
from aionn.service.wire.protocol import Call, Failed, PrepareModelFromCache, Reply, decode, encode
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
    close_all([*cache.model, *cache.data])


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
