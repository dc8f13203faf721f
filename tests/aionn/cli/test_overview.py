"""``aionn --help`` and ``aionn --version`` are quick and complete, and no page of help loses or breaks text in a pipe."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

import aionn
from aionn.cli.commands import app
from aionn.cli.main import main
from aionn.cli.overview import DESCRIPTIONS
from tests.support.processes.terminal import shown_on_terminal

COMMANDS = [name for name in app if not name.startswith("-")]
RUN_S_MAX = 60
STARTS = 5
RATIO_MAX = 8.0
"""Of the quickest start of ``aionn --help`` and that of ``python -c pass``; 2 on an idle machine, and 10 to 15 with the parser
of the command line."""


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    told = capsys.readouterr()
    assert (end.value.code, told.err) == (0, "")
    return told.out


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_overview_has_a_line_for_each_command(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split(maxsplit=1) for line in shown(*arguments, capsys=capsys).splitlines() if line.strip()]
    described = {parts[0]: parts[1] for parts in lines if len(parts) == 2}
    for place, text in DESCRIPTIONS.items():
        first = " ".join(text.strip().partition("\n\n")[0].split())
        assert described[place.partition(":")[2]] == first


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("--version", capsys=capsys) == f"{aionn.__version__}\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_overview_imports_no_parser_and_no_arrays(option: str) -> None:
    code = (
        "import sys; from aionn.cli.main import main\n"
        f"try: main([{option!r}])\n"
        "except SystemExit: print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_S_MAX, check=True
    )
    loaded = set(finished.stdout.splitlines()[-1].split())
    assert "aionn" in loaded
    assert loaded.isdisjoint({"cyclopts", "numpy", "msgspec", "anyio", "asyncio", "flatbuffers", "logging"})


@pytest.mark.thorough
def test_overview_starts_almost_as_soon_as_python() -> None:
    def start_s(*arguments: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=RUN_S_MAX)
        return time.perf_counter() - began

    # Alternating, and the quickest of each: other load comes and goes.
    pairs = [(start_s("-m", "aionn", "--help"), start_s("-c", "pass")) for _ in range(STARTS)]
    ours, python = (min(times) for times in zip(*pairs, strict=True))
    assert ours < RATIO_MAX * python


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_reader_that_leaves_is_no_mistake() -> None:
    command = f"{sys.executable} -m aionn --help | head -c 1"
    finished = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=RUN_S_MAX
    )
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_a_line_for_each_text_in_a_pipe(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = app[command]
    if chosen.default_command is None:
        pytest.skip("a group of commands")
    lines = [" ".join(line.split()) for line in shown(command, "--help", capsys=capsys).splitlines()]
    described, _, arguments = (inspect.getdoc(chosen.default_command) or "").partition("\n\nArgs:")
    for paragraph in described.split("\n\n"):
        assert " ".join(paragraph.split()) in lines
    for entry in re.split(r"\n    (?=\w+: )", arguments)[1:]:
        _, _, text = entry.partition(": ")
        told = " ".join(text.split())
        assert any(told in line for line in lines), f"broken, or not there: {told}"
    assert not re.search("[│╭╮╰╯─]", "".join(lines)), "a drawing"


@pytest.mark.slow
@pytest.mark.forked("any")
def test_help_of_a_command_fills_a_terminal_of_any_width() -> None:
    width = 60
    told = shown_on_terminal([sys.executable, "-m", "aionn", "stream", "--help"], width=width)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()
    assert max(map(len, lines)) == width and lines[-1] != ""
    words = re.sub("[│╭╮╰╯─]", " ", " ".join(lines)).split()
    assert "or another address; screen:, this display; replay:FILE, a recording" in " ".join(words)


def test_brackets_of_a_remedy_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from aionn.reports.terminal import print_line, print_table

    remedy = "pip install 'aionn[litert]' or [bold]not[/bold]"
    print_line(f"unavailable: litert-cpu: {remedy}")
    print_table("[title]", ("[head]",), [(remedy,)])
    told = capsys.readouterr().out
    assert told.count(remedy) == 2 and "[title]" in told and "[head]" in told


@pytest.mark.thorough
def test_extras_in_messages_can_be_copied_into_a_shell(repository: os.PathLike[str]) -> None:
    from pathlib import Path

    for path in Path(repository, "aionn").rglob("*.py"):
        for line in path.read_text().splitlines():
            for found in re.finditer(r"(.?)aionn\[\w+\]", line):
                # Without quotes, a shell takes the brackets for a pattern.
                assert found[1] in "'\"", f"{path}: {line.strip()}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("arguments", ["--help", "env", "env --json"])
@pytest.mark.parametrize("buffering", ["0", "1"])
@pytest.mark.thorough
def test_output_on_a_full_disk_is_one_sentence(arguments: str, buffering: str) -> None:
    with open("/dev/full", "wb") as full:
        finished = subprocess.run(
            [sys.executable, "-m", "aionn", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=RUN_S_MAX,
            env={**os.environ, "PYTHONUNBUFFERED": buffering.strip("0")},
        )
    told = "aionn: stdout: expected a stream that can be written: No space left on device\n"
    assert (finished.returncode, finished.stderr) == (2, told)


@pytest.mark.forked("any")
def test_mistake_that_is_not_read_keeps_its_exit_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "aionn", "run", "absent.tflite"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(RUN_S_MAX) == 2


def test_closed_streams_are_no_mistake_and_lend_their_numbers_to_no_file() -> None:
    """A file that were opened as number 1 would get what is printed."""
    script = "from aionn.cli.main import main; main()"
    script = f"import os, atexit; atexit.register(lambda: os._exit(os.readlink('/proc/self/fd/1') != '/dev/null')); {script}"
    command = f'"{sys.executable}" -c "{script}" env <&- >&- 2>&-'
    finished = subprocess.run(["sh", "-c", command], timeout=RUN_S_MAX)
    assert finished.returncode == 0
