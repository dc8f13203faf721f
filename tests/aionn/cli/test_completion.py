"""The completion of the shell: written on request, for the shells that exist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from aionn.benchmarking.stress.bodies import BODIES, TestName
from aionn.cli.main import main
from aionn.simulation.baselines import POLICIES, PolicyName


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "aionn.bash"
    assert call("--install-completion", "--shell", "bash", "--output", path) == 0
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["aionn", "con"], {"conformance"}),
        (["aionn", "demo", "--prec"], {"--precision"}),
        (["aionn", "demo", "--precision", "u"], {"uint8"}),
        (["aionn", "run", "--priority", "h"], {"high"}),
        (
            ["aionn", "simulate", "--policy", "edf-abort-"],
            {f"edf-abort-{end}" for end in ("high", "priority", "whole")},
        ),
        (["aionn", "stress", "--test", "killed"], {"killed_clients"}),
    ],
)
def test_bash_completes_commands_options_and_choices(
    script: Path, typed: list[str], expected: set[str]
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    words = " ".join(typed)
    code = f"""
source {script}
COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}
_aionn
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60)
    assert {word.strip() for word in done.stdout.split()} == expected, done.stderr


@pytest.mark.parametrize("startup", ["", "autoload -Uz compinit && compinit\n"])
@pytest.mark.thorough
def test_line_that_zsh_needs_is_named_where_it_is_missing(
    startup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".zshrc").write_text(startup)
    assert call("--install-completion", "--shell", "zsh") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "_cyclopts_aionn is written" in line
    assert line.endswith(f"{tmp_path}/.zshrc: autoload -Uz compinit && compinit") == (not startup)
    # compinit reads the folders that it knows when it is called.
    content = (tmp_path / ".zshrc").read_text()
    assert "fpath=" in content.partition("autoload")[0]


@pytest.mark.thorough
def test_folder_that_cannot_be_written_is_reported_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert call("--install-completion", "--shell", "zsh", "--output", tmp_path / "file" / "below") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aionn: --output: expected a file that can be written")


def test_unknown_shell_is_reported_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cyclopts.completion.detect import ShellDetectionError

    def fail() -> str:
        raise ShellDetectionError

    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", fail)
    assert call("--install-completion") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aionn: --shell: expected one of bash, zsh, fish")


def test_folder_that_takes_no_script_is_named_with_the_option_of_the_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.write_text("a file, not a folder")
    monkeypatch.setenv("HOME", str(home))
    assert call("--install-completion", "--shell", "bash") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"aionn: --install-completion: {home}") and "--output: expected" not in told
    assert "cannot be written: Not a directory; --output FILE names another place" in told
    assert call("--install-completion", "--shell", "bash", "--output", home / "a.bash") == 2
    assert capsys.readouterr().err.startswith(
        f"aionn: --output: expected a file that can be written: {home}/a.bash: "
    )


def test_names_that_the_shell_completes_are_those_of_the_tables() -> None:
    assert get_args(PolicyName) == tuple(POLICIES)
    assert get_args(TestName) == tuple(BODIES)
