"""The checks: settings of this machine that delay frames, found in the texts of /proc and /sys. Pure.

No check fails because a text is absent or cannot be parsed: its finding reports that the setting cannot be read.

Source: the kernel's documentation of sched-rt-group, cgroup-v2, cpufreq, cpuidle, transhuge, damon, proc(5). The delays are orders
of magnitude: without real-time scheduling they were measured while other programs ran on two processors; otherwise they are the
bound that the setting gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from aionn.realtime.findings import Finding, Severity
from aionn.realtime.permission import Permission, Way
from aionn.realtime.remedies import Host, memlock_remedy
from aionn.realtime.threads.slices import SLICE_NS

__all__ = ["CHECKS", "Machine", "check"]

FINE, NOTE, WARNING, SEVERE = Severity

LATE_UNPRIVILEGED_MS = 80.0
"""Delay of the latest frame of a stream while a dozen other programs are busy, without any privilege."""

LATE_NICE_MS = 25.0
"""The same with nice -10."""

MEMLOCK_ENOUGH = 256 << 20
"""A limit of locked memory that is enough for the pools and arenas of some streams."""

STEAL_NOTED, STEAL_SEVERE = 0.01, 0.05
"""Shares of time taken by the hypervisor that cause a warning and a severe finding: a hundredth is one late frame in a hundred."""

IDLE_NOTED_US = 100
"""Exit latency of an idle state that is reported: lower ones are less than a wake-up takes in any case."""

CLOCKS_IN_REGISTERS = {
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
    "timebase",
    "riscv_clocksource",
}


class Machine(msgspec.Struct, frozen=True):
    """The state of the machine that the checks use.

    Attributes:
        texts: The text of each file by its path; absent files have no entry.
        processors: The processors that this process may run on.
        permission: The scheduling that this process may use.
        memlock_bytes: RLIMIT_MEMLOCK, soft; a negative number means no limit, None that a sandbox refuses to read it.
        may_lock: Whether this process has CAP_IPC_LOCK.
        groups: Folders of the cpu groups of this process, its own first.
        host: The environment that this process runs in.
        engines: Versions of the engines that are installed, by distribution.
        slice_ns: The slice of an ordinary thread; 0 if the kernel has no slices of single threads, or if it cannot be read.
        slice_refusal: The reason why the slice cannot be read; empty if it can.
    """

    texts: Mapping[str, str]
    processors: tuple[int, ...]
    permission: Permission
    memlock_bytes: int | None
    may_lock: bool
    groups: tuple[str, ...]
    host: Host
    engines: Mapping[str, str]
    slice_ns: int = 0
    slice_refusal: str = ""

    @property
    def locks_all(self) -> bool:
        """Whether this process may lock all of its memory."""
        return self.may_lock or (self.memlock_bytes is not None and self.memlock_bytes < 0)

    def text(self, path: str) -> str:
        """The text of a file without blanks around it; empty if the file is absent."""
        return self.texts.get(path, "").strip()

    def number(self, path: str) -> int | None:
        """The number in a file; None if the file is absent or holds no number."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def check_permission(machine: Machine) -> Finding:
    """Whether threads may run at a higher priority than those of other programs."""
    found = machine.permission
    sentence = str(found).removesuffix(f": {found.remedy}") if found.remedy else str(found)
    if found.is_realtime:
        return Finding("permission", FINE, sentence)
    if found.way is Way.NICE:
        return Finding("permission", WARNING, sentence, found.remedy, LATE_NICE_MS)
    return Finding("permission", SEVERE, sentence, found.remedy, LATE_UNPRIVILEGED_MS)


def check_slices(machine: Machine) -> Finding:
    """Whether ordinary threads may have shorter slices than those of other programs: the means where nothing else is permitted."""
    name = "slices"
    if machine.slice_ns:
        return Finding(
            name,
            FINE,
            f"ordinary threads have {machine.slice_ns / 1e6:.3g} ms, those of aionn may have {SLICE_NS / 1e6:g} ms",
        )
    sentence = (
        f"the slice of an ordinary thread cannot be read: {machine.slice_refusal}"
        if machine.slice_refusal
        else "the kernel has no slices of single threads"
    )
    if machine.permission.is_realtime:
        return Finding(name, FINE, f"{sentence}; threads under real-time scheduling need none")
    remedy = "permit sched_setattr and sched_getattr" if machine.slice_refusal else "use Linux 6.12 or newer"
    return Finding(name, NOTE, sentence, remedy)


def check_throttling(machine: Machine) -> Finding:
    """The share of the time that real-time threads may run."""
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
            "kernel.sched_rt_runtime_us is -1: only the watchdog stops a real-time thread that does not yield its processor",
            "sysctl kernel.sched_rt_runtime_us=950000",
        )
    if runtime == 0:
        return Finding(
            name,
            SEVERE,
            f"{setting}: they cannot run",
            "sysctl kernel.sched_rt_runtime_us=950000",
            LATE_UNPRIVILEGED_MS,
        )
    if runtime < 0.9 * period:
        late = (period - runtime) / 1e3
        return Finding(
            name,
            WARNING,
            f"{setting}, and then are stopped",
            "sysctl kernel.sched_rt_runtime_us=950000",
            late,
        )
    return Finding(name, FINE, f"{setting}: the watchdog puts back earlier those that do not yield")


def check_group(machine: Machine) -> Finding:
    """Whether a control group stops this process after it has used its share of processor time."""
    name = "cpu group"
    limits = [(limit, folder) for folder in machine.groups if (limit := _group_limit(machine, folder))]
    if limits:
        # A group gets no more than the groups above it.
        (quota, period), folder = min(limits, key=lambda limited: limited[0][0] / limited[0][1])
        sentence = (
            f"{folder} may use {quota / period:.3g} processors, {quota / 1e3:g} ms in {period / 1e3:g} ms"
        )
        stopped = re.search(r"^nr_throttled (\d+)$", machine.text(f"{folder}/cpu.stat"), re.MULTILINE)
        times = int(stopped[1]) if stopped else 0
        sentence += f", and was stopped {times} times" if times else ""
        return Finding(
            name,
            SEVERE if times else WARNING,
            sentence,
            "raise the limit of the group (docker run --cpus, the pod's limits.cpu, CPUQuota= of the unit) or remove it; "
            "it does not stop real-time threads",
            0.0 if machine.permission.is_realtime else period / 1e3,
        )
    if not machine.groups:
        return Finding(name, NOTE, "the control groups of this process cannot be read")
    return Finding(name, FINE, "no control group limits the processor time of this process")


def _group_limit(machine: Machine, folder: str) -> tuple[int, int] | None:
    """Quota and period in microseconds; None means no limit."""
    fields = machine.text(f"{folder}/cpu.max").split()
    if len(fields) == 2 and all(re.fullmatch(r"\d{1,18}", field) for field in fields):
        quota, period = map(int, fields)
    else:
        quota = machine.number(f"{folder}/cpu.cfs_quota_us") or -1
        period = machine.number(f"{folder}/cpu.cfs_period_us") or 0
    return (quota, period) if quota > 0 and period > 0 else None


def check_governor(machine: Machine) -> Finding:
    """The rule by which the frequency of the processors follows their load."""
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
    """The time that a processor takes to wake."""
    name = "idle states"
    deepest: tuple[int, str] | None = None
    for number in machine.processors:
        for state in range(IDLE_STATES_MAX):
            folder = f"/sys/devices/system/cpu/cpu{number}/cpuidle/state{state}"
            latency = machine.number(f"{folder}/latency")
            if latency is not None and machine.text(f"{folder}/disable") != "1":
                deepest = max(deepest or (0, ""), (latency, machine.text(f"{folder}/name")))
    if deepest is None:
        return Finding(name, FINE, "the kernel lists no idle states, as in a virtual machine")
    latency, state_name = deepest
    sentence = f"the deepest is {state_name or 'unnamed'}, which takes {latency} us to leave"
    if latency < IDLE_NOTED_US:
        return Finding(name, FINE, sentence)
    return Finding(
        name,
        NOTE if latency < 1000 else WARNING,
        sentence,
        "cpupower idle-set -D 100, or keep a number such as 50 written into the open file /dev/cpu_dma_latency",
        latency / 1e3,
    )


IDLE_STATES_MAX = 16
"""The kernel has at most ten."""


def check_swap(machine: Machine) -> Finding:
    """Whether the kernel may move memory of this process to a disk."""
    if "/proc/swaps" not in machine.texts:
        return Finding("swap", NOTE, "/proc/swaps cannot be read")
    areas = [fields[0] for line in machine.text("/proc/swaps").splitlines()[1:] if (fields := line.split())]
    if not areas:
        return Finding(
            "swap",
            FINE,
            "no swap area: the kernel can reclaim only pages of files, such as code, and reads them again",
        )
    if all("/zram" in area for area in areas):
        return Finding("swap", NOTE, "compressed memory: reading a swapped page takes some 10 us", "", 0.1)
    sentence = f"{', '.join(areas[:4])}: reading a swapped page takes milliseconds"
    if machine.locks_all:
        return Finding("swap", NOTE, f"{sentence}; this process may lock its pages", "sysctl vm.swappiness=1")
    return Finding("swap", WARNING, sentence, f"swapoff -a, or {memlock_remedy(machine.host)}", 50.0)


DAMON = "/sys/kernel/mm/damon/admin/kdamonds"
DAMON_RECLAIM = "/sys/module/damon_reclaim/parameters/enabled"
KDAMONDS_MAX, SCHEMES_MAX = 4, 8
"""Most threads of DAMON, and of the schemes of each, that are read; usually there is one."""


def check_idle_memory(machine: Machine) -> Finding:
    """Whether the kernel reclaims memory that was not used for a while, though memory is free."""
    name = "idle memory"
    by = [f"{DAMON}/{k}/state" for k in range(KDAMONDS_MAX) if _pages_out(machine, f"{DAMON}/{k}")]
    remedy = f"echo off > {by[0]}" if by else f"echo N > {DAMON_RECLAIM}"
    if machine.text(DAMON_RECLAIM) in ("Y", "1"):
        by.append(DAMON_RECLAIM)
    if not by:
        return Finding(name, FINE, "the kernel reclaims memory only where memory is short")
    sentence = "DAMON reclaims memory that was not used for a while: code and data after a pause are read from a disk again"
    if machine.locks_all:
        return Finding(name, NOTE, f"{sentence}; this process may lock its pages", remedy)
    return Finding(name, WARNING, sentence, f"{remedy}, or {memlock_remedy(machine.host)}", 50.0)


def _pages_out(machine: Machine, kdamond: str) -> bool:
    """Whether a thread of DAMON runs, and has a scheme that reclaims."""
    actions = (machine.text(f"{kdamond}/contexts/0/schemes/{scheme}/action") for scheme in range(SCHEMES_MAX))
    return machine.text(f"{kdamond}/state") == "on" and "pageout" in actions


def check_overcommit(machine: Machine) -> Finding:
    """The kernel's behaviour when memory runs out."""
    mode = machine.number("/proc/sys/vm/overcommit_memory")
    match mode:
        case 0:
            return Finding(
                "overcommit",
                FINE,
                "vm.overcommit_memory is 0: an allocation that exceeds the memory of the machine fails where it is made",
            )
        case 2:
            return Finding(
                "overcommit",
                FINE,
                "vm.overcommit_memory is 2: an allocation fails before memory runs out, and the kernel need not kill a process",
            )
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
    """Whether a page fault may wait while the kernel moves memory."""
    name = "transparent huge pages"
    folder = "/sys/kernel/mm/transparent_hugepage"
    enabled, defrag = (_chosen(machine.text(f"{folder}/{file}")) for file in ("enabled", "defrag"))
    if not enabled:
        return Finding(name, FINE, "the kernel does not use them")
    sentence = f"enabled: {enabled}, defrag: {defrag or 'unknown'}"
    if enabled == "always" and defrag == "always":
        return Finding(
            name,
            WARNING,
            f"{sentence}: a page fault may move memory for milliseconds",
            f"echo madvise > {folder}/enabled; echo defer+madvise > {folder}/defrag",
            10.0,
        )
    if enabled == "always":
        return Finding(
            name,
            NOTE,
            f"{sentence}: khugepaged moves memory of running programs",
            f"echo madvise > {folder}/enabled",
            1.0,
        )
    use = (
        "the kernel uses none"
        if enabled == "never"
        else "the kernel uses them only where a program requests them"
    )
    return Finding(name, FINE, f"{sentence}: {use}")


def check_memlock(machine: Machine) -> Finding:
    """The amount of memory that this process may lock."""
    name = "locked memory"
    if machine.locks_all:
        return Finding(name, FINE, "without a limit")
    if machine.memlock_bytes is None:
        return Finding(
            name,
            NOTE,
            "a sandbox refuses to read RLIMIT_MEMLOCK: pools are touched, and locked as far as it permits",
            "allow prlimit64 in the seccomp filter of the sandbox",
        )
    sentence = f"at most {machine.memlock_bytes / (1 << 20):.3g} MiB (RLIMIT_MEMLOCK)"
    if machine.memlock_bytes >= MEMLOCK_ENOUGH:
        return Finding(name, FINE, sentence)
    return Finding(
        name, NOTE, f"{sentence}: larger pools are touched, not locked", memlock_remedy(machine.host)
    )


def check_clock(machine: Machine) -> Finding:
    """The time that reading the clock takes."""
    folder = "/sys/devices/system/clocksource/clocksource0"
    current = machine.text(f"{folder}/current_clocksource")
    available = machine.text(f"{folder}/available_clocksource").split()
    if current in CLOCKS_IN_REGISTERS:
        return Finding("clock source", FINE, f"{current}: the clock is read without a system call")
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
            "clock source", SEVERE, f"{current}: time advances in steps of milliseconds", remedy, 10.0
        )
    return Finding(
        "clock source", WARNING, f"{current}: each reading takes a microsecond or more", remedy, 0.1
    )


def check_steal(machine: Machine) -> Finding:
    """The share of the time in which the hypervisor ran something else."""
    share = steal_share("", machine.text("/proc/stat"))
    if share is None:
        return Finding("steal time", NOTE, "/proc/stat cannot be read")
    sentence = f"the hypervisor took {100 * share:.2g} % of the time since the machine started"
    if share < STEAL_NOTED:
        return Finding("steal time", FINE, sentence if share else "none")
    return Finding(
        "steal time",
        SEVERE if share >= STEAL_SEVERE else WARNING,
        sentence,
        "use a machine with processors of its own, or fewer of them on a host that is not oversold",
        50.0 if share >= STEAL_SEVERE else 10.0,
    )


def steal_share(earlier: str, later: str) -> float | None:
    """The share of steal time between two texts of /proc/stat; None if the later text cannot be parsed.

    Args:
        earlier: The first text; empty means the start of the machine.
        later: The second text.
    """
    counts = [_ticks(text) for text in (earlier, later)]
    before, after = counts[0] or [0] * 8, counts[1]
    if after is None:
        return None
    total = sum(after) - sum(before)
    return max(0.0, (after[7] - before[7]) / total) if total > 0 else 0.0


def _ticks(text: str) -> list[int] | None:
    """User, nice, system, idle, iowait, irq, softirq and steal; the first two include the time of guests."""
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
    """The processors that this process may run on, and whether the kernel distributes threads over them."""
    count = len(machine.processors)
    isolated = numbers_in(machine.text("/sys/devices/system/cpu/isolated"))
    ours = sorted(isolated & set(machine.processors))
    sentence = f"this process may use {count}, {len(isolated)} of the machine are isolated"
    if count == 1:
        return Finding(
            "processors",
            WARNING,
            "this process may use 1: the application, the driver and the watchdog share it",
            "allow the process two processors or more (taskset, cpuset.cpus)",
            1.0,
        )
    if ours and len(ours) > 1:
        return Finding(
            "processors",
            WARNING,
            f"{sentence}, of which this process may use {len(ours)}: the kernel does not distribute threads over isolated ones",
            "give the process one isolated processor at most, or use cpuset.cpus.partition=root instead of isolcpus",
            LATE_UNPRIVILEGED_MS,
        )
    return Finding("processors", FINE, sentence)


def numbers_in(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,7``; parts that cannot be parsed are ignored."""
    found: set[int] = set()
    for part in text.split(","):
        if ends := re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part):
            found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return found


UNPREEMPTED_MS = 20.0
"""Measured beside ``stress-ng --cpu 8 --io 2 --vm 2`` on Linux 6.18 with PREEMPT_NONE: a thread under SCHED_RR that only sleeps
woke up to 20.8 ms late."""


def check_preemption(machine: Machine) -> Finding:
    """Whether the kernel interrupts a long system call of another program to run a real-time thread."""
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
                "voluntary: a long system call of another program causes a delay of a millisecond",
                remedy,
                1.0,
            )
        case "none":
            return Finding(
                name,
                WARNING,
                "none: system calls of programs that write or free much memory cause delays of 10 ms and more",
                remedy,
                UNPREEMPTED_MS,
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
        "its CompiledModel holds the interpreter's lock while a model runs (its Interpreter, which aionn uses, does not)",
    ),
    "onnxruntime": ((1, 12), "versions before 1.12 hold the interpreter's lock during io binding"),
}
"""Engines that hold the interpreter's lock: the first version that does not, where None means that all do, and the reason."""


def check_engines(machine: Machine) -> Finding:
    """The installed engines that stop all other threads of their process while they run."""
    notes, warnings = [], []
    for name, version in machine.engines.items():
        before, what = LOCK_HOLDERS.get(name, ((0,), ""))
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if what and before is None:
            notes.append(f"{name} {version}: {what}")
        elif before is not None and found < before:
            warnings.append(f"{name} {version}: {what}")
    sentence = "; ".join([*warnings, *notes])
    if not sentence:
        listed = ", ".join(f"{name} {version}" for name, version in machine.engines.items())
        return Finding("engines", FINE, listed or "none is installed")
    remedy = "run drivers in processes of their own, which is the default"
    return Finding("engines", WARNING if warnings else NOTE, sentence, remedy)


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_permission,
    check_slices,
    check_throttling,
    check_group,
    check_governor,
    check_idle_states,
    check_swap,
    check_idle_memory,
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
    """The findings of all checks, in the order of ``CHECKS``."""
    return [each(machine) for each in CHECKS]


def _chosen(text: str) -> str:
    """The word in square brackets."""
    found = re.search(r"\[([\w+]+)\]", text)
    return found[1] if found else ""
