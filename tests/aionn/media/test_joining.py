"""Two sources joined by time: the rule with times as arguments, and the shell with a clock of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import pytest

import aionn
from aionn.media.joining import KEPT_MAX, WAITING_MAX, Pair, TimeJoin, joined

LIMIT_S = 10
MS = 1_000_000


class Stamped(NamedTuple):
    name: str
    captured_at_ns: int


def test_partner_is_the_newest_within_the_tolerance() -> None:
    join: TimeJoin[str, str] = TimeJoin(10, 100)
    for stamp in (85, 92, 99, 111):
        join.add_second(str(stamp), stamp)
    join.add_first("a", 100, 0)
    assert join.take(0) == Pair("a", "99", 100, -1)


def test_item_waits_for_a_partner_and_is_abandoned_in_time() -> None:
    join: TimeJoin[str, str] = TimeJoin(10, 50)
    join.add_first("a", 100, 1000)
    assert join.take(1049) is None and join.expires_ns == 1050
    join.add_second("early", 89)
    assert join.take(1049) is None
    join.add_second("exact", 110)
    assert join.take(1049) == Pair("a", "exact", 100, 10)
    join.add_first("b", 200, 2000)
    assert join.take(2050) is None and (join.paired, join.unmatched) == (1, 1)


def test_item_whose_partner_cannot_come_is_abandoned_immediately() -> None:
    join: TimeJoin[str, str] = TimeJoin(10, 50)
    join.add_first("a", 100, 0)
    join.add_first("b", 120, 0)
    join.add_second("x", 121)
    assert join.take(0) == Pair("b", "x", 120, 1) and join.unmatched == 1
    join.add_first("c", 200, 0)
    join.end_second()
    assert join.take(0) is None and join.unmatched == 2 and not join.is_waiting


@pytest.mark.parametrize("seed", range(10))
def test_rule_agrees_with_a_search_of_everything(seed: int) -> None:
    rng = random.Random(seed)
    tolerance, wait = 30, 40
    join: TimeJoin[int, int] = TimeJoin(tolerance, wait)
    firsts = sorted(rng.sample(range(5000), 120))
    seconds = sorted(rng.sample(range(5000), 150))
    pairs, arrived = list[Pair[int, int]](), list[int]()
    for now in range(5100):
        if seconds and seconds[0] <= now and join.wants_second:
            arrived.append(seconds.pop(0))
            join.add_second(arrived[-1], arrived[-1])
        if firsts and firsts[0] <= now and join.wants_first:
            stamp = firsts.pop(0)
            join.add_first(stamp, stamp, now)
        while (pair := join.take(now)) is not None:
            within = [s for s in arrived if abs(s - pair.first) <= tolerance]
            assert pair.second == max(within) and pair.skew_ns == pair.second - pair.first
            pairs.append(pair)
        assert len(join._waiting) <= WAITING_MAX and len(join._kept) <= KEPT_MAX
    assert [p.first for p in pairs] == sorted(p.first for p in pairs)
    assert len(pairs) > 60 and join.paired == len(pairs)
    assert join.paired + join.unmatched == 120 - len(firsts)


async def source(name: str, stamps_ms: list[float], error: Exception | None = None) -> AsyncIterator[Stamped]:
    for stamp_ms in stamps_ms:
        yield Stamped(name, round(stamp_ms * MS))
    if error is not None:
        raise error


async def test_sources_without_a_pace_are_joined_without_a_wait() -> None:
    pictures, sounds = source("p", [0, 33, 66, 100]), source("s", [1, 34, 80, 99, 130])
    with anyio.fail_after(LIMIT_S):
        async with joined(pictures, sounds, tolerance_s=0.005, wait_s=60) as both:
            pairs = [(p.first.captured_at_ns // MS, p.second.captured_at_ns // MS) async for p in both]
    assert pairs == [(0, 1), (33, 34), (100, 99)]
    assert both.statistics() == aionn.media.JoinStatistics(paired=3, unmatched=1)


async def test_error_of_a_source_is_raised_and_the_other_one_is_left() -> None:
    async def endless() -> AsyncIterator[Stamped]:
        yield Stamped("s", 0)
        await anyio.sleep_forever()

    for first, second in (
        (source("p", [0], OSError("unplugged")), endless()),
        (endless(), source("s", [0], OSError("unplugged"))),
    ):
        with anyio.fail_after(LIMIT_S):
            async with joined(first, second, tolerance_s=0.01) as both:
                assert (await anext(both)).skew_ns == 0
                with pytest.raises(OSError, match="unplugged"):
                    await anext(both)


@pytest.mark.parametrize("which", ["first", "second"])
async def test_cancellation_that_a_source_lets_out_is_its_failure(which: str) -> None:
    async def cancels() -> AsyncIterator[Stamped]:
        yield Stamped("c", 0)
        raise asyncio.CancelledError

    async def endless() -> AsyncIterator[Stamped]:
        yield Stamped("e", 0)
        await anyio.sleep_forever()

    sources = [cancels(), endless()] if which == "first" else [endless(), cancels()]
    with anyio.fail_after(LIMIT_S):
        async with joined(*sources, tolerance_s=0.01) as both:
            assert (await anext(both)).skew_ns == 0
            with pytest.raises(aionn.GeneralFailure, match=f"joined: the {which} source: CancelledError"):
                await anext(both)


async def test_cancelled_wait_loses_no_pair() -> None:
    go = anyio.Event()

    async def late() -> AsyncIterator[Stamped]:
        await go.wait()
        yield Stamped("s", 0)

    with anyio.fail_after(LIMIT_S):
        async with joined(source("p", [0]), late(), tolerance_s=0.01, wait_s=60) as both:
            with anyio.move_on_after(0.001) as cancelled:
                await anext(both)
            assert cancelled.cancelled_caught
            go.set()
            assert (await anext(both)).first.name == "p"


async def test_error_in_its_block_keeps_its_class_and_another_task_may_leave_it() -> None:
    async def endless() -> AsyncIterator[Stamped]:
        await anyio.sleep_forever()
        yield Stamped("e", 0)

    with anyio.fail_after(LIMIT_S):
        with pytest.raises(aionn.DeadObject, match="planted"):
            async with joined(endless(), endless(), tolerance_s=0.01):
                raise aionn.DeadObject("planted")
        both = joined(source("p", [0]), endless(), tolerance_s=0.01, wait_s=60)
        await asyncio.create_task(both.__aenter__())
        consumer = asyncio.create_task(anext(both, None))  # type: ignore[call-overload]
        await anyio.lowlevel.checkpoint()
        await asyncio.create_task(both.__aexit__(None, None, None))
        assert await consumer is None


async def test_source_that_does_not_let_itself_be_cancelled_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aionn.media.joining.CLOSE_S_MAX", 0.01)
    go = anyio.Event()

    async def stubborn() -> AsyncIterator[Stamped]:
        with anyio.CancelScope(shield=True):
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    pass
        yield Stamped("s", 0)

    with anyio.fail_after(LIMIT_S):
        async with joined(stubborn(), stubborn(), tolerance_s=0.01):
            await anyio.lowlevel.checkpoint()
    go.set()
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tolerance_s": -1},
            "tolerance_s: expected a number of seconds of at least 0 and at most 60, got -1",
        ),
        (
            {"tolerance_s": float("nan")},
            "tolerance_s: expected a number of seconds of at least 0 and at most 60, got nan",
        ),
        (
            {"tolerance_s": 1, "wait_s": 61},
            "wait_s: expected a number of seconds of at least 0 and at most 60, got 61",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        joined(source("p", []), source("s", []), **options)


async def test_joined_is_used_with_async_with() -> None:
    with pytest.raises(aionn.InvalidArgument, match="use it with async with"):
        await anext(joined(source("p", []), source("s", []), tolerance_s=1))
    with pytest.raises(aionn.InvalidArgument, match="joined: second: expected an async iterable, got a list"):
        joined(source("p", []), [], tolerance_s=1)  # type: ignore[arg-type]


async def test_second_consumer_is_rejected_while_the_first_waits() -> None:
    async def silent() -> AsyncIterator[Stamped]:
        await anyio.sleep_forever()
        yield Stamped("never", 0)

    with anyio.fail_after(LIMIT_S):
        async with joined(silent(), silent(), tolerance_s=0.1) as pairs:
            waiting = asyncio.ensure_future(anext(pairs))
            await anyio.lowlevel.checkpoint()
            with pytest.raises(aionn.InvalidArgument, match=r"joined: expected one consumer"):
                await anext(pairs)
            waiting.cancel()
            await asyncio.wait([waiting])
