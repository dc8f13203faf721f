"""Peers that lie, die or both: fuzzing, a flipper at full rate, deaths at every numbered point, kill cycles."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fmq
from fmq import _native

pytestmark = pytest.mark.forked("any")

Make = Callable[..., fmq.MessageQueue]
SECOND_NS = 1_000_000_000
ROOT = Path(__file__).parents[3]


# Fuzzing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 4))])
def test_fuzzing_finds_only_errors_of_the_package(fuzzer: ModuleType, seed: int) -> None:
    endings = fuzzer.run(seed, 30_000)
    assert endings.total() >= 30_000
    for expected in ("answered", "CorruptQueue", "InvalidArgument", "refused descriptor", "Overflow"):
        assert endings[expected] > 0, f"seed {seed} never came to: {expected}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_fuzzing_for_longer(fuzzer: ModuleType, seed: int) -> None:
    assert fuzzer.run(seed, 500_000).total() >= 500_000


@pytest.mark.long
def test_fuzzing_under_address_sanitizer() -> None:
    script = str(ROOT / "tests/sanitizers.py")
    done = subprocess.run(
        [sys.executable, script, "--fuzz", "1000000", "--seed", "7"], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    if "skipped" in done.stdout:
        pytest.skip(done.stdout)


# A flipper


CALLS = [500, pytest.param(20_000, marks=pytest.mark.long)]
"""Calls beside a flipper, at least."""


@pytest.mark.parametrize("calls_min", CALLS)
@pytest.mark.parametrize("flavour", list(fmq.Flavour))
def test_a_flipper_of_counters_causes_errors_and_nothing_else(
    make: Make, peer: Any, flavour: fmq.Flavour, calls_min: int
) -> None:
    queue = make(8, 512, flavour=flavour)
    other = peer(queue)
    other.begin("flip(5, False)")
    assert other._line() == "flipping"
    rng = random.Random(5)
    calls, corrupt, answered = 0, 0, 0
    deadline = time.monotonic() + 20
    while (calls < calls_min or corrupt < 5) and time.monotonic() < deadline:
        with (
            fmq.MessageQueue.attach(queue.descriptor, queue.fds, reset=True) as writer,
            fmq.MessageQueue.attach(queue.descriptor, queue.fds) as reader,
        ):
            for _ in range(20):
                count = rng.randrange(1, 513)
                calls += 1
                try:
                    writer.write_many(bytes(8 * count))
                    if calls % 8 == 0:
                        os.sched_yield()  # on a busy machine, let the flipper in
                    taken = reader.read_available(count)
                    assert len(taken) <= 8 * count
                    if reader.begin_read(1) is not None:
                        reader.commit_read(1)
                    answered += 1
                except fmq.Overflow:
                    pass
                except fmq.CorruptQueue:
                    corrupt += 1
                    break
    other.begin("0")
    assert other.finish() > 1000
    assert corrupt >= 5 and calls >= calls_min


class AlwaysSet(fmq.EventFlag):
    """As a peer that sets the bits again before every look."""

    def wait(self, mask: int, timeout_ns: int | None = None, retry: bool = True) -> int:
        self.wake(mask)
        return super().wait(mask, timeout_ns, retry)


def test_a_peer_that_sets_the_bits_for_ever_prolongs_no_timeout(make: Make, background: Any) -> None:
    queue = make(8, 2)
    flag = AlwaysSet(memoryview(bytearray(4)))
    bits = {"read_notification": 1, "write_notification": 2, "event_flag": flag}
    assert background(lambda: queue.read_blocking(1, 1_000_000, **bits)).result() is None
    assert queue.write_many(bytes(16))
    assert background(lambda: queue.write_blocking(bytes(8), 1_000_000, **bits)).result() is False
    flag.close()


def test_a_peer_that_jams_the_eventfds_blocks_no_poke(make: Make, counters: Any, peer: Any) -> None:
    """Full, and made blocking at any moment, also between a look at the flag and what follows it."""
    queue = make(1, 64)
    parks = [queue.descriptor.grantors[part].offset for part in (4, 5)]
    memory = counters(queue)
    other = peer(queue)
    other.begin("jam()")
    assert other._line() == "jamming"

    def poke(times: int) -> None:
        wakes = queue.statistics().wake_count
        for _ in range(times):
            for park in parks:
                memory[park] = 2
            assert queue.write(b"x") and queue.read() == b"x"
        assert queue.statistics().wake_count == wakes + 2 * times

    poke(20_000)
    other.begin("0")
    assert other.finish() > 0
    poke(10)  # full and blocking for good


@pytest.mark.parametrize("calls_min", CALLS)
def test_a_flipper_of_message_headers_causes_errors_and_nothing_else(
    make: Make, peer: Any, calls_min: int
) -> None:
    queue = make(1, 256)
    other = peer(queue)
    other.begin("flip(6, True)")
    assert other._line() == "flipping"
    corrupt = whole = 0
    deadline = time.monotonic() + 20
    while (whole < calls_min or corrupt < 5) and time.monotonic() < deadline:
        with (
            fmq.MessageQueue.attach(queue.descriptor, queue.fds, reset=True) as writer,
            fmq.MessageQueue.attach(queue.descriptor, queue.fds) as reader,
        ):
            try:
                for size in (0, 8, 100):
                    assert writer.write_message(bytes(size))
                    if whole % 8 == 0:
                        os.sched_yield()
                    message = reader.read_message()
                    assert message is not None and len(message) <= 248
                    whole += 1
            except fmq.CorruptQueue:
                corrupt += 1
    other.begin("0")
    assert other.finish() > 1000
    assert corrupt >= 5 and whole >= calls_min


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (1, 0),  # not a multiple of the quantum
        (8, 1),
        (0, 8),  # read beyond written
        (8 * 17, 0),  # further apart than the capacity
        (2**64 - 8, 0),
        (0, 2**64 - 8 * 17),
        (2**63, 0),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_impossible_counters_are_corruption(
    make: Make, join: Any, counters: Any, write: int, read: int
) -> None:
    queue = make(8, 16)
    memory = counters(queue)
    for which, value in ((fmq.Grantor.WRITEPTR, write), (fmq.Grantor.READPTR, read)):
        offset = queue.descriptor.grantors[which].offset
        memory[offset : offset + 8] = value.to_bytes(8, "little")
    reader, writer = join(queue), join(queue)
    assert reader.available_to_read() == 0
    assert writer.available_to_write() == 0
    calls: list[Callable[[], object]] = [
        reader.read,
        lambda: reader.begin_read(1),
        lambda: reader.read_blocking(1, None),
        lambda: writer.write(bytes(8)),
        lambda: writer.begin_write(1),
        lambda: writer.write_blocking(bytes(8), None),
    ]
    for call in calls:
        with pytest.raises(fmq.CorruptQueue):
            call()


def test_counters_that_go_backwards_are_corruption(make: Make, join: Any, counters: Any) -> None:
    queue = make(8, 16)
    reader = join(queue)
    assert queue.write_many(bytes(8 * 8))
    assert reader.read_many(4) is not None
    assert queue.write_many(bytes(8 * 8))  # asks for the read counter: 4
    memory = counters(queue)
    offset = queue.descriptor.grantors[fmq.Grantor.WRITEPTR].offset
    memory[offset : offset + 8] = (8 * 6).to_bytes(8, "little")
    with pytest.raises(fmq.CorruptQueue, match="went backwards"):
        reader.read_many(12)


# Deaths at numbered points


def dies_at(point: int, call: Callable[[], object]) -> bool:
    """Runs a call in a forked process that dies at a point of it; False if it got through the call without."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ["FMQ_DEBUG_POINTS"] = "1"
            _native.die_at(point)
            call()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def writing(queue: fmq.MessageQueue, how: str, payload: bytes) -> Callable[[], object]:
    def call() -> None:
        with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as end:
            if how == "message":
                assert end.write_message(payload)
            elif how == "elements":
                assert end.write_many(payload)
            elif how == "transaction":
                transaction = end.begin_write(len(payload))
                assert transaction is not None
                transaction.copy_to(payload)
                end.commit_write(len(payload))
            else:
                reserved = end.reserve_message(len(payload))
                assert reserved is not None
                reserved.copy_to(payload)
                end.commit_message()

    return call


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["message", "elements", "transaction", "reservation"])
def test_a_writer_that_dies_at_any_point_leaves_all_or_nothing(make: Make, how: str) -> None:
    lone, second, third = b"A" * 24, b"B" * 100, b"C" * 40
    messages = how in ("message", "reservation")
    seen = {True: 0, False: 0}
    for point in range(1, 9):
        queue = make(1, 256)

        def take(size: int, queue: fmq.MessageQueue = queue) -> bytes | None:
            if messages:
                return queue.read_message_blocking(SECOND_NS // 50)
            return queue.read_blocking(size, SECOND_NS // 50)

        writing(queue, how, lone)()
        died = dies_at(point, writing(queue, how, second))
        assert take(len(lone)) == lone
        survived = take(len(second))
        assert survived in (None, second)
        assert survived == second if not died or point in (5, 6, 7, 8) else survived is None
        seen[survived is None] += 1
        writing(queue, how, third)()  # a new writer goes on where the counters are
        assert take(len(third)) == third
    assert seen[True] >= 1 and seen[False] >= 4


@pytest.mark.parametrize("point", [5, 6, 7, 8])
def test_a_parked_reader_gets_what_was_published_before_the_death(make: Make, join: Any, point: int) -> None:
    """Dying between publishing and waking costs the reader a slice, no more."""
    queue = make(1, 256)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as reader:
                code = 0 if reader.read_message_blocking(20 * SECOND_NS) == b"last words" else 2
        finally:
            os._exit(code)
    park = queue.descriptor.grantors[fmq.Grantor.READER_PARK].offset
    parked_word(queue, park)
    assert dies_at(point, writing(queue, "message", b"last words"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def parked_word(queue: fmq.MessageQueue, offset: int) -> None:
    """Waits until a sleeper has declared itself."""
    import mmap

    with mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size) as memory:
        deadline = time.monotonic() + 20
        while not memory[offset]:
            os.sched_yield()
            assert time.monotonic() < deadline


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["read", "message", "transaction", "peek"])
def test_a_reader_that_dies_at_any_point_frees_all_or_nothing(make: Make, how: str) -> None:
    payload = b"D" * 248
    freed_at = {}
    for point in (*range(11, 15), *range(5, 9)):
        queue = make(1, 256)
        assert queue.write_message(payload)

        def call(queue: fmq.MessageQueue = queue) -> None:
            with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as end:
                if how == "read":
                    assert end.read_many(256) is not None
                elif how == "message":
                    assert end.read_message() == payload
                elif how == "transaction":
                    assert end.begin_read(256) is not None
                    end.commit_read(256)
                else:
                    assert end.peek_message() is not None
                    end.release_message()

        dies_at(point, call)
        freed = queue.write_message_blocking(b"E" * 248, SECOND_NS // 50)
        freed_at[point] = freed
        with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as fresh:
            assert fresh.read_message() == (b"E" * 248 if freed else payload)
    assert all(freed_at[point] for point in range(5, 9))
    assert not all(freed_at.values())


@pytest.mark.parametrize("point", [21, 22])
def test_a_reader_that_dies_asleep_stops_nobody(make: Make, point: int) -> None:
    queue = make(1, 256)

    def park() -> None:
        with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as reader:
            reader.read_message_blocking(None)

    assert dies_at(point, park)
    for _ in range(3):
        assert queue.write_message(b"nobody listens")
    assert queue.statistics().wake_count == 1
    assert queue.read_message() == b"nobody listens"


def test_an_overwriting_writer_that_dies_never_leaves_a_torn_element(make: Make) -> None:
    for point in range(1, 6):
        queue = make(64, 4, flavour=fmq.Flavour.UNSYNCHRONIZED)
        assert all(queue.write(bytes([i]) * 64) for i in range(4))

        def overwrite(queue: fmq.MessageQueue = queue) -> None:
            with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as writer:
                writer.write(b"\xee" * 64)

        assert dies_at(point, overwrite)
        with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as reader:
            try:
                assert reader.read() == bytes(64)
                assert point == 1  # later ones have announced what they overwrite
            except fmq.Overflow:
                assert point > 1


def test_a_death_while_the_event_flag_is_set_leaves_the_bits(make: Make) -> None:
    queue = make(1, 16)

    def wake() -> None:
        with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as end:
            end.event_flag.wake(4)

    assert dies_at(31, wake)
    assert queue.event_flag.wait(4, SECOND_NS) == 4


def test_dying_on_demand_needs_the_environment() -> None:
    assert "FMQ_DEBUG_POINTS" not in os.environ
    with pytest.raises(fmq.InvalidArgument, match="FMQ_DEBUG_POINTS"):
        _native.die_at(1)


# Connect and kill


def footprint() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:fmq")


def connect_and_kill(cycles: int) -> None:
    before = footprint()
    for cycle in range(cycles):
        with fmq.MessageQueue.create(1, 4096) as queue:
            ready_end, child_end = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    end = fmq.MessageQueue.attach(queue.descriptor, queue.fds)
                    end.write_message(b"here I am")
                    if cycle % 3 == 1:
                        end.reserve_message(1000)
                    os.write(child_end, b"x")
                    if cycle % 3 == 2:
                        end.wait_writable(4096, None)
                    while True:
                        signal.pause()
                finally:
                    os._exit(1)
            os.close(child_end)
            assert os.read(ready_end, 1) == b"x"
            os.close(ready_end)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert queue.read_message_blocking(SECOND_NS) == b"here I am"
            assert queue.read_message() is None
            assert queue.write_message(b"too late")
    assert footprint() == before


def test_connect_and_kill_cycles_leave_nothing_behind() -> None:
    connect_and_kill(12)


@pytest.mark.long
def test_ten_thousand_connect_and_kill_cycles_leave_nothing_behind() -> None:
    def resident_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4

    connect_and_kill(500)
    before = resident_kib()
    connect_and_kill(10_000)
    assert resident_kib() - before < 2048
