"""Pictures that the driver of a camera writes into memory of the application: nothing copies a pixel on the way to a model.

Owns which of the arrays the driver may fill, and the capture over them. Refuses to own the memory: it is given, usually by the
slots of a burst, which the driver process of the model maps as well.

Invariants:
1. An array is with the driver, or with the application, never with both: the application has it from the delivery of its frame
   until ``release``.
2. The format has the layout of the array, byte for byte; any other one is an error when the camera is opened.

Source: the kernel's documentation "Video for Linux API", streaming I/O (user pointers).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, class_text, shown
from aionn.media.cameras import videodev
from aionn.media.cameras.capture import NO_CONTROLS, CameraCapture, set_up
from aionn.media.cameras.controls import ControlValue
from aionn.media.cameras.device import VideoDevice
from aionn.media.cameras.negotiation import EDGE_MAX, Choice, PixelFormat, Wish
from aionn.media.cameras.pixels import BYTES_PER_PIXEL
from aionn.media.cameras.system import System
from aionn.media.live.capture import Grab, SourceUnavailable
from aionn.media.records import Frame
from aionn.platform.process_bound import InThisProcess

__all__ = ["CaptureMemory", "InPlaceCapture", "in_place_format", "open_in_place"]

ARRAYS_MIN = 3
"""One that the application has, one that the driver fills, and one that waits: a driver with a single buffer loses every other
frame."""

ARRAYS_MAX = 32
"""The kernel has no more buffers for a stream (VIDEO_MAX_FRAME)."""

FORMATS: dict[int, tuple[PixelFormat, ...]] = {1: ("GREY",), 2: ("YUYV", "UYVY"), 3: ("RGB3", "BGR3")}
"""The formats whose rows are those of an array, by its number of channels; the first one is the default."""

Pixels = npt.NDArray[np.uint8]


class CaptureMemory(InThisProcess):
    """Arrays that a camera's driver fills in place, for ``camera(into=...)``.

    A frame of such a camera is one of the arrays: ``frame.data`` is a read-only view of it, valid until ``release``. The driver has
    at least two arrays to fill if the application holds at most ``len(memory) - 2`` frames; while it holds all of them the camera
    waits.

    Args:
        arrays: 3 to 32 arrays of one shape, uint8 ``[height, width, channels]`` or ``[1, height, width, channels]``, contiguous and
            writable. 1 channel is GREY, 2 are YUYV (or UYVY), 3 are RGB3 (or BGR3). They must not share memory.

    Attributes:
        size: ``(width, height)``.
        channels: Number of bytes of a pixel.

    Raises:
        InvalidArgument: The arrays cannot be filled so.
    """

    INSTEAD = "make one in the other process; frames can be copied and pickled"

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        where = "aionn.media.CaptureMemory"
        is_array = isinstance(arrays, np.ndarray) and arrays.ndim > 0
        if not (is_array or isinstance(arrays, Sequence)) or isinstance(arrays, memoryview):
            raise InvalidArgument(f"{where}: expected a list of arrays, got {shown(arrays)}")
        if not ARRAYS_MIN <= len(arrays) <= ARRAYS_MAX:
            raise InvalidArgument(f"{where}: expected {ARRAYS_MIN} to {ARRAYS_MAX} arrays, got {len(arrays)}")
        self._arrays: list[Pixels] = [_checked(array, where) for array in arrays]
        shapes = {array.shape for array in self._arrays}
        if len(shapes) != 1:
            raise InvalidArgument(f"{where}: expected arrays of one shape, got {sorted(shapes)}")
        self._addresses = [address_of(array) for array in self._arrays]
        ordered = sorted(self._addresses)
        if any(later - earlier < self.size_bytes for earlier, later in itertools.pairwise(ordered)):
            raise InvalidArgument(f"{where}: expected arrays that share no memory")
        self._numbers = {address: number for number, address in enumerate(self._addresses)}
        self._lent: set[int] = set()
        self._capture: InPlaceCapture | None = None

    def __repr__(self) -> str:
        width, height = self.size
        return f"<CaptureMemory {len(self)} arrays of {width} x {height} x {self.channels}, lent {len(self._lent)}>"

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def size(self) -> tuple[int, int]:
        """``(width, height)`` of the pictures."""
        height, width, _ = self._arrays[0].shape
        return int(width), int(height)

    @property
    def channels(self) -> int:
        """Bytes of a pixel."""
        return int(self._arrays[0].shape[2])

    @property
    def size_bytes(self) -> int:
        """Bytes of a picture."""
        return int(self._arrays[0].nbytes)

    @property
    def lent(self) -> frozenset[int]:
        """Numbers of the arrays whose frames the application has."""
        return frozenset(self._lent)

    def number(self, frame: Frame) -> int:
        """The position, in the arrays that were given, of the one that a frame is in.

        Raises:
            InvalidArgument: It is not a frame of this memory.
        """
        is_frame = isinstance(frame, Frame) and isinstance(frame.data, np.ndarray)
        number = self._numbers.get(address_of(frame.data)) if is_frame else None
        if number is None:
            raise InvalidArgument(
                "aionn.media.CaptureMemory: expected a frame that was captured into it, got another one"
            )
        return number

    def release(self, frame: Frame) -> None:
        """Has the array of a frame filled again; ``frame.data`` must not be used any more. Idempotent until then.

        Call it in the loop of the source, when nothing reads the array any more. It never waits.

        Raises:
            InvalidArgument: It is not a frame of this memory.
        """
        number = self.number(frame)
        if number in self._lent:
            self._lent.discard(number)
            if self._capture is not None:
                self._capture.queue(number)

    # For the capture

    def lend(self, number: int) -> Pixels:
        """Gives an array to the application; returns the view that its frame has."""
        self._lent.add(number)
        view = self._arrays[number].view()
        view.flags.writeable = False
        return view

    def entry(self, number: int) -> videodev.Buffer:
        """The buffer of the kernel for an array."""
        entry = videodev.Buffer(
            index=number,
            type=videodev.VIDEO_CAPTURE,
            memory=videodev.MEMORY_USERPTR,
            length=self.size_bytes,
        )
        entry.m.userptr = self._addresses[number]
        return entry

    def attach(self, capture: InPlaceCapture | None) -> None:
        """Has released arrays queued by this capture; None by none. In the loop's thread."""
        self._capture = capture

    @property
    def is_attached(self) -> bool:
        """Whether a camera captures into it."""
        return self._capture is not None

    def is_held(self) -> bool:
        """Whether the driver has no array to fill, since the application, or the source's queue, has all of them."""
        return self._capture is not None and not self._capture.has_queued

    def detach(self, capture: InPlaceCapture) -> None:
        """Takes ``attach`` back, unless another capture has followed. From any thread."""
        if self._capture is capture:
            self._capture = None


def _checked(array: Any, where: str) -> Pixels:
    """The array as ``[height, width, channels]``."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = array.dtype if isinstance(array, np.ndarray) else class_text(array)
        raise InvalidArgument(f"{where}: expected arrays of uint8, got {kind}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidArgument(f"{where}: expected arrays that are contiguous and writable")
    shape = array.shape[1:] if array.ndim == 4 and array.shape[0] == 1 else array.shape
    if len(shape) != 3 or shape[2] not in FORMATS or not all(1 <= edge <= EDGE_MAX for edge in shape[:2]):
        raise InvalidArgument(
            f"{where}: expected arrays of [height, width, channels] with 1 to 3 channels, got {list(array.shape)}"
        )
    return array.reshape(shape)


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of the first byte."""
    return int(array.__array_interface__["data"][0])


def in_place_format(memory: CaptureMemory, wished: PixelFormat | None, where: str) -> PixelFormat:
    """The pixel format that fills the arrays as they are.

    Raises:
        InvalidArgument: The wish is another one.
    """
    known = FORMATS[memory.channels]
    if wished is None or (isinstance(wished, str) and wished in known):
        return wished or known[0]
    raise InvalidArgument(
        f"{where}: pixel_format: expected {' or '.join(known)} for arrays of {memory.channels} bytes a pixel, got {shown(wished)}"
    )


def check_layout(path: str, choice: Choice, pix: videodev.PixFormat, memory: CaptureMemory) -> None:
    """Checks that the format which the driver has set fills the arrays as they are.

    Raises:
        SourceUnavailable: Size, rows or length differ.
    """
    width, height = memory.size
    row_bytes = width * BYTES_PER_PIXEL[choice.format]
    stride = pix.bytesperline or row_bytes
    if (
        (pix.width, pix.height) == (width, height)
        and stride == row_bytes
        and pix.sizeimage <= memory.size_bytes
    ):
        return
    raise SourceUnavailable(
        f"camera {path}: expected {choice.format} {width}x{height} in {memory.size_bytes} bytes with rows of {row_bytes}, "
        f"which the memory has, got {pix.width}x{pix.height} in {pix.sizeimage} bytes with rows of {stride}; capture without into=",
        is_permanent=True,
    )


class InPlaceCapture(CameraCapture):
    """A camera that streams into memory of the application. Made by `open_camera`; see `CameraCapture` for the arguments.

    Args:
        memory: The arrays.
        queued: Those that the driver has from the start.
    """

    is_immediate = True

    def __init__(
        self,
        device: VideoDevice,
        memory: CaptureMemory,
        queued: set[int],
        period_ns: int | None,
        description: str,
    ) -> None:
        super().__init__(device, [], None, period_ns, description)
        self._memory = memory
        self._queued = queued
        self._is_attached = self._is_closed = False
        # The number of a closed descriptor may be another one's: closing, in its thread, and queueing exclude each other.
        self._turn = threading.Lock()

    @property
    def depth(self) -> int:
        """Number of arrays that the application does not have."""
        return len(self._memory) - len(self._memory.lent)

    @property
    def has_queued(self) -> bool:
        """Whether the driver has an array."""
        return bool(self._queued)

    def dequeue(self, now_ns: int) -> Grab | None:
        """See `aionn.media.live.capture.Capture`."""
        if not self._is_attached:
            # Not when it was opened, which is in another thread: the application may have released some since.
            self._is_attached = True
            self._memory.attach(self)
            for number in range(len(self._memory)):
                if number not in self._queued and number not in self._memory.lent:
                    self.queue(number)
        entry = self._dequeued(videodev.MEMORY_USERPTR)
        if entry is None:
            return None
        if entry.index not in self._queued:
            raise SourceUnavailable(
                f"{self.name}: expected one of the buffers {sorted(self._queued)}, got number {entry.index}; the driver is at fault"
            )
        self._queued.discard(entry.index)
        grab = self._grab(entry, now_ns)
        # Less than a picture would show the rest of an earlier one.
        grab.is_corrupt = grab.is_corrupt or entry.bytesused < self._memory.size_bytes
        return grab

    def requeue(self, grab: Grab) -> None:
        """See `aionn.media.live.capture.Capture`. An array whose frame was delivered is queued by ``CaptureMemory.release``."""
        if grab.slot not in self._memory.lent:
            self.queue(grab.slot)

    def queue(self, number: int) -> None:
        """Has the driver fill an array. It raises nothing: a camera that is gone is noticed by the next dequeue."""
        with self._turn, contextlib.suppress(OSError):
            if number not in self._queued and not self._is_closed:
                self._device.system.ioctl(self._device.fd, videodev.QBUF, self._memory.entry(number))
                self._queued.add(number)

    def convert(self, grab: Grab) -> Frame:
        """See `aionn.media.live.capture.Capture`; the frame is the memory itself."""
        return self._frame(grab, self._memory.lend(grab.slot))

    def close(self) -> None:
        """See `aionn.media.live.capture.Capture`. The driver writes into no array afterwards."""
        self._memory.detach(self)
        with self._turn:
            self._is_closed = True
        super().close()


def open_in_place(
    system: System,
    path: str,
    wish: Wish,
    memory: CaptureMemory,
    *,
    input_index: int | None,
    controls: Mapping[str, ControlValue] = NO_CONTROLS,
) -> InPlaceCapture:
    """Opens a camera and starts its stream into memory of the application. It may block for as long as the driver does.

    Args:
        system: The system calls.
        path: The device.
        wish: See `choose`; its format and size are those of the memory.
        memory: The arrays.
        input_index: Input to select, of a card that has several; None leaves it.
        controls: Values of controls, by name.

    Raises:
        SourceUnavailable: It cannot be opened, its driver does not write into memory of others, or its format has another layout.
    """
    device = VideoDevice(system, path)
    try:
        if memory.is_attached:
            raise SourceUnavailable(
                f"camera {path}: expected memory of its own, got one into which another camera is captured",
                is_permanent=True,
            )
        setting = set_up(device, wish, input_index, controls)
        check_layout(path, setting.choice, setting.pix, memory)
        wanted = videodev.RequestBuffers(
            count=len(memory), type=videodev.VIDEO_CAPTURE, memory=videodev.MEMORY_USERPTR
        )
        try:
            system.ioctl(device.fd, videodev.REQBUFS, wanted)
        except OSError as e:
            if e.errno == errno.EINVAL:
                raise SourceUnavailable(
                    f"camera {path}: expected a driver that writes into memory of the application, got one that does not (user "
                    "pointers); capture without into=",
                    is_permanent=True,
                ) from e
            raise device.problem(e, f"requesting {len(memory)} buffers") from e
        if wanted.count < len(memory):
            raise SourceUnavailable(
                f"camera {path}: expected {len(memory)} buffers, got {wanted.count}; give fewer arrays",
                is_permanent=True,
            )
        queued = set(range(len(memory))) - memory.lent
        for number in sorted(queued):
            device.ask(videodev.QBUF, memory.entry(number), f"queueing array {number}")
        device.ask(videodev.STREAMON, ctypes.c_int(videodev.VIDEO_CAPTURE), "starting to stream")
        return InPlaceCapture(device, memory, queued, setting.period_ns, setting.description)
    except BaseException:
        system.close(device.fd)
        raise
