"""The structure of the packages: the tree of folders with their sizes, and a picture of the imports between the units.

    python -m tests.structure                     # the tree, the layers, and each unit's imports
    python -m tests.structure --svg FILE          # the picture as well

A unit stands one layer above the highest unit that it imports. So every arrow leads down, unless the units of a circle import each
other: those are named, and the exit code is 1. It is 1 as well if a folder holds more files than ``test_tidy_rooms`` permits.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path, PurePosixPath

from tests.test_tidy import PACKAGES, imports_of, module_name, parse, read, unit_of
from tests.test_tidy_rooms import FILES_PER_FOLDER_MAX, full_folders, knotted_modules

BOX_WIDTH, BOX_HEIGHT, GAP, LAYER_HEIGHT = 150, 34, 14, 84
"""Pixels of the picture."""

LINES_MIN = 10
"""A smaller unit is not shown."""

STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; }
rect { fill: #eef3f8; stroke: #45607a; }
text { fill: #16212b; text-anchor: middle; }
path { fill: none; stroke: #7b93a8; }
path.back { stroke: #c01818; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  svg { background: #14191e; }
  rect { fill: #22303c; stroke: #7f9bb5; }
  text { fill: #e6edf3; }
  path { stroke: #58718a; }
  path.back { stroke: #ff7b72; }
}
"""


def unit_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By unit (a package, or a module of ``aionn``), the other units that it imports; imports for types count."""
    modules = {module_name(path) for path in sources}
    found: dict[str, set[str]] = {}
    for path, text in sources.items():
        unit = unit_of(module_name(path))
        targets = {target for _, target in imports_of(path, parse(text), modules) if target in modules}
        found.setdefault(unit, set()).update(unit_of(target) for target in targets)
    return {unit: targets - {unit} for unit, targets in found.items()}


def layers_of(imports: Mapping[str, set[str]]) -> tuple[list[list[str]], set[str]]:
    """The units by layer, the lowest first, and the units that are in a circle or import one that is."""
    layers: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(imports):
        layer = sorted(unit for unit in imports.keys() - placed if imports[unit] <= placed)
        if not layer:
            return layers, set(imports) - placed
        layers.append(layer)
        placed.update(layer)
    return layers, set()


def reduced(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports without those that follow from others: a picture of all of them is a net in which nothing can be seen."""

    def reach(unit: str, seen: set[str]) -> set[str]:
        for target in imports[unit] - seen:
            seen.add(target)
            reach(target, seen)
        return seen

    through = {unit: reach(unit, set()) for unit in imports}
    return {
        unit: {one for one in targets if not any(one in through[other] for other in targets - {one})}
        for unit, targets in imports.items()
    }


def tree(sources: Mapping[str, str]) -> list[str]:
    """A line for each folder: its name by depth, the files in it, and their lines."""
    folders: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path, text in sources.items():
        folder = str(PurePosixPath(path).parent)
        folders[folder] += 1
        lines[folder] += text.count("\n")
    names = {folder: "  " * folder.count("/") + folder.rpartition("/")[2] for folder in folders}
    width = max(map(len, names.values()))
    return [
        f"{names[folder]:{width}} {folders[folder]:3} files {lines[folder]:6} lines"
        for folder in sorted(folders)
    ]


def svg(imports: Mapping[str, set[str]], sizes: Mapping[str, int]) -> str:
    """The picture: a row for each layer, an arrow for each import that does not follow from others."""
    layers, rest = layers_of(imports)
    rows = [*layers, sorted(rest)] if rest else layers
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) + GAP
    height = len(rows) * LAYER_HEIGHT + GAP
    place: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(reversed(rows)):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        for index, unit in enumerate(row):
            place[unit] = (left + index * (BOX_WIDTH + GAP), GAP + number * LAYER_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>Imports between the units; every arrow leads down</title><style>{STYLE}</style>",
    ]
    for unit, targets in sorted(reduced(imports).items()):
        for target in sorted(targets):
            (x, y), (to_x, to_y) = place[unit], place[target]
            x, to_x = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2
            y += BOX_HEIGHT
            middle = (y + to_y) / 2
            kind = "" if y < to_y else ' class="back"'
            parts.append(f'<path{kind} d="M{x} {y} C{x} {middle} {to_x} {middle} {to_x} {to_y}"/>')
    for unit, (x, y) in place.items():
        name = escape(unit.removeprefix("aionn."))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
            f'<text x="{x + BOX_WIDTH / 2}" y="{y + 15}">{name}</text>'
            f'<text x="{x + BOX_WIDTH / 2}" y="{y + 28}">{sizes[unit]:,} lines</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--svg", type=Path, help="where the picture is written")
    arguments = parser.parse_args()

    sources = read(PACKAGES, (".py",))
    imports = unit_imports(sources)
    sizes: Counter[str] = Counter()
    for path, text in sources.items():
        sizes[unit_of(module_name(path))] += text.count("\n")

    # An empty package, or a module that only calls another one, is no information in a picture.
    shown = {unit for unit in imports if sizes[unit] >= LINES_MIN}
    imports = {unit: imports[unit] & shown for unit in shown}

    print("\n".join(tree(sources)))
    layers, rest = layers_of(imports)
    print("\nlayers, the highest first; a unit imports only units of lower layers")
    for number in range(len(layers), 0, -1):
        print(f"{number:2}  " + "  ".join(unit.removeprefix("aionn.") for unit in layers[number - 1]))
    print("\nimports")
    for unit, targets in sorted(imports.items()):
        print(f"{unit}: " + (", ".join(sorted(targets)) or "none"))

    knots, full = knotted_modules(sources), full_folders(list(sources))
    print(f"\nunits in a circle: {', '.join(sorted(rest)) or 'none'}")
    print(f"modules in a circle: {', '.join(sorted(knots)) or 'none'}")
    print(f"folders of more than {FILES_PER_FOLDER_MAX} files: {', '.join(sorted(full)) or 'none'}")
    if arguments.svg is not None:
        arguments.svg.write_text(svg(imports, sizes))
    return 1 if rest or knots or full else 0


if __name__ == "__main__":
    sys.exit(main())
