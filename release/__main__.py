"""`python -m release`: checks the version and CHANGELOG.md, builds the sdist and a wheel for each platform, and checks them.

    .venv/bin/pip install --group release && .venv/bin/python -m release --out dist

Writes into the folder, which must be empty: the sdist, the wheels, `aionn-VERSION.cdx.json` (CycloneDX) and `SHA256SUMS`. Builds
the files of the last commit, and the wheels from the sdist. The same commit gives the same bytes with the same setuptools and
ziglang.

Publishing is another step, and no part of this one: nothing here opens a connection.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from release.building import build_sdist, build_wheel, commit_time_s, export, platforms, unpack
from release.contents import check_abi, check_contents, check_platform
from release.manifest import checksums, software_bill
from release.version import ReleaseError, check_changelog, declared_version

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), help="an empty folder for the files; default dist"
    )
    parser.add_argument(
        "--platform",
        action="append",
        help="a platform, such as musllinux_1_2_aarch64; may be repeated; default all",
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="accept a CHANGELOG.md without a section for the version"
    )
    options = parser.parse_args()
    try:
        make(options.out, options.platform, is_rehearsal=options.rehearsal)
    except ReleaseError as e:
        sys.exit(f"release: {e}")


def make(out: Path, wanted: list[str] | None, *, is_rehearsal: bool) -> None:
    """Makes all files of a release.

    Raises:
        ReleaseError: A check has failed, or a tool is missing.
    """
    known = platforms()
    chosen = known if wanted is None else wanted
    if not set(chosen) <= set(known):
        raise ReleaseError(f"--platform: expected some of {', '.join(known)}, got {', '.join(chosen)}")
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(commit_time_s(ROOT)))
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="aionn-release-") as scratch:
        tree = export(ROOT, Path(scratch, "tree"))
        version = declared_version(tree)
        if not is_rehearsal:
            check_changelog((tree / "CHANGELOG.md").read_text("utf-8"), version)
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ReleaseError(f"{out}: expected an empty folder")
        sdist = build_sdist(tree, out)
        print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
        source = unpack(sdist, Path(scratch, "source"))
        for platform in chosen:
            wheel = build_wheel(source, out, platform)
            check_contents(wheel)
            check_platform(wheel, platform)
            check_abi(wheel)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
        bill = out / f"aionn-{version}.cdx.json"
        bill.write_text(software_bill(tree, version, sorted(out.iterdir())), "utf-8")
        (out / "SHA256SUMS").write_text(checksums(sorted(out.iterdir())), "utf-8")
    print(f"{out / 'SHA256SUMS'}: {len(list(out.iterdir())) - 1} files")


if __name__ == "__main__":
    main()
