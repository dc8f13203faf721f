"""The frame of pages: escaping, tables, and words that stay whole."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser

import pytest

from aionn.reports.columns import counted, number_columns
from aionn.reports.html_page import (
    LETTERS_WHOLE_MAX,
    Html,
    document,
    element,
    joined,
    key,
    marked,
    scrolled,
    table,
    words,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "a & b",
    "&lt;",
    '"><img src=x onerror=y>',
    "x' onload='y",
    "</td></table>",
    "\u202e<",
]


class Texts(HTMLParser):
    """Collects tags and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Texts:
    texts = Texts()
    texts.feed(page)
    texts.close()
    return texts


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_an_element(text: str) -> None:
    parts = [
        element("p", text, title=text),
        marked(text, "bad"),
        key([("late", text)]),
        scrolled(text, text),
        table((text, "b", "c", "d"), [(text, text, 1, 2)], caption=text, text=("b",)),
        words(f"{text * 5} {text}"),
    ]
    plain = {"html", "head", "meta", "title", "style", "body", "main", "h1", "p", "span", "ul", "li", "i", "div", "wbr",
             "table", "caption", "thead", "tbody", "tr", "th", "td"}  # fmt: skip
    page = read(document(text, *parts, text))
    assert set(page.tags) <= plain
    assert page.text.count(text) >= 14


def test_html_is_put_in_as_it_is_and_only_that() -> None:
    assert joined(Html("<b>"), "<b>", None, 1) == "<b>&lt;b&gt;1"
    assert (
        element("g", element("rect", x=1, rx=None), stroke_width=2) == '<g stroke-width="2"><rect x="1"/></g>'
    )
    assert element("details", open=True) == "<details open></details>"
    assert element("details", open=False) == "<details></details>"


def test_page_is_framed_for_phones_and_both_settings() -> None:
    page = document("heading", element("p", "text"), title="tab")
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>tab</title>" in page and "<h1>heading</h1>" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme:dark" in page
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert page == document("heading", element("p", "text"), title="tab")


def test_columns_of_numbers_are_aligned_right() -> None:
    page = table(("name", "ms", "both"), [("a", "1.5", "1"), ("b", "2,000", "x")])
    assert page.count('class="n"') == 3  # The head and two cells of one column.
    rows = [["1", "n/a", "a", "1.2e-07", "3 %", "12 ms"], ["-2.5", "", "b", "0", "95.0%", "0.35 MB"]]
    assert number_columns(rows, 6) == [True, True, False, True, True, True]
    assert number_columns([], 2) == [False, False]


def test_wide_table_becomes_records_and_a_narrow_one_stays() -> None:
    wide = table(("a", "b", "c", "d"), [(1, 2, 3, 4)])
    assert 'class="records"' in wide and re.findall(r'data-head="(\w)"', wide) == ["b", "c", "d"]
    assert "records" not in table(("a", "b", "c"), [(1, 2, 3)])


def test_last_cell_of_a_short_row_takes_the_rest() -> None:
    page = table(("a", "b", "c", "d"), [(1, 2, 3, 4), (1, "why not")])
    assert '<td class="text" colspan="3">why not</td>' in page


@pytest.mark.parametrize("seed", range(20))
def test_long_words_keep_their_letters_and_short_ones_are_not_touched(seed: int) -> None:
    chosen = random.Random(seed)
    text = "".join(chosen.choices("ab/.:=- ", k=chosen.randint(1, 200)))
    shown = words(text)
    assert read(shown).text == text
    if all(len(word) <= LETTERS_WHOLE_MAX for word in text.split()):
        assert "wbr" not in shown and "long" not in shown


def test_path_breaks_behind_its_slashes_and_a_name_nowhere() -> None:
    path = "/" + "/".join(["folder"] * 8)
    assert words(path).count("folder/<wbr>") == 7 and "<span>/folder/<wbr>" in words(path)
    assert words("split-quick") == '<span class="whole">split-quick</span>'
    assert words("x" * (LETTERS_WHOLE_MAX + 1)).startswith('<span><span class="long">xxx')


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (5000, "5,000 steps")]
)
def test_count_has_its_noun(count: int, expected: str) -> None:
    assert counted(count, "step") == expected


def test_count_may_have_a_plural_of_its_own() -> None:
    assert (
        counted(2, "process", "processes") == "2 processes"
        and counted(1, "process", "processes") == "1 process"
    )
