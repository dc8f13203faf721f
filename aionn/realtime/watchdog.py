"""The watchdog: puts real-time threads that do not yield back to the ordinary class.

It is a process of its own, with a higher priority than all threads that it monitors: a thread of the monitored process would need
the interpreter's lock, which an engine or a library in C may hold for as long as it spins. It reads the kernel's counters:
processor time since a thread last paused. The monitored processes need not do anything, and only the kernel's clock is used.

Owns the application's side: start, messages, end; and RLIMIT_RTTIME, which acts if the watchdog has died. The module ``watching``
is the process.

Source: getrlimit(2) and sched(7) for RLIMIT_RTTIME.

When this side ends, in whatever way, the watchdog makes every thread that it still monitors ordinary, and ends.
"""

from __future__ import annotations

import json
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from aionn.realtime.permission import Permission, Way
from aionn.realtime.realtimekit import Offer, make_realtime
from aionn.realtime.watching import MESSAGE_BYTES_MAX, NAME_LENGTH_MAX

__all__ = ["RunLimit", "Watchdog", "WatchdogEnd"]

START_S = 10.0
"""Longest wait for the process to start: an interpreter without packages needs 20 ms, on a busy machine a second."""

END_S = 2.0
"""Longest wait for the process to end after its connection was closed, before it is killed."""

ANSWER_S = 1.0
"""Longest wait for the answer to ``watch``: the process has a higher priority than its callers, and answers in 100 microseconds."""

REPORTS_MAX = 256
"""Most reports of threads that were put back which are kept until ``take_put_back``; the oldest are discarded first."""

LIMIT_US = 500_000
"""Limit in microseconds: later than the watchdog, which needs 150 ms, and before the kernel throttles all real-time threads at 950
ms of a second."""


class WatchdogEnd:
    """A connection to a watchdog, of the process that started it or of another that was lent one."""

    def __init__(self, end: socket.socket) -> None:
        """Takes the ownership of a connected socket."""
        self._socket = end
        self._socket.setblocking(False)
        self._put_back: list[tuple[int, int, int, int]] = []
        self._rested: list[tuple[int, int]] = []
        self._answer: list[int] | None = None
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable when a thread was put back, or the watchdog has ended; -1 if closed."""
        return self._socket.fileno()

    def watch(self, pid: int, tid: int, name: str) -> bool:
        """Monitors a thread from now on; False if the watchdog has ended, monitors too many threads, or does not answer.

        A watchdog that does not answer (it is stopped) would not put a thread back either: the connection is hung up.

        Args:
            pid: The thread's process.
            tid: The thread; False if another connection registered it.
            name: Its name in the message on standard error.
        """
        with self._lock:
            if not self._receive() or not self._send({"watch": [pid, tid, name[:NAME_LENGTH_MAX]]}):
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            until_s = time.monotonic() + ANSWER_S
            self._answer = None
            while self._answer is None or self._answer[:2] != [pid, tid]:
                if not poll.poll(1e3 * max(0.0, until_s - time.monotonic())):
                    self.hang_up()
                    return False
                if not self._receive():
                    return False
            return self._answer[2] == 1

    def forget(self, pid: int, tid: int) -> None:
        """Stops monitoring a thread."""
        self._send({"forget": [pid, tid]})

    def take_put_back(self) -> list[tuple[int, int, int, int]]:
        """The threads put back since the last call: process, thread, the nanoseconds that it ran without a pause, and whether it
        rests (1) or stays ordinary (0)."""
        with self._lock:
            self._receive()
            found, self._put_back = self._put_back, []
            return found

    def take_rested(self) -> list[tuple[int, int]]:
        """The threads that have rested since the last call and may be real-time threads again: process and thread. Call it after
        ``take_put_back``."""
        with self._lock:
            found, self._rested = self._rested, []
            return found

    def is_alive(self) -> bool:
        """Whether the watchdog still runs. Does not wait."""
        with self._lock:
            return self._receive()

    def wait_for_message(self) -> bool:
        """Blocks until a message has come, the watchdog has ended, or ``hang_up`` was called in any thread.

        Returns:
            False after the end; True if there may be a message, which the caller reads by ``take_put_back``.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not any(
            event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()
        )

    def renew_lock(self) -> None:
        """See ``Threads.renew_lock``."""
        self._lock = threading.Lock()

    def hang_up(self) -> None:
        """Ends the connection for every process that has a copy of it: the watchdog makes all threads ordinary that were
        registered on it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The watchdog has ended, or the connection is closed.

    def close(self) -> None:
        """Closes this process's descriptor of the connection: the last one that is closed ends it, as ``hang_up`` does."""
        self._socket.close()

    def _send(self, message: dict[str, list[int | str]]) -> bool:
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:
            return False
        return True

    def _receive(self) -> bool:
        """Reads the received messages without waiting. Returns whether the watchdog is alive."""
        for _ in range(REPORTS_MAX):
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            if not data:
                return False
            match json.loads(data):
                case {"watched": [int(), int(), int()] as answer}:
                    self._answer = answer
                case {"put_back": [int(pid), int(tid), int(ran_ns), int(rests)]}:
                    self._put_back = [*self._put_back, (pid, tid, ran_ns, rests)][-REPORTS_MAX:]
                case {"rested": [int(pid), int(tid)]}:
                    self._rested = [*self._rested, (pid, tid)][-REPORTS_MAX:]
        return True


class Watchdog(WatchdogEnd):
    """The watchdog's process. Start it once for a runtime; pass a connection to each driver process."""

    def __init__(self, permission: Permission, offer: Offer | None = None) -> None:
        """Starts the process, and waits some 20 milliseconds until it is ready. Do not call it on the thread of an event loop.

        Args:
            permission: The scheduling that this process may use; the watchdog gets its highest priority.
            offer: The limits of RealtimeKit; None if ``permission`` does not come from it.

        Raises:
            OSError: It could not be started, or could not get its priority.
        """
        priorities = permission.priorities
        if priorities is None:
            raise PermissionError("without real-time scheduling there are no threads to monitor")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(here)
        with there:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(__file__).with_name("watching.py")),
                    str(there.fileno()),
                    str(0 if permission.way is Way.REALTIMEKIT else priorities.watchdog),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                # Ctrl-C in a terminal must reach only the application, which ends the watchdog last.
                process_group=0,
            )
        try:
            self._wait_until_ready()
            if permission.way is Way.REALTIMEKIT:
                assert offer is not None, "permission by RealtimeKit comes with its offer"
                refused = make_realtime(offer, self._process.pid, self._process.pid, priorities.watchdog)
                if refused is not None:
                    raise PermissionError(f"RealtimeKit: {refused.sentence}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The number of the watchdog's process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the watchdog still runs."""
        return super().is_alive() and self._process.poll() is None

    def lend(self) -> socket.socket:
        """Makes a connection for another process of this user, which makes a ``WatchdogEnd`` of it.

        Raises:
            OSError: The watchdog has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [b'{"lend": []}'], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the process by closing its connection. Blocks for a moment; may be called again."""
        super().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        self._socket.settimeout(START_S)
        try:
            first = self._socket.recv(MESSAGE_BYTES_MAX)
        except TimeoutError:
            raise TimeoutError(f"the watchdog did not start within {START_S:g} s") from None
        finally:
            self._socket.setblocking(False)
        if not first:
            raise ChildProcessError("the watchdog ended when it was started")
        match json.loads(first):
            case {"failed": str(reason)}:
                raise PermissionError(f"the watchdog cannot run: {reason}")


class RunLimit:
    """RLIMIT_RTTIME, for the case that the watchdog has died: sets the soft limit of this process, and restores the previous one.

    The kernel counts the time that a real-time thread runs since it last slept, and sends SIGXCPU to its process at the soft
    limit. The signal ends a driver process, which is then started again. An application puts its threads back instead; its handler
    needs the interpreter's lock and the main thread, so it supplements the watchdog and cannot replace it. The hard limit, at
    which the kernel kills the process, is not changed.
    """

    def __init__(self, put_back: Callable[[], None] | None, limit_us: int = LIMIT_US) -> None:
        """Keeps the arguments; ``open`` sets the limit.

        Args:
            put_back: Called in the main thread when a thread has run for too long; None means that the kernel ends the process.
            limit_us: Microseconds that a real-time thread may run without a pause.
        """
        self._put_back = put_back
        self._limit_us = limit_us
        self._before: tuple[int, Any] | None = None

    def open(self) -> str:
        """Sets the limit; an application calls it in the main thread.

        Returns:
            The reason why it is not set; empty if it is.
        """
        try:
            soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
            cpu_s, _ = resource.getrlimit(resource.RLIMIT_CPU)
        except OSError as e:
            return f"RLIMIT_RTTIME cannot be read: {e.strerror}"
        if 0 <= soft <= self._limit_us or 0 <= hard < self._limit_us:
            return f"RLIMIT_RTTIME is {soft} us already"
        handler = signal.getsignal(signal.SIGXCPU)
        if self._put_back is not None:
            if threading.current_thread() is not threading.main_thread():
                return "only the main thread can set a signal handler"
            if handler is not signal.SIG_DFL:
                return "the program has its own handler of SIGXCPU"
            if cpu_s != resource.RLIM_INFINITY:
                return "RLIMIT_CPU is set, and the kernel sends the same signal for it"
            signal.signal(signal.SIGXCPU, self._handle)
        try:
            resource.setrlimit(resource.RLIMIT_RTTIME, (self._limit_us, hard))
        except (OSError, ValueError) as e:  # Python makes a ValueError of a sandbox's EPERM.
            if self._put_back is not None:
                signal.signal(signal.SIGXCPU, handler)
            return f"RLIMIT_RTTIME cannot be set: {e}"
        self._before = soft, handler
        return ""

    def close(self) -> None:
        """Restores the previous limit and handler; an application calls it in the main thread. May be called again."""
        if self._before is None:
            return
        (soft, handler), self._before = self._before, None
        _set_soft_limit(soft)
        if self._put_back is not None:
            signal.signal(signal.SIGXCPU, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        assert self._put_back is not None
        self._put_back()
        # The kernel raises the soft limit by a second each time it sends the signal.
        _set_soft_limit(self._limit_us)


def _set_soft_limit(soft_us: int) -> None:
    """Sets the soft RLIMIT_RTTIME, or the hard one where that was lowered below it in the meantime. Raises nothing: a sandbox that
    the application entered in the meantime may refuse it."""
    try:
        _, hard_us = resource.getrlimit(resource.RLIMIT_RTTIME)
        most_us = soft_us if hard_us < 0 else hard_us if soft_us < 0 else min(soft_us, hard_us)
        resource.setrlimit(resource.RLIMIT_RTTIME, (most_us, hard_us))
    except (OSError, ValueError):  # Python makes a ValueError of a sandbox's EPERM.
        pass
