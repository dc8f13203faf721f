"""Limits of the size of messages, by kind.

Owns the limits, and how to read a message's kind without decoding it. No I/O.

A peer's message is decoded on the event loop, and one byte of it may become an object of a hundred. So a limit is as low as the
kind's meaning allows, and is checked before anything is decoded: most calls carry a few numbers, a request names its arguments, and
a model alone is large, which is why it travels in parts (``large``). The sender checks the same limits: an error there has a cause
and an owner, while a message that breaks them ends the connection.
"""

from __future__ import annotations

import re

import msgspec

from aionn.errors import InvalidArgument

__all__ = [
    "ARGUMENTS_MAX",
    "FENCES_MAX",
    "INLINE_BYTES_MAX",
    "MODEL_INLINE_BYTES_MAX",
    "MODEL_KINDS",
    "SMALL_BYTES_MAX",
    "TEXT_CHARACTERS_MAX",
    "WrongTypes",
    "are_wrong_types",
    "array_length",
    "check_inline",
    "check_large",
    "kind_of",
    "read_envelope",
    "shortened",
]

INLINE_BYTES_MAX = 32 << 10
"""Largest datagram: well below the kernel's default send buffer of 208 KiB, so that several can be in the socket together."""

SMALL_BYTES_MAX = 1 << 10
"""A message up to this size is decoded directly, whatever its content: a millisecond at worst, some microseconds as a rule."""

PLAIN_BYTES_MAX = 4 << 10
"""Largest message of a kind with a few numbers or one text; a list of 240 slots or identifiers is half of it."""

MODEL_INLINE_BYTES_MAX = 4 << 10
"""Largest model that travels as it is: some hundred operands, half a millisecond."""

ARGUMENTS_MAX = 1024
"""Arguments of a request on one side, and pools: a network with a state per layer has some hundreds."""

FENCES_MAX = 8
"""Fences of a message: taking one and waiting for it is some 50 microseconds of the event loop. A sender merges what is more."""

TEXT_CHARACTERS_MAX = 1000
"""Longest text of an error that is sent; it may quote the peer's message."""

MODEL_KINDS = frozenset({"SupportedOperations", "PrepareModel"})

_REQUEST_KINDS = frozenset({"Execute", "ExecuteReserved", "Launch", "ExecuteFenced", "CreateExecution"})

_INLINE_BYTES_MAX = {
    **dict.fromkeys(MODEL_KINDS, MODEL_INLINE_BYTES_MAX),
    **dict.fromkeys(_REQUEST_KINDS, INLINE_BYTES_MAX),
    "ComputeFenced": INLINE_BYTES_MAX,
    "GetMemoriesReply": INLINE_BYTES_MAX,
    "HelloReply": INLINE_BYTES_MAX,
    "SupportedOperationsReply": INLINE_BYTES_MAX,
    "ThreadsReply": INLINE_BYTES_MAX,
    "Allocate": 16 << 10,
    "ExecuteReply": 16 << 10,
    "ExecuteReservedReply": 16 << 10,
    "Failed": 16 << 10,
    "Notify": 16 << 10,
}
"""Largest datagram by kind, where it is not PLAIN_BYTES_MAX."""

_LARGE_BYTES_MAX = {
    **dict.fromkeys(MODEL_KINDS, 16 << 20),
    "HelloReply": 256 << 10,
    "SupportedOperationsReply": 1 << 20,
}
"""Largest message by kind that may be in a memory of its own, the bytes of a model's constants aside: 100 thousand operations with
their operands; a device with thousands of extensions; an answer per operation."""

_KIND = re.compile(
    rb"\x83\xa4type(?:\xa4Call|\xa5Reply)\xa2id"
    rb"(?:[\x00-\x7f]|[\xcc\xd0].|[\xcd\xd1]..|[\xce\xd2].{4}|[\xcf\xd3].{8})"
    rb"\xa4body[\x80-\x8f]\xa4type(?:[\xa0-\xbf]|\xd9.)([A-Za-z]+)",
    re.DOTALL,
)
"""The first bytes of a message of aionn's encoder; the names of kinds are plain letters, and the byte after one is not a letter."""


def kind_of(payload: bytes) -> str:
    """The name of a message's kind, read without decoding it.

    Raises:
        InvalidArgument: It is not a message of aionn's encoder.
    """
    found = _KIND.match(payload)
    if found is None:
        raise InvalidArgument("message: its kind cannot be read")
    return found[1].decode()


_VALUE_OF_A_BODY = re.compile(r" at `\$\.body\.(?!type`)")
"""In a message of msgspec: the place of a value, which is not the name of the kind."""


class WrongTypes(InvalidArgument):
    """A message whose values are not of the types that its kind has; the rest of it is in order."""


def are_wrong_types(error: BaseException) -> bool:
    """Whether an error of a decoder is about a value inside of a body whose kind it knows."""
    is_about_a_type = isinstance(error, msgspec.ValidationError) and error.__cause__ is None
    return is_about_a_type and _VALUE_OF_A_BODY.search(str(error)) is not None


def check_inline(payload: bytes) -> None:
    """Checks a datagram before it is decoded, or sent.

    Raises:
        InvalidArgument: It is larger than its kind may be, or lists too many arguments.
    """
    if len(payload) <= SMALL_BYTES_MAX:
        return
    kind = kind_of(payload)
    limit = _INLINE_BYTES_MAX.get(kind, PLAIN_BYTES_MAX)
    if len(payload) > limit:
        raise InvalidArgument(f"message {kind}: expected at most {limit} bytes, got {len(payload)}")
    if kind in _REQUEST_KINDS:
        _check_lists(payload)


class _Lists(msgspec.Struct, array_like=True):
    inputs: msgspec.Raw
    outputs: msgspec.Raw
    pools: msgspec.Raw


class _RequestBody(msgspec.Struct):
    request: _Lists


class _RequestCall(msgspec.Struct):
    body: _RequestBody


_REQUEST_DECODER = msgspec.msgpack.Decoder(_RequestCall)


def _check_lists(payload: bytes) -> None:
    """Counts the lists of a request without making their objects."""
    try:
        request = _REQUEST_DECODER.decode(payload).body.request
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidArgument(f"message: {e}") from e
    for name in ("inputs", "outputs", "pools"):
        count = array_length(bytes(getattr(request, name)))
        if count > ARGUMENTS_MAX:
            raise InvalidArgument(f"request: expected at most {ARGUMENTS_MAX} {name}, got {count}")


class _Envelope(msgspec.Struct, frozen=True):
    """The readable part of a message whose descriptors were lost."""

    type: str
    id: int


_ENVELOPE_DECODER = msgspec.msgpack.Decoder(_Envelope)


def read_envelope(payload: bytes) -> tuple[bool, int] | None:
    """Whether an undecodable message is a call, and its number; None if it cannot be answered."""
    try:
        envelope = _ENVELOPE_DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # Text that is not UTF-8 is a plain ValueError.
    return (envelope.type == "Call", envelope.id) if envelope.type in ("Call", "Reply") else None


def array_length(raw: bytes) -> int:
    """Number of elements of an encoded list, by its first five bytes.

    Raises:
        InvalidArgument: It is not a list.
    """
    head = raw[0] if raw else 0
    if 0x90 <= head <= 0x9F:
        return head & 0x0F
    if head in (0xDC, 0xDD):
        return int.from_bytes(raw[1 : 3 if head == 0xDC else 5], "big")
    raise InvalidArgument("message: expected a list")


def check_large(kind: str, size_bytes: int) -> None:
    """Checks a message in a memory of its own.

    Raises:
        InvalidArgument: Its kind may not be so large.
    """
    limit = _LARGE_BYTES_MAX.get(kind) or _INLINE_BYTES_MAX.get(kind, PLAIN_BYTES_MAX)
    if not 0 < size_bytes <= limit:
        raise InvalidArgument(f"message {kind}: expected at most {limit} bytes, got {size_bytes}")


def shortened(text: str) -> str:
    """A text of an error, cut where it is too long to be sent."""
    if len(text) <= TEXT_CHARACTERS_MAX:
        return text
    return f"{text[:TEXT_CHARACTERS_MAX]} ... ({len(text) - TEXT_CHARACTERS_MAX} more characters)"
