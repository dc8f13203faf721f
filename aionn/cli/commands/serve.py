"""``aionn serve``: one driver process for every application that may use its socket."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import anyio.abc
import msgspec
from cyclopts import Parameter

from aionn.cli import interrupts
from aionn.cli.driver_module import find_driver_module
from aionn.cli.numbers import numbers
from aionn.cli.realtime import RealtimeOption
from aionn.drivers import registry
from aionn.errors import InvalidArgument
from aionn.hal import Device
from aionn.observability.log_tags import choose_tags
from aionn.platform.loops import finish
from aionn.realtime import Mode, PageLocks, RunLimit, SchedulingClass
from aionn.realtime.scheduling import close_shared, open_shared
from aionn.reports.terminal import print_line
from aionn.runtime.settings import settings_from
from aionn.runtime.traces import begin_trace
from aionn.service.host.admission import ClientLimits
from aionn.service.host.process import DEFAULT_LIMITS, SHARED_QUOTAS, freeze_modules, listen, shorten_turns
from aionn.service.progress import Progress
from aionn.service.wire.quotas import Quotas

__all__ = ["serve"]

MIB = 1 << 20

MIB_MAX = 1 << 27
"""Most memory of one client: 128 TiB, the address space of a process."""

OBJECTS_MAX = 1 << 20
"""Most objects of one kind of one client, and most connections: the kernel gives a process no more descriptors."""

SECONDS_MAX = 86400
"""Longest wait for a client or for the device, a day."""


def serve(
    device: str,
    /,
    *,
    socket: Path,
    name: str | None = None,
    mode: str = "600",
    memory_mib: Annotated[int, numbers(1, MIB_MAX)] = SHARED_QUOTAS.memory_bytes // MIB,
    models: Annotated[int, numbers(1, OBJECTS_MAX)] = SHARED_QUOTAS.prepared_models,
    bursts: Annotated[int, numbers(1, OBJECTS_MAX)] = SHARED_QUOTAS.bursts,
    executions: Annotated[int, numbers(1, OBJECTS_MAX)] = SHARED_QUOTAS.executions,
    descriptors: Annotated[int, numbers(1, OBJECTS_MAX)] = SHARED_QUOTAS.descriptors,
    mapped_mib: Annotated[int, numbers(1, MIB_MAX)] = SHARED_QUOTAS.mapped_bytes // MIB,
    clients: Annotated[int, numbers(1, OBJECTS_MAX)] = DEFAULT_LIMITS.clients,
    clients_per_user: Annotated[int, numbers(1, OBJECTS_MAX)] = DEFAULT_LIMITS.clients_per_user,
    clients_per_process: Annotated[int, numbers(1, OBJECTS_MAX)] = DEFAULT_LIMITS.clients_per_process,
    hello_within: Annotated[float, numbers(0, SECONDS_MAX, "s", is_open=True)] = DEFAULT_LIMITS.hello_s,
    hang_after: Annotated[float | None, numbers(0, SECONDS_MAX, "s", is_open=True)] = None,
    realtime: RealtimeOption = None,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve a device to every application that may write to a socket, until interrupted.

    Clients cannot see or disturb one another: each has objects and limits of its own, and its objects are freed when it
    disconnects.

    Args:
        device: Registered name of the driver, or MODULE:CLASS, in the working directory too.
        socket: Path of the socket to create; one that a crashed server left is replaced.
        name: Name of the device; by default the driver's.
        mode: Permissions of the socket in octal: 600 admits this user, 660 the group, 666 all users.
        memory_mib: Device memories, models, cache files and queues of one client, in MiB.
        models: Prepared models of one client.
        bursts: Open bursts of one client.
        executions: Executions under way of one client.
        descriptors: Descriptors for memories, fences and files that one client sent: two for a memory.
        mapped_mib: Memories that one client sent, in MiB.
        clients: Concurrent connections. When a limit is reached, connections that have not sent Hello are ended first; then
            new ones are rejected, with the reason.
        clients_per_user: Concurrent connections of one user, as identified by the kernel.
        clients_per_process: Concurrent connections of one process.
        hello_within: Seconds after which a connection that has not sent Hello is ended.
        hang_after: End the process, with status 1, when the device makes no progress for this number of seconds.
        realtime: Real-time scheduling of this process: required, used if the machine permits it, or off; by default AIONN_REALTIME,
            or off.
        quiet: Print nothing.
    """
    try:
        permissions = int(mode, 8)
    except ValueError:
        permissions = -1
    if not 0 <= permissions <= 0o777:
        raise InvalidArgument(f"--mode: expected an octal number up to 777, got {mode}")
    quotas = msgspec.structs.replace(
        SHARED_QUOTAS,
        memory_bytes=memory_mib * MIB,
        prepared_models=models,
        bursts=bursts,
        executions=executions,
        descriptors=descriptors,
        mapped_bytes=mapped_mib * MIB,
    )
    limits = ClientLimits(clients, clients_per_user, clients_per_process, hello_within)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # The usual 1024 are what a few clients may have.
    settings = settings_from(realtime=realtime)  # Refuses a variable whose value makes no sense.
    choose_tags()
    begin_trace(None, process=f"server of {name or device}")
    find_driver_module(device)
    made = registry.make_device(device, name or device)
    freeze_modules()
    shorten_turns()
    with _realtime(settings.realtime):
        try:
            interrupts.run(_serve, made, socket, permissions, quotas, limits, hang_after, quiet)
        except KeyboardInterrupt:
            pass  # That is how it is ended.
    return 0


@contextmanager
def _realtime(mode: Mode) -> Iterator[None]:
    """Gives the thread of the event loop the class HIGH; the threads of the device acquire theirs when they start."""
    if mode is Mode.OFF:
        yield
        return
    scheduling = open_shared(mode)
    limit = RunLimit(lambda: scheduling.put_back_all("RLIMIT_RTTIME"))
    locks = PageLocks()
    try:
        limit.open()
        scheduling.acquire(SchedulingClass.HIGH, "control")
        locks.keep_everything()
        yield
    finally:
        locks.close()
        limit.close()
        close_shared()


async def _serve(
    device: Device,
    path: Path,
    mode: int,
    quotas: Quotas,
    limits: ClientLimits,
    hang_after: float | None,
    quiet: bool,
) -> None:
    try:
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                tasks.start_soon(_listen, device, path, mode, quotas, limits, hang_after, started)
                await started.wait()
                if not quiet:
                    print_line(f"serving {device.info.name} at {path}; Ctrl-C ends it")
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    break
    finally:
        await finish(device.aclose())


async def _listen(
    device: Device,
    path: Path,
    mode: int,
    quotas: Quotas,
    limits: ClientLimits,
    hang_after: float | None,
    started: anyio.Event,
) -> None:
    with Progress(hang_after) as progress:
        await listen(
            device, path, mode=mode, quotas=quotas, limits=limits, progress=progress, started=started
        )
