"""Frames over a stream connection: what each byte belongs to, and where it goes.

Owns the form of the stream and its limits; no I/O and no clock. Each end first sends eight bytes, a mark and a version. Then follow
frames: two lengths, a head (a message of ``messages``), and a body, which is read into the memory that the receiver names for it
once it has the head.

Invariants:
1. A length is compared with its limit before anything of that length is allocated, and before a byte of it is read.
2. A stream that has broken a rule is read no further. The error names the bytes that came in its place, in words for an operator.
3. Bytes of a body reach their destination without an intermediate copy, except for those that came together with their head.

Source: the framing of MessagePack RPC and of HTTP/2's connection preface, reduced to what one request in flight needs.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aionn.errors import InvalidArgument

__all__ = [
    "HTTP_ANSWER",
    "PRELUDE",
    "VERSION",
    "ForeignProtocol",
    "FrameLimits",
    "FrameReader",
    "OtherVersion",
    "ReadState",
    "frame_lengths",
]

VERSION = 1
"""Version of the frames and of their messages. Both ends must have the same one."""

MARK = b"\x89aionn"
"""The first bytes of a stream. The first one is not ASCII, so that no protocol of text lines begins with it, as in PNG files."""

PRELUDE = MARK + VERSION.to_bytes(2, "big")
"""The first bytes that each end sends."""

_LENGTHS = struct.Struct(">4sIQ")
_FRAME_MARK = b"aion"

SCRATCH_BYTES = 16 << 10
"""Bytes that are read before their destination is known. Heads are smaller as a rule; the first bytes of a body that come with its
head are copied, at most so many."""

HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
    b"This port serves a device of aionn and does not speak HTTP. Connect with aionn.open(fleet=[...]).\n"
)
"""The answer to a client that speaks HTTP."""

_HTTP_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC", b"PRI ")


class ForeignProtocol(InvalidArgument):
    """The other end does not speak this protocol.

    Attributes:
        is_http: Whether a client spoke HTTP, and may be answered with ``HTTP_ANSWER``.
    """

    def __init__(self, message: str, *, is_http: bool) -> None:
        super().__init__(message)
        self.is_http = is_http


class OtherVersion(InvalidArgument):
    """The other end speaks another version of this protocol."""


class FrameLimits(NamedTuple):
    """Largest parts of a frame that a reader accepts.

    Attributes:
        head_bytes: Of the head.
        body_bytes: Of the body.
    """

    head_bytes: int
    body_bytes: int


class ReadState(enum.Enum):
    """The part of the stream that comes next: each follows on the one above it, and LENGTHS on BODY, once that is complete. ENDED
    follows on a broken rule, and nothing on ENDED."""

    PRELUDE = "prelude"
    LENGTHS = "lengths"
    HEAD = "head"
    BODY = "body"
    ENDED = "ended"


def frame_lengths(head_bytes: int, body_bytes: int) -> bytes:
    """The lengths that precede a head and a body."""
    return _LENGTHS.pack(_FRAME_MARK, head_bytes, body_bytes)


class FrameReader:
    """One direction of a stream.

    ``buffer`` is the destination of the next bytes, ``received`` takes their number.

    Args:
        limits: The largest frame; ``limits`` may be assigned later, for the frames that follow.
        on_head: Called with a head and the length of its body; returns where the body goes, writable views of that length
            together, or None if ``place`` is called later.
        on_body: Called when the body is in its place; for an empty body as well.

    Attributes:
        state: The part that comes next.
        is_within: Whether a frame has begun and is not complete.
    """

    def __init__(
        self,
        limits: FrameLimits,
        on_head: Callable[[bytes, int], Sequence[memoryview] | None],
        on_body: Callable[[], None],
    ) -> None:
        self.limits = limits
        self.state = ReadState.PRELUDE
        self._on_head = on_head
        self._on_body = on_body
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._begin = self._end = 0
        self._head_bytes = self._body_bytes = 0
        self._places: list[memoryview] | None = []
        self._is_parsing = False

    @property
    def is_within(self) -> bool:
        return self.state in (ReadState.HEAD, ReadState.BODY) or self._begin != self._end

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self.state is ReadState.BODY and self._places and self._begin == self._end:
            return self._places[0]
        if self._end == len(self._scratch):
            self._make_room(len(self._scratch) - (self._end - self._begin) or SCRATCH_BYTES)
        return self._scratch[self._end :]

    def received(self, count: int) -> bool:
        """Takes note of bytes that were read into ``buffer``.

        Returns:
            Whether the next bytes belong to a body whose place is known.

        Raises:
            ForeignProtocol: They belong to another protocol.
            OtherVersion: The other end has another version.
            InvalidArgument: A length is beyond its limit, or the stream is not one of frames any more.
        """
        if self.state is ReadState.ENDED:
            return False
        if self.state is ReadState.BODY and self._places and self._begin == self._end:
            self._fill(count)
            if self._places:
                return True
        else:
            self._end += count
        self._parse()
        return self.state is ReadState.BODY and bool(self._places)

    def place(self, places: Sequence[memoryview]) -> None:
        """Gives the destination of a body for which ``on_head`` had none yet. Raises as ``received``."""
        self._take_places(places)
        self._parse()

    def discard(self) -> None:
        """Reads the rest of the present body into memory of this object: its destination is not the owner's any more."""
        if self.state is ReadState.BODY and self._places:
            self._places = [memoryview(bytearray(place.nbytes)) for place in self._places]

    def end(self) -> None:
        """Nothing more is read."""
        self.state = ReadState.ENDED
        self._places = []

    def _parse(self) -> None:
        if self._is_parsing:
            return  # ``place`` within ``on_head``: the loop below continues.
        self._is_parsing = True
        try:
            while self._take():
                pass
        except BaseException:
            self.end()
            raise
        finally:
            self._is_parsing = False

    def _take(self) -> bool:
        """Takes what is there of the next frame, in one call where all of it is; False if more bytes are needed."""
        if self.state is ReadState.LENGTHS:
            if self._end - self._begin < _LENGTHS.size:
                return False
            self._read_lengths()
            self.state = ReadState.HEAD
        if self.state is ReadState.HEAD:
            have = self._end - self._begin
            if have < self._head_bytes:
                if self._head_bytes > len(self._scratch) - self._begin:
                    self._make_room(self._head_bytes - have)
                return False
            head = bytes(self._taken(self._head_bytes))
            self.state = ReadState.BODY
            self._places = None
            places = self._on_head(head, self._body_bytes)
            if places is not None:
                self._take_places(places)
        if self.state is ReadState.BODY:
            if self._places and self._begin != self._end:
                self._copy_body(self._places)
            if self._places is None or self._places:
                return False
            self.state = ReadState.LENGTHS
            self._on_body()
            return True
        return self.state is ReadState.PRELUDE and self._take_prelude()

    def _take_prelude(self) -> bool:
        _check_mark(bytes(self._scratch[self._begin : self._end]))
        if self._end - self._begin < len(PRELUDE):
            return False
        _check_version(bytes(self._taken(len(PRELUDE))))
        self.state = ReadState.LENGTHS
        return True

    def _read_lengths(self) -> None:
        mark, head_bytes, body_bytes = _LENGTHS.unpack(self._taken(_LENGTHS.size))
        if mark != _FRAME_MARK:
            raise InvalidArgument("connection: the bytes that came are not a frame: the stream is damaged")
        if head_bytes > self.limits.head_bytes:
            raise _too_long("head", head_bytes, self.limits.head_bytes)
        if body_bytes > self.limits.body_bytes:
            raise _too_long("body", body_bytes, self.limits.body_bytes)
        self._head_bytes, self._body_bytes = head_bytes, body_bytes

    def _take_places(self, places: Sequence[memoryview]) -> None:
        if self.state is ReadState.ENDED:
            return
        if len(places) == 1:  # As most executions have it.
            size_bytes = places[0].nbytes
            self._places = [places[0]] if size_bytes else []
        else:
            size_bytes = sum(place.nbytes for place in places)
            self._places = [place for place in places if place.nbytes]
        assert size_bytes == self._body_bytes, "the owner checks the lengths"

    def _copy_body(self, places: list[memoryview]) -> None:
        while places and self._begin != self._end:
            count = min(places[0].nbytes, self._end - self._begin)
            places[0][:count] = self._taken(count)
            self._fill(count)

    def _fill(self, count: int) -> None:
        assert self._places, "a body is read into a place"
        if count == self._places[0].nbytes:
            self._places.pop(0)
        else:
            self._places[0] = self._places[0][count:]

    def _taken(self, count: int) -> memoryview:
        """The next bytes, valid until more are read."""
        begin = self._begin
        end = begin + count
        if end == self._end:
            self._begin = self._end = 0
        else:
            self._begin = end
        return self._scratch[begin:end]

    def _make_room(self, more: int) -> None:
        """Makes room for so many bytes behind those that are there; the limits bound it."""
        have = self._end - self._begin
        size = max(have + more, SCRATCH_BYTES)
        scratch = memoryview(bytearray(size))
        scratch[:have] = self._scratch[self._begin : self._end]
        self._scratch, self._begin, self._end = scratch, 0, have


def _too_long(what: str, length: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"connection: expected a {what} of at most {limit} bytes, got {length} bytes announced"
    )


def _check_mark(data: bytes) -> None:
    if MARK.startswith(data[: len(MARK)]):
        return
    if data[:4] in _HTTP_METHODS:
        raise ForeignProtocol("connection: the client speaks HTTP, and this port does not", is_http=True)
    if data.startswith(b"HTTP"):
        raise ForeignProtocol("connection: an HTTP server answered, and not a node of aionn", is_http=False)
    if data[0] in (0x15, 0x16) and data[1:2] in (b"\x03", b""):
        raise ForeignProtocol(
            "connection: the other end speaks TLS, and this end does not; write tls:// before the address",
            is_http=False,
        )
    raise ForeignProtocol(
        f"connection: the other end is not a node or client of aionn; it began with {data[:16]!r}",
        is_http=False,
    )


def _check_version(prelude: bytes) -> None:
    version = int.from_bytes(prelude[len(MARK) :], "big")
    if version != VERSION:
        raise OtherVersion(
            f"connection: the other end speaks version {version} of the protocol, this one speaks {VERSION}; install the same "
            "version of aionn on both machines"
        )
