"""Bursts whose known packets are answered without Python: the same answers, and every other packet, or what changed, as ever."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from aionn.burst.packets import decode_result, encode_limits
from aionn.errors import DeviceUnavailable, ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import NO_TIMING, Memory, Priority, Request
from aionn.observability.tracing import start_tracing, stop_tracing
from fences import now_ns
from tests.aionn.burst.native_device import (
    COUNT,
    MODEL,
    WAIT_S,
    NativeBurst,
    NativeDevice,
    output_of,
    request_of,
)

FAR_NS = 3_600_000_000_000


class Setting:
    """A device, and bursts of models of its own."""

    def __init__(self, device: NativeDevice) -> None:
        self.device = device
        self.bursts: list[NativeBurst] = []

    async def burst(
        self, *, owner: str | None = None, priority: Priority = Priority.MEDIUM, is_native: bool = True
    ) -> NativeBurst:
        prepared = await self.device.prepare_model(MODEL, priority=priority)
        prepared.owner = owner
        self.bursts.append(NativeBurst(prepared, is_native=is_native))
        return self.bursts[-1]

    async def held(
        self, burst: NativeBurst, request: Request, tasks: Any, done: Callable[[], object]
    ) -> None:
        """Has a native call of the burst run until ``device.may_end``."""
        await burst.execute(request)
        self.device.is_held = True

        async def execute() -> None:
            await burst.execute(request)
            done()

        tasks.start_soon(execute)
        assert await anyio.to_thread.run_sync(lambda: self.device.entered.acquire(timeout=WAIT_S))
        self.device.is_held = False


@contextlib.asynccontextmanager
async def opened(slots: int = 1) -> AsyncIterator[Setting]:
    device = NativeDevice(slots)
    setting = Setting(device)
    try:
        yield setting
    finally:
        device.may_end.set()
        for burst in setting.bursts:
            await burst.controller.aclose()
            burst.server.stop()
            await burst.prepared.aclose()
        await device.aclose()


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    async with opened() as made:
        yield made


# The same answers


async def test_a_packet_is_executed_by_python_once_and_then_natively(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    results = [await burst.execute(request) for _ in range(4)]
    assert results[0] == results[3] and results[0].timing == NO_TIMING
    assert output_of(request) == [2, 4, 6, 8]
    assert (device.python_count, device.native_count, device.offered) == (1, 3, 1)
    assert len(burst.asked) == 1, "its memories are asked for once"
    pool = request.pools[0]
    assert isinstance(pool, Memory)
    pool.array[: 4 * COUNT].view(np.float32)[:] = 5
    await burst.execute(request)
    assert output_of(request) == [10] * COUNT, "the values are those of this frame"


async def test_native_and_python_give_the_same_bytes(setting: Setting) -> None:
    """Each packet is asked of a burst with native calls and of one without, twice."""
    bursts = [await setting.burst(), await setting.burst(is_native=False)]
    answers = []
    for burst in bursts:
        request = request_of(1, 2, 3, 4)
        await burst.execute(request)
        good = burst.packet()
        packets = [
            good,
            good,
            good[:-1],
            b"",
            good + b"\x00",
            good,
            *(bytes([*good[:i], good[i] ^ 1, *good[i + 1 :]]) for i in range(len(good))),
        ]
        answers.append([burst.ask(packet) for packet in packets])
    native, python = answers
    # A flipped bit may also ask for timings, which differ.
    assert [decode_result(a)[:2] for a in native] == [decode_result(a)[:2] for a in python]
    assert setting.device.native_count == 3


async def test_limits_are_read_each_time_and_a_late_packet_is_never_executed(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    for number in range(3):
        await burst.execute(request, deadline_ns=now_ns() + FAR_NS, loop_timeout_ns=number or None)
    assert (device.python_count, device.native_count) == (1, 2)
    (head,) = {k.payload for key, k in burst.controller._packets.items() if key[2]}
    counts = device.python_count, device.native_count
    for late in (0, 1, now_ns()):
        result = decode_result(burst.ask(head + encode_limits(late, None)))
        assert result.status == ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert counts == (device.python_count, device.native_count)
    with pytest.raises(MissedDeadline):
        await burst.execute(request, deadline_ns=1)
    illegal = bytearray(head + encode_limits(2**63 - 1, None))
    illegal[-17] = 0x80
    assert decode_result(burst.ask(bytes(illegal))).status == ErrorStatus.GENERAL_FAILURE
    assert counts == (device.python_count, device.native_count)
    assert decode_result(burst.ask(head + encode_limits(2**63 - 1, None))).status == ErrorStatus.NONE
    assert device.native_count == counts[1] + 1


async def test_measured_executions_stay_in_python(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    for _ in range(3):
        result = await burst.execute(request, measure=True)
        assert result.timing != NO_TIMING
    assert (device.python_count, device.native_count, device.offered) == (3, 0, 0)


async def test_a_call_that_fails_is_answered_as_python_answers_it(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    by_python = await setting.burst(is_native=False)
    request = request_of(1, 2, 3, 4)
    await burst.execute(request)
    await by_python.execute(request)
    while device.gate._slots.held_count:  # A job is released after its answer.
        await anyio.lowlevel.checkpoint()
    device.status = 7
    counts = device.python_count, device.native_count
    answers = [decode_result(b.ask(b.packet())) for b in (burst, by_python)]
    assert (device.python_count - counts[0], device.native_count - counts[1]) == (1, 1), (
        "each was executed once"
    )
    assert answers[0][:3] == answers[1][:3] and answers[0].status == ErrorStatus.GENERAL_FAILURE
    texts = [answer.texts for answer in answers]
    assert texts[0] is not None and texts[1] is not None and texts[0].message == texts[1].message
    with pytest.raises(GeneralFailure, match="status 7"):
        await burst.execute(request)
    device.status = 0
    await burst.execute(request)
    assert output_of(request) == [2, 4, 6, 8] and device.native_count == counts[1] + 3
    assert burst.turns.used_ns.count(None) == 2 and by_python.turns.used_ns.count(None) <= 1


async def test_native_calls_are_in_the_trace(setting: Setting, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    start_tracing(path, process="test")
    try:
        burst = await setting.burst()
        request = request_of(1, 2, 3, 4)
        for _ in range(3):
            await burst.execute(request)
        await burst.controller.aclose()
    finally:
        stop_tracing()
    assert setting.device.native_count == 2
    lines = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines() if line.startswith("{")]
    sections = [line for line in lines if line["name"].startswith("[NN_LD_PE]")]
    assert [s["name"] for s in sections] == ["[NN_LD_PE]reference", "[NN_LD_PE]native", "[NN_LD_PE]native"]
    assert all(s["dur"] > 0 for s in sections)


# Hostile packets


@pytest.mark.parametrize("count", [3_000, pytest.param(1_000_000, marks=pytest.mark.long)])
async def test_hostile_packets_are_answered_or_rejected_and_never_executed_with_altered_words(
    setting: Setting, count: int
) -> None:
    """Half of them valid, the others altered in one byte, each place in its turn, cut, or of random bytes."""
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    await burst.execute(request)
    good, drawn = burst.packet(), random.Random(22)
    answer = burst.ask(good)
    (words,) = set(device.called)

    def ask_all() -> None:
        known = 1
        for number in range(count):
            packet = good
            if number % 2:
                place = number // 2 % len(good)
                packet = bytes([*good[:place], drawn.randrange(256), *good[place + 1 :]])
            if number % 20 == 1:
                packet = drawn.choice(
                    (drawn.randbytes(drawn.randrange(300)), good[: drawn.randrange(len(good))])
                )
            known += packet == good
            got = burst.ask(packet)
            assert (got == answer) if packet == good else (len(got) > 0)
        # Packets that Python took for others may be known by now: they name memory of the burst as well.
        assert device.called.count(words) >= known

    await anyio.to_thread.run_sync(ask_all)
    pool = request.pools[0]
    assert isinstance(pool, Memory)
    start, end = pool.array.ctypes.data, pool.array.ctypes.data + pool.array.nbytes
    span = max(abs(a - b) for call in device.called for a, b in zip(call[:2], words[:2], strict=True))
    assert span < end - start, "no call was made with words outside of the request's memory"
    assert len(burst.asked) >= 1


# Memories and models that change


async def test_a_memory_that_is_freed_between_two_frames_is_asked_for_again(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    first, second = request_of(1, 2, 3, 4), request_of(9, 9, 9, 9)
    for _ in range(2):
        await burst.execute(first)
    assert device.native_count == 1
    await burst.controller.release_memory_resource(0)
    # The same slot, the same bytes of the packet, another memory.
    for _ in range(2):
        await burst.execute(second)
    assert output_of(first) == [2, 4, 6, 8] and output_of(second) == [18] * COUNT
    assert (device.python_count, device.native_count) == (2, 2)
    assert len(burst.asked) == 2 and device.called[0][:2] != device.called[1][:2]


async def test_a_memory_that_is_freed_while_a_native_call_runs_stays_until_its_end(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        burst.server.free_slot(0)
        assert burst.server._answers is not None and burst.server._answers.count == 0
        device.may_end.set()
    assert done.is_set() and output_of(request) == [2, 4, 6, 8]
    await burst.execute(request)
    assert device.python_count == 2 and len(burst.asked) == 2


async def test_a_model_that_is_closed_while_a_native_call_runs_refuses_the_next_one(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        await burst.prepared.aclose()
        device.may_end.set()
    assert done.is_set() and output_of(request) == [2, 4, 6, 8]
    with pytest.raises(InvalidArgument, match="the prepared model is closed"):
        await burst.execute(request)
    assert device.native_count == 1


async def test_a_device_that_is_closed_waits_for_a_native_call(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    await burst.prepared.execute_synchronously(request)  # The gate has threads, which end with the last job.
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        device.gate.begin_close()
        assert not device.gate.has_ended
        device.may_end.set()
    await anyio.to_thread.run_sync(device.gate.close)
    assert done.is_set() and device.gate.has_ended
    with pytest.raises(DeviceUnavailable):
        await burst.execute(request)
    assert device.native_count == 1


async def test_a_burst_that_drains_executes_nothing_more_and_has_its_native_call_under_way(
    setting: Setting,
) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        burst.server.drain("the server ends")
        assert burst.server.under_way() == (True, None)
        device.may_end.set()
    assert done.is_set() and output_of(request) == [2, 4, 6, 8]
    for _ in range(3):
        with pytest.raises(DeviceUnavailable, match="the server ends"):
            await burst.execute(request)
    assert (device.python_count, device.native_count) == (1, 1)
    assert burst.server.under_way()[0] is False


async def test_a_burst_that_is_ended_while_a_native_call_runs_ends_after_it(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        burst.server.begin_stop()
        assert burst.server._thread.is_alive()
        device.may_end.set()
    await anyio.to_thread.run_sync(lambda: burst.server._thread.join(WAIT_S))
    assert not burst.server._thread.is_alive() and output_of(request) == [2, 4, 6, 8]


async def test_a_cancelled_execution_keeps_its_slot_and_the_next_one_waits(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    await burst.execute(request)
    device.is_held = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(burst.execute, request)
        assert await anyio.to_thread.run_sync(lambda: device.entered.acquire(timeout=WAIT_S))
        tasks.cancel_scope.cancel()
    device.is_held = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(burst.execute, request)
        await anyio.lowlevel.checkpoint()
        assert device.native_count == 1
        device.may_end.set()
    assert device.native_count == 2 and output_of(request) == [2, 4, 6, 8]


async def test_a_burst_rests_only_when_no_native_call_runs_or_ran_of_late(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    request, done = request_of(1, 2, 3, 4), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await setting.held(burst, request, tasks, done.set)
        assert not burst.server.rest(0.0)
        began_s, ended_s = burst.server.native_activity()
        assert began_s > ended_s
        device.may_end.set()
    began_s, ended_s = burst.server.native_activity()
    assert began_s < ended_s
    assert not burst.server.rest(3600.0) and burst.server.rest(0.0)
    assert burst.server._answers is not None and burst.server._answers.count == 0
    for _ in range(2):
        await burst.execute(request)
    assert len(burst.asked) == 2 and device.native_count == 2


async def test_more_packets_than_the_table_holds_are_learnt_again(setting: Setting) -> None:
    burst, device = await setting.burst(), setting.device
    requests = [request_of(n, n, n, n) for n in range(200)]
    for _ in range(2):
        for number, request in enumerate(requests):
            await burst.execute(request, number)
    assert all(output_of(request) == [2 * n] * COUNT for n, request in enumerate(requests))
    count = device.native_count
    for _ in range(3):
        await burst.execute(requests[0], 0)
    assert device.native_count >= count + 2


async def test_an_address_that_is_no_function_is_refused_and_python_executes(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    burst, device = await setting.burst(), setting.device
    request = request_of(1, 2, 3, 4)
    pool = request.pools[0]
    assert isinstance(pool, Memory)
    device.address = pool.array.ctypes.data
    with caplog.at_level(logging.WARNING, "aionn.burst"):
        for _ in range(3):
            await burst.execute(request)
    assert "a native call was rejected" in caplog.text and "executable" in caplog.text
    assert (device.python_count, device.native_count) == (3, 0) and output_of(request) == [2, 4, 6, 8]


# The device's queue


async def test_jobs_that_wait_for_a_native_call_start_in_the_order_of_the_queue(setting: Setting) -> None:
    """One slot: while a client's native call runs, jobs of all kinds arrive; the client's next frame takes its turn."""
    device = setting.device
    flood, other = await setting.burst(owner="a"), await setting.burst(owner="b")
    urgent = await setting.burst(owner="c", priority=Priority.HIGH)
    low = await setting.burst(owner="d", priority=Priority.LOW)
    order: list[str] = []
    request = request_of(1, 2, 3, 4)
    requests = [request_of(n, n, n, n) for n in range(4)]
    for burst, own in zip((other, urgent, low), requests, strict=False):
        await burst.execute(own)

    async def execute(name: str, burst: NativeBurst, own: Request, count: int) -> None:
        while device.gate.waiting_count < count:
            await anyio.lowlevel.checkpoint()
        await burst.execute(own)
        order.append(name)

    async with anyio.create_task_group() as tasks:
        await setting.held(flood, request, tasks, lambda: order.append("held"))
        for count, (name, burst) in enumerate({"low": low, "other": other, "urgent": urgent}.items()):
            tasks.start_soon(execute, name, burst, requests[{"other": 0, "urgent": 1, "low": 2}[name]], count)
        while device.gate.waiting_count < 3:
            await anyio.lowlevel.checkpoint()
        assert device.gate._native is not None and not device.gate._native.is_open
        device.may_end.set()
    assert order == ["held", "urgent", "other", "low"]
    assert device.gate.learnt_count >= 1, (
        "the duration of the native call was learnt, since jobs waited for it"
    )
    while not device.gate._native.is_open:  # A job is released after its answer.
        await anyio.lowlevel.checkpoint()
    count = device.native_count
    await flood.execute(request)
    assert device.native_count == count + 1


@pytest.mark.parametrize("slots", [1, 2])
async def test_slots_are_never_shared_between_native_calls_and_other_jobs(slots: int) -> None:
    """Three bursts and plain launches at once; every execution sees its own engine alone."""
    async with opened(slots) as setting:
        device = setting.device
        bursts = [await setting.burst(owner=str(n)) for n in range(3)]
        plain = bursts[0].prepared
        requests = [request_of(n, n, n, n) for n in range(3)]

        async def frames(burst: NativeBurst, request: Request, value: float) -> None:
            for _ in range(60):
                await burst.execute(request)
                assert output_of(request) == [2 * value] * COUNT

        async def launches() -> None:
            request = request_of(7, 7, 7, 7)
            for _ in range(30):
                await plain.execute_synchronously(request)
                assert output_of(request) == [14] * COUNT
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            for number, (burst, request) in enumerate(zip(bursts, requests, strict=True)):
                tasks.start_soon(frames, burst, request, number)
            tasks.start_soon(launches)
        assert device.python_count + device.native_count == 3 * 60 + 30
        assert device.native_count > 0 and device.used_max <= slots
        with anyio.fail_after(WAIT_S):
            while device.gate._slots.held_count:  # A job is released after its answer.
                await anyio.lowlevel.checkpoint()
        assert device.gate._slots.held_count == 0 and device.gate.waiting_count == 0
        assert not device.gate._native_jobs
