"""The client's side of a driver process: a device behind a connection, and the supervisor that starts and ends the process."""

from __future__ import annotations

from aionn.service.client.device import RemoteDevice

__all__ = ["RemoteDevice"]
