"""Executions as spans of OpenTelemetry, within the trace of a caller.

Owns the spans of an execution, and how a caller's W3C trace context is accepted. OpenTelemetry's API, an optional dependency, reads
the headers and knows the current span. A span is made when its execution has ended: nothing is done before, and nothing at all for
a runtime without spans.

The spans: ``aionn.execution`` from the call to the result; within it ``queue`` until a slot of the device was acquired, and
``transfer`` from then until the result was here; within that ``device``, where it was measured. The way to the device and the way
back are not measured one by one, so ``device`` is in the middle of ``transfer``. One without a result has no parts.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aionn.errors import DeviceUnavailable, ErrorStatus, InvalidArgument
from aionn.runtime.executions.results import Result

__all__ = ["ExecutionSpans", "Report", "all_of", "open_spans", "trace_context"]

Report = Callable[[ErrorStatus, Result | None, int], None]
"""Called at the end of an execution with its status, its result and nanoseconds since the call; see ``JobOwner``."""


class ExecutionSpans:
    """Makes the spans of the executions of one runtime.

    Args:
        provider: A ``TracerProvider``; True takes the one of the process.

    Raises:
        DeviceUnavailable: The package is missing.
        InvalidArgument: It is not a ``TracerProvider``.
    """

    def __init__(self, provider: Any) -> None:
        try:
            from opentelemetry import trace
        except ImportError as e:
            raise DeviceUnavailable(
                "spans: needs opentelemetry-api, which cannot be found: pip install 'aionn[otel]'"
            ) from e
        if provider is not True and not isinstance(provider, trace.TracerProvider):
            raise InvalidArgument(f"spans: expected True or a TracerProvider, got {provider!r}")
        self._trace = trace
        self._tracer = trace.get_tracer("aionn", tracer_provider=None if provider is True else provider)

    def report(self, devices: str, model: str) -> Report:
        """The report of a compilation's executions.

        Args:
            devices: The names of its devices.
            model: The name of its file, or the digest of a model that came from none.
        """
        attributes = {"aionn.device": devices, "aionn.model": model}

        def ended(status: ErrorStatus, result: Result | None, took_ns: int) -> None:
            self._ended(attributes, status, result, took_ns)

        return ended

    def _ended(
        self, attributes: dict[str, str], status: ErrorStatus, result: Result | None, took_ns: int
    ) -> None:
        trace = self._trace
        ended_ns = time.time_ns()  # The clock of OpenTelemetry is that of the calendar.
        began_ns = ended_ns - took_ns
        # The parent is the current span of the task that executes, which has the context of its caller.
        whole = self._tracer.start_span("aionn.execution", attributes=attributes, start_time=began_ns)
        if whole.is_recording():
            if result is None:
                whole.set_status(trace.Status(trace.StatusCode.ERROR, status.name))
            else:
                within = trace.set_span_in_context(whole)
                slot_ns = began_ns + result.queued_ns
                self._part("queue", began_ns, slot_ns, within)
                transfer = self._part("transfer", slot_ns, ended_ns, within)
                device_ns = result.timing.time_on_device_ns
                if device_ns is not None:
                    device_ns = min(device_ns, ended_ns - slot_ns)
                    begin_ns = slot_ns + (ended_ns - slot_ns - device_ns) // 2
                    self._part("device", begin_ns, begin_ns + device_ns, trace.set_span_in_context(transfer))
                if result.fallback:
                    whole.set_attribute("aionn.fallback", result.fallback)
        whole.end(ended_ns)

    def _part(self, name: str, begin_ns: int, end_ns: int, context: Any) -> Any:
        span = self._tracer.start_span(name, context, start_time=begin_ns)
        span.end(end_ns)
        return span


def open_spans(spans: Any) -> ExecutionSpans | None:
    """The argument ``spans`` of ``aionn.open``: None or False makes none. Raises as ``ExecutionSpans``."""
    return None if spans is None or spans is False else ExecutionSpans(spans)


def all_of(*reports: Report | None) -> Report | None:
    """One report that calls all of those that are not None; None where all are."""
    called = [report for report in reports if report is not None]
    if len(called) <= 1:
        return called[0] if called else None

    def report(status: ErrorStatus, result: Result | None, took_ns: int) -> None:
        for each in called:
            each(status, result, took_ns)

    return report


@contextmanager
def trace_context(traceparent: str | None, tracestate: str | None = None) -> Iterator[None]:
    """Executions that begin in the block belong to the trace of a caller, such as the sender of a request:

        with aionn.trace_context(request.headers.get("traceparent")):
            result = await burst.execute([x])

    A stream belongs to the trace in whose block its first result is requested. In a program that has no spans (the argument
    ``spans`` of ``aionn.open``, or OpenTelemetry itself) it has no effect.

    Args:
        traceparent: The header of W3C Trace Context; None or an invalid one changes nothing, as the standard demands.
        tracestate: The header beside it; None means none.

    Raises:
        InvalidArgument: An argument is not text.
    """
    for name, value in (("traceparent", traceparent), ("tracestate", tracestate)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"trace_context, {name}: expected the text of the header, got {value!r}")
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        yield
        return
    carrier = {}
    if traceparent is not None:
        carrier["traceparent"] = traceparent
    if tracestate is not None:
        carrier["tracestate"] = tracestate
    token = context.attach(TraceContextTextMapPropagator().extract(carrier, context.get_current()))
    try:
        yield
    finally:
        context.detach(token)
