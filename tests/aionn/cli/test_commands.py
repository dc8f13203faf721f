"""The command line: JSON for programs, one sentence and an exit code for mistakes, no traceback."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.cli.commands import app, devices
from aionn.cli.commands.bench import _opened_drivers
from aionn.cli.commands.run import _quantiles_text, _spread
from aionn.cli.commands.stress import _usable_devices
from aionn.cli.importing import import_options
from aionn.cli.main import main
from aionn.drivers import registry
from aionn.drivers.openvino import driver
from aionn.errors import DeviceUnavailable
from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import DataType, ValueInfo
from tests.aionn.models.onnx.building import file

RUN_S_MAX = 60
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def aionn(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "aionn", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env={**os.environ, "COLUMNS": "80", **environment},
        check=False,
    )


def answer(*arguments: str | Path) -> Any:
    finished = aionn(*arguments, "--json")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    (line,) = finished.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture(params=["here", pytest.param("in a process", marks=pytest.mark.long)])
def answered(aionn_here: Command, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What a command prints as JSON, in this process; with ``--long`` also in one of its own."""

    def run(*arguments: str | Path) -> Any:
        finished = aionn_here(*arguments, "--json")
        assert (finished.returncode, finished.stderr) == (0, "")
        (line,) = finished.stdout.splitlines()
        return json.loads(line)

    return run if request.param == "here" else answer


async def test_device_that_does_not_answer_is_listed_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        name = "silent"

        async def status(self) -> None:
            await anyio.sleep_forever()

    monkeypatch.setattr(devices, "STATUS_S_MAX", 0.01)
    runtime: Any = SimpleNamespace(devices=[Silent()], unavailable=[])
    with anyio.fail_after(RUN_S_MAX):
        found = await devices._described(runtime)
    assert found == ([], [{"name": "silent", "reason": "no answer within 0.01 s"}])


@pytest.mark.forked("any")
def test_devices_lists_the_reference_device_last() -> None:
    report = answer("devices")
    last = report["devices"][-1]
    assert (last["name"], last["type"], last["status"]) == ("reference", "cpu", "available")
    # No list has a device that another one has.
    names = [device["name"] for kind in ("devices", "on_request", "unavailable") for device in report[kind]]
    assert len(set(names)) == len(names)
    assert set(registry.devices_on_request()) < set(names)


def test_device_that_is_used_only_where_it_is_named_and_lacks_its_package_is_listed_with_the_reason(
    aionn_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "version_of", lambda distribution: None)
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    monkeypatch.setattr(registry, "driver_names", lambda: ("reference",))
    finished = aionn_here("devices")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "unavailable: openvino-cpu: openvino is not installed; pip install" in finished.stdout
    assert "devices that are used only where they are named" not in finished.stdout


@pytest.mark.parametrize(
    ("devices", "drivers"),
    [
        (None, None),
        ([], None),
        ("reference", None),
        (["npu", "reference"], None),
        ("openvino-cpu", ["openvino-cpu"]),
        (["openvino-cpu", "npu", "reference"], ["reference", "openvino-cpu"]),
        # Their drivers find out whether the machine has them.
        ("openvino-gpu7", ["openvino-gpu7"]),
        (["ort-cuda", "ort-cuda", "reference"], ["reference", "ort-cuda"]),
        ("ort-cpu", None),
    ],
)
def test_device_that_is_used_only_where_it_is_named_is_opened_for_a_command_that_names_it(
    devices: str | list[str] | None, drivers: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    assert registry.drivers_for(devices) == drivers


@pytest.mark.parametrize(
    ("devices", "drivers"),
    [
        (None, None),
        (["ort-cpu"], None),
        (["openvino-cpu"], ["litert-cpu", "openvino-cpu"]),
        (["litert-cpu", "openvino-cpu"], ["litert-cpu", "openvino-cpu"]),
    ],
)
def test_bench_has_litert_beside_a_device_that_is_used_only_where_it_is_named(
    devices: list[str] | None, drivers: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ai_edge_litert", reason="LiteRT is not installed")
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    assert _opened_drivers(devices) == drivers


def test_bench_needs_no_litert(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(driver: str, name: str) -> None:
        raise DeviceUnavailable(f"{driver}: it is not installed")

    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    monkeypatch.setattr(registry, "built_in_info", missing)
    assert _opened_drivers(["openvino-cpu"]) == ["openvino-cpu"]


def test_inspect_counts_operations_and_asks_devices(example_data: Path, answered: Callable[..., Any]) -> None:
    report = answered("inspect", example_data / "shapes_int8.tflite")
    assert report["operations"]["DEPTHWISE_CONV_2D"] == 5
    assert report["feature_level"] == 4
    # The last layer has a scale for each of its five units: it becomes five operations, and one that joins them.
    count = sum(report["operations"].values())
    assert report["operations"]["FULLY_CONNECTED"] == 5
    assert report["operations"]["CONCATENATION"] == 1
    assert report["devices"]["reference"] == {"supported": count, "of": count, "operations": [True] * count}


@pytest.mark.forked("any")
@pytest.mark.thorough
def test_run_is_reproducible_by_seed(digits: Path, aionn_here: Command) -> None:
    first = answer("run", digits, "--seed", "1")["outputs"]
    again, other = (
        json.loads(aionn_here("run", digits, "--seed", s, "--json").stdout)["outputs"] for s in "12"
    )
    assert first == again != other


def test_run_reads_and_writes_arrays(digits: Path, tmp_path: Path, answered: Callable[..., Any]) -> None:
    given = np.full((1, 49, 40, 1), np.log(1e-6), np.float32)
    np.save(tmp_path / "in.npy", given)
    report = answered(
        "run", digits, "--input", tmp_path / "in.npy", "--output", tmp_path / "out.npz", "--count", "3"
    )
    assert report["executions"] == 3
    with np.load(tmp_path / "out.npz") as written:
        assert written["output0"].shape == (1, 11)
        assert int(written["output0"].argmax()) == report["outputs"][0]["largest"][0]["index"] == 0


@pytest.mark.thorough
def test_stream_counts_every_item_also_when_it_is_replayed(
    example_data: Path, tmp_path: Path, digits: Path, answered: Callable[..., Any]
) -> None:
    import wave

    with (
        wave.open(str(example_data / "digits.wav")) as whole,
        wave.open(str(tmp_path / "short.wav"), "wb") as short,
    ):
        short.setparams(whole.getparams())
        short.writeframes(whole.readframes(2 * whole.getframerate()))
    usual = ("stream", digits, "--keep", "all", "--deadline-ms", "60000")
    report = answered(*usual, "--audio", tmp_path / "short.wav", "--record", tmp_path / "a.rec")
    assert report["items"] == report["on_time"] + report["late"] + report["dropped"] == 11
    assert report["recognised"] and report["latency_ms"]["p50"] > 0
    size = (tmp_path / "a.rec").stat().st_size
    found = report["recording"]
    assert (found["items"], found["bytes"], found["left_out"], found["problem"]) == (11, size, 0, "")
    again = answered(*usual, "--source", f"replay:{tmp_path / 'a.rec'}")
    assert (again["items"], again["recognised"]) == (11, report["recognised"])


def test_stream_of_the_test_picture_ends_after_its_time(
    example_data: Path, answered: Callable[..., Any]
) -> None:
    model = example_data / "shapes_int8.tflite"
    report = answered("stream", model, "--source", "pattern:", "--seconds", "0.5", "--deadline-ms", "5000")
    assert report["source"] == "pattern:"
    assert report["items"] >= report["on_time"] > 0


def test_cameras_of_this_machine_are_listed(answered: Callable[..., Any]) -> None:
    found = answered("devices", "--sources")
    assert isinstance(found["cameras"], list)
    assert found["microphones"] or found["microphones_unavailable"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "missing.tflite"), "missing.tflite: cannot be read: No such file"),
        (("inspect", "missing.tflite"), "missing.tflite: cannot be read: No such file"),
        (("run", "{data}/shapes.json"), "expected a .tflite or .onnx file, got a text file"),
        (("run", "{data}/shapes.mp4"), "expected a .tflite or .onnx file, got an MP4 video"),
        (("--json", "devices"), "options follow the command: aionn devices --json"),
        (("simulate", "{data}/shapes.json", "--policy", "edv"), '--policy. Choose from: "plan", "fifo"'),
        (("stress", "--test", "slow"), '--test. Choose from: "long_inference"'),
        (("run", "{data}/digits_float.tflite", "--device", "npu"), "expected one of"),
        (
            ("run", "{data}/digits_float.tflite", "--deadline-ms", "-1"),
            "--deadline-ms: expected from 0 to 31622400000 ms, got -1",
        ),
        (("run", "{data}/digits_float.tflite", "--count", "0"), "--count: expected from 1"),
        (
            ("run", "{data}/digits_float.tflite", "--priority", "urgent"),
            '--priority. Choose from: "low", "medium", "high"',
        ),
        (("run", "{data}/digits_float.tflite", "--input", "{data}/digits.wav"), "this is no .npy file"),
        (
            ("run", "{data}/digits_float.tflite", "--input", "{tmp}/wrong.npy"),
            "expected shape [1, 49, 40, 1]",
        ),
        (
            ("run", "{data}/digits_float.tflite", "--input", "{tmp}/double.npy"),
            "expected element type float32",
        ),
        (
            ("run", "{data}/digits_float.tflite", "--output", "{tmp}/no/such/folder.npz"),
            "expected a file that can be written: its folder does not exist",
        ),
        (
            ("stream", "{data}/digits_float.tflite"),
            "expected one of --video, --audio, --camera, --source; got none",
        ),
        (
            ("stream", "{data}/shapes_int8.tflite", "--source", "0", "--video", "x"),
            "got --video and --source",
        ),
        (
            ("stream", "{data}/shapes_int8.tflite", "--audio", "{data}/digits.wav"),
            "1x96x96x3), and --audio is sound; use --video or a camera",
        ),
        (("stream", "{data}/shapes_int8.tflite", "--source", "patern:"), "did you mean pattern:?"),
        (
            ("stream", "{data}/shapes_int8.tflite", "--source", "camera:"),
            "expected a camera's number or path",
        ),
        (("stream", "{data}/shapes_int8.tflite", "--source", "/dev/video250"), "there is no such camera"),
        (("stream", "{data}/shapes_int8.tflite", "--source", "replay:{tmp}/none"), "none: cannot be read"),
        (
            ("stream", "{data}/shapes_int8.tflite", "--source", "replay:{data}/shapes.mp4"),
            "expected a recording, got another kind of file",
        ),
        (
            ("stream", "{data}/shapes_int8.tflite", "--source", "pattern:", "--record", "{data}/shapes.mp4"),
            "expected a new file, got one that exists",
        ),
        (
            ("watch", "pattern:", "--record", "{tmp}/no/such/folder"),
            "cannot be created: its folder does not exist",
        ),
        (("stream", "{data}/shapes_int8.tflite", "--source", "gopher://a:secret@b/"), "got 'gopher://b/'"),
        (("stream", "{data}/shapes_int8.tflite", "--source", "pattern:", "--seconds", "0"), "--seconds"),
        (("stream", "{data}/shapes_int8.tflite", "--video", "{tmp}/none.mp4"), "none.mp4"),
        (("stream", "{data}/shapes_int8.tflite", "--video", "{data}/shapes.json"), "shapes.json"),
        (("stream", "{data}/digits_float.tflite", "--audio", "{tmp}/none.wav"), "none.wav"),
        (("demo", "--data", "{tmp}"), "shapes.json"),
        (("run", "{tmp}/pipe"), "{tmp}/pipe: expected a regular file, got a pipe"),
        (("inspect", "/dev/null"), "/dev/null: expected a regular file, got a device"),
        (("run", "{data}/digits_float.tflite", "--input", "{tmp}/pipe"), "a regular file, got a pipe"),
        (("run", "{data}/digits_float.tflite", "--output", "{tmp}/pipe"), "{tmp}/pipe"),
        (
            ("run", "{tmp}/empty.tflite"),
            "model {tmp}/empty.tflite: expected a .tflite or .onnx file, got an empty",
        ),
        (
            ("stream", "{data}/shapes_int8.tflite", "--video", "{data}/shapes.mp4", "--labels", "{tmp}/pipe"),
            "--labels {tmp}/pipe: expected a regular file, got a pipe",
        ),
    ],
)
def test_mistake_is_told_in_one_sentence(
    example_data: Path, tmp_path: Path, arguments: tuple[str, ...], message: str, aionn_here: Command
) -> None:
    np.save(tmp_path / "wrong.npy", np.zeros((3, 3), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((1, 49, 40, 1)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.tflite").touch()
    message = message.replace("{tmp}", str(tmp_path))
    finished = aionn_here(*(a.format(data=example_data, tmp=tmp_path) for a in arguments))
    assert finished.returncode == 2
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("aionn: ") and message in line
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("run", "m.tflite", "a.jpg"),
            "run: expected no further argument, got a.jpg; see the options of aionn run --help",
        ),
        (("stream",), "stream: expected MODEL, a .tflite or .onnx file, got none; see aionn stream --help"),
        (
            ("run", "m.onnx", "--deadline-ms", "33ms"),
            "--deadline-ms: expected a number of ms, got 33ms",
        ),
        (("run", "m.onnx", "--count", "x"), "--count: expected a whole number, got x"),
        (("m.onnx",), "expected a command, got the model m.onnx; did you mean aionn run m.onnx?"),
        (("rum", "m.onnx"), "expected a command, got rum; did you mean aionn run?"),
        (("help",), "expected a command, got help; did you mean aionn --help?"),
        (("gpu",), "expected a command, got gpu; aionn --help lists all"),
        (("--verison",), "expected an option, got --verison; did you mean aionn --version?"),
        (
            ("watch", "clip.mp4", "--port", "1"),
            "Unknown option: --port. aionn watch --help lists the options",
        ),
        (("run", "m.onnx", "--devices", "reference"), "Unknown option: --devices. Did you mean --device?"),
    ],
)
def test_word_that_is_not_expected(arguments: tuple[str, ...], words: str, aionn_here: Command) -> None:
    finished = aionn_here(*arguments)
    assert (finished.returncode, " ".join(finished.stderr.split())) == (2, f"aionn: {words}")


@pytest.mark.forked("any")
def test_process_ends_with_the_sentence_and_its_code() -> None:
    finished = aionn("run", "missing.tflite")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("aionn: ") and len(finished.stderr.splitlines()) == 1


@pytest.mark.forked("any")
def test_traceback_is_shown_when_asked_for() -> None:
    finished = aionn("run", "missing.tflite", AIONN_TRACEBACK="1")
    assert finished.returncode == 2, "as without it"
    assert "Traceback" in finished.stderr


@pytest.mark.forked("any")
def test_help_names_every_command() -> None:
    finished = aionn("--help")
    assert finished.returncode == 0
    for command in ("demo", "stream", "run", "devices", "inspect", "conformance"):
        assert command in finished.stdout


DESCRIBED = [name for name in app if not name.startswith("-")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", DESCRIBED)
def test_description_of_a_command_is_its_functions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = app[command]
    function = chosen.default_command
    if function is not None:  # Otherwise it is a group of commands, whose description is this one.
        described = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0]
        assert chosen.help.split() == described.split()
    assert app(["--help"]) is None
    first = " ".join(chosen.help.partition("\n\n")[0].split())
    assert f"  {command}: {first}\n" in capsys.readouterr().out
    assert app([command, "--help"]) is None
    assert "[ARGS]" not in capsys.readouterr().out.splitlines()[0]


def test_help_imports_no_command() -> None:
    code = "import sys; from aionn.cli.commands import app; app(['--help']); print('numpy' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_S_MAX, check=True
    )
    assert finished.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices",),
        ("run", "{data}/digits_float.tflite"),
        ("serve", "reference", "--socket", "{tmp}/x.sock"),
        ("conformance", "reference", "--data", "{tmp}"),
        ("stress", "--device", "reference", "--minutes", "0.001"),
        ("stress", "--device", "reference", "--soak", "0.0001"),
    ],
)
def test_variable_that_makes_no_sense_is_told_once_with_its_name(
    example_data: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AIONN_LOG", "bogus")
    with pytest.raises(SystemExit) as end:
        main([a.format(data=example_data, tmp=tmp_path) for a in arguments])
    told = capsys.readouterr()
    assert (end.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert line.startswith("aionn: AIONN_LOG: expected some of model, ") and line.endswith("got bogus")


async def test_stress_leaves_out_devices_that_cannot_be_used_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        registry, "driver_names", lambda: ("no_such_module:Device", "onnx-reference", "reference")
    )
    assert await _usable_devices() == ("reference",)
    missing, unsuited = capsys.readouterr().err.splitlines()
    assert missing.startswith("no_such_module:Device is left out: ") and "ModuleNotFoundError" in missing
    assert unsuited.startswith("onnx-reference is left out: it supports only operations of extensions")


@pytest.mark.parametrize("count", [1, 9, 10, 500])
def test_quantiles_of_a_run_have_five_executions_beyond_them(count: int) -> None:
    spread = _spread([1.0] * count)
    assert spread is not None
    assert (spread["p50"] is None, spread["p99"] is None) == (count < 10, count < 500)
    told = _quantiles_text(spread, count)
    assert ("p50" in told, "p99" in told) == (count >= 10, count >= 500)
    assert told.endswith("1.00 ms")


@pytest.mark.forked("any")
def test_lines_of_drivers_are_labelled_where_nobody_logs() -> None:
    code = (
        "import logging; from aionn.observability.log_tags import label_lines; label_lines();"
        "logging.getLogger('aionn.driver.x').warning('ERROR: Division by 0')"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_S_MAX, check=True
    )
    assert finished.stderr == "aionn.driver.x: ERROR: Division by 0\n"


@pytest.mark.thorough
def test_interrupted_command_ends_its_driver_process(example_data: Path) -> None:
    import select
    import signal
    import time

    streamed = (example_data / "digits_float.tflite", "--audio", example_data / "digits.wav")
    process = subprocess.Popen(
        [sys.executable, "-m", "aionn", "stream", *map(str, streamed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job has SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    drivers: list[int] = []
    end_s = time.monotonic() + RUN_S_MAX
    while not drivers and time.monotonic() < end_s and process.poll() is None:
        # The worker thread that started it may be the parent on paper: look at every task.
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # The task has ended.
                drivers += [int(p) for p in (task / "children").read_text().split()]
        time.sleep(0.01)
    assert drivers, children
    driver = os.pidfd_open(drivers[0])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=RUN_S_MAX)
    try:
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1] == "aionn: interrupted"
        assert select.select([driver], [], [], RUN_S_MAX)[0], "the driver process outlived the command"
    finally:
        os.close(driver)


@pytest.fixture
def onnx_files(tmp_path: Path) -> Path:
    """``good.onnx`` with two open extents and ``bad.onnx`` with operators that cannot be imported."""
    x = [ValueInfo("x", DataType.FLOAT, ("batch", "size"))]
    (tmp_path / "good.onnx").write_bytes(file([node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)], x, ["y"]))
    nodes = [node("Foo", ["x"], ["a"]), node("Foo", ["a"], ["b"]), node("Relu", ["b"], ["y"])]
    (tmp_path / "bad.onnx").write_bytes(file(nodes, x, ["y"]))
    return tmp_path


@pytest.mark.forked("any")
def test_run_takes_an_onnx_file_with_its_extents(onnx_files: Path, tmp_path: Path) -> None:
    array = tmp_path / "x.npy"
    np.save(array, np.array([[1, 3, 2], [5, 0, 4]], np.float32))
    options = ("--device", "reference", "--dimension", "batch=2")
    report = answer("run", onnx_files / "good.onnx", *options, "--input-shape", "x=2,3", "--input", array)
    assert report["outputs"][0]["type"] == "int64" and report["outputs"][0]["name"] == "y"
    assert report["outputs"][0]["largest"][0] == {"index": 0, "value": 1.0}


@pytest.mark.forked("any")
def test_inspect_shows_the_content_of_an_onnx_file(onnx_files: Path) -> None:
    report = answer("inspect", onnx_files / "good.onnx", "--dimension", "batch=1", "--dimension", "size=3")
    assert report["file"]["inputs"] == ["x float [batch, size]"]
    assert report["file"]["operators"] == {"ArgMax": 1}
    assert report["outputs"] == ["y TENSOR_INT32 1 (in the file int64 1)"]
    incomplete = aionn("inspect", onnx_files / "good.onnx")
    assert incomplete.returncode == 2 and "open extents: batch, size" in incomplete.stdout
    assert "--dimension batch=... --dimension size=..." in incomplete.stderr


@pytest.mark.forked("any")
def test_inspect_lists_every_operator_that_cannot_be_imported(onnx_files: Path) -> None:
    options = ("--dimension", "batch=1", "--dimension", "size=3")
    finished = aionn("inspect", onnx_files / "bad.onnx", *options)
    assert finished.returncode == 1 and finished.stderr == ""
    assert "2 of them cannot be expressed by operations of the HAL" in finished.stdout
    assert "the importer has no conversion for this operator" in " ".join(finished.stdout.split())
    listed = json.loads(aionn("inspect", onnx_files / "bad.onnx", *options, "--json").stdout)
    assert [(each["name"], each["count"]) for each in listed["unsupported"]] == [("Foo", 2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dimension", "batch"), "--dimension: expected NAME=VALUE, got 'batch'"),
        (("--dimension", "batch=x"), "--dimension batch: expected a whole number of 0 or more, got 'x'"),
        (
            ("--dimension", "a=1", "--dimension", "a=2"),
            "--dimension: expected every name once, got 'a' again",
        ),
        (("--input-shape", "x=1,,3"), "--input-shape x: expected a whole number of 0 or more, got ''"),
        (("--value", "x=1,b"), "--value x: expected the name of an .npy file, or numbers with commas"),
        (("--value", "x=missing.npy"), "--value x missing.npy: cannot be read: No such file"),
        (("--value", f"x={1 << 70}"), "--value x: expected numbers of 64 bits"),
        (("--dimension", "bach=1"), "dimensions: expected names among ['batch', 'size'], got ['bach']"),
    ],
)
def test_wrong_options_of_an_import_are_rejected_in_a_sentence(
    onnx_files: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(onnx_files / "good.onnx"), *options])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("aionn: ") and told.count("\n") == 1
    assert words in told


def test_options_of_an_import_are_parsed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.int32))
    options = import_options(
        ["a=1", "b=c=2"], ["x=1,2", "scalar="], ["n=3", "r=1.5", "s=1,2", f"f={tmp_path / 'a.npy'}"]
    )
    assert options.dimensions == {"a": 1, "b=c": 2}
    assert options.input_shapes == {"x": (1, 2), "scalar": ()}
    found = {name: (value.dtype.name, value.tolist()) for name, value in options.values.items()}
    assert found == {
        "n": ("int64", 3),
        "r": ("float32", 1.5),
        "s": ("int64", [1, 2]),
        "f": ("int32", [[1, 1], [1, 1]]),
    }
