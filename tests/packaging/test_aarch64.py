"""The wheel for aarch64 runs: under qemu-user, with Debian's Python for that processor. Both come by apt, into a scratch folder.

This shows that the compiled code, its calls of the C library and the layout of its data are right. It shows nothing about the order
of memory accesses: the processor below is another one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.building import call_backend
from tests.packaging.debian import STEP_S_MAX, fetch_debian, step

PROGRAM = """
import platform, sys, threading
import anyio, numpy as np
import aionn, fmq
from aionn.cli.example_data import example_data

with fmq.MessageQueue.create(quantum_bytes=8, count=16) as queue:
    with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as peer:
        for number in range(1000):
            assert queue.write(number.to_bytes(8, "little"))
            assert int.from_bytes(bytes(peer.read()), "little") == number
        writer = threading.Thread(target=queue.write, args=(bytes(8),))
        writer.start()
        assert peer.wait_readable(1, None)
        writer.join()


async def main():
    async with aionn.open(isolation="in_process", drivers=["reference"]) as runtime:
        net = await runtime.compile(example_data("") / "digits_float.tflite")
        async with net.burst() as burst:
            return await burst.execute([np.zeros(net.inputs[0].dimensions, np.float32)])


result = anyio.run(main)
assert result.outputs[0].shape == (1, 11) and abs(float(result.outputs[0].sum()) - 1) < 1e-3
print(platform.machine(), fmq._native.__file__)
"""


@pytest.mark.long
def test_wheel_for_aarch64_runs_under_emulation(source: Path, tmp_path: Path) -> None:
    if os.uname().machine == "aarch64":
        pytest.skip("this is one")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install --group release")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("apt-get and dpkg-deb are not installed here")
    for name in ("emulator", "system", "packages"):
        (tmp_path / name).mkdir()
    emulator = fetch_debian(tmp_path / "emulator", ["qemu-user-static"]) / "usr/bin/qemu-aarch64-static"
    arm = ("-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64")
    root = fetch_debian(tmp_path / "system", ["python3", "libstdc++6"], *arm)
    python = max((root / "usr/bin").glob("python3.*"))
    version = python.name.removeprefix("python")
    wheel = call_backend(source, "build_wheel", tmp_path / "wheel", {"platform": "manylinux_2_28_aarch64"})
    tags = [
        f"--platform={tag}_aarch64"
        for tag in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
    ]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--only-binary=:all:",
        f"--python-version={version}",
        *tags,
    ]
    step([*pip, "--target", tmp_path / "packages", wheel], "the packages for aarch64 cannot be fetched here")
    done = subprocess.run(
        [emulator, "-L", root, python, "-P", "-c", PROGRAM],
        cwd=tmp_path,
        env={
            "PYTHONHOME": str(root / "usr"),
            "PYTHONPATH": str(tmp_path / "packages"),
            "AIONN_SPARE_PROCESSES": "0",
        },
        capture_output=True,
        text=True,
        timeout=STEP_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    machine, native = done.stdout.split()
    assert machine == "aarch64" and native.startswith(str(tmp_path / "packages"))
