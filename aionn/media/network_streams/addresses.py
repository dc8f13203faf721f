"""The addresses that can be read, their protocols, and the form in which they are shown.

Owns the check of an address, FFmpeg's options for it, and the hiding of credentials. Refuses to own a connection.

Invariant: no message contains a user's name, a password or a query of an address: all of them are used as keys to cameras.

Source: FFmpeg's documentation of its protocols; the options are those that were measured to give fresh frames.
"""

from __future__ import annotations

import re
import urllib.parse

from aionn.errors import InvalidArgument
from aionn.media.arguments import checked_text

__all__ = ["SCHEMES", "checked_address", "masked", "options_of", "without_credentials"]

ADDRESS_MAX = 4096
"""Characters of an address; servers accept some 2,000 to 8,000."""

_WEB = "http,https,tcp,tls,crypto,httpproxy"
_RTSP = "rtsp,rtp,rtcp,udp,tcp,tls,srtp,http,https"

SCHEMES: dict[str, str] = {
    "rtsp": _RTSP,
    "rtsps": _RTSP,
    "http": _WEB,
    "https": _WEB,
    "rtmp": "rtmp,tcp",
    "rtmps": "rtmps,rtmp,tcp,tls",
    "tcp": "tcp",
    "udp": "udp",
}
"""``scheme: protocols that FFmpeg may use for it``. No file: a playlist from the network must not name one of this machine."""


def checked_address(url: str, where: str) -> str:
    """Returns an address if its scheme is known and it names a host.

    Raises:
        InvalidArgument: Otherwise; the message does not contain credentials.
    """
    checked_text(url, f"{where}: url")
    if not 0 < len(url) <= ADDRESS_MAX or any(c.isspace() or not c.isprintable() for c in url):
        raise InvalidArgument(
            f"{where}: url: expected up to {ADDRESS_MAX} characters without spaces, got {masked(url)[:80]!r}"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        # Its message may hold a part of a password, which a traceback would show as the cause.
        raise InvalidArgument(
            f"{where}: url: expected scheme://host:port/path, got {masked(url)!r}"
        ) from None
    if parts.scheme.lower() not in SCHEMES:
        raise InvalidArgument(
            f"{where}: url: expected one of {', '.join(SCHEMES)}, got {masked(url)!r}; files are read by video_file"
        )
    if not host and not (parts.scheme == "udp" and port):
        raise InvalidArgument(f"{where}: url: expected a host, got {masked(url)!r}")
    return url


SECRET_LONG = 8
"""Characters of a secret that no word of a message contains by chance."""

_SECRET_PART = re.compile(r"[?#;&=]")
"""Begins a part of a path that may be a key: a query, a fragment, or parameters, which some cameras take as their path."""


def masked(url: str) -> str:
    """An address as it may be shown: without credentials, parameters, query and fragment."""
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    # A password with a slash, a question mark or a number sign that is not encoded ends the authority too early.
    credentials, _, place = rest.rpartition("@")
    hidden = "***@" if re.search(r"[/?#]", credentials) else ""
    return f"{head}{separator}{hidden}{_SECRET_PART.split(place, maxsplit=1)[0]}"


def without_credentials(text: str, url: str) -> str:
    """A message of a library about an address, with the address and its secret parts replaced."""
    shown = masked(url)
    text = text.replace(url, shown)
    parts = urllib.parse.urlsplit(url)
    parameters = _SECRET_PART.split(parts.path, maxsplit=1)[1:]
    for secret in (parts.password, parts.username, parts.query, *parameters):
        if secret:
            for form in (secret, urllib.parse.unquote(secret)):
                text = re.sub(_pattern_of(form), "***", text)
    return text


def _pattern_of(secret: str) -> str:
    """Finds a secret; a short one only where it is a word, since parts of other words with *** instead would show it."""
    anywhere = re.escape(secret)
    return anywhere if len(secret) >= SECRET_LONG else f"(?<![0-9A-Za-z]){anywhere}(?![0-9A-Za-z])"


def options_of(url: str, transport: str, open_s_max: float, *, keeps_all: bool) -> dict[str, str]:
    """FFmpeg's options for an address.

    ``nobuffer`` delivers the packets that arrive, rather than first those that were read while the format was found out; it costs
    the first frame.

    Args:
        url: A checked address.
        transport: ``"tcp"`` or ``"udp"``, for RTSP.
        open_s_max: Limit of opening.
        keeps_all: Whether the caller wants every frame, rather than the newest.
    """
    scheme = url.partition("://")[0].lower()
    options = {"protocol_whitelist": SCHEMES[scheme]}
    if not keeps_all:
        options["fflags"] = "nobuffer"
    if scheme in ("rtsp", "rtsps"):
        options["rtsp_transport"] = transport
        options["allowed_media_types"] = "video+audio"
    if scheme in ("http", "https", "rtsp", "rtsps"):
        # The time-out of a socket's operations, in microseconds; the process is ended if that does not suffice.
        options["timeout"] = str(int(open_s_max * 1e6))
    return options
