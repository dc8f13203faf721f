"""A client that behaves well, in a process of its own: executes, compares every answer, and says how long each took.

Run as a script with the socket's path. Each line of its input is a number of executions, or with ``s`` behind it a number of
seconds; the answer is one line of JSON with ``latencies_ns`` of executions and what was ``wrong``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from hostile_messages import sum_model

from aionn.hal import DataLocation, Memory, Request, RequestArgument
from aionn.service.client.device import RemoteDevice
from fences import SyncFence

CALL_S_MAX = 10.0
STATUS_EVERY = 32
PREPARE_EVERY = 128
OPEN_EVERY = 64
CONNECT_EVERY = 512
"""Other calls come between executions, so that whoever blocks one of them is noticed."""

WRONG_MAX = 5


class Client:
    """Its objects at the server."""

    def __init__(self, path: str, tasks: Any) -> None:
        self._path = path
        self._tasks = tasks
        self._count = 0
        self.latencies_ns: list[int] = []
        self.wrong: list[str] = []
        self._memory = Memory.create(48)
        self._values = self._memory.array.view(np.float32).reshape(3, 4)
        arguments = [RequestArgument(False, DataLocation(0, i * 16, 16)) for i in range(3)]
        self._request = Request((arguments[0], arguments[1]), (arguments[2],), (self._memory,))

    async def begin(self) -> None:
        self._device = self._new_device()
        self._prepared = await self._device.prepare_model(sum_model())
        self._burst = await self._prepared.configure_execution_burst()

    async def end(self) -> None:
        await self._burst.aclose()
        await self._device.aclose()

    def _new_device(self) -> RemoteDevice:
        return RemoteDevice("reference", "reference", self._tasks, path=self._path)

    async def _other_calls(self) -> None:
        if self._count % STATUS_EVERY == 0:
            await self._device.status()
        if self._count % PREPARE_EVERY == 1:
            prepared = await self._device.prepare_model(sum_model())
            await self._execute(prepared.execute_synchronously, self._request)
            await prepared.aclose()
        if self._count % OPEN_EVERY == 3:
            await self._open()
        if self._count % CONNECT_EVERY == 2:
            device = self._new_device()
            await device.status()
            await device.aclose()

    async def _open(self) -> None:
        """Opens a few descriptors: a fence that an execution waits for, and the one that it gives."""
        fence = SyncFence("of a client that behaves well")
        try:
            execution = await self._prepared.execute_fenced(self._request, [fence])
            fence.signal()
        finally:
            fence.close()
        if execution.fence is not None:
            await execution.fence
            execution.fence.close()
        await execution.get_execution_info()

    async def _execute(self, execute: Any, *arguments: Any) -> int:
        self._values[0], self._values[1], self._values[2] = self._count % 1000, np.arange(4), -1
        began_ns = time.monotonic_ns()
        await execute(*arguments)
        took_ns = time.monotonic_ns() - began_ns
        if not (self._values[2] == self._values[0] + self._values[1]).all():
            self.wrong.append(f"execution {self._count}: {self._values.tolist()}")
        return took_ns

    async def one(self) -> None:
        self._count += 1
        try:
            with anyio.fail_after(CALL_S_MAX):
                await self._other_calls()
                if self._count % 2:
                    took_ns = await self._execute(self._burst.execute_synchronously, self._request, [0])
                else:
                    took_ns = await self._execute(self._prepared.execute_synchronously, self._request)
            self.latencies_ns.append(took_ns)
        except Exception as e:
            self.wrong.append(f"execution {self._count}: {type(e).__name__}: {e}")


async def main(path: str) -> None:
    async with anyio.create_task_group() as tasks:
        client = Client(path, tasks)
        await client.begin()
        print("ready", flush=True)
        while line := (await anyio.to_thread.run_sync(sys.stdin.readline)).strip():
            client.latencies_ns, client.wrong = [], []
            if line.endswith("s"):
                end_s = time.monotonic() + float(line[:-1])
                while time.monotonic() < end_s and len(client.wrong) < WRONG_MAX:
                    await client.one()
            else:
                for _ in range(int(line)):
                    await client.one()
            print(json.dumps({"latencies_ns": client.latencies_ns, "wrong": client.wrong}), flush=True)
        await client.end()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
