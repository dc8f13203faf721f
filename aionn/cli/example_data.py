"""The place of the models and media that the commands use by default."""

from __future__ import annotations

from pathlib import Path

from aionn.errors import InvalidArgument

__all__ = ["example_data"]

_PACKAGE = Path(__file__).resolve().parents[1]

PLACES = (_PACKAGE / "example_data", _PACKAGE.parent / "examples" / "data")
"""In an installed package, where the build has put them, and in a source tree."""


def example_data(option: str) -> Path:
    """The folder of the models and media of the demo.

    Args:
        option: The option of the command that names others, for the message.

    Raises:
        InvalidArgument: This installation lacks them.
    """
    for place in PLACES:
        if place.is_dir():
            return place
    raise InvalidArgument(
        f"{option}: expected to be given, since this installation of aionn lacks the example data ({PLACES[0]})"
    )
