"""The waits of a client that behaves well for its answers, beside a hostile one, at a device that both share.

Measured: the median and the 99th percentile of executions, half of them in a burst, of a client of ``aionn serve reference``
with its defaults, beside each attack of tests/aionn/service/hostile, hostile_attacks.h and hostile_objects.h, against the same
client alone in the same run. Server, client and hostile peer are processes of their own; the peer has the scheduler's lowest
priority (nice 19).

The control is the attack ``spin``: the same peer, busy and without a word to the server. It shows the part of a ratio that
the scheduler causes, much of it on two cores: an attacker, a server and a client are three. For attacks that write large files, it
is ``own_files``: the same peer writes such files as often, and sends nothing either. The rows are those of measuring.py.

How: blocks alone, beside the attack and beside the control take turns (rows.py), each of so many executions, with a pause that
lets what an attack left behind go. The figure of a block is its percentile. A wrong answer or an error ends the benchmark with
status 1.

With ``--driver`` the roles change: an application waits for a good device beside a hostile driver (driver.py).

`python -m benchmarks.hostile [--driver] [--json] [--quick] [ATTACK ...]`
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hostile import measuring
from benchmarks.hostile.measuring import CONTROL, NICE, Wrong, chosen_attacks, measure, percentiles_ms, sizes
from benchmarks.rows import Options, Report

TESTS = Path(__file__).parents[2] / "tests" / "aionn" / "service" / "hostile"
BEGIN_S = 0.1
"""Duration of an attack before the block begins: it opens its connections."""

PAUSE_S = 0.2
OF_FILES = {"cache_forged_heads", "cache_changing"}
"""Attacks that write some hundred megabytes of files in a second."""

OWN_FILES = ("own_files", "beside a writer of files")
ATTACK_S_MAX = 120.0
"""A block beside an attack ends it, at the latest this does."""


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
        p50_ms, p99_ms = percentiles_ms(answer["latencies_ns"])
        self.medians_ms.setdefault(name, []).append(p50_ms)
        return p99_ms

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


def run(report: Report, chosen: Options, asked: list[str]) -> None:
    """All attacks, or those that were asked for."""
    sys.path.insert(0, str(TESTS))
    import hostile_stage as stage

    rounds, executions = sizes(chosen)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program, messages = stage.compile_peer(folder), folder / "messages"
        script = str(TESTS / "hostile_messages.py")
        subprocess.run([sys.executable, script, str(messages)], check=True, env=stage.environment())
        listed = subprocess.run([str(program), "list"], capture_output=True, text=True, check=True)
        attacks = chosen_attacks(asked, listed.stdout.split())
        server = stage.Server(folder)
        try:
            with contextlib.closing(stage.WellBehaved(server.path)) as client:
                blocks = Blocks(stage, server, client, (program, messages), executions)
                blocks.alone()
                for attack in attacks:
                    control, beside = OWN_FILES if attack in OF_FILES else (CONTROL, "beside a busy process")
                    measure(report, blocks, attack, rounds, label=attack, beside=beside, control=control)
        finally:
            server.terminate()


def main() -> int:
    """Runs and prints it."""
    if "--driver" in sys.argv:
        from benchmarks.hostile.driver import main as driver_main

        return driver_main()
    return measuring.main(run, __doc__, "the client that behaves well")


if __name__ == "__main__":
    raise SystemExit(main())
