"""The virtual clock: jumps only when it may, stands still for real work, and never hangs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import fences
from aionn.platform.real_work import begin_real_work, real_work
from aionn.runtime.clock import after, now_ns
from aionn.testing import Deadlock, StuckPin, VirtualClock, VirtualClockLoop, run
from aionn.testing.clock import new_loops

REAL_WORK_S = 0.05


def real_work_takes(seconds: float = REAL_WORK_S) -> str:
    time.sleep(seconds)
    return "done"


# --- Timers alone -------------------------------------------------------------------------------------------------------------


def test_an_hour_takes_well_under_a_second() -> None:
    clock = VirtualClock()

    async def main() -> None:
        for _ in range(3600):
            await anyio.sleep(1)

    began_s = time.monotonic()
    run(main, clock=clock)
    assert clock.now == 3600
    assert clock.jump_count == 3600
    assert time.monotonic() - began_s < 20, "an hour of it would be 3600 s"


def test_time_moves_exactly_to_the_next_timer() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for when in (0.3, 0.1 + 0.2, 1e-7, 2.5e9, 86_400 * 3.5):
            loop.call_at(when, lambda: seen.append(loop.time()))
        await anyio.sleep(3e9)  # noqa: ASYNC116

    run(main, clock=clock)
    assert seen == [1e-7, 0.3, 0.3, 86_400 * 3.5, 2.5e9], "what is closer than 1 ns comes together"
    assert clock.now == 3e9


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        timers = [loop.call_at(1.0, order.append, number) for number in range(200)]
        for number in range(0, 200, 3):
            timers[number].cancel()
        await anyio.sleep(2)
        return order

    assert run(main) == [number for number in range(200) if number % 3]


def test_a_cancelled_timer_moves_no_time() -> None:
    clock = VirtualClock()

    async def main() -> None:
        asyncio.get_running_loop().call_later(100, lambda: None).cancel()
        with anyio.move_on_after(5):
            await anyio.sleep(1)

    run(main, clock=clock)
    assert clock.now == 1


def test_busy_callbacks_keep_time_where_it_is() -> None:
    clock = VirtualClock()

    async def main() -> None:
        asyncio.get_running_loop().call_later(1e-3, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)

    run(main, clock=clock)
    assert clock.now == 0


@pytest.mark.parametrize(
    "time_out",
    [
        pytest.param(lambda: anyio.fail_after(3600), id="anyio"),
        pytest.param(lambda: asyncio.timeout(3600), id="asyncio"),
    ],
)
def test_a_time_out_comes_at_its_time(time_out: Callable[[], object]) -> None:
    clock = VirtualClock(start_s=10)

    async def main() -> None:
        scope = time_out()
        if hasattr(scope, "__aenter__"):
            async with scope:  # type: ignore[attr-defined]
                await anyio.sleep(7200)
        else:
            with scope:  # type: ignore[attr-defined]
                await anyio.sleep(7200)

    with pytest.raises(TimeoutError):
        run(main, clock=clock)
    assert clock.now == 3610


def test_a_clock_goes_on_from_one_loop_to_the_next() -> None:
    clock = VirtualClock()
    run(anyio.sleep, 1, clock=clock)
    run(anyio.sleep, 1, clock=clock)
    assert (clock.now, clock.run_count > 1) == (2, True)


def test_anyio_takes_the_loop_as_a_factory() -> None:
    clock = VirtualClock()
    anyio.run(anyio.sleep, 60, backend_options={"loop_factory": lambda: VirtualClockLoop(clock)})
    assert clock.now == 60


@pytest.mark.parametrize("option", ["start_s", "stuck_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_clock_refuses_times_that_are_none(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        VirtualClock(**{option: value})


def test_deadlines_are_whole_nanoseconds_from_now() -> None:
    clock = VirtualClock(start_s=0.1)
    assert clock.after(0.2) == 300_000_000
    assert clock.after(float("inf")) == clock.after(1e300) == 2**63 - 1
    for wrong in (-1e-9, float("nan")):
        with pytest.raises(ValueError, match="after"):
            clock.after(wrong)


# --- Real work ----------------------------------------------------------------------------------------------------------------


async def wait_in_executor() -> object:
    return await asyncio.get_running_loop().run_in_executor(None, real_work_takes)


async def wait_in_own_executor() -> object:
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, real_work_takes)


async def wait_in_worker_thread() -> object:
    return await anyio.to_thread.run_sync(real_work_takes)


async def wait_for_eventfd() -> object:
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    timer = threading.Timer(REAL_WORK_S, os.eventfd_write, (fd, 1))
    timer.start()
    try:
        await anyio.wait_readable(fd)
    finally:
        timer.join()
        os.close(fd)
    return "done"


async def wait_for_process() -> object:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", "import time; time.sleep(0.05)", stdin=subprocess.DEVNULL
    )
    return "done" if await process.wait() == 0 else "failed"


async def wait_for_stream() -> object:
    async with await anyio.open_process(
        [sys.executable, "-c", "print('done')"], stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        return (await process.stdout.receive()).decode().strip()


async def wait_for_pinned_thread() -> object:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)

    def work() -> None:
        real_work_takes()
        loop.call_soon_threadsafe(event.set)

    with loop.clock.pin("my thread"):
        thread = threading.Thread(target=work)
        thread.start()
        await event.wait()
    thread.join()
    return "done"


async def wait_for_announced_thread() -> object:
    fence = fences.SyncFence("work of a driver")

    def work() -> None:
        real_work_takes()
        fence.signal()
        end()

    end = begin_real_work("driver thread")
    thread = threading.Thread(target=work)
    thread.start()
    await fence
    thread.join()
    return "done"


@pytest.mark.parametrize(
    "wait",
    [
        wait_in_executor,
        wait_in_own_executor,
        wait_in_worker_thread,
        wait_for_eventfd,
        wait_for_process,
        wait_for_stream,
        wait_for_pinned_thread,
        wait_for_announced_thread,
    ],
)
def test_real_work_ends_before_a_time_out(wait: Callable[[], object]) -> None:
    clock = VirtualClock()

    async def main() -> object:
        with anyio.fail_after(10):
            return await wait()  # type: ignore[misc]

    assert run(main, clock=clock) == "done"
    assert clock.now == 0


def test_time_goes_on_after_real_work() -> None:
    clock = VirtualClock()

    async def main() -> None:
        await anyio.sleep(1)
        await wait_in_worker_thread()
        await anyio.sleep(1)
        await wait_in_executor()
        await anyio.sleep(1)

    run(main, clock=clock)
    assert clock.now == 3


def test_a_descriptor_that_is_not_expected_can_be_left_out() -> None:
    clock = VirtualClock(pin_descriptors=False)
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    async def main() -> bool:
        with anyio.move_on_after(10) as scope:
            await anyio.wait_readable(fd)
        return scope.cancelled_caught

    assert run(main, clock=clock)
    assert clock.now == 10
    os.close(fd)


def test_a_ready_descriptor_comes_before_time_even_where_it_holds_nothing() -> None:
    clock = VirtualClock(pin_descriptors=False)
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    async def main() -> float:
        os.eventfd_write(fd, 1)
        with anyio.fail_after(10):
            await anyio.wait_readable(fd)
        return anyio.current_time()

    assert run(main, clock=clock) == 0
    os.close(fd)


def test_a_pin_that_another_thread_lets_go_frees_the_clock() -> None:
    clock = VirtualClock()

    async def main() -> None:
        pin = clock.pin("another thread's").__enter__()
        assert clock.pins == ("another thread's",)
        timer = threading.Timer(REAL_WORK_S, pin.release)
        timer.start()
        await anyio.sleep(1)
        assert clock.pins == ()
        timer.join()

    began_s = time.monotonic()
    run(main, clock=clock)
    assert time.monotonic() - began_s >= REAL_WORK_S
    assert clock.now == 1


def test_announcing_work_costs_nothing_without_a_virtual_clock() -> None:
    with real_work("nobody listens"):
        end = begin_real_work("nobody listens")
        end()
        end()


# --- What would hang ----------------------------------------------------------------------------------------------------------


async def waits_for_nobody() -> None:
    await anyio.Event().wait()


def test_a_deadlock_is_told_with_the_place_of_every_task() -> None:
    async def main() -> None:
        await anyio.sleep(5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits_for_nobody, name="lonely")
            await waits_for_nobody()

    with pytest.raises(Deadlock, match=r"virtual time 5 s") as caught:
        run(main)
    assert "lonely: in waits_for_nobody (" in str(caught.value)
    assert str(caught.value).count("waits_for_nobody") == 2


def test_a_timer_at_the_end_of_time_is_none() -> None:
    async def main() -> None:
        await asyncio.sleep(float("inf"))

    with pytest.raises(Deadlock):
        run(main)


def test_a_deadlock_names_only_the_first_of_many_tasks() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(waits_for_nobody)

    with pytest.raises(Deadlock, match="and 31 more"):
        run(main)


@pytest.mark.parametrize(
    ("hold", "named"),
    [
        pytest.param(lambda clock, go: clock.pin("the decoder").__enter__(), "the decoder", id="pin"),
        pytest.param(
            lambda clock, go: asyncio.get_running_loop().run_in_executor(None, go.wait),
            "executor job Event.wait",
            id="executor",
        ),
        pytest.param(
            lambda clock, go: asyncio.ensure_future(anyio.to_thread.run_sync(go.wait)),
            "a worker thread of anyio in ",
            id="worker",
        ),
    ],
)
def test_a_stuck_pin_is_named(hold: Callable[[VirtualClock, threading.Event], object], named: str) -> None:
    clock = VirtualClock(stuck_s=0.2)
    go = threading.Event()

    async def main() -> None:
        held = hold(clock, go)
        try:
            await anyio.sleep(1)
        finally:
            go.set()
        del held

    # The loop raises where it waits, so its tasks learn of it when the runner cancels them.
    with pytest.raises(StuckPin, match=named):
        run(main, clock=clock)
    assert clock.now == 0


def test_a_closed_loop_holds_its_clock_no_longer() -> None:
    clock = VirtualClock()
    loop = VirtualClockLoop(clock)
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        async def main() -> list[asyncio.Future[bool]]:
            return [asyncio.get_running_loop().run_in_executor(pool, go.wait)]

        (job,) = loop.run_until_complete(main())
        job.cancel()
        assert clock.pins == ("executor job Event.wait",)
        loop.close()
        assert clock.pins == ()
        go.set()
    run(anyio.sleep, 1, clock=clock)
    assert clock.now == 1


def test_a_descriptor_that_stays_silent_is_named() -> None:
    clock = VirtualClock(stuck_s=0.05)
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    async def main() -> None:
        await anyio.wait_readable(fd)

    with pytest.raises(StuckPin, match=rf"descriptor {fd}, watched by .*wait_readable"):
        run(main, clock=clock)
    os.close(fd)


def test_a_descriptor_that_stays_active_is_not_stuck() -> None:
    clock = VirtualClock(stuck_s=0.2)
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    seen = 0

    async def main() -> None:
        nonlocal seen
        loop, enough = asyncio.get_running_loop(), asyncio.Event()

        def readable() -> None:
            nonlocal seen
            seen += os.eventfd_read(fd)
            if seen == 8:
                enough.set()

        def write() -> None:
            for _ in range(8):
                time.sleep(0.05)
                os.eventfd_write(fd, 1)

        thread = threading.Thread(target=write)
        loop.add_reader(fd, readable)
        thread.start()
        await enough.wait()
        loop.remove_reader(fd)
        thread.join()

    run(main, clock=clock)
    assert (seen, clock.now) == (8, 0)
    os.close(fd)


def test_two_virtual_clocks_cannot_run_at_once() -> None:
    second = VirtualClockLoop()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="only one can"):
            await anyio.to_thread.run_sync(second.run_forever)

    run(main)
    second.close()


def test_a_loop_can_be_used_again_after_a_deadlock() -> None:
    clock = VirtualClock()
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(clock)) as runner:
        with pytest.raises(Deadlock):
            runner.run(waits_for_nobody())
        runner.run(anyio.sleep(1))
    assert clock.now == 1


# --- The rest of the process --------------------------------------------------------------------------------------------------


def test_fences_and_deadlines_go_by_the_virtual_clock() -> None:
    async def main() -> tuple[int | None, int, int]:
        fence = fences.SyncFence("f")
        await anyio.sleep(0.25)
        fence.signal()
        return fence.signal_time_ns, now_ns(), after(0.57)

    assert run(main) == (250_000_000, 250_000_000, 820_000_000)
    assert abs(fences.now_ns() - time.monotonic_ns()) < 10**12, "restored"
    assert begin_real_work("x") is begin_real_work("y"), "restored"


def test_an_imported_fence_holds_the_clock() -> None:
    clock = VirtualClock()

    async def main() -> None:
        with fences.SyncFence("ours") as ours, fences.SyncFence.from_fd(ours.fileno()) as theirs:
            timer = threading.Timer(REAL_WORK_S, ours.signal)
            timer.start()
            with anyio.fail_after(10):
                await theirs
            timer.join()

    run(main, clock=clock)
    assert clock.now == 0


def test_new_loops_are_virtual_only_inside() -> None:
    clock = VirtualClock()
    with new_loops(clock):
        asyncio.run(asyncio.sleep(5))
        with new_loops(None):
            assert not isinstance(_new_loop(), VirtualClockLoop)
        assert isinstance(_new_loop(), VirtualClockLoop)
    assert not isinstance(_new_loop(), VirtualClockLoop)
    assert clock.now == 5


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


TRAFFIC = """
import random, anyio, hashlib
from aionn.testing import VirtualClock, run
clock, log = VirtualClock(), []
async def client(name, seed):
    source = random.Random(seed)
    for _ in range(100):
        await anyio.sleep(source.choice([0.001, 0.01, 0.01, 0.1]))
        async with limit:
            log.append(f"{name} {clock.now_ns}")
            with anyio.move_on_after(source.choice([0.005, 0.02])):
                await anyio.sleep(0.01)
async def main():
    global limit
    limit = anyio.Semaphore(2)
    async with anyio.create_task_group() as tasks:
        for seed in range(10):
            tasks.start_soon(client, f"client {seed}", seed)
run(main, clock=clock)
print(hashlib.sha256("\\n".join(log).encode()).hexdigest(), clock.now_ns)
"""


@pytest.mark.thorough
def test_the_same_program_gives_the_same_order(repository: object) -> None:
    outputs = set()
    for hash_seed in ("0", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(repository)}
        finished = subprocess.run(
            [sys.executable, "-c", TRAFFIC],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.add(finished.stdout)
    assert len(outputs) == 1
    digest, _ = outputs.pop().split()
    assert len(digest) == len(hashlib.sha256().hexdigest())
