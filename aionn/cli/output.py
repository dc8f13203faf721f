"""Output of commands for programs, JSON, and files of reports; ``aionn.reports.terminal`` has what people read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from aionn.errors import InvalidArgument
from aionn.reports.terminal import write_out

__all__ = ["check_writable", "print_json", "write_report"]


def print_json(value: Any) -> None:
    """One JSON object on one line."""
    write_out(sys.stdout, msgspec.json.encode(value).decode() + "\n")


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
    """Writes a report into a file, over what is there.

    Raises:
        InvalidArgument: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise _unwritable(path, e) from e


def _unwritable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path}: expected a file that can be written: {error.strerror}")
