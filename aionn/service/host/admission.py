"""The admission of clients to a shared socket: their number in all, of one user and of one process.

Owns the places and their clients. Refuses to own sockets and time, which the host reports.

The rule. The kernel identifies the process and the user of a connection (SO_PEERCRED); a client's own claims do not count. The
kernel gives the number of a process that has ended to another one, while children of the first may still have its connections. So a
process is known by its number and its start. A newcomer is served if its process, its user and all clients together stay within
their limits; processes of another PID namespace have no number, and are limited by their user alone. At a limit, the client that
has waited longest without sending anything loses its place, of those that the limit counts; if all have sent something, the new one
is rejected. So silent connections exclude no client, and one user cannot take all places. A client that is gone keeps its place
until its objects are freed; the error of a rejected newcomer contains whether such a place can be waited for.

Invariant: no limit is ever exceeded.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import msgspec

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.platform.numbers import POSITIVE_S_MIN, checked_seconds

__all__ = [
    "FOREIGN_PID",
    "FREED_S_MAX",
    "UNKNOWN_START",
    "Admission",
    "ClientLimits",
    "Credentials",
    "NoPlace",
    "Place",
    "Reports",
]

FREED_S_MAX = 5.0
"""A place whose client has been gone for longer is stuck, and not waited for. The objects of a client are freed in a fraction of a
second, or in some seconds where many clients leave beside others that are served."""

REPORT_S = 1.0
"""Refusals are reported at most this often: a client that connects in a loop must not fill the log."""

FOREIGN_PID = 0
"""The kernel's number for every process of a PID namespace that is not below this process's own: it identifies none. Source:
pid_namespaces(7)."""

UNKNOWN_START = 0
"""The start of a process that has ended, or that this process may not look at: such a process is known by its number alone."""

_START_FIELD = 22
"""The number of the start in ``/proc/PID/stat``. Source: proc_pid_stat(5)."""

_CREDENTIALS = struct.Struct("3i")


class Credentials(NamedTuple):
    """The peer of a connection; as the kernel recorded it when the client connected.

    Attributes:
        pid: The process; ``FOREIGN_PID`` for one of a namespace that this process does not see.
        uid: Its user.
        start: The time at which the process started, in the kernel's ticks since boot; ``UNKNOWN_START`` where that is unknown.
    """

    pid: int
    uid: int
    start: int = UNKNOWN_START

    @property
    def process(self) -> tuple[int, int]:
        """The identity of the process, which a later process with the same number does not have."""
        return self.pid, self.start

    @property
    def in_words(self) -> str | None:
        """The identity of the process in words; None if it has no number."""
        return None if self.pid == FOREIGN_PID else f"pid {self.pid}, start {self.start}"

    @classmethod
    def of(cls, sock: socket.socket) -> Credentials:
        """Those of the peer of a connected Unix socket."""
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return cls(pid, uid, _start_of(pid))

    def __str__(self) -> str:
        return f"pid {self.pid}, uid {self.uid}"


def _start_of(pid: int) -> int:
    """The time at which a process started."""
    if pid == FOREIGN_PID:
        return UNKNOWN_START
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        # The second field is the program's name in parentheses, which may contain any character.
        return int(text.rpartition(b")")[2].split()[_START_FIELD - 3])
    except (OSError, ValueError, IndexError):
        return UNKNOWN_START


class ClientLimits(msgspec.Struct, frozen=True):
    """Number of clients that a socket serves concurrently.

    Attributes:
        clients: All together. Each costs a descriptor, and an idle one some 30 KiB.
        clients_per_user: Those of one user: half of all by default, so that one user leaves room for others.
        clients_per_process: Those of one process: far more than the one that an application needs.
        hello_s: Limit of the time until a client has sent Hello.
        reserved_share: The share of the time of all device slots that the streams of one process may reserve, above 0 and at most
            1; the rest is for others.
        reserved_share_per_user: The same for the streams of all processes of one user together.
    """

    clients: int = 256
    clients_per_user: int = 128
    clients_per_process: int = 64
    hello_s: float = 5.0
    reserved_share: float = 0.75
    reserved_share_per_user: float = 0.9

    def __post_init__(self) -> None:
        for name in ("clients", "clients_per_user", "clients_per_process"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"limit {name}: expected 1 or more, got {getattr(self, name)}")
        checked_seconds(self.hello_s, "limit hello_s", least=POSITIVE_S_MIN)
        for name in ("reserved_share", "reserved_share_per_user"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidArgument(
                    f"limit {name}: expected more than 0 and at most 1, got {getattr(self, name)}"
                )


class NoPlace(ResourceExhausted):
    """A limit of the concurrent clients is reached.

    Attributes:
        is_being_freed: Whether a client that the limit counts is gone, and has been for less than ``FREED_S_MAX``: its place is
            free as soon as its objects are.
    """

    def __init__(self, message: str, *, is_being_freed: bool) -> None:
        super().__init__(message, transient=True)
        self.is_being_freed = is_being_freed


class Place:
    """The place of a client while it is served.

    Attributes:
        client: Whose it is.
        on_displaced: Called with the reason when the place is given to another client; ends the connection.
        on_gone: Called at a limit when the client has closed its end, though messages of it are unread; ends the connection.
        on_silence: Called when the connection ends since the client has not sent Hello in time.
        has_sent: Whether the client has sent anything; asked at a limit. Its Hello may be unread where many come.
    """

    def __init__(self, client: Credentials) -> None:
        self.client = client
        self.on_displaced: Callable[[str], None] = _nobody
        self.on_gone: Callable[[], None] = _unknown
        self.on_silence: Callable[[], None] = _unknown
        self.has_sent: Callable[[], bool] = _nothing

    @property
    def process(self) -> Hashable:
        """The identity of the client's process; of one that has no number each connection counts as one."""
        return self if self.client.pid == FOREIGN_PID else self.client.process


def _nobody(why: str) -> None:
    """There is no client to notify."""


def _unknown() -> None:
    """There is no connection yet, or no more."""


def _nothing() -> bool:
    """There is no connection yet, or no more."""
    return False


def _forget_connection(place: Place) -> None:
    """The functions of a place refer to the connection, which refers to the place."""
    place.on_displaced, place.on_gone, place.has_sent = _nobody, _unknown, _nothing


class Admission:
    """The places of one socket.

    Args:
        limits: See there.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._of_user: Counter[Hashable] = Counter()
        self._of_process: Counter[Hashable] = Counter()
        # In the order in which they came.
        self._silent: dict[Place, None] = {}
        self._taken: set[Place] = set()
        self._ending: dict[Place, float] = {}  # With the time since when.
        self._rejections = Reports()

    def __len__(self) -> int:
        return len(self._taken)

    def admit(self, client: Credentials, now_s: float) -> Place:
        """A place for a newcomer.

        Raises:
            NoPlace: A limit is reached; the message names it.
        """
        limits = self._limits
        if client.pid != FOREIGN_PID:
            self._make_room(
                f"{limits.clients_per_process} connections of process {client.pid}",
                "--clients-per-process",
                self._of_process[client.process],
                limits.clients_per_process,
                lambda place: place.client.process == client.process,
                now_s,
            )
        self._make_room(
            f"{limits.clients_per_user} connections of user {client.uid}",
            "--clients-per-user",
            self._of_user[client.uid],
            limits.clients_per_user,
            lambda place: place.client.uid == client.uid,
            now_s,
        )
        self._make_room(
            f"its {limits.clients} connections",
            "--clients",
            len(self._taken),
            limits.clients,
            lambda place: True,
            now_s,
        )
        place = Place(client)
        self._taken.add(place)
        self._silent[place] = None
        self._of_process[client.process] += 1
        self._of_user[client.uid] += 1
        return place

    def _make_room(
        self, which: str, option: str, count: int, limit: int, counts: Callable[[Place], bool], now_s: float
    ) -> None:
        if count < limit:
            return
        silent = next((place for place in self._silent if counts(place) and not place.has_sent()), None)
        if silent is None:
            is_being_freed = any(
                counts(place) and now_s - since_s < FREED_S_MAX for place, since_s in self._ending.items()
            )
            raise NoPlace(f"the device serves {which} already ({option})", is_being_freed=is_being_freed)
        displaced = silent.on_displaced
        self.leave(silent)
        displaced(f"the device serves {which} already ({option}), and this one had not sent Hello")

    def greeted(self, place: Place) -> None:
        """The client has sent Hello, and keeps its place until it leaves."""
        self._silent.pop(place, None)

    def ends(self, place: Place, now_s: float) -> None:
        """The client is gone, and its objects are being freed. Idempotent."""
        if place in self._taken:
            self._silent.pop(place, None)
            self._ending.setdefault(place, now_s)
            _forget_connection(place)

    def leave(self, place: Place) -> None:
        """The client is gone, and holds nothing. Idempotent."""
        _forget_connection(place)
        if place not in self._taken:
            return
        self._taken.remove(place)
        self._ending.pop(place, None)
        self._silent.pop(place, None)
        for table, key in ((self._of_process, place.client.process), (self._of_user, place.client.uid)):
            table[key] -= 1
            if not table[key]:
                del table[key]

    def report(self, now_s: float) -> int:
        """Number of rejections since the last report, with this one; 0 while it is too early for another report."""
        return self._rejections.report(now_s)


class Reports:
    """The pace of a line of the log that any client can cause: once a second, with the number of events since the last."""

    def __init__(self) -> None:
        self._count = 0
        self._reported_s: float | None = None

    def report(self, now_s: float) -> int:
        """Number of events since the last report, with this one; 0 while it is too early for another report."""
        self._count += 1
        if self._reported_s is not None and now_s - self._reported_s < REPORT_S:
            return 0
        count, self._count, self._reported_s = self._count, 0, now_s
        return count
