"""The watchdog: puts real-time threads that do not yield back to the ordinary class.

It is a process of its own, above all threads that it looks after: a thread in theirs would need the interpreter's lock, which an
engine or a library in C may hold for as long as it spins. It looks at what the kernel counts: processor time since a thread last
paused. The processes that it looks after need not do anything, and no clock decides but the kernel's.

Owns this side of it: start, messages, end. The process is ``watching``.

When this side ends, in whatever way, the watchdog makes every thread that it still looks after ordinary, and ends.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

from aionn.realtime.permission import Permission, Way
from aionn.realtime.realtimekit import Offer, make_realtime
from aionn.realtime.watching import MESSAGE_BYTES_MAX, NAME_LENGTH_MAX

__all__ = ["Watchdog", "WatchdogEnd"]

START_S = 10.0
"""How long the process may take until it looks: an interpreter without packages needs 20 ms, on a busy machine a second."""

END_S = 2.0
"""How long it may take to end when it is told to, before it is killed."""

REPORTS_MAX = 256
"""How many threads that were put back are kept until somebody asks; the oldest are lost first."""


class WatchdogEnd:
    """A connection to a watchdog, of the process that started it or of another that was lent one."""

    def __init__(self, end: socket.socket) -> None:
        """Takes the connection over."""
        self._socket = end
        self._socket.setblocking(False)
        self._put_back: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable when a thread was put back, or the watchdog has ended; -1 when closed."""
        return self._socket.fileno()

    def watch(self, pid: int, tid: int, name: str) -> bool:
        """Looks after a thread from now on; False where the watchdog has ended, or does not read."""
        return self._send({"watch": [pid, tid, name[:NAME_LENGTH_MAX]]})

    def forget(self, pid: int, tid: int) -> None:
        """Looks after a thread no longer."""
        self._send({"forget": [pid, tid]})

    def take_put_back(self) -> list[tuple[int, int, int]]:
        """Threads that were put back since the last call: process, thread, and what it ran without a pause in nanoseconds."""
        with self._lock:
            self._receive()
            found, self._put_back = self._put_back, []
            return found

    def close(self) -> None:
        """Ends the connection: the watchdog makes every thread that it looks after on account of it ordinary."""
        self._socket.close()

    def _send(self, message: dict[str, list[int | str]]) -> bool:
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:
            return False
        return True

    def _receive(self) -> bool:
        """Reads what is there; whether the watchdog is alive."""
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
                case {"put_back": [int(pid), int(tid), int(ran_ns)]}:
                    self._put_back = [*self._put_back, (pid, tid, ran_ns)][-REPORTS_MAX:]
        return True


class Watchdog(WatchdogEnd):
    """The watchdog's process. Start it once for a runtime; lend a connection to each driver process."""

    def __init__(self, permission: Permission, offer: Offer | None = None) -> None:
        """Starts the process, and waits until it looks: some 20 milliseconds, on a thread that is no event loop's.

        Args:
            permission: What this process may do; the watchdog takes the highest priority of it.
            offer: RealtimeKit's, where ``permission`` is by it.

        Raises:
            OSError: It could not be started, or could not be given its priority.
        """
        priorities = permission.priorities
        if priorities is None:
            raise PermissionError("without real-time scheduling there is nothing to look after")
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
                # Ctrl-C in a terminal is for the application, which ends the watchdog last.
                process_group=0,
            )
        try:
            self._wait_until_it_looks()
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
        """The watchdog's process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it still looks."""
        with self._lock:
            return self._receive() and self._process.poll() is None

    def lend(self) -> socket.socket:
        """A connection for another process of this user, to be passed on and made a ``WatchdogEnd`` there.

        Raises:
            OSError: The watchdog has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [b'{"lend": []}'], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the process: closing the connection tells it to. Blocks for a moment; may be called again."""
        super().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_it_looks(self) -> None:
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
