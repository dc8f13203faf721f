"""How long a client that behaves well waits for its answers beside a hostile one, at a device that both share.

Measured: the median and the 99th percentile of executions, half of them in a burst, of a client of ``aionn serve reference``
with its defaults, beside each attack of tests/aionn/service/hostile_attacks.h, against the same client alone in the same run.
Server, client and hostile peer are processes of their own; the peer has the scheduler's lowest priority (nice 19).

The control is the attack ``spin``: the same peer, busy and without a word to the server. It says what part of a ratio is the
scheduler's, which on two cores is much of it: an attacker, a server and a client are three. An attack has a row for its median,
and two for its 99th percentile: against the client alone, where the goal is at most twice that, and against the control.

How: blocks alone, beside the attack and beside the control take turns (rows.py), each of so many executions, with a pause that
lets what an attack left behind go. The figure of a block is its percentile. A wrong answer or an error ends the benchmark with
status 1.

With ``--driver`` the roles change: an application waits for a good device beside a hostile driver (hostile_driver.py).

`python -m benchmarks.hostile [--driver] [--json] [--quick] [ATTACK ...]`
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import Options, Report, alternate, at_most, compare, options

STAGE = Path(__file__).parents[1] / "tests" / "aionn" / "service" / "hostile_stage.py"
CONTROL = "spin"
NICE = 19
ROUNDS, EXECUTIONS = 10, 200
"""2,000 executions a side."""

ROUNDS_QUICK, EXECUTIONS_QUICK = 2, 40
BEGIN_S = 0.1
"""How long an attack goes on before the block begins: it opens its connections."""

PAUSE_S = 0.2
ATTACK_S_MAX = 120.0
"""A block beside an attack ends it, at the latest this does."""

GOAL = at_most(2.0)


def _stage() -> Any:
    specification = importlib.util.spec_from_file_location("hostile_stage", STAGE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["hostile_stage"] = module
    specification.loader.exec_module(module)
    return module


class Wrong(Exception):
    """The client that behaves well got a wrong answer or an error."""


class Blocks:
    """Blocks of executions alone and beside attacks.

    Args:
        stage: The module hostile_stage.
        server: The server.
        client: The client that behaves well.
        peer: The hostile peer's program, and its messages.
        executions: Of a block.
    """

    def __init__(
        self, stage: Any, server: Any, client: Any, peer: tuple[Path, Path], executions: int
    ) -> None:
        self._stage = stage
        self._server = server
        self._client = client
        self._peer = peer
        self._executions = executions
        self.medians_ms: dict[str, list[float]] = {}

    def _block(self, name: str) -> float:
        self._client.ask(str(self._executions))
        answer = self._client.answer()
        if answer["wrong"]:
            raise Wrong(f"{name}: {answer['wrong']}")
        latencies = sorted(answer["latencies_ns"])
        self.medians_ms.setdefault(name, []).append(latencies[len(latencies) // 2] / 1e6)
        return float(latencies[int(0.99 * (len(latencies) - 1))]) / 1e6

    def alone(self) -> float:
        """The 99th percentile without an attack, in ms."""
        time.sleep(PAUSE_S)
        return self._block("alone")

    def beside(self, attack: str) -> float:
        """The same beside an attack, in ms."""
        with self._stage.attacking(
            *self._peer, self._server, attack, ATTACK_S_MAX, len(self.medians_ms), NICE
        ) as process:
            time.sleep(BEGIN_S)
            try:
                return self._block(attack)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                process.stderr.close()


def measure(report: Report, blocks: Blocks, attack: str, rounds: int) -> None:
    """The rows of an attack."""
    blocks.medians_ms.clear()
    contenders: dict[str, Callable[[], float]] = {
        "alone": blocks.alone,
        attack: lambda: blocks.beside(attack),
        CONTROL: lambda: blocks.beside(CONTROL),
    }
    p99_ms = alternate(contenders, rounds)
    p50_ms = blocks.medians_ms
    report.add(
        compare(f"{attack}, p50", "ms", p50_ms[attack], "alone", p50_ms["alone"]),
        compare(f"{attack}, p99", "ms", p99_ms[attack], "alone", p99_ms["alone"], GOAL),
        compare(f"{attack}, p99", "ms", p99_ms[attack], "beside a busy process", p99_ms[CONTROL]),
    )


def run(report: Report, chosen: Options, asked: list[str]) -> None:
    """All attacks, or those that were asked for."""
    stage = _stage()
    rounds, executions = (ROUNDS_QUICK, EXECUTIONS_QUICK) if chosen.quick else (ROUNDS, EXECUTIONS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program, messages = stage.compile_peer(folder), folder / "messages"
        script = str(STAGE.with_name("hostile_messages.py"))
        subprocess.run([sys.executable, script, str(messages)], check=True, env=stage.environment())
        listed = subprocess.run([str(program), "list"], capture_output=True, text=True, check=True)
        attacks = [name for name in listed.stdout.split() if name != CONTROL]
        unknown = [name for name in asked if name not in attacks]
        if unknown:
            raise SystemExit(f"expected attacks of {' '.join(attacks)}, got {' '.join(unknown)}")
        server = stage.Server(folder)
        try:
            with contextlib.closing(stage.WellBehaved(server.path)) as client:
                blocks = Blocks(stage, server, client, (program, messages), executions)
                blocks.alone()
                for attack in asked or attacks:
                    measure(report, blocks, attack, rounds)
        finally:
            server.terminate()


def main() -> int:
    """Runs and prints it."""
    if "--driver" in sys.argv:
        sys.argv.remove("--driver")
        from benchmarks.hostile_driver import main as driver_main

        return driver_main()
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    chosen = options(__doc__)
    try:
        run(Report(chosen), chosen, asked)
    except Wrong as e:
        print(f"the client that behaves well: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
