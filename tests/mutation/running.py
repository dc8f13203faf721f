"""Runs pytest in a copy of the tree: once under coverage, and in forks of a warm process against each mutant.

Owns the copies, the time that tests may take, and which tests run in which order. What a verdict means is ``__main__``'s.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mutants import Mutant

__all__ = [
    "BELOW",
    "HUNG",
    "Measured",
    "Warm",
    "chosen_tests",
    "copy_tree",
    "limit_s",
    "measure",
    "watchdog_s",
]

ROOT = Path(__file__).resolve().parents[2]

TESTS_S_MAX = 30.0
"""Seconds of tests that run against one mutant, as they took without it. Those beyond seldom notice what these did not."""

TEST_S_MAX = 30.0
"""A test that takes longer is not run against mutants."""

SECONDS_MIN = 60.0
"""How long the tests may take against one mutant, at least. Those that hang have noticed it."""

WATCHDOG_MIN_S = 15
"""When a single test counts as hanging, at least: many have a watchdog of ten seconds of their own."""

SLOWER_MAX = 4.0
"""Times that tests may take longer than without a mutant before they count as hanging: the machine may be busier by then."""

COVERAGE_WATCHDOG_S = "1200"
"""When a test counts as hanging while coverage is measured: on a busy machine that takes tens of times as long."""

PRINTED_MAX = 20_000
"""Characters of the end of what a run printed that are looked at: the summary, or the stacks of what hangs."""

START_S_MAX = 120.0
"""How long the warm process may take to fork: it imports first."""

COPIED = ("aionn", "fences", "fmq", "tests", "examples", "docs", "pyproject.toml", "README.md")
COMPILED = ("aionn", "fences", "fmq")

BELOW = {
    "fences": (),
    "aionn/validation": ("aionn.models.builder",),
    "aionn/burst": ("aionn.validation", "aionn.models.builder", "fmq.aio"),
    "aionn/scheduler": ("aionn.validation", "aionn.interpreter", "aionn.models.builder"),
    "aionn/service": ("aionn.burst.controller", "aionn.burst.server", "aionn.drivers.reference"),
    "aionn/runtime": (
        "aionn.service.client.device",
        "aionn.drivers.reference",
        "aionn.drivers.simulated.driver",
    ),
}
"""Modules that a run against a mutant of a package would import anew each time, and that do not import that package."""

HUNG = -1000
"""The status of a run that took too long; no exit code and no signal."""


class Measured(NamedTuple):
    """What a run without a mutant showed.

    Attributes:
        lines: Per file and line the tests that execute it.
        seconds: How long each test takes; infinite for those that fail or skip.
    """

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]


def tests_of(package: str) -> str:
    """Where a package's own tests are."""
    return f"tests/{package}"


def copy_tree(place: Path) -> None:
    """Makes a copy of the code and its tests, compiled parts included.

    Bytecode is checked by the hash of its source: a changed file is compiled anew, the others are not.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)
    compiling = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *COMPILED]
    subprocess.run([sys.executable, *compiling], cwd=place, check=True)


def _environment(place: Path, **variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(place), str(place / "tests/mutation"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": "",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(place / ".hypothesis"),
        **variables,
    }


def _end_group(pid: int) -> None:
    # Driver processes end with their parent; tests of a broken supervisor may leave some behind.
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Warm:
    """A warm process in one copy of the tree, which runs pytest in forks of itself. One thread uses it.

    Args:
        place: The copy.
        imports: Modules of ours that it has imported.
    """

    def __init__(self, place: Path, imports: Iterable[str] = ()) -> None:
        self._place = place
        self._imports = tuple(imports)
        self._output = place / "output.txt"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", str(self._place / "tests/mutation/nursery.py"), *self._imports],
            cwd=self._place,
            env=_environment(self._place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(
        self, arguments: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> tuple[int, str]:
        """One run of pytest: its exit status, ``HUNG`` where it took too long, and the end of what it printed."""
        order = {
            "arguments": ["-q", "--tb=no", "-p", "no:cacheprovider", *arguments],
            "output": str(self._output),
            "variables": dict(variables),
        }
        status = self._run(order, timeout_s)
        if status is None:
            # The kernel ends processes where memory is short; once more may be all right.
            self.close()
            self._process = self._start()
            status = self._run(order, timeout_s)
        if status is None:
            raise SystemExit("the warm process has ended")
        return status, self._output.read_text(encoding="utf-8", errors="replace")[-PRINTED_MAX:]

    def _run(self, order: dict[str, object], timeout_s: float) -> int | None:
        """The exit status; None where the warm process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            return None
        pid = self._read(START_S_MAX)
        if pid is None or pid == HUNG:
            return None
        status = self._read(timeout_s)
        _end_group(pid)
        if status == HUNG:
            self._read(START_S_MAX)
        return status

    def _read(self, timeout_s: float) -> int | None:
        """A number that it says; None where it has ended, ``HUNG`` where it says none in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return HUNG
        line = self._process.stdout.readline()
        return int(line) if line else None

    def close(self) -> None:
        """Ends the warm process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(START_S_MAX)
        self._process.stdout.close()


def measure(packages: Iterable[str], place: Path, kept: Path | None = None) -> Measured:
    """Runs all tests of the packages once: which test executes which line, and how long each takes.

    Args:
        packages: Whose tests.
        place: A copy of the tree.
        kept: A file that the result is taken from if it is there, else kept in.
    """
    if kept is not None and kept.exists():
        lines, seconds = json.loads(kept.read_text(encoding="utf-8"))
        # Bytecode of the tests is written here once, for all runs to come.
        collecting = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        subprocess.run(
            [*collecting, *map(tests_of, packages)],
            cwd=place,
            env=_environment(place, PYTHONDONTWRITEBYTECODE=""),
            stdout=subprocess.DEVNULL,
        )
        by_line = {path: {int(line): names for line, names in of.items()} for path, of in lines.items()}
        return Measured(by_line, seconds)
    measured = _measure(packages, place)
    if kept is not None:
        kept.write_text(json.dumps(measured), encoding="utf-8")
    return measured


def _measure(packages: Iterable[str], place: Path) -> Measured:
    import coverage

    data = place / "coverage.data"
    # Bytecode of the tests is written here once, for all runs to come.
    variables = {
        "AIONN_MUTATION_DATA": str(data),
        "AIONN_TEST_WATCHDOG_S": COVERAGE_WATCHDOG_S,
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "contexts"]
    with open(place / "output.txt", "w+b") as output:
        process = subprocess.Popen(
            [*command, *map(tests_of, packages)],
            cwd=place,
            env=_environment(place, **variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            _end_group(process.pid)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")[-4000:]
    noted = Path(f"{data}.json")
    if not noted.exists() or status not in (0, 1):
        raise SystemExit(f"the tests could not be run once: exit status {status}\n{text}")
    notes = json.loads(noted.read_text(encoding="utf-8"))
    seconds: dict[str, float] = notes["seconds"]
    warm = Warm(place)
    for name in dict.fromkeys(notes["failed"]):
        # Some count descriptors, and coverage has its own.
        started_s = time.monotonic()
        if warm.run([name], timeout_s=SECONDS_MIN, variables={})[0] == 0:
            seconds[name] = time.monotonic() - started_s
        else:
            print(f"left out, since it fails without a mutant: {name}", flush=True)
    warm.close()
    measured = coverage.CoverageData(str(data))
    measured.read()
    lines = {
        os.path.relpath(file, place): {
            line: [name for name in names if name]
            for line, names in measured.contexts_by_lineno(file).items()
        }
        for file in measured.measured_files()
    }
    return Measured(lines, seconds)


def chosen_tests(mutant: Mutant, measured: Measured) -> list[str]:
    """The tests that run against a mutant, those that likely notice it first.

    They are those that execute its line. None known means all of its package: the line runs in a process of its own, or when it is
    imported. Tests that are named like the file come first, then those of the package, each by how long they take.
    """
    own = tests_of(os.path.dirname(mutant.path)) + "/"
    named = own + "test_" + Path(mutant.path).stem
    found = measured.lines.get(mutant.path, {}).get(mutant.line, [])
    found = found or [name for name in measured.seconds if name.startswith(own)]
    seconds = {name: measured.seconds.get(name, float("inf")) for name in found}
    seen: Counter[str] = Counter()
    ranked = []
    for name in sorted(found, key=lambda name: (seconds[name], name)):
        function = name.partition("[")[0]
        # Of one test with many parameters a few first, the others at the end.
        ranked.append((seen[function] > 2, not name.startswith(named), not name.startswith(own), name))
        seen[function] += 1
    chosen = []
    left_s = TESTS_S_MAX
    for *_, name in sorted(ranked, key=lambda entry: entry[:3]):
        if seconds[name] <= min(left_s, TEST_S_MAX):
            left_s -= seconds[name]
            chosen.append(name)
    return chosen


def limit_s(tests: Iterable[str], measured: Measured) -> float:
    """How long tests may take together."""
    return max(SECONDS_MIN, SLOWER_MAX * sum(measured.seconds.get(name, 0.0) for name in tests))


def watchdog_s(tests: Iterable[str], measured: Measured) -> str:
    """How long a single one of them may take."""
    longest_s = max((measured.seconds.get(name, 0.0) for name in tests), default=0.0)
    return str(max(WATCHDOG_MIN_S, round(SLOWER_MAX * longest_s)))
