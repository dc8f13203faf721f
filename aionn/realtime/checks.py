"""The checks: what on this machine is against deadlines, over the texts of /proc and /sys. Pure.

A text that is absent or makes no sense never fails a check: it says that it cannot tell.

Source: the kernel's documentation of sched-rt-group, cgroup-v2, cpufreq, cpuidle, transhuge, proc(5). The delays are orders of
magnitude: without real-time scheduling those that were measured beside other programs on two processors, otherwise what the
setting bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from aionn.realtime.findings import Finding, Severity
from aionn.realtime.permission import Permission, Way
from aionn.realtime.remedies import Host, memlock_remedy

__all__ = ["CHECKS", "Machine", "check"]

FINE, NOTE, WARNING, SEVERE = Severity

LATE_UNPRIVILEGED_MS = 80.0
"""The worst frame of a stream beside a dozen busy programs, without any privilege."""

LATE_NICE_MS = 25.0
"""The same with nice -10."""

MEMLOCK_ENOUGH = 256 << 20
"""Locked memory that holds the pools and arenas of some streams."""

STEAL_NOTED, STEAL_SEVERE = 0.01, 0.05
"""Shares of time taken by the hypervisor: a hundredth is one late frame in a hundred."""

IDLE_NOTED_US = 100
"""Exit latency of an idle state from which on it is more than waking costs anyhow."""

CLOCKS_IN_REGISTERS = {
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
    "timebase",
    "riscv_clocksource",
}


class Machine(msgspec.Struct, frozen=True):
    """What was read.

    Attributes:
        texts: The text of each file by its path; absent ones are missing.
        processors: Those that this process may run on.
        permission: What it may do.
        memlock_bytes: RLIMIT_MEMLOCK, soft; negative for no limit.
        may_lock: Whether it has CAP_IPC_LOCK.
        groups: Folders of its cpu groups, its own first.
        host: Where it runs.
        engines: Versions of the engines that are installed, by distribution.
    """

    texts: Mapping[str, str]
    processors: tuple[int, ...]
    permission: Permission
    memlock_bytes: int
    may_lock: bool
    groups: tuple[str, ...]
    host: Host
    engines: Mapping[str, str]

    def text(self, path: str) -> str:
        """The text of a file without blanks around it; empty for none."""
        return self.texts.get(path, "").strip()

    def number(self, path: str) -> int | None:
        """The number in a file; None for none."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def check_permission(machine: Machine) -> Finding:
    """Whether threads may be put above those of other programs."""
    found = machine.permission
    told = str(found).removesuffix(f": {found.remedy}") if found.remedy else str(found)
    if found.is_realtime:
        return Finding("permission", FINE, told)
    if found.way is Way.NICE:
        return Finding("permission", WARNING, told, found.remedy, LATE_NICE_MS)
    return Finding("permission", SEVERE, told, found.remedy, LATE_UNPRIVILEGED_MS)


def check_throttling(machine: Machine) -> Finding:
    """How much of the time real-time threads may take."""
    name = "real-time throttling"
    runtime = machine.number("/proc/sys/kernel/sched_rt_runtime_us")
    period = machine.number("/proc/sys/kernel/sched_rt_period_us")
    if runtime is None or period is None or period <= 0:
        return Finding(name, NOTE, "kernel.sched_rt_runtime_us cannot be read")
    setting = f"real-time threads may take {runtime} of {period} us"
    if runtime < 0:
        return Finding(
            name,
            NOTE,
            "kernel.sched_rt_runtime_us is -1: only the watchdog keeps a spinning real-time thread from a processor",
            "sysctl kernel.sched_rt_runtime_us=950000",
        )
    if runtime == 0:
        return Finding(
            name,
            SEVERE,
            f"{setting}: none at all",
            "sysctl kernel.sched_rt_runtime_us=950000",
            LATE_UNPRIVILEGED_MS,
        )
    if runtime < 0.9 * period:
        late = (period - runtime) / 1e3
        return Finding(
            name, WARNING, f"{setting}, and then stop", "sysctl kernel.sched_rt_runtime_us=950000", late
        )
    return Finding(name, FINE, setting)


def check_group(machine: Machine) -> Finding:
    """Whether a control group stops this process when it has used its share of the processors."""
    name = "cpu group"
    for folder in machine.groups:
        limit = _group_limit(machine, folder)
        if limit is None:
            continue
        quota, period = limit
        told = f"{folder} may use {quota / period:.3g} processors, {quota / 1e3:g} ms in {period / 1e3:g} ms"
        stopped = re.search(r"^nr_throttled (\d+)$", machine.text(f"{folder}/cpu.stat"), re.MULTILINE)
        times = int(stopped[1]) if stopped else 0
        told += f", and was stopped {times} times" if times else ""
        return Finding(
            name,
            SEVERE if times else WARNING,
            told,
            "raise the limit of the group (docker run --cpus, the pod's limits.cpu, CPUQuota= of the unit) or remove it; "
            "real-time threads are not stopped by it",
            0.0 if machine.permission.is_realtime else period / 1e3,
        )
    if not machine.groups:
        return Finding(name, NOTE, "the groups of this process cannot be read")
    return Finding(name, FINE, "no group limits the processor time of this process")


def _group_limit(machine: Machine, folder: str) -> tuple[int, int] | None:
    """Quota and period in microseconds; None for no limit."""
    fields = machine.text(f"{folder}/cpu.max").split()
    if len(fields) == 2 and all(re.fullmatch(r"\d{1,18}", field) for field in fields):
        quota, period = map(int, fields)
    else:
        quota = machine.number(f"{folder}/cpu.cfs_quota_us") or -1
        period = machine.number(f"{folder}/cpu.cfs_period_us") or 0
    return (quota, period) if quota > 0 and period > 0 else None


def check_governor(machine: Machine) -> Finding:
    """How the frequency of the processors follows their load."""
    name = "frequency governor"
    found = {
        (machine.text(f"{folder}/scaling_governor"), machine.text(f"{folder}/scaling_driver"))
        for folder in (f"/sys/devices/system/cpu/cpu{number}/cpufreq" for number in machine.processors)
    } - {("", "")}
    if not found:
        return Finding(name, FINE, "the kernel does not change frequencies here, as in a virtual machine")
    governors = ", ".join(sorted({governor or "unknown" for governor, _ in found}))
    remedy = "cpupower frequency-set -g performance"
    if governors == "performance":
        return Finding(name, FINE, "performance")
    if any(governor == "powersave" and "pstate" not in driver for governor, driver in found):
        return Finding(
            name, WARNING, f"{governors}: the processors stay at their lowest frequency", remedy, 5.0
        )
    if {"ondemand", "conservative"} & {governor for governor, _ in found}:
        return Finding(
            name, WARNING, f"{governors}: frequencies rise 10 ms and more after the load", remedy, 10.0
        )
    return Finding(name, NOTE, f"{governors}: the first frame after a pause takes longer", remedy, 1.0)


def check_idle_states(machine: Machine) -> Finding:
    """How long a processor takes to wake."""
    name = "idle states"
    deepest: tuple[int, str] | None = None
    for number in machine.processors:
        for state in range(IDLE_STATES_MAX):
            folder = f"/sys/devices/system/cpu/cpu{number}/cpuidle/state{state}"
            latency = machine.number(f"{folder}/latency")
            if latency is not None and machine.text(f"{folder}/disable") != "1":
                deepest = max(deepest or (0, ""), (latency, machine.text(f"{folder}/name")))
    if deepest is None:
        return Finding(name, FINE, "the kernel chooses no idle states here")
    latency, state_name = deepest
    told = f"the deepest is {state_name or 'unnamed'}, which takes {latency} us to leave"
    if latency < IDLE_NOTED_US:
        return Finding(name, FINE, told)
    return Finding(
        name,
        NOTE if latency < 1000 else WARNING,
        told,
        "cpupower idle-set -D 100, or keep a number such as 50 written into the open file /dev/cpu_dma_latency",
        latency / 1e3,
    )


IDLE_STATES_MAX = 16
"""The kernel has at most ten."""


def check_swap(machine: Machine) -> Finding:
    """Whether memory can be on a disk when it is needed."""
    if "/proc/swaps" not in machine.texts:
        return Finding("swap", NOTE, "/proc/swaps cannot be read")
    areas = [fields[0] for line in machine.text("/proc/swaps").splitlines()[1:] if (fields := line.split())]
    if not areas:
        return Finding("swap", FINE, "none: only pages of programs can be taken away, and read again")
    if all("/zram" in area for area in areas):
        return Finding(
            "swap", NOTE, "compressed memory: a page that was taken away takes some 10 us", "", 0.1
        )
    told = f"{', '.join(areas[:4])}: a page that was taken away takes milliseconds to come back"
    if machine.may_lock or machine.memlock_bytes < 0:
        return Finding("swap", NOTE, f"{told}; this process may lock its pages", "sysctl vm.swappiness=1")
    return Finding("swap", WARNING, told, f"swapoff -a, or {memlock_remedy(machine.host)}", 50.0)


def check_overcommit(machine: Machine) -> Finding:
    """What happens when memory runs out."""
    mode = machine.number("/proc/sys/vm/overcommit_memory")
    match mode:
        case 0 | 2:
            return Finding("overcommit", FINE, f"vm.overcommit_memory is {mode}")
        case 1:
            return Finding(
                "overcommit",
                NOTE,
                "vm.overcommit_memory is 1: no allocation fails, and the kernel kills a process when memory runs out",
                "sysctl vm.overcommit_memory=0",
            )
        case _:
            return Finding("overcommit", NOTE, "vm.overcommit_memory cannot be read")


def check_huge_pages(machine: Machine) -> Finding:
    """Whether a page fault may stop to move memory."""
    name = "transparent huge pages"
    folder = "/sys/kernel/mm/transparent_hugepage"
    enabled, defrag = (_chosen(machine.text(f"{folder}/{file}")) for file in ("enabled", "defrag"))
    if not enabled:
        return Finding(name, FINE, "the kernel has none")
    told = f"enabled: {enabled}, defrag: {defrag or 'unknown'}"
    if enabled == "always" and defrag == "always":
        return Finding(
            name,
            WARNING,
            f"{told}: a page fault may move memory for milliseconds",
            f"echo madvise > {folder}/enabled; echo defer+madvise > {folder}/defrag",
            10.0,
        )
    if enabled == "always":
        return Finding(
            name,
            NOTE,
            f"{told}: khugepaged moves memory of running programs",
            f"echo madvise > {folder}/enabled",
            1.0,
        )
    return Finding(name, FINE, told)


def check_memlock(machine: Machine) -> Finding:
    """How much memory may be locked."""
    name = "locked memory"
    if machine.may_lock or machine.memlock_bytes < 0:
        return Finding(name, FINE, "without limit")
    told = f"at most {machine.memlock_bytes / (1 << 20):.3g} MiB (RLIMIT_MEMLOCK)"
    if machine.memlock_bytes >= MEMLOCK_ENOUGH:
        return Finding(name, FINE, told)
    return Finding(name, NOTE, f"{told}: larger pools are touched, not locked", memlock_remedy(machine.host))


def check_clock(machine: Machine) -> Finding:
    """What reading the clock costs."""
    folder = "/sys/devices/system/clocksource/clocksource0"
    current = machine.text(f"{folder}/current_clocksource")
    available = machine.text(f"{folder}/available_clocksource").split()
    if current in CLOCKS_IN_REGISTERS:
        return Finding("clock source", FINE, current)
    if not current:
        return Finding("clock source", NOTE, "the clock source cannot be read")
    better = next((name for name in available if name in CLOCKS_IN_REGISTERS), "")
    remedy = (
        f"echo {better} > {folder}/current_clocksource"
        if better
        else "look in the kernel's log for why tsc is unstable"
    )
    if "jiffies" in current:
        return Finding(
            "clock source", SEVERE, f"{current}: time goes on in steps of milliseconds", remedy, 10.0
        )
    return Finding(
        "clock source", WARNING, f"{current}: each reading takes a microsecond or more", remedy, 0.1
    )


def check_steal(machine: Machine) -> Finding:
    """How much of the time the hypervisor ran something else."""
    share = steal_share("", machine.text("/proc/stat"))
    if share is None:
        return Finding("steal time", NOTE, "/proc/stat cannot be read")
    told = f"the hypervisor took {100 * share:.2g} % of the time since the start"
    if share < STEAL_NOTED:
        return Finding("steal time", FINE, told if share else "none")
    return Finding(
        "steal time",
        SEVERE if share >= STEAL_SEVERE else WARNING,
        told,
        "use a machine with processors of its own, or fewer of them on a host that is not oversold",
        50.0 if share >= STEAL_SEVERE else 10.0,
    )


def steal_share(earlier: str, later: str) -> float | None:
    """The share of steal time between two texts of /proc/stat; None where they make no sense.

    Args:
        earlier: Empty for the start of the machine.
        later: After it.
    """
    counts = [_ticks(text) for text in (earlier, later)]
    before, after = counts[0] or [0] * 8, counts[1]
    if after is None:
        return None
    total = sum(after) - sum(before)
    return max(0.0, (after[7] - before[7]) / total) if total > 0 else 0.0


def _ticks(text: str) -> list[int] | None:
    """User, nice, system, idle, iowait, irq, softirq and steal; guests are counted in the first two already."""
    for line in text.splitlines()[:1]:
        fields = line.split()
        if (
            fields
            and fields[0] == "cpu"
            and len(fields) >= 9
            and all(field.isdecimal() for field in fields[1:9])
        ):
            return [int(field) for field in fields[1:9]]
    return None


def check_processors(machine: Machine) -> Finding:
    """Which processors this process may run on, and whether the kernel spreads threads over them."""
    count = len(machine.processors)
    isolated = numbers_in(machine.text("/sys/devices/system/cpu/isolated"))
    ours = sorted(isolated & set(machine.processors))
    told = f"{count} may be used, {len(isolated)} of the machine are isolated"
    if count == 1:
        return Finding(
            "processors",
            WARNING,
            "1 may be used: the application, the driver and the watchdog take turns on it",
            "let the process run on two processors or more (taskset, cpuset.cpus)",
            1.0,
        )
    if ours and len(ours) > 1:
        return Finding(
            "processors",
            WARNING,
            f"{told}, of which this process may use {len(ours)}: the kernel does not spread threads over those",
            "give the process one isolated processor at most, or use cpuset.cpus.partition=root instead of isolcpus",
            LATE_UNPRIVILEGED_MS,
        )
    return Finding("processors", FINE, told)


def numbers_in(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,7``; what makes no sense is left out."""
    found: set[int] = set()
    for part in text.split(","):
        if ends := re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part):
            found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return found


def check_preemption(machine: Machine) -> Finding:
    """Whether the kernel leaves a long system call of another program for a real-time thread."""
    name = "preemption"
    version = machine.text("/proc/version")
    if "PREEMPT_RT" in version or machine.text("/sys/kernel/realtime") == "1":
        return Finding(name, FINE, "PREEMPT_RT")
    model = _preemption_model(machine, version)
    remedy = (
        "boot with preempt=full"
        if "PREEMPT_DYNAMIC" in version
        else "use a kernel with CONFIG_PREEMPT or PREEMPT_RT"
    )
    match model:
        case "full" | "lazy":
            return Finding(name, FINE, model)
        case "voluntary":
            return Finding(
                name,
                NOTE,
                "voluntary: a long system call of another program delays by a millisecond",
                remedy,
                1.0,
            )
        case "none":
            return Finding(
                name,
                NOTE,
                "none: a long system call of another program delays by some milliseconds",
                remedy,
                4.0,
            )
        case _:
            return Finding(name, NOTE, "the preemption model of the kernel cannot be read", "", 4.0)


def _preemption_model(machine: Machine, version: str) -> str:
    chosen = re.search(r"\((\w+)\)", machine.text("/sys/kernel/debug/sched/preempt"))
    if chosen:
        return chosen[1]
    config = machine.text("kernel config")
    if "PREEMPT_DYNAMIC" in version:
        wanted = re.search(r"(?:^|\s)preempt=(\w+)", machine.text("/proc/cmdline"))
        if wanted and wanted[1] in ("full", "lazy", "voluntary", "none"):
            return wanted[1]
    elif re.search(r"\bPREEMPT\b", version):
        return "full"
    for option, model in (
        ("CONFIG_PREEMPT", "full"),
        ("CONFIG_PREEMPT_LAZY", "lazy"),
        ("CONFIG_PREEMPT_VOLUNTARY", "voluntary"),
        ("CONFIG_PREEMPT_NONE", "none"),
    ):
        if re.search(rf"^{option}=y$", config, re.MULTILINE):
            return model
    return ""


LOCK_HOLDERS = {
    "ai-edge-litert": (
        None,
        "its CompiledModel holds it while a model runs; its Interpreter, which aionn uses, does not",
    ),
    "onnxruntime": ((1, 12), "before 1.12 it holds it during io binding"),
}
"""Versions of engines that hold the interpreter's lock: those before the first number, or all for None."""


def check_engines(machine: Machine) -> Finding:
    """Which engines keep every other thread of their process from running."""
    notes, warnings = [], []
    for name, version in machine.engines.items():
        before, what = LOCK_HOLDERS.get(name, ((0,), ""))
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if what and before is None:
            notes.append(f"{name} {version}: {what}")
        elif before is not None and found < before:
            warnings.append(f"{name} {version}: {what}")
    told = "; ".join([*warnings, *notes])
    if not told:
        listed = ", ".join(f"{name} {version}" for name, version in machine.engines.items())
        return Finding("engines", FINE, listed or "none is installed")
    remedy = "keep drivers in processes of their own, which is the default"
    return Finding("engines", WARNING if warnings else NOTE, f"the interpreter's lock: {told}", remedy)


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_permission,
    check_throttling,
    check_group,
    check_governor,
    check_idle_states,
    check_swap,
    check_overcommit,
    check_huge_pages,
    check_memlock,
    check_clock,
    check_steal,
    check_processors,
    check_preemption,
    check_engines,
)


def check(machine: Machine) -> list[Finding]:
    """What every check found, in a fixed order."""
    return [each(machine) for each in CHECKS]


def _chosen(text: str) -> str:
    """The word in square brackets."""
    found = re.search(r"\[([\w+]+)\]", text)
    return found[1] if found else ""
