"""Writing the items of a stream into a file, without ever making the stream wait.

Owns the file, the thread that writes it, and the bound of what waits for it. Refuses to own the form (`items.py`).

Invariants:
1. ``add`` never waits: an item goes to a thread, or is left out and counted.
2. A file that cannot be written ends the recording and nothing else: it is cut to its last whole item, the reason is logged and
   kept, and the stream continues.
3. At most `QUEUE_BYTES_MAX` of items wait for the thread, or one item, and at most `QUEUE_ITEMS_MAX`.
4. ``added == written + left_out + queued`` in the statistics, at any time.
5. When ``async with`` has ended the file is closed, unless the system has not written it within `CLOSE_S_MAX`; the thread then
   continues by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

import msgspec

from aionn.errors import InvalidArgument, class_text
from aionn.media.arguments import checked_path
from aionn.media.live.worker import Call, Worker
from aionn.media.pacing import worthwhile_wait_ns
from aionn.media.recording.items import Item, Kind, encoded_head, encoded_item, kind_of
from aionn.media.records import AudioWindow, Frame
from aionn.platform.files import creation_error
from aionn.platform.process_bound import InThisProcess

__all__ = ["Recorder", "RecordingStatistics", "record"]

_logger = logging.getLogger("aionn.media")

QUEUE_BYTES_MAX: Final = 64 << 20
"""Two seconds of 640 x 480 pixels at 30 frames/s: longer than a disk pauses to write its cache, and no burden for the memory."""

QUEUE_ITEMS_MAX: Final = 256
"""Small items: each also costs the thread a call."""

OPEN_S_MAX: Final = 10.0
"""Creating a file takes microseconds; a network's file system may have to connect first."""

CLOSE_S_MAX: Final = 10.0
"""The items that wait are written at 6 MB/s in this time, which a slow memory card can do."""

T = TypeVar("T", Frame, AudioWindow)


class RecordingStatistics(msgspec.Struct, frozen=True):
    """Counts of a recording so far. ``added == written + left_out + queued`` at any time.

    Attributes:
        added: Items that were to be recorded.
        written: Items that are in the file.
        left_out: Items that are not in it, since the disk was slower than the stream, or could not be written.
        queued: Items that wait for the disk now.
        bytes: Length of the file.
        problem: Why the recording has ended early; empty if it has not.
    """

    added: int
    written: int
    left_out: int
    queued: int
    bytes: int
    problem: str


def record(path: str | os.PathLike[str]) -> Recorder:
    """Records items with their times: ``async with record("gate.rec") as recorder``, then ``recorder.through(frames)``.

    `replay` and `replay_audio` read the file. It holds every value as it is: one picture of 96 x 96 pixels takes 28 kB, one of
    640 x 480 takes 0.9 MB. Only its owner may read it. A recording without an item leaves no file.

    Where the disk is slower than the stream, items are left out; where it is full, the recording ends with the last whole item.
    Both are logged and counted, and the stream continues.

    Args:
        path: A file that does not exist yet.

    Raises:
        InvalidArgument: It is not a path.
    """
    return Recorder(checked_path(path, "aionn.media.record: path"))


class RecordingFile:
    """The file. Its methods run in one thread.

    Args:
        fd: An empty file that is open for writing. It belongs to this object.
        path: Where it is.

    Attributes:
        written: Number of whole items.
        bytes: Length of the file up to the last of them.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._kind: Kind | None = None
        self._has_failed = False
        self.written = 0
        self.bytes = 0

    def append(self, item: Item) -> None:
        """Writes an item.

        Raises:
            OSError: It cannot be written; the file ends with the item before, and every later call fails as well.
            InvalidArgument: It is of another kind than the items before.
        """
        if self._has_failed:
            raise OSError("an earlier item could not be written")
        kind = kind_of(item)
        parts = encoded_item(item)
        if self._kind is None:
            parts.insert(0, encoded_head(kind))
        elif kind != self._kind:
            raise InvalidArgument(f"aionn.media.record: expected {self._kind}, as before, got {kind}")
        try:
            size = _write_all(self._fd, parts)
        except OSError:
            self._has_failed = True
            with contextlib.suppress(
                OSError
            ):  # A device that is gone cannot be cut either; a reader stops there.
                os.ftruncate(self._fd, self.bytes)
            raise
        self._kind = kind
        self.written += 1
        self.bytes += size

    def close(self) -> None:
        """Closes the file, and removes one without items. It raises nothing."""
        with contextlib.suppress(OSError):
            # By then another recording may be there, and the present folder another one.
            if self.written == 0 and os.path.samestat(os.fstat(self._fd), os.lstat(self._path)):
                os.unlink(self._path)
        with contextlib.suppress(
            OSError
        ):  # A network's file system may report a full disk here, after the items were counted.
            os.close(self._fd)


def _write_all(fd: int, parts: list[Any]) -> int:
    """Writes all parts; returns their length."""
    data = b"".join(parts[:-1])
    for piece in (memoryview(data), memoryview(parts[-1])):
        done = 0
        while done < len(piece):
            done += os.write(fd, piece[done:])
    return len(data) + len(parts[-1])


class Recorder(InThisProcess):
    """Writes items into a file. Made by `record`; entered once."""

    INSTEAD = "make one in the other process, with a file of its own"

    def __init__(self, path: str) -> None:
        self._path = path
        self._name = f"recording {path!r}"
        self._state: Literal["new", "open", "closed"] = "new"
        self._worker = Worker("aionn-recorder")
        self._file: RecordingFile | None = None
        self._added = self._written = self._left_out = self._queued = self._queued_bytes = 0
        self._problem = ""

    async def __aenter__(self) -> Self:
        """Creates the file.

        Raises:
            InvalidArgument: It exists, or cannot be created; or this was entered before.
            SourceUnavailable: The system does not answer.
        """
        if self._state != "new":
            raise InvalidArgument(f"{self._name}: can be entered once, this one is {self._state}")
        self._state = "closed"
        try:
            self._file = await self._worker.run(
                self._create, limit_s=OPEN_S_MAX, what=self._name, discard=RecordingFile.close
            )
        except BaseException:
            await self._worker.aclose(_nothing, CLOSE_S_MAX)
            raise
        self._state = "open"
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the items that wait, and closes the file."""
        if self._state != "open":
            return
        self._state = "closed"
        assert self._file is not None
        await self._worker.aclose(self._file.close, CLOSE_S_MAX)

    def __repr__(self) -> str:
        return f"<Recorder {self._path!r} {self._state}, written {self._written}, left out {self._left_out}>"

    def add(self, item: Item) -> None:
        """Records an item; never waits. Its array must not be written into afterwards.

        Raises:
            InvalidArgument: It is not a `Frame` or an `AudioWindow`, or the recorder is not open.
        """
        if self._state != "open" or self._file is None:
            raise InvalidArgument(
                f"{self._name}: expected to be used inside its `async with`, it is {self._state}"
            )
        kind_of(item)
        size = item.data.nbytes if isinstance(item, Frame) else item.samples.nbytes
        self._added += 1
        if self._problem or not self._has_room(size):
            self._left_out += 1
            return
        self._queued += 1
        self._queued_bytes += size
        call = self._worker.submit(functools.partial(self._file.append, item))
        call.future.add_done_callback(functools.partial(self._take_written, call, size))

    def through(self, items: AsyncIterable[T]) -> Through[T]:
        """The same items, each of which is recorded when it is taken. Cancelling is as for ``items``.

        Raises:
            InvalidArgument: They are not an async iterable.
        """
        if not isinstance(items, AsyncIterable):
            raise InvalidArgument(
                f"{self._name}: through: expected an async iterable, got {class_text(items)}"
            )
        return Through(self, items)

    def statistics(self) -> RecordingStatistics:
        """Counts so far; also after the end."""
        return RecordingStatistics(
            added=self._added,
            written=self._written,
            left_out=self._left_out,
            queued=self._queued,
            bytes=0 if self._file is None else self._file.bytes,
            problem=self._problem,
        )

    def _create(self) -> RecordingFile:
        path = self._path and os.path.abspath(self._path)
        try:
            # Pictures and sounds of people: for the owner alone. Never over a file that is there.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as e:
            raise InvalidArgument(
                f"{self._name}: expected a new file, got one that exists; name another one"
            ) from e
        except (OSError, ValueError) as e:
            reason = creation_error(path, e) if isinstance(e, OSError) else str(e)
            raise InvalidArgument(f"{self._name}: cannot be created: {reason}") from e
        return RecordingFile(fd, path)

    def _has_room(self, size: int) -> bool:
        has_room = self._queued < QUEUE_ITEMS_MAX and self._queued_bytes + size <= QUEUE_BYTES_MAX
        if not (has_room or self._queued == 0) and not self._left_out:
            _logger.warning("%s: the disk is slower than the stream; items are left out", self._name)
        return has_room or self._queued == 0

    def _take_written(self, call: Call[None], size: int, future: object) -> None:
        self._queued -= 1
        self._queued_bytes -= size
        error = None if call.future.cancelled() else call.future.exception()
        if error is None:
            self._written += 1
            return
        self._left_out += 1
        if not self._problem:
            reason = error.strerror if isinstance(error, OSError) else None
            self._problem = reason or str(error)
            _logger.warning(
                "%s: ended after %d items: %s; the stream continues", self._name, self._written, self._problem
            )


class Through(AsyncIterator[T], Generic[T]):
    """Items on their way through a recorder. Made by `Recorder.through`."""

    def __init__(self, recorder: Recorder, items: AsyncIterable[T]) -> None:
        self._recorder = recorder
        self._items: AsyncIterator[T] = aiter(items)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await anext(self._items)
        self._recorder.add(item)
        return item

    def newest_in_place_of(self, item: T) -> T:
        """Exchanges the item where the items' source can; both are recorded."""
        exchange = getattr(self._items, "newest_in_place_of", None)
        newest: T = item if exchange is None else exchange(item)
        if newest is not item:
            self._recorder.add(newest)
        return newest

    def is_newer_due(self, then: Callable[[], object]) -> bool:
        """As that of the items' source; False where it has none."""
        ask = getattr(self._items, "is_newer_due", None)
        return ask is not None and bool(ask(then))

    def worthwhile_wait_ns(self) -> int:
        """As that of the items' source; 0 where it has none."""
        return worthwhile_wait_ns(self._items)


def _nothing() -> None:
    """Called in place of closing a file that was not created."""
