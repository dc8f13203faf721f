"""The summary of a run names each reason to skip once, with the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REMEDIES, grouped_skips

TESTS = Path(__file__).parent


def test_reasons_with_one_remedy_are_one_line_and_the_most_frequent_comes_first() -> None:
    reasons = [
        "Skipped: no such file",
        "Skipped: PyAV is not installed",
        "Skipped: could not import 'ai_edge_litert': No module named 'ai_edge_litert'",
        "Skipped: PyAV, the extra `media`, is not installed",
        "Skipped: LiteRT is not installed",
        "Skipped: PyAV is not installed",
    ]
    assert grouped_skips(reasons) == [
        "3 x PyAV is not installed: pip install -e '.[media]'",
        "2 x LiteRT is not installed: pip install -e '.[litert]'",
        "1 x no such file",
    ]


@pytest.mark.parametrize("pattern", REMEDIES)
def test_remedy_belongs_to_a_reason_that_a_test_gives(pattern: str) -> None:
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    reasons = [r for s in sources for r in re.findall(r'(?:skip\(|importorskip\(|reason=)\s*f?"([^"]+)"', s)]
    assert any(re.search(pattern, reason) for reason in reasons)
