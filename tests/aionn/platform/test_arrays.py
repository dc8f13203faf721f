"""Arrays in .npy files that users name: a file of any content is an array, or an error that names it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.platform.arrays import read_array
from fmq.available import Available

pytestmark = pytest.mark.usefixtures("ends_at_once")


def headed(text: str, values: bytes = b"") -> bytes:
    """A file of version 1.0 with this text as its header."""
    padded = text.encode("latin1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + values


def shaped(shape: str, descr: str = "'|i1'") -> bytes:
    return headed(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}", b"\0" * 4)


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_array_is_read(tmp_path: Path, is_mapped: bool, order: str) -> None:
    array = np.array(np.arange(6, dtype=np.float32).reshape(2, 3), order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", array)
    read = read_array(tmp_path / "a.npy", "--input", is_mapped=is_mapped)
    assert np.array_equal(read, array) and isinstance(read, np.memmap) == is_mapped


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is no .npy file, as numpy.save writes it"),
        (b"\x93NUMPY\x01\x00", "reading array header length"),
        (b"\x93NUMPY\x09\x00", "version"),
        (b"PK\x03\x04, and no archive", "got an archive"),
        (b"\x80\x04pickle", "this is no .npy file"),
        (headed("(" * 100), "the header cannot be read"),
        (headed("{'shape': (-" + "-" * 80), "header"),
        (shaped("(9999999999999,)"), "expected 9999999999999 bytes of values by its header, got 4"),
        (shaped("(4294967296, 4294967296)"), "expected 18446744073709551616 bytes"),
        (shaped(f"({10**23},)"), "expected 100000000000000000000000 bytes"),
        (shaped(f"(0, {10**23})"), "expected an array"),
        (shaped("(-5,)"), "expected -5 bytes of values by its header, got 4"),
        (shaped("(-2, -2)"), "expected 4 bytes of values by its header, got 4"),
        (shaped("(1,)", "'|O'"), "expected values, got objects"),
    ],
)
def test_any_other_content_is_an_error_that_names_the_file(
    tmp_path: Path, is_mapped: bool, content: bytes, words: str
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"^--input {path}: expected an array: ") as e:
        read_array(path, "--input", is_mapped=is_mapped)
    assert words in str(e.value)


def test_array_that_does_not_fit_into_memory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        file.write(shaped(f"({1 << 40},)"))
        file.truncate(128 + (1 << 40))  # Without blocks on the disk.
    monkeypatch.setattr("fmq.available.available", lambda: Available(0, 1 << 29))
    with pytest.raises(ResourceExhausted, match=r"a\.npy: cannot hold its 1099511627776 bytes"):
        read_array(tmp_path / "a.npy", "--input")
