"""What runtime and driver process say to each other, as bytes and descriptors.

Owns the messages, their MessagePack form, how memories and fences travel (an index into the descriptors sent beside the message), and
the limits. No I/O.

Invariants:
1. One message is one datagram; one that is larger than ``INLINE_BYTES_MAX`` travels in a sealed memory whose descriptor comes first.
2. Decoding never keeps a descriptor: what is kept is duplicated, and the caller closes all that it received.
3. Whatever a peer sends is checked by type and range here, and by meaning where it is used.

Messages mirror the driver contract (``aionn.hal.device``).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import fmq
from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    BufferToken,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    ExecutionResult,
    FencedTiming,
    Memory,
    MemoryKind,
    Model,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
)
from fences import FenceState, NotAFenceError, SyncFence

__all__ = [
    "DESCRIPTORS_MAX",
    "DESCRIPTORS_WITH_MESSAGE_MAX",
    "INLINE_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "PROTOCOL_VERSION",
    "QueueHandle",
    "Call",
    "Reply",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 1
"""Refused at the handshake when it differs: both ends come from one installation, except with a served device."""

INLINE_BYTES_MAX = 32 << 10
"""Largest datagram: well below the kernel's default send buffer of 208 KiB, so that several are under way at once."""

MESSAGE_BYTES_MAX = 256 << 20
"""Largest message: a model without its constants is small; one whose constants are all inline may be this large."""

DESCRIPTORS_WITH_MESSAGE_MAX = 240
"""Descriptors that one message may carry; the kernel allows 253 (SCM_MAX_FD)."""

DESCRIPTORS_MAX = DESCRIPTORS_WITH_MESSAGE_MAX + 1
"""The same, and the memory of a message that is not inline."""


class _Descriptor:
    """A descriptor that is closed when this object is dropped."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)


class QueueHandle:
    """A message queue on its way to the peer: its descriptor, and descriptors of files that this object owns.

    Attributes:
        descriptor: Where the parts of the queue lie.
        fds: Duplicates; closed when this object is dropped.
    """

    __slots__ = ("__weakref__", "_owned", "descriptor")

    def __init__(self, descriptor: fmq.MQDescriptor, fds: Sequence[int]) -> None:
        self.descriptor = descriptor
        self._owned = [_Descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)) for fd in fds]

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(owned.fd for owned in self._owned)


class PoolOnWire(msgspec.Struct, frozen=True, array_like=True):
    """A request's pool: a memory, or a device memory's token where there is none.

    msgspec decodes no union of a class of ours with anything but None.
    """

    memory: Memory | None
    token: int = 0


class RequestOnWire(msgspec.Struct, frozen=True, array_like=True):
    """A ``Request`` as it travels."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[PoolOnWire, ...]

    @classmethod
    def of(cls, request: Request) -> RequestOnWire:
        """The form that travels."""
        pools = tuple(
            PoolOnWire(None, pool.token) if isinstance(pool, BufferToken) else PoolOnWire(pool)
            for pool in request.pools
        )
        return cls(request.inputs, request.outputs, pools)

    def request(self) -> Request:
        """The request itself."""
        pools = tuple(BufferToken(p.token) if p.memory is None else p.memory for p in self.pools)
        return Request(self.inputs, self.outputs, pools)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First call of a client."""

    version: int


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    """Who answers."""

    version: int
    pid: int
    info: DeviceInfo


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """``Device.status``."""


class StatusReply(msgspec.Struct, frozen=True, tag=True):
    """The device's status."""

    status: DeviceStatus


class SupportedOperations(msgspec.Struct, frozen=True, tag=True):
    """``Device.supported_operations``."""

    model: Model


class SupportedOperationsReply(msgspec.Struct, frozen=True, tag=True):
    """One answer per operation of the main subgraph."""

    supported: tuple[bool, ...]


class PrepareModel(msgspec.Struct, frozen=True, tag=True):
    """``Device.prepare_model``."""

    model: Model
    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None


class PrepareModelReply(msgspec.Struct, frozen=True, tag=True):
    """The handle of the prepared model; handles are never used again."""

    prepared: int


class FreePreparedModel(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.aclose``."""

    prepared: int


class Execute(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.execute_synchronously``."""

    prepared: int
    request: RequestOnWire
    measure: bool
    deadline_ns: int | None
    loop_timeout_ns: int | None


class ExecuteReply(msgspec.Struct, frozen=True, tag=True):
    """The result."""

    result: ExecutionResult


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """The caller of a call gave up; the call is still answered."""

    call: int


class ExecuteFenced(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.execute_fenced``."""

    prepared: int
    request: RequestOnWire
    wait_for: tuple[SyncFence, ...]
    measure: bool
    deadline_ns: int | None
    loop_timeout_ns: int | None
    duration_ns: int | None


class ExecuteFencedReply(msgspec.Struct, frozen=True, tag=True):
    """The launched execution; ``execution`` is its handle for ``GetExecutionInfo``."""

    execution: int
    fence: SyncFence | None


class GetExecutionInfo(msgspec.Struct, frozen=True, tag=True):
    """The information callback of a fenced execution; ``last`` frees the handle."""

    execution: int
    last: bool


class ExecutionInfoReply(msgspec.Struct, frozen=True, tag=True):
    """Status and timings."""

    status: ErrorStatus
    timing: FencedTiming


class ConfigureBurst(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.configure_execution_burst``."""

    prepared: int
    requests: QueueHandle
    results: QueueHandle


class ConfigureBurstReply(msgspec.Struct, frozen=True, tag=True):
    """The burst's handle."""

    burst: int


class FreeMemorySlot(msgspec.Struct, frozen=True, tag=True):
    """The client dropped a memory of a burst."""

    burst: int
    slot: int


class EndBurst(msgspec.Struct, frozen=True, tag=True):
    """``Burst.aclose``."""

    burst: int


class GetMemories(msgspec.Struct, frozen=True, tag=True):
    """Driver to client: what memories do these slots stand for?"""

    burst: int
    slots: tuple[int, ...]


class GetMemoriesReply(msgspec.Struct, frozen=True, tag=True):
    """One memory per slot that was asked for."""

    memories: tuple[Memory, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """A call that returns nothing has succeeded."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call has failed."""

    status: ErrorStatus
    message: str
    output_shapes: tuple[OutputShape, ...] = ()


CallBody = (
    Hello
    | GetStatus
    | SupportedOperations
    | PrepareModel
    | FreePreparedModel
    | Execute
    | CancelCall
    | ExecuteFenced
    | GetExecutionInfo
    | ConfigureBurst
    | FreeMemorySlot
    | EndBurst
    | GetMemories
)

ReplyBody = (
    HelloReply
    | StatusReply
    | SupportedOperationsReply
    | PrepareModelReply
    | ExecuteReply
    | ExecuteFencedReply
    | ExecutionInfoReply
    | ConfigureBurstReply
    | GetMemoriesReply
    | Done
    | Failed
)


class Call(msgspec.Struct, frozen=True, tag=True):
    """A question; ``id`` is unique among the sender's calls that are not yet answered."""

    id: int
    body: CallBody


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to the peer's call ``id``; exactly one per call."""

    id: int
    body: ReplyBody


class _InMemory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stands for a message that lies in the memory whose descriptor came first."""

    size_bytes: int


Message = Call | Reply


def encode(message: Message) -> tuple[bytes, list[int], list[Any]]:
    """A message as one datagram.

    Returns:
        The bytes; the descriptors to send beside them; objects to keep until they are sent, which then may be dropped.

    Raises:
        InvalidArgument: The message needs too many descriptors or is too large.
    """
    fds: list[int] = []
    keep: list[Any] = []

    def encode_hook(value: Any) -> Any:
        if isinstance(value, Memory):
            fds.append(value.fileno())
            keep.append(value)
            return len(fds) - 1, value.size_bytes, str(value.kind)
        if isinstance(value, SyncFence):
            state, fd = value.export()
            if fd is None:
                return None, state
            keep.append(_Descriptor(fd))
            fds.append(fd)
            return len(fds) - 1, state
        if isinstance(value, QueueHandle):
            first = len(fds)
            fds.extend(value.fds)
            keep.append(value)
            return value.descriptor, list(range(first, len(fds)))
        raise NotImplementedError(f"cannot send a {type(value).__name__}")

    try:
        payload = msgspec.msgpack.Encoder(enc_hook=encode_hook).encode(message)
    except ValueError as e:
        raise InvalidArgument(f"message: {e}") from e
    if len(fds) > DESCRIPTORS_WITH_MESSAGE_MAX:
        raise InvalidArgument(
            f"message: at most {DESCRIPTORS_WITH_MESSAGE_MAX} memories and fences go into one call, got {len(fds)}"
        )
    if len(payload) > INLINE_BYTES_MAX:
        if len(payload) > MESSAGE_BYTES_MAX:
            raise InvalidArgument(f"message: expected at most {MESSAGE_BYTES_MAX} bytes, got {len(payload)}")
        memory = Memory.create(len(payload), name="aionn-message")
        memory.array[:] = np.frombuffer(payload, dtype=np.uint8)
        keep.append(memory)
        fds.insert(0, memory.fileno())
        payload = _IN_MEMORY_ENCODER.encode(_InMemory(len(payload)))
    return payload, fds, keep


def decode(payload: bytes, fds: Sequence[int]) -> Message:
    """A message from a datagram; the caller closes ``fds`` afterwards.

    Raises:
        InvalidArgument: The bytes are no message, or a descriptor is not what the message says.
        ResourceExhausted: No descriptor or memory is left here.
    """
    if payload[:1] == b"\x92" and payload[1:11] == b"\xa9_InMemory":
        try:
            size_bytes = _IN_MEMORY_DECODER.decode(payload).size_bytes
        except msgspec.MsgspecError as e:
            raise InvalidArgument(f"message: {e}") from e
        if not fds or not 0 < size_bytes <= MESSAGE_BYTES_MAX:
            raise InvalidArgument(
                f"message: expected a memory of at most {MESSAGE_BYTES_MAX} bytes, got {size_bytes}"
            )
        # One private copy, then no further look at memory that the peer can change.
        payload = Memory.from_fd(fds[0], size_bytes=size_bytes, writable=False).array.tobytes()
        fds = fds[1:]

    def decode_hook(kind: type, value: Any) -> Any:
        if kind is Memory:
            index, size_bytes, memory_kind = value
            return Memory.from_fd(_at(fds, index), size_bytes=size_bytes, kind=MemoryKind(memory_kind))
        if kind is SyncFence:
            index, state = value
            record = msgspec.convert(state, FenceState)
            return SyncFence.from_state(record, None if index is None else _at(fds, index))
        if kind is QueueHandle:
            descriptor, indexes = value
            return QueueHandle(
                msgspec.convert(descriptor, fmq.MQDescriptor), [_at(fds, index) for index in indexes]
            )
        raise NotImplementedError(f"cannot receive a {kind.__name__}")

    try:
        message: Message = msgspec.msgpack.Decoder(Message, dec_hook=decode_hook).decode(payload)
    except (GeneralFailure, ResourceExhausted):
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, NotAFenceError) as e:
        raise InvalidArgument(f"message: {e}") from e
    except OSError as e:
        raise ResourceExhausted(f"message: a descriptor cannot be kept: {e.strerror}", transient=True) from e
    return message


def _at(fds: Sequence[int], index: Any) -> int:
    if not isinstance(index, int) or not 0 <= index < len(fds):
        raise InvalidArgument(f"message: refers to descriptor {index!r} of {len(fds)}")
    return fds[index]


_IN_MEMORY_ENCODER = msgspec.msgpack.Encoder()
_IN_MEMORY_DECODER = msgspec.msgpack.Decoder(_InMemory)
