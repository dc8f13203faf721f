"""Output of commands for programs, JSON, and files of reports; ``aionn.reports.terminal`` has what people read."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aionn.errors import InvalidArgument
from aionn.platform.files import creation_error
from aionn.reports.terminal import write_out

__all__ = ["check_writable", "print_json", "replaced", "write_report"]

NAME_MAX = 100
"""Characters of a file's name that occur in the name of its replacement: of 255 bytes a character may take four."""


def print_json(value: Any) -> None:
    """One JSON object on one line. Bytes of a file's name that are not text are written as JSON's escape of a surrogate."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_escaped(msgspec.to_builtins(value)))
    write_out(sys.stdout, encoded.decode() + "\n")


def _escaped(value: Any) -> Any:
    """The same value, with texts as JSON of ASCII alone."""
    if isinstance(value, str):
        return msgspec.Raw(json.dumps(value).encode())
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list | tuple) else value


def check_writable(*paths: Path | None) -> None:
    """Checks that files can be written, before the work that they report; creates none that did not exist.

    Raises:
        InvalidArgument: One of them cannot; None means no file.
    """
    for path in paths:
        if path is None:
            continue
        try:
            is_new = not path.exists()
            # The file is opened, since its rights do not show that a file system is read-only. A pipe without a reader is rejected
            # and not waited for.
            os.close(
                os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            )
            if is_new:
                # Behind a link to nothing it is the link's target that was made.
                path.resolve().unlink()
        except OSError as e:
            raise _unwritable(path, e) from e


def write_report(path: Path, text: str) -> None:
    """Writes a report into a file, in place of what is there. Raises as ``replaced``."""
    with replaced(path) as file:
        file.write(
            text.encode("utf-8", "backslashreplace")
        )  # A file's name may have bytes that are not text.


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file whose content takes the place of what is there when all of it is written: a full disk loses nothing.

    Raises:
        InvalidArgument: It cannot be written.
    """
    target = Path(os.path.realpath(path))  # A link stays, and points to the new file.
    try:
        temporary = None if target.exists() and not target.is_file() else _beside(target)
        if temporary is None:
            with target.open("wb") as file:
                yield file
            return
        try:
            with temporary.open("wb") as file:
                yield file
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o7777)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise _unwritable(path, e) from e


def _beside(target: Path) -> Path | None:
    """A new file in the folder of another one; None where the folder takes none, though the file itself may be written."""
    temporary = target.with_name(f".aionn-{os.getpid()}-{target.name[:NAME_MAX]}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except (PermissionError, FileExistsError):
        return None
    return temporary


def _unwritable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path}: expected a file that can be written: {creation_error(path, error)}")
