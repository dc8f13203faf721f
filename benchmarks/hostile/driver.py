"""The waits of an application for a good device, beside a hostile driver of the same runtime.

Measured: the median and the 99th percentile of executions on the reference device in a process of its own, half of them in a burst,
beside each attack of tests/aionn/service/hostile/hostile_driver_attacks.py and hostile_driver_lies.py, against the same application
without the hostile device in the same run. The application uses the hostile device all the while, in every way there is, as far as
that answers. The hostile driver has the scheduler's lowest priority (nice 19).

The control is the attack ``spin``: a driver that answers rightly and keeps a core busy. It shows the part of a ratio that the
scheduler causes, and the part of the application's own work for a second device. Rows and goals are those of measuring.py.

How: blocks alone, beside the attack and beside the control take turns (rows.py), each a runtime of its own with so many executions.
A wrong answer or an error of the good device ends the benchmark with status 1.

`python -m benchmarks.hostile --driver [--json] [--quick] [ATTACK ...]`
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import anyio

import aionn
from benchmarks.hostile import measuring
from benchmarks.hostile.measuring import NICE, Wrong, chosen_attacks, measure, percentiles_ms, sizes
from benchmarks.rows import Options, Report

TESTS = Path(__file__).parents[2] / "tests" / "aionn" / "service" / "hostile"
CALL_S = 0.25
"""Time that a call on the hostile device may take."""

WARM = 20
"""Executions before those that count."""


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

    def alone(self) -> float:
        """The 99th percentile without an attack, in ms."""
        return self._block("alone", None)

    def beside(self, attack: str) -> float:
        """The same beside an attack, in ms."""
        return self._block(attack, attack)

    def _block(self, name: str, attack: str | None) -> float:
        p50_ms, p99_ms = percentiles_ms(asyncio.run(self._run(name, attack)))
        self.medians_ms.setdefault(name, []).append(p50_ms)
        return p99_ms

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


def run(report: Report, chosen: Options, asked: list[str]) -> None:
    """All attacks, or those that were asked for."""
    sys.path.insert(0, str(TESTS))  # Driver processes get it, too.
    os.environ["HOSTILE_NICE"] = str(NICE)
    logging.getLogger("aionn").addHandler(logging.NullHandler())
    logging.getLogger("aionn").propagate = False
    import hostile_application
    import hostile_driver
    import hostile_driver_lies  # noqa: F401

    attacks = chosen_attacks(asked, list(hostile_driver.ATTACKS))
    rounds, executions = sizes(chosen)
    blocks = Blocks(hostile_application, executions)
    blocks.alone()
    for attack in attacks:
        measure(report, blocks, attack, rounds, label=f"driver {attack}", beside="beside a busy driver")


def main() -> int:
    """Runs and prints it."""
    return measuring.main(run, __doc__, "the good device")


if __name__ == "__main__":
    raise SystemExit(main())
