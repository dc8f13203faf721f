"""Devices of OpenVINO whose engine does not come back, for tests with driver processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from aionn.drivers.openvino.driver import OpenvinoDevice

__all__ = ["HangingDevice", "SlowDevice"]


class HangingDevice(OpenvinoDevice):
    """Its requests never end, and cannot be cancelled: so are those of a plugin that hangs."""

    def make(self, *arguments: Any) -> Any:
        """See the base class."""
        prepared = super().make(*arguments)
        for slot in prepared._idle:
            slot.run = _never  # type: ignore[method-assign]
        return prepared


def _never(inputs: Sequence[Any], areas: Sequence[Any]) -> Any:
    while True:
        threading.Event().wait()


class SlowDevice(OpenvinoDevice):
    """It compiles for a minute the first time."""

    has_compiled = False

    def make(self, *arguments: Any) -> Any:
        """See the base class."""
        if not self.has_compiled:
            self.has_compiled = True
            threading.Event().wait(60.0)
        return super().make(*arguments)
