"""The Intel GPUs and NPUs of a machine, and its processor, as the kernel lists them, without a library of theirs.

Owns the names of devices, and what the processor computes wrongly. A device that the kernel lists may still be unusable, where
the part of its driver that programs load or its firmware is missing: that is found out in the driver's process.

Source: ``/proc/cpuinfo``, ``/sys/class/drm`` and ``/sys/class/accel`` of the Linux kernel; OpenVINO's names of devices.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["CPU", "PREFIX", "found_names", "openvino_name", "saturates"]

PREFIX = "openvino-"
CPU = "openvino-cpu"

SYS = Path("/sys")
PROCESSOR = Path("/proc/cpuinfo")

INTEL = "0x8086"
"""Intel's number as a vendor of PCI devices."""

_EXACT_PRODUCTS = frozenset(("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8"))
"""Instructions of x86 that add products of bytes in 32 bits."""

_NAME = re.compile(r"openvino-(cpu|npu|gpu([1-9][0-9]*)?)")


def openvino_name(driver: str) -> str | None:
    """OpenVINO's name of a driver's device, such as ``GPU`` or ``GPU.1``; None where no device has the name."""
    match = _NAME.fullmatch(driver)
    if match is None:
        return None
    kind, number = match.groups()
    return kind.upper() if number is None else f"GPU.{number}"


def found_names(root: Path = SYS) -> list[str]:
    """The drivers of the GPUs and NPUs of this machine.

    Args:
        root: Where the kernel's files are.
    """
    gpus = _count(root / "class" / "drm", "renderD*")
    names = [PREFIX + "gpu" + (str(number) if number else "") for number in range(gpus)]
    return names + [PREFIX + "npu"] * bool(_count(root / "class" / "accel", "accel*"))


def saturates(path: Path = PROCESSOR) -> bool:
    """Whether sums of products of bytes saturate: on a processor of x86 without VNNI, OpenVINO adds two of them in 16 bits.

    A network of int8 whose numbers are large is then wrong by up to half of its range, in OpenVINO itself as well.

    Args:
        path: Where the kernel's description of the processor is.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)  # Other architectures have "Features".
    return flags is not None and _EXACT_PRODUCTS.isdisjoint(flags[1].split())


def _count(folder: Path, pattern: str) -> int:
    """Number of Intel's devices in a folder of the kernel's."""
    count = 0
    for path in folder.glob(pattern):
        try:
            count += (path / "device" / "vendor").read_text().strip() == INTEL
        except OSError:
            continue  # It went away, or is on another bus.
    return count
