"""A pytest plugin: which test executes which lines, and how long each takes.

Loaded with ``-p contexts``; AIONN_MUTATION_DATA names the file that coverage writes, and beside it the times.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import coverage
import pytest

_data = os.environ["AIONN_MUTATION_DATA"]
_coverage = coverage.Coverage(
    data_file=_data, include=["aionn/*", "fences/*", "fmq/*"], config_file=False, timid=False
)
_coverage.start()
_seconds: dict[str, float] = {}
_failed: list[str] = []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _coverage.switch_context(item.nodeid)
    started_s = time.monotonic()
    try:
        return (yield)
    finally:
        _seconds.setdefault(item.nodeid, time.monotonic() - started_s)
        _coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        # What fails or skips without a mutant says nothing about one.
        _seconds[report.nodeid] = float("inf")
        if report.failed:
            _failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    _coverage.stop()
    _coverage.save()
    with open(f"{_data}.json", "w", encoding="utf-8") as file:
        json.dump({"seconds": _seconds, "failed": _failed}, file)
