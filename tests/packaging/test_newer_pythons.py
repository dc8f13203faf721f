"""The wheel works under newer Pythons than the oldest one: those of this machine, else Debian's, fetched into a scratch folder."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.debian import STEP_S_MAX, fetch_debian, step

VERSIONS = ("3.12", "3.13", "3.14")

TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")

PROGRAM = """
import asyncio, sys
import anyio, numpy as np
import aionn, aionn.blocking, fmq
from aionn.cli.example_data import example_data

MODEL = example_data("") / "digits_float.tflite"


async def windows(shape):
    for _ in range(20):
        yield np.zeros(shape, np.float32)
        await anyio.sleep(0.001)


async def main():
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(MODEL, recover=True)
        silence = np.zeros(net.inputs[0].dimensions, np.float32)
        first = net.execute_fenced([silence])
        second = net.execute_fenced([silence], wait_for=[first.fence])
        assert ((await second).outputs[0] == (await first).outputs[0]).all()
        async with net.burst() as burst:
            stream = burst.stream(windows(silence.shape), deadline=lambda item: aionn.after(5))
            statuses = {result.status async for result in stream}
        return statuses, runtime.device("reference").pid


statuses, pid = anyio.run(main)
assert statuses == {"on_time"} and pid
with aionn.blocking.open(drivers=["reference"]) as runtime:
    net = runtime.compile(MODEL)
    assert net.execute([np.zeros(net.inputs[0].dimensions, np.float32)]).outputs[0].shape == (1, 11)
before = sys.getrefcount(None)
with fmq.MessageQueue.create(quantum_bytes=8, count=16) as queue:
    for number in range(5000):
        assert queue.write(number.to_bytes(8, "little"))
        assert int.from_bytes(bytes(queue.read()), "little") == number
assert abs(sys.getrefcount(None) - before) < 1000, "the extension counts None wrongly"
print(*sys.version_info[:2], fmq._native.__file__)
"""


def installed_python(version: str) -> Path | None:
    """That Python, where this machine has it: on the PATH, or among those that pyenv has built."""
    name = f"python{version}"
    built = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    # Not a shim of pyenv, which refuses versions that are not chosen.
    found = [Path(place, name) for place in os.get_exec_path() if not place.endswith("shims")]
    found += sorted(built.glob(f"{version}.*/bin/{name}"))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def debians_python(version: str, folder: Path) -> Path:
    """Debian's newest, as a program for its children too: run by its own loader, since the C library here may be older."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip(f"Python {version} is not installed here, and neither are apt-get and dpkg-deb")
    if platform.machine() != "x86_64":
        pytest.skip(f"Python {version} is not installed here")
    root = fetch_debian(folder / "debian", [f"python{version}", "libstdc++6"], suite="sid")
    loader, libraries = root / "usr/lib64/ld-linux-x86-64.so.2", root / "usr/lib/x86_64-linux-gnu"
    program = folder / f"python{version}"
    program.write_text(
        f"#!/bin/sh\nPYTHONHOME={root}/usr\nexport PYTHONHOME\n"
        f'exec {loader} --argv0 "$0" --library-path {libraries} {root}/usr/bin/python{version} "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_runs_under_a_newer_python(version: str, wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    tags = [f"--platform={tag}_x86_64" for tag in TAGS]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", f"--python-version={version}"]
    # The wheel of this machine's compiler has its own tag; no platform of the list has it.
    renamed = tmp_path / f"{'-'.join(wheel.name.split('-')[:4])}-manylinux_2_28_x86_64.whl"
    shutil.copy(wheel, renamed)
    step([*pip, *tags, "--target", packages, renamed, "av"], f"packages for {version} cannot be fetched here")
    python = installed_python(version) or debians_python(version, tmp_path)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "AIONN_SPARE_PROCESSES": "0"}

    def told(*arguments: str) -> str:
        done = subprocess.run(
            [python, "-P", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_S_MAX,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    *found, native = told("-W", "error::DeprecationWarning:aionn", "-c", PROGRAM).split()
    assert ".".join(found) == version and native.startswith(str(packages))
    report = json.loads(told("-m", "aionn", "demo", "--device", "reference", "--json").splitlines()[-1])
    assert report["video"]["accuracy"] >= 0.99 and report["audio"]["words_found"] == 30
