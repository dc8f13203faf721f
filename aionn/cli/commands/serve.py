"""``aionn serve``: one driver process for every application that may use its socket, and for clients of a network."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from cyclopts import Parameter

from aionn.cli import interrupts
from aionn.cli.driver_module import find_driver_module
from aionn.cli.numbers import numbers
from aionn.cli.realtime import RealtimeOption
from aionn.cli.serving.children import kill_all
from aionn.cli.serving.door import DoorProcess, door_of, serving_door
from aionn.cli.serving.network import Network, network_of, serving_network, socket_of
from aionn.drivers import registry
from aionn.errors import InvalidArgument
from aionn.hal import Device
from aionn.observability.lines import never_wait_for_readers
from aionn.observability.log_tags import choose_tags
from aionn.observability.scraping import MetricsServer, Source
from aionn.oip.settings import DoorSettings
from aionn.platform.loops import caller, finish, in_loop
from aionn.realtime import Mode, PageLocks, RunLimit, SchedulingClass
from aionn.realtime.scheduling import close_shared, open_shared
from aionn.realtime.threads.slices import serving_in_short_slices
from aionn.reports.terminal import report_line
from aionn.runtime.settings import settings_from
from aionn.runtime.traces import begin_trace
from aionn.service.host.accepted import Drain
from aionn.service.host.admission import ClientLimits
from aionn.service.host.draining import DRAIN_S_MAX, EXIT_STATUS, DrainState
from aionn.service.host.metrics import FAMILIES, HostFigures
from aionn.service.host.process import DEFAULT_LIMITS, SHARED_QUOTAS, freeze_modules, shorten_turns
from aionn.service.host.process import listen as listen_for_clients
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

CLOSE_S_MAX = 0.05
"""Limit of closing the device when nothing is under way any more: its threads end in a few milliseconds, and then the process exits
regardless."""


Share = Annotated[float, numbers(0, 1, is_open=True)]
"""A part of the whole."""


def serve(
    device: str,
    /,
    *,
    socket: Path | None = None,
    listen: str | None = None,
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
    reserved_share: Share = DEFAULT_LIMITS.reserved_share,
    reserved_share_per_user: Share = DEFAULT_LIMITS.reserved_share_per_user,
    hang_after: Annotated[float | None, numbers(0, SECONDS_MAX, "s", is_open=True)] = None,
    drain_within: Annotated[float, numbers(0, SECONDS_MAX, "s")] = DRAIN_S_MAX,
    metrics: str | None = None,
    watch: Annotated[bool, Parameter(negative=())] = False,
    watch_at: str | None = None,
    node_name: str | None = None,
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
    tls_clients: Path | None = None,
    any_client: Annotated[bool, Parameter(negative=())] = False,
    client_quota: Sequence[str] = (),
    oip: str | None = None,
    oip_rest: Annotated[int | None, numbers(0, 65535)] = None,
    model: Sequence[str] = (),
    realtime: RealtimeOption = None,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve a device to every application that may write to a socket, or to other machines, until interrupted.

    Clients cannot see or disturb one another: each has objects and limits of its own, and its objects are freed when it
    disconnects.

    At SIGTERM the process drains, so that nothing new is accepted, accepted executions end, and the exit status is 0. A second
    SIGTERM ends it immediately.

    Args:
        device: Registered name of the driver, or MODULE:CLASS, in the working directory too.
        socket: Path of the socket to create; one that a crashed server left is replaced. Not needed with --listen.
        listen: HOST:PORT at which clients of a network are served: aionn.open(fleet=["HOST:PORT"]). Port 0 takes a free one.
        name: Name of the device; by default the driver's.
        mode: Permissions of the socket in octal: 600 admits this user, 660 the group, 666 all users.
        memory_mib: Device memories, models, cache files and queues of one client, in MiB.
        models: Prepared models of one client.
        bursts: Open bursts of one client.
        executions: Executions under way of one client.
        descriptors: Descriptors for memories, fences and files that one client sent: two for a memory, and eight for a burst.
        mapped_mib: Memories that one client sent, in MiB.
        clients: Concurrent connections, of the socket and of the network each. When a limit is reached, connections that have not
            sent Hello are ended first; then new ones are rejected, with the reason.
        clients_per_user: Concurrent connections of one user, as identified by the kernel; of the network from one address.
        clients_per_process: Concurrent connections of one process.
        hello_within: Seconds after which a connection that has not sent Hello is ended.
        reserved_share: Share of the time of the device that streams with a guarantee of one process may reserve, above 0 up to 1.
        reserved_share_per_user: The same for all processes of one user together.
        hang_after: End the process, with status 1, when the device makes no progress for this number of seconds.
        drain_within: Seconds that accepted executions without a deadline, or with a later one, have after SIGTERM; then they are
            cut off, with status 1.
        metrics: HOST:PORT at which the figures are exposed, at /metrics in the text format of Prometheus, and at /ready whether new
            work is accepted; 127.0.0.1 and 9464 where they are left out. Another host lets other machines read them.
        watch: Serve a page that shows the clients and their executions by priority; prints its address.
        watch_at: HOST:PORT of the page, 127.0.0.1:8470 by default; another host lets other machines connect.
        node_name: Name of this machine, under which network clients have the device: NAME/DEVICE; by default the host name.
        tls_certificate: File of this node's certificate: network connections are encrypted.
        tls_key: File of its key, if it is not in the same file.
        tls_clients: File of the certificates of network clients, or of authorities that sign them: others are not served.
        any_client: Serve network clients of other machines without a certificate. All that can connect may then use the device.
        client_quota: NAME:QUOTA=NUMBER,... limits all network clients of a name together: clients, executions, memory-mib, models,
            connections, reservations, reserved-share. A name is the common name of a certificate, without certificates an address,
            and * for all others; can be given several times.
        oip: PORT or HOST:PORT at which models are served by the Open Inference Protocol over gRPC, at 127.0.0.1 without a host;
            port 0 takes a free one. Over REST they are served at the port below it.
        oip_rest: Port of REST, if it is another one.
        model: NAME=FILE, FILE, or a folder of .tflite and .onnx files that --oip serves; can be given several times.
        realtime: Real-time scheduling of this process: required, used if the machine permits it, or off; by default AIONN_REALTIME,
            or off.
        quiet: Print nothing.
    """
    permissions = _permissions(mode)
    _check_places(socket, listen, oip)
    door = door_of(oip, oip_rest, model, any_client=any_client, drain_s=drain_within)
    is_open = any_client and (oip is None or listen is not None)
    quotas = msgspec.structs.replace(
        SHARED_QUOTAS,
        memory_bytes=memory_mib * MIB,
        prepared_models=models,
        bursts=bursts,
        executions=executions,
        descriptors=descriptors,
        mapped_bytes=mapped_mib * MIB,
    )
    limits = ClientLimits(
        clients, clients_per_user, clients_per_process, hello_within, reserved_share, reserved_share_per_user
    )
    files = tls_certificate, tls_key, tls_clients
    network = network_of(listen, node_name, files, client_quota, limits, any_client=is_open)
    at = _page_address(watch, watch_at, quiet)
    _prepare_process()
    settings = settings_from(realtime=realtime)  # Refuses a variable whose value makes no sense.
    choose_tags()
    begin_trace(None, process=f"server of {name or device}")
    find_driver_module(device)
    made = registry.make_device(device, name or device)
    freeze_modules()
    shorten_turns()
    with _realtime(settings.realtime), socket_of(socket) as path:
        places = _Places(path, socket is None, permissions, network, door, metrics, at)
        try:
            return interrupts.run(_serve, made, places, quotas, limits, hang_after, drain_within, quiet)
        except KeyboardInterrupt:
            return 0  # That is how it is ended.


def _check_places(socket: Path | None, listen: str | None, oip: str | None) -> None:
    if socket is None and listen is None and oip is None:
        raise InvalidArgument(
            "serve: expected --socket PATH, --listen HOST:PORT or --oip PORT, or several of them"
        )


def _permissions(mode: str) -> int:
    try:
        permissions = int(mode, 8)
    except ValueError:
        permissions = -1
    if not 0 <= permissions <= 0o777:
        raise InvalidArgument(f"--mode: expected an octal number up to 777, got {mode}")
    return permissions


def _prepare_process() -> None:
    """Allows as many descriptors as the system does, since the usual 1024 suffice for a few clients, and has nothing wait for the
    readers of its output.
    """
    never_wait_for_readers()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _page_address(is_wanted: bool, at: str | None, quiet: bool) -> str | None:
    if not is_wanted and at is None:
        return None
    if quiet:
        raise InvalidArgument(
            "serve: expected either --watch or --quiet, got both; the page's address would not be printed"
        )
    from aionn.cli.watched_streams import watch_address  # A server without a page imports nothing of it.

    return watch_address(is_wanted, at)


@contextmanager
def _realtime(mode: Mode) -> Iterator[None]:
    """Gives the thread of the event loop the class HIGH; the threads of the device acquire theirs when they start."""
    if mode is Mode.OFF:
        with serving_in_short_slices():
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


class _Places(NamedTuple):
    """Where the command serves.

    Attributes:
        path: Of the socket.
        is_private: Whether the socket is this command's own, for the network alone.
        mode: Permissions of the socket.
        network: None if it does not listen.
        door: None if it does not serve models.
        metrics: See ``serve``.
        page: HOST:PORT of the page; None without one.
    """

    path: Path
    is_private: bool
    mode: int
    network: Network | None
    door: DoorSettings | None
    metrics: str | None
    page: str | None

    def end_process(self, state: DrainState) -> NoReturn:
        """Ends the process without closing anything: a folder of this command's own is removed, processes beside it are killed."""
        kill_all()
        if self.is_private:
            shutil.rmtree(self.path.parent, ignore_errors=True)
        os._exit(EXIT_STATUS[state])


async def _serve(
    device: Device,
    places: _Places,
    quotas: Quotas,
    limits: ClientLimits,
    hang_after: float | None,
    drain_within: float,
    quiet: bool,
) -> int:
    """Serves until SIGTERM; returns the exit status."""
    name = device.info.name
    figures, page = _counted(device, places.metrics, places.page)
    drain = Drain(drain_within, figures)
    try:
        async with (
            _exposed(places.metrics, figures, name, drain) as url,
            page,
            anyio.create_task_group() as tasks,
        ):
            started, terminated = anyio.Event(), anyio.Event()
            with _sigterm(drain, places, terminated.set):
                tasks.start_soon(_listen, device, places, quotas, limits, hang_after, started, drain)
                await started.wait()
                async with (
                    serving_network(places.network, places.path) as address,
                    serving_door(places.door, places.path) as door,
                ):
                    if not quiet:
                        _report_places(name, places, address, door, url)
                    await terminated.wait()
                    if not quiet:
                        report_line(f"ending {name}: accepted executions have {drain_within:g} s")
                    # Requests that the door has accepted are executed while the device still begins executions.
                    is_whole = door is None or await door.drain()
                    drain.wake()
                    await drain.ended()
                    state = drain.state if is_whole else DrainState.CUT_OFF
                    _end_soon(state, name, places)
    finally:
        await finish(device.aclose())
    return EXIT_STATUS[state]


def _report_places(name: str, places: _Places, address: str, door: DoorProcess | None, metrics: str) -> None:
    own = "" if places.is_private else str(places.path)
    found = list(filter(None, (own, address, "" if door is None else f"{door.address} (gRPC)")))
    report_line(f"serving {name} at {' and '.join(found)}; Ctrl-C ends it")
    if door is not None and places.door is not None:
        report_line(f"models {', '.join(places.door.models)} at {door.rest_url} as well")
    if metrics:
        report_line(f"metrics at {metrics}")


def _counted(
    device: Device, metrics: str | None, at: str | None
) -> tuple[HostFigures | None, AbstractAsyncContextManager[object]]:
    """The counts of the process, None if they are not read, and its page, an empty context without one."""
    if at is None:
        return None if metrics is None else HostFigures(), nullcontext()
    from aionn.cli.serving.served import ServedFigures
    from aionn.cli.watched_streams import served_page
    from aionn.watch import Collector

    collector = Collector(f"aionn serve {device.info.name}")
    return ServedFigures(device, collector), served_page(collector, at)


@asynccontextmanager
async def _exposed(
    place: str | None, figures: HostFigures | None, name: str, drain: Drain
) -> AsyncIterator[str]:
    """Exposes the figures; gives their address, or an empty text where they are not exposed."""
    if place is None or figures is None:
        yield ""
        return

    def is_up() -> bool:
        return drain.state is DrainState.SERVING

    source = Source(
        FAMILIES,
        lambda: figures.samples(name, is_up=is_up()),
        in_loop(),
        is_up,
    )
    server = MetricsServer(place, source)
    try:
        yield server.url
    finally:
        await finish(anyio.to_thread.run_sync(server.close))


@contextmanager
def _sigterm(drain: Drain, places: _Places, begin: Callable[[], object]) -> Iterator[None]:
    """Calls ``begin`` in the loop at SIGTERM, and ends the process at the second one.

    A handler of Python and not of the event loop: the second signal takes effect although a device blocks the loop.
    """
    wake = caller(begin)

    def handle(number: int, frame: object) -> None:
        if drain.terminate() is DrainState.STOPPED:
            places.end_process(DrainState.STOPPED)
        wake()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        # The rest of the process's life is bounded: a signal in it must not end the exit status that the drain has earned.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if drain.state is DrainState.DRAINED else before)


def _end_soon(state: DrainState, name: str, places: _Places) -> None:
    """Ends the process although the device hangs in an execution that was not waited for any longer."""
    if state is not DrainState.DRAINED:
        # Nothing is closed: that would wait for what was cut off.
        report_line(f"aionn: {name}: {state.value}; they were cut off", wraps=False, stream=sys.stderr)
        places.end_process(state)

    def end() -> None:
        threading.Event().wait(CLOSE_S_MAX)
        places.end_process(state)

    try:
        threading.Thread(target=end, daemon=True, name="aionn-end").start()
    except RuntimeError:  # No thread is left. The exit status has been earned regardless.
        places.end_process(state)


async def _listen(
    device: Device,
    places: _Places,
    quotas: Quotas,
    limits: ClientLimits,
    hang_after: float | None,
    started: anyio.Event,
    drain: Drain,
) -> None:
    with Progress(hang_after) as progress:
        await listen_for_clients(
            device,
            places.path,
            mode=places.mode,
            quotas=quotas,
            limits=limits,
            progress=progress,
            started=started,
            drain=drain,
        )
