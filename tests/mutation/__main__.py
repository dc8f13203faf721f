"""Mutation testing: how many small changes to the code do the tests notice?

    python tests/mutation --count 500 --seed 1 --jobs 2
    python tests/mutation --count 500 --seed 1 --only aionn/scheduler --report verdicts.json
    python tests/mutation --again verdicts.json --tests tests/aionn/scheduler/test_planning_policy.py
    python tests/mutation --packages aionn/scheduler fences --count 100

First all tests of the packages run once under coverage (``coverage`` must be installed), to know which test executes which line;
with ``--only`` those of the packages that it names. Then each sampled mutant is applied to a copy of the tree, and the tests that
execute its line run until one fails, those of its own package first. A mutant that none of them notices has survived.
``survivors.toml`` holds survivors that change nothing that anybody could see, each with its reason; they count as noticed.

``--again`` judges the survivors of a report once more, wherever their lines have moved since; ``--tests`` runs these tests against
every mutant, without measuring before.

Prints each survivor as it is found, then the share that was noticed. Exit code 1 where that is below ``--goal``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant, find_mutants
from running import BELOW, HUNG, ROOT, Measured, Warm, chosen_tests, copy_tree, limit_s, measure, watchdog_s

PACKAGES = (
    "aionn/scheduler",
    "aionn/runtime",
    "aionn/burst",
    "fences",
    "aionn/service",
    "aionn/validation",
)

FLAKES_MAX = 3
"""Failures against one mutant that a second run may contradict; the next one counts."""

SURE_S_MAX = 0.3
"""A test that is so quick without a mutant waits for nothing that a busy machine could delay: its failure counts at once."""

Key = tuple[str, str, str, str, str, int]


def load_argued(path: Path) -> dict[Key, str]:
    """Survivors that were looked at, each with the reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", []) if path.exists() else []
    return {
        (e["path"], e["within"], e["kind"], e["before"], e["after"], e.get("nth", 1)): e["reason"]
        for e in entries
    }


def key_of(mutant: Mutant) -> Key:
    """What a mutant is known by: its line may move."""
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return mutant.path, mutant.within, mutant.kind, before, after, mutant.nth


def failed_test(text: str) -> str | None:
    """The test that pytest's summary names as failed; None if it names none."""
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
    return found[-1] if found else None


def judge(
    mutant: Mutant, place: Path, warm: Warm, tests: Sequence[str], measured: Measured
) -> tuple[str, str, str | None]:
    """Runs the tests against one mutant: ``noticed``, ``hung``, ``survived`` or ``broken``, what pytest printed last, and which
    test noticed it, if pytest says so.

    A test that fails is run once more unless it is very quick: one that passes then has failed for another reason than the mutant,
    and the others go on without it.
    """
    file = place / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.applied_to(source))
    variables = {"AIONN_TEST_WATCHDOG_S": watchdog_s(tests, measured)}

    def run(*arguments: str) -> tuple[int, str]:
        return warm.run(arguments, timeout_s=limit_s(tests, measured), variables=variables)

    try:
        status, text = run("-x", *tests) if tests else (0, "")
        flakes: list[str] = []
        while status == 1 and len(flakes) < FLAKES_MAX and (name := failed_test(text)) is not None:
            if measured.seconds.get(name, SURE_S_MAX) < SURE_S_MAX:
                break
            again, _ = run(name)
            if again != 0:
                break
            flakes.append(name)
            status, text = run("-x", *tests, *(f"--deselect={name}" for name in flakes))
            status = 0 if status == 5 else status  # None is left.
    finally:
        file.write_bytes(source)
    if status == HUNG or (status != 0 and re.search(r"^Timeout \(", text, re.MULTILINE)):
        return "hung", text, None
    verdicts = {0: "survived", 1: "noticed", 2: "noticed", 3: "noticed", 4: "noticed"}
    verdict = verdicts.get(status, "noticed" if status < 0 else "broken")
    return verdict, text, failed_test(text) if status == 1 else None


def find_again(report: Path) -> list[Mutant]:
    """The survivors of a report that the code still has."""
    rows = [row for row in json.loads(report.read_text(encoding="utf-8")) if row["verdict"] == "survived"]
    found: list[Mutant] = []
    for row in rows:
        del row["verdict"]
        asked = Mutant(**row)
        mutants = find_mutants(asked.path, (ROOT / asked.path).read_bytes())
        alike = [mutant for mutant in mutants if key_of(mutant) == key_of(asked)]
        if not alike:
            print(f"gone: {asked}", flush=True)
        found += alike
    return found


def draw(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that were asked for."""
    if options.again is not None:
        return [mutant for mutant in find_again(options.again) if mutant.path.startswith(options.only)]
    mutants = [
        mutant
        for package in options.packages
        for path in sorted((ROOT / package).glob("*.py"))
        for mutant in find_mutants(str(path.relative_to(ROOT)), path.read_bytes())
    ]
    sample = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    print(f"{len(sample)} of {len(mutants)} mutants, seed {options.seed}", flush=True)
    return [mutant for mutant in sample if mutant.path.startswith(options.only)]


def judge_all(sample: Sequence[Mutant], options: argparse.Namespace) -> dict[Mutant, str]:
    """The verdict on each mutant."""
    argued = load_argued(Path(__file__).with_name("survivors.toml"))
    started_s = time.monotonic()
    verdicts: dict[Mutant, str] = {}
    left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in sample:
        left.put(mutant)
    printing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="aionn-mutation-") as folder:
        places = [Path(folder) / str(job) for job in range(max(1, options.jobs))]
        for place in places:
            copy_tree(place)
        measured = Measured({}, {})
        if not options.tests:
            named = [package for package in options.packages if options.only.startswith(package)]
            used = {os.path.dirname(mutant.path) for mutant in sample}
            packages = named or [p for p in options.packages if p in used]
            measured = measure(packages, places[0], options.measured)
            print(f"the tests without a mutant took {time.monotonic() - started_s:.0f} s", flush=True)

        def work(place: Path) -> None:
            packages = {os.path.dirname(mutant.path) for mutant in sample}
            warm = Warm(place, BELOW.get(packages.pop(), ()) if len(packages) == 1 else ())
            status, text = warm.run(options.tests, timeout_s=600, variables={}) if options.tests else (0, "")
            believed: set[str] = set()
            while status == 0:
                try:
                    mutant = left.get_nowait()
                except queue.Empty:
                    break
                tests = options.tests or chosen_tests(mutant, measured)
                begun_s = time.monotonic()
                verdict, text, test = judge(mutant, place, warm, tests, measured)
                if test is not None:
                    believed.add(test)
                if verdict == "survived" and key_of(mutant) in argued:
                    verdict = "argued"
                took_s = time.monotonic() - begun_s
                with printing:
                    verdicts[mutant] = verdict
                    if options.verbose or verdict in ("survived", "broken"):
                        share = f"[{len(verdicts)}/{len(sample)}]"
                        print(f"{share} {verdict.upper()} in {took_s:.1f} s: {mutant}", flush=True)
                    if verdict == "broken":
                        print(text[-4000:], flush=True)
            if believed:
                status, text = warm.run(sorted(believed), timeout_s=limit_s(believed, measured), variables={})
            if status:
                print(f"tests that noticed a mutant fail without one:\n{text}", flush=True)
            warm.close()

        workers = [threading.Thread(target=work, args=(place,)) for place in places]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), metavar="FOLDER")
    parser.add_argument("--count", type=int, default=500, help="mutants to sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run the part of the sample whose paths begin so")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--goal", type=float, default=0.95, help="least share that must be noticed")
    parser.add_argument("--report", type=Path, help="a JSON file with the verdict on each mutant")
    parser.add_argument(
        "--again", type=Path, metavar="REPORT", help="judge its survivors instead of a sample"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="TEST", help="run these tests and measure nothing before"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="keep there what the run without a mutant shows, or take it from there",
    )
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print each verdict, and how long it took")
    options = parser.parse_args()
    sample = draw(options)
    if options.list:
        print(*sample, sep="\n")
        return 0
    started_s = time.monotonic()
    verdicts = judge_all(sample, options)
    counts = Counter(verdicts.values())
    noticed = sum(counts[verdict] for verdict in ("noticed", "hung", "argued"))
    for package in options.packages:
        own = Counter(v for m, v in verdicts.items() if os.path.dirname(m.path) == package)
        if own:
            told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(own.items()))
            print(f"{package:20} {own.total():4}: {told}")
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
