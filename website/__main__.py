"""`python -m website`: builds the documentation as a website that needs no network.

    .venv/bin/pip install --group docs && .venv/bin/python -m website

Writes into `build/website`, or the folder of `--out`, which is replaced; open `index.html` there in a browser. Every relative link
and anchor is checked first, and a warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from website.building import build
from website.sources import SourceError

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/website"),
        help="the folder of the site; default build/website",
    )
    parser.add_argument(
        "--without-reference", action="store_true", help="leave the API reference out, which is quicker"
    )
    options = parser.parse_args()
    try:
        count = build(ROOT, options.out, has_reference=not options.without_reference)
    except SourceError as e:
        sys.exit(f"website: {e}")
    print(f"{count} pages: {options.out / 'index.html'}")


if __name__ == "__main__":
    main()
