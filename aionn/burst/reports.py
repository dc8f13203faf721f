"""The packets of results with the report about a frame that kept its promises, in a form in which only the last bytes differ.

Owns that form: the report at the end, with all numbers at their longest, so that the bytes before it repeat and are neither encoded
nor decoded again. It is MessagePack like any other form, which ``packets`` reads. No I/O.
"""

from __future__ import annotations

import struct

import msgspec

from aionn.burst.packets import encode_result, result_of
from aionn.hal import ExecutionResult
from aionn.hal.callers import FrameReport

__all__ = ["REPORT_BYTES", "encode_report", "head_of_result", "split_report"]

_REPORT = struct.Struct(">3sBQ1sBQBQBQBQBQ")
"""``FrameReport`` in MessagePack, without a label."""

_START = b"\x99\x05\xa0"
_UINT64 = 0xCF
_TRUE, _FALSE = b"\xc3", b"\xc2"

REPORT_BYTES = _REPORT.size
"""Length of the report at the end of a packet."""

_NUMBER_MAX = 2**64 - 1
_NOTHING = FrameReport("", 0)


def head_of_result(result: ExecutionResult) -> bytes:
    """The bytes before the report, of a result packet with one."""
    packet = encode_result(result_of(result)._replace(report=_NOTHING))
    return packet[: -len(msgspec.msgpack.encode(_NOTHING))]


def encode_report(report: FrameReport) -> bytes | None:
    """The end of a result packet; None for a report that does not have this form."""
    if report.label:
        return None
    times = report.arrived_ns, report.ended_ns, report.answered_ns, report.blocked_ns, report.missing_ns
    if not 0 <= min(report.held_ns, *times) <= max(report.held_ns, *times) <= _NUMBER_MAX:
        return None
    arrived_ns, ended_ns, answered_ns, blocked_ns, missing_ns = times
    return _REPORT.pack(
        _START,
        _UINT64,
        report.held_ns,
        _TRUE if report.is_by_other else _FALSE,
        _UINT64,
        arrived_ns,
        _UINT64,
        ended_ns,
        _UINT64,
        answered_ns,
        _UINT64,
        blocked_ns,
        _UINT64,
        missing_ns,
    )


def split_report(payload: bytes) -> tuple[bytes, FrameReport] | None:
    """A packet's bytes before the report, and the report; None if it does not end like one.

    Any bytes may end like that: the caller must know that the bytes before are those of a result packet with a report.
    """
    at = len(payload) - REPORT_BYTES
    if at <= 0 or not payload.startswith(_START, at):
        return None
    _, a, held_ns, other, b, arrived_ns, c, ended_ns, d, answered_ns, e, blocked_ns, f, missing_ns = (
        _REPORT.unpack_from(payload, at)
    )
    if not (a == b == c == d == e == f == _UINT64 and other in (_TRUE, _FALSE)):
        return None
    report = FrameReport(
        "", held_ns, other == _TRUE, arrived_ns, ended_ns, answered_ns, blocked_ns, missing_ns
    )
    return payload[:at], report
