"""A network camera in a process of its own: Motion JPEG over HTTP, each picture with its number in blocks of black and white.

The time of capture of each number is in a file that the contenders map. The camera has one picture: while a client has not taken
it, the next ones are lost to that client, as with a camera whose link is full.

    python -m benchmarks.live.camera RATE STAMPS
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import struct
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

__all__ = ["BITS", "NUMBERS", "SIZE", "Stamps", "number_of"]

SIZE = 640, 480
BITS = 10
NUMBERS = 1 << BITS
"""At 60 a second they come again after 17 s, far above the age of every picture."""

LINK_BYTES = 65_536
"""Of the socket's buffer, so that a client that reads slowly loses pictures rather than time: two to four pictures."""

Pixels = npt.NDArray[np.uint8]


class Stamps:
    """Times of capture by number, in a file.

    Args:
        path: Where it is; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * NUMBERS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * NUMBERS)

    def __setitem__(self, number: int, at_ns: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * number, at_ns)

    def __getitem__(self, number: int) -> int:
        return int(struct.unpack_from("<Q", self._memory, 8 * number)[0])


def number_of(picture: Pixels) -> int:
    """The number in a picture of any size, ``[height, width, 3]``: by the brightness in the middle of each block."""
    height, width = picture.shape[:2]
    columns = ((np.arange(BITS) + 0.5) * width / BITS).astype(int)
    bright = picture[height // 8, columns].mean(axis=1) > 128
    return int((bright << np.arange(BITS)).sum())


def pictures() -> list[bytes]:
    """All numbers as JPEG pictures, over a ground with some detail."""
    width, height = SIZE
    rng = np.random.default_rng(5)
    ground = np.repeat(np.repeat(rng.integers(60, 200, (height // 8, width // 8, 3), np.uint8), 8, 0), 8, 1)
    block = width // BITS
    found = []
    encoder: Any = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
    encoder.framerate, encoder.time_base = Fraction(60), Fraction(1, 60)
    for number in range(NUMBERS):
        picture = ground.copy()
        for bit in range(BITS):
            picture[: height // 4, bit * block : (bit + 1) * block] = 255 * (number >> bit & 1)
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuvj420p")
        frame.pts = number
        found += [bytes(packet) for packet in encoder.encode(frame)]
    return found + [bytes(packet) for packet in encoder.encode(None)]


async def serve(rate: float, stamps: Stamps) -> None:
    """Prints the port, and then sends pictures to every client until standard input is closed."""
    encoded = pictures()
    assert len(encoded) == NUMBERS
    clients: set[asyncio.StreamWriter] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
        writer.write(
            b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace;boundary=frame\r\n\r\n--frame\r\n"
        )
        clients.add(writer)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        clients.discard(writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    started_s = loop.time()
    count = 0
    while not ended.done():
        number = count % NUMBERS
        data = encoded[number]
        # The boundary ends a picture: a client shows it only then.
        part = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n--frame\r\n" % (len(data), data)
        stamps[number] = time.monotonic_ns()
        for writer in list(clients):
            if not writer.transport.get_write_buffer_size() and not writer.is_closing():
                writer.write(part)
        count += 1
        await asyncio.sleep(max(0.0, started_s + count / rate - loop.time()))
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), Stamps(Path(sys.argv[2]))))
