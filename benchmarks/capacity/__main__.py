"""The number of streams of 30 frames/s that keep their deadlines, and the fate of all of them when one more runs.

Contenders, on the same engine and each in a process of its own: aionn with a guarantee, and as best effort with deadlines; the
engine in worker threads behind one queue (LiteRT, ONNX Runtime, OpenVINO); an asyncio application with a place for the newest frame
of each stream; OpenVINO's `AsyncInferQueue`. One that is not installed is left out, and the reason is printed.

How each figure is taken:
- A stream is 30 frames/s at a random phase, the same phases for all contenders, with frames as the model takes them. A frame is on
  time if its result is in the process of the contender a period after its capture. Streams keep their deadlines if all of them
  together have 99.5 % of the frames on time; of aionn with a guarantee each one must be admitted, too. A run that fails is repeated
  once, since the machine may have been busy.
- Streams: the largest number that keeps the deadlines, by bisection. A block is one search, in a new process.
- Slots: executions that run concurrently, which are the worker threads of the peers, and the requests of each model's queue of
  OpenVINO, so that it runs twice as many with both models. Each execution has one thread.
- Models: shapes, a millisecond or less; mobilenet_v2, some milliseconds; both, in turn. ONNX Runtime and OpenVINO have the networks
  of `benchmarks.engines`.
- Cases: without options `CASES`, one block of each, which takes some ten minutes; `--engine`, `--work` and `--slots` choose others,
  `--rounds` and `--seconds` more and longer blocks.
- One too many: the streams that keep 99.5 % of their own frames, of that number and one more. With a guarantee the last one is not
  admitted and runs as best effort; the row of the other ones has the share of the admitted ones is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.capacity.cameras import PERIOD_NS, Tally, is_kept, kept_count, largest
from benchmarks.capacity.contenders import CONTENDERS, ENGINES, missing
from benchmarks.rows import Report, alternating, at_least, compare, options, single

ROOT = Path(__file__).resolve().parents[2]

STREAMS_MAX = 256
"""Most streams of a run: some ten thousand frames a second are more than one event loop takes."""

WORKS = {"shapes": ("small CNN",), "mobilenet_v2": ("mobilenet_v2",), "both": ("small CNN", "mobilenet_v2")}

CASES = (
    *(("litert", work, slots) for work in WORKS for slots in (1, 2)),
    ("ort", "mobilenet_v2", 1),
    ("openvino", "mobilenet_v2", 1),
    ("openvino", "both", 2),
)
"""Engine, work and slots: all works on one engine, and each other engine beside the peers that it alone has. All combinations with
three blocks of ten seconds take hours."""

DEVICES = {"litert": "litert-cpu", "ort": "ort-cpu", "openvino": "openvino-cpu"}

OURS = "aionn, guarantee"

ANSWER_S_MAX = 60.0
"""Limit of an answer of a contender, beside the time of its run: it starts a process, or opens bursts."""


class Case(NamedTuple):
    """The work of the contenders.

    Attributes:
        engine: The engine.
        work: The models.
        slots: Executions that run concurrently.
        paths: The models' files.
    """

    engine: str
    work: str
    slots: int
    paths: Sequence[Path]

    def __str__(self) -> str:
        return f"{self.engine}, {self.work}, {self.slots} slot{'s' if self.slots > 1 else ''}"


class Process:
    """A contender in its process.

    Args:
        name: The contender.
        case: Its work.
    """

    def __init__(self, name: str, case: Case) -> None:
        command = [sys.executable, "-m", "benchmarks.capacity.contenders", name, case.engine, str(case.slots)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._process = subprocess.Popen(
            [*command, *map(str, case.paths)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.frame_ms: list[float] = self._answer(0.0)

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        limit = threading.Timer(ANSWER_S_MAX + 3 * seconds, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            self._process.wait()
            raise RuntimeError(f"ended with status {self._process.returncode}: {self.errors_text()[-500:]}")
        return json.loads(line)

    def run(self, streams: int, seconds: float, *, stops: bool) -> list[Tally]:
        """Runs some streams."""
        assert self._process.stdin is not None
        print(json.dumps([streams, seconds, stops]), file=self._process.stdin, flush=True)
        return [Tally(*row) for row in self._answer(seconds)]

    def errors_text(self) -> str:
        """The text that it has written to standard error: reasons of refusals, or its failure."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@contextmanager
def opened(name: str, case: Case) -> Iterator[Process]:
    """A contender in its process."""
    process = Process(name, case)
    try:
        yield process
    finally:
        process.close()


class Found(NamedTuple):
    """The result of one search.

    Attributes:
        streams: The largest number that keeps the deadlines.
        beyond: The tallies of one stream more.
    """

    streams: int
    beyond: list[Tally]


def search(name: str, case: Case, seconds: float) -> Found:
    """One block.

    Raises:
        RuntimeError: The contender failed.
    """
    with opened(name, case) as process:

        def keeps(streams: int) -> bool:
            for _ in range(2):
                tallies = process.run(streams, seconds, stops=True)
                if is_kept(tallies):
                    return True
                if not all(tally.is_admitted for tally in tallies):
                    break  # Not the machine's doing.
            return False

        frame_ms = statistics.mean(process.frame_ms)
        guess = int(case.slots * 0.9 * PERIOD_NS / 1e6 / frame_ms)
        streams = largest(keeps, guess, STREAMS_MAX)
        beyond = process.run(streams + 1, seconds, stops=False)
        refusal = process.errors_text().rpartition("\n")[2] if name == OURS else ""
    admitted = [tally for tally in beyond if tally.is_admitted]
    print(
        f"{case}: {name:21} {streams:3} streams ({frame_ms:.2f} ms a frame); one too many: {kept_count(beyond)} of"
        f" {len(beyond)} kept, {kept_count(admitted)} of {len(admitted)} admitted, load {os.getloadavg()[0]:.1f}"
        f"{refusal and f'; the last refusal: {refusal}'}",
        file=sys.stderr,
        flush=True,
    )
    return Found(streams, beyond)


def measure(report: Report, case: Case, rounds: int, seconds: float) -> None:
    """The rows of a case."""
    names = []
    for name in CONTENDERS:
        reason = missing(name, case.engine)
        if reason is None:
            names.append(name)
        elif "belongs" not in reason:
            report.note(f"{case}: {name}: left out: {reason}")
    found: dict[str, list[Found]] = {name: [] for name in names}
    for name in alternating(names, rounds):
        found[name].append(search(name, case, seconds))
    ours = [float(each.streams) for each in found[OURS]]
    for name in names[1:]:
        peers = [float(each.streams) for each in found[name]]
        title = f"{case}: streams"
        if min(peers) > 0:
            report.add(compare(title, "1", ours, name, peers, at_least(1.0)))
        else:
            report.note(f"{case}: {name}: not one stream kept its deadlines")
            report.add(single(title, "1", ours))
    for name in names:
        kept = [float(kept_count(each.beyond)) for each in found[name]]
        report.add(single(f"{case}: one too many, kept, {name}", "1", kept))
    shares = []
    for each in found[OURS]:
        admitted = [tally for tally in each.beyond if tally.is_admitted]
        if admitted:
            shares.append(kept_count(admitted) / len(admitted))
    if shares:
        report.add(single(f"{case}: one too many, share of admitted kept", "1", shares, at_least(1.0)))
    else:
        report.note(f"{case}: no stream was admitted, even alone")


def paths_of(engine: str, work: str, folder: Path) -> list[Path] | None:
    """The files of the models of a case; None where one is missing."""
    from benchmarks.engines.peers import ENGINES as NETWORKS

    known = NETWORKS[DEVICES[engine]].models(folder)
    paths = [known[name] for name in WORKS[work]]
    return None if None in paths else [path for path in paths if path is not None]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--slots", type=int, choices=(1, 2))
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a try")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a case")
    mine, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    report = Report(chosen)
    wanted = (mine.engine, mine.work, mine.slots)
    if any(wanted):
        cases = [case for case in itertools.product(ENGINES, WORKS, (1, 2)) if _is_wanted(case, wanted)]
    else:
        cases = [("litert", "mobilenet_v2", 1)] if chosen.quick else list(CASES)
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="aionn-capacity-") as folder:
        for engine, work, slots in cases:
            reason = missing(OURS, engine)
            paths = None if reason is not None else paths_of(engine, work, Path(folder))
            if paths is None:
                left_out[f"{engine}, {work}"] = reason or "a model's file is missing"
                continue
            measure(report, Case(engine, work, slots, paths), mine.rounds, mine.seconds)
    for what, reason in left_out.items():
        report.note(f"{what}: left out: {reason}")


def _is_wanted(case: tuple[str, str, int], wanted: tuple[str | None, str | None, int | None]) -> bool:
    return all(value is None or part == value for part, value in zip(case, wanted, strict=True))


if __name__ == "__main__":
    main()
