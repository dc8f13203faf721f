"""What holds for all tests: a summary names each reason to skip once; what a test leaves is found; one that hangs ends the run."""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aionn.observability.log_tags import choose_tags
from tests.conftest import (
    REMEDIES,
    Belongings,
    BriefWorker,
    Watchdog,
    grouped_skips,
    pytest_collection_modifyitems,
)
from tests.support.sampling import chosen

TESTS = Path(__file__).parent


def test_reasons_with_one_remedy_are_one_line_and_the_most_frequent_comes_first() -> None:
    reasons = [
        "Skipped: no such file",
        "Skipped: PyAV is not installed",
        "Skipped: could not import 'ai_edge_litert': No module named 'ai_edge_litert'",
        "Skipped: PyAV, the extra `media`, is not installed",
        "Skipped: LiteRT is not installed",
        "Skipped: PyAV is not installed",
    ]
    assert grouped_skips(reasons) == [
        "3 x PyAV is not installed: pip install -e '.[media]'",
        "2 x LiteRT is not installed: pip install -e '.[litert]'",
        "1 x no such file",
    ]


def test_each_remedy_belongs_to_a_reason_that_a_test_gives() -> None:
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    reasons = [r for s in sources for r in re.findall(r'(?:skip\(|importorskip\(|reason=)\s*f?"([^"]+)"', s)]
    assert [p for p in REMEDIES if not any(re.search(p, reason) for reason in reasons)] == []


# --- What is run and reported ------------------------------------------------------------------------------------------------


class Marked:
    """What is asked of a test here."""

    def __init__(self, *marks: str) -> None:
        self.get_closest_marker = {mark: mark for mark in marks}.get


@pytest.mark.parametrize(
    ("options", "left", "counts"),
    [
        ([], 1, {"long": 2, "thorough": 1}),
        (["--thorough"], 2, {"long": 2}),
        (["--long"], 4, None),
        (["--long", "--thorough"], 4, None),
    ],
)
def test_long_and_thorough_tests_are_left_out_and_counted(
    options: list[str], left: int, counts: dict[str, int] | None
) -> None:
    items, told = [Marked("long"), Marked("slow"), Marked("long"), Marked("thorough")], []
    config: Any = SimpleNamespace(
        getoption=lambda name: name in options,
        hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items)),
        stash=pytest.Stash(),
        workeroutput={},
    )
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert len(items) == left and len(told) == 4 - left
    assert config.workeroutput == ({} if counts is None else {"left_out": counts})


def test_sample_is_one_case_in_a_step() -> None:
    assert chosen([{"seed": seed} for seed in range(10)], 4) == [0, 4, 8]
    assert chosen([], 4) == []


def test_sample_has_each_value_of_each_parameter() -> None:
    cases = [{"x": x, "y": y, "z": z} for x in range(3) for y in range(4) for z in range(2)]
    positions = chosen(cases, 100)
    assert len(positions) < 8
    for name in ("x", "y", "z"):
        assert {cases[position][name] for position in positions} == {case[name] for case in cases}


def test_sample_does_not_prefer_the_first_values() -> None:
    cases = [{"file": file, "device": device} for file in range(20) for device in range(2)]
    devices = [cases[position]["device"] for position in chosen(cases, 4)]
    assert devices.count(0) == devices.count(1) == 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(7))
def test_ordinary_run_has_the_sampled_cases_alone(case: int, pytestconfig: pytest.Config) -> None:
    is_whole = pytestconfig.getoption("--long") or any("::" in word for word in pytestconfig.args)
    assert is_whole or case in (0, 3, 6)


@pytest.mark.parametrize(
    ("failing", "sent"),
    [
        (None, ["call"]),
        ("setup", ["setup", "call"]),
        ("call", ["call"]),
        ("teardown", ["call", "teardown"]),
    ],
)
def test_worker_reports_each_call_and_whatever_did_not_pass(
    monkeypatch: pytest.MonkeyPatch, failing: str | None, sent: list[str]
) -> None:
    phases = ("setup", "call", "teardown")
    reports = [SimpleNamespace(when=when, passed=when != failing, sections=[]) for when in phases]
    monkeypatch.setattr("tests.conftest.runtestprotocol", lambda item, log, nextitem: reports)
    reported: list[str] = []
    hook = SimpleNamespace(pytest_runtest_logreport=lambda report: reported.append(report.when))
    item: Any = SimpleNamespace(ihook=hook)
    assert BriefWorker().pytest_runtest_protocol(item, None)
    assert reported == sent


# --- What is left ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_page() -> Iterator[int]:
    """A descriptor of shared memory of one page."""
    fd = os.memfd_create("left")
    os.ftruncate(fd, mmap.PAGESIZE)
    yield fd
    os.close(fd)


def test_what_has_come_is_more_than_before(shared_page: int) -> None:
    before = Belongings()
    fd = os.dup(shared_page)
    with mmap.mmap(shared_page, mmap.PAGESIZE):
        left = Belongings(before).more_than(before)
    os.close(fd)
    # A mapping in Python holds a descriptor of its own.
    assert sorted(set(left)) == [
        "descriptor of /memfd:left (deleted)",
        "mapping of /memfd:left (deleted)",
    ]
    assert Belongings(before).more_than(before) == []


def test_log_tag_of_an_earlier_test_is_more_than_before(own_log_tags: None) -> None:
    before = Belongings()
    choose_tags("model")
    assert Belongings().more_than(before) == [f"logger aionn.model at {logging.DEBUG}"]


def test_mapping_in_place_of_another_is_found_by_a_thorough_look(shared_page: int) -> None:
    other = mmap.mmap(-1, mmap.PAGESIZE)
    before = Belongings()
    other.close()
    with mmap.mmap(shared_page, mmap.PAGESIZE):
        left = Belongings().more_than(before)
    assert "mapping of /memfd:left (deleted)" in left


# --- What hangs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How often the timer was set, and for how many seconds."""
    calls: list[float] = []

    def set_timer(seconds: float, **more: Any) -> None:
        calls.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", set_timer)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: None)
    return calls


def test_watchdog_ends_each_test_that_hangs_and_is_set_rarely(settings: list[float]) -> None:
    watchdog, end_s = Watchdog(os.dup(2)), 0.0
    for now_s in range(1000):
        before = len(settings)
        watchdog.watch(100, now_s)
        if len(settings) > before:
            end_s = now_s + settings[-1]
        assert 100 <= end_s - now_s <= 150
    assert len(settings) == 20
    watchdog.end()


def test_watchdog_is_set_for_a_test_with_another_limit(settings: list[float]) -> None:
    watchdog = Watchdog(os.dup(2))
    for seconds in (100, 1000, 100):
        watchdog.watch(seconds, 0)
    assert settings == [150, 1500, 150]
    watchdog.end()


@pytest.mark.parametrize("use", ["dump_traceback_later", "cancel_dump_traceback_later"])
def test_watchdog_is_set_after_another_use_of_the_timer(settings: list[float], use: str) -> None:
    watchdog = Watchdog(os.dup(2))
    watchdog.watch(100, 0)
    getattr(faulthandler, use)(*([7] if use == "dump_traceback_later" else []))
    watchdog.watch(100, 0)
    assert [seconds for seconds in settings if seconds != 7] == [150, 150]
    watchdog.end()
