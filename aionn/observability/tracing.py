"""Sections of work for a trace: which layer does what phase of it, from when to when, in which process.

Owns the marks, the lanes that sections are drawn in, and the file, to which every process of an application appends. Refuses to own
what is made of the file: ``aionn.runtime.traces`` finishes it and adds up what is in it.

Invariants:
1. While tracing is off, a section costs one call and one comparison, and writes nothing.
2. One section is one line, written by one call in append mode: the lines of several processes never mix, and a process
   that is killed loses the sections that had not ended, no others. A line that a full disk cut off is completed before the next.
3. Sections of one lane nest. A thread has a lane; each task of an event loop that traces has one while it does.
4. Times are CLOCK_MONOTONIC, which all processes of a machine share.
5. A forked child does not trace to the file of its parent.

Source: the NN HAL's tracing marks ``[NN_<layer>_<phase>]detail``; Chrome's trace event format, JSON array form.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from types import TracebackType
from typing import cast

import anyio
import msgspec

from aionn.errors import InvalidArgument
from aionn.platform.files import creation_error

__all__ = [
    "LAYERS",
    "PHASES",
    "TRACE_VARIABLE",
    "is_of_parent",
    "is_tracing",
    "record",
    "section",
    "start_tracing",
    "stop_tracing",
    "trace_path",
]

TRACE_VARIABLE = "AIONN_TRACE"
"""Names the file that a process traces to; a driver process inherits it."""

LAYERS = {
    "LA": "Application",
    "LR": "Runtime",
    "LU": "Utilities",
    "LI": "IPC",
    "LD": "Driver",
    "LC": "CPU",
    "LO": "Other",
}

PHASES = {
    "PO": "overall",
    "PWU": "warm-up",
    "PBM": "benchmark",
    "PI": "initialisation",
    "PP": "preparation",
    "PC": "compilation",
    "PE": "execution",
    "PT": "termination",
    "PU": "unspecified",
    "PIO": "input and output",
    "PTR": "transformation",
    "PCO": "computation",
    "PR": "results",
}

_ENCODER = msgspec.json.Encoder()


class _Recorder:
    """An open trace file."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lanes: dict[int, list[int]] = {}  # task -> lane, open sections
        self._free: list[int] = []
        self._named: set[int] = set()
        self._rest = b""  # Of a line that was cut off.

    def enter(self) -> tuple[int, int | None]:
        """``(lane, task)`` for a section that begins now; the task is None on a thread without a loop."""
        try:
            task = anyio.get_current_task().id
        except RuntimeError:  # anyio's NoEventLoopError, or a callback outside of any task
            lane = threading.get_native_id()
            self._name(lane, threading.current_thread().name)
            return lane, None
        with self._lock:
            entry = self._lanes.get(task)
            if entry is None:
                # The loop thread's tasks overlap: each has a lane from the first section to the end of the outermost one.
                lane = heapq.heappop(self._free) if self._free else 1 + len(self._lanes)
                entry = self._lanes[task] = [lane, 0]
            entry[1] += 1
        self._name(entry[0], f"tasks, lane {entry[0]}")
        return entry[0], task

    def leave(
        self, mark: str, detail: str, lane: int, task: int | None, start_ns: int, end_ns: int | None = None
    ) -> None:
        """Writes a section that ended then; None means now."""
        if end_ns is None:
            end_ns = time.monotonic_ns()
        if task is not None:
            with self._lock:
                entry = self._lanes[task]
                entry[1] -= 1
                if not entry[1]:
                    del self._lanes[task]
                    heapq.heappush(self._free, entry[0])
        self._write(
            {
                "name": f"[NN_{mark}]{detail}",
                "ph": "X",
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "pid": self._pid,
                "tid": lane,
            }
        )

    def name_process(self, name: str) -> None:
        self._write({"name": "process_name", "ph": "M", "pid": self._pid, "tid": 0, "args": {"name": name}})

    def _name(self, lane: int, name: str) -> None:
        if lane not in self._named:
            self._named.add(lane)
            event = {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": lane, "args": {"name": name}}
            self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        rest, line = self._rest, _ENCODER.encode(event) + b",\n"
        try:
            count = os.write(self._fd, rest + line)
        except OSError:
            return  # A full disk costs the trace lines, and the application nothing.
        if rest or count < len(line):
            self._rest = (rest + line)[count:] if count > len(rest) else rest[count:]

    def close(self) -> None:
        os.close(self._fd)


_recorder: _Recorder | None = None
_of_parent: str | None = None
"""In a forked child, the file of its parent."""


def _forget_in_child() -> None:
    global _of_parent
    _of_parent = trace_path() or _of_parent
    stop_tracing()


os.register_at_fork(after_in_child=_forget_in_child)


class _Section:
    __slots__ = ("_detail", "_lane", "_mark", "_recorder", "_start_ns", "_task")

    def __init__(self, recorder: _Recorder, mark: str, detail: str) -> None:
        self._recorder = recorder
        self._mark = mark
        self._detail = detail

    def __enter__(self) -> None:
        self._lane, self._task = self._recorder.enter()
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorder is _recorder:  # Otherwise tracing was stopped inside of this section.
            self._recorder.leave(self._mark, self._detail, self._lane, self._task, self._start_ns)


class _Nothing:
    """A section while tracing is off."""

    # A function of C that takes any arguments and returns nothing that is true: entering and leaving ``contextlib.nullcontext``
    # calls two functions of Python, and an execution has several sections.
    __enter__ = __exit__ = "".format


_NOTHING = cast("contextlib.AbstractContextManager[None]", _Nothing())


def section(mark: str, detail: str = "") -> contextlib.AbstractContextManager[None]:
    """A stretch of work, for ``with``; nothing while tracing is off.

    Args:
        mark: Layer and phase, such as ``LR_PE``: see ``LAYERS`` and ``PHASES``.
        detail: The action.
    """
    return _NOTHING if _recorder is None else _Section(_recorder, mark, detail)


def record(mark: str, detail: str, start_ns: int, end_ns: int) -> None:
    """Writes a section that has ended, of the calling thread; nothing while tracing is off.

    Args:
        mark: As for ``section``.
        detail: As for ``section``.
        start_ns: When it began, by CLOCK_MONOTONIC.
        end_ns: When it ended.
    """
    recorder = _recorder
    if recorder is not None:
        lane, task = recorder.enter()
        recorder.leave(mark, detail, lane, task, start_ns, end_ns)


def is_tracing() -> bool:
    """Whether sections are written."""
    return _recorder is not None


def is_of_parent(path: str | os.PathLike[str]) -> bool:
    """Whether this process was forked from one that traces to a file."""
    return _of_parent == os.path.abspath(os.fsdecode(path))


def trace_path() -> str | None:
    """The file that sections are written to; None while tracing is off."""
    return None if _recorder is None else _recorder.path


def start_tracing(path: str | os.PathLike[str], *, process: str, create: bool = True) -> None:
    """Starts tracing in this process.

    Args:
        path: The file: a new one, or an older trace's, which is emptied.
        process: The name of this process in the trace.
        create: False appends to the file of a process that has started tracing before.

    Raises:
        InvalidArgument: The file cannot be written, or this process traces already.
    """
    global _recorder
    try:
        name = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise InvalidArgument(f"trace: expected a path, got {path!r}") from None
    if _recorder is not None:
        raise InvalidArgument(f"trace: this process traces to {_recorder.path} already")
    if is_of_parent(name):
        raise InvalidArgument(f"trace: the process that this one was forked from traces to {name}")
    # A pipe without a reader is rejected and not waited for.
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT | os.O_TRUNC if create else 0)
    )
    try:
        fd = os.open(name, flags, 0o644)
        try:
            os.set_blocking(fd, True)
            if create:
                os.write(fd, b"[\n")
        except BaseException:
            os.close(fd)
            raise
    except OSError as e:
        raise InvalidArgument(f"trace {name}: cannot be written: {creation_error(name, e)}") from e
    except ValueError as e:  # NUL, or a character that no file's name has.
        raise InvalidArgument(f"trace {name!r}: expected a path: {e}") from e
    recorder = _Recorder(name, fd)
    recorder.name_process(process)
    _recorder = recorder


def stop_tracing() -> None:
    """Stops tracing in this process. Idempotent."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()
