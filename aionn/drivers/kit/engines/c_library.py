"""An engine's shared library, whose functions return a status: 0 for success.

Owns the loading, the signatures as ctypes has them, and what a status means. Drivers own the versions whose signatures they know.

Source: the C interfaces of LiteRT and OpenVINO, which are alike in this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from aionn.drivers.kit.engines.support import Unsupported

__all__ = ["CLibrary", "Handle"]

Handle = ctypes.c_void_p
"""An object of an engine."""


class CLibrary:
    """A loaded library.

    Args:
        path: The file.
        engine: The engine's name, for errors.
        signatures: Functions that return a status, and their arguments.
        ends: Functions that end an object and return nothing, and their arguments.

    Attributes:
        functions: The functions.

    Raises:
        Unsupported: It cannot be loaded, or lacks a function.
    """

    def __init__(
        self,
        path: str,
        engine: str,
        signatures: Mapping[str, tuple[Any, ...]],
        ends: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self._engine = engine
        try:
            self.functions = ctypes.CDLL(path)
            for result, table in ((ctypes.c_int, signatures), (None, ends)):
                for name, arguments in table.items():
                    getattr(self.functions, name).argtypes = arguments
                    getattr(self.functions, name).restype = result
        except (OSError, AttributeError) as e:
            raise Unsupported(f"{engine}'s C interface: {e}") from e

    def make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Calls a function whose last argument takes a new handle. Raises as ``check``."""
        handle = Handle()
        self.check(function, getattr(self.functions, function)(*arguments, ctypes.byref(handle)))
        return handle

    def check(self, function: str, status: int) -> None:
        """Raises ``Unsupported`` for the status of a call that has failed."""
        if status:
            raise Unsupported(f"{self._engine} refuses it: {function} gives status {status}")
