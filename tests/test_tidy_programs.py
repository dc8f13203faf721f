"""Tests start no program that a system may lack, unless they ask for it first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GUEST = TESTS / "guest"
"""A system with its own programs, which is assembled on Debian alone and says so."""

PRESENT = frozenset({"cat", "sh"})
"""What every system has. Python itself is ``sys.executable``."""

STARTING = frozenset(
    {
        "subprocess.run",
        "subprocess.Popen",
        "asyncio.create_subprocess_exec",
        "os.execvp",
        "monkeypatch.setattr",
    }
)
PROGRAM = re.compile(r"[a-z][a-z0-9_-]+")


def programs(tree: ast.AST) -> set[str]:
    """The programs that a file starts by name: the first word of a list, or of the call itself, in a call that starts programs.

    A command that a test puts in the place of another is given as a ``lambda`` to ``monkeypatch.setattr``.
    """
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args or ast.unparse(call.func) not in STARTING:
            continue
        command = call.args[0]
        if ast.unparse(call.func) == "monkeypatch.setattr":
            command = call.args[-1].body if isinstance(call.args[-1], ast.Lambda) else ast.List([])
            if not isinstance(command, ast.List):
                continue
        found.append(command.elts[0] if isinstance(command, ast.List) and command.elts else command)
    words = {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return {word for word in words if PROGRAM.fullmatch(word)}


def missing(source: str) -> set[str]:
    """The programs that a file starts, but for those of every system, and those that it looks for or does without."""
    if "except (OSError, subprocess." in source:
        return set()
    return {each for each in programs(ast.parse(source)) - PRESENT if f'which("{each}")' not in source}


@pytest.mark.thorough
def test_tests_start_only_what_is_there() -> None:
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    texts = {path: text for path, text in texts.items() if path.parent != GUEST}
    starting = {path: text for path, text in texts.items() if any(name in text for name in STARTING)}
    found = {
        str(path.relative_to(TESTS)): names for path, text in starting.items() if (names := missing(text))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        'subprocess.run(["sleep", "60"])',
        'monkeypatch.setattr("place", lambda: ["sleep", "60"])',
        'await asyncio.create_subprocess_exec("sleep", "60")',
    ],
)
def test_rule_catches(source: str) -> None:
    assert missing(source) == {"sleep"}
    assert not missing(f'shutil.which("sleep")\n{source}')
