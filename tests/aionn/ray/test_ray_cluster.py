"""A cluster of two raylets on this machine: the devices of both used by one application, and the death of one node."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aionn.ray.death import DEATH_AT, FRAMES

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is missing: pip install 'aionn[ray]'"
    ),
]

CLUSTER_S_MAX = 400.0
"""Start of two raylets, three actors' processes and two devices, on a machine with much else to do."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.aionn.ray.two_raylets"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=CLUSTER_S_MAX,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert lines, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    result: dict[str, Any] = json.loads(lines[0].removeprefix("found "))
    return result


def test_an_actor_on_each_machine_serves_its_device_and_holds_its_resource(found: dict[str, Any]) -> None:
    assert len(found["started"]) == 2 and all(address for _, address, _ in found["started"])
    assert found["is_same"], "a second start finds them"
    assert found["free"] == 0


def test_one_application_uses_the_devices_of_both_nodes(found: dict[str, Any]) -> None:
    names = sorted(device for device, _, _ in found["started"])
    assert found["devices"] == names
    assert sorted(found["places"].values()) == names


def test_streams_of_a_killed_node_go_on_elsewhere_within_a_second(found: dict[str, Any]) -> None:
    mortal = found["mortal"]
    assert found["gap_ns"] < 1_000_000_000
    for name, items in found["items"].items():
        assert [index for index, _ in items] == list(range(FRAMES))
        moves = found["moves"][name]
        if found["places"][name] != mortal:
            assert not moves
            continue
        ((left, reached, lost, took_ns),) = moves
        assert left == mortal != reached
        assert took_ns < 1_000_000_000
        assert [status for _, status in items].count("lost") == lost
        assert "lost" not in {status for _, status in items[:DEATH_AT]}


def test_a_drained_node_is_gone(found: dict[str, Any]) -> None:
    assert found["left"] == []


def test_a_folder_of_frames_is_labelled_by_plain_tasks() -> None:
    example = Path(__file__).parents[3] / "examples" / "cluster" / "folder_of_frames.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        timeout=CLUSTER_S_MAX,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("24 frames in 4 tasks: ")
