"""Servers of the tests of network sources: real sockets on this machine, and every way to disappoint a client.

A behaviour is a coroutine function of the two ends of a connection and of its number. Needs PyAV for the pictures and sounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from fractions import Fraction

import av
import numpy as np

__all__ = ["Behaviour", "jpeg", "media_server", "mpegts", "multipart", "reads_request", "wav"]

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace;boundary=frame\r\n\r\n"


@functools.cache
def jpeg(level: int = 128, width: int = 64, height: int = 48) -> bytes:
    """A picture of one grey level."""
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.framerate = (
        width,
        height,
        "yuvj420p",
        Fraction(30),
    )
    encoder.time_base = Fraction(1, 30)
    picture = av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8), format="rgb24")
    packets = encoder.encode(picture.reformat(format="yuvj420p")) or encoder.encode(None)
    return bytes(packets[0])


@functools.cache
def mpegts(
    frames: int = 60, width: int = 64, height: int = 48, sound: bool = False, start_s: int = 0
) -> bytes:
    """A transport stream at 30 frames/s, with a tone of 440 Hz if wanted, whose clock begins at ``start_s``."""
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        video = container.add_stream("mpeg4", rate=30)
        video.width, video.height, video.pix_fmt, video.gop_size = width, height, "yuv420p", 10
        audio = container.add_stream("mp2", rate=48_000) if sound else None
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(
                np.full((height, width, 3), 4 * index % 256, np.uint8), format="rgb24"
            )
            picture.pts = index + 30 * start_s
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        if audio is not None:
            time_s = np.arange(frames * 1600) / 48_000
            tone = (np.sin(2 * np.pi * 440 * time_s) * 16_000).astype(np.int16)
            for first in range(0, tone.size - 1151, 1152):
                part = tone[first : first + 1152].reshape(1, -1)
                samples = av.AudioFrame.from_ndarray(part, format="s16", layout="mono")
                samples.sample_rate, samples.pts = 48_000, first
                container.mux(audio.encode(samples))
            container.mux(audio.encode(None))
    return file.getvalue()


def multipart(data: bytes) -> bytes:
    """One part of a stream of pictures; with its end, since some clients wait for the next boundary."""
    return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(data), data)


async def reads_request(reader: asyncio.StreamReader) -> bytes:
    """Reads the head of a request."""
    return await reader.readuntil(b"\r\n\r\n")


async def pictures(writer: asyncio.StreamWriter, count: int, period_s: float = 0.02, first: int = 0) -> None:
    """Sends pictures at a pace."""
    for number in range(first, first + count):
        writer.write(multipart(jpeg(number % 256)))
        await writer.drain()
        await asyncio.sleep(period_s)


def wav(samples: int = 16_000) -> bytes:
    """Silence, with a head."""
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + bytes(samples)


@contextlib.asynccontextmanager
async def media_server(behaviour: Behaviour, port: int = 0) -> AsyncIterator[int]:
    """Serves on a port of this machine, a free one by default, which it yields; every connection has ended when it is left."""
    connections: set[asyncio.Task[None]] = set()
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        count += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await behaviour(reader, writer, count)
        finally:
            connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        if connections:
            await asyncio.wait(list(connections), timeout=5)
        await server.wait_closed()
