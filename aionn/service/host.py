"""The driver process: serves one ``hal.Device`` to the client at the other end of a socket.

Owns the client's tables (prepared models, bursts, fenced executions), and the process's life: it ends when the client's end of the socket is
gone, within ``END_S_MAX`` even when a device hangs.

Invariants:
1. Everything that a client made is freed when its connection ends.
2. A handle is checked at every use and never used twice.
3. The event loop of this process runs no device code: blocking devices have threads of their own.

Run as ``python -m aionn.service.host --fd N --driver NAME --name DEVICE``; started by ``aionn.service.supervisor``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import socket
import threading
from collections.abc import Sequence, Sized

import anyio
import anyio.from_thread
import anyio.to_thread

import fmq
from aionn.burst.server import BurstServer
from aionn.drivers import registry
from aionn.errors import (
    DeadObject,
    Error,
    GeneralFailure,
    InvalidArgument,
    OutputInsufficientSize,
    ResourceExhausted,
)
from aionn.hal import Device, ExecutionResult, FencedExecution, Memory, PreparedModel, Request
from aionn.service.channel import Channel
from aionn.service.protocol import (
    PROTOCOL_VERSION,
    CallBody,
    ConfigureBurst,
    ConfigureBurstReply,
    Done,
    EndBurst,
    Execute,
    ExecuteFenced,
    ExecuteFencedReply,
    ExecuteReply,
    ExecutionInfoReply,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    GetMemories,
    GetMemoriesReply,
    GetStatus,
    Hello,
    HelloReply,
    PrepareModel,
    PrepareModelReply,
    QueueHandle,
    ReplyBody,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)

__all__ = ["Client", "main", "serve"]

END_S_MAX = 0.5
"""How long a process whose client is gone may take to clean up before it ends regardless: half of what users are promised."""

HANDLES_MAX = 1 << 16
"""Most objects of one kind that one client may hold."""

_logger = logging.getLogger("aionn.service")


class Client:
    """One client's objects and the answers to its calls."""

    def __init__(self, device: Device, portal: anyio.from_thread.BlockingPortal) -> None:
        self._device = device
        self._portal = portal
        self._handles = itertools.count(1)
        self._prepared: dict[int, PreparedModel] = {}
        self._bursts: dict[int, tuple[int, BurstServer]] = {}
        self._fenced: dict[int, FencedExecution] = {}

    async def handle(self, body: CallBody, channel: Channel) -> ReplyBody:
        """Answers one call. Raises ``Error`` for what becomes a failed reply."""
        match body:
            case Hello():
                return self._hello(body)
            case GetStatus():
                return StatusReply(await self._device.status())
            case SupportedOperations():
                return SupportedOperationsReply(await self._device.supported_operations(body.model))
            case PrepareModel():
                return await self._prepare(body)
            case FreePreparedModel():
                return await self._free_prepared(body.prepared)
            case Execute():
                return await self._execute(body)
            case ExecuteFenced():
                return await self._execute_fenced(body)
            case GetExecutionInfo():
                return await self._execution_info(body)
            case ConfigureBurst():
                return self._configure_burst(body, channel)
            case FreeMemorySlot():
                self._burst(body.burst).free_slot(body.slot)
                return Done()
            case EndBurst():
                return await self._end_burst(body.burst)
            case _:
                raise InvalidArgument(f"service: a driver answers no {type(body).__name__}")

    def _hello(self, body: Hello) -> HelloReply:
        if body.version != PROTOCOL_VERSION:
            raise InvalidArgument(
                f"service: expected protocol version {PROTOCOL_VERSION}, got {body.version}: the two ends differ"
            )
        return HelloReply(PROTOCOL_VERSION, os.getpid(), self._device.info)

    async def _prepare(self, body: PrepareModel) -> PrepareModelReply:
        _check_room("prepared models", self._prepared)
        prepared = await self._device.prepare_model(
            body.model, preference=body.preference, priority=body.priority, deadline_ns=body.deadline_ns
        )
        handle = next(self._handles)
        self._prepared[handle] = prepared
        return PrepareModelReply(handle)

    async def _free_prepared(self, handle: int) -> Done:
        prepared = self._prepared.pop(handle, None)
        if prepared is not None:
            for burst in [b for b, (owner, _) in self._bursts.items() if owner == handle]:
                await self._end_burst(burst)
            await prepared.aclose()
        return Done()

    def _prepared_model(self, handle: int) -> PreparedModel:
        try:
            return self._prepared[handle]
        except KeyError:
            raise InvalidArgument(f"service: no prepared model has the handle {handle}") from None

    def _burst(self, handle: int) -> BurstServer:
        try:
            return self._bursts[handle][1]
        except KeyError:
            raise InvalidArgument(f"service: no burst has the handle {handle}") from None

    async def _execute(self, body: Execute) -> ExecuteReply:
        prepared = self._prepared_model(body.prepared)
        return ExecuteReply(
            await prepared.execute_synchronously(
                body.request.request(),
                measure=body.measure,
                deadline_ns=body.deadline_ns,
                loop_timeout_ns=body.loop_timeout_ns,
            )
        )

    async def _execute_fenced(self, body: ExecuteFenced) -> ExecuteFencedReply:
        _check_room("fenced executions", self._fenced)
        launched = await self._prepared_model(body.prepared).execute_fenced(
            body.request.request(),
            body.wait_for,
            measure=body.measure,
            deadline_ns=body.deadline_ns,
            loop_timeout_ns=body.loop_timeout_ns,
            duration_ns=body.duration_ns,
        )
        handle = next(self._handles)
        self._fenced[handle] = launched
        return ExecuteFencedReply(handle, launched.fence)

    async def _execution_info(self, body: GetExecutionInfo) -> ExecutionInfoReply:
        launched = self._fenced.get(body.execution)
        if launched is None:
            raise InvalidArgument(f"service: no fenced execution has the handle {body.execution}")
        status, timing = await launched.get_execution_info()
        if body.last:
            del self._fenced[body.execution]
        return ExecutionInfoReply(status, timing)

    def _configure_burst(self, body: ConfigureBurst, channel: Channel) -> ConfigureBurstReply:
        _check_room("bursts", self._bursts)
        prepared = self._prepared_model(body.prepared)
        requests = _attach(body.requests)
        try:
            results = _attach(body.results)
        except Error:
            requests.close()
            raise
        handle = next(self._handles)

        def execute(request: Request, measure: bool) -> ExecutionResult:
            execute_now = getattr(prepared, "execute_now", None)
            if execute_now is not None:
                result: ExecutionResult = execute_now(request, measure=measure)
                return result
            return self._portal.call(lambda: prepared.execute_synchronously(request, measure=measure))

        def get_memories(slots: Sequence[int]) -> Sequence[Memory]:
            reply = self._portal.call(
                lambda: channel.call(GetMemories(handle, tuple(slots)), GetMemoriesReply)
            )
            return reply.memories

        server = BurstServer(
            requests, results, execute=execute, get_memories=get_memories, name=f"aionn-burst-{handle}"
        )
        self._bursts[handle] = (body.prepared, server)
        server.start()
        return ConfigureBurstReply(handle)

    async def _end_burst(self, handle: int) -> Done:
        owned = self._bursts.pop(handle, None)
        if owned is not None:
            await anyio.to_thread.run_sync(owned[1].stop)
        return Done()

    async def aclose(self) -> None:
        """Frees everything that the client made."""
        for handle in list(self._bursts):
            await self._end_burst(handle)
        for handle in list(self._prepared):
            await self._free_prepared(handle)
        self._fenced.clear()


def _attach(handle: QueueHandle) -> fmq.MessageQueue:
    try:
        return fmq.MessageQueue.attach(handle.descriptor, handle.fds)
    except fmq.Error as e:
        raise InvalidArgument(f"burst: the queue cannot be used: {e}") from e
    except OSError as e:
        raise ResourceExhausted(f"burst: the queue cannot be mapped: {e.strerror}") from e


def _check_room(what: str, table: Sized) -> None:
    if len(table) >= HANDLES_MAX:
        raise ResourceExhausted(f"service: this client holds {HANDLES_MAX} {what} already", transient=True)


async def serve(device: Device, sock: socket.socket) -> None:
    """Serves one client until it goes away, then frees what was its own."""
    async with anyio.from_thread.BlockingPortal() as portal:
        client = Client(device, portal)
        channel = Channel(sock, client.handle, peer_name="the client")
        try:
            await channel.run()
        finally:
            with anyio.CancelScope(shield=True):
                await client.aclose()
            channel.release()


async def _main(driver: str, name: str, sock: socket.socket) -> None:
    device = registry.load_factory(driver)(name)
    try:
        await serve(device, sock)
    finally:
        with anyio.CancelScope(shield=True):
            await device.aclose()


def _end_with_client(fd: int) -> None:
    """Waits for the client's end to go away, then lets the process END_S_MAX to clean up. A thread, so that a loop that is stuck
    cannot keep the process alive."""
    import select
    import time

    poller = select.poll()
    poller.register(fd, select.POLLHUP | select.POLLRDHUP)
    while not any(events & (select.POLLHUP | select.POLLRDHUP) for _, events in poller.poll()):
        pass
    time.sleep(END_S_MAX)
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m aionn.service.host", description="Serves one driver; internal."
    )
    parser.add_argument("--fd", type=int, required=True, help="connected Unix socket, inherited")
    parser.add_argument("--driver", required=True, help="registered name of the driver")
    parser.add_argument("--name", required=True, help="name of the device")
    options = parser.parse_args(arguments)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    threading.Thread(
        target=_end_with_client, args=(os.dup(options.fd),), daemon=True, name="aionn-end"
    ).start()
    try:
        anyio.run(_main, options.driver, options.name, sock)
    except (DeadObject, GeneralFailure, OutputInsufficientSize) as e:
        raise SystemExit(f"{options.name}: {e}") from e


if __name__ == "__main__":
    main()
