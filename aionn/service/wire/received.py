"""Descriptors that come over a socket, until a message keeps them or they are closed.

Owns what must be known of a stranger's descriptor before it is closed: whether closing it can wait. Closing the last descriptor of
a network socket whose owner asked to linger (SO_LINGER) waits until its peer has read everything: for hours, although the socket
does not block. That holds as well for what the kernel closes by itself: descriptors of unread messages when a Unix socket is
closed. Closing a file of a file system in user space waits for the process that serves it. See ``platform.descriptors`` for more.

Invariants:
1. No closing of a received descriptor waits for a network, also one inside a Unix socket that was sent.
2. A socket that does not belong to a fence is recognised before anything of the message is used.
3. Of a client of a shared device, no file that another process may serve is read, asked for its size, or closed in the event loop.
4. The descriptors that wait to be closed are bounded: a message is not received while its process, or all together, have many of
   them (``load``), nor one of a connection that ends while ``WAITING_MAX`` wait.

The content of a fence's packet is not examined: a fence is closed while other readers may still read it.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import anyio
import anyio.lowlevel

from aionn.errors import DeadObject, InvalidArgument, ResourceExhausted
from aionn.platform.descriptors import close_apart, kinds_of, waiting_to_be_closed
from aionn.service.wire.handles import close_gently, close_quick
from aionn.service.wire.peers import Peer
from aionn.service.wire.quotas import Account
from fences import FenceStatus, SyncFence, first
from fences.descriptor import NAME_PREFIX

__all__ = [
    "SENT_AT_ONCE_MAX",
    "HangUps",
    "close_charged",
    "close_in_turns",
    "close_kept",
    "close_received",
    "close_unread",
    "descriptors_of",
    "drain",
    "has_unread",
    "have_strange_sockets",
    "keeping",
    "local_only",
    "no_descriptor_is_left",
    "payload_of",
    "receive",
]

SENT_AT_ONCE_MAX = 253
"""Descriptors of one message (SCM_MAX_FD of the kernel). With room for fewer the kernel would close the rest itself."""

FOREIGN_S_MAX = 1.0
"""Time for which a connection waits until files of others that it sent are closed."""

WAITING_MAX = 512
"""Descriptors that wait for the thread that closes, while connections that end are emptied: two messages with as many as fit."""

LOOKS_MAX = 1000
"""Turns for which a connection that ends waits until those are closed."""

LOOK_S = 1e-3
"""Interval between two of them."""

ROOM_LOOK_S = 1e-3
"""Interval between two looks whether descriptors are closed: a flood of descriptors alone is waited for."""

REJECTED_NS = 5_000_000_000
"""Time for which a process is suspect after its descriptors were in the way of others, or were strange sockets: it may send such a
message again immediately."""

UNREAD_MAX = 1 << 16
"""Messages that are taken from a socket that is shut down: more than its buffer holds."""

DRAINED_WEIGHT = 16
"""Messages that are taken from a socket that is shut down before others have a turn: some tens of microseconds. A descriptor counts
as one more. With one message a turn, the connections of a process that died after a flood would stay: each has hundreds."""

_ROOM_OF_MESSAGE = socket.CMSG_SPACE(SENT_AT_ONCE_MAX * array.array("i").itemsize)
_ROOM = _ROOM_OF_MESSAGE + socket.CMSG_SPACE(struct.calcsize("3i"))
_BYTES_AT_ONCE = 1 << 12
_FLAGS = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_NO_LINGER = struct.pack("ii", 0, 0)
_Ancillary = Iterable[tuple[int, int, bytes]]


def descriptors_of(ancillary: _Ancillary) -> list[int]:
    """The descriptors that came with a message."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


async def local_only(fds: Sequence[int], account: Account | None, peer: Peer, ended: SyncFence) -> list[int]:
    """The descriptors of a message, with the null device in the place of each file of another's file system.

    Those are closed by a thread: until then they count, and for ``FOREIGN_S_MAX`` nothing more is read from the connection,
    or until another process is not read because of these.

    Args:
        fds: The descriptors; closed where this raises.
        account: The client's.
        peer: The process.
        ended: Signalled when the connection has ended, which ends the wait.

    Raises:
        InvalidArgument: One is of a kind that no message uses.
        OSError: No descriptor is left.
        ResourceExhausted: The client has too many.
    """
    kinds = kinds_of(fds)
    if not kinds.foreign and not kinds.useless:
        return list(fds)
    kept = [fd for fd in fds if fd not in kinds.foreign]
    stand_ins = []
    closed = SyncFence("closing of files")
    try:
        if kinds.foreign:
            _close_counted(sorted(kinds.foreign), account, closed)
        if kinds.useless:
            raise InvalidArgument(f"no message uses such a descriptor: {next(iter(kinds.useless.values()))}")
        with anyio.move_on_after(FOREIGN_S_MAX) as scope, peer.held.keeping(len(fds), scope.cancel):
            await first([closed, ended])
        if scope.cancelled_caught:
            _suspect(peer)
        for _ in kinds.foreign:
            stand_ins.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            kept.append(stand_ins[-1])
    except BaseException:
        await close_received(kept, anyio.lowlevel.checkpoint)
        raise
    return [stand_ins.pop() if fd in kinds.foreign else fd for fd in fds]


async def receive(
    sock: socket.socket, bytes_max: int, peer: Peer, ended: SyncFence
) -> tuple[bytes, list[int], int, bool]:
    """The next message of a process.

    Args:
        sock: The connection.
        bytes_max: The longest message.
        peer: The process.
        ended: Signalled when the connection has ended.

    Returns:
        Its bytes; its descriptors, which count as held by the process until ``close_charged``; its flags; and whether the loop has
        waited for it.

    Raises:
        OSError: The connection has failed.
    """
    has_waited = False
    while True:
        if not peer.may_send_descriptors:
            await _until_closed(peer, ended)
            if ended.status is not FenceStatus.PENDING:
                raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        try:
            # Without MSG_CMSG_CLOEXEC a child forked at this moment would inherit the descriptors.
            payload, ancillary, flags, _ = sock.recvmsg(bytes_max, _ROOM_OF_MESSAGE, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:
            await anyio.wait_readable(sock)
            has_waited = True
    fds = descriptors_of(ancillary) if ancillary else []
    if fds:
        peer.held.add(len(fds))
    return payload, fds, flags, has_waited


async def _until_closed(peer: Peer, ended: SyncFence) -> None:
    """Waits until a process may send descriptors, or the connection has ended. Of the connections of a process one looks."""
    with _cancelled_by(ended):
        async with peer.room:
            await _until_room(peer)


@contextmanager
def _cancelled_by(ended: SyncFence) -> Iterator[anyio.CancelScope]:
    with anyio.CancelScope() as scope:

        def cancel(_: SyncFence) -> None:
            scope.cancel()

        ended.add_callback(cancel)
        try:
            yield scope
        finally:
            ended.remove_callback(cancel)


async def _until_room(peer: Peer) -> None:
    try:
        while not peer.may_send_descriptors:
            peer.held.waits(time.monotonic_ns(), is_suspect=peer.is_suspect)
            await anyio.sleep(ROOM_LOOK_S)
    finally:
        peer.held.waits_no_more()


def keeping(fds: Sequence[int], peer: Peer, ended: SyncFence) -> AbstractContextManager[None]:
    """The work on a message before its descriptors are closed. That of a large one lasts as long as its process likes, whose
    models are prepared before, and that of each one while a flood pauses. It ends early where a process without descriptors is not
    read because of it, or the connection has ended.

    Raises:
        DeadObject: The connection has ended.
        ResourceExhausted: It is in the way; its process is suspect for a while.
    """
    return _keeping(len(fds), peer, ended) if fds else nullcontext()


@contextmanager
def _keeping(count: int, peer: Peer, ended: SyncFence) -> Iterator[None]:
    with _cancelled_by(ended) as scope, peer.held.keeping(count, scope.cancel):
        yield
    if scope.cancelled_caught:
        if ended.status is not FenceStatus.PENDING:
            raise DeadObject("the connection has ended")
        _suspect(peer)
        raise ResourceExhausted("the descriptors of a message were in others' way", transient=True)


def close_charged(fds: Sequence[int], peer: Peer) -> SyncFence | None:
    """Closes descriptors of ``receive``. Returns a fence that is signalled when a thread has closed some, which counts as the
    peer's use of the loop; None where no thread does.
    """
    slow = close_quick(fds)
    if len(slow) < len(fds):
        peer.held.closed(len(fds) - len(slow))
    if not slow:
        return None
    closed = SyncFence("closing of descriptors")

    def on_closed(used_ns: int) -> None:
        peer.closed(used_ns)
        peer.held.closed(len(slow))
        closed.try_signal()

    close_apart(slow, on_closed)
    return closed


def _close_counted(fds: list[int], account: Account | None, closed: SyncFence) -> None:
    """Closes files of others, which count for the client until then."""
    try:
        if account is not None:
            account.take_descriptors(len(fds))
    except BaseException:
        close_apart(fds)
        raise

    def on_closed(_: int) -> None:
        if account is not None:
            account.give_back_descriptors(len(fds))
        closed.try_signal()

    close_apart(fds, on_closed)


def have_strange_sockets(fds: Sequence[int]) -> bool:
    """Whether there are sockets among descriptors that do not belong to a fence: they are to be closed by ``close_received``."""
    return any(map(_is_strange_socket, fds))


def _is_strange_socket(fd: int) -> bool:
    try:
        # A file is recognised by the failure of a call for sockets: fstat may wait for the process that serves its file system.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
    except OSError:
        return False
    try:
        name = sock.getsockname()
        return not (isinstance(name, bytes) and name.startswith(NAME_PREFIX))
    except OSError as e:
        return e.errno != errno.ENOTSOCK
    finally:
        sock.detach()


_Parts = Generator[Any, None, None]
"""Work in parts. Each item is the weight of a part, one for a message, a connection and a descriptor, or a generator of the same
kind, whose parts come first. One descriptor may stand for a hundred thousand messages: sockets in messages in sockets."""


def _weights(parts: _Parts) -> Iterator[int]:
    """Does all parts; returns the weight of each."""
    # A stack of generators, no ``yield from``: a sender that packs the outermost socket first nests sockets as deep as it has
    # descriptors, which is deeper than Python's calls, and passing a weight through all of them would be quadratic.
    unfinished = [parts]
    while unfinished:
        part = next(unfinished[-1], None)
        if part is None:
            unfinished.pop()
        elif isinstance(part, int):
            yield part
        else:
            unfinished.append(part)


def _closing(fds: Sequence[int]) -> _Parts:
    """Closes descriptors such that it does not wait; those that can take long in a thread."""
    # Files are not distinguished by kind, which would take a table of the kernel for each: a thread closes them all.
    sockets: list[int] = []
    others: list[int] = []
    for fd in fds:
        (sockets if _is_strange_socket(fd) else others).append(fd)
    if others:
        close_gently(others)
        yield len(others)
    for fd in sockets:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
        is_empty = False
        try:
            if _forget_lingering(sock) == socket.AF_UNIX:
                yield _emptying(sock)
                is_empty = True
        finally:
            sock.detach()
        if is_empty:
            os.close(fd)
        else:
            close_gently([fd])  # Another holder may have it linger again.
        yield 1


def _forget_lingering(sock: socket.socket) -> int:
    """Has the closing of a socket not wait for its own data. Returns its family."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    except OSError:
        pass  # Closing a socket without that option does not wait.
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)


def _emptying(sock: socket.socket) -> _Parts:
    """Shuts a Unix socket down and empties it: descriptors in it are closed with it, and so on."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The peer has done it, or it was never connected.
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        yield _emptying_backlog(sock)
    else:
        yield _draining(sock)


def _emptying_backlog(listener: socket.socket) -> _Parts:
    """Closes the connections that no process has accepted: their messages are closed with a listening socket."""
    listener.setblocking(False)
    for _ in range(UNREAD_MAX):
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # No further one has come, or no descriptor is left.
        with sock:
            yield _emptying(sock)
        yield 1


def _draining(sock: socket.socket) -> _Parts:
    """Takes the unread messages from a socket that is shut down, and closes their descriptors."""
    try:
        # Then every message comes with its sender's number, also an empty one; the end does not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The end of a stream comes with a number, too; but a stream has no empty messages.
        is_stream = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        for _ in range(UNREAD_MAX):
            payload, ancillary, _, _ = sock.recvmsg(_BYTES_AT_ONCE, _ROOM, _FLAGS)
            fds = descriptors_of(ancillary)
            if fds:
                yield _closing(fds)
            if not payload and (is_stream or not ancillary):
                return
            yield 1
    except OSError:
        return  # It is closed already, or there is nothing in it.


async def _in_turns(parts: _Parts, next_turn: Callable[[], Awaitable[None]]) -> None:
    """Does all parts, with ``next_turn`` after each ``DRAINED_WEIGHT`` of them; without it when it is cancelled natively."""
    total = 0
    weights = _weights(parts)
    try:
        with anyio.CancelScope(shield=True):
            while True:
                for _ in range(LOOKS_MAX):
                    if waiting_to_be_closed() <= WAITING_MAX:
                        break
                    await anyio.sleep(LOOK_S)
                    await next_turn()
                weight = next(weights, None)
                if weight is None:
                    break
                total += weight
                if total >= DRAINED_WEIGHT:
                    total = 0
                    await next_turn()
    finally:
        for _ in weights:
            pass


async def close_received(fds: Sequence[int], next_turn: Callable[[], Awaitable[None]]) -> None:
    """Closes descriptors, those of sockets without waiting for their peers, while others have turns; also when it is cancelled.

    Args:
        fds: The descriptors.
        next_turn: Awaited between parts of the work; others have turns in it.
    """
    await _in_turns(_closing(fds), next_turn)


def _suspect(peer: Peer) -> None:
    peer.suspect_until_ns = time.monotonic_ns() + REJECTED_NS


async def close_kept(fds: Sequence[int], peer: Peer) -> None:
    """As ``close_received``, for strange sockets of ``receive`` and what came with them. Once a process without descriptors is not
    read because of them, no turn of their process is waited for.
    """
    _suspect(peer)
    is_in_the_way, turn = False, anyio.CancelScope()

    def hurry() -> None:
        nonlocal is_in_the_way
        is_in_the_way = True
        turn.cancel()

    async def next_turn() -> None:
        nonlocal turn
        if is_in_the_way:
            await anyio.lowlevel.checkpoint()
        else:
            with anyio.CancelScope() as turn:
                await peer.next_turn_of_leaving()

    try:
        with peer.held.keeping(len(fds), hurry):
            await close_received(fds, next_turn)
    finally:
        peer.held.closed(len(fds))


async def payload_of(sock: socket.socket, bytes_max: int, next_turn: Callable[[], Awaitable[None]]) -> bytes:
    """The next message of a socket, without its descriptors, which are closed in turns. Raises as ``recvmsg``."""
    payload, ancillary, _, _ = sock.recvmsg(bytes_max, _ROOM, _FLAGS)
    await close_received(descriptors_of(ancillary), next_turn)
    return payload


async def drain(sock: socket.socket, next_turn: Callable[[], Awaitable[None]]) -> None:
    """Takes the unread messages from a socket that is shut down, and closes their descriptors; as ``close_received``."""
    await _in_turns(_draining(sock), next_turn)


async def close_in_turns(sock: socket.socket, next_turn: Callable[[], Awaitable[None]]) -> None:
    """As ``close_unread``, while others have turns; also when it is cancelled. See ``close_received`` for the arguments."""
    try:
        await _in_turns(_emptying(sock), next_turn)
    finally:
        sock.close()


def has_unread(sock: socket.socket) -> bool:
    """Whether a message of a peer that has not closed its end is unread."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return any(events == select.POLLIN for _, events in poll.poll(0))


class HangUps:
    """Finds out which of many connections their peers have closed, also while messages are unread.

    One call of the kernel asks for all: each call releases the interpreter's lock, as in ``handles.close_gently``.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._on_hang_up: dict[int, Callable[[], None]] = {}

    def watch(self, sock: socket.socket, on_hang_up: Callable[[], None]) -> int:
        """Has a function called by ``look`` when the peer has closed its end. To be forgotten before the socket is closed.

        Returns:
            The argument of ``forget``.
        """
        number = sock.fileno()
        self._poll.register(number, 0)
        self._on_hang_up[number] = on_hang_up
        return number

    def forget(self, number: int) -> None:
        """Undoes ``watch``."""
        self._poll.unregister(number)
        del self._on_hang_up[number]

    def look(self) -> None:
        """Calls the functions of those connections that are closed."""
        closed = [self._on_hang_up.get(number) for number, _ in self._poll.poll(0)]
        for on_hang_up in closed:
            if on_hang_up is not None:
                on_hang_up()


def close_unread(sock: socket.socket) -> None:
    """Closes a Unix socket for good, and the descriptors of unread messages, in one turn: for sockets of processes of our own."""
    try:
        for _ in _weights(_emptying(sock)):
            pass
    except OSError:
        pass  # It is closed already.
    sock.close()


def no_descriptor_is_left() -> bool:
    """Whether this process, or the machine, can open none at this moment."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)
    return False
