"""What the flatbuffer reader accepts and refuses."""

import struct

import flatbuffers
import pytest

from aionn.errors import InvalidModel
from aionn.models.flatbuffer import FlatBuffer


def file_with(build):
    """A file whose root table has the fields that ``build`` makes: ``{slot: (prepend, value)}``."""
    b = flatbuffers.Builder(64)
    slots = build(b)
    b.StartObject(4)
    for slot, (prepend, value) in slots.items():
        getattr(b, prepend)(value)
        b.Slot(slot)
    b.Finish(b.EndObject(), file_identifier=b"TEST")
    return bytes(b.Output())


def root(data):
    return FlatBuffer(data).root(b"TEST", "root", "test")


def test_absent_fields_have_their_defaults():
    table = root(file_with(lambda b: {}))
    assert table.integer(0, "int32", 7, "x") == 7
    assert table.table(1, "x") is None
    assert table.text(2, "x") == ""
    assert table.int32s(3, "x") == ()
    assert list(table.tables(40, "x")) == []
    assert not table.has(0)


def test_scalars_are_read_with_their_sign_and_width():
    table = root(
        file_with(
            lambda b: {0: ("PrependInt8", -3), 1: ("PrependInt64", -(2**40)), 2: ("PrependFloat32", 0.5)}
        )
    )
    assert table.integer(0, "int8", 0, "x") == -3
    assert table.integer(0, "uint8", 0, "x") == 253
    assert table.integer(1, "int64", 0, "x") == -(2**40)
    assert table.scalar(2, "float32", 0, "x") == 0.5


def test_strings_that_are_no_utf8_are_escaped():
    data = file_with(lambda b: {0: ("PrependUOffsetTRelative", b.CreateByteVector(b"a\xffb"))})
    assert root(data).text(0, "name") == "a\\xffb"


def test_vectors_keep_their_order():
    def build(b):
        b.StartVector(4, 3, 4)
        for value in (3, 2, -1):
            b.PrependInt32(value)
        return {0: ("PrependUOffsetTRelative", b.EndVector())}

    assert root(file_with(build)).int32s(0, "x") == (-1, 2, 3)


@pytest.mark.parametrize("length", range(8))
def test_file_shorter_than_its_head_is_refused(length):
    with pytest.raises(InvalidModel, match="at least 8 bytes"):
        root(b"\0\0\0\0TEST"[:length])


def test_other_kind_of_file_is_refused():
    with pytest.raises(InvalidModel, match=r"not a test file .*the file identifier TEST, got NOPE"):
        root(b"\x08\0\0\0NOPE\0\0\0\0")


def test_root_outside_of_the_file_is_refused():
    with pytest.raises(InvalidModel, match="root at byte 4294967295"):
        root(struct.pack("<I4s", 2**32 - 1, b"TEST"))


def test_vtable_outside_of_the_file_is_refused():
    with pytest.raises(InvalidModel, match="vtable at byte"):
        root(struct.pack("<I4si", 8, b"TEST", 100))


@pytest.mark.parametrize("size", [0, 2, 3, 5])
def test_vtable_of_illegal_size_is_refused(size):
    data = struct.pack("<I4sHHi", 12, b"TEST", size, 4, 4)
    with pytest.raises(InvalidModel, match="even size of at least 4"):
        root(data)


def test_field_outside_of_its_table_is_refused():
    data = struct.pack("<I4sHHHHi", 16, b"TEST", 6, 4, 4, 0, 8)
    with pytest.raises(InvalidModel, match="4 bytes inside of the table's 4"):
        root(data).integer(0, "int32", 0, "x")


def test_vector_longer_than_the_file_is_refused():
    data = struct.pack("<I4sHHHHiII", 16, b"TEST", 6, 8, 4, 0, 8, 4, 2**31)
    with pytest.raises(InvalidModel, match="2147483648 elements"):
        root(data).int32s(0, "numbers")


def test_tables_that_share_their_bytes_cannot_unfold_without_end():
    # A vector of 30,000 tables which are all the same one.
    b = flatbuffers.Builder(64)
    b.StartObject(1)
    b.PrependInt32(1)
    b.Slot(0)
    leaf = b.EndObject()
    b.StartVector(4, 30_000, 4)
    for _ in range(30_000):
        b.PrependUOffsetTRelative(leaf)
    leaves = b.EndVector()
    b.StartObject(1)
    b.PrependUOffsetTRelative(leaves)
    b.Slot(0)
    b.Finish(b.EndObject(), file_identifier=b"TEST")
    table = root(bytes(b.Output()))
    with pytest.raises(InvalidModel, match="unfolds to many times its size"):
        for _ in range(10):
            list(table.tables(0, "leaves"))
