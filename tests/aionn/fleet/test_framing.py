"""Frames: bytes go where they belong, in whatever pieces they come, and no length is believed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aionn.errors import InvalidArgument
from aionn.fleet.framing import (
    MARK,
    PRELUDE,
    SCRATCH_BYTES,
    ForeignProtocol,
    FrameLimits,
    FrameReader,
    OtherVersion,
    ReadState,
    frame_lengths,
)

LIMITS = FrameLimits(1 << 10, 1 << 20)


class Reader:
    """A reader, and the frames that it has read."""

    def __init__(self, limits: FrameLimits = LIMITS, *, later: bool = False) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.head = b""
        self.later = later
        self.is_waiting = False
        self.reader = FrameReader(limits, self.on_head, self.on_body)

    def places(self, body_bytes: int) -> Sequence[memoryview]:
        self.body = bytearray(body_bytes)
        half = body_bytes // 2
        return [memoryview(self.body)[:half], memoryview(self.body)[half:]]

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview] | None:
        self.head = head
        self.body_bytes = body_bytes
        self.is_waiting = self.later
        return None if self.later else self.places(body_bytes)

    def on_body(self) -> None:
        self.frames.append((self.head, bytes(self.body)))

    def feed(self, data: bytes, rng: random.Random | None = None) -> None:
        while data:
            buffer = self.reader.buffer()
            assert buffer.nbytes, "never empty"
            count = min(len(data), buffer.nbytes)
            if rng is not None:
                count = rng.randint(1, count)
            buffer[:count] = data[:count]
            data = data[count:]
            self.reader.received(count)
            while self.is_waiting:
                self.is_waiting = False
                self.reader.place(self.places(self.body_bytes))


def frame(head: bytes, body: bytes) -> bytes:
    return frame_lengths(len(head), len(body)) + head + body


@given(
    frames=st.lists(st.tuples(st.binary(max_size=600), st.binary(max_size=40_000)), max_size=6),
    seed=st.integers(0, 1000),
    later=st.booleans(),
)
def test_frames_are_read_in_whatever_pieces_they_come(
    frames: list[tuple[bytes, bytes]], seed: int, later: bool
) -> None:
    reader = Reader(later=later)
    reader.feed(PRELUDE + b"".join(frame(*one) for one in frames), random.Random(seed))
    assert reader.frames == frames
    assert not reader.reader.is_within


def test_long_body_is_read_straight_into_its_place() -> None:
    reader = Reader()
    body = random.Random(1).randbytes(500_000)
    reader.feed(PRELUDE + frame(b"head", b"")[:-4])
    reader.feed(b"head" + frame_lengths(1, len(body)) + b"x" + body[:10])
    assert reader.reader.buffer().obj is reader.body
    reader.feed(body[10:])
    assert reader.frames == [(b"head", b""), (b"x", body)]


@pytest.mark.parametrize("lengths", [(1 << 30, 0), (1025, 0), (0, (1 << 20) + 1), (1, 1 << 63)])
def test_length_beyond_its_limit_is_rejected_before_it_is_allocated(lengths: tuple[int, int]) -> None:
    reader = Reader()
    with pytest.raises(InvalidArgument, match=r"expected a (head|body) of at most .* announced"):
        reader.feed(PRELUDE + frame_lengths(*lengths))
    assert reader.reader.state is ReadState.ENDED
    assert reader.reader._scratch.nbytes == SCRATCH_BYTES
    assert not reader.body


def test_nothing_is_read_after_a_broken_rule() -> None:
    reader = Reader()
    with pytest.raises(InvalidArgument, match="the stream is damaged"):
        reader.feed(PRELUDE + b"xxxx" + bytes(12))
    reader.feed(frame(b"head", b"body"))
    assert not reader.frames


@pytest.mark.parametrize(
    ("first", "words", "is_http"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "the client speaks HTTP", True),
        (b"PRI * HTTP/2.0\r\n\r\n", "the client speaks HTTP", True),
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server answered", False),
        (b"\x16\x03\x01\x02\x00\x01", "speaks TLS", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not a node or client of aionn; it began with b'SSH-2.0", False),
        (MARK[:5] + b"m", "is not a node", False),
    ],
)
def test_other_protocols_are_named(first: bytes, words: str, is_http: bool) -> None:
    with pytest.raises(ForeignProtocol, match=words) as caught:
        Reader().feed(first)
    assert caught.value.is_http == is_http


def test_other_version_is_named() -> None:
    with pytest.raises(OtherVersion, match="speaks version 9 of the protocol, this one speaks 1"):
        Reader().feed(MARK + b"\x00\x09")


def test_discarded_body_leaves_its_place_alone() -> None:
    reader = Reader()
    reader.feed(PRELUDE + frame_lengths(1, 40_000) + b"x" + b"a" * 30_000)
    reader.reader.discard()
    reader.feed(b"b" * 10_000)
    assert [head for head, _ in reader.frames] == [b"x"]
    assert b"b" not in reader.body


def test_head_of_the_largest_size_is_read_and_bounded() -> None:
    reader = Reader(FrameLimits(3 * SCRATCH_BYTES, 0))
    head = random.Random(2).randbytes(3 * SCRATCH_BYTES)
    reader.feed(PRELUDE + frame(head, b""), random.Random(3))
    assert reader.frames == [(head, b"")]
    assert reader.reader._scratch.nbytes <= 4 * SCRATCH_BYTES
