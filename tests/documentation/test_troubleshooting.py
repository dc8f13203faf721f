"""Every message of docs/troubleshooting.md is a text of the code, so that the page stays true."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.documentation.pages import ROOT
from tests.test_tidy import PACKAGES, parse, read

GAP = "\0"
"""Stands for a value in a text of the code."""


def listed_messages() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"(?m)^\| `(.+?)` \|", page)


@functools.cache
def texts() -> tuple[str, ...]:
    """Every text of the code with its values as gaps; backquotes, which a page cannot show, are left out."""
    found = set()
    for source in read(PACKAGES, (".py",)).values():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values]
                found.add("".join(parts))
    return tuple(" ".join(text.replace("`", "").split()) for text in found)


def is_text_of_the_code(message: str) -> bool:
    """Whether a text begins like the message; ``...`` is any value, and a value of the code may be written out."""
    pattern = re.compile(
        "".join(".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", message))
    )
    return any(pattern.match(text) for text in texts())


@pytest.mark.parametrize("message", listed_messages())
def test_message_is_a_text_of_the_code(message: str) -> None:
    assert len(message.replace("...", "").strip(" :,;()")) >= 12, "too few words to be found"
    assert is_text_of_the_code(message)


def test_message_that_does_not_exist_is_noticed() -> None:
    assert not is_text_of_the_code("...: expected a unicorn, got ...")
    assert len(listed_messages()) > 50
