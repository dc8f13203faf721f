"""Sources by a name that a person types.

Owns what a name means. Refuses to own the sources.
"""

from __future__ import annotations

import difflib
import os

from aionn.errors import InvalidArgument, class_text
from aionn.media.cameras.opening import camera
from aionn.media.live.source import LiveSource
from aionn.media.microphones.opening import microphone
from aionn.media.network_streams.addresses import masked
from aionn.media.network_streams.opening import network
from aionn.media.pacing import Keep
from aionn.media.recording.replay import recorded_kind, replay, replay_audio
from aionn.media.records import AudioWindow, Frame
from aionn.media.screen import screen
from aionn.media.source import Source
from aionn.media.synthetic import synthetic_video
from aionn.media.video import video_file

__all__ = ["has_sound", "named_source", "shown_name"]

PATTERN_FRAMES = 2**53
"""The test pattern never ends: nine million years at 30 frames/s."""

KINDS = ("camera", "microphone", "screen", "pattern", "replay")
"""Words before a colon; a name that begins with a similar one is taken for a misspelt one, unless it is a file."""

EXPECTED = "a camera's number or path, camera:NAME, microphone:, screen:, pattern:, replay:FILE, an address or a video file"


def named_source(
    name: str, *, size: tuple[int, int] | None = None, keep: Keep = "latest"
) -> Source[Frame] | Source[AudioWindow] | LiveSource[Frame] | LiveSource[AudioWindow]:
    """A source by its name.

    Args:
        name: ``0`` or ``/dev/video0``, a camera; ``camera:NAME``, one by a part of its name; ``microphone:`` or
            ``microphone:DEVICE``;
            ``screen:`` or ``screen::0``, an X display; ``pattern:``, a test picture that moves at 30 frames/s;
            ``replay:FILE``, a recording; an address such as ``rtsp://...``; any other name is a video file.
        size: ``(width, height)`` of the frames; None leaves that of the source.
        keep: Items for a slow consumer.

    Raises:
        InvalidArgument: The name is not a text, is empty, or an address that cannot be read, or a recording that is not one.
    """
    _check_name(name, "aionn.media.named_source")
    kind, separator, rest = name.partition(":")
    if name.isdecimal() or name.startswith("/dev/video"):
        return camera(name, size=size, keep=keep)
    if separator and kind == "camera" and rest:
        return camera(rest, size=size, keep=keep)
    if separator and kind == "microphone":
        return microphone(rest or None, keep=keep)
    if separator and kind == "replay" and rest:
        if recorded_kind(rest) == "windows":
            return replay_audio(rest, keep=keep)
        return replay(rest, size=size, keep=keep)
    if separator and kind == "screen":
        return screen(rest or None, size=size, keep=keep)
    if name == "pattern:":
        return synthetic_video(size=size or (640, 480), frames=PATTERN_FRAMES, keep=keep)
    if "://" in name:
        return network(name, size=size, keep=keep)
    if not name or (separator and kind in ("camera", "pattern", "replay")):
        raise InvalidArgument(f"aionn.media.named_source: expected {EXPECTED}, got {name!r}")
    if separator and not os.path.exists(name):
        close = difflib.get_close_matches(kind, KINDS, n=1)
        # NAME:PASSWORD@HOST is an address without its scheme, whose password must not be in the message about a missing file.
        if close or rest.startswith("/") or "@" in rest:
            is_kind = close and "@" not in rest
            advice = f"; did you mean {close[0]}:{rest}?" if is_kind else "; an address has :// in it"
            raise InvalidArgument(
                f"aionn.media.named_source: expected {EXPECTED}, got {masked(name)!r}{advice}"
            )
    if (
        not separator
        and len(meant := [kind for kind in KINDS if kind.startswith(name)]) == 1
        and not os.path.exists(name)
    ):
        raise InvalidArgument(
            f"aionn.media.named_source: expected {EXPECTED}, got {name!r}; did you mean {meant[0]}:?"
        )
    return video_file(name, size=size, keep=keep)


def has_sound(name: str) -> bool:
    """Whether the source of a name returns windows of sound. For a recording this reads the beginning of the file.

    Raises:
        InvalidArgument: It is not a text, or names a recording that is not one.
    """
    _check_name(name, "aionn.media.has_sound")
    kind, separator, rest = name.partition(":")
    if separator and kind == "replay" and rest:
        return recorded_kind(rest) == "windows"
    return bool(separator) and kind == "microphone"


def shown_name(name: str) -> str:
    """A source's name as it may be shown: an address without credentials.

    Raises:
        InvalidArgument: It is not a text.
    """
    _check_name(name, "aionn.media.shown_name")
    return masked(name) if "://" in name else name


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str):  # The value is not shown: an address may be in it, with credentials.
        raise InvalidArgument(f"{where}: name: expected a text, got {class_text(name)}")
