"""The settings of a cluster's nodes, and the words that follow from them: names, command lines, addresses. Pure.

Invariant: a node listens on an address that other machines reach only with certificates of its clients, or where ``any_client``
allows all of them.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import aionn

__all__ = [
    "NodeSettings",
    "NodeTls",
    "actor_name",
    "address_for_clients",
    "device_of",
    "node_names",
    "serve_arguments",
]

PREFIX: Final = "aionn/"
"""Begins the names of actors: ``aionn/NODE/DEVICE``."""

SUFFIX_CHARACTERS: Final = 6
"""Of Ray's number of a machine, where two have one host name: of sixteen million."""


class NodeTls(NamedTuple):
    """The files of encryption, as they are called on the machines.

    Attributes:
        certificate: Of a node, with its key.
        clients: Of the certificates of clients, or their authorities; on a node.
        ca: Of the authorities of the nodes; at a client.
        own: The client's own certificate, with its key; at a client.
    """

    certificate: str
    clients: str
    ca: str
    own: str


class NodeSettings(NamedTuple):
    """The settings of one node.

    Attributes:
        device: Registered name of a driver, or MODULE:CLASS.
        node: The node's name.
        host: The address of the machine that it listens on.
        tls: Its encryption; None without.
        any_client: Whether clients need no certificate.
        arguments: Further ones of ``aionn serve``.
    """

    device: str
    node: str
    host: str
    tls: NodeTls | None = None
    any_client: bool = False
    arguments: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_settings(settings: NodeSettings) -> None:
    """Checks that strangers are not served by mistake.

    Raises:
        InvalidArgument: The address is reached by other machines, and clients need no certificate.
    """
    if settings.tls is None and not settings.any_client and not is_loopback(settings.host):
        raise aionn.InvalidArgument(
            f"start_nodes, {settings.node}: other machines reach {settings.host}; give tls=NodeTls(...), so that clients prove who"
            " they are, or any_client=True where the whole network is trusted"
        )


def serve_arguments(settings: NodeSettings, port: int) -> list[str]:
    """The arguments of ``aionn serve``, with the port that the node had before; 0 takes a free one."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    found = [settings.device, "--listen", f"{host}:{port}", "--node-name", settings.node]
    if settings.tls is not None:
        found += ["--tls-certificate", settings.tls.certificate, "--tls-clients", settings.tls.clients]
    elif settings.any_client:
        found.append("--any-client")
    return [*found, *settings.arguments]


def place_of(line: str) -> str | None:
    """HOST:PORT from the line by which ``aionn serve`` reports that it serves; None for any other line."""
    if not line.startswith("serving ") or " at " not in line:
        return None
    places = line.rstrip().split(" at ", 1)[1].split(";")[0].split(" and ")
    found = next((place for place in places if place.rpartition(":")[2].isdecimal()), None)
    return None if found is None else found.removeprefix("tls://")


def port_of(place: str) -> int:
    """The port of HOST:PORT."""
    return int(place.rpartition(":")[2])


def address_for_clients(settings: NodeSettings, place: str) -> str:
    """The address that an application gives to ``aionn.open(fleet=...)``."""
    if settings.tls is not None:
        ca, own = urllib.parse.quote(settings.tls.ca), urllib.parse.quote(settings.tls.own)
        return f"tls://{place}?ca={ca}&certificate={own}"
    return place if is_loopback(settings.host) else f"tcp://{place}"


def actor_name(node: str, device: str) -> str:
    """The name of an actor."""
    return f"{PREFIX}{node}/{device}"


def device_of(name: str) -> str | None:
    """NODE/DEVICE from the name of an actor; None for an actor of another kind."""
    if not name.startswith(PREFIX) or name.count("/") < 2:
        return None
    return name.removeprefix(PREFIX)


def node_names(machines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A name for each machine that is alive, by Ray's number of it: its host name, with a part of the number where two have one.

    Args:
        machines: As ``ray.nodes()`` gives them.
    """
    alive = [machine for machine in machines if machine["Alive"]]
    hosts = Counter(machine["NodeManagerHostname"] for machine in alive)
    found = {}
    for machine in alive:
        host, number = machine["NodeManagerHostname"], machine["NodeID"]
        found[number] = host if hosts[host] == 1 else f"{host}-{number[:SUFFIX_CHARACTERS]}"
    return found
