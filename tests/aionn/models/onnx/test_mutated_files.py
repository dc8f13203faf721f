"""Mutated files are imported or rejected, without a crash, without a hang and within bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ORDINARY = 120
LONG = 20_000
WATCHDOG_S = 60.0


def imported(repository: Path, folder: Path, seed: int, count: int, seconds: float) -> dict[str, Any]:
    """The figures of a process that imports this number of mutated files; its output names the file that ended it."""
    with open(folder / "out", "w+") as out:
        command = [sys.executable, "-m", "tests.aionn.models.onnx.mutating", str(seed), str(count)]
        done = subprocess.run(
            command, cwd=repository, stdout=out, stderr=subprocess.PIPE, text=True, timeout=seconds
        )
        out.seek(0)
        last, *figures = out.read().splitlines()
    assert done.returncode == 0, (
        f"file {last.strip()} ended the process with {done.returncode}: {done.stderr[-2000:]}"
    )
    found: dict[str, Any] = json.loads(figures[0])
    return found


@pytest.mark.thorough
def test_mutated_files_are_imported_or_rejected(repository: Path, tmp_path: Path) -> None:
    figures = imported(repository, tmp_path, 0, ORDINARY, WATCHDOG_S)
    assert 0 < figures["read"] < ORDINARY


@pytest.mark.long
def test_twenty_thousand_mutated_files_are_imported_or_rejected(repository: Path, tmp_path: Path) -> None:
    figures = imported(repository, tmp_path, 1_000_000, LONG, 60 * WATCHDOG_S)
    print(figures)
    assert 0 < figures["read"] < LONG
