"""Reads the state that the checks use: files of /proc and /sys, limits, and versions of engines. Every read is bounded."""

from __future__ import annotations

import os
import resource
import zlib
from importlib import metadata

from aionn.realtime.checks import DAMON, DAMON_RECLAIM, IDLE_STATES_MAX, KDAMONDS_MAX, SCHEMES_MAX, Machine
from aionn.realtime.permission import CAP_IPC_LOCK, Permission, ask, host_here
from aionn.realtime.reading import TEXT_BYTES_MAX, read_text, soft_limit
from aionn.realtime.threads.kernel import failed
from aionn.realtime.threads.slices import read_attributes

__all__ = ["group_folders", "read_machine"]

FILES = (
    "/proc/cmdline",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/kernel/sched_rt_period_us",
    "/proc/sys/kernel/sched_rt_runtime_us",
    "/proc/sys/vm/overcommit_memory",
    "/proc/version",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/devices/system/cpu/isolated",
    "/sys/kernel/debug/sched/preempt",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/realtime",
    DAMON_RECLAIM,
)
GROUP_FILES = ("cpu.max", "cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us")
ENGINES = ("ai-edge-litert", "tflite-runtime", "onnxruntime", "openvino")

GROUPS_MAX = 32
"""Most levels of groups: the kernel rejects deeper ones where a controller is enabled."""

PROCESSORS_MAX = 256
"""Most processors that are read one by one; on larger machines the first are taken as typical."""


def read_machine(permission: Permission | None = None) -> Machine:
    """Read the state of this machine that the checks use. Blocks for some ten milliseconds.

    Args:
        permission: The scheduling that this process may use; None finds it out.
    """
    processors = tuple(sorted(os.sched_getaffinity(0)))
    groups = group_folders(read_text("/proc/self/cgroup"), read_text("/proc/mounts"))
    paths = [*FILES, *(f"{folder}/{file}" for folder in groups for file in GROUP_FILES)]
    for number in processors[:PROCESSORS_MAX]:
        folder = f"/sys/devices/system/cpu/cpu{number}"
        paths += [f"{folder}/cpufreq/scaling_governor", f"{folder}/cpufreq/scaling_driver"]
        if os.path.isdir(f"{folder}/cpuidle"):
            paths += [
                f"{folder}/cpuidle/state{state}/{file}"
                for state in range(IDLE_STATES_MAX)
                for file in ("latency", "disable", "name")
            ]
    for kdamond in (f"{DAMON}/{number}" for number in range(KDAMONDS_MAX)):
        if os.path.isdir(kdamond):
            schemes = (f"{kdamond}/contexts/0/schemes/{scheme}/action" for scheme in range(SCHEMES_MAX))
            paths += [f"{kdamond}/state", *schemes]
    texts = {path: text for path in paths if (text := read_text(path))}
    texts["kernel config"] = _kernel_config()
    soft = soft_limit(resource.RLIMIT_MEMLOCK)
    return Machine(
        texts,
        processors[:PROCESSORS_MAX],
        ask() if permission is None else permission,
        -1 if soft == resource.RLIM_INFINITY else soft,
        _has_capability(read_text("/proc/self/status"), CAP_IPC_LOCK),
        groups,
        host_here(),
        _engines(),
        *_own_slice(),
    )


def group_folders(cgroup: str, mounts: str) -> tuple[str, ...]:
    """The folders of a process's cpu groups, its own first, up to the root, of both versions of cgroup.

    Args:
        cgroup: Text of /proc/self/cgroup.
        mounts: Text of /proc/mounts.
    """
    points: dict[str, str] = {}
    for fields in (line.split() for line in mounts.splitlines()):
        if len(fields) >= 4 and fields[2] == "cgroup2":
            points.setdefault("", fields[1])
        elif len(fields) >= 4 and fields[2] == "cgroup" and "cpu" in fields[3].split(","):
            points.setdefault("cpu", fields[1])
    found: list[str] = []
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        key = "cpu" if "cpu" in controllers.split(",") else "" if number == "0" and not controllers else None
        if key is None or key not in points or ".." in path.split("/"):
            continue
        parts = [part for part in path.split("/") if part][:GROUPS_MAX]
        found += ["/".join([points[key], *parts[:length]]) for length in range(len(parts), -1, -1)]
    return tuple(found[: 2 * GROUPS_MAX])


def _kernel_config() -> str:
    """The options that the kernel was built with; empty if no file lists them."""
    try:
        with open("/proc/config.gz", "rb") as file:
            packed = file.read(TEXT_BYTES_MAX)
        return zlib.decompressobj(31).decompress(packed, 4 * TEXT_BYTES_MAX).decode(errors="replace")
    except (OSError, zlib.error):
        return read_text(f"/boot/config-{os.uname().release}")


def _has_capability(status: str, number: int) -> bool:
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            try:
                return bool(int(line.partition(":")[2], 16) >> number & 1)
            except ValueError:
                return False
    return False


def _own_slice() -> tuple[int, str]:
    """The slice of the calling thread, and the reason why it cannot be read."""
    try:
        return read_attributes(0).slice_ns, ""
    except OSError as e:
        return 0, failed("sched_getattr", e)


def _engines() -> dict[str, str]:
    found = {}
    for name in ENGINES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
