"""The gRPC server, by claims that a process of its own checks (``grpc_claims.py``)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLAIMS = re.findall(r"(?m)^async def (claim_\w+)", (Path(__file__).parent / "grpc_claims.py").read_text())
RUN_S_MAX = 110
"""Limit of all claims together."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The traceback of each claim that failed, by name; empty for the others."""
    pytest.importorskip("grpc", reason="grpcio is not installed")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.aionn.oip.grpc_claims"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, str] = json.loads(finished.stdout)
    return found


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_about_the_server_holds(outcomes: dict[str, str], claim: str) -> None:
    assert outcomes[claim] == ""
