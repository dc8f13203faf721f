"""``aionn stress``: does a device survive hours of work, many clients, and clients that die?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aionn.benchmarking.stress import StressResult, stress
from aionn.benchmarking.stress_bodies import BODIES
from aionn.cli import interrupts
from aionn.cli.output import console, print_json, print_table
from aionn.drivers import registry
from aionn.errors import InvalidArgument

__all__ = ["stress_command"]


def stress_command(
    *,
    device: list[str] | None = None,
    minutes: float = 5.0,
    test: list[str] | None = None,
    model: Path | None = None,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Stress a device: each test ends as SUCCESS, FAILURE, HANG or CRASH. Exit code 1 says that one was no success.

    Args:
        device: Which device, given once for each; by default all that there are.
        minutes: How long all tests of a device work together.
        test: Which test, given once for each; by default all.
        model: A .tflite file; by default one of the examples' data beside the package.
        seed: Seed of everything that is random.
        json: Print one JSON object.
    """
    tests = tuple(BODIES) if test is None else tuple(test)
    devices = registry.driver_names() if device is None else tuple(device)
    known = (*registry.driver_names(), *registry.ON_REQUEST)
    for name in devices:
        if name not in known:
            raise InvalidArgument(f"--device: expected one of {', '.join(known)}, got {name!r}")
    file = model or Path(__file__).resolve().parents[2] / "examples" / "data" / "shapes_int8.tflite"
    seconds = minutes * 60 / max(1, len(tests))
    report: dict[str, tuple[StressResult, ...]] = {}
    for name in devices:

        def progress(running: str, index: int, name: str = name) -> None:
            if sys.stderr.isatty() and not json:
                print(f"{name}: {running} ({index + 1} of {len(tests)}, {seconds:.0f} s)", file=sys.stderr)

        async def run(name: str = name) -> tuple[StressResult, ...]:
            return await stress(name, file, tests, seconds, seed=seed, progress=progress)

        report[name] = interrupts.run(run)
    if json:
        print_json(report)
    else:
        for name, results in report.items():
            rows = [(r.test, r.result, r.count, r.seconds) for r in results]
            print_table(f"stress on {name}", ("test", "result", "done", "s"), rows)
            for r in results:
                if r.message:
                    console().print(f"{r.test}: {r.message}", markup=False)
    return 0 if all(r.result == "SUCCESS" for results in report.values() for r in results) else 1
