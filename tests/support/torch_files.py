"""The files that PyTorch's exporters wrote: their inputs, and how near to an engine's results others have to be."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.models.onnx.constants import ConstantReader
from aionn.models.onnx.schema import read_model

__all__ = ["CASES", "FOLDER", "Array", "check", "drawn", "options_of"]

FOLDER = Path(__file__).parents[1] / "aionn" / "models" / "torch_files"
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
Array = npt.NDArray[Any]

FLOAT_MAX = 1e-4
"""Largest difference of float results, relative to the largest result."""

STEPS_MAX = 1.01
"""The same for quantised networks, in steps of the scale of their results."""


def drawn(name: str) -> list[Array]:
    """Seeded inputs: pictures and sounds from 0 to 1, numbers of tokens below 60, masks of ones."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values: list[Array] = []
    for shape, dtype in CASES[name]["inputs"]:
        if dtype == "int64":
            is_mask = bool(values)
            values.append(np.ones(shape, np.int64) if is_mask else rng.integers(1, 60, shape))
        else:
            values.append(rng.random(shape).astype(dtype))
    return values


def step_of(name: str) -> float:
    """The scale of a quantised network's results: that of the DequantizeLinear that writes them."""
    graph = read_model((FOLDER / f"{name}.onnx").read_bytes()).graph
    (last,) = [one for one in graph.nodes if graph.outputs[0].name in one.outputs]
    assert last.op_type == "DequantizeLinear"
    (scale,) = [one for one in graph.initializers if one.name == last.inputs[1]]
    return float(ConstantReader(None).array(scale))


def check(name: str, wanted: Sequence[Array], got: Sequence[Array], *, steps: float = STEPS_MAX) -> None:
    assert len(wanted) == len(got)
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        assert (have.shape, have.dtype) == (want.shape, want.dtype), f"output {index}"
        if want.dtype.kind == "f":
            most = FLOAT_MAX * float(np.abs(want).max(initial=0))
            if name.endswith("_int8"):
                most = steps * step_of(name)
            np.testing.assert_allclose(have, want, rtol=0, atol=most, err_msg=f"output {index}")
        else:
            np.testing.assert_array_equal(have, want, err_msg=f"output {index}")


def options_of(name: str, values: Sequence[Array]) -> dict[str, Any]:
    """The extents that the file leaves open."""
    if not CASES[name]["open"]:
        return {}
    found = {}
    for info, value in zip(
        read_model((FOLDER / f"{name}.onnx").read_bytes()).graph.inputs, values, strict=True
    ):
        found.update(
            {
                extent: size
                for extent, size in zip(info.shape or (), value.shape, strict=True)
                if isinstance(extent, str)
            }
        )
    return {"dimensions": found}
