"""The process of the door: ``aionn serve --oip`` starts it beside the process of the device, whose client it is.

Owns its start, its end, and its arguments. All that clients of the network send is decoded here, in a process that runs no driver;
to the device it is one client of its Unix socket, with the quotas of any other.

Invariants:
1. The process ends when the one that started it does, however that ends: its standard input is a pipe of that process.
2. When the pipe is closed, nothing new is accepted, accepted requests are answered within ``drain_s``, and the exit status is 0; it
   is 1 where requests were cut off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec

import aionn
from aionn.oip.door import Door
from aionn.oip.grpc_server import GrpcServer
from aionn.oip.models import ServedModel, served
from aionn.oip.rest_server import RestServer
from aionn.oip.settings import CUT_OFF, DoorSettings, Started
from aionn.oip.unread import is_worth_logging

__all__ = ["main", "serving"]


@asynccontextmanager
async def serving(
    models: Mapping[str, ServedModel],
    host: str = "127.0.0.1",
    port: int = 0,
    rest_port: int = 0,
    *,
    is_remote: bool = False,
) -> AsyncIterator[tuple[Door, int, int]]:
    """Serves models by gRPC and REST while inside; gives the door, and the ports of both.

    Raises:
        InvalidArgument: An address cannot be used.
    """
    door = Door(models)
    shown = f"[{host}]" if ":" in host else host
    grpc = GrpcServer(door, f"{shown}:{port}")
    rest = RestServer(door, host, rest_port, is_remote=is_remote)
    try:
        yield door, await grpc.start(), await rest.start()
    finally:
        with anyio.CancelScope(shield=True):
            await rest.stop()
            await grpc.stop()


def main(arguments: Sequence[str]) -> None:
    """The process: its settings, as JSON."""
    # They go to the whole group, or to all processes of a service; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="aionn %(name)s: %(message)s")
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_worth_logging)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = msgspec.json.decode(arguments[0], type=DoorSettings)
    try:
        status = anyio.run(_serve, settings)
    except aionn.Error as e:
        _report(Started(problem=str(e)))
        raise SystemExit(2) from None
    # The driver's end of the socket may be gone already; nothing is left to be closed in order.
    os._exit(status)


async def _serve(settings: DoorSettings) -> int:
    async with _runtime(settings) as runtime, served(runtime, settings.models) as models:
        where = settings.host, settings.port, settings.rest_port
        async with serving(models, *where, is_remote=settings.is_remote) as (door, port, rest_port):
            _report(Started(port, rest_port))
            await _owner_gone()
            is_whole = await door.drain(settings.drain_s)
    return 0 if is_whole else CUT_OFF


def _runtime(settings: DoorSettings) -> aionn.Runtime:
    # The device alone: the environment may name other ones.
    return aionn.open(
        drivers=(),
        sockets=[settings.socket],
        fleet=(),
        enabled_devices=".*",
        cpu_only=False,
    )


def _report(started: Started) -> None:
    with contextlib.suppress(OSError):  # The reader may be gone.
        os.write(sys.stdout.fileno(), msgspec.json.encode(started) + b"\n")


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
