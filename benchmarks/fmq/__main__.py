"""The speed of the message queue, against other ways to pass messages between two Python processes.

Measured: round trips of 64 bytes (busy waiting, asleep on a futex, asleep in an event loop), one-way streams of single
and batched 64-byte elements, a 4 MiB message in place against one of 64 bytes, system calls per message, and the
processor time of an idle reader. Peers: multiprocessing's Pipe and Queue, pyzmq, faster-fifo, iceoryx2, and the bare
mechanisms: a spinning and a futex ping-pong in C (reference.c, compiled here) and an eventfd echo on the same loop.

How: every contender is a pair of fresh processes (new ones every five rounds); contenders take turns in blocks of about
50 ms (rows.py). Placements: both sides on one core, on two cores, and wherever the system puts them; figures are only
compared within a placement. Busy waiting with both sides on one core measures the scheduler's time slice, for all alike.
A peer that is not installed, or a compiler that is missing, drops its rows with a remark.

`python -m benchmarks.fmq [--json] [--quick]`
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmarks.fmq.contenders as sides
import fmq
from benchmarks.rows import Goal, Options, Report, alternate, at_least, at_most, compare, options, single

CONTEXT = multiprocessing.get_context("spawn")
BLOCK_NS = 50_000_000
ROUNDS_PER_PROCESS = 5
ANSWER_TIMEOUT_S = 10


@dataclass(frozen=True)
class Placement:
    """Where client and server run; None leaves it to the system."""

    name: str
    client: int | None
    server: int | None


def placements() -> list[Placement]:
    """One core, two cores where there are two, and unpinned."""
    cores = sorted(os.sched_getaffinity(0))
    found = [Placement("one core", cores[0], cores[0])]
    if len(cores) > 1:
        found.append(Placement("two cores", cores[0], cores[1]))
    return [*found, Placement("unpinned", None, None)]


Resources = Callable[[], tuple[Any, Any, Callable[[], None]]]


@dataclass
class Contender:
    """A pair of processes, restarted now and then, and the size of one request to it."""

    name: str
    opener: Callable[[bool, Any], sides.Channel]
    resources: Resources
    command: str = "round trips"
    group: int = 1
    needs: str | None = None
    _processes: list[Any] = field(default_factory=list)
    _controls: list[Any] = field(default_factory=list)
    _close: Callable[[], None] | None = None
    _rounds: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""

    def installed(self) -> bool:
        """Whether what it needs can be imported."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def start(self) -> None:
        """Starts both processes and waits until they have opened their sides, the server's first."""
        client, server, self._close = self.resources()
        for is_client, resources in ((False, server), (True, client)):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=sides.worker, args=(self.opener, is_client, resources, theirs, self.group), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._controls.append(ours)
            if self.needs == "iceoryx2" and not is_client:
                self._answer(ours)  # two that create one service concurrently can miss each other
        for control in self._controls if self.needs != "iceoryx2" else self._controls[1:]:
            self._answer(control)

    def _answer(self, control: Any) -> Any:
        if not control.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"{self.name}: no answer within {ANSWER_TIMEOUT_S} s")
        return control.recv()

    def stop(self) -> None:
        """Ends both processes."""
        for control in self._controls:
            with contextlib.suppress(OSError):
                control.send(("end", 0, None))
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for control in self._controls:
            control.close()
        if self._close is not None:
            self._close()
        self._processes, self._controls, self._close, self._rounds = [], [], None, 0

    def measure(self, count: int, where: Placement) -> tuple[float, list[float]]:
        """One block: the median (or the mean, of a stream) in nanoseconds, and the samples."""
        server, client = self._controls
        server.send((self.command, count, where.server))
        assert self._answer(server) == "started"
        client.send((self.command, count, where.client))
        value, times = self._answer(client)
        return float(value), times

    def block(self, where: Placement) -> float:
        """One block of about 50 ms, in a pair of processes that is not too old; nan once it has failed to answer."""
        if self.failed:
            return math.nan
        try:
            return self._block(where)
        except (TimeoutError, EOFError, OSError) as error:
            if self.name == "fmq":
                raise
            self.failed = f"{type(error).__name__}: {error}"
            for process in self._processes:
                process.kill()
            self.stop()
            return math.nan

    def _block(self, where: Placement) -> float:
        if self._rounds >= ROUNDS_PER_PROCESS:
            self.stop()
        if not self._processes:
            self.start()
            self._counts.clear()
        few, most = (20, 50_000) if self.command == "round trips" else (20_000, 50_000_000)
        count = self._counts.get(where.name)
        if count is None:
            value, _ = self.measure(few, where)
            count = int(min(most, max(few, BLOCK_NS / value)))
        self._rounds += 1
        value, times = self.measure(count, where)
        self._counts[where.name] = int(min(most, max(few, BLOCK_NS / value)))
        self.samples.setdefault(where.name, []).extend(times)
        return value


@contextlib.contextmanager
def running(contenders: list[Contender]) -> Iterator[list[Contender]]:
    """The contenders that are installed; all processes end with the block."""
    found = [contender for contender in contenders if contender.installed()]
    try:
        yield found
    finally:
        for contender in found:
            contender.stop()


# ---- the figures -----------------------------------------------------------------------------------------------------------


def measure(
    report: Report,
    figure: str,
    contenders: list[Contender],
    rounds: int,
    goals: dict[str, Goal],
    bare: Any = None,
) -> None:
    """Ours (the first) against each other contender, by placement; goals are by the peer's name, "best" for the best."""
    with running(contenders) as found:
        for where in placements():
            blocks: dict[str, Callable[[], float]] = {
                contender.name: (lambda c=contender, w=where: c.block(w) / 1000) for contender in found
            }
            if bare is not None:
                blocks["bare C"] = lambda w=where: bare(w) / 1000  # type: ignore[misc]
            results = answered(report, found, alternate(blocks, rounds))
            ours = results.pop(found[0].name)
            name = f"{figure}, {where.name}"
            if "best" in goals and results:
                best = min((n for n in results if n != "bare C"), key=lambda n: statistics.median(results[n]))
                report.add(compare(name, "us", ours, best, results.pop(best), goals["best"]))
            for peer, theirs in results.items():
                report.add(compare(name, "us", ours, peer, theirs, goals.get(peer)))
            spread(report, name, found[0].samples.get(where.name, []))


def measure_stream(
    report: Report, figure: str, contenders: list[Contender], rounds: int, goal: Goal, against_best: bool
) -> None:
    """As `measure`, in messages a second: more is better."""
    with running(contenders) as found:
        for where in placements():
            blocks = {contender.name: (lambda c=contender, w=where: 1e9 / c.block(w)) for contender in found}
            results = answered(report, found, alternate(blocks, rounds))
            ours = results.pop(found[0].name)
            best = max(results, key=lambda n: statistics.median(results[n])) if results else None
            for peer, theirs in results.items():
                wanted = goal if not against_best or peer == best else None
                report.add(compare(f"{figure}, {where.name}", "1/s", ours, peer, theirs, wanted))


def answered(
    report: Report, contenders: list[Contender], results: dict[str, list[float]]
) -> dict[str, list[float]]:
    """The results of those that answered in every block; a remark for each of the other ones."""
    for contender in contenders:
        if contender.failed and contender.name in results:
            if results[contender.name]:
                report.note(f"{contender.name} dropped out: {contender.failed}")
            del results[contender.name]
    return results


def spread(report: Report, name: str, samples: list[float]) -> None:
    """The distribution of ours: a remark under its rows."""
    if not samples:
        return
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000

    report.note(
        f"    ours, {name}: min {ordered[0] / 1000:.3g}, p50 {at(0.5):.3g}, p90 {at(0.9):.3g}, p99 {at(0.99):.3g}, "
        f"p99.9 {at(0.999):.3g} us over {len(ordered)}"
    )


def spinning(report: Report, rounds: int, bare: Any) -> None:
    """Round trips of 64 bytes, busy waiting."""
    name = f"bench{os.getpid()}"
    contenders = [
        Contender("fmq", sides.open_fmq_spin, sides.fmq_resources, group=16),
        Contender(
            "iceoryx2 pub/sub", sides.open_iceoryx2_pub_sub, named(f"{name}/a"), group=16, needs="iceoryx2"
        ),
        Contender(
            "iceoryx2 request", sides.open_iceoryx2_request, named(f"{name}/b"), group=16, needs="iceoryx2"
        ),
    ]
    measure(report, "spinning round trip", contenders, rounds, {"best": at_most(0.25)}, bare)


def named(name: str) -> Resources:
    """A fresh name for each pair of processes, where a peer's resources are found by name."""
    fresh = iter(range(1_000_000))

    def resources() -> tuple[Any, Any, Callable[[], None]]:
        full = f"{name}.{next(fresh)}"
        return full, full, lambda: None

    return resources


def zmq_address(folder: Path) -> Resources:
    """A fresh address for each pair of processes."""
    fresh = iter(range(1_000_000))

    def resources() -> tuple[Any, Any, Callable[[], None]]:
        address = f"ipc://{folder}/zmq{next(fresh)}"
        return address, address, lambda: None

    return resources


def blocking(report: Report, rounds: int, bare: Any, folder: Path) -> None:
    """Round trips of 64 bytes, asleep in between."""
    contenders = [
        Contender("fmq", sides.open_fmq_blocking, lambda: sides.fmq_resources(1, 1 << 14)),
        Contender("multiprocessing.Pipe", sides.open_pipe, lambda: sides.pipe_resources(CONTEXT)),
        Contender("multiprocessing.Queue", sides.open_queue, lambda: sides.queue_resources(CONTEXT)),
        Contender("pyzmq", sides.open_zmq, zmq_address(folder), needs="zmq"),
        Contender("faster-fifo", sides.open_faster_fifo, sides.faster_fifo_resources, needs="faster_fifo"),
        Contender(
            "iceoryx2 event", sides.open_iceoryx2_event, named(f"bench{os.getpid()}/c"), needs="iceoryx2"
        ),
    ]
    measure(report, "blocking round trip", contenders, rounds, {"bare C": at_most(1.5)}, bare)


def awaited(report: Report, rounds: int, kind: str) -> None:
    """Round trips of 64 bytes with both ends asleep in an event loop."""

    def ours() -> tuple[Any, Any, Callable[[], None]]:
        client, server, close = sides.fmq_resources()
        return (kind, client), (kind, server), close

    contenders = [
        Contender("fmq", sides.open_fmq_aio, ours, needs="uvloop" if kind == "uvloop" else None),
        Contender("bare eventfd echo", sides.open_eventfd, lambda: sides.eventfd_resources(kind)),
    ]
    if not contenders[0].installed():
        report.note("uvloop is not installed: no rows for it")
        return
    measure(report, f"{kind} round trip", contenders, rounds, {"bare eventfd echo": at_most(1.25)})


def streams(report: Report, rounds: int, folder: Path) -> None:
    """One-way streams: single writes, then batches."""
    name = f"bench{os.getpid()}/d"
    singles = [
        Contender("fmq", sides.open_fmq_stream, lambda: sides.fmq_resources(spin_ns=sides.SPIN_NS), "stream"),
        Contender("multiprocessing.Pipe", sides.open_pipe, lambda: sides.pipe_resources(CONTEXT), "stream"),
        Contender(
            "multiprocessing.Queue", sides.open_queue, lambda: sides.queue_resources(CONTEXT), "stream"
        ),
        Contender("pyzmq", sides.open_zmq, zmq_address(folder), "stream", needs="zmq"),
        Contender(
            "faster-fifo", sides.open_faster_fifo, sides.faster_fifo_resources, "stream", needs="faster_fifo"
        ),
        Contender("iceoryx2 pub/sub", sides.open_iceoryx2_pub_sub, named(name), "stream", needs="iceoryx2"),
    ]
    measure_stream(report, "stream of single writes", singles, rounds, at_least(3), against_best=True)
    batches = [
        Contender(
            "fmq", sides.open_fmq_batches, lambda: sides.fmq_resources(spin_ns=sides.SPIN_NS), "stream"
        ),
        Contender(
            "faster-fifo get_many",
            sides.open_faster_fifo_batches,
            sides.faster_fifo_resources,
            "stream",
            needs="faster_fifo",
        ),
    ]
    measure_stream(report, "stream of batches", batches, rounds, at_least(5), against_best=False)


def large(report: Report, rounds: int) -> None:
    """4 MiB in place against 64 bytes in place: the time must not grow with the size."""

    def sized(size: int) -> Resources:
        def resources() -> tuple[Any, Any, Callable[[], None]]:
            client, server, close = sides.fmq_resources(1, sides.LARGE_BYTES * 2)
            return (size, client), (size, server), close

        return resources

    contenders = [
        Contender("4 MiB", sides.open_fmq_large, sized(sides.LARGE_BYTES), group=16),
        Contender("64 bytes by reservation", sides.open_fmq_large, sized(64), group=16),
    ]
    goals = {"64 bytes by reservation": at_most(1.5)}
    measure(report, "4 MiB by reservation", contenders, rounds, goals)


# ---- figures without a pair of processes -------------------------------------------------------------------------------------

AWAKE = """
import sys, fmq
with fmq.MessageQueue.create(64, 1024) as a, fmq.MessageQueue.attach(a.descriptor, a.fds) as b:
    write, read, element = a.write, b.read, bytes(64)
    for _ in range(int(sys.argv[1])):
        write(element)
        read()
"""


def system_calls(report: Report, folder: Path) -> None:
    """System calls per message with the consumer awake: two runs of different length under strace, their difference."""
    if shutil.which("strace") is None:
        with fmq.MessageQueue.create(64, 1024) as a, fmq.MessageQueue.attach(a.descriptor, a.fds) as b:
            for _ in range(100_000):
                a.write(sides.PAYLOAD)
                b.read()
            wakes = a.statistics().wake_count + b.statistics().wake_count
        report.note("no strace here: wakes are counted instead of system calls")
        report.add(single("system calls per message, consumer awake", "1", [wakes / 100_000], at_most(0.01)))
        return
    counts = []
    for messages in (1000, 101_000):
        output = folder / f"strace{messages}"
        command = ["strace", "-f", "-c", "-U", "calls,name", "-o", str(output), sys.executable, "-c", AWAKE]
        done = subprocess.run([*command, str(messages)], capture_output=True, check=False, timeout=60)
        total = [line.split()[0] for line in output.read_text().splitlines() if line.endswith("total")]
        if done.returncode != 0 or not total:
            report.note("strace does not work here: no row for system calls")
            return
        counts.append(int(total[0]))
    per_message = max(0, counts[1] - counts[0]) / 100_000
    report.add(single("system calls per message, consumer awake", "1", [per_message], at_most(0.01)))


def idle(report: Report, seconds: float) -> None:
    """Processor time of a sleeping reader, as a share of one core: a thread, and a task in an event loop."""

    def thread(queue: fmq.MessageQueue) -> None:
        queue.read_message_blocking(round(seconds * 1e9))

    def task(queue: fmq.MessageQueue) -> None:
        import asyncio

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fmq.aio.read_message(queue), seconds)

        asyncio.run(wait())

    for name, wait in (("thread", thread), ("task", task)):
        with fmq.MessageQueue.create(1, 1024) as queue:
            used: list[float] = []

            def run(
                wait: Callable[[fmq.MessageQueue], None] = wait, queue: Any = queue, used: Any = used
            ) -> None:
                before = time.thread_time()
                wait(queue)
                used.append(100 * (time.thread_time() - before) / seconds)

            reader = threading.Thread(target=run)
            reader.start()
            reader.join()
            report.add(single(f"idle reader, {name}", "% core", used, at_most(1)))


def build_reference(report: Report, folder: Path) -> Callable[[str], Callable[[Placement], float]] | None:
    """Compiles the bare mechanisms; None, with a remark, where there is no compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "cc"]
    if compiler is None and importlib.util.find_spec("ziglang") is None:
        report.note("no C compiler: no rows against the bare C ping-pong")
        return None
    program = folder / "reference"
    source = Path(__file__).with_name("reference.c")
    subprocess.run([*command, "-O2", "-std=gnu11", str(source), "-o", str(program)], check=True)

    def mechanism(kind: str) -> Callable[[Placement], float]:
        counts: dict[str, int] = {}

        def run(where: Placement, count: int) -> float:
            cores = [str(-1 if core is None else core) for core in (where.client, where.server)]
            done = subprocess.run(
                [str(program), kind, *cores, str(count)],
                capture_output=True,
                check=True,
                timeout=ANSWER_TIMEOUT_S,
            )
            return float(done.stdout)

        def block(where: Placement) -> float:
            if where.name not in counts:
                # The median of a group of spins on one core hides the slices between groups: bound the time outright.
                on_one = kind == "spin" and where.client is not None and where.client == where.server
                counts[where.name] = (
                    64 if on_one else int(min(200_000, max(2000, BLOCK_NS / run(where, 2000))))
                )
            return run(where, counts[where.name])

        return block

    return mechanism


def run(chosen: Options) -> Report:
    """All figures."""
    report = Report(chosen)
    rounds = 3 if chosen.quick else 20
    report.note(
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}"
    )
    with tempfile.TemporaryDirectory(prefix="fmq-bench-") as name:
        folder = Path(name)
        reference = build_reference(report, folder)
        spinning(report, rounds, None if reference is None else reference("spin"))
        for kind in ("asyncio", "uvloop"):
            awaited(report, rounds, kind)
        blocking(report, rounds, None if reference is None else reference("futex"), folder)
        streams(report, rounds, folder)
        large(report, rounds)
        system_calls(report, folder)
        idle(report, 1.0 if chosen.quick else 5.0)
    return report


def main() -> None:
    """The command line."""
    report = run(options(__doc__))
    missed = [row.name for row in report.rows if row.met is False]
    report.note(f"{sum(row.met is True for row in report.rows)} goals met, {len(missed)} not met")


if __name__ == "__main__":
    main()
