"""The importer's numbers are those of the schema that LiteRT was built with."""

import enum
import functools
import re
from pathlib import Path

import pytest

from aionn.models.tflite.operators import CONVERSIONS, document
from aionn.models.tflite.schema import FIELDS, OPTIONS, ActivationFunctionType, TensorType

_READ = re.compile(
    r"    def (\w+)\(self[^)]*\):\n\s+o = flatbuffers\.number_types\.UOffsetTFlags\.py_type\(self\._tab\.Offset\((\d+)\)\)"
    r"\n(.*?)(?=\n    def |\n    # |\ndef |\Z)",
    re.S,
)


@pytest.fixture(scope="module")
def generated():
    return pytest.importorskip("ai_edge_litert.schema_py_generated")


@functools.cache
def _sources(module):
    """Source text of each class of the module; ``inspect.getsource`` would parse the whole module for each."""
    parts = re.split(r"^class (\w+)\(object\):\n", Path(module.__file__).read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _fields(module, table):
    """Field name -> (number, kind, default), read from the generated accessors."""
    found = {}
    for name, offset, body in _READ.findall(_sources(module)[table]):
        if name.endswith(("AsNumpy", "Length", "IsNone")):
            continue
        kind = re.search(r"number_types\.(\w+)Flags", body)
        default = re.search(r"return ([\w.\-]+)\s*$", body.strip())
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        found[snake] = (
            (int(offset) - 4) // 2,
            kind.group(1).lower() if kind else None,
            default.group(1) if default else None,
        )
    return found


@pytest.mark.parametrize("table", FIELDS)
def test_field_numbers_are_the_schemas(table, generated):
    theirs = _fields(generated, table)
    assert {name: theirs[name][0] for name in FIELDS[table]} == FIELDS[table]


@pytest.mark.parametrize("table", OPTIONS)
def test_options_are_the_schemas(table, generated):
    code, fields = OPTIONS[table]
    assert getattr(generated.BuiltinOptions, table) == code
    theirs = _fields(generated, table)
    for name, field in fields.items():
        number, kind, default = theirs[name]
        assert (field.number, field.kind) == (number, kind)
        assert field.default == float({"False": 0, "True": 1}.get(default, default))


def _members(table):
    # Python 3.13 notes the first line of a class in it.
    return {name: value for name, value in vars(table).items() if isinstance(value, int) and name[0] != "_"}


@pytest.mark.parametrize("ours", [TensorType, ActivationFunctionType])
def test_enumerations_are_the_schemas(ours: type[enum.IntEnum], generated):
    assert {m.name: m.value for m in ours} == _members(getattr(generated, ours.__name__))


def test_every_operator_of_the_schema_stands_in_the_table(generated):
    assert {c.name: code for code, c in CONVERSIONS.items()} == _members(generated.BuiltinOperator)


def test_the_documented_table_is_the_importers(repository):
    assert (repository / "docs" / "engines" / "tflite-operators.md").read_text() == document()


def test_codes_are_complete_and_in_order():
    assert list(CONVERSIONS) == list(range(210))
