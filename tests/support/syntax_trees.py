"""Trees of source texts, each made once: the rules about sources look at all of them many times."""

from __future__ import annotations

import ast
import functools
import gc

__all__ = ["nodes", "parse"]


@functools.cache
def parse(text: str) -> ast.Module:
    """The tree of a source text, frozen: the collector would look at all of the trees, some million objects, again and again."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All of a tree, in the order of ``ast.walk``, which takes as long as parsing does."""
    return tuple(ast.walk(tree))
