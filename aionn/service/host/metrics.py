"""The metrics of a served device: its clients and their executions, as its process sees them.

Owns the counts, their names and their samples. An application counts its own executions (``aionn.runtime.metrics``), with the wait
in its own queue and the way here and back; these are from the request to the answer in this process, of all clients together.

Invariants:
1. The number of arrays is fixed: one for each priority.
2. Counting is exact although each burst has a thread: a lock is held for the additions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aionn.errors import ErrorStatus, status_of
from aionn.hal import Priority
from aionn.observability.durations import Durations
from aionn.observability.exposition import Family, Sample

__all__ = ["FAMILIES", "HostFigures"]

FAMILIES: Final = {
    "aionn_executions_total": Family("counter", "Executions by outcome."),
    "aionn_execution_seconds": Family("histogram", "From a request to its answer in this process."),
    "aionn_clients": Family("gauge", "Clients that are served."),
    "aionn_executions_under_way": Family("gauge", "Executions that wait for the device or run on it."),
    "aionn_device_up": Family("gauge", "1 while new work is accepted, 0 while the process drains."),
}

_OUTCOMES: Final = ("on_time", "late", "refused", "overran", "failed")

_OUTCOME_OF: Final = {
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: "refused",
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: "refused",
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: "refused",
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: "overran",
}


class HostFigures:
    """The counts of one process.

    Attributes:
        clients: Number of clients that are served.
    """

    def __init__(self) -> None:
        self.clients = 0
        self._lock = threading.Lock()
        self._under_way = 0
        self._durations = {priority: Durations() for priority in Priority}
        self._outcomes = {priority: dict.fromkeys(_OUTCOMES, 0) for priority in Priority}

    @contextmanager
    def executing(self, priority: Priority, deadline_ns: int | None) -> Iterator[None]:
        """An execution, from its request to its answer. From any thread."""
        began_ns, outcome = time.monotonic_ns(), "failed"
        with self._lock:
            self._under_way += 1
        try:
            yield
            outcome = "on_time" if deadline_ns is None or time.monotonic_ns() <= deadline_ns else "late"
        except Exception as e:
            outcome = _OUTCOME_OF.get(status_of(e), "failed")
            raise
        finally:
            with self._lock:
                self._under_way -= 1
                self._outcomes[priority][outcome] += 1
                if outcome in ("on_time", "late"):
                    self._durations[priority].add(time.monotonic_ns() - began_ns)

    def samples(self, device: str, *, is_up: bool) -> Iterator[Sample]:
        """The samples of now, with copies of all counts. Classes without an execution are left out."""
        own = {"device": device}
        yield Sample("aionn_device_up", own, float(is_up))
        yield Sample("aionn_clients", own, self.clients)
        yield Sample("aionn_executions_under_way", own, self._under_way)
        for priority in Priority:
            with self._lock:
                outcomes, durations = dict(self._outcomes[priority]), self._durations[priority].copy()
            if any(outcomes.values()):
                labels = {**own, "class": priority.name.lower()}
                for outcome, count in outcomes.items():
                    yield Sample("aionn_executions_total", {**labels, "outcome": outcome}, count)
                yield Sample("aionn_execution_seconds", labels, durations)
