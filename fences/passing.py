"""Sending and receiving fences over a Unix socket.

Owns: one small message for each fence, the descriptor beside it, the closing of descriptors that came with a message that is
refused. Refuses to own: connections, event loops; a protocol that has messages of its own carries ``SyncFence.export`` in
them instead.

The message is a length of four bytes, then the record (see ``state``); the descriptor travels with the first byte. A
finished fence crosses as its record alone. Stream and packet sockets both do.

Invariants:
1. A receiver owns what it received or has closed it: no descriptor stays behind after an error.
2. A message is at most ``RECORD_BYTES_MAX`` and the length, so a stream socket takes it whole or not at all.
"""

from __future__ import annotations

import array
import os
import socket
import struct

from fences.fence import SyncFence
from fences.state import RECORD_BYTES_MAX, NotAFenceError, decode, encode, outcome_of

_LENGTH = struct.Struct("<I")
_DESCRIPTORS_MAX = 8
"""Room for more than the one we expect, so that strays arrive and can be closed instead of being lost in a truncated
message."""
_OTHER_BYTES = 256
"""Room for ancillary data that a socket may be configured to add: credentials, a security label, time stamps."""


def send_fence(sock: socket.socket, fence: SyncFence) -> None:
    """Send a fence to the reader of the other end. The fence stays usable here, and whose it is does not change.

    Args:
        sock: A connected Unix socket; its time-out holds, and non-blocking it raises instead of waiting.
        fence: Pending or finished, our own or imported.

    Raises:
        OSError: of the socket; EMFILE, no descriptor was free. The message was not sent, unless the socket itself is broken.
        BlockingIOError: the socket is non-blocking and full; nothing was sent.
    """
    state, number = fence.export()
    try:
        record = encode(outcome_of(state))
        message = _LENGTH.pack(len(record)) + record
        rights = (
            [] if number is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [number]))]
        )
        sent = sock.sendmsg([message], rights, socket.MSG_NOSIGNAL)
        if sent != len(message):
            raise ConnectionError(
                f"fence message: only {sent} of {len(message)} bytes went out; the connection is unusable"
            )
    finally:
        if number is not None:
            os.close(number)


def recv_fence(sock: socket.socket, name: str | None = None) -> SyncFence:
    """Receive a fence that :func:`send_fence` sent.

    Args:
        sock: A connected Unix socket; its time-out holds, and non-blocking it raises instead of waiting.
        name: Name of the fence in errors here.

    Raises:
        EOFError: the other side closed the connection.
        NotAFenceError: the message is not a fence; its descriptors are closed. The connection should be closed too.
        OSError: of the socket; EMFILE, no descriptor was free for the fence.
        BlockingIOError: the socket is non-blocking and nothing has come.
    """
    packets = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_STREAM
    wanted = _LENGTH.size + RECORD_BYTES_MAX if packets else _LENGTH.size
    numbers: list[int] = []
    try:
        room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize) + _OTHER_BYTES
        data, rights, flags, _ = sock.recvmsg(wanted, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                numbers.extend(received)
        if not data:
            raise EOFError("the other side closed the connection")
        if flags & socket.MSG_CTRUNC:
            raise NotAFenceError(
                "fence message: descriptors were lost on the way (too many came, or none is free here)"
            )
        if flags & socket.MSG_TRUNC or len(data) < _LENGTH.size:
            raise NotAFenceError(f"fence message: expected a length and a record, got {len(data)} bytes")
        (size_bytes,) = _LENGTH.unpack_from(data)
        if not 0 < size_bytes <= RECORD_BYTES_MAX:
            raise NotAFenceError(
                f"fence message: expected a record of 1..{RECORD_BYTES_MAX} bytes, got {size_bytes}"
            )
        record = data[_LENGTH.size :] if packets else _receive_exactly(sock, size_bytes)
        if len(record) != size_bytes:
            raise NotAFenceError(f"fence message: expected a record of {size_bytes} bytes, got {len(record)}")
        if len(numbers) > 1:
            raise NotAFenceError(f"fence message: expected at most one descriptor, got {len(numbers)}")
        outcome = decode(record)
        if outcome is not None:
            return SyncFence.finished(outcome, name)
        if not numbers:
            raise NotAFenceError("fence message: pending, but no descriptor came with it")
        return SyncFence.from_fd(numbers[0], name)
    finally:
        for number in numbers:
            os.close(number)


def _receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    # The sender's kernel queued the message whole, so this waits only if the peer does not send fences.
    received = bytearray()
    while len(received) < size_bytes:
        try:
            part = sock.recv(size_bytes - len(received))
        except BlockingIOError as error:
            raise NotAFenceError("fence message: came in pieces, which no sender of fences makes") from error
        if not part:
            raise EOFError("the other side closed the connection in the middle of a fence")
        received += part
    return bytes(received)
