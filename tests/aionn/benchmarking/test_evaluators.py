"""The evaluators: their arithmetic on data made by hand, their limits, and what they refuse."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from aionn.benchmarking.evaluators import (
    FRAME_VALUES,
    edit_distance,
    evaluate_mel_cepstra,
    evaluate_phones,
    evaluate_top_k,
)
from aionn.errors import InvalidArgument


def scores(*places: int) -> np.ndarray:
    """Scores of a picture in which the classes are ranked as given."""
    array = np.zeros((1, len(places)), dtype=np.float32)
    for rank, place in enumerate(places):
        array[0, place] = 1 - rank / 10
    return array


def test_top_k_counts_where_the_right_class_stands() -> None:
    ranked = scores(3, 1, 4, 0, 2, 5)
    found = evaluate_top_k([ranked] * 4, [3, 1, 2, 5])
    assert found.values == {"top1": 0.25, "top2": 0.5, "top3": 0.5, "top4": 0.5, "top5": 0.75}
    assert found.samples == 4
    assert found.failures == ()


def test_equal_scores_favour_the_lower_class_like_argmax() -> None:
    assert evaluate_top_k([np.ones((1, 3), dtype=np.int8)], [0]).values["top1"] == 1.0
    assert evaluate_top_k([np.ones((1, 3), dtype=np.int8)], [1]).values == {"top1": 0, "top2": 1, "top3": 1}


def test_unsigned_scores_do_not_wrap() -> None:
    assert evaluate_top_k([np.array([0, 255, 1], dtype=np.uint8)], [1]).values["top1"] == 1.0


@pytest.mark.parametrize(("expected", "fails"), [(0.5, False), (0.549, False), (0.551, True), (None, False)])
def test_top_1_may_be_five_points_under_what_is_known(expected: float | None, fails: bool) -> None:
    found = evaluate_top_k([scores(0, 1), scores(1, 0)], [0, 0], expected)
    assert bool(found.failures) == fails


def frames(count: int, value: float = 0.0, voicing: float = 1.0) -> np.ndarray:
    array = np.full((count, FRAME_VALUES), value, dtype=np.float32)
    array[:, -1] = voicing
    return array


def test_distortion_is_the_root_mean_square_over_39_amplitudes() -> None:
    ours, wanted = frames(4), frames(4)
    ours[:, 0] += 100  # loudness is not compared
    ours[:, 45] += 100  # nor is an aperiodicity
    ours[0, 1:40] += 6
    found = evaluate_mel_cepstra([ours, wanted], [wanted, wanted])
    assert found.values["mel_cepstral_distortion"] == pytest.approx(3.0)
    assert found.values["log_f0_error"] == 0
    assert found.failures == ()
    ours[1, 1:40] += 6
    assert "sequence 0: mel-cepstral distortion 4.24" in evaluate_mel_cepstra([ours], [wanted]).failures[0]


def test_pitch_counts_only_where_both_sides_are_voiced() -> None:
    ours, wanted = frames(4), frames(4)
    ours[:, -2] += np.array([0.02, 5.0, 5.0, 0.0], dtype=np.float32)
    ours[1, -1] = 0.0
    wanted[2, -1] = -1.0
    found = evaluate_mel_cepstra([ours], [wanted])
    assert found.values["log_f0_error"] == pytest.approx(0.02 / math.sqrt(2), rel=1e-5)
    assert len(found.failures) == 1
    silent = evaluate_mel_cepstra([frames(4, voicing=0)], [wanted])
    assert silent.values["log_f0_error"] == 0


def test_missing_numbers_fail() -> None:
    found = evaluate_mel_cepstra([frames(4, math.nan)], [frames(4)])
    assert len(found.failures) == 2
    assert math.isnan(found.values["mel_cepstral_distortion"])


def plain_distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The definition, by recursion."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        plain_distance(a[1:], b) + 1,
        plain_distance(a, b[1:]) + 1,
        plain_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


def test_edit_distance_is_the_definition_s() -> None:
    generator = np.random.default_rng(7)
    words = [tuple(generator.integers(0, 3, generator.integers(0, 6)).tolist()) for _ in range(12)]
    for a, b in itertools.product(words, words):
        assert edit_distance(a, b) == plain_distance(a, b)


def test_phones_are_the_largest_scores_and_the_worst_sequence_is_told() -> None:
    right = np.arange(40) % 7
    ours = np.eye(7, dtype=np.float32)[right]
    assert evaluate_phones([ours], [right]).values == {"phone_error_rate": 0.0}
    assert evaluate_phones([ours], [ours * 3]).values == {"phone_error_rate": 0.0}
    wrong = np.roll(ours, 3, axis=1)
    mixed = np.concatenate([wrong[:3], ours[3:]])
    found = evaluate_phones([ours, mixed], [right, right])
    assert found.values["phone_error_rate"] == 3 / 40
    assert len(found.failures) == 1
    assert found.failures[0].startswith("sequence 1:")


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        evaluate_top_k([], [])
    with pytest.raises(InvalidArgument, match="expected a class from 0 to 2, got 3"):
        evaluate_top_k([np.zeros(3)], [3])
    with pytest.raises(InvalidArgument, match="multiple of 49"):
        evaluate_mel_cepstra([np.zeros(50)], [np.zeros(50)])
    with pytest.raises(InvalidArgument, match="at least one phone"):
        evaluate_phones([np.zeros((0, 3))], [np.zeros(0)])
