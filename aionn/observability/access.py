"""The requests that a server of this machine answers: with the token, from its own page, for a name of this machine; pure.

Owns the three checks. A camera's picture is personal data, and any page that a browser has open can send requests to this machine:

1. The token, without which another user of the machine, or another page, learns nothing. It is compared in constant time.
2. The header ``Host``, against DNS rebinding: another site's name that resolves to this machine is rejected. An address cannot be
   rebound.
3. The header ``Origin``, against web sockets that another page opens: browsers send it, and no page can change it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

__all__ = ["Access", "Refusal", "is_loopback"]

TOKEN_LETTERS_MAX = 512
"""A longer text is not compared: it cannot be the token."""

QUERY_BYTES_MAX = 2048
"""A longer query is not parsed."""

QUERY_FIELDS_MAX = 16
"""Fields of a query that is parsed; the page sends one."""

Headers = Iterable[tuple[bytes, bytes]]


class Refusal(NamedTuple):
    """The reason why a request is rejected.

    Attributes:
        status: Of HTTP.
        text: For a person.
    """

    status: int
    text: str


def is_loopback(host: str) -> bool:
    """Whether a name or address reaches this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Checks requests.

    Args:
        token: The token that the query must have; None for an application that checks its users itself.
        hosts: Names of this machine, besides ``localhost``; None accepts all, for an application that checks them itself.
        is_remote: Whether other machines reach the server: then ``Host`` may be any address.
    """

    def __init__(
        self, *, token: str | None, hosts: Sequence[str] | None = (), is_remote: bool = False
    ) -> None:
        self._token = token
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._is_remote = is_remote

    def refusal(self, headers: Headers, query: bytes) -> Refusal | None:
        """The reason to reject a request; None if it is accepted.

        Args:
            headers: Names in lower case, as ASGI has them.
            query: The part of the address behind the question mark.
        """
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1").strip().lower())
        if len(found[b"host"]) != 1 or not self._is_own(_host_of(found[b"host"][0])):
            return Refusal(
                421, "This name is not one of this server's: use the address that the program printed."
            )
        if any(not self._is_same(origin, found[b"host"][0]) for origin in found[b"origin"]):
            return Refusal(403, "Another page sent this request.")
        if not self._has_token(query):
            return Refusal(
                401, "The token is missing or wrong: use the whole address that the program printed."
            )
        return None

    def _is_own(self, host: str | None) -> bool:
        if host is None:
            return False
        if self._hosts is None or host in self._hosts or is_loopback(host):
            return True
        if not self._is_remote:
            return False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def _is_same(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return False  # ``null``, which sandboxed pages and files have, is among them.
        # A proxy in front of a mounted page may change ``Host``, which its owner then declares.
        return parts.netloc == host or (self._hosts is not None and _host_of(parts.netloc) in self._hosts)

    def _has_token(self, query: bytes) -> bool:
        if self._token is None:
            return True
        if len(query) > QUERY_BYTES_MAX:
            return False
        try:
            given = parse_qs(query.decode("latin-1"), max_num_fields=QUERY_FIELDS_MAX).get("token", [""])
        except ValueError:
            return False
        is_one = len(given) == 1 and len(given[0]) <= TOKEN_LETTERS_MAX
        return is_one and hmac.compare_digest(given[0].encode(), self._token.encode())


def _host_of(netloc: str) -> str | None:
    """The name or address in ``name:port`` or ``[address]:port``; None if it is neither."""
    try:
        parts = urlsplit(f"//{netloc}")
        parts.port  # noqa: B018  # Raises for a port that is not one.
    except ValueError:
        return None
    return parts.hostname if parts.netloc == netloc and parts.username is None else None
