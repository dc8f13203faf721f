"""The connection of a gRPC client is found by the name that gRPC gives the client."""

from __future__ import annotations

import socket

import pytest

from aionn.oip.unread import address_of, shut_down


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4000", ("127.0.0.1", 4000)),
        ("ipv6:%5B::1%5D:4000", ("::1", 4000)),
        ("ipv6:[::ffff:10.0.0.1]:4000", ("10.0.0.1", 4000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4000", ("fe80::1%eth0", 4000)),
        ("unix:", None),
        ("unix:/run/socket:1", None),
        ("ipv4:127.0.0.1", None),
        ("ipv4:127.0.0.1:x", None),
        ("", None),
    ],
)
def test_address_of_a_client(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
def test_only_the_connection_of_that_client_is_shut_down(family: int, host: str, peer: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        with socket.socket(family) as first, socket.socket(family) as second:
            for one in (first, second):
                one.settimeout(10)
                one.connect(listener.getsockname())
            with listener.accept()[0] as server_of_first, listener.accept()[0] as server_of_second:
                assert shut_down(peer.format(first.getsockname()[1])) == 1
                assert first.recv(1) == b""
                server_of_second.sendall(b"x")
                assert second.recv(1) == b"x"
                server_of_first.close()
                assert shut_down(peer.format(first.getsockname()[1])) == 0
