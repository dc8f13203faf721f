"""SIGTERM to ``aionn serve`` in the middle of streams: are accepted frames lost, and how long does the end take?

``python -m benchmarks.drain [--count 200] [--streams 3] [--driver reference] [--model FILE] [--json] [--quick]`` starts a server
each time, sends it SIGTERM at a random moment of the streams, and counts. A frame is accepted when the server has read it, which
the queue of its burst shows; an accepted frame is lost unless its result is right, or it is rejected with the reason. Each round
has one of these conditions in turn: plain; applications that connect at the same time; compilations under way; a client that sends
nothing; one that is stopped (SIGSTOP) with frames under way; two SIGTERMs within a millisecond.

Columns: rounds; frames with a result, rejected, unread (sent when the server had ended), cut off (accepted, when a second SIGTERM
ended the server immediately) and lost; exit statuses; time from SIGTERM to the exit (median, longest), and the same beyond the
deadline of the frames that were under way. Every frame has 200 ms. Exit code 1 means that a frame was lost, or that a server ended
with another status than 0, or 143 after two SIGTERMs. SIGINT and SIGTERM end it after the present round, with the figures so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aionn

FORMS = ("plain", "connecting", "compiling", "silent", "stopped", "twice")
DEADLINE_S = 0.2
STOPPED_STATUS = 143
"""Exit status of a server that a second SIGTERM has ended."""

START_S_MAX = 60.0
"""Start of a server on a busy machine."""


class Counts:
    """The fate of the frames of a round."""

    def __init__(self) -> None:
        self.ended = self.rejected = self.unread = self.lost = self.cut_off = 0
        self.problems: Counter[str] = Counter()


class Work(NamedTuple):
    """A model, inputs for it, and the right outputs."""

    driver: str
    model: str
    inputs: list[Any]
    outputs: list[Any]


async def made_work(driver: str, model: str) -> Work:
    numbers = np.random.default_rng(1)
    async with aionn.open(drivers=[driver]) as runtime:
        net = await runtime.compile(model)
        (spec,) = net.inputs
        inputs = [np.asarray(10 * numbers.random(spec.dimensions), spec.dtype) for _ in range(4)]
        outputs = [(await net.execute([each])).outputs[0] for each in inputs]
    return Work(driver, model, inputs, outputs)


async def one_stream(path: Path, work: Work, counts: Counts, ready: asyncio.Event, pace_s: float) -> None:
    async with aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(work.model)
        async with net.burst() as burst:
            hal = burst._opened[0][0].hal  # Whether a frame was read is to be seen here alone.
            ready.set()
            number = 0
            while True:
                number = (number + 1) % len(work.inputs)
                was_dead = hal.state.name == "DEAD"
                try:
                    result = await burst.execute([work.inputs[number]], deadline=aionn.after(DEADLINE_S))
                except aionn.DeviceUnavailable:
                    counts.rejected += 1
                    return
                except aionn.MissedDeadline:
                    counts.problems["missed its deadline"] += 1
                    continue
                except aionn.DeadObject as e:
                    if was_dead or hal._requests.available_to_read():
                        counts.unread += 1
                    else:
                        counts.cut_off += 1  # Lost, unless a second SIGTERM has ended the process.
                        counts.problems[str(e)[:100]] += 1
                    return
                if not (result.outputs[0] == work.outputs[number]).all():
                    counts.lost += 1
                    counts.problems["wrong result"] += 1
                counts.ended += 1
                if pace_s:
                    await asyncio.sleep(pace_s)


STOPPED = """
import sys, anyio, numpy as np, aionn
async def main():
    async with aionn.open(drivers=[], sockets=[sys.argv[1]]) as runtime:
        net = await runtime.compile(sys.argv[2])
        value = np.zeros(net.inputs[0].dimensions, net.inputs[0].dtype)
        async with net.burst() as burst:
            print("ready", flush=True)
            while True:
                await burst.execute([value], deadline=aionn.after(0.2))
anyio.run(main)
"""


def stopped_client(path: Path, work: Work) -> subprocess.Popen[bytes]:
    made = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(path), work.model],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert made.stdout is not None
    made.stdout.readline()
    return made


async def one_round(form: str, work: Work, streams: int, numbers: random.Random) -> tuple[Counts, int, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.sock"
        command = [
            sys.executable,
            "-P",
            "-m",
            "aionn",
            "serve",
            work.driver,
            "--socket",
            str(path),
            "--quiet",
        ]
        server = subprocess.Popen(command, stderr=subprocess.PIPE)
        counts, extra, socks = Counts(), None, []
        try:
            limit_s = time.monotonic() + START_S_MAX
            while not path.exists():
                if server.poll() is not None:
                    assert server.stderr is not None
                    raise RuntimeError(
                        f"the server ended with {server.returncode}: {server.stderr.read().decode()}"
                    )
                if time.monotonic() > limit_s:
                    raise RuntimeError(f"the server did not start within {START_S_MAX:g} s")
                await asyncio.sleep(0.01)
            readies = [asyncio.Event() for _ in range(streams)]
            tasks = [
                asyncio.create_task(one_stream(path, work, counts, ready, numbers.choice([0.0, 0.001])))
                for ready in readies
            ]
            if form == "stopped":
                extra = await asyncio.to_thread(stopped_client, path, work)
            async with asyncio.timeout(START_S_MAX):  # A stream that failed sets none.
                for ready in readies:
                    await ready.wait()
            if form == "silent":
                socks.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                socks[-1].connect(str(path))
            await asyncio.sleep(numbers.uniform(0.005, 0.05))
            others = []
            if form == "compiling":
                others.append(asyncio.create_task(compiling(path, work)))
                await asyncio.sleep(numbers.uniform(0, 0.02))
            if form == "connecting":
                others.append(asyncio.create_task(connecting(path)))
            if extra is not None:
                extra.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            server.send_signal(signal.SIGTERM)
            if form == "twice":
                server.send_signal(signal.SIGTERM)
            status = await asyncio.to_thread(server.wait, START_S_MAX)
            took_s = time.monotonic() - began_s
            await asyncio.wait_for(asyncio.gather(*tasks, *others), START_S_MAX)
            if status != STOPPED_STATUS:
                counts.lost += counts.cut_off
                counts.cut_off = 0
            assert server.stderr is not None
            written = server.stderr.read().decode()
            if written:
                counts.problems[written[-200:]] += 1
            return counts, status, took_s
        finally:
            for sock in socks:
                sock.close()
            if extra is not None:
                extra.kill()
                extra.wait()
                assert extra.stdout is not None
                extra.stdout.close()
            server.kill()
            server.wait()
            if server.stderr is not None:
                server.stderr.close()


async def compiling(path: Path, work: Work) -> None:
    with contextlib.suppress(aionn.DeviceUnavailable, aionn.DeadObject):
        async with aionn.open(drivers=[], sockets=[path]) as runtime:
            while True:
                net = await runtime.compile(work.model)
                await net.aclose()


async def connecting(path: Path) -> None:
    while True:
        try:
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                if not runtime.devices:
                    return
        except (aionn.DeviceUnavailable, aionn.DeadObject):
            return


async def main(count: int, streams: int, seed: int, driver: str, model: str, *, as_json: bool) -> int:
    numbers = random.Random(seed)
    work = await made_work(driver, model)
    by_form: dict[str, list[tuple[Counts, int, float]]] = {form: [] for form in FORMS}
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    for number in range(count):
        if interrupted.is_set():
            break
        form = FORMS[number % len(FORMS)]
        by_form[form].append(await one_round(form, work, streams, numbers))
    found = [row_of(form, rounds) for form, rounds in by_form.items() if rounds]
    if as_json:
        for row in found:
            print(json.dumps(row))
    else:
        print(
            f"{'form':12} rounds  ended rejected unread cut off lost  statuses           exit ms p50    max"
            "  past the deadline ms"
        )
        for row in found:
            print(
                f"{row['form']:12} {row['rounds']:6} {row['ended']:6} {row['rejected']:8} {row['unread']:6}"
                f" {row['cut_off']:7} {row['lost']:4}"
                f"  {row['statuses']!s:18} {row['exit_ms']:10.1f} {row['exit_ms_max']:6.1f} {row['past_deadline_ms']:8.1f}"
            )
            for problem, times in row["problems"].items():
                print(f"    {times} x {problem}")
    return int(any(row["lost"] or set(row["statuses"]) - allowed(row["form"]) for row in found))


def allowed(form: str) -> set[int]:
    """The exit statuses of a server in order."""
    return {0, STOPPED_STATUS} if form == "twice" else {0}


def row_of(form: str, rounds: list[tuple[Counts, int, float]]) -> dict[str, Any]:
    """The figures of one form."""
    counts = [count for count, _, _ in rounds]
    exits_ms = [1e3 * took_s for _, _, took_s in rounds]
    return {
        "form": form,
        "rounds": len(rounds),
        "ended": sum(count.ended for count in counts),
        "rejected": sum(count.rejected for count in counts),
        "unread": sum(count.unread for count in counts),
        "cut_off": sum(count.cut_off for count in counts),
        "lost": sum(count.lost for count in counts),
        "statuses": dict(Counter(status for _, status, _ in rounds)),
        "exit_ms": statistics.median(exits_ms),
        "exit_ms_max": max(exits_ms),
        "past_deadline_ms": max(exits_ms) - 1e3 * DEADLINE_S,
        "problems": dict(sum((count.problems for count in counts), Counter[str]())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", default="reference")
    parser.add_argument("--model", default="examples/data/digits_float.tflite")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--quick", action="store_true", help="two rounds of each form")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    rounds = 2 * len(FORMS) if given.quick else given.count
    sys.exit(
        asyncio.run(main(rounds, given.streams, given.seed, given.driver, given.model, as_json=given.json))
    )
