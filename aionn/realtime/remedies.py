"""What an administrator does about a refusal, in one sentence for the kind of machine that the process runs on.

Pure: the shell that reads environment and files is in ``permission``.

Source: limits.conf(5), systemd.exec(5), the manuals of docker run and of Kubernetes' securityContext.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

import msgspec

__all__ = ["Cause", "Host", "HostKind", "host_of", "memlock_remedy", "remedy"]

RTPRIO = 20
"""The limit that remedies name: all of ours fit below, and RealtimeKit grants as much."""

NICE = -15
"""The nice value that remedies name: what HIGH threads take."""


class HostKind(enum.StrEnum):
    """How the process was started, which says where its limits are set."""

    LOGIN = "login"
    SYSTEMD_SERVICE = "systemd service"
    SYSTEMD_USER = "systemd user service"
    DOCKER = "docker"
    PODMAN = "podman"
    KUBERNETES = "kubernetes"


class Host(msgspec.Struct, frozen=True):
    """Where the process runs.

    Attributes:
        kind: How it was started.
        user: The user's name, or number.
        unit: The systemd unit; empty for none.
    """

    kind: HostKind = HostKind.LOGIN
    user: str = "USER"
    unit: str = ""


class Cause(enum.StrEnum):
    """Why something was refused."""

    NOT_PERMITTED = "not permitted"
    LIMIT_TOO_LOW = "limit too low"
    NAMESPACE = "capability of a user namespace only"
    NO_BUDGET = "no real-time budget"
    FILTERED = "system call refused by a filter"
    NO_SYSTEM_CALL = "no such system call"
    ABSENT = "absent"
    SLOW = "slow"
    REFUSED = "refused"
    FAILED = "failed"


def host_of(environment: Mapping[str, str], marks: Collection[str], cgroup: str, user: str) -> Host:
    """How this process was started.

    Args:
        environment: Its variables.
        marks: Of ``/.dockerenv`` and ``/run/.containerenv`` those that exist.
        cgroup: Text of /proc/self/cgroup; empty where it cannot be read.
        user: The user's name, or number.
    """
    if "KUBERNETES_SERVICE_HOST" in environment or "kubepods" in cgroup:
        return Host(HostKind.KUBERNETES, user)
    if "/run/.containerenv" in marks or environment.get("container") == "podman":
        return Host(HostKind.PODMAN, user)
    if "/.dockerenv" in marks or "/docker" in cgroup:
        return Host(HostKind.DOCKER, user)
    for line in cgroup.splitlines():
        path = line.rpartition(":")[2]
        unit = path.rpartition("/")[2]
        if unit.endswith(".service") and not unit.startswith("user@"):
            kind = HostKind.SYSTEMD_USER if "/user@" in path else HostKind.SYSTEMD_SERVICE
            return Host(kind, user, unit)
    return Host(HostKind.LOGIN, user)


def remedy(host: Host, cause: Cause) -> str:
    """What to do about a refusal of real-time scheduling."""
    match cause:
        case Cause.NO_BUDGET:
            return _budget_remedy(host)
        case Cause.FILTERED:
            return _filter_remedy(host)
        case Cause.NO_SYSTEM_CALL:
            return "use a container runtime or sandbox that passes sched_setscheduler on to the Linux kernel"
        case Cause.NAMESPACE:
            return (
                "set the limits of the user on the host who starts the container: "
                f"'{_owner(host)} - rtprio {RTPRIO}' in /etc/security/limits.d/aionn.conf; "
                "a capability in a user namespace does not count"
            )
        case _:
            return _limit_remedy(host)


def memlock_remedy(host: Host) -> str:
    """What to do about a limit of locked memory that is too low."""
    match host.kind:
        case HostKind.DOCKER | HostKind.PODMAN:
            return f"start the container with '{host.kind} run --ulimit memlock=-1'"
        case HostKind.KUBERNETES:
            return (
                "add IPC_LOCK to securityContext.capabilities.add of the container, which then runs as user 0"
            )
        case HostKind.SYSTEMD_SERVICE | HostKind.SYSTEMD_USER:
            return f"add LimitMEMLOCK=infinity to [Service] of {host.unit} and restart it"
        case HostKind.LOGIN:
            return f"write '{host.user} - memlock unlimited' into /etc/security/limits.d/aionn.conf and log in again"


def _limit_remedy(host: Host) -> str:
    match host.kind:
        case HostKind.DOCKER | HostKind.PODMAN:
            return (
                f"start the container with '{host.kind} run --ulimit rtprio={RTPRIO} --ulimit memlock=-1', "
                "or as user 0 with --cap-add SYS_NICE"
            )
        case HostKind.KUBERNETES:
            return (
                "add SYS_NICE to securityContext.capabilities.add of the container, which then runs as user 0; "
                "a pod cannot raise RLIMIT_RTPRIO"
            )
        case HostKind.SYSTEMD_SERVICE:
            return (
                f"add LimitRTPRIO={RTPRIO}, LimitNICE={NICE} and LimitMEMLOCK=infinity to [Service] of {host.unit} "
                f"(systemctl edit {host.unit}) and restart it"
            )
        case HostKind.SYSTEMD_USER:
            return (
                f"add LimitRTPRIO={RTPRIO} and LimitNICE={NICE} to [Service] of the system's user@.service "
                f"(systemctl edit user@.service) and of {host.unit}, and log in again"
            )
        case HostKind.LOGIN:
            return (
                f"write '{host.user} - rtprio {RTPRIO}', '{host.user} - nice {NICE}' and '{host.user} - memlock unlimited' "
                "into /etc/security/limits.d/aionn.conf and log in again"
            )


def _budget_remedy(host: Host) -> str:
    match host.kind:
        case HostKind.DOCKER | HostKind.PODMAN:
            return (
                f"give the container a budget, '{host.kind} run --cpu-rt-runtime=950000', "
                "or boot the host with rt_group_sched=0"
            )
        case HostKind.KUBERNETES:
            return "boot the node with rt_group_sched=0 or with a kernel without CONFIG_RT_GROUP_SCHED"
        case _:
            return (
                "write a budget such as 950000 into cpu.rt_runtime_us of the group and of those above it, "
                "or boot with rt_group_sched=0"
            )


def _filter_remedy(host: Host) -> str:
    match host.kind:
        case HostKind.DOCKER | HostKind.PODMAN:
            return "start the container with a seccomp profile (--security-opt seccomp=FILE) that allows sched_setscheduler"
        case HostKind.KUBERNETES:
            return "set securityContext.seccompProfile of the container to one that allows sched_setscheduler"
        case HostKind.SYSTEMD_SERVICE | HostKind.SYSTEMD_USER:
            return f"set RestrictRealtime=no in [Service] of {host.unit}, and allow @resources in its SystemCallFilter"
        case HostKind.LOGIN:
            return (
                "start the program outside of the sandbox, or allow sched_setscheduler in its seccomp filter"
            )


def _owner(host: Host) -> str:
    return "USER" if host.user in ("root", "0") else host.user
