"""The driver process: serves one ``hal.Device`` to the client at the other end of a socket, or to all clients of a socket in the
file system.

Owns connections and the process's life. A process that was started for one client ends when the client's end of the socket is gone,
within ``END_S_MAX`` even when a device hangs; one that serves a path ends when it is told to.

Invariants:
1. Everything that a client made is freed when its connection ends; other clients do not notice.
2. Whoever may write to the socket's path may use the device; nobody else can.
3. A socket's file that a crashed process left behind is replaced; one that somebody serves is not.

Started by ``aionn.service.supervisor`` with ``--fd N --driver NAME --name DEVICE``.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import socket
import stat
import threading
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.from_thread

from aionn.drivers import registry
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    OutputInsufficientSize,
)
from aionn.hal import Device
from aionn.hal.log_tags import choose_tags
from aionn.hal.tracing import TRACE_VARIABLE, start_tracing
from aionn.service.channel import Channel
from aionn.service.progress import Progress
from aionn.service.protocol import CallBody, ReplyBody
from aionn.service.quotas import Quotas
from aionn.service.session import Session

__all__ = ["IDLE_S", "SHARED_QUOTAS", "listen", "main", "serve"]

END_S_MAX = 0.5
"""How long a process whose client is gone may take to clean up before it ends regardless: half of what users are promised."""

IDLE_S = 10.0
"""What was not used for so long, a burst or a memory of requests, is unmapped until it is used again: longer than any pause within
a stream."""

BACKLOG = 64

CLIENTS_MAX = 256
"""Clients of one socket at once; further ones are turned away."""

ABANDONED_S = 1.0
"""After this time what a client left running has ended, as a rule."""

RETRY_S = 0.1
"""Pause before accepting again when no descriptor was left."""

SHARED_QUOTAS = Quotas(
    memory_bytes=1 << 30,
    prepared_models=256,
    buffers=256,
    bursts=32,
    executions=1024,
    fenced=1024,
    reusable=256,
    pools=16,
)
"""What each client of a shared device may take unless the server is told otherwise."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.ECONNABORTED)
"""Why a client cannot be accepted, or the listener not be watched, now: later it can."""

_logger = logging.getLogger("aionn.service")


async def serve(
    device: Device,
    sock: socket.socket,
    *,
    quotas: Quotas | None = None,
    progress: Progress | None = None,
    idle_s: float = IDLE_S,
    sealed_only: bool = False,
) -> bool:
    """Serves one client until it goes away, then frees what was its own.

    Args:
        device: What is served.
        sock: The connection; owned by this call.
        quotas: What the client may take; None for the defaults of ``Quotas``.
        progress: Is told of the work that the device does; None for no watch.
        idle_s: Memories of bursts and requests that were not used for so long are given back.
        sealed_only: Refuses memory that the client can shorten: that would end this process, which other clients use.

    Returns:
        Whether it went in the middle of something.
    """
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(
            device, portal, tasks, quotas=quotas or Quotas(), progress=progress or Progress(None)
        )
        channel = Channel(
            sock,
            session.handle,
            peer_name="the client",
            sealed_only=sealed_only,
            settle_of=session.settling.settle_of,
        )
        tasks.start_soon(_rest, session, idle_s)
        try:
            await channel.run()
        finally:
            was_cut_off = channel.was_cut_off or session.account.taken("executions") > 0
            with anyio.CancelScope(shield=True):
                await session.aclose()
            channel.release()
            tasks.cancel_scope.cancel()
    return was_cut_off


async def _rest(session: Session, idle_s: float) -> None:
    while True:
        await anyio.sleep(idle_s / 2)
        session.rest(idle_s)


async def listen(
    device: Device,
    path: str | os.PathLike[str],
    *,
    mode: int = 0o600,
    quotas: Quotas = SHARED_QUOTAS,
    progress: Progress | None = None,
    idle_s: float = IDLE_S,
    started: anyio.Event | None = None,
) -> None:
    """Serves every client of a socket until the task is cancelled.

    Args:
        device: What is served.
        path: Where the socket is made.
        mode: Its permissions: who may write may use the device.
        quotas: What each client may take.
        progress: Is told of the work that the device does; None for no watch.
        idle_s: See ``serve``.
        started: Is set when clients can connect.

    Raises:
        DeviceUnavailable: The socket cannot be made, or somebody serves there already.
    """
    listener = _bind(os.fspath(path), mode)
    identity = os.lstat(path).st_ino
    try:
        async with anyio.create_task_group() as tasks:
            if started is not None:
                started.set()
            clients = anyio.CapacityLimiter(CLIENTS_MAX)
            while True:
                sock = await _accept(listener)
                if clients.available_tokens == 0:
                    _logger.warning("turned a client away: %d are served already", CLIENTS_MAX)
                    sock.close()
                    continue
                borrower = object()
                await clients.acquire_on_behalf_of(borrower)

                async def serve_one(sock: socket.socket = sock, borrower: object = borrower) -> None:
                    try:
                        was_cut_off = await serve(
                            device, sock, quotas=quotas, progress=progress, idle_s=idle_s, sealed_only=True
                        )
                        if was_cut_off:
                            tasks.start_soon(_collect_garbage)
                    except Exception:
                        # One client's end, however it comes, is not the others'.
                        _logger.exception("serving a client failed")
                    finally:
                        clients.release_on_behalf_of(borrower)

                tasks.start_soon(serve_one)
    finally:
        listener.close()
        _unlink(os.fspath(path), identity)


async def _collect_garbage() -> None:
    """What was given up lies in cycles of errors and frames, with memories of the client's. This process may be idle for long."""
    await anyio.sleep(ABANDONED_S)
    gc.collect()


async def _accept(listener: socket.socket) -> socket.socket:
    while True:
        try:
            sock, _ = listener.accept()
            return sock
        except BlockingIOError:
            pass
        except OSError as e:
            if e.errno not in _PASSING:
                raise
            # The client waits in the backlog; those who are served go on.
            await anyio.sleep(RETRY_S)
            continue
        try:
            await anyio.wait_readable(listener)
        except OSError as e:
            if e.errno not in _PASSING:
                raise
            await anyio.sleep(RETRY_S)


def _bind(path: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        _remove_stale(path)
        # Narrow from the start: between bind and chmod somebody might connect. No thread of ours makes files meanwhile.
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as e:
        listener.close()
        raise DeviceUnavailable(f"socket {path}: cannot be served: {e}") from e
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise DeviceUnavailable(f"socket {path}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # Whoever made it is gone.
            return
        except BlockingIOError:
            pass  # Its backlog is full, so somebody listens.
    raise DeviceUnavailable(f"socket {path}: a process serves there already")


def _unlink(path: str, identity: int) -> None:
    try:
        if os.lstat(path).st_ino == identity:
            os.unlink(path)
    except OSError:
        pass  # Somebody removed or replaced it: not ours any more.


async def _main(driver: str, name: str, sock: socket.socket, hang_after_s: float | None) -> None:
    try:
        device = registry.make_device(driver, name)
    except (DeviceUnavailable, InvalidArgument) as e:
        await _refuse(sock, DeviceUnavailable(str(e)))
        return
    with Progress(hang_after_s) as progress:
        try:
            await serve(device, sock, progress=progress)
        finally:
            with anyio.CancelScope(shield=True):
                await device.aclose()


async def _refuse(sock: socket.socket, why: DeviceUnavailable) -> None:
    """Tells the client, whatever it asks, why there is no device."""

    async def refuse(body: CallBody, channel: Channel) -> ReplyBody:
        raise why

    channel = Channel(sock, refuse, peer_name="the client")
    try:
        await channel.run()
    finally:
        channel.release()


def _end_with_client(fd: int) -> None:
    """Waits for the client's end to go away, then lets the process END_S_MAX to clean up. A thread, so that a loop that is stuck
    cannot keep the process alive."""
    import select
    import time

    poller = select.poll()
    poller.register(fd, select.POLLHUP | select.POLLRDHUP)
    while not any(events & (select.POLLHUP | select.POLLRDHUP) for _, events in poller.poll()):
        pass
    time.sleep(END_S_MAX)
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="aionn.service.host", description="Serves one driver; internal.")
    parser.add_argument("--fd", type=int, required=True, help="connected Unix socket, inherited")
    parser.add_argument("--driver", required=True, help="registered name of the driver")
    parser.add_argument("--name", required=True, help="name of the device")
    parser.add_argument(
        "--hang-after", type=float, default=None, help="seconds without progress that end the process"
    )
    options = parser.parse_args(arguments)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    choose_tags(is_driver=True)
    trace = os.environ.get(TRACE_VARIABLE)
    if trace:
        try:
            start_tracing(trace, process=f"driver of {options.name}", create=False)
        except InvalidArgument as e:
            _logger.warning("%s", e)
    threading.Thread(
        target=_end_with_client, args=(os.dup(options.fd),), daemon=True, name="aionn-end"
    ).start()
    try:
        anyio.run(_main, options.driver, options.name, sock, options.hang_after)
    except (DeadObject, DeviceUnavailable, GeneralFailure, InvalidArgument, OutputInsufficientSize) as e:
        raise SystemExit(f"{options.name}: {e}") from e
