"""The watchdog's process: measures the time that real-time threads run without a pause, and puts back those that run too long.

An interpreter without packages runs this file: it imports only the standard library. The rules are pure (``Pauses``, ``Rests``);
the rest reads and changes the state of threads.

Source: /proc/PID/task/TID/schedstat (time on a processor in nanoseconds) and status (voluntary_ctxt_switches), proc(5).
"""

from __future__ import annotations

import enum
import gc
import json
import os
import resource
import select
import socket
import sys
import time

__all__ = ["BUDGET_NS", "PERIOD_MS", "REST_NS", "Pauses", "Rests"]

BUDGET_NS = 100_000_000
"""Time that a real-time thread may run without a pause. After at most two more periods, within 150 ms, it is put back: before the
200 ms after which a process with RealtimeKit is killed, and long before the kernel throttles all real-time threads at 950 ms of a
second."""

PERIOD_MS = 25
"""Period of the checks while threads are monitored: forty checks a second, some ten microseconds for each thread."""

BUSY_NS = PERIOD_MS * 1_000_000 // 4
"""Time that a thread must have run since the last check for its pauses to be read: that read takes ten times as long as the
first."""

REST_NS = 5_000_000_000
"""Time after which a thread that was put back may be a real-time thread again, if it paused often enough in all of it. A thread
that is put back each time takes 150 ms of a processor from other programs in five seconds: 3 %."""

RESTS_MAX = 3
"""Most rests within ``REST_WINDOW_NS``. A thread that is put back once more stays ordinary: its work does not suit real time."""

REST_WINDOW_NS = 600_000_000_000
"""Ten minutes: a callback that is long once an hour does not take real time from an application for good."""

WATCHED_MAX = 4096
"""Most monitored threads; further ones are rejected, and so do not become real-time threads."""

OWNERS_MAX = 256
"""Most connections: one for each process that has real-time threads."""

DESCRIPTORS = 2 * WATCHED_MAX + OWNERS_MAX + 16
"""Descriptors needed: two for each thread, one for each connection, and some for Python."""

MESSAGE_BYTES_MAX = 1536
"""Longest message; the rest of a longer one is cut off, and it is ignored. The longest is that which names a thread."""

NAME_LENGTH_MAX = 100
"""Characters kept of a thread's name: one takes twelve bytes of a message at most, as two escaped surrogates."""

MESSAGES_MAX = 256
"""Most messages of one owner that are read before the next check."""


class Pauses:
    """The time of a thread's last pause, in its own processor time."""

    def __init__(self) -> None:
        """Starts without a count; the first check begins one."""
        self._switches = -1
        self._ran_ns = 0
        self._seen_ns = 0

    def is_busy(self, ran_ns: int) -> bool:
        """Whether the thread ran for a large part of the time since the last call, so that its pauses must be counted.

        Args:
            ran_ns: The processor time of the thread in total.
        """
        grown_ns, self._seen_ns = ran_ns - self._seen_ns, ran_ns
        return grown_ns >= BUSY_NS

    def begin_again(self) -> None:
        """Starts the count again: the time so far is ignored."""
        self._switches = -1

    def ran_too_long(self, ran_ns: int, switches: int) -> int:
        """The time that the thread ran without a pause, in nanoseconds, if it exceeds the budget; otherwise 0.

        Args:
            ran_ns: The processor time of the thread in total.
            switches: The number of its pauses in total.
        """
        if switches != self._switches:
            self._switches, self._ran_ns = switches, ran_ns
            return 0
        ran_ns -= self._ran_ns
        return ran_ns if ran_ns >= BUDGET_NS else 0


class Standing(enum.Enum):
    """The standing of a monitored thread: it may be a real-time thread, rests after it was put back, or stays ordinary."""

    REALTIME = "real time"
    RESTING = "resting"
    ORDINARY = "ordinary"


class _Event(enum.Enum):
    PUT_BACK = "put back"
    PUT_BACK_TOO_OFTEN = "put back too often"
    RESTED = "rested"


_STANDINGS = {
    (Standing.REALTIME, _Event.PUT_BACK): Standing.RESTING,
    (Standing.REALTIME, _Event.PUT_BACK_TOO_OFTEN): Standing.ORDINARY,
    # Another process has made it a real-time thread in the meantime.
    (Standing.RESTING, _Event.PUT_BACK): Standing.RESTING,
    (Standing.RESTING, _Event.PUT_BACK_TOO_OFTEN): Standing.ORDINARY,
    (Standing.RESTING, _Event.RESTED): Standing.REALTIME,
    (Standing.ORDINARY, _Event.PUT_BACK): Standing.ORDINARY,
    (Standing.ORDINARY, _Event.PUT_BACK_TOO_OFTEN): Standing.ORDINARY,
}


class Rests:
    """The rule when a thread that was put back may be a real-time thread again.

    Attributes:
        standing: The standing of the thread.
    """

    def __init__(self, rests_max: int = RESTS_MAX) -> None:
        """Starts with a real-time thread.

        Args:
            rests_max: Most rests within ``REST_WINDOW_NS``; with 0 the first time is for good.
        """
        self.standing = Standing.REALTIME
        self._rests_max = rests_max
        self._put_back_ns: list[int] = []
        self._since_ns = 0

    def put_back(self, now_ns: int) -> bool:
        """The thread was put back. Returns whether it may be a real-time thread again after a rest."""
        recent = [then_ns for then_ns in self._put_back_ns if now_ns - then_ns < REST_WINDOW_NS]
        self._put_back_ns = [*recent, now_ns][-self._rests_max - 1 :]
        self._since_ns = now_ns
        too_often = len(self._put_back_ns) > self._rests_max
        self._step(_Event.PUT_BACK_TOO_OFTEN if too_often else _Event.PUT_BACK)
        return self.standing is Standing.RESTING

    def ran_too_long(self, now_ns: int) -> None:
        """The thread ran for too long without a pause as an ordinary thread: its rest begins again."""
        self._since_ns = now_ns

    def is_over(self, now_ns: int) -> bool:
        """Whether the thread has rested for long enough; ``end`` must follow."""
        return self.standing is Standing.RESTING and now_ns - self._since_ns >= REST_NS

    def end(self) -> None:
        """The thread may be a real-time thread again, and its owner knows it."""
        self._step(_Event.RESTED)

    def _step(self, event: _Event) -> None:
        self.standing = _STANDINGS[self.standing, event]


class _Thread:
    """A monitored thread. Its files stay open, so that another thread that gets its number later is not mistaken for it."""

    def __init__(self, pid: int, tid: int, name: str, owner: socket.socket, rests_max: int) -> None:
        self.pid, self.tid, self.name, self.owner = pid, tid, name, owner
        self.pauses, self.rests = Pauses(), Rests(rests_max)
        self._times = os.open(f"/proc/{pid}/task/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._status = os.open(f"/proc/{pid}/task/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._times)
            raise

    def close(self) -> None:
        os.close(self._times)
        os.close(self._status)

    def ran_too_long(self, now_ns: int) -> int:
        ran_ns = int(os.pread(self._times, 128, 0).split()[0])
        is_resting = self.rests.standing is Standing.RESTING
        # A resting thread may get a small part of a processor: its pauses are counted in any case.
        if not self.pauses.is_busy(ran_ns) and not is_resting:
            return 0
        if os.sched_getscheduler(self.tid) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_RR, os.SCHED_FIFO):
            return self.pauses.ran_too_long(ran_ns, self._switches())
        if not is_resting:
            # The thread has the class LOW at the moment: the kernel shares the processor between ordinary threads.
            self.pauses.begin_again()
        elif self.pauses.ran_too_long(ran_ns, self._switches()):
            self.rests.ran_too_long(now_ns)
        return 0

    def put_back(self) -> None:
        os.sched_setscheduler(self.tid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))

    def _switches(self) -> int:
        text = os.pread(self._status, 8192, 0)
        _, _, rest = text.partition(b"\nvoluntary_ctxt_switches:")
        return int(rest.split(None, 1)[0])


class Watch:
    """All monitored threads, and the connections on which they were registered.

    A message without a meaning is ignored, whatever it holds: the threads of the other connections are monitored further. Only the
    process that started the watchdog can have it use a connection; other descriptors that come are closed.
    """

    def __init__(self, first: socket.socket, rests_max: int = RESTS_MAX) -> None:
        """Monitors no thread yet.

        Args:
            first: Connection of the process that started this one; the watchdog ends with it.
            rests_max: See ``Rests``.
        """
        self._rests_max = rests_max
        self._poll = select.poll()
        self._first = first
        self._owners: dict[int, socket.socket] = {}
        self._threads: dict[tuple[int, int], _Thread] = {}
        self._add_owner(first)

    def run(self) -> None:
        """Checks the threads until the first connection ends; then makes every thread ordinary."""
        while self._first.fileno() in self._owners:
            for fd, _ in self._poll.poll(PERIOD_MS if self._threads else None):
                if fd in self._owners:
                    self._read(self._owners[fd])
            self.look(time.monotonic_ns())
        for fd in list(self._owners):
            self._drop_owner(self._owners[fd])

    def look(self, now_ns: int) -> None:
        """Checks each thread once."""
        for key, thread in list(self._threads.items()):
            try:
                ran_ns = thread.ran_too_long(now_ns)
            except (OSError, ValueError, IndexError):
                self._forget(key)  # It has ended.
                continue
            if ran_ns:
                self._put_back(thread, ran_ns, now_ns)
            elif thread.rests.is_over(now_ns):
                self._end_rest(thread)

    def _end_rest(self, thread: _Thread) -> None:
        try:
            thread.owner.send(json.dumps({"rested": [thread.pid, thread.tid]}).encode())
        except OSError:
            return  # The owner does not read: the next look tries again.
        thread.pauses.begin_again()
        thread.rests.end()

    def _put_back(self, thread: _Thread, ran_ns: int, now_ns: int) -> None:
        # The thread stays monitored: its owner may make it a real-time thread again.
        thread.pauses.begin_again()
        rests = thread.rests.put_back(now_ns)
        message = json.dumps({"put_back": [thread.pid, thread.tid, ran_ns, int(rests)]}).encode()
        try:
            # The owner is notified before the change, so that it has the reason when it finds an ordinary thread.
            thread.owner.send(message)
        except OSError:
            pass  # The owner does not read; it can read the state of its threads from the kernel.
        what = f"aionn: the real-time thread {thread.name!r} ({thread.tid} of process {thread.pid}) ran {ran_ns // 1_000_000} ms"
        try:
            thread.put_back()
        except OSError as e:
            _write(f"{what} without a pause and cannot be put back: {e.strerror}")
            return
        until = f"until it has not done so for {REST_NS // 1_000_000_000} s" if rests else "for good"
        _write(f"{what} without a pause: it was put back to the ordinary class, {until}")

    def _read(self, owner: socket.socket) -> None:
        for _ in range(MESSAGES_MAX):
            try:
                data, descriptors, _, _ = socket.recv_fds(owner, MESSAGE_BYTES_MAX, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                _close_all(descriptors)
                self._drop_owner(owner)
                return
            try:
                message = json.loads(data)
            except (ValueError, RecursionError):
                message = None
            match message:
                case {"watch": [int(pid), int(tid), str(name)]}:
                    self._watch(pid, tid, name, owner)
                case {"forget": [int(pid), int(tid)]}:
                    known = self._threads.get((pid, tid))
                    if known is not None and known.owner is owner:
                        self._forget((pid, tid))
                case {"lend": []} if owner is self._first and descriptors and len(self._owners) < OWNERS_MAX:
                    self._lend(descriptors.pop())
            _close_all(descriptors)

    def _watch(self, pid: int, tid: int, name: str, owner: socket.socket) -> None:
        """Monitors a thread if it can, and sends the owner the answer."""
        known = self._threads.get((pid, tid))
        done = False
        if known is None or known.owner is owner:
            self._forget((pid, tid))
            if len(self._threads) < WATCHED_MAX:
                try:
                    self._threads[pid, tid] = _Thread(pid, tid, name, owner, self._rests_max)
                    done = True
                except OSError:
                    pass  # It has ended, or there are no descriptors left.
        try:
            owner.send(json.dumps({"watched": [pid, tid, int(done)]}).encode())
        except OSError:
            pass  # The owner takes a missing answer for a rejection.

    def _forget(self, key: tuple[int, int]) -> None:
        thread = self._threads.pop(key, None)
        if thread is not None:
            thread.close()

    def _lend(self, fd: int) -> None:
        try:
            owner = socket.socket(fileno=fd)
        except OSError:
            _close_all([fd])  # It is not a socket.
            return
        self._add_owner(owner)

    def _add_owner(self, owner: socket.socket) -> None:
        # The socket's mode is set, since recv_fds of Python 3.11 ignores MSG_DONTWAIT.
        owner.setblocking(False)
        self._owners[owner.fileno()] = owner
        self._poll.register(owner, select.POLLIN)

    def _drop_owner(self, owner: socket.socket) -> None:
        """Makes the threads of a connection ordinary after its process has closed it or ended."""
        for key, thread in list(self._threads.items()):
            if thread.owner is owner:
                try:
                    thread.put_back()
                except OSError:
                    pass
                self._forget(key)
        self._poll.unregister(owner)
        del self._owners[owner.fileno()]
        if owner is not self._first:
            owner.close()


def _close_all(descriptors: list[int]) -> None:
    # As numbers: those of a driver's process need not be sockets.
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            pass


def _write(line: str) -> None:
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        pass


def main() -> None:
    """Runs the watchdog: ``watching.py DESCRIPTOR PRIORITY``; with priority 0 the process that started this one sets the
    priority."""
    first = socket.socket(fileno=int(sys.argv[1]))
    priority = int(sys.argv[2])
    gc.disable()  # This process makes no reference cycles.
    try:
        # Each monitored thread needs two descriptors.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(most, DESCRIPTORS) if most >= 0 else DESCRIPTORS, most)
        )
    except (OSError, ValueError):
        pass  # A sandbox refuses it: threads for which no descriptor is left are rejected.
    try:
        if priority:
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except OSError as e:
        first.send(json.dumps({"failed": f"sched_setscheduler: {e.strerror}"}).encode())
        return
    first.send(b'{"looks": []}')
    # RealtimeKit lets the kernel kill a process whose thread runs 200 ms, and answers a few questions a minute: no second try.
    Watch(first, RESTS_MAX if priority else 0).run()


if __name__ == "__main__":
    main()
