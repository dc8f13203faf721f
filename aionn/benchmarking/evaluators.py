"""Correctness of a model's answers by their kind: classes, synthesised speech, recognised phones.

Owns the arithmetic of the three evaluators and their limits; pure. Refuses to own reading data and running models.

Sequences are judged one by one and the worst is reported: a mean hides the one file that a driver garbles.

Source: the evaluators of MLTS, the HAL's own benchmark suite (TopK, MelCepLogF0, PhoneErrorRate): layouts, numbers and limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument

__all__ = [
    "EVALUATORS",
    "Evaluation",
    "Evaluator",
    "edit_distance",
    "evaluate_mel_cepstra",
    "evaluate_phones",
    "evaluate_top_k",
]

Array = npt.NDArray[Any]
Evaluator = Literal["top-k", "mel-cepstral", "phone-error"]
EVALUATORS: tuple[Evaluator, ...] = get_args(Evaluator)

K_MAX = 5
TOP1_LOSS_MAX = 0.05
"""Tolerance of the share of correct first choices below the model's known share."""

AMPLITUDES, APERIODICITIES = 40, 7
FRAME_VALUES = AMPLITUDES + APERIODICITIES + 2
"""One frame of synthesised speech: amplitudes, aperiodicities, the logarithm of the pitch, and how voiced it is."""
DISTORTION_MAX = 4.0
LOG_F0_ERROR_MAX = 0.01
PHONE_ERROR_MAX = 0.05


class Evaluation(msgspec.Struct, frozen=True):
    """The result of an evaluator.

    Attributes:
        evaluator: Which one.
        samples: Number of pictures, clips or sequences that were judged.
        values: Its figures by name: shares from 0 to 1, distortions and errors in the units of the outputs.
        failures: The values beyond a limit, one text each; none where all is well.
    """

    evaluator: Evaluator
    samples: int
    values: dict[str, float]
    failures: tuple[str, ...] = ()


def evaluate_top_k(
    outputs: Sequence[Array], labels: Sequence[int], expected_top1: float | None = None
) -> Evaluation:
    """Share of samples whose class is among the k largest scores, for k from 1 to 5.

    Args:
        outputs: Scores of each sample, any shape; of equal scores the lower class counts as the larger, as with argmax.
        labels: The right class of each.
        expected_top1: The model's known score, from 0 to 1; None for unknown, and then nothing can fail.

    Raises:
        InvalidArgument: There are no samples, or a label is not a class of the model.
    """
    _demand_samples(outputs, labels)
    classes = outputs[0].size
    hits = np.zeros(K_MAX)
    for index, (scores, label) in enumerate(zip(outputs, labels, strict=True)):
        if not 0 <= label < classes:
            raise InvalidArgument(
                f"top-k, sample {index}: expected a class from 0 to {classes - 1}, got {label}"
            )
        order = np.argsort(-scores.reshape(-1).astype(np.float64), kind="stable")
        place = int(np.flatnonzero(order == label)[0])
        hits[place:] += 1
    shares = hits / len(outputs)
    failures: list[str] = []
    if expected_top1 is not None and shares[0] < expected_top1 - TOP1_LOSS_MAX:
        failures.append(
            f"top-1 is {shares[0]:.1%}, more than {TOP1_LOSS_MAX:.0%} under the expected {expected_top1:.1%}"
        )
    values = {f"top{k + 1}": float(shares[k]) for k in range(min(K_MAX, classes))}
    return Evaluation("top-k", len(outputs), values, tuple(failures))


def evaluate_mel_cepstra(outputs: Sequence[Array], expected: Sequence[Array]) -> Evaluation:
    """Mel-cepstral distortion and the error of the pitch of synthesised speech, of the worst sequence.

    Args:
        outputs: Real numbers of each sequence, in frames of 49: 40 amplitudes, 7 aperiodicities, log F0, voicing.
        expected: The same of the right answer. The first amplitude of a frame, its loudness, is not compared; the pitch is where
            both sides have voicing above 0.

    Raises:
        InvalidArgument: There are no sequences, or their sizes are wrong.
    """
    _demand_samples(outputs, expected)
    distortions, log_f0_errors, failures = [], [], []
    for index, (ours, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if ours.size != wanted.size or ours.size % FRAME_VALUES or not ours.size:
            raise InvalidArgument(
                f"mel-cepstral, sequence {index}: expected a multiple of {FRAME_VALUES} values on both sides, got {ours.size} "
                f"and {wanted.size}"
            )
        a = ours.reshape(-1, FRAME_VALUES).astype(np.float64)
        b = wanted.reshape(-1, FRAME_VALUES).astype(np.float64)
        distortion = _root_mean_square(a[:, 1:AMPLITUDES] - b[:, 1:AMPLITUDES])
        voiced = (a[:, -1] > 0) & (b[:, -1] > 0)
        log_f0_error = _root_mean_square(a[voiced, -2] - b[voiced, -2])
        # A comparison with a missing number is false: what is not within the limit fails.
        if not distortion <= DISTORTION_MAX:
            failures.append(
                f"sequence {index}: mel-cepstral distortion {distortion:.4g} > {DISTORTION_MAX:g}"
            )
        if not log_f0_error <= LOG_F0_ERROR_MAX:
            failures.append(f"sequence {index}: log F0 error {log_f0_error:.4g} > {LOG_F0_ERROR_MAX:g}")
        distortions.append(distortion)
        log_f0_errors.append(log_f0_error)
    values = {"mel_cepstral_distortion": _worst(distortions), "log_f0_error": _worst(log_f0_errors)}
    return Evaluation("mel-cepstral", len(outputs), values, tuple(failures))


def evaluate_phones(outputs: Sequence[Array], expected: Sequence[Array]) -> Evaluation:
    """The share of phones that are wrong in the worst sequence: the edit distance over the right number.

    Args:
        outputs: Of each sequence ``[steps, phones]`` scores; the largest is the phone.
        expected: Of each ``[steps]`` right phones, or ``[steps, phones]`` scores of the right answer.

    Raises:
        InvalidArgument: There are no sequences, or one is empty.
    """
    _demand_samples(outputs, expected)
    rates, failures = [], []
    for index, (ours, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not ours.size or not wanted.size:
            raise InvalidArgument(f"phone-error, sequence {index}: expected at least one phone, got none")
        rate = edit_distance(_phones(ours), _phones(wanted)) / len(_phones(wanted))
        if rate > PHONE_ERROR_MAX:
            failures.append(
                f"sequence {index}: {rate:.1%} of the phones are wrong, more than {PHONE_ERROR_MAX:.0%}"
            )
        rates.append(rate)
    return Evaluation("phone-error", len(outputs), {"phone_error_rate": max(rates)}, tuple(failures))


def edit_distance(ours: Sequence[int], wanted: Sequence[int]) -> int:
    """The least number of insertions, deletions and replacements that turn one sequence into the other."""
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(ours, start=1):
        above, row[0] = row[0], i
        for j, b in enumerate(wanted, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]


def _phones(array: Array) -> list[int]:
    if array.ndim == 1:
        return [int(phone) for phone in array]
    return [int(np.argmax(scores)) for scores in array.reshape(array.shape[0], -1)]


def _root_mean_square(differences: Array) -> float:
    return math.sqrt(float(np.mean(differences**2))) if differences.size else 0.0


def _worst(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _demand_samples(outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    if not outputs or len(outputs) != len(wanted):
        raise InvalidArgument(
            f"evaluator: expected as many answers as right ones, at least one, got {len(outputs)} and {len(wanted)}"
        )
