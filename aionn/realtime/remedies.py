"""Remedies: the change that lets the kernel permit what it rejected, in one sentence for the environment of the process.

Pure: ``permission`` reads the environment and the files.

Source: limits.conf(5), systemd.exec(5), the manuals of docker run and of Kubernetes' securityContext.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

import msgspec

__all__ = ["Cause", "Host", "HostKind", "host_of", "memlock_remedy", "remedy"]

RTPRIO = 20
"""The limit of the remedies: all priorities that aionn uses are below it, and RealtimeKit grants the same."""

NICE = -15
"""The nice value of the remedies: that of HIGH threads."""


class HostKind(enum.StrEnum):
    """The way in which the process was started, which determines the place where its limits are set."""

    LOGIN = "login"
    SYSTEMD_SERVICE = "systemd service"
    SYSTEMD_USER = "systemd user service"
    DOCKER = "docker"
    PODMAN = "podman"
    KUBERNETES = "kubernetes"


class Host(msgspec.Struct, frozen=True):
    """The environment that the process runs in.

    Attributes:
        kind: The way in which it was started.
        user: The user's name, or number.
        unit: The systemd unit; empty for a process outside of a unit.
    """

    kind: HostKind = HostKind.LOGIN
    user: str = "USER"
    unit: str = ""


class Cause(enum.StrEnum):
    """The cause of a rejection."""

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
    """Derive the environment of this process.

    Args:
        environment: The variables of the environment.
        marks: Those of the files ``/.dockerenv`` and ``/run/.containerenv`` that exist.
        cgroup: Text of /proc/self/cgroup; empty if it cannot be read.
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
    """The change that permits real-time scheduling, as an imperative sentence."""
    match cause:
        case Cause.NO_BUDGET:
            return _budget_remedy(host)
        case Cause.FILTERED:
            return _filter_remedy(host)
        case Cause.NO_SYSTEM_CALL:
            return "use a container runtime or sandbox that forwards sched_setscheduler to the Linux kernel"
        case Cause.NAMESPACE:
            return (
                "set the limits of the user on the host who starts the container: "
                f"'{_owner(host)} - rtprio {RTPRIO}' in /etc/security/limits.d/aionn.conf; "
                "the kernel ignores a capability of a user namespace"
            )
        case _:
            return _limit_remedy(host)


def memlock_remedy(host: Host) -> str:
    """The change that raises the limit of locked memory, as an imperative sentence."""
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
            return "start the program outside the sandbox, or allow sched_setscheduler in its seccomp filter"


def _owner(host: Host) -> str:
    return "USER" if host.user in ("root", "0") else host.user
