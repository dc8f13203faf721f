"""Blocks of code in the pages that are not whole programs: Python that parses, commands that exist, workloads that run.

Whole programs are run by ``tests/test_documentation.py``.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aionn.cli.commands import app
from aionn.cli.main import main
from tests.documentation.pages import ROOT, Block, blocks

PYTEST_S_MAX = 100
PLACEHOLDERS = {"N", "NUMBER", "SECONDS"}
"""Words of a page that stand for a number."""


def parsed(text: str) -> ast.Module:
    """The block, or the body of an async function: a passage may use ``await``, and begin within a block."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse("async def passage():\n" + textwrap.indent(textwrap.dedent(text), "    "))


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_in_a_page_is_python(block: Block) -> None:
    parsed(block.text)


# --- Commands -----------------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The calls of ``aionn`` in a block of shell lines, as lists of arguments."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        for part in re.split(r"&&|\|\|?|;", line.partition(" #")[0]):
            words = shlex.split(part.strip(" ()"))
            for position, word in enumerate(words):
                if word == "aionn" or word.endswith("/aionn"):
                    found.append(words[position + 1 :])
                    break
    return found


def service_commands(text: str) -> list[list[str]]:
    return [call for line in re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE) for call in commands(line)]


CALLS = [(block.name, call) for block in blocks("sh") for call in commands(block.text)]
CALLS += [(block.name, call) for block in blocks("ini") for call in service_commands(block.text)]


def check_call(call: list[str]) -> None:
    """Raises if the command line's signatures reject the call. Nothing is executed."""
    if call and call[0] not in ("--install-completion", "--help", "--version"):
        app.parse_args(
            ["1" if word in PLACEHOLDERS else word for word in call], print_error=False, exit_on_error=False
        )


@pytest.mark.parametrize(("place", "call"), CALLS, ids=[f"{place} {' '.join(call)}" for place, call in CALLS])
def test_command_in_a_page_is_accepted(place: str, call: list[str]) -> None:
    check_call(call)


def test_wrong_command_is_noticed() -> None:
    assert len(CALLS) > 30
    for call in (
        ["inspect"],
        ["inspect", "m", "--no-such-option"],
        ["no-such-command"],
        ["bench", "m", "--runs", "many"],
    ):
        with pytest.raises(Exception, match=r".+"):
            check_call(call)


# --- Test files and workloads -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.forked("any")
def test_test_files_of_the_pages_and_of_the_tutorial_pass(tmp_path: Path) -> None:
    found = [block for block in blocks("python") if "pytestmark =" in block.text]
    assert len(found) >= 5
    for block in found:
        place = tmp_path / f"test_{re.sub(r'[^a-z]', '_', block.page)}_{block.number}.py"
        place.write_text(block.text)
    # As in a project of its own: this repository's configuration has other rules.
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:cacheprovider\nasyncio_default_fixture_loop_scope = function\n"
    )
    tutorial = ROOT / "examples" / "tutorial" / "test_application.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "pytest.ini",
        "--rootdir",
        tmp_path,
        tmp_path,
        tutorial,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PYTEST_S_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= len(found) + 2


WORKLOADS = [block for block in blocks("toml") if "[[stream]]" in block.text]


@pytest.mark.parametrize("block", WORKLOADS, ids=lambda block: block.name)
def test_workload_in_a_page_runs(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "door.toml"
    workload.write_text(block.text)
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(workload), "--json", "--check"])
    told = capsys.readouterr()
    assert end.value.code == 0, told.err
    assert json.loads(told.out)


# --- The tutorial -------------------------------------------------------------------------------------------------------------


def test_passages_of_the_tutorial_are_those_of_its_application() -> None:
    files = [path.read_text() for path in sorted((ROOT / "examples" / "tutorial").glob("*.py"))]
    found = [block for block in blocks("python") if block.page == "docs/tutorial.md"]
    passages = [block for block in found if not block.text.rstrip().endswith("anyio.run(main)")]
    assert len(passages) >= 8
    for block in passages:
        assert any(block.text in text for text in files), f"{block.name} is in no file of examples/tutorial"
