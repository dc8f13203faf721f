"""The counts of a runtime with ``metrics``: of executions and of the items of streams; pure.

Owns the outcomes, and the arrays, which are made when a model is compiled or a stream begins. A frame adds to them and makes none.
Owns also the life of labels. A monitoring system computes rates from differences, so a counter never falls while its label exists.
A label that disappears ends its series, and one that comes back begins at zero: the same as after a restart of the process, and it
is computed as such. Counts between the last reading and the end would be lost; so a label stays for ``KEPT_NS`` after its last
count. Its counts are not added to those of ``OTHER``: a rate over all labels would have them twice.

Invariants:
1. The number of arrays does not depend on the number of frames: at most ``MODELS_MAX`` models and ``STREAMS_MAX`` streams have
   their own, all further ones share one of the label ``OTHER``.
2. An execution is counted once, when it ends; an item of a stream once, when its consumer gets it.
3. A label is freed when its compilations or its stream are gone and nothing was counted for ``KEPT_NS``; ``OTHER`` never is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aionn.errors import ErrorStatus
from aionn.hal import TIME_MAX_NS, Priority
from aionn.observability.durations import EXPOSED_NS, LEAST_NS, Durations, SignedDurations, bucket_of

if TYPE_CHECKING:
    from aionn.runtime.executions.results import Result

__all__ = [
    "KEPT_NS",
    "MODELS_MAX",
    "OTHER",
    "OUTCOMES",
    "STREAMS_MAX",
    "ClassFigures",
    "CompilationFigures",
    "ExecutionFigures",
    "RuntimeFigures",
    "StreamFigures",
]

MODELS_MAX = 64
"""Pairs of a model and its devices with series of their own: each has up to some 900 series of the monitoring system."""

STREAMS_MAX = 64
"""Streams with series of their own that are open together; a stream that begins later takes the label of one that has ended."""

KEPT_NS = 600_000_000_000
"""Time for which a label stays after its last count: ten intervals of a monitoring system that reads every minute, and twice the
five minutes for which Prometheus looks back."""

OTHER = "other"
_ALL_OTHERS = (OTHER, OTHER)

IMMEDIATE_NS = EXPOSED_NS[0]
"""A shorter wait for a slot counts as none: it is the time of the dispatcher itself, and below the first bound that is exposed."""

OUTCOMES = ("on_time", "late", "aborted", "refused", "failed", "overran", "cancelled")
"""``late``: with a result after its deadline. ``aborted``: it waited until its deadline, or until that was certain to be missed.
``refused``: on arrival. ``overran``: its deadline passed while it ran."""

_, _LATE, _ABORTED, _REFUSED, _FAILED, _OVERRAN, _CANCELLED = range(len(OUTCOMES))

_REFUSALS = (
    ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
)

Drop = Literal["deadline", "lost"]


class CountedJob(Protocol):
    """The part of an execution that is counted; see ``ExecutionJob``."""

    priority: Priority
    deadline_ns: int | None
    landed_ns: int
    queued_ns: int


class ClassFigures:
    """The executions of one model and one priority.

    Attributes:
        whole: From the call to the result, of those with a result.
        others: Counts of the outcomes but ``on_time``, in the order of ``OUTCOMES``.
        immediate: Number of those that waited for less than ``IMMEDIATE_NS``.
        waits: Longer waits until a slot of the device was acquired.
        device: On the device, where it was measured.
        transfer: The rest, where the device was measured.
    """

    __slots__ = ("device", "immediate", "others", "transfer", "waits", "whole")

    def __init__(self) -> None:
        self.whole = Durations()
        self.others = [0] * len(OUTCOMES)
        self.immediate = 0
        self.waits = Durations()
        self.device = Durations()
        self.transfer = Durations()

    def outcomes(self) -> dict[str, int]:
        """Counts by outcome. Each execution with a result was on time or late, so a frame on time counts in ``whole`` alone."""
        counts = dict(zip(OUTCOMES, self.others, strict=True))
        counts["on_time"] = self.whole.count - counts["late"]
        return counts

    def queue(self) -> Durations:
        """A copy of all waits."""
        made = self.waits.copy()
        made.counts[bucket_of(LEAST_NS)] += self.immediate
        return made


class ExecutionFigures:
    """The executions of one model on its devices.

    Attributes:
        by_priority: By the value of ``Priority``.
    """

    __slots__ = ("by_priority",)

    def __init__(self) -> None:
        self.by_priority = {int(priority): ClassFigures() for priority in Priority}

    @property
    def count(self) -> int:
        """A number that grows with each count."""
        return sum(found.whole.count + sum(found.others) for found in self.by_priority.values())

    def ended(self, job: CountedJob, result: Result, took_ns: int) -> None:
        """Counts one with a result."""
        figures = self.by_priority[job.priority]
        deadline_ns = job.deadline_ns
        if deadline_ns is not None and job.landed_ns > deadline_ns:
            figures.others[_LATE] += 1
        # ``Durations.add`` written out: a call fewer in each frame.
        counted = figures.whole
        if took_ns < LEAST_NS:
            took_ns = LEAST_NS
        bits = took_ns.bit_length()
        counted.counts[(bits << 2) + (took_ns >> bits - 3) - 8] += 1
        counted.total_ns += took_ns
        if job.queued_ns < IMMEDIATE_NS:
            figures.immediate += 1
        else:
            figures.waits.add(job.queued_ns)
        on_device_ns = result.timing.time_on_device_ns
        if on_device_ns is not None:
            figures.device.add(on_device_ns)
            figures.transfer.add(took_ns - job.queued_ns - on_device_ns)

    def failed(self, job: CountedJob, status: ErrorStatus, *, is_cancelled: bool) -> None:
        """Counts one without a result."""
        if is_cancelled:
            outcome = _CANCELLED
        elif status in _REFUSALS:
            outcome = _REFUSED
        elif status is ErrorStatus.MISSED_DEADLINE_TRANSIENT:
            outcome = _OVERRAN if job.queued_ns else _ABORTED
        else:
            outcome = _FAILED
        self.by_priority[job.priority].others[outcome] += 1


class StreamFigures:
    """The items of one stream.

    Attributes:
        age: From the capture of an item to its result, of items that have ``captured_at_ns``.
        slack: From the result to the deadline; below zero for late ones.
        dropped: Items without a result, by reason.
        is_open: Whether a stream counts here.
    """

    __slots__ = ("age", "dropped", "is_open", "slack")

    def __init__(self) -> None:
        self.age = Durations()
        self.slack = SignedDurations()
        self.dropped: dict[Drop, int] = {"deadline": 0, "lost": 0}
        self.is_open = False

    @property
    def count(self) -> int:
        """A number that grows with each count."""
        return self.age.count + self.slack.count + sum(self.dropped.values())

    def begin(self) -> None:
        """A stream begins."""
        self.is_open = True

    def delivered(self, item: Any, finished_ns: int, deadline_ns: int | None) -> None:
        """Counts an item with a result."""
        # Of each item: those of one stream may differ, and an application's own item may raise anything.
        try:
            captured_ns = item.captured_at_ns
        except Exception:
            captured_ns = None
        if isinstance(captured_ns, int) and 0 <= captured_ns <= TIME_MAX_NS:
            self.age.add(finished_ns - captured_ns)
        if deadline_ns is not None:
            self.slack.add(deadline_ns - finished_ns)

    def lost(self, reason: Drop) -> None:
        """Counts an item without a result."""
        self.dropped[reason] += 1


class CompilationFigures:
    """The counts of one compilation.

    Attributes:
        executions: Of its executions.
        model: Its label.
    """

    def __init__(self, owner: RuntimeFigures, model: str, executions: ExecutionFigures) -> None:
        self._owner = owner
        self.model = model
        self.executions = executions

    def stream(self) -> StreamFigures:
        """The counts of a stream that begins; it sets ``is_open`` to False when it ends."""
        return self._owner.stream(self.model)


class RuntimeFigures:
    """The counts of a runtime.

    Args:
        now: The clock.

    Attributes:
        executions: By the labels of devices and model.
        streams: By label.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.executions: dict[tuple[str, str], ExecutionFigures] = {}
        self.streams: dict[str, StreamFigures] = {}
        self._users: dict[tuple[str, str], weakref.WeakSet[CompilationFigures]] = {}
        # The labels without a user: their count, and since when that is the same.
        self._idle: dict[Hashable, tuple[int, int]] = {}

    def compilation(self, devices: str, model: str) -> CompilationFigures:
        """The counts of a compilation, whose label is in use as long as the result exists; those of the same labels are shared."""
        key = (devices, model)
        if key not in self.executions:
            self.free_labels(self._now())
        if key not in self.executions and len(self.executions.keys() - {_ALL_OTHERS}) >= MODELS_MAX:
            key = _ALL_OTHERS
        made = CompilationFigures(self, key[1], self.executions.setdefault(key, ExecutionFigures()))
        self._users.setdefault(key, weakref.WeakSet()).add(made)
        return made

    def stream(self, model: str) -> StreamFigures:
        """The counts of a stream of a model that begins: those of one that has ended, if there is one."""
        for number in range(STREAMS_MAX):
            label = f"{model}-{number}"
            found = self.streams.get(label)
            if found is None:
                self.free_labels(self._now())
                if len(self.streams.keys() - {OTHER}) >= STREAMS_MAX:
                    break
                found = self.streams[label] = StreamFigures()
            if not found.is_open:
                found.begin()
                return found
        shared = self.streams.setdefault(OTHER, StreamFigures())
        shared.begin()
        return shared

    def free_labels(self, now_ns: int) -> None:
        """Frees the labels whose users are gone and whose counts are as they were ``KEPT_NS`` ago."""
        for key, executions in list(self.executions.items()):
            is_used = key == _ALL_OTHERS or bool(self._users[key])
            if self._is_over(key, is_used, executions, now_ns):
                del self.executions[key], self._users[key]
        for label, stream in list(self.streams.items()):
            if self._is_over(label, label == OTHER or stream.is_open, stream, now_ns):
                del self.streams[label]

    def _is_over(
        self, label: Hashable, is_used: bool, figures: ExecutionFigures | StreamFigures, now_ns: int
    ) -> bool:
        seen = self._idle.pop(label, None)
        if is_used:
            return False
        count = figures.count
        if seen is None or seen[0] != count:
            seen = (count, now_ns)
        if now_ns - seen[1] >= KEPT_NS:
            return True
        self._idle[label] = seen
        return False
