"""Where LiteRT is missing or too old, `litert-cpu` says so and everything else works; a client never imports it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

import aionn
from aionn.drivers import registry
from aionn.drivers.litert.driver import LitertDevice
from aionn.errors import DeviceUnavailable


def test_missing_package_makes_the_device_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(DeviceUnavailable, match="ai-edge-litert is not installed; pip install"):
        registry.built_in_info("litert-cpu", "litert-cpu")


def test_old_package_makes_the_device_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.4.0")
    with pytest.raises(DeviceUnavailable, match=r"expected version 2\.0 or later, got 1\.4\.0"):
        LitertDevice()


async def test_runtime_goes_on_without_it(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.4.0")
    async with aionn.open(drivers=["litert-cpu", "reference"], isolation="in_process") as runtime:
        assert [device.name for device in runtime.devices] == ["reference"]
        (missing,) = runtime.unavailable
        assert missing.name == "litert-cpu"
        assert "1.4.0" in missing.reason
        compilation = await runtime.compile(small.sum_model())
        assert compilation.devices == ("reference",)


def test_client_imports_nothing_of_litert() -> None:
    code = (
        "import sys; from aionn.drivers import registry; registry.built_in_info('litert-cpu', 'a');"
        "sys.exit(any(name.startswith('ai_edge_litert') for name in sys.modules))"
    )
    pytest.importorskip("ai_edge_litert", reason="LiteRT is not installed")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
