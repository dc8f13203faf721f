"""The pages as they are written, their names on the site, and their links.

Owns the way from a file of the repository to a page, and every relative link: one that leads to a page becomes a link to that page,
one that leads to another file or a folder becomes a link to a page that shows it. Refuses to own how pages look: Sphinx does that.

Invariants:
1. A relative link leads to a file or a folder of the repository, and its anchor to a heading of that page; else the build fails.
2. Blocks of code are never changed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from website.navigation import SECTIONS

__all__ = [
    "Link",
    "Page",
    "SourceError",
    "anchors_of",
    "broken_links",
    "links_of",
    "listing",
    "page_name",
    "pages_of",
    "rewritten",
    "summary_of",
    "title_of",
]

_LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s#]*)(?P<anchor>#[^()\s]*)?(?=\))")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`[^`\n]+`)")
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:")

_NAMES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "fmq/README.md": "fmq",
    "fences/README.md": "fences",
}

_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".c": "c", ".sh": "sh", ".md": "markdown"}


class SourceError(Exception):
    """A page or a link is wrong; the message names the file."""


class Page(NamedTuple):
    """A page of the site.

    Attributes:
        path: The file, relative to the root of the repository.
        name: Its name on the site, without a suffix.
        text: Markdown.
    """

    path: str
    name: str
    text: str


class Link(NamedTuple):
    """A relative link: the path as it is written, empty within the page, and the anchor without its sign."""

    target: str
    anchor: str


def page_name(path: str) -> str:
    """The name on the site of a file of the repository: ``docs/how-to/docker.md`` is ``how-to/docker``."""
    return _NAMES.get(path) or path.removeprefix("docs/").removesuffix(".md")


def pages_of(root: Path) -> dict[str, Page]:
    """All pages by their paths, the first page first.

    Raises:
        SourceError: A page of the navigation does not exist.
    """
    paths = ["README.md", *(path for section in SECTIONS for path in section.pages)]
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise SourceError(f"website/navigation.py names files that do not exist: {', '.join(missing)}")
    return {path: Page(path, page_name(path), (root / path).read_text("utf-8")) for path in paths}


def _prose(text: str) -> Iterator[str]:
    """The passages outside of blocks of code, and outside of code in a line."""
    for part in _FENCE.split(text)[::2]:
        yield from _CODE.split(part)[::2]


def links_of(text: str) -> list[Link]:
    """The relative links of a page, in their order."""
    # A link whose words are code is split at the code: only the part from `](` on is needed.
    found = (match for part in _FENCE.split(text)[::2] for match in _LINK.finditer(part))
    links = [Link(match["target"], (match["anchor"] or "").removeprefix("#")) for match in found]
    return [link for link in links if not _ELSEWHERE.match(link.target)]


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and MyST name them."""
    anchors: set[str] = set()
    for part in _FENCE.split(text)[::2]:
        for heading in re.findall(r"^#+ (.*)$", part, re.MULTILINE):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            anchor = re.sub(r"[^\w -]", "", plain).strip().lower().replace(" ", "-")
            number, unique = 0, anchor
            while unique in anchors:
                number += 1
                unique = f"{anchor}-{number}"
            anchors.add(unique)
    return anchors


def title_of(text: str) -> str:
    """The first heading, without marks."""
    found = re.search(r"^# (.*)$", text, re.MULTILINE)
    if found is None:
        raise SourceError("expected a heading of the first level")
    return found[1].replace("`", "")


def summary_of(text: str) -> str:
    """The first sentence below the title, without marks."""
    rest = _FENCE.sub("", text.partition("\n# ")[2] if not text.startswith("# ") else text[2:]).partition(
        "\n"
    )[2]
    paragraphs = (" ".join(block.split()) for block in rest.split("\n\n"))
    first = next((p for p in paragraphs if p and not p.startswith(("#", "|", "-", ">", "```"))), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).replace("`", "").replace("**", "")
    found = re.match(r".*?\.(?= |$)", plain)
    return found[0] if found else plain.rstrip(":")


def _resolved(page: str, target: str) -> str:
    """The path of a link's target, relative to the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page


def broken_links(root: Path, pages: Mapping[str, str]) -> list[str]:
    """A sentence for each relative link of the pages that leads nowhere, and for each anchor that is not a heading.

    Args:
        root: The root of the repository.
        pages: Texts by path, relative to the root.
    """
    found = []
    anchors = {path: anchors_of(text) for path, text in pages.items()}
    for path, text in pages.items():
        for target, anchor in links_of(text):
            goal = _resolved(path, target)
            shown = f"{target}#{anchor}" if anchor else target
            if goal.partition("/")[0] == ".." or not (root / goal).exists():
                found.append(f"{path}: ({shown}) does not exist")
            elif anchor and (goal.endswith(".md") or not target):
                known = anchors.get(goal)
                if anchor not in (anchors_of((root / goal).read_text("utf-8")) if known is None else known):
                    found.append(f"{path}: ({shown}) names no heading of {goal}")
    return found


def rewritten(page: Page, pages: Mapping[str, Page], shown: dict[str, str]) -> str:
    """The text of a page with its relative links as the site needs them.

    Args:
        page: The page.
        pages: All pages by path.
        shown: Names of the pages that show other files, by the path of the file; those that this page needs are added.
    """
    here = posixpath.dirname(page.name)

    def replace(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or _ELSEWHERE.match(target):
            return match.group()
        goal = _resolved(page.path, target)
        if goal in pages:
            return posixpath.relpath(pages[goal].name, here or ".") + ".md" + anchor
        name = shown.setdefault(goal, f"files/{goal}")
        return posixpath.relpath(name, here or ".") + ".md"

    parts = _FENCE.split(page.text)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def listing(root: Path, path: str) -> str:
    """A page that shows a file; of a folder, each Python file in it that is not a test's.

    Raises:
        SourceError: There is no such file.
    """
    place = root / path
    if place.is_dir():
        files = sorted(place.rglob("*.py"))
        if not files:
            raise SourceError(f"{path}: expected a folder with Python files")
        blocks = [f"## {file.relative_to(place).as_posix()}\n\n{_fenced(file)}" for file in files]
        return f"# The folder {path}\n\n" + "\n".join(blocks)
    if not place.is_file():
        raise SourceError(f"{path}: does not exist")
    return f"# {path}\n\n{_fenced(place)}"


def _fenced(file: Path) -> str:
    return f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8').rstrip()}\n````\n"
