"""The wire format: what is written is read, and what is damaged is refused."""

import bisect
import random

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import schema, wire
from aionn.models.onnx.encoding import encode_model, node, tensor
from aionn.models.onnx.schema import GraphProto, ModelProto, OpsetImport, read_model
from aionn.models.onnx.wire import PART_BYTES_MIN, SHORT_BYTES, Budget, Message, MessageWriter


def fields(data: bytes) -> list:
    return list(Message.of_file(data, "Test"))


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31 - 1, -1, -(2**63), 2**63 - 1])
def test_integers_come_back(value):
    w = MessageWriter()
    w.integer(3, value)
    (field,) = fields(w.encoded())
    assert field.number == 3 and field.integer() == value


def test_packed_and_single_numbers_come_back():
    numbers = [0, 5, -1, 2**40, -(2**63)]
    w = MessageWriter()
    w.integers(1, numbers)
    w.integer(1, 7)
    w.floats(2, [1.5, -2.25])
    w.float32(2, 0.5)
    found = fields(w.encoded())
    assert np.concatenate([f.integers() for f in found if f.number == 1]).tolist() == [*numbers, 7]
    assert np.frombuffer(b"".join(f.fixed(4) for f in found if f.number == 2), "<f4").tolist() == [
        1.5,
        -2.25,
        0.5,
    ]


@pytest.mark.parametrize("size_bytes", range(SHORT_BYTES - 12, SHORT_BYTES + 12))
def test_packed_numbers_come_back_from_lists_of_all_lengths(size_bytes):
    numbers = [-(2**63), 2**63 - 1, -1, *range(size_bytes - 29)]
    w = MessageWriter()
    w.integers(1, numbers)
    (field,) = fields(w.encoded())
    assert len(field.view()) == size_bytes
    assert field.integers().tolist() == numbers and field.integers().dtype == np.int64


@pytest.mark.parametrize("count", [1, 3, SHORT_BYTES, SHORT_BYTES + 1])
def test_numbers_are_the_integers_up_to_a_limit(count):
    numbers = [-1, 2**63 - 1, 5][:count] + [7] * (count - 3)
    w = MessageWriter()
    w.integers(1, numbers)
    w.integer(1, -9)
    listed, single = fields(w.encoded())
    assert listed.numbers(count) == listed.integers().tolist() == numbers
    assert single.numbers(count) == [-9]
    with pytest.raises(InvalidModel, match=f"at most {count - 1} numbers, got {count}"):
        listed.numbers(count - 1)


def test_packed_numbers_of_more_than_64_bits_are_cut_alike_in_short_and_long_lists():
    wide = b"\xff" * 9 + b"\x7f"
    for count in (1, SHORT_BYTES):
        w = MessageWriter()
        w.view(1, wide * count)
        (field,) = fields(w.encoded())
        assert field.integers().tolist() == [-1] * count


def test_large_values_are_copied_only_into_the_encoded_message():
    array = np.arange(PART_BYTES_MIN, dtype=np.uint8)
    assert np.shares_memory(np.frombuffer(tensor("w", array).raw, np.uint8), array)
    inner, outer = MessageWriter(), MessageWriter()
    inner.text(1, "before")
    inner.view(2, array.data)
    inner.text(3, "behind")
    outer.message(4, inner)
    outer.message(5, inner)
    outer.text(6, "end")
    array[:] = 7
    first, second, last = fields(outer.encoded())
    for field in (first, second):
        before, large, behind = field.message("Inner")
        assert (before.text(), bytes(large.view()), behind.text()) == ("before", bytes(array), "behind")
    assert last.text() == "end"


def test_a_message_within_a_message_is_as_it_was():
    inner, outer = MessageWriter(), MessageWriter()
    inner.text(1, "a")
    outer.message(4, inner)
    inner.text(1, "b")
    inner.view(1, bytes(PART_BYTES_MIN))
    (field,) = fields(outer.encoded())
    assert [text.text() for text in field.message("Inner")] == ["a"]


def test_messages_and_texts_come_back():
    inner, outer = MessageWriter(), MessageWriter()
    inner.text(1, "größer")
    outer.message(4, inner)
    (field,) = fields(outer.encoded())
    (text,) = field.message("Inner")
    assert text.text() == "größer"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x08", "a varint that ends"),
        (b"\x08" + b"\xff" * 11, "a varint that ends"),
        (b"\x0a\x05abc", "at most 3 bytes"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "at most 0 bytes"),
        (b"\x0d\x00", "at most 1 bytes"),
        (b"\x09\x00", "at most 1 bytes"),
        (b"\x00\x00", "field numbers from 1"),
        (b"\x0b", "a known wire type"),
        (b"\x0f", "a known wire type"),
    ],
)
def test_damage_is_refused(data, why):
    with pytest.raises(InvalidModel, match=why):
        fields(data)


def test_values_of_another_wire_type_are_refused():
    w = MessageWriter()
    w.integer(1, 3)
    (field,) = fields(w.encoded())
    for read in (field.text, field.view, field.float32, lambda: field.fixed(8), lambda: field.message("M")):
        with pytest.raises(InvalidModel, match="expected"):
            read()


def test_texts_that_are_no_utf8_are_refused():
    w = MessageWriter()
    w.view(1, b"a\xff")
    (field,) = fields(w.encoded())
    with pytest.raises(InvalidModel, match="UTF-8"):
        field.text()


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\x80", b"\xff" * 10 + b"\x01"])
def test_packed_varints_that_do_not_end_are_refused(packed):
    w = MessageWriter()
    w.view(1, packed)
    (field,) = fields(w.encoded())
    with pytest.raises(InvalidModel, match="varints"):
        field.integers()


def test_packed_lists_of_odd_length_are_refused():
    w = MessageWriter()
    w.view(1, b"12345")
    (field,) = fields(w.encoded())
    with pytest.raises(InvalidModel, match="multiple of 4"):
        field.fixed(4)


def test_fields_are_counted_also_if_nobody_reads_them():
    budget = Budget()
    budget.fields_left = 5
    inner = MessageWriter()
    inner.text(1, "")
    w = MessageWriter()
    for _ in range(3):
        w.message(1, inner)
    data = w.encoded()
    read = 0
    with pytest.raises(InvalidModel, match="fields in all messages"):
        for field in Message(data, 0, len(data), "Test", budget):
            list(field.message("Inner"))
            read += 1
    assert read == 2
    budget.fields_left = 2
    with pytest.raises(InvalidModel, match="fields in all messages"):
        for _ in Message(data, 0, len(data), "Test", budget):
            read += 1
    assert read == 4


def test_random_bytes_are_read_or_refused():
    source = random.Random(5)
    for _ in range(2000):
        data = source.randbytes(source.randrange(40))
        try:
            for field in fields(data):
                for read in (field.integers, field.text, lambda f=field: list(f.message("Inner"))):
                    try:
                        read()
                    except InvalidModel:
                        pass
        except InvalidModel:
            pass


def repetitive(count: int) -> bytes:
    """A file whose nodes have equal attributes."""
    nodes = tuple(node("Cast", ["x"], [f"y{i}"], to=1, axes=[1, 2]) for i in range(count))
    return encode_model(ModelProto(8, (OpsetImport("", 17),), GraphProto(nodes)))


def test_equal_attributes_of_a_file_are_read_once():
    first, *others = read_model(repetitive(20)).graph.nodes
    assert [(a.name, a.value) for a in first.attributes] == [("to", 1), ("axes", (1, 2))]
    assert all(
        one is other for each in others for one, other in zip(each.attributes, first.attributes, strict=True)
    )


def test_equal_attributes_count_as_fields_each_time(monkeypatch):
    data = repetitive(20)

    def is_read(fields_max: int) -> bool:
        monkeypatch.setattr(wire, "FIELDS_MAX", fields_max)
        try:
            read_model(data)
        except InvalidModel as e:
            assert "fields in all messages" in str(e)
            return False
        return True

    least = bisect.bisect_left(range(1000), True, key=is_read)
    assert 20 * 2 * 3 < least < 1000
    monkeypatch.setattr(schema, "KNOWN_MAX", 0)
    assert is_read(least) and not is_read(least - 1)
