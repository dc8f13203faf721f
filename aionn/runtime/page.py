"""A compilation as one self-contained HTML page: the graph as SVG, each device's operations in a colour of their own.

Owns the layout: operations in rows, one below those whose results they read. ``aionn.models.dot`` has the graph's labels,
``aionn.reports`` the frame, the style and the colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, operand_type_name
from aionn.reports.colours import device_roles
from aionn.reports.columns import counted
from aionn.reports.html_page import Html, document, element, key, scrolled, table
from aionn.runtime.placement.plan import Placement, Plan

__all__ = ["compilation_page"]

OPERATIONS_MAX = 5000
"""Most operations that are drawn: beyond that no browser scrolls smoothly, and the page is unreadable."""

_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 236, 38, 60, 26, 20

_BULGE_MIN, _BULGE_PER_ROW, _BULGE_MAX = 18, 6, 54
"""Distance between operations and a line that passes them."""

_LETTERS_MAX = 36
"""The text that a box is wide enough for."""


def compilation_page(plan: Plan, *, title: str = "compilation") -> str:
    """The page's text.

    Args:
        plan: The plan to draw: its main subgraph, coloured by the devices that operations run on.
        title: The page's.

    Raises:
        InvalidArgument: The model is too large to be drawn.
    """
    model = plan.model
    count = len(model.main.operations)
    if count > OPERATIONS_MAX:
        raise InvalidArgument(f"page: expected at most {OPERATIONS_MAX} operations, got {count}")
    # An IF or WHILE that is interpreted has a colour too, beside those of the devices that its subgraphs go to.
    roles = device_roles((*(device.name for device in plan.devices), *(p.device for p in plan.placement)))
    numbers = {p.operation: p for p in plan.placement if not p.subgraph}
    entries = [
        (role, f"{device}: {counted(sum(p.device == device for p in plan.placement), 'operation')}")
        for device, role in roles.items()
    ]
    rows = [(f"{p.subgraph or 'main'}.{p.operation}", p.type, p.device, p.reason) for p in plan.placement]
    heads = ("operation", "type", "device", "why there")
    return document(
        title,
        element("p", f"{counted(count, 'operation')} in {counted(len(plan.steps), 'step')}"),
        key(entries),
        element(
            "div",
            scrolled("graph of the operations", _drawing(model, numbers, roles)),
            table(heads, rows, text=("why there",)),
            class_="beside",
        ),
    )


def _drawing(model: Model, placed: dict[int, Placement], roles: dict[str, str]) -> Html:
    places = _places(model)
    width = 2 * _MARGIN + _BULGE_MAX + max(x + _BOX_WIDTH for x, _ in places)
    height = 2 * _MARGIN + max(y + _BOX_HEIGHT for _, y in places)
    shapes = _lines(model, places)
    for index, (x, y) in enumerate(places):
        placement = placed[index]
        results = ", ".join(_described(model.main.operands[i]) for i in model.main.operations[index].outputs)
        title = f"{index}: {placement.type} on {placement.device}, {placement.reason}; gives {results}"
        left, upper = x + _MARGIN, y + _MARGIN
        fill = f"var(--{roles[placement.device]})"
        shapes.append(
            element(
                "g",
                element("title", title),
                element("rect", x=left, y=upper, width=_BOX_WIDTH, height=_BOX_HEIGHT, rx=4, fill=fill),
                element(
                    "text", f"{index}: {_fitting(placement.type)}", x=left + 6, y=upper + 15, class_="box"
                ),
                element("text", _fitting(results), x=left + 6, y=upper + 30, class_="box"),
            )
        )
    title = f"{counted(len(places), 'operation')}, each below those whose results it reads"
    return element(
        "svg", element("title", title), *shapes, role="img", aria_label=title, width=width, height=height
    )


def _described(operand: Operand) -> str:
    shape = "x".join(str(extent) if extent else "?" for extent in operand.dimensions)
    return f"{shape or 'scalar'} {operand_type_name(operand.type).removeprefix('TENSOR_')}"


def _fitting(text: str) -> str:
    return text if len(text) <= _LETTERS_MAX else text[: _LETTERS_MAX - 1] + "…"


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


def _lines(model: Model, places: Sequence[tuple[int, int]]) -> list[Html]:
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
                    lines.append(element("path", d=f"M{x} {ay}C{x + bulge} {ay} {x + bulge} {by} {x} {by}"))
                    continue
                ax, ay = x0 + _MARGIN + _BOX_WIDTH // 2, y0 + _MARGIN + _BOX_HEIGHT
                bx, by = x1 + _MARGIN + _BOX_WIDTH // 2, y1 + _MARGIN
                middle = (ay + by) // 2
                lines.append(element("path", d=f"M{ax} {ay}C{ax} {middle} {bx} {middle} {bx} {by}"))
    return lines
