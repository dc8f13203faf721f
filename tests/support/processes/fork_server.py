"""Python processes that are forked from one that has imported what they import: a start takes milliseconds instead of a third of
a second.

Owns the fork server, a child of the process of the tests, and the use of it in place of ``exec`` by ``subprocess.Popen``.

A forked process differs from one that was executed in its command line as the kernel lists it (``/proc/PID/cmdline``) and in the
modules that are imported when it begins. Everything else is the same: it is a child of the process of the tests, with the
requested descriptors, environment, session and working directory. It ends with its threads and exit handlers, but does not
take its modules down.

A program, which may start driver processes itself, gets a fork server of its own: a child that begins as a fork of it, with
everything imported.

Invariants:
1. A process is forked only where an executed one would have the same interpreter, flags, priority, processors, umask and limits as
   the fork server, but for ``LIMITS``, and the same variables that count when it starts (``START_VARIABLES``). Otherwise it is
   executed.
2. A fork server never has a second thread, and ends with the process whose processes it forks.
3. A forked process has no descriptor but the requested ones, and, where it has a fork server, the socket to that.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import inspect
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Literal

__all__ = ["EXECUTE", "ForkServer", "ForkedStarts", "Kinds", "run", "serve"]

START_VARIABLES = re.compile(
    r"(PYTHON(?!PATH$)|LD_|LC_|LANG|TZ|GLIBC_|MALLOC_|OMP_|OPENBLAS_|MKL_|GOTO_|BLIS_|NPY_|KMP_|.SAN_OPTIONS|COVERAGE_)"
)
"""Beginnings of the names of variables that the interpreter or a library reads when it starts. A process sets its module path
itself."""

LIBRARY_VARIABLES = re.compile(r"(OMP_|OPENBLAS_|MKL_|MALLOC_)")
"""Those of them that the supervisor of driver processes sets: a process that is started without them has the same results."""

MESSAGE_BYTES_MAX = 1 << 17
"""Of a request: an environment and a command line have some thousands."""

DESCRIPTORS_MAX = 64
"""Of a request: standard input, output and error, and what is passed."""

ANSWER_S_MAX = 110.0
"""Limit of the wait for an answer: the first one comes once everything is imported, which takes half a minute on a busy machine."""

CODE = re.compile(r"import sys; sys\.path\[:\] = .*; from (\S+) import main; main\(sys\.argv\[1:\]\)")
"""Of a process of ours: it sets its module path, whatever that was, and executes a module's ``main``."""

NUMBER_BYTES_MAX = 16
"""Of the number of a process in decimal digits."""

LIMITS = ("RLIMIT_CORE", "RLIMIT_RTTIME", "RLIMIT_RTPRIO", "RLIMIT_NICE", "RLIMIT_MEMLOCK")
"""Limits without an effect on the start of an interpreter: a forked process sets those of the process that asks for it."""

OWN_NAME = b"own-forks"
"""The name of a process that is the fork server of a forked one, at most 15 bytes."""

OWN_SOCKET_MIN = 200
"""The least number of the descriptor that a process has for its fork server: those that programs count are lower."""

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
CLOSED = -1

_libc = ctypes.CDLL(None, use_errno=True)


def _conditions() -> dict[str, Any]:
    """What an executed process would inherit from this one and cannot be requested."""
    names = (name for name in dir(resource) if name.startswith("RLIMIT_") and name not in LIMITS)
    limits = (getattr(resource, name) for name in names)
    status = Path("/proc/self/status").read_text()
    return {
        "limits": sorted({limit: list(resource.getrlimit(limit)) for limit in limits}.items()),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "processors": sorted(os.sched_getaffinity(0)),
        "status": re.findall(r"^(?:Umask|SigBlk|CapEff|CapBnd|NoNewPrivs|Uid|Gid):.*$", status, re.MULTILINE),
    }


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}


def _is_within(asked: Mapping[str, tuple[int, int]], own: Mapping[str, tuple[int, int]]) -> bool:
    """Whether no hard limit is above the own one: only a privileged process may raise it."""
    finite = {name: asked[name][1] for name in asked if own[name][1] != resource.RLIM_INFINITY}
    return all(hard != resource.RLIM_INFINITY and hard <= own[name][1] for name, hard in finite.items())


def _starts_alike(asked: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Whether no variable that counts at the start of a process differs."""
    return all(
        asked.get(name) == own.get(name) or (LIBRARY_VARIABLES.match(name) and name not in asked)
        for name in {*asked, *own}
        if START_VARIABLES.match(name)
    )


class ForkServer:
    """The process that forks.

    Args:
        modules: What it imports before it forks first.
        environment: Its own; those of the processes may differ in variables that do not count when they start.
        begun: Its end of the socket and its number, where it has been forked already; None: it is executed.

    Attributes:
        pids: The numbers of all fork servers of this process.
    """

    pids: ClassVar[set[int]] = set()

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        begun: tuple[socket.socket, int] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._environment = dict(environment)
        self._conditions, self._limits = json.dumps(_conditions()), _limits()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        if begun is not None:
            self._socket, self._forked = begun
            self._socket.settimeout(ANSWER_S_MAX)
            self.pids.add(self._forked)
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S_MAX)
        code = (
            f"import sys; own = sys.path[:]; sys.path[:] = {sys.path!r}; from {__name__} import run, serve; "
        )
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    code + f"run(serve({theirs.fileno()}, {list(modules)!r}, own))",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        self.pids.add(self._process.pid)

    def close(self) -> None:
        """Ends the process, and waits for its end. What it has forked continues."""
        if os.getpid() != self._owner:
            return
        with suppress(OSError):
            # A process that this one has forked may hold the socket, too. A signal would not do: this one may have dropped its
            # privileges.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            self._process.wait()
            self.pids.remove(self._process.pid)
        else:
            os.waitpid(self._forked, 0)
            self.pids.remove(self._forked)

    def start(self, asked: Mapping[str, Any], *, is_any: bool) -> int | None:
        """Forks a process.

        Args:
            asked: The arguments of ``Popen._execute_child``.
            is_any: Whether it may be any Python process; otherwise one that the product starts.

        Returns:
            Its number, a child of this process; None if only an executed process would be as requested.
        """
        program = _program(asked["args"])
        environment = os.environ if asked["env"] is None else asked["env"]
        if (
            program is None
            or not (is_any or _is_ours(program))
            or not _starts_alike(environment, self._environment)
            or not asked["close_fds"]
            or not asked["restore_signals"]
            or any(asked[name] is not None for name in ("preexec_fn", "gid", "gids", "uid"))
            or asked["executable"] is not None
            or asked["shell"]
            or asked["umask"] >= 0
            or asked["process_group"] > 0
            or os.getpid() != self._owner
            or json.dumps(_conditions()) != self._conditions
            or not _is_within(limits := _limits(), self._limits)
        ):
            return None
        standard = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        standard = [number if fd == CLOSED else fd for number, fd in enumerate(standard)]
        passed = sorted(asked["pass_fds"])
        message = {
            **program,
            "command": [os.fspath(word) for word in asked["args"]],
            "environment": dict(environment),
            "folder": os.getcwd() if asked["cwd"] is None else os.fspath(asked["cwd"]),
            "numbers": [0, 1, 2, *passed],
            "session": asked["start_new_session"],
            "group": asked["process_group"] == 0,
            "limits": limits,
            "starts": self._environment if is_any and not _is_ours(program) else None,
        }
        with self._lock, _adopting():
            socket.send_fds(self._socket, [json.dumps(message).encode()], [*standard, *passed])
            answer = self._socket.recv(MESSAGE_BYTES_MAX)
        assert answer, "the fork server has ended"
        number = int(answer)
        return number or None


def reap_orphan(pid: int) -> bool:
    """Whether a child is the fork server of a program that was killed; waits for its end.

    It becomes a child of the process of the tests if that is starting another one at this moment.
    """
    try:
        if Path(f"/proc/{pid}/comm").read_bytes().strip() != OWN_NAME:
            return False
        os.waitpid(pid, 0)
    except OSError:
        return False
    return True


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of those whose parent ends meanwhile, as the one between it and a forked process does."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _program(command: object) -> dict[str, Any] | None:
    """What a command line of Python executes; None for another one, and for options that count when the interpreter starts."""
    if not isinstance(command, list | tuple) or not command or command[0] != sys.executable:
        return None
    words = [os.fspath(word) for word in command[1:]]
    found: dict[str, Any] = {"is_safe": False, "is_unbuffered": False, "are_errors": False}
    while words:
        match words:
            case ["-P", *words]:
                found["is_safe"] = True
            case ["-u", *words]:
                found["is_unbuffered"] = True
            case ["-W", "error", *words]:
                found["are_errors"] = True
            case ["-c" | "-m" as kind, what, *words]:
                return {**found, "kind": kind, "what": what, "arguments": words}
            case [what, *words] if not what.startswith("-"):
                return {**found, "kind": "script", "what": what, "arguments": words}
            case _:
                return None
    return None


def _is_ours(program: Mapping[str, Any]) -> bool:
    """Whether it is one of ``aionn.platform.python_process``."""
    return bool(program["is_safe"] and program["kind"] == "-c" and CODE.fullmatch(program["what"]))


EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]

Kinds = Literal["product", "any", "none"]


class ForkedStarts:
    """Lets ``subprocess.Popen`` fork from a server.

    Args:
        server: It.
        kinds: Which processes may be forked now: those of the product, any, or none.

    Attributes:
        count: The number of forked processes.
    """

    def __init__(self, server: ForkServer, kinds: Callable[[], Kinds]) -> None:
        self.count = 0
        before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        signature = inspect.signature(EXECUTE)

        def start(process: Any, *given: Any) -> None:
            asked = signature.bind(process, *given).arguments
            now = kinds()
            pid = None if now == "none" else server.start(asked, is_any=now == "any")
            if pid is None:
                EXECUTE(process, *given)
                return
            self.count += 1
            process.pid = pid
            process._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            process._close_pipe_fds(*(asked[name] for name in pipes))

        self._before = before
        subprocess.Popen._execute_child = start  # type: ignore[attr-defined]

    def end(self) -> None:
        """Lets it do as before."""
        subprocess.Popen._execute_child = self._before  # type: ignore[attr-defined]


def serve(fd: int, modules: Sequence[str], path: list[str]) -> CodeType:
    """Forks until the other end of the socket is closed, in the fork server; in a process that it forks, returns its code.

    Args:
        fd: Of the socket.
        modules: To be imported.
        path: The module path with which the interpreter started.
    """
    gained = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in path if entry not in gained]
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return _serve(sock, modules, path, is_ready=False)


def _serve(sock: socket.socket, modules: Sequence[str], path: Sequence[str], *, is_ready: bool) -> CodeType:
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        content, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not content:
            os._exit(0)
        if not is_ready:
            _prepare(modules)
            is_ready = True
        message = json.loads(content)
        number_read, number_written = os.pipe()
        go_read, go_written = os.pipe()
        between: int | None
        try:
            between = os.fork()
        except OSError:
            between = None
        if between == 0:
            _fork_and_end(number_written)
            os.close(go_written)
            if not os.read(go_read, 1):
                os._exit(1)  # The fork server has been killed.
            sock.detach()
            _libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(sys.executable)), 0, 0, 0)
            signal.signal(
                signal.SIGINT, inherited
            )  # Ignored where the tests run in the background of a shell.
            _take_place(message, fds)
            if message["starts"] is not None and (its := _own_server(message, modules)) is not None:
                return _serve(its, modules, path, is_ready=True)
            _become(message)
            return _main_code(message, path)
        os.close(number_written)
        if between is not None:
            os.waitpid(between, 0)  # From now on its child is a child of the process of the tests.
        number = os.read(number_read, NUMBER_BYTES_MAX)
        if number:
            os.write(go_written, b"g")
        sock.send(number or b"0")
        for fd in (number_read, go_read, go_written, *fds):
            os.close(fd)


def run(code: CodeType) -> None:
    """Executes the main module, and ends the process as an interpreter does, but that it does not take its modules down.

    That would take ten times as long as the fork, since each page of memory would be copied.
    """
    status = 0
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as e:
        if isinstance(e.code, int):
            status = e.code & 0xFF
        elif e.code is not None:
            print(e.code, file=sys.stderr)
            status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if _own is not None:
        _own.close()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            return  # Closed, or nobody reads it: the interpreter has a status for that.
    os._exit(status)


def _prepare(modules: Sequence[str]) -> None:
    import gc
    import importlib

    for module in modules:
        importlib.import_module(module)
    if "anyio" in sys.modules:
        import anyio

        anyio.run(anyio.sleep, 0)  # imports what runs the event loop
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread can fork"


def _fork_and_end(number_written: int) -> None:
    """Returns in the new process; this one reports its number and ends."""
    try:
        forked = os.fork()
    except OSError:
        os._exit(1)
    if forked:
        os.write(number_written, str(forked).encode())
        os._exit(0)


_own: ForkServer | None = None
"""Of this process, where it is a forked one that may start others."""


def _own_server(message: Mapping[str, Any], modules: Sequence[str]) -> socket.socket | None:
    """Forks a fork server of the new process. Returns its end of the socket there, and None in the new process."""
    global _own
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _libc.prctl(PR_SET_NAME, OWN_NAME, 0, 0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, its.fileno())
        os.closerange(its.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        ours.detach()
        return its
    its.close()
    moved = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, OWN_SOCKET_MIN))
    ours.close()
    _own = ForkServer(modules, message["starts"], (moved, pid))
    ForkedStarts(_own, lambda: "product")
    return None


def _take_place(message: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Has the requested descriptors, session and process group."""
    numbers: list[int] = message["numbers"]
    above = max(*numbers, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    os.closerange(3, min(moved))
    for fd, number in zip(moved, numbers):
        os.dup2(fd, number)
    os.closerange(max(numbers) + 1, max(moved) + 1)
    if message["session"]:
        os.setsid()
    if message["group"]:
        os.setpgid(0, 0)


def _become(message: Mapping[str, Any]) -> None:
    """Has the requested limits, folder and environment."""
    for name, limit in message["limits"].items():
        if tuple(limit) != resource.getrlimit(getattr(resource, name)):
            resource.setrlimit(getattr(resource, name), tuple(limit))
    os.chdir(message["folder"])
    for name in set(os.environ) - set(message["environment"]):
        del os.environ[name]
    os.environ.update(message["environment"])


def _main_code(message: Mapping[str, Any], path: Sequence[str]) -> CodeType:
    """Prepares the interpreter for its program, and returns what its main module executes."""
    kind, what = message["kind"], message["what"]
    sys.argv[:] = [what if kind == "script" else kind, *message["arguments"]]
    sys.orig_argv[:] = message["command"]
    first = {"-c": "", "-m": os.getcwd(), "script": os.path.dirname(os.path.realpath(what))}[kind]
    gained = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*([] if message["is_safe"] else [first]), *gained, *path]
    if message["is_unbuffered"]:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    if message["are_errors"]:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    if kind == "-m":
        return compile(f"import runpy; runpy._run_module_as_main({what!r})", "<string>", "exec")
    if kind == "script":
        sys.modules["__main__"].__file__ = what
        return compile(Path(what).read_bytes(), what, "exec")
    return compile(what, "<string>", "exec")
