"""The messages of runtime and driver process, as bytes and descriptors; they mirror the driver contract (``aionn.hal.device``).

Owns the messages, their MessagePack form, how memories and fences travel (an index into the descriptors sent beside the message),
and the limits. No I/O.

Invariants:
1. One message is one datagram; one that is too large for that travels in a sealed memory whose descriptor comes first (``large``).
2. Decoding never keeps a descriptor: what is kept is duplicated, once each, and the caller closes all that it received.
3. A peer's messages are checked by size before decoding (``sizes``), by type and range here, by meaning where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import msgspec

import fmq
from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted, class_text
from aionn.hal import (
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    ExecutionResult,
    FencedTiming,
    Memory,
    Model,
    OutputShape,
    Priority,
    Timing,
)
from aionn.service.wire.buffer_messages import Allocate, AllocateReply, CopyFrom, CopyTo, FreeBuffer
from aionn.service.wire.handles import (
    CacheOnWire,
    Descriptor,
    FileHandle,
    QueueHandle,
    RequestOnWire,
    fence_from_wire,
    memory_from_wire,
    memory_on_wire,
)
from aionn.service.wire.large import (
    InMemory,
    Parts,
    in_memory,
    is_large_model,
    read_parts,
    without_contents,
    written,
)
from aionn.service.wire.quotas import Account
from aionn.service.wire.repetition import (
    Compute,
    ComputeFenced,
    CreateExecution,
    CreateExecutionReply,
    ForgetMemory,
    RecallMemories,
)
from aionn.service.wire.scheduling_messages import SchedulingCall, SchedulingReply
from aionn.service.wire.sizes import (
    FENCES_MAX,
    INLINE_BYTES_MAX,
    MODEL_INLINE_BYTES_MAX,
    MODEL_KINDS,
    WrongTypes,
    are_wrong_types,
    check_inline,
    read_envelope,
)
from aionn.validation import check_field_types
from fences import FenceState, NotAFenceError, SyncFence

__all__ = [
    "Allocate",
    "AllocateReply",
    "CopyFrom",
    "CopyTo",
    "FreeBuffer",
    "DESCRIPTORS_MAX",
    "DESCRIPTORS_WITH_MESSAGE_MAX",
    "INLINE_BYTES_MAX",
    "PROTOCOL_VERSION",
    "Call",
    "Reply",
    "decode",
    "decode_inline",
    "decode_parts",
    "encode",
    "has_large_model",
    "read_envelope",
]

PROTOCOL_VERSION = 8
"""Refused at the handshake when it differs: both ends come from one installation, except with a served device."""

DESCRIPTORS_WITH_MESSAGE_MAX = 240
"""Descriptors that one message may carry; the kernel allows 253 (SCM_MAX_FD)."""

DESCRIPTORS_MAX = DESCRIPTORS_WITH_MESSAGE_MAX + 1
"""The same, and the memory of a message that is not inline."""
_T = TypeVar("_T")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First call of a client."""

    version: int


class HelloReply(msgspec.Struct, frozen=True, tag=True):
    """The answering device; ``pools`` is how many memories of requests it remembers."""

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
    """The handle of the prepared model, never used again, and the duration of an execution, if the driver declares it."""

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
    """The caller of a call was cancelled; the call is still answered."""

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
    """The client dropped a fenced execution, so that its information will not be requested; or a reusable one."""

    execution: int


class ConfigureBurst(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.configure_execution_burst``."""

    prepared: int
    requests: QueueHandle
    results: QueueHandle
    polling_us: int = 0


class ConfigureBurstReply(msgspec.Struct, frozen=True, tag=True):
    """The burst's handle, and the thread that executes its requests, by its number in the kernel; 0 where it is not known."""

    burst: int
    thread: int = 0


class FreeMemorySlot(msgspec.Struct, frozen=True, tag=True):
    """The client dropped a memory of a burst."""

    burst: int
    slot: int


class EndBurst(msgspec.Struct, frozen=True, tag=True):
    """``Burst.aclose``."""

    burst: int


class BurstEnded(msgspec.Struct, frozen=True, tag=True):
    """From the driver: a burst cannot continue, because its queues are corrupt."""

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
    """A call has failed. ``traceback`` is that of an exception in the driver, as text; empty without one."""

    status: ErrorStatus
    message: str
    output_shapes: tuple[OutputShape, ...] = ()
    traceback: str = ""


CallBody = (
    Hello
    | SchedulingCall
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
    | SchedulingReply
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


Message = Call | Reply


def has_large_model(message: Message) -> bool:
    """Whether encoding the message takes long: it speaks of a model that has to travel in parts."""
    model = _model_of(message)
    return model is not None and is_large_model(model)


def encode(message: Message) -> tuple[bytes, list[int], list[Any]]:
    """A message as one datagram. Takes as long as the message is large; see ``has_large_model``.

    Returns:
        The bytes; the descriptors to send beside them; objects to keep until they are sent, which then may be dropped.

    Raises:
        InvalidArgument: The message needs too many descriptors or is too large, or holds values of wrong types.
        ResourceExhausted: No descriptor or no memory is left for it.
    """
    model = _model_of(message)
    if model is not None:
        check_field_types(model, Model, "model")
    is_large = model is not None and is_large_model(model)
    payload, fds, keep = _encode(message, model if is_large else None)
    if not is_large and len(payload) <= (INLINE_BYTES_MAX if model is None else MODEL_INLINE_BYTES_MAX):
        check_inline(payload)
        return payload, fds, keep
    if model is not None and not is_large:
        payload, fds, keep = _encode(message, model)
    head = InMemory(type(message.body).__name__, isinstance(message, Call), message.id)
    payload, memory = written(head, payload, model)
    return payload, [memory.fileno(), *fds], [*keep, memory]


def _model_of(message: Message) -> Model | None:
    body = message.body
    return body.model if isinstance(body, SupportedOperations | PrepareModel) else None


def _encode(message: Message, without: Model | None) -> tuple[bytes, list[int], list[Any]]:
    """The bytes of a message, without the contents of a model that travels in parts, and its descriptors."""
    if without is not None:
        body = msgspec.structs.replace(message.body, model=without_contents(without))
        message = msgspec.structs.replace(message, body=body)
    fds: list[int] = []
    keep: list[Any] = []

    def encode_hook(value: Any) -> Any:
        if isinstance(value, Memory):
            fds.append(value.fileno())
            keep.append(value)
            return len(fds) - 1, *memory_on_wire(value)
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
        raise NotImplementedError(f"cannot send {class_text(value)}")

    try:
        payload = msgspec.msgpack.Encoder(enc_hook=encode_hook).encode(message)
    except (ValueError, TypeError, OverflowError, NotImplementedError) as e:
        raise InvalidArgument(f"{type(message.body).__name__}: {e}") from e
    except OSError as e:
        raise ResourceExhausted(f"message: no descriptor for its fences: {e.strerror}", transient=True) from e
    if len(fds) > DESCRIPTORS_WITH_MESSAGE_MAX:
        raise InvalidArgument(
            f"message: at most {DESCRIPTORS_WITH_MESSAGE_MAX} memories and fences go into one call, got {len(fds)}"
        )
    return payload, fds, keep


def decode(
    payload: bytes, fds: Sequence[int], *, sealed_only: bool = False, account: Account | None = None
) -> Message:
    """A message from a datagram; the caller closes ``fds`` afterwards. Takes as long as the message is large.

    Args:
        payload: The datagram.
        fds: The descriptors that came with it.
        sealed_only: Refuses files that the peer can shorten, which would end this process; reads no record of its fences.
        account: The peer's, which memories, fences and files are counted in until they are dropped; None counts nothing.

    Raises:
        GeneralFailure: A memory cannot be mapped, or is not sealed.
        InvalidArgument: The bytes are not a message or are a too large one, or a descriptor does not agree with the message.
        ResourceExhausted: No descriptor or memory is left here, or none for this peer.
    """
    stands_for = in_memory(payload)
    if stands_for is None:
        return decode_inline(payload, fds, sealed_only=sealed_only, account=account)
    structure, values = read_parts(stands_for, fds)
    steps = decode_parts(stands_for, structure, values, fds, sealed_only=sealed_only, account=account)
    try:
        while True:
            next(steps)
    except StopIteration as e:
        message: Message = e.value
    return message


def decode_inline(
    payload: bytes, fds: Sequence[int], *, sealed_only: bool = False, account: Account | None = None
) -> Message:
    """As ``decode``, for a datagram that is the message itself."""
    check_inline(payload)
    return _decode(payload, fds, sealed_only, account)


def decode_parts(
    stands_for: InMemory,
    structure: bytes,
    values: bytes,
    fds: Sequence[int],
    *,
    sealed_only: bool = False,
    account: Account | None = None,
) -> Generator[None, None, Message]:
    """As ``decode``, for a message in a memory that has been read: in steps that are short, whatever the message is."""
    parts = Parts(structure)
    head = parts.head(has_model=stands_for.kind in MODEL_KINDS)
    message = _decode(head, fds[1:], sealed_only, account)
    if InMemory(type(message.body).__name__, isinstance(message, Call), message.id) != stands_for.heading:
        raise InvalidArgument(f"message: expected {stands_for.kind} {stands_for.id}, got another one")
    model = _model_of(message)
    if model is not None:
        yield
        model = yield from parts.model(model, values)
        body = msgspec.structs.replace(message.body, model=model)
        message = msgspec.structs.replace(message, body=body)
    elif values or not parts.is_over:
        raise InvalidArgument("message: more parts than its kind has")
    return message


def _decode(payload: bytes, fds: Sequence[int], sealed_only: bool, account: Account | None) -> Message:
    imported: list[SyncFence] = []
    free = set(range(len(fds)))

    def take(index: Any) -> int:
        """A descriptor, which nothing else in the message may refer to: each reference makes a duplicate."""
        if not isinstance(index, int) or index not in free:
            raise InvalidArgument(f"message: refers to descriptor {index!r} of {len(fds)}, or twice to one")
        free.remove(index)
        return fds[index]

    def receive(make: Callable[[], _T], descriptors: int, mapped_bytes: int = 0) -> _T:
        return make() if account is None else account.receive(make, descriptors, mapped_bytes)

    def decode_hook(kind: type, value: Any) -> Any:
        if kind is Memory:
            index, *rest = value
            return memory_from_wire(take(index), rest, sealed_only=sealed_only, account=account)
        if kind is SyncFence:
            if len(imported) == FENCES_MAX:
                raise InvalidArgument(f"message: expected at most {FENCES_MAX} fences, got more")
            index, state = value
            fd = None if index is None else take(index)
            known = msgspec.convert(state, FenceState)
            imported.append(fence_from_wire(fd, known, sealed_only=sealed_only, account=account))
            return imported[-1]
        if kind is FileHandle:
            fd = take(value)
            return receive(lambda: FileHandle(fd), 1)
        if kind is QueueHandle:
            descriptor, indexes = value
            return QueueHandle(msgspec.convert(descriptor, fmq.MQDescriptor), list(map(take, indexes)))
        raise NotImplementedError(f"cannot receive a {kind.__name__}")

    try:
        message = _decode_message(payload, decode_hook)
        if not free:
            return message
        raise InvalidArgument(f"message: {len(free)} descriptors belong to nothing in it")
    except BaseException:
        for fence in imported:
            fence.close()
        raise


def _decode_message(payload: bytes, decode_hook: Callable[[type, Any], Any]) -> Message:
    try:
        return msgspec.msgpack.Decoder(Message, dec_hook=decode_hook).decode(payload)  # type: ignore[no-any-return]
    except (GeneralFailure, ResourceExhausted):
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, NotAFenceError) as e:
        raise (WrongTypes if are_wrong_types(e) else InvalidArgument)(f"message: {e}") from e
    except OSError as e:
        raise ResourceExhausted(f"message: a descriptor cannot be kept: {e.strerror}", transient=True) from e


# The codecs of all messages are prepared here, and not on an event loop at the first message.
msgspec.msgpack.Decoder(Message)
