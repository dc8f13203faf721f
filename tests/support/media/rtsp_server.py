"""A small RTSP server that sends a transport stream over interleaved TCP, and loses, pauses and repeats what a test wants.

Source: RFC 2326 (RTSP 1.0), RFC 3550 and 3551 (RTP, payload type 33 is MPEG-2 TS).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

from tests.support.media.media_server import Behaviour

__all__ = ["rtsp", "transport_packets"]

TS_PER_RTP = 7
SDP = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\nm=video 0 RTP/AVP 33\r\na=control:track1\r\n"

Play = Callable[[asyncio.StreamWriter, int], AsyncIterator[bytes]]


async def transport_packets(data: bytes, seconds: float, start: float = 0.0) -> AsyncIterator[bytes]:
    """Pieces of a transport stream of so many seconds, at its own pace."""
    size = 188 * TS_PER_RTP
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    for piece in pieces[int(len(pieces) * start) :]:
        yield piece
        await asyncio.sleep(seconds / len(pieces))


def rtsp(play: Play, *, requires: bytes | None = None, silent_at: bytes | None = None) -> Behaviour:
    """The behaviour of a server that answers requests and then sends what ``play`` yields; an empty piece is lost on the way.

    Args:
        play: Gives the pieces for a connection, by its number.
        requires: The credentials of the header Authorization; None admits everything.
        silent_at: The method that is never answered.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method = head.split(b" ", 1)[0]
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            answer = [b"RTSP/1.0 200 OK", b"CSeq: " + fields[b"CSeq"]]
            body = b""
            if method == silent_at:
                await asyncio.sleep(20)
            if requires is not None and fields.get(b"Authorization") != requires:
                answer = [b"RTSP/1.0 401 Unauthorized", answer[1], b'WWW-Authenticate: Basic realm="test"']
            elif method == b"OPTIONS":
                answer.append(b"Public: DESCRIBE, SETUP, PLAY, TEARDOWN")
            elif method == b"DESCRIBE":
                body = SDP
                answer += [b"Content-Type: application/sdp", b"Content-Length: %d" % len(body)]
            elif method == b"SETUP":
                answer += [b"Transport: RTP/AVP/TCP;unicast;interleaved=0-1", b"Session: 7"]
            elif method == b"PLAY":
                answer.append(b"Session: 7")
            writer.write(b"\r\n".join(answer) + b"\r\n\r\n" + body)
            await writer.drain()
            if method == b"PLAY" and answer[0].endswith(b"OK"):
                await _send(play(writer, number), writer)
                return

    return serve


async def _send(pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
    sequence = 0
    loop = asyncio.get_running_loop()
    async for piece in pieces:
        sequence = (sequence + 1) & 0xFFFF
        if not piece:
            continue
        stamp = int(loop.time() * 90_000) & 0xFFFF_FFFF
        packet = struct.pack(">BBHII", 0x80, 33, sequence, stamp, 1) + piece
        writer.write(struct.pack(">cBH", b"$", 0, len(packet)) + packet)
        await writer.drain()
