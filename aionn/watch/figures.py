"""The figures of one stream: outcomes, latencies and stages, as a whole and for the last minute; pure.

Owns the counting. Takes the time as an argument; ``streams`` is the shell around it, ``collector`` puts several together.

Invariants:
1. The memory does not depend on the number of items.
2. An item is counted once, in the second in which it finished.
3. ``on_time + late + dropped + lost`` is the number of results.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from aionn.watch.detections import Finding, plain_findings
from aionn.watch.histogram import Histogram, Quantiles, Recent, bucket_of

__all__ = ["STAGES", "WINDOW_S", "Outcome", "Second", "SourceFigures", "StreamFigures", "StreamSnapshot"]

WINDOW_S = 60
"""Seconds that are kept one by one: a person watches for a minute to see an effect."""

RECENT_NS = 5_000_000_000
"""Half of the time that "recent" quantiles cover: long enough for 150 frames, short enough to see a change."""

LABELS_MAX = 10_000
"""Labels that are counted; ImageNet's largest list has 21,000 classes, of which no stream shows half."""

FINDINGS_MAX = 50
"""Findings of a picture that are kept; the boxes of more could not be read."""

STAGES = ("wait", "device", "rest")
"""Stages of an item: from its capture to its buffer; on the device; the rest, which is the way there and back and the queue of
the device."""

Outcome = Literal["on_time", "late", "dropped", "lost"]
"""See ``StreamResult.status``."""


class Second(msgspec.Struct, array_like=True):
    """The results of one second.

    Attributes:
        ago_s: Seconds since then; 0 is the current second.
        on_time: Results that were on time.
        late: Late results.
        dropped: Items without a result, dropped or lost.
        p50: Median latency in milliseconds; None without a result.
        p99: Its 99th percentile.
    """

    ago_s: int
    on_time: int
    late: int
    dropped: int
    p50: float | None
    p99: float | None


class SourceFigures(msgspec.Struct, frozen=True):
    """The figures of a stream's source.

    Attributes:
        state: ``opening``, ``live``, ``waiting`` or ``ended``, see `aionn.media.Health`; empty for a source that cannot be lost.
        since_s: Seconds in that state.
        reason: Why it was last lost.
        presented: See `aionn.media.SourceStatistics` for this and the next three.
        delivered: See there.
        dropped: Items dropped because their consumer was slow.
        queued: See there.
        lost: See `aionn.media.LiveStatistics` for this and the next three.
        corrupt: See there.
        reconnections: See there.
        delay_ms: See there.
    """

    state: str = ""
    since_s: float = 0.0
    reason: str = ""
    presented: int = 0
    delivered: int = 0
    dropped: int = 0
    queued: int = 0
    lost: int = 0
    corrupt: int = 0
    reconnections: int = 0
    delay_ms: float = 0.0


class StreamSnapshot(msgspec.Struct, frozen=True):
    """The figures of a stream at one moment.

    Attributes:
        name: The stream's.
        within_ms: An item is on time if its result is there so long after its capture; None without deadlines.
        on_time: Results on time.
        late: Late results.
        dropped: Items without a result because of their deadline.
        lost: Items without a result because their driver died.
        per_second: Results per second, from the first capture to the last.
        latency: From capture to result, of all results.
        recent: The same of the last 5 to 10 s.
        stages: Of the same time, by stage, where the stream measures them.
        seconds: The last minute, the oldest second first; seconds without an item are left out.
        age_ms: Age of the last result's item; None before the first.
        status: Of the last item; empty before the first.
        findings: Of the last result.
        source: Of its source; None where it has none that counts.
        has_pictures: Whether its items have pictures.
    """

    name: str
    within_ms: float | None
    on_time: int
    late: int
    dropped: int
    lost: int
    per_second: float
    latency: Quantiles
    recent: Quantiles
    stages: dict[str, Quantiles]
    seconds: tuple[Second, ...]
    age_ms: float | None
    status: str
    findings: tuple[Finding, ...]
    source: SourceFigures | None
    has_pictures: bool


class _Tally:
    """The results of one second, as they come."""

    __slots__ = ("counts", "latency", "number", "seen")

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: dict[Outcome, int] = {"on_time": 0, "late": 0, "dropped": 0, "lost": 0}
        self.latency = Histogram()
        self.seen: tuple[int, Quantiles] = (0, Quantiles())

    def second(self, current: int) -> Second:
        # A second that is over does not change: its quantiles are computed once.
        if self.seen[0] != self.latency.count:
            self.seen = (self.latency.count, self.latency.quantiles())
        on_time, late, dropped, lost = self.counts.values()
        seen = self.seen[1]
        return Second(current - self.number, on_time, late, dropped + lost, seen.p50, seen.p99)


class StreamFigures:
    """Counts results.

    Args:
        name: Shown.
        within_ns: See ``StreamSnapshot.within_ms``.

    Attributes:
        name: See above.
        within_ns: See above.
        counts: Results by outcome.
        labels: Number of times that each label was the first finding.
        findings: Of the last result.
        has_pictures: Whether its items have pictures.
    """

    def __init__(self, name: str, *, within_ns: int | None = None) -> None:
        self.name = name
        self.within_ns = within_ns
        self.counts: dict[Outcome, int] = {"on_time": 0, "late": 0, "dropped": 0, "lost": 0}
        self.labels: Counter[str] = Counter()
        self.findings: tuple[Finding, ...] = ()
        self.has_pictures = False
        self._status = ""
        self._latency = Histogram()
        self._recent = Recent(RECENT_NS)
        self._stages = {stage: Recent(RECENT_NS) for stage in STAGES}
        self._has_stages = False
        self._tallies: deque[_Tally] = deque(maxlen=WINDOW_S)
        self._first_ns: int | None = None
        self._last_ns = 0

    def add(
        self,
        status: Outcome,
        captured_ns: int,
        finished_ns: int,
        *,
        placed_ns: int | None = None,
        device_ns: int | None = None,
        findings: Sequence[Finding] = (),
    ) -> None:
        """Counts one item.

        Args:
            status: Its outcome.
            captured_ns: When it was captured.
            finished_ns: When its result was there, or when it was dropped.
            placed_ns: When it was written into a buffer; None if it was not, or if that is not known.
            device_ns: Time on the device; None if it was not measured.
            findings: The model's answer, the most certain one first.
        """
        self.counts[status] += 1
        tally = self._tally(finished_ns // 1_000_000_000)
        tally.counts[status] += 1
        if self._first_ns is None:
            self._first_ns = captured_ns
        self._last_ns = captured_ns
        self._status = status
        if status in ("dropped", "lost"):
            return
        latency_ns = finished_ns - captured_ns
        bucket = bucket_of(latency_ns)
        self._latency.add(latency_ns, bucket)
        tally.latency.add(latency_ns, bucket)
        self._recent.add(latency_ns, finished_ns, bucket)
        if placed_ns is not None:
            self._has_stages = True
            self._stages["wait"].add(placed_ns - captured_ns, finished_ns)
            if device_ns is not None:
                self._stages["device"].add(device_ns, finished_ns)
            self._stages["rest"].add(finished_ns - placed_ns - (device_ns or 0), finished_ns)
        self.findings = tuple(findings[:FINDINGS_MAX])
        if self.findings:
            label = self.findings[0].label
            if label in self.labels or len(self.labels) < LABELS_MAX:
                self.labels[label] += 1

    def _tally(self, number: int) -> _Tally:
        if not self._tallies or self._tallies[-1].number < number:
            self._tallies.append(_Tally(number))
        # Results come in order; one that finished a moment before the last one counts in that second.
        return self._tallies[-1]

    @property
    def results(self) -> int:
        """Number of results: items on time and late ones."""
        return self._latency.count

    @property
    def latency(self) -> Quantiles:
        """From capture to result, of all results."""
        return self._latency.quantiles()

    @property
    def per_second(self) -> float:
        """Results per second, from the first capture to the last, by the number of intervals between them."""
        seconds = 0.0 if self._first_ns is None else (self._last_ns - self._first_ns) / 1e9
        return (self.results - 1) / seconds if seconds > 0 and self.results else 0.0

    def snapshot(self, now_ns: int, source: SourceFigures | None = None) -> StreamSnapshot:
        """The figures now; see ``StreamSnapshot``."""
        current = now_ns // 1_000_000_000
        stages = {
            stage: quantiles
            for stage, recent in self._stages.items()
            if (quantiles := recent.quantiles(now_ns)).p50 is not None
        }
        return StreamSnapshot(
            name=self.name,
            within_ms=None if self.within_ns is None else self.within_ns / 1e6,
            on_time=self.counts["on_time"],
            late=self.counts["late"],
            dropped=self.counts["dropped"],
            lost=self.counts["lost"],
            per_second=round(self.per_second, 2),
            latency=self.latency,
            recent=self._recent.quantiles(now_ns),
            stages=stages if self._has_stages else {},
            seconds=tuple(t.second(current) for t in self._tallies if current - t.number < WINDOW_S),
            age_ms=None if self._first_ns is None else round(max(0, now_ns - self._last_ns) / 1e6, 1),
            status=self._status,
            findings=plain_findings(self.findings, FINDINGS_MAX),
            source=source,
            has_pictures=self.has_pictures,
        )
