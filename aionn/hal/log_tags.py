"""Log tags: which parts of the runtime and of drivers say what they do.

Owns the tags, the variable that chooses them, and their loggers. Every tag is the logger ``aionn.<tag>``; what is logged there at
DEBUG level is off until a tag is chosen, or the application sets the logger's level itself.

Invariants:
1. Nothing is chosen unless somebody chooses it.
2. An unknown tag is told once and the others apply.

Source: the NN HAL's verbose log tags (``initVLogMask``): names, order and separators.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence

__all__ = ["LOG_VARIABLE", "TAGS", "choose_tags", "parse_tags"]

LOG_VARIABLE = "AIONN_LOG"
"""Tags with spaces, commas or colons between them; 1 or ``all`` chooses every one. Driver processes inherit it."""

TAGS = ("model", "compilation", "execution", "cpuexe", "manager", "driver", "memory")

_FORMAT = "%(asctime)s %(process)d %(name)s: %(message)s"


def parse_tags(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(tags, unknown words)`` of a choice."""
    words = [word for word in re.split(r"[ ,:]+", text) if word]
    if any(word in ("1", "all") for word in words):
        return TAGS, ()
    chosen = tuple(tag for tag in TAGS if tag in words)
    return chosen, tuple(word for word in words if word not in TAGS)


def choose_tags(text: str | None = None) -> Sequence[str]:
    """Lets the chosen tags' loggers speak, on standard error where the application has no handler of its own.

    Args:
        text: The choice; None takes the variable's.

    Returns:
        The tags.
    """
    tags, unknown = parse_tags(os.environ.get(LOG_VARIABLE, "") if text is None else text)
    ours = logging.getLogger("aionn")
    if tags and not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        ours.addHandler(handler)
    for tag in tags:
        logging.getLogger(f"aionn.{tag}").setLevel(logging.DEBUG)
    if unknown:
        ours.error("log tags: expected some of %s; unknown: %s", ", ".join(TAGS), ", ".join(unknown))
    return tags
