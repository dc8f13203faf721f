"""Claims that a process of its own checks, since gRPC's threads stay in a process: a module of coroutines and functions whose names
begin with ``claim_``, and which prints the traceback of each one that failed as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def claims_of(module: str) -> list[str]:
    """The names of the claims of a module beside this one."""
    text = (Path(__file__).parent / f"{module}.py").read_text()
    return re.findall(r"(?m)^(?:async )?def (claim_\w+)", text)


def outcomes_of(module: str, *arguments: str, limit_s: float) -> dict[str, str]:
    """The traceback of each claim that failed, by name; empty for the others.

    Args:
        module: The module, beside this one.
        arguments: Of its process.
        limit_s: Limit of all claims together.
    """
    finished = subprocess.run(
        [sys.executable, "-m", f"{__package__}.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, str] = json.loads(finished.stdout)
    return found
