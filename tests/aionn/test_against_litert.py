"""The small models give LiteRT's answers: integers byte for byte, floats closely, the same class on every sample."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite

litert = pytest.importorskip(
    "ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError
)

FLOAT_MAX = 1e-5
"""Largest difference of a probability. Only the order of additions differs."""

SEED = 11
DRAWN_COUNT = 40

MODELS = [f"{kind}_{form}" for kind in ("shapes", "digits") for form in ("float", "int8", "uint8")]

Array = npt.NDArray[Any]


def drawn(kind: str) -> Array:
    """Seeded samples in the range of a model's input: pictures, or logarithms of energies."""
    generator = np.random.default_rng(SEED)
    if kind == "shapes":
        return generator.random((DRAWN_COUNT, 96, 96, 3)).astype(np.float32)
    return generator.uniform(np.log(1e-6), 5, (DRAWN_COUNT, 49, 40, 1)).astype(np.float32)


@functools.cache
def whole_set(folder: Path, kind: str) -> Array:
    x = np.load(folder / f"{kind}_test.npz")["x"]
    if kind == "shapes":
        return x.astype(np.float32) / np.float32(255)
    return x.astype(np.float32)


def quantised(real: Array, details: dict[str, Any]) -> Array:
    dtype = details["dtype"]
    if dtype == np.float32:
        return real
    scale, zero_point = details["quantization"]
    info = np.iinfo(dtype)
    return np.clip(np.round(real / scale) + zero_point, info.min, info.max).astype(dtype)


def answers(path: Path, real: Array) -> tuple[Array, Array]:
    """Ours and LiteRT's reference kernels' outputs for every sample, `[samples, classes]` each."""
    peer = litert.Interpreter(
        model_path=str(path),
        num_threads=1,
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF,
    )
    peer.allocate_tensors()
    (source,), (target,) = peer.get_input_details(), peer.get_output_details()
    interpreter = Interpreter(load_tflite(path).model)
    ours, theirs = [], []
    for x in quantised(real, source):
        (y,) = interpreter.run([x[np.newaxis]], RunControl())
        ours.append(y[0].copy())
        peer.set_tensor(source["index"], x[np.newaxis])
        peer.invoke()
        theirs.append(peer.get_tensor(target["index"])[0])
    return np.stack(ours), np.stack(theirs)


def compare(ours: Array, theirs: Array) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    other_class = np.flatnonzero(ours.argmax(axis=1) != theirs.argmax(axis=1))
    assert other_class.size == 0, f"another class for samples {other_class.tolist()}"
    if ours.dtype == np.float32:
        difference = float(np.abs(ours - theirs).max())
        assert difference <= FLOAT_MAX, f"the largest difference is {difference:.3g}"
    else:
        byte_count = int(np.count_nonzero(ours != theirs))
        assert byte_count == 0, f"{byte_count} of {ours.size} bytes differ"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_drawn_samples_give_the_peers_answers(example_data: Path, name: str) -> None:
    compare(*answers(example_data / f"{name}.tflite", drawn(name.split("_")[0])))


UINT8 = [pytest.param(name, marks=pytest.mark.long) for name in MODELS if name.endswith("uint8")]
"""Their kernels are those of the int8 models, which are in the ordinary run."""


STEPS = [pytest.param(5, id="share"), pytest.param(1, id="all", marks=pytest.mark.long)]
"""One sample in so many."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [*(name for name in MODELS if not name.endswith("uint8")), *UINT8])
def test_samples_of_the_test_set_give_the_peers_answers(shared: Path, name: str, step: int) -> None:
    folder = shared / "models"
    real = whole_set(folder, name.split("_")[0])
    assert len(real) in (288, 300)
    compare(*answers(folder / f"{name}.tflite", real[::step]))


def test_comparison_finds_a_byte_a_difference_and_a_class() -> None:
    integers = np.array([[1, 5, 2]], dtype=np.int8)
    floats = np.array([[0.1, 0.7, 0.2]], dtype=np.float32)
    compare(integers, integers.copy())
    compare(floats, floats.copy())
    with pytest.raises(AssertionError, match="1 of 3 bytes differ"):
        compare(integers + np.array([1, 0, 0], dtype=np.int8), integers)
    with pytest.raises(AssertionError, match="the largest difference"):
        compare(floats + np.float32(2e-5), floats)
    with pytest.raises(AssertionError, match="another class"):
        compare(integers[:, ::-1] * np.array([9, 1, 1], dtype=np.int8), integers)
