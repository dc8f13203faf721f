"""From the pages to the site: a folder of Markdown for Sphinx, Sphinx itself, and the files for machines."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from website.machines import llms_text
from website.navigation import SECTIONS
from website.reference import MODULES, reference_pages
from website.sources import Page, SourceError, broken_links, listing, page_name, pages_of, rewritten

__all__ = ["build", "write_sources"]

BUILD_S_MAX = 600
"""A build takes some ten seconds; one that takes so long hangs."""

PACKAGES = ("sphinx", "furo", "myst_parser")
LINES_SHOWN_MAX = 40


def build(root: Path, out: Path, *, has_reference: bool = True) -> int:
    """Builds the site; returns the number of its pages.

    Args:
        root: The root of the repository.
        out: The folder of the site; the files of an earlier build are replaced.
        has_reference: Whether it has the API reference.

    Raises:
        SourceError: A package is missing, a link leads nowhere, or Sphinx has failed or warned.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SourceError(f"{', '.join(missing)}: not installed; run pip install --group docs")
    if out.exists() and not (out / "objects.inv").exists() and any(out.iterdir()):
        raise SourceError(f"--out: expected an empty folder or an earlier site, got {out}")
    pages = pages_of(root)
    wrong = broken_links(root, {path: page.text for path, page in pages.items()})
    if wrong:
        raise SourceError("\n".join(wrong))
    with tempfile.TemporaryDirectory(prefix="aionn-website-") as scratch:
        sources, made = Path(scratch) / "sources", Path(scratch) / "site"
        count = write_sources(root, pages, sources, has_reference=has_reference)
        _run_sphinx(root, sources, made)
        (made / "llms.txt").write_text(llms_text(pages), "utf-8")
        for source in sources.rglob("*.md"):
            place = made / source.relative_to(sources)
            if not place.is_relative_to(made / "reference"):
                shutil.copyfile(source, place)
        if out.exists():
            shutil.rmtree(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, out)
    return count


def write_sources(root: Path, pages: dict[str, Page], folder: Path, *, has_reference: bool) -> int:
    """Writes the pages as Sphinx reads them; returns their number."""
    shown: dict[str, str] = {}
    texts = {page.name: rewritten(page, pages, shown) for page in pages.values()}
    reference = reference_pages() if has_reference else {}
    texts |= reference
    # A folder that is shown has no links of its own, so that nothing is added while this runs.
    texts |= {name: listing(root, path) for path, name in shown.items()}
    texts["index"] += _navigation(list(shown.values()), has_reference=has_reference)
    for name, text in texts.items():
        place = folder / f"{name}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, "utf-8")
    return len(texts)


def _navigation(files: list[str], *, has_reference: bool) -> str:
    lists = [(section.title, [page_name(path) for path in section.pages]) for section in SECTIONS]
    if has_reference:
        names = ["index", "aionn", *(module.name for module in MODULES)]
        lists.insert(-1, ("API reference", [f"reference/{name}" for name in names]))
    lists.append(("Files", sorted(files)))
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"
        for title, names in lists
        if names
    )


def _run_sphinx(root: Path, sources: Path, out: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        f"{out}.doctrees",
    ]
    command += ["-c", str(root / "website"), str(sources), str(out)]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=BUILD_S_MAX)
    except subprocess.TimeoutExpired as e:
        raise SourceError(f"sphinx: no end within {BUILD_S_MAX} s") from e
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise SourceError("sphinx:\n" + "\n".join(lines[:LINES_SHOWN_MAX]))
    (out / ".buildinfo").unlink(missing_ok=True)
