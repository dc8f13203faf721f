"""Compilation caches in files: written so that only the same token reads them back, and only if nothing was changed.

Owns the form of the files, their integrity, and the copy of a model in them. The caller maps files to models; the driver defines
their content.

Invariants:
1. Content is read once into private memory; the checked bytes are used, even if the file is written at the same time.
2. A digest, keyed with the token, covers every file's role, length and content, and a random number that all files of one saving
   share: files of two savings never fit together, even of the same model.
3. Nothing of a file is decoded before the digest was found right.
4. Saving starts at byte 0 whatever the descriptor's offset, and leaves no old content; one that fails leaves nothing that loads.

Source: compilation caching of the NN HAL 1.2, and the security cases of its test suite.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import stat
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from aionn.errors import GeneralFailure
from aionn.hal import CacheFiles, Memory, Model

__all__ = ["CacheContents", "HeldFiles", "decode_model", "encode_model", "load", "save"]

FILE_BYTES_MAX = 4 << 30
"""Largest file that is read: beyond any model, and a bound for a file that was made huge on purpose."""

_MAGIC = b"aionn-c1"
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _NONCE_BYTES


class CacheContents(NamedTuple):
    """The content that a driver saves: one piece per file.

    Attributes:
        model: Pieces for the model files; at least one.
        data: Pieces for the data files.
    """

    model: Sequence[bytes | memoryview]
    data: Sequence[bytes | memoryview]


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
        contents: What to keep.
        driver: Name and version of the driver: another one does not read it back.

    Raises:
        OSError: A file cannot be written; nothing that loads is left then.
    """
    fds = (*cache.model, *cache.data)
    nonce = os.urandom(_NONCE_BYTES)
    pieces = [memoryview(piece) for piece in (*contents.model, *contents.data)]
    digest = _digest(cache.token, driver, nonce, len(contents.model), pieces)
    try:
        for fd in fds:
            _check_regular(fd)
            os.ftruncate(fd, 0)
        for index, (fd, piece) in enumerate(zip(fds, pieces, strict=True)):
            head = _MAGIC + nonce + (digest if index == 0 else b"")
            _write(fd, 0, memoryview(head))
            _write(fd, len(head), piece)
    except OSError:
        for fd in fds:
            try:
                os.ftruncate(fd, 0)
            except OSError:
                pass
        raise


def load(cache: CacheFiles, *, driver: str) -> CacheContents:
    """Reads a compilation back.

    Args:
        cache: Files and token, as they were given to ``save``.
        driver: See ``save``.

    Raises:
        GeneralFailure: The files cannot be read, or are not those that were saved with this token by this driver.
    """
    try:
        files = _read_all(cache)
    except OSError as e:
        raise GeneralFailure(f"compilation cache: a file cannot be read: {e.strerror}") from e
    except MemoryError as e:
        raise GeneralFailure("compilation cache: a file does not fit the memory") from e
    if not cache.model or any(file[: len(_MAGIC)] != _MAGIC for file in files):
        raise GeneralFailure("compilation cache: expected files that this version of aionn saved")
    nonce = bytes(files[0][len(_MAGIC) : _HEAD_BYTES])
    digest = bytes(files[0][_HEAD_BYTES : _HEAD_BYTES + _DIGEST_BYTES])
    pieces = [
        memoryview(file)[_HEAD_BYTES + (_DIGEST_BYTES if index == 0 else 0) :]
        for index, file in enumerate(files)
    ]
    is_whole = all(file[len(_MAGIC) : _HEAD_BYTES] == nonce for file in files)
    expected = _digest(cache.token, driver, nonce, len(cache.model), pieces)
    if not (hmac.compare_digest(expected, digest) and is_whole):
        raise GeneralFailure(
            "compilation cache: expected the files as they were saved with this token by this driver, got changed ones"
        )
    count = len(cache.model)
    return CacheContents(pieces[:count], pieces[count:])


def _digest(token: bytes, driver: str, nonce: bytes, model_count: int, pieces: Sequence[memoryview]) -> bytes:
    digest = hashlib.blake2b(key=token, digest_size=_DIGEST_BYTES, person=_MAGIC)
    name = driver.encode()
    for number in (len(name), len(nonce), model_count, len(pieces), *(piece.nbytes for piece in pieces)):
        digest.update(number.to_bytes(8, "little"))
    digest.update(name)
    digest.update(nonce)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _check_regular(fd: int) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        # Reading a pipe would wait without end, reading a device would never end.
        raise OSError(0, "expected an ordinary file")
    return status.st_size


def _write(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_all(cache: CacheFiles) -> list[bytearray]:
    fds = (*cache.model, *cache.data)
    sizes = [_check_regular(fd) for fd in fds]
    if max(sizes, default=0) > FILE_BYTES_MAX:
        raise OSError(0, f"expected at most {FILE_BYTES_MAX} bytes, got {max(sizes)}")
    if cache.bytes_max is not None and sum(sizes) > cache.bytes_max:
        raise OSError(0, f"expected at most {cache.bytes_max} bytes together, got {sum(sizes)}")
    # A large file that aionn did not write is not read to its end.
    if any(os.pread(fd, len(_MAGIC), 0) != _MAGIC for fd in fds):
        raise OSError(0, "expected files that this version of aionn saved")
    return [_read(fd, size_bytes) for fd, size_bytes in zip(fds, sizes, strict=True)]


def _read(fd: int, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    view, read_bytes = memoryview(data), 0
    while read_bytes < size_bytes:
        count = os.preadv(fd, [view[read_bytes:]], read_bytes)
        if not count:
            break
        read_bytes += count
    view.release()
    del data[read_bytes:]
    return data


class _ModelOnDisk(msgspec.Struct, frozen=True):
    """A model whose constants are stored separately: first the inline ones, then each pool's."""

    model: Model
    value_bytes: int
    pool_bytes: tuple[int, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_ModelOnDisk)


def encode_model(model: Model) -> CacheContents:
    """A model as one model piece and one data piece, which has the constants."""
    bare = msgspec.structs.replace(model, operand_values=b"", pools=())
    sizes = tuple(pool.size_bytes for pool in model.pools)
    structure = _ENCODER.encode(_ModelOnDisk(bare, len(model.operand_values), sizes))
    return CacheContents(
        [structure], [b"".join([model.operand_values, *(p.array.data for p in model.pools)])]
    )


def decode_model(contents: CacheContents) -> Model:
    """The model that was encoded; constants in pools are in new memory.

    Raises:
        GeneralFailure: The contents do not describe a model.
        ResourceExhausted: No memory is left for the pools.
    """
    try:
        on_disk = _DECODER.decode(contents.model[0])
        data = contents.data[0]
    except (msgspec.MsgspecError, IndexError, ValueError, RecursionError) as e:
        raise GeneralFailure(f"compilation cache: expected a model: {e}") from e
    if on_disk.value_bytes + sum(on_disk.pool_bytes) != len(data):
        raise GeneralFailure("compilation cache: the constants are not those of the model")
    pools = []
    offset = on_disk.value_bytes
    for size_bytes in on_disk.pool_bytes:
        memory = Memory.create(size_bytes, name="aionn-constants")
        memory.array[:] = np.frombuffer(data, np.uint8, size_bytes, offset)
        pools.append(memory)
        offset += size_bytes
    return msgspec.structs.replace(
        on_disk.model, operand_values=bytes(data[: on_disk.value_bytes]), pools=tuple(pools)
    )
