"""The execution providers of ONNX Runtime as devices, and whether the installed ones can be used.

Owns the providers of the drivers' names, the entries of ``AIONN_ORT_PROVIDERS``, and the distributions that contain ONNX Runtime.
Nothing of ONNX Runtime is imported here, so that clients can ask for a DeviceInfo at no cost.

Invariants:
1. A name always means the same provider; an unknown one is rejected with the known names.
2. Two distributions that contain the same module are reported, and never used: the files of the later one replace those of the
   other.

Source: packages of ONNX Runtime on the Python Package Index; its documentation of execution providers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping

import msgspec

from aionn.drivers.kit.engines.installed import check_version, version_of
from aionn.drivers.registry import ORT_PREFIX, ORT_PROVIDERS_VARIABLE
from aionn.errors import DeviceUnavailable

__all__ = ["Provider", "installed_version", "provider_named"]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

_PROVIDERS = {
    "ort-cpu": CPU,
    "ort-cuda": CUDA,
    "ort-migraphx": "MIGraphXExecutionProvider",
    "ort-openvino": "OpenVINOExecutionProvider",
    "ort-qnn": "QNNExecutionProvider",
    "ort-tensorrt": "TensorrtExecutionProvider",
    "ort-webgpu": "WebGpuExecutionProvider",
}

_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-webgpu",
)
_MODULE = "onnxruntime/__init__.py"

VERSION_MIN = (1, 22)

_EXACT: Mapping[str, Mapping[str, str]] = {CUDA: {"use_tf32": "0"}}
"""Options without which a provider rounds float32 by itself: the matrix units of CUDA take 10 bits of the mantissa."""


class Provider(msgspec.Struct, frozen=True):
    """An execution provider.

    Attributes:
        name: As ONNX Runtime has it.
        options: Its options.
    """

    name: str
    options: Mapping[str, str] = {}

    @property
    def is_cpu(self) -> bool:
        """Whether it is ONNX Runtime's own kernels on the CPU."""
        return self.name == CPU

    @property
    def is_cuda(self) -> bool:
        """Whether its libraries are those of CUDA."""
        return self.name in (CUDA, "TensorrtExecutionProvider")

    def options_for(self, *, is_relaxed: bool) -> dict[str, str]:
        """The options of a session; those that were configured come first.

        Args:
            is_relaxed: Whether floats may have the range and precision of float16.
        """
        return {**({} if is_relaxed else _EXACT.get(self.name, {})), **self.options}


def _configured() -> dict[str, Provider]:
    """The devices that the environment names.

    Raises:
        DeviceUnavailable: The variable makes no sense.
    """
    found = {}
    for entry in os.environ.get(ORT_PROVIDERS_VARIABLE, "").split(","):
        if not entry.strip():
            continue
        name, _, rest = entry.strip().partition("=")
        if name in _PROVIDERS and "=" not in entry:
            rest = _PROVIDERS[name]
        provider, *options = rest.split(":")
        pairs = [option.partition("=") for option in options]
        if (
            not name.startswith(ORT_PREFIX)
            or not provider
            or not all(key and is_pair for key, is_pair, _ in pairs)
        ):
            raise DeviceUnavailable(
                f"{ORT_PROVIDERS_VARIABLE}: expected {ORT_PREFIX}NAME=PROVIDER or {ORT_PREFIX}NAME=PROVIDER:OPTION=VALUE, "
                f"got {entry!r}"
            )
        found[name] = Provider(provider, {key: value for key, _, value in pairs})
    return found


def provider_named(name: str) -> Provider:
    """The provider of a driver's name.

    Raises:
        DeviceUnavailable: No provider has this name.
    """
    configured = _configured()
    if name in configured:
        return configured[name]
    if name in _PROVIDERS:
        return Provider(_PROVIDERS[name])
    known = ", ".join(sorted({*_PROVIDERS, *configured}))
    raise DeviceUnavailable(
        f"{name}: expected one of {known}, or {ORT_PROVIDERS_VARIABLE}={name}=PROVIDER for another execution provider"
    )


@functools.cache
def installed_version() -> str:
    """The version of the ONNX Runtime that is installed.

    Raises:
        DeviceUnavailable: None is installed, several are installed over each other, or it is too old.
    """
    found = {}
    for name in _DISTRIBUTIONS:
        version = version_of(name)
        if version is not None:
            found[name] = version
    if len(found) > 1:
        found = {name: version for name, version in found.items() if _contains_module(name)} or found
    if not found:
        return check_version("onnxruntime", None, VERSION_MIN, "onnxruntime")
    if len(found) > 1:
        names = " and ".join(found)
        raise DeviceUnavailable(
            f"{names} are installed over each other: each contains the module onnxruntime, so that neither is complete; "
            f"pip uninstall {' '.join(found)}, and install one of them"
        )
    ((name, version),) = found.items()
    return check_version(name, version, VERSION_MIN, "onnxruntime")


def _contains_module(name: str) -> bool:
    """Whether a distribution has the module, and is not an addition to another one."""
    files = importlib.metadata.distribution(name).files or ()
    return any(file.as_posix() == _MODULE for file in files)
