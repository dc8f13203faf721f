"""Addresses of nodes: what is accepted, and what is said of the rest."""

from __future__ import annotations

import pytest

from aionn.errors import InvalidArgument
from aionn.fleet.addresses import NODES_MAX, parse_listen, parse_node, parse_nodes

PIN = "ab" * 32


def test_address_of_this_machine_needs_no_scheme() -> None:
    node = parse_node("127.0.0.1:7463")
    assert (node.host, node.port, node.is_tls) == ("127.0.0.1", 7463, False)
    assert parse_node("[::1]:1").host == "::1"
    assert parse_node("localhost:65535").port == 65535


def test_options_follow_the_address() -> None:
    node = parse_node(f"tls://edge2:7463?pin={PIN.upper()}&certificate=a%20b.pem&key=k.pem&silence_ms=500")
    assert (node.text, node.host, node.is_tls, node.pin) == ("tls://edge2:7463", "edge2", True, PIN)
    assert (node.certificate, node.key, node.silence_ms) == ("a b.pem", "k.pem", 500)


def test_pin_may_be_written_as_openssl_prints_it() -> None:
    printed = ":".join(["AB"] * 32)
    assert parse_node(f"tls://edge2:7463?pin={printed}").pin == PIN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("edge2:7463", "leads to another machine: write tls://"),
        ("10.0.0.1:7463", "leads to another machine"),
        ("http://edge2:80", "expected tls://HOST:PORT or tcp://HOST:PORT"),
        ("tls://edge2", "expected HOST:PORT"),
        ("tls://edge2:", "expected HOST:PORT"),
        ("tls://edge2:65536", "expected HOST:PORT"),
        ("tls://edge2:0", "a port of 1 to 65535"),
        ("tls://:7463", "expected a host"),
        ("tls://a b:1", "expected HOST:PORT"),
        ("::1:7463", "expected HOST:PORT"),
        ("tcp://edge2:1?pin=" + PIN, "pin goes with tls:// alone"),
        ("tls://edge2:1?pin=12", "expected a pin of 64 hexadecimal digits"),
        ("tls://edge2:1?pin=" + PIN + "&ca=x", "a pin or an authority, got both"),
        ("tls://edge2:1?key=x", "a key goes with a certificate"),
        ("tls://edge2:1?colour=red", "expected options NAME=VALUE"),
        ("tls://edge2:1?pin", "expected options NAME=VALUE"),
        ("tls://edge2:1?silence_ms=1", "expected silence_ms from 100 to 60000"),
        ("", "expected HOST:PORT"),
    ],
)
def test_other_texts_are_rejected_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match="fleet: ") as caught:
        parse_node(text)
    assert words in str(caught.value)


def test_list_is_of_different_addresses() -> None:
    assert parse_nodes(None, {"AIONN_FLEET": " 127.0.0.1:1  tcp://edge2:2 "})[1].host == "edge2"
    assert parse_nodes(None, {}) == ()
    with pytest.raises(InvalidArgument, match="AIONN_FLEET: expected different addresses"):
        parse_nodes(None, {"AIONN_FLEET": "127.0.0.1:1 tcp://127.0.0.1:1"})
    with pytest.raises(InvalidArgument, match="expected a list of addresses"):
        parse_nodes("127.0.0.1:1", {})
    with pytest.raises(InvalidArgument, match="expected an address such as"):
        parse_nodes([7], {})  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match=f"at most {NODES_MAX} nodes"):
        parse_nodes([f"127.0.0.1:{port}" for port in range(1, NODES_MAX + 2)], {})


def test_listening_may_take_any_port_and_all_addresses() -> None:
    assert parse_listen("127.0.0.1:0").port == 0
    assert parse_listen(":7463").host == ""
    with pytest.raises(InvalidArgument, match="--listen: expected HOST:PORT"):
        parse_listen("7463")
