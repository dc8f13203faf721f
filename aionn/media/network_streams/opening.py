"""The functions for users: a network stream as a source of frames or of windows of sound.

Owns their arguments. Refuses to own anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal, TypeVar, get_args

import msgspec

from aionn.media.arguments import checked_size, checked_text, checked_texts, one_of
from aionn.media.live.capture import Capture
from aionn.media.live.reconnection import Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.network_streams.addresses import checked_address, options_of
from aionn.media.network_streams.capture import SoundCapture, StreamClock, StreamProcess, VideoCapture
from aionn.media.network_streams.messages import Start
from aionn.media.pacing import Keep, checked_keep, checked_queue_max
from aionn.media.records import AudioWindow, Frame
from aionn.media.windows import WindowPlan
from aionn.platform.numbers import checked_seconds

__all__ = ["DECODER_BYTES_MAX", "READ_S_MAX", "SLOTS", "StreamOpener", "network", "network_audio"]

OPEN_S_DEFAULT = 10.0
"""Opening takes about a second; a camera that wakes up, or a slow line, takes several."""

OPEN_S_MAX = 120.0
"""The longest limit that may be asked for."""

READ_S_MAX = 5.0
"""FFmpeg's own limit of a read; the source's own limits are independent of it."""

RECONNECTION = Reconnection()
"""The default: after a quarter of a second, then ever more rarely, up to every 10 s, without an end."""

SLOTS = 4
"""One that is filled, one that waits, one that is copied, and one in reserve."""

DECODER_BYTES_MAX = 4 << 30
"""Address space of the process: libraries and stacks of threads take about one GiB of addresses, 8K pictures another."""

T = TypeVar("T", Frame, AudioWindow)


class StreamOpener(Generic[T]):
    """Opens a stream in a process of its own, again and again.

    Args:
        start: The first message to the process.
        make: Makes the capture of a process that is open, with its number of slots.
        name: The source, for messages; None takes the address.
    """

    def __init__(
        self,
        start: Start,
        make: Callable[[StreamProcess, int], Capture[T]],
        name: str | None = None,
    ) -> None:
        self._start = start
        self._name = name
        self._make: Callable[[StreamProcess, int], Capture[T]] = make
        # The process ends by its own limit first, with a better reason.
        self.limit_s = start.open_s_max + 5.0
        self._opening: StreamProcess | None = None
        self._is_cancelled = False

    def open(self) -> Capture[T]:
        """See `aionn.media.live.capture.Opener`."""
        process = self._opening = StreamProcess(self._start, self._name)
        try:
            if self._is_cancelled:
                process.kill()
            process.wait_until_open()
        finally:
            self._opening = None
        return self._make(process, self._start.slots)

    def cancel(self) -> None:
        """See `aionn.media.live.capture.Opener`."""
        self._is_cancelled = True
        opening = self._opening
        if opening is not None:
            opening.kill()


def network(
    url: str,
    *,
    size: tuple[int, int] | None = None,
    transport: Literal["tcp", "udp"] = "tcp",
    clock: StreamClock = "arrival",
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    reconnect: Reconnection | None = RECONNECTION,
    open_s_max: float = OPEN_S_DEFAULT,
) -> LiveSource[Frame]:
    """The frames of a network camera: ``async with network("rtsp://...") as frames: async for frame in frames``.

    A process of its own connects and decodes, so that a silent or hostile server can neither block nor end the application.
    ``captured_at_ns`` is the arrival, smoothed by the stream's own time stamps (`Frame.clock` is ``"arrival"``), or the sender's
    time.

    Args:
        url: ``rtsp://``, ``rtsps://``, ``http://``, ``https://``, ``rtmp://``, ``rtmps://``, ``tcp://`` or ``udp://``.
            Credentials in it are not shown in messages.
        size: ``(width, height)`` to scale to, without regard to the proportions; None leaves the size of the stream.
        transport: The way RTSP sends its data; ``"udp"`` loses packets where ``"tcp"`` delays them.
        clock: ``"arrival"``, or ``"sender"``: the time at which the sender captured the frame, by the reports that senders of RTP
            send every few seconds (RTSP). `Frame.clock` is then ``"sender"``, and `Frame.uncertainty_ns` the distance to the
            arrival. It holds the delay of the sender's encoder and of the network, which the arrival does not show, if the clocks
            of both machines are set by NTP. Before the first report, without reports, and where the sender's clock is more than
            10 s behind or 1 s ahead, frames have the arrival.
        format: FFmpeg's name of the container; None has it found out.
        options: Further options of FFmpeg, which replace those that are set here.
        keep: Items for a slow consumer: the ``"latest"`` frame, the ``"oldest"`` ones, or ``"all"``, which holds the server
            back, as far as it can be held back.
        queue_frames_max: Number of frames that wait for the consumer under ``"all"`` and ``"oldest"``.
        reconnect: When a lost stream is opened again; None ends the source with the error. The end of a stream cannot be
            distinguished from a loss.
        open_s_max: Limit of opening, in seconds.

    Returns:
        A source of `Frame`, uint8 ``[height, width, 3]`` RGB. Entering it raises `SourceUnavailable` when the stream cannot be
        opened; iterating raises it when it is lost and not opened again.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.network"
    if size is not None:
        size = checked_size(size, f"{where}: size")
    queue_frames_max = checked_queue_max(queue_frames_max, "queue_frames_max", where)
    start = _start(url, "video", transport, format, options, keep, open_s_max, where)
    slots = SLOTS if keep == "latest" else queue_frames_max + 3
    start = msgspec.structs.replace(start, size=size, slots=min(slots, 255))
    chosen = _checked_clock(clock, where)
    opener: StreamOpener[Frame] = StreamOpener(
        start, lambda process, slots: VideoCapture(process, slots, chosen)
    )
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_frames_max, reconnect=reconnect)


def network_audio(
    url: str,
    *,
    window_s: float = 1.0,
    hop_s: float = 0.1,
    sample_rate_hz: int = 16_000,
    transport: Literal["tcp", "udp"] = "tcp",
    clock: StreamClock = "arrival",
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    reconnect: Reconnection | None = RECONNECTION,
    open_s_max: float = OPEN_S_DEFAULT,
) -> LiveSource[AudioWindow]:
    """Overlapping windows of a network stream's sound. See `network` for the arguments that are not listed.

    Args:
        url: See `network`.
        window_s: Length of a window, rounded to whole samples.
        hop_s: Distance between the starts of neighbours, rounded to whole samples.
        sample_rate_hz: The rate of the windows; the sound is resampled, and its channels are mixed into one.
        transport: See `network`.
        clock: See `network`.
        format: See `network`.
        options: See `network`.
        keep: Items for a slow consumer: the ``"latest"`` window, the ``"oldest"`` ones, or ``"all"``.
        queue_windows_max: Number of windows that wait for the consumer under ``"all"`` and ``"oldest"``.
        reconnect: See `network`.
        open_s_max: See `network`.

    Returns:
        A source of `AudioWindow`, float32 ``[window_s * sample_rate_hz]`` in [-1, 1]. After a loss the next window begins with
        new sound.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.network_audio"
    plan = WindowPlan.of(window_s, hop_s, sample_rate_hz, where)
    queue_windows_max = checked_queue_max(queue_windows_max, "queue_windows_max", where)
    start = _start(url, "audio", transport, format, options, keep, open_s_max, where)
    start = msgspec.structs.replace(start, sample_rate_hz=plan.sample_rate_hz, slots=16)
    chosen = _checked_clock(clock, where)
    opener: StreamOpener[AudioWindow] = StreamOpener(
        start, lambda process, slots: SoundCapture(process, slots, plan, chosen)
    )
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_windows_max, reconnect=reconnect)


def _checked_clock(clock: str, where: str) -> StreamClock:
    known: StreamClock = one_of(clock, get_args(StreamClock), f"{where}: clock")
    return known


def _start(
    url: str,
    kind: Literal["video", "audio"],
    transport: str,
    format: str | None,
    options: Mapping[str, str] | None,
    keep: Keep,
    open_s_max: float,
    where: str,
) -> Start:
    """The first message, with its checked parts; size, sample rate and slots are filled in by the caller."""
    checked_address(url, where)
    transport = one_of(transport, ("tcp", "udp"), f"{where}: transport")
    keep = checked_keep(keep, where)
    open_s_max = checked_seconds(open_s_max, f"{where}: open_s_max", least=0.1, most=OPEN_S_MAX)
    further = {} if options is None else checked_texts(options, f"{where}: options")
    if format is not None:
        checked_text(format, f"{where}: format")
    return Start(
        url=url,
        kind=kind,
        size=None,
        sample_rate_hz=16_000,
        options={**options_of(url, transport, open_s_max, keeps_all=keep == "all"), **further},
        format=format,
        open_s_max=open_s_max,
        read_s_max=READ_S_MAX,
        slots=SLOTS,
        drops=keep != "all",
        memory_bytes_max=DECODER_BYTES_MAX,
    )
