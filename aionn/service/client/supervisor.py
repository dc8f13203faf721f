"""Starts and ends driver processes.

Owns the process, its socket and the wait for its end. ``connection`` owns the messages on the socket, and reports the end.

Invariants:
1. A process that was started is always reaped, and killed if it does not end by itself in time, however often the task that
   starts or ends it is cancelled.
2. Processes that it has started end with it, unless they have a process group or session of their own: they may have copies of its
   ends of sockets and fences, whose closing reports its end.
3. Everything inherited is the one end of the socket pair and, with real time, a connection to the watchdog. Standard output and
   standard error go to a logger: a holder of a descriptor of the application's could set flags of it for both, so that the
   application's own output fails.
4. A forked child ends no process of its parent's, however it ends itself.
5. The process is its own session: a terminal's Ctrl-C reaches the application alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from weakref import WeakSet

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from aionn.errors import DeviceUnavailable
from aionn.observability.log_tags import LOG_VARIABLE, chosen_tags
from aionn.observability.tracing import TRACE_VARIABLE, trace_path
from aionn.platform.forking import close_at_fork
from aionn.platform.loops import finish
from aionn.platform.python_process import python_command, python_environment
from aionn.realtime import Scheduling
from aionn.service.client.standard_error import StandardError
from aionn.service.entry import READY, SPARE_ARGUMENT

__all__ = ["DriverProcess", "StartConditions", "kill_all"]

END_S_MAX = 2.0
"""Limit of the time until a process ends once its client has closed the socket; the host itself ends within half a second."""

UNWATCHED_S = 0.01
"""Interval between two checks of a process while the event loop has no room to watch it."""

STDERR_BYTES_AT_ONCE = 1 << 16
"""Bytes that are read from a process's standard error in one call: all that a pipe holds."""

STDERR_PAUSE_S = 0.001
"""Pause between two readings of a process's standard error: a driver can write 64 MB in a second, or a byte at a time, for a
twentieth of the loop's time."""

LAST_WORDS_S_MAX = 0.1
"""Time for which a process's output is read after its end; a process that it started may keep the pipe open."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_ARENA_MAX": "1",
}
"""Default environment variables of a driver process.

Threads of the common matrix libraries, one each: a driver process shares the cores with the application, and a thread pool that
spins between calls would take them away. glibc's allocator, to keep what one frame gave back for the next one: by default it
returns large temporaries to the system immediately, and the page faults of taking them again are a fifth of a MobileNet frame. And
to keep it in one heap: by default each of a few dozen threads has its own, in which what one thread gave back is of no use to
another, and the process grows for hours.
"""


_started: WeakSet[DriverProcess] = WeakSet()
"""The processes that were started and not dropped, for ``kill_all``."""


def kill_all() -> None:
    """Ends all driver processes of this process, and the processes that they have started, without waiting.

    For a program that ends without closing anything, also in a signal handler: a process that hangs or is stopped does not notice
    that its client has ended, and would stay.
    """
    for process in list(_started):
        process.end_now()


class DriverProcess:
    """One driver process.

    Attributes:
        pid: Its process id.
        socket: Our end of the connection; the one who takes it closes it.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, name: str) -> None:
        assert process.stderr is not None, "_spawn asks for a pipe"
        self._process = process
        self._parent_pid = os.getpid()
        self.pid = process.pid
        self.socket = sock
        self._pidfd = os.pidfd_open(process.pid)
        self._is_over = False
        self._stderr = process.stderr
        os.set_blocking(self._stderr.fileno(), False)
        self._logged = anyio.Event()
        self._logged.set()  # until log_output begins
        self._standard_error = StandardError(name, process.pid, now_s=anyio.current_time())
        _started.add(self)

    @classmethod
    async def start(
        cls,
        driver: str,
        name: str,
        *,
        hang_after_s: float | None = None,
        is_spare: bool = False,
        scheduling: Scheduling | None = None,
    ) -> DriverProcess:
        """Starts a process for a registered driver.

        Args:
            driver: Its registered name.
            name: The device's name.
            hang_after_s: The process ends itself when its device makes no progress for so long; None for never.
            is_spare: The process makes no device before the first message; see ``wait_until_ready``.
            scheduling: The process inherits a connection to its watchdog; None if real time is off.

        Raises:
            DeviceUnavailable: The process cannot be started.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as e:
            raise DeviceUnavailable(f"device {name!r}: no descriptors for its socket: {e.strerror}") from e
        close_at_fork(ours, theirs)
        started: list[DriverProcess] = []

        async def start() -> None:
            # Forking is quick but not instant; exec waits for the file system. The thread has the descriptors until it is done.
            process = await anyio.to_thread.run_sync(
                _spawn, driver, name, theirs, hang_after_s, is_spare, scheduling
            )
            try:
                started.append(cls(process, ours, name))
            except BaseException:
                process.kill()
                process.communicate()  # reaps it, and closes the pipe
                raise

        try:
            await finish(start())
            return started[0]
        except (
            OSError,
            RuntimeError,
        ) as e:  # Python raises RuntimeError when no further thread can be started.
            ours.close()
            raise DeviceUnavailable(f"device {name!r}: its process cannot be started: {e}") from e
        except BaseException:
            ours.close()
            for process in started:
                process.kill()
                await process.aclose()
            raise
        finally:
            theirs.close()

    async def wait_until_ready(self) -> bool:
        """Waits until a spare process has imported what it needs. False when it ends before that."""
        while True:
            try:
                return self.socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
            except BlockingIOError:
                pass
            except OSError:
                return False
            try:
                await anyio.wait_readable(self.socket)
            except OSError:
                await anyio.sleep(UNWATCHED_S)  # It cannot be watched now.

    async def log_output(self) -> None:
        """Hands what the process writes to standard output and error to the logger ``aionn.driver.NAME``, until it ends.

        Engines greet there; a terminal that shows a live table, or a program whose errors are read, must not see that.
        """
        self._logged = anyio.Event()
        try:
            while True:
                try:
                    await anyio.wait_readable(self._stderr)
                except OSError:
                    # It cannot be watched now. It must be read all the same: a full pipe would stop the driver.
                    await anyio.sleep(UNWATCHED_S)
                chunk = self._read_some()
                if chunk is None:
                    continue
                steps = self._standard_error.take(chunk, anyio.current_time())
                try:
                    for _ in steps:
                        await anyio.lowlevel.checkpoint()
                finally:
                    for _ in steps:
                        pass  # Cancelled, it logs all the same what it has read.
                if not chunk:
                    return
                await anyio.sleep(STDERR_PAUSE_S)
        except (anyio.ClosedResourceError, ValueError):
            return  # closed by aclose
        finally:
            self._logged.set()

    def _read_some(self) -> bytes | None:
        """The available bytes: empty at the end, None if none are available yet."""
        try:
            return os.read(self._stderr.fileno(), STDERR_BYTES_AT_ONCE)
        except BlockingIOError:
            return None

    async def _log_last_words(self) -> None:
        with anyio.move_on_after(LAST_WORDS_S_MAX):
            await self._logged.wait()
        chunk = self._read_some()
        for last in (chunk, b"") if chunk else (b"",):
            for _ in self._standard_error.take(last, anyio.current_time()):
                await anyio.lowlevel.checkpoint()

    async def wait(self) -> int:
        """Waits until the process has ended, and returns its exit status (negative: the signal)."""
        if self._process.returncode is None:
            try:
                await anyio.wait_readable(self._pidfd)
            except OSError:  # It cannot be watched now.
                while not self._has_ended():
                    await anyio.sleep(UNWATCHED_S)
        if self._process.returncode is None:
            self._end_group()
            self._process.wait()
        return self._process.returncode

    def _has_ended(self) -> bool:
        """Whether it has ended; does not reap it."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # Other code in this process has reaped it.

    def _end_group(self) -> None:
        """Ends the processes that it has started. No other process gets its number until it is reaped."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(self.pid, signal.SIGKILL)
        except (ChildProcessError, PermissionError, ProcessLookupError):
            pass  # Other code has reaped it, or there is nothing that this process may end.

    def kill(self) -> None:
        """Ends the process immediately; it is reaped by ``aclose``. Does nothing in a forked child: the process belongs to the
        parent.
        """
        if self._process.returncode is None and self._is_ours():
            self._kill()

    def end_now(self) -> None:
        """As ``kill``, for the processes that it has started as well."""
        if self._process.returncode is None and self._is_ours():
            self._kill()  # By itself: what has just been started may not have a group of its own yet.
            self._end_group()

    def _is_ours(self) -> bool:
        """Whether this process started it: a forked child has copies of the descriptors, and nothing else of it."""
        return os.getpid() == self._parent_pid

    def _kill(self) -> None:
        # Not by the process object, which would reap one that has ended.
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def aclose(self) -> None:
        """Waits for the process to end, and kills it when that takes too long. The socket must have been shut down. Idempotent."""
        if not self._is_over:
            await finish(self._end())

    async def _end(self) -> None:
        if not self._is_ours():
            self._is_over = True
            os.close(self._pidfd)
            self._stderr.close()
            return
        with anyio.move_on_after(END_S_MAX):
            await self.wait()
        if self._process.returncode is None:
            self._kill()
            await self.wait()
        os.close(self._pidfd)
        self._is_over = True
        await self._log_last_words()
        anyio.notify_closing(self._stderr)
        self._stderr.close()


class StartConditions(msgspec.Struct, frozen=True):
    """The start conditions that a driver process gets from the application: processes with equal conditions can replace each other.

    Attributes:
        command: Its command line, without its socket.
        environment: Its variables.
        folder: Its working directory.
        processors: On which it may run.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    processors: frozenset[int]

    @classmethod
    def now(cls, driver: str, name: str, hang_after_s: float | None) -> StartConditions:
        """Those of a process that is started now.

        Raises:
            OSError: The working directory is gone.
        """
        command = _command(driver, name, hang_after_s)
        return cls(tuple(command), _environment(), os.getcwd(), frozenset(os.sched_getaffinity(0)))


def _environment() -> dict[str, str]:
    environment = python_environment()
    path = trace_path()
    if path is not None:
        environment[TRACE_VARIABLE] = path
    if chosen_tags():
        environment[LOG_VARIABLE] = ",".join(chosen_tags())
    for variable, value in _ENVIRONMENT.items():
        environment.setdefault(variable, value)
    return environment


def _command(driver: str, name: str, hang_after_s: float | None) -> list[str]:
    # With "=": a name may begin like an option.
    arguments = [f"--driver={driver}", f"--name={name}"]
    if hang_after_s is not None:
        arguments.append(f"--hang-after={hang_after_s}")
    return python_command("aionn.service.entry", *arguments)


def _watchdog_end(scheduling: Scheduling | None) -> socket.socket | None:
    """A connection to the watchdog; None if no thread may be a real-time thread, or the watchdog has ended."""
    try:
        lent = None if scheduling is None else scheduling.lend()
    except OSError:
        return None
    return None if lent is None else lent[1]


def _spawn(
    driver: str,
    name: str,
    theirs: socket.socket,
    hang_after_s: float | None,
    is_spare: bool,
    scheduling: Scheduling | None,
) -> subprocess.Popen[bytes]:
    with ExitStack() as lent:
        inherited = {"--fd": theirs.fileno()}
        if (end := _watchdog_end(scheduling)) is not None:
            inherited["--watchdog-fd"] = lent.enter_context(end).fileno()
        more = [word for option, fd in inherited.items() for word in (option, str(fd))]
        process = subprocess.Popen(
            [*_command(driver, name, hang_after_s), *more, *([SPARE_ARGUMENT] if is_spare else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(inherited.values()),
            env=_environment(),
            start_new_session=True,
        )
    process.stdout, process.stderr = None, process.stdout  # One pipe has both.
    return process
