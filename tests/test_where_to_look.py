"""docs/architecture.md, "Where to look": every file and definition that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PLACE = re.compile(r"`([\w/.]+/[\w]+\.(?:py|toml|md))`(?:\s+`([A-Za-z_][\w.]*)`)?")


def places() -> list[tuple[str, str]]:
    section = PAGE.read_text().partition("## Where to look\n")[2].partition("\n## ")[0]
    return sorted({(path, name) for path, name in PLACE.findall(section)})


def definitions(path: Path) -> set[str]:
    """Qualified names of the classes and functions of a file, and of what its classes assign."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_section_names_places() -> None:
    assert len(places()) > 20


@pytest.mark.parametrize(("path", "name"), places())
def test_place_exists(path: str, name: str) -> None:
    file = ROOT / path
    assert file.is_file()
    assert not name or name in definitions(file)
