"""`aionn stress`: how tests end on a device that works, and on drivers that crash, hang and fail on purpose."""

from __future__ import annotations

import asyncio
import random
import textwrap
from pathlib import Path

import numpy as np
import pytest

from aionn.benchmarking.paths import draw_inputs
from aionn.benchmarking.stress import bodies as stress_bodies
from aionn.benchmarking.stress.bodies import BODIES, StressTask, random_model, run_task
from aionn.benchmarking.stress.run import stress, suited_model
from aionn.cli.main import main
from aionn.errors import InvalidArgument
from aionn.interpreter import Interpreter, RunControl
from aionn.runtime.introspection import Support
from aionn.runtime.runtime import Runtime
from tests.support.cancellation import NATIVE_COUNTS, SLEEPING, cancelled_natively, child_processes

SHORT_S = 0.2


@pytest.fixture
def model(example_data: Path) -> Path:
    return example_data / "digits_int8.tflite"


@pytest.fixture
def wrong_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed drivers, as the processes of the tests see it: `hangs` at the first execution, `dies` and `fails` at the third."""
    (tmp_path / "wrong.py").write_text(
        textwrap.dedent(
            """
            import itertools, os, time
            from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel

            class Prepared(ReferencePreparedModel):
                def run(self, inputs, outputs, control):
                    if next(self.device.turns) >= {"hangs": 0}.get(self.device.info.name, 2):
                        {"dies": lambda: os._exit(3), "hangs": lambda: time.sleep(3600), "fails": lambda: 1 / 0}[
                            self.device.info.name
                        ]()
                    return super().run(inputs, outputs, control)

            class Wrong(ReferenceDevice):
                def __init__(self, name):
                    super().__init__(name)
                    self.turns = itertools.count()

                def prepare(self, model, *, preference, priority, deadline_ns):
                    return Prepared(self, model, priority)
            """
        )
    )
    information = tmp_path / "wrong-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1\n")
    lines = "\n".join(f"{name} = wrong:Wrong" for name in ("dies", "hangs", "fails"))
    (information / "entry_points.txt").write_text(f"[aionn.drivers]\n{lines}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_device_that_works_ends_in_success(model: Path) -> None:
    told: list[tuple[str, int]] = []
    results = await stress(
        "reference", model, ["load_and_unload", "mapped_models"], SHORT_S, progress=lambda *a: told.append(a)
    )
    assert [(r.test, r.result, r.message) for r in results] == [
        ("load_and_unload", "SUCCESS", ""),
        ("mapped_models", "SUCCESS", ""),
    ]
    assert all(r.count >= 1 for r in results)
    assert told == [("load_and_unload", 0), ("mapped_models", 1)]


async def test_model_of_the_tests_is_the_first_that_the_device_supports(
    example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, floats = example_data / "digits_int8.tflite", example_data / "digits_float.tflite"
    assert await suited_model("reference", [quantised, floats]) == quantised
    answers = {quantised: (True, False), floats: (True, True)}

    async def supported(self: Runtime, model: Path, *, devices: str) -> tuple[Support, ...]:
        return (Support(devices, answers[model]),)

    monkeypatch.setattr(Runtime, "supported_operations", supported)
    assert await suited_model("reference", [quantised, floats]) == floats
    answers[floats] = (False, True)
    assert await suited_model("reference", [quantised, floats]) == quantised
    assert await suited_model("no_such_module:Device", [quantised, floats]) == quantised


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", ["long_inference", "parallel_inference", "random_models"])
async def test_body_does_its_work(model: Path, body: str) -> None:
    ended = await run_task(StressTask(body, "reference", str(model), SHORT_S, 1))
    assert (ended.result, ended.message) == ("SUCCESS", "")
    assert ended.count >= 1


@pytest.mark.long
async def test_killed_clients_do_not_disturb_the_others(model: Path) -> None:
    ended = await run_task(StressTask("killed_clients", "reference", str(model), 3.0, 1))
    assert (ended.result, ended.message) == ("SUCCESS", "")
    assert ended.count >= 2


@pytest.mark.thorough
@pytest.mark.usefixtures("wrong_drivers")
@pytest.mark.parametrize(
    ("driver", "result"), [("dies", "CRASH"), pytest.param("fails", "FAILURE", marks=pytest.mark.long)]
)
async def test_crash_and_failure_are_told_and_the_next_test_is_made(
    model: Path, driver: str, result: str
) -> None:
    # It ends at the third execution, which a busy machine reaches late.
    first, second = await stress(driver, model, ["long_inference", "load_and_unload"], 10.0)
    assert (first.result, second.result) == (result, result)
    assert first.message
    assert second.test == "load_and_unload"


@pytest.mark.thorough
@pytest.mark.usefixtures("wrong_drivers")
async def test_hang_is_told_and_leaves_no_process(model: Path) -> None:
    (result,) = await stress("hangs", model, ["long_inference"], SHORT_S, grace_s=3.0)
    assert (result.result, result.message) == ("HANG", f"no result within {SHORT_S + 3:g} s")
    assert result.seconds >= SHORT_S + 3


async def test_process_that_says_nothing_is_a_crash(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.benchmarking.stress.run.task_command", lambda task: ["sh", "-c", "exit 7"])
    (result,) = await stress("reference", model, ["long_inference"], SHORT_S)
    assert result.result == "CRASH"
    assert "code 7" in result.message


async def test_slow_rate_is_told_as_a_measurement(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_bodies, "SLOWDOWN_MAX", -10.0)  # Nothing is that much quicker.
    ended = await run_task(StressTask("slowdown", "reference", str(model), 0.1, 1))
    assert ended.result == "FAILURE"
    assert (
        ended.message.startswith("measured: executions are ") and "other work of the machine" in ended.message
    )


def test_progress_is_told_where_nobody_watches(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aionn.benchmarking.stress.run.task_command", lambda task: ["sh", "-c", "exit 7"])
    arguments = ["stress", "--device", "reference", "--model", str(model), "--minutes", "0.001"]
    chosen = ["--test", "long_inference", "--test", "slowdown"]
    for options, count in (([], 2), (["--json"], 0)):
        with pytest.raises(SystemExit):
            main([*arguments, *chosen, *options])
        assert len(capsys.readouterr().err.splitlines()) == count


@pytest.mark.parametrize(
    ("tests", "seconds", "match"),
    [
        (["nothing"], 1.0, "expected tests of long_inference.*got nothing"),
        ([], 1.0, "got none"),
        (["long_inference"], 0.0, "expected more than 0"),
        (["long_inference"], float("nan"), "expected more than 0"),
    ],
)
async def test_senseless_arguments_are_refused(
    model: Path, tests: list[str], seconds: float, match: str
) -> None:
    with pytest.raises(InvalidArgument, match=match):
        await stress("reference", model, tests, seconds)


@pytest.mark.parametrize("name", ["broken.tflite", "broken.onnx", "broken.mp4"])
async def test_file_that_is_no_model_is_refused_before_any_test(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no model")
    begun: list[str] = []
    with pytest.raises(InvalidArgument, match=f"^model {tmp_path / name}: "):
        await stress(
            "reference",
            tmp_path / name,
            ["long_inference"],
            SHORT_S,
            progress=lambda test, _: begun.append(test),
        )
    assert not begun


def test_random_models_are_legal_and_differ() -> None:
    chosen = random.Random(3)
    models = [random_model(chosen) for _ in range(20)]
    for drawn in models:
        (output,) = Interpreter(drawn).run(draw_inputs(drawn, np.random.default_rng(1)), RunControl())
        assert output.shape == drawn.main.inputs[0].dimensions
    assert len({len(drawn.main.operations) for drawn in models}) > 5


def test_command_refuses_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["stress", "--device", "toaster"])
    assert end.value.code == 2
    assert "--device: expected one of" in capsys.readouterr().err


def test_every_test_has_a_body() -> None:
    assert list(BODIES) == [
        "long_inference",
        "parallel_inference",
        "load_and_unload",
        "killed_clients",
        "random_models",
        "mapped_models",
        "slowdown",
    ]


@pytest.mark.parametrize("count", NATIVE_COUNTS)
@pytest.mark.parametrize("is_started", [False, True], ids=["starting", "started"])
async def test_cancelled_stress_leaves_no_process(
    model: Path, count: int, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.benchmarking.stress.run.task_command", lambda task: SLEEPING)
    before = child_processes()
    task = asyncio.create_task(stress("reference", model, ["long_inference"], 60.0))
    while is_started and child_processes() == before:
        assert not task.done(), "it ended before a process had started"
        await asyncio.sleep(0.001)
    await cancelled_natively(task, count)
    assert child_processes() == before
