"""Drivers of others: found by their entry points, named by module and attribute, and listed with a reason when they are broken."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers import registry
from aionn.drivers.reference import INFO, ReferenceDevice
from aionn.drivers.skeleton import SkeletonDevice
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.hal import DeviceInfo, Extension, OperandType, OperationType
from aionn.models.builder import GraphBuilder

MODULE = """
    from aionn.drivers.reference import INFO, ReferenceDevice

    class Device(ReferenceDevice):
        pass

    def refuses(name):
        raise OSError("the accelerator is not plugged in")
"""

ENTRY_POINTS = """
    [aionn.drivers]
    acme-good = acme_driver:Device
    acme-absent = acme_missing:Device
    acme-refusing = acme_driver:refuses
    reference = acme_driver:Device
    ort-acme = acme_driver:Device
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with drivers, as this process and driver processes see it."""
    (tmp_path / "acme_driver.py").write_text(textwrap.dedent(MODULE))
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_drivers_of_others_come_first_and_cannot_replace_ours(acme: None) -> None:
    names = registry.driver_names()
    assert names[:3] == ("acme-absent", "acme-good", "acme-refusing")
    assert names[-1] == "reference" and names.count("reference") == 1
    assert "ort-acme" not in names, (
        "the prefix is that of drivers on ONNX Runtime, of which there is no such one"
    )
    assert registry.load_factory("reference") is ReferenceDevice
    assert registry.load_factory("acme-good").__name__ == "Device"


@pytest.mark.parametrize("is_installed", [True, False])
def test_openvino_is_used_without_being_named_where_onnx_runtime_is_not_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("json") if is_installed else None
    monkeypatch.setattr(registry, "find_spec", {"onnxruntime": spec}.__getitem__)
    assert ("openvino-cpu" in registry.driver_names()) == (not is_installed)
    assert ("openvino-cpu" in registry.names_on_request()) == is_installed
    assert "simulated" in registry.names_on_request()


async def test_broken_drivers_are_listed_with_their_reason_and_the_rest_works(acme: None) -> None:
    async with aionn.open(drivers=["acme-absent", "acme-good", "acme-refusing"]) as runtime:
        assert [device.name for device in runtime.devices] == ["acme-good"]
        reasons = {missing.name: missing.reason for missing in runtime.unavailable}
        assert "No module named 'acme_missing'" in reasons["acme-absent"]
        assert "the accelerator is not plugged in" in reasons["acme-refusing"]


def test_driver_can_be_named_by_module_and_attribute(acme: None) -> None:
    assert registry.load_factory("acme_driver:Device").__name__ == "Device"
    with pytest.raises(DeviceUnavailable, match="no attribute 'absent'"):
        registry.load_factory("acme_driver:absent")
    with pytest.raises(DeviceUnavailable, match="expected something that makes a device"):
        registry.load_factory("acme_driver:__name__")
    with pytest.raises(InvalidArgument, match="expected one of"):
        registry.load_factory("nobody")


async def test_device_that_says_illegal_things_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    def with_info(**changes: Any) -> Any:
        def make(name: str) -> ReferenceDevice:
            device = ReferenceDevice(name)
            device.info = msgspec.structs.replace(device.info, **changes)
            return device

        return make

    module = types.ModuleType("illegal_drivers")
    module.no_version = with_info(version="")  # type: ignore[attr-defined]
    module.no_slots = with_info(slots=0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "illegal_drivers", module)
    for name, why in (("no_version", "version"), ("no_slots", "slots")):
        with pytest.raises(DeviceUnavailable, match=why):
            registry.make_device(f"illegal_drivers:{name}", "device")
    made = registry.make_device("reference", "mine")
    assert made.info.name == "mine"
    await made.aclose()


async def test_device_that_cannot_hide_its_extensions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        """A device whose info is a property."""

        @property
        def info(self) -> DeviceInfo:
            return msgspec.structs.replace(INFO, extensions=(Extension("com.acme.double"),))

    monkeypatch.setenv(registry.EXTENSIONS_VARIABLE, "com.acme.*")
    device = registry.made_by(lambda name: Fixed(), "acme", "fixed")  # type: ignore[arg-type, return-value]
    assert device.info.extensions, "nothing was to be hidden"
    monkeypatch.setenv(registry.EXTENSIONS_VARIABLE, "none")
    with pytest.raises(
        DeviceUnavailable, match=r"'acme': AIONN_EXTENSIONS hides .* whose info cannot be assigned"
    ):
        registry.made_by(lambda name: Fixed(), "acme", "fixed")  # type: ignore[arg-type, return-value]


async def test_skeleton_computes_what_it_says_it_supports() -> None:
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    b = graph.constant(np.array([1, 2, 3], np.float32))
    none = graph.constant(0)
    total = graph.result(OperationType.ADD, [a, b, none], a)
    product = graph.result(OperationType.MUL, [total, a, none], a)
    largest = graph.result(OperationType.MAXIMUM, [product, a], a)
    model = graph.build([largest])
    values = np.array([[-1, 0, 1], [2, -3, 4]], np.float32)
    async with aionn.open(devices=[SkeletonDevice("acme-skeleton")]) as runtime:
        net = await runtime.compile(model)
        expected = np.maximum((values + np.array([1, 2, 3], np.float32)) * values, values)
        np.testing.assert_array_equal((await net.execute([values])).outputs[0], expected)
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    refused = graph.build([graph.result(OperationType.ADD, [a, a, graph.constant(1)], a)])
    async with SkeletonDevice("acme-skeleton") as device:
        assert await device.supported_operations(refused) == (False,)
