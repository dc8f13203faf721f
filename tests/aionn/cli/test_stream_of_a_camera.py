"""``aionn stream MODEL --camera 0 --watch``: one line from a camera to a page, over a driver in Python."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.media.fake_camera import FakeSystem

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
