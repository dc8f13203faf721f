"""The version of a release, and its section in CHANGELOG.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

__all__ = ["ReleaseError", "check_changelog", "declared_version"]

UNRELEASED = "Unreleased"


class ReleaseError(Exception):
    """A release cannot be made; the message gives the reason."""


def declared_version(tree: Path) -> str:
    """The version of a source tree.

    Raises:
        ReleaseError: pyproject.toml and ``aionn.__version__`` differ.
    """
    declared = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    found = re.search(
        r'^__version__ = "(.*)"$', (tree / "aionn/__init__.py").read_text("utf-8"), re.MULTILINE
    )
    if found is None or found[1] != declared:
        raise ReleaseError(
            f"aionn/__init__.py: expected __version__ {declared!r}, as in pyproject.toml, "
            f"got {found[1] if found else None!r}"
        )
    return str(declared)


def check_changelog(text: str, version: str) -> None:
    """Checks that the first section of CHANGELOG.md is the version's and has an entry.

    Raises:
        ReleaseError: It is another one, or empty.
    """
    sections = re.findall(r"^## (.+?)\s*$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not sections:
        raise ReleaseError("CHANGELOG.md: expected a section, got none")
    title, body = sections[0]
    if title != version:
        what = "rename it" if title == UNRELEASED and body.strip() else "write one"
        raise ReleaseError(
            f"CHANGELOG.md: expected the first section to be {version!r}, got {title!r}: {what}"
        )
    if not re.search(r"^- \S", body, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md: expected an entry in the section {version!r}, got none")
