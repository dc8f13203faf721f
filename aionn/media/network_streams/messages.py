"""The messages between a network source and the process that decodes for it.

Owns their form and their bounds. Refuses to own the socket.

The decoder handles what a stranger on the network sends, so its process is not trusted: what it sends is checked here and
where it is used.

Invariant: a message is at most `MESSAGE_BYTES_MAX` long, and a malformed one raises `SourceUnavailable`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aionn.media.live.capture import SourceUnavailable
from aionn.media.network_streams.addresses import masked

__all__ = [
    "AUDIO_SLOT_SAMPLES",
    "COUNTER_BYTES",
    "Ended",
    "Filled",
    "MESSAGE_BYTES_MAX",
    "Message",
    "Opened",
    "Start",
    "decode",
    "encode",
    "encode_start",
    "decode_start",
]

MESSAGE_BYTES_MAX = 65_536
"""Far above the largest message, the first, which has the module path of the application."""

AUDIO_SLOT_SAMPLES = 16_384
"""Samples of a slot; a decoder's frame has up to some thousand, and a longer one is divided."""

COUNTER_BYTES = 1
"""The shared memory ends with the number of items that were sent, modulo 256, so that the receiver of the last one need not ask the
socket for another. There are fewer buffers than that."""

TEXT_MAX = 1_000
"""Characters of a reason."""


class Start(msgspec.Struct, frozen=True):
    """The first message to the process.

    Attributes:
        url: With its credentials.
        kind: Which stream is decoded.
        size: ``(width, height)`` of the frames; None leaves the stream's.
        sample_rate_hz: Of sound.
        options: Of FFmpeg, for the container.
        format: FFmpeg's name of the container; None has it found out.
        open_s_max: Limit of opening.
        read_s_max: Limit of a read.
        slots: Number of buffers.
        drops: Whether a frame is dropped when no buffer is free; otherwise the process waits.
        memory_bytes_max: Limit of the address space of the process.
    """

    url: str
    kind: Literal["video", "audio"]
    size: tuple[int, int] | None
    sample_rate_hz: int
    options: dict[str, str]
    format: str | None
    open_s_max: float
    read_s_max: float
    slots: int
    drops: bool
    memory_bytes_max: int

    def __repr__(self) -> str:
        """Without the credentials of the address, and without the options, which may be headers with keys: debuggers and reports of
        failures show the values of variables."""
        return f"<Start {self.kind} {masked(self.url)}>"


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """The stream is open.

    Attributes:
        slot_bytes: Bytes that a buffer needs.
        width: Of the frames; 0 for sound.
        height: Of the frames; 0 for sound.
        rate: Frames per second; 0 if the stream names none.
    """

    slot_bytes: int
    width: int
    height: int
    rate: float


class Filled(msgspec.Struct, frozen=True, tag="filled", array_like=True):
    """A buffer is filled.

    Attributes:
        slot: Its number.
        used: Bytes.
        media_ns: The stream's time stamp; None if it has none.
        arrival_ns: When it was decoded, CLOCK_MONOTONIC.
        dropped: Items that were dropped since the last message, since no buffer was free.
        damaged: Items that could not be decoded since the last message.
        sender_ns: The sender's clock (CLOCK_REALTIME) for ``media_ns``, by its reports; None if it sent none.
    """

    slot: int
    used: int
    media_ns: int | None
    arrival_ns: int
    dropped: int
    damaged: int
    sender_ns: int | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """The stream ended, or cannot be opened.

    Attributes:
        reason: Why.
        is_permanent: Whether another attempt cannot succeed.
    """

    reason: str
    is_permanent: bool


Message = Opened | Filled | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Opened | Filled | Ended)
_start_decoder = msgspec.msgpack.Decoder(Start)


def encode(message: Message) -> bytes:
    """A message as bytes; a long reason is cut."""
    if isinstance(message, Ended):
        message = Ended(message.reason[:TEXT_MAX], message.is_permanent)
    return _encoder.encode(message)


def decode(data: bytes, where: str) -> Message:
    """The message in some bytes.

    Raises:
        SourceUnavailable: They are not a message.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise SourceUnavailable(
            f"{where}: expected a message of the process that decodes, got {len(data)} other bytes ({e}); "
            f"that process is at "
            "fault"
        ) from e


def encode_start(start: Start) -> bytes:
    """The first message as bytes."""
    return _encoder.encode(start)


def decode_start(data: bytes) -> Start:
    """The first message, in the process."""
    return _start_decoder.decode(data)
