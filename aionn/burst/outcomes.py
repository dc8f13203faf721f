"""The outcome of an execution, as its result packet states it. No I/O."""

from __future__ import annotations

from aionn.burst.packets import TEXT_CHARACTERS_MAX, BurstResult, MalformedPacket, decode_result
from aionn.errors import (
    Error,
    ErrorStatus,
    GeneralFailure,
    error_for_status,
    general_failure_of,
    with_driver_traceback,
)
from aionn.hal import ExecutionResult
from aionn.hal.callers import FrameReport

__all__ = ["outcome_of_packet"]


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


def _error_of(result: BurstResult) -> Error:
    message = f"burst: the driver answered {result.status.name}"
    if result.texts is None:
        return error_for_status(result.status, message)
    error = error_for_status(result.status, f"{message}: {result.texts.message[:TEXT_CHARACTERS_MAX]}")
    return with_driver_traceback(error, result.texts.traceback)
