"""What each check finds in texts of /proc and /sys: real-looking ones, broken ones and none."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from aionn.realtime.checks import CHECKS, DAMON, DAMON_RECLAIM, check, numbers_in, steal_share
from aionn.realtime.findings import Distribution, Finding, Gaps, Measured, Severity, judge
from aionn.realtime.machine import group_folders
from aionn.realtime.permission import Permission, Refusal, Way
from aionn.realtime.remedies import Cause
from tests.aionn.realtime.texts import CLOCK, CPU, GOOD, GOOD_TEXTS, GROUP, PAGES, machine

FINE, NOTE, WARNING, SEVERE = Severity
NOTHING = Permission(
    Way.NONE,
    refusals=(Refusal(Way.LIMIT, Cause.NOT_PERMITTED, "RLIMIT_RTPRIO is 0"),),
    remedy="ask the administrator",
)


def found(name: str, texts: dict[str, str | None] | None = None, **changes: Any) -> Finding:
    return next(each for each in check(machine(texts, **changes)) if each.name == name)


def test_nothing_is_found_on_a_good_machine() -> None:
    assert [(each.name, each.severity, each.remedy, each.late_ms) for each in check(GOOD)] == [
        (each.name, FINE, "", 0.0) for each in check(GOOD)
    ]


def test_every_finding_that_is_bad_has_a_remedy() -> None:
    bad = [case for case in CASES if case[2] in (WARNING, SEVERE)]
    for name, texts, _, _ in bad:
        assert found(name, texts).remedy, name


CASES: list[tuple[str, dict[str, str | None], Severity, str]] = [
    ("real-time throttling", {"/proc/sys/kernel/sched_rt_runtime_us": "-1"}, NOTE, "is -1"),
    ("real-time throttling", {"/proc/sys/kernel/sched_rt_runtime_us": "0"}, SEVERE, "they cannot run"),
    (
        "real-time throttling",
        {"/proc/sys/kernel/sched_rt_runtime_us": "500000"},
        WARNING,
        "500000 of 1000000",
    ),
    ("real-time throttling", {"/proc/sys/kernel/sched_rt_runtime_us": None}, NOTE, "cannot be read"),
    ("real-time throttling", {"/proc/sys/kernel/sched_rt_period_us": "0"}, NOTE, "cannot be read"),
    ("cpu group", {f"{GROUP}/cpu.max": "150000 100000"}, WARNING, "1.5 processors, 150 ms in 100 ms"),
    (
        "cpu group",
        {
            f"{GROUP}/cpu.max": "20000 100000",
            f"{GROUP}/cpu.stat": "nr_periods 9\nnr_throttled 7\nthrottled_usec 5",
        },
        SEVERE,
        "was stopped 7 times",
    ),
    (
        "cpu group",
        {"/sys/fs/cgroup/system.slice/cpu.max": "100000 100000"},
        WARNING,
        "system.slice may use 1 processors",
    ),
    (
        "cpu group",
        {
            f"{GROUP}/cpu.max": "400000 100000",
            "/sys/fs/cgroup/system.slice/cpu.max": "10000 50000",
            "/sys/fs/cgroup/system.slice/cpu.stat": "nr_throttled 7",
        },
        SEVERE,
        "system.slice may use 0.2 processors, 10 ms in 50 ms, and was stopped 7 times",
    ),
    ("cpu group", {f"{GROUP}/cpu.max": None, f"{GROUP}/cpu.cfs_quota_us": "-1"}, FINE, "no control group"),
    (
        "cpu group",
        {
            f"{GROUP}/cpu.max": None,
            f"{GROUP}/cpu.cfs_quota_us": "50000",
            f"{GROUP}/cpu.cfs_period_us": "100000",
        },
        WARNING,
        "0.5 processors",
    ),
    ("cpu group", {f"{GROUP}/cpu.max": "many few"}, FINE, "no control group"),
    (
        "frequency governor",
        {f"{CPU}/cpu1/cpufreq/scaling_governor": "powersave"},
        NOTE,
        "performance, powersave",
    ),
    (
        "frequency governor",
        {
            f"{CPU}/cpu1/cpufreq/scaling_governor": "powersave",
            f"{CPU}/cpu1/cpufreq/scaling_driver": "acpi-cpufreq",
        },
        WARNING,
        "lowest frequency",
    ),
    (
        "frequency governor",
        {f"{CPU}/cpu0/cpufreq/scaling_governor": "ondemand"},
        WARNING,
        "10 ms and more after",
    ),
    ("frequency governor", {f"{CPU}/cpu0/cpufreq/scaling_governor": "schedutil"}, NOTE, "schedutil"),
    ("frequency governor", {path: None for path in GOOD_TEXTS if "cpufreq" in path}, FINE, "virtual machine"),
    (
        "idle states",
        {f"{CPU}/cpu1/cpuidle/state3/latency": "890", f"{CPU}/cpu1/cpuidle/state3/name": "C10"},
        NOTE,
        "C10, which takes 890 us",
    ),
    (
        "idle states",
        {f"{CPU}/cpu1/cpuidle/state3/latency": "890", f"{CPU}/cpu1/cpuidle/state3/disable": "1"},
        FINE,
        "POLL",
    ),
    ("idle states", {f"{CPU}/cpu1/cpuidle/state3/latency": "5000"}, WARNING, "5000 us"),
    ("idle states", {path: None for path in GOOD_TEXTS if "cpuidle" in path}, FINE, "no idle states"),
    (
        "swap",
        {"/proc/swaps": GOOD_TEXTS["/proc/swaps"] + "/dev/sda2 partition 8388604 0 -2\n"},
        NOTE,
        "/dev/sda2",
    ),
    (
        "swap",
        {"/proc/swaps": GOOD_TEXTS["/proc/swaps"] + "/dev/zram0 partition 8388604 0 100\n"},
        NOTE,
        "compressed",
    ),
    ("swap", {"/proc/swaps": None}, NOTE, "cannot be read"),
    ("idle memory", {}, FINE, "only where memory is short"),
    (
        "idle memory",
        {f"{DAMON}/0/state": "on", f"{DAMON}/0/contexts/0/schemes/1/action": "pageout"},
        NOTE,
        "lock its pages",
    ),
    (
        "idle memory",
        {f"{DAMON}/0/state": "on", f"{DAMON}/0/contexts/0/schemes/0/action": "stat"},
        FINE,
        "only where",
    ),
    (
        "idle memory",
        {f"{DAMON}/0/state": "off", f"{DAMON}/0/contexts/0/schemes/0/action": "pageout"},
        FINE,
        "only where",
    ),
    ("idle memory", {DAMON_RECLAIM: "Y"}, NOTE, "not used for a while"),
    ("idle memory", {DAMON_RECLAIM: "N"}, FINE, "only where"),
    ("overcommit", {"/proc/sys/vm/overcommit_memory": "1"}, NOTE, "kills a process"),
    (
        "overcommit",
        {"/proc/sys/vm/overcommit_memory": "0"},
        FINE,
        "is 0: an allocation that exceeds the memory",
    ),
    ("overcommit", {"/proc/sys/vm/overcommit_memory": "2"}, FINE, "is 2: an allocation fails before"),
    ("overcommit", {"/proc/sys/vm/overcommit_memory": "x"}, NOTE, "cannot be read"),
    (
        "transparent huge pages",
        {f"{PAGES}/enabled": "[always] madvise never", f"{PAGES}/defrag": "[always] defer madvise never"},
        WARNING,
        "for milliseconds",
    ),
    ("transparent huge pages", {f"{PAGES}/enabled": "[always] madvise never"}, NOTE, "khugepaged"),
    ("transparent huge pages", {f"{PAGES}/enabled": "always madvise [never]"}, FINE, "the kernel uses none"),
    ("transparent huge pages", {}, FINE, "only where a program requests them"),
    ("clock source", {}, FINE, "tsc: the clock is read without a system call"),
    ("transparent huge pages", {f"{PAGES}/enabled": None}, FINE, "does not use them"),
    ("clock source", {f"{CLOCK}/current_clocksource": "hpet"}, WARNING, "hpet"),
    ("clock source", {f"{CLOCK}/current_clocksource": "refined-jiffies"}, SEVERE, "steps of milliseconds"),
    ("clock source", {f"{CLOCK}/current_clocksource": "arch_sys_counter"}, FINE, "arch_sys_counter"),
    ("clock source", {f"{CLOCK}/current_clocksource": None}, NOTE, "cannot be read"),
    ("steal time", {"/proc/stat": "cpu  1000 0 500 96500 0 0 0 2000 0 0"}, WARNING, "took 2 %"),
    ("steal time", {"/proc/stat": "cpu  1000 0 500 78500 0 0 0 20000 0 0"}, SEVERE, "took 20 %"),
    ("steal time", {"/proc/stat": "cpu  1000 0 500"}, NOTE, "cannot be read"),
    ("processors", {f"{CPU}/isolated": "0-1"}, WARNING, "this process may use 2"),
    ("processors", {f"{CPU}/isolated": "2-63"}, FINE, "62 of the machine are isolated"),
    (
        "preemption",
        {"/sys/kernel/debug/sched/preempt": "(none) voluntary full"},
        WARNING,
        "none: system calls",
    ),
    ("preemption", {"/sys/kernel/debug/sched/preempt": None}, FINE, "full"),
    (
        "preemption",
        {"/sys/kernel/debug/sched/preempt": None, "/proc/cmdline": "quiet preempt=voluntary"},
        NOTE,
        "voluntary",
    ),
    (
        "preemption",
        {
            "/sys/kernel/debug/sched/preempt": None,
            "kernel config": "# CONFIG_PREEMPT is not set\nCONFIG_PREEMPT_NONE=y",
        },
        WARNING,
        "none:",
    ),
    ("preemption", {"/proc/version": "Linux version 6.12 #1 SMP PREEMPT_RT"}, FINE, "PREEMPT_RT"),
    (
        "preemption",
        {"/proc/version": "Linux 6.1 #1 SMP PREEMPT x", "/sys/kernel/debug/sched/preempt": None},
        FINE,
        "full",
    ),
    ("preemption", dict.fromkeys(GOOD_TEXTS), NOTE, "cannot be read"),
]


@pytest.mark.parametrize(("name", "texts", "severity", "words"), CASES)
def test_check_finds(name: str, texts: dict[str, str | None], severity: Severity, words: str) -> None:
    finding = found(name, texts)
    assert finding.severity is severity
    assert words in finding.sentence


def test_permission_says_why_and_what_to_do() -> None:
    finding = found("permission", permission=NOTHING)
    assert (finding.severity, finding.remedy) == (SEVERE, "ask the administrator")
    assert finding.sentence == "no real-time scheduling (RLIMIT_RTPRIO is 0)"
    nice = msgspec.structs.replace(NOTHING, way=Way.NICE, nice_lowest=-10)
    better = found("permission", permission=nice)
    assert better.severity is WARNING and 0 < better.late_ms < finding.late_ms


def test_slices_are_reported_with_the_reason_why_there_are_none() -> None:
    assert found("slices").sentence == "ordinary threads have 2.8 ms, those of aionn may have 0.1 ms"
    older = found("slices", permission=NOTHING, slice_ns=0)
    assert older.severity is NOTE and "no slices" in older.sentence and "Linux 6.12" in older.remedy
    refused = found(
        "slices", permission=NOTHING, slice_ns=0, slice_refusal="sched_getattr failed with ENOSYS"
    )
    assert refused.severity is NOTE and "failed with ENOSYS" in refused.sentence
    assert "sched_getattr" in refused.remedy
    assert found("slices", slice_ns=0).severity is FINE


def test_limit_of_a_group_counts_only_without_real_time() -> None:
    texts: dict[str, str | None] = {f"{GROUP}/cpu.max": "150000 100000"}
    assert found("cpu group", texts).late_ms == 0
    assert found("cpu group", texts, permission=NOTHING).late_ms == 100
    assert found("cpu group", groups=()).severity is NOTE


def test_locked_memory_by_its_limit() -> None:
    assert found("locked memory", memlock_bytes=8 << 20).severity is NOTE
    assert "8 MiB" in found("locked memory", memlock_bytes=8 << 20).sentence
    assert found("locked memory", memlock_bytes=0, may_lock=True).severity is FINE
    assert found("locked memory", memlock_bytes=1 << 30).severity is FINE
    unknown = found("locked memory", memlock_bytes=None)
    assert unknown.severity is NOTE and "refuses to read RLIMIT_MEMLOCK" in unknown.sentence
    assert found("locked memory", memlock_bytes=None, may_lock=True).severity is FINE
    swap: dict[str, str | None] = {"/proc/swaps": "Filename\n/swapfile file 1 0 -2\n"}
    assert found("swap", swap, memlock_bytes=0).severity is WARNING
    reclaimed = found("idle memory", {DAMON_RECLAIM: "Y"}, memlock_bytes=0)
    assert reclaimed.severity is WARNING and reclaimed.remedy.startswith(f"echo N > {DAMON_RECLAIM}, or ")


def test_single_processor_is_told() -> None:
    assert found("processors", processors=(3,)).severity is WARNING


@pytest.mark.parametrize(
    ("engines", "severity"),
    [
        ({"onnxruntime": "1.11.1"}, WARNING),
        ({"onnxruntime": "1.22.0", "openvino": "2025.1"}, FINE),
        ({"ai-edge-litert": "2.3.0"}, NOTE),
        ({"onnxruntime": "nonsense"}, WARNING),
        ({}, FINE),
    ],
)
def test_engines_that_hold_the_interpreters_lock_are_named(
    engines: dict[str, str], severity: Severity
) -> None:
    assert found("engines", engines=engines).severity is severity


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_no_check_fails_on_broken_texts(seed: int) -> None:
    broken = random.Random(seed)
    pieces = [
        "",
        "\0",
        "-",
        "max",
        "9" * 400,
        "-1",
        "[",
        "[]",
        "(",
        "cpu",
        "cpu " * 12,
        "\n\n",
        "\ufffd",
        "0-99999",
        "1e9",
        " x ",
    ]

    def text(original: str) -> str:
        match broken.randrange(3):
            case 0:
                return original[: broken.randrange(len(original) + 1)]
            case 1:
                return "".join(broken.choices(pieces, k=broken.randrange(6)))
            case _:
                at = broken.randrange(len(original) + 1)
                return original[:at] + broken.choice(pieces) + original[at:]

    texts = {path: text(original) for path, original in GOOD_TEXTS.items()}
    names = [each.name for each in check(machine(texts))]  # type: ignore[arg-type]
    assert names == [each.name for each in check(GOOD)] and len(names) == len(CHECKS)


def test_steal_is_the_share_between_two_texts() -> None:
    before, after = "cpu 10 0 0 90 0 0 0 0", "cpu 20 0 0 170 0 0 0 10"
    assert steal_share(before, after) == pytest.approx(0.1)
    assert steal_share(after, after) == 0
    assert steal_share(after, before) == 0
    assert steal_share("", "cpu") is None


def test_list_of_processors_is_read() -> None:
    assert numbers_in("0-2,7\n") == {0, 1, 2, 7}
    assert numbers_in("") == numbers_in("x,-,3-1") == set()


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        (
            "0::/a/b\n",
            "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
            ("/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"),
        ),
        ("3:cpu,cpuacct:/a\n0::/\n", "c /c cgroup rw,cpu,cpuacct 0 0\n", ("/c/a", "/c")),
        ("0::/../../x\n", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", ()),
        ("", "", ()),
        ("nonsense", "nonsense", ()),
    ],
)
def test_groups_of_the_process_are_found(cgroup: str, mounts: str, expected: tuple[str, ...]) -> None:
    assert group_folders(cgroup, mounts) == expected


# --- The verdict ----------------------------------------------------------------------------------------------------------


def measured(timer_us: float) -> Measured:
    quiet = Distribution(10, 1, 1, 1)
    return Measured(1.0, "SCHED_RR", Distribution(10, 5, 9, timer_us), quiet, Gaps(0, 100, 0, 0), 0.0)


def test_deadline_that_is_shorter_than_a_delay_cannot_be_expected() -> None:
    findings = check(machine(permission=NOTHING))
    assert not judge(findings, 10, None).expected
    assert "permission (80 ms)" in judge(findings, 10, None).sentence
    assert judge(findings, 100, None).expected
    assert judge(check(GOOD), 0.1, None).expected


def test_what_was_measured_counts_as_well() -> None:
    assert judge(check(GOOD), 10, measured(900)).expected
    late = judge(check(GOOD), 10, measured(12_000))
    assert not late.expected and "the longest measured delay (12 ms)" in late.sentence


def test_distribution_and_gaps_of_times() -> None:
    assert Distribution.of([]) == Distribution(0, 0, 0, 0)
    assert Distribution.of([3000, 1000, 2000]) == Distribution(3, 2, 3, 3)
    many = Distribution.of(range(0, 1_000_000, 1000))
    assert (many.count, many.median_us, many.p99_us, many.max_us) == (1000, 500, 990, 999)
    assert Gaps.of([200_000, 800_000], 100, 10_000_000) == Gaps(2, 100, 800, 0.1)
    assert Gaps.of([], 100, 0) == Gaps(0, 100, 0, 0)
