"""The counts of a runtime with ``metrics``: of executions and of the items of streams; pure.

Owns the outcomes, and the arrays, which are made when a model is compiled or a stream begins. A frame adds to them and makes none.

Invariants:
1. The number of arrays does not depend on the number of frames: at most ``MODELS_MAX`` models and ``STREAMS_MAX`` streams have
   their own, all further ones share one of the label ``OTHER``.
2. An execution is counted once, when it ends; an item of a stream once, when its consumer gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from aionn.errors import ErrorStatus
from aionn.hal import TIME_MAX_NS, Priority
from aionn.observability.durations import EXPOSED_NS, LEAST_NS, Durations, SignedDurations, bucket_of

if TYPE_CHECKING:
    from aionn.runtime.executions.results import Result

__all__ = [
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

OTHER = "other"

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

    Attributes:
        executions: By the labels of devices and model.
        streams: By label.
    """

    def __init__(self) -> None:
        self.executions: dict[tuple[str, str], ExecutionFigures] = {}
        self.streams: dict[str, StreamFigures] = {}

    def compilation(self, devices: str, model: str) -> CompilationFigures:
        """The counts of a compilation; those of the same labels are shared."""
        key = (devices, model)
        if key not in self.executions and len(self.executions) >= MODELS_MAX:
            key = (OTHER, OTHER)
        return CompilationFigures(self, key[1], self.executions.setdefault(key, ExecutionFigures()))

    def stream(self, model: str) -> StreamFigures:
        """The counts of a stream of a model that begins: those of one that has ended, if there is one."""
        for number in range(STREAMS_MAX):
            label = f"{model}-{number}"
            found = self.streams.get(label)
            if found is None:
                if len(self.streams) >= STREAMS_MAX:
                    break
                found = self.streams[label] = StreamFigures()
            if not found.is_open:
                found.begin()
                return found
        shared = self.streams.setdefault(OTHER, StreamFigures())
        shared.begin()
        return shared
