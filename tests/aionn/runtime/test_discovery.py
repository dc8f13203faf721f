"""Which devices a runtime finds: registered, given and served ones, each asked once, with the reason where one is left out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket as socket_module
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Device, DeviceInfo, OperationType
from aionn.runtime.settings import settings_from
from aionn.service.client import device as client_module
from aionn.service.host.process import listen
from aionn.testing.models import chain

pytestmark = pytest.mark.forked("any")

X = np.array([-1.0, 2.0, -3.0], np.float32)
RELU = np.array([0.0, 2.0, 0.0], np.float32)
START_S_MAX = 30


class Asked:
    """A device that counts how often it is asked what it is."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.times = 0

    @property
    def info(self) -> DeviceInfo:
        self.times += 1
        return self._device.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[Path]:
    """A socket where this loop serves the device ``shared``."""
    path, device = tmp_path / "npu.sock", ReferenceDevice("shared")
    started = anyio.Event()
    server = asyncio.create_task(listen(device, path, started=started))
    with anyio.fail_after(START_S_MAX):
        await started.wait()
    yield path
    server.cancel()
    await asyncio.wait([server])
    await device.aclose()


@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_served_device_is_found_and_used(socket: Path, isolation: str) -> None:
    async with aionn.open(drivers=["reference"], sockets=[socket], isolation=isolation) as runtime:
        assert [(d.name, d.driver) for d in runtime.devices] == [
            ("shared", "served"),
            ("reference", "reference"),
        ]
        assert runtime.device("shared").pid == os.getpid()
        net = await runtime.compile(chain([OperationType.RELU], (3,)), devices="shared")
        np.testing.assert_array_equal((await net.execute([X])).outputs[0], RELU)
        async with net.burst() as burst:
            np.testing.assert_array_equal((await burst.execute([X])).outputs[0], RELU)


async def test_variable_names_sockets(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_SOCKETS", f"{socket}{os.pathsep}{socket.parent / 'nobody'}")
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        assert [d.name for d in runtime.devices] == ["shared", "reference"]
        (missing,) = runtime.unavailable
        assert missing.name.endswith("nobody") and "cannot connect" in missing.reason
    assert settings_from(environment={"AIONN_SOCKETS": f"/a{os.pathsep}{os.pathsep}/b"}).sockets == (
        "/a",
        "/b",
    )


@pytest.mark.parametrize("option", [{"enabled_devices": "reference"}, {"cpu_only": True}])
async def test_served_device_is_filtered_by_its_own_name(socket: Path, option: dict[str, object]) -> None:
    async with aionn.open(
        drivers=["reference"], sockets=[socket], isolation="in_process", **option
    ) as runtime:  # type: ignore[arg-type]
        assert [d.name for d in runtime.devices] == ["reference"]
        assert "not enabled" in runtime.unavailable[0].reason


async def test_second_device_of_a_name_is_left_out(socket: Path) -> None:
    async with aionn.open(devices=[ReferenceDevice("shared")], sockets=[socket]) as runtime:
        assert [(d.name, d.driver) for d in runtime.devices] == [("shared", "given")]
        assert "'shared' already" in runtime.unavailable[0].reason


@pytest.mark.parametrize("sockets", ["/one", ["/one", "/one"], [""]])
def test_senseless_sockets_are_refused(sockets: object) -> None:
    with pytest.raises(aionn.InvalidArgument, match="sockets"):
        aionn.open(sockets=sockets)  # type: ignore[arg-type]


async def test_served_device_that_comes_back_is_used_again(tmp_path: Path) -> None:
    path, device = tmp_path / "npu.sock", ReferenceDevice("shared")
    model = chain([OperationType.RELU], (3,))

    async def serve() -> asyncio.Task[None]:
        started = anyio.Event()
        server = asyncio.create_task(listen(device, path, started=started))
        await started.wait()
        return server

    server = await serve()
    async with aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(model)
        np.testing.assert_array_equal((await net.execute([X])).outputs[0], RELU)
        server.cancel()
        await asyncio.wait([server])
        with pytest.raises(aionn.DeadObject):
            await net.execute([X])
        with pytest.raises(aionn.DeviceUnavailable, match="cannot connect"):
            await runtime.compile(model)
        server = await serve()
        again = await runtime.compile(model)
        np.testing.assert_array_equal((await again.execute([X])).outputs[0], RELU)
    server.cancel()
    await asyncio.wait([server])
    await device.aclose()


async def test_metadata_are_asked_for_once() -> None:
    device = Asked(ReferenceDevice("counted"))
    async with aionn.open(devices=[device]) as runtime:  # type: ignore[list-item]
        found = runtime.device("counted")
        assert (found.version, found.type.name, found.feature_level) == ("1", "CPU", 7)
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        await net.execute([X])
    assert device.times == 1


@pytest.fixture
def odd_drivers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a machine with drivers that ask too much, answer wrongly, or cannot be made."""
    (tmp_path / "odd_drivers.py").write_text(
        "import msgspec\n"
        "from aionn.drivers.reference import ReferenceDevice\n"
        "from aionn.hal import CacheFileCounts\n"
        "def changed(name, **changes):\n"
        "    device = ReferenceDevice(name)\n"
        "    device.info = msgspec.structs.replace(device.info, **changes)\n"
        "    return device\n"
        "def greedy(name): return changed(name, cache_files=CacheFileCounts(33, 0))\n"
        "def silent(name): return changed(name, version='')\n"
        "def broken(name): raise OSError('not plugged in')\n"
        "def good(name): return ReferenceDevice(name)\n"
    )
    metadata = tmp_path / "odd-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    names = ("greedy", "silent", "broken", "good")
    (metadata / "entry_points.txt").write_text(
        "[aionn.drivers]\n" + "".join(f"odd-{name} = odd_drivers:{name}\n" for name in names)
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH"))))
    yield {**os.environ, "PYTHONPATH": path, "AIONN_DEVICES": "odd-.*|reference"}


@pytest.mark.thorough
def test_command_shows_why_a_device_is_left_out(odd_drivers: dict[str, str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "aionn", "devices", "--json"],
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
        env=odd_drivers,
        check=True,
    )
    told = json.loads(finished.stdout)
    assert [d["name"] for d in told["devices"]] == ["odd-good", "reference"]
    reasons = {u["name"]: u["reason"] for u in told["unavailable"]}
    assert "cache" in reasons["odd-greedy"] and "33" in reasons["odd-greedy"]
    assert "version" in reasons["odd-silent"]
    assert "not plugged in" in reasons["odd-broken"]
    assert "not enabled" in reasons["litert-cpu"]


async def test_driver_that_cannot_be_made_here_is_left_out(
    odd_drivers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    drivers = ["odd-broken", "odd-greedy", "odd-good", "reference"]
    async with aionn.open(drivers=drivers, isolation="in_process") as runtime:
        assert [d.name for d in runtime.devices] == ["odd-good", "reference"]
        assert [u.name for u in runtime.unavailable] == ["odd-broken", "odd-greedy"]


async def test_every_device_that_was_given_is_closed_once_whether_it_is_used_or_not() -> None:
    closed: list[str] = []

    class Closing(ReferenceDevice):
        async def aclose(self) -> None:
            closed.append(self.info.name)
            await super().aclose()

    devices = [Closing(name) for name in ("not wanted", "used", "used as well", "not wanted either")]
    async with aionn.open(devices=devices, enabled_devices="used.*") as runtime:
        assert [device.name for device in runtime.devices] == ["used", "used as well"]
    assert sorted(closed) == sorted(device.info.name for device in devices)


async def test_served_device_that_cannot_be_reached_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "nobody.sock")
    async with aionn.open(drivers=["reference"], sockets=[path], isolation="in_process") as runtime:
        assert [device.name for device in runtime.devices] == ["reference"]
        (missing,) = runtime.unavailable
        assert missing.name == path and missing.reason.startswith("cannot connect"), "the path once"
        with pytest.raises(aionn.DeviceUnavailable) as told:
            runtime.device(path)
        assert str(told.value).count(path) == 1
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.name == "aionn.manager" and record.getMessage().startswith(
        f"{path} is not used: cannot connect"
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"drivers": ["reference", "litert-cpu"], "enabled_devices": "reference"}, {"cpu_only": True}],
)
async def test_what_nobody_asked_for_is_no_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with aionn.open(**options):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_command_says_that_a_served_device_is_not_used(tmp_path: Path, example_data: Path) -> None:
    path = str(tmp_path / "nobody.sock")
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "aionn",
            "run",
            str(example_data / "digits_float.tflite"),
            "--device",
            "reference",
        ],
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
        env={**os.environ, "AIONN_SOCKETS": path},
        check=True,
    )
    (line,) = finished.stderr.splitlines()
    assert path in line and "is not used" in line


async def test_silent_server_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that accept and never say Hello: what they take passes once, and the devices keep their order."""
    limit_s, count = 0.5, 60
    monkeypatch.setattr(client_module, "START_S_MAX", limit_s)
    async with contextlib.AsyncExitStack() as stack:
        paths = []
        for name in range(count):
            listener = stack.enter_context(
                socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_SEQPACKET)
            )
            paths.append(str(tmp_path / f"{name}.sock"))
            listener.bind(paths[-1])
            listener.listen()
        began_s = time.monotonic()
        async with aionn.open(drivers=["reference"], sockets=paths, isolation="in_process") as runtime:
            took_s = time.monotonic() - began_s
            assert [missing.name for missing in runtime.unavailable] == paths
            assert all(missing.reason == "no answer within 0.5 s" for missing in runtime.unavailable)
            assert [device.name for device in runtime.devices] == ["reference"]
    assert limit_s <= took_s < count * limit_s


async def test_driver_that_does_not_exist_is_refused_beside_a_silent_server(tmp_path: Path) -> None:
    with socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_SEQPACKET) as listener:
        path = str(tmp_path / "silent.sock")
        listener.bind(path)
        listener.listen()
        with anyio.fail_after(START_S_MAX), pytest.raises(aionn.InvalidArgument, match="'nonsense'"):
            async with aionn.open(drivers=["nonsense"], sockets=[path]):
                pass
