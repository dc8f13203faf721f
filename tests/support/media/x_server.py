"""A small X server that gives a picture of one grey level, another one each time, and no extension.

Source: X Window System Protocol, version 11: connection setup, QueryExtension, GetGeometry, GetImage.
"""

from __future__ import annotations

import asyncio
import struct

from tests.support.media.media_server import Behaviour

__all__ = ["GET_IMAGE", "PORT", "display_of", "x_display"]

PORT = 6000
"""Display N of a host is at this port plus N."""

QUERY_POINTER, GET_INPUT_FOCUS, GET_GEOMETRY, GET_IMAGE, QUERY_EXTENSION = 38, 43, 14, 73, 98
FIRST_EXTENSION = 128
ROOT, VISUAL, DEPTH = 0x100, 0x21, 24


def display_of(port: int) -> str:
    """The name of the display at a port of this machine."""
    return f"127.0.0.1:{port - PORT}"


def _setup(width: int, height: int) -> bytes:
    vendor = b"test"
    visual = struct.pack("<IBBHIII4x", VISUAL, 4, 8, 256, 0xFF0000, 0xFF00, 0xFF)
    depth = struct.pack("<BxH4x", DEPTH, 1) + visual
    screen = struct.pack(
        "<IIIIIHHHHHHIBBBB", ROOT, 0x20, 0xFFFFFF, 0, 0, width, height, 300, 200, 1, 1, VISUAL, 0, 0, DEPTH, 1
    )
    formats = struct.pack("<BBB5x", DEPTH, 32, 32)
    head = struct.pack(
        "<IIIIHHBBBBBBBB4x", 1, 0x200000, 0x1FFFFF, 0, len(vendor), 0xFFFF, 1, 1, 0, 0, 32, 32, 8, 255
    )
    body = head + vendor + formats + screen + depth
    return struct.pack("<BxHHH", 1, 11, 0, len(body) // 4) + body


def x_display(
    *,
    size: tuple[int, int] = (64, 48),
    is_admitted: bool = True,
    pictures: int | None = None,
    then: str = "cut",
) -> Behaviour:
    """The behaviour of a display.

    Args:
        size: Of its screen.
        is_admitted: Whether connections are accepted.
        pictures: So many are given to the first connection; None gives them without a limit.
        then: ``"cut"`` or ``"silent"``, after the last of them.
    """
    width, height = size

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        head = await reader.readexactly(12)
        lengths = struct.unpack("<HH", head[6:10])
        for length in lengths:
            await reader.readexactly(-(-length // 4) * 4)
        if not is_admitted:
            reason = b"not for you!"
            writer.write(struct.pack("<BBHHH", 0, len(reason), 11, 0, len(reason) // 4) + reason)
            await writer.drain()
            return
        writer.write(_setup(width, height))
        sequence = given = 0
        while True:
            opcode, _, length = struct.unpack("<BBH", await reader.readexactly(4))
            body = await reader.readexactly(length * 4 - 4)
            sequence = (sequence + 1) & 0xFFFF
            if opcode == GET_IMAGE:
                if number == 1 and given == pictures:
                    if then == "silent":
                        await asyncio.sleep(20)
                    writer.transport.abort()
                    return
                _, _, _, wide, high, _ = struct.unpack("<IhhHHI", body)
                pixels = bytes([given % 256]) * (wide * high * 4)
                given += 1
                reply = struct.pack("<BBHII20x", 1, DEPTH, sequence, len(pixels) // 4, VISUAL) + pixels
            elif opcode == GET_GEOMETRY:
                reply = struct.pack("<BBHIIhhHHH10x", 1, DEPTH, sequence, 0, ROOT, 0, 0, width, height, 0)
            elif opcode == QUERY_EXTENSION:
                # Present, since libxcb ends the connection otherwise; its requests fail.
                reply = struct.pack("<BxHIBBBB20x", 1, sequence, 0, 1, FIRST_EXTENSION, 64, 128)
            elif opcode == QUERY_POINTER:
                reply = struct.pack("<BBHIIIhhhhH6x", 1, 1, sequence, 0, ROOT, 0, 1, 1, 1, 1, 0)
            elif opcode == GET_INPUT_FOCUS:
                reply = struct.pack("<BBHII20x", 1, 0, sequence, 0, ROOT)
            elif opcode >= FIRST_EXTENSION:
                reply = struct.pack("<BBHIHB21x", 0, 1, sequence, 0, 0, opcode)
            else:
                continue
            writer.write(reply)
            await writer.drain()

    return serve
