"""Errors of aionn as statuses of gRPC and of HTTP, a table; pure.

A transport sends the status, the text, and ``aionn-why``: the name of the HAL's status, which distinguishes more than that of the
transport (whether a deadline was missed for good, whether a resource may become free).
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import aionn

__all__ = ["WHY", "NotServed", "Refusal", "Unavailable", "refusal_of"]

WHY: Final = "aionn-why"
"""The name of the header or trailer with the name of the HAL's status."""

TEXT_BYTES_MAX: Final = 4096
"""Longest text of an error, as gRPC encodes it: clients refuse trailers of more than 8 KiB."""


class NotServed(aionn.InvalidArgument):
    """No model of this name and version is served."""


class Unavailable(aionn.DeviceUnavailable):
    """The server does not accept requests any more."""


class Code(enum.IntEnum):
    """The status codes of gRPC that are used."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14


class Refusal(NamedTuple):
    """An error as the transports send it.

    Attributes:
        code: Of gRPC.
        status: Of HTTP.
        text: For a person.
        why: The name of the HAL's status.
    """

    code: Code
    status: int
    text: str
    why: str


_S = aionn.ErrorStatus

_STATUSES: Final = {
    _S.INVALID_ARGUMENT: (Code.INVALID_ARGUMENT, 400),
    _S.MISSED_DEADLINE_TRANSIENT: (Code.DEADLINE_EXCEEDED, 504),
    _S.MISSED_DEADLINE_PERSISTENT: (Code.DEADLINE_EXCEEDED, 504),
    _S.RESOURCE_EXHAUSTED_TRANSIENT: (Code.RESOURCE_EXHAUSTED, 429),
    _S.RESOURCE_EXHAUSTED_PERSISTENT: (Code.RESOURCE_EXHAUSTED, 429),
    _S.DEVICE_UNAVAILABLE: (Code.UNAVAILABLE, 503),
    _S.DEAD_OBJECT: (Code.UNAVAILABLE, 503),
    _S.OUTPUT_INSUFFICIENT_SIZE: (Code.INTERNAL, 500),
    _S.GENERAL_FAILURE: (Code.INTERNAL, 500),
}
"""Both statuses by the status of the HAL."""


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error; one of another package is an internal one, whose text stays here."""
    if not isinstance(error, aionn.Error):
        return Refusal(Code.INTERNAL, 500, f"internal error ({type(error).__name__})", "GENERAL_FAILURE")
    code, status = (Code.NOT_FOUND, 404) if isinstance(error, NotServed) else _STATUSES[error.status]
    return Refusal(code, status, _cut(str(error)), error.status.name)


def _cut(text: str) -> str:
    """A text, or its beginning, that can be sent: a lone surrogate (of an undecodable file name) cannot."""
    text = text.encode("utf-8", "backslashreplace").decode()
    left = TEXT_BYTES_MAX
    for position, letter in enumerate(text):
        # As ``grpc-message``: bytes that are not printable are three letters each.
        left -= 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
        if left < 0:
            return f"{text[:position]}..."
    return text
