"""Log tags: they choose the parts of the runtime and of drivers that log their activity.

Owns the tags, the variable that chooses them, their loggers, the handler that writes records without waiting, and the path of a
driver process's records to the application.
Every tag is the logger ``aionn.<tag>``; its messages of DEBUG level are off until a tag is chosen, or the application sets
the logger's level itself.

Invariants:
1. Nothing is chosen by default.
2. An unknown tag is rejected where a runtime is opened; a driver process that is started by hand logs it, and applies the known
   ones.

Source: the NN HAL's verbose log tags (``initVLogMask``): names, order and separators.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import sys
from collections.abc import Sequence

from aionn.observability.lines import write_if_taken

__all__ = [
    "LOG_VARIABLE",
    "LinesHandler",
    "TAGS",
    "choose_tags",
    "chosen_tags",
    "label_lines",
    "parse_tags",
    "relayed",
]

LOG_VARIABLE = "AIONN_LOG"
"""Tags with spaces, commas or colons between them; 1 or ``all`` chooses every one. Driver processes inherit it."""

TAGS = ("model", "compilation", "execution", "cpuexe", "manager", "driver", "memory")

_FORMAT = "%(asctime)s %(process)d %(name)s: %(message)s"

_RELAY_FORMAT = "aionn-log %(name)s: %(message)s"
"""The form in which a driver process writes a tag's records to its standard error."""

_RELAYED = re.compile(rf"aionn-log (aionn\.(?:{'|'.join(TAGS)})): (.*)", re.DOTALL)

_chosen: tuple[str, ...] = ()

_levels_before: dict[str, int] = {}
"""The level that the logger of a chosen tag had."""


class LinesHandler(logging.Handler):
    """Writes records to standard error as far as it takes them now. The first line after dropped ones states their number.

    A program's own stream, such as a notebook's, gets them by its ``write``: its descriptor may lead elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Source: ``logging.Handler``."""
        try:
            text = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        stream = sys.stderr
        if stream is None:
            return
        fd = -1
        with contextlib.suppress(OSError, ValueError):  # A stream in memory, or a closed one.
            fd = stream.fileno() if isinstance(stream, io.TextIOWrapper) else -1
        if fd < 0:
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
            return
        if self._dropped:
            text = f"{record.name}: {self._dropped} records before this were dropped: standard error was not read\n{text}"
        line = text.encode(errors="backslashreplace")
        if not write_if_taken(fd, line):
            self._dropped += 1
            return
        self._dropped = 0
        for at in range(select.PIPE_BUF, len(line), select.PIPE_BUF):  # A traceback.
            if not write_if_taken(fd, line[at:]):
                break


def parse_tags(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(tags, unknown words)`` of a choice."""
    words = [word for word in re.split(r"[ ,:]+", text) if word]
    if any(word in ("1", "all") for word in words):
        return TAGS, ()
    chosen = tuple(tag for tag in TAGS if tag in words)
    return chosen, tuple(word for word in words if word not in TAGS)


def chosen_tags() -> tuple[str, ...]:
    """The tags that were chosen last in this process: what a driver process inherits."""
    return _chosen


def relayed(line: str) -> tuple[str, str] | None:
    """``(logger, message)`` of a line that a driver process logged under a tag; None for any other line."""
    found = _RELAYED.fullmatch(line)
    return None if found is None else (found[1], found[2])


def label_lines() -> None:
    """Makes lines that no handler takes begin with their logger's name, so that the output of drivers names its source, and never
    wait for the reader of standard error.
    """
    handler = LinesHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.lastResort = handler


def choose_tags(text: str | None = None, *, is_driver: bool = False) -> Sequence[str]:
    """Lets the chosen tags' loggers speak, on standard error where the application has no handler of its own.

    Args:
        text: The choice, which replaces the one before; None takes the variable's, and silences no tag that was chosen before.
        is_driver: Whether this is a driver process, whose standard error the application reads.

    Returns:
        The tags.
    """
    global _chosen
    tags, unknown = parse_tags(os.environ.get(LOG_VARIABLE, "") if text is None else text)
    # As the levels: what was chosen before still holds, in driver processes that start from now on too.
    _chosen = tags if text is not None else tuple(dict.fromkeys((*_chosen, *tags)))
    for tag in () if text is None else _levels_before.keys() - tags:
        logging.getLogger(f"aionn.{tag}").setLevel(_levels_before.pop(tag))
    ours = logging.getLogger("aionn")
    if tags and not ours.hasHandlers():
        # A driver's records wait for the application, which reads them; nothing may wait for the reader of an application's.
        handler = logging.StreamHandler() if is_driver else LinesHandler()
        handler.setFormatter(logging.Formatter(_RELAY_FORMAT if is_driver else _FORMAT))
        ours.addHandler(handler)
    for tag in tags:
        logger = logging.getLogger(f"aionn.{tag}")
        _levels_before.setdefault(tag, logger.level)
        logger.setLevel(logging.DEBUG)
    if unknown:
        ours.error("%s: expected some of %s; unknown: %s", LOG_VARIABLE, ", ".join(TAGS), ", ".join(unknown))
    return tags
