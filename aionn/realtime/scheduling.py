"""The object that grants real-time scheduling to the threads of one process, and restores them.

The application makes one with ``Scheduling.open`` and passes a connection to each driver process, which makes its own with
``Scheduling.join``. Both grant threads by the same calls, and one watchdog monitors all of them.

A process has one of them at most that its threads use (``current``): the state of a thread in the kernel has no owner, so that two
objects would take each other's priorities for the thread's own. ``open_shared`` opens it for the first user and ``close_shared``
closes it for the last; a process that joins another one's makes it the current one with ``adopt``.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.realtime.permission import Permission, Way, ask
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.realtimekit import Offer, ask_realtimekit
from aionn.realtime.threads import ThreadRow, Threads
from aionn.realtime.watchdog import Watchdog, WatchdogEnd

__all__ = ["Lent", "Mode", "Scheduling", "adopt", "close_shared", "current", "open_shared"]


_T = TypeVar("_T")


class Mode(enum.StrEnum):
    """The setting of an application: real time is required, used if the machine permits it, or off."""

    REQUIRED = "required"
    IF_PERMITTED = "if_permitted"
    OFF = "off"

    @classmethod
    def parse(cls, text: object, where: str) -> Mode:
        """A mode by its name.

        Args:
            text: The name.
            where: Begins the message of an error.

        Raises:
            InvalidArgument: No mode has that name.
        """
        try:
            return cls(text)  # type: ignore[arg-type]
        except ValueError:
            raise InvalidArgument(f"{where}: expected one of {', '.join(cls)}, got {text!r}") from None


class Lent(msgspec.Struct, frozen=True):
    """The message that a driver process gets together with its connection to the watchdog; it holds plain values.

    Attributes:
        permission: The permission of the application, which its children have as well.
        offer: The limits of RealtimeKit; None if the permission does not come from it.
    """

    permission: Permission
    offer: Offer | None = None


WATCHDOG_ENDED = (
    "the watchdog over real-time threads has ended or does not answer, so no thread runs under SCHED_RR"
)

_logger = logging.getLogger("aionn.manager")


class Scheduling:
    """The granted threads of this process and their watchdog. May be used from any thread; see ``Threads`` for the time that calls
    block.

    A thread of its own reads the watchdog's reports, gives real time again to threads that have rested, and waits for the end of
    the watchdog's process, after which every real-time thread of this process becomes ordinary, for good: nothing would put back
    one that does not yield. Processes with a connection of their own do the same.
    """

    def __init__(
        self, permission: Permission | None, end: WatchdogEnd | None, offer: Offer | None, problem: str = ""
    ) -> None:
        """Made by ``open`` and ``join``.

        Args:
            permission: The scheduling that this process may use; None means that real time is off.
            end: The connection to the watchdog; None means that no thread may be a real-time thread.
            offer: The limits of RealtimeKit; None if the permission does not come from it.
            problem: The reason why there is no watchdog although the permission allows real-time threads; empty without one.
        """
        self.permission = permission
        self._end = end
        self._offer = offer
        self._problem = problem
        self._threads = None if permission is None else Threads(permission, end, offer)
        self._lock = threading.Lock()
        self._is_closing = False
        self._waiting: threading.Thread | None = None
        if end is not None and self._threads is not None:
            self._waiting = threading.Thread(
                target=self._wait_for_reports,
                args=(end, self._threads),
                name="aionn watchdog's end",
                daemon=True,
            )
            self._waiting.start()

    @classmethod
    def open(cls, mode: Mode, *, permission: Permission | None = None) -> Scheduling:
        """Finds out what is permitted, and starts the watchdog. Blocks: do not call it on the thread of an event loop.

        Args:
            mode: The setting of the application.
            permission: The scheduling that this process may use; None finds it out.

        Raises:
            DeviceUnavailable: Real time is required, and this machine does not permit it; the message has the remedy.
        """
        if mode is Mode.OFF:
            return cls(None, None, None)
        found = ask() if permission is None else permission
        offer = None
        if found.way is Way.REALTIMEKIT:
            answer = ask_realtimekit()
            offer = answer if isinstance(answer, Offer) else None
        problem = "" if found.is_realtime else str(found)
        watchdog = None
        if found.is_realtime:
            try:
                watchdog = Watchdog(found, offer)
            except OSError as e:
                problem = f"the watchdog over real-time threads cannot be started: {e}"
        if problem and mode is Mode.REQUIRED:
            raise DeviceUnavailable(f"real time is required: {problem}")
        return cls(found, watchdog, offer, problem if found.is_realtime else "")

    @classmethod
    def join(cls, lent: Lent, end: socket.socket | None) -> Scheduling:
        """Makes the object of a driver process.

        Args:
            lent: The message from the application.
            end: The connection that came with it, which this object closes; None means that no thread may be a real-time thread.
        """
        return cls(lent.permission, None if end is None else WatchdogEnd(end), lent.offer)

    @property
    def lent(self) -> Lent | None:
        """The message for a driver process that gets no connection; None if real time is off."""
        return None if self.permission is None else Lent(self.permission, self._offer)

    @property
    def is_realtime(self) -> bool:
        """Whether HIGH and MEDIUM threads run under SCHED_RR here: not after the watchdog has ended."""
        self._look()
        return self._end is not None and not self._problem

    @property
    def sentence(self) -> str:
        """The permission, or why no thread may be a real-time thread, and the remedy; empty if real time is off."""
        self._look()
        return self._problem or ("" if self.permission is None else str(self.permission))

    def lend(self) -> tuple[Lent, socket.socket] | None:
        """Makes the message and the connection for a driver process; None if no thread may be a real-time thread.

        The caller closes the connection after it has been sent.

        Raises:
            OSError: The watchdog has ended.
        """
        if not isinstance(self._end, Watchdog) or self.permission is None or self._problem:
            return None
        return Lent(self.permission, self._offer), self._end.lend()

    def acquire(
        self, scheduling_class: SchedulingClass, name: str, tid: int | None = None
    ) -> ThreadRow | None:
        """See ``Threads.acquire``; None if real time is off."""
        return None if self._threads is None else self._threads.acquire(scheduling_class, name, tid)

    def change(self, tid: int, scheduling_class: SchedulingClass) -> bool:
        """See ``Threads.change``; False if real time is off."""
        return self._threads is not None and self._threads.change(tid, scheduling_class)

    def call_as_low(self, call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
        """See ``Threads.call_as_low``; just calls if real time is off."""
        return call(*arguments) if self._threads is None else self._threads.call_as_low(call, arguments)

    def class_of(self, tid: int) -> SchedulingClass | None:
        """See ``Threads.class_of``; None if real time is off."""
        return None if self._threads is None else self._threads.class_of(tid)

    def put_back_all(self, reason: str) -> None:
        """See ``Threads.put_back_all``."""
        if self._threads is not None:
            self._threads.put_back_all(reason)

    def give_back(self, tid: int | None = None) -> None:
        """See ``Threads.give_back``."""
        if self._threads is not None:
            self._threads.give_back(tid)

    def table(self) -> list[ThreadRow]:
        """See ``Threads.table``; empty if real time is off."""
        self._look()
        return [] if self._threads is None else self._threads.table()

    def close(self) -> list[str]:
        """Restores every thread, then ends the watchdog or the connection to it. Blocks for a moment; may be called again.

        Returns:
            A line for each thread that could not be restored completely.
        """
        with self._lock:
            self._is_closing = True
        left = [] if self._threads is None else self._threads.close()
        if self._end is not None:
            if self._waiting is not None:
                self._end.hang_up()
                self._waiting.join()
                self._waiting = None
            self._end.close()
        return left

    def _look(self) -> None:
        """Notices the end of the watchdog before the thread that waits for it."""
        if self._end is None or self._is_closing:
            return
        if not self._end.is_alive():
            self._watchdog_ended()
        elif self._threads is not None:
            self._threads.note_reports()  # The thread that waits is not woken for a message that was read here.

    def _wait_for_reports(self, end: WatchdogEnd, threads: Threads) -> None:
        while end.wait_for_message() and not self._problem:
            threads.note_reports()
        self._watchdog_ended()

    def _watchdog_ended(self) -> None:
        with self._lock:
            if self._is_closing or self._problem or self._threads is None:
                return
            self._problem = WATCHDOG_ENDED
            names = self._threads.lose_guard(WATCHDOG_ENDED)
        _logger.warning("%s; process %d had: %s", WATCHDOG_ENDED, os.getpid(), ", ".join(names) or "none")

    def forget(self) -> None:
        """Closes the connection alone, in a forked child: threads and watchdog belong to the parent, whose end the watchdog notices
        only when no other process has the connection."""
        self._is_closing = True  # So that this copy never touches the parent's threads.
        # Another thread of the parent may have held them at that moment, and is not there to release them.
        self._lock = threading.Lock()
        if self._threads is not None:
            self._threads.renew_lock()
        if self._end is not None:
            self._end.renew_lock()
            WatchdogEnd.close(self._end)


_current: Scheduling | None = None
_users = 0
_lock = threading.Lock()


def current() -> Scheduling | None:
    """The object that the threads of this process use; None if real time is off."""
    return _current


def open_shared(mode: Mode) -> Scheduling:
    """Opens the object of this process for one more user, who calls ``close_shared`` once. Blocks as ``Scheduling.open`` does.

    Args:
        mode: ``REQUIRED`` or ``IF_PERMITTED``; with ``OFF`` there is nothing to open.

    Raises:
        DeviceUnavailable: Real time is required, and this machine does not permit it, or did not when the first user opened it.
    """
    global _current, _users
    with _lock:
        if _current is None:
            _current = Scheduling.open(mode)
        elif mode is Mode.REQUIRED and not _current.is_realtime:
            raise DeviceUnavailable(f"real time is required: {_current.sentence}")
        _users += 1
        return _current


def close_shared() -> list[str]:
    """Closes the object if this was its last user. Blocks as ``Scheduling.close`` does.

    Returns:
        A line for each thread that could not be restored completely.
    """
    global _current, _users
    with _lock:
        _users -= 1
        if _users or _current is None:
            return []
        closed, _current = _current, None
        return closed.close()


def adopt(scheduling: Scheduling) -> None:
    """Makes an object that joined another process's the current one of this process, with one user. The previous one is closed."""
    global _current, _users
    with _lock:
        before, _current, _users = _current, scheduling, 1
    if before is not None:
        before.close()


def _forget_in_child() -> None:
    global _current, _users, _lock
    before, _current, _users, _lock = _current, None, 0, threading.Lock()
    if before is not None:
        before.forget()


os.register_at_fork(after_in_child=_forget_in_child)
