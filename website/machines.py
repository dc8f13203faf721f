"""`llms.txt`: the pages with a sentence each, for programs that read documentation; every page is next to it as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from website.navigation import SECTIONS
from website.sources import Page, summary_of, title_of

__all__ = ["llms_text"]


def llms_text(pages: Mapping[str, Page]) -> str:
    """The file's text: title, summary, then a list of links for each section.

    Args:
        pages: All pages by path.
    """
    first = pages["README.md"]
    parts = [
        f"# {title_of(first.text)}\n\n> {summary_of(first.text)}\n\n- [README]({first.name}.md): {summary_of(first.text)}\n"
    ]
    for section in SECTIONS:
        entries = [_entry(pages[path]) for path in section.pages]
        parts.append(f"## {section.title}\n\n" + "".join(entries))
    return "\n".join(parts)


def _entry(page: Page) -> str:
    summary = summary_of(page.text)
    return f"- [{title_of(page.text)}]({page.name}.md)" + (f": {summary}\n" if summary else "\n")
