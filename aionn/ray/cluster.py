"""The nodes of a Ray cluster: started, found by the names of their actors, drained, stopped.

Owns the calls of Ray. They block: an application makes them before it opens its runtime, or in a thread.

Invariants:
1. Each actor has a name of its own, ``aionn/NODE/DEVICE``, in the namespace ``aionn``, and lives until ``stop_nodes`` or the end of
   its machine, whichever application has started it.
2. No call waits longer than its ``within_s``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import aionn
from aionn.ray.actor import NodeActor
from aionn.ray.settings import (
    PREFIX,
    NodeSettings,
    NodeTls,
    actor_name,
    check_settings,
    device_of,
    node_names,
)

__all__ = ["NodeFound", "drain_node", "nodes_of_cluster", "ray_fleet", "start_nodes", "stop_nodes"]

NAMESPACE: Final = "aionn"

START_S_MAX: Final = 120.0
"""Time for the start of all nodes: an engine loads for seconds from a slow disk, and Ray starts a process for the actor before."""

ANSWER_S_MAX: Final = 10.0
"""Time in which an actor answers: it has nothing else to do, and Ray notices the end of its process after seconds."""

DRAIN_S_MAX: Final = 60.0
"""Time for a drain: ``aionn serve`` gives accepted executions eight seconds by default."""

NODES_MAX: Final = 64
"""Most addresses that a runtime takes; see ``docs/production/fleet.md``."""

_logger = logging.getLogger("aionn.manager")


class NodeFound(NamedTuple):
    """A node of the cluster.

    Attributes:
        device: NODE/DEVICE, as a runtime calls it.
        address: For ``aionn.open(fleet=...)``; empty where it does not serve.
        reason: Why it does not serve; empty where it does.
    """

    device: str
    address: str
    reason: str = ""


class Cluster(Protocol):
    """The questions to Ray; tests have a cluster without it."""

    def names(self) -> list[str]:
        """The names of all actors in the namespace."""
        ...

    def addresses(self, names: Sequence[str], within_s: float) -> dict[str, str | Exception]:
        """The address of each actor that has answered, or its error."""
        ...


def loaded() -> Any:
    """Ray, connected to a cluster.

    Raises:
        DeviceUnavailable: It is not installed, or ``ray.init`` was not called.
    """
    try:
        import ray
    except ImportError as e:
        raise aionn.DeviceUnavailable(
            f"aionn.ray: Ray cannot be imported ({e}); pip install 'aionn[ray]' installs it"
        ) from None
    if not ray.is_initialized():
        raise aionn.DeviceUnavailable(
            'aionn.ray: no cluster is connected; call ray.init(address="auto") first'
        )
    return ray


class RayCluster:
    """The cluster that Ray is connected to.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def names(self) -> list[str]:
        """See ``Cluster``."""
        listed = self._ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"] for one in listed if one["namespace"] == NAMESPACE)

    def addresses(self, names: Sequence[str], within_s: float) -> dict[str, str | Exception]:
        """See ``Cluster``."""
        ray, found = self._ray, dict[str, str | Exception]()
        asked = {}
        for name in names:
            try:
                asked[ray.get_actor(name, NAMESPACE).address.remote()] = name
            except ValueError as e:  # It has ended since it was listed.
                found[name] = e
        if asked:
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=within_s)
            for reference in done:
                try:
                    found[asked[reference]] = ray.get(reference)
                except ray.exceptions.RayError as e:
                    found[asked[reference]] = e
        return found


def start_nodes(
    device: str,
    *,
    resource: str | None = None,
    tls: NodeTls | None = None,
    any_client: bool = False,
    arguments: Sequence[str] = (),
    within_s: float = START_S_MAX,
) -> list[NodeFound]:
    """Serves a device on each machine of the cluster that has a custom resource, and does not serve it yet.

    Args:
        device: Registered name of a driver, or MODULE:CLASS, as for ``aionn serve``.
        resource: The custom resource of Ray that one device takes one of, such as ``aionn_npu``; None serves on every machine.
        tls: The files of encryption; None without, on loopback addresses or with ``any_client``.
        any_client: Whether clients of other machines need no certificate.
        arguments: Further ones of ``aionn serve``.
        within_s: Time for the start.

    Returns:
        All nodes with this device, those of before as well.

    Raises:
        DeviceUnavailable: Ray is missing or not connected, or no machine has the resource.
        InvalidArgument: Other machines reach a node, and neither ``tls`` nor ``any_client`` is given.
    """
    ray = loaded()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machines = [
        machine
        for machine in ray.nodes()
        if machine["Alive"] and (resource is None or machine["Resources"].get(resource, 0) >= 1)
    ]
    if not machines:
        raise aionn.DeviceUnavailable(f"start_nodes: no machine of the cluster has the resource {resource!r}")
    names = node_names(ray.nodes())
    wanted = []
    for machine in machines:
        settings = NodeSettings(
            device, names[machine["NodeID"]], machine["NodeManagerAddress"], tls, any_client, tuple(arguments)
        )
        check_settings(settings)
        wanted.append((machine["NodeID"], settings))
    handles = []  # Kept until all have answered; the actors are detached.
    for number, settings in wanted:
        options: dict[str, Any] = {
            "name": actor_name(settings.node, device),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(number, soft=False),
        }
        if resource is not None:
            options["resources"] = {resource: 1}
        handles.append(ray.remote(NodeActor).options(**options).remote(settings))
    return _found(RayCluster(ray), [actor_name(settings.node, device) for _, settings in wanted], within_s)


def nodes_of_cluster(*, within_s: float = ANSWER_S_MAX, cluster: Cluster | None = None) -> list[NodeFound]:
    """All nodes that were started on the cluster.

    Args:
        within_s: Time for their answers.
        cluster: Asked instead of Ray; None takes the one that Ray is connected to.

    Raises:
        DeviceUnavailable: Ray is missing or not connected.
    """
    cluster = RayCluster(loaded()) if cluster is None else cluster
    return _found(cluster, [name for name in cluster.names() if device_of(name) is not None], within_s)


def _found(cluster: Cluster, names: Sequence[str], within_s: float) -> list[NodeFound]:
    answers = cluster.addresses(names, within_s)
    found = []
    for name in names:
        device, answer = device_of(name), answers.get(name)
        assert device is not None, "others were left out"
        if isinstance(answer, str):
            found.append(NodeFound(device, answer))
        else:
            reason = (
                f"no answer within {within_s:g} s"
                if answer is None
                else str(answer).strip().rpartition("\n")[2]
            )
            found.append(NodeFound(device, "", reason))
    return found


def ray_fleet(*, within_s: float = ANSWER_S_MAX, cluster: Cluster | None = None) -> list[str]:
    """The addresses of the cluster's nodes, for ``aionn.open(fleet=ray_fleet())``.

    Nodes that do not serve are left out, with a warning.

    Args:
        within_s: Time for their answers.
        cluster: See ``nodes_of_cluster``.

    Raises:
        DeviceUnavailable: Ray is missing or not connected, or no node serves.
    """
    nodes = nodes_of_cluster(within_s=within_s, cluster=cluster)
    for node in nodes:
        if not node.address:
            _logger.warning("%s is not used: %s", node.device, node.reason)
    serving = [node.address for node in nodes if node.address]
    if not serving:
        reasons = (
            "; ".join(f"{node.device}: {node.reason}" for node in nodes)
            or "none was started: see start_nodes"
        )
        raise aionn.DeviceUnavailable(f"ray_fleet: no node of the cluster serves ({reasons})")
    if len(serving) > NODES_MAX:
        _logger.warning("ray_fleet: %d nodes serve, the first %d are used", len(serving), NODES_MAX)
    return serving[:NODES_MAX]


def drain_node(device: str, *, within_s: float = DRAIN_S_MAX) -> None:
    """Ends a node in order, and frees its resource: it accepts nothing new, and accepted executions end. Applications move their
    streams before it (``FleetStreams.drain``).

    Args:
        device: NODE/DEVICE.
        within_s: Time for the drain; then the node is killed.

    Raises:
        DeviceUnavailable: Ray is missing or not connected, or there is no such node.
    """
    ray = loaded()
    try:
        actor = ray.get_actor(PREFIX + device, NAMESPACE)
    except ValueError:
        raise aionn.DeviceUnavailable(f"drain_node: the cluster has no node {device!r}") from None
    try:
        ray.get(actor.drain.remote(), timeout=within_s)
    except ray.exceptions.RayError as e:
        _logger.warning("%s did not end in order within %g s: %s", device, within_s, e)
    finally:
        ray.kill(actor, no_restart=True)  # Its keeper ends the process of the device.


def stop_nodes() -> None:
    """Ends all nodes of the cluster immediately.

    Raises:
        DeviceUnavailable: Ray is missing or not connected.
    """
    ray = loaded()
    for name in RayCluster(ray).names():
        if device_of(name) is None:
            continue
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError:
            continue  # It has ended since.
        ray.kill(actor, no_restart=True)  # Its keeper ends the process of the device.
