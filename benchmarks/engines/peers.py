"""The engines alone, in this process and on one thread: what each device is measured against, and the table of devices.

A peer is made of a model's path, which is its creation of a session; its ``x`` is bound as the input, and a call computes ``y``
from it without copying either. A further engine is a class here and an entry of ``ENGINES``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.engines.networks import mobilenet_v2, small_cnn

__all__ = ["ENGINES", "Engine", "Peer", "openvino_core"]

Array = npt.NDArray[Any]

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"


class Peer(Protocol):
    """An engine with a model.

    Attributes:
        x: The array that is bound as the input.
    """

    x: Array

    def __call__(self) -> None:
        """Computes."""
        ...

    def y(self) -> Array:
        """A copy of the result of the last call."""
        ...


class OnnxRuntime:
    """ONNX Runtime by ``run_with_iobinding``, with the options that make a call cheapest."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        (first,), (last,) = self._session.get_inputs(), self._session.get_outputs()
        self.x = np.random.default_rng(3).random(first.shape, dtype=np.float32)
        self._y = np.empty(last.shape, np.float32)
        self._binding.bind_input(first.name, "cpu", 0, np.float32, self.x.shape, self.x.ctypes.data)
        self._binding.bind_output(last.name, "cpu", 0, np.float32, self._y.shape, self._y.ctypes.data)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", "-1")

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding, self._options)

    def y(self) -> Array:
        return self._y.copy()


class LiteRT:
    """LiteRT by ``invoke``."""

    def __init__(self, path: Path) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter = Interpreter(model_path=str(path), num_threads=1)
        self._interpreter.allocate_tensors()
        (first,), (last,) = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self.x = np.random.default_rng(3).random(tuple(first["shape"]), dtype=np.float32)
        self._interpreter.set_tensor(first["index"], self.x)
        self._last = last["index"]

    def __call__(self) -> None:
        self._interpreter.invoke()

    def y(self) -> Array:
        found: Array = self._interpreter.get_tensor(self._last)
        return found


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's core, one for the process: of two whose ends are not nested, one leaves its thread a signal stack that is
    unmapped."""
    import openvino as ov

    return ov.Core()


class OpenVino:
    """OpenVINO by ``infer``, in float32 and with one stream on one thread."""

    def __init__(self, path: Path) -> None:
        import openvino as ov

        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": "1",
            "ENABLE_CPU_PINNING": "NO",
        }
        compiled = openvino_core().compile_model(str(path), "CPU", properties)
        self._request = compiled.create_infer_request()
        self.x = np.random.default_rng(3).random(tuple(compiled.input(0).shape), dtype=np.float32)
        self._y = np.empty(tuple(compiled.output(0).shape), np.float32)
        self._request.set_input_tensor(0, ov.Tensor(self.x, shared_memory=True))
        self._request.set_output_tensor(0, ov.Tensor(self._y, shared_memory=True))

    def __call__(self) -> None:
        self._request.infer()

    def y(self) -> Array:
        return self._y.copy()


class Engine(NamedTuple):
    """A device of aionn and its engine alone.

    Attributes:
        module: The engine's package, without which the rows are left out.
        peer: The engine alone.
        models: Given a folder, the paths of the small and of the large model; None for one that is missing.
        tolerance: Largest difference of the results, relative to the largest one.
    """

    module: str
    peer: Callable[[Path], Peer]
    models: Callable[[Path], Mapping[str, Path | None]]
    tolerance: float

    def is_installed(self) -> bool:
        """Whether the engine's package is there."""
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None


def written(folder: Path) -> dict[str, Path | None]:
    """The networks as ONNX files."""
    found: dict[str, Path | None] = {}
    for name, make in (("small CNN", small_cnn), ("mobilenet_v2", mobilenet_v2)):
        path = folder / f"{make.__name__}.onnx"
        if not path.exists():
            path.write_bytes(make())
        found[name] = path
    return found


def shipped(folder: Path) -> dict[str, Path | None]:
    """The nearest TensorFlow Lite files."""

    def find(name: str, places: Sequence[Path] = (SHARED, EXAMPLES)) -> Path | None:
        return next((place / name for place in places if (place / name).is_file()), None)

    return {
        "small CNN": find("shapes_float.tflite"),
        "mobilenet_v2": find("mobilenet_v2_1.0_224_float.tflite"),
    }


ENGINES: Mapping[str, Engine] = {
    "litert-cpu": Engine("ai_edge_litert.interpreter", LiteRT, shipped, 1e-5),
    "ort-cpu": Engine("onnxruntime", OnnxRuntime, written, 1e-4),
    "openvino-cpu": Engine("openvino", OpenVino, written, 1e-4),
}
"""By the name of aionn's driver."""
