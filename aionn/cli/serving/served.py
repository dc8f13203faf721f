"""The figures of a served device for its watch page: the executions of all its clients, by priority.

Owns the counting by priority, and the row of the device. ``aionn.service.host.metrics`` counts for monitoring systems.

Invariant: counting and snapshots exclude each other, since each burst of a client has a thread, and the page is answered by the
loop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aionn.errors import ErrorStatus, status_of
from aionn.hal import Device, Priority
from aionn.service.host.metrics import HostFigures
from aionn.watch.collector import Collector, DeviceFigures
from aionn.watch.figures import Outcome, StreamSnapshot
from aionn.watch.streams import WatchedStream

__all__ = ["ServedFigures"]

_DROPPED = frozenset(
    {
        ErrorStatus.MISSED_DEADLINE_PERSISTENT,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT,
        ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
        ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    }
)
"""Executions that were rejected, or ended at their deadline; an execution that fails otherwise counts as lost."""


class _Executions(WatchedStream):
    """The executions of one priority: ``captured`` is the time of the request here, ``finished`` that of the answer."""

    def __init__(self, priority: Priority) -> None:
        super().__init__(f"{priority.name.lower()} priority", within_ns=None, source=None)
        self._turn = threading.Lock()

    def count(self, outcome: Outcome, began_ns: int, ended_ns: int) -> None:
        """Counts one execution. From any thread."""
        with self._turn:
            self.figures.add(outcome, began_ns, ended_ns)

    def snapshot(self, at_ns: int) -> StreamSnapshot:
        """See ``WatchedStream.snapshot``."""
        with self._turn:
            return super().snapshot(at_ns)


class ServedFigures(HostFigures):
    """Counts the executions of a served device for its page as well.

    Args:
        device: The device.
        collector: Gets a row for the device, and a stream for each priority that is used.
    """

    def __init__(self, device: Device, collector: Collector) -> None:
        super().__init__()
        self._device = device
        self._collector = collector
        self._of: dict[Priority, _Executions] = {}
        self._adding = threading.Lock()
        collector.add_device_figures(self.row)

    @contextmanager
    def executing(self, priority: Priority, deadline_ns: int | None) -> Iterator[None]:
        """See ``HostFigures.executing``."""
        began_ns = time.monotonic_ns()
        outcome: Outcome = "lost"
        try:
            with super().executing(priority, deadline_ns):
                yield
            outcome = "on_time" if deadline_ns is None or time.monotonic_ns() <= deadline_ns else "late"
        except Exception as e:
            outcome = "dropped" if status_of(e) in _DROPPED else "lost"
            raise
        finally:
            self._stream(priority).count(outcome, began_ns, time.monotonic_ns())

    def row(self) -> DeviceFigures:
        """The row of the device. An execution that waits for a client's own turn counts as waiting too."""
        slots = self._device.info.slots
        counts = [dict(outcomes) for outcomes in self._outcomes.values()]
        return DeviceFigures(
            name=self._device.info.name,
            pid=os.getpid(),
            slots=slots,
            waiting=max(0, self._under_way - slots),
            started=sum(sum(outcomes.values()) - outcomes["refused"] for outcomes in counts),
            rejected=sum(outcomes["refused"] for outcomes in counts),
            aborted={},
            overran=sum(outcomes["overran"] for outcomes in counts),
            preempted=0,
            clients=self.clients,
        )

    def _stream(self, priority: Priority) -> _Executions:
        stream = self._of.get(priority)
        if stream is None:
            with self._adding:
                stream = self._of.get(priority)
                if stream is None:
                    stream = self._of[priority] = self._collector.add(_Executions(priority))
        return stream
