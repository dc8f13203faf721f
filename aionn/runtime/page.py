"""A compilation as one self-contained HTML page: the graph as SVG, each device's operations in a colour of their own.

Owns the layout: operations in rows, one below those whose results they read. ``aionn.models.dot`` has the graph's labels.

Invariants:
1. The page loads nothing from anywhere, and every text in it is escaped.
2. Equal compilations give equal pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, operand_type_name
from aionn.runtime.placement.plan import Placement, Plan

__all__ = ["compilation_page"]

OPERATIONS_MAX = 5000
"""Most operations that are drawn: beyond that no browser scrolls smoothly, and the page is unreadable."""

_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 236, 38, 60, 26, 20

_BULGE_MIN, _BULGE_PER_ROW, _BULGE_MAX = 18, 6, 54
"""Distance between operations and a line that passes them."""

_LETTERS_MAX = 36
"""The text that a box is wide enough for."""

_COLOURS = ("#4477aa", "#cc6677", "#228833", "#997700", "#aa3377", "#117788", "#555555", "#884400")
"""Dark enough for white text, and distinguishable for colour-blind readers; devices beyond them repeat."""

_STYLE = """body{font:14px sans-serif;margin:1.5em}svg text{font:11px sans-serif;fill:#fff;pointer-events:none}
.sheet{display:flex;flex-wrap:wrap;gap:2em;align-items:flex-start}
.key span{display:inline-block;padding:.2em .6em;margin-right:.6em;color:#fff;border-radius:4px}
path{fill:none;stroke:#999}table{border-collapse:collapse;margin-top:1em;max-width:44em}
td,th{padding:.15em .7em;text-align:left;vertical-align:top}td:nth-child(4){white-space:nowrap}
tr:nth-child(even){background:#f4f4f4}"""


def compilation_page(plan: Plan, *, title: str = "compilation") -> str:
    """The page's text.

    Args:
        plan: What is drawn: its main subgraph, coloured by the devices that operations run on.
        title: The page's.

    Raises:
        InvalidArgument: The model is too large to be drawn.
    """
    model = plan.model
    count = len(model.main.operations)
    if count > OPERATIONS_MAX:
        raise InvalidArgument(f"page: expected at most {OPERATIONS_MAX} operations, got {count}")
    # An IF or WHILE that is interpreted has a colour too, beside those of the devices that its subgraphs go to.
    placed_on = dict.fromkeys(
        (*(device.name for device in plan.devices), *(p.device for p in plan.placement))
    )
    colours = {device: _COLOURS[index % len(_COLOURS)] for index, device in enumerate(placed_on)}
    numbers = {p.operation: p for p in plan.placement if not p.subgraph}
    key = "".join(
        f'<span style="background:{colour}">{escape(device)}: '
        f"{_counted(sum(p.device == device for p in plan.placement), 'operation')}</span>"
        for device, colour in colours.items()
    )
    rows = "".join(
        f"<tr><td>{p.subgraph or 'main'}</td><td>{p.operation}</td><td>{escape(p.type)}</td>"
        f"<td>{escape(p.device)}</td><td>{escape(p.reason)}</td></tr>"
        for p in plan.placement
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p>{_counted(count, "operation")} in {_counted(len(plan.steps), "step")}</p><p class="key">{key}</p>'
        f'<div class="sheet">{_drawing(model, numbers, colours)}'
        f"<table><tr><th>subgraph</th><th>operation</th><th>type</th><th>device</th>"
        f"<th>why there</th></tr>{rows}</table></div></body></html>\n"
    )


def _drawing(model: Model, placed: dict[int, Placement], colours: dict[str, str]) -> str:
    places = _places(model)
    width = 2 * _MARGIN + _BULGE_MAX + max(x + _BOX_WIDTH for x, _ in places)
    height = 2 * _MARGIN + max(y + _BOX_HEIGHT for _, y in places)
    shapes = [*_lines(model, places)]
    for index, (x, y) in enumerate(places):
        placement = placed[index]
        results = ", ".join(_described(model.main.operands[i]) for i in model.main.operations[index].outputs)
        told = escape(f"{index}: {placement.type} on {placement.device}, {placement.reason}; gives {results}")
        shapes.append(
            f'<g><title>{told}</title><rect x="{x + _MARGIN}" y="{y + _MARGIN}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="4" fill="{colours[placement.device]}"/>'
            f'<text x="{x + _MARGIN + 6}" y="{y + _MARGIN + 15}">{index}: {escape(_fitting(placement.type))}</text>'
            f'<text x="{x + _MARGIN + 6}" y="{y + _MARGIN + 30}">{escape(_fitting(results))}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{"".join(shapes)}</svg>'
    )


def _described(operand: Operand) -> str:
    shape = "x".join(str(extent) if extent else "?" for extent in operand.dimensions)
    return f"{shape or 'scalar'} {operand_type_name(operand.type).removeprefix('TENSOR_')}"


def _fitting(text: str) -> str:
    return text if len(text) <= _LETTERS_MAX else text[: _LETTERS_MAX - 1] + "…"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _places(model: Model) -> list[tuple[int, int]]:
    """Left upper corners of the operations: a row below everything that is read, the next free column of the row."""
    row_of: dict[int, int] = {}
    used: dict[int, int] = {}
    places = []
    for operation in model.main.operations:
        row = max((row_of[i] + 1 for i in operation.inputs if i in row_of), default=0)
        column = used.get(row, 0)
        used[row] = column + 1
        row_of.update(dict.fromkeys(operation.outputs, row))
        places.append((column * (_BOX_WIDTH + _GAP_X), row * (_BOX_HEIGHT + _GAP_Y)))
    return places


def _lines(model: Model, places: Sequence[tuple[int, int]]) -> list[str]:
    writer = {i: index for index, operation in enumerate(model.main.operations) for i in operation.outputs}
    lines = []
    for index, operation in enumerate(model.main.operations):
        for i in dict.fromkeys(operation.inputs):
            if i in writer:
                (x0, y0), (x1, y1) = places[writer[i]], places[index]
                rows = (y1 - y0) // (_BOX_HEIGHT + _GAP_Y)
                if x0 == x1 and rows > 1:
                    # Straight down it would be hidden behind what it passes.
                    x, bulge = x0 + _MARGIN + _BOX_WIDTH, min(_BULGE_MAX, _BULGE_MIN + _BULGE_PER_ROW * rows)
                    ay, by = (y + _MARGIN + _BOX_HEIGHT // 2 for y in (y0, y1))
                    lines.append(f'<path d="M{x} {ay}C{x + bulge} {ay} {x + bulge} {by} {x} {by}"/>')
                    continue
                ax, ay = x0 + _MARGIN + _BOX_WIDTH // 2, y0 + _MARGIN + _BOX_HEIGHT
                bx, by = x1 + _MARGIN + _BOX_WIDTH // 2, y1 + _MARGIN
                middle = (ay + by) // 2
                lines.append(f'<path d="M{ax} {ay}C{ax} {middle} {bx} {middle} {bx} {by}"/>')
    return lines
