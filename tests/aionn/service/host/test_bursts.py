"""Bursts to a driver process: limits of time, device memories, polling windows, ends that are told at once, memory that stays."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest

import fmq
from aionn.burst.packets import decode_result, encode_request
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import DeadObject, Error, ErrorStatus, InvalidArgument, MissedDeadline
from aionn.hal import (
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    ExecutionPreference,
    Memory,
    Model,
    OperandType,
    OperationType,
    Priority,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from aionn.service.client.device import RemoteDevice
from aionn.service.host import process as process_module
from aionn.service.host.process import listen
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.handles import QueueHandle
from aionn.service.wire.peers import Peers
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Call,
    ConfigureBurst,
    ConfigureBurstReply,
    EndBurst,
    Failed,
    FreePreparedModel,
    GetMemories,
    GetMemoriesReply,
    Hello,
    PrepareModel,
    decode,
)
from aionn.service.wire.quotas import Quotas
from fmq.descriptor import Grantor, plan_layout

ANSWER_S_MAX = 10.0
SOON_NS = 50_000_000


def looping(value: float) -> tuple[Request, Memory]:
    """A request for the endless loop, which ends at once for values below 0."""
    memory = Memory.create(128)
    memory.array[:4].view(np.float32)[0] = value
    arguments = [RequestArgument(False, DataLocation(0, offset, 4)) for offset in (0, 64)]
    return Request((arguments[0],), (arguments[1],), (memory,)), memory


async def test_deadline_that_passes_while_running_ends_the_execution(served: Any) -> None:
    client = served.client()
    burst = await (await client.prepare_model(endless_model())).configure_execution_burst()
    request, _ = looping(1.0)
    with anyio.fail_after(ANSWER_S_MAX):
        for _ in range(2):
            deadline_ns = time.monotonic_ns() + SOON_NS
            with pytest.raises(MissedDeadline) as missed:
                await burst.execute_synchronously(request, [0], deadline_ns=deadline_ns)
            assert missed.value.transient and time.monotonic_ns() >= deadline_ns
        with pytest.raises(MissedDeadline) as missed:
            await burst.execute_synchronously(request, [0], deadline_ns=time.monotonic_ns())
        assert not missed.value.transient
        # Without a limit, and with one that is kept, the same burst executes.
        ending, _ = looping(-1.0)
        await burst.execute_synchronously(ending, [1])
        await burst.execute_synchronously(ending, [1], deadline_ns=time.monotonic_ns() + 10**10)
    await burst.aclose()
    await client.aclose()


async def test_loop_timeout_ends_the_execution(served: Any) -> None:
    client = served.client()
    burst = await (await client.prepare_model(endless_model())).configure_execution_burst()
    request, _ = looping(1.0)
    started_ns = time.monotonic_ns()
    with anyio.fail_after(ANSWER_S_MAX), pytest.raises(MissedDeadline) as missed:
        await burst.execute_synchronously(request, [0], loop_timeout_ns=SOON_NS)
    assert missed.value.transient and time.monotonic_ns() - started_ns >= SOON_NS
    for illegal in ({"loop_timeout_ns": -1}, {"deadline_ns": -1}, {"deadline_ns": 2**63}):
        with pytest.raises(InvalidArgument):
            await burst.execute_synchronously(request, [0], **illegal)
    await burst.aclose()
    await client.aclose()


async def test_memory_that_came_first_stays_until_it_is_released(served: Any, small: Any) -> None:
    client = served.client()
    burst = await (await client.prepare_model(small.sum_model())).configure_execution_burst()
    first, second = small.Sum(), small.Sum()
    await burst.execute_synchronously(first.request, [7])
    first.values[2] = second.values[2] = -1
    await burst.execute_synchronously(second.request, [7])
    assert first.is_right and (second.values[2] == -1).all()
    await burst.release_memory_resource(7)
    await burst.execute_synchronously(second.request, [8])
    assert second.is_right
    await burst.aclose()
    await client.aclose()


async def test_device_memories_go_through_bursts_without_an_identifier(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    buffer = await client.allocate(BufferDesc(), [prepared], [], [BufferRole(0, 0)])
    burst = await prepared.configure_execution_burst()
    work = small.Sum()
    request = Request(
        work.request.inputs,
        (RequestArgument(False, DataLocation(1, 0, 0)),),
        (work.memory, BufferToken(buffer.token)),
    )
    await burst.execute_synchronously(work.request, [0])
    other = small.Sum()
    other.values[0] = 1000.0
    # The memory that identifier 0 stands for is the first one's, on this way as well.
    elsewhere = Request(request.inputs, request.outputs, (other.memory, BufferToken(buffer.token)))
    for asked in (request, elsewhere):
        await burst.execute_synchronously(asked, [0, -1])
        copy = Memory.create(16)
        await buffer.copy_to(copy)
        assert (copy.array.view(np.float32) == work.values[0] + work.values[1]).all()
    for identifiers in ([0, 1], [0], [0, -2]):
        with pytest.raises(InvalidArgument):
            await burst.execute_synchronously(request, identifiers)
    await burst.execute_synchronously(work.request, [0])
    await buffer.aclose()
    await burst.aclose()
    await client.aclose()


def _many(inputs: int, outputs: int) -> tuple[Model, Request, Memory]:
    """A model that passes numbers of rank 4 on, and a request with the dimensions of its inputs."""
    graph, count = GraphBuilder(), max(inputs, outputs)
    kind, shape = OperandType.TENSOR_FLOAT32, (count // inputs, 1, 1, 1)
    given = [graph.input(kind, shape) for _ in range(inputs)]
    made = [graph.variable(kind, (count // outputs, 1, 1, 1)) for _ in range(outputs)]
    if inputs > 1:
        graph.operation(OperationType.CONCATENATION, [*given, 0], made)
    else:
        graph.operation(OperationType.SPLIT, [*given, 0, outputs], made)
    memory = Memory.create(8 * count)
    memory.array.view(np.float32)[:count] = np.arange(count)

    def arguments(number: int, start: int, dimensions: tuple[int, ...]) -> tuple[RequestArgument, ...]:
        size = 4 * count // number
        return tuple(
            RequestArgument(False, DataLocation(0, start + place * size, size), dimensions)
            for place in range(number)
        )

    request = Request(arguments(inputs, 0, shape), arguments(outputs, 4 * count, ()), (memory,))
    return graph.build(made), request, memory


@pytest.mark.parametrize(("inputs", "outputs"), [(900, 1), (1, 900)])
async def test_request_or_result_with_more_datums_than_a_packet_has_goes_through_the_model(
    served: Any, inputs: int, outputs: int
) -> None:
    client = served.client()
    model, request, memory = _many(inputs, outputs)
    burst = await (await client.prepare_model(model)).configure_execution_burst()
    values = memory.array.view(np.float32).reshape(2, -1)
    for identifier in (0, -1, 0):
        values[1] = -1.0
        await burst.execute_synchronously(request, [identifier])
        assert (values[0] == values[1]).all()
    await burst.aclose()
    await client.aclose()


async def test_burst_with_a_corrupt_queue_ends_on_both_sides(
    served: Any, small: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst, other = [await prepared.configure_execution_burst() for _ in range(2)]
    work = small.Sum()
    await burst.execute_synchronously(work.request, [0])
    queue = burst._requests
    grantor = queue.descriptor.grantors[Grantor.WRITEPTR]
    with (
        caplog.at_level(logging.WARNING, "aionn.burst"),
        mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size) as memory,
    ):
        memory[grantor.offset : grantor.offset + 8] = struct.pack("<Q", 2**62 + 3)
        with anyio.fail_after(ANSWER_S_MAX):
            while burst.state.value != "dead":
                await anyio.sleep(0.005)
    assert "ended:" in caplog.text
    with pytest.raises(DeadObject, match="the driver ended the burst"):
        await burst.execute_synchronously(work.request, [0])
    # Nothing else of this client has suffered.
    work.values[2] = 0
    await other.execute_synchronously(work.request, [0])
    assert work.is_right
    await burst.aclose()
    await other.aclose()
    await client.aclose()


async def test_both_ends_may_look_for_their_packets_for_a_while(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    for window in ({"controller_polling_us": 501}, {"server_polling_us": -1}):
        with pytest.raises(InvalidArgument, match="polling window"):
            await prepared.configure_execution_burst(**window)
    burst = await prepared.configure_execution_burst(controller_polling_us=500, server_polling_us=500)
    work, turns = small.Sum(), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        for value in range(200):
            work.values[0] = value
            await burst.execute_synchronously(work.request, [0])
            assert work.is_right
        tasks.cancel_scope.cancel()
    assert turns >= 200 // 9, "results that are found at once must not keep the loop from others"
    await burst.aclose()
    await client.aclose()


def page_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


async def test_driver_process_keeps_the_memory_of_its_temporaries(background: Any) -> None:
    """A chain of additions on 2 MiB: without that every frame takes and gives back 512 pages a temporary."""
    graph = GraphBuilder()
    x = value = graph.input(OperandType.TENSOR_FLOAT32, (512, 1024))
    for _ in range(4):
        value = graph.result(OperationType.ADD, [value, x, graph.constant(0)], x)
    model = graph.build([value])
    size = 4 * 512 * 1024
    memory = Memory.create(2 * size)
    arguments = [RequestArgument(False, DataLocation(0, index * size, size)) for index in range(2)]
    request = Request((arguments[0],), (arguments[1],), (memory,))
    device = RemoteDevice("reference", "reference", background.tasks)
    try:
        await device.connect()
        burst = await (await device.prepare_model(model)).configure_execution_burst()
        for _ in range(10):
            await burst.execute_synchronously(request, [0])
        assert device.pid is not None
        before = page_faults(device.pid)
        for _ in range(10):
            await burst.execute_synchronously(request, [0])
        assert page_faults(device.pid) - before < 512
        await burst.aclose()
    finally:
        await device.aclose()


async def test_request_that_was_sent_takes_no_second_path(background: Any, small: Any) -> None:
    device = RemoteDevice("reference", "reference", background.tasks)
    try:
        await device.connect()
        prepared = await device.prepare_model(endless_model())
        burst = await prepared.configure_execution_burst()
        calls: list[Any] = []

        async def second_path(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)

        burst._model.execute_synchronously = second_path
        request, _ = looping(1.0)

        async def execute() -> None:
            with pytest.raises(Error):
                await burst.execute_synchronously(request, [0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(execute)
            while burst.state.value != "in flight":
                await anyio.sleep(0.001)
            os.kill(device.pid, 9)
        assert calls == []
        await burst.aclose()
    finally:
        await device.aclose()


def sparse_queue(ring_bytes: int) -> tuple[fmq.MQDescriptor, list[int]]:
    """A queue whose memory has no pages yet, as it is sent; the caller closes the descriptors."""
    plan, size_bytes = plan_layout(1, ring_bytes, fmq.Flavour.SYNCHRONIZED, event_flag=True, own_ring=False)
    memory = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size_bytes)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return plan, [memory, os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)]


async def test_queues_count_and_a_large_one_gets_no_pages(serving: Any, small: Any) -> None:
    served = await serving(memory_bytes=1 << 20)
    raw = await served.raw().hello()
    body = PrepareModel(small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
    prepared = (await raw.ask(2, body)).prepared
    with contextlib.ExitStack() as stack:
        replies = []
        for number, ring_bytes in enumerate((1 << 30, 1 << 19, 1 << 16), 3):
            descriptor, fds = sparse_queue(ring_bytes)
            for fd in fds:
                stack.callback(os.close, fd)
            queue = QueueHandle(descriptor, fds)
            replies.append(await raw.ask(number, ConfigureBurst(prepared, queue, queue)))
            has_pages = os.fstat(fds[0]).st_blocks > 0
            assert has_pages == isinstance(replies[-1], ConfigureBurstReply)
        assert isinstance(replies[0], Failed) and "expected a queue of at most" in replies[0].message
        assert isinstance(replies[1], Failed) and "memory bytes" in replies[1].message
        assert isinstance(replies[2], ConfigureBurstReply)
        # What it took is given back with it.
        await raw.ask(6, EndBurst(replies[2].burst))
        for number in range(7, 27):
            reply = await raw.ask(number, ConfigureBurst(prepared, queue, queue))
            assert isinstance(reply, ConfigureBurstReply)
            await raw.ask(100 + number, EndBurst(reply.burst))
    raw.close()


async def test_server_that_ends_while_a_burst_asks_for_memories_reports_no_failure(
    served: Any, small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, path, started = ReferenceDevice(), tmp_path / "ending.sock", anyio.Event()
    requests, results = (fmq.MessageQueue.create(1, 1 << 12) for _ in range(2))
    with anyio.fail_after(ANSWER_S_MAX), caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: listen(device, path, started=started))
            await started.wait()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(str(path))
            raw = await served.speaking(sock).hello()
            model = small.sum_model()
            body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
            prepared = (await raw.ask(2, body)).prepared
            queues = [QueueHandle(queue.descriptor, queue.fds) for queue in (requests, results)]
            await raw.ask(3, ConfigureBurst(prepared, *queues))
            assert requests.write_message(encode_request(small.Sum().request, [0], measure=False))
            question = decode(await raw.receive(), [])
            assert isinstance(question, Call) and isinstance(question.body, GetMemories)
            tasks.cancel_scope.cancel()
        packet = results.read_message()
        await device.aclose()
    raw.close()
    assert packet is not None and decode_result(packet).status == ErrorStatus.DEAD_OBJECT
    assert caplog.text == ""
    requests.close()
    results.close()


async def test_process_has_a_burst_until_its_thread_has_ended(
    serving: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it uses it, it counts among the processes that wait."""
    made: list[Peers] = []

    class Recorded(Peers):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(process_module, "Peers", Recorded)
    client = (await serving()).client()
    prepared = await client.prepare_model(small.sum_model())
    began_s = time.monotonic()
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(small.Sum().request, [0])
    (peer,) = made[0]._known.values()
    (used,) = peer.bursts
    assert used.was_used_since(began_s)
    await burst.aclose()
    assert not peer.bursts
    await client.aclose()


class Answering:
    """The channel to a client that has one memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    async def call(self, body: GetMemories, expected: object) -> GetMemoriesReply:
        return GetMemoriesReply((self._memory,) * len(body.slots))


@pytest.mark.parametrize("how", ["free", "end", "close"])
async def test_nothing_is_freed_before_the_thread_of_a_burst_that_is_being_ended_is_done(
    small: Any, how: str
) -> None:
    entered, may_end = threading.Event(), threading.Event()
    closed: list[bool] = []

    class Halting(ReferencePreparedModel):
        def run(self, *asked: Any) -> Any:
            entered.set()
            assert may_end.wait(ANSWER_S_MAX)
            return super().run(*asked)

        async def aclose(self) -> None:
            closed.append(may_end.is_set())
            await super().aclose()

    class HaltingDevice(ReferenceDevice):
        def prepare(self, model: Model, *, priority: Priority, **terms: Any) -> Halting:
            return Halting(self, model, priority)

    device, work = HaltingDevice(), small.Sum()
    channel: Any = Answering(work.memory)
    requests, results = (fmq.MessageQueue.create(1, 1 << 12) for _ in range(2))
    over: list[str] = []
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(device, portal, tasks, quotas=Quotas(), progress=Progress(None))
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        prepare = PrepareModel(
            small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
        )
        prepared: Any = await session.handle(prepare, channel)
        queues = [QueueHandle(queue.descriptor, queue.fds) for queue in (requests, results)]
        burst: Any = await session.handle(ConfigureBurst(prepared.prepared, *queues), channel)

        async def do(what: str) -> None:
            if what == "close":
                await session.aclose()
            else:
                body = FreePreparedModel(prepared.prepared) if what == "free" else EndBurst(burst.burst)
                await session.handle(body, channel)
            over.append(what)

        try:
            assert requests.write_message(encode_request(work.request, [0], measure=False))
            assert await anyio.to_thread.run_sync(entered.wait, ANSWER_S_MAX)
            for what in ("end", how):
                tasks.start_soon(do, what)
                await anyio.wait_all_tasks_blocked()
            assert not closed and not over and session.account.taken("bursts") == 1
            assert session.bursts.under_way() == [None]
        finally:
            may_end.set()
        while len(over) < 2:
            await anyio.sleep(0.001)
        assert session.account.taken("bursts") == 0 and not session.bursts.under_way()
        assert results.read_message() is not None
        await session.aclose()
    assert closed == [True]
    await device.aclose()
    for queue in (requests, results):
        queue.close()
