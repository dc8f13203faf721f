"""A node in processes of its own on loopback: values, forms of execution, quotas, silence, death, drain, the command line."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import aionn
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
)
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.hal import (
    BufferDesc,
    BufferRole,
    CacheFiles,
    DataLocation,
    DeviceStatus,
    Memory,
    MemoryKind,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from aionn.service.host.draining import EXIT_STATUS, DrainState
from aionn.testing import models
from fences import SyncFence
from tests.aionn.fleet.conftest import START_S_MAX, Served, serving
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.forked("any")


async def test_every_form_of_execution(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    plain, notified, fenced, again, fast = (Sum() for _ in range(5))
    await prepared.execute_synchronously(plain.request)
    done = anyio.Event()
    statuses: list[ErrorStatus] = []

    def callback(status: ErrorStatus, shapes: Any, timing: Any) -> None:
        statuses.append(status)
        done.set()

    await prepared.execute(notified.request, callback)
    before = SyncFence("before")
    launched = await prepared.execute_fenced(fenced.request, [before])
    before.signal()
    assert launched.fence is not None
    await launched.fence
    reusable = await prepared.create_reusable_execution(again.request)
    await reusable.execute_synchronously()
    burst = await prepared.configure_execution_burst()
    for _ in range(3):
        await burst.execute_synchronously(fast.request, [0])
    with anyio.fail_after(START_S_MAX):
        await done.wait()
    assert statuses == [ErrorStatus.NONE]
    assert all(one.is_right for one in (plain, notified, fenced, again, fast))


async def test_timings_are_measured_at_the_node(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    result = await prepared.execute_synchronously(Sum().request, measure=True)
    assert result.timing.time_in_driver_ns is not None and result.timing.time_in_driver_ns > 0
    assert (await prepared.execute_synchronously(Sum().request)).timing.time_in_driver_ns is None


async def test_values_of_megabytes_cross(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model(500_000))
    for _ in range(2):
        frame = Sum(500_000)
        await prepared.execute_synchronously(frame.request)
        assert frame.is_right
    assert device.bytes_per_s > 0


async def test_large_constants_cross_and_files_become_memories(device: NodeDevice, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((1000, 700), dtype=np.float32)
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (1000, 700))
    model = graph.build([graph.result(OperationType.ADD, [a, graph.constant(weights), graph.constant(0)], a)])
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096) + model.pools[0].array.tobytes())
    with path.open("rb") as file:
        mapped = Memory.from_fd(file.fileno(), offset=4096, kind=MemoryKind.MMAP_FD, writable=False)
    prepared = await device.prepare_model(msgspec.structs.replace(model, pools=(mapped,)))
    memory = Memory.create(2 * weights.nbytes)
    request = Request(
        (RequestArgument(False, DataLocation(0, 0, weights.nbytes)),),
        (RequestArgument(False, DataLocation(0, weights.nbytes, weights.nbytes)),),
        (memory,),
    )
    values = memory.array.view(np.float32).reshape(2, 1000, 700)
    values[0] = 1
    await prepared.execute_synchronously(request)
    assert (values[1] == 1 + weights).all()


async def test_request_that_was_executed_keeps_no_memory(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    burst = await prepared.configure_execution_burst()
    alone, in_burst = Sum(), Sum()
    await prepared.launch(alone.request)
    await burst.execute_synchronously(in_burst.request, [-1])
    await burst.aclose()
    pools = [weakref.ref(pool) for each in (alone, in_burst) for pool in each.request.pools]
    del alone, in_burst
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert pools and not any(pool() for pool in pools)


async def test_request_whose_memory_was_closed_is_rejected_again(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    values = Sum()
    await prepared.launch(values.request)
    for pool in values.request.pools:
        assert isinstance(pool, Memory)
        pool.close()
    with pytest.raises(InvalidArgument, match="closed"):
        prepared.launch(values.request)


async def test_failures_are_those_of_the_device(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    with pytest.raises(MissedDeadline) as caught:
        await prepared.execute_synchronously(Sum().request, deadline_ns=0)
    assert not caught.value.transient
    with pytest.raises(InvalidArgument):
        await prepared.execute_synchronously(Sum(5).request)
    with pytest.raises(GeneralFailure, match="does not cache"):
        await device.prepare_model_from_cache(CacheFiles((), (), bytes(32)))
    with pytest.raises(GeneralFailure, match="no device memories"):
        await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    await prepared.aclose()
    with pytest.raises(InvalidArgument, match="closed"):
        await prepared.execute_synchronously(Sum().request)


async def test_many_executions_at_once_are_all_right(device: NodeDevice) -> None:
    prepared = await device.prepare_model(sum_model())
    frames = [Sum() for _ in range(40)]
    async with anyio.create_task_group() as tasks:
        for frame in frames:
            tasks.start_soon(prepared.execute_synchronously, frame.request)
    assert all(frame.is_right for frame in frames)


async def test_cancelled_preparation_leaves_nothing(device: NodeDevice) -> None:
    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(device.prepare_model, sum_model(1000))
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    prepared = await device.prepare_model(sum_model())
    frame = Sum()
    await prepared.execute_synchronously(frame.request)
    assert frame.is_right


async def test_application_uses_the_device_of_a_node(served: Served) -> None:
    address = f"{served.address}?silence_ms=30000"
    async with aionn.open(drivers=[], fleet=[address]) as runtime:
        device = runtime.device("edge1/reference")
        assert device.driver == "remote"
        assert device.info.location == "remote" and device.info.round_trip_ns > 0
        async with await runtime.compile(sum_model()) as net:
            a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
            result = await net.execute([a, b])
            assert (result.outputs[0] == a + b).all() and result.device == "edge1/reference"

        async with await runtime.compile(models.identity((4,))) as net, net.burst() as burst:

            async def frames() -> Any:
                for index in range(20):
                    yield a + index

            stream = burst.stream(frames(), deadline=lambda frame: aionn.after(30.0))
            copies = [item.outputs[0].copy() async for item in stream]
            assert len(copies) == 20 and (copies[19] == a + 19).all()


async def test_node_that_cannot_be_reached_is_unavailable_and_hides_nobody() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process", fleet=["127.0.0.1:1"]) as runtime:
        assert [device.name for device in runtime.devices] == ["reference"]
        assert runtime.unavailable[0].name == "127.0.0.1:1"
        assert "cannot be reached" in runtime.unavailable[0].reason


async def test_names_that_collide_are_unavailable(served: Served) -> None:
    fleet = [served.address, served.address.replace("127.0.0.1", "localhost")]
    async with aionn.open(drivers=[], fleet=fleet) as runtime:
        assert [device.name for device in runtime.devices] == ["edge1/reference"]
        assert "is called 'edge1/reference' already" in runtime.unavailable[0].reason


def test_fleet_command_shows_who_is_there(served: Served, aionn_here: Any) -> None:
    done = aionn_here("fleet", served.address, "127.0.0.1:1", "--json")
    nodes = json.loads(done.stdout)["nodes"]
    assert done.returncode == 1
    assert (nodes[0]["name"], nodes[0]["status"], nodes[0]["clients"]) == ("edge1/reference", "available", 1)
    assert "cannot be reached" in nodes[1]["problem"]
    done = aionn_here("fleet", served.address)
    assert done.returncode == 0 and "edge1/reference" in done.stdout
    done = aionn_here("devices", "--fleet", served.address, "--json")
    assert "edge1/reference" in [device["name"] for device in json.loads(done.stdout)["devices"]]


def test_mistakes_on_the_command_line_are_told_in_one_sentence(aionn_here: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for arguments, words in (
        ((), "expected --socket PATH, --listen HOST:PORT or --oip PORT, or several of them"),
        (("--listen", "0.0.0.0:0"), "other machines reach this address"),
        (("--listen", "7463"), "expected HOST:PORT"),
        (("--socket", "x", "--any-client"), "--any-client goes with --listen"),
        (("--listen", "127.0.0.1:0", "--tls-clients", "x"), "go with --tls-certificate"),
        (("--listen", "127.0.0.1:0", "--tls-certificate", str(tmp_path / "empty.pem")), "cannot be used"),
        (("--listen", "192.0.2.1:1", "--any-client"), "cannot listen"),
        (("--listen", "127.0.0.1:0", "--node-name", "a/b"), "without /"),
    ):
        done = aionn_here("serve", "reference", *arguments)
        assert done.returncode == 2 and words in " ".join(done.stderr.split()), (arguments, done.stderr)
    done = aionn_here("fleet", "edge2:1")
    assert done.returncode == 2 and "write tls:// before it" in " ".join(done.stderr.split())


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_silent_and_dead_nodes_end_every_call(number: int) -> None:
    with serving() as served:
        device = NodeDevice(parse_node(served.address))
        errors: list[BaseException] = []
        node_pid = served.node_pid
        try:
            prepared = await device.prepare_model(sum_model(200_000))

            async def execute() -> None:
                try:
                    while True:
                        await prepared.execute_synchronously(Sum(200_000).request)
                except DeadObject as e:
                    errors.append(e)

            with anyio.fail_after(START_S_MAX):
                async with anyio.create_task_group() as tasks:
                    for _ in range(3):
                        tasks.start_soon(execute)
                    await anyio.sleep(0.05)
                    for pid in (node_pid, served.process.pid):
                        os.kill(pid, number)
            assert len(errors) == 3
            with pytest.raises(DeadObject):
                await prepared.execute_synchronously(Sum(200_000).request)
        finally:
            if number == signal.SIGSTOP:
                os.kill(node_pid, signal.SIGCONT)
            await device.aclose()


@pytest.mark.slow
async def test_drain_answers_what_was_accepted_and_ends_all_processes() -> None:
    with serving() as served:
        device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
        prepared = await device.prepare_model(sum_model())
        await prepared.execute_synchronously(Sum().request)
        node_pid = served.node_pid
        served.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(START_S_MAX):
            assert await anyio.to_thread.run_sync(served.process.wait) == 0
            while Path(f"/proc/{node_pid}/exe").exists():
                await anyio.sleep(0.01)
            assert await device.status() is DeviceStatus.OFFLINE
        with pytest.raises((DeadObject, DeviceUnavailable)):
            await prepared.execute_synchronously(Sum().request)
        await device.aclose()


@pytest.mark.slow
async def test_sigterm_of_the_nodes_own_process_cuts_off_nothing() -> None:
    """A service manager sends it to every process; the device's process alone decides when the node ends."""
    with serving() as served:
        device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
        prepared = await device.prepare_model(sum_model())
        os.kill(served.node_pid, signal.SIGTERM)
        for _ in range(3):
            await prepared.execute_synchronously(Sum().request)
        await device.aclose()
        served.signal(signal.SIGTERM)
        with anyio.fail_after(START_S_MAX):
            assert await anyio.to_thread.run_sync(served.process.wait) == 0


@pytest.mark.slow
def test_server_that_is_ended_by_force_leaves_no_process_that_is_stopped() -> None:
    with serving() as served:
        node_pid = served.node_pid
        os.kill(node_pid, signal.SIGSTOP)
        end_s = time.monotonic() + START_S_MAX
        while served.process.poll() is None:  # The first signal has to be handled before the second is sent.
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert time.monotonic() < end_s
        while Path(f"/proc/{node_pid}/exe").exists():
            time.sleep(0.01)
            assert time.monotonic() < end_s


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_signalled_node_leaves_no_folder(
    signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as served:
        assert list(tmp_path.iterdir()) != []
        for _ in range(signals):
            served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(START_S_MAX) in (
            EXIT_STATUS[DrainState.DRAINED],
            EXIT_STATUS[DrainState.STOPPED],
        )
        assert list(tmp_path.iterdir()) == []


async def test_clients_are_freed_when_they_leave(served: Served) -> None:
    watcher = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    for _ in range(3):
        client = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
        prepared = await client.prepare_model(sum_model())
        await prepared.execute_synchronously(Sum().request)
        await client.aclose()
    with anyio.fail_after(START_S_MAX):
        while (figures := await watcher.figures()).clients > 1 or figures.data_connections:
            await anyio.sleep(0.01)
    await watcher.aclose()
