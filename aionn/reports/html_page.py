"""Pages: one frame and one style for every report that is an HTML file.

Owns the escaping, the style and the tables. ``plots`` has the drawings, ``colours`` the colours.

Invariants:
1. A page loads nothing from anywhere and runs no script but the one that ``document`` is given.
2. Every text is escaped unless it is ``Html``, and only ``element`` makes ``Html`` of other text.
3. A page needs no scrolling sideways, from 320 pixels on: a table of several columns becomes records on a narrow screen, and only a
   drawing in ``scrolled`` may be wider than its box.
4. Equal content gives equal pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from aionn.reports.colours import variables
from aionn.reports.columns import number_columns

__all__ = ["Html", "document", "element", "joined", "key", "marked", "scrolled", "swatch", "table", "words"]

SHAPES = frozenset({"rect", "line", "polyline", "path"})
"""Elements of SVG without content: they end with a slash, so that a drawing is XML as well."""

VOID = frozenset({"input", "link", "meta", "wbr"})
"""Elements of HTML without content."""

PLAIN_COLUMNS_MAX = 3
"""Tables of more columns become records on a narrow screen: three columns of names and numbers fit a phone."""

LETTERS_WHOLE_MAX = 36
"""Longest word that is never broken: it fits a phone, and all names of operations, statuses and operand types are shorter."""

_STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;max-width:84rem;
padding:1rem clamp(.75rem,2.5vw,2rem) 3rem;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:0}
p{max-width:60rem;margin:.5rem 0}
.soft,caption,figcaption{color:var(--soft)}.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.bad{font-weight:600}
table{border-collapse:collapse;margin:.75rem 0}caption{text-align:left;padding-bottom:.25rem}
th,td{padding:.25rem .75rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:break-word}
.long{overflow-wrap:anywhere}
tbody tr:nth-child(even){background:var(--row)}.n{text-align:right;font-variant-numeric:tabular-nums}td.n{white-space:nowrap}
.code,code{font-family:ui-monospace,monospace;font-size:.9em}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.key{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;padding:0;margin:.5rem 0;list-style:none}
figure{margin:.75rem 0}figcaption{font-size:.9em}.plots{display:grid;gap:1rem 2rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}.plots figure{margin:0}
.plot{padding:.5rem .75rem 0 2.75rem}.plot.wide{padding-left:.75rem}
svg{display:block;overflow:visible}.plot svg{width:100%}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .label{fill:var(--ink)}svg .box{fill:var(--paper)}svg line{stroke:var(--line)}svg path{stroke:var(--soft);fill:none}
svg polyline{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}
.scrolled{overflow-x:auto;max-width:100%}.beside{display:flex;flex-wrap:wrap;gap:1rem 2rem;align-items:flex-start}
.beside>table,.beside>div:not(.scrolled){flex:1 1 30rem;max-width:100%}
summary{cursor:pointer;font-weight:600;padding:.3rem 0}
@media (max-width:56rem){
table.records,.records tbody,.records caption{display:block;width:100%}.records thead{display:none}
.records tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.1rem .75rem;padding:.5rem;
border-bottom:1px solid var(--line)}
.records td{display:flex;flex-wrap:wrap;gap:0 .5rem;border:0;padding:0;text-align:left;grid-column:1/-1}
.records td.n{grid-column:auto;justify-content:space-between}.records td:empty{display:none}
.records td::before{content:attr(data-head);color:var(--soft);flex:none;min-width:5.5rem}.records td.n::before{min-width:0}
.records td.text{flex-wrap:nowrap}.records td>*{overflow-wrap:anywhere;min-width:0}
.records td:first-child{font-weight:600;grid-column:1/-1;justify-content:flex-start;align-items:center;gap:0}
.records td:first-child::before{content:none}
}
@media (min-width:64rem){code,.whole{white-space:nowrap}}
"""


class Html(str):
    """Text that is HTML already; any other value is escaped where it is put into an element."""

    __slots__ = ()


def joined(*parts: object) -> Html:
    """The parts one after the other; None and the empty text leave nothing."""
    return Html(
        "".join(
            part if isinstance(part, Html) else escape(str(part), quote=False)
            for part in parts
            if part is not None
        )
    )


def element(name: str, /, *content: object, **attributes: object) -> Html:
    """One element of HTML or SVG.

    Args:
        name: The element's.
        content: Texts, which are escaped, and elements; None leaves nothing.
        attributes: Names with ``_`` for ``-``, and ``class_`` for ``class``; None and False leave the attribute out, True gives it
            no value.
    """
    parts = [name]
    for key_, value in attributes.items():
        if value is not None and value is not False:
            named = key_.rstrip("_").replace("_", "-")
            parts.append(named if value is True else f'{named}="{escape(str(value))}"')
    start = " ".join(parts)
    if name in VOID:
        return Html(f"<{start}>")
    return Html(f"<{start}/>") if name in SHAPES else Html(f"<{start}>{joined(*content)}</{name}>")


def document(
    heading: str,
    *body: object,
    title: str | None = None,
    style: str = "",
    script: str = "",
    heading_id: str | None = None,
) -> str:
    """A whole page.

    Args:
        heading: The first line of the page.
        body: Elements, and texts, which are escaped.
        title: The name of the page's tab; None for the heading.
        style: Rules of this page alone, from a module of ours: they are not escaped.
        script: Of a page that changes, from a file of ours: it is not escaped either.
        heading_id: The heading's id, for a script.
    """
    # Style and script are the only texts that must not be escaped, and no text from elsewhere is among them.
    assert "</" not in style + script, "it would end its element"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Browsers ask the server for an icon otherwise.
        element("link", rel="icon", href="data:,") if script else None,
        element("title", heading if title is None else title),
        Html(f"<style>{variables()}{_STYLE}{style}</style>"),
    )
    top = element("h1", heading, id=heading_id)
    main = element("main", top, "\n", *(joined(part, "\n") for part in body))
    code = Html(f"<script>{script}</script>") if script else None
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main, code), lang='en')}\n"


def marked(value: object, kind: str) -> Html:
    """A text in the colour of ``good``, ``warn``, ``bad`` or ``soft``; the text must be clear without it."""
    return element("span", words(value), class_=kind)


def words(value: object) -> Html:
    """A text whose words stay whole in a column; one of more than ``LETTERS_WHOLE_MAX`` letters breaks behind a slash or a mark."""
    if isinstance(value, Html):
        return value
    parts = re.split(r"(\s+)", str(value))
    if len(parts) == 1 and len(parts[0]) <= LETTERS_WHOLE_MAX:
        # A name: a browser would break it at a hyphen.
        is_breakable = "-" in parts[0] or "/" in parts[0]
        return element("span", parts[0], class_="whole") if is_breakable else joined(parts[0])
    kept = [_broken(part) if len(part) > LETTERS_WHOLE_MAX else part for part in parts]
    # One element: the cells of a record are flex boxes, which would put each of several into a column.
    return joined(value) if kept == parts else element("span", *kept)


def _broken(word: str) -> Html:
    pieces = re.findall(r"[/.,;:=?]*[^/.,;:=?]+[/.,;:=?]*|[/.,;:=?]+", word)
    return joined(*(joined(_piece(piece), element("wbr")) for piece in pieces))


def _piece(text: str) -> Html:
    return element("span", text, class_="long") if len(text) > LETTERS_WHOLE_MAX else joined(text)


def key(entries: Sequence[tuple[str, str]]) -> Html:
    """The colours of a drawing and their meanings: pairs of a role and a text."""
    items = (element("li", swatch(role, text)) for role, text in entries)
    return element("ul", *items, class_="key")


def swatch(role: str, text: str) -> Html:
    """A text behind a small square in the colour of a role."""
    return joined(element("i", class_="swatch", style=f"background:var(--{role})"), words(text))


def scrolled(label: str, *content: object) -> Html:
    """A box that is scrolled sideways by itself, with the keyboard too, since its drawing may be wider than the screen."""
    return element("div", *content, class_="scrolled", tabindex=0, role="region", aria_label=label)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = "", text: Sequence[str] = ()
) -> Html:
    """A table; columns of numbers are aligned right. A row that is shorter than the heads has its last cell across the rest.

    Args:
        heads: The columns' names; empty for a table of names and values, which needs none.
        rows: The cells.
        caption: The subject of the table.
        text: Heads of columns of sentences, and of texts whose words may be broken anywhere.
    """
    count = len(heads) or max(map(len, rows), default=0)
    whole = [[_plain(cell) for cell in row] for row in rows if len(row) == count]
    is_number = number_columns(whole, count) if heads else [False] * count
    is_records = count > PLAIN_COLUMNS_MAX

    def line(row: Sequence[object]) -> Html:
        cells = []
        for index, cell in enumerate(row):
            rest = count - len(row) + 1 if index == len(row) - 1 and len(row) < count else None
            name = heads[index] if heads else ""
            if rest is not None or name in text or (not heads and index):
                kind: str | None = "text"
            else:
                kind = "n" if is_number[index] else None
            shown = name if is_records and index and rest is None else None
            cells.append(element("td", words(cell), class_=kind, colspan=rest, data_head=shown))
        return element("tr", *cells)

    top = (
        element("th", name, class_="n" if number else None, scope="col")
        for name, number in zip(heads, is_number)
    )
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *top)) if heads else None,
        element("tbody", *map(line, rows)),
        class_="records" if is_records else None,
    )


def _plain(cell: object) -> str:
    """The text of a cell; that of an element is not a number."""
    return "x" if isinstance(cell, Html) and cell else str(cell)
