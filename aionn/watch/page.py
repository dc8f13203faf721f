"""The watch page: its text, and the policy under which a browser runs it.

Owns the elements that ``page.js`` fills. ``aionn.reports.html_page`` has the frame and the style.

Invariant: the page fetches nothing but the web socket of its own server; the policy makes browsers enforce that.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from aionn.reports.html_page import Html, document, element, key

__all__ = ["POLICY", "page_text"]

_STYLE = """
.controls{display:flex;flex-wrap:wrap;gap:.5rem 1.25rem;align-items:center;margin:.5rem 0}
button,select{font:inherit;color:var(--ink);background:var(--row);border:1px solid var(--soft);border-radius:4px;
padding:.25rem .9rem}
button[aria-pressed=true]{background:var(--ink);color:var(--paper)}
:focus-visible{outline:3px solid var(--device-0);outline-offset:2px}
#view{flex:1 1 20rem;max-width:40rem}
#view canvas{display:block;width:100%;max-width:40rem;max-height:70vh;background:var(--row);border:1px solid var(--line)}
#caption{font-variant-numeric:tabular-nums;min-height:3em}
.deadline{stroke:var(--bad)!important;stroke-dasharray:6 4;stroke-width:1.5}
[hidden]{display:none!important}
"""

_SCRIPT = resources.files("aionn.watch").joinpath("page.js").read_text(encoding="utf-8")

_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

POLICY = (
    f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: this script alone runs, and it reaches this server alone."""


@functools.cache
def page_text() -> str:
    """The page, the same for everyone: figures and pictures come by the web socket."""
    controls = element(
        "div",
        element("button", "Pause", id="pause", type="button", aria_pressed="false"),
        element(
            "label", element("input", id="drawn", type="checkbox", checked=True), " results in the picture"
        ),
        element("label", "picture of ", element("select", id="choice"), id="choosing", hidden=True),
        class_="controls",
    )
    picture = element(
        "figure",
        element("canvas", id="picture", role="img", aria_label="Newest frame", hidden=True),
        element("figcaption", "No picture yet.", id="caption"),
        id="view",
        hidden=True,
    )
    legend = key(
        [
            ("device-0", "median latency"),
            ("late", "99th percentile, late results"),
            ("bad", "deadline (dashed), dropped"),
            ("on-time", "on time"),
        ]
    )
    return document(
        "aionn",
        element("p", "Connecting.", id="state", role="status"),
        controls,
        element("div", picture, _table("streams", "Streams, latency of the last seconds"), class_="beside"),
        element("h2", "The last minute"),
        legend,
        element("div", id="plots", class_="plots"),
        _part("losses", "Items lost or late, by place"),
        _part("stages", "Time by stage, in ms"),
        _part("sources", "Sources"),
        _part("devices", "Devices"),
        element("noscript", element("p", "This page needs JavaScript.")),
        style=_STYLE,
        script=_SCRIPT,
        heading_id="title",
    )


def _table(name: str, caption: str = "") -> Html:
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr")),
        element("tbody"),
        id=name,
        class_="records",
        hidden=True,
        aria_labelledby=None if caption else f"{name}-heading",
    )


def _part(name: str, heading: str) -> Html:
    top = element("h2", heading, id=f"{name}-heading")
    return element("section", top, _table(name), id=f"{name}-part", hidden=True)
