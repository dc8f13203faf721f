"""Exceptions and the status codes they stand for.

Owns the mapping between the HAL's ``ErrorStatus`` and Python exceptions, in both directions. The class of an exception determines
the caller's next step: fix the call (``InvalidArgument``), try again (``transient``), choose another device
(``DeviceUnavailable``), reconnect (``DeadObject``).

Invariants:
1. Every status but ``NONE`` has exactly one exception class, and ``error_for_status(s).status == s``.
2. A message names the place, the expected and the actual value, and the party at fault.

Source: ``ErrorStatus`` of the NN HAL 1.3; ``DEAD_OBJECT`` is the canonical interface's addition for a peer that is gone.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import re
import reprlib
import traceback
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = [
    "class_text",
    "DeadObject",
    "DeviceUnavailable",
    "DriverTraceback",
    "Error",
    "ErrorStatus",
    "ExecutionCancelled",
    "GeneralFailure",
    "general_failure_of",
    "InvalidArgument",
    "InvalidModel",
    "MissedDeadline",
    "named",
    "NotAdmitted",
    "OutputInsufficientSize",
    "ResourceExhausted",
    "error_for_status",
    "shortage_of",
    "shortages_raised",
    "shown",
    "status_of",
    "traceback_of",
    "with_driver_traceback",
    "words_of",
    "WouldFit",
]

TRACEBACK_CHARACTERS_MAX = 2000
"""Longest text of a traceback that a driver process sends: the last ten calls, which fit a message beside the text of the error."""

TRACEBACK_FRAMES_MAX = 12
"""Most calls of a traceback that are written down: each reads a line of a source file."""

_TAKES_AN = re.compile(r"_*(?:[AEIOaeio]|[Uu]n(?!i)|nd|[FHLMNRSX](?![a-z]))")
"""The names of classes that begin with the sound of a vowel: abbreviations too, such as those of ndarray and HTTPError."""

_SHORTENED = reprlib.Repr()
_SHORTENED.maxother = 60  # A span of time has 30 to 50 characters.

_SHORTAGES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)


class ErrorStatus(enum.IntEnum):
    """The HAL's status codes. 5 to 8 exist from version 1.3 on; older peers see ``GENERAL_FAILURE`` instead."""

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8
    DEAD_OBJECT = 10000


class Error(Exception):
    """Base of all errors that aionn raises on purpose.

    Attributes:
        status: The HAL status that this error stands for.
    """

    status: ErrorStatus = ErrorStatus.GENERAL_FAILURE


class GeneralFailure(Error):
    """Something went wrong that has no status of its own."""


class ExecutionCancelled(GeneralFailure):
    """The application cancelled the execution, by ``Execution.cancel``: nothing went wrong."""


class InvalidArgument(Error, ValueError):
    """The caller's mistake: the call must change before it can succeed."""

    status = ErrorStatus.INVALID_ARGUMENT


class InvalidModel(InvalidArgument):
    """The model, or the file it was read from, breaks a rule."""


class DeviceUnavailable(Error):
    """The device cannot be used now: missing, refused, offline, or its engine cannot be loaded."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


class DeadObject(Error):
    """The driver process that held this object is gone. Compile again: a new driver is started.

    Attributes:
        transient: True when the same call may succeed at another time: a driver that died during a compilation is started again by
            the next one, and a compilation with ``recover`` is prepared again. False when the object is gone for good.
    """

    status = ErrorStatus.DEAD_OBJECT

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class DriverTraceback(Exception):
    """The traceback of an exception in a driver process, as text; the cause of the error that the application gets.

    Attributes:
        text: Python's output there, or its end.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the driver process\n{self.text}"


class OutputInsufficientSize(Error):
    """An output buffer is too small.

    Attributes:
        output_shapes: ``(dimensions, is_sufficient)`` per output, as far as known; 0 stands for an unknown extent.
    """

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE

    def __init__(self, message: str, output_shapes: Sequence[tuple[tuple[int, ...], bool]] = ()) -> None:
        super().__init__(message)
        self.output_shapes = tuple(output_shapes)


class MissedDeadline(Error, TimeoutError):
    """The deadline passed, or cannot be kept.

    Attributes:
        transient: True when the same call may succeed at another time; False when even an idle device could not make it,
            or the deadline had passed before the start.
    """

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient
        self.status = (
            ErrorStatus.MISSED_DEADLINE_TRANSIENT if transient else ErrorStatus.MISSED_DEADLINE_PERSISTENT
        )


class ResourceExhausted(Error):
    """A bounded resource is full.

    Attributes:
        transient: True when the resource may become free by itself.
    """

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient
        self.status = (
            ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
            if transient
            else ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
        )


class WouldFit(NamedTuple):
    """The changes of which each alone would make a stream fit. A field is None, or empty, where that change does not suffice.

    Attributes:
        deadline_ns: The least deadline that fits.
        period_ns: The least period that fits.
        slots: Names of other device slots that have room.
        blocker: The model whose operations occupy the slot for too long.
        piece_ns: The longest operation that it may have.
        shift_ns: The least known delay of all captures of a stream with a phase that makes it fit.
    """

    deadline_ns: int | None = None
    period_ns: int | None = None
    slots: tuple[str, ...] = ()
    blocker: str | None = None
    piece_ns: int | None = None
    shift_ns: int | None = None


class NotAdmitted(ResourceExhausted):
    """A stream with a guarantee does not fit beside the reservations that exist. Persistent: it fits when it or they change.

    Attributes:
        reason: Where the demand exceeds the time, in a sentence.
        would_fit: The changes that would make it fit.
        is_by_event_loop: Whether the device has time, and the event loop of this application has too little.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        would_fit: WouldFit | None = None,
        is_by_event_loop: bool = False,
    ) -> None:
        super().__init__(message, transient=False)
        self.reason = reason or message
        self.would_fit = WouldFit() if would_fit is None else would_fit
        self.is_by_event_loop = is_by_event_loop


def error_for_status(status: ErrorStatus, message: str) -> Error:
    """Returns (does not raise) the exception for a status.

    Raises:
        ValueError: ``status`` is ``NONE``, which is not an error.
    """
    match status:
        case ErrorStatus.NONE:
            raise ValueError("status NONE is not an error")
        case ErrorStatus.DEVICE_UNAVAILABLE:
            return DeviceUnavailable(message)
        case ErrorStatus.GENERAL_FAILURE:
            return GeneralFailure(message)
        case ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return OutputInsufficientSize(message)
        case ErrorStatus.INVALID_ARGUMENT:
            return InvalidArgument(message)
        case ErrorStatus.MISSED_DEADLINE_TRANSIENT | ErrorStatus.MISSED_DEADLINE_PERSISTENT:
            return MissedDeadline(message, transient=status == ErrorStatus.MISSED_DEADLINE_TRANSIENT)
        case ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT | ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT:
            return ResourceExhausted(message, transient=status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT)
        case ErrorStatus.DEAD_OBJECT:
            return DeadObject(message)


def status_of(error: BaseException) -> ErrorStatus:
    """The status that an exception stands for; one of another package is a ``GENERAL_FAILURE``, unless it reports a shortage."""
    if isinstance(error, Error):
        return error.status
    return (
        ErrorStatus.GENERAL_FAILURE if _shortage(error) is None else ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    )


def general_failure_of(error: BaseException, where: str) -> GeneralFailure:
    """The error of aionn for an exception of any other package, which is its cause: the bug of a driver."""
    failure = GeneralFailure(f"{where}: {named(error)}")
    failure.__cause__ = error
    return failure


def traceback_of(error: BaseException) -> str:
    """The traceback of a driver's failure, for the application; empty for a caller's mistake, a missed deadline, a shortage and
    a cancellation, whose texts suffice. At most ``TRACEBACK_CHARACTERS_MAX``: the end of a longer one, where it was raised.
    """
    if status_of(error) != ErrorStatus.GENERAL_FAILURE or isinstance(error, ExecutionCancelled):
        return ""
    raised = error.__cause__ if isinstance(error, Error) and error.__cause__ is not None else error
    if isinstance(raised, DriverTraceback):
        return raised.text
    # By lines alone: marks of the place within a line parse its source, under the interpreter's lock. One error that a client
    # causes takes 0.1 ms so, and a millisecond with them.
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(raised.__traceback__), limit=-TRACEBACK_FRAMES_MAX
    )
    last = traceback.TracebackException(type(raised), raised, None, compact=True).format_exception_only()
    text = "".join(("Traceback (most recent call last):\n", *frames.format(), *last)).rstrip()
    # A lone surrogate (an undecodable file name) cannot be encoded.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= TRACEBACK_CHARACTERS_MAX else f"...{text[3 - TRACEBACK_CHARACTERS_MAX :]}"


def with_driver_traceback(error: Error, text: str) -> Error:
    """The error with the text of a driver's traceback as its cause; unchanged without a text."""
    if text:
        error.__cause__ = DriverTraceback(text[-TRACEBACK_CHARACTERS_MAX:])
    return error


def shortage_of(error: BaseException, where: str) -> ResourceExhausted | None:
    """The error of aionn for an exception that Python raises when a limit of the process or of the machine is reached; None for any
    other exception.
    """
    what = _shortage(error)
    if what is None:
        return None
    shortage = ResourceExhausted(f"{where}: {what} ({named(error)})", transient=True)
    shortage.__cause__ = error
    return shortage


def words_of(error: BaseException, where: str) -> str:
    """The description of an exception of any package: a shortage with its place, any other with its class."""
    shortage = shortage_of(error, where)
    return named(error) if shortage is None else str(shortage)


def named(error: BaseException) -> str:
    """The class and the text of an exception of any package, also of one whose text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:
        # Raised further, it would end the thread or the task that reports the first one, and leave its waiters.
        return f"{type(error).__name__}, whose text raises {type(e).__name__}"


def shown(value: object) -> str:
    """A value of any class as it is shown in a message: on one line, and shortened."""
    try:
        return " ".join(_SHORTENED.repr(value).split())
    except Exception:  # Python makes no text of a number with more than 4,300 digits.
        return f"{class_text(value)} that cannot be shown"


def class_text(value: object) -> str:
    """The class of a value with its article, as messages name a value of a wrong class: ``an int``, ``the class int``, ``None``."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, bytes):
        return "bytes"
    name = type(value).__name__
    return f"{'an' if _TAKES_AN.match(name) else 'a'} {name}"


def _shortage(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return "no memory is left, see RLIMIT_AS"
    # Python has no class of its own for it.
    if isinstance(error, RuntimeError) and "can't start new thread" in named(error):
        return "no thread can be started, see RLIMIT_NPROC and RLIMIT_AS"
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        return "the system refuses what is needed"
    return None


class shortages_raised(contextlib.AsyncContextDecorator):
    """Raises RESOURCE_EXHAUSTED instead of what Python raises where a limit of the process or of the machine is reached.

    In a ``with`` statement, or as the decorator of a coroutine function.

    Args:
        where: Begins the message.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shortage = None if error is None else shortage_of(error, self._where)
        if shortage is not None:
            raise shortage from error

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
