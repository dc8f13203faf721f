"""Sending a queue to another process: its descriptor as bytes, its file descriptors beside them.

Owns the form on a Unix stream socket (a length, the descriptor's bytes, the file descriptors with the first byte) and
the closing of descriptors that came with a message that is refused. Refuses to own the socket.

By inheritance there is nothing to send: start the child with `pass_fds=queue.fds` and hand it
`queue.descriptor.to_bytes()` and the numbers; it attaches with them, and closes them afterwards if it likes.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from fmq.descriptor import FDS_MAX, MQDescriptor
from fmq.errors import InvalidDescriptor
from fmq.queue import MessageQueue

__all__ = ["receive_queue", "receive_descriptor", "send_queue"]

_LENGTH: Final = struct.Struct("<I")
_BYTES_MAX: Final = 1024
"""A descriptor with all its grantors takes 168 bytes."""
_ROOM_FDS: Final = 64
"""Room for more than a queue has, in descriptors: for ancillary data that the socket may be configured to add, credentials for
example, which would leave none for the queue's own.
"""


def send_queue(channel: socket.socket, queue: MessageQueue) -> None:
    """Sends what `receive_queue` at the other end of a blocking Unix stream socket needs.

    Raises:
        OSError: As `socket.sendmsg`.
    """
    payload = queue.descriptor.to_bytes()
    message = _LENGTH.pack(len(payload)) + payload
    sent = socket.send_fds(channel, [message], list(queue.fds))
    if sent < len(message):
        channel.sendall(message[sent:])


def receive_descriptor(channel: socket.socket) -> tuple[MQDescriptor, list[int]]:
    """Receives a descriptor and its file descriptors; the caller owns and closes these.

    Raises:
        InvalidDescriptor: The stream ended, too many descriptors came, or the bytes are not a descriptor; all received descriptors
            are closed.
        OSError: As `socket.recvmsg`.
    """
    data, fds, flags, _ = socket.recv_fds(channel, _LENGTH.size, _ROOM_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC or len(fds) > FDS_MAX:
            raise InvalidDescriptor(f"descriptor: expected at most {FDS_MAX} file descriptors, got more")
        data += _receive_exactly(channel, _LENGTH.size - len(data)) if data else b""
        if len(data) < _LENGTH.size:
            raise InvalidDescriptor("descriptor: expected a length of 4 bytes, got the end of the stream")
        (length,) = _LENGTH.unpack(data)
        if length > _BYTES_MAX:
            raise InvalidDescriptor(f"descriptor: expected at most {_BYTES_MAX} bytes, got {length}")
        return MQDescriptor.from_bytes(_receive_exactly(channel, length)), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def receive_queue(channel: socket.socket) -> MessageQueue:
    """Receives a descriptor and attaches to its queue.

    Raises:
        InvalidDescriptor: As `receive_descriptor` and `MessageQueue.attach`.
        OSError: As `socket.recvmsg`.
    """
    descriptor, fds = receive_descriptor(channel)
    try:
        return MessageQueue.attach(descriptor, fds)
    finally:
        for fd in fds:
            os.close(fd)


def _receive_exactly(channel: socket.socket, size_bytes: int) -> bytes:
    parts = b""
    while len(parts) < size_bytes:
        part = channel.recv(size_bytes - len(parts))
        if not part:
            raise InvalidDescriptor(f"descriptor: expected {size_bytes} bytes, got the end of the stream")
        parts += part
    return parts
