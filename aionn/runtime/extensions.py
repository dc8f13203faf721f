"""The permission of models to use vendor extensions in a runtime.

Owns the check of a model before anything is done with it. ``aionn.drivers.registry`` defines the patterns, and applies the same
policy to drivers in their own processes.

Invariants:
1. An extension that is not allowed is hidden: no device of the runtime lists it, and no model may use it.
2. An extension that two devices describe differently is not used: the application could not know which one it gets.

Source: the NN HAL runtime's ``TypeManager``: extensions only for those on an allow-list, and none whose types differ by driver.
"""

from __future__ import annotations

from collections.abc import Iterable

from aionn.drivers.registry import EXTENSIONS_VARIABLE, ExtensionPolicy
from aionn.errors import InvalidArgument
from aionn.hal import DeviceInfo, Model

__all__ = ["check_extensions"]


def check_extensions(model: object, policy: ExtensionPolicy, infos: Iterable[DeviceInfo]) -> None:
    """Refuses a model for an extension that it uses; an object that is not a ``Model`` can use none.

    Raises:
        InvalidArgument: The extension is not allowed here, or two of the devices disagree on its operand types.
    """
    if not isinstance(model, Model) or not model.extension_name_to_prefix:
        return
    every = [(info.name, extension) for info in infos for extension in info.extensions]
    for name in [entry.name for entry in model.extension_name_to_prefix]:
        if not policy.allows(name):
            raise InvalidArgument(
                f"model: expected extensions that are allowed by `extensions` or {EXTENSIONS_VARIABLE}, got {name!r}"
            )
        having = [(device, extension) for device, extension in every if extension.name == name]
        kinds = {tuple(sorted(e.operand_types, key=lambda kind: kind.type)) for _, e in having}
        if len(kinds) > 1:
            raise InvalidArgument(
                f"model, extension {name!r}: expected devices that agree on its operand types, "
                f"got {', '.join(device for device, _ in having)}, which do not"
            )
