"""The descriptor form of a fence: what other processes, ``select``, ``epoll`` and other runtimes see.

Owns: the socket pair behind an exported fence, the record in it, the check that a received descriptor is one of ours, and
what happens to it at ``fork``. Refuses to own: the fence's state in memory, event loops, passing descriptors along.

The form. An exported fence is a connected pair of Unix SEQPACKET sockets. The *exporting end* never leaves the process that
may finish the fence; ``fileno`` gives the *importing end*, which is duplicated into other processes.
Finishing sends one packet, the record (status, time, cause), and closes the exporting end. Hence, for every holder of
a duplicate:

- readable means finished; nothing is ever sent before, so ``poll``, ``select`` and ``epoll`` need to know nothing of us;
- importers look with MSG_PEEK, so the packet stays for all other holders of duplicates, present and future;
- readable with no packet means that the kernel closed the exporting end: the exporter died, even by SIGKILL, or dropped the
  fence. The kernel does that at the moment of death, so importers notice it immediately and without a timer;
- the importing end is bound to an abstract name, ``fences/1/...``. It distinguishes a fence from any other descriptor while nothing
  may be sent yet, identifies the fence across duplicates, and shows up in ``ss -x``. It accepts no connections: it does not listen;
- sending from the importing end is shut down before it is given away, so no importer can write to the exporter.

Rejected. A plain eventfd: one bit, no failure, no time, and the death of the exporter is silent. A pipe: shows
hang-up, but its content cannot be looked at without taking it from the other readers. A pipe and a sealed memfd: two
descriptors a fence. A pidfd beside an eventfd: also two, and a living exporter that drops its fence is not seen.

Invariants:
1. Only the process that made a pair holds its exporting end: close-on-exec guards ``exec``, a fork hook closes it in
   the child.
2. A record is sent at most once, before the exporting end closes.
3. A descriptor is closed only after every event loop and thread that watches it has released it (``hold`` and
   ``release``): a number closed while an epoll still has it would be reported without end, or come back as another file.

A holder of a duplicate that is hostile can take the packet or shut the socket down; others then see a failure, never a false
signal, since only the exporting end can send. It can set SO_PEEK_OFF, which belongs to the socket: no look at it gives the packet
then, and the number of its bytes decides. And it can read into memory whose page fault waits, such as that of a file system of
its own: the kernel copies under a lock of the socket, so each reader waits as long within the kernel, whatever its flags are.
Hence a process that does not trust other holders never reads the packet, and asks for the number of its bytes
(``reads_record``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import sys
import termios
import threading
import warnings
import weakref
from collections.abc import Callable

from fences.state import (
    RECORD_BYTES_MAX,
    SIGNALLED_RECORD_BYTES,
    Failure,
    NotAFenceError,
    Outcome,
    decode,
    encode,
    process_name,
)

NAME_PREFIX = b"\0fences/1/"
"""Start of the abstract name of every importing end; the number is the version of this form."""

_SEQPACKET = socket.SOCK_SEQPACKET
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_SHORT_BYTES = 64
"""Longer than any record of a signalled fence."""

_ENDED = "ended without finishing its fence: it died or dropped it"

_lock = threading.RLock()  # Reentrant: `Port.__del__` may run in the middle of anything, here too.
_exporting: weakref.WeakSet[Port] = weakref.WeakSet()


class Port:
    """One end, or both, of the pair behind one fence. Closes idempotently; dropped open it warns.

    Attributes:
        name: The abstract name: identifies the fence in whatever process and through whatever duplicate.
        reads_record: Whether it reads the record. If not, a time is that of looking, and a failure has no text.
        closing: Closes the number of the importing end; None closes it here.
        handed_out: The number was given to the caller by ``fileno``, so only ``close`` may end it.
    """

    __slots__ = (
        "__weakref__",
        "_closing",
        "_holder_count",
        "_importing",
        "_sending",
        "_unsent",
        "closing",
        "handed_out",
        "name",
        "reads_record",
    )

    def __init__(
        self,
        importing: socket.socket,
        sending: socket.socket | None,
        name: bytes,
        reads_record: bool = True,
        closing: Callable[[int], object] | None = None,
    ) -> None:
        self._importing: socket.socket | None = importing
        self._sending = sending
        self._unsent = True
        self._holder_count = 0
        self._closing = False
        self.handed_out = False
        self.name = name
        self.reads_record = reads_record
        self.closing = closing

    @property
    def imported(self) -> bool:
        """Whether only another process can finish this fence, or it is finished: there is no exporting end here."""
        return self._sending is None

    @property
    def closed(self) -> bool:
        """Whether the descriptor is gone, or about to be when its last watcher releases it."""
        return self._closing or self._importing is None

    def fileno(self) -> int:
        """The importing end's number, owned by this port. Raises ValueError if closed."""
        if self.closed or self._importing is None:
            raise ValueError("fence: its descriptor has been closed")
        return self._importing.fileno()

    def publish(self, outcome: Outcome) -> None:
        """Send the record. The first call counts; later ones do nothing. ``retire`` does the rest.

        Never raises: an outcome that could not be sent (no memory) reads as a failure over there, which is the safe side.
        """
        try:
            del self._unsent  # The claim: of two threads one succeeds.
        except AttributeError:
            return
        sending = self._sending
        if sending is not None:
            try:
                sending.send(encode(outcome), _SEND)
            except OSError:
                pass

    def retire(self) -> None:
        """Close the exporting end of a finished fence. Apart from ``publish`` so that it keeps no importer waiting."""
        with _lock:
            sending, self._sending = self._sending, None
        if sending is not None:
            sending.close()
            _exporting.discard(self)

    def peek(self, clock: Callable[[], int], *, is_reported: bool = False) -> Outcome | None:
        """The descriptor's present record, left there for other readers; None while pending. Does not wait.

        Args:
            clock: Gives the time in ns of a failure that is only noticed here (the exporter died).
            is_reported: Whether an event loop has just reported it readable: a record is read without another question then.
        """
        importing = self._importing
        if importing is None:
            return None
        try:
            if is_reported and self.reads_record:
                # The usual wake of a waiter, which gets no call that it does not need.
                try:
                    record = importing.recv(_SHORT_BYTES, _PEEK)
                    if record and len(record) < _SHORT_BYTES:
                        return self._outcome_of(record, clock)
                except BlockingIOError:
                    pass
            number = importing.fileno()
            if number < 0:  # Another thread has just closed it.
                return Failure(self.origin(), OSError(errno.EBADF, os.strerror(errno.EBADF)), clock())
            poll = select.poll()
            poll.register(number, select.POLLIN)
            if not poll.poll(0):
                return None
            record = self._record_of(importing)
            if record:
                return self._outcome_of(record, clock)
            # Readable with nothing to read: its exporter has ended, the packet was taken, or SO_PEEK_OFF is set. Taken for
            # a pending fence, it would be readable without end.
            return self._outcome_by_size(number, clock)
        except OSError as error:  # The number was closed behind our back, or the socket was reset.
            return Failure(self.origin(), error, clock())

    def _record_of(self, importing: socket.socket) -> bytes:
        """The packet; empty if none is there, or it may not be read."""
        if not self.reads_record:
            return b""
        try:
            record = importing.recv(_SHORT_BYTES, _PEEK)
            if len(record) == _SHORT_BYTES:  # There may be more of it.
                record = importing.recv(RECORD_BYTES_MAX + 1, _PEEK)
            return record
        except BlockingIOError:
            return b""

    def _outcome_of(self, record: bytes, clock: Callable[[], int]) -> Outcome:
        try:
            outcome = decode(record)
        except NotAFenceError as error:
            return Failure(self.origin(), error, clock())
        if outcome is None:
            # It can never be taken back, so a reader that took it for pending would be woken without end.
            return Failure(self.origin(), "sent a record with the status pending", clock())
        return outcome

    def _outcome_by_size(self, number: int, clock: Callable[[], int]) -> Outcome:
        # This ioctl takes the lock of the queue alone, under which nothing is copied. It counts the bytes of all packets.
        waiting = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
        size_bytes = int.from_bytes(waiting, sys.byteorder)
        if size_bytes == SIGNALLED_RECORD_BYTES:
            return clock()
        return Failure(self.origin(), "failed, and its record is not read" if size_bytes else _ENDED, clock())

    def origin(self) -> str:
        """Names the process that made the pair, which the kernel remembers, for failures that carry no name."""
        importing = self._importing
        try:
            if importing is None:
                return "a closed fence"
            credentials = importing.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return "the exporter of a fence"
        return f"process {int.from_bytes(credentials[:4], sys.byteorder, signed=True)}"

    def duplicate(self) -> int:
        """A new close-on-exec descriptor of the importing end, owned by the caller."""
        return os.dup(self.fileno())

    def hold(self) -> int:
        """Keep the descriptor open until ``release``, even if ``close`` is called before; returns its number, -1 if closed."""
        with _lock:
            if self.closed:
                return -1
            number = self.fileno()
            self._holder_count += 1
            return number

    def release(self) -> None:
        """Undo one ``hold``; ends the descriptor if it was closed before."""
        with _lock:
            self._holder_count -= 1
            assert self._holder_count >= 0
            if self._closing and self._holder_count == 0:
                self._end()

    def close(self) -> None:
        """Close both ends; the importing one as soon as it has no watcher. Idempotent."""
        with _lock:
            _exporting.discard(self)
            sending, self._sending = self._sending, None
            self._closing = True
            if self._holder_count == 0:
                self._end()
        if sending is not None:
            sending.close()

    def become_foreign(self) -> None:
        """In the child after ``fork``: the exporting end belongs to the parent alone."""
        sending, self._sending = self._sending, None
        self._holder_count = 0  # Loops and threads that watched belong to the parent.
        if sending is not None:
            sending.close()

    def _end(self) -> None:
        importing, self._importing = self._importing, None
        if importing is not None:
            try:
                if self.closing is None:
                    importing.close()
                else:
                    self.closing(importing.detach())
            except OSError:  # Closed behind our back.
                pass

    def __del__(self) -> None:
        # `_importing` is missing when __init__ did not get so far.
        if getattr(self, "_importing", None) is None:
            return
        if self._sending is not None:
            message = "dropped while pending, without being signalled, failed or closed"
            self.publish(Failure(process_name(), message, 0))
            self.retire()
        dropped, self._holder_count = not self._closing, 0
        self.close()
        if dropped:  # Last: the warning may be set to raise.
            warnings.warn(
                "a fence was dropped with its descriptor open; close it", ResourceWarning, stacklevel=2
            )


def create_port() -> Port:
    """A new pair, for a pending fence of this process.

    Raises:
        OSError: EMFILE or ENFILE at the limit of descriptors, ENOMEM; nothing is left open then.
    """
    importing, sending = socket.socketpair(socket.AF_UNIX, _SEQPACKET)  # Both are close-on-exec.
    try:
        importing.setblocking(False)
        sending.setblocking(False)
        name = NAME_PREFIX + b"%d/%s" % (os.getpid(), os.urandom(12).hex().encode())
        importing.bind(name)
        importing.shutdown(socket.SHUT_WR)
        with _lock:
            port = Port(importing, sending, name)
            _exporting.add(port)
    except BaseException:
        importing.close()
        sending.close()
        raise
    return port


def import_port(
    fd: int, *, reads_record: bool = True, closing: Callable[[int], object] | None = None
) -> Port:
    """A port over a duplicate of a descriptor received from elsewhere; ``fd`` stays the caller's.

    Args:
        fd: The importing end of a fence.
        reads_record: Whether the record is read; False where other holders of duplicates are not trusted.
        closing: Called once instead of os.close with the duplicate, by whatever closes the port.

    Raises:
        TypeError: ``fd`` is not an int.
        NotAFenceError: it is not a descriptor of a fence: an impossible number, a file, a directory, an eventfd, another socket.
        OSError: EBADF, it is closed; EMFILE, no descriptor is free. Nothing is left open.
    """
    if not isinstance(fd, int) or isinstance(fd, bool):
        raise TypeError(f"fence descriptor: expected an int, got {type(fd).__name__}")
    if not 0 <= fd < 1 << 31:  # The kernel's numbers are of C's int.
        raise NotAFenceError(f"fence descriptor: expected a number from 0 to {(1 << 31) - 1}, got {fd}")
    mode = os.fstat(fd).st_mode
    if not stat.S_ISSOCK(mode):
        raise NotAFenceError(f"descriptor {fd}: expected the socket of a fence, got a {_kind_of(mode)}")
    number = os.dup(fd)
    try:
        # With the family and type given, the constructor does not ask the kernel for them; the checks below do. SOCK_NONBLOCK makes
        # the object non-blocking without a system call: O_NONBLOCK belongs to the open file, which all holders share.
        importing = socket.socket(socket.AF_UNIX, _SEQPACKET | socket.SOCK_NONBLOCK, 0, number)
    except BaseException:
        os.close(number)
        raise
    try:
        kind = importing.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        family = importing.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        name = importing.getsockname() if family == socket.AF_UNIX else b""
        if kind != _SEQPACKET or not isinstance(name, bytes) or not name.startswith(NAME_PREFIX):
            raise NotAFenceError(
                f"descriptor {fd}: expected the socket of a fence, got another socket ({name!r})"
            )
        return Port(importing, None, name, reads_record, closing)
    except BaseException:
        importing.close()
        raise


def _kind_of(mode: int) -> str:
    for test, word in (
        (stat.S_ISREG, "regular file"),
        (stat.S_ISDIR, "directory"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISCHR, "character device"),
        (stat.S_ISBLK, "block device"),
    ):
        if test(mode):
            return word
    return "nameless kernel object such as an eventfd"


def _after_fork_in_child() -> None:
    _lock.release()
    for port in list(_exporting):
        port.become_foreign()
    _exporting.clear()


# The lock is held over the fork so that the child finds the set whole, whatever thread was changing it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)
