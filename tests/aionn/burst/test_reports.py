"""Result packets with reports in the form in which only the last bytes differ."""

from __future__ import annotations

import msgspec
import pytest

from aionn.burst.outcomes import FrameOutcomes
from aionn.burst.packets import decode_result, encode_result, result_of
from aionn.burst.reports import REPORT_BYTES, encode_report, head_of_result, split_report
from aionn.errors import GeneralFailure
from aionn.hal import ExecutionResult, OutputShape, Timing
from aionn.hal.callers import FrameReport

RESULTS = [
    ExecutionResult(),
    ExecutionResult(True, (OutputShape((1, 2**32 - 1)), OutputShape(()))),
    ExecutionResult(True, (OutputShape((3,)),), Timing(5, 7)),
    ExecutionResult(False, (OutputShape((9,), False),)),
    ExecutionResult(True, tuple(OutputShape((each,)) for each in range(20))),
]
REPORTS = [
    FrameReport("", 0),
    FrameReport("", 5, True, 2**63, 2**64 - 1, 1, 0, 3),
    FrameReport("", 2**64 - 1, False, 1, 2, 3, 4, 5),
]


class Noting:
    """A frame that notes its reports."""

    reservation = 1

    def __init__(self) -> None:
        self.reports: list[tuple[FrameReport, int]] = []

    def sent(self, now_ns: int) -> None: ...

    def reported(self, report: FrameReport, now_ns: int) -> None:
        self.reports.append((report, now_ns))


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("report", REPORTS)
def test_form_is_read_as_any_other_and_ends_with_the_report(
    result: ExecutionResult, report: FrameReport
) -> None:
    end = encode_report(report)
    assert end is not None and len(end) == REPORT_BYTES
    packet = head_of_result(result) + end
    assert decode_result(packet) == result_of(result)._replace(report=report)
    assert split_report(packet) == (head_of_result(result), report)


def test_other_reports_have_another_form() -> None:
    for report in (FrameReport("early", 1), FrameReport("", -1), FrameReport("", 1, missing_ns=2**64)):
        assert encode_report(report) is None


def test_packets_that_end_otherwise_are_not_split() -> None:
    assert split_report(b"") is None
    for report in (None, FrameReport("blocked", 1, True, 1, 2, 3)):
        assert split_report(encode_result(result_of(RESULTS[1])._replace(report=report))) is None
    end = encode_report(REPORTS[1])
    assert end is not None and split_report(end) is None, "there is nothing before it"
    packet = bytearray(head_of_result(RESULTS[1]) + end)
    kept = [split_report(bytes(packet))]
    assert kept != [None]
    for place in range(len(packet) - REPORT_BYTES, len(packet)):
        changed = bytearray(packet)
        changed[place] ^= 0xFF
        split = split_report(bytes(changed))
        if split is not None:  # A number is another one.
            assert decode_result(bytes(changed)).report == split[1]


def test_result_that_repeats_is_the_same_object_and_each_frame_has_its_report() -> None:
    outcomes, frame = FrameOutcomes(), Noting()
    found = []
    for result in (RESULTS[1], RESULTS[1], RESULTS[2], RESULTS[1]):
        for now_ns, report in enumerate(REPORTS):
            end = encode_report(report)
            assert end is not None
            found.append(outcomes.outcome(head_of_result(result) + end, frame, now_ns))
            assert found[-1] == result
    assert len({id(each) for each in found}) == 3
    assert frame.reports == [(report, now_ns) for now_ns, report in enumerate(REPORTS)] * 4


def test_bytes_that_only_look_like_a_report_are_decoded() -> None:
    """A packet that is malformed before its end is never taken for the one before it."""
    outcomes, frame = FrameOutcomes(), Noting()
    end = encode_report(REPORTS[0])
    assert end is not None
    outcomes.outcome(head_of_result(RESULTS[1]) + end, frame, 0)
    for head in (b"\x91", head_of_result(RESULTS[1])[:-1], head_of_result(RESULTS[1]) + b"\xc0"):
        assert isinstance(outcomes.outcome(head + end, frame, 1), GeneralFailure)
    text = msgspec.msgpack.encode("x")
    assert isinstance(outcomes.outcome(text + end, frame, 2), GeneralFailure)
    assert len(frame.reports) == 1
