"""The entry point of a driver process, and the life of a spare one until it is needed.

A spare process has the command line of any other, with ``--spare`` as its last argument. It imports the driver's modules, at low
priority, reports that it is ready and waits for the first message; it makes no device. Then it continues as any other.

Invariants:
1. It ends immediately when its client's end of the socket is gone, whether it imports or waits.
2. Once it is ready, every thread of it has the priority with which it was started. One whose imports left a thread behind that
   kept the low priority ends instead: only a privileged process may raise it again.
3. It executes the files as they are when it is needed: if an imported one has changed, it restarts.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["READY", "SPARE_ARGUMENT", "main"]

SPARE_ARGUMENT = "--spare"

READY = b"ready"
"""The bytes that a spare process sends when it has imported everything: before any message of the protocol."""

NICENESS = 5
"""Increase of a process's nice value while it imports: it gets a third of the time of another one on the same processor. The lowest
priority would make half a second of work last for minutes on a busy machine, and a killed process would take as long for the ten
milliseconds of its end."""

AUTOGROUP = "/proc/self/autogroup"
"""Where the kernel groups processes by session, this priority counts, and that of a thread counts within its session alone. Unlike
that of a thread it can be raised again."""

AUTOGROUP_RETRY_MS = 110
"""The kernel accepts one change in a tenth of a second, of all processes."""

AUTOGROUP_TRIES_MAX = 50
"""Number of tries of a change: each failure means that another process has made one."""

Signatures = dict[str, tuple[int, int, int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point: see ``aionn.service.host.process`` for the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[-1:] == [SPARE_ARGUMENT]:
        given.pop()
        _be_spare(given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            line_buffering=True
        )  # It is a pipe to the application's log: printed lines are logged immediately.
    from aionn.service.host.process import main as host_main

    host_main(given)


def _be_spare(arguments: Sequence[str]) -> None:
    """Returns when the first message is there."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--watchdog-fd", type=int)
    parser.add_argument("--driver", required=True)
    options, _ = parser.parse_known_args(arguments)
    fd: int = options.fd
    inherited = [fd] if options.watchdog_fd is None else [fd, options.watchdog_fd]
    environment = dict(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in inherited:
        os.set_inheritable(each, False)
    _import_quietly(fd, options.driver)
    signatures = _signatures()
    try:
        os.write(fd, READY)
    except OSError:
        _end(0)
    _wait(fd, select.POLLIN)
    if _signatures(signatures) != signatures:
        from aionn.platform.python_process import start_over

        for each in inherited:
            os.set_inheritable(each, True)
        start_over(sys.orig_argv[:-1], environment)


def _import_quietly(fd: int, driver: str) -> None:
    """Imports at low priority, in a thread of its own: this one keeps its priority, which it could not get back."""
    is_grouped = os.getsid(0) == os.getpid() and _set_autogroup(NICENESS)
    done = os.eventfd(0, os.EFD_CLOEXEC)
    failed = False

    def work() -> None:
        nonlocal failed
        try:
            _lower_thread()
            _import(driver)
        except BaseException:
            failed = True  # A process that is not spare reports the reason.
        finally:
            os.eventfd_write(done, 1)

    importer = threading.Thread(target=work, name="aionn-import", daemon=True)
    importer.start()
    _wait(fd, 0, done)
    importer.join()
    os.close(done)
    if failed or _has_slow_threads(importer.native_id):
        _end(1)
    tries = 0
    while is_grouped and not _set_autogroup(0):
        tries += 1
        if tries == AUTOGROUP_TRIES_MAX:
            _end(1)
        _wait(fd, 0, limit_ms=AUTOGROUP_RETRY_MS)


def _import(driver: str) -> None:
    import anyio

    import aionn.service.host.process
    import aionn.validation  # noqa: F401 # which checks the description of a device
    from aionn.drivers.registry import load_factory

    anyio.run(anyio.sleep, 0)  # imports what runs the event loop
    load_factory(driver)


def _lower_thread() -> None:
    try:
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        )
    except OSError:
        pass  # It is forbidden here; the work is short.


def _has_slow_threads(importer: int | None) -> bool:
    """Whether imports started threads, which have the importing thread's priority."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for task in os.listdir("/proc/self/task"):
        try:
            if int(task) != importer and os.getpriority(os.PRIO_PROCESS, int(task)) != own:
                return True
        except ProcessLookupError:
            continue
    return False


def _set_autogroup(niceness: int) -> bool:
    try:
        with open(AUTOGROUP, "w") as file:
            file.write(str(niceness))
    except OSError:
        return False  # It is missing, or another process has just changed its own.
    return True


def _wait(fd: int, events: int, other: int | None = None, *, limit_ms: int | None = None) -> None:
    """Waits for events of the socket, or until the other can be read, or so long; ends the process when the client is gone."""
    gone = select.POLLHUP | select.POLLRDHUP | select.POLLERR
    poller = select.poll()
    poller.register(fd, events | select.POLLRDHUP)
    if other is not None:
        poller.register(other, select.POLLIN)
    for _, found in poller.poll(limit_ms):
        if found & gone:  # The other one is an eventfd, which reports nothing of the kind.
            _end(0)


def _end(status: int) -> NoReturn:
    """Without the interpreter's end: another thread may be in the middle of an import."""
    os._exit(status)


def _signatures(known: Signatures | None = None) -> Signatures:
    """The identity of each file, which shows changes: of the imported modules, or of the known ones."""
    paths = known or [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    found: Signatures = {}
    for path in paths:
        if isinstance(path, str):
            try:
                status = os.stat(path)
            except OSError:
                continue
            found[path] = status.st_mtime_ns, status.st_size, status.st_ino
    return found
