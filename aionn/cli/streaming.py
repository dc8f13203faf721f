"""A source through a burst, counted: what ``demo`` and ``stream`` have in common.

Owns the account of a stream (how many, how late, what was recognised) and the live table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import msgspec
import numpy as np

from aionn.benchmarking.figures import percentile
from aionn.media import AudioWindow, Frame, Source
from aionn.reports.terminal import live_lines, table_lines
from aionn.runtime.executions.burst import Burst
from aionn.runtime.memory.arguments import Array, TensorSpec, Writer

__all__ = ["Account", "Latency", "Recognised", "show_live", "stream_into_account", "warm_up"]

REFRESH_S = 0.25
"""Interval between two drawings of the live table: short enough to look alive, long enough that no frame misses its deadline."""

_I = TypeVar("_I", Frame, AudioWindow)


class Latency(msgspec.Struct, frozen=True):
    """Latencies from capture to result in milliseconds."""

    p50: float
    p99: float
    max: float


class Recognised(msgspec.Struct, frozen=True):
    """The best class of one item.

    Attributes:
        index: The item's number in its source.
        time_s: Its position in the medium.
        label: Index of the class.
        probability: Its score.
    """

    index: int
    time_s: float
    label: int
    probability: float


class Account(Generic[_I]):
    """Results of a stream's items."""

    def __init__(self, name: str, labels: Sequence[str]) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.on_time = 0
        self.late = 0
        self.dropped_by_deadline = 0
        self.latencies_ms: list[float] = []
        self.recognised: list[Recognised] = []
        self.source: Source[_I] | None = None
        self._first_ns: int | None = None
        self._last_ns = 0

    def add(
        self, item: _I, status: str, outputs: Sequence[Array], finished_ns: int, spec: TensorSpec
    ) -> None:
        """Counts one result."""
        if self._first_ns is None:
            self._first_ns = item.captured_at_ns
        self._last_ns = item.captured_at_ns
        if status == "dropped":
            self.dropped_by_deadline += 1
            return
        self.on_time += status == "on_time"
        self.late += status == "late"
        self.latencies_ms.append((finished_ns - item.captured_at_ns) / 1e6)
        scores = outputs[0].reshape(-1)
        label = int(np.argmax(scores))
        score = float(scores[label])
        probability = (score - spec.zero_point) * spec.scale if spec.scale else score
        time_s = item.time_s if isinstance(item, Frame) else item.start_s
        self.recognised.append(Recognised(item.index, time_s, label, probability))

    @property
    def presented(self) -> int:
        """Number of items that the source presented."""
        return self.source.statistics().presented if self.source is not None else 0

    @property
    def dropped(self) -> int:
        """Number of items without an answer: dropped at the source, or at their deadline."""
        given_up = self.source.statistics().dropped if self.source is not None else 0
        return given_up + self.dropped_by_deadline

    @property
    def per_second(self) -> float:
        """Answers per second, from the first capture to the last, by the number of intervals between them."""
        seconds = 0.0 if self._first_ns is None else (self._last_ns - self._first_ns) / 1e9
        return (len(self.latencies_ms) - 1) / seconds if seconds > 0 else 0.0

    @property
    def latency_ms(self) -> Latency:
        """From capture to result."""
        return Latency(
            round(percentile(self.latencies_ms, 0.50), 3),
            round(percentile(self.latencies_ms, 0.99), 3),
            round(max(self.latencies_ms, default=0.0), 3),
        )

    @property
    def latest(self) -> tuple[str, str]:
        """The last recognised class, and its probability in per cent."""
        if not self.recognised:
            return "-", "-"
        last = self.recognised[-1]
        name = self.labels[last.label] if last.label < len(self.labels) else f"class {last.label}"
        return name, f"{last.probability:.0%}"


async def warm_up(burst: Burst, spec: TensorSpec) -> None:
    """One execution on zeros, so that the first frame does not pay for what is done once."""
    await burst.execute([np.zeros(spec.dimensions, dtype=spec.dtype)])


async def stream_into_account(
    account: Account[_I],
    source: Source[_I],
    burst: Burst,
    *,
    into: Writer,
    output: TensorSpec,
    within_ns: int,
    on_late: Any,
) -> None:
    """Streams a source through a burst and counts every result."""
    async with source as items:
        account.source = source
        results = burst.stream(
            items, into=into, deadline=lambda item: item.captured_at_ns + within_ns, on_late=on_late
        )
        async for result in results:
            account.add(result.item, result.status, result.outputs, result.finished_ns, output)


HEADS = ("stream", "per s", "on time", "late", "dropped", "p50 ms", "p99 ms", "recognised", "certain")

LEAST = ("p50 ms", "per s", "certain", "recognised", "p99 ms")
"""The columns that a narrow terminal loses; the counts stay."""


def _lines(title: str, accounts: Sequence[Account[Any]], width: int) -> list[str]:
    rows = []
    for account in accounts:
        latency = account.latency_ms
        figures = (account.on_time, account.late, account.dropped, f"{latency.p50:.1f}", f"{latency.p99:.1f}")
        rows.append((account.name, f"{account.per_second:.1f}", *figures, *account.latest))
    return table_lines(title, HEADS, rows, width, least=LEAST)


async def show_live(title: str, accounts: Sequence[Account[Any]], *, finished: Callable[[], bool]) -> None:
    """Draws the accounts until ``finished``, where standard error is a terminal; does nothing elsewhere."""
    started_s = time.monotonic()
    with live_lines() as show:
        while show is not None and not finished():
            now = f"{title}   {time.monotonic() - started_s:5.1f} s"
            show(partial(_lines, now, accounts))
            await anyio.sleep(REFRESH_S)
