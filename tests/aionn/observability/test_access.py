"""The three checks of a request: token, name of the server, page that sent it."""

from __future__ import annotations

import pytest

from aionn.observability.access import Access, is_loopback

TOKEN = "0123456789abcdef"
QUERY = f"token={TOKEN}".encode()


def status(access: Access, query: bytes = QUERY, **headers: str | list[str]) -> int:
    pairs = []
    for name, values in headers.items():
        for value in values if isinstance(values, list) else [values]:
            pairs.append((name.encode(), value.encode("latin-1")))
    refusal = access.refusal(pairs, query)
    return 200 if refusal is None else refusal.status


LOCAL = Access(token=TOKEN)
REMOTE = Access(token=TOKEN, is_remote=True)
NAMED = Access(token=TOKEN, hosts=("Cam.Example",))
MOUNTED = Access(token=None, hosts=None)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8470", "localhost", "LOCALHOST:9000", "[::1]:8470", "127.8.8.8", "127.0.0.1"]
)
def test_names_of_this_machine_are_accepted(host: str) -> None:
    assert status(LOCAL, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.168.1.5:8470",
        "user@localhost",
        "localhost:port",
        "localhost/x",
        "localhost?x",
        "localhost#x",
        "[::1",
        "[v1.x]",
        "0",
        "2130706433",
        "",
        " ",
        "\xff",
        "a" * 5000,
        "localhost:99999",
    ],
)
def test_names_of_others_are_rejected(host: str) -> None:
    assert status(LOCAL, host=host) == 421


def test_request_has_exactly_one_host() -> None:
    assert status(LOCAL) == 421
    assert status(LOCAL, host=["localhost", "localhost"]) == 421


def test_any_address_but_no_name_reaches_a_server_for_other_machines() -> None:
    assert status(REMOTE, host="192.168.1.5:8470") == status(REMOTE, host="[fe80::1]:8470") == 200
    assert status(REMOTE, host="evil.example") == 421
    assert status(NAMED, host="cam.example:443") == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:8471",
        "file://",
        "http://",
        "",
        "x",
        "http://[",
        "ws://localhost",
    ],
)
def test_other_pages_are_rejected(origin: str) -> None:
    assert status(LOCAL, host="localhost:8470", origin=origin) == 403


def test_own_page_is_accepted() -> None:
    assert status(LOCAL, host="localhost:8470", origin="http://localhost:8470") == 200
    assert status(LOCAL, host="localhost:8470", origin=["http://localhost:8470", "http://evil"]) == 403
    assert status(NAMED, host="localhost", origin="https://cam.example") == 200
    assert status(MOUNTED, b"", host="any.example", origin="https://any.example") == 200
    assert status(MOUNTED, b"", host="any.example", origin="https://evil.example") == 403


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"token=",
        b"token=0123456789abcdeF",
        b"token=0123456789abcde",
        b"token=" + b"0" * 10_000,
        b"token=%ff%00",
        b"token=\xff",
        b"token[]=x",
        QUERY + b"&" + QUERY,
        b"&".join([b"a=b"] * 100 + [QUERY]),
        b"Token=0123456789abcdef",
    ],
)
def test_wrong_token_is_rejected(query: bytes) -> None:
    assert status(LOCAL, query, host="localhost") == 401


def test_loopback_is_this_machine_alone() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "127.3.2.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example", "")))
