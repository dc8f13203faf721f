"""The file of an engine in a compilation cache, and the digests that it may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aionn.drivers.kit import caching
from aionn.errors import GeneralFailure
from aionn.hal import CacheFiles


@pytest.fixture
def memfds() -> Iterator[CacheFiles]:
    fds = [os.memfd_create(name) for name in ("model", "data")]
    yield CacheFiles(fds[:1], fds[1:], bytes(range(32)))
    for fd in fds:
        os.close(fd)


def test_file_of_an_engine_comes_back_as_one_object(memfds: CacheFiles) -> None:
    file = np.random.default_rng(3).bytes(2 * caching.BLOCK_BYTES + 5)
    for each in (file, b""):
        contents = caching.CacheContents([b"model"], [each])
        kept = caching.KeptFile(contents)
        assert kept.path is None and kept.size_bytes == len(each) and kept.take() == each
        caching.save(memfds, contents, driver="one")
        kept = caching.KeptFile(caching.load(memfds, driver="one"))
        assert kept.path is None if not each else Path(kept.path or "").read_bytes() == each
        assert kept.size_bytes == len(each) and kept.take() == each and kept.path is None


@pytest.mark.parametrize(
    "flags, magic",
    [
        ("fpu sha_ni avx", b"aionn-c4"),
        ("asimd sha2 crc32", b"aionn-c4"),
        ("fpu avx", b"aionn-c3"),
        ("", b"aionn-c3"),
    ],
)
def test_the_digest_is_the_quickest_of_the_processor_and_each_is_read_everywhere(
    memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch, flags: str, magic: bytes
) -> None:
    monkeypatch.setattr(caching, "processor_flags", lambda: flags)
    caching._chosen.cache_clear()
    try:
        caching.save(memfds, caching.CacheContents([b"model"], [bytes(99)]), driver="one")
    finally:
        caching._chosen.cache_clear()
    assert [os.pread(fd, 8, 0) for fd in (*memfds.model, *memfds.data)] == [magic] * 2
    monkeypatch.undo()
    assert caching.load(memfds, driver="one").data[0] == bytes(99)


@pytest.mark.parametrize("magic", [b"aionn-c3", b"aionn-c4"])
def test_a_file_of_one_digest_is_none_of_the_other(
    memfds: CacheFiles, monkeypatch: pytest.MonkeyPatch, magic: bytes
) -> None:
    monkeypatch.setattr(caching, "_chosen", lambda: magic)
    caching.save(memfds, caching.CacheContents([b"model"], [bytes(99)]), driver="one")
    for fd in (*memfds.model, *memfds.data):
        os.pwrite(fd, b"aionn-c4" if magic == b"aionn-c3" else b"aionn-c3", 0)
    with pytest.raises(GeneralFailure, match="as they were saved"):
        caching.load(memfds, driver="one")
