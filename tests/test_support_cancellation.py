"""The child processes that a test finds."""

from __future__ import annotations

import subprocess

from tests.support.cancellation import child_processes


def test_child_process_is_seen_until_it_is_reaped() -> None:
    before = child_processes()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert child_processes() - before == {process.pid}
    assert child_processes() == before
