"""Nodes of a Ray cluster: Ray decides where they run and that they are there; frames go by the connections of ``aionn.fleet``.

An actor on each machine starts ``aionn serve DEVICE --listen`` as a process and watches it (``actor``, ``process``, ``restarts``),
has a custom resource of Ray for it, and a name by which applications find it (``cluster``). ``ray_fleet`` gives the addresses for
``aionn.open(fleet=...)``: from then on the application notices by itself, and within a quarter of a second, when a node is lost,
which Ray notices after a minute.

``import aionn`` imports neither this package nor Ray; Ray is imported when a function is called.
"""

from __future__ import annotations

from aionn.ray.cluster import NodeFound, drain_node, nodes_of_cluster, ray_fleet, start_nodes, stop_nodes
from aionn.ray.settings import NodeTls

__all__ = [
    "NodeFound",
    "NodeTls",
    "drain_node",
    "nodes_of_cluster",
    "ray_fleet",
    "start_nodes",
    "stop_nodes",
]
