"""The memory that this process can still get, checked before a large memory gets its pages.

Owns the figures of the machine and of the control groups, and the comparison. Allocates nothing.

The kernel gives a memfd the pages that `posix_fallocate` asks for one after the other. It notices that they do not fit only when
none is left, and by then it ends processes, or the machine does not respond. So what cannot fit is refused before the first page.

Invariant: what is below `CHECKED_BYTES_MIN` costs nothing here: no file is read.

Source: MemAvailable in proc(5); memory.max, memory.current and memory.stat of the kernel's cgroup-v2.rst, and their counterparts
of version 1.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["CHECKED_BYTES_MIN", "MARGIN_BYTES", "Available", "MemoryShortage", "available", "check_available"]

CHECKED_BYTES_MIN = 64 << 20
"""Smaller memories are not checked: reading the figures takes about 1 ms, allocating 64 MiB some 10 ms."""

MARGIN_BYTES = 64 << 20
"""Memory that is left for other processes. A machine cannot use its last pages: it would spend its time searching for pages.
"""

GROUPS_MAX = 64
"""Control groups that are looked at, from this process's upwards; real ones are a few levels deep."""

_ROOT = Path("/")

_GROUP_FILES = {
    # Limit, usage, and the fields of memory.stat whose pages the kernel takes back when it needs them. A version 1 group counts its
    # children's pages only under other names.
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}

_MOUNTS = {2: ("sys/fs/cgroup", "sys/fs/cgroup/unified"), 1: ("sys/fs/cgroup/memory",)}


class Available(NamedTuple):
    """Memory available to a process.

    Attributes:
        now_bytes: At this moment, the margin taken off; never below 0.
        ever_bytes: If no other process had any.
    """

    now_bytes: int
    ever_bytes: int


class MemoryShortage(OSError):
    """A memory cannot fit. Its `errno` is ENOMEM, as from the kernel.

    Attributes:
        transient: True where the same memory may fit when others have given theirs back.
    """

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__(errno.ENOMEM, message)
        self.transient = transient


def check_available(size_bytes: int) -> None:
    """Refuses a memory that cannot fit. Two that are checked at the same time may both pass.

    Raises:
        MemoryShortage: It is larger than the available memory; the message has both.
    """
    if size_bytes < CHECKED_BYTES_MIN:
        return
    found = available()
    if size_bytes > found.now_bytes:
        what = f"only {found.now_bytes} bytes of memory are available"
        raise MemoryShortage(what, transient=size_bytes <= found.ever_bytes)


def available(root: Path = _ROOT) -> Available:
    """Memory available to this process: the least that the machine and its control groups leave. Swap space does not count.

    Figures that cannot be read limit nothing.

    Args:
        root: Where the file systems proc and sys/fs/cgroup are.
    """
    machine = _fields(root / "proc/meminfo", 1024)
    now, ever = machine.get("MemAvailable:", sys.maxsize), machine.get("MemTotal:", sys.maxsize)
    for version, group in _groups(root):
        limit_name, usage_name, reclaimable = _GROUP_FILES[version]
        limit = _number(group / limit_name)
        if limit is None:
            continue
        ever = min(ever, limit)
        usage = _number(group / usage_name)
        if usage is not None and limit - usage < now:
            # The pages of files that were read count as used, and a group that has read much is always full of them.
            fields = _fields(group / "memory.stat", 1)
            now = min(now, limit - usage + sum(fields.get(name, 0) for name in reclaimable))
    return Available(max(0, now - MARGIN_BYTES), max(0, ever - MARGIN_BYTES))


def _groups(root: Path) -> list[tuple[int, Path]]:
    """This process's control groups and those around them: `(version, folder)`."""
    found = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        # In a container the path may be that of the machine, of which only the mount's root is seen: folders that are not there
        # have no limit, and the root has the container's.
        steps = [step for step in path.split("/") if step not in ("", "..")][:GROUPS_MAX]
        for mount in _MOUNTS[version]:
            found += [
                (version, root / mount / "/".join(steps[:depth])) for depth in range(len(steps), -1, -1)
            ]
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """A file's number; None without one, as for `max`."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path, unit_bytes: int) -> dict[str, int]:
    """The fields of a file of lines that begin with a name and a number."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {
        words[0]: int(words[1]) * unit_bytes for words in lines if len(words) > 1 and words[1].isdecimal()
    }
