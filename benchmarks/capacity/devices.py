"""Drivers of aionn with one slot, as the contenders with one worker have it: the devices of aionn have two."""

from __future__ import annotations

import importlib

import msgspec

from aionn.drivers import registry
from aionn.hal import Device

__all__ = ["litert", "openvino", "ort"]


def _one_slot(driver: str, name: str) -> Device:
    module = importlib.import_module(registry.BUILT_IN[driver].partition(":")[0])
    module.INFO = msgspec.structs.replace(module.INFO, slots=1)
    return registry.make_device(driver, name)


def litert(name: str) -> Device:
    """``litert-cpu`` with one slot."""
    return _one_slot("litert-cpu", name)


def ort(name: str) -> Device:
    """``ort-cpu`` with one slot."""
    return _one_slot("ort-cpu", name)


def openvino(name: str) -> Device:
    """``openvino-cpu`` with one slot."""
    return _one_slot("openvino-cpu", name)
