"""What names of `ort-*` mean, and what is said where ONNX Runtime is installed twice, or has no such provider."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.conformance.expectations import driver_expectations
from aionn.drivers import registry
from aionn.drivers.onnxruntime import providers
from aionn.drivers.onnxruntime.driver import UNSUPPORTED, OrtDevice, info_for
from aionn.drivers.onnxruntime.providers import Provider, provider_named
from aionn.errors import DeviceUnavailable, ResourceExhausted
from aionn.hal import CancelCapability

VARIABLE = registry.ORT_PROVIDERS_VARIABLE


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes it look as though these distributions were installed: names to versions."""

    def install(**versions: str) -> None:
        found = {name.replace("_", "-"): version for name, version in versions.items()}

        def version_of(name: str) -> str:
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        providers.installed_version.cache_clear()

    yield install
    providers.installed_version.cache_clear()


def test_two_packages_with_one_module_make_the_device_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``pip install onnxruntime onnxruntime-gpu`` leaves it: one folder of the module, and two lists of its files."""
    for name, version in (("onnxruntime", "1.32.0"), ("onnxruntime_gpu", "1.31.0")):
        listed = tmp_path / f"{name}-{version}.dist-info"
        listed.mkdir()
        title = name.replace("_", "-")
        (listed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n")
        (listed / "RECORD").write_text(f"onnxruntime/__init__.py,,\n{listed.name}/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    providers.installed_version.cache_clear()
    try:
        with pytest.raises(
            DeviceUnavailable, match="onnxruntime and onnxruntime-gpu are installed over each"
        ):
            registry.built_in_info("ort-cpu", "ort-cpu")
    finally:
        providers.installed_version.cache_clear()


def test_package_that_adds_a_provider_is_no_second_one(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(onnxruntime="1.32.0", onnxruntime_qnn="2.0.0")
    monkeypatch.setattr(providers, "_contains_module", lambda name: name == "onnxruntime")
    assert providers.installed_version() == "1.32.0"


def test_device_of_another_provider_says_what_it_cannot(installed: Any) -> None:
    installed(onnxruntime_gpu="1.32.0")
    info = info_for("gpu", "ort-cuda")
    assert (info.name, info.slots, info.cancel) == ("gpu", 1, CancelCapability.NONE)
    assert "CUDAExecutionProvider" in info.version


def test_versions_name_library_provider_and_opset(installed: Any) -> None:
    installed(onnxruntime="1.99.1")
    assert info_for("ort-cpu").version == "2 ONNX Runtime 1.99.1 CPUExecutionProvider opset 21"


def test_variable_names_devices_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "ort-cuda1=CUDAExecutionProvider:device_id=1:arena_extend_strategy=kSameAsRequested, ort-x=X,ort-qnn"
    )
    monkeypatch.setenv(VARIABLE, text)
    options = {"device_id": "1", "arena_extend_strategy": "kSameAsRequested"}
    assert provider_named("ort-cuda1") == Provider("CUDAExecutionProvider", options)
    assert provider_named("ort-x") == Provider("X")
    assert provider_named("ort-qnn") == Provider("QNNExecutionProvider")
    assert registry.driver_names()[-4:] == ("ort-cuda1", "ort-qnn", "ort-x", "reference")


@pytest.mark.parametrize("text", ["cuda=X", "ort-a", "ort-a=", "ort-a=X:", "ort-a=X:b", "ort-a=X:=1"])
def test_senseless_variable_is_reported(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(DeviceUnavailable, match=f"{VARIABLE}: expected ort-NAME=PROVIDER"):
        provider_named("ort-a")


def test_unknown_name_is_reported_with_the_known_ones() -> None:
    with pytest.raises(DeviceUnavailable, match="ort-none: expected one of ort-cpu, ort-cuda"):
        registry.built_in_info("ort-none", "ort-none")


def test_lists_of_every_driver_reach_the_suites() -> None:
    assert dict(driver_expectations("ort-cuda").unsupported) == UNSUPPORTED


async def test_configured_device_computes(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    monkeypatch.setenv(VARIABLE, "ort-second=CPUExecutionProvider")
    async with aionn.open(drivers={"mine": "ort-second"}) as runtime:
        net = await runtime.compile(small.sum_model(), devices="mine")
        ones = np.ones((2, 3), np.float32)
        result = await net.execute([ones, ones])
        assert result.outputs[0].tolist() == [[2.0] * 3] * 2


async def test_provider_that_is_not_there_fails_and_never_becomes_the_cpu(small: Any) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    async with OrtDevice("gpu", "ort-cuda") as device:
        with pytest.raises(
            DeviceUnavailable, match=r"CUDAExecutionProvider: the installed ONNX Runtime .* has"
        ):
            await device.prepare_model(small.sum_model())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "CudaCall CUDA failure 2: out of memory ; GPU=0 ; expr=cudaSetDevice(device_id);",
            ResourceExhausted,
        ),
        (
            "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; expr=cublasCreate(&handle);",
            ResourceExhausted,
        ),
        ("CUDA failure 100: no CUDA-capable device is detected ; GPU=-1", DeviceUnavailable),
    ],
)
async def test_provider_that_cannot_start_is_reported_with_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, small: Any, text: str, expected: type[Exception]
) -> None:
    """Without an option ONNX Runtime makes a session of the CPU's instead, and what became of the provider is not known."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

    def fail(self: Any, providers: Any, *arguments: Any) -> Any:
        assert providers == ["CUDAExecutionProvider"], "there is no second attempt on the CPU"
        raise RuntimeError(text)

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", fail)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    async with OrtDevice("gpu", "ort-cuda") as device:
        model = small.sum_model()
        with pytest.raises(expected, match=text[:20]):
            await device.supported_operations(model)
        with pytest.raises(expected, match=text[:20]):
            await device.prepare_model(model)


async def test_provider_that_falls_back_to_the_cpu_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    # What ONNX Runtime does where a library of the provider is missing: a session on the CPU, and a line in its log.
    made = ort.InferenceSession

    def falling_back(file: bytes, options: Any, **ignored: Any) -> Any:
        return made(file, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(ort, "InferenceSession", falling_back)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    async with OrtDevice("gpu", "ort-cuda") as device:
        with pytest.raises(DeviceUnavailable, match="made a session on CPUExecutionProvider instead"):
            await device.prepare_model(small.sum_model())
