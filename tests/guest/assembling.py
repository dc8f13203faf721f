"""The parts of an emulated machine with cameras and a sound card: QEMU, an unmodified kernel of Debian and its modules, a small
first file system.

    python -m tests.guest.assembling FOLDER

downloads the packages by ``apt-get`` (some 100 MB, 450 MB unpacked) and one of Python, unpacks them in the folder and installs
nothing. Then ``AIONN_GUEST=FOLDER pytest --long tests/guest`` starts the machine: pure emulation, no network, and the files of this
machine read-only.

Source: the kernel's documentation of initramfs (the format newc), of 9p and of overlay file systems; vivid's documentation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.guest.unpacking import unpack

__all__ = ["PACKAGES", "assemble", "environment", "kernel_of", "missing", "modules_of", "write_first_files"]

PACKAGES = (
    "qemu-system-x86",
    "linux-image-amd64",
    "busybox-static",
    "kmod",
    "v4l-utils",
    "alsa-utils",
    "libportaudio2",
)

PYTHON_PACKAGES = ("sounddevice",)
"""Unpacked below ``python`` in the folder; it loads the library of PortAudio."""

ROOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What the first file system needs to find this machine's files."""

LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib", "usr/lib")


def assemble(folder: Path) -> None:
    """Downloads and unpacks the packages, with those that they need and this machine lacks."""
    unpack(PACKAGES, folder)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder / "python"]
    subprocess.run([*install, *PYTHON_PACKAGES], check=True)
    version = kernel_of(folder)
    # ``depmod`` is a link to ``kmod``, with an absolute path.
    subprocess.run(
        ["depmod", "-b", folder / "root", version],
        executable=folder / "root/bin/kmod",
        check=True,
        env=environment(folder),
    )


def missing(folder: Path | None) -> str | None:
    """Why the machine cannot be started; None if it can."""
    if folder is None:
        return "AIONN_GUEST names no folder: python -m tests.guest.assembling FOLDER makes one"
    for name in ("root/usr/bin/qemu-system-x86_64", "root/boot", "root/lib/modules", "root/usr/bin/aplay"):
        if not (folder / name).exists():
            return f"{folder} has no {name}: python -m tests.guest.assembling {folder}"
    return None


def environment(folder: Path) -> dict[str, str]:
    """The environment in which the unpacked programs find their libraries."""
    libraries = ":".join(str(folder / "root" / name) for name in LIBRARIES)
    sound = folder / "root/usr/share/alsa/alsa.conf"
    settings = {"ALSA_CONFIG_PATH": str(sound)} if sound.exists() else {}
    return {**os.environ, "LD_LIBRARY_PATH": libraries, **settings}


def kernel_of(folder: Path) -> str:
    """Version of the unpacked kernel."""
    (found,) = (path.name for path in (folder / "root/lib/modules").iterdir())
    return found


def modules_of(folder: Path, names: Iterable[str]) -> list[Path]:
    """Files of modules and of those that they need, in the order in which they are inserted."""
    modules = folder / "root/lib/modules" / kernel_of(folder)
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.removesuffix(".ko").replace("-", "_"): path for path in needs}
    found: list[Path] = []
    for name in names:
        path = by_name.get(name.replace("-", "_"))
        if path is None:
            continue  # It is a part of the kernel.
        for needed in [*reversed(needs[path]), path]:
            if modules / needed not in found:
                found.append(modules / needed)
    return found


INIT = """#!/bin/busybox sh
export PATH=/bin
busybox mkdir -p /proc /sys /dev /host /rw /all
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
for module in $(busybox cat /modules); do busybox insmod /m/$module || echo "insmod $module failed"; done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144 host /host || busybox poweroff -f
busybox mount -t tmpfs tmpfs /rw
busybox mkdir -p /rw/upper /rw/work
busybox mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work overlay /all
for place in proc sys dev; do busybox mount -o move /$place /all/$place; done
busybox mkdir -p /all/dev/shm
busybox mount -t tmpfs tmpfs /all/dev/shm
busybox mount -t tmpfs tmpfs /all/run
busybox chroot /all /bin/sh {script}
busybox poweroff -f
"""


def write_first_files(folder: Path, script: str) -> Path:
    """Writes the initramfs, whose init runs a script of this machine within its files.

    Args:
        folder: See `assemble`.
        script: Path on this machine.
    """
    modules = modules_of(folder, ROOT_MODULES)
    busybox = next(
        path for path in (folder / "root/bin/busybox", folder / "root/usr/bin/busybox") if path.exists()
    )
    files = [("bin", 0o040755, b""), ("m", 0o040755, b""), ("bin/busybox", 0o100755, busybox.read_bytes())]
    files.append(("init", 0o100755, INIT.format(script=script).encode()))
    files.append(("modules", 0o100644, " ".join(module.name for module in modules).encode()))
    files += [(f"m/{module.name}", 0o100644, module.read_bytes()) for module in modules]
    path = folder / "first.cpio"
    path.write_bytes(b"".join(_newc(files)))
    return path


def _newc(files: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """Files as an archive in the format newc: ``(name, mode, content)``."""
    for number, (name, mode, content) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        yield head + bytes(-len(head) % 4)
        yield content + bytes(-len(content) % 4)


if __name__ == "__main__":
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit("tests.guest.assembling: expected Debian's apt-get and dpkg-deb, got neither or one of them")
    assemble(Path(sys.argv[1]).resolve())
