"""The scheduling that this process may give its threads: real-time scheduling, lower nice values, or none of them.

The ways, in order: CAP_SYS_NICE, RLIMIT_RTPRIO, RealtimeKit, RLIMIT_NICE. An attempt decides, on a thread of its own that ends
immediately afterwards: limits, capabilities and files give the reason why an attempt failed, but do not show that the next one will
succeed.

Invariants:
1. ``decide`` is pure: it takes facts and returns a permission.
2. Each way that was tried and failed has a sentence with its cause and the remedy for this kind of machine.

Source: sched(7), getrlimit(2), capabilities(7), user_namespaces(7); ``sched_setscheduler`` of the kernel for the causes of EPERM.
"""

from __future__ import annotations

import enum
import errno
import os
import pwd
import resource
import threading
from collections.abc import Callable

import msgspec

from aionn.realtime.priorities import NICE_BY_CLASS, Priorities, SchedulingClass, priorities_within
from aionn.realtime.reading import read_text, soft_limit
from aionn.realtime.realtimekit import Offer, Unavailable, ask_realtimekit, make_realtime
from aionn.realtime.remedies import Cause, Host, host_of, remedy

__all__ = [
    "Facts",
    "Permission",
    "Refusal",
    "Way",
    "ask",
    "decide",
    "host_here",
    "own_cpu_group",
    "read_facts",
    "explain_refusal",
]

CAP_SYS_NICE = 23
CAP_IPC_LOCK = 14
PRIORITY_MAX = 99
ATTEMPT_S = 10.0
"""Longest wait for the thread of an attempt: it makes a few system calls, but on a busy machine it may wait for seconds."""

INITIAL_NAMESPACE = ["0", "0", "4294967295"]
"""The contents of /proc/self/uid_map in the initial user namespace."""


class Way(enum.StrEnum):
    """The source of a permission. ``NICE`` comes from RLIMIT_NICE, or from CAP_SYS_NICE where only nice values can be changed."""

    CAPABILITY = "CAP_SYS_NICE"
    LIMIT = "RLIMIT_RTPRIO"
    REALTIMEKIT = "RealtimeKit"
    NICE = "nice values"
    NONE = "none"


class Refusal(msgspec.Struct, frozen=True):
    """A way that does not work here.

    Attributes:
        way: The way.
        cause: The cause, as an enumerator.
        sentence: The cause, as a sentence.
    """

    way: Way
    cause: Cause
    sentence: str


class Facts(msgspec.Struct, frozen=True):
    """The state of the process, and the results of the attempts.

    Attributes:
        capabilities: Effective capabilities, a bit for each.
        is_initial_namespace: Whether the process is in the initial user namespace.
        seccomp: 0 means no seccomp, 1 strict mode, 2 a filter.
        rtprio_limit: RLIMIT_RTPRIO, soft; None if a sandbox refuses to read it.
        nice_lowest: Smallest nice value that RLIMIT_NICE permits; -20 if a sandbox refuses to read it.
        rt_budget_us: cpu.rt_runtime_us of the process's group; None if there is no such file.
        rt_budget_all_us: kernel.sched_rt_runtime_us; None if it cannot be read, -1 means no limit.
        is_group_nested: Whether the process is in a group below the root of the hierarchy.
        rt_errno: The errno of the attempt with SCHED_RR; 0 means success, None that no priority is permitted and nothing was tried.
        rt_priority: The priority of that attempt.
        realtimekit: The answer of RealtimeKit; None if it was not asked.
        nice_errno: The errno of the attempt with a nice value; None if nothing was tried.
        nice_tried: The nice value of that attempt.
        host: The environment that the process runs in.
    """

    capabilities: int = 0
    is_initial_namespace: bool = True
    seccomp: int = 0
    rtprio_limit: int | None = 0
    nice_lowest: int = 0
    rt_budget_us: int | None = None
    rt_budget_all_us: int | None = 950_000
    is_group_nested: bool = False
    rt_errno: int | None = None
    rt_priority: int = 0
    realtimekit: Offer | Unavailable | None = None
    nice_errno: int | None = None
    nice_tried: int = 0
    host: Host = Host()

    @property
    def has_capability(self) -> bool:
        """Whether CAP_SYS_NICE is effective; the kernel ignores it in a user namespace other than the initial one."""
        return bool(self.capabilities >> CAP_SYS_NICE & 1)


class Permission(msgspec.Struct, frozen=True):
    """The scheduling that this process may use.

    Attributes:
        way: The source of the permission.
        priorities: The priorities of SCHED_RR; None if real-time scheduling is not permitted.
        nice_lowest: Smallest permitted nice value if ``way`` is ``NICE``, otherwise 0.
        refusals: The ways before ``way`` that do not work, in order.
        remedy: The change that permits real-time scheduling, in one sentence; empty if it is permitted.
    """

    way: Way
    priorities: Priorities | None = None
    nice_lowest: int = 0
    refusals: tuple[Refusal, ...] = ()
    remedy: str = ""

    @property
    def is_realtime(self) -> bool:
        """Whether threads may run under SCHED_RR."""
        return self.priorities is not None

    def __str__(self) -> str:
        """One sentence: the permission, or the reason why real-time scheduling is not permitted and the remedy."""
        if self.priorities is not None:
            medium, most = self.priorities.medium, self.priorities.watchdog
            return f"real-time scheduling is permitted by {self.way}; aionn uses SCHED_RR at priorities {medium} to {most}"
        what = (
            f"nice values down to {self.nice_lowest}, no real-time scheduling"
            if self.way is Way.NICE
            else "no real-time scheduling"
        )
        why = "; ".join(refusal.sentence for refusal in self.refusals if refusal.way is not Way.NICE)
        return f"{what} ({why}): {self.remedy}"


def decide(facts: Facts) -> Permission:
    """The permission that follows from facts."""
    refusals: list[Refusal] = []
    if facts.rt_errno == 0:
        way = Way.CAPABILITY if facts.has_capability and facts.is_initial_namespace else Way.LIMIT
        limit = PRIORITY_MAX if way is Way.CAPABILITY else facts.rtprio_limit
        if limit is None:
            limit = facts.rt_priority
        if (priorities := priorities_within(limit)) is not None:
            return Permission(way, priorities)
    direct = _refusal(facts)
    refusals.append(direct)
    if isinstance(facts.realtimekit, Offer):
        if (priorities := priorities_within(facts.realtimekit.priority_max)) is not None:
            return Permission(Way.REALTIMEKIT, priorities, refusals=tuple(refusals))
        refusals.append(
            Refusal(
                Way.REALTIMEKIT,
                Cause.LIMIT_TOO_LOW,
                f"RealtimeKit grants priorities up to {facts.realtimekit.priority_max}, expected at least 3",
            )
        )
    elif facts.realtimekit is not None:
        refusals.append(
            Refusal(Way.REALTIMEKIT, facts.realtimekit.cause, f"RealtimeKit: {facts.realtimekit.sentence}")
        )
    advice = remedy(facts.host, direct.cause)
    if facts.nice_errno == 0 and facts.nice_tried < 0:
        return Permission(Way.NICE, None, facts.nice_tried, tuple(refusals), advice)
    refusals.append(_nice_refusal(facts))
    return Permission(Way.NONE, None, 0, tuple(refusals), advice)


def _limit_sentence(facts: Facts) -> str:
    if facts.rtprio_limit is None:
        return "a sandbox refuses to read RLIMIT_RTPRIO"
    return f"RLIMIT_RTPRIO is {facts.rtprio_limit}"


def _refusal(facts: Facts) -> Refusal:
    """The reason why SCHED_RR is not permitted without RealtimeKit."""
    if facts.rt_errno in (None, 0):
        if facts.has_capability and not facts.is_initial_namespace:
            return Refusal(
                Way.CAPABILITY,
                Cause.NAMESPACE,
                "the process has CAP_SYS_NICE only in its own user namespace, where the kernel ignores it, "
                f"and {_limit_sentence(facts)}",
            )
        if facts.rtprio_limit:
            return Refusal(
                Way.LIMIT,
                Cause.LIMIT_TOO_LOW,
                f"RLIMIT_RTPRIO is {facts.rtprio_limit}, expected at least 3",
            )
        return Refusal(
            Way.LIMIT, Cause.NOT_PERMITTED, f"the process has no CAP_SYS_NICE and {_limit_sentence(facts)}"
        )
    assert facts.rt_errno is not None
    return explain_refusal(facts, facts.rt_errno)


def explain_refusal(facts: Facts, number: int) -> Refusal:
    """The reason why SCHED_RR failed although it should be permitted: the causes of EPERM and ENOSYS on this machine.

    Args:
        facts: The state of the process.
        number: The errno, not 0.
    """
    way = Way.CAPABILITY if facts.has_capability else Way.LIMIT
    if number == errno.ENOSYS:
        by = "a seccomp filter or the sandbox" if facts.seccomp else "the kernel or the sandbox"
        return Refusal(way, Cause.NO_SYSTEM_CALL, f"{by} answers sched_setscheduler with ENOSYS")
    if number != errno.EPERM:
        return Refusal(
            way, Cause.FAILED, f"sched_setscheduler failed with {errno.errorcode.get(number, number)}"
        )
    if facts.rt_budget_us == 0 or facts.rt_budget_all_us == 0:
        name = (
            "cpu.rt_runtime_us of the process's group"
            if facts.rt_budget_us == 0
            else "kernel.sched_rt_runtime_us"
        )
        return Refusal(
            way, Cause.NO_BUDGET, f"the kernel schedules real-time threads by group, and {name} is 0"
        )
    if facts.has_capability and not facts.is_initial_namespace:
        return Refusal(
            way,
            Cause.NAMESPACE,
            "the process has CAP_SYS_NICE only in its own user namespace, where the kernel ignores it, "
            f"and {_limit_sentence(facts)}",
        )
    if not facts.has_capability and not facts.rtprio_limit:
        # The limit is unknown, or was lowered between the read and the attempt.
        return Refusal(
            way, Cause.NOT_PERMITTED, f"the process has no CAP_SYS_NICE and {_limit_sentence(facts)}"
        )
    if facts.seccomp:
        return Refusal(
            way,
            Cause.FILTERED,
            "a seccomp filter answers sched_setscheduler with EPERM although it is permitted",
        )
    if facts.is_group_nested and facts.rt_budget_us is None:
        return Refusal(
            way,
            Cause.NO_BUDGET,
            "sched_setscheduler answers EPERM although it is permitted: the kernel seems to schedule real-time threads "
            "by group, and groups of cgroup v2 have no budget",
        )
    return Refusal(
        way,
        Cause.FAILED,
        "sched_setscheduler answers EPERM although it is permitted, as a security module may do",
    )


def _nice_refusal(facts: Facts) -> Refusal:
    if facts.nice_errno is None or facts.nice_lowest >= 0:
        return Refusal(Way.NICE, Cause.NOT_PERMITTED, "RLIMIT_NICE permits no nice value below 0")
    name = errno.errorcode.get(facts.nice_errno, facts.nice_errno)
    return Refusal(Way.NICE, Cause.FAILED, f"setpriority failed with {name}")


def ask(*, with_realtimekit: bool = True) -> Permission:
    """Find out what this process may do now; limits may change while it runs. Blocks for milliseconds, and up to the time-outs of
    RealtimeKit if it is asked.

    Args:
        with_realtimekit: Whether to ask RealtimeKit if neither the capability nor the limit permits real-time scheduling.
            RealtimeKit requires that RLIMIT_RTTIME is lowered permanently to its own limit: the kernel kills the process of a
            thread that exceeds it.
    """
    return decide(read_facts(with_realtimekit=with_realtimekit))


def read_facts(*, with_realtimekit: bool = True) -> Facts:
    """Reads the state of the process and makes attempts, in the order of the ways, until one succeeds. See ``ask``."""
    status = _fields(read_text("/proc/self/status"))
    limit = _limit(resource.RLIMIT_RTPRIO, PRIORITY_MAX)
    group, is_nested = own_cpu_group(read_text("/proc/self/cgroup"), read_text("/proc/mounts"))
    facts = Facts(
        capabilities=int(status.get("CapEff", "0") or "0", 16),
        is_initial_namespace=read_text("/proc/self/uid_map").split() in (INITIAL_NAMESPACE, []),
        seccomp=int(status.get("Seccomp", "0") or "0"),
        rtprio_limit=limit,
        nice_lowest=-20 if (nice := _limit(resource.RLIMIT_NICE, 40)) is None else 20 - nice,
        rt_budget_us=_number(read_text(f"{group}/cpu.rt_runtime_us")) if group else None,
        rt_budget_all_us=_number(read_text("/proc/sys/kernel/sched_rt_runtime_us")),
        is_group_nested=is_nested,
        host=host_here(),
    )
    allowed = PRIORITY_MAX if facts.has_capability or limit is None else limit
    priorities = priorities_within(allowed)
    if priorities is not None:
        number = _attempt(lambda: _set_round_robin(priorities.watchdog))
        facts = msgspec.structs.replace(facts, rt_errno=number, rt_priority=priorities.watchdog)
        if number == errno.EPERM and (lower := priorities_within(limit or 0)) not in (None, priorities):
            # The kernel ignores the capability, for example in a user namespace; the limit may still permit a lower priority.
            assert lower is not None
            number = _attempt(lambda: _set_round_robin(lower.watchdog))
            facts = msgspec.structs.replace(facts, rt_errno=number, rt_priority=lower.watchdog)
            if number == 0:
                facts = msgspec.structs.replace(facts, capabilities=0)
        if number == 0:
            return facts
    if with_realtimekit:
        offer = ask_realtimekit()
        if isinstance(offer, Offer) and (granted := priorities_within(offer.priority_max)) is not None:
            offer = _tried(offer, granted.high)
        facts = msgspec.structs.replace(facts, realtimekit=offer)
        if isinstance(offer, Offer):
            return facts
    lowest = -20 if facts.has_capability and facts.is_initial_namespace else facts.nice_lowest
    if lowest < 0:
        nice = max(lowest, NICE_BY_CLASS[SchedulingClass.HIGH])
        number = _attempt(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice))
        facts = msgspec.structs.replace(facts, nice_errno=number, nice_tried=nice)
    return facts


def _set_round_robin(priority: int) -> None:
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


def _tried(offer: Offer, priority: int) -> Offer | Unavailable:
    """The offer if RealtimeKit grants it to a thread of this process, else the reason why not."""
    refused: list[Unavailable] = []

    def ask_for_this_thread() -> None:
        answer = make_realtime(offer, os.getpid(), threading.get_native_id(), priority)
        if answer is not None:
            refused.append(answer)

    number = _attempt(ask_for_this_thread)
    if number:
        return Unavailable(Cause.FAILED, f"asking failed with {errno.errorcode.get(number, number)}")
    return refused[0] if refused else offer


def _attempt(call: Callable[[], None]) -> int:
    """The errno of a call in a thread of its own, which ends immediately afterwards; 0 means success.

    The calling thread is not used, since without CAP_SYS_NICE it could not clear SCHED_RESET_ON_FORK again.
    """
    found = [errno.ETIMEDOUT]

    def run() -> None:
        try:
            call()
            found[0] = 0
        except OSError as e:
            found[0] = e.errno or errno.EIO

    thread = threading.Thread(target=run, name="aionn-realtime-attempt", daemon=True)
    try:
        thread.start()
    except (MemoryError, RuntimeError):
        return errno.EAGAIN
    thread.join(ATTEMPT_S)
    return found[0]


def _limit(kind: int, most: int) -> int | None:
    """A soft limit, at most ``most``; None if a sandbox refuses to read it."""
    soft = soft_limit(kind)
    return None if soft is None else most if soft == resource.RLIM_INFINITY else min(soft, most)


def _fields(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def own_cpu_group(cgroup: str, mounts: str) -> tuple[str, bool]:
    """The folder of the process's group in the cpu controller of cgroup v1, and whether it is in a group below any root.

    Args:
        cgroup: Text of /proc/self/cgroup.
        mounts: Text of /proc/mounts.

    Returns:
        An empty folder if the controller is not mounted as version 1.
    """
    points = [
        fields[1]
        for fields in (line.split() for line in mounts.splitlines())
        if len(fields) >= 4 and fields[2] == "cgroup" and "cpu" in fields[3].split(",")
    ]
    folder, is_nested = "", False
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" in controllers.split(",") and points:
            folder = points[0] + ("" if path == "/" else path)
            is_nested = path != "/"
        elif number == "0" and not points:
            is_nested = path not in ("/", "")
    return folder, is_nested


def host_here() -> Host:
    """The environment that this process runs in."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    marks = [mark for mark in ("/.dockerenv", "/run/.containerenv") if os.path.exists(mark)]
    return host_of(os.environ, marks, read_text("/proc/self/cgroup"), user)
