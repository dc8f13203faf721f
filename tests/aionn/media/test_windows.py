"""Cutting a stream into windows, against slices of the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aionn.errors import InvalidArgument
from aionn.media.windows import WindowCutter, WindowPlan


@given(
    window=st.integers(1, 40),
    hop=st.integers(1, 60),
    blocks=st.lists(st.integers(0, 50), max_size=30),
)
def test_windows_are_slices_whatever_the_blocks(window, hop, blocks):
    plan = WindowPlan(window, hop, 100)
    whole = np.arange(sum(blocks), dtype=np.float32)
    cutter = WindowCutter(plan)
    start = 0
    windows = []
    for block in blocks:
        start += block
        windows += cutter.push(whole[start - block : start])
        # As soon as the last sample is there, and not sooner.
        assert len(windows) == plan.count(start)
    for number, (index, samples) in enumerate(windows):
        assert index == number
        assert samples.base is None
        np.testing.assert_array_equal(samples, whole[plan.start(index) : plan.stop(index)])


def test_last_sample_is_captured_at_the_end_of_the_window():
    plan = WindowPlan.of(1.0, 0.1, 16_000, "here")
    assert (plan.window_samples, plan.hop_samples) == (16_000, 1_600)
    assert plan.captured_after_ns(0) == 1_000_000_000
    assert plan.captured_after_ns(7) == 1_700_000_000
    assert plan.start_s(7) == 0.7
    assert plan.count(15_999) == 0
    assert plan.count(17_600) == 2


@pytest.mark.parametrize("length_s", [0.0, -1.0, 1e-6, 61.0, math.nan, math.inf])
def test_length_out_of_range_is_refused(length_s):
    with pytest.raises(InvalidArgument, match=r"here: window_s: expected one sample \(1/16000 s\) to 60 s"):
        WindowPlan.of(length_s, 0.1, 16_000, "here")
    with pytest.raises(InvalidArgument, match="here: hop_s: expected"):
        WindowPlan.of(1.0, length_s, 16_000, "here")


@pytest.mark.parametrize("rate", [0, -8_000, 200_000])
def test_sample_rate_out_of_range_is_refused(rate):
    with pytest.raises(InvalidArgument, match=f"here: sample_rate_hz: expected 1 to 192000, got {rate}"):
        WindowPlan.of(1.0, 0.1, rate, "here")
