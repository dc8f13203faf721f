"""Compilation caches in files: written so that only the same token reads them back, and only if nothing was changed.

Owns the form of the files, their integrity, and the copy of a model in them. The caller maps files to models; the driver defines
their content.

Invariants:
1. Content is read once into private memory; the checked bytes are used, even if the file is written at the same time.
2. A digest, keyed with the token, covers every file's role, length and content, and a random number that all files of one saving
   share: files of two savings never fit together, even of the same model.
3. Nothing of a file is decoded before the digest was found right, and no content is read before the heads of all files, with their
   lengths, were.
4. Saving starts at byte 0 whatever the descriptor's offset, and leaves no old content; one that fails leaves nothing that loads.
5. Content is read, checked and written in steps of ``STEP_BYTES``, each by a few calls that do not hold the interpreter's lock.

A file is a head (magic, number of the saving, seal, digest) and its content. Blocks of zeros are neither hashed nor written, so
that content without pages, such as a sparse pool's, becomes a file without pages.

Source: compilation caching of the NN HAL 1.2, and the security cases of its test suite.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import hmac
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.drivers.kit.engines.installed import processor_flags
from aionn.errors import GeneralFailure
from aionn.hal import CacheFiles, Memory, Model
from aionn.hal.memory import write_all
from aionn.hal.pieces import between_pieces
from aionn.platform.descriptors import close_memory
from aionn.platform.memory_turns import memory_turn

__all__ = [
    "CacheContents",
    "HeldFiles",
    "KeptFile",
    "Parts",
    "checked_structure",
    "decode_model",
    "encode_model",
    "load",
    "save",
]

FILE_BYTES_MAX = 4 << 30
"""Largest file that is read: beyond any model, and a bound for a file that was made huge on purpose."""

BLOCK_BYTES = 1 << 20
"""Content that is neither hashed nor written if it has nothing but zeros."""

STEP_BYTES = 4 * BLOCK_BYTES
"""Content that is copied between two pauses, in some milliseconds. A thread that comes back for the interpreter's lock more often
delays a thread without a processor, which finds the lock taken each time."""

POOLS_MAX = 256
"""Most pools of a saved model; each takes two descriptors. A message to a driver process carries fewer."""

STRUCTURE_BYTES_MAX = 1 << 20
"""Longest description of a model that is saved and decoded, of some 10,000 operations: decoding holds the interpreter's lock, for
0.05 s then, and takes several times the memory."""

_READ_BYTES_MAX = 0x7FFFF000
"""Most bytes of one call of read(2)."""

_BLAKE2, _SHA256 = b"aionn-c3", b"aionn-c4"
"""The first bytes of files, by the digest of their content. The token is the key of a BLAKE2b in both cases: over the content, or
over the SHA-256 of the content."""

_MAGIC_BYTES = 8
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_SEAL_END = _MAGIC_BYTES + _NONCE_BYTES + _DIGEST_BYTES
_HEAD_BYTES = _SEAL_END + _DIGEST_BYTES


class Parts(NamedTuple):
    """The content of one file in several parts, each written from its place. Memories begin at multiples of the page size.

    Attributes:
        parts: One after the other.
    """

    parts: Sequence[bytes | memoryview | Memory]


class CacheContents(NamedTuple):
    """The content that a driver saves: one piece per file.

    Attributes:
        model: Pieces for the model files; at least one.
        data: Pieces for the data files.
        memories: Of loaded contents, the private memories that the pieces of ``data`` view; empty otherwise.
    """

    model: Sequence[bytes | memoryview]
    data: Sequence[bytes | memoryview | Parts]
    memories: Sequence[Memory] = ()


class HeldFiles:
    """Cache files that stay open although the caller closes its own descriptors: a call may be cancelled while it continues.

    Attributes:
        files: Duplicates of the caller's; closed when this object is dropped.

    Raises:
        OSError: A descriptor is not open, or none is left.
    """

    def __init__(self, cache: CacheFiles) -> None:
        fds: list[int] = []
        weakref.finalize(self, _close_all, fds)
        for fd in (*cache.model, *cache.data):
            fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
        count = len(cache.model)
        self.files = CacheFiles(tuple(fds[:count]), tuple(fds[count:]), bytes(cache.token), cache.bytes_max)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def save(cache: CacheFiles, contents: CacheContents, *, driver: str) -> None:
    """Writes a compilation.

    Args:
        cache: Files, as many as ``contents`` has pieces, and the token.
        contents: The contents to keep.
        driver: Name and version of the driver: another one does not read it back.

    Raises:
        OSError: A file cannot be written, or a pool not be read; nothing that loads is left then.
        ValueError: A pool is closed, or the number of files is not that of pieces. Likewise.
    """
    fds = (*cache.model, *cache.data)
    with contextlib.ExitStack() as stack:
        pieces = [_Content(piece, stack) for piece in (*contents.model, *contents.data)]
        nonce, count = os.urandom(_NONCE_BYTES), len(contents.model)
        saving = _Saving(_chosen(), cache.token, driver, nonce, count, [p.size_bytes for p in pieces])
        try:
            for fd in fds:
                _check_regular(fd)
                os.ftruncate(fd, 0)
            for fd, piece in zip(fds, pieces, strict=True):
                _copy(piece, fd, _HEAD_BYTES, saving)
                os.ftruncate(fd, _HEAD_BYTES + piece.size_bytes)
            for index, fd in enumerate(fds):
                write_all(fd, memoryview(saving.sealed(index) + saving.digest()), 0)
        except BaseException:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
            raise


def load(cache: CacheFiles, *, driver: str) -> CacheContents:
    """Reads a compilation back.

    Args:
        cache: Files and token, as they were given to ``save``.
        driver: See ``save``.

    Raises:
        GeneralFailure: The files cannot be read, or are not those that were saved with this token by this driver.
        ResourceExhausted: No memory is left for their content.
    """
    fds = (*cache.model, *cache.data)
    try:
        sizes = _content_sizes(cache)
        heads = [os.pread(fd, _HEAD_BYTES, 0) for fd in fds]
        magic, nonce = heads[0][:_MAGIC_BYTES], heads[0][_MAGIC_BYTES : _MAGIC_BYTES + _NONCE_BYTES]
        saving = _Saving(magic, cache.token, driver, nonce, len(cache.model), sizes)
        # A large file that this token and driver did not write is not read to its end.
        _check_same([head[:_SEAL_END] for head in heads], [saving.sealed(i) for i in range(len(heads))])
        memories = []
        for fd, size_bytes in zip(fds, sizes, strict=True):
            # An event loop drops it, with the model or with an exception that has it in its frames.
            with memory_turn():
                memories.append(Memory.create(max(1, size_bytes), name="aionn-cache", closing=close_memory))
            _copy(_File(fd, size_bytes), memories[-1].fileno(), 0, saving)
    except OSError as e:
        raise GeneralFailure(f"compilation cache: a file cannot be read: {e.strerror}") from e
    _check_same([head[_SEAL_END:] for head in heads], [saving.digest()] * len(heads))
    count = len(cache.model)
    model = [_read_bytes(memory, size) for memory, size in zip(memories[:count], sizes, strict=False)]
    views = [m.array.data[:size] for m, size in zip(memories[count:], sizes[count:], strict=True)]
    return CacheContents(model, views, memories[count:])


class KeptFile:
    """The first data piece, the file of an engine.

    Args:
        contents: Where it is.

    Attributes:
        size_bytes: Its length.

    Raises:
        IndexError: The contents have no data piece.
    """

    def __init__(self, contents: CacheContents) -> None:
        piece = contents.data[0]
        assert not isinstance(piece, Parts), "only a model is saved in parts"
        self._piece: bytes | memoryview = piece
        self._memory = contents.memories[0] if contents.memories else None
        self.size_bytes = memoryview(piece).nbytes

    @property
    def path(self) -> str | None:
        """A path by which this process reads it while this object lives, for engines that copy bytes once more. None means that it
        has no path.
        """
        if self._memory is None or self._memory.size_bytes != self.size_bytes:
            return None
        path = f"/proc/self/fd/{self._memory.fileno()}"
        return path if os.path.exists(path) else None

    def take(self) -> bytes:
        """Returns all of it, once: the engine needs memory, and this object gives its own back. Loaded content is copied by the
        kernel, without the interpreter's lock.
        """
        piece, memory = self._piece, self._memory
        self._piece, self._memory = b"", None
        return bytes(piece) if memory is None else _read_bytes(memory, self.size_bytes)


def checked_structure(piece: bytes | memoryview) -> bytes | memoryview:
    """A model piece that is decoded as a whole, unchanged.

    Raises:
        ValueError: It is longer than ``STRUCTURE_BYTES_MAX``.
    """
    if len(piece) > STRUCTURE_BYTES_MAX:
        raise ValueError(f"expected a structure of at most {STRUCTURE_BYTES_MAX} bytes, got {len(piece)}")
    return piece


@functools.cache
def _chosen() -> bytes:
    """The first bytes of files that are saved here. SHA-256 takes half the time of BLAKE2b where the processor has instructions for
    it, and twice the time elsewhere; files of both kinds are read everywhere.
    """
    return _SHA256 if {"sha_ni", "sha2"} & set(processor_flags().split()) else _BLAKE2


class _Saving:
    """The digests of the files that are saved together: the seals of their heads, and the digest of their content."""

    def __init__(
        self, magic: bytes, token: bytes, driver: str, nonce: bytes, model_count: int, sizes: Sequence[int]
    ) -> None:
        name = driver.encode()
        self._head = magic + nonce
        self._start = hashlib.blake2b(key=token, digest_size=_DIGEST_BYTES, person=magic)
        for number in (len(name), len(nonce), model_count, len(sizes), *sizes):
            self._start.update(number.to_bytes(8, "little"))
        self._start.update(name)
        self._start.update(nonce)
        self._is_keyed = magic == _BLAKE2
        self._content = self._start.copy() if self._is_keyed else hashlib.sha256()

    def _sealed(self, text: bytes) -> bytes:
        """The keyed digest of a text that no content begins with: see ``add``."""
        seal = self._start.copy()
        seal.update(text)
        return seal.digest()

    def sealed(self, index: int) -> bytes:
        """The start of a file's head, which depends on the lengths of all files and not on their content."""
        return self._head + self._sealed(b"\2" + index.to_bytes(8, "little"))

    def add(self, step: memoryview) -> list[tuple[int, int]]:
        """Adds the next bytes, a multiple of whole blocks but for the last of a file.

        Returns:
            The ranges that need to be written: whole blocks of zeros do not.
        """
        whole = step.nbytes // BLOCK_BYTES
        blocks = np.frombuffer(step, np.uint64, whole * (BLOCK_BYTES // 8)).reshape(whole, BLOCK_BYTES // 8)
        # One call of numpy for all blocks, and one of hashlib for those that follow each other: see ``STEP_BYTES``.
        is_written = (np.bitwise_or.reduce(blocks, axis=1) != 0).tolist()
        if step.nbytes % BLOCK_BYTES:
            is_written.append(True)
        self._content.update(bytes(is_written))
        ranges: list[tuple[int, int]] = []
        for index, each in enumerate(is_written):
            if each:
                at, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, step.nbytes)
                begin = ranges.pop()[0] if ranges and ranges[-1][1] == at else at
                ranges.append((begin, end))
        for begin, end in ranges:
            self._content.update(step[begin:end])
        return ranges

    def digest(self) -> bytes:
        """Of everything that was added."""
        content = self._content.digest()
        return content if self._is_keyed else self._sealed(b"\3" + content)


class _File(NamedTuple):
    """The content of a cache file."""

    fd: int
    size_bytes: int

    def fill(self, step: memoryview, at: int) -> None:
        _read(self.fd, step, _HEAD_BYTES + at)


class _Content:
    """A piece that is saved.

    Args:
        piece: The piece.
        stack: Closes what this opens.
    """

    def __init__(self, piece: bytes | memoryview | Parts, stack: contextlib.ExitStack) -> None:
        parts = piece.parts if isinstance(piece, Parts) else [piece]
        self._parts: list[tuple[int, int, int | npt.NDArray[np.uint8], int]] = []
        self.size_bytes = 0
        for part in parts:
            if isinstance(part, Memory):
                begin = _aligned(self.size_bytes)
                self._parts.append((begin, part.size_bytes, _duplicate(part, stack), part.offset))
                self.size_bytes = begin + part.size_bytes
            else:
                array = np.frombuffer(part, np.uint8)
                self._parts.append((self.size_bytes, array.nbytes, array, 0))
                self.size_bytes += array.nbytes

    def fill(self, block: memoryview, at: int) -> None:
        """Copies the content from ``at`` on into a block."""
        place = np.frombuffer(block, np.uint8)
        place.fill(0)
        for begin, size_bytes, part, offset in self._parts:
            first, end = max(at, begin), min(at + block.nbytes, begin + size_bytes)
            if first >= end:
                continue
            if isinstance(part, int):
                # Reading the mapping instead would add pages to a sparse pool.
                _read(part, block[first - at : end - at], offset + first - begin)
            else:
                place[first - at : end - at] = part[first - begin : end - begin]


def _duplicate(pool: Memory, stack: contextlib.ExitStack) -> int:
    """The pool's descriptor, which the application cannot close during the copy."""
    fd = fcntl.fcntl(pool.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, fd)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != pool.file:
        raise ValueError("memory: the pool was closed")
    return fd


def _aligned(offset: int) -> int:
    return -(-offset // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _copy(source: _Content | _File, fd: int, offset: int, saving: _Saving | None) -> None:
    # A mapping of the destination would save a copy, and cost more for its page faults and its end.
    scratch = np.empty(min(STEP_BYTES, source.size_bytes), np.uint8).data
    for at in range(0, source.size_bytes, STEP_BYTES):
        between_pieces()
        step = scratch[: source.size_bytes - at]
        with memory_turn():
            source.fill(step, at)
            for begin, end in [(0, step.nbytes)] if saving is None else saving.add(step):
                write_all(fd, step[begin:end], offset + at + begin)


def _check_same(found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    if not hmac.compare_digest(b"".join(found), b"".join(expected)):
        raise GeneralFailure(
            "compilation cache: expected the files as they were saved with this token by this driver, got changed ones"
        )


def _check_regular(fd: int) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        # Reading a pipe would wait without end, reading a device would never end.
        raise OSError(0, "expected an ordinary file")
    return status.st_size


def _read(fd: int, place: memoryview, offset: int) -> None:
    while place:
        count = os.preadv(fd, [place], offset)
        if not count:
            raise OSError(0, "it became shorter")
        place, offset = place[count:], offset + count


def _read_bytes(memory: Memory, size_bytes: int) -> bytes:
    """The first bytes of a private memory, read without the interpreter's lock."""
    parts = [
        os.pread(memory.fileno(), min(_READ_BYTES_MAX, size_bytes - offset), offset)
        for offset in range(0, size_bytes, _READ_BYTES_MAX)
    ]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _content_sizes(cache: CacheFiles) -> list[int]:
    fds = (*cache.model, *cache.data)
    sizes = [_check_regular(fd) for fd in fds]
    if max(sizes, default=0) > FILE_BYTES_MAX:
        raise OSError(0, f"expected at most {FILE_BYTES_MAX} bytes, got {max(sizes)}")
    if cache.bytes_max is not None and sum(sizes) > cache.bytes_max:
        raise OSError(0, f"expected at most {cache.bytes_max} bytes together, got {sum(sizes)}")
    is_ours = min(sizes, default=0) >= _HEAD_BYTES and cache.model
    if not is_ours or any(os.pread(fd, _MAGIC_BYTES, 0) not in (_BLAKE2, _SHA256) for fd in fds):
        raise OSError(0, "expected files that this version of aionn saved")
    return [size_bytes - _HEAD_BYTES for size_bytes in sizes]


class _ModelOnDisk(msgspec.Struct, frozen=True):
    """A model whose constants are stored separately: first the inline ones, then each pool's."""

    model: Model
    value_bytes: int
    pool_bytes: tuple[int, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_ModelOnDisk)


def encode_model(model: Model) -> CacheContents:
    """A model as one model piece and one data piece, which has the constants: parts of the model, not copies.

    Raises:
        ValueError: It has more than ``POOLS_MAX`` pools, or its structure is longer than ``STRUCTURE_BYTES_MAX``.
    """
    if len(model.pools) > POOLS_MAX:
        raise ValueError(f"expected at most {POOLS_MAX} pools, got {len(model.pools)}")
    bare = msgspec.structs.replace(model, operand_values=b"", pools=())
    sizes = tuple(pool.size_bytes for pool in model.pools)
    structure = _ENCODER.encode(_ModelOnDisk(bare, len(model.operand_values), sizes))
    return CacheContents([checked_structure(structure)], [Parts((model.operand_values, *model.pools))])


def decode_model(contents: CacheContents) -> Model:
    """The model that was encoded; constants in pools are in new memory, which is that of loaded contents.

    Raises:
        GeneralFailure: The contents do not describe a model.
        ResourceExhausted: No memory or descriptor is left for the pools.
    """
    try:
        on_disk = _DECODER.decode(checked_structure(contents.model[0]))
        data = contents.data[0]
    except (msgspec.MsgspecError, IndexError, ValueError, RecursionError) as e:
        raise GeneralFailure(f"compilation cache: expected a model: {e}") from e
    if contents.memories and not isinstance(data, Parts):
        memory, data_bytes = contents.memories[0], memoryview(data).nbytes
    else:
        memory, data_bytes = _stored(data)
    offsets, end = [], on_disk.value_bytes
    for size_bytes in on_disk.pool_bytes:
        offsets.append(_aligned(end))
        end = offsets[-1] + size_bytes
    is_legal = on_disk.value_bytes >= 0 and min(on_disk.pool_bytes, default=1) > 0
    if not is_legal or len(offsets) > POOLS_MAX or end != data_bytes:
        raise GeneralFailure("compilation cache: the constants are not those of the model")
    pools = tuple(
        Memory.from_fd(memory.fileno(), size_bytes=size_bytes, offset=offset, closing=close_memory)
        for size_bytes, offset in zip(on_disk.pool_bytes, offsets, strict=True)
    )
    values = _read_bytes(memory, on_disk.value_bytes)
    return msgspec.structs.replace(on_disk.model, operand_values=values, pools=pools)


def _stored(piece: bytes | memoryview | Parts) -> tuple[Memory, int]:
    """A piece in a memory of its own, and its size."""
    with contextlib.ExitStack() as stack:
        content = _Content(piece, stack)
        memory = Memory.create(max(1, content.size_bytes), name="aionn-constants")
        _copy(content, memory.fileno(), 0, None)
    return memory, content.size_bytes
