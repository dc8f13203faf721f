"""Claims about joined bytes: the same as Python's own, whatever their size, and with no descriptor to copy through."""

from __future__ import annotations

import errno
import os

import pytest

from aionn.platform import joining
from aionn.platform.joining import joined

PARTS = (
    b"one",
    bytearray(range(200)),
    memoryview(b"\x00\xff" * 5000),
    b"",
    memoryview(b"abcdefgh").cast("H"),
)


@pytest.mark.parametrize("large_bytes", [0, 1 << 20])
def test_parts_are_joined_in_their_order(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LARGE_BYTES", large_bytes)
    assert joined(PARTS) == b"".join(PARTS)
    assert joined(()) == b""


def test_parts_are_joined_without_a_descriptor_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(joining, "LARGE_BYTES", 0)
    monkeypatch.setattr(os, "memfd_create", refused)
    assert joined(PARTS) == b"".join(PARTS)


def test_full_memory_is_a_memory_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(joining, "LARGE_BYTES", 0)
    monkeypatch.setattr(os, "write", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError, match="no space left"):
        joined(PARTS)
    assert len(os.listdir("/proc/self/fd")) == len(before)
