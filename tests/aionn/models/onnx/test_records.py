"""The numbers and the records of the extension ``ai.onnx``."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import extension as ext
from aionn.validation import check_extension


def test_numbers_of_operators_do_not_change() -> None:
    # Compilation caches and models contain these numbers.
    assert [ext.number_of(name) for name in ("Abs", "Erf", "Gelu", "NonZero", "Xor")] == [0, 54, 64, 113, 202]
    assert len(ext.OPERATORS) == len(set(ext.OPERATORS)) >= 203
    assert all(ext.op_type_of(ext.number_of(name)) == name for name in ext.OPERATORS)
    assert [int(kind) for kind in ext.ElementType] == list(range(15))


def test_table_has_every_operator_of_the_installed_onnx_package() -> None:
    defs = pytest.importorskip(
        "onnx.defs", reason="the onnx package is not installed: pip install --group onnx"
    )
    names = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    assert not names - set(ext.OPERATORS), "append them to the table"


def test_unknown_operators_and_numbers_are_rejected() -> None:
    with pytest.raises(InvalidModel, match="Frobnicate"):
        ext.number_of("Frobnicate")
    for number in (-1, len(ext.OPERATORS), 0xFFFF):
        with pytest.raises(InvalidModel, match=str(number)):
            ext.op_type_of(number)


def test_extension_is_a_valid_description() -> None:
    check_extension(ext.EXTENSION)
    assert {kind.type: kind.byte_size for kind in ext.EXTENSION.operand_types}[ext.ElementType.INT64] == 8


def test_importing_the_extension_does_not_import_the_importer() -> None:
    code = (
        "import sys, aionn.models.onnx.extension; "
        "sys.exit(any('conversions' in m or m.endswith(('.load', '.tflite')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


ATTRIBUTES: dict[str, Any] = {
    "axis": -1,
    "alpha": 0.25,
    "mode": "linear",
    "axes": [1, 2],
    "scales": [1.0, 2.0],
    "activations": ["Tanh", "Relu"],
    "none": [],
}


def test_record_reads_what_was_written() -> None:
    inputs = (ext.ValueType(1, (2, -1)), None, ext.ValueType(7))
    outputs = (ext.ValueType(10, ()),)
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    data = ext.encode_attributes(13, {**ATTRIBUTES, "value": table}, inputs, outputs)
    record = ext.decode_record(data)
    assert (record.version, record.inputs, record.outputs) == (13, inputs, outputs)
    np.testing.assert_array_equal(record.attributes.pop("value").array, table)
    assert record.attributes == ATTRIBUTES
    assert [value is not None and value.is_known for value in (*inputs, *outputs)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("texts", [["t"], ["t", "a", "b", "c"], ["t", "", "\u00fc" * 40, "c"]])
def test_texts_that_begin_as_a_tensor_does_are_texts(texts: list[str]) -> None:
    _, attributes = ext.decode_attributes(ext.encode_attributes(10, {"stopwords": texts}))
    assert attributes == {"stopwords": texts}


def test_equal_records_have_equal_bytes() -> None:
    backwards = dict(reversed(ATTRIBUTES.items()))
    assert ext.encode_attributes(1, ATTRIBUTES) == ext.encode_attributes(1, backwards)


def test_values_that_cannot_be_written_are_rejected() -> None:
    for value in (object(), [1, 2.0], [[1]], None, True, 1 << 70):
        with pytest.raises(InvalidModel):
            ext.encode_attributes(1, {"x": value})


def record(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"a": {}, "i": [], "o": [], "v": 1} | changes)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "MessagePack"),
        (b"\xc1", "MessagePack"),
        (b"\x91" * 5000, "MessagePack"),
        (record() + b"\0", "MessagePack"),
        (record(x=1), "MessagePack"),
        (record(v=0), "version"),
        (record(v=1 << 40), "version"),
        (record(a={"x" * 65: 1}), "name"),
        (record(a={str(i): 1 for i in range(65)}), "length <= 64"),
        (record(a={"x": [[]] * 100}), "attribute 'x'"),
        (record(a={"x": [1] * ((1 << 20) + 1)}), "attribute 'x'.*length <= 1048576"),
        (record(a={"x": {"y": 1}}), "attribute 'x'"),
        (record(a={"x": ["t", 1, [1 << 40], b""]}), "tensor"),
        (record(a={"x": ["t", 1, [2], b"1234"]}), "8 bytes"),
        (record(a={"x": ["t", 8, [0], b""]}), "tensor"),
        (record(i=[None] * 1025), r"length <= 1024 - at `\$\.i`"),
        (record(i=[[0, None]]), "inputs 0"),
        (record(o=[[1, [-2]]]), "outputs 0"),
        (record(o=[[1, [1] * 33]]), r"length <= 32 - at `\$\.o"),
        (bytes(17 << 20), "at most"),
    ],
)
def test_hostile_bytes_are_rejected(data: bytes, what: str) -> None:
    with pytest.raises(InvalidModel, match=what):
        ext.decode_record(data)


def test_changed_bytes_give_a_record_or_an_error() -> None:
    whole = ext.encode_attributes(13, {**ATTRIBUTES, "value": np.arange(3)}, [ext.ValueType(1, (2, 3))])
    draw = random.Random(5)
    rejected = 0
    for _ in range(2000):
        data = bytearray(whole[: draw.randrange(1, len(whole) + 1)])
        data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            ext.decode_record(data)
        except InvalidModel:
            rejected += 1
    assert rejected > 1000
