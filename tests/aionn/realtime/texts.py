"""A machine that has nothing against deadlines, as texts of /proc and /sys; tests change one text at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from aionn.realtime.checks import Machine
from aionn.realtime.permission import Permission, Way
from aionn.realtime.priorities import Priorities
from aionn.realtime.remedies import Host

CPU = "/sys/devices/system/cpu"
CLOCK = "/sys/devices/system/clocksource/clocksource0"
PAGES = "/sys/kernel/mm/transparent_hugepage"
GROUP = "/sys/fs/cgroup/system.slice/camera.service"

GOOD_TEXTS = {
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz-6.12 root=/dev/nvme0n1p2 quiet\n",
    "/proc/stat": "cpu  1000 0 500 98500 0 0 0 0 0 0\ncpu0 1 2 3\n",
    "/proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
    "/proc/sys/kernel/sched_rt_period_us": "1000000\n",
    "/proc/sys/kernel/sched_rt_runtime_us": "950000\n",
    "/proc/sys/vm/overcommit_memory": "0\n",
    "/proc/version": "Linux version 6.12.9 (build@host) (gcc 14.2) #1 SMP PREEMPT_DYNAMIC Debian 6.12.9-1\n",
    f"{CLOCK}/available_clocksource": "tsc hpet acpi_pm \n",
    f"{CLOCK}/current_clocksource": "tsc\n",
    f"{CPU}/isolated": "\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate\n",
    f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu1/cpufreq/scaling_driver": "intel_pstate\n",
    f"{CPU}/cpu0/cpuidle/state0/latency": "0\n",
    f"{CPU}/cpu0/cpuidle/state0/name": "POLL\n",
    f"{CPU}/cpu0/cpuidle/state0/disable": "0\n",
    "/sys/kernel/debug/sched/preempt": "none voluntary (full) lazy\n",
    f"{PAGES}/defrag": "always defer defer+madvise [madvise] never\n",
    f"{PAGES}/enabled": "always [madvise] never\n",
    f"{GROUP}/cpu.max": "max 100000\n",
    f"{GROUP}/cpu.stat": "usage_usec 5\nnr_periods 0\nnr_throttled 0\n",
    "kernel config": "CONFIG_PREEMPT_DYNAMIC=y\nCONFIG_PREEMPT=y\n",
}
GRANTED = Permission(Way.LIMIT, Priorities(5, 10, 15))

GOOD = Machine(
    GOOD_TEXTS,
    processors=(0, 1),
    permission=GRANTED,
    memlock_bytes=-1,
    may_lock=False,
    groups=(GROUP, "/sys/fs/cgroup/system.slice", "/sys/fs/cgroup"),
    host=Host(),
    engines={},
    slice_ns=2_800_000,
)


def machine(texts: dict[str, str | None] | None = None, **changes: Any) -> Machine:
    """The good machine with other texts (None for an absent one) and other attributes."""
    merged = {**GOOD_TEXTS, **(texts or {})}
    return msgspec.structs.replace(
        GOOD, texts={path: text for path, text in merged.items() if text is not None}, **changes
    )
