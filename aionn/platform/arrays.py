"""Arrays in .npy files that a user names: read without code, and without more memory than the file has bytes.

Owns the reading and the errors, which name the file. The callers judge shapes and element types.

Invariants:
1. The header's shape and element type are compared with the file's size before memory is allocated.
2. A file of any content is read, or raises an error of ``aionn.errors``.

Source: numpy.lib.format.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.platform.files import open_regular
from fmq.available import MemoryShortage, check_available

__all__ = ["read_array"]

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
"""The readers of headers by version. Version 3 has structures alone, whose fields have names that are not ASCII."""

_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06")
"""The first bytes of a ZIP archive, which an .npz file is."""


def read_array(path: str | os.PathLike[str], what: str, *, is_mapped: bool = False) -> npt.NDArray[Any]:
    """The array of an .npy file.

    Args:
        path: Where it is; links are followed.
        what: Its name for the user, such as ``--input``; begins the message of an error.
        is_mapped: Read the header alone; the values come from the file when they are used.

    Raises:
        InvalidArgument: The file cannot be read, does not contain an array of plain values, or is too short for its header.
        ResourceExhausted: The array does not fit into memory.
    """
    with open_regular(path, what) as file:
        name = f"{what} {os.fsdecode(path)}"
        try:
            size_bytes = _values_bytes(file)
            if not is_mapped:
                check_available(size_bytes)
            file.seek(0)
            array: npt.NDArray[Any] = np.load(
                os.fspath(path) if is_mapped else file,
                allow_pickle=False,
                mmap_mode="r" if is_mapped else None,
            )
        except MemoryShortage as e:
            raise ResourceExhausted(
                f"{name}: cannot hold its {size_bytes} bytes: {e.strerror}", transient=e.transient
            ) from e
        except (OSError, ValueError, EOFError, OverflowError) as e:
            raise InvalidArgument(f"{name}: expected an array: {e}") from e
    return array


def _values_bytes(file: BinaryIO) -> int:
    """The bytes of an array's values by the header of its file, which has as many.

    Raises:
        ValueError: It has not, or it is another file.
    """
    begin = file.read(npy.MAGIC_LEN)
    if begin[:4] in _ARCHIVES:
        raise ValueError("expected one array, got an archive")
    if not begin.startswith(npy.MAGIC_PREFIX):
        raise ValueError("this is no .npy file, as numpy.save writes it")
    file.seek(0)
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"expected version 1.0 or 2.0, got {'.'.join(map(str, version))}")
    try:
        shape, _, dtype = _HEADERS[version](file)
    except (OSError, ValueError, EOFError):
        raise
    except Exception as e:  # Python's own parser reads the text, and raises errors of many kinds.
        raise ValueError(f"the header cannot be read: {e}") from e
    if dtype.hasobject:
        raise ValueError("expected values, got objects")
    size_bytes = prod(shape) * dtype.itemsize
    found = os.fstat(file.fileno()).st_size - file.tell()
    if min(shape, default=0) < 0 or size_bytes > found:
        raise ValueError(f"expected {size_bytes} bytes of values by its header, got {found}")
    return size_bytes
