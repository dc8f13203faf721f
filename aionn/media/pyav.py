"""The one door to PyAV.

Owns loading PyAV when it is first needed and turning its errors into ours. Refuses to own decoding.

Invariants:
1. ``import aionn.media`` loads no PyAV; it is the optional extra ``media``.
2. An error of FFmpeg leaves here as `InvalidArgument`, which names the file.

Source: PyAV 14 to 19; only what all of them have is used.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.platform.files import place_of

__all__ = ["RgbScaler", "check_file", "load", "open_container", "whole_packets"]


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_file(text: str, where: str) -> None:
    """Raises `InvalidArgument` unless a file is at the path.

    FFmpeg would also take a URL, a directory, a pipe or a device; a source reads regular files only.
    """
    try:
        mode = os.stat(text).st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        advice = "; aionn.media.network opens an address" if "://" in text else place_of(text)
        raise InvalidArgument(f"{where}: expected a media file at {text!r}, got: {reason}{advice}") from error
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        # A pipe without a writer would be waited for without end.
        advice = "; aionn.media.camera opens a camera" if kind == stat.S_IFCHR else ""
        raise InvalidArgument(
            f"{where}: expected a media file at {text!r}, got {_KINDS.get(kind, 'no file')}{advice}"
        )


def load(where: str) -> Any:
    """Returns the module ``av``.

    Raises:
        DeviceUnavailable: It is not installed, or cannot be loaded.
    """
    try:
        import av
        import av.error
        import av.video.reformatter
    except ImportError as error:
        raise DeviceUnavailable(
            f"{where}: needs PyAV, which cannot be loaded here ({error}): pip install 'aionn[media]'"
        ) from error
    return av


class RgbScaler:
    """Scales pictures and converts them to red, green, blue in one pass, on the calling thread alone.

    swscale would divide each picture among all processors by default: for pictures of the size of a model's input that takes
    longer, most of all where the processors are busy.

    Args:
        av: The module.
        interpolation: swscale's name of it.
    """

    def __init__(self, av: Any, interpolation: str = "FAST_BILINEAR") -> None:
        module = av.video.reformatter
        # One for all pictures: it keeps swscale's tables.
        self._reformatter = module.VideoReformatter()
        self._method = module.Interpolation[interpolation.upper()]
        self._format = av.VideoFormat("rgb24")  # Its name would be looked up for each picture.
        self._threads = {"threads": 1}

    def __call__(self, picture: Any, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Pixels of a picture, uint8 ``[height, width, 3]``, in memory of their own."""
        pixels: npt.NDArray[np.uint8] = self._scaled(picture, width, height).to_ndarray()
        return pixels

    def rows(self, picture: Any, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Pixels of a picture, uint8 ``[height, width * 3]``, where FFmpeg has put them, for a caller that copies them: the rows
        may be padded."""
        plane = self._scaled(picture, width, height).planes[0]
        return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, : width * 3]

    def _scaled(self, picture: Any, width: int, height: int) -> Any:
        try:
            return self._reformatter.reformat(
                picture, width, height, self._format, interpolation=self._method, **self._threads
            )
        except TypeError:
            if not self._threads:
                raise
            self._threads = {}  # Older versions of PyAV have no such argument.
            return self._scaled(picture, width, height)


@contextlib.contextmanager
def open_container(path: str, kind: str, where: str) -> Iterator[tuple[Any, Any]]:
    """Opens a media file; yields ``(container, stream)`` with its first stream of the kind, and closes it at the end.

    Errors of FFmpeg inside the block become `InvalidArgument` as well.

    Args:
        path: A file.
        kind: ``"video"`` or ``"audio"``.
        where: The caller, for messages.

    Raises:
        InvalidArgument: Not a media file, no stream of the kind, or damaged.
        DeviceUnavailable: PyAV is missing.
    """
    av = load(where)
    check_file(path, where)
    opened = False
    try:
        with av.open(path) as container:
            streams = getattr(container.streams, kind)
            if not streams:
                kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
                raise InvalidArgument(f"{where}: expected {path!r} to hold {kind}, got {kinds}")
            opened = True
            yield container, streams[0]
    except av.error.FFmpegError as error:
        problem = f"data that cannot be decoded ({error.strerror}); the file is damaged or cut short"
        if not opened:
            problem = f"no media file, or one cut short ({error.strerror})"
        raise InvalidArgument(f"{where}: expected {path!r} to hold {kind}, got {problem}") from error


def whole_packets(container: Any, stream: Any, path: str, where: str) -> Iterator[Any]:
    """Yields the packets of a stream, the empty one that flushes the decoder last.

    FFmpeg reads a file that was cut short to its end without a word, the last packet in part. A file of the MP4 family begins
    with a table of all packets, though, so that missing packets are noticed; other kinds return the packets that they have.

    Raises:
        InvalidArgument: The file ends before its table does.
    """
    promised = int(stream.frames) if "mp4" in container.format.name else 0
    packets = 0
    for packet in container.demux(stream):
        if promised and (packet.is_corrupt or (packet.size == 0 and packets < promised)):
            raise InvalidArgument(
                f"{where}: expected {path!r} to hold {promised} packets of {stream.type}, as its header declares, got {packets}; "
                "the file is cut short"
            )
        packets += packet.size > 0
        yield packet
