"""docs/drivers/operations.md has every contract, word for word, and nothing that Markdown would read out of a formula."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from aionn.hal import OperationType
from aionn.ops import CONTRACTS, OperationContract
from aionn.ops.document import _section, contract_text, document

PAGE = Path(__file__).resolve().parents[3] / "docs" / "drivers" / "operations.md"


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^### (\w+)$", re.sub(r"(?m)^## .*$", "", document()))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(markdown: str) -> str:
    """The words of a section without its marks."""
    text = re.sub(r"(?m)^- ", "", markdown.replace("**", ""))
    return re.sub(r"\\(.)", r"\1", text).replace("`", "")


def words(text: str) -> list[str]:
    return text.replace("**", "").replace("`", "").split()


def test_documented_reference_is_the_contracts() -> None:
    assert PAGE.read_text() == document(), (
        "write it again: python -c 'from aionn.ops.document import document; print(document(), end=\"\")' "
        "> docs/drivers/operations.md"
    )


def test_every_operation_has_a_section() -> None:
    assert sections().keys() == {contract.type.name for contract in CONTRACTS.values()}


@pytest.mark.parametrize("name", ["ADD", "CONV_2D", "IF", "LSTM", "STRIDED_SLICE", "QUANTIZE", "SOFTMAX"])
def test_section_has_the_words_of_its_contract_in_their_order(name: str) -> None:
    contract = CONTRACTS[OperationType[name]]
    assert words(plain(sections()[name])) == ["Operation", f"{int(contract.type)}.", *words(contract.doc)]


def test_signs_of_formulas_are_escaped_and_names_are_code() -> None:
    doc = """out = a * b**2 <c> of `d`.

    Inputs:
        0: x [n](m), ``NO_VALUE`` or
            the rest.
        1 to 2: y.
    Types: float32."""
    found = OperationContract(
        OperationType.ADD, lambda check: None, None, lambda call: [], textwrap.dedent(doc)
    )
    assert _section(found) == (
        "### ADD\n\nOperation 0.\n\n"
        "out = a * b\\*\\*2 \\<c> of \\`d\\`.\n\n"
        "**Inputs:**\n\n- **0:** x [n\\](m), `NO_VALUE` or the rest.\n- **1 to 2:** y.\n\n"
        "**Types:** float32.\n"
    )


def test_text_of_a_contract_names_the_operation() -> None:
    text = contract_text(CONTRACTS[OperationType.CONV_2D])
    assert text.startswith("CONV_2D, operation 3\n    out[b, y, x, o] = ")
