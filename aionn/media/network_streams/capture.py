"""A network stream that is open: the process that decodes it, the memory that it fills, and the messages between.

Owns the process from its start to its end, and the check of everything that it sends. Refuses to own FFmpeg (`process.py`),
waiting and reconnection (`aionn/media/live`).

Invariants:
1. A failed opening leaves no process, no descriptor and no mapping.
2. ``close`` ends the process by SIGKILL and reaps it: whatever FFmpeg waits for, that works.
3. A number from the process is used as an index or a length after it was checked alone; the memory has a size that it cannot
change. 4. Credentials reach the process by a socket; a command line would show them to every user.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
import subprocess
import time
from collections import deque
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from aionn.media.live.capture import Grab, SourceUnavailable
from aionn.media.live.clock import CaptureTime, MediaClock, sender_time
from aionn.media.network_streams.addresses import masked
from aionn.media.network_streams.messages import (
    AUDIO_SLOT_SAMPLES,
    COUNTER_BYTES,
    MESSAGE_BYTES_MAX,
    Ended,
    Filled,
    Message,
    Opened,
    Start,
    decode,
    encode_start,
)
from aionn.media.records import AudioWindow, Frame
from aionn.media.windows import WindowCutter, WindowPlan
from aionn.platform.python_process import python_command, python_environment

__all__ = ["SoundCapture", "StreamClock", "StreamProcess", "VideoCapture"]

MEMORY_BYTES_MAX = 512 << 20
"""The slots together: four pictures of 7680 x 4320 pixels (8K) are 400 MB. A server chooses the size where the caller names
none."""

DELAY_NS_MAX = 3_000_000_000
"""A stream that arrives so much later than before has a queue on its way that will not become empty by itself: it is opened
again."""

IMMEDIATE_BYTES_MAX = 256 << 10
"""A copy of so many bytes takes some 25 us, less than waking a thread and being woken by it; 224 x 224 pixels have 150 kB."""

COUNT_MAX = 1_000_000
"""Items that may be dropped between two that are sent: hours of a camera."""

SENDER_NS_MAX = 2**62
"""A clock of a sender that is beyond the year 2116 is a mistake of the process."""

StreamClock = Literal["arrival", "sender"]
"""The clock of times of capture, see `network`."""

_logger = logging.getLogger("aionn.manager")

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

REAP_S_MAX = 2.0
"""A killed process is gone in milliseconds, unless the kernel writes a lot of memory back."""

T = TypeVar("T", Frame, AudioWindow)


class StreamProcess:
    """A process that decodes one stream.

    Args:
        start: The first message.
        name: The source, for messages; None takes the address.

    Attributes:
        name: The source, for messages.
        opened: The description of the stream.
        views: Its slots, uint8: ``[height, width, 3]`` of pictures, ``[bytes]`` of sound.
    """

    def __init__(self, start: Start, name: str | None = None) -> None:
        self.name = name or f"stream {masked(start.url)}"
        self._limit_s = start.open_s_max
        self._end_s = time.monotonic() + start.open_s_max
        self._memory: mmap.mmap | None = None
        self.views: list[npt.NDArray[np.uint8]] = []
        try:
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = self._start_process(theirs)
        except OSError as e:
            raise SourceUnavailable(f"{self.name}: the process that decodes cannot be started: {e}") from e
        self._start = start
        self.opened: Opened

    def _start_process(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        try:
            return _started(theirs)
        except BaseException:
            self._link.close()
            raise

    def wait_until_open(self) -> None:
        """Waits until the stream is open, at most its limit; closes everything if it cannot be opened.

        Raises:
            SourceUnavailable: It cannot be opened.
        """
        try:
            self._link.setblocking(False)
            self._link.send(encode_start(self._start))
            self.opened = self._await_opened()
            self._share_memory(self._start.slots)
        except OSError as e:
            self.close()
            raise SourceUnavailable(f"{self.name}: the process that decodes has ended: {e}") from e
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """Ends the process, so that whatever waits for it fails. May be called in any thread."""
        self._process.kill()

    def fileno(self) -> int:
        """The socket."""
        return self._link.fileno()

    def receive(self) -> Message | None:
        """The next message; None if none waits.

        Raises:
            SourceUnavailable: The process has ended, or sends nonsense.
        """
        try:
            data = self._link.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError as e:
            data = self._last_message(e)
        if not data:
            raise SourceUnavailable(f"{self.name}: {self._last_words()}")
        return decode(data, self.name)

    def _last_message(self, error: OSError) -> bytes:
        """A message of a process that has ended; empty without one."""
        if isinstance(error, ConnectionResetError):
            # The process ended with messages unread. That is reported once, before its own last messages, which are still here.
            with contextlib.suppress(OSError):
                return self._link.recv(MESSAGE_BYTES_MAX)
        return b""

    def has_sent(self, number: int) -> bool:
        """Whether the last item that the process has sent has this number, modulo 256; the process may claim any."""
        return self._memory is not None and self._memory[-1] == number

    def release(self, slot: int) -> None:
        """Has a slot filled again. It raises nothing."""
        try:
            self._link.send(bytes((slot,)))
        except OSError:
            return

    def close(self) -> None:
        """Ends the process, reaps it and frees the memory. It raises nothing."""
        self._process.kill()
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S_MAX)
        self.views.clear()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _last_words(self) -> str:
        """The reason of a process that ended without a message. Its status may come a little later than the end of its socket."""
        code = self._process.poll()
        status = "" if code is None else f" with status {code}"
        return f"the process that decodes ended{status}; the stream may be hostile, or memory is short"

    def _await_opened(self) -> Opened:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while True:
            left_s = self._end_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1e3):
                raise SourceUnavailable(
                    f"{self.name}: expected a stream within {self._limit_s:g} s, got none; the server is silent, is not a media "
                    "server, or sends a picture in seconds and needs a larger open_s_max"
                )
            message = self.receive()
            if isinstance(message, Ended):
                raise SourceUnavailable(
                    f"{self.name}: cannot be opened: {message.reason}", is_permanent=message.is_permanent
                )
            if isinstance(message, Opened):
                return self._checked(message)
            if message is not None:
                raise SourceUnavailable(f"{self.name}: the process that decodes breaks the order of messages")

    def _checked(self, opened: Opened) -> Opened:
        """Returns what the process announces, if it agrees with what was asked for and with itself."""
        start = self._start
        if start.kind == "audio":
            agrees = opened.slot_bytes == AUDIO_SLOT_SAMPLES * 4
        else:
            size = opened.width, opened.height
            agrees = min(size) > 0 and opened.slot_bytes == opened.width * opened.height * 3
            agrees = agrees and start.size in (None, size)
        if not agrees:
            raise SourceUnavailable(
                f"{self.name}: expected the size that was asked for, got {opened}; the process that decodes is at fault"
            )
        return opened

    def _share_memory(self, slots: int) -> None:
        slot_bytes = self.opened.slot_bytes
        total = slot_bytes * slots
        if not 0 < total <= MEMORY_BYTES_MAX:
            raise SourceUnavailable(
                f"{self.name}: expected {slots} buffers of {MEMORY_BYTES_MAX} bytes together at most, got {total}; "
                f"give a smaller size"
            )
        try:
            descriptor, self._memory = _shared_memory(total + COUNTER_BYTES)
        except OSError as e:
            raise SourceUnavailable(
                f"{self.name}: no memory for {slots} buffers of {slot_bytes} bytes: {e.strerror or e}"
            ) from e
        try:
            socket.send_fds(self._link, [b"memory"], [descriptor])
        finally:
            os.close(descriptor)
        opened = self.opened
        shape = (
            (slots, opened.height, opened.width, 3) if self._start.kind == "video" else (slots, slot_bytes)
        )
        self.views = list(np.frombuffer(self._memory, np.uint8, total).reshape(shape))


def _shared_memory(size: int) -> tuple[int, mmap.mmap]:
    """Memory that another process can map and cannot resize: its descriptor, which the caller closes, and its mapping.

    Raises:
        OSError: There is no room for it.
    """
    descriptor = os.memfd_create("aionn-stream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return descriptor, mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def _started(theirs: socket.socket) -> subprocess.Popen[bytes]:
    environment = {**python_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        python_command("aionn.media.network_streams.process", str(theirs.fileno())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=environment,
        # Ctrl-C in a terminal is for the application, which ends this process in order.
        process_group=0,
    )


class _Receiving(Generic[T]):
    """The part that pictures and sounds have in common."""

    def __init__(self, process: StreamProcess, slots: int, clock: StreamClock = "arrival") -> None:
        self._process = process
        self._slots = slots
        self._uses_sender = clock == "sender"
        self._has_warned = False
        self._clock = MediaClock()
        self._held: set[int] = set()

    @property
    def name(self) -> str:
        """The address without credentials."""
        return self._process.name

    @property
    def depth(self) -> int:
        """Number of slots."""
        return self._slots

    @property
    def clock(self) -> MediaClock | None:
        """The stream's."""
        return self._clock

    def fileno(self) -> int:
        """The socket to the process."""
        return self._process.fileno()

    def close(self) -> None:
        """See `aionn.media.live.capture.Capture`."""
        self._process.close()

    def _next(self) -> Filled | None:
        message = self._process.receive()
        if message is None:
            return None
        if isinstance(message, Ended):
            raise SourceUnavailable(f"{self.name}: lost: {message.reason}", is_permanent=message.is_permanent)
        if not isinstance(message, Filled) or not self._is_valid(message):
            raise SourceUnavailable(
                f"{self.name}: expected a filled slot, got {message}; the process that decodes is at fault"
            )
        return message

    def _is_valid(self, message: Filled) -> bool:
        return (
            0 <= message.slot < self._slots
            and message.slot not in self._held
            and 0 <= message.dropped <= COUNT_MAX
            and 0 <= message.damaged <= COUNT_MAX
            and (message.sender_ns is None or abs(message.sender_ns) <= SENDER_NS_MAX)
            and 0 < message.used <= self._process.opened.slot_bytes
        )

    def _captured(self, message: Filled, now_ns: int) -> tuple[CaptureTime, bool]:
        """The time of capture, and whether the stream's clock was set."""
        arrival_ns = min(message.arrival_ns, now_ns)
        if message.media_ns is None:
            return CaptureTime(arrival_ns, "arrival", 0), False
        before = self._clock.anchorings
        captured = self._clock.observe(message.media_ns, arrival_ns)
        if self._clock.delay_ns > DELAY_NS_MAX:
            raise SourceUnavailable(
                f"{self.name}: expected items without delay, got one {self._clock.delay_ns / 1e9:.1f} s later than "
                f"others; the network "
                "or this machine is too slow for the stream"
            )
        if self._uses_sender and message.sender_ns is not None:
            captured = self._by_sender(message.sender_ns, captured, arrival_ns)
        return captured, self._clock.anchorings > before

    def _by_sender(self, sender_ns: int, arrived: CaptureTime, arrival_ns: int) -> CaptureTime:
        # Read for each item: CLOCK_REALTIME of this machine may be set at any time.
        stamp_ns = sender_ns - time.time_ns() + time.monotonic_ns()
        captured = sender_time(stamp_ns, arrived, arrival_ns)
        if captured.clock != "sender" and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s: expected the sender's clock to agree with this machine's, got one that is %.1f s ahead; the times are those of"
                " the arrival",
                self.name,
                (stamp_ns - arrival_ns) / 1e9,
            )
        return captured


class VideoCapture(_Receiving[Frame]):
    """Pictures of a stream.

    Attributes:
        is_immediate: Whether pictures have the size of a model's input, which are copied faster than a thread is woken.
        period_ns: By the rate that the stream names.
    """

    def __init__(self, process: StreamProcess, slots: int, clock: StreamClock = "arrival") -> None:
        super().__init__(process, slots, clock)
        opened = process.opened
        self._number = 0
        self.is_immediate = opened.slot_bytes <= IMMEDIATE_BYTES_MAX
        self.period_ns: int | None = int(1e9 / opened.rate) if 0.001 < opened.rate < 10_000 else None

    def dequeue(self, now_ns: int) -> Grab | None:
        """See `aionn.media.live.capture.Capture`."""
        message = self._next()
        if message is None:
            return None
        opened = self._process.opened
        if message.used != opened.slot_bytes:
            raise SourceUnavailable(
                f"{self.name}: expected {opened.width}x{opened.height} pixels, got {message.used} bytes; the process "
                f"that decodes is at "
                "fault"
            )
        captured, was_set = self._captured(message, now_ns)
        self._held.add(message.slot)
        lost = message.dropped + message.damaged
        self._number = (self._number + 1) & 0xFF
        is_last = self._process.has_sent(self._number)
        return Grab(message.slot, captured, lost_before=lost, follows_gap=was_set, is_last=is_last)

    def requeue(self, grab: Grab) -> None:
        """See `aionn.media.live.capture.Capture`."""
        self._held.discard(grab.slot)
        self._process.release(grab.slot)

    def convert(self, grab: Grab) -> Frame:
        """See `aionn.media.live.capture.Capture`."""
        captured = grab.captured
        return Frame(
            # The process could write while this is read, which changes the picture and nothing else.
            self._process.views[grab.slot].copy(),
            captured.at_ns,
            grab.index,
            grab.time_s,
            clock=captured.clock,
            uncertainty_ns=captured.uncertainty_ns,
            lost_before=grab.lost_before,
            follows_gap=grab.follows_gap,
        )


class SoundCapture(_Receiving[AudioWindow]):
    """Windows of a stream's sound.

    Args:
        process: The process.
        slots: Number of its slots.
        plan: The windows.
        clock: See `network`.
    """

    is_immediate = True
    period_ns: int | None = None

    def __init__(
        self, process: StreamProcess, slots: int, plan: WindowPlan, clock: StreamClock = "arrival"
    ) -> None:
        super().__init__(process, slots, clock)
        self._plan = plan
        self._cutter = WindowCutter(plan)
        self._received = 0
        self._windows: deque[Grab] = deque()
        self._has_gap = False

    def dequeue(self, now_ns: int) -> Grab | None:
        """See `aionn.media.live.capture.Capture`. One block may complete several windows, which are returned one by one."""
        while not self._windows:
            message = self._next()
            if message is None:
                return None
            if message.used % 4:
                raise SourceUnavailable(f"{self.name}: expected whole samples, got {message.used} bytes")
            samples = np.frombuffer(self._process.views[message.slot], np.float32, message.used // 4)
            # A copy; a stream of floats may hold some that are not numbers, and infinite ones.
            samples = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0)
            self._process.release(message.slot)
            captured, was_set = self._captured(message, now_ns)
            if message.dropped or message.damaged or was_set:
                # Windows across the gap would hold sounds that never followed each other.
                self._cutter, self._received, self._has_gap = WindowCutter(self._plan), 0, True
            self._cut(samples, captured)
        return self._windows.popleft()

    def _cut(self, samples: Any, captured: CaptureTime) -> None:
        self._received += samples.size
        for index, window in self._cutter.push(samples):
            behind = self._received - self._plan.stop(index)
            at_ns = captured.at_ns - behind * 1_000_000_000 // self._plan.sample_rate_hz
            stamp = CaptureTime(at_ns, captured.clock, captured.uncertainty_ns)
            self._windows.append(Grab(0, stamp, content=window, follows_gap=self._has_gap))
            self._has_gap = False

    def requeue(self, grab: Grab) -> None:
        """The slot was released when its samples were copied."""

    def convert(self, grab: Grab) -> AudioWindow:
        """See `aionn.media.live.capture.Capture`."""
        start_s = max(0.0, grab.time_s)
        captured = grab.captured
        return AudioWindow(
            grab.content,
            captured.at_ns,
            grab.index,
            start_s,
            clock=captured.clock,
            uncertainty_ns=captured.uncertainty_ns,
            lost_before=grab.lost_before,
            follows_gap=grab.follows_gap,
        )
