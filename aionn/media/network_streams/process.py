"""The process that connects to a server and decodes what it sends.

Owns the calls of PyAV for network sources. Refuses to own reconnection and every limit that must hold: its parent ends it.

It is a process of its own because FFmpeg's calls cannot be interrupted in every state, because a server can send anything, and
because a decoder that fails on hostile data must not end the application. Its address space is limited.

Invariants:
1. The process ends when the parent's end of the socket is closed, also while a call of FFmpeg blocks.
2. A slot is written only between its release by the parent and the message that it is filled.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from aionn.errors import DeviceUnavailable
from aionn.media.network_streams.addresses import without_credentials
from aionn.media.network_streams.messages import (
    AUDIO_SLOT_SAMPLES,
    COUNTER_BYTES,
    MESSAGE_BYTES_MAX,
    Ended,
    Filled,
    Opened,
    Start,
    decode_start,
    encode,
)
from aionn.media.pyav import RgbScaler, load
from aionn.media.reduction import JpegDecoder

__all__ = ["EDGE_MAX", "main"]

EDGE_MAX = 8192
"""The longest edge of a stream's picture: the largest that H.264 has at its highest level, nearly."""

DAMAGED_MAX = 100
"""So many packets in a row that cannot be decoded end the stream; a lost key frame costs some tens."""

NO_TIME_STAMPS = 0x80
"""``AVFMT_NOTIMESTAMPS`` of FFmpeg: such as Motion JPEG over HTTP."""

PERMANENT = frozenset({"HTTPUnauthorizedError", "HTTPForbiddenError"})
"""Errors of PyAV that another attempt does not change: wrong passwords, which may also lock an account. Absent servers come back,
and a server that starts again knows no stream (404) until its camera has come."""


class _Refused(Exception):
    """The stream is not what is wanted; its message is for the user."""

    def __init__(self, message: str, *, is_permanent: bool) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class _Slots:
    """The buffers that the parent has released, by its messages.

    The messages are read when a buffer is needed: a thread for them would be woken for each item, and would take the interpreter's
    lock from the thread that decodes.

    Args:
        link: The socket to the parent.
        count: Number of buffers.
    """

    def __init__(self, link: socket.socket, count: int) -> None:
        self._link = link
        self._count = count
        self._free = deque(range(count))

    def take(self, *, waits: bool) -> int | None:
        """A free slot; None without one, unless ``waits`` is set."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        while not self._free:
            try:
                data = self._link.recv(MESSAGE_BYTES_MAX, flags)
            except BlockingIOError:
                return None
            if not data:
                os._exit(0)  # The parent is gone.
            self._free.extend(slot for slot in data if slot < self._count)
        return self._free.popleft()


class _Outlet:
    """Writes items into slots.

    Args:
        start: The parent's wishes.
        link: The socket to the parent.
        memory: The slots, and the counter behind them.
        slot_bytes: Length of one.
        slots: Those that are free.
    """

    def __init__(
        self, start: Start, link: socket.socket, memory: mmap.mmap, slot_bytes: int, slots: _Slots
    ) -> None:
        self._waits = not start.drops
        self._link = link
        self._slots = slots
        self._views = [
            np.frombuffer(memory, np.uint8, slot_bytes, slot * slot_bytes) for slot in range(start.slots)
        ]
        # The same memory as items of the last shape, which seldom changes.
        self._shaped: dict[int, Any] = {}
        self._memory = memory
        self._counter = slot_bytes * start.slots
        self._sent = 0
        self._dropped = 0
        self._damaged = 0
        self._damaged_row = 0

    def put(self, item: Any, media_ns: int | None, sender_ns: int | None) -> None:
        """Sends one item, a numpy array, or drops it where no slot is free."""
        self._damaged_row = 0
        slot = self._slots.take(waits=self._waits)
        if slot is None:
            self._dropped += 1
            return
        used = item.nbytes
        shaped = self._shaped.get(slot)
        if shaped is None or shaped.shape != item.shape:
            shaped = self._views[slot][:used].view(item.dtype).reshape(item.shape)
            self._shaped[slot] = shaped
        np.copyto(shaped, item)
        arrival_ns = time.monotonic_ns()
        filled = Filled(slot, used, media_ns, arrival_ns, self._dropped, self._damaged, sender_ns)
        self._dropped = self._damaged = 0
        # Before the message: its receiver must not see an older number.
        self._sent = (self._sent + 1) & 0xFF
        self._memory[self._counter] = self._sent
        self._link.send(encode(filled))

    def count_damaged(self) -> None:
        """Counts an item that cannot be decoded."""
        self._damaged += 1
        self._damaged_row += 1
        if self._damaged_row >= DAMAGED_MAX:
            raise _Refused(f"{DAMAGED_MAX} packets in a row cannot be decoded", is_permanent=False)


def main(arguments: Sequence[str]) -> None:
    """Connects, decodes and sends until the stream or the parent ends. The process ends with it.

    Args:
        arguments: The descriptor of the socket to the parent.
    """
    link = socket.socket(fileno=int(arguments[0]))
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
    start = decode_start(link.recv(MESSAGE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (start.memory_bytes_max, start.memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    slots = _Slots(link, start.slots)
    reason, is_permanent = "the server ended the stream", False
    try:
        _stream(start, link, slots)
    except _Refused as e:
        reason, is_permanent = str(e), e.is_permanent
    except DeviceUnavailable as e:
        reason, is_permanent = str(e), True
    except MemoryError:
        reason = f"the stream needs more than {start.memory_bytes_max >> 20} MiB to decode"
    except Exception as e:  # Any exception of FFmpeg is an answer for the parent.
        reason = without_credentials(_words(e), start.url)
        # An error of another kind is a bug here, or a wrong option: it comes again.
        names = {kind.__name__ for kind in type(e).__mro__}
        is_permanent = "FFmpegError" not in names or bool(names & PERMANENT)
    with contextlib.suppress(OSError):
        link.send(encode(Ended(reason, is_permanent)))
    # Not sys.exit: closing a container may wait for the server.
    os._exit(0)


def _end_with_parent(link: socket.socket) -> None:
    """Ends the process when the parent has closed its end. In a thread, since FFmpeg may block in the other one."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _words(error: Exception) -> str:
    if type(error).__name__ == "ExitError":
        return "the server was silent for too long"
    if getattr(error, "errno", None) == errno.EIO:
        return "the server ended the connection, or its name has no address"
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"


def _stream(start: Start, link: socket.socket, slots: _Slots) -> None:
    av = load("aionn.media.network")
    av.logging.set_level(None)
    # It is never closed: that may wait for the server, and the end of the process does the same.
    container = _open(start, av)
    streams = getattr(container.streams, start.kind)
    if not streams:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        # One that holds nothing comes from a server that waits for its camera.
        raise _Refused(
            f"expected {start.kind}, the stream holds {kinds}", is_permanent=bool(len(container.streams))
        )
    stream = streams[0]
    # Frame threads would hold a frame each; the server's data are decoded as they come.
    stream.thread_type = "SLICE"
    opened = _announcement(start, stream)
    link.send(encode(opened))
    # The parent's answer is the memory, which it has made itself and whose size cannot change.
    _, descriptors, _, _ = socket.recv_fds(link, 16, 1)
    memory = mmap.mmap(descriptors[0], opened.slot_bytes * start.slots + COUNTER_BYTES)
    os.close(descriptors[0])
    outlet = _Outlet(start, link, memory, opened.slot_bytes, slots)
    items = _frames if start.kind == "video" else _sounds
    for item, media_ns in items(start, av, container, stream, outlet, opened):
        outlet.put(item, media_ns, None if media_ns is None else _sender_ns(container, media_ns))


def _open(start: Start, av: Any) -> Any:
    timeout = (start.open_s_max, start.read_s_max)
    if start.format is not None:
        try:
            av.format.ContainerFormat(start.format, "r")
        except ValueError as e:
            raise _Refused(
                f"expected FFmpeg to have the format {start.format!r}, got a PyAV that is built without it: "
                "pip install --upgrade av",
                is_permanent=True,
            ) from e
    try:
        return av.open(start.url, format=start.format, options=dict(start.options), timeout=timeout)
    except av.error.FFmpegError as e:
        if type(e).__name__ == "InvalidDataError":
            raise _Refused("the server sends no media that FFmpeg knows", is_permanent=False) from e
        raise


def _announcement(start: Start, stream: Any) -> Opened:
    if start.kind == "audio":
        return Opened(AUDIO_SLOT_SAMPLES * 4, 0, 0, 0.0)
    width, height = start.size or (stream.width, stream.height)
    _check_size(stream.width, stream.height)
    rate = stream.average_rate or stream.guessed_rate or 0
    return Opened(width * height * 3, width, height, float(rate) if 0 < rate < 1000 else 0.0)


def _check_size(width: int, height: int) -> None:
    if not (0 < width <= EDGE_MAX and 0 < height <= EDGE_MAX):
        raise _Refused(
            f"expected pictures of 1 to {EDGE_MAX} pixels, got {width}x{height}", is_permanent=False
        )


def _decoded(
    container: Any, stream: Any, outlet: _Outlet, av: Any, decode: Callable[[Any], list[Any]]
) -> Iterator[Any]:
    """Pictures or sounds; packets that cannot be decoded are counted. A loss comes after what the decoder still holds.

    Args:
        container: Gives the packets.
        stream: Those of this stream alone are decoded.
        outlet: Counts the damaged ones.
        av: The module of PyAV.
        decode: Decodes a packet; None returns what the decoder still holds.
    """
    lost: Exception | None = None
    packets = container.demux(stream)
    while lost is None:
        try:
            packet = next(packets, None)
            if packet is None:
                return
        except av.error.FFmpegError as e:
            packet, lost = None, e
        try:
            yield from decode(packet)
        except av.error.FFmpegError:
            outlet.count_damaged()
    raise lost


def _has_clock(container: Any) -> bool:
    """Whether the sender made the time stamps: for some containers FFmpeg computes them from a rate that it assumes."""
    return not int(container.format.flags) & NO_TIME_STAMPS


def _sender_ns(container: Any, media_ns: int) -> int | None:
    """The sender's clock for a time stamp: FFmpeg knows it once a report of an RTP sender has come. Older PyAV does not return
    it."""
    start_us = getattr(container, "start_time_realtime", None)
    return None if start_us is None else int(start_us) * 1_000 + media_ns


def _media_ns(item: Any) -> int | None:
    return (
        None if item.pts is None or item.time_base is None else int(item.pts * item.time_base * 1_000_000_000)
    )


def _jpeg_decoder(start: Start, av: Any, stream: Any) -> JpegDecoder | None:
    """The decoder of Motion JPEG that is wanted in another size; None for other streams, whose pictures depend on each other."""
    codec = None if start.size is None else stream.codec_context
    if codec is None or codec.name != "mjpeg":
        return None
    return JpegDecoder(av, (stream.width, stream.height), start.size)


def _frames(
    start: Start, av: Any, container: Any, stream: Any, outlet: _Outlet, opened: Opened
) -> Iterator[tuple[Any, int | None]]:
    scale = RgbScaler(av).rows
    has_clock = _has_clock(container)
    jpeg = _jpeg_decoder(start, av, stream)
    for picture in _decoded(container, stream, outlet, av, stream.decode if jpeg is None else jpeg.decode):
        size = (picture.width, picture.height) if jpeg is None else jpeg.size
        _check_size(*size)
        if start.size is None and size != (opened.width, opened.height):
            raise _Refused(
                f"the size changed from {opened.width}x{opened.height} to {size[0]}x{size[1]}",
                is_permanent=False,
            )
        yield scale(picture, opened.width, opened.height), _media_ns(picture) if has_clock else None


def _sounds(
    start: Start, av: Any, container: Any, stream: Any, outlet: _Outlet, opened: Opened
) -> Iterator[tuple[Any, int | None]]:
    has_clock = _has_clock(container)
    resampler = av.AudioResampler(format="fltp", rate=start.sample_rate_hz)
    for sound in _decoded(container, stream, outlet, av, stream.decode):
        # The end of a sound is captured when it arrives.
        end_ns = _media_ns(sound) if has_clock else None
        if end_ns is not None and sound.sample_rate:
            end_ns += sound.samples * 1_000_000_000 // sound.sample_rate
        for part in resampler.resample(sound):
            samples = part.to_ndarray().mean(axis=0, dtype=np.float32).clip(-1.0, 1.0)
            for first in range(0, samples.size, AUDIO_SLOT_SAMPLES):
                yield samples[first : first + AUDIO_SLOT_SAMPLES], end_ns
