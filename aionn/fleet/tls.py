"""Encryption and identity of connections between machines.

Owns the two contexts. A node shows a certificate, which the client checks against its pin (the SHA-256 of the certificate) or
against authorities and the node's host name. A client shows a certificate where the node demands one: those in a file of the node,
or signed by one of them, are served.

Invariant: a client sends nothing before it has checked the node's certificate, and a node reads nothing before it has checked the
client's.

Source: ``ssl`` of the standard library; TLS 1.3 (RFC 8446).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Callable

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.fleet.addresses import NodeAddress

__all__ = ["check_pin", "client_context", "client_name", "name_of_address", "node_context"]

NAME_CHARACTERS_MAX = 64
"""Longest common name. Source: RFC 5280, ub-common-name."""


def client_context(address: NodeAddress) -> ssl.SSLContext | None:
    """The settings of a client's connections to a node; None where the connection is not encrypted. Reads files.

    Raises:
        InvalidArgument: A file cannot be read or does not hold what it should.
    """
    if not address.is_tls:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if address.pin:
        # The pin names the one certificate that is accepted, so that no authority and no name is needed: see ``check_pin``.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    place = f"node {address.text}"
    if address.ca:
        _load(place, context.load_verify_locations, address.ca)
    elif not address.pin:
        context.load_default_certs()
    if address.certificate:
        _load(place, context.load_cert_chain, address.certificate, address.key)
    return context


def node_context(certificate: str, key: str, clients: str) -> ssl.SSLContext:
    """The settings of a node's connections. Reads files.

    Args:
        certificate: File of its certificate.
        key: File of its key; empty if it is in the same file.
        clients: File of the clients' certificates, or of authorities that sign them; empty if clients need none.

    Raises:
        InvalidArgument: A file cannot be read or does not hold what it should.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load("node", context.load_cert_chain, certificate, key)
    if clients:
        _load("node", context.load_verify_locations, clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(place: str, load: Callable[..., None], *files: str) -> None:
    """Has a context read files; an error names them, which those of ``ssl`` do not."""
    named = [file for file in files if file]
    try:
        load(*named)
    except (OSError, ssl.SSLError) as e:
        reason = e.reason if isinstance(e, ssl.SSLError) else e.strerror
        # Of a file without a key, or without anything, the library names neither.
        reason = reason or "expected PEM: certificates, and of an own one its private key"
        raise InvalidArgument(
            f"{place}: a certificate or key cannot be used ({' with '.join(named)}): {reason}"
        ) from e


def check_pin(address: NodeAddress, transport: asyncio.BaseTransport) -> None:
    """Compares the certificate of a node with its pin, if it has one.

    Raises:
        DeviceUnavailable: It is another certificate.
    """
    if not address.pin:
        return
    tls = transport.get_extra_info("ssl_object")
    shown = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(shown, address.pin):
        raise DeviceUnavailable(
            f"node {address.text}: expected the certificate {address.pin}, got {shown}: it is another node, or its certificate "
            "was renewed"
        )


def client_name(transport: asyncio.BaseTransport) -> str:
    """The name under which all connections of a client count together (``aionn.fleet.node.quotas``).

    That of its certificate (the common name), as the operator's file or authority has it, so that a renewed certificate is the same
    client; of a certificate without one its digest. Without a certificate, its address (``name_of_address``).
    """
    tls = transport.get_extra_info("ssl_object")
    shown = None if tls is None else tls.getpeercert(binary_form=True)
    if shown:
        # Only of a certificate that was checked does ``getpeercert`` give the fields.
        names = [
            value
            for group in tls.getpeercert().get("subject", ())
            for key, value in group
            if key == "commonName"
        ]
        if len(names) == 1 and 0 < len(names[0]) <= NAME_CHARACTERS_MAX and names[0].isprintable():
            return str(names[0])
        return f"certificate {hashlib.sha256(shown).hexdigest()[:16]}"
    peer = transport.get_extra_info("peername")
    return name_of_address(str(peer[0])) if isinstance(peer, tuple) and peer else "unknown"


def name_of_address(text: str) -> str:
    """The machine that an address stands for: a machine has the whole loopback network, and 64 bits of IPv6 addresses."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return name_of_address(str(address.ipv4_mapped))
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return "localhost" if address.is_loopback else str(address)
