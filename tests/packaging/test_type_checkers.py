"""mypy and pyright find the types of an installed aionn, from a wheel and from an editable installation."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.building import Environment, call_backend

CHECK_S_MAX = 600
TUTORIAL = Path(__file__).resolve().parents[2] / "examples" / "tutorial" / "application.py"

APPLICATION = '''\
"""A small application that uses what most do."""

from pathlib import Path

import anyio

import aionn
from aionn.media import video_file
from fences import SyncFence
from fmq import MessageQueue


async def classify(model: Path, video: Path) -> list[int]:
    found: list[int] = []
    async with aionn.open() as runtime:
        net = await runtime.compile(model, priority="high")
        write = aionn.image_writer(net.inputs[0])
        async with net.burst() as burst, video_file(video, size=(96, 96)) as frames:
            async for result in burst.stream(
                frames,
                into=lambda frame, view: write(frame.data, view),
                deadline=lambda frame: frame.captured_at_ns + 33_000_000,
            ):
                if result.outputs:
                    found.append(int(result.outputs[0].argmax()))
        try:
            await net.execute([], deadline=aionn.after(0.1))
        except aionn.MissedDeadline:
            pass
    return found


def queue() -> tuple[MessageQueue, type[SyncFence]]:
    return MessageQueue.create(8, 16), SyncFence


if __name__ == "__main__":
    print(anyio.run(classify, Path("model.tflite"), Path("video.mp4")))
'''

WRONG = """
async def wrong() -> None:
    async with aionn.open() as runtime:
        net: str = await runtime.compile("model.tflite")
"""

CHOICES = """
async def choices(burst: aionn.Burst) -> None:
    async with aionn.open(partition="sometimes", execution_path="fast", realtime="maybe", collector="off") as runtime:
        net = await runtime.compile("model.tflite", priority="urgent", preference="quick")
        await net.execute([], priority="urgent")
        burst.stream(video_file("video.mp4", keep="some"), on_late="ignore")
"""

CHOICE_LINES = {
    len(APPLICATION.splitlines()) + number
    for number, line in enumerate(CHOICES.splitlines(), 1)
    if '="' in line
}


@pytest.fixture(params=["wheel", "editable"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    if request.param == "wheel":
        found = request.getfixturevalue("installed")
        assert isinstance(found, Environment)
        return found
    source, compiler = (request.getfixturevalue(name) for name in ("source", "compiler_that_writes_nothing"))
    made = Environment(tmp_path / "venv")
    # An editable build writes into its tree, which other tests share.
    own = shutil.copytree(source, tmp_path / "source")
    made.install(call_backend(own, "build_editable", tmp_path / "editable", CC=compiler))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "application"
    made.mkdir()
    (made / "application.py").write_text(APPLICATION)
    (made / "wrong.py").write_text(APPLICATION + WRONG)
    (made / "choices.py").write_text(APPLICATION + CHOICES)
    (made / "tutorial.py").write_text(TUTORIAL.read_text())
    return made


@pytest.mark.long
def test_mypy_finds_no_error_under_strict_but_a_planted_one(environment: Environment, folder: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install --group lint")

    def check(name: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment.python, name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CHECK_S_MAX,
        )
        return [line for line in done.stdout.splitlines() if ": error:" in line]

    assert check("application.py") == []
    assert check("tutorial.py") == []
    (planted,) = check("wrong.py")
    assert "Compilation" in planted
    assert {int(line.split(":")[1]) for line in check("choices.py")} == CHOICE_LINES


@pytest.mark.long
def test_pyright_finds_no_error_under_strict_but_a_planted_one(
    environment: Environment, folder: Path
) -> None:
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: pip install basedpyright")
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))

    def check(name: str) -> list[tuple[int, str]]:
        done = subprocess.run(
            [sys.executable, "-m", "basedpyright", "--pythonpath", environment.python, "--outputjson", name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CHECK_S_MAX,
        )
        found = json.loads(done.stdout)["generalDiagnostics"]
        errors = [one for one in found if one["severity"] == "error"]
        return [(one["range"]["start"]["line"] + 1, one["message"]) for one in errors]

    assert check("application.py") == []
    assert check("tutorial.py") == []
    assert [message for _, message in check("wrong.py") if "Compilation" in message] != []
    assert {line for line, _ in check("choices.py")} == CHOICE_LINES
