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
        label: The engine's name.
        device_class: The name of the device's class.
        module: The engine's Python module.
        distribution: The engine's distribution.
        folder: The driver's package.
        threads_variable: Its environment variable.
        rules: Where its lowering has the table of operations.
        is_stoppable: Whether another thread can stop it.
    """

    device: str
    label: str
    device_class: str
    module: str
    distribution: str
    folder: str
    threads_variable: str
    rules: str
    is_stoppable: bool

    @property
    def make(self) -> Callable[[], EngineDevice]:
        """Makes the device."""
        module = importlib.import_module(f"{self.folder}.driver")
        made: Callable[[], EngineDevice] = getattr(module, self.device_class)
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
    "litert-cpu", "LiteRT", "LitertDevice", "ai_edge_litert.interpreter", "ai-edge-litert", "aionn.drivers.litert",
    "AIONN_LITERT_THREADS", "aionn.drivers.litert.lowering", is_stoppable=False,
)  # fmt: skip
ORT = Engine(
    "ort-cpu", "ONNX Runtime", "OrtDevice", "onnxruntime", "onnxruntime", "aionn.drivers.onnxruntime",
    "AIONN_ORT_THREADS", "aionn.drivers.kit.onnx.lowering", is_stoppable=True,
)  # fmt: skip
OPENVINO = Engine(
    "openvino-cpu", "OpenVINO", "OpenvinoDevice", "openvino", "openvino", "aionn.drivers.openvino",
    "AIONN_OPENVINO_THREADS", "aionn.drivers.kit.onnx.lowering", is_stoppable=True,
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
        pytest.skip(f"{described.label} is not installed")
    return described
