"""The microphones of the sound server.

Owns the list. Refuses to own recording (`recorders.py`).

Source: ``pactl list short sources`` of PulseAudio, which PipeWire's server answers as well: five columns with tabs between them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from typing import Final

import msgspec

from aionn.media.live.capture import SourceUnavailable
from aionn.media.live.worker import Worker

__all__ = ["MicrophoneInfo", "list_microphones"]

LIST_S_MAX: Final = 5.0
"""A server answers within milliseconds; one that is started by the question takes a second."""

OUTPUT_BYTES_MAX: Final = 1 << 20
"""Thousands of microphones."""

MONITOR: Final = ".monitor"
"""Ends the name of a source that returns what is played."""


class MicrophoneInfo(msgspec.Struct, frozen=True):
    """A source of the sound server.

    Attributes:
        name: The name that `microphone` takes as its device.
        sample_format: Format, channels and rate, in the server's words.
        state: ``RUNNING``, ``IDLE`` or ``SUSPENDED``.
        is_monitor: Whether it returns what is played, rather than the sound of a microphone.
    """

    name: str
    sample_format: str
    state: str
    is_monitor: bool


async def list_microphones() -> list[MicrophoneInfo]:
    """The microphones that the sound server has, and the monitors of its outputs.

    Raises:
        SourceUnavailable: There is no ``pactl``, or the server does not answer within `LIST_S_MAX`.
    """
    worker = Worker("aionn-microphones")
    try:
        return await worker.run(_listed, limit_s=LIST_S_MAX + 1, what="aionn.media.list_microphones")
    finally:
        await worker.aclose(_nothing, LIST_S_MAX)


def _listed() -> list[MicrophoneInfo]:
    program = shutil.which("pactl")
    if program is None:
        raise SourceUnavailable(
            "microphones: expected the control program of PipeWire or PulseAudio, got no `pactl`: install a package such as "
            "pulseaudio-utils",
            is_permanent=True,
        )
    try:
        process = subprocess.Popen(
            [program, "list", "short", "sources"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
    except OSError as e:
        raise SourceUnavailable(f"microphones: {program} cannot be started: {e}") from e
    with process:
        try:
            output, errors = process.communicate(timeout=LIST_S_MAX)
        except subprocess.TimeoutExpired as e:
            raise SourceUnavailable(
                f"microphones: expected an answer of the sound server within {LIST_S_MAX:g} s, got none"
            ) from e
        finally:
            with contextlib.suppress(OSError):
                process.kill()
    if process.returncode:
        words = errors[:OUTPUT_BYTES_MAX].decode(errors="replace").strip()
        raise SourceUnavailable(f"microphones: {words or 'pactl failed'}; is a sound server running?")
    return parsed(output[:OUTPUT_BYTES_MAX].decode(errors="replace"))


def parsed(text: str) -> list[MicrophoneInfo]:
    """The microphones in the output of ``pactl``; lines of another form are left out."""
    found = []
    for line in text.splitlines():
        columns = line.split("\t")
        if len(columns) >= 5 and columns[1]:
            name, sample_format, state = columns[1], columns[3], columns[4]
            found.append(MicrophoneInfo(name, sample_format, state, name.endswith(MONITOR)))
    return found


def _nothing() -> None:
    """The worker has nothing to close."""
