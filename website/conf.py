"""The configuration of Sphinx. `python -m website` passes the folder of the pages; nothing here is fetched from a network."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aionn  # noqa: E402
from website.docstrings import prepare_docstring  # noqa: E402

project = "aionn"
author = "the aionn project"
release = version = aionn.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []
# Names of errors in docstrings exist in several packages: they are shown without a link.
suppress_warnings = ["ref.python"]

myst_heading_anchors = 4
myst_all_links_external = False

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_include_init_with_doc = False

html_theme = "furo"
html_title = "aionn"
html_static_path = ["static"]
html_css_files = ["website.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# The summaries are fetched from the pages, which a browser forbids where the site is opened as files.
html_show_search_summary = False
html_last_updated_fmt = ""
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {"navigation_with_keys": False}


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)  # type: ignore[attr-defined]
