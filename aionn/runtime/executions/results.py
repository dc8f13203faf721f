"""Records of executions: the result, of a stream's item too, where an execution is in its life, sums, priorities, and flags."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np

from aionn.errors import ErrorStatus, InvalidArgument
from aionn.hal import NO_TIMING, Priority, Timing
from aionn.runtime.memory.arguments import Array

__all__ = [
    "ExecutionState",
    "PriorityName",
    "Result",
    "Status",
    "StreamResult",
    "StreamStatistics",
    "flag_of",
    "priority_of",
    "sum_of",
    "with_own_outputs",
]

_T = TypeVar("_T")

PriorityName = Literal["low", "medium", "high"]
"""A priority by its name, for type checkers and editors."""


class Result(msgspec.Struct, frozen=True):
    """The result of an execution.

    Attributes:
        outputs: One array per output. From ``execute`` they are the caller's own; from a stream they are read-only views of shared
            memory, valid until the next result is asked for.
        timing: Durations, counted from the launch: time in the driver has the wait for dependencies in it, which is the
            runtime's doing, but not the wait for the device's slot, see ``queued_ns``. None entries where nothing was measured.
        status: NONE; a result of another status is an exception instead.
        device: Name of the device that ran it, or names, in the order of the steps.
        fallback: Parts that ran on the reference device instead, with the reason; usually empty.
        queued_ns: From the call until a device slot was acquired, dependencies included.
        total_ns: From the call until the result was here.
        valid_until: The event that ends the validity of ``outputs``; empty where they are the caller's own, for good.
        dependencies_ns: From the call until this process saw that the last fence of ``wait_for`` had signalled; 0 where none had
            to be waited for.
    """

    outputs: tuple[Array, ...]
    timing: Timing = NO_TIMING
    status: ErrorStatus = ErrorStatus.NONE
    device: str = ""
    fallback: tuple[str, ...] = ()
    queued_ns: int = 0
    total_ns: int = 0
    valid_until: str = ""
    dependencies_ns: int = 0

    @property
    def fenced(self) -> Timing:
        """As ``timing``, counted from the moment that the last dependency signalled; equal to it without dependencies.

        Never more than ``timing``. Source: ``timingLaunched`` and ``timingFenced`` of the NN HAL 1.3.
        """
        in_driver_ns = self.timing.time_in_driver_ns
        if in_driver_ns is None or not self.dependencies_ns:
            return self.timing
        return Timing(self.timing.time_on_device_ns, in_driver_ns - self.dependencies_ns)


def priority_of(value: str | Priority) -> Priority:
    """A priority by name or value.

    Raises:
        InvalidArgument: There is no such priority.
    """
    try:
        return Priority[value.upper()] if isinstance(value, str) else Priority(value)
    except (KeyError, ValueError):
        names = ", ".join(p.name.lower() for p in Priority)
        raise InvalidArgument(f"priority: expected one of {names}, got {value!r}") from None


def flag_of(value: object, what: str) -> bool:
    """An option that is on or off; one of numpy's bools becomes Python's, which a driver process can be sent.

    Raises:
        InvalidArgument: It is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgument(f"{what}: expected a bool, got {value!r}")
    return bool(value)


class ExecutionState(enum.Enum):
    """Where an execution is in its life. ``Where to look`` in docs/architecture.md names what changes it.

    It waits for the device also while large inputs are copied, and runs also while a more urgent one preempts it.
    """

    WAITING_FOR_FENCES = "waiting for fences"
    WAITING_FOR_SLOT = "waiting for the device"
    RUNNING = "running"
    FINISHED = "finished"


def sum_of(timings: Sequence[Timing]) -> Timing:
    """The timing of all steps; None where one was not measured."""
    on_device = [t.time_on_device_ns for t in timings if t.time_on_device_ns is not None]
    in_driver = [t.time_in_driver_ns for t in timings if t.time_in_driver_ns is not None]
    return Timing(
        sum(on_device) if len(on_device) == len(timings) else None,
        sum(in_driver) if len(in_driver) == len(timings) else None,
    )


Status = Literal["on_time", "late", "dropped", "lost"]
"""The end of an item of a stream."""


def with_own_outputs(result: Result) -> Result:
    """The same result with copies of its outputs, which can be read only, as those of a stream."""
    copies = []
    for array in result.outputs:
        copy = array.copy()
        copy.flags.writeable = False
        copies.append(copy)
    return msgspec.structs.replace(result, outputs=tuple(copies))


class StreamResult(msgspec.Struct, Generic[_T], frozen=True):
    """The result of one item of a stream.

    Attributes:
        item: The item.
        outputs: Read-only views of shared memory, valid until the next result is asked for; copy to keep. Empty when dropped or
            lost.
        status: ``on_time``, ``late`` (executed, but after its deadline), ``dropped`` (not there at its deadline) or ``lost`` (its
            driver died while it ran, and the compilation recovers: see ``recover`` of ``Runtime.compile``).
        finished_ns: When its result was here, or when it was dropped.
        deadline_ns: Its deadline; None means no deadline.
        timing: Durations measured by the device.
        label: The promise of a stream with a guarantee that this frame broke first: ``early``, ``delayed``, ``overran`` or
            ``withdrawn``; or what it was delayed by though it kept all of them: ``stalled`` (the machine did not run the event
            loop), ``blocked`` (an execution before it took longer than was counted with), ``unserved`` (the process of a served
            device took or answered it late), ``unread`` (the event loop read its answer late). None for all others, and without a
            guarantee.
    """

    item: _T
    outputs: tuple[Array, ...]
    status: Status
    finished_ns: int
    deadline_ns: int | None
    timing: Timing
    label: str | None = None

    @property
    def valid_until(self) -> str:
        """The end of the validity of ``outputs``: they are views of a slot that is used again."""
        return "the next result is asked for, or the stream ends"


class StreamStatistics(msgspec.Struct, frozen=True):
    """Counts of a stream's items so far; and of the frames of one with a guarantee, by the promise that they broke first.

    Attributes:
        on_time: Results that were here in time.
        late: Results that came late.
        dropped: Items without a result at their deadline.
        lost: Items whose driver died.
        early: Frames that came sooner than period and jitter allow.
        delayed: Frames that came later after their capture than the jitter allows.
        overran: Frames that took longer than the reserved duration, or paid for one that did.
        withdrawn: Frames after the end of the reservation.
        stalled: Frames that came late, overran or were lost while the machine did not run the event loop.
        blocked: Frames that were lost since an execution before them took longer than was counted with.
        unserved: Frames that were lost, or came too early or too late to the device, since the process of a served device took or
            answered them late.
        unread: Frames that were lost since the event loop read their answers late.
    """

    on_time: int
    late: int
    dropped: int
    lost: int = 0
    early: int = 0
    delayed: int = 0
    overran: int = 0
    withdrawn: int = 0
    stalled: int = 0
    blocked: int = 0
    unserved: int = 0
    unread: int = 0

    def _repr_html_(self) -> str:
        from aionn.reports.notebooks import values_html

        return values_html((("on time", self.on_time), ("late", self.late), ("dropped", self.dropped)))
