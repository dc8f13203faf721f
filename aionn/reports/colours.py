"""Colours of pages: one table of roles, each with a colour on light and one on dark paper; pure.

Owns the meaning of a colour: a device, a priority and an outcome look the same on every page. A page names a role
(``var(--late)``), never a colour; ``variables`` gives the roles their colours by the reader's setting.

Source: the contrast of WCAG 2.2 (1.4.3 for text, 1.4.11 for shapes), which the tests compute for every pair.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "DEVICE_COLOURS",
    "OUTCOME_ROLES",
    "PAPERS",
    "SHAPES",
    "TEXTS",
    "Colour",
    "contrast",
    "device_roles",
    "variables",
]


class Colour(NamedTuple):
    """A role's colour on light and on dark paper."""

    light: str
    dark: str


DEVICE_COLOURS = 8
"""Number of colours of devices: more look alike. A page with more devices repeats them."""

PAPERS = {"paper": Colour("#ffffff", "#14171b"), "row": Colour("#f3f5f7", "#1d2228")}
"""Backgrounds: the page, and every other row of a table."""

TEXTS = {
    "ink": Colour("#1b1f24", "#e6e8eb"),
    "soft": Colour("#59636e", "#a3adb8"),
    "good": Colour("#17703f", "#62c58f"),
    "warn": Colour("#8f5200", "#e0a84e"),
    "bad": Colour("#b3261e", "#f28b82"),
}
"""Colours of text on the papers."""

SHAPES = {
    "device-0": Colour("#3b6ea5", "#7fb2e5"),
    "device-1": Colour("#bb4030", "#ff917a"),
    "device-2": Colour("#1f7a33", "#6fc27c"),
    "device-3": Colour("#8a6a00", "#d3b24a"),
    "device-4": Colour("#99337a", "#dd8fc4"),
    "device-5": Colour("#0f7280", "#55c0cf"),
    "device-6": Colour("#586068", "#a9b0b8"),
    "device-7": Colour("#5f4433", "#cba894"),
    "high": Colour("#9c1c5b", "#f08cbc"),
    "medium": Colour("#2b6cb0", "#6ea8e0"),
    "low": Colour("#6b6f1d", "#c3c763"),
    "on-time": Colour("#1a7f4b", "#5fc28c"),
    "late": Colour("#b06000", "#e6a94c"),
    "dropped": Colour("#b3261e", "#f08a80"),
    "refused": Colour("#7440a8", "#c49ceb"),
    "failed": Colour("#545c66", "#aab3bd"),
}
"""Colours of bars, boxes and lines. Text in a box has the colour ``paper``."""

LINE = Colour("#d5d8dd", "#3a4048")
"""Lines of tables, axes and grids. They repeat what positions show, so no contrast is demanded of them."""

OUTCOME_ROLES = {
    "on time": "on-time",
    "late": "late",
    "aborted": "dropped",
    "refused": "refused",
    "failed": "failed",
}
"""Roles of a request's outcomes. A request that is aborted is one that a stream calls dropped."""


def contrast(first: str, second: str) -> float:
    """The contrast of two colours ``#rrggbb``, from 1 (equal) to 21 (black on white)."""
    darker, lighter = sorted(map(_luminance, (first, second)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def device_roles(names: Iterable[str]) -> dict[str, str]:
    """The role of each device, in the order of ``names``.

    A device has the same colour on every page, unless another one on a page has that colour already.
    """
    given = tuple(dict.fromkeys(names))
    taken: dict[str, int] = {}
    # Sorted, so that the order in which a page names its devices does not matter.
    for name in sorted(given):
        first = zlib.crc32(name.encode()) % DEVICE_COLOURS
        free = [(first + i) % DEVICE_COLOURS for i in range(DEVICE_COLOURS)]
        used = list(taken.values())
        taken[name] = min(free, key=used.count)
    return {name: f"device-{taken[name]}" for name in given}


def variables() -> str:
    """The roles as variables of a style sheet, by the reader's setting."""
    roles = {**PAPERS, **TEXTS, **SHAPES, "line": LINE}
    light = "".join(f"--{role}:{colour.light};" for role, colour in roles.items())
    dark = "".join(f"--{role}:{colour.dark};" for role, colour in roles.items())
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
