"""docs/glossary.md names only code that exists, and each concept once."""

import ast
import re
from collections import Counter

from tests.support.syntax_trees import nodes
from tests.test_tidy import PACKAGES, ROOT, parse, read

PAGE = ROOT / "docs" / "glossary.md"


def rows() -> list[list[str]]:
    """``[term, meaning, code, words that are not used]`` of each row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "term" and not row[0].startswith("---")]


def defined_names(sources: dict[str, str]) -> set[str]:
    """Names of classes, functions and annotated attributes."""
    names = set()
    for text in sources.values():
        for node in nodes(parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_every_code_name_of_the_glossary_is_defined() -> None:
    defined = defined_names(read(PACKAGES, (".py",)))
    named = {name: row[0] for row in rows() for name in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 30
    assert {name: term for name, term in named.items() if name not in defined} == {}


def test_every_term_is_defined_once_and_in_sentences() -> None:
    table = rows()
    assert all(len(row) == 4 for row in table)
    assert [term for term, count in Counter(row[0] for row in table).items() if count > 1] == []
    assert [row[0] for row in table if not re.match(r"^[A-Z].*\.$", row[1])] == []


def test_name_that_is_not_defined_is_noticed() -> None:
    sources = {"a.py": "class Job:\n    slots: int\n    def run(self): ...\n"}
    assert defined_names(sources) == {"Job", "slots", "run"}
