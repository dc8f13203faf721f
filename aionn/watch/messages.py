"""Messages between an application and the process that serves its page; pure.

Owns their form. The process asks, the application answers: a question has no answer under way when it is asked, so that the socket
holds one answer for each kind at most, and an application whose page is not open sends nothing. Large contents are in
a memory beside the message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aionn.watch.streams import Shot

__all__ = ["Answer", "MESSAGE_BYTES_MAX", "QUESTION_FIGURES", "Ready", "Start"]

QUESTION_FIGURES = 255
"""The byte that asks for figures; any smaller one asks for the next picture of the stream with that number."""

MESSAGE_BYTES_MAX = 32 << 10
"""The largest message: a ``Shot`` with 50 findings of 80 letters has about 12 kB."""


class Start(msgspec.Struct, frozen=True):
    """The first message of the application; see ``WatchApp`` for the arguments."""

    token: str
    hosts: tuple[str, ...]
    is_remote: bool


class Ready(msgspec.Struct, frozen=True):
    """The first message of the process.

    Attributes:
        problem: Why it cannot serve; empty if it serves.
    """

    problem: str = ""


class Answer(msgspec.Struct, frozen=True):
    """An answer of the application; a memory comes with it.

    Attributes:
        kind: ``figures``, the memory has a ``Snapshot`` as JSON; ``picture``, it has ``height * width`` pixels of three bytes.
        stream: Number of the picture's stream.
        height: Rows.
        width: Pixels of a row.
        shot: The data that belong to the picture.
    """

    kind: Literal["figures", "picture"]
    stream: int = 0
    height: int = 0
    width: int = 0
    shot: Shot | None = None
