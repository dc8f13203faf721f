"""Every program in the runtime's pages runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PROGRAMS = [
    pytest.param(program, id=f"{page}-{number}")
    for page in ("compilation", "memory", "watching", "threads")
    for number, program in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    )
]


def test_every_page_has_a_program() -> None:
    assert len(PROGRAMS) >= 7


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, repository: Path, example_data: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=example_data,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
