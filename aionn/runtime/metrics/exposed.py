"""The metrics of a runtime: their names, and the samples of now.

Owns the names. Reads the counts of ``figures``, and of each device its dispatcher's statistics and its process: nothing is
counted twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import anyio.to_thread

from aionn.hal import Model, Priority
from aionn.observability.exposition import Family, Sample
from aionn.observability.scraping import MetricsServer, Source, metrics_place
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.runtime.metrics.figures import CompilationFigures, RuntimeFigures
from aionn.runtime.metrics.spans import ExecutionSpans, Report
from aionn.runtime.placement.plan import Plan
from aionn.runtime.telemetry import structure_digest
from aionn.service.client.device import RemoteDevice

__all__ = ["FAMILIES", "RuntimeMetrics", "model_label", "samples", "spans_of"]

DIGEST_LETTERS = 12
"""Letters of a model's digest in a label: enough to distinguish the models of one application."""

MODEL_LETTERS_MAX = 64
"""Letters of a file's name in a label."""

FAMILIES = {
    "aionn_executions_total": Family("counter", "Executions by outcome."),
    "aionn_execution_seconds": Family("histogram", "From the call to the result."),
    "aionn_queue_seconds": Family("histogram", "From the call until a slot of the device was acquired."),
    "aionn_device_seconds": Family("histogram", "On the device, of executions that measure it."),
    "aionn_transfer_seconds": Family(
        "histogram", "Neither in the queue nor on the device, where that is measured."
    ),
    "aionn_frame_age_seconds": Family("histogram", "From the capture of an item of a stream to its result."),
    "aionn_slack_seconds": Family(
        "histogram", "From the result of an item to its deadline, below zero for late ones."
    ),
    "aionn_frames_dropped_total": Family("counter", "Items of a stream without a result, by reason."),
    "aionn_queue_length": Family(
        "gauge", "Executions of this application that wait for a slot of the device."
    ),
    "aionn_slots_busy": Family("gauge", "Slots of the device that run executions of this application."),
    "aionn_reserved_share": Family("gauge", "The share of a device slot that streams have reserved."),
    "aionn_event_loop_reserved_share": Family(
        "gauge", "The share of the event loop's time that streams have reserved."
    ),
    "aionn_reservations_total": Family("counter", "Reservations by result."),
    "aionn_reservations_refused_total": Family("counter", "Reservations that were refused, by reason."),
    "aionn_reserved_frames_total": Family(
        "counter", "Frames of streams with a guarantee that broke a promise, by the first promise."
    ),
    "aionn_device_up": Family("gauge", "0 after the driver process has ended, until the next one serves."),
    "aionn_driver_restarts_total": Family("counter", "Driver processes after the first one."),
}


def samples(figures: RuntimeFigures, devices: Iterable[RuntimeDevice]) -> Iterator[Sample]:
    """The samples of now, with copies of all counts. Classes without an execution are left out."""
    for (device, model), executions in figures.executions.items():
        for priority, found in executions.by_priority.items():
            outcomes = found.outcomes()
            if not any(outcomes.values()):
                continue
            labels = {"device": device, "model": model, "class": Priority(priority).name.lower()}
            for outcome, count in outcomes.items():
                yield Sample("aionn_executions_total", {**labels, "outcome": outcome}, count)
            yield Sample("aionn_execution_seconds", labels, found.whole.copy())
            yield Sample("aionn_queue_seconds", labels, found.queue())
            if found.device.total_ns:
                yield Sample("aionn_device_seconds", labels, found.device.copy())
                yield Sample("aionn_transfer_seconds", labels, found.transfer.copy())
    for label, stream in figures.streams.items():
        own = {"stream": label}
        if stream.age.total_ns:
            yield Sample("aionn_frame_age_seconds", own, stream.age.copy())
        if stream.slack.positive.total_ns or stream.slack.negative.total_ns:
            yield Sample("aionn_slack_seconds", own, stream.slack.copy())
        for reason, count in stream.dropped.items():
            yield Sample("aionn_frames_dropped_total", {**own, "reason": reason}, count)
    has_loop = False
    for each in devices:
        own = {"device": each.name}
        loop = each.reservations.loop
        if loop is not None and not has_loop:  # One for all devices.
            has_loop = True
            yield Sample("aionn_event_loop_reserved_share", {}, loop.share)
        yield Sample("aionn_queue_length", own, each.dispatcher.statistics().waiting)
        yield Sample("aionn_slots_busy", own, each.dispatcher.busy_count)
        yield from _reservations(each.reservations, own)
        hal = each.hal
        yield Sample("aionn_device_up", own, float(not (isinstance(hal, RemoteDevice) and hal.has_died)))
        if isinstance(hal, RemoteDevice):
            yield Sample("aionn_driver_restarts_total", own, max(0, hal.starts - 1))


def _reservations(reservations: DeviceReservations, own: dict[str, str]) -> Iterator[Sample]:
    """The samples of one device; none while no stream has asked for a guarantee, and from then on all of them."""
    results = reservations.counts()
    if not any(results.values()):
        return
    for result, count in results.items():
        yield Sample("aionn_reservations_total", {**own, "result": result}, count)
    for reason, count in reservations.refusals.items():
        yield Sample("aionn_reservations_refused_total", {**own, "reason": reason}, count)
    for label, count in reservations.labels.items():
        yield Sample("aionn_reserved_frames_total", {**own, "label": label.value}, count)
    for slot, share in enumerate(reservations.shares()):
        yield Sample("aionn_reserved_share", {**own, "slot": str(slot)}, share)


async def model_label(model: Model | str | os.PathLike[str]) -> str:
    """The name of a model's file, or the first letters of the digest of a model that came from none."""
    if isinstance(model, Model):
        return (await anyio.to_thread.run_sync(structure_digest, model))[:DIGEST_LETTERS]
    return os.path.splitext(os.path.basename(os.fspath(model)))[0][:MODEL_LETTERS_MAX]


async def spans_of(
    spans: ExecutionSpans | None, plan: Plan, model: Model | str | os.PathLike[str]
) -> Report | None:
    """The report of a compilation's executions as spans; None for a runtime without spans."""
    return None if spans is None else spans.report(plan.device_names, await model_label(model))


class RuntimeMetrics:
    """The figures of one runtime, counted from the start and served while it is open.

    Args:
        place: See ``MetricsServer``.

    Raises:
        InvalidArgument: The place is wrong.
    """

    def __init__(self, place: str) -> None:
        metrics_place(place)
        self._place = place
        self._figures = RuntimeFigures(now_ns)
        self._server: MetricsServer | None = None

    @property
    def url(self) -> str | None:
        """Where they are served; None while they are not."""
        return None if self._server is None else self._server.url

    def serve(self, background: Background, devices: Callable[[], Iterable[RuntimeDevice]]) -> None:
        """Begins to serve. Raises as ``MetricsServer``.

        Args:
            background: In its loop the samples are taken.
            devices: Returns the devices.
        """

        def collect() -> Iterator[Sample]:
            self._figures.free_labels(now_ns())
            return samples(self._figures, devices())

        source = Source(
            FAMILIES,
            collect,
            background.run_in_loop,
            lambda: background.is_open,
        )
        self._server = MetricsServer(self._place, source)

    async def compilation(self, model: Model | str | os.PathLike[str], plan: Plan) -> CompilationFigures:
        """The counts of a compilation."""
        return self._figures.compilation(plan.device_names, await model_label(model))

    async def aclose(self) -> None:
        """Ends the server. Idempotent. On a thread: that of the server may wait for the loop."""
        server, self._server = self._server, None
        if server is not None:
            await anyio.to_thread.run_sync(server.close)
