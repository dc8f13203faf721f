"""What an owner of threads calls: one object for a process, from its setting to the last thread given back.

The application makes one by ``Scheduling.open`` and lends a connection to each driver process, which makes its own by
``Scheduling.join``. Both grant threads by the same calls, and one watchdog looks after all of them.
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
    """What an application asks for."""

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
            InvalidArgument: There is none of that name.
        """
        try:
            return cls(text)  # type: ignore[arg-type]
        except ValueError:
            raise InvalidArgument(f"{where}: expected one of {', '.join(cls)}, got {text!r}") from None


class Lent(msgspec.Struct, frozen=True):
    """What a driver process is told beside its connection to the watchdog; a message of plain values.

    Attributes:
        permission: The application's, which its children have as well.
        offer: RealtimeKit's; None where the permission is not by it.
    """

    permission: Permission
    offer: Offer | None = None


class Scheduling:
    """The threads of this process and what looks after them. May be used from any thread; ``Threads`` says how long calls block."""

    def __init__(self, permission: Permission | None, end: WatchdogEnd | None, offer: Offer | None) -> None:
        """Made by ``open`` and ``join``.

        Args:
            permission: What this process may do; None for real time that is off.
            end: The connection to the watchdog; None where no thread may be a real-time thread.
            offer: RealtimeKit's.
        """
        self.permission = permission
        self._end = end
        self._offer = offer
        self._threads = None if permission is None else Threads(permission, end, offer)

    @classmethod
    def open(cls, mode: Mode, *, permission: Permission | None = None) -> Scheduling:
        """Asks what is permitted, and starts the watchdog. Blocks: not on the thread of an event loop.

        Args:
            mode: What the application asks for.
            permission: What is permitted, where that is known; None asks.

        Raises:
            DeviceUnavailable: Real time is required, and this machine does not permit it; with the remedy.
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
        """The driver process's side.

        Args:
            lent: What the application said.
            end: The connection that it lent; taken over.
        """
        return cls(lent.permission, WatchdogEnd(end), lent.offer)

    @property
    def is_realtime(self) -> bool:
        """Whether HIGH and MEDIUM threads run under SCHED_RR here."""
        return self._end is not None

    def lend(self) -> tuple[Lent, socket.socket] | None:
        """What a driver process needs, to be closed here when it is passed on; None where no thread may be a real-time thread.

        Raises:
            OSError: The watchdog has ended.
        """
        if not isinstance(self._end, Watchdog) or self.permission is None:
            return None
        return Lent(self.permission, self._offer), self._end.lend()

    def acquire(
        self, scheduling_class: SchedulingClass, name: str, tid: int | None = None
    ) -> ThreadRow | None:
        """See ``Threads.acquire``; None where real time is off."""
        return None if self._threads is None else self._threads.acquire(scheduling_class, name, tid)

    def change(self, tid: int, scheduling_class: SchedulingClass) -> bool:
        """See ``Threads.change``; False where real time is off."""
        return self._threads is not None and self._threads.change(tid, scheduling_class)

    def give_back(self, tid: int | None = None) -> None:
        """See ``Threads.give_back``."""
        if self._threads is not None:
            self._threads.give_back(tid)

    def table(self) -> list[ThreadRow]:
        """See ``Threads.table``; empty where real time is off."""
        return [] if self._threads is None else self._threads.table()

    def close(self) -> list[str]:
        """Gives every thread back, then ends the watchdog or the connection to it. Blocks for a moment; may be called again.

        Returns:
            A line for each thread of which something could not be set back.
        """
        left = [] if self._threads is None else self._threads.close()
        if self._end is not None:
            self._end.close()
        return left
