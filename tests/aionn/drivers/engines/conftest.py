"""The drivers around engines of others, one for each test that says ``engine``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from aionn.drivers.kit.engines.device import EngineDevice
from aionn.hal import OperationType


class Engine(NamedTuple):
    """A driver around an engine.

    Attributes:
        device: The device's name, which is the driver's.
        module: The engine's Python module.
        distribution: The engine's distribution.
        folder: The driver's package.
        threads_variable: Its environment variable.
        rules: Where its lowering has the table of operations.
    """

    device: str
    module: str
    distribution: str
    folder: str
    threads_variable: str
    rules: str

    @property
    def make(self) -> Callable[[], EngineDevice]:
        """Makes the device."""
        module = importlib.import_module(f"{self.folder}.driver")
        names = {"litert-cpu": "LitertDevice", "ort-cpu": "OrtDevice", "openvino-cpu": "OpenvinoDevice"}
        made: Callable[[], EngineDevice] = getattr(module, names[self.device])
        return made

    @property
    def lists(self) -> Any:
        """The module with its lists of expected results."""
        return importlib.import_module(f"{self.folder}.driver")

    def lowered_operations(self) -> set[str]:
        """The names of the operations that its lowering knows."""
        rules: dict[OperationType, Any] = importlib.import_module(self.rules).RULES
        return {kind.name for kind in rules}


LITERT = Engine(
    "litert-cpu", "ai_edge_litert.interpreter", "ai-edge-litert", "aionn.drivers.litert", "AIONN_LITERT_THREADS",
    "aionn.drivers.litert.lowering",
)  # fmt: skip
ORT = Engine(
    "ort-cpu", "onnxruntime", "onnxruntime", "aionn.drivers.onnxruntime", "AIONN_ORT_THREADS",
    "aionn.drivers.kit.onnx.lowering",
)  # fmt: skip
OPENVINO = Engine(
    "openvino-cpu", "openvino", "openvino", "aionn.drivers.openvino", "AIONN_OPENVINO_THREADS",
    "aionn.drivers.kit.onnx.lowering",
)  # fmt: skip


ENGINES = (LITERT, ORT, OPENVINO)


def _can_be_imported(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# Before the tests: what an engine opens when it is imported is not left behind by the test that is the first to use it.
MISSING = {engine.device for engine in ENGINES if not _can_be_imported(engine.module)}


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.device)
def described(request: pytest.FixtureRequest) -> Engine:
    """A driver whose engine may be missing."""
    engine: Engine = request.param
    return engine


@pytest.fixture
def engine(described: Engine) -> Engine:
    """A driver whose engine is installed."""
    if described.device in MISSING:
        names = {"litert-cpu": "LiteRT", "ort-cpu": "ONNX Runtime", "openvino-cpu": "OpenVINO"}
        pytest.skip(f"{names[described.device]} is not installed")
    return described
