"""The node's process: ``aionn serve --listen`` starts it beside the process of the device, and it ends with that.

Owns its start, its end, and its arguments. It computes nothing and imports no engine, so that its heartbeats come in time whatever
the device does. It reaches the device by its Unix socket, as any client does.

Invariants:
1. The process ends when the process that started it does, however that ends: its standard input is a pipe of that process.
2. When it ends in order, results that are there are sent first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from aionn.errors import DeviceUnavailable, Error, InvalidArgument
from aionn.fleet.addresses import ListenAddress
from aionn.fleet.node.quotas import ClientQuotas
from aionn.fleet.node.server import Node, check_name
from aionn.fleet.tls import node_context
from aionn.hal import Device
from aionn.observability.access import is_loopback
from aionn.observability.log_tags import label_lines
from aionn.platform.loops import finish
from aionn.platform.python_process import python_command, python_environment
from aionn.service.client.device import RemoteDevice
from aionn.service.host.admission import ClientLimits

__all__ = ["NodeSettings", "check_open_to", "listening", "main", "running"]

BACKLOG = 128
"""Connections that wait to be accepted: one for each data connection of a few clients that start at the same time."""

START_S_MAX = 30.0
"""Limit of the start of the process, which imports for a third of a second: for a machine with much else to do."""

READY = b"."
"""The output of the process when it serves."""

FLUSH_S_MAX = 1.0
"""Time for which results are still sent after the device's process has ended."""

FLUSH_LOOK_S = 0.01
"""Interval of looks whether all were sent."""

END_S_MAX = 2.0
"""Time for which the process that started this one waits for its end."""

_logger = logging.getLogger("aionn.service")


class NodeSettings(msgspec.Struct, frozen=True):
    """The settings of a node.

    Attributes:
        name: By which clients call its devices.
        socket: Path of the device's Unix socket.
        certificate: File of its certificate; empty without encryption.
        key: File of its key; empty if it is in the same file.
        clients: File of the certificates of clients; empty if they need none.
        limits: Limits of connections.
        quotas: Limits of clients by name; see ``quotas_of``.
    """

    name: str
    socket: str
    certificate: str = ""
    key: str = ""
    clients: str = ""
    limits: ClientLimits = ClientLimits()
    quotas: dict[str, ClientQuotas] = {}


def check_open_to(address: ListenAddress, settings: NodeSettings, *, any_client: bool) -> None:
    """Checks the name and the files of a node, and that it does not serve strangers without ``any_client``.

    Raises:
        InvalidArgument: The name is illegal, or a file cannot be used; or the address is reached from other machines, and clients
            need no certificate.
    """
    check_name(settings.name)
    if not settings.certificate and (settings.key or settings.clients):
        raise InvalidArgument("--tls-key and --tls-clients go with --tls-certificate")
    if settings.certificate:
        node_context(settings.certificate, settings.key, settings.clients)
    if is_loopback(address.host) or settings.clients or any_client:
        return
    raise InvalidArgument(
        f"--listen {address.host or '*'}: other machines reach this address. Give --tls-certificate and --tls-clients, so that "
        "clients prove who they are, or --any-client to serve all that can connect"
    )


def listening(address: ListenAddress) -> socket.socket:
    """A socket that listens.

    Raises:
        DeviceUnavailable: The address is not this machine's, or the port is in use.
    """
    place = f"{address.host}:{address.port}"
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as e:
        raise DeviceUnavailable(f"--listen {place}: no address of this name: {e}") from e
    # All addresses of the machine: one socket of IPv6 accepts connections by IPv4 as well.
    found.sort(key=lambda one: one[0] != (socket.AF_INET6 if not address.host else socket.AF_INET))
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(address.host)))
        sock.bind(where)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise DeviceUnavailable(f"--listen {place}: cannot listen: {e.strerror}") from e
    return sock


@asynccontextmanager
async def running(listener: socket.socket, settings: NodeSettings) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Runs a node's process while inside; it has the listener, which the caller closes.

    Raises:
        DeviceUnavailable: It cannot be started.
    """
    process = await anyio.to_thread.run_sync(_started, listener, settings)
    try:
        yield process
    finally:
        await finish(anyio.to_thread.run_sync(end, process))


def _started(listener: socket.socket, settings: NodeSettings) -> subprocess.Popen[bytes]:
    command = python_command(__name__, str(listener.fileno()), msgspec.json.encode(settings).decode())
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            env=python_environment(),
        )
    except OSError as e:
        raise DeviceUnavailable(f"node {settings.name}: its process cannot be started: {e.strerror}") from e
    assert process.stdout is not None, "it was started so"
    with process.stdout as pipe:
        readable, _, _ = select.select([pipe], [], [], START_S_MAX)
        if readable and pipe.read(len(READY)) == READY:
            return process
    end(process)
    raise DeviceUnavailable(
        f"node {settings.name}: its process did not begin to serve (exit status {process.returncode})"
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a node's process: in order, then by force. Blocks for a bounded time."""
    assert process.stdin is not None, "it was started so"
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> None:
    """The process: the number of the listener's descriptor, and the settings."""
    # Ctrl-C goes to the whole group, and so does the SIGTERM of a service manager. The process that started this one ends it, after
    # it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    label_lines()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = msgspec.json.decode(arguments[1], type=NodeSettings)
    try:
        with socket.socket(fileno=int(arguments[0])) as listener:
            anyio.run(_serve, listener, settings)
    except Error as e:
        with contextlib.suppress(OSError):  # The reader may be gone.
            sys.stderr.write(f"aionn: {e}\n")
        raise SystemExit(2) from None


async def _serve(listener: socket.socket, settings: NodeSettings) -> None:
    context = None
    if settings.certificate:
        context = node_context(settings.certificate, settings.key, settings.clients)

    async def open_device(tasks: anyio.abc.TaskGroup) -> Device:
        device = RemoteDevice("served", settings.socket, tasks, path=settings.socket)
        await device.connect()
        return device

    async with anyio.create_task_group() as tasks:
        node = Node(settings.name, open_device, tasks, limits=settings.limits, quotas=settings.quotas)
        tasks.start_soon(node.serve, listener, context)
        os.write(sys.stdout.fileno(), READY)
        await _owner_gone()
        with anyio.move_on_after(FLUSH_S_MAX):
            while node.figures.executing:
                await anyio.sleep(FLUSH_LOOK_S)
        tasks.cancel_scope.cancel()


async def _owner_gone() -> None:
    """Waits until the process that started this one has closed the pipe, or has ended."""
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        await anyio.wait_readable(sys.stdin.fileno())
        try:
            if not os.read(sys.stdin.fileno(), 1024):
                return
        except BlockingIOError:
            pass
