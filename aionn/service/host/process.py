"""The driver process: serves one ``hal.Device`` to the client at the other end of a socket, or to all clients of a socket in the
file system.

Owns connections and the process's life. A process that was started for one client ends when the client's end of the socket is gone,
within ``END_S_MAX`` even when a device hangs; one that serves a path ends when it is requested to, in order (``draining``) or
immediately.

Invariants:
1. Everything that a client made is freed when its connection ends; other clients do not notice.
2. Users who may write to the socket's path may use the device, and no other users.
3. ``admission`` limits the number of clients; a rejected one gets the reason.

Started by ``aionn.service.client.supervisor``, through ``entry``, with ``--fd N --driver NAME --name DEVICE``.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel

from aionn.drivers import registry
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    OutputInsufficientSize,
    ResourceExhausted,
    shortage_of,
)
from aionn.hal import Device
from aionn.observability.log_tags import choose_tags
from aionn.observability.tracing import TRACE_VARIABLE, start_tracing
from aionn.platform.loops import finish, is_cancelled
from aionn.platform.threads import start_thread
from aionn.service.host.accepted import ENDING, Drain
from aionn.service.host.admission import Admission, ClientLimits, Credentials, Place
from aionn.service.host.listening import BACKLOG, listen_at, remove_socket
from aionn.service.host.newcomers import FIRST_CALL, Newcomers, send_reason
from aionn.service.host.session import Session
from aionn.service.host.threads import HostThreads
from aionn.service.progress import Progress
from aionn.service.wire.channel import Channel, Handler
from aionn.service.wire.peers import Peer, Peers
from aionn.service.wire.protocol import (
    CallBody,
    ReplyBody,
)
from aionn.service.wire.quotas import Quotas, Share, SharedDescriptors
from aionn.service.wire.received import close_in_turns, close_unread, has_unread

if TYPE_CHECKING:
    from aionn.service.host.reservations import ClientReservations, ServedReservations

__all__ = [
    "DEFAULT_LIMITS",
    "IDLE_S",
    "SHARED_QUOTAS",
    "freeze_modules",
    "listen",
    "main",
    "serve",
    "shorten_turns",
]

END_S_MAX = 0.5
"""Limit of the cleanup of a process whose client is gone, before it ends regardless: half of the documented time."""

IDLE_S = 10.0
"""A burst or request memory that is idle for this time is unmapped until its next use: longer than any pause within a stream."""

SWITCH_S = 0.0002
"""Time for which a thread may keep the interpreter's lock while other threads wait for it: a twenty-fifth of Python's own. An
execution passes the lock on up to six times, between the event loop and a thread of the device, and waits so long each time while
the model of another client is prepared. The Python code of a burst's frame is shorter as a rule, and is not interrupted."""

HELLO_TIMES_MAX = 12
"""Times that the limit for Hello is given to a connection whose first message waits for its turn, behind many others that began at
the same time: a minute, and a process of a hundred connections has served each within some seconds."""

ABANDONED_S = 1.0
"""After this time what a client left running has ended, as a rule."""

GARBAGE_PAUSE_S = 10.0
"""Pause between two garbage collections for the sake of clients that were cut off: one takes tens of milliseconds, in which this
process does not serve. Nothing of ours needs one; a driver may have left memories in cycles.
"""

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
    descriptors=2048 + 32 * 8 + 1024 * 2,  # Of what comes, of bursts, and of fenced executions.
    mapped_bytes=16 << 30,
)
"""Default limits of each client of a shared device."""

DEFAULT_LIMITS = ClientLimits()
"""Default number of clients that a socket serves concurrently."""

OWN_DESCRIPTORS = 256
"""Descriptors that are kept for this process itself: its device, its metrics, and those of messages that are being read."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.ECONNABORTED)
"""Errors by which a client cannot be accepted, or the listener not be watched, now: later it can."""

_logger = logging.getLogger("aionn.service")


async def serve(
    device: Device,
    sock: socket.socket,
    *,
    quotas: Quotas | None = None,
    progress: Progress | None = None,
    idle_s: float = IDLE_S,
    sealed_only: bool = False,
    peer_name: str = "the client",
    hello_s: float | None = None,
    place: Place | None = None,
    on_hello: Callable[[], None] | None = None,
    on_end: Callable[[], None] | None = None,
    peer: Peer | None = None,
    threads: HostThreads | None = None,
    share: Share | None = None,
    drain: Drain | None = None,
    reservations: ClientReservations | None = None,
) -> bool:
    """Serves one client until it goes away, then frees what was its own.

    Args:
        device: The device to serve.
        sock: The connection; owned by this call.
        quotas: The client's quotas; None for the defaults of ``Quotas``.
        progress: Is notified of the work that the device does; None means no watch.
        idle_s: Memories of bursts and requests that were not used for so long are given back.
        sealed_only: Refuses memory that the client can shorten: that would end this process, which other clients use.
        peer_name: Name of the client in errors.
        hello_s: Limit of the time until the client has sent Hello; None means no limit.
        place: The connection ends when this is given to another client; None for a process that has one client.
        on_hello: Called when the client has sent Hello.
        on_end: Called when the connection has ended, before the client's objects are freed.
        peer: The client's process, which may have other connections; None for one that has none.
        threads: The scheduling of this process, which the client may lend; None if it may not.
        share: The client's part in the descriptors of this process; None where it is the only one.
        drain: Ends the process in order; None for one that ends with its client.
        reservations: Those of its streams, beside the ones of other clients; None for a client that has the process alone.

    Returns:
        Whether it went in the middle of something.
    """
    peer = Peer() if peer is None else peer
    peer.connects_or_leaves()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(
            device,
            portal,
            tasks,
            quotas=quotas or Quotas(),
            progress=progress or Progress(None),
            on_hello=on_hello,
            peer=peer,
            threads=threads,
        )
        session.account.share = share
        handle = _handler(session, sock, tasks, drain, reservations)
        channel = Channel(
            sock,
            handle,
            peer_name=peer_name,
            sealed_only=sealed_only,
            account=session.account,
            peer=peer,
        )

        def dismiss(why: str) -> None:
            send_reason(sock, FIRST_CALL, why)
            channel.close(why)

        if place is not None:
            place.on_displaced = dismiss
            place.on_gone = lambda: channel.close(f"{peer_name} is gone")
            place.has_sent = lambda: channel.has_received or has_unread(sock)
        if on_end is not None:
            channel.ended.add_callback(lambda _: on_end())
        tasks.start_soon(_rest, session, idle_s)
        if hello_s is not None:
            is_kept_waiting = partial(_is_kept_waiting, channel, sock)
            tasks.start_soon(_await_hello, session, hello_s, is_kept_waiting, place, dismiss)
        try:
            await channel.run()
        finally:
            peer.connects_or_leaves()
            was_cut_off = channel.was_cut_off or session.account.taken("executions") > 0
            try:
                await finish(_close(session, peer, reservations))
            finally:
                if drain is not None:
                    drain.leave(session)
                channel.release()
                tasks.cancel_scope.cancel()
    return was_cut_off


def _handler(
    session: Session,
    sock: socket.socket,
    tasks: anyio.abc.TaskGroup,
    drain: Drain | None,
    reservations: ClientReservations | None,
) -> Handler:
    """Answers the calls of a client, as ``serve`` is asked to."""
    handle = session.handle if drain is None else drain.enter(session, sock, tasks).handle
    if reservations is None:
        return handle
    session.bursts.reserving = reservations.executing
    return reservations.before(
        handle, session.greeted.is_set, lambda: drain is not None and drain.is_requested
    )


async def _close(session: Session, peer: Peer, reservations: ClientReservations | None) -> None:
    try:
        await peer.charged(session.aclose())
    finally:
        if reservations is not None:
            reservations.leave()  # Its frames have ended.


async def _rest(session: Session, idle_s: float) -> None:
    # Not to be cancelled: a cancelled task is in a reference cycle with its frames, and so would be the session and all its
    # objects.
    while not session.closed.is_set():
        with anyio.move_on_after(idle_s / 2):
            await session.closed.wait()
        session.rest(idle_s)


def _is_kept_waiting(channel: Channel, sock: socket.socket) -> bool:
    """Whether the first message of a client is here, and waits for its turn."""
    return not channel.received_count and (channel.has_received or has_unread(sock))


async def _await_hello(
    session: Session,
    hello_s: float,
    is_kept_waiting: Callable[[], bool],
    place: Place | None,
    dismiss: Callable[[str], None],
) -> None:
    """Ends a connection without Hello; while its first message waits for its turn of the loop, it is given more time."""
    for _ in range(HELLO_TIMES_MAX):
        with anyio.move_on_after(hello_s):
            await session.greeted.wait()
        if session.greeted.is_set() or not is_kept_waiting():
            break
    if not session.greeted.is_set():
        if place is not None:
            place.on_silence()
        dismiss(f"service: expected Hello within {hello_s:g} s")


async def listen(
    device: Device,
    path: str | os.PathLike[str],
    *,
    mode: int = 0o600,
    quotas: Quotas = SHARED_QUOTAS,
    limits: ClientLimits = DEFAULT_LIMITS,
    progress: Progress | None = None,
    idle_s: float = IDLE_S,
    started: anyio.Event | None = None,
    drain: Drain | None = None,
    descriptors_max: int | None = None,
) -> None:
    """Serves every client of a socket until the task is cancelled, or until a drain is over.

    Args:
        device: The device to serve.
        path: Where the socket is made.
        mode: Its permissions: users who may write may use the device.
        quotas: The quotas of each client.
        limits: Limits of the concurrent clients; further ones get the reason for their rejection.
        progress: Is notified of the work that the device does; None means no watch.
        idle_s: See ``serve``.
        started: Is set when clients can connect.
        drain: Ends the process in order: the socket is removed when it begins; None serves until the task is cancelled.
        descriptors_max: Number of descriptors that this process may have; None asks the system (``RLIMIT_NOFILE``).

    Raises:
        DeviceUnavailable: The socket cannot be made, or another process serves there already.
    """
    listener, identity = await listen_at(os.fspath(path), mode)
    try:
        async with anyio.create_task_group() as tasks:
            if started is not None:
                started.set()
            peers, cut_off = Peers(), _CutOff()
            ledger = _ledger_of(device, limits, tasks)
            shared = SharedDescriptors(_for_clients(descriptors_max, limits))
            tasks.start_soon(cut_off.collect)

            async def serve_one(sock: socket.socket, client: Credentials, place: Place) -> None:
                peer = peers.of(place.process)
                one = serve(
                    device,
                    sock,
                    quotas=quotas,
                    progress=progress,
                    idle_s=idle_s,
                    sealed_only=True,
                    peer_name=f"the client ({client})",
                    hello_s=limits.hello_s,
                    place=place,
                    on_hello=lambda: newcomers.admission.greeted(place),
                    on_end=lambda: newcomers.ends(place),
                    peer=peer,
                    share=Share(shared, client.uid, place.process),
                    drain=drain,
                    reservations=ledger.client(client.in_words, peer, place, user=client.uid),
                )
                try:
                    if await peer.charged(one):
                        cut_off.happened.set()
                except Exception:
                    # One client's end, however it comes, does not affect other clients.
                    _logger.exception("serving a client (%s) failed", client)
                except anyio.get_cancelled_exc_class():
                    if is_cancelled():
                        raise
                    # A driver raised it while it freed its objects. Raised further, it would end the task group of all clients.
                    _logger.exception("serving a client (%s) failed", client)
                finally:
                    newcomers.leave(place)

            newcomers = Newcomers(Admission(limits), tasks, serve_one, peers.next_connection)
            tasks.start_soon(newcomers.end_those_gone)
            with anyio.CancelScope() as accepting:
                if drain is not None:
                    tasks.start_soon(_end_accepting, drain, accepting)
                await _accept_all(listener, newcomers, peers)
            assert drain is not None, "nothing else ends the acceptance"
            remove_socket(listener, os.fspath(path), identity)
            _reject_backlog(listener)
            await drain.over()
            tasks.cancel_scope.cancel()
    finally:
        remove_socket(listener, os.fspath(path), identity)
        listener.close()


def _ledger_of(device: Device, limits: ClientLimits, tasks: anyio.abc.TaskGroup) -> ServedReservations:
    """The reservations of all clients. A process that serves one application does not import the test of admission."""
    from aionn.realtime.delay import reserved_delay_ns
    from aionn.service.host.reservations import ServedReservations

    info = device.info
    ledger = ServedReservations(
        info.name,
        info.slots,
        share=limits.reserved_share,
        user_share=limits.reserved_share_per_user,
        delay_ns=reserved_delay_ns(),
    )
    tasks.start_soon(ledger.notify)
    return ledger


def _for_clients(descriptors_max: int | None, limits: ClientLimits) -> int:
    """Number of descriptors for what clients send: without those of their connections, and of this process itself."""
    if descriptors_max is None:
        descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = min(limits.clients + OWN_DESCRIPTORS, descriptors_max // 2)
    return descriptors_max - kept


async def _accept_all(listener: socket.socket, newcomers: Newcomers, peers: Peers) -> None:
    """Receives newcomers until the task is cancelled."""

    async def take_one() -> None:
        sock = await _accept(listener)
        try:
            client = Credentials.of(sock)
        except (MemoryError, OSError):
            await close_in_turns(sock, peers.next_connection)  # It is gone, or there is no room for it.
        else:
            await newcomers.receive(sock, client)

    while True:
        # Where connections come without end, those who are served have their turns between two of them.
        await peers.next_connection()
        try:
            await peers.charged_to_newcomers(take_one())
        except MemoryError:
            # The newcomer's connection is closed; those who are served continue.
            await anyio.sleep(RETRY_S)


async def _end_accepting(drain: Drain, accepting: anyio.CancelScope) -> None:
    await drain.requested()
    accepting.cancel()


def _reject_backlog(listener: socket.socket) -> None:
    """Sends the clients that have connected and were not accepted the reason why they are not served, and closes the listener."""
    for _ in range(BACKLOG):
        try:
            sock, _ = listener.accept()
        except OSError:
            break
        send_reason(sock, FIRST_CALL, ENDING)
        # First: a message that came after its emptying would discard the reason at the client.
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        close_unread(sock)
    listener.close()


class _CutOff:
    """Collects garbage after clients that left during a call, once for all that left within a while.

    Attributes:
        happened: To be set when there was one.
    """

    def __init__(self) -> None:
        self.happened = anyio.Event()

    async def collect(self) -> None:
        while True:
            await self.happened.wait()
            await anyio.sleep(ABANDONED_S)
            self.happened = anyio.Event()
            gc.collect()
            await anyio.sleep(GARBAGE_PAUSE_S)


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
            # The client waits in the backlog; those who are served continue.
            await anyio.sleep(RETRY_S)
            continue
        try:
            await anyio.wait_readable(listener)
        except OSError as e:
            if e.errno not in _PASSING:
                raise
            await anyio.sleep(RETRY_S)


async def _main(
    driver: str, name: str, sock: socket.socket, hang_after_s: float | None, threads: HostThreads
) -> None:
    try:
        device = registry.make_device(driver, name)
    except (DeviceUnavailable, InvalidArgument) as e:
        await _refuse(sock, DeviceUnavailable(str(e)))
        return
    freeze_modules()
    shorten_turns()
    with Progress(hang_after_s) as progress:
        try:
            await serve(device, sock, progress=progress, threads=threads)
        finally:
            try:
                await finish(device.aclose())
            finally:
                threads.close()


async def _refuse(sock: socket.socket, why: DeviceUnavailable | ResourceExhausted) -> None:
    """Answers any call of the client with the reason for the missing device."""

    async def refuse(body: CallBody, channel: Channel) -> ReplyBody:
        raise why

    channel = Channel(sock, refuse, peer_name="the client")
    try:
        await channel.run()
    finally:
        channel.release()


def shorten_turns() -> None:
    """Sets how long one thread of this process may keep the interpreter's lock from others, to ``SWITCH_S``.

    For processes that only serve a device.
    """
    sys.setswitchinterval(SWITCH_S)


def freeze_modules() -> None:
    """Takes what this process has made so far, and keeps as long as it lives, out of every later garbage collection.

    One that looks through all modules takes tens of milliseconds, in which the event loop does not run. For processes that only
    serve a device.
    """
    gc.freeze()


def _end_with_client(fd: int) -> None:
    """Waits for the client's end to go away, then lets the process END_S_MAX to clean up. A thread, so that a loop that is stuck
    cannot keep the process alive."""
    import select
    import time

    poller = select.poll()
    poller.register(fd, select.POLLHUP | select.POLLRDHUP)
    poller.poll()  # Nothing else is reported but errors of the socket, after which there is no client either.
    time.sleep(END_S_MAX)
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="aionn.service.entry", description="Serves one driver; internal.")
    parser.add_argument("--fd", type=int, required=True, help="connected Unix socket, inherited")
    parser.add_argument(
        "--watchdog-fd", type=int, help="connection to the watchdog over real-time threads, inherited"
    )
    parser.add_argument("--driver", required=True, help="registered name of the driver")
    parser.add_argument("--name", required=True, help="name of the device")
    parser.add_argument(
        "--hang-after", type=float, default=None, help="seconds without progress that end the process"
    )
    options = parser.parse_args(arguments)
    # The client decides when this ends. A terminal's Ctrl-C does not reach this process, since it has a session of its own; a
    # signal that is sent is not reported.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    watchdog = None
    if options.watchdog_fd is not None:
        watchdog = socket.socket(fileno=options.watchdog_fd)
        watchdog.set_inheritable(False)
    threads = HostThreads(may_join=True, watchdog=watchdog)
    choose_tags(is_driver=True)
    trace = os.environ.get(TRACE_VARIABLE)
    if trace:
        try:
            start_tracing(trace, process=f"driver of {options.name}", create=False)
        except InvalidArgument as e:
            _logger.warning("%s", e)
    watch = threading.Thread(
        target=_end_with_client, args=(os.dup(options.fd),), daemon=True, name="aionn-end"
    )
    try:
        try:
            start_thread(watch, "driver process")
        except ResourceExhausted as e:
            # Without the watch a device that hangs would outlive its client; this message needs no thread.
            anyio.run(_refuse, sock, e)
            return
        anyio.run(_main, options.driver, options.name, sock, options.hang_after, threads)
    except (MemoryError, OSError, RuntimeError) as e:
        shortage = shortage_of(e, options.name)
        if shortage is None:
            raise
        raise SystemExit(str(shortage)) from e
    except (DeadObject, DeviceUnavailable, GeneralFailure, InvalidArgument, OutputInsufficientSize) as e:
        raise SystemExit(f"{options.name}: {e}") from e
