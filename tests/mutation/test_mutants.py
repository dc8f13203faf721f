"""Claims about mutants: each is one legal change of the text, and what only describes is left alone."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutants import find_mutants

SOURCE = b'''"""Text with a < b."""
from x import y
__all__ = ["a" + "b"]

def f(a: int = 1 + 1, *, priority: "x < y") -> None:
    assert a < 3
    if a < 2 and not priority:
        raise ValueError(f"\xc3\xa4 {a - 1}")
    return g(a - 1, deadline=priority, strict=True) if h(a) else -a
'''


def changes() -> set[tuple[str, str, str]]:
    return {(mutant.kind, mutant.before, mutant.after) for mutant in find_mutants("f.py", SOURCE)}


def test_each_decision_has_its_changes() -> None:
    assert changes() == {
        ("sign", "1 + 1", "(1 - 1)"),
        ("connective", "a < 2 and not priority", "(a < 2 or not priority)"),
        ("comparison", "a < 2", "(a <= 2)"),
        ("negation", "not priority", "(priority)"),
        ("condition", "h(a)", "(not h(a))"),
        ("argument deadline", "g(a - 1, deadline=priority, strict=True)", "(g(a - 1, strict=True))"),
        ("sign", "a - 1", "(a + 1)"),
        ("sign", "-a", "(a)"),
    }


def test_every_mutant_is_legal_and_differs_in_one_place() -> None:
    for mutant in find_mutants("f.py", SOURCE):
        changed = mutant.applied_to(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.startswith(SOURCE[: mutant.start]) and changed.endswith(SOURCE[mutant.end :])
        assert SOURCE[mutant.start : mutant.end].decode() == mutant.before


def test_a_chained_comparison_has_a_mutant_for_each_link() -> None:
    found = find_mutants("f.py", b"x = 0 <= a < b")
    assert {mutant.after for mutant in found} == {"(0 < a < b)", "(0 <= a <= b)"}


def test_mutants_with_the_same_texts_are_told_apart_by_their_function_and_order() -> None:
    source = (
        b"class C:\n    def f(self):\n        return a < b, a < b\n\ndef g():\n    return a < b\nx = a < b\n"
    )
    found = find_mutants("f.py", source)
    assert [(mutant.within, mutant.nth) for mutant in found] == [("C.f", 1), ("C.f", 2), ("g", 1), ("", 1)]


def test_every_argued_survivor_is_a_mutant_that_there_is_and_has_a_reason() -> None:
    here = Path(__file__).parent
    entries = tomllib.loads((here / "survivors.toml").read_text(encoding="utf-8"))["survivor"]
    known: dict[str, set[tuple[str, str, str, str, int]]] = {}
    for path in {entry["path"] for entry in entries}:
        mutants = find_mutants(path, (here.parents[1] / path).read_bytes())
        known[path] = {
            (m.within, m.kind, " ".join(m.before.split()), " ".join(m.after.split()), m.nth) for m in mutants
        }
    for entry in entries:
        key = (entry["within"], entry["kind"], entry["before"], entry["after"], entry.get("nth", 1))
        assert key in known[entry["path"]], entry
        assert entry["reason"].endswith(".")
    assert [entry["path"] for entry in entries] == sorted(entry["path"] for entry in entries)
