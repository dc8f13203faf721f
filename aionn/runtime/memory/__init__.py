"""The places of the values of executions: request memory, and the memory of the application's own."""

from __future__ import annotations

from aionn.runtime.memory.own import DeviceMemory, OwnMemory, SharedMemory, copy

__all__ = ["DeviceMemory", "OwnMemory", "SharedMemory", "copy"]
