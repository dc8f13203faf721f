"""The controls of a camera: brightness, exposure and others, by name.

Owns their names, the checks of values and the words of errors. Refuses to own when they are set: at each opening (`opening.py`), or
when an application asks for it.

Invariants:
1. A value is checked against the range of the driver before it is set.
2. The enumeration is bounded, whatever the driver answers.

Source: the kernel's documentation "Video for Linux API", user controls. The names are those of ``v4l2-ctl``.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from aionn.errors import InvalidArgument, shown
from aionn.media.arguments import checked_text, checked_whole
from aionn.media.cameras import videodev
from aionn.media.cameras.device import VideoDevice, shown_text
from aionn.media.live.capture import SourceUnavailable
from aionn.platform.numbers import number_of

__all__ = ["CameraControl", "ControlValue", "checked_values", "controls_of", "set_controls"]

CONTROLS_MAX = 512
"""Controls that are asked for; webcams have some twenty, vivid a hundred."""

CHOICES_MAX = 256
"""Entries of a menu that are asked for; the longest of the kernel's headers have some forty."""

VALUE_MIN, VALUE_MAX = -(2**31), 2**32 - 1
"""A value has 32 bits, which are signed, or those of a bitmask."""

Kind = Literal["integer", "boolean", "menu", "button", "bitmask"]

ControlValue = int | bool | str
"""A number, a truth value, or the text of a menu's entry."""

KINDS: dict[int, Kind] = {
    videodev.CTRL_INTEGER: "integer",
    videodev.CTRL_BOOLEAN: "boolean",
    videodev.CTRL_MENU: "menu",
    videodev.CTRL_BUTTON: "button",
    videodev.CTRL_BITMASK: "bitmask",
    videodev.CTRL_INTEGER_MENU: "menu",
}
"""Kinds that have a value of 32 bits; others, such as texts and matrices, are left out."""


class CameraControl(msgspec.Struct, frozen=True):
    """A control of a camera.

    Attributes:
        name: Its name in ``camera(controls=...)``: the driver's text in small letters, with ``_`` between the words.
        title: The driver's text.
        kind: ``integer``, ``boolean``, ``menu``, ``button`` (which does something when it is set) or ``bitmask``.
        minimum: The smallest value.
        maximum: The largest one.
        step: The distance between values.
        default: The driver's default.
        value: The present value; None for one that cannot be read.
        choices: The entries of a menu, by value.
        is_read_only: Whether it cannot be set.
        is_inactive: Whether it has no effect now, usually since another control sets it automatically.
    """

    name: str
    title: str
    kind: Kind
    minimum: int = 0
    maximum: int = 0
    step: int = 1
    default: int = 0
    value: int | None = None
    choices: dict[int, str] = {}
    is_read_only: bool = False
    is_inactive: bool = False


def name_of(title: str) -> str:
    """The name of a control from the driver's text, as ``v4l2-ctl`` makes it."""
    letters = "".join(c.lower() if c.isascii() and c.isalnum() else " " for c in title)
    return "_".join(letters.split())


def controls_of(device: VideoDevice) -> list[CameraControl]:
    """The controls of an open camera, in the order of its driver.

    Raises:
        SourceUnavailable: It does not answer.
    """
    return [control for _, control in _numbered(device)]


def _numbered(device: VideoDevice) -> list[tuple[int, CameraControl]]:
    found: list[tuple[int, CameraControl]] = []
    number = 0
    for _ in range(CONTROLS_MAX):
        query = videodev.QueryControl(id=number | videodev.CTRL_FLAG_NEXT)
        if not device.offers(videodev.QUERYCTRL, query) or query.id <= number:
            break
        number = query.id
        kind = KINDS.get(query.type)
        if kind is not None and not query.flags & videodev.CTRL_FLAG_DISABLED:
            found.append((number, _control(device, query, kind)))
    return found


def _control(device: VideoDevice, query: videodev.QueryControl, kind: Kind) -> CameraControl:
    title = shown_text(query.name)
    return CameraControl(
        name=name_of(title),
        title=title,
        kind=kind,
        minimum=query.minimum,
        maximum=query.maximum,
        step=max(1, query.step),
        default=query.default_value,
        value=_value(device, query, kind),
        choices=_choices(device, query) if kind == "menu" else {},
        is_read_only=bool(query.flags & videodev.CTRL_FLAG_READ_ONLY),
        is_inactive=bool(query.flags & videodev.CTRL_FLAG_INACTIVE),
    )


def _value(device: VideoDevice, query: videodev.QueryControl, kind: Kind) -> int | None:
    if kind == "button" or query.flags & videodev.CTRL_FLAG_WRITE_ONLY:
        return None
    control = videodev.Control(id=query.id)
    try:
        device.system.ioctl(device.fd, videodev.G_CTRL, control)
    except OSError as e:
        if e.errno in (errno.ENODEV, errno.ENXIO):
            raise device.problem(e, "reading its controls") from e
        return None  # Some cameras answer for a control only while they stream, or with an error of the bus.
    return int(control.value)


def _choices(device: VideoDevice, query: videodev.QueryControl) -> dict[int, str]:
    choices: dict[int, str] = {}
    for index in range(max(0, query.minimum), min(query.maximum, query.minimum + CHOICES_MAX - 1) + 1):
        entry = videodev.QueryMenu(id=query.id, index=index)
        if device.offers(videodev.QUERYMENU, entry):  # A menu may have gaps.
            is_number = query.type == videodev.CTRL_INTEGER_MENU
            choices[index] = str(entry.entry.value) if is_number else shown_text(entry.entry.name)
    return choices


def checked_values(values: object, where: str) -> dict[str, ControlValue]:
    """Returns values of controls by name, with integers and bools of numpy as Python's.

    Raises:
        InvalidArgument: It is not a mapping, or holds other types; ranges depend on the camera and are checked by `set_controls`.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{where}: expected a mapping from names to values, got {shown(values)}")
    return {
        checked_text(name, f"{where}: a name"): _checked_value(value, f"{where}: {name}")
        for name, value in values.items()
    }


def _checked_value(value: object, where: str) -> ControlValue:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    number = number_of(value)
    if not isinstance(number, int):
        raise InvalidArgument(f"{where}: expected an integer, a bool or a text, got {shown(value)}")
    return checked_whole(number, VALUE_MIN, VALUE_MAX, where)


def set_controls(device: VideoDevice, values: Mapping[str, ControlValue]) -> None:
    """Sets controls in the given order, which matters where one makes another one active.

    Args:
        device: The open camera.
        values: By name.

    Raises:
        InvalidArgument: There is no such control, it cannot be set, or the value is out of its range. Those before it are set.
        SourceUnavailable: The driver rejects a value, or is gone.
    """
    for name, value in values.items():
        # Asked for each time: one control may change the range of another.
        known = {control.name: (number, control) for number, control in _numbered(device)}
        if name not in known:
            names = ", ".join(known) or "none"
            raise InvalidArgument(f"camera {device.path}: control {name!r}: expected one of {names}")
        number, control = known[name]
        entry = videodev.Control(id=number, value=_checked(device.path, control, value))
        try:
            device.system.ioctl(device.fd, videodev.S_CTRL, entry)
        except OSError as e:
            if e.errno == errno.EBUSY:
                raise SourceUnavailable(
                    f"camera {device.path}: control {name}: expected it to be free, got EBUSY: it cannot be changed while the "
                    "camera streams"
                ) from e
            if e.errno in (errno.EINVAL, errno.ERANGE):
                raise InvalidArgument(
                    f"camera {device.path}: control {name}: expected a value that the driver accepts, it rejects {value!r}"
                ) from e
            raise device.problem(e, f"setting the control {name}") from e


def _checked(path: str, control: CameraControl, value: ControlValue) -> int:
    """The number to set."""
    where = f"camera {path}: control {control.name}"
    if control.is_read_only:
        raise InvalidArgument(f"{where}: expected one that can be set, this one can be read alone")
    if isinstance(value, str):
        for number, text in control.choices.items():
            if text.casefold() == value.casefold():
                return number
        choices = ", ".join(repr(text) for text in control.choices.values()) or "a number"
        raise InvalidArgument(f"{where}: expected {choices}, got {value!r}")
    if control.kind == "button":
        return int(value)
    if control.choices:
        if value not in control.choices:
            raise InvalidArgument(f"{where}: expected one of {sorted(control.choices)}, got {value}")
        return value
    is_in_range = control.minimum <= value <= control.maximum
    if control.kind != "bitmask" and not (is_in_range and (value - control.minimum) % control.step == 0):
        steps = f" in steps of {control.step}" if control.step > 1 else ""
        raise InvalidArgument(f"{where}: expected {control.minimum} to {control.maximum}{steps}, got {value}")
    return int(value)
