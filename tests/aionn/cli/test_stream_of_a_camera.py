"""``aionn stream MODEL --camera 0 --watch``: one line from a camera to a page, over a driver in Python."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from aionn.media.cameras import videodev
from tests.support.media.fake_camera import FakeControl, FakeSystem

PERIOD_S = 0.02


@pytest.fixture
def filming(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSystem]:
    """A machine with one camera, which gives a picture every 20 ms whenever it streams."""
    system = FakeSystem()
    monkeypatch.setattr("aionn.media.cameras.opening.System", lambda: system)
    ends = threading.Event()

    def film() -> None:
        while not ends.wait(PERIOD_S):
            system.camera.fill()

    thread = threading.Thread(target=film)
    thread.start()
    yield system
    ends.set()
    thread.join()
    assert system.camera.holds_nothing


@pytest.mark.slow
def test_one_line_streams_a_camera_and_serves_a_page(
    filming: FakeSystem, example_data: Path, aionn_here: Callable[..., CompletedProcess[str]]
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")
    pytest.importorskip("websockets", reason="uvicorn and websockets are not installed")
    usual = ("--seconds", "1", "--deadline-ms", "20000", "--watch", "--watch-at", ":0", "--json")
    done = aionn_here("stream", example_data / "shapes_int8.tflite", "--camera", "0", *usual)
    assert done.returncode == 0, done.stderr
    assert "watch: http://127.0.0.1:" in done.stderr
    report = json.loads(done.stdout)
    assert report["source"] == "camera:0"
    assert report["items"] >= report["on_time"] > 0 and report["reconnections"] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ("7", "there is no such camera"),
        ("C920", "expected a camera whose name contains that, got /dev/video0 'Fake Camera'"),
        ("", "expected a camera's number or path"),
    ],
)
def test_camera_that_is_not_there_is_an_error_in_one_sentence(
    filming: FakeSystem,
    example_data: Path,
    aionn_here: Callable[..., CompletedProcess[str]],
    camera: str,
    message: str,
) -> None:
    done = aionn_here("stream", example_data / "shapes_int8.tflite", "--camera", camera)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("aionn: ") and message in line


def test_controls_of_a_camera_are_listed(
    monkeypatch: pytest.MonkeyPatch, aionn_here: Callable[..., CompletedProcess[str]]
) -> None:
    system = FakeSystem()
    system.camera.controls = {
        1: FakeControl("Gain", minimum=10, maximum=100, step=10, value=20),
        2: FakeControl(
            "Power Line", videodev.CTRL_MENU, maximum=1, default=0, value=1, menu={0: "Off", 1: "50 Hz"}
        ),
        3: FakeControl("Reset", videodev.CTRL_BUTTON, flags=videodev.CTRL_FLAG_INACTIVE),
    }
    monkeypatch.setattr("aionn.media.cameras.opening.System", lambda: system)
    shown = aionn_here("devices", "--controls", "0").stdout
    assert "10 to 100 in steps of 10" in shown and "Off, 50 Hz" in shown and "button, inactive" in shown
    found = json.loads(aionn_here("devices", "--controls", "Fake", "--json").stdout)["controls"]
    assert [one["name"] for one in found] == ["gain", "power_line", "reset"]
    assert found[1]["choices"] == {"0": "Off", "1": "50 Hz"}
    wrong = aionn_here("devices", "--controls", "0", "--sources")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "either --sources or --controls" in wrong.stderr
