"""Whichever allocation fails, nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="the interpreter itself crashes where it cannot allocate a function object",
)
def test_any_failing_allocation_leaves_no_descriptor_and_no_mapping() -> None:
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("this Python comes without the hook that lets allocations fail")
    done = subprocess.run(
        [sys.executable, str(HERE / "failing_allocations.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 50
