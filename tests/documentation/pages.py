"""The pages of this repository, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Block", "blocks", "page_paths"]

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code of a page; ``number`` counts those of its language there."""

    page: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}[{self.number}]"


def page_paths() -> list[Path]:
    """Every page: README.md, what is in ``docs``, and the pages of the packages and of contributors."""
    alone = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "fmq/README.md", "fences/README.md")]
    return [*alone, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[Block]:
    """All blocks of a language, in the order of the pages."""
    found = []
    for path in page_paths():
        page = path.relative_to(ROOT).as_posix()
        texts = [text for kind, text in _FENCE.findall(path.read_text()) if kind == language]
        found += [Block(page, number, text) for number, text in enumerate(texts)]
    return found
