"""A machine without descriptors or memory left: an error of the source, which a lost stream waits out as any other."""

import contextlib
import errno
import os
import resource

import anyio
import pytest

from aionn.media import Reconnection, SourceUnavailable, network
from aionn.media.network_streams import capture as capture_module
from aionn.media.network_streams.capture import StreamProcess
from aionn.media.network_streams.messages import Opened, Start, encode
from tests.aionn.media.network_streams.test_hostile_process import FakeProcess
from tests.support.media.media_server import HEAD, media_server, pictures, reads_request

SOON = Reconnection(first_s=0.02, most_s=0.1)


@contextlib.contextmanager
def descriptors_left(count):
    """Leaves so many free descriptors to this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    # Every number up to the highest one that is used is taken first.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while not taken or taken[-1] < highest:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


@pytest.mark.parametrize("count", range(6))
def test_opening_with_few_descriptors_is_an_error_of_the_stream(count):
    """A socket, its other end, and the pipe and the files of a process that starts: each of them may be one too many."""
    start = Start("http://127.0.0.1:1/x", "video", None, 16_000, {}, None, 5.0, 1.0, 4, True, 4 << 30)
    words = "Too many open files" if count < 5 else "ConnectionRefusedError"
    with (
        descriptors_left(count),
        pytest.raises(SourceUnavailable, match=rf"^stream http://127\.0\.0\.1:1/x: .*{words}"),
    ):
        StreamProcess(start).wait_until_open()


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_memory_that_cannot_be_had_is_named(monkeypatch, name):
    def started(theirs):
        process = FakeProcess(theirs)
        process.theirs.send(encode(Opened(64 * 48 * 3, 64, 48, 30.0)))
        return process

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(capture_module, "_started", started)
    process = StreamProcess(
        Start("http://127.0.0.1/x", "video", None, 16_000, {}, None, 2.0, 1.0, 4, True, 1 << 30)
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        with pytest.raises(
            SourceUnavailable, match="no memory for 4 buffers of 9216 bytes: Too many open files"
        ):
            process.wait_until_open()


@pytest.mark.slow
def test_lost_stream_outlasts_a_shortage_of_descriptors(really):
    is_cut = False

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        while number > 1 or not is_cut:
            await pictures(writer, 1)

    async def body():
        nonlocal is_cut
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/cam", reconnect=SOON) as source,
        ):
            await anext(source)
            with descriptors_left(0), contextlib.ExitStack() as taken:
                is_cut = True
                while source.health().failures < 3:
                    # Those as well that the lost connection gives back.
                    with contextlib.suppress(OSError):
                        while True:
                            taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
                    await anyio.sleep(0.001)
                assert source.health().state in ("waiting", "opening")
                reason = source.health().reason
            async for frame in source:
                if frame.follows_gap:
                    return reason

    assert "Too many open files" in really(body)
