"""A small RTSP server over interleaved TCP, which loses, pauses, repeats and misdates what a test wants.

It sends a transport stream, or pictures with the time stamps of RTP and the reports of the sender's clock.

Source: RFC 2326 (RTSP 1.0), RFC 3550 and 3551 (RTP; payload type 33 is MPEG-2 TS, 32 is MPEG video), RFC 2250 (MPEG video in RTP).
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import AsyncIterator, Callable
from fractions import Fraction

import av
import msgspec
import numpy as np

from tests.support.media.media_server import Behaviour

__all__ = ["Picture", "SenderReport", "mpeg_picture", "rtsp", "transport_packets"]

TS_PER_RTP = 7
SDP = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\nm=video 0 RTP/AVP 33\r\na=control:track1\r\n"

PICTURES_SDP = SDP.replace(b"RTP/AVP 33", b"RTP/AVP 32")
CLOCK_HZ = 90_000
NTP_OF_UNIX_S = 2_208_988_800


class Picture(msgspec.Struct, frozen=True):
    """A picture with its time stamp, in 1/90,000 s."""

    data: bytes
    stamp: int


class SenderReport(msgspec.Struct, frozen=True):
    """The sender's clock at a time stamp, in seconds of CLOCK_REALTIME."""

    clock_s: float
    stamp: int


Play = Callable[[asyncio.StreamWriter, int], AsyncIterator[bytes | Picture | SenderReport]]


@functools.lru_cache(maxsize=256)
def mpeg_picture(level: int, width: int = 64, height: int = 48, *further: int) -> bytes:
    """A picture of one grey level, or of stripes of the same width if there are further ones, complete in itself."""
    encoder = av.CodecContext.create("mpeg1video", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
    encoder.framerate, encoder.time_base, encoder.gop_size = Fraction(25), Fraction(1, 25), 1
    row = np.repeat(np.array([level, *further], np.uint8), width // (1 + len(further)))
    pixels = np.ascontiguousarray(np.broadcast_to(row[:, None], (height, width, 3)))
    picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    packets = encoder.encode(picture.reformat(format="yuv420p")) + encoder.encode(None)
    return bytes(packets[0])


async def transport_packets(data: bytes, seconds: float, start: float = 0.0) -> AsyncIterator[bytes]:
    """Pieces of a transport stream of so many seconds, at its own pace."""
    size = 188 * TS_PER_RTP
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    for piece in pieces[int(len(pieces) * start) :]:
        yield piece
        await asyncio.sleep(seconds / len(pieces))


def rtsp(
    play: Play, *, requires: bytes | None = None, silent_at: bytes | None = None, sdp: bytes = SDP
) -> Behaviour:
    """The behaviour of a server that answers requests and then sends what ``play`` yields; an empty piece is lost on the way.

    Args:
        play: Gives the pieces for a connection, by its number: parts of a transport stream, or pictures and reports.
        sdp: The description of the stream: ``PICTURES_SDP`` for pictures.
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
                body = sdp
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


async def _send(pieces: AsyncIterator[bytes | Picture | SenderReport], writer: asyncio.StreamWriter) -> None:
    sequence = 0
    loop = asyncio.get_running_loop()
    async for piece in pieces:
        if isinstance(piece, SenderReport):
            _write(writer, 1, _report(piece))
            continue
        sequence = (sequence + 1) & 0xFFFF
        if not piece:
            continue
        if isinstance(piece, Picture):
            # The marker ends a picture; four bytes of zeros are the header of MPEG video.
            head = struct.pack(">BBHII", 0x80, 0x80 | 32, sequence, piece.stamp & 0xFFFF_FFFF, 1)
            _write(writer, 0, head + bytes(4) + piece.data)
        else:
            stamp = int(loop.time() * CLOCK_HZ) & 0xFFFF_FFFF
            _write(writer, 0, struct.pack(">BBHII", 0x80, 33, sequence, stamp, 1) + piece)
        await writer.drain()


def _write(writer: asyncio.StreamWriter, channel: int, packet: bytes) -> None:
    writer.write(struct.pack(">cBH", b"$", channel, len(packet)) + packet)


def _report(report: SenderReport) -> bytes:
    ntp = int((report.clock_s + NTP_OF_UNIX_S) * 2**32)
    return struct.pack(
        ">BBHIQIII", 0x80, 200, 6, 1, ntp & 0xFFFF_FFFF_FFFF_FFFF, report.stamp & 0xFFFF_FFFF, 0, 0
    )
