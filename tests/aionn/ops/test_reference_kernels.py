"""Whole models against LiteRT's reference kernels: integer models to the last bit, float models within rounding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite

MODELS = Path(__file__).resolve().parents[4] / "shared" / "models"

litert = pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed")
pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not there")


def reference(path: Path) -> Any:
    interpreter = litert.Interpreter(
        os.fspath(path), experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF, num_threads=1
    )
    interpreter.allocate_tensors()
    return interpreter


def samples(name: str, count: int, details: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Inputs in the model's type: frames of the model's test set where there is one, noise where there is none."""
    test_set = MODELS / f"{name.split('_')[0]}_test.npz"
    if test_set.exists():
        with np.load(test_set) as arrays:
            values = arrays["x"][:: max(len(arrays["x"]) // count, 1)][:count].astype(np.float32)
        values = values / 255 if name.startswith("shapes") else values
    else:
        values = np.random.default_rng(1).uniform(-1, 1, (count, *details["shape"])).astype(np.float32)
    values = values.reshape(len(values), *details["shape"])
    if details["dtype"] == np.float32:
        return values
    scale, zero_point = details["quantization"]
    limits = np.iinfo(details["dtype"])
    return np.clip(np.round(values / scale) + zero_point, limits.min, limits.max).astype(details["dtype"])


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("shapes_int8", 20),
        ("shapes_uint8", 20),
        ("shapes_float", 20),
        ("digits_int8", 20),
        ("digits_uint8", 20),
        ("digits_float", 20),
        ("kws_dscnn_int8", 10),
        ("kws_dscnn_float", 10),
        ("mobilenet_v1_0.25_128_int8", 4),
        ("mobilenet_v1_0.25_128_float", 4),
        ("mobilenet_v2_1.0_224_int8", 1),
    ],
)
def test_model_agrees_with_the_reference_kernels(name: str, count: int) -> None:
    path = MODELS / f"{name}.tflite"
    ours, theirs = Interpreter(load_tflite(path).model), reference(path)
    (given,), (result,) = theirs.get_input_details(), theirs.get_output_details()
    for sample in samples(name, count, given):
        (got,) = ours.run([sample], RunControl())
        theirs.set_tensor(given["index"], sample)
        theirs.invoke()
        expected = theirs.get_tensor(result["index"])
        assert got.dtype == expected.dtype
        if got.dtype == np.float32:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, expected)
