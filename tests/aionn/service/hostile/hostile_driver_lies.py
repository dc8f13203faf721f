"""What the hostile driver does by lies, fences, shared memory and processes of its own: one function for each attack."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from hostile_driver import ATTACKS, Driver, attack
from hostile_driver_attacks import dies_at_each_call

from aionn.burst.packets import encode_result, result_of
from aionn.errors import ErrorStatus
from aionn.hal import ExecutionResult, FencedTiming, Memory, OutputShape, Timing
from aionn.hal.capabilities import OperandPerformance, PerformanceInfo
from aionn.service.wire import protocol
from fences import SyncFence

HUGE = 2**62

_libc = ctypes.CDLL(None, use_errno=True)


# Lies


@attack
def wrong_ids(driver: Driver) -> None:
    """Answers other calls than those that were made."""
    for kind in ("Execute", "ExecuteFenced", "CreateExecution"):
        driver.answers[kind] = lambda call: driver.reply(call.id + 1000, driver.right_answer(call))


@attack
def answers_twice(driver: Driver) -> None:
    """Each call."""

    def said(call: Any) -> Any:
        body = driver.right_answer(call)
        driver.reply(call.id, body)
        return body

    for kind in ("GetStatus", "PrepareModel", "Execute", "ExecuteFenced", "CreateExecution", "Allocate"):
        driver.answers[kind] = said


@attack
def answers_with_other_kinds(driver: Driver) -> None:
    """A reply of another kind than the question has, with a fence."""
    for kind in ("Execute", "CreateExecution", "Allocate"):
        driver.answers[kind] = lambda call: protocol.ExecuteFencedReply(1, _pending())
    driver.answers["ExecuteFenced"] = lambda call: protocol.GetMemoriesReply((Memory.create(64),))


def _pending() -> SyncFence:
    fence = SyncFence()
    fence.fileno()
    _KEPT.append(fence)
    return fence


_KEPT: list[Any] = []


@attack
def failures_without_a_failure(driver: Driver) -> None:
    """Failures of status NONE, and of a text with everything in it."""
    text = "[/red]\x1b[2J\0\n" * 100
    for index, kind in enumerate(("PrepareModel", "Execute", "ExecuteFenced", "Allocate", "ConfigureBurst")):
        status = ErrorStatus.NONE if index % 2 else ErrorStatus.GENERAL_FAILURE
        driver.answers[kind] = lambda call, status=status: protocol.Failed(status, text)
    driver.answers["Launch"] = lambda call: protocol.LaunchReply(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)


SHAPES: tuple[tuple[OutputShape, ...], ...] = (
    (OutputShape((-1,)),),
    (OutputShape((HUGE,)),),
    (OutputShape((2**63 - 1, 2**63 - 1)),),
    (OutputShape((0,)),),
    (OutputShape((5,)),),
    (OutputShape((1,) * 300),),
    (OutputShape(()),),
    (OutputShape((4,)),) * 7,
    (OutputShape((4,), False),),
)


@attack
def wrong_shapes(driver: Driver) -> None:
    """Of outputs: negative, huge, too many."""
    results = [ExecutionResult(True, shapes) for shapes in SHAPES]
    _results(driver, results)


@attack
def huge_insufficient_shapes(driver: Driver) -> None:
    """Outputs that are said not to fit: the application would make more room."""
    shapes = [
        (OutputShape((HUGE,), False),),
        (OutputShape((2**40, 2**40), False),),
        (OutputShape((4,), False),),
    ]
    _results(driver, [ExecutionResult(False, shape) for shape in shapes])


TIMINGS = (
    Timing(-1, -1),
    Timing(HUGE, HUGE),
    Timing(2**63 - 1, 0),
    Timing(None, -(2**62)),
    Timing(5, 3),
)


@attack
def wrong_timings(driver: Driver) -> None:
    """Negative, from the future, longer on the device than in the driver; also where none was asked for."""
    _results(driver, [ExecutionResult(True, (), timing) for timing in TIMINGS])
    driver.answers["GetExecutionInfo"] = lambda call: protocol.ExecutionInfoReply(
        ErrorStatus.NONE, FencedTiming(TIMINGS[call.id % 5], TIMINGS[(call.id + 1) % 5])
    )


def _results(driver: Driver, results: list[ExecutionResult]) -> None:
    """Has these answered in turn, in each way of execution."""
    turn = iter(range(1 << 30))

    def result() -> ExecutionResult:
        return results[next(turn) % len(results)]

    def launched(call: Any) -> Any:
        said = result()
        driver.reply(call.id, protocol.LaunchReply(ErrorStatus.NONE))
        driver.call(protocol.Notify(call.body.launch, ErrorStatus.NONE, said.output_shapes, said.timing))

    def in_queue(requests: Any, written: Any, packet: bytes) -> None:
        try:
            written.write_message(encode_result(result_of(result())))
        except Exception:
            written.write_message(b"\xc1")

    for kind in ("Execute", "Compute"):
        driver.answers[kind] = lambda call: protocol.ExecuteReply(result())
    driver.answers["Launch"] = launched
    driver.on_request = in_queue


@attack
def wrong_support(driver: Driver) -> None:
    """A list of another length than the model has operations; then one of a hundred thousand."""
    driver.answers["SupportedOperations"] = lambda call: protocol.SupportedOperationsReply(
        (True,) * (0, 2, 100_000)[call.id % 3]
    )


@attack
def wrong_durations(driver: Driver) -> None:
    """Executions that take less than nothing, or for ever."""
    durations = (-(2**63), HUGE, 0, 2**63 - 1)
    driver.answers["PrepareModel"] = lambda call: protocol.PrepareModelReply(
        driver.number(), durations[call.id % len(durations)]
    )


@attack
def wrong_handles(driver: Driver) -> None:
    """Each object has the same number, also those that are used no more; tokens are none."""
    driver.answers["PrepareModel"] = lambda call: protocol.PrepareModelReply(-(2**63))
    driver.answers["Allocate"] = lambda call: protocol.AllocateReply(0, -(call.id % 2))


@attack
def same_burst_handles(driver: Driver) -> None:
    """Two bursts have one number; with the second request the driver dies."""

    def said(call: Any) -> Any:
        driver.burst(call.body)
        return protocol.ConfigureBurstReply(1)

    driver.answers["ConfigureBurst"] = said
    driver.on_request = lambda *_: os._exit(0)


def _says(change: Callable[[Any], dict[str, Any]]) -> Callable[[Driver], None]:
    def lie(driver: Driver) -> None:
        driver.info = msgspec.structs.replace(driver.info, **change(driver.info))

    return lie


def _capabilities(ratio: float) -> Callable[[Any], dict[str, Any]]:
    def change(info: Any) -> dict[str, Any]:
        wrong = PerformanceInfo(ratio, ratio)
        return {"capabilities": msgspec.structs.replace(info.capabilities, if_performance=wrong)}

    return change


def _many_types(info: Any) -> dict[str, Any]:
    entries = tuple(OperandPerformance(1, PerformanceInfo(1.0, 1.0)) for _ in range(1000))  # type: ignore[arg-type]
    return {"capabilities": msgspec.structs.replace(info.capabilities, operand_performance=entries)}


for _name, _change in {
    "says_nan": _capabilities(math.nan),
    "says_infinity": _capabilities(math.inf),
    "says_less_than_nothing": _capabilities(-1.0),
    "says_huge_slots": lambda info: {"slots": 2**62},
    "says_no_slots": lambda info: {"slots": -5},
    "says_many_types": _many_types,
    "says_long_version": lambda info: {"version": "v" * 200_000},
    "says_markup": lambda info: {"version": "[/red]\x1b]0;x\x07\0\n<script>"},
    "says_another_name": lambda info: {"name": "good"},
}.items():
    ATTACKS[_name] = _says(_change)


@attack
def changes_at_each_start(driver: Driver) -> None:
    """Another device after each death."""
    driver.info = msgspec.structs.replace(driver.info, version=str(os.getpid()))
    dies_at_each_call(driver)


# Fences


@attack
def fences_never_signalled(driver: Driver) -> None:
    """Fences that stay pending as long as the process lives."""
    driver.answers["ExecuteFenced"] = lambda call: protocol.ExecuteFencedReply(1, _pending())


@attack
def fences_of_a_child(driver: Driver) -> None:
    """A child that was forked without Python's knowledge keeps the fence's other end, and the socket; the driver dies."""

    def said(call: Any) -> Any:
        fence = _pending()
        if _libc.fork() == 0:
            _libc.sleep(30)
            _libc._exit(0)
        driver.reply(call.id, protocol.ExecuteFencedReply(1, fence))
        os._exit(0)

    driver.answers["ExecuteFenced"] = said


@attack
def fences_from_the_future(driver: Driver) -> None:
    """Signalled at times that there are not; and failures without a cause."""
    times = (HUGE, -1, 0, 2**63 - 1)
    driver.answers["ExecuteFenced"] = lambda call: protocol.ExecuteFencedReply(
        1, SyncFence.finished(times[call.id % 4])
    )
    driver.answers["GetExecutionInfo"] = lambda call: protocol.ExecutionInfoReply(
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, FencedTiming()
    )


@attack
def fences_with_garbage(driver: Driver) -> None:
    """Packets that are no record, with descriptors beside them; then the other end stays open."""

    def said(call: Any) -> Any:
        fence = _pending()
        sending = fence._port._sending
        socket.send_fds(sending, [bytes(range(256)) * (1 + call.id % 8)], [sending.fileno()])
        return protocol.ExecuteFencedReply(1, fence)

    driver.answers["ExecuteFenced"] = said


# Bursts


@attack
def garbage_results(driver: Driver) -> None:
    """Result packets that are none."""
    chance = random.Random(2)
    right = encode_result(result_of(ExecutionResult()))

    def said(requests: Any, results: Any, packet: bytes) -> None:
        broken = bytearray(right)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        results.write_message([b"", b"\xdf\xff\xff\xff\xff", bytes(broken), packet][chance.randrange(4)])

    driver.on_request = said


@attack
def too_many_results(driver: Driver) -> None:
    """As many results as the queue holds, for one request and for none."""
    right = encode_result(result_of(ExecutionResult()))

    def said(requests: Any, results: Any, packet: bytes) -> None:
        while results.write_message(right):
            pass

    driver.on_request = said


def _maps(queue: Any) -> Any:
    """The first memory of a queue, as bytes that can be written."""
    import mmap

    for fd in queue.fds:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd"):
            return mmap.mmap(fd, os.fstat(fd).st_size)
    raise AssertionError("a queue has a memory")


def _rewrites(values: Callable[[random.Random], int], span: int) -> Callable[[Driver], None]:
    def rewriting(driver: Driver) -> None:
        inner = driver.burst
        chance = random.Random(3)

        def burst(body: Any) -> Any:
            reply = inner(body)
            maps = [_maps(queue) for queue in driver.queues[-1]]

            def rewrite() -> None:
                while True:
                    for shared in maps:
                        end = min(span, len(shared)) - 8
                        struct.pack_into("<Q", shared, 8 * chance.randrange(end // 8), values(chance))

            threading.Thread(target=rewrite, daemon=True).start()
            return reply

        driver.burst = burst  # type: ignore[method-assign]

        def said(requests: Any, results: Any, packet: bytes) -> None:
            try:
                results.write_message(encode_result(result_of(ExecutionResult())))
            except Exception:
                pass

        driver.on_request = said

    return rewriting


ATTACKS["rewriting_counters"] = _rewrites(lambda chance: chance.getrandbits(64), 512)
ATTACKS["rewriting_counters_a_little"] = _rewrites(lambda chance: chance.randrange(1 << 16), 512)
ATTACKS["rewriting_queues"] = _rewrites(lambda chance: chance.getrandbits(64), 1 << 20)
ATTACKS["filling_queues"] = _rewrites(lambda chance: (1 << 64) - 1, 1 << 20)


@attack
def wakes_for_nothing(driver: Driver) -> None:
    """Pokes the queues' eventfds without end, in whatever mode, and answers nothing."""
    inner = driver.burst

    def burst(body: Any) -> Any:
        reply = inner(body)
        fds = [fd for queue in driver.queues[-1] for fd in queue.fds]
        events = [fd for fd in fds if "eventfd" in os.readlink(f"/proc/self/fd/{fd}")]

        def poke() -> None:
            index = 0
            while True:
                fd = events[index % len(events)]
                os.set_blocking(fd, bool(index % 3))
                os.set_blocking(fd, False)
                for act in (lambda: os.eventfd_read(fd), lambda: os.eventfd_write(fd, 1 << 40)):  # noqa: B023
                    try:
                        act()
                    except OSError:
                        pass
                os.set_blocking(fd, bool(index % 2))
                index += 1

        threading.Thread(target=poke, daemon=True).start()
        return reply

    driver.burst = burst  # type: ignore[method-assign]
    driver.on_request = lambda *_: None


@attack
def truncates_memories(driver: Driver) -> None:
    """Shortens every file that it has been given, adds seals, and locks it."""

    def said(call: Any) -> Any:
        for pool in call.body.request.pools:
            if pool.memory is None:
                continue
            fd = pool.memory.fileno()
            for act in (
                lambda: os.ftruncate(fd, 0),  # noqa: B023
                lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),  # noqa: B023
                lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),  # noqa: B023
                lambda: os.set_blocking(fd, False),  # noqa: B023
                lambda: os.posix_fallocate(fd, 0, 1 << 34),  # noqa: B023
            ):
                try:
                    act()
                except OSError:
                    pass
        return driver.right_answer(call)

    driver.answers["Execute"] = said


# Processes


@attack
def child_keeps_everything(driver: Driver) -> None:
    """Forks a child that lives on with every descriptor, and dies in the next call."""

    def said(call: Any) -> Any:
        if _libc.fork() == 0:
            _libc.sleep(30)
            _libc._exit(0)
        os._exit(0)

    driver.answers["Execute"] = said


@attack
def standard_output_in_the_way(driver: Driver) -> None:
    """Changes how the application's standard output works, which both share, and writes there."""
    flags = fcntl.fcntl(1, fcntl.F_GETFL)
    fcntl.fcntl(1, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_APPEND)
    sys.stdout.write("not what the application says\n")
    sys.stdout.flush()


@attack
def closes_and_reopens(driver: Driver) -> None:
    """Ends each burst as soon as it is made, and frees each model as soon as it is prepared."""

    def said(call: Any) -> Any:
        reply = driver.burst(call.body)
        driver.reply(call.id, reply)
        for number in range(reply.burst + 2):
            driver.call(protocol.BurstEnded(number, "no more"))

    driver.answers["ConfigureBurst"] = said


@attack
def numbers_too_large(driver: Driver) -> None:
    """Integers of 64 bits where smaller ones are meant."""
    driver.answers["PrepareModel"] = lambda call: protocol.PrepareModelReply(2**64 - 1, 2**64 - 1)
    driver.answers["ExecuteFenced"] = lambda call: protocol.ExecuteFencedReply(2**64 - 1, None)
    driver.answers["ConfigureBurst"] = lambda call: (
        driver.burst(call.body),
        protocol.ConfigureBurstReply(2**64 - 1),
    )[1]
