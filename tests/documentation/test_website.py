"""The website: links, navigation, the files for machines, and the pages in a browser on a phone and on a wide screen."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import aionn
from tests.documentation.pages import ROOT, page_paths
from tests.support.browser import SeenPage, Window, find_browser, open_browser
from website.building import PACKAGES, build, write_sources
from website.docstrings import escaped, with_lists_apart
from website.machines import llms_text
from website.navigation import SECTIONS
from website.reference import GROUPS, INTERNAL, reference_pages
from website.sources import (
    Page,
    anchors_of,
    broken_links,
    links_of,
    listing,
    pages_of,
    rewritten,
    summary_of,
    title_of,
)

SEARCH_S_MAX = 100
WINDOWS = [Window(width, is_dark=is_dark) for width in (360, 1400) for is_dark in (False, True)]


def texts() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in [*page_paths(), ROOT / "CHANGELOG.md"]
    }


# --- Links --------------------------------------------------------------------------------------------------------------------


def test_every_relative_link_and_anchor_exists() -> None:
    pages = texts()
    assert sum(len(links_of(text)) for text in pages.values()) > 120
    assert broken_links(ROOT, pages) == []


def test_wrong_links_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# Two words\n")
    page = "[a](b.md) [b](b.md#two-words) [c](c.md) [d](b.md#three) [e](../..) [f](https://x/y) [`g`](#here)\n\n# There\n"
    page += "```python\n[h](nowhere.md)\n```\n"
    (tmp_path / "docs" / "a.md").write_text(page)
    assert broken_links(tmp_path, {"docs/a.md": page}) == [
        "docs/a.md: (c.md) does not exist",
        "docs/a.md: (b.md#three) names no heading of docs/b.md",
        "docs/a.md: (../..) does not exist",
        "docs/a.md: (#here) names no heading of docs/a.md",
    ]


def test_anchors_are_those_of_code_hosts() -> None:
    text = "# `fmq`: queues\n\n## The 3 [parts](x.md)\n\n## A_b\n\n## Same\n\n## Same\n\n```sh\n# not a heading\n```\n"
    assert anchors_of(text) == {"fmq-queues", "the-3-parts", "a_b", "same", "same-1"}


def test_links_become_those_of_the_site() -> None:
    page = Page(
        "docs/how-to/a.md",
        "how-to/a",
        "[r](../../README.md#x) [s](../b.md) [f](../../aionn/errors.py) [w](https://w)",
    )
    others = {"README.md": Page("README.md", "index", ""), "docs/b.md": Page("docs/b.md", "b", "")}
    shown: dict[str, str] = {}
    text = rewritten(page, others, shown)
    assert text == "[r](../index.md#x) [s](../b.md) [f](../files/aionn/errors.py.md) [w](https://w)"
    assert shown == {"aionn/errors.py": "files/aionn/errors.py"}
    assert "class MissedDeadline" in listing(ROOT, "aionn/errors.py")
    assert "## application.py" in listing(ROOT, "examples/tutorial")


# --- Navigation, reference and the file for machines --------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once() -> None:
    named = [path for section in SECTIONS for path in section.pages]
    written = {path.relative_to(ROOT).as_posix() for path in page_paths()} - {"README.md"}
    assert len(named) == len(set(named))
    assert set(named) == written | {"CHANGELOG.md"}


def test_reference_has_every_public_name_once() -> None:
    names = [name for group in GROUPS for name in group.names]
    assert sorted(names) == sorted(aionn.__all__)


def test_reference_has_no_member_that_only_the_runtime_calls() -> None:
    text = reference_pages()["reference/aionn"]
    pages = "".join(text for path, text in texts().items() if path != "docs/architecture.md")
    for name, members in INTERNAL.items():
        entry = text.partition(f".. autoclass:: aionn.{name}\n")[2].partition("```")[0]
        assert f":exclude-members: {', '.join(members)}\n" in entry
        for member in members:
            assert hasattr(getattr(aionn, name), member), f"{name}.{member} is gone"
            assert f"{name}.{member}" not in pages, f"a page names {name}.{member}"


def test_every_page_has_a_title_and_a_summary_for_machines() -> None:
    pages = pages_of(ROOT)
    entries = llms_text(pages).splitlines()
    assert entries[0] == "# aionn" and entries[2].startswith("> An asyncio runtime")
    for page in pages.values():
        assert title_of(page.text)
        (entry,) = [line for line in entries if f"]({page.name}.md)" in line]
        summary = entry.partition("): ")[2]
        assert 10 < len(summary) < 400 or page.path == "CHANGELOG.md", f"{page.path}: {summary!r}"


def test_every_page_begins_with_a_sentence_that_is_its_summary() -> None:
    for page in pages_of(ROOT).values():
        first = page.text.partition("\n")[2].lstrip("\n").partition("\n\n")[0]
        if page.path != "CHANGELOG.md":
            assert not first.startswith(("```", "|", "#", "- ")), f"{page.path}: {first}"
            summary = summary_of(page.text)
            assert summary.endswith("."), f"{page.path}: {summary}"
            assert ".md" not in summary, f"{page.path}: a pointer is no summary: {summary}"


def test_summary_is_the_first_sentence_below_the_title() -> None:
    assert summary_of("# T\n\n```sh\nx\n```\n\nOne `a` is\n[b](c.md). Two.\n") == "One a is b."
    assert summary_of("# T\n\n| a |\n\nLast one") == "Last one"


def test_signs_of_docstrings_are_escaped_outside_of_code() -> None:
    assert (
        escaped("a * b, ort-*, ``c * d``, `e*`, f_ and g_h")
        == r"a \* b, ort-\*, ``c * d``, `e*`, f\_ and g_h"
    )


def test_list_below_a_paragraph_is_set_apart() -> None:
    lines = ["Invariants:", "1. One", "   line.", "2. Two."]
    assert with_lists_apart(lines) == ["Invariants:", "", *lines[1:]]
    assert with_lists_apart(with_lists_apart(lines)) == ["Invariants:", "", *lines[1:]]


# --- The site -----------------------------------------------------------------------------------------------------------------

HAS_SPHINX = all(importlib.util.find_spec(name) for name in PACKAGES)
needs_sphinx = pytest.mark.skipif(not HAS_SPHINX, reason="Sphinx is not installed")
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")


def test_sources_of_the_site_have_every_page(tmp_path: Path) -> None:
    pages = pages_of(ROOT)
    count = write_sources(ROOT, pages, tmp_path, has_reference=True)
    assert count == len(list(tmp_path.rglob("*.md"))) > len(pages) + 10
    text = (tmp_path / "drivers" / "writing-a-driver.md").read_text()
    assert "](../files/aionn/drivers/skeleton.py.md)" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without the API reference, which takes most of the time of a build."""
    out = tmp_path_factory.mktemp("website") / "site"
    build(ROOT, out, has_reference=False)
    return out


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("website") / "whole"
    build(ROOT, out)
    return out


def check(seen: list[SeenPage], where: str) -> None:
    for window, page in zip(WINDOWS, seen, strict=True):
        place = f"{where}, {window.width} pixels, {'dark' if window.is_dark else 'light'}"
        assert page.width <= window.width, f"{place}: the page is {page.width} wide"
        assert page.cut == [], f"{place}: {page.cut[:5]}"
        assert set(page.broken).isdisjoint(page.title.split()), f"{place}: {page.broken[:5]}"
        assert page.pale == [], f"{place}: {page.pale[:5]}"
        assert page.console == [], f"{place}: {page.console[:5]}"
        assert [a for a in page.requests if not a.startswith("file:")] == [], place
        assert (sum(page.paper[:3]) < 3 * 80) == window.is_dark, f"{place}: {page.paper}"


@pytest.mark.thorough
@needs_sphinx
@needs_browser
def test_page_can_be_read_on_a_phone_and_a_wide_screen(site: Path) -> None:
    with open_browser() as browser:
        check(browser.see(site / "tutorial.html", WINDOWS), "tutorial")


def all_pages(site: Path) -> Iterator[Path]:
    return (path for path in sorted(site.rglob("*.html")) if path.name != "genindex.html")


@pytest.mark.long
@needs_sphinx
@needs_browser
def test_every_page_can_be_read(whole_site: Path) -> None:
    pages = list(all_pages(whole_site))
    assert len(pages) > 60
    with open_browser() as browser:
        for path in pages:
            check(browser.see(path, WINDOWS), path.relative_to(whole_site).as_posix())


@pytest.mark.long
@needs_sphinx
def test_site_names_no_address_that_it_would_fetch(whole_site: Path) -> None:
    for path in all_pages(whole_site):
        text = path.read_text()
        fetched = re.findall(r'<(?:link|script|img|iframe)[^>]+(?:href|src)="(https?:)?//', text)
        assert fetched == [], path
    assert (whole_site / "searchindex.js").is_file() and (whole_site / "llms.txt").is_file()
    assert (whole_site / "tutorial.md").read_text().startswith("# Tutorial")


@pytest.mark.long
@needs_sphinx
@needs_browser
def test_search_works_from_files(whole_site: Path) -> None:
    browser = find_browser()
    assert browser is not None
    address = f"{(whole_site / 'search.html').as_uri()}?q=captured_at_ns"
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SEARCH_S_MAX)
    found = re.search(r"found (\d+) pages?", done.stdout)
    assert found is not None and int(found[1]) >= 3
    assert 'href="running/streams.html' in done.stdout
