"""What runtime and driver process say to each other, as bytes and descriptors.

Owns the messages, their MessagePack form, how memories and fences travel (an index into the descriptors sent beside the message),
and the limits. No I/O.

Invariants:
1. One message is one datagram; one that is larger than ``INLINE_BYTES_MAX`` travels in a sealed memory whose descriptor comes
   first.
2. Decoding never keeps a descriptor: what is kept is duplicated, and the caller closes all that it received.
3. Whatever a peer sends is checked by type and range here, and by meaning where it is used.

Messages mirror the driver contract (``aionn.hal.device``).
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

import fmq
from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    BufferDesc,
    BufferRole,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    ExecutionResult,
    FencedTiming,
    HardwareBufferDesc,
    Memory,
    MemoryKind,
    Model,
    OutputShape,
    Priority,
    Timing,
)
from aionn.service.handles import CacheOnWire, Descriptor, FileHandle, QueueHandle, RequestOnWire
from aionn.service.repetition import (
    Compute,
    ComputeFenced,
    CreateExecution,
    CreateExecutionReply,
    ForgetMemory,
    RecallMemories,
)
from fences import FenceState, NotAFenceError, SyncFence

__all__ = [
    "DESCRIPTORS_MAX",
    "DESCRIPTORS_WITH_MESSAGE_MAX",
    "INLINE_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "PROTOCOL_VERSION",
    "Call",
    "Reply",
    "decode",
    "encode",
    "large_size_bytes",
    "read_envelope",
]

PROTOCOL_VERSION = 3
"""Refused at the handshake when it differs: both ends come from one installation, except with a served device."""

INLINE_BYTES_MAX = 32 << 10
"""Largest datagram: well below the kernel's default send buffer of 208 KiB, so that several are under way at once."""

MESSAGE_BYTES_MAX = 256 << 20
"""Largest message: a model without its constants is small; one whose constants are all inline may be this large."""

DESCRIPTORS_WITH_MESSAGE_MAX = 240
"""Descriptors that one message may carry; the kernel allows 253 (SCM_MAX_FD)."""

DESCRIPTORS_MAX = DESCRIPTORS_WITH_MESSAGE_MAX + 1
"""The same, and the memory of a message that is not inline."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First call of a client."""

    version: int


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    """Who answers; ``pools`` is how many memories of requests it remembers."""

    version: int
    pid: int
    info: DeviceInfo
    pools: int = 0


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
    cache: CacheOnWire | None = None


class PrepareModelFromCache(msgspec.Struct, frozen=True, tag=True):
    """``Device.prepare_model_from_cache``; answered by ``PrepareModelReply``."""

    cache: CacheOnWire
    priority: Priority
    deadline_ns: int | None


class PrepareModelReply(msgspec.Struct, frozen=True, tag=True):
    """The handle of the prepared model; handles are never used again. And what an execution takes, where the driver says it."""

    prepared: int
    expected_duration_ns: int | None = None


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
    priority: Priority | None = None


class ExecuteReply(msgspec.Struct, frozen=True, tag=True):
    """The result."""

    result: ExecutionResult


class Launch(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.execute``; ``launch`` is the client's number for its callback."""

    launch: int
    prepared: int
    request: RequestOnWire
    measure: bool
    deadline_ns: int | None
    loop_timeout_ns: int | None
    priority: Priority | None = None


class LaunchReply(msgspec.Struct, frozen=True, tag=True):
    """The launch status."""

    status: ErrorStatus


class Notify(msgspec.Struct, frozen=True, tag=True):
    """Driver to client: the callback of a launched execution."""

    launch: int
    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing


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


class ForgetExecution(msgspec.Struct, frozen=True, tag=True):
    """The client dropped a fenced execution, so that nobody will ask for its information; or a reusable one."""

    execution: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """``Device.allocate``, with handles of prepared models."""

    description: BufferDesc
    prepared: tuple[int, ...]
    input_roles: tuple[BufferRole, ...]
    output_roles: tuple[BufferRole, ...]


class AllocateReply(msgspec.Struct, frozen=True, tag=True):
    """The buffer's handle, and the token that requests name it by."""

    buffer: int
    token: int


class CopyTo(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.copy_to``."""

    buffer: int
    destination: Memory


class CopyFrom(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.copy_from``."""

    buffer: int
    source: Memory
    dimensions: tuple[int, ...]


class FreeBuffer(msgspec.Struct, frozen=True, tag=True):
    """``Buffer.aclose``."""

    buffer: int


class ConfigureBurst(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.configure_execution_burst``."""

    prepared: int
    requests: QueueHandle
    results: QueueHandle
    polling_us: int = 0


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


class BurstEnded(msgspec.Struct, frozen=True, tag=True):
    """From the driver: a burst cannot go on, because what lies in its queues is no queue any more."""

    burst: int
    why: str


class GetMemories(msgspec.Struct, frozen=True, tag=True):
    """Driver to client: what memories do these slots stand for?"""

    burst: int
    slots: tuple[int, ...]


class GetMemoriesReply(msgspec.Struct, frozen=True, tag=True):
    """One memory per slot that was asked for."""

    memories: tuple[Memory, ...]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Does the peer still answer?"""


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
    | PrepareModelFromCache
    | FreePreparedModel
    | Execute
    | Launch
    | Notify
    | CancelCall
    | ExecuteFenced
    | GetExecutionInfo
    | ForgetExecution
    | CreateExecution
    | Compute
    | ComputeFenced
    | ForgetMemory
    | RecallMemories
    | Allocate
    | CopyTo
    | CopyFrom
    | FreeBuffer
    | ConfigureBurst
    | FreeMemorySlot
    | EndBurst
    | BurstEnded
    | GetMemories
    | Ping
)

ReplyBody = (
    HelloReply
    | StatusReply
    | SupportedOperationsReply
    | PrepareModelReply
    | ExecuteReply
    | LaunchReply
    | ExecuteFencedReply
    | ExecutionInfoReply
    | CreateExecutionReply
    | AllocateReply
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


class _Envelope(msgspec.Struct, frozen=True):
    """What can be read of a message whose descriptors were lost."""

    type: str
    id: int


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
        ResourceExhausted: No descriptor or no memory is left for it.
    """
    fds: list[int] = []
    keep: list[Any] = []

    def encode_hook(value: Any) -> Any:
        if isinstance(value, Memory):
            fds.append(value.fileno())
            keep.append(value)
            is_writable = bool(value.array.flags.writeable)
            return len(fds) - 1, value.size_bytes, str(value.kind), value.offset, is_writable, value.image
        if isinstance(value, SyncFence):
            state, fd = value.export()
            if fd is None:
                return None, state
            keep.append(Descriptor(fd))
            fds.append(fd)
            return len(fds) - 1, state
        if isinstance(value, FileHandle):
            fds.append(value.fd)
            keep.append(value)
            return len(fds) - 1
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
    except OSError as e:
        raise ResourceExhausted(f"message: no descriptor for its fences: {e.strerror}", transient=True) from e
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


def large_size_bytes(payload: bytes) -> int:
    """Size of the message that a datagram stands for, if it lies in memory of its own; 0 for one that is the datagram itself.

    Raises:
        InvalidArgument: The datagram is no message, or the message is too large.
    """
    if payload[:1] != b"\x92" or payload[1:11] != b"\xa9_InMemory":
        return 0
    try:
        size_bytes = _IN_MEMORY_DECODER.decode(payload).size_bytes
    except (msgspec.MsgspecError, ValueError) as e:
        raise InvalidArgument(f"message: {e}") from e
    if not 0 < size_bytes <= MESSAGE_BYTES_MAX:
        raise InvalidArgument(
            f"message: expected a memory of at most {MESSAGE_BYTES_MAX} bytes, got {size_bytes}"
        )
    return size_bytes


def read_envelope(payload: bytes) -> tuple[bool, int] | None:
    """Whether an undecodable message is a call, and its number; None if it is nothing that can be answered."""
    try:
        envelope = _ENVELOPE_DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError):  # Text that is no UTF-8 is a plain ValueError.
        return None
    return (envelope.type == "Call", envelope.id) if envelope.type in ("Call", "Reply") else None


def decode(payload: bytes, fds: Sequence[int], *, sealed_only: bool = False) -> Message:
    """A message from a datagram; the caller closes ``fds`` afterwards.

    Args:
        payload: The datagram.
        fds: What came with it.
        sealed_only: Refuses files that the peer can shorten while they are used, which would end this process.

    Raises:
        GeneralFailure: A memory cannot be mapped, or is not sealed.
        InvalidArgument: The bytes are no message, or a descriptor is not what the message says.
        ResourceExhausted: No descriptor or memory is left here.
    """
    size_bytes = large_size_bytes(payload)
    if size_bytes:
        if not fds:
            raise InvalidArgument("message: its memory did not come with it")
        # One private copy, then no further look at memory that the peer can change.
        payload = Memory.from_fd(fds[0], size_bytes=size_bytes, writable=False).array.tobytes()
        fds = fds[1:]

    imported: list[SyncFence] = []

    def decode_hook(kind: type, value: Any) -> Any:
        if kind is Memory:
            fields = msgspec.convert(value, _MEMORY_FIELDS)
            index, size_bytes, memory_kind, offset, is_writable, image = fields
            if sealed_only and not _is_sealed(_at(fds, index)):
                raise GeneralFailure("memory: a device that is shared takes sealed memory alone, got a file")
            return Memory.from_fd(
                _at(fds, index),
                size_bytes=size_bytes,
                offset=offset,
                kind=MemoryKind(memory_kind),
                writable=is_writable,
                image=image,
            )
        if kind is SyncFence:
            index, state = value
            record = msgspec.convert(state, FenceState)
            imported.append(SyncFence.from_state(record, None if index is None else _at(fds, index)))
            return imported[-1]
        if kind is FileHandle:
            return FileHandle(_at(fds, value))
        if kind is QueueHandle:
            descriptor, indexes = value
            return QueueHandle(
                msgspec.convert(descriptor, fmq.MQDescriptor), [_at(fds, index) for index in indexes]
            )
        raise NotImplementedError(f"cannot receive a {kind.__name__}")

    try:
        return _decode_message(payload, decode_hook)
    except BaseException:
        for fence in imported:
            fence.close()
        raise


def _decode_message(payload: bytes, decode_hook: Callable[[type, Any], Any]) -> Message:
    try:
        message: Message = msgspec.msgpack.Decoder(Message, dec_hook=decode_hook).decode(payload)
    except (GeneralFailure, ResourceExhausted):
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, NotAFenceError) as e:
        raise InvalidArgument(f"message: {e}") from e
    except OSError as e:
        raise ResourceExhausted(f"message: a descriptor cannot be kept: {e.strerror}", transient=True) from e
    return message


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # A file in a file system, which has no seals.


def _at(fds: Sequence[int], index: Any) -> int:
    if not isinstance(index, int) or not 0 <= index < len(fds):
        raise InvalidArgument(f"message: refers to descriptor {index!r} of {len(fds)}")
    return fds[index]


_MEMORY_FIELDS = tuple[int, int, str, int, bool, HardwareBufferDesc | None]
_ENVELOPE_DECODER = msgspec.msgpack.Decoder(_Envelope)
_IN_MEMORY_ENCODER = msgspec.msgpack.Encoder()
_IN_MEMORY_DECODER = msgspec.msgpack.Decoder(_InMemory)

# What msgspec must know of every message is worked out here, and not on an event loop at the first message.
msgspec.msgpack.Decoder(Message)
