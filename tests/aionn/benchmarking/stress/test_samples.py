"""Samples of a process, taken while what they count comes and goes."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from aionn.benchmarking.stress import samples
from aionn.benchmarking.stress.samples import (
    READINGS_MAX,
    child_count,
    child_pids,
)

OWN = os.getpid()


def test_child_is_counted_until_it_is_reaped() -> None:
    before = child_pids(OWN)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert child_pids(OWN) - before == {process.pid}
        assert child_count(OWN) == len(before) + 1
    assert child_pids(OWN) == before


def test_threads_that_end_while_they_are_read_do_not_fail_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def listed_too_late(path: str) -> list[str]:
        thread = threading.Thread(target=threading.Event().wait, args=(0.0,))
        thread.start()
        names = [*listed(path), str(thread.native_id)]
        thread.join()
        return names

    before = child_count(OWN)
    monkeypatch.setattr(samples.os, "listdir", listed_too_late)
    assert child_count(OWN) == before


def test_count_of_a_process_that_has_ended_is_an_error() -> None:
    with subprocess.Popen(["sh", "-c", ":"]) as process:
        process.wait()
    with pytest.raises(FileNotFoundError):
        child_count(process.pid)


def test_child_that_one_reading_of_the_kernels_list_misses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([{7, 8}, {7}, {7, 9}, {7, 9}])
    monkeypatch.setattr(samples, "_listed_children", lambda pid: next(readings))
    assert child_pids(OWN) == {7, 9}


def test_children_that_change_all_the_time_are_read_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(samples, "_listed_children", lambda pid: {next(count)})
    assert child_pids(OWN) == {READINGS_MAX - 1}
