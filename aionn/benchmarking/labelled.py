"""Data whose right answers are known, from a folder.

Owns finding the files and turning each into the first input of a model. ``evaluators`` judge the answers.

Classes, for ``top-k``: one folder for each, named after its number, or after a line of ``labels.txt`` beside them; in it pictures,
sounds, or arrays (.npy) of the input's shape. Sequences, for the remaining evaluators: ``NAME.npy`` with one input for each step,
and the right outputs in ``NAME.expected.npy``.

Invariants:
1. Everything is found and named before anything is read; files come in the order of their names.
2. A file that cannot be used is an error that names it: none is left out in silence.
3. Files are checked by their headers, without their content, so that a whole folder is checked before a long run.

Source: the data sets of MLTS, the HAL's own benchmark suite, and how its models take their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.benchmarking.evaluators import Evaluator
from aionn.errors import InvalidArgument
from aionn.hal import Operand, operand_dtype
from aionn.media import LogMel, audio_file, video_file
from aionn.media.pyav import open_container
from aionn.platform.arrays import read_array
from aionn.platform.files import TEXT_BYTES_MAX, read_regular

__all__ = ["Sample", "check_sample", "find_samples", "load_array", "read_sample"]

Array = npt.NDArray[Any]

SAMPLES_MAX = 100_000
PICTURES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"))
SOUNDS = frozenset((".wav", ".flac", ".mp3", ".ogg", ".m4a"))
PIECE_S = 0.02


class Sample(msgspec.Struct, frozen=True):
    """One file with its right answer.

    Attributes:
        path: The file.
        label: Its class; -1 for a sequence.
        expected: The file with the right outputs of a sequence; None for a class.
    """

    path: Path
    label: int = -1
    expected: Path | None = None


def find_samples(folder: Path, evaluator: Evaluator) -> list[Sample]:
    """The content of a folder, in the order of the names.

    Raises:
        InvalidArgument: It cannot be read, holds nothing, or something that has no right answer.
    """
    if not folder.is_dir():
        raise InvalidArgument(f"labelled data {folder}: expected a folder")
    try:
        found = _classes(folder) if evaluator == "top-k" else _sequences(folder)
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"labelled data {folder}: cannot be read: {e}") from e
    if not 0 < len(found) <= SAMPLES_MAX:
        raise InvalidArgument(
            f"labelled data {folder}: expected 1 to {SAMPLES_MAX} samples, got {len(found)}"
        )
    return found


def _classes(folder: Path) -> list[Sample]:
    names: list[str] = []
    listed = folder / "labels.txt"
    if listed.exists():
        text = read_regular(listed, "labelled data", TEXT_BYTES_MAX).decode()
        names = [line.strip() for line in text.splitlines()]
    found = []
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if inner.name in names:
            label = names.index(inner.name)
        elif inner.name.isdecimal():
            label = int(inner.name)
        else:
            raise InvalidArgument(
                f"labelled data {inner}: expected a folder named after a class's number, or after a line of labels.txt"
            )
        for path in sorted(inner.iterdir()):
            if path.suffix.lower() not in PICTURES | SOUNDS | {".npy"}:
                raise InvalidArgument(
                    f"labelled data {path}: expected a picture, a sound, or an array (.npy)"
                )
            found.append(Sample(path, label))
    return found


def _sequences(folder: Path) -> list[Sample]:
    found = []
    for path in sorted(folder.glob("*.npy")):
        if path.name.endswith(".expected.npy"):
            continue
        expected = path.with_name(f"{path.stem}.expected.npy")
        if not expected.exists():
            raise InvalidArgument(f"labelled data {path}: expected its right outputs in {expected.name}")
        found.append(Sample(path, expected=expected))
    return found


def check_sample(sample: Sample, evaluator: Evaluator, operand: Operand, result: Operand) -> None:
    """Checks by its header that a file fits a model and has an expected answer that the model could give.

    Args:
        sample: Which one.
        evaluator: The evaluator that judges it.
        operand: The model's first input, of known shape.
        result: The model's first output; one of unknown shape is not compared with the right answers.

    Raises:
        InvalidArgument: The file cannot be opened, or does not fit.
        DeviceUnavailable: It is a picture or a sound, and PyAV is missing.
    """
    values = prod(result.dimensions)
    if sample.expected is None and values and not 0 <= sample.label < values:
        raise InvalidArgument(
            f"labelled data {sample.path.parent}: expected a class from 0 to {values - 1}, got {sample.label}"
        )
    suffix = sample.path.suffix.lower()
    if suffix in PICTURES | SOUNDS:
        fit, kind = (_demand_picture, "video") if suffix in PICTURES else (_demand_sound, "audio")
        fit(sample.path, operand)
        with open_container(str(sample.path), kind, "labelled data") as (_, stream):
            # Every file with a picture's name has a stream; only one that FFmpeg understands has a size.
            if kind == "video" and not stream.width:
                raise InvalidArgument(
                    f"labelled data {sample.path}: expected a picture, got none, or one cut short"
                )
        return
    steps = _steps(sample, load_array(sample.path, is_mapped=True), operand)
    if sample.expected is not None:
        right = load_array(sample.expected, is_mapped=True)
        if not right.size or (evaluator == "mel-cepstral" and values and right.size != steps * values):
            wanted = f"{values} numbers for each of {steps} steps" if right.size else "at least one number"
            raise InvalidArgument(
                f"labelled data {sample.expected}: expected {wanted}, got {list(right.shape)}"
            )


async def read_sample(sample: Sample, operand: Operand, pixels: tuple[float, float]) -> Array:
    """A file as the model takes it.

    Args:
        sample: Which one.
        operand: The model's first input, of known shape.
        pixels: The values of the darkest and the lightest pixel; arrays and sounds are taken as they are.

    Returns:
        One input for a class; ``[steps, *shape]`` for a sequence. Real numbers are quantised with the operand's scale and zero
        point.

    Raises:
        InvalidArgument: The file cannot be read, or does not fit the input.
    """
    suffix = sample.path.suffix.lower()
    if suffix in PICTURES:
        return _stored(await _picture(sample.path, operand, pixels), operand)
    if suffix in SOUNDS:
        return _stored(await _sound(sample.path, operand), operand)
    array = load_array(sample.path)
    steps = _steps(sample, array, operand)
    array = array.reshape(operand.dimensions if sample.expected is None else (steps, *operand.dimensions))
    return array if array.dtype == operand_dtype(operand.type) else _stored(array, operand)


def _steps(sample: Sample, array: Array, operand: Operand) -> int:
    """Number of inputs in an array; one for a class."""
    shape: tuple[int, ...] = operand.dimensions
    steps = 1 if sample.expected is None else array.size // max(1, prod(shape))
    if array.size != steps * prod(shape) or not steps:
        what = "of shape" if sample.expected is None else "with a whole number of steps, each of shape"
        raise InvalidArgument(
            f"labelled data {sample.path}: expected an array {what} {list(shape)}, got {list(array.shape)}"
        )
    return steps


def load_array(path: Path, *, is_mapped: bool = False) -> Array:
    """An array from a .npy file, without any code that the file may hold.

    Args:
        path: The file.
        is_mapped: Read the header alone; the numbers come from the file when they are asked for.

    Raises:
        InvalidArgument: It is not a .npy file of numbers.
        ResourceExhausted: The array does not fit into memory.
    """
    array = read_array(path, "labelled data", is_mapped=is_mapped)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"labelled data {path}: expected an array of numbers, got {array.dtype}")
    return array


def _demand_picture(path: Path, operand: Operand) -> None:
    shape: Sequence[int] = operand.dimensions
    if len(shape) != 4 or shape[0] != 1 or shape[3] not in (1, 3):
        raise InvalidArgument(
            f"labelled data {path}: a picture needs an input of shape [1, height, width, 1 or 3], got {list(shape)}"
        )


async def _picture(path: Path, operand: Operand, pixels: tuple[float, float]) -> Array:
    _demand_picture(path, operand)
    shape: Sequence[int] = operand.dimensions
    async with video_file(path, size=(shape[2], shape[1]), pace=False) as frames:
        async for frame in frames:
            low, high = pixels
            picture = np.asarray(frame.data, dtype=np.float64) / 255 * (high - low) + low
            return picture[None] if shape[3] == 3 else picture.mean(axis=2, keepdims=True)[None]
    raise InvalidArgument(f"labelled data {path}: expected a picture, got none")


def _demand_sound(path: Path, operand: Operand) -> None:
    shape: Sequence[int] = operand.dimensions
    if len(shape) < 3 or shape[-2:] != (40, 1) or np.prod(shape[:-3]) != 1:
        raise InvalidArgument(
            f"labelled data {path}: a sound needs an input of log-mel energies [1, frames, 40, 1], got {list(shape)}"
        )


async def _sound(path: Path, operand: Operand) -> Array:
    """Log-mel energies of the sound, which is cut or filled with silence to the length that the input takes."""
    _demand_sound(path, operand)
    shape: Sequence[int] = operand.dimensions
    front_end = LogMel()
    samples = front_end.frame_samples + front_end.hop_samples * (shape[-3] - 1)
    pieces: list[Array] = []
    async with audio_file(path, window_s=PIECE_S, hop_s=PIECE_S, pace=False) as windows:
        async for window in windows:
            pieces.append(np.array(window.samples))
            if sum(piece.size for piece in pieces) >= samples:
                break
    heard = np.concatenate(pieces)[:samples] if pieces else np.zeros(0, dtype=np.float32)
    return front_end(np.pad(heard, (0, samples - heard.size)).astype(np.float32)).reshape(shape)


def _stored(array: Array, operand: Operand) -> Array:
    dtype = operand_dtype(operand.type)
    if not operand.scale:
        return array.astype(dtype)
    info = np.iinfo(dtype.name)
    stored = np.round(array.astype(np.float64) / operand.scale) + operand.zero_point
    return np.clip(stored, info.min, info.max).astype(dtype)
