"""What a process may do, in real child processes with limits of their own, and what facts stand for."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from aionn.realtime.permission import Facts, Permission, Way, decide, own_cpu_group
from aionn.realtime.priorities import Priorities, SchedulingClass, nice_of, priorities_within
from aionn.realtime.realtimekit import Offer, Unavailable
from aionn.realtime.remedies import Cause, Host, HostKind, host_of, remedy
from tests.aionn.realtime.children import BEGIN, LIMITS, SET_SCHEDULER, as_root, run_child

pytestmark = pytest.mark.forked("any")

ASK = """
from aionn.realtime.permission import ask
import msgspec
def ask_and_say():
    found = ask()
    say(**msgspec.to_builtins(found), told=str(found))
"""
CAP_SYS_NICE = 1 << 23


# --- In children ----------------------------------------------------------------------------------------------------------


@as_root
def test_a_privileged_process_is_permitted_by_its_capability() -> None:
    found = run_child(ASK + "ask_and_say()")
    assert found["way"] == "CAP_SYS_NICE"
    assert found["priorities"] == {"medium": 5, "high": 10, "watchdog": 15}
    assert found["refusals"] == [] and found["remedy"] == ""


@as_root
@pytest.mark.parametrize(
    ("limit", "priorities"), [(99, (5, 10, 15)), (20, (5, 10, 15)), (7, (2, 4, 6)), (3, (1, 2, 3))]
)
def test_rtprio_limit_permits_up_to_itself(limit: int, priorities: tuple[int, ...]) -> None:
    found = run_child(ASK + f"drop(rtprio={limit}); ask_and_say()")
    assert found["way"] == "RLIMIT_RTPRIO"
    assert tuple(found["priorities"].values()) == priorities


@as_root
def test_rtprio_limit_without_room_for_the_watchdog_is_told() -> None:
    found = run_child(ASK + "drop(rtprio=2); ask_and_say()")
    assert found["way"] == "none"
    assert found["refusals"][0]["cause"] == "limit too low"
    assert "RLIMIT_RTPRIO is 2, expected at least 3" in found["told"]


@as_root
def test_nice_limit_is_taken_where_real_time_is_refused() -> None:
    found = run_child(ASK + "drop(nice=-11); ask_and_say()")
    assert (found["way"], found["nice_lowest"]) == ("nice values", -11)
    assert found["priorities"] is None
    assert [refusal["cause"] for refusal in found["refusals"]] == ["not permitted", "absent"]
    assert found["remedy"]


@as_root
def test_nothing_is_permitted_without_limits() -> None:
    found = run_child(ASK + "drop(); ask_and_say()")
    assert found["way"] == "none"
    assert [refusal["way"] for refusal in found["refusals"]] == [
        "RLIMIT_RTPRIO",
        "RealtimeKit",
        "nice values",
    ]
    assert found["remedy"]


@as_root
@pytest.mark.skipif(
    not SET_SCHEDULER, reason="the number of sched_setscheduler is known for x86_64 and aarch64 only"
)
@pytest.mark.parametrize(
    ("number", "cause"),
    [(errno.EPERM, "system call refused by a filter"), (errno.ENOSYS, "no such system call")],
)
def test_filter_of_the_system_call_is_told_from_a_missing_permission(number: int, cause: str) -> None:
    found = run_child(ASK + f"refuse({SET_SCHEDULER}, {number}); ask_and_say()")
    assert found["refusals"][0]["cause"] == cause
    assert found["way"] == "nice values", (
        "setpriority is another system call, and the process has the capability"
    )


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_capability_of_a_user_namespace_does_not_count() -> None:
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make user namespaces")
    code = "resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0)); ask_and_say()"
    found = run_child(ASK + code, before=["unshare", "--user", "--map-root-user"])
    assert found["way"] == "none"
    assert found["refusals"][0]["cause"] == "capability of a user namespace only"


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_limit_counts_in_a_user_namespace() -> None:
    # The limit is set outside: inside of the namespace the process may not raise it.
    code = """
limit(resource.RLIMIT_RTPRIO, 20)
os.execvp("unshare", ["unshare", "--user", "--map-root-user", sys.executable, "-c", sys.argv[1]])
"""
    found = run_child(code, arguments=[BEGIN + ASK + "ask_and_say()"])
    assert found["way"] == "RLIMIT_RTPRIO"


@pytest.fixture
def group_without_budget() -> Iterator[Path]:
    """A group of the cpu controller of cgroup v1, new and so without real-time budget."""
    parent = Path("/sys/fs/cgroup/cpu")
    if not (parent / "cpu.rt_runtime_us").exists():
        pytest.skip("the kernel does not schedule real-time threads by group here")
    folder = parent / f"aionn-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no group can be made: {e.strerror}")
    yield folder
    folder.rmdir()


@as_root
def test_group_without_budget_is_told(group_without_budget: Path) -> None:
    assert (group_without_budget / "cpu.rt_runtime_us").read_text().strip() == "0"
    found = run_child(
        ASK + f"open('{group_without_budget}/cgroup.procs', 'w').write(str(os.getpid())); ask_and_say()"
    )
    assert found["refusals"][0]["cause"] == "no real-time budget"
    assert "cpu.rt_runtime_us" in found["told"]
    assert found["way"] == "nice values"


@as_root
def test_asking_leaves_the_process_as_it_was() -> None:
    code = """
drop(rtprio=20)
def state():
    limit = resource.getrlimit(resource.RLIMIT_RTTIME)
    return [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, os.getpriority(os.PRIO_PROCESS, 0), limit]
before = state()
ask()
say(is_same=state() == before, threads=threading.active_count())
"""
    assert run_child(ASK + code) == {"is_same": True, "threads": 1}


# --- Pure -----------------------------------------------------------------------------------------------------------------


def test_priorities_keep_their_order_within_every_limit() -> None:
    assert [priorities_within(limit) for limit in range(3)] == [None] * 3
    for limit in range(3, 100):
        found = priorities_within(limit)
        assert found is not None
        assert 0 < found.medium < found.high < found.watchdog <= limit
        assert found.watchdog < 20, "RealtimeKit grants as much, and threads of interrupts run at 50"
        assert found.of(SchedulingClass.LOW) == 0


def test_nice_values_differ_by_class_within_every_limit() -> None:
    for lowest in range(-20, 1):
        high, medium = (nice_of(c, lowest) for c in (SchedulingClass.HIGH, SchedulingClass.MEDIUM))
        assert max(lowest, -15) == high <= medium <= 0
        assert lowest > -2 or high < medium


GRANTED = Facts(rt_errno=0, rt_priority=15, rtprio_limit=20)
LIMITED = Facts(rtprio_limit=20, rt_errno=errno.EPERM, rt_priority=15)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (Facts(), Cause.NOT_PERMITTED),
        (Facts(rtprio_limit=2), Cause.LIMIT_TOO_LOW),
        (Facts(capabilities=CAP_SYS_NICE, is_initial_namespace=False, rt_errno=errno.EPERM), Cause.NAMESPACE),
        (msgspec.structs.replace(LIMITED, rt_budget_us=0), Cause.NO_BUDGET),
        (msgspec.structs.replace(LIMITED, rt_budget_all_us=0), Cause.NO_BUDGET),
        (msgspec.structs.replace(LIMITED, is_group_nested=True), Cause.NO_BUDGET),
        (msgspec.structs.replace(LIMITED, seccomp=2, is_group_nested=True), Cause.FILTERED),
        (msgspec.structs.replace(LIMITED, rt_errno=errno.ENOSYS), Cause.NO_SYSTEM_CALL),
        (msgspec.structs.replace(LIMITED, rt_errno=errno.EINVAL), Cause.FAILED),
        (LIMITED, Cause.FAILED),
        (msgspec.structs.replace(LIMITED, rtprio_limit=0), Cause.NOT_PERMITTED),
        (msgspec.structs.replace(LIMITED, rtprio_limit=None), Cause.NOT_PERMITTED),
    ],
)
def test_refusal_names_its_cause(facts: Facts, cause: Cause) -> None:
    found = decide(facts)
    assert found.way is Way.NONE and not found.is_realtime
    assert found.refusals[0].cause is cause
    assert found.remedy in str(found) and found.refusals[0].sentence in str(found)


def test_ways_are_taken_in_their_order() -> None:
    offer = Offer(20, 200_000)
    nice = {"nice_errno": 0, "nice_tried": -15, "nice_lowest": -15}
    everything = Facts(CAP_SYS_NICE, rtprio_limit=20, rt_errno=0, realtimekit=offer, **nice)
    assert decide(everything).way is Way.CAPABILITY
    assert decide(msgspec.structs.replace(everything, capabilities=0)).way is Way.LIMIT
    refused = msgspec.structs.replace(everything, rt_errno=errno.EPERM)
    assert decide(refused) == Permission(
        Way.REALTIMEKIT, Priorities(5, 10, 15), 0, decide(refused).refusals, ""
    )
    slow = Unavailable(Cause.SLOW, "no answer within 1 s")
    assert decide(msgspec.structs.replace(refused, realtimekit=slow)).way is Way.NICE
    assert decide(msgspec.structs.replace(refused, realtimekit=Offer(2, 200_000))).way is Way.NICE
    last = msgspec.structs.replace(refused, realtimekit=slow, nice_errno=errno.EACCES)
    assert decide(last).way is Way.NONE
    assert "RealtimeKit: no answer within 1 s" in str(decide(last))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", HostKind)
@pytest.mark.parametrize("cause", Cause)
def test_every_refusal_has_a_remedy_on_every_host(kind: HostKind, cause: Cause) -> None:
    told = remedy(Host(kind, "ann", "camera.service"), cause)
    assert told and "\n" not in told and not told.endswith(".")


@pytest.mark.parametrize(
    ("environment", "marks", "cgroup", "kind"),
    [
        ({}, (), "0::/user.slice/user-1000.slice/session-2.scope", HostKind.LOGIN),
        ({}, (), "", HostKind.LOGIN),
        ({}, (), "0::/system.slice/camera.service", HostKind.SYSTEMD_SERVICE),
        ({}, (), "0::/user.slice/user-1.slice/user@1.service/app.slice/cam.service", HostKind.SYSTEMD_USER),
        ({}, (), "0::/user.slice/user-1.slice/user@1.service", HostKind.LOGIN),
        ({}, ("/.dockerenv",), "0::/", HostKind.DOCKER),
        ({}, (), "1:cpu:/docker/0123", HostKind.DOCKER),
        ({}, ("/run/.containerenv",), "0::/", HostKind.PODMAN),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("/.dockerenv",), "0::/", HostKind.KUBERNETES),
        ({}, (), "0::/kubepods.slice/pod1", HostKind.KUBERNETES),
    ],
)
def test_host_is_recognised(
    environment: dict[str, str], marks: tuple[str, ...], cgroup: str, kind: HostKind
) -> None:
    assert host_of(environment, marks, cgroup, "ann").kind is kind


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        ("", "", ("", False)),
        ("0::/", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", ("", False)),
        ("0::/system.slice/a.service", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", ("", True)),
        (
            "2:cpu,cpuacct:/\n0::/x",
            "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0",
            ("/sys/fs/cgroup/cpu", False),
        ),
        ("2:cpu:/a/b", "cgroup /c cgroup rw,cpu 0 0", ("/c/a/b", True)),
        ("nonsense\n:::\n\0", "nonsense\ncgroup\n", ("", False)),
    ],
)
def test_own_group_of_the_cpu_controller_is_found(
    cgroup: str, mounts: str, expected: tuple[str, bool]
) -> None:
    assert own_cpu_group(cgroup, mounts) == expected


def test_limit_that_cannot_be_read_is_no_limit_of_zero() -> None:
    unknown = msgspec.structs.replace(LIMITED, rtprio_limit=None)
    assert "a sandbox refuses to read RLIMIT_RTPRIO" in str(decide(unknown))
    assert "is 0" not in str(decide(unknown)) and "None" not in str(decide(unknown))
    granted = decide(msgspec.structs.replace(unknown, rt_errno=0))
    assert (granted.way, granted.priorities) == (Way.LIMIT, Priorities(5, 10, 15))


@as_root
@pytest.mark.skipif(not LIMITS, reason="the number of the system call is not known for this processor")
@pytest.mark.parametrize("rtprio", [0, 20])
def test_attempt_decides_where_a_sandbox_refuses_to_read_limits(rtprio: int) -> None:
    found = run_child(ASK + f"drop(rtprio={rtprio}); refuse({LIMITS}, {errno.EPERM}); ask_and_say()")
    assert found["way"] == ("RLIMIT_RTPRIO" if rtprio else "none")
    if not rtprio:
        assert "RLIMIT_RTPRIO is 0" not in found["told"] and "refuses to read RLIMIT_RTPRIO" in found["told"]


def test_sentence_distinguishes_the_permission_from_what_aionn_uses() -> None:
    permitted = "real-time scheduling is permitted by CAP_SYS_NICE; aionn uses SCHED_RR at priorities 5 to 15"
    assert str(Permission(Way.CAPABILITY, Priorities(5, 10, 15))) == permitted
