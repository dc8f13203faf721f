"""The outcome of an execution, as its result packet states it. No I/O."""

from __future__ import annotations

from aionn.burst.packets import TEXT_CHARACTERS_MAX, BurstResult, MalformedPacket, decode_result
from aionn.burst.reports import split_report
from aionn.errors import (
    Error,
    ErrorStatus,
    GeneralFailure,
    error_for_status,
    general_failure_of,
    with_driver_traceback,
)
from aionn.hal import ExecutionResult
from aionn.hal.callers import FrameReport, ReservedFrame

__all__ = ["FrameOutcomes", "outcome_of_packet"]


def outcome_of_packet(payload: bytes) -> tuple[ExecutionResult | Error, FrameReport | None]:
    """Decodes a result packet, and the report about a frame of a reservation, if it has one. Raises nothing: a packet that cannot
    be decoded is a ``GeneralFailure``."""
    try:
        result = decode_result(payload)
    except MalformedPacket as e:
        return GeneralFailure(f"burst: the result cannot be read: {e}"), None
    except Exception as e:  # The packet is taken from the queue: there will be no other.
        return general_failure_of(e, "burst: the result cannot be read"), None
    if result.status == ErrorStatus.NONE:
        return ExecutionResult(True, result.output_shapes, result.timing), result.report
    if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        return ExecutionResult(False, result.output_shapes), result.report
    return _error_of(result), result.report


class FrameOutcomes:
    """The outcomes of frames of reservations: of packets that differ in their reports alone the first one is decoded."""

    def __init__(self) -> None:
        self._head = b""
        self._result = ExecutionResult()

    def outcome(self, payload: bytes, frame: ReservedFrame, now_ns: int) -> ExecutionResult | Error:
        """The outcome of a frame, which gets its report, if there is one. The same object as long as results repeat."""
        split = split_report(payload)
        if split is not None and split[0] == self._head:
            frame.reported(split[1], now_ns)
            return self._result
        outcome, report = outcome_of_packet(payload)
        if report is not None:
            frame.reported(report, now_ns)
        if isinstance(outcome, ExecutionResult) and report is not None and split is not None:
            self._head, self._result = split[0], outcome
        return outcome


def _error_of(result: BurstResult) -> Error:
    message = f"burst: the driver answered {result.status.name}"
    if result.texts is None:
        return error_for_status(result.status, message)
    error = error_for_status(result.status, f"{message}: {result.texts.message[:TEXT_CHARACTERS_MAX]}")
    return with_driver_traceback(error, result.texts.traceback)
