"""The operation reference: every contract as a page of Markdown, and as text for a terminal.

Owns the form of the page. Refuses to own what an operation means: that is the ``doc`` of its contract, next to the kernel.

Invariants:
1. No word of a contract is left out, added or reordered; only the layout changes.
2. A sign of a formula is never read as Markdown: text is escaped, names in double backquotes become code.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from aionn.ops import CONTRACTS, FAMILIES
from aionn.ops.signature import OperationContract

__all__ = ["contract_text", "document"]

_LABEL = re.compile(r"[A-Z][\w() ]*:(?= |$)")
"""The beginning of a paragraph of a contract, such as ``Types by feature level:``."""

_ITEM = re.compile(r"\d[\w., ]*?(?:\.\.\.)?:(?= )")
"""The beginning of an entry of ``Inputs:`` or ``Outputs:``, such as ``1 to 4:``."""

_LIST = re.compile(r"(?:Inputs|Outputs?):(?= \d[\w, ]{0,12}: )")
"""The label of a list whose first entry is on the same line."""

_NEXT_ITEM = re.compile(r"(?<=[.;]) (?=\d[\w, ]{0,12}: )")
"""The place between two entries that share a line, as in ``1: h'. 2: c'.``"""

_CODE = re.compile(r"``(.+?)``")
_SIGNS = re.compile(r"([\\`]|(?<! )\*|\*(?! )|<(?=[\w/!?])|\](?=\())")
"""Signs that Markdown would read: an asterisk between blanks and an underscore within a word are only themselves."""


class _Paragraph(NamedTuple):
    """A paragraph of a contract; an entry of a list if ``is_item``."""

    text: str
    is_item: bool


def _paragraphs(doc: str) -> Iterator[_Paragraph]:
    """Paragraphs end before an empty line, a label, an entry of a list, and where the indentation ends."""
    lines: list[str] = []
    is_item = False
    for line in [*inspect.cleandoc(doc).splitlines(), ""]:
        text = line.strip()
        is_indented = line.startswith(" ")
        begins_item = is_indented and _ITEM.match(text) is not None
        begins = not text or begins_item or (not is_indented and (is_item or _LABEL.match(text) is not None))
        if lines and begins:
            yield from _entries(" ".join(lines), is_item=is_item)
            lines = []
        if text:
            if not lines:
                is_item = begins_item
            lines.append(text)


def _entries(text: str, *, is_item: bool) -> Iterator[_Paragraph]:
    """The entries of a list that share a paragraph, and the label before them."""
    label = None if is_item else _LIST.match(text)
    if label is not None:
        yield _Paragraph(label.group(), False)
        text = text[label.end() + 1 :]
    if is_item or label is not None:
        yield from (_Paragraph(entry, True) for entry in _NEXT_ITEM.split(text))
    else:
        yield _Paragraph(text, False)


def _markdown(text: str) -> str:
    """A passage with its signs escaped. Every other part is a name in double backquotes."""
    parts = _CODE.split(text)
    parts[::2] = [_SIGNS.sub(r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def _section(contract: OperationContract) -> str:
    blocks: list[str] = []
    was_item = False
    for paragraph in _paragraphs(contract.doc):
        label = (_ITEM if paragraph.is_item else _LABEL).match(paragraph.text)
        text = _markdown(paragraph.text)
        if label is not None:
            begin = _markdown(label.group())
            text = f"**{begin}**{text[len(begin) :]}"
        if paragraph.is_item:
            text = f"- {text}"
        blocks.append(("\n" if paragraph.is_item and was_item else "\n\n") + text)
        was_item = paragraph.is_item
    return f"### {contract.type.name}\n\nOperation {int(contract.type)}.{''.join(blocks)}\n"


def contract_text(contract: OperationContract) -> str:
    """The contract of an operation as plain text: its name and number, and the documented contract below."""
    body = textwrap.indent(inspect.cleandoc(contract.doc), "    ")
    return f"{contract.type.name}, operation {int(contract.type)}\n{body}"


def document() -> str:
    """``docs/drivers/operations.md`` as text."""
    parts = [_HEAD.format(count=len(CONTRACTS))]
    for family in FAMILIES:
        name = family.rpartition(".")[2].replace("_", " ")
        parts.append(f"## {_HEADINGS.get(name, name.capitalize())}\n")
        parts += [_section(each) for each in importlib.import_module(f"aionn.ops.{family}").OPERATIONS]
    return "\n".join(parts)


_HEADINGS = {
    "lstm": "LSTM",
    "quantized lstm": "Quantised LSTM",
    "rnn": "RNN",
    "roi": "Regions of interest",
    "svdf": "SVDF",
}
"""Headings of families whose names are abbreviations."""


_HEAD = """# Operations

The contracts of the HAL's {count} operations: the formula, the inputs by number, the outputs, the rules of quantisation, the
operand types with the feature level that added them, and the differences from the specification. The page is written from the
contracts in `aionn/ops` (`aionn.ops.document`), and a test keeps both equal.

- The reference device computes exactly this, and the validator rejects every model that breaks it, before a driver sees the model.
- `aionn inspect MODEL --contracts` prints the contracts of the operations that a model has, and `--operations` lists each
  operation with the values of its scalars.
- An entry such as "2: INT32 scalar" is the operand at that position of the operation's inputs. Optional ones at the end may be
  absent, or have the lifetime NO_VALUE.
- "Level" and "from 3" are feature levels of the HAL: 1 is version 1.0, 2 is 1.1, 3 is 1.2, 4 is 1.3, and 5 to 7 are its AIDL
  versions 1 to 3.
- [writing-a-driver.md](writing-a-driver.md) describes the way in which a driver declares the operations that it supports, and
  [adding-an-operation.md](adding-an-operation.md) the places that a new one needs.
"""
