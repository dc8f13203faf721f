"""Which mutants a source has: one small change each, as an edit of the text.

Owns the kinds of change. Pure: text in, edits out. Which tests run against a mutant is ``__main__``'s.

Left alone: assertions, annotations, texts of errors, docstrings and ``__all__``, since no test should depend on them; and
constants, most of which are bounds that could as well be a little larger.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mutant", "find_mutants"]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

_SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}

_EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_DECORATIVE = {None, "strict", "name", "daemon", "stacklevel", "where"}
"""Arguments that only check or describe; None is a mapping of arguments."""


class Mutant(NamedTuple):
    """One change.

    Attributes:
        path: The file, relative to the root.
        line: Of the change, from 1.
        kind: What is changed.
        start: Where the replaced text starts, in bytes of UTF-8.
        end: Where it ends.
        before: The replaced text.
        after: What stands there instead.
        within: The function that it is in, with its class: ``Fence.wait``; empty outside of any.
        nth: Which one of those with the same texts in that function, from 1.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    within: str
    nth: int

    def applied_to(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line} {self.kind}: {before}  ->  {after}"


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of its text.

    Args:
        path: The name that the mutants carry.
        source: The file's bytes.
    """
    offsets = [0]
    for line in source.split(b"\n"):
        offsets.append(offsets[-1] + len(line) + 1)
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, _SCOPES)]
    scopes.sort(key=lambda scope: scope.lineno)
    found = []
    for node, kind, changed in _changes(tree):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        before, after = source[start:end].decode(), f"({ast.unparse(changed)})"
        around = [scope.name for scope in scopes if scope.lineno <= node.lineno <= (scope.end_lineno or 0)]
        found.append(Mutant(path, node.lineno, kind, start, end, before, after, ".".join(around), 1))
    found.sort(key=lambda mutant: (mutant.start, mutant.end, mutant.kind))
    alike: Counter[tuple[str, ...]] = Counter()
    for index, mutant in enumerate(found):
        key = (mutant.within, mutant.kind, mutant.before, mutant.after)
        alike[key] += 1
        found[index] = mutant._replace(nth=alike[key])
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    for node in _code(tree):
        match node:
            case ast.Compare(ops=ops):
                for position, operator in enumerate(ops):
                    changed = copy.deepcopy(node)
                    changed.ops[position] = _COMPARISONS[type(operator)]()
                    yield node, "comparison", changed
            case ast.BinOp(op=operator) if type(operator) in _SIGNS:
                yield node, "sign", ast.BinOp(node.left, _SIGNS[type(operator)](), node.right)
            case ast.BoolOp(op=ast.And()):
                yield node, "connective", ast.BoolOp(ast.Or(), node.values)
            case ast.BoolOp(op=ast.Or()):
                yield node, "connective", ast.BoolOp(ast.And(), node.values)
            case ast.UnaryOp(op=ast.Not()):
                yield node, "negation", node.operand
            case ast.UnaryOp(op=ast.USub()):
                yield node, "sign", node.operand
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                # A comparison is negated by its own change already.
                if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
                    yield test, "condition", ast.UnaryOp(ast.Not(), test)
            case ast.Call(func=ast.Name(id=name)) if name in _EXTREMES:
                yield node, "extreme", ast.Call(ast.Name(_EXTREMES[name]), node.args, node.keywords)
            case ast.Call(keywords=keywords):
                for keyword in keywords:
                    if keyword.arg not in _DECORATIVE:
                        kept = [k for k in keywords if k is not keyword]
                        yield node, f"argument {keyword.arg}", ast.Call(node.func, node.args, kept)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide something."""
    match tree:
        case ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)
