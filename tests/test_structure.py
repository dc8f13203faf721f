"""``python -m tests.structure``: layers, circles and the picture of the imports."""

import xml.etree.ElementTree as ElementTree

from tests.structure import layers_of, reduced, svg, tree, unit_imports

SOURCES = {
    "aionn/errors.py": "",
    "aionn/hal/__init__.py": "import aionn.errors",
    "aionn/ops/__init__.py": "from aionn.hal import x\nimport aionn.errors\nimport os",
    "aionn/runtime/job.py": "def f():\n    import aionn.ops",
}


def test_units_stand_above_the_units_that_they_import() -> None:
    layers, rest = layers_of(unit_imports(SOURCES))
    assert layers == [["aionn.errors"], ["aionn.hal"], ["aionn.ops"], ["aionn.runtime"]]
    assert not rest


def test_units_of_a_circle_have_no_layer() -> None:
    circle = {**SOURCES, "aionn/errors.py": "import aionn.ops"}
    layers, rest = layers_of(unit_imports(circle))
    assert layers == []
    assert rest == {"aionn.errors", "aionn.hal", "aionn.ops", "aionn.runtime"}


def test_picture_leaves_out_imports_that_follow_from_others() -> None:
    assert reduced(unit_imports(SOURCES))["aionn.ops"] == {"aionn.hal"}


def test_picture_has_a_box_for_each_unit_and_marks_an_arrow_that_leads_up() -> None:
    imports = unit_imports(SOURCES)
    sizes = dict.fromkeys(imports, 10)
    picture = ElementTree.fromstring(svg(imports, sizes))
    names = [each.tag.rpartition("}")[2] for each in picture]
    assert names.count("rect") == len(imports)
    assert "back" not in svg(imports, sizes).partition("</style>")[2]
    back = unit_imports({**SOURCES, "aionn/errors.py": "import aionn.ops"})
    assert 'class="back"' in svg(back, sizes)


def test_tree_counts_files_and_lines_by_folder() -> None:
    assert tree({"a/b.py": "1\n2\n", "a/c.py": "1\n", "a/d/e.py": "1\n"}) == [
        "a     2 files      3 lines",
        "  d   1 files      1 lines",
    ]
