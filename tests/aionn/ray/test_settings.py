"""Names, command lines and addresses of a cluster's nodes."""

from __future__ import annotations

import pytest

from aionn.errors import InvalidArgument
from aionn.fleet.addresses import parse_node
from aionn.ray.settings import (
    NodeSettings,
    NodeTls,
    actor_name,
    address_for_clients,
    check_settings,
    device_of,
    node_names,
    place_of,
    port_of,
    serve_arguments,
)

TLS = NodeTls("/etc/node.pem", "/etc/clients.pem", "/etc/node&s.crt", "/home/me/own key.pem")


def machine(number: str, host: str, *, alive: bool = True) -> dict[str, object]:
    return {"NodeID": number, "NodeManagerHostname": host, "Alive": alive}


def test_machines_are_called_by_their_hosts_and_two_of_one_host_are_told_apart() -> None:
    machines = [machine("aaaaaaaa1", "edge1"), machine("bbbbbbbb2", "edge2"), machine("cccccccc3", "edge2")]
    assert node_names(machines) == {
        "aaaaaaaa1": "edge1",
        "bbbbbbbb2": "edge2-bbbbbb",
        "cccccccc3": "edge2-cccccc",
    }
    machines[2]["Alive"] = False
    assert node_names(machines) == {"aaaaaaaa1": "edge1", "bbbbbbbb2": "edge2"}


def test_strangers_are_not_served_by_mistake() -> None:
    check_settings(NodeSettings("reference", "edge1", "127.0.0.1"))
    check_settings(NodeSettings("reference", "edge1", "10.0.0.1", TLS))
    check_settings(NodeSettings("reference", "edge1", "10.0.0.1", any_client=True))
    with pytest.raises(InvalidArgument, match=r"edge1: other machines reach 10\.0\.0\.1; give tls=NodeTls"):
        check_settings(NodeSettings("reference", "edge1", "10.0.0.1"))


def test_the_command_line_has_the_port_of_before() -> None:
    settings = NodeSettings("litert-cpu", "edge1", "10.0.0.1", TLS, arguments=("--models", "3"))
    assert serve_arguments(settings, 7463) == [
        *("litert-cpu", "--listen", "10.0.0.1:7463", "--node-name", "edge1"),
        *("--tls-certificate", "/etc/node.pem", "--tls-clients", "/etc/clients.pem", "--models", "3"),
    ]
    assert "[::1]:0" in serve_arguments(NodeSettings("reference", "edge1", "::1"), 0)
    assert "--any-client" in serve_arguments(
        NodeSettings("reference", "edge1", "10.0.0.1", any_client=True), 0
    )


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("serving reference at 127.0.0.1:34567; Ctrl-C ends it", "127.0.0.1:34567"),
        ("serving reference at tls://10.0.0.1:7463; Ctrl-C ends it", "10.0.0.1:7463"),
        ("serving reference at /run/device and [::1]:7463; Ctrl-C ends it", "[::1]:7463"),
        ("serving reference at 127.0.0.1:1 and 127.0.0.1:2 (gRPC); Ctrl-C ends it", "127.0.0.1:1"),
        ("serving reference at /run/device; Ctrl-C ends it", None),
        ("ending reference: accepted executions have 10 s", None),
        ("", None),
    ],
)
def test_the_place_is_read_from_the_line_of_the_command(line: str, place: str | None) -> None:
    assert place_of(line) == place
    if place is not None:
        assert port_of(place) > 0


@pytest.mark.parametrize(
    "settings",
    [
        NodeSettings("reference", "edge1", "127.0.0.1"),
        NodeSettings("reference", "edge1", "10.0.0.1", TLS),
        NodeSettings("reference", "edge1", "10.0.0.1", any_client=True),
    ],
)
def test_addresses_are_those_that_a_runtime_takes(settings: NodeSettings) -> None:
    found = parse_node(address_for_clients(settings, f"{settings.host}:7463"))
    assert (found.host, found.port, found.is_tls) == (settings.host, 7463, settings.tls is not None)
    if settings.tls is not None:
        assert (found.ca, found.certificate) == (TLS.ca, TLS.own)


def test_an_actor_of_another_kind_is_none_of_ours() -> None:
    assert device_of(actor_name("edge1", "litert-cpu")) == "edge1/litert-cpu"
    assert device_of("aionn/other") is device_of("trainer/0/1") is None
