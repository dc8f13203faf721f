"""The cameras of the machine, and the one that a name means.

Owns the list and the choice by name. Refuses to own opening a stream (`capture.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from aionn.errors import Error
from aionn.media.cameras.device import NotACamera, VideoDevice, capability_of, offers_of, shown_text
from aionn.media.cameras.problems import is_gone
from aionn.media.cameras.system import System
from aionn.media.live.capture import SourceUnavailable

__all__ = ["CameraInfo", "Identity", "find_cameras", "identity_of", "naming_others", "resolve"]

WITHOUT_A_CAMERA = (
    "aionn.media.named_source takes a source without a camera by its name: a video file, 'replay:FILE' (a recording), or "
    "'pattern:' (a synthetic picture)"
)
"""Ends the message about a camera that is not there."""


class CameraInfo(msgspec.Struct, frozen=True):
    """A camera of this machine.

    Attributes:
        path: Its device, such as ``/dev/video0``; another one may have the path after a reconnection.
        stable_path: A name that survives reconnections; None where udev makes none, as in most containers.
        name: Its name for people.
        driver: The kernel's driver.
        bus: The place where it is plugged in.
        formats: Its pixel formats.
        problem: Why it cannot be asked now; empty if it can. The other attributes are then empty.
    """

    path: str
    stable_path: str | None
    name: str = ""
    driver: str = ""
    bus: str = ""
    formats: tuple[str, ...] = ()
    problem: str = ""


class Identity(msgspec.Struct, frozen=True):
    """A camera, wherever it is: its name and the place where it is plugged in."""

    name: str
    bus: str


def find_cameras(system: System) -> list[CameraInfo]:
    """Every camera, by number. Nodes that capture no pictures are left out; those that cannot be opened are listed with the
    reason."""
    stable = system.stable_names()
    found = []
    for path in system.video_nodes():
        try:
            found.append(_info(system, path, stable.get(path)))
        except NotACamera:
            continue
        except SourceUnavailable as e:
            found.append(CameraInfo(path, stable.get(path), problem=str(e)))
    return found


def _info(system: System, path: str, stable_path: str | None) -> CameraInfo:
    device = VideoDevice(system, path)
    try:
        capability = capability_of(device)
        formats = tuple(dict.fromkeys(offer.format for offer in offers_of(device)))
    finally:
        system.close(device.fd)
    card, driver, bus = (
        shown_text(part) for part in (capability.card, capability.driver, capability.bus_info)
    )
    return CameraInfo(path, stable_path, card, driver, bus, formats)


def identity_of(system: System, path: str) -> Identity | None:
    """Name and place of a camera; None if it cannot be asked."""
    with contextlib.suppress(Error):
        device = VideoDevice(system, path)
        try:
            capability = capability_of(device)
        finally:
            system.close(device.fd)
        return Identity(shown_text(capability.card), shown_text(capability.bus_info))
    return None


def resolve(system: System, camera: str | int, identity: Identity | None) -> str:
    """The device that a caller means.

    Args:
        system: The system calls.
        camera: A number, a path, or a part of a camera's name.
        identity: The camera that was open before; it is searched for where the number or path leads to nothing, or to another one.

    Raises:
        SourceUnavailable: No camera is called so.
    """
    if isinstance(camera, int) or camera.isdecimal():
        camera = f"/dev/video{camera}"
    if camera.startswith("/"):
        if identity is None or identity_of(system, camera) == identity:
            return camera
        same = [info.path for info in find_cameras(system) if Identity(info.name, info.bus) == identity]
        return same[0] if same else camera
    infos = find_cameras(system)
    for info in infos:
        if camera.casefold() in info.name.casefold():
            return info.path
    names = _names(infos) or "none"
    raise SourceUnavailable(
        f"camera {camera!r}: expected a camera whose name contains that, got {names}; it is not plugged in, or the name is "
        f"wrong; {WITHOUT_A_CAMERA}"
    )


@contextlib.contextmanager
def naming_others(system: System) -> Iterator[None]:
    """Adds the cameras of the machine, and sources without one, to the error about a camera that is not there."""
    try:
        yield
    except SourceUnavailable as e:
        if not is_gone(e.__cause__):
            raise
        there = "its cameras cannot be listed"
        with contextlib.suppress(OSError):  # No descriptor is left.
            there = f"this machine has {_names(find_cameras(system)) or 'no camera'}"
        raise SourceUnavailable(
            f"{e}; {there}; {WITHOUT_A_CAMERA}", is_permanent=e.is_permanent
        ) from e.__cause__


def _names(infos: list[CameraInfo]) -> str:
    return ", ".join(f"{info.path} {info.name!r}" for info in infos)
