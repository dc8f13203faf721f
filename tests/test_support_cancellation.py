"""The child processes that a test finds."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import cancellation
from tests.support.cancellation import READINGS_MAX, child_processes


def test_child_process_is_seen_until_it_is_reaped() -> None:
    before = child_processes()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert child_processes() - before == {process.pid}
    assert child_processes() == before


def test_child_that_one_reading_of_the_kernels_list_misses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([{7, 8}, {7}, {7, 9}, {7, 9}])
    monkeypatch.setattr(cancellation, "_listed_children", lambda: next(readings))
    assert child_processes() == {7, 9}


def test_children_that_change_all_the_time_are_read_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(cancellation, "_listed_children", lambda: {next(count)})
    assert child_processes() == {READINGS_MAX - 1}
