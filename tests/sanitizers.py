"""The queue's native code and its tests under the sanitizers of the compiler, and under Python's own debugging aids.

    python tests/sanitizers.py                      # each sanitizer: the tests of fmq, and the fuzzer for a while
    python tests/sanitizers.py address --long       # one of them, with the long forms of the tests
    python tests/sanitizers.py --fuzz 10000000      # nothing but the fuzzer, under AddressSanitizer
    python tests/sanitizers.py debug                # -X dev and PYTHONMALLOC=debug, with the ordinary build

Everything is built in a scratch folder; the checkout is only read. What the compiler lacks is skipped with a sentence. Exit code 1
says that something was found.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZ_OPERATIONS = 200_000
"""Of the fuzzer beside the tests: some seconds under AddressSanitizer."""

RUNTIMES = {
    "address": ("address,undefined", ("libasan.so", "libubsan.so")),
    "undefined": ("undefined", ("libubsan.so",)),
    "thread": ("thread", ("libtsan.so",)),
}
"""What the compiler is asked for, and the libraries that have to be in the process before Python."""

OPTIONS = {
    # The interpreter keeps what it allocated for its own life; leaks of descriptors and mappings are the tests' own business.
    # Few frames of every allocation: the interpreter makes many.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:malloc_context_size=4:quarantine_size_mb=32",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:report_signal_unsafe=0",
}

NOT_UNDER = {
    "address": "not address_sanitizer and not failing_allocation",
    "undefined": "not address_sanitizer",
    # Unsynchronized queues are read while they are written, by design: what is torn is thrown away. Fuzzing and flipping write to
    # the words from outside. A forked child of a process with threads is refused by the sanitizer.
    "thread": "not hostile and not fork and not unsynchronized and not address_sanitizer",
}
"""Tests that build or load other native code, or do on purpose what a sanitizer refuses."""


def library(compiler: str, name: str) -> str | None:
    """The path of one of the compiler's runtime libraries; None where it has none."""
    asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    found = asked.stdout.strip()
    return os.path.realpath(found) if asked.returncode == 0 and os.path.isabs(found) else None


def build(folder: Path, kinds: str) -> str | None:
    """Builds the package with sanitizers into a folder; the compiler's complaint where it cannot."""
    made = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-temp",
            folder / "build",
            "--build-lib",
            folder,
        ],
        cwd=ROOT,
        env={**os.environ, "FMQ_SANITIZE": kinds},
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        return made.stderr.strip().splitlines()[-1] if made.stderr.strip() else "no reason given"
    return None


def lay_out(folder: Path, *, with_native: bool) -> None:
    """The package and its tests, as in the checkout."""
    native = () if with_native else ("*.so",)
    # Without the tests of the build and of the benchmarks, which need the rest of the checkout.
    ignored = shutil.ignore_patterns("__pycache__", "test_build.py", "test_benchmark_rows.py", *native)
    shutil.copytree(ROOT / "fmq", folder / "fmq", ignore=ignored, dirs_exist_ok=True)
    for name in ("fmq", "support"):
        shutil.copytree(ROOT / "tests" / name, folder / "tests" / name, ignore=ignored)
    shutil.copy(ROOT / "tests/conftest.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)


def without_random_addresses() -> list[str]:
    """ThreadSanitizer of older compilers does not find its way around in a randomised address space."""
    return ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []


def run(
    folder: Path, arguments: Sequence[str | Path], *, before: Sequence[str] = (), **environment: str
) -> bool:
    print("+", *arguments, flush=True)
    command = [*before, sys.executable, "-P", *map(str, arguments)]
    given = {**os.environ, **OPTIONS, "PYTHONPATH": str(folder), **environment}
    return subprocess.run(command, cwd=folder, env=given).returncode == 0


def check(kind: str, options: argparse.Namespace) -> bool:
    """Whether nothing was found, or the sanitizer is not there."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    kinds, names = RUNTIMES[kind]
    if compiler is None:
        print(f"{kind}: skipped: there is no {os.environ.get('CC', 'gcc')}")
        return True
    found = [library(compiler, name) for name in names]
    if None in found:
        print(f"{kind}: skipped: {compiler} has no {names[found.index(None)]}")
        return True
    with tempfile.TemporaryDirectory(prefix=f"fmq-{kind}-") as name:
        folder = Path(name)
        complaint = build(folder, kinds)
        if complaint is not None:
            print(f"{kind}: the build failed: {complaint}")
            return False
        lay_out(folder, with_native=False)
        before = without_random_addresses() if kind == "thread" else []
        preload = {"LD_PRELOAD": " ".join(path for path in found if path), "PYTHONMALLOC": "malloc"}
        if not run(folder, ["-c", "import fmq"], before=before, **preload):
            print(f"{kind}: skipped: this Python does not start under it")
            return True
        fine = True
        if options.fuzz is None:
            tests = [
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/fmq",
                "-k",
                selected(NOT_UNDER[kind], options),
            ]
            fine = run(folder, [*tests, *(["--long"] if options.long else [])], before=before, **preload)
        if kind != "thread":
            operations = FUZZ_OPERATIONS if options.fuzz is None else options.fuzz
            fuzzer = ["tests/fmq/faults/fuzzer.py", str(options.seed), str(operations)]
            fine = run(folder, fuzzer, before=before, **preload) and fine
        return fine


def selected(expression: str, options: argparse.Namespace) -> str:
    return " and ".join(filter(None, (expression, options.select and f"({options.select})")))


def debug(options: argparse.Namespace) -> bool:
    """The tests with the checks that Python itself has: of its allocator, of what is left open, of threads and loops."""
    with tempfile.TemporaryDirectory(prefix="fmq-debug-") as name:
        folder = Path(name)
        lay_out(folder, with_native=True)
        tests = ["-X", "dev", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fmq"]
        tests += ["-k", options.select]
        return run(folder, [*tests, *(["--long"] if options.long else [])], PYTHONMALLOC="debug")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*RUNTIMES, "debug", []], help="default: all")
    parser.add_argument("--long", action="store_true", help="also the long forms of the tests")
    parser.add_argument(
        "-k", dest="select", default="", metavar="EXPRESSION", help="only tests that it selects"
    )
    parser.add_argument("--fuzz", type=int, metavar="OPERATIONS", help="only the fuzzer, for so many calls")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the fuzzer")
    options = parser.parse_args()
    kinds = options.kinds or (["address"] if options.fuzz is not None else [*RUNTIMES, "debug"])
    results = {kind: debug(options) if kind == "debug" else check(kind, options) for kind in kinds}
    for kind, fine in results.items():
        print(f"{kind}: {'nothing was found' if fine else 'FAILED'}")
    raise SystemExit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
