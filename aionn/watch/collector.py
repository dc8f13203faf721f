"""One object that collects the figures of streams, sources and devices, for a terminal, a page, a notebook and metrics.

Owns which ones there are, and what a snapshot of them has. Every reader takes the same snapshot, so that no two of them disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aionn.errors import InvalidArgument
from aionn.reports.columns import counted
from aionn.reports.html_page import element, joined, table
from aionn.runtime.clock import now_ns
from aionn.scheduler.job import Reason
from aionn.watch.figures import StreamSnapshot
from aionn.watch.histogram import Quantiles
from aionn.watch.streams import WatchedStream

if TYPE_CHECKING:
    from aionn.runtime.devices import RuntimeDevice

__all__ = ["Collector", "DeviceFigures", "Snapshot", "milliseconds"]

STREAMS_MAX = 16
"""Streams of a collector: a page with more could not be read, and a snapshot must fit into one message."""

DEVICES_MAX = 32
"""Devices of a collector, for the same reason."""

NAME_LETTERS_MAX = 120
"""Letters of a name or of a reason that a snapshot repeats."""

_W = TypeVar("_W", bound=WatchedStream)


class DeviceFigures(msgspec.Struct, frozen=True):
    """The figures of a device's queue in this application.

    Attributes:
        name: The device's.
        pid: Its driver process; None without one.
        slots: Executions that it runs concurrently.
        waiting: Executions that wait for a slot now.
        started: Executions that got a slot.
        rejected: Executions that were rejected when they were asked for.
        aborted: Executions that were rejected while they waited, by reason.
        overran: Executions that ran past their deadline.
        preempted: Executions that were stopped for more urgent ones.
        clients: Applications that it serves; None for a device of this application alone.
    """

    name: str
    pid: int | None
    slots: int
    waiting: int
    started: int
    rejected: int
    aborted: dict[str, int]
    overran: int
    preempted: int
    clients: int | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """The figures at one moment.

    Attributes:
        at_ns: The moment, CLOCK_MONOTONIC.
        title: The subject of the figures.
        streams: In the order in which they were added.
        devices: In the order in which they were added.
    """

    at_ns: int
    title: str
    streams: tuple[StreamSnapshot, ...]
    devices: tuple[DeviceFigures, ...]

    def _repr_html_(self) -> str:
        """Tables for a notebook."""
        parts = [_streams_table(self.streams)] if self.streams else []
        parts += [_devices_table(self.devices)] if self.devices else []
        return joined(element("p", self.title) if self.title else None, *parts)


class Collector:
    """Collects figures; one for an application is enough.

    Args:
        title: The subject of the figures; the page's heading.

    Attributes:
        title: See above.
        streams: In the order in which they were added.
    """

    def __init__(self, title: str = "aionn") -> None:
        self.title = _text(title)
        self.streams: list[WatchedStream] = []
        self._devices: list[RuntimeDevice] = []
        self._readers: list[Callable[[], DeviceFigures]] = []

    def add_stream(
        self, name: str, *, within_ns: int | None = None, source: Any | None = None
    ) -> WatchedStream:
        """Adds a stream.

        Args:
            name: Shown.
            within_ns: An item is on time if its result is there so long after its capture; None without deadlines.
            source: A source of `aionn.media`, or what has its ``statistics()``; None means no source that counts.

        Raises:
            InvalidArgument: There are `STREAMS_MAX` already.
        """
        return self.add(WatchedStream(_text(name)[:NAME_LETTERS_MAX], within_ns=within_ns, source=source))

    def add(self, stream: _W) -> _W:
        """Adds a stream that was made before; returns it. Raises as ``add_stream``."""
        if len(self.streams) >= STREAMS_MAX:
            raise InvalidArgument(
                f"Collector: expected at most {STREAMS_MAX} streams; make another collector"
            )
        self.streams.append(stream)
        return stream

    def remove_stream(self, stream: WatchedStream) -> None:
        """Removes a stream that has ended. Idempotent."""
        self.streams = [other for other in self.streams if other is not stream]

    def add_devices(self, devices: Iterable[RuntimeDevice]) -> None:
        """Adds the devices whose queues are shown, such as those of ``runtime.devices`` that a compilation uses.

        Raises:
            InvalidArgument: There would be more than `DEVICES_MAX`.
        """
        added = [device for device in devices if device not in self._devices]
        self._check_devices(len(added))
        self._devices += added

    def add_device_figures(self, read: Callable[[], DeviceFigures]) -> None:
        """Adds a device whose figures are read by a function at each snapshot, such as one that is served to other applications.

        Raises:
            InvalidArgument: There are `DEVICES_MAX` already.
        """
        self._check_devices(1)
        self._readers.append(read)

    def _check_devices(self, added: int) -> None:
        if len(self._devices) + len(self._readers) + added > DEVICES_MAX:
            raise InvalidArgument(f"Collector: expected at most {DEVICES_MAX} devices")

    def snapshot(self, at_ns: int | None = None) -> Snapshot:
        """The figures of now, or of a moment given in nanoseconds of CLOCK_MONOTONIC. Takes about 0.1 ms for each stream."""
        moment_ns = now_ns() if at_ns is None else at_ns
        return Snapshot(
            moment_ns,
            self.title,
            tuple(stream.snapshot(moment_ns) for stream in self.streams),
            (*map(_device_figures, self._devices), *(read() for read in self._readers)),
        )

    def _repr_html_(self) -> str:
        return self.snapshot()._repr_html_()


def _text(name: str) -> str:
    """A name as text that can be sent. The name of a file may have bytes that are not text."""
    return name.encode("utf-8", "backslashreplace").decode()


def _device_figures(device: RuntimeDevice) -> DeviceFigures:
    queue, counts = device.dispatcher.statistics(), device.dispatcher.counts()
    aborted = {Reason[name].value: count for name, count in queue.aborted.items()}
    return DeviceFigures(
        name=device.name[:NAME_LETTERS_MAX],
        pid=device.pid,
        slots=device.info.slots,
        waiting=queue.waiting,
        started=queue.started,
        rejected=queue.rejected,
        aborted=aborted,
        overran=counts["overran"],
        preempted=counts["preempted"],
    )


def milliseconds(value: float | None) -> str:
    """A duration for people; a hyphen without one."""
    return "-" if value is None else f"{value:.1f}"


def _streams_table(streams: Iterable[StreamSnapshot]) -> str:
    def cells(stream: StreamSnapshot) -> tuple[object, ...]:
        latency: Quantiles = stream.latency
        dropped = stream.dropped + stream.lost + (stream.source.dropped if stream.source else 0)
        state = stream.source.state if stream.source else ""
        figures = (stream.on_time, stream.late, dropped, milliseconds(latency.p50), milliseconds(latency.p99))
        found = ", ".join(f"{finding.label} {finding.score:.0%}" for finding in stream.findings[:3])
        return (stream.name, f"{stream.per_second:.1f}", *figures, state or "-", found or "-")

    heads = ("stream", "per s", "on time", "late", "dropped", "p50 ms", "p99 ms", "source", "recognised")
    return table(heads, [cells(stream) for stream in streams])


def _devices_table(devices: Iterable[DeviceFigures]) -> str:
    rows = [
        (
            device.name,
            device.slots,
            device.waiting,
            device.started,
            device.rejected + sum(device.aborted.values()),
            device.overran,
        )
        for device in devices
    ]
    caption = counted(len(rows), "device")
    return table(("device", "slots", "waiting", "started", "rejected", "overran"), rows, caption=caption)
