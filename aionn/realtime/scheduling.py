"""The object that grants real-time scheduling to the threads of one process, and restores them.

The application makes one with ``Scheduling.open`` and passes a connection to each driver process, which makes its own with
``Scheduling.join``. Both grant threads by the same calls, and one watchdog monitors all of them.
"""

from __future__ import annotations

import enum
import socket

import msgspec

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.realtime.permission import Permission, Way, ask
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.realtimekit import Offer, ask_realtimekit
from aionn.realtime.threads import ThreadRow, Threads
from aionn.realtime.watchdog import Watchdog, WatchdogEnd

__all__ = ["Lent", "Mode", "Scheduling"]


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


class Scheduling:
    """The granted threads of this process and their watchdog. May be used from any thread; see ``Threads`` for the time that calls
    block."""

    def __init__(self, permission: Permission | None, end: WatchdogEnd | None, offer: Offer | None) -> None:
        """Made by ``open`` and ``join``.

        Args:
            permission: The scheduling that this process may use; None means that real time is off.
            end: The connection to the watchdog; None means that no thread may be a real-time thread.
            offer: The limits of RealtimeKit; None if the permission does not come from it.
        """
        self.permission = permission
        self._end = end
        self._offer = offer
        self._threads = None if permission is None else Threads(permission, end, offer)

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
        return cls(found, watchdog, offer)

    @classmethod
    def join(cls, lent: Lent, end: socket.socket) -> Scheduling:
        """Makes the object of a driver process.

        Args:
            lent: The message from the application.
            end: The connection that came with it; this object closes it.
        """
        return cls(lent.permission, WatchdogEnd(end), lent.offer)

    @property
    def is_realtime(self) -> bool:
        """Whether HIGH and MEDIUM threads run under SCHED_RR here."""
        return self._end is not None

    def lend(self) -> tuple[Lent, socket.socket] | None:
        """Makes the message and the connection for a driver process; None if no thread may be a real-time thread.

        The caller closes the connection after it has been sent.

        Raises:
            OSError: The watchdog has ended.
        """
        if not isinstance(self._end, Watchdog) or self.permission is None:
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

    def give_back(self, tid: int | None = None) -> None:
        """See ``Threads.give_back``."""
        if self._threads is not None:
            self._threads.give_back(tid)

    def table(self) -> list[ThreadRow]:
        """See ``Threads.table``; empty if real time is off."""
        return [] if self._threads is None else self._threads.table()

    def close(self) -> list[str]:
        """Restores every thread, then ends the watchdog or the connection to it. Blocks for a moment; may be called again.

        Returns:
            A line for each thread that could not be restored completely.
        """
        left = [] if self._threads is None else self._threads.close()
        if self._end is not None:
            self._end.close()
        return left
