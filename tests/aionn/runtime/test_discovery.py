"""Which devices a runtime finds: registered, given and served ones, each asked once, with the reason where one is left out."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
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
from aionn.service.host import listen
from aionn.testing.models import chain

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
