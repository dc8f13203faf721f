"""The words every other module of this package uses: the three states, the errors, the record of an outcome.

Owns: ``FenceStatus``, the exceptions, ``Failure`` (why a fence failed, held in memory) and ``FenceState`` (status, time and
cause in a form that crosses a process). Refuses to own: fences, descriptors, waiting.

Invariants:
1. A ``FenceState`` decoded from a peer is checked in full before anything of it is used; one that does not fit is refused.
2. An encoded ``FenceState`` never exceeds ``RECORD_BYTES_MAX``, so that one packet always carries it: long texts are cut.
3. A failure keeps the name of the fence at which it began, through chains, merges and processes.
"""

from __future__ import annotations

import enum
import os
import struct

import msgspec

RECORD_VERSION = 1
"""First field of every record; a reader refuses any other."""

RECORD_BYTES_MAX = 4096
"""One page: far above a status with two texts, far below the smallest send buffer of a Unix socket."""

TEXT_CHARACTERS_MAX = 480
"""Of one text in a record. Three texts of four bytes a character fit ``RECORD_BYTES_MAX`` with room for any escape."""

TIME_NS_MAX = 2**63 - 1
"""The last moment of a signed 64-bit clock, as the kernel keeps it."""


class FenceStatus(enum.Enum):
    """The three states of a fence. The two finished ones are final."""

    PENDING = 0
    SIGNALLED = 1
    FAILED = 2


class FenceError(Exception):
    """A fence that was waited for has failed.

    Attributes:
        origin: The name of the fence at which the failure began, which need not be the one that was waited for.
        message: Why it failed, without the origin.
        at_ns: When it failed, in ns of CLOCK_MONOTONIC.

    ``__cause__`` is the exception given to ``fail``; a :class:`RemoteCause` if that was in another process; None if
    the cause was given as text.
    """

    def __init__(self, origin: str, message: str, at_ns: int) -> None:
        super().__init__(f"{origin}: {message}")
        self.origin = origin
        self.message = message
        self.at_ns = at_ns

    def __reduce__(self) -> tuple[type[FenceError], tuple[str, str, int]]:
        return type(self), (self.origin, self.message, self.at_ns)


class FenceStateError(RuntimeError):
    """The caller's mistake: the fence or timeline is in no state for this call. Nothing was changed."""


class ForeignFenceError(FenceStateError):
    """The caller's mistake: the fence belongs to another process, which alone may finish it. Nothing was changed."""


class NotAFenceError(ValueError):
    """The descriptor or record received from another process is not a fence of this package. Nothing was kept."""


class RemoteCause(Exception):
    """An exception of another process, of which only the name of its type and its text crossed.

    Attributes:
        type_name: Name of the type over there.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name


class Failure:
    """The reason of a failed fence. One record is shared by a fence and all its dependants; each raise makes a new exception."""

    __slots__ = ("at_ns", "cause", "message", "origin")

    def __init__(self, origin: str, cause: BaseException | str, at_ns: int) -> None:
        self.origin = origin
        self.at_ns = at_ns
        self.cause: BaseException | None = None
        if isinstance(cause, str):
            self.message = cause
        else:
            self.cause = cause
            self.message = text_of(cause)

    def error(self) -> FenceError:
        """A fresh exception: one shared instance would gather the tracebacks of all its waiters."""
        error = FenceError(self.origin, self.message, self.at_ns)
        error.__cause__ = self.cause
        return error


def failure_of(cause: BaseException | str, here: str, origin: str | None, at_ns: int) -> Failure:
    """The failure to record for a cause that a caller gave.

    Args:
        cause: An exception or a text. Of a :class:`FenceError` origin, message and cause are taken over: it is the same failure.
        here: The name of what is failed now: the origin, unless there is a better one.
        origin: The origin that the caller gave, or None.
        at_ns: When, in ns.

    Raises:
        TypeError: the cause is neither.
    """
    if not isinstance(cause, BaseException | str):
        raise TypeError(f"cause: expected an exception or a str, got {type(cause).__name__}")
    if isinstance(cause, FenceError):
        failure = Failure(origin or cause.origin, cause.message, at_ns)
        failure.cause = cause.__cause__
        return failure
    return Failure(origin or here, cause, at_ns)


Outcome = int | Failure
"""The outcome of a fence: the ns at which it was signalled, or the reason for its failure."""


class FenceState(msgspec.Struct, frozen=True, array_like=True):
    """Status, time and cause of a fence at one moment, for another process.

    Attributes:
        version: ``RECORD_VERSION``.
        status: The value of a :class:`FenceStatus`.
        at_ns: ns of CLOCK_MONOTONIC at which it finished; 0 while pending.
        origin: Name of the fence where a failure began; empty unless failed.
        cause_type: Name of the type of the exception that was the cause; empty without one.
        message: The text of the cause; empty unless failed.
    """

    version: int
    status: int
    at_ns: int
    origin: str = ""
    cause_type: str = ""
    message: str = ""


PENDING_STATE = FenceState(RECORD_VERSION, FenceStatus.PENDING.value, 0)

_HEAD = struct.Struct("<BBQ")  # Version, status, time.

SIGNALLED_RECORD_BYTES = _HEAD.size
"""Size of the record of a signalled fence; that of a failure has texts, so it is longer."""
_encode_texts = msgspec.msgpack.Encoder().encode
_decode_texts = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


def text_of(cause: BaseException) -> str:
    """``TypeName: text`` of an exception; never raises, though the exception's own ``__str__`` may."""
    try:
        text = str(cause)
    except Exception:
        text = "(its text could not be made)"
    name = type(cause).__name__
    return f"{name}: {text}" if text else name


def state_of(outcome: Outcome | None) -> FenceState:
    """The record of an outcome; None is pending. Texts are cut to ``TEXT_CHARACTERS_MAX``."""
    if outcome is None:
        return PENDING_STATE
    if isinstance(outcome, int):
        return FenceState(RECORD_VERSION, FenceStatus.SIGNALLED.value, outcome)
    cause_type = "" if outcome.cause is None else type(outcome.cause).__name__
    if isinstance(outcome.cause, RemoteCause):
        cause_type = outcome.cause.type_name
    return FenceState(
        RECORD_VERSION,
        FenceStatus.FAILED.value,
        outcome.at_ns,
        _cut(outcome.origin),
        _cut(cause_type),
        _cut(outcome.message),
    )


def outcome_of(state: FenceState) -> Outcome | None:
    """The outcome that a record from elsewhere describes; None is pending.

    Raises:
        NotAFenceError: the record is of another version, or its fields do not fit together.
    """
    if state.version != RECORD_VERSION:
        raise NotAFenceError(f"fence record: expected version {RECORD_VERSION}, got {state.version}")
    if not 0 <= state.at_ns <= TIME_NS_MAX:
        raise NotAFenceError(f"fence record: expected a time of 0..{TIME_NS_MAX} ns, got {state.at_ns}")
    if state.status == FenceStatus.PENDING.value:
        return None
    if state.status == FenceStatus.SIGNALLED.value:
        return state.at_ns
    if state.status != FenceStatus.FAILED.value:
        raise NotAFenceError(f"fence record: expected a status of 0..2, got {state.status}")
    failure = Failure(state.origin, state.message, state.at_ns)
    if state.cause_type:
        failure.cause = RemoteCause(state.cause_type, state.message.removeprefix(f"{state.cause_type}: "))
    return failure


def encode(outcome: Outcome | None) -> bytes:
    """The bytes of a record, at most ``RECORD_BYTES_MAX``: a fixed head, and after it the texts of a failure."""
    if type(outcome) is int:
        return _HEAD.pack(RECORD_VERSION, 1, outcome)
    state = state_of(outcome)
    head = _HEAD.pack(state.version, state.status, state.at_ns)
    if outcome is None:
        return head
    record = head + _encode_texts((state.origin, state.cause_type, state.message))
    assert len(record) <= RECORD_BYTES_MAX
    return record


def decode(record: bytes) -> Outcome | None:
    """The outcome that a record in some bytes from elsewhere describes; None is pending.

    Raises:
        NotAFenceError: the bytes are not a record.
    """
    if not _HEAD.size <= len(record) <= RECORD_BYTES_MAX:
        raise NotAFenceError(
            f"fence record: expected {_HEAD.size}..{RECORD_BYTES_MAX} bytes, got {len(record)}"
        )
    version, status, at_ns = _HEAD.unpack_from(record)
    texts = ("", "", "")
    if len(record) > _HEAD.size:
        if status != FenceStatus.FAILED.value:
            raise NotAFenceError(f"fence record: expected no texts with status {status}")
        try:
            texts = _decode_texts(record[_HEAD.size :])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotAFenceError(f"fence record: {error}") from error
    elif version == RECORD_VERSION and status == 1 and at_ns <= TIME_NS_MAX:
        return int(at_ns)
    return outcome_of(FenceState(version, status, at_ns, *texts))


def process_name() -> str:
    """The name of this process in the origin of a failure that begins here without any other name."""
    return f"process {os.getpid()}"


def _cut(text: str) -> str:
    # A lone surrogate (an undecodable file name in a message) would make the encoder refuse the whole record.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
