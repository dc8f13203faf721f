"""The functions for users: a microphone, or raw samples, as a source of windows.

Owns their arguments. Refuses to own anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, get_args

from aionn.errors import InvalidArgument, shown
from aionn.media.arguments import checked_path, checked_text, checked_whole, one_of
from aionn.media.live.reconnection import Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.microphones.recorders import open_parec, open_pipe, open_portaudio
from aionn.media.microphones.samples import SampleFormat, SampleLayout, SamplesCapture
from aionn.media.pacing import Keep, checked_queue_max
from aionn.media.records import AudioWindow
from aionn.media.windows import WindowPlan

__all__ = ["Recorder", "microphone", "raw_audio"]

Recorder = Literal["parec", "portaudio"]

OPEN_S_MAX = 10.0
"""Opening takes tenths of a second; a Bluetooth headset that changes its profile takes some seconds."""

NUMBER_MAX = 2**31 - 1
"""Numbers of devices and of descriptors are an int of C."""

RECONNECTION = Reconnection(most_s=2.0)
"""A sound server that is started again is there within a second."""


class _SoundOpener:
    limit_s = OPEN_S_MAX

    def __init__(self, open_it: Callable[[], SamplesCapture]) -> None:
        self._open = open_it

    def open(self) -> SamplesCapture:
        """See `aionn.media.live.capture.Opener`."""
        return self._open()

    def cancel(self) -> None:
        """See `aionn.media.live.capture.Opener`. None of the recorders waits long."""


def microphone(
    device: str | int | None = None,
    *,
    window_s: float = 1.0,
    hop_s: float = 0.1,
    sample_rate_hz: int = 16_000,
    recorder: Recorder = "parec",
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    reconnect: Reconnection | None = RECONNECTION,
) -> LiveSource[AudioWindow]:
    """Overlapping windows of a microphone: ``async with microphone() as windows: async for window in windows``.

    ``captured_at_ns`` is the arrival of the window's last sample, smoothed over the number of samples; the delay of the sound
    server before that, usually some 20 ms, is not in it.

    Args:
        device: For ``parec`` the name of a source of the sound server (``pactl list sources short``), for ``portaudio`` a
            number or a part of a name; None means the default.
        window_s: Length of a window, rounded to whole samples.
        hop_s: Distance between the starts of neighbours, rounded to whole samples.
        sample_rate_hz: Samples per second; the sound server resamples.
        recorder: ``"parec"`` for PipeWire and PulseAudio, by a subprocess; ``"portaudio"``, the extra ``microphone``, for machines
            without a sound server.
        keep: Items for a slow consumer: the ``"latest"`` window, the ``"oldest"`` ones, or ``"all"``.
        queue_windows_max: Number of windows that wait for the consumer under ``"all"`` and ``"oldest"``.
        reconnect: When a microphone that was lost is opened again; None ends the source with the error.

    Returns:
        A source of `AudioWindow`, float32 ``[window_s * sample_rate_hz]`` in [-1, 1]. After samples were lost the next window
        begins with new ones, and has ``follows_gap``.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.microphone"
    plan = WindowPlan.of(window_s, hop_s, sample_rate_hz, where)
    queue_windows_max = checked_queue_max(queue_windows_max, "queue_windows_max", where)
    recorder = one_of(recorder, get_args(Recorder), f"{where}: recorder")
    name = None if device is None else _checked_device(device, recorder, f"{where}: device")
    if recorder == "portaudio":
        opener = _SoundOpener(lambda: open_portaudio(name, plan))
    else:
        source = name if isinstance(name, str) else None
        opener = _SoundOpener(lambda: open_parec(source, plan))
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_windows_max, reconnect=reconnect)


def _checked_device(device: object, recorder: Recorder, where: str) -> str | int:
    if isinstance(device, str):
        return checked_text(device, where)
    if recorder == "parec":
        raise InvalidArgument(
            f"{where}: expected the name of a source of the sound server, got {shown(device)}"
        )
    return checked_whole(device, 0, NUMBER_MAX, where)


def raw_audio(
    source: str | os.PathLike[str] | int,
    *,
    window_s: float = 1.0,
    hop_s: float = 0.1,
    sample_rate_hz: int = 16_000,
    sample_format: SampleFormat = "s16le",
    channels: int = 1,
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    reconnect: Reconnection | None = None,
) -> LiveSource[AudioWindow]:
    """Overlapping windows of raw samples from a named pipe, or from the descriptor of a pipe or a connected socket.

    Args:
        source: Path of a named pipe, or a descriptor, which is duplicated and set not to block.
        window_s: See `microphone`.
        hop_s: See `microphone`.
        sample_rate_hz: Of the samples, which are not resampled.
        sample_format: Type of the samples: 16-bit integers or 32-bit floats, little-endian.
        channels: Number of interleaved channels, which are mixed into one.
        keep: See `microphone`.
        queue_windows_max: See `microphone`.
        reconnect: When it is opened again after its writer was silent or has left; None ends the source with the error.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.raw_audio"
    plan = WindowPlan.of(window_s, hop_s, sample_rate_hz, where)
    queue_windows_max = checked_queue_max(queue_windows_max, "queue_windows_max", where)
    layout = SampleLayout.of(sample_format, channels, plan.sample_rate_hz, where)
    path = _checked_place(source, f"{where}: source")
    opener = _SoundOpener(lambda: open_pipe(path, layout, plan))
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_windows_max, reconnect=reconnect)


def _checked_place(source: object, where: str) -> str | int:
    if isinstance(source, str | os.PathLike):
        return checked_path(source, where)
    return checked_whole(
        source, 0, NUMBER_MAX, where, expected=f"a path, or a descriptor of 0 to {NUMBER_MAX}"
    )
