"""The heads of frames between a client and a node, and their limits.

Owns the messages that only a network needs: greeting, time, and executions with their values behind the head. A call of the driver
contract is a message of ``aionn.service.wire.protocol`` as it is: its descriptors travel as the contents of their files, and are
memories again at the node (``Carried``). So its checks, its limits and its decoding in short parts hold here as well.

Invariants:
1. No absolute time of one machine is used on another. A client sends what is left until a deadline, and the earliest time of the
   node's clock at which that was so.
2. A result names the execution and the generation that it belongs to; both are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from aionn.errors import ErrorStatus, InvalidArgument
from aionn.fleet.framing import FrameLimits, frame_lengths
from aionn.hal import DeviceInfo, OutputShape, Priority, Timing
from aionn.hal.callers import FrameReport
from aionn.service.wire.scheduling_messages import Room, Withdrawn

__all__ = [
    "CLIENT_LIMITS",
    "CONTROL_LIMITS",
    "GREETING_LIMITS",
    "DATA_BYTES_MAX",
    "DATA_LIMITS",
    "PARTS_MAX",
    "Argument",
    "Heartbeat",
    "Carried",
    "Figures",
    "FromClient",
    "FromNode",
    "GetFigures",
    "Hello",
    "LaidOut",
    "Layout",
    "Outcome",
    "Probe",
    "ProbeReply",
    "Refused",
    "Submit",
    "Welcome",
    "Withdraw",
    "decode_from_client",
    "decode_from_node",
    "framed",
]

MIB = 1 << 20

PARTS_MAX = 241
"""Contents of files that one message may carry, as many as a message over a Unix socket has descriptors."""

DATA_BYTES_MAX = 256 * MIB
"""Largest values of one execution, in each direction: forty frames of 1080p in float32, far beyond what has a deadline."""

MODEL_BYTES_MAX = 1024 * MIB
"""Largest contents of a call: the constants of a large model."""

GREETING_LIMITS = FrameLimits(4 << 10, 0)
"""Limits of a connection that has not greeted: a name, a secret and a number."""

CONTROL_LIMITS = FrameLimits(64 << 10, MODEL_BYTES_MAX)
"""A call in a datagram is at most 32 KiB; see ``aionn.service.wire.sizes``."""

DATA_LIMITS = FrameLimits(64 << 10, DATA_BYTES_MAX)
"""The head of a layout: 1,024 arguments with their shapes."""

CLIENT_LIMITS = FrameLimits(2 * MIB, DATA_BYTES_MAX)
"""Limits of what a client reads: a device with thousands of extensions, an answer per operation of a large model."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a connection.

    Attributes:
        role: ``control`` for calls, ``data`` for executions of one prepared model.
        sent_ns: On the client's clock.
        secret: Of a data connection: what the node gave to the connection of the calls. Empty otherwise.
        prepared: Of a data connection: the handle of its prepared model.
    """

    role: Literal["control", "data"]
    sent_ns: int
    secret: bytes = b""
    prepared: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello.

    Attributes:
        sent_ns: As in Hello.
        received_ns: When Hello came, on the node's clock.
        replied_ns: When this was sent, on the node's clock.
        generation: Of the client's connection; no other of this node ever has it.
        secret: For data connections.
        node: The node's name. Empty for a data connection.
        info: The device. None for a data connection.
        data_connections: Number of data connections that the client may have.
        keeps_reservations: Whether the device has a ledger for the streams of all its clients.
    """

    sent_ns: int
    received_ns: int
    replied_ns: int
    generation: int
    secret: bytes = b""
    node: str = ""
    info: DeviceInfo | None = None
    data_connections: int = 0
    keeps_reservations: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The node ends the connection.

    Attributes:
        why: The reason.
        is_full: Whether the client, or those of its name, have as much as they may: another end makes room.
    """

    why: str
    is_full: bool = False


class Carried(msgspec.Struct, frozen=True, tag=True):
    """A message of ``aionn.service.wire.protocol``; its body has the contents of its descriptors, one after the other.

    Attributes:
        payload: The message.
        parts: The sizes of the contents in bytes, at least 1 each.
    """

    payload: bytes
    parts: tuple[int, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The node is alive, and has work of this client."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks for the time."""

    sent_ns: int


class ProbeReply(msgspec.Struct, frozen=True, tag=True):
    """The node's time, when the question came and when this was sent."""

    sent_ns: int
    received_ns: int
    replied_ns: int


class GetFigures(msgspec.Struct, frozen=True, tag=True):
    """Asks for the load of the node."""


class Figures(msgspec.Struct, frozen=True, tag=True):
    """The load of the node.

    Attributes:
        clients: Connected applications.
        data_connections: Their open data connections.
        executing: Executions that have begun to arrive and are not answered.
    """

    clients: int
    data_connections: int
    executing: int


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """One input or output.

    Attributes:
        length: In bytes; None for an optional input that is left out.
        dimensions: Its shape; of an output what is known of it, 0 for an extent that is not.
    """

    length: int | None
    dimensions: tuple[int, ...] = ()


class Layout(msgspec.Struct, frozen=True, tag=True):
    """The arguments of the executions that follow on this connection."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]


class LaidOut(msgspec.Struct, frozen=True, tag=True):
    """The node has memory for the layout; or the reason why it has not."""

    status: ErrorStatus = ErrorStatus.NONE
    message: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An execution; its body has the inputs, one after the other.

    Attributes:
        number: Unique on this connection.
        generation: The client's.
        stamp_ns: When it was sent, on the client's clock; only returned.
        sent_ns: The same on the node's clock, at the earliest; 0 where there is no deadline.
        remaining_ns: The time that was left until the deadline then; None without a deadline.
        measure: Whether timings are wanted.
        loop_timeout_ns: For every WHILE; None means the default.
        priority: Of this execution; None means the prepared model's.
        in_burst: Whether the node may execute it by a burst, which is quicker, and which a cancellation does not stop.
        reservation: The number of the reservation that it is a frame of; 0 for best effort.
    """

    number: int
    generation: int
    stamp_ns: int
    sent_ns: int = 0
    remaining_ns: int | None = None
    measure: bool = False
    loop_timeout_ns: int | None = None
    priority: Priority | None = None
    in_burst: bool = False
    reservation: int = 0


class Withdraw(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of an execution is not wanted any more. It is answered all the same."""

    number: int


class Outcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of an execution; its body has the outputs, one after the other.

    Attributes:
        number: As in Submit.
        generation: As in Submit.
        stamp_ns: As in Submit.
        received_ns: When all of it was there, on the node's clock.
        replied_ns: When this was sent, on the node's clock.
        status: NONE, or the error. An output that is too small has a status of its own.
        message: The error's text.
        shapes: Of the outputs.
        timing: If it was measured.
        lengths: The bytes of each output in the body; empty where an output did not fit.
        report: Of a frame of a reservation, what the queue of the device has measured, on the node's clock.
    """

    number: int
    generation: int
    stamp_ns: int
    received_ns: int
    replied_ns: int
    status: ErrorStatus = ErrorStatus.NONE
    message: str = ""
    shapes: tuple[OutputShape, ...] = ()
    timing: Timing = Timing()
    lengths: tuple[int, ...] = ()
    report: FrameReport | None = None


FromClient = Hello | Carried | Probe | GetFigures | Layout
FromNode = Welcome | Refused | Carried | Heartbeat | ProbeReply | Figures | LaidOut | Withdrawn | Room
ExecutionFromClient = Submit | Withdraw

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_executions: msgspec.msgpack.Decoder[ExecutionFromClient] = msgspec.msgpack.Decoder(ExecutionFromClient)
_outcomes = msgspec.msgpack.Decoder(Outcome)

_ARRAY = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
"""First bytes of an array in MessagePack: the messages of an execution, which are decoded for each frame, are arrays."""

_T = TypeVar("_T")


def framed(message: msgspec.Struct, body_bytes: int = 0) -> bytes:
    """The lengths and the head of a frame; the body of that size follows."""
    head = _encoder.encode(message)
    return frame_lengths(len(head), body_bytes) + head


def decode_from_client(head: bytes) -> FromClient | ExecutionFromClient:
    """A message that a node received.

    Raises:
        InvalidArgument: It is not one.
    """
    if head and head[0] in _ARRAY:
        return _decoded(_executions, head)
    return _decoded(_from_client, head)


def decode_from_node(head: bytes) -> FromNode | Outcome:
    """A message that a client received.

    Raises:
        InvalidArgument: It is not one.
    """
    if head and head[0] in _ARRAY:
        return _decoded(_outcomes, head)
    return _decoded(_from_node, head)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], head: bytes) -> _T:
    try:
        return decoder.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidArgument(f"connection: the head of a frame cannot be read: {e}") from e


def check_parts(parts: Sequence[int], body_bytes: int) -> None:
    """Checks the sizes of the contents that a call carries, before memory is made for them.

    Raises:
        InvalidArgument: There are too many, one is empty, or they are not the body.
    """
    if len(parts) > PARTS_MAX or any(part < 1 for part in parts) or sum(parts) != body_bytes:
        raise InvalidArgument(
            f"connection: expected up to {PARTS_MAX} contents of {body_bytes} bytes together, got {len(parts)} of {sum(parts)}"
        )
