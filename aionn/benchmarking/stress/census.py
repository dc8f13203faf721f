"""The kinds of the objects that a process holds, and what became more of them: the first question about growth.

Objects are those that the garbage collector tracks, without those that were frozen.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter

import msgspec

__all__ = ["Census", "growth_since"]

KINDS_MAX = 10
"""Kinds in an account of growth."""


class Census(msgspec.Struct, frozen=True):
    """The objects of this process.

    Attributes:
        kinds: Number of objects by the name of their class.
        modules: Names of the modules that are imported.
    """

    kinds: dict[str, int]
    modules: frozenset[str]

    @classmethod
    def taken(cls) -> Census:
        """The present one. Takes some milliseconds for ten thousand objects."""
        counts = Counter(map(type, gc.get_objects()))
        kinds: Counter[str] = Counter()
        for kind, count in counts.items():
            kinds[f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")] += count
        return cls(dict(kinds), frozenset(sys.modules))


def growth_since(before: Census, now: Census) -> tuple[str, ...]:
    """The kinds that became more, those with the largest growth first, and the modules that were imported since.

    A module that is imported in the middle of a run adds some hundred objects once.
    """
    more = {kind: count - before.kinds.get(kind, 0) for kind, count in now.kinds.items()}
    largest = sorted(
        (kind for kind, count in more.items() if count > 0), key=lambda kind: (-more[kind], kind)
    )
    kinds = [f"{more[kind]:+} {kind}" for kind in largest[:KINDS_MAX]]
    return (*kinds, *(f"imported: {name}" for name in sorted(now.modules - before.modules)))
