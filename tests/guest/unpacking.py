"""Packages of the distribution, unpacked into a folder: nothing is installed on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["unpack"]


def unpack(packages: Sequence[str], folder: Path) -> None:
    """Downloads packages, with those that they need and this machine lacks, and unpacks them below ``root`` in a folder."""
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "apt-get", "-y", "--no-install-recommends", "--download-only", "-o", f"Dir::Cache::archives={archives}",
            "install", *packages,
        ],
        check=True,
    )  # fmt: skip
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, folder / "root"], check=True)
