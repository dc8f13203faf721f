"""``aionn serve --oip`` in processes of its own: tritonclient's clients, the end in order, and calls of the command that fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aionn.platform.python_process import python_command, python_environment
from tests.aionn.conftest import Command
from tests.aionn.oip.claims import claims_of, outcomes_of
from tests.documentation.pages import blocks

pytestmark = pytest.mark.forked("any")

ROOT = Path(__file__).parents[3]
DATA = ROOT / "examples" / "data"
MODELS = (
    "--model",
    f"digits={DATA / 'digits_float.tflite'}",
    "--model",
    f"shapes={DATA / 'shapes_int8.tflite'}",
)
START_S_MAX = 60.0
RUN_S_MAX = 100


class Served(NamedTuple):
    """A running command, and the addresses of gRPC and of REST."""

    process: subprocess.Popen[str]
    grpc: str
    rest: str


def need(*packages: str) -> None:
    """Skips where a package is missing, without importing it: gRPC's threads stay in a process."""
    for package, name in {"grpc": "grpcio", "uvicorn": "uvicorn", "tritonclient": "tritonclient"}.items():
        if package in packages and importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} is not installed")


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    need("grpc", "uvicorn")
    command = python_command(
        "aionn.cli.main", "serve", "reference", "--oip", "0", "--oip-rest", "0", *MODELS, *options
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment())
    assert process.stdout is not None
    try:
        select.select([process.stdout], [], [], START_S_MAX)
        lines = [process.stdout.readline() for _ in range(2)]
        yield Served(process, *(re.findall(r"127\.0\.0\.1:\d+", line)[0] for line in lines))
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()  # SIGINT is ignored where the tests were started in the background.
        process.wait(RUN_S_MAX)
        process.stdout.close()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The traceback of each claim about tritonclient that failed, by name; empty for the others."""
    need("tritonclient")
    with serving() as served:
        return outcomes_of("triton_claims", served.grpc, served.rest, limit_s=RUN_S_MAX)


@pytest.mark.thorough
@pytest.mark.parametrize("claim", claims_of("triton_claims"))
def test_clients_of_triton_are_served(outcomes: dict[str, str], claim: str) -> None:
    assert outcomes[claim] == ""


def ask(place: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of one request by REST."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://{place}", data, timeout=RUN_S_MAX) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


@pytest.mark.thorough
def test_sigterm_ends_all_processes_in_order() -> None:
    with serving() as served:
        tensor = {"name": "serve_x:0", "datatype": "FP32", "shape": [1, 49, 40, 1], "data": [0.5] * 1960}
        status, answer = ask(f"{served.rest}/v2/models/digits/infer", {"inputs": [tensor]})
        assert (status, answer["outputs"][0]["shape"]) == (200, [1, 11])
        served.process.terminate()
        assert served.process.wait(RUN_S_MAX) == 0
        with pytest.raises(OSError):
            ask(f"{served.rest}/v2")


@pytest.mark.thorough
def test_death_of_the_process_that_serves_is_reported() -> None:
    with serving() as served:
        children = Path(f"/proc/{served.process.pid}/task").glob("*/children")
        (pid,) = [int(child) for file in children for child in file.read_text().split()]
        assert b"aionn.oip.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGKILL)
        assert served.process.wait(RUN_S_MAX) == 2


@pytest.mark.long
def test_death_of_the_device_ends_the_process_that_serves() -> None:
    with serving() as served:
        served.process.kill()
        served.process.wait(RUN_S_MAX)
        end_s = time.monotonic() + RUN_S_MAX
        while time.monotonic() < end_s:
            try:
                ask(f"{served.rest}/v2")
            except OSError:
                return
        raise AssertionError("it still serves")


@pytest.mark.long
def test_program_of_the_page_runs() -> None:
    need("grpc", "uvicorn", "tritonclient")
    (program,) = [
        block.text
        for block in blocks("python")
        if block.page == "docs/how-to/open-inference-protocol.md" and "tritonclient" in block.text
    ]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env=python_environment() | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "StatefulPartitionedCall:0 (1, 11)\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--oip", "0"), "--oip: expected --model NAME=FILE"),
        (("--oip", "nowhere", *MODELS), "--oip: expected PORT or HOST:PORT, got 'nowhere'"),
        (("--oip", "70000", *MODELS), "--oip: expected PORT or HOST:PORT, got '70000'"),
        (("--oip", "0.0.0.0:0", *MODELS), "other machines reach this address"),
        (("--oip", ":0", *MODELS), "other machines reach this address"),
        (("--socket", "s", *MODELS), "--model goes with --oip"),
        (("--socket", "s", "--oip-rest", "1"), "--oip-rest goes with --oip"),
        (("--oip", "0", "--model", "none.tflite"), "--model none.tflite: no such file"),
        (("--oip", "0", "--oip-rest", "99999", *MODELS), "--oip-rest"),
        ((), "expected --socket PATH, --listen HOST:PORT or --oip PORT"),
    ],
)
def test_call_that_makes_no_sense_is_refused(
    aionn_here: Command, arguments: tuple[str, ...], text: str
) -> None:
    need("grpc", "uvicorn")
    finished = aionn_here("serve", "reference", *arguments)
    assert finished.returncode == 2
    assert text in " ".join(finished.stderr.split())


@pytest.mark.thorough
def test_model_that_cannot_be_compiled_ends_the_command(tmp_path: Path) -> None:
    need("grpc", "uvicorn")
    (tmp_path / "bad.tflite").write_bytes(b"no model")
    command = python_command(
        "aionn.cli.main", "serve", "reference", "--oip", "0", "--model", str(tmp_path / "bad.tflite")
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S_MAX, env=python_environment()
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.tflite: " in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_package_is_named_with_the_extra(
    aionn_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "grpc" else find(name, *more)
    )
    finished = aionn_here("serve", "reference", "--oip", "0", *MODELS)
    assert finished.returncode == 2
    assert "oip: needs grpcio, which cannot be found: pip install 'aionn[oip]'" in " ".join(
        finished.stderr.split()
    )
