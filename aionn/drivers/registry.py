"""The known drivers: names to factories, nothing imported until it is asked for.

Drivers of others register in the entry-point group ``aionn.drivers``: name -> a callable that takes the device's name and returns
an ``aionn.hal.Device``. One that cannot be loaded is listed as unavailable with its reason; the rest works.

Owns also which vendor extensions drivers may have: ``AIONN_EXTENSIONS`` is read where a device is made, in its own process too.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import msgspec

from aionn.errors import DeviceUnavailable, InvalidArgument, class_text, named
from aionn.hal import Device, DeviceInfo, Model

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "EXTENSIONS_VARIABLE",
    "DriverFactory",
    "ExtensionPolicy",
    "built_in_info",
    "devices_on_request",
    "driver_names",
    "drivers_for",
    "is_of_family",
    "load_factory",
    "made_by",
    "make_device",
    "may_support",
]

ENTRY_POINT_GROUP = "aionn.drivers"

DriverFactory = Callable[[str], Device]
"""Makes the device that shall have the given name."""

EXTENSIONS_VARIABLE = "AIONN_EXTENSIONS"
"""Vendor extensions that may be used: patterns with commas between them, or ``none``. Unset or empty allows all."""


class ExtensionPolicy(msgspec.Struct, frozen=True):
    """The vendor extensions that may be used.

    Attributes:
        patterns: Names, in which ``*`` stands for any text: ``com.acme.*``. None at all allows none.
    """

    patterns: tuple[str, ...] = ("*",)

    @classmethod
    def parse(cls, text: str, where: str) -> ExtensionPolicy:
        """The policy of a text as in ``AIONN_EXTENSIONS``.

        Raises:
            InvalidArgument: A pattern could match no name.
        """
        if text == "none":
            return cls(())
        patterns = tuple(part.strip() for part in text.split(",") if part.strip())
        for pattern in patterns:
            if not re.fullmatch(r"[a-z0-9_.*]+", pattern):
                raise InvalidArgument(f"{where}: expected names of extensions or none, got {pattern!r}")
        return cls(patterns) if patterns else cls()

    def allows(self, name: str) -> bool:
        """Whether an extension may be used."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def restricted(self, info: DeviceInfo) -> DeviceInfo:
        """The DeviceInfo of a device, without the extensions that may not be used."""
        allowed = tuple(extension for extension in info.extensions if self.allows(extension.name))
        if len(allowed) == len(info.extensions):
            return info
        return msgspec.structs.replace(info, extensions=allowed)


BUILT_IN = {
    "litert-cpu": "aionn.drivers.litert.driver:LitertDevice",
    "onnx-reference": "aionn.drivers.onnx_reference.driver:OnnxReferenceDevice",
    "openvino-cpu": "aionn.drivers.openvino.driver:OpenvinoDevice",
    "ort-cpu": "aionn.drivers.onnxruntime.driver:OrtDevice",
    "reference": "aionn.drivers.reference:ReferenceDevice",
    "simulated": "aionn.drivers.simulated.driver:SimulatedDevice",
}
"""Our own drivers. The reference device comes last in every listing, as the HAL has it."""

ORT_PREFIX = "ort-"
"""The prefix of the names of drivers that are execution providers of ONNX Runtime."""

OPENVINO_PREFIX = "openvino-"
"""The prefix of the names of drivers that are devices of OpenVINO."""

FAMILIES = {
    OPENVINO_PREFIX: "aionn.drivers.openvino.driver",
    ORT_PREFIX: "aionn.drivers.onnxruntime.driver",
}
"""Modules with many drivers, by the prefix of their names: each has ``info_for`` and ``factory_for``."""

ORT_PROVIDERS_VARIABLE = "AIONN_ORT_PROVIDERS"
"""Environment variable with further drivers on ONNX Runtime: NAME=PROVIDER, with commas between them; options of a provider follow
as :OPTION=VALUE."""

SIMULATED = "simulated"

ON_REQUEST = (SIMULATED,)
"""Drivers that are used when they are named, and never because they are there. A simulated device is named after its profile."""

SUPERSEDED = {"openvino-cpu": "onnxruntime"}
"""Drivers that are used only when they are named where a module is installed. ``ort-cpu`` supports the same models, but for what
OpenVINO computes wrongly, and states shorter times: it would be chosen, and a process of the other one started for nothing."""

EXTENSIONS_ONLY = ("onnx-reference",)
"""Drivers that support no operation of the HAL."""


def may_support(driver: str, model: Model) -> bool:
    """Whether a driver may support an operation of a model; False is found out without starting the driver."""
    return driver not in EXTENSIONS_ONLY or bool(model.extension_name_to_prefix)


def _entry_points() -> EntryPoints:
    # Imported here: a process of one of our own drivers does not need it, and starts by a twentieth earlier.
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)


def driver_names() -> tuple[str, ...]:
    """The drivers that are used where none is named: those of others first, the reference driver last."""
    others = {entry.name for entry in _entry_points() if _family(entry.name) is None} - BUILT_IN.keys()
    own = (name for name in BUILT_IN if name != "reference" and not _is_on_request(name))
    return (*sorted(others), *own, *_configured_names(), "reference")


def names_on_request() -> tuple[str, ...]:
    """The drivers that are used where they are named alone."""
    return (*(name for name in BUILT_IN if _is_on_request(name)), *_openvino_names())


def devices_on_request() -> tuple[str, ...]:
    """Those of them whose device is part of this machine: simulated ones are not."""
    return tuple(name for name in names_on_request() if name != SIMULATED)


def drivers_for(devices: str | Sequence[str] | None) -> list[str] | None:
    """The drivers that a command opens for the devices that its ``--device`` names, as ``aionn.open`` takes them.

    Args:
        devices: The name or names; None means that the option is absent.

    Returns:
        None, which means all that are used by default, unless a device is among them that is used only where it is named: then
        the drivers of the named devices. Among these are devices of ONNX Runtime and OpenVINO that this machine may not have:
        their drivers have the reason.
    """
    names = [devices] if isinstance(devices, str) else list(devices or ())
    by_default = driver_names()
    on_request = devices_on_request()
    others = [name for name in dict.fromkeys(names) if name not in on_request and is_of_family(name)]
    added = [*on_request, *(name for name in others if name not in by_default)]
    if not set(names).intersection(added):
        return None
    return [name for name in (*by_default, *added) if name in names]


def is_of_family(name: str) -> bool:
    """Whether a driver is an execution provider of ONNX Runtime or a device of OpenVINO, usable or not."""
    return _family(name) is not None


def _is_on_request(name: str) -> bool:
    """Whether one of our own drivers is used only where it is named."""
    return name in ON_REQUEST or (name in SUPERSEDED and find_spec(SUPERSEDED[name]) is not None)


def _configured_names() -> list[str]:
    """The drivers that ``ORT_PROVIDERS_VARIABLE`` adds. Whether their providers exist is found out when they are made."""
    entries = os.environ.get(ORT_PROVIDERS_VARIABLE, "").split(",")
    names = {entry.partition("=")[0].strip() for entry in entries}
    return sorted(name for name in names - BUILT_IN.keys() if name.startswith(ORT_PREFIX))


def _openvino_names() -> list[str]:
    """The drivers of the GPUs and NPUs that OpenVINO may use."""
    found: list[str] = importlib.import_module("aionn.drivers.openvino.hardware").found_names()
    return found


def _family(name: str) -> str | None:
    """The module of a driver that is one of many; None for others."""
    return next((module for prefix, module in FAMILIES.items() if name.startswith(prefix)), None)


def load_factory(name: str) -> DriverFactory:
    """Imports a driver.

    Args:
        name: A registered name; or ``module:attribute``, for a driver that is not registered yet.

    Raises:
        InvalidArgument: No such driver.
        DeviceUnavailable: It cannot be imported; the message has the reason.
    """
    if name in BUILT_IN:
        target = BUILT_IN[name]
    elif family := _family(name):
        return cast(DriverFactory, importlib.import_module(family).factory_for(name))
    elif ":" in name:
        target = name
    else:
        found = [entry.value for entry in _entry_points() if entry.name == name]
        if not found:
            known = ", ".join((*driver_names(), *names_on_request()))
            raise InvalidArgument(f"driver {name!r}: expected one of {known}, or module:Class")
        target = found[0]
    module_name, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        if not callable(factory):
            raise TypeError(f"expected something that makes a device, got {class_text(factory)}")
        return cast(DriverFactory, factory)
    except (
        Exception,
        SystemExit,
    ) as e:  # A module that ends its process when it is imported must not end ours.
        raise DeviceUnavailable(f"driver {name!r} cannot be loaded: {named(e)}") from e


def make_device(driver: str, name: str) -> Device:
    """Imports a driver, makes its device and checks its DeviceInfo.

    Raises:
        InvalidArgument: No such driver.
        DeviceUnavailable: It cannot be imported or made, or breaks a rule about names, counts, performance or extensions.
    """
    return made_by(load_factory(driver), driver, name)


def made_by(factory: DriverFactory, driver: str, name: str) -> Device:
    """As ``make_device``, of a driver that has been imported."""
    # Not before it is needed: the rules import every operation.
    from aionn.validation import check_device_info

    policy = ExtensionPolicy.parse(os.environ.get(EXTENSIONS_VARIABLE, ""), EXTENSIONS_VARIABLE)
    try:
        device = factory(name)
        said = device.info  # A property may return another object each time.
        check_device_info(said)
        info = policy.restricted(said)
        if info is not said:
            # A device does not support an extension that it does not declare, whatever its driver returns.
            try:
                cast(Any, device).info = info
            except AttributeError as e:
                raise DeviceUnavailable(
                    f"driver {driver!r}: {EXTENSIONS_VARIABLE} hides extensions of its device, whose info cannot be assigned"
                ) from e
    except DeviceUnavailable:
        raise
    except (Exception, SystemExit) as e:
        raise DeviceUnavailable(f"driver {driver!r} makes no device: {named(e)}") from e
    return device


def built_in_info(driver: str, name: str) -> DeviceInfo | None:
    """The DeviceInfo of one of aionn's own drivers without starting it; None for drivers of others, and of GPUs and NPUs, which
    must be asked.

    Raises:
        DeviceUnavailable: A package of the driver is missing or too old.
    """
    if family := _family(driver):
        return cast("DeviceInfo | None", importlib.import_module(family).info_for(name, driver))
    if driver not in BUILT_IN:
        return None
    module = importlib.import_module(BUILT_IN[driver].partition(":")[0])
    return cast(DeviceInfo, module.info_for(name))
