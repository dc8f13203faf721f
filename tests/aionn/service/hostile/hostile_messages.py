"""Writes well-formed messages of every kind, with the contents of their descriptors, for hostile_peer.c to replay and mutate.

A record is: length and letters of its name; where its number stands in the payload and where that of the call that it cancels, or
of a device memory (65535 for nowhere); the payload's length and bytes; how many descriptors, and for each its kind (M memory, C
cache file, F pending fence, E eventfd), the size of the memory, and the bytes at its beginning with their count. Records whose
names begin with ``only_`` come last: attacks that choose from all messages do not choose these. Some of them are packets of bursts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

import fmq
from aionn.burst.packets import encode_limits, encode_request
from aionn.drivers.kit import caching
from aionn.errors import ErrorStatus
from aionn.hal import (
    NO_TIMING,
    TIME_MAX_NS,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DataLocation,
    ExecutionPreference,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Priority,
    Request,
    RequestArgument,
    Subgraph,
)
from aionn.models.builder import GraphBuilder
from aionn.service.wire.handles import CacheOnWire, PoolOnWire, QueueHandle, RequestOnWire
from aionn.service.wire.large import in_memory
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Allocate,
    Call,
    CallBody,
    CancelCall,
    ConfigureBurst,
    CopyFrom,
    CopyTo,
    Done,
    EndBurst,
    Execute,
    ExecuteFenced,
    Failed,
    ForgetExecution,
    FreeBuffer,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    GetMemories,
    GetMemoriesReply,
    GetStatus,
    Hello,
    Launch,
    Notify,
    Ping,
    PrepareModel,
    PrepareModelFromCache,
    Reply,
    ReplyBody,
    SupportedOperations,
    encode,
)
from aionn.service.wire.repetition import (
    Compute,
    ComputeFenced,
    CreateExecution,
    ForgetMemory,
    RecallMemories,
)
from aionn.service.wire.sizes import FENCES_MAX
from fences import SyncFence

NUMBER = 0xC0FFEE01
"""Stands where a message's number is written in."""

CANCELLED = 0xC0FFEE02
"""Stands where the number of a cancelled call is written in."""

NOWHERE = 0xFFFF
CONTENT_BYTES_MAX = 32 << 20
LARGE_OPERATIONS = 4000
WIDE_BYTES = 64 << 20
SPARSE_BYTES = 256 << 20
SAVED_BYTES = 900 << 20
FILLED_BYTES = 16 << 20
HUGE_BYTES = 3 << 30
QUEUE_BYTES = 16 << 10
WIDE_QUEUE_BYTES = 128 << 10
ODD_PACKET_BYTES = 61 << 10
DATUMS = 4096
PACKETS_IN_QUEUE = 16
PREPARED = BURST = 1
"""Handles that a session's first objects have; a reusable or fenced execution has the next one after the model."""

FIRST_EXECUTION = 2
SECOND_PREPARED = 2
LATER_NS = TIME_MAX_NS // 2
"""A deadline far ahead."""

DRIVER = "aionn.drivers.reference.ReferenceDevice 1"
"""The driver's name in the cache files that it saves."""

TOKEN = bytes(32)
SEAL_END = 56
"""Where the digest of all content begins in the head of a cache file."""


def sum_model(count: int = 4) -> Model:
    """``a + b`` of float32 vectors."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (count,))
    b = graph.input(OperandType.TENSOR_FLOAT32, (count,))
    return graph.build([graph.result(OperationType.ADD, [a, b, graph.constant(0)], a)])


def chain_model(length: int) -> Model:
    """A long chain of sums: every operation has an operand of its own."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    none = graph.constant(0)
    last = a
    for _ in range(length):
        last = graph.result(OperationType.ADD, [last, a, none], a)
    return graph.build([last])


def constant_model(size_bytes: int, *, in_pool: bool) -> tuple[Model, list[Memory]]:
    """``a + constant``, the constant in a memory of its own that nobody has written to, or among the model's values."""
    count = size_bytes // 4
    vector = Operand(OperandType.TENSOR_FLOAT32, (count,), lifetime=OperandLifeTime.SUBGRAPH_INPUT)
    where = OperandLifeTime.CONSTANT_REFERENCE if in_pool else OperandLifeTime.CONSTANT_COPY
    constant = Operand(
        OperandType.TENSOR_FLOAT32, (count,), lifetime=where, location=DataLocation(0, 0, size_bytes)
    )
    values = bytes(4) if in_pool else bytes(size_bytes + 4)
    activation = Operand(
        OperandType.INT32,
        (),
        lifetime=OperandLifeTime.CONSTANT_COPY,
        location=DataLocation(0, len(values) - 4, 4),
    )
    result = Operand(OperandType.TENSOR_FLOAT32, (count,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT)
    operation = Operation(OperationType.ADD, (0, 1, 2), (3,))
    main = Subgraph((vector, constant, activation, result), (operation,), (0,), (3,))
    pools = [Memory.create(size_bytes, name="constants")] if in_pool else []
    return Model(main, operand_values=values, pools=tuple(pools)), pools


def request_of(memory: Memory) -> Request:
    """A request for a sum of vectors of four numbers, all in one memory."""
    arguments = [RequestArgument(False, DataLocation(0, i * 16, 16)) for i in range(3)]
    return Request((arguments[0], arguments[1]), (arguments[2],), (memory,))


class Writer:
    """Writes records to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def close(self) -> None:
        self._file.close()

    def call(self, name: str, body: CallBody) -> None:
        self._write(name, Call(NUMBER, body))

    def reply(self, name: str, body: ReplyBody) -> None:
        self._write(name, Reply(NUMBER, body))

    def packet(self, name: str, packet: bytes) -> None:
        """A packet of a burst, which is no message."""
        head = struct.pack("<B", len(name)) + name.encode()
        self._file.write(head + struct.pack("<HHI", NOWHERE, NOWHERE, len(packet)) + packet + b"\0")

    def _write(self, name: str, message: Call | Reply) -> None:
        payload, fds, keep = encode(message)
        places = [NOWHERE, NOWHERE]
        if (
            in_memory(payload) is None
        ):  # Otherwise the number stands in the memory too, and has to be the same there.
            marks = [b"\xce" + mark.to_bytes(4, "big") for mark in (NUMBER, CANCELLED)]
            places = [payload.find(mark) + 1 or NOWHERE for mark in marks]
        head = struct.pack("<B", len(name)) + name.encode()
        self._file.write(head + struct.pack("<HHI", *places, len(payload)) + payload)
        self._file.write(struct.pack("<B", len(fds)))
        for fd in fds:
            kind, size, content = _contents(fd)
            self._file.write(kind + struct.pack("<II", size, len(content)) + content)
        del keep


def _contents(fd: int) -> tuple[bytes, int, bytes]:
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return b"F", 0, b""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return (b"M", os.fstat(fd).st_size, b"") if stat.S_ISREG(mode) else (b"E", 0, b"")
    size = os.fstat(fd).st_size
    kind = b"C" if seals == fcntl.F_SEAL_SEAL else b"M"
    return kind, size, os.pread(fd, CONTENT_BYTES_MAX, 0).rstrip(b"\0")


def _queue() -> fmq.MessageQueue:
    return fmq.MessageQueue.create(1, QUEUE_BYTES, event_flag=True)


def _handle(queue: fmq.MessageQueue) -> QueueHandle:
    return QueueHandle(queue.descriptor, queue.fds)


def _models(writer: Writer) -> Iterator[Memory]:
    def prepare(name: str, model: Model) -> None:
        body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        writer.call(name, body)

    prepare("prepare", sum_model())
    prepare("prepare_large", chain_model(LARGE_OPERATIONS))
    writer.call("supported", SupportedOperations(sum_model()))
    writer.call("supported_large", SupportedOperations(chain_model(LARGE_OPERATIONS)))
    prepare("prepare_wide", constant_model(WIDE_BYTES, in_pool=False)[0])
    sparse, pools = constant_model(SPARSE_BYTES, in_pool=True)
    prepare("prepare_sparse", sparse)
    yield from pools
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(256)) * 64)
        file.flush()
        cache = CacheOnWire.of(CacheFiles([file.fileno()], [file.fileno()], bytes(32)))
        cached = PrepareModel(
            sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None, cache
        )
        writer.call("prepare_cached", cached)
        writer.call("prepare_from_cache", PrepareModelFromCache(cache, Priority.MEDIUM, None))


def _executions(writer: Writer) -> Iterator[Memory]:
    memory = Memory.create(4096, name="request")
    yield memory
    own = RequestOnWire.of(request_of(memory))
    limits = (False, None, None)
    writer.call("execute", Execute(PREPARED, own, *limits))
    writer.call("launch", Launch(NUMBER, PREPARED, own, *limits))

    def pool(identifier: int, along: Memory | None) -> RequestOnWire:
        return RequestOnWire(own.inputs, own.outputs, (PoolOnWire(along, 0, identifier),))

    writer.call("execute_remembered", Execute(PREPARED, pool(5, memory), *limits))
    writer.call("execute_unknown", Execute(PREPARED, pool(77, None), *limits))
    writer.call("execute_of_another", Execute(10**6, own, *limits))
    writer.call("create", CreateExecution(PREPARED, own, False, None))
    writer.call("compute", Compute(FIRST_EXECUTION, None))
    fences = [SyncFence(f"hostile {i}") for i in range(FENCES_MAX)]
    for name, waits in (("fenced_ready", ()), ("fenced", fences[:1]), ("fenced_many", fences)):
        writer.call(name, ExecuteFenced(PREPARED, own, tuple(waits), *limits, None))
    writer.call("compute_fenced", ComputeFenced(FIRST_EXECUTION, tuple(fences[:1]), None, None))
    for fence in fences:
        fence.signal()
        fence.close()
    writer.call("info", GetExecutionInfo(FIRST_EXECUTION, False))
    writer.call("forget_execution", ForgetExecution(FIRST_EXECUTION))
    writer.call("forget_memory", ForgetMemory(5))
    writer.call("allocate", Allocate(BufferDesc(), (PREPARED,), (BufferRole(0, 0),), (BufferRole(0, 0),)))
    writer.call("copy_from", CopyFrom(FIRST_EXECUTION, memory, ()))
    writer.call("copy_to", CopyTo(FIRST_EXECUTION, memory))
    writer.call("free_buffer", FreeBuffer(FIRST_EXECUTION))
    writer.call("free_prepared", FreePreparedModel(PREPARED))
    writer.reply("memories", GetMemoriesReply((memory,)))
    writer.reply("memories_many", GetMemoriesReply(tuple(memory for _ in range(100))))


def _bursts(writer: Writer) -> Iterator[Memory]:
    memory = Memory.create(4096, name="request")
    yield memory
    packet = encode_request(request_of(memory), [0], measure=False)
    queues = [_queue() for _ in range(3)]
    for _ in range(PACKETS_IN_QUEUE):
        queues[1].write_message(packet)
    for name, asked in (("burst", queues[0]), ("burst_filled", queues[1])):
        for polling in (0, 1000):
            body = ConfigureBurst(PREPARED, _handle(asked), _handle(queues[2]), polling)
            writer.call(f"{name}_polling" if polling else name, body)
    for queue in queues:
        queue.close()
    writer.call("free_slot", FreeMemorySlot(BURST, 0))
    writer.call("end_burst", EndBurst(BURST))


def _packets(writer: Writer) -> None:
    """Packets that fail, but for the first, and a burst with room for them."""
    with contextlib.closing(Memory.create(4096, name="request")) as memory:
        known = encode_request(request_of(memory), [0], measure=False, with_limits=True)
    writer.packet("only_packet_later", known + encode_limits(LATER_NS, None))
    writer.packet("only_packet_expired", known + encode_limits(1, None))
    text = msgspec.msgpack.encode("x" * (ODD_PACKET_BYTES // 2))
    odd = known[:-1] + text
    writer.packet("only_packet_odd", odd + bytes([0x94]) * (ODD_PACKET_BYTES - len(odd)))
    writer.packet("only_packet_nested", bytes([0x91]) * ODD_PACKET_BYTES)
    inputs = [[1, True, [0, 0, 0, 0], 0]] * (DATUMS - 4)
    datums = [[0, DATUMS, len(inputs), 1, 1], *inputs, [3, True, [0, 0, 0, 0], 0], [5, 0], [6, False]]
    writer.packet("only_packet_wide", msgspec.msgpack.encode(datums))
    queues = [fmq.MessageQueue.create(1, WIDE_QUEUE_BYTES, event_flag=True) for _ in range(2)]
    writer.call("only_burst", ConfigureBurst(PREPARED, _handle(queues[0]), _handle(queues[1]), 0))
    for queue in queues:
        queue.close()


def _later(writer: Writer) -> None:
    """Executions with a deadline far ahead, and device memories without a whole shape."""
    with contextlib.closing(Memory.create(4096, name="request")) as memory:
        own = RequestOnWire.of(request_of(memory))
        limits = (False, LATER_NS, None)
        writer.call("only_execute_later", Execute(PREPARED, own, *limits))
        writer.call("only_launch_later", Launch(NUMBER, PREPARED, own, *limits))
        fence = SyncFence("hostile")
        writer.call("only_fenced_later", ExecuteFenced(PREPARED, own, (fence,), *limits, None))
        fence.signal()
        fence.close()
        unknown = PrepareModel(sum_model(0), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        writer.call("only_prepare_unknown", unknown)
        roles = (BufferRole(0, 0),)
        writer.call("only_allocate_unknown", Allocate(BufferDesc(), (SECOND_PREPARED,), roles, ()))
        writer.call("only_fill", CopyFrom(CANCELLED, memory, (1024,)))


@contextlib.contextmanager
def _saved(contents: caching.CacheContents | None) -> Iterator[CacheFiles]:
    """A saving in new files, which are empty where there is nothing to save."""
    fds = [os.memfd_create("cache", os.MFD_CLOEXEC) for _ in range(2)]
    cache = CacheFiles(fds[:1], fds[1:], TOKEN)
    if contents is not None:
        caching.save(cache, contents, driver=DRIVER)
    yield cache
    for fd in fds:
        os.close(fd)


def _cache_files(writer: Writer) -> None:
    """Savings that load, savings that only look like it, and one to be made."""

    def write(name: str, cache: CacheFiles) -> None:
        writer.call(name, PrepareModelFromCache(CacheOnWire.of(cache), Priority.MEDIUM, None))

    small = caching.encode_model(sum_model())
    with _saved(small) as cache:
        write("only_from_cache", cache)
        os.ftruncate(cache.data[0], HUGE_BYTES)
        write("only_huge_file", cache)
    filled, _ = constant_model(FILLED_BYTES, in_pool=False)
    filled = msgspec.structs.replace(filled, operand_values=b"\x3f" * len(filled.operand_values))
    with _saved(caching.encode_model(filled)) as cache:
        write("only_from_cache_filled", cache)
    for name, lengths in (
        ("only_huge_values", {"value_bytes": 2**62}),
        ("only_huge_pools", {"pool_bytes": [2**40] * caching.POOLS_MAX}),
    ):
        structure = msgspec.msgpack.encode({**msgspec.msgpack.decode(small.model[0]), **lengths})
        with _saved(caching.CacheContents([structure], small.data)) as cache:
            write(name, cache)
    with _saved(caching.CacheContents([bytes(2 * caching.STRUCTURE_BYTES_MAX)], small.data)) as cache:
        write("only_huge_structure", cache)
    sparse, pools = constant_model(SAVED_BYTES, in_pool=True)
    with _saved(caching.encode_model(sparse)) as cache:
        write("only_sparse", cache)
        os.pwrite(cache.data[0], b"spoiled", SEAL_END)
        write("only_sparse_wrong", cache)
    with _saved(None) as cache:
        on_wire, preference = CacheOnWire.of(cache), ExecutionPreference.FAST_SINGLE_ANSWER
        writer.call("only_save_sparse", PrepareModel(sparse, preference, Priority.MEDIUM, None, on_wire))
    for pool in pools:
        pool.close()


def write_messages(path: Path) -> None:
    """Writes a record of every message."""
    writer = Writer(path)
    try:
        writer.call("hello", Hello(PROTOCOL_VERSION))
        writer.call("hello_other", Hello(PROTOCOL_VERSION + 1))
        writer.call("ping", Ping())
        writer.call("status", GetStatus())
        writer.call("cancel", CancelCall(CANCELLED))
        for memory in (*_models(writer), *_executions(writer), *_bursts(writer)):
            memory.close()
        # What only a driver says, and answers to questions that nobody asked.
        writer.call("notify", Notify(1, ErrorStatus.NONE, (), NO_TIMING))
        writer.call("get_memories", GetMemories(BURST, tuple(range(200))))
        writer.call("recall", RecallMemories(tuple(range(200))))
        writer.reply("done", Done())
        writer.reply("failed", Failed(ErrorStatus.GENERAL_FAILURE, "x" * 900))
        for others in (_packets, _later, _cache_files):
            others(writer)
    finally:
        writer.close()


if __name__ == "__main__":
    write_messages(Path(sys.argv[1]))
