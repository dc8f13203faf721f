"""Addresses of nodes, as users write them.

Owns their form: ``HOST:PORT`` on this machine, ``tls://HOST:PORT`` on others, and ``tcp://HOST:PORT`` for a network that is
trusted. Options follow behind a question mark: ``tls://edge2:7463?pin=SHA256&certificate=me.pem&key=me.key``. No I/O.

Invariant: bytes go to another machine without TLS only where the address begins with ``tcp://``.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence

import msgspec

from aionn.errors import InvalidArgument
from aionn.observability.access import is_loopback
from aionn.validation import is_iterable

__all__ = ["ListenAddress", "NodeAddress", "parse_listen", "parse_node", "parse_nodes"]

NODES_MAX = 64
"""Most nodes of one runtime. Each costs a connection and its heartbeats; more machines need placement, which a list lacks."""

SILENCE_MS_MIN, SILENCE_MS_MAX = 100, 60_000
"""Range of ``silence_ms``: two heartbeats, and a minute."""

SILENCE_MS = 200

_PIN = re.compile(r"[0-9a-f]{64}")
_OPTIONS = ("pin", "ca", "certificate", "key", "silence_ms")


class NodeAddress(msgspec.Struct, frozen=True):
    """The address of a node.

    Attributes:
        text: As the user wrote it, without options.
        host: A name or a number.
        port: 1 to 65535.
        is_tls: Whether the connection is encrypted.
        pin: SHA-256 of the node's certificate, in hexadecimal; empty to check it against authorities.
        ca: File of the authorities; empty for the system's.
        certificate: File of the client's own certificate; empty for none.
        key: File of its key; empty if it is in the same file.
        silence_ms: A node is lost when nothing came from it for so long while work was out.
    """

    text: str
    host: str
    port: int
    is_tls: bool = False
    pin: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    silence_ms: int = SILENCE_MS


class ListenAddress(msgspec.Struct, frozen=True):
    """Where a node listens.

    Attributes:
        host: A name or a number; empty for all of the machine's.
        port: 0 for any free one.
    """

    host: str
    port: int


def parse_nodes(fleet: Sequence[str] | None, variables: Mapping[str, str]) -> tuple[NodeAddress, ...]:
    """The nodes of a runtime.

    Args:
        fleet: Their addresses; None takes ``AIONN_FLEET``, with blanks between them.
        variables: The environment.

    Raises:
        InvalidArgument: It is not a list of different addresses.
    """
    where = "fleet"
    if fleet is None:
        where, fleet = "AIONN_FLEET", variables.get("AIONN_FLEET", "").split()
    if isinstance(fleet, str) or not is_iterable(fleet):
        raise InvalidArgument(f"fleet: expected a list of addresses, got {fleet!r}")
    nodes = tuple(parse_node(text, where) for text in fleet)
    if len({(node.host, node.port) for node in nodes}) != len(nodes):
        raise InvalidArgument(f"{where}: expected different addresses, got {[node.text for node in nodes]}")
    if len(nodes) > NODES_MAX:
        raise InvalidArgument(f"{where}: expected at most {NODES_MAX} nodes, got {len(nodes)}")
    return nodes


def parse_node(text: str, where: str = "fleet") -> NodeAddress:
    """An address as users write it.

    Raises:
        InvalidArgument: It is not one, or it leads to another machine and has neither ``tls://`` nor ``tcp://``.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}: expected an address such as 127.0.0.1:7463, got {text!r}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if scheme not in ("", "tls", "tcp"):
        raise InvalidArgument(f"{where}: expected tls://HOST:PORT or tcp://HOST:PORT, got {text!r}")
    place, _, query = rest.partition("?")
    host, port = _host_and_port(place, text, where)
    if not host or port == 0:
        raise InvalidArgument(f"{where}: expected a host and a port of 1 to 65535, got {text!r}")
    if not scheme and not is_loopback(host):
        raise InvalidArgument(
            f"{where}: {text!r} leads to another machine: write tls:// before it, or tcp:// where the network is trusted"
        )
    options = _options(query, text, where)
    is_tls = scheme == "tls"
    if not is_tls and (named := [name for name in options if name != "silence_ms"]):
        raise InvalidArgument(f"{where}: {text!r}: {named[0]} goes with tls:// alone")
    if "key" in options and "certificate" not in options:
        raise InvalidArgument(f"{where}: {text!r}: a key goes with a certificate")
    if "pin" in options and "ca" in options:
        raise InvalidArgument(f"{where}: {text!r}: expected a pin or an authority, got both")
    silence_ms = _silence_ms(options.pop("silence_ms", str(SILENCE_MS)), text, where)
    if "pin" in options:
        options["pin"] = options["pin"].replace(":", "").lower()
        if not _PIN.fullmatch(options["pin"]):
            raise InvalidArgument(
                f"{where}: {text!r}: expected a pin of 64 hexadecimal digits, the SHA-256 of the certificate"
            )
    return NodeAddress(text.partition("?")[0], host, port, is_tls, silence_ms=silence_ms, **options)


def parse_listen(text: str, where: str = "--listen") -> ListenAddress:
    """Where a node is to listen: ``HOST:PORT``, or ``:PORT`` for all addresses of the machine.

    Raises:
        InvalidArgument: The text has another form.
    """
    return ListenAddress(*_host_and_port(text, text, where))


def _host_and_port(place: str, text: str, where: str) -> tuple[str, int]:
    host, separator, digits = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""  # An IPv6 address without brackets: its last part is not a port.
    if not separator or not (digits.isascii() and digits.isdecimal()) or int(digits) > 65535:
        raise InvalidArgument(f"{where}: expected HOST:PORT, got {text!r}")
    if any(character.isspace() or character in "/@" for character in host):
        raise InvalidArgument(f"{where}: expected HOST:PORT, got {text!r}")
    return host, int(digits)


def _options(query: str, text: str, where: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, separator, value = pair.partition("=")
        if not separator or name not in _OPTIONS or name in options or not value:
            raise InvalidArgument(
                f"{where}: {text!r}: expected options NAME=VALUE of {', '.join(_OPTIONS)}, each once, got {pair!r}"
            )
        options[name] = urllib.parse.unquote(value)
        if name in ("ca", "certificate", "key"):
            options[name] = os.path.expanduser(options[name])
    return options


def _silence_ms(value: str, text: str, where: str) -> int:
    if not value.isdecimal() or not SILENCE_MS_MIN <= int(value) <= SILENCE_MS_MAX:
        raise InvalidArgument(
            f"{where}: {text!r}: expected silence_ms from {SILENCE_MS_MIN} to {SILENCE_MS_MAX}, got {value}"
        )
    return int(value)
