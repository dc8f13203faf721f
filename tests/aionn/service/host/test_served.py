"""One driver process, many clients: nobody sees or disturbs another, and what a client leaves behind goes with it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
)
from aionn.hal import BufferDesc, BufferRole, BufferToken, Memory
from aionn.service.host.model_sizes import _structure_bytes
from aionn.service.host.process import listen
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.protocol import (
    Allocate,
    Execute,
    Failed,
    Ping,
)

pytestmark = pytest.mark.forked("any")

IN, OUT = [BufferRole(0, 0)], [BufferRole(0, 0)]
SETTLED_S_MAX = 30.0


async def settled(is_so: Any) -> None:
    """Waits for what another task or thread brings about."""
    with anyio.fail_after(SETTLED_S_MAX):
        while not is_so():
            gc.collect()
            await anyio.sleep(0.005)


async def test_clients_share_a_device(served: Any, small: Any) -> None:
    clients = [served.client() for _ in range(4)]

    async def use(client: Any) -> None:
        prepared = await client.prepare_model(small.sum_model())
        burst = await prepared.configure_execution_burst()
        for _ in range(10):
            plain, fast = small.Sum(), small.Sum()
            await prepared.execute_synchronously(plain.request)
            await burst.execute_synchronously(fast.request, [-1])
            assert plain.is_right and fast.is_right
        await burst.aclose()

    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(use, client)
    assert {client.pid for client in clients} == {os.getpid()}
    for client in clients:
        await client.aclose()


async def test_connection_is_quiet_while_nothing_is_under_way_and_no_burst_is_open(
    served: Any, small: Any
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    connection = client._connection
    assert connection.is_quiet()
    burst = await prepared.configure_execution_burst()
    assert not connection.is_quiet()
    await burst.aclose()
    assert connection.is_quiet()
    slot = served.device.gate.slot(2, None)
    await anyio.to_thread.run_sync(slot.__enter__)  # The device does somebody else's work.
    told = threading.Event()
    await prepared.execute(small.Sum().request, lambda *outcome: told.set())
    assert not connection.is_quiet()
    async with anyio.create_task_group() as tasks:
        slot.__exit__(None, None, None)
        await settled(told.is_set)
        assert connection.is_quiet()
        tasks.start_soon(client.status)
        with anyio.fail_after(SETTLED_S_MAX):
            while connection.is_quiet():
                await anyio.lowlevel.checkpoint()
    await client.aclose()


async def test_handles_and_tokens_of_others_mean_nothing(served: Any, small: Any) -> None:
    mine, other = served.client(), served.client()
    prepared = await mine.prepare_model(small.sum_model())
    buffer = await mine.allocate(BufferDesc(), [prepared], IN, OUT)
    await buffer.copy_from(Memory.create(16), [])
    raw = await served.raw().hello()
    request = RequestOnWire.of(small.Sum().request)
    reply = await raw.ask(2, Execute(prepared.handle, request, False, None, None))
    assert isinstance(reply, Failed) and "no prepared model has the handle" in reply.message
    reply = await raw.ask(3, Allocate(BufferDesc(), (prepared.handle,), tuple(IN), ()))
    assert isinstance(reply, Failed)
    theirs = await other.prepare_model(small.sum_model())
    work = small.Sum()
    stolen = type(work.request)(
        (
            type(work.request.inputs[0])(False, type(work.request.inputs[0].location)(1)),
            work.request.inputs[1],
        ),
        work.request.outputs,
        (work.memory, BufferToken(buffer.token)),
    )
    with pytest.raises(InvalidArgument, match="not allocated for this use"):
        await theirs.execute_synchronously(stolen)
    raw.close()
    await mine.aclose()
    await other.aclose()


async def test_end_of_a_client_frees_all_that_was_its_own(served: Any, small: Any) -> None:
    device: ReferenceDevice = served.device
    leaving, staying = served.client(), served.client()
    kept = await staying.prepare_model(small.sum_model())
    prepared = await leaving.prepare_model(small.sum_model())
    buffer = await leaving.allocate(BufferDesc(), [prepared], IN, OUT)
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(small.Sum().request, [-1])
    assert device.memories is not None and device.memories.used_bytes == 16
    await leaving.aclose()
    await settled(lambda: device.memories.used_bytes == 0)
    with pytest.raises(DeadObject):
        await buffer.copy_to(Memory.create(16))
    with pytest.raises(DeadObject):
        await prepared.execute_synchronously(small.Sum().request)
    await burst.aclose()
    work = small.Sum()
    await kept.execute_synchronously(work.request)
    assert work.is_right
    await staying.aclose()


async def test_killed_client_is_cleaned_up_and_others_go_on(
    served: Any, small: Any, repository: Path
) -> None:
    script = """
        import sys, anyio
        from aionn.hal import BufferDesc, BufferRole
        from aionn.service.client.device import RemoteDevice
        sys.path.insert(0, sys.argv[2])
        from conftest import sum_model, Sum

        async def main():
            async with anyio.create_task_group() as tasks:
                device = RemoteDevice("reference", "reference", tasks, path=sys.argv[1])
                prepared = await device.prepare_model(sum_model())
                buffer = await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
                burst = await prepared.configure_execution_burst()
                work = Sum()
                print("ready", flush=True)
                while True:
                    await burst.execute_synchronously(work.request, [0])

        anyio.run(main)
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(script),
        str(served.path),
        str(Path(__file__).parents[1]),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    staying = served.client()
    prepared = await staying.prepare_model(small.sum_model())
    process = await anyio.open_process(command, env=environment, stderr=None)
    try:
        assert process.stdout is not None
        with anyio.fail_after(30):
            assert b"ready" in await process.stdout.receive()
        assert served.device.memories.used_bytes == 16
        process.send_signal(signal.SIGKILL)
        await process.wait()
    finally:
        await process.aclose()
    await settled(lambda: served.device.memories.used_bytes == 0)
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await staying.aclose()


async def test_dropped_objects_are_freed_at_the_driver(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    buffers = [await client.allocate(BufferDesc(), [prepared], IN, []) for _ in range(3)]
    assert served.device.memories.used_bytes == 48
    del buffers
    await settled(lambda: served.device.memories.used_bytes == 0)
    import weakref

    at_driver: list[Any] = []
    make = served.device.prepare

    def remember(*arguments: Any, **more: Any) -> Any:
        made = make(*arguments, **more)
        at_driver.append(weakref.ref(made))
        return made

    served.device.prepare = remember
    dropped = await client.prepare_model(small.sum_model())
    assert at_driver[0]() is not None
    del dropped
    await settled(lambda: at_driver[0]() is None)
    await client.aclose()


async def test_questions_of_one_client_leave_turns_to_others(
    serving: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    may_go_on = threading.Event()

    class Asked(ReferenceDevice):
        def supports(self, model: Any) -> Any:
            may_go_on.wait(SETTLED_S_MAX)
            told.append("preparation" if model.main.operands[0].dimensions == (8,) else "question")
            return super().supports(model)

    may_go_on.set()
    served = await serving(Asked())
    asking, working = served.client(), served.client()
    prepared = await working.prepare_model(small.sum_model())
    run = ReferencePreparedModel.run

    def noted(self: Any, *arguments: Any) -> Any:
        told.append("execution")
        return run(self, *arguments)

    monkeypatch.setattr(ReferencePreparedModel, "run", noted)
    await asking.status()
    may_go_on.clear()
    told.clear()
    count, preparing = 20, served.device.preparing
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(asking.supported_operations, small.sum_model())
        await settled(lambda: preparing.waiting_count == count - 1)
        tasks.start_soon(prepared.execute_synchronously, small.Sum().request)
        tasks.start_soon(working.prepare_model, small.sum_model(8))
        await settled(lambda: preparing.waiting_count == count and told == ["execution"])
        may_go_on.set()
    assert max(told.index("execution"), told.index("preparation")) < count / 2, told
    for client in (asking, working):
        await client.aclose()


# Quotas


async def test_prepared_models_are_limited_per_client(serving: Any, small: Any) -> None:
    served = await serving(prepared_models=2)
    greedy, modest = served.client(), served.client()
    held = [await greedy.prepare_model(small.sum_model()) for _ in range(2)]
    with pytest.raises(ResourceExhausted, match="prepared models: this client may have 2"):
        await greedy.prepare_model(small.sum_model())
    await modest.prepare_model(small.sum_model())
    await held[0].aclose()
    await greedy.prepare_model(small.sum_model())
    with pytest.raises(InvalidArgument):  # A preparation that fails takes nothing.
        await modest.prepare_model(small.sum_model(2**31))
    await modest.prepare_model(small.sum_model())
    await greedy.aclose()
    await modest.aclose()


async def test_memory_is_limited_per_client(serving: Any, small: Any) -> None:
    structure_bytes = _structure_bytes([small.sum_model(64).main])
    served = await serving(memory_bytes=1000 + structure_bytes)
    greedy, modest = served.client(), served.client()
    prepared = await greedy.prepare_model(small.sum_model(64))
    buffers = [await greedy.allocate(BufferDesc(), [prepared], IN, []) for _ in range(3)]
    with pytest.raises(ResourceExhausted, match="memory bytes"):
        await greedy.allocate(BufferDesc(), [prepared], IN, [])
    assert served.device.memories.used_bytes == 3 * 256
    with pytest.raises(ResourceExhausted, match="memory bytes"):
        await greedy.prepare_model(large_constant_model())
    other = await modest.prepare_model(small.sum_model(64))
    await modest.allocate(BufferDesc(), [other], IN, [])
    await buffers.pop().aclose()
    await greedy.allocate(BufferDesc(), [prepared], IN, [])
    await greedy.aclose()
    await modest.aclose()


def large_constant_model() -> Any:
    from aionn.hal import OperandType, OperationType
    from aionn.models.builder import GraphBuilder

    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (256,))
    b = graph.constant(np.arange(256, dtype=np.float32))
    return graph.build([graph.result(OperationType.ADD, [a, b, graph.constant(0)], a)])


async def test_bursts_and_executions_are_limited_per_client(serving: Any, small: Any) -> None:
    served = await serving(bursts=1, executions=1)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    with pytest.raises(ResourceExhausted, match="bursts"):
        await prepared.configure_execution_burst()
    await burst.aclose()
    await (await prepared.configure_execution_burst()).aclose()
    gate = served.device.gate.slot(2, None)
    await anyio.to_thread.run_sync(gate.__enter__)  # The device is busy with somebody else's work.
    async with anyio.create_task_group() as tasks:
        first = small.Sum()
        tasks.start_soon(prepared.execute_synchronously, first.request)
        await settled(lambda: served.device.gate.waiting_count == 1)
        with pytest.raises(ResourceExhausted, match="executions"):
            await prepared.execute_synchronously(small.Sum().request)
        gate.__exit__(None, None, None)
    assert first.is_right
    await prepared.execute_synchronously(small.Sum().request)
    await client.aclose()


# The socket in the file system


async def test_socket_has_the_permissions_that_were_asked_for(served: Any, tmp_path: Path) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    device = ReferenceDevice()
    async with anyio.create_task_group() as tasks:
        started = anyio.Event()

        async def run() -> None:
            await listen(device, tmp_path / "group.sock", mode=0o660, started=started)

        tasks.start_soon(run)
        await started.wait()
        assert stat.S_IMODE((tmp_path / "group.sock").stat().st_mode) == 0o660
        tasks.cancel_scope.cancel()
    assert not (tmp_path / "group.sock").exists()
    await device.aclose()


async def test_stale_socket_is_replaced_and_a_served_one_is_not(served: Any, tmp_path: Path) -> None:
    device = ReferenceDevice()
    with pytest.raises(DeviceUnavailable, match="serves there already"):
        await listen(device, served.path)
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(stale))
    async with anyio.create_task_group() as tasks:
        started = anyio.Event()

        async def run() -> None:
            await listen(device, stale, started=started)

        tasks.start_soon(run)
        await started.wait()
        tasks.cancel_scope.cancel()
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("precious")
    with pytest.raises(DeviceUnavailable, match="not a socket"):
        await listen(device, ordinary)
    assert ordinary.read_text() == "precious"
    with pytest.raises(DeviceUnavailable, match="cannot be served"):
        await listen(device, tmp_path / ("x" * 200))
    with pytest.raises(DeviceUnavailable, match=r"cannot be served: its folder does not exist$"):
        await listen(device, tmp_path / "none" / "npu.sock")
    await device.aclose()


async def test_nobody_at_the_socket_is_told_so(background: Any, tmp_path: Path) -> None:
    from aionn.service.client.device import RemoteDevice

    client = RemoteDevice("reference", "r", background.tasks, path=tmp_path / "none.sock")
    with pytest.raises(DeviceUnavailable, match="cannot connect"):
        await client.connect()


def test_command_serves_until_it_is_told_to_end(tmp_path: Path, repository: Path) -> None:
    path = tmp_path / "cli.sock"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", str(path), "--mode", "660"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        assert "serving reference" in server.stdout.readline()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert again.returncode == 2 and "serves there already" in again.stderr
        assert "Traceback" not in again.stderr
        server.terminate()
        assert server.wait(20) == 0
    assert not path.exists()


@pytest.mark.long
async def test_ten_thousand_connections_leave_nothing(served: Any, small: Any) -> None:
    def resident_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024

    async def rounds(count: int) -> None:
        for _ in range(count):
            client = served.client()
            prepared = await client.prepare_model(small.sum_model())
            await client.allocate(BufferDesc(), [prepared], IN, OUT)
            await client.aclose()

    await rounds(500)
    before_kib, before = resident_kib(), len(os.listdir("/proc/self/fd"))
    await rounds(10_000)
    await settled(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert resident_kib() - before_kib < 4096


# Idle bursts


async def test_idle_burst_gives_its_memories_back_and_takes_them_again(serving: Any, small: Any) -> None:
    served = await serving(idle_s=0.1)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    asked: list[int] = []
    answer = burst.memories

    def count(slots: Any) -> Any:
        asked.extend(slots)
        return answer(slots)

    burst.memories = count
    work = small.Sum()
    for _ in range(3):
        await burst.execute_synchronously(work.request, [0])
    asked_before = len(asked)
    mappings = Path("/proc/self/maps").read_text().count("/memfd:aionn ")
    await settled(lambda: Path("/proc/self/maps").read_text().count("/memfd:aionn ") < mappings)
    work.values[0] += 1
    await burst.execute_synchronously(work.request, [0])
    assert len(asked) == asked_before + 1 and work.is_right
    await burst.aclose()
    await client.aclose()


# The channel's own promises


async def test_error_of_an_answer_that_cannot_be_sent_ends_neither_side() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def refuse(body: Any, channel: Channel) -> Any:
        raise GeneralFailure("no")

    async def too_much(body: Any, channel: Channel) -> Any:
        from aionn.service.wire.protocol import GetMemoriesReply

        return GetMemoriesReply(tuple(Memory.create(1) for _ in range(300)))

    one = Channel(ours, refuse, peer_name="one")
    two = Channel(theirs, too_much, peer_name="two")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        tasks.start_soon(two.run)
        with pytest.raises(InvalidArgument, match="at most"):
            await one.command(Ping())
        with pytest.raises(GeneralFailure, match="no"):
            await two.command(Ping())
        tasks.cancel_scope.cancel()
    with pytest.raises(Error):
        await one.command(Ping())
    one.release()
    two.release()


async def test_what_a_burst_remembers_of_a_request_goes_with_its_memory(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    first, second = small.Sum(), small.Sum()
    second.values[0] += 7
    for _ in range(3):
        await burst.execute_synchronously(first.request, [0])
    assert first.is_right
    own = Path("/proc/self/maps").read_text().count("/memfd:aionn ")
    await burst.release_memory_resource(0)
    await settled(lambda: Path("/proc/self/maps").read_text().count("/memfd:aionn ") < own)
    # The same slot stands for another memory now, and the same packet for another request.
    for _ in range(3):
        second.values[1] += 1
        await burst.execute_synchronously(second.request, [1])
        assert second.is_right
    await burst.aclose()
    await client.aclose()


@pytest.mark.filterwarnings("ignore:.*dropped open.*:ResourceWarning")
async def test_dropped_burst_is_ended_at_the_driver(served: Any, small: Any) -> None:
    def listeners() -> int:
        return sum(thread.name.startswith("aionn-burst-") for thread in threading.enumerate())

    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    before = listeners()
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(small.Sum().request, [-1])
    assert listeners() == before + 1
    del burst
    await settled(lambda: listeners() == before)
    await client.aclose()
