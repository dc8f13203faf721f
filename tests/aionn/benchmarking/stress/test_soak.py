"""A soak: steady on what works; a leak, a wrong answer, a hang and a runtime that leaves something behind are told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from aionn.benchmarking.stress import episodes
from aionn.benchmarking.stress import soak as stress_soak
from aionn.benchmarking.stress.census import Census, growth_since
from aionn.benchmarking.stress.episodes import COUNTS, Actor, Target
from aionn.benchmarking.stress.samples import SAMPLES_MAX, Series
from aionn.benchmarking.stress.slopes import Slope
from aionn.benchmarking.stress.soak import SoakReport, soak
from aionn.benchmarking.stress.watch import Pause, Watch
from aionn.cli.main import main
from aionn.errors import InvalidArgument

SHORT_S = 4.0
LONG_S = 600.0
WAIT_S_MAX = 30.0


def told(report: SoakReport) -> list[str]:
    return [*report.failures, *report.hangs, *report.left_behind]


@pytest.mark.thorough
async def test_short_soak_has_right_answers_and_leaves_nothing() -> None:
    states = []
    report = await soak(["reference"], SHORT_S, seed=1, progress=states.append)
    assert told(report) == []
    assert report.counts["kills"] >= 1
    assert report.counts["right"] > 10
    assert report.counts["wrong"] == 0
    assert report.samples >= 2
    assert set(report.counts) == set(COUNTS)
    assert states and states[-1].failures == 0


@pytest.mark.long
async def test_soak_of_ten_minutes_holds_no_more_at_its_end() -> None:
    report = await soak(["reference"], LONG_S, seed=2)
    assert told(report) == []
    assert [slope for slope in report.slopes if not slope.is_steady] == []
    assert report.kills_per_hour >= 1000


@pytest.mark.thorough
async def test_soak_in_process_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_soak, "EPISODES", {episodes.one_by_one: 1, episodes.cancelled: 1})
    report = await soak(["reference"], 1.0, isolation="in_process")
    assert told(report) == []
    assert report.counts["right"] > 0
    assert report.counts["kills"] == report.counts["stops"] == report.counts["dead"] == 0
    assert not [slope for slope in report.slopes if slope.quantity.startswith("driver")]


class Thing:
    """What is leaked; a class of its own, so that the collector tracks each."""


async def in_process(
    monkeypatch: pytest.MonkeyPatch, episode: Any, seconds: float = 2.0, **more: Any
) -> SoakReport:
    monkeypatch.setattr(stress_soak, "EPISODES", {episode: 1})
    return await soak(["reference"], seconds, isolation="in_process", **more)


async def test_planted_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[Thing] = []

    async def idles(actor: Actor, target: Target) -> None:
        await anyio.sleep(0.01)

    report = await in_process(
        monkeypatch,
        idles,
        3.0,
        growth_s_min=3.0,
        after_episode=lambda: leaked.extend(Thing() for _ in range(100)),
    )
    (objects,) = [slope for slope in report.slopes if slope.quantity == "application: objects"]
    assert not objects.is_steady
    assert objects.low is not None and objects.low > 1000
    assert not report.is_success
    assert any(reason.startswith("these grew: ") and "objects" in reason for reason in report.reasons)
    assert re.fullmatch(rf"\+\d{{4,}} {re.escape(__name__)}\.Thing", report.growth[0])


def test_growth_has_the_largest_first_and_names_modules_that_were_imported() -> None:
    before = Census({"dict": 5, "list": 9, "set": 1}, frozenset({"os"}))
    now = Census({"dict": 7, "list": 8, "tuple": 3, "function": 2}, frozenset({"os", "wave"}))
    assert growth_since(before, now) == ("+3 tuple", "+2 dict", "+2 function", "imported: wave")


def test_census_counts_tracked_objects_by_class() -> None:
    before = Census.taken()
    things = [Thing() for _ in range(50)]
    assert growth_since(before, Census.taken())[0] == f"+{len(things)} {__name__}.Thing"


def soak_report(**changes: Any) -> SoakReport:
    grown = Slope("application: objects", 1.0, 9.0, 800.0, 700.0, 900.0, 200.0)
    report = SoakReport(("reference",), 0, 36.0, dict.fromkeys(COUNTS, 0), 0.0, 9, 0, (), (), (grown,), ())
    return msgspec.structs.replace(report, **changes)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, ("these grew: application: objects",)),
        ({"is_growth_judged": False}, ()),
        (
            {"is_growth_judged": False, "failure_count": 2, "failures": ("a", "b")},
            ("2 wrong answers or unexpected errors",),
        ),
        ({"is_growth_judged": False, "hangs": ("x",)}, ("1 hangs",)),
        ({"is_growth_judged": False, "left_behind": ("1 descriptors",)}, ("left behind: 1 descriptors",)),
    ],
)
def test_run_that_is_all_warm_up_fails_for_everything_but_growth(
    changes: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    report = soak_report(**changes)
    assert report.reasons == reasons
    assert report.is_success == (not reasons)


async def test_wrong_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(actor: Actor, target: Target) -> None:
        await anyio.sleep(0.02)
        actor.compare(np.ones(4, np.float32), np.ones(4, np.float32))

    report = await in_process(monkeypatch, wrong, 0.3)
    assert report.counts["wrong"] == report.failure_count > 0
    assert "WrongAnswer: expected [16. 16. 16. 16.]" in report.failures[0]
    assert not report.is_success


async def test_unexpected_error_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(actor: Actor, target: Target) -> None:
        await anyio.sleep(0.02)
        raise InvalidArgument("on purpose")

    report = await in_process(monkeypatch, fails, 0.3)
    assert report.failure_count >= 2
    assert report.failures[0].startswith("fails on reference-")
    assert report.failures[0].endswith("InvalidArgument: on purpose")


async def test_hang_is_told_with_the_place_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits_for_ever(actor: Actor, target: Target) -> None:
        await anyio.Event().wait()

    report = await in_process(monkeypatch, waits_for_ever, 0.2, episode_s_max=2.0)
    told = [text for text in report.hangs if text.startswith("HANG: waits_for_ever on reference-")]
    assert told
    assert "await anyio.Event().wait()" in told[0]
    assert "thread aionn-soak-watch" in told[0]
    assert not report.is_success


async def test_what_cannot_be_cancelled_is_told_from_a_thread() -> None:
    found, is_found = [], threading.Event()

    def on_stuck(text: str) -> None:
        found.append((text, threading.current_thread()))
        is_found.set()

    watch = Watch(0.2, on_stuck)
    watch.begin(0, "shielded", anyio.CancelScope())
    try:
        while not is_found.is_set():
            watch.heartbeat()
            await anyio.sleep(0.01)
    finally:
        watch.end(0)
        watch.close()
    ((text, thread),) = found
    assert "shielded took more than 0.4 s, and cannot be cancelled" in text
    assert thread is not threading.main_thread()


async def test_loop_that_stands_still_is_told() -> None:
    is_found = threading.Event()
    watch = Watch(0.1, lambda _: is_found.set())
    try:
        assert is_found.wait(WAIT_S_MAX)  # On the loop's thread, on purpose.
    finally:
        watch.close()
    assert "the event loop was blocked" in watch.hangs[0]


async def test_pause_waits_for_all_and_lets_all_go_on() -> None:
    pause, busy, log = Pause(), anyio.Event(), []

    async def party(name: str, work: anyio.Event | None) -> None:
        async with pause.party():
            if work is not None:
                await work.wait()
            log.append(f"{name} comes")
            await pause.pass_through()
            log.append(f"{name} goes on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(party, "b", busy)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(_hold, pause, log)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(party, "a", None)
        await anyio.wait_all_tasks_blocked()
        assert log == ["a comes"]
        busy.set()
    assert log[:4] == ["a comes", "b comes", "held", "over"]
    assert sorted(log[4:]) == ["a goes on", "b goes on"]


async def _hold(pause: Pause, log: list[str]) -> None:
    async with pause.held():
        log.append("held")
        await anyio.lowlevel.checkpoint()
        log.append("over")


async def test_pauses_follow_on_each_other_at_once() -> None:
    pause, log = Pause(), []
    async with anyio.create_task_group() as tasks:

        async def party() -> None:
            async with pause.party():
                while len(log) < 40:
                    await pause.pass_through()
                    await anyio.lowlevel.checkpoint()

        for _ in range(3):
            tasks.start_soon(party)
        with anyio.fail_after(WAIT_S_MAX):
            for _ in range(20):
                await _hold(pause, log)


def test_room_for_samples_is_there_from_the_first_one_on() -> None:
    counts: Iterator[int] = iter(range(10**6))
    series = Series("process", {"things": (lambda _: next(counts), 0.0)})
    assert series.slopes() == ()
    for time_s in range(SAMPLES_MAX + 5):
        series.take(float(time_s), 0)
    assert series.count == SAMPLES_MAX
    assert series.last("things") == SAMPLES_MAX - 1
    (slope,) = series.slopes()
    assert slope.quantity == "process: things"
    assert slope.per_hour == pytest.approx(3600)


@pytest.mark.parametrize(
    ("drivers", "seconds", "match"),
    [
        ([], 1.0, "at least one driver"),
        (["reference"], 0.0, "more than 0 s"),
        (["reference"], float("nan"), "a year"),
    ],
)
async def test_senseless_soak_is_refused(drivers: list[str], seconds: float, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        await soak(drivers, seconds)


def test_command_refuses_a_soak_of_one_test(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["stress", "--soak", "1", "--test", "slowdown"])
    assert end.value.code == 2
    assert "--soak: expected neither --test nor --model" in capsys.readouterr().err


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a soak does is to keep more and more objects."""
    leaked: list[Thing] = []

    async def leaks(actor: Actor, target: Target) -> None:
        await anyio.sleep(0.01)
        leaked.extend(Thing() for _ in range(100))

    monkeypatch.setattr(stress_soak, "EPISODES", {leaks: 1})


@pytest.mark.usefixtures("leaking")
@pytest.mark.thorough
def test_command_tells_of_a_leak_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aionn.cli.commands.stress.GROWTH_S_MIN", 3.0)
    arguments = ["stress", "--soak", str(3 / 3600), "--device", "reference", "--in-process", "--json"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert report["success"] is False
    assert [
        slope
        for slope in report["slopes"]
        if slope["quantity"] == "application: objects" and slope["low"] > 0
    ]
    with pytest.raises(SystemExit) as end:
        main(arguments[:-1])
    assert end.value.code == 1
    _, _, reason = " ".join(capsys.readouterr().out.split()).partition("FAILURE: these grew: ")
    assert "application: objects" in reason


@pytest.mark.usefixtures("leaking")
@pytest.mark.thorough
def test_command_does_not_judge_growth_of_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["stress", "--soak", str(2 / 3600), "--device", "reference", "--in-process"])
    shown = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0, shown
    assert "growth is not judged: that takes 10 minutes" in shown
    assert shown.endswith("SUCCESS") and "NO" not in shown
