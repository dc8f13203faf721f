"""Mutation testing: how many small changes to the code do the tests notice?

    python tests/mutation --count 500 --seed 1 --jobs 2
    python tests/mutation --count 500 --seed 1 --only aionn/scheduler
    python tests/mutation --packages aionn/scheduler fences --count 100

First all tests of the packages run once under coverage (``coverage`` must be installed), to know which test executes which line.
Then each sampled mutant is applied to a copy of the tree, and the tests that execute its line run until one fails, those of its own
package first. A mutant that none of them notices has survived. ``survivors.toml`` holds survivors that change nothing that anybody
could see, each with its reason; they count as noticed.

Prints each survivor as it is found, then the share that was noticed. Exit code 1 where that is below ``--goal``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mutants import Mutant, find_mutants

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "aionn/scheduler",
    "aionn/runtime",
    "aionn/burst",
    "fences",
    "aionn/service",
    "aionn/validation",
)

TESTS_MAX = 60
"""Tests run against one mutant: those of its own package first, then by how long they take."""

SECONDS_MAX = 90.0
"""How long the tests may take against one mutant, at least. Those that hang have noticed it."""

SLOWER_MAX = 4.0
"""Times that tests may take longer than without a mutant before they count as hanging: the machine may be busier by then."""

FLAKES_MAX = 3
"""Failures against one mutant that a second run may contradict; the next one counts."""

WATCHDOG_S = "1200"
"""When a test counts as hanging while coverage is measured: on a busy machine that takes tens of times as long."""

COPIED = ("aionn", "fences", "fmq", "tests", "examples", "docs", "pyproject.toml", "README.md")

Coverage = dict[str, dict[int, list[str]]]


def tests_of(package: str) -> str:
    """Where a package's own tests are."""
    return f"tests/{package}"


def copy_tree(place: Path) -> None:
    """Makes a copy of the code and its tests, compiled parts included."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)


def run_pytest(
    place: Path, arguments: Sequence[str], *, timeout_s: float, **variables: str
) -> tuple[int, str]:
    """Runs pytest in a copy; the exit code, -1 where it took too long, and the end of what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(place), str(place / "tests/mutation"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(place / ".hypothesis"),
        **variables,
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            # Driver processes end with their parent; tests of a broken supervisor may leave some behind.
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")[-4000:]


def measure_coverage(packages: Iterable[str], place: Path) -> tuple[Coverage, dict[str, float]]:
    """Runs all tests of the packages once: which test executes which line, and how long each takes."""
    import coverage

    data = place / "coverage.data"
    status, text = run_pytest(
        place,
        ["-p", "contexts", *map(tests_of, packages)],
        timeout_s=7200,
        AIONN_MUTATION_DATA=str(data),
        AIONN_TEST_WATCHDOG_S=WATCHDOG_S,
    )
    noted = Path(f"{data}.json")
    if not noted.exists() or status not in (0, 1):
        raise SystemExit(f"the tests could not be run once: exit status {status}\n{text}")
    notes = json.loads(noted.read_text(encoding="utf-8"))
    seconds: dict[str, float] = notes["seconds"]
    for name in notes["failed"]:
        print(f"left out, since it fails without a mutant: {name}")
    measured = coverage.CoverageData(str(data))
    measured.read()
    lines: Coverage = {}
    for file in measured.measured_files():
        lines[os.path.relpath(file, place)] = {
            line: [c for c in contexts if c and seconds.get(c, float("inf")) < SECONDS_MAX / 3]
            for line, contexts in measured.contexts_by_lineno(file).items()
        }
    return lines, seconds


def chosen_tests(mutant: Mutant, lines: Coverage, seconds: dict[str, float]) -> list[str]:
    """The tests that execute a mutant's line; none known means all of its package."""
    package = os.path.dirname(mutant.path)
    found = lines.get(mutant.path, {}).get(mutant.line, [])
    if not found:
        return [tests_of(package)]
    own = tests_of(package) + "/"
    seen: Counter[str] = Counter()
    ranked = []
    for name in sorted(found, key=lambda name: (not name.startswith(own), seconds[name], name)):
        function = name.partition("[")[0]
        # Of one test with many parameters a few first, the others at the end.
        ranked.append((seen[function] > 2, name))
        seen[function] += 1
    return [name for _, name in sorted(ranked, key=lambda entry: entry[0])][:TESTS_MAX]


def load_argued(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Survivors that were looked at: file, kind, text before and after, and the reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", []) if path.exists() else []
    return {(e["path"], e["kind"], e["before"], e["after"]): e["reason"] for e in entries}


def key_of(mutant: Mutant) -> tuple[str, str, str, str]:
    """What an argued survivor is known by: its line may move."""
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return mutant.path, mutant.kind, before, after


def failed_test(text: str, tests: Sequence[str]) -> str | None:
    """The test that pytest's summary names as failed; None if it names none of these."""
    named = [line.removeprefix("FAILED ").removeprefix("ERROR ") for line in text.splitlines()[-8:]]
    # The longest: one name may be the beginning of another.
    found = [name for name in tests if any(line == name or line.startswith(f"{name} - ") for line in named)]
    return max(found, key=len, default=None)


def judge(mutant: Mutant, place: Path, tests: Sequence[str], seconds: Mapping[str, float]) -> tuple[str, str]:
    """Runs the tests against one mutant: ``noticed``, ``hung``, ``survived`` or ``broken``, and what pytest printed last.

    A test that fails is run once more: one that passes then has failed for another reason than the mutant, and the others go on
    without it.
    """
    file = place / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.applied_to(source))
    left = [*tests]
    limit_s = max(SECONDS_MAX, SLOWER_MAX * sum(seconds.get(name, 0.0) for name in tests))
    try:
        status, text = run_pytest(place, ["-x", *left], timeout_s=limit_s)
        for _ in range(FLAKES_MAX):
            name = failed_test(text, left) if status == 1 else None
            if name is None:
                break
            again, _ = run_pytest(place, [name], timeout_s=limit_s)
            if again != 0:
                break
            left.remove(name)
            status, text = run_pytest(place, ["-x", *left], timeout_s=limit_s) if left else (0, "")
    finally:
        file.write_bytes(source)
    verdicts = {0: "survived", 1: "noticed", 2: "noticed", 3: "noticed", 4: "noticed", -1: "hung"}
    return verdicts.get(status, "noticed" if status < 0 else "broken"), text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), metavar="FOLDER")
    parser.add_argument("--count", type=int, default=500, help="mutants to sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run the part of the sample whose paths begin so")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--goal", type=float, default=0.95, help="least share that must be noticed")
    parser.add_argument("--report", type=Path, help="a JSON file with the verdict on each mutant")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    options = parser.parse_args()
    mutants = [
        mutant
        for package in options.packages
        for path in sorted((ROOT / package).glob("*.py"))
        for mutant in find_mutants(str(path.relative_to(ROOT)), path.read_bytes())
    ]
    sample = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    print(f"{len(sample)} of {len(mutants)} mutants, seed {options.seed}", flush=True)
    sample = [mutant for mutant in sample if mutant.path.startswith(options.only)]
    if options.list:
        print(*sample, sep="\n")
        return 0
    argued = load_argued(Path(__file__).with_name("survivors.toml"))
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aionn-mutation-") as folder:
        places = [Path(folder) / str(job) for job in range(max(1, options.jobs))]
        for place in places:
            copy_tree(place)
        measured = [package for package in options.packages if options.only.startswith(package)]
        lines, seconds = measure_coverage(measured or options.packages, places[0])
        print(f"the tests without a mutant took {time.monotonic() - started_s:.0f} s", flush=True)
        left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in sample:
            left.put(mutant)
        verdicts: dict[Mutant, str] = {}
        printing = threading.Lock()

        def work(place: Path) -> None:
            while True:
                try:
                    mutant = left.get_nowait()
                except queue.Empty:
                    return
                verdict, text = judge(mutant, place, chosen_tests(mutant, lines, seconds), seconds)
                if verdict == "survived" and key_of(mutant) in argued:
                    verdict = "argued"
                with printing:
                    verdicts[mutant] = verdict
                    if verdict in ("survived", "broken"):
                        print(f"[{len(verdicts)}/{len(sample)}] {verdict.upper()} {mutant}", flush=True)
                        if verdict == "broken":
                            print(text, flush=True)

        workers = [threading.Thread(target=work, args=(place,)) for place in places]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    counts = Counter(verdicts.values())
    noticed = sum(counts[verdict] for verdict in ("noticed", "hung", "argued"))
    by_package = Counter((os.path.dirname(m.path), v in ("survived", "broken")) for m, v in verdicts.items())
    for package in options.packages:
        good, bad = by_package[package, False], by_package[package, True]
        print(f"{package:20} {good:4} of {good + bad:4} noticed")
    share = noticed / max(1, len(verdicts))
    print(
        f"{noticed} of {len(verdicts)} noticed ({share:.1%}; {counts['hung']} by hanging, {counts['argued']} argued) "
        f"in {time.monotonic() - started_s:.0f} s"
    )
    if options.report is not None:
        rows = [{**m._asdict(), "verdict": v} for m, v in sorted(verdicts.items())]
        options.report.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if share >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
