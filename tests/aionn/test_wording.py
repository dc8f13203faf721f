"""The words that all messages share: the class of a value, and durations that make no sense."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import class_text, shown
from aionn.platform.numbers import POSITIVE_S_MIN, checked_seconds
from fences import SyncFence


class NDFrame:
    """An abbreviation begins with the sound of a vowel."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "an int"),
        ("x", "a str"),
        (b"x", "bytes"),
        (None, "None"),
        (int, "the class int"),
        (object(), "an object"),
        (np.zeros(1), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (NDFrame(), "an NDFrame"),
        (SyncFence("x"), "a SyncFence"),
        (OSError(), "an OSError"),
    ],
)
def test_class_of_a_value_has_its_article(value: Any, words: str) -> None:
    assert class_text(value) == words


def test_every_value_can_be_shown() -> None:
    assert shown(-(10**5000)) == "an int that cannot be shown"
    assert "\n" not in shown(np.zeros((3, 3)))


SPAN = datetime.timedelta(milliseconds=33)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "got -1$"),
        (math.nan, "got nan$"),
        (math.inf, "got inf$"),
        (True, "got True$"),
        ("33ms", "got '33ms'$"),
        (None, "got None$"),
        (SPAN, r"got datetime.timedelta\(.*\); write its total_seconds\(\)$"),
        (33_000_000, r"got 33000000; did you mean 0.033\? It looks like nanoseconds$"),
        (1e300, r"got 1e\+300$"),
        (10**400, r"got 1000.*000$"),
    ],
)
def test_duration_that_is_none(value: Any, words: str) -> None:
    start = r"^f: wait_s: expected a number of seconds of at least 0 and at most 86400 \(a day\), "
    with pytest.raises(aionn.InvalidArgument, match=start + words):
        checked_seconds(value, "f: wait_s")


def test_duration_in_milliseconds_where_the_range_is_short() -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"got 250; did you mean 0.25\? It looks like milliseconds$"
    ):
        checked_seconds(250, "f: wait_s", most=60)


def test_duration_above_zero() -> None:
    for value in (0, 1e-10):
        with pytest.raises(aionn.InvalidArgument, match=r"a number of seconds above 0, got"):
            checked_seconds(value, "f: wait_s", least=POSITIVE_S_MIN, most=None)
    assert checked_seconds(np.float32(0.5), "f: wait_s") == 0.5


def test_time_out_of_a_fence_in_seconds() -> None:
    with pytest.raises(
        TypeError, match=r"^timeout_ns: expected nanoseconds .* or None, got 0.5; seconds are round"
    ):
        SyncFence("x").wait(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^timeout_ns: expected nanoseconds of at least 0 or None, got -1$"):
        SyncFence("x").wait(-1)
