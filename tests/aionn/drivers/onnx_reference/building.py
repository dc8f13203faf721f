"""Operations of the extension ``ai.onnx`` for tests, and their results on the device ``onnx-reference``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.kernels import kernel_for
from aionn.models.onnx.encoding import DATA_TYPES
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.extension.application import Application
from aionn.models.onnx.extension.contracts import output_types

Array = np.ndarray[Any, Any]


def compute(
    op_type: str, *inputs: Any, outputs: int = 1, version: int = 21, **attributes: Any
) -> list[Array]:
    """The results of a kernel; checks them against the contract's types and shapes.

    Lists of numbers become float32 or int64 arrays; None is an omitted input.
    """
    arrays = [None if value is None else _array(value) for value in inputs]
    types = [None if a is None else ValueType(int(DATA_TYPES[a.dtype.name]), a.shape) for a in arrays]
    application = Application(op_type, version, attributes, types, arrays, outputs)
    expected = output_types(application)
    kernel = kernel_for(op_type, Record(version, attributes, tuple(types), tuple(expected)))
    assert kernel is not None, f"{op_type} has no kernel for {attributes}"
    with np.errstate(all="ignore"):
        results = list(kernel(*arrays))
    assert len(results) == outputs
    for result, value in zip(results, expected, strict=True):
        assert int(DATA_TYPES[result.dtype.name]) == value.data_type
        if value.shape is not None:
            assert len(result.shape) == len(value.shape)
            assert all(e in (-1, got) for e, got in zip(value.shape, result.shape, strict=True))
    return results


def _array(value: Any) -> Array:
    array = np.asarray(value)
    return (
        array.astype(np.float32) if array.dtype == np.float64 and isinstance(value, list | float) else array
    )


def same(got: Sequence[Array] | Array, expected: Any, *, rtol: float = 1e-6) -> None:
    """Checks one result."""
    (array,) = got if isinstance(got, list) else [got]
    np.testing.assert_allclose(np.asarray(array, np.float64), np.asarray(expected, np.float64), rtol, 1e-6)
