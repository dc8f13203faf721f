"""LiteRT in this process without any runtime: the peer of the benchmarks of models and operations, and what a bare process runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter, OpResolverType

Array = npt.NDArray[Any]


class Engine:
    """LiteRT with one thread and one set of kernels.

    Args:
        path: The model: one input, one output.
        kernels: Its own choice by default.

    Attributes:
        input: The details of the input.
        output: The details of the output.
    """

    def __init__(self, path: Path, kernels: OpResolverType = OpResolverType.AUTO) -> None:
        self._interpreter = Interpreter(
            model_path=str(path), num_threads=1, experimental_op_resolver_type=kernels
        )
        self._interpreter.allocate_tensors()
        (self.input,), (self.output,) = (
            self._interpreter.get_input_details(),
            self._interpreter.get_output_details(),
        )

    def __call__(self, x: Array) -> Array:
        self._interpreter.set_tensor(self.input["index"], x)
        self._interpreter.invoke()
        y: Array = self._interpreter.get_tensor(self.output["index"])
        return y

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(int(extent) for extent in self.input["shape"])

    def quantised(self, real: Array) -> Array:
        """Real numbers as the model's input wants them."""
        dtype = self.input["dtype"]
        if dtype == np.float32:
            return real
        scale, zero_point = self.input["quantization"]
        info = np.iinfo(dtype)
        return np.clip(np.rint(real / scale) + zero_point, info.min, info.max).astype(dtype)
