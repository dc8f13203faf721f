"""Memory pools: shared memory by descriptor, mapped once, closed with the last reference.

Owns creation, sealing, import and mapping, and the layout of an image's pixels. Does not interpret the content of any other pool.

Invariants:
1. A pool that we create has its space allocated at creation (shortage is an exception then, never SIGBUS later) and is sealed
   against shrinking and growing, one of constants also against writing. One that cannot fit is refused before it gets a page.
2. A pool of kind ``ashmem`` that comes from elsewhere must carry those seals and be as large as declared.
3. Descriptors are close-on-exec. A pool's descriptor and mapping go when its last reference goes, or at ``close``.
4. A pool of kind ``hardware_buffer`` is an image and has a description; no other pool has one.

Source: ``Memory`` of the NN HAL (kinds ashmem, mmap_fd, hardware_buffer_blob, hardware_buffer) and ``AHardwareBuffer_Desc``;
sealing: memfd_create(2).
"""

from __future__ import annotations

import enum
import errno
import fcntl
import functools
import mmap
import operator
import os
import reprlib
import weakref
from collections.abc import Callable, Iterable
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from fmq.available import MemoryShortage, check_available

__all__ = [
    "PREFERRED_ALIGNMENT_BYTES",
    "BufferDesc",
    "BufferRole",
    "PREFERRED_PADDING_BYTES",
    "HardwareBufferDesc",
    "HardwareBufferFormat",
    "Memory",
    "MemoryKind",
    "whole_number",
    "write_all",
]

PREFERRED_ALIGNMENT_BYTES = 64
"""Alignment that values in request pools should have; the spec's number, and a cache line."""

PREFERRED_PADDING_BYTES = 64
"""Padding that values in request pools should have; the spec's number."""

IMAGE_BYTES_MAX = 2**32 - 1
"""Sizes are unsigned 32-bit numbers on the HAL's wire."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEALS_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1 and newer: the file can neither be written nor mapped writable from then on. ``fcntl`` names it from Python 3.13 on."""


def whole_number(value: object, where: str) -> int:
    """Python's number for a whole number of any class, such as numpy's.

    Raises:
        InvalidArgument: It is not a whole number; the message begins with ``where``.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{where}: expected a whole number, got {reprlib.repr(value)}") from None


class MemoryKind(enum.StrEnum):
    """The spec's names of memory kinds."""

    ASHMEM = "ashmem"
    MMAP_FD = "mmap_fd"
    HARDWARE_BUFFER_BLOB = "hardware_buffer_blob"
    HARDWARE_BUFFER = "hardware_buffer"


class HardwareBufferFormat(enum.IntEnum):
    """The pixel format of a hardware buffer, with the spec's numbers; ``BLOB`` is bytes without pixels."""

    R8G8B8A8_UNORM = 1
    R8G8B8X8_UNORM = 2
    R8G8B8_UNORM = 3
    BLOB = 0x21
    R8_UNORM = 0x38


_PIXELS = {
    # Bytes of a pixel, and the number of them, from the first on, that are channels: an X byte is unused.
    HardwareBufferFormat.R8G8B8A8_UNORM: (4, 4),
    HardwareBufferFormat.R8G8B8X8_UNORM: (4, 3),
    HardwareBufferFormat.R8G8B8_UNORM: (3, 3),
    HardwareBufferFormat.BLOB: (1, 1),
    HardwareBufferFormat.R8_UNORM: (1, 1),
}


class BufferDesc(msgspec.Struct, frozen=True, array_like=True):
    """The known part of a device memory's shape beyond its roles; empty or 0 where unknown."""

    dimensions: tuple[int, ...] = ()


class BufferRole(msgspec.Struct, frozen=True, array_like=True):
    """One use that a device memory is meant for.

    Attributes:
        model_index: Which prepared model of the call.
        io_index: Which of its inputs or outputs.
        probability: Likelihood of the use, above 0 and at most 1.
    """

    model_index: int
    io_index: int
    probability: float = 1.0


class HardwareBufferDesc(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a hardware buffer's pixels: layer behind layer, row behind row, from the buffer's first byte on.

    Attributes:
        width: Pixels of a row; of a ``BLOB``, its bytes.
        height: Rows of a layer; 1 for a ``BLOB``.
        layers: Images behind each other; 1 for a ``BLOB``.
        format: The format of a pixel.
        stride: Pixels from the start of a row to the start of the next; 0 stands for ``width``, as in a ``BLOB``.
    """

    width: int
    height: int
    layers: int = 1
    format: HardwareBufferFormat = HardwareBufferFormat.R8G8B8A8_UNORM
    stride: int = 0

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel."""
        return _PIXELS[self.format][0]

    @property
    def channel_count(self) -> int:
        """Values of a pixel."""
        return _PIXELS[self.format][1]

    @property
    def row_bytes(self) -> int:
        """Bytes from the start of a row to the start of the next."""
        return (self.stride or self.width) * self.pixel_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole buffer, the last row's end included."""
        return self.layers * self.height * self.row_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The pixels as a tensor: ``(layers, height, width, channels)``."""
        return self.layers, self.height, self.width, self.channel_count

    def check(self) -> None:
        """Refuses what no buffer can be.

        Raises:
            InvalidArgument: A field has a value of another type, an extent is below 1, a row reaches into the next, a ``BLOB`` has
                rows, or it is larger than 4 GiB.
        """
        for name in self.__struct_fields__:
            _check_type(
                getattr(self, name), HardwareBufferFormat if name == "format" else int, f"image, {name}"
            )
        if min(self.width, self.height, self.layers) < 1 or self.stride < 0:
            raise InvalidArgument(f"hardware buffer: expected extents of at least 1, got {self}")
        if self.stride and self.stride < self.width:
            raise InvalidArgument(
                f"hardware buffer: expected a stride of at least the {self.width} pixels of a row, got {self.stride}"
            )
        is_row = (self.height, self.layers) == (1, 1) and self.stride in (0, self.width)
        if self.format == HardwareBufferFormat.BLOB and not is_row:
            raise InvalidArgument(f"hardware buffer: expected a BLOB of one row, got {self}")
        if self.size_bytes > IMAGE_BYTES_MAX:
            raise InvalidArgument(
                f"hardware buffer: expected at most {IMAGE_BYTES_MAX} bytes, got {self.size_bytes}"
            )


class Memory:
    """A pool of shared memory.

    Make one with ``Memory.create``, ``Memory.of_constants`` or ``Memory.from_fd``. The descriptor belongs to this object; it is
    duplicated on import and may be sent to other processes, which then share the bytes.

    Attributes:
        kind: The spec's kind.
        size_bytes: Size of the pool.
        offset: Where it starts in the file behind the descriptor.
        file: Which file that is, equal in every process and for every memory that shares its bytes: device and inode.
        image: The layout of its pixels; None for memory that is not an image.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_at_close",
        "_fd",
        "_finalizer",
        "file",
        "image",
        "kind",
        "offset",
        "size_bytes",
    )

    def __init__(
        self,
        fd: int,
        array: npt.NDArray[np.uint8],
        kind: MemoryKind,
        offset: int = 0,
        image: HardwareBufferDesc | None = None,
        closing: Callable[[int, object], object] | None = None,
    ) -> None:
        self._fd = fd
        self.image = image
        self._array = array
        self.kind = kind
        self.size_bytes = array.nbytes
        self.offset = offset
        status = os.fstat(fd)
        self.file = status.st_dev, status.st_ino
        # The mapping itself goes with the last array that views it: numpy keeps the mmap object alive.
        self._at_close: list[Callable[[], object]] = []
        ending = functools.partial(os.close, fd) if closing is None else functools.partial(closing, fd, array)
        self._finalizer = weakref.finalize(self, _end, ending, self._at_close)

    @classmethod
    def create(
        cls,
        size_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.ASHMEM,
        name: str = "aionn",
        closing: Callable[[int, object], object] | None = None,
    ) -> Self:
        """Makes a pool, zeroed, allocated and sealed.

        Args:
            size_bytes: At least 1.
            kind: ``ASHMEM`` or ``HARDWARE_BUFFER_BLOB``: both are memfd-backed here.
            name: Shows in /proc/<pid>/maps.
            closing: See ``from_fd``.

        Raises:
            InvalidArgument: Illegal size or kind.
            ResourceExhausted: No memory or no descriptor is left, or the machine could never have so much (persistent).
        """
        size_bytes = whole_number(size_bytes, "memory, size")
        if size_bytes <= 0:
            raise InvalidArgument(f"memory: size must be at least 1 byte, got {size_bytes}")
        if kind not in (MemoryKind.ASHMEM, MemoryKind.HARDWARE_BUFFER_BLOB):
            raise InvalidArgument(f"memory: can create ashmem or hardware_buffer_blob, got {kind}")
        return cls._create(size_bytes, kind, name, closing=closing)

    @classmethod
    def of_constants(
        cls,
        size_bytes: int,
        parts: Iterable[tuple[int, npt.NDArray[np.uint8]]],
        *,
        name: str = "aionn-constants",
    ) -> Self:
        """Makes a pool that is sealed against writing, mapped read-only: see ``is_unchanging``.

        Args:
            size_bytes: At least 1.
            parts: Where each part begins, and its bytes, contiguous and in order. Gaps between parts are shorter than a page. Each
                is written before the next one is asked for; exceptions of the iterable are passed on, but no ``OSError``.
            name: Shows in /proc/<pid>/maps.

        Raises:
            ResourceExhausted: No memory or no descriptor is left, or the machine could never have so much (persistent).
        """
        fd = cls._new_file(size_bytes, name)
        try:
            os.ftruncate(fd, size_bytes)
            end = 0
            # Written, not mapped: the kernel allocates each page when it copies into it, and clears none before.
            for offset, part in parts:
                assert 0 <= offset - end < mmap.PAGESIZE, (
                    "a page without a part would be allocated when it is read"
                )
                end = offset + part.nbytes
                write_all(fd, part.data, offset)
            assert end == size_bytes, "the last part ends the pool"
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            except OSError:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # An older kernel.
            return cls(fd, _map(fd, size_bytes, 0, writable=False), MemoryKind.ASHMEM)
        except BaseException as e:
            os.close(fd)
            if isinstance(e, OSError):
                raise _cannot_allocate(size_bytes, e) from e
            raise

    @classmethod
    def create_hardware_buffer(cls, description: HardwareBufferDesc, *, name: str = "aionn-image") -> Self:
        """Makes a hardware buffer, zeroed, allocated and sealed: an image, or plain bytes for the format ``BLOB``.

        Raises:
            InvalidArgument: No buffer can be so.
            ResourceExhausted: No memory or no descriptor is left.
        """
        _check_type(description, HardwareBufferDesc, "image")
        description.check()
        if description.format == HardwareBufferFormat.BLOB:
            return cls._create(description.width, MemoryKind.HARDWARE_BUFFER_BLOB, name)
        return cls._create(description.size_bytes, MemoryKind.HARDWARE_BUFFER, name, description)

    @classmethod
    def _create(
        cls,
        size_bytes: int,
        kind: MemoryKind,
        name: str,
        image: HardwareBufferDesc | None = None,
        closing: Callable[[int, object], object] | None = None,
    ) -> Self:
        fd = cls._new_file(size_bytes, name)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, _map(fd, size_bytes, 0, writable=True), kind, 0, image, closing)
        except OSError as e:
            os.close(fd)
            raise _cannot_allocate(size_bytes, e) from e

    @staticmethod
    def _new_file(size_bytes: int, name: str) -> int:
        try:
            check_available(size_bytes)
        except MemoryShortage as e:
            raise ResourceExhausted(
                f"memory: cannot allocate {size_bytes} bytes: {e.strerror}", transient=e.transient
            ) from e
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as e:
            raise ResourceExhausted(f"memory: no descriptor for {size_bytes} bytes: {e.strerror}") from e

    @classmethod
    def from_fd(
        cls,
        fd: int,
        *,
        size_bytes: int | None = None,
        offset: int = 0,
        kind: MemoryKind = MemoryKind.ASHMEM,
        writable: bool = True,
        image: HardwareBufferDesc | None = None,
        closing: Callable[[int, object], object] | None = None,
    ) -> Self:
        """Imports a descriptor, which is duplicated: the caller keeps and closes its own.

        Args:
            fd: Any file that can be mapped for ``MMAP_FD``; a sealed memfd for every other kind.
            size_bytes: Declared size; None takes what the file has after ``offset``, or what ``image`` needs.
            offset: Where the pool starts, a multiple of the page size.
            kind: The spec's kind.
            writable: False maps read-only.
            image: The layout of the pixels of a ``HARDWARE_BUFFER``; None for every other kind.
            closing: Called once, instead of os.close, with the pool's own descriptor and the object whose end unmaps it, in the
                thread that drops the pool; None for a file that is closed without delay.

        Raises:
            InvalidArgument: No such file, not sealed, too small, or illegal numbers.
            ResourceExhausted: No descriptor or no address space is left.
            GeneralFailure: It cannot be mapped.
        """
        fd, offset = whole_number(fd, "memory, descriptor"), whole_number(offset, "memory, offset")
        size_bytes = None if size_bytes is None else whole_number(size_bytes, "memory, size")
        try:
            kind = MemoryKind(kind)
        except ValueError:
            raise InvalidArgument(
                f"memory: expected a kind of {', '.join(MemoryKind)}, got {kind!r:.80}"
            ) from None
        _check_image(kind, size_bytes, image)
        if image is not None:
            size_bytes = image.size_bytes
        try:
            file_bytes = os.fstat(fd).st_size
        except OSError as e:
            raise InvalidArgument(f"memory: descriptor {fd} cannot be used: {e.strerror}") from e
        except OverflowError as e:
            raise InvalidArgument(f"memory: expected a descriptor, got {fd}") from e
        if size_bytes is None:
            size_bytes = file_bytes - offset
        if offset < 0 or offset % mmap.PAGESIZE or size_bytes <= 0:
            raise InvalidArgument(
                f"memory: expected a page-aligned offset and a positive size, got offset {offset}, size {size_bytes}"
            )
        if offset + size_bytes > file_bytes:
            raise InvalidArgument(
                f"memory: declared {size_bytes} bytes at offset {offset}, but the file has {file_bytes}"
            )
        if kind != MemoryKind.MMAP_FD:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _SEALS_NEEDED != _SEALS_NEEDED:
                raise InvalidArgument(
                    f"memory: a pool of kind {kind} must be a memfd sealed against shrinking and growing"
                )
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as e:
            raise ResourceExhausted(f"memory: no descriptor left to import a pool: {e.strerror}") from e
        try:
            return cls(own, _map(own, size_bytes, offset, writable=writable), kind, offset, image, closing)
        except (OSError, ValueError) as e:
            os.close(own)
            # mmap needs a descriptor of its own: the limit may be reached here as well as one call earlier.
            short = isinstance(e, OSError) and e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
            error = ResourceExhausted if short else GeneralFailure
            raise error(f"memory: cannot map {size_bytes} bytes: {e}") from e

    @property
    def is_unchanging(self) -> bool:
        """Whether the file is sealed against shrinking, writing and writable mappings. False where the kernel has no such seal, and
        once it is closed.

        A process that mapped the file writable before the seal can still write. So another process's seal is trusted only where a
        broken promise harms that process alone.
        """
        if self.is_closed:
            return False
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
        except OSError:
            return False
        is_whole = bool(
            seals & fcntl.F_SEAL_SHRINK
        )  # Pages that are cut off end the process that reads them.
        return is_whole and bool(seals & (fcntl.F_SEAL_WRITE | _SEAL_FUTURE_WRITE))

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def fileno(self) -> int:
        """The pool's descriptor, still owned by the pool.

        Raises:
            ValueError: The pool is closed.
        """
        if self.is_closed:
            raise ValueError("memory: the pool is closed")
        return self._fd

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole pool as a writable ``[size_bytes]`` uint8 array (read-only if imported so, or of constants).

        Views stay valid after ``close``; the pages are given back when the last of them goes.
        """
        return self._array

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """An image's values, ``[layers, height, width, channels]`` uint8: a view, with gaps where rows or pixels have some.

        Raises:
            ValueError: The memory is not an image.
        """
        image = self.image
        if image is None:
            raise ValueError(f"memory: expected an image, got memory of kind {self.kind}")
        shape = (image.layers, image.height, image.stride or image.width, image.pixel_bytes)
        return self._array.reshape(shape)[:, :, : image.width, : image.channel_count]

    def close(self) -> None:
        """Closes the descriptor. Arrays that view the pool stay valid."""
        self._finalizer()

    def add_close_callback(self, callback: Callable[[], object]) -> None:
        """Has ``callback`` called once when the pool is closed or dropped, in whatever thread that happens; it must not block."""
        self._at_close.append(callback)

    def remove_close_callback(self, callback: Callable[[], object]) -> None:
        """Undoes ``add_close_callback``; one that was never added is ignored."""
        if callback in self._at_close:
            self._at_close.remove(callback)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"fd {self._fd}"
        return f"<Memory {self.kind} {self.size_bytes} bytes, {state}>"


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Writes all bytes at a place of a file. Raises ``OSError``."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _cannot_allocate(size_bytes: int, error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"memory: cannot allocate {size_bytes} bytes: {error.strerror}")


def _check_type(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidArgument(
            f"{where}: expected {kind.__name__}, got {type(value).__name__} {reprlib.repr(value)}"
        )


def _check_image(kind: MemoryKind, size_bytes: int | None, image: HardwareBufferDesc | None) -> None:
    if (kind == MemoryKind.HARDWARE_BUFFER) != (image is not None):
        raise InvalidArgument(f"memory: expected a description for an image and for nothing else, got {kind}")
    if image is None:
        return
    _check_type(image, HardwareBufferDesc, "image")
    image.check()
    if image.format == HardwareBufferFormat.BLOB:
        raise InvalidArgument("memory: expected an image, got a BLOB: that is hardware_buffer_blob")
    if size_bytes is not None and size_bytes != image.size_bytes:
        raise InvalidArgument(f"memory: expected {image.size_bytes} bytes for {image}, got {size_bytes}")


def _end(ending: Callable[[], object], callbacks: list[Callable[[], object]]) -> None:
    ending()
    for callback in callbacks:
        callback()
    callbacks.clear()


def _map(fd: int, size_bytes: int, offset: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # mmap duplicates the descriptor for itself; trackfd=False (3.13) would save it, but 3.11 lacks the argument.
    return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, prot, offset=offset), dtype=np.uint8)
