"""A snapshot as metrics in the Prometheus text format; pure.

Owns the names of the metrics; ``aionn.observability.exposition`` owns the format.
"""

from __future__ import annotations

from collections.abc import Iterator

from aionn.observability.exposition import Family, Sample, exposition
from aionn.watch.collector import Snapshot

__all__ = ["metrics_text"]

FAMILIES = {
    "aionn_stream_items_total": Family("counter", "Items of a stream by outcome."),
    "aionn_stream_latency_seconds": Family(
        "gauge", "Latency from capture to result of the last 5 to 10 seconds, by quantile."
    ),
    "aionn_stream_age_seconds": Family("gauge", "Age of the last item."),
    "aionn_source_items_total": Family("counter", "Items of a source by outcome."),
    "aionn_source_reconnections_total": Family(
        "counter", "Number of times that a lost source was opened again."
    ),
    "aionn_source_live": Family("gauge", "1 while a live source delivers, 0 while it is lost."),
    "aionn_device_waiting": Family("gauge", "Executions that wait for a slot of a device."),
    "aionn_device_executions_total": Family(
        "counter", "Executions of a device by outcome of their scheduling."
    ),
}


def metrics_text(snapshot: Snapshot) -> str:
    """All figures of a snapshot that a monitoring system can use, each with its labels."""
    return exposition(FAMILIES, (*_of_streams(snapshot), *_of_devices(snapshot)))


def _of_streams(snapshot: Snapshot) -> Iterator[Sample]:
    for number, stream in enumerate(snapshot.streams):
        # Two streams may have the same name.
        own = {"stream": stream.name, "number": str(number)}
        for outcome in ("on_time", "late", "dropped", "lost"):
            yield Sample("aionn_stream_items_total", {**own, "outcome": outcome}, getattr(stream, outcome))
        for quantile, value in (("0.5", stream.recent.p50), ("0.99", stream.recent.p99)):
            if value is not None:
                yield Sample("aionn_stream_latency_seconds", {**own, "quantile": quantile}, value / 1e3)
        if stream.age_ms is not None:
            yield Sample("aionn_stream_age_seconds", own, stream.age_ms / 1e3)
        source = stream.source
        if source is not None:
            for outcome in ("delivered", "dropped", "lost", "corrupt"):
                yield Sample(
                    "aionn_source_items_total", {**own, "outcome": outcome}, getattr(source, outcome)
                )
            if source.state:
                yield Sample("aionn_source_reconnections_total", own, source.reconnections)
                yield Sample("aionn_source_live", own, float(source.state == "live"))


def _of_devices(snapshot: Snapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        own = {"device": device.name}
        yield Sample("aionn_device_waiting", own, device.waiting)
        aborted = sum(device.aborted.values())
        outcomes = {
            "started": device.started,
            "rejected": device.rejected + aborted,
            "overran": device.overran,
            "preempted": device.preempted,
        }
        for outcome, count in outcomes.items():
            yield Sample("aionn_device_executions_total", {**own, "outcome": outcome}, count)
