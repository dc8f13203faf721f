"""The program of ``test_ray_cluster``: a cluster of two raylets on this machine, an application that uses the devices of both
nodes, and the death of one. It prints what it found as JSON; a process of its own, since Ray leaves threads and handlers behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import ray
from ray.cluster_utils import Cluster

import aionn
import aionn.ray
from aionn.ray.settings import node_names
from aionn.runtime.fleet import measured, places
from aionn.testing import models
from tests.aionn.ray.death import DEATH_AT, FRAMES

RESOURCE = "aionn_npu"
PERIOD_S = 0.05


async def frames() -> AsyncIterator[Any]:
    for index in range(FRAMES):
        yield np.full(4, index, np.float32)
        await anyio.sleep(PERIOD_S)


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return [pid, *(found for child in children for found in descendants(child))]


async def use(fleet: list[str], mortal: str, kill: Callable[[], None]) -> dict[str, Any]:
    """Streams over both nodes; ``kill`` ends that of the device ``mortal``."""
    async with (
        aionn.open(drivers=[], fleet=fleet) as runtime,
        aionn.FleetStreams(runtime, models.identity((4,))) as streams,
    ):
        placed = [
            streams.stream(frames(), period=0.2, deadline=2.0, jitter=0.5, name=f"s{number}")
            for number in range(2)
        ]
        for one in placed:
            await one.admit()
        found: dict[str, Any] = {
            "devices": sorted(device.name for device in runtime.devices),
            "places": dict(streams.places),
            "items": {one.request.name: [] for one in placed},
        }

        died: list[str] = []

        async def read(stream: aionn.PlacedStream[Any]) -> None:
            async for result in stream:
                items = found["items"][stream.request.name]
                items.append([int(result.item[0]), result.status])
                if stream.device == mortal and len(items) == DEATH_AT and not died:
                    died.append(stream.request.name)
                    tasks.start_soon(anyio.to_thread.run_sync, kill)
                elif stream.moves and result.status != "lost" and "resumed_ns" not in found:
                    found["resumed_ns"] = time.monotonic_ns()

        async with anyio.create_task_group() as tasks:
            for one in placed:
                tasks.start_soon(read, one)
        found["moves"] = {
            one.request.name: [(move.left, move.reached, move.lost, move.took_ns) for move in one.moves]
            for one in placed
        }
        return found


def main() -> None:
    """Runs it."""
    # Whatever the machine does while it measures: both nodes are alike, so that each gets a stream.
    places.ALIKE = 1e9
    measured.LATENCY_STEP_NS = 10**10
    options = {"num_cpus": 1, "resources": {RESOURCE: 1}, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        second = cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        started = aionn.ray.start_nodes("reference", resource=RESOURCE, any_client=True)
        again = aionn.ray.start_nodes("reference", resource=RESOURCE, any_client=True)
        free = ray.available_resources().get(RESOURCE, 0)
        # A busy machine keeps a node silent for longer than 200 ms. One that is killed ends its connections immediately.
        fleet = [f"{address}?silence_ms=10000" for address in aionn.ray.ray_fleet()]

        # The node beside that of the head.
        number = next(
            machine["NodeID"]
            for machine in ray.nodes()
            if machine["ObjectStoreSocketName"] == second.plasma_store_socket_name
        )
        mortal = f"{node_names(ray.nodes())[number]}/reference"
        killed_ns = 0
        actor = ray.get_actor(f"aionn/{mortal}", "aionn")
        keeper = ray.get(actor.figures.remote())["pid"]

        def kill() -> None:
            """The death of a machine: all processes of its node, and its raylet."""
            nonlocal killed_ns
            actor_pid = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in descendants(actor_pid):
                os.kill(pid, signal.SIGKILL)
            killed_ns = time.monotonic_ns()
            cluster.remove_node(second, allow_graceful=False)

        found = anyio.run(use, fleet, mortal, kill)
        found["gap_ns"] = found["resumed_ns"] - killed_ns
        found["mortal"] = mortal
        found["started"] = [list(node) for node in started]
        found["is_same"] = started == again
        found["free"] = free
        (other,) = [node.device for node in started if node.device != mortal]
        aionn.ray.drain_node(other)
        found["left"] = [node.device for node in aionn.ray.nodes_of_cluster(within_s=1) if node.address]
        aionn.ray.stop_nodes()
        print("found " + json.dumps(found), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
