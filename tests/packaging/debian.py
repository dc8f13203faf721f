"""Packages of Debian in a scratch folder: programs for another processor, and newer Pythons. Nothing of the machine is changed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["STEP_S_MAX", "fetch_debian", "step"]

STEP_S_MAX = 600
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def step(command: Sequence[str | Path], reason: str) -> str:
    """Runs a command that fetches, and returns what it prints; skips the test where it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S_MAX)
    except (OSError, subprocess.TimeoutExpired) as e:
        pytest.skip(f"{reason}: {e}")
    if done.returncode:
        pytest.skip(f"{reason}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return done.stdout


def fetch_debian(folder: Path, packages: list[str], *options: str, suite: str | None = None) -> Path:
    """Packages of Debian and all that they need, unpacked into a folder.

    Args:
        folder: Where they are kept.
        packages: Their names.
        options: More options of apt-get.
        suite: The distribution, such as ``sid``; None for that of this machine.
    """
    state, root = folder / "apt", folder / "root"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True)
    root.mkdir(exist_ok=True)
    (state / "status").touch()
    reason = f"Debian's {packages[0]} cannot be fetched here"
    settings = [
        f"Dir::State={state}/state",
        f"Dir::Cache={state}/cache",
        f"Dir::State::status={state}/status",
    ]
    settings += ["APT::Sandbox::User=root", "Debug::NoLocking=1", "APT::Install-Recommends=0"]
    if suite is not None:
        (state / "sources.list").write_text(f"deb [signed-by={KEYS}] {_archive(reason)} {suite} main\n")
        settings += [f"Dir::Etc::sourcelist={state}/sources.list", "Dir::Etc::sourceparts=/dev/null"]
    apt = ["apt-get", "-qq", "-y", *options, *(word for setting in settings for word in ("-o", setting))]
    step([*apt, "update"], reason)
    step([*apt, "--download-only", "install", *packages], reason)
    for archive in sorted((state / "cache/archives").glob("*.deb")):
        step(["dpkg-deb", "-x", archive, root], reason)
    return root


def _archive(reason: str) -> str:
    """The address from which this machine gets Debian."""
    told = step(["apt-get", "indextargets", "--format", "$(REPO_URI)"], reason)
    found = [address for address in told.split() if address.rstrip("/").endswith("/debian")]
    if not found:
        pytest.skip(f"{reason}: this machine has no source of Debian's packages")
    return found[0]
