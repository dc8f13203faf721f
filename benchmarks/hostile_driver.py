"""How long an application waits for a good device beside a hostile driver of the same runtime.

Measured: the median and the 99th percentile of executions on the reference device in a process of its own, half of them in a burst,
beside each attack of tests/aionn/service/hostile_driver_attacks.py and hostile_driver_lies.py, against the same application without
the hostile device in the same run. The application uses the hostile device all the while, in every way there is, as far as that
answers. The hostile driver has the scheduler's lowest priority (nice 19).

The control is the attack ``spin``: a driver that answers rightly and keeps a core busy. It says what part of a ratio is the
scheduler's, and what part is the application's own work for a second device. Rows and goals are those of hostile.py.

How: blocks alone, beside the attack and beside the control take turns (rows.py), each a runtime of its own with so many executions.
A wrong answer or an error of the good device ends the benchmark with status 1.

`python -m benchmarks.hostile --driver [--json] [--quick] [ATTACK ...]`
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

import aionn
from benchmarks.rows import Options, Report, alternate, at_most, compare, options

STAGE = Path(__file__).parents[1] / "tests" / "aionn" / "service"
CONTROL = "spin"
NICE = 19
ROUNDS, EXECUTIONS = 10, 200
ROUNDS_QUICK, EXECUTIONS_QUICK = 2, 40
CALL_S = 0.25
"""How long a call on the hostile device may take."""

WARM = 20
"""Executions before those that count."""

GOAL = at_most(2.0)


class Wrong(Exception):
    """The good device gave a wrong answer or an error."""


class Blocks:
    """Blocks of executions alone and beside attacks.

    Args:
        application: The module hostile_application.
        executions: Of a block.
    """

    def __init__(self, application: Any, executions: int) -> None:
        self._application = application
        self._executions = executions
        self.medians_ms: dict[str, list[float]] = {}

    def block(self, attack: str | None) -> float:
        """The 99th percentile of a block, in ms; without an attack for None."""
        name = attack or "alone"
        latencies_ns = sorted(asyncio.run(self._run(name, attack)))
        self.medians_ms.setdefault(name, []).append(latencies_ns[len(latencies_ns) // 2] / 1e6)
        return float(latencies_ns[int(0.99 * (len(latencies_ns) - 1))]) / 1e6

    async def _run(self, name: str, attack: str | None) -> list[int]:
        drivers = {"good": "reference"}
        if attack is not None:
            drivers["hostile"] = f"hostile_driver:{attack}"
        async with aionn.open(drivers=drivers, spare_processes=False) as runtime:
            async with self._application.good_device(runtime) as good, anyio.create_task_group() as tasks:
                tasks.start_soon(self._use_hostile, runtime)
                for _ in range(WARM):
                    await good.one()
                good.latencies_ns.clear()
                for _ in range(self._executions):
                    await good.one()
                    await asyncio.sleep(0.001)
                tasks.cancel_scope.cancel()
            if good.wrong:
                raise Wrong(f"{name}: {good.wrong[:3]}")
            return list(good.latencies_ns)

    async def _use_hostile(self, runtime: Any) -> None:
        for device in runtime.devices:
            while device.name == "hostile":
                outcomes = self._application.Outcomes(device.hal, CALL_S)
                await self._application.use_runtime(runtime, outcomes)
                await self._application.use_contract(device.hal, outcomes)
                if outcomes.undocumented:
                    raise Wrong(str(outcomes.undocumented))


def measure(report: Report, blocks: Blocks, attack: str, rounds: int) -> None:
    """The rows of an attack."""
    blocks.medians_ms.clear()
    contenders: dict[str, Callable[[], float]] = {
        "alone": lambda: blocks.block(None),
        attack: lambda: blocks.block(attack),
        CONTROL: lambda: blocks.block(CONTROL),
    }
    p99_ms = alternate(contenders, rounds)
    p50_ms = blocks.medians_ms
    report.add(
        compare(f"driver {attack}, p50", "ms", p50_ms[attack], "alone", p50_ms["alone"]),
        compare(f"driver {attack}, p99", "ms", p99_ms[attack], "alone", p99_ms["alone"], GOAL),
        compare(f"driver {attack}, p99", "ms", p99_ms[attack], "beside a busy driver", p99_ms[CONTROL]),
    )


def run(report: Report, chosen: Options, asked: list[str]) -> None:
    """All attacks, or those that were asked for."""
    sys.path.insert(0, str(STAGE))  # Driver processes get it, too.
    os.environ["HOSTILE_NICE"] = str(NICE)
    logging.getLogger("aionn").addHandler(logging.NullHandler())
    logging.getLogger("aionn").propagate = False
    import hostile_application
    import hostile_driver
    import hostile_driver_lies  # noqa: F401

    attacks = [name for name in hostile_driver.ATTACKS if name != CONTROL]
    unknown = [name for name in asked if name not in attacks]
    if unknown:
        raise SystemExit(f"expected attacks of {' '.join(attacks)}, got {' '.join(unknown)}")
    rounds, executions = (ROUNDS_QUICK, EXECUTIONS_QUICK) if chosen.quick else (ROUNDS, EXECUTIONS)
    blocks = Blocks(hostile_application, executions)
    blocks.block(None)
    for attack in asked or attacks:
        measure(report, blocks, attack, rounds)


def main() -> int:
    """Runs and prints it."""
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    chosen = options(__doc__)
    try:
        run(Report(chosen), chosen, asked)
    except Wrong as e:
        print(f"the good device: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
