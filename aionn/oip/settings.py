"""The settings of the process of a door, and its answer; importing it imports neither gRPC nor a server of HTTP."""

from __future__ import annotations

import importlib.util
from typing import Final

import msgspec

import aionn

__all__ = ["CUT_OFF", "DoorSettings", "Started", "check_packages"]

CUT_OFF: Final = 1
"""The exit status of the process where accepted requests were cut off."""


class DoorSettings(msgspec.Struct, frozen=True):
    """The settings of a door.

    Attributes:
        socket: Path of the device's Unix socket.
        models: Files by name.
        host: The address at which it listens.
        port: Of gRPC; 0 takes a free one.
        rest_port: Of REST; 0 takes a free one.
        is_remote: Whether other machines reach the address.
        drain_s: Limit of the wait for accepted requests at the end.
    """

    socket: str
    models: dict[str, str]
    host: str
    port: int
    rest_port: int
    is_remote: bool
    drain_s: float


class Started(msgspec.Struct, frozen=True):
    """The one line that the process writes when it serves, or cannot.

    Attributes:
        port: Of gRPC.
        rest_port: Of REST.
        problem: Why it cannot serve; empty where it serves.
    """

    port: int = 0
    rest_port: int = 0
    problem: str = ""


def check_packages() -> None:
    """Raises ``DeviceUnavailable`` where a package of the extra ``oip`` is missing."""
    missing = [
        name
        for name, package in (("grpcio", "grpc"), ("uvicorn", "uvicorn"))
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise aionn.DeviceUnavailable(
            f"oip: needs {' and '.join(missing)}, which cannot be found: pip install 'aionn[oip]'"
        )
