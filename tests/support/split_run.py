"""The conformance data on the reference device split over three, seed after seed: whatever the cut, the answers equal those of the
whole model.

Owns the run of one seed and its figures, and the long form: ``python -m tests.support.split_run DATA --first 17`` continues where
another run has ended. ``split`` splits the device.

Invariants:
1. A seed gives the same cuts and the same figures on every machine.
2. Every test is judged as the conformance suite judges it; the first that fails ends the run and is named.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio

import aionn
from aionn.conformance import cts
from aionn.conformance.cts import CtsTest
from aionn.errors import Error, InvalidArgument
from aionn.hal import Device, Memory
from aionn.runtime.settings import PreferenceName
from tests.support.split import split_devices

__all__ = ["Tally", "main", "run_one", "run_split"]

_logger = logging.getLogger("tests.support.split_run")

LOOP_TIMEOUT_S = 0.05
"""Of tests whose loop has no end; all other tests have the default."""

PROGRESS_EVERY = 500
"""Tests between two words of progress."""


class Tally:
    """The counts of a run.

    Attributes:
        tests: How many tests ran.
        cut: How many of them over several devices.
        interpreted: How many with an IF or WHILE that the runtime itself ran.
        fallen_back: How many with a step on the reference device that was another's.
        refused: How many were refused, as the data expect.
    """

    def __init__(self) -> None:
        self.tests = self.cut = self.interpreted = self.fallen_back = self.refused = 0

    def __str__(self) -> str:
        return (
            f"{self.tests} tests, {self.cut} cut, {self.interpreted} interpreted, {self.fallen_back} fell back, "
            f"{self.refused} refused as expected"
        )


async def run_one(
    runtime: aionn.Runtime,
    test: CtsTest,
    tally: Tally,
    *,
    preference: PreferenceName = "fast_single_answer",
    allow_fallback: bool = True,
) -> None:
    """Runs one test on all of a runtime's devices.

    Raises:
        AssertionError: It fails, or does not though it should.
    """
    model = cts.build_model(test)
    tally.tests += 1
    try:
        try:
            net = await runtime.compile(model, preference=preference, allow_fallback=allow_fallback)
        except InvalidArgument:
            assert test.expect_failure, test.name
            tally.refused += 1
            return
        async with net:
            tally.cut += len(net.devices) > 1
            tally.interpreted += any(p.device == "interpreter" for p in net.placement)
            is_endless = "while_infinite_loop" in test.name
            try:
                result = await net.execute(
                    cts.main_inputs(test), loop_timeout=LOOP_TIMEOUT_S if is_endless else None
                )
            except Error as e:
                # An input that is left out, or empty, is for some tests what makes the model fail.
                assert test.expect_failure, f"{test.name} on {net.devices}: {e}"
                tally.refused += 1
                return
            assert not test.expect_failure, test.name
            tally.fallen_back += bool(result.fallback)
            mismatch = cts.compare(test, result.outputs)
            assert mismatch is None, f"{test.name} on {net.devices}: {mismatch}"
    finally:
        for pool in model.pools:
            assert isinstance(pool, Memory), "conformance models are in ordinary memory"
            pool.close()


async def run_split(
    tests: Iterable[CtsTest],
    seed: int,
    *,
    devices: Sequence[Device] | None = None,
    preference: PreferenceName | None = None,
    progress: Callable[[str], None] = lambda told: None,
) -> Tally:
    """Runs tests on the reference device split by a seed, with the reference device behind it.

    Args:
        tests: What to run.
        seed: Of the split.
        devices: Other devices than those of the seed, which the runtime closes; None for those.
        preference: What devices are chosen for; None takes speed for even seeds, low power for odd ones, since no device of the
            three is best at both.
        progress: Called with a line of text now and then.

    Raises:
        AssertionError: A test fails.
    """
    tally = Tally()
    if preference is None:
        preference = "low_power" if seed % 2 else "fast_single_answer"
    async with aionn.open(
        devices=split_devices(seed) if devices is None else devices,
        drivers=["reference"],
        isolation="in_process",
    ) as runtime:
        for test in tests:
            await run_one(runtime, test, tally, preference=preference)
            if tally.tests % PROGRESS_EVERY == 0:
                progress(f"seed {seed}: {tally}")
    return tally


def main(arguments: Sequence[str] | None = None) -> None:
    """The long form: prints a line per seed, and more with ``--verbose``."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.split_run", description=main.__doc__)
    parser.add_argument("data", type=Path, help="folder of the conformance data")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with (default: 0)")
    parser.add_argument("--count", type=int, default=50, help="how many seeds (default: 50)")
    parser.add_argument("--contains", default="", help="only tests whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="report progress more often")
    chosen = parser.parse_args(arguments)

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    _logger.setLevel(logging.DEBUG if chosen.verbose else logging.INFO)
    tests = list(cts.iterate_tests(chosen.data, contains=chosen.contains))
    for seed in range(chosen.first, chosen.first + chosen.count):
        started_s = time.monotonic()
        tally = anyio.run(functools.partial(run_split, tests, seed, progress=_logger.debug))
        _logger.info("seed %d: %s, in %.0f s", seed, tally, time.monotonic() - started_s)


if __name__ == "__main__":
    main()
