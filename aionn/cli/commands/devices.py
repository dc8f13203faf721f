"""``aionn devices``: what can run models here. ``aionn fleet``: the nodes of a network, and their load."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import anyio
from cyclopts import Parameter
from msgspec import to_builtins

import aionn
from aionn.cli import interrupts
from aionn.cli.output import print_json
from aionn.drivers import registry
from aionn.errors import Error, InvalidArgument
from aionn.fleet.addresses import NodeAddress, parse_nodes
from aionn.fleet.device import NodeDevice
from aionn.hal import duration_text
from aionn.media import (
    CameraControl,
    CameraInfo,
    MicrophoneInfo,
    SourceUnavailable,
    camera_controls,
    list_cameras,
    list_microphones,
)
from aionn.platform.loops import finish
from aionn.reports.terminal import print_line, print_table

__all__ = ["devices", "fleet"]

STATUS_S_MAX = 60.0
"""The time in which a device gives its status: its process starts, and an engine is imported, which takes seconds on a busy machine
and may hang, in a library or a driver of the system."""


def devices(
    *,
    sources: Annotated[bool, Parameter(negative=())] = False,
    controls: str | None = None,
    fleet: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """List the devices with type, version, feature level and status, those that are used only where they are named, and the
    drivers that cannot be used, with the reason.

    Args:
        sources: List the cameras and microphones of this machine instead, with the names that survive a reconnection.
        controls: List the controls of a camera instead, such as its exposure: 0, /dev/video0 or a part of its name.
        fleet: Address of a node (aionn serve --listen) whose device is listed as well; may be repeated. By default AIONN_FLEET.
        json: Print one JSON object instead of a table.
    """
    if sources and controls is not None:
        raise InvalidArgument("devices: expected either --sources or --controls CAMERA, got both")
    if sources:
        return _sources(json)
    if controls is not None:
        return _controls(controls, json)
    report = interrupts.run(_devices, fleet)
    if json:
        print_json(report)
        return 0
    _print_devices("devices", report["devices"])
    if report["on_request"]:
        _print_devices("devices that are used only where they are named", report["on_request"])
    for missing in report["unavailable"]:
        print_line(f"unavailable: {missing['name']}: {missing['reason']}")
    return 0


def _print_devices(title: str, found: Sequence[dict[str, Any]]) -> None:
    rows = [
        (d["name"], d["type"], d["version"], d["feature_level"], d["slots"], d["cancel"], d["status"])
        for d in found
    ]
    heads = ("name", "type", "version", "level", "slots", "cancel", "status")
    print_table(title, heads, rows, least=("cancel", "slots", "level"))


def _sources(json: bool) -> int:
    cameras, microphones, problem = interrupts.run(_find_sources)
    if json:
        print_json(
            {
                "cameras": [to_builtins(camera) for camera in cameras],
                "microphones": [to_builtins(microphone) for microphone in microphones],
                "microphones_unavailable": problem,
            }
        )
        return 0
    _print_cameras(cameras)
    if microphones:
        microphone_rows = [(m.name, m.sample_format, m.state.lower()) for m in microphones]
        print_table("microphones", ("name", "format", "state"), microphone_rows, least=("state", "format"))
    else:
        print_line(problem or "no microphone: the sound server has none")
    return 0


def _controls(camera: str, json: bool) -> int:
    found = interrupts.run(camera_controls, camera)
    if json:
        print_json({"controls": [to_builtins(control, str_keys=True) for control in found]})
        return 0
    print_table(
        f"controls of camera {camera}",
        ("name", "value", "values", "default"),
        [(c.name, _shown_value(c, c.value), _range(c), _shown_value(c, c.default)) for c in found],
        least=("default",),
    )
    return 0


def _shown_value(control: CameraControl, value: int | None) -> str:
    if value is None or control.kind == "button":
        return "-"
    return control.choices.get(value, str(value))


def _range(control: CameraControl) -> str:
    notes = "".join(
        f", {note}"
        for note, holds in (("read-only", control.is_read_only), ("inactive", control.is_inactive))
        if holds
    )
    if control.kind == "button":
        return f"button{notes}"
    if control.choices:
        return ", ".join(control.choices.values()) + notes
    steps = f" in steps of {control.step}" if control.step > 1 else ""
    return f"{control.minimum} to {control.maximum}{steps}{notes}"


async def _find_sources() -> tuple[list[CameraInfo], list[MicrophoneInfo], str]:
    """Cameras, microphones, and why there are no microphones."""
    cameras = await list_cameras()
    try:
        return cameras, await list_microphones(), ""
    except SourceUnavailable as e:
        return cameras, [], str(e)


def _print_cameras(cameras: list[CameraInfo]) -> None:
    if not cameras:
        print_line(
            "no camera: none is plugged in, or none is passed into this container; --source pattern: is a test picture"
        )
        return
    rows = [
        (c.path, c.name, ", ".join(c.formats), c.bus, c.stable_path or "-") for c in cameras if not c.problem
    ]
    print_table(
        "cameras", ("path", "name", "formats", "place", "stable path"), rows, least=("place", "formats")
    )
    for camera in cameras:
        if camera.problem:
            print_line(f"unavailable: {camera.problem}")


async def _devices(fleet: list[str] | None) -> dict[str, Any]:
    async with aionn.open(fleet=fleet) as runtime:
        found, unavailable = await _described(runtime)
        drivers = {device.driver for device in runtime.devices}
    others = [name for name in registry.devices_on_request() if name not in drivers]
    with _without_warnings():
        async with aionn.open(drivers=others, sockets=[], fleet=[]) as runtime:
            on_request, unavailable_too = await _described(runtime)
    return {"devices": found, "on_request": on_request, "unavailable": [*unavailable, *unavailable_too]}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Within it a runtime does not warn of unavailable devices: the command prints all reasons."""
    logger, handler = logging.getLogger("aionn.manager"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


async def _described(runtime: aionn.Runtime) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The devices of a runtime, and those that cannot be used, with the reasons."""
    found = []
    unavailable = [{"name": u.name, "reason": u.reason} for u in runtime.unavailable]
    for device in runtime.devices:
        try:
            with anyio.fail_after(STATUS_S_MAX):
                status = (await device.status()).name.lower()
        except TimeoutError:
            unavailable.append({"name": device.name, "reason": f"no answer within {STATUS_S_MAX:g} s"})
            continue
        except Error as e:
            unavailable.append({"name": device.name, "reason": str(e)})
            continue
        info = device.info
        found.append(
            {
                "name": device.name,
                "driver": device.driver,
                "type": info.type.name.lower(),
                "version": info.version,
                "feature_level": int(info.feature_level),
                "slots": info.slots,
                "cancel": info.cancel.name.lower(),
                "extensions": [extension.name for extension in info.extensions],
                "status": status,
            }
        )
    return found, unavailable


def fleet(
    addresses: Annotated[list[str] | None, Parameter(negative=())] = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Ask the nodes of a network for their devices, their distance in time, and their load.

    Exit code 1 means that a node cannot be reached.

    Args:
        addresses: Of the nodes (aionn serve --listen), such as 127.0.0.1:7463 or tls://edge2:7463; by default AIONN_FLEET.
        json: Print one JSON object instead of a table.
    """
    nodes = parse_nodes(addresses or None, os.environ)
    if not nodes:
        raise InvalidArgument("fleet: expected the address of a node, or AIONN_FLEET")
    report = interrupts.run(_nodes, nodes)
    reached = [node for node in report if not node["problem"]]
    if json:
        print_json({"nodes": report})
        return 0 if len(reached) == len(report) else 1
    rows = [
        (
            n["name"],
            n["status"],
            duration_text(n["round_trip_ns"]),
            duration_text(n["clock_uncertainty_ns"]),
            n["clients"],
            n["executing"],
            n["slots"],
        )
        for n in reached
    ]
    heads = ("device", "status", "round trip", "clock within", "clients", "executing", "slots")
    if rows:
        print_table("nodes", heads, rows, least=("slots", "clients", "clock within"))
    for node in report:
        if node["problem"]:
            print_line(f"unavailable: {node['address']}: {node['problem']}")
    return 0 if len(reached) == len(report) else 1


async def _nodes(nodes: Sequence[NodeAddress]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    async def ask(index: int, node: NodeAddress) -> None:
        found[index] = await _node(node)

    async with anyio.create_task_group() as tasks:
        for index, node in enumerate(nodes):
            tasks.start_soon(ask, index, node)
    return [report for _, report in sorted(found.items())]


async def _node(address: NodeAddress) -> dict[str, Any]:
    device = NodeDevice(address)
    try:
        await device.connect()
        figures = await device.figures()
        status = await device.status()
        return {
            "address": address.text,
            "name": device.info.name,
            "version": device.info.version,
            "status": status.name.lower(),
            "slots": device.info.slots,
            "round_trip_ns": device.round_trip_ns,
            "clock_uncertainty_ns": device.clock_uncertainty_ns,
            "clients": figures.clients,
            "data_connections": figures.data_connections,
            "executing": figures.executing,
            "problem": "",
        }
    except Error as e:
        return {"address": address.text, "problem": str(e).removeprefix(f"node {address.text}: ")}
    finally:
        await finish(device.aclose())
