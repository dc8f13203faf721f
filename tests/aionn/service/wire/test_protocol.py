"""Messages: what goes in comes out, and whatever else comes in is refused without a trace."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import msgspec
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import Error, ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted, WouldFit
from aionn.hal import (
    BufferDesc,
    BufferRole,
    BufferToken,
    CacheFiles,
    ExecutionPreference,
    ExecutionResult,
    Memory,
    MemoryKind,
    OperandType,
    OperationType,
    OutputShape,
    Priority,
    Request,
    Timing,
)
from aionn.hal.callers import FrameReport
from aionn.models.builder import GraphBuilder
from aionn.service.host.reservations import ServedReservations
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import CacheOnWire, PoolOnWire, RequestOnWire, close_gently, memory_from_wire
from aionn.service.wire.large import in_memory
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import (
    DESCRIPTORS_MAX,
    DESCRIPTORS_WITH_MESSAGE_MAX,
    INLINE_BYTES_MAX,
    PROTOCOL_VERSION,
    Allocate,
    AllocateReply,
    Call,
    CopyFrom,
    CopyTo,
    Execute,
    ExecuteFenced,
    ExecuteReply,
    Failed,
    FreePreparedModel,
    GetMemoriesReply,
    GetStatus,
    Hello,
    Launch,
    Notify,
    PrepareModel,
    PrepareModelFromCache,
    Reply,
    SupportedOperations,
    decode,
    encode,
    read_envelope,
)
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.repetition import (
    Compute,
    ComputeFenced,
    CreateExecution,
    ForgetMemory,
    RecallMemories,
)
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    ExecuteReserved,
    ExecuteReservedReply,
    Move,
    MoveReply,
    Refusal,
    Release,
    Reserve,
    Reserved,
    ReserveReply,
    Room,
    Withdrawn,
)
from fences import SyncFence

ALLOWED = {
    ErrorStatus.INVALID_ARGUMENT,
    ErrorStatus.GENERAL_FAILURE,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
}


ASKED = AskedTime(
    name="gate",
    period_ns=10**8,
    deadline_ns=10**8,
    jitter_ns=10**6,
    duration_ns=10**5,
    blocker="enhance",
    blocker_ns=1,
)


HUGE_BYTES = 2 << 20
"""Size of a huge page of most machines."""

PHASED = msgspec.structs.replace(ASKED, phase_ns=2**62, tolerance_ns=10, chooses_phase=True)


def calls(small: Any) -> list[Any]:
    """One call of every kind that carries something."""
    request = RequestOnWire.of(small.Sum().request)
    model = small.sum_model()
    roles = (BufferRole(0, 0, 0.5),)
    fd = os.open("/dev/null", os.O_RDWR)
    cache = CacheOnWire.of(CacheFiles([fd], [fd], bytes(32)))
    os.close(fd)
    return [
        Hello(PROTOCOL_VERSION),
        GetStatus(),
        SupportedOperations(model),
        PrepareModel(model, ExecutionPreference.LOW_POWER, Priority.HIGH, 2**62, cache),
        PrepareModelFromCache(cache, Priority.LOW, None),
        FreePreparedModel(1),
        Execute(1, request, True, None, 10**9),
        Launch(1, 1, request, False, None, None),
        ExecuteFenced(1, request, (SyncFence("wait"), SyncFence.signalled()), True, None, None, 5),
        Allocate(BufferDesc((4,)), (1,), roles, ()),
        CopyTo(1, Memory.create(16)),
        CopyFrom(1, Memory.create(16), (4,)),
        Execute(1, RequestOnWire.of(small.Sum().request, lambda m: PoolOnWire(m, 0, 7)), False, None, None),
        Execute(
            1, RequestOnWire.of(small.Sum().request, lambda m: PoolOnWire(None, 0, 7)), False, None, None
        ),
        CreateExecution(1, request, True, 10**9),
        Compute(3, None),
        ComputeFenced(3, (SyncFence.signalled(),), None, 10**9),
        ForgetMemory(7),
        Reserve(ASKED),
        Change(1, PHASED),
        Move(1, 2**40),
        Release(2),
        Withdrawn(1, "silent"),
        Room(10**6),
        ExecuteReserved(1, 1, request, True, None, 10**9, Priority.HIGH),
    ]


def test_messages_come_out_as_they_went_in(small: Any) -> None:
    for number, body in enumerate(calls(small)):
        payload, fds, keep = encode(Call(number, body))
        again = decode(payload, fds)
        assert isinstance(again, Call) and again.id == number and type(again.body) is type(body)
        if isinstance(again.body, ExecuteFenced | ComputeFenced):
            assert [fence.status for fence in again.body.wait_for] == [f.status for f in body.wait_for]
            close_fences(again)
            close_fences(Call(0, body))
            continue
        # Memories and fences are other objects for the same thing: what can be compared is the second encoding's size.
        assert len(encode(again)[0]) == len(payload)
        assert read_envelope(payload) == (True, number)
        del keep
    result = ExecutionResult(True, (OutputShape((2, 0), True),), Timing(1, 2))
    replies = (
        ExecuteReply(result),
        AllocateReply(1, 2),
        Failed(ErrorStatus.DEAD_OBJECT, "gone"),
        ReserveReply(Reserved(1, True, 0, None, 5, 7)),
        ReserveReply(refusal=Refusal("there is no room", "no", WouldFit(period_ns=10))),
        MoveReply(True),
        ExecuteReservedReply(result),
        ExecuteReservedReply(result, report=FrameReport("overran", 2**40)),
        ExecuteReservedReply(
            status=ErrorStatus.MISSED_DEADLINE_TRANSIENT,
            message="late",
            report=FrameReport("blocked", 1, True, 2**62, 2**62, 2**62, 7, 9),
        ),
    )
    for reply in replies:
        assert decode(encode(Reply(7, reply))[0], []) == Reply(7, reply)
    notice = Notify(1, ErrorStatus.NONE, (OutputShape((1,)),), Timing())
    assert decode(encode(Call(0, notice))[0], []) == Call(0, notice)


def test_best_effort_has_no_byte_for_reservations(small: Any) -> None:
    request = RequestOnWire.of(small.Sum().request)
    payload, _, _ = encode(Call(1, Execute(1, request, False, None, None)))
    assert b"reserv" not in payload
    reply, _, _ = encode(Reply(1, ExecuteReply(ExecutionResult())))
    assert b"report" not in reply
    reserved, _, _ = encode(Reply(1, ExecuteReservedReply(ExecutionResult())))
    assert len(reserved) == len(reply) + len("Reserved")


def test_tokens_and_memories_of_a_request_keep_their_places() -> None:
    memory = Memory.create(8)
    request = Request((), (), (BufferToken(3), memory, BufferToken(1)))
    payload, fds, keep = encode(Call(1, Execute(1, RequestOnWire.of(request), False, None, None)))
    again = decode(payload, fds)
    assert isinstance(again, Call) and isinstance(again.body, Execute)
    pools = again.body.request.request().pools
    assert pools[0] == BufferToken(3) and pools[2] == BufferToken(1) and isinstance(pools[1], Memory)
    pools[1].array[0] = 9
    assert memory.array[0] == 9
    del keep


@pytest.mark.parametrize("count", [1, 2000])
def test_file_that_its_owner_could_shorten_is_refused_where_only_sealed_memory_may_come(
    count: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        memory = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD)
    graph = GraphBuilder()
    first = value = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    for _ in range(count):
        value = graph.result(OperationType.ADD, [value, first, graph.constant(0)], first)
    model = msgspec.structs.replace(graph.build([value]), pools=(memory,))
    payload, fds, keep = encode(Call(1, SupportedOperations(model)))
    assert isinstance(decode(payload, fds), Call)
    with pytest.raises(GeneralFailure, match="sealed memory alone"):
        decode(payload, fds, sealed_only=True)
    del keep
    memory.close()


def test_a_shared_device_takes_no_memory_of_huge_pages() -> None:
    """Its owner can make a hole in it, whatever its seals are, after which every access ends the process."""
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fields = (HUGE_BYTES, str(MemoryKind.ASHMEM), 0, True, None)
        with pytest.raises(GeneralFailure, match="ordinary pages, got huge ones"):
            memory_from_wire(fd, fields, sealed_only=True)
    finally:
        os.close(fd)


def test_large_message_travels_in_a_memory(small: Any) -> None:
    import msgspec

    model = msgspec.structs.replace(small.sum_model(), operand_values=bytes(INLINE_BYTES_MAX + 1))
    payload, fds, keep = encode(Call(1, SupportedOperations(model)))
    assert len(payload) < 100 and len(fds) == 1
    again = decode(payload, fds)
    assert isinstance(again, Call) and isinstance(again.body, SupportedOperations)
    assert again.body.model == model
    with pytest.raises(InvalidArgument):
        decode(payload, [])
    del keep


def mutated(rng: random.Random, payload: bytes, others: list[bytes]) -> bytes:
    """A message with something wrong in it, most of the time."""
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                data[at : at + 8] = other[start : start + rng.randrange(1, 64)]
            case 4 if data:
                data[at % len(data)] = rng.choice(
                    (0x00, 0x7F, 0x80, 0xC0, 0xC3, 0xCB, 0xCF, 0xD3, 0xDF, 0xFF)
                )
            case _:
                del data[at:]
        if not data:
            data = bytearray(payload)
    return bytes(data)


@pytest.mark.parametrize("sealed_only", [True, False])
def test_record_of_a_strangers_fence_is_not_read(sealed_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncFence("stranger's") as fence:
        payload, fds, _ = encode(Call(0, ComputeFenced(3, (fence,), None, None)))
        message = decode(payload, fds, sealed_only=sealed_only)
        fence.fail(ValueError("why"))
        assert isinstance(message.body, ComputeFenced)
        (imported,) = message.body.wait_for
        assert ("why" in str(imported.error)) != sealed_only
        close_fences(message)


def close_fences(message: Any) -> None:
    for fence in getattr(message.body, "wait_for", ()):
        fence.close()


def fuzz_decode(small: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    bodies = calls(small)
    encoded = [encode(Call(i, body)) for i, body in enumerate(bodies)]
    payloads = [payload for payload, _, _ in encoded]
    fds = [fd for _, own, _ in encoded for fd in own]
    accepted = 0
    for _ in range(count):
        payload, own, _ = rng.choice(encoded)
        payload = mutated(rng, payload, payloads)
        given = own if rng.random() < 0.5 else rng.sample(fds, rng.randrange(len(fds) + 1))
        try:
            close_fences(decode(payload, given))
            accepted += 1
        except Error as e:
            assert e.status in ALLOWED
        read_envelope(payload)
    for body in bodies:
        close_fences(Call(0, body))
    return accepted


def until_no_more_than(count: int) -> None:
    """Waits for what threads close."""
    until_s = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > count:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_mutated_messages_are_refused_or_are_messages(small: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    accepted = fuzz_decode(small, seed=5, count=3_000)
    gc.collect()
    until_no_more_than(before)
    assert 30 < accepted < 2_970  # Mutations that are all refused, or none, would try nothing.
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_mutated_messages(small: Any, seed: int) -> None:
    fuzz_decode(small, seed, 100_000)


async def fuzz_session(small: Any, seed: int, count: int) -> set[str]:
    """Mutated calls to a session that has a prepared model, a memory and a fenced execution."""
    rng = random.Random(seed)
    answered: set[str] = set()
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        quotas = Quotas(
            memory_bytes=1 << 20, prepared_models=64, buffers=16, bursts=4, executions=64, fenced=64
        )
        session = Session(device, portal, tasks, quotas=quotas, progress=Progress(None))
        ledger = ServedReservations("reference", device.info.slots, share=1.0)
        reservations = ledger.client(None, Peer(), session)
        handle = reservations.before(session.handle, session.greeted.is_set, lambda: False)
        channel: Any = _NoChannel()
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        model = small.sum_model()
        first = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        await session.handle(first, channel)
        await session.handle(Allocate(BufferDesc(), (1,), (BufferRole(0, 0),), (BufferRole(0, 0),)), channel)
        request = RequestOnWire.of(small.Sum().request)
        await session.handle(CreateExecution(1, request, False, None), channel)
        await handle(Reserve(PHASED), channel)
        bodies = calls(small)
        encoded = [encode(Call(i, body)) for i, body in enumerate(bodies)]
        payloads = [payload for payload, _, _ in encoded]
        for _ in range(count):
            payload, own, _ = rng.choice(encoded)
            if rng.random() < 0.9:
                payload = mutated(rng, payload, payloads)
            try:
                message = decode(payload, own)
            except Error:
                continue
            is_rare = isinstance(message.body, FreePreparedModel) and rng.random() < 0.9
            if not isinstance(message, Call) or is_rare:
                close_fences(message)
                continue
            try:
                with anyio.fail_after(20):
                    reply = await handle(message.body, channel)
                answered.add(type(reply).__name__)
            except Error as e:
                assert e.status in ALLOWED, e
                answered.add(e.status.name)
        for body in bodies:
            close_fences(Call(0, body))
        work = small.Sum()
        prepared = await device.prepare_model(model)
        await prepared.execute_synchronously(work.request)
        assert work.is_right
        await session.aclose()
        reservations.leave()
        ledger.look()
        counts = ledger.counts()
        assert counts["admitted"] == counts["released"] and not ledger._holders
        assert device.memories is not None and device.memories.used_bytes == 0
        tasks.cancel_scope.cancel()
    await device.aclose()
    return answered


class _NoChannel(Channel):
    """A channel whose client takes every notice."""

    def __init__(self) -> None:
        pass

    async def command(self, body: Any) -> None:
        assert isinstance(body, Notify)

    async def call(self, body: Any, expected: Any) -> Any:
        assert isinstance(body, RecallMemories)
        return GetMemoriesReply(())


async def test_session_survives_mutated_calls(small: Any) -> None:
    answered = await fuzz_session(small, seed=11, count=2_500)
    assert {
        "INVALID_ARGUMENT",
        "GENERAL_FAILURE",
        "PrepareModelReply",
        "ExecuteReply",
        "CreateExecutionReply",
        "ReserveReply",
        "MoveReply",
        "ExecuteReservedReply",
    } <= answered


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
async def test_session_survives_many_mutated_calls(small: Any, seed: int) -> None:
    await fuzz_session(small, seed, 200_000)


def test_account_refuses_beyond_its_limit_and_takes_nothing_then() -> None:
    account = Account(Quotas(memory_bytes=10))
    account.take("memory_bytes", 6)
    with pytest.raises(
        ResourceExhausted, match=r"may have 10 \(aionn serve --memory-mib\), has 6, asked for 5 more"
    ) as told:
        account.take("memory_bytes", 5)
    assert told.value.transient
    with pytest.raises(ResourceExhausted, match="asked for 11 more") as told:
        account.take("memory_bytes", 11)
    assert not told.value.transient, "it would not fit if nothing was taken"
    account.take("memory_bytes", 4)
    account.give_back("memory_bytes", 10)
    assert account.taken("memory_bytes") == 0
    with pytest.raises(InvalidArgument, match="expected 0 or more"):
        Quotas(bursts=-1)


def test_many_descriptors_are_closed_at_once_while_another_thread_computes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(100))

    fds = [os.open("/", os.O_RDONLY) for _ in range(DESCRIPTORS_MAX)]
    os.close(fds.pop(100))  # Nothing says that they are neighbours.
    thread = threading.Thread(target=compute)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.2)
    try:
        thread.start()
        began_s = time.monotonic()
        close_gently(fds)
        took_s = time.monotonic() - began_s
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        thread.join()
    until_no_more_than(before)
    assert took_s < 25.0  # One by one it takes the interval for each: fifty seconds.
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_message_carries_as_many_memories_as_it_may_and_no_more() -> None:
    memory = Memory.create(64)
    payload, fds, keep = encode(Reply(1, GetMemoriesReply((memory,) * DESCRIPTORS_WITH_MESSAGE_MAX)))
    assert len(fds) == DESCRIPTORS_WITH_MESSAGE_MAX
    with pytest.raises(InvalidArgument, match=f"at most {DESCRIPTORS_WITH_MESSAGE_MAX} memories"):
        encode(Reply(1, GetMemoriesReply((memory,) * (DESCRIPTORS_WITH_MESSAGE_MAX + 1))))
    del payload, keep
    memory.close()


@pytest.mark.parametrize(
    "head",
    [
        b"\x83\xa4type\xa4Call\xa2id\x05\xa1z",
        b"\x9f\xa9_InMemory",
        b"\x9f\xa9_InMemory\xa1a\xc3\x01\x01\x01",
    ],
    ids=["message", "first field", "further field"],
)
def test_nesting_of_any_depth_is_an_invalid_message(head: bytes) -> None:
    payload = head + b"\x91" * 5000
    assert read_envelope(payload) is None
    with pytest.raises(InvalidArgument):
        decode(payload, [])
    with suppress(InvalidArgument):
        in_memory(payload)


def test_files_of_a_cache_are_bound_to_a_key() -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    cache, odd = (CacheOnWire.of(CacheFiles([fd], [fd], bytes(length))) for length in (32, 31))
    os.close(fd)
    assert cache.files().token == bytes(32)
    bound = {cache.files(key=key).token for key in (b"one", b"one", b"two")}
    assert len(bound) == 2 and all(len(token) == 32 for token in bound)
    assert odd.files(key=b"one").token == bytes(31), "drivers reject it by its length"
