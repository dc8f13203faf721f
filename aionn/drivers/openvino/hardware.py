"""The Intel GPUs and NPUs of a machine, as the kernel lists them, without a library of theirs.

Owns the names of devices. A device that the kernel lists may still be unusable, where the part of its driver that programs load or
its firmware is missing: that is found out in the driver's process.

Source: ``/sys/class/drm`` and ``/sys/class/accel`` of the Linux kernel; OpenVINO's names of devices.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["CPU", "PREFIX", "found_names", "openvino_name"]

PREFIX = "openvino-"
CPU = "openvino-cpu"

SYS = Path("/sys")

INTEL = "0x8086"
"""Intel's number as a vendor of PCI devices."""

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


def _count(folder: Path, pattern: str) -> int:
    """Number of Intel's devices in a folder of the kernel's."""
    count = 0
    for path in folder.glob(pattern):
        try:
            count += (path / "device" / "vendor").read_text().strip() == INTEL
        except OSError:
            continue  # It went away, or is on another bus.
    return count
