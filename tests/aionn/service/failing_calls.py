"""Lives a client's whole life again and again while the n-th system call of a kind fails, until a life passes untouched.

Run as a script by test_failing_calls.py, with the library of failing_calls.c preloaded: each line of its standard input is a
request, each line of its standard output a report. What a life may end with is success or an error of the package; whatever it
ends with, nothing may hang or be left behind, here or in the driver process, and the next life, undisturbed, must succeed.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import functools
import gc
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from conftest import Sum, sum_model

from aionn.errors import Error, ErrorStatus, ResourceExhausted
from aionn.hal import BufferDesc, BufferRole, Memory
from aionn.service.client.device import RemoteDevice
from fences import FenceError, SyncFence
from tests.support.cancellation import child_processes

_KINDS = (
    "nothing mmap memfd_create eventfd recvmsg sendmsg send socketpair fork fcntl_dup fallocate pipe dup pidfd_open "
    "epoll_ctl epoll_create epoll_wait poll pthread_create connect accept socket"
)
KINDS = _KINDS.split()
"""As in failing_calls.c."""

LIFE_S_MAX = 30.0
LEFT_S_MAX = 20.0
REQUEST_S_MAX = 700
NUMBERS_MAX = 500
"""No life makes so many calls of a kind."""

MODEL = sum_model()


class Plan:
    """What fails: see failing_calls.c."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def arm(self, kind: str, first: int, error: str, role: str, times: int = 1) -> None:
        code = ("client", "driver").index(role) + 1
        self._map[:28] = struct.pack("7i", 0, first, times, getattr(errno, error), code, 0, 0)
        self._map[:4] = struct.pack("i", KINDS.index(kind))

    def disarm(self) -> int:
        """How often something was made to fail."""
        self._map[:4] = struct.pack("i", 0)
        return int(struct.unpack("7i", self._map[:28])[6])


async def live(device: RemoteDevice) -> None:
    """Every way of execution, and device memories."""
    prepared = await device.prepare_model(MODEL)
    work = Sum()
    for value in range(3):  # The third time the driver remembers the memory.
        work.values[0] = value
        await prepared.execute_synchronously(work.request)
        assert work.is_right
    told: list[ErrorStatus] = []
    called = SyncFence("callback")

    def callback(status: ErrorStatus, *_: Any) -> None:
        told.append(status)
        called.try_signal()

    await prepared.execute(work.request, callback)
    await called
    assert len(told) == 1 and isinstance(told[0], ErrorStatus)
    with SyncFence("start") as start:
        launched = await prepared.execute_fenced(work.request, [start])
        assert launched.fence is not None
        with launched.fence:
            start.signal()
            try:
                await launched.fence
            except OSError as e:  # An event loop that can watch no further descriptor says so.
                raise ResourceExhausted(f"fence: {e}") from e
            await launched.get_execution_info()
    execution = await prepared.create_reusable_execution(work.request)
    await execution.execute_synchronously()
    burst = await prepared.configure_execution_burst()
    try:
        for value in range(3):
            work.values[1] = value
            await burst.execute_synchronously(work.request, [0])
            assert work.is_right
        await burst.release_memory_resource(0)
    finally:
        await burst.aclose()
    buffer = await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    source, target = Memory.create(16), Memory.create(16)
    source.array[:] = np.arange(16)
    await buffer.copy_from(source, [])
    await buffer.copy_to(target)
    assert (target.array == source.array).all()
    await buffer.aclose()
    await prepared.aclose()


class Lives:
    """Runs lives in this process and says what is wrong with them.

    Args:
        make: Makes the device, with the task group that it lives in.
        server: The process that serves it, if it outlives a life.
    """

    def __init__(self, make: Callable[[Any], RemoteDevice], server: int | None) -> None:
        self._make = make
        self._server = server
        self._unhandled: list[str] = []
        sys.unraisablehook = lambda u: self._note(u.exc_value, f"in {u.object!r}")
        threading.excepthook = lambda a: self._note(a.exc_value, "in a thread")

    def _note(self, exception: BaseException | None, where: str) -> None:
        text = "".join(traceback.format_exception(exception)) if exception else ""
        self._unhandled.append(f"{where}: {text}")

    async def _main(self, arm: Callable[[], None]) -> None:
        arm()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, c: self._note(c.get("exception"), str(c.get("message"))))
        error: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            device = self._make(tasks)
            try:
                with anyio.fail_after(LIFE_S_MAX):
                    await live(device)
            except (Error, FenceError) as e:
                error = e
            finally:
                with anyio.fail_after(LIFE_S_MAX):
                    await device.aclose()
        if error is not None:
            raise error

    def one(self, arm: Callable[[], None] = lambda: None) -> tuple[str, list[str]]:
        """How a life ended, and what is wrong with that. ``arm`` is called when the event loop runs: it is not ours to make."""
        before, before_there = self._footprint(), self._server_footprint()
        wrong: list[str] = []
        try:
            anyio.run(self._main, arm)
            outcome = "success"
        except (Error, FenceError) as e:
            outcome = type(e).__name__
        except BaseException:
            outcome = "other"
            wrong.append(traceback.format_exc())
        wrong += self._unhandled
        self._unhandled.clear()
        wrong += self._left(before, self._footprint, "here")
        wrong += self._left(before_there, self._server_footprint, "at the server")
        return outcome, wrong

    @staticmethod
    def _left(before: list[int], footprint: Callable[[], list[int]], where: str) -> list[str]:
        end_s = time.monotonic() + LEFT_S_MAX
        while any(now > then for now, then in zip(footprint(), before, strict=True)):
            if time.monotonic() > end_s:
                return [f"left {where}: {footprint()} after {before} of {WHAT}: {descriptors()}"]
            gc.collect()
            time.sleep(0.002)
        return []

    def _footprint(self) -> list[int]:
        return [*_process_footprint("self"), threading.active_count(), len(child_processes())]

    def _server_footprint(self) -> list[int]:
        return [] if self._server is None else _process_footprint(str(self._server))


WHAT = "descriptors, mappings, threads, children"


def descriptors() -> list[str]:
    return sorted(os.readlink(e) for e in Path("/proc/self/fd").iterdir() if e.is_symlink() and e.exists())


def _process_footprint(pid: str) -> list[int]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [len(os.listdir(f"/proc/{pid}/fd")), maps.count("/memfd:")]


def main() -> None:
    plan = Plan(sys.argv[1])
    for line in sys.stdin:
        faulthandler.dump_traceback_later(REQUEST_S_MAX, exit=True)
        print(json.dumps(report_of(plan, **json.loads(line))), flush=True)


def report_of(
    plan: Plan, faults: list[str], step: int, server: int | None, socket_path: str | None
) -> dict[str, Any]:
    """Lives lives with each fault, at every ``step``-th call of its kind.

    Args:
        plan: What fails.
        faults: As ``role:kind:error``.
        step: At least 1.
        server: The process that serves the device; None: each life starts a driver process.
        socket_path: Where that serves.
    """
    if server is None:
        lives = Lives(lambda tasks: RemoteDevice("reference", "reference", tasks), None)
    else:
        lives = Lives(lambda tasks: RemoteDevice("r", "r", tasks, path=socket_path), server)
    report: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    for _ in range(1 if server is None else 2):
        undisturbed = lives.one()
        assert undisturbed == ("success", []), f"a life that nothing disturbs: {undisturbed}"
    gc.collect()
    gc.freeze()  # What stays to the end need not be looked at after each life.
    for fault in faults:
        role, kind, error = fault.split(":")
        outcomes: dict[str, int] = {}
        for number in range(1, NUMBERS_MAX, step):
            began_s = time.monotonic()
            outcome, found = lives.one(functools.partial(plan.arm, kind, number, error, role))
            if plan.disarm() == 0:
                break
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if time.monotonic() - began_s > LIFE_S_MAX:
                found.append(f"took {time.monotonic() - began_s:.1f} s")
            after, more = lives.one()
            if after != "success":
                more.append(f"the next life ended with {after}")
            wrong += [f"{fault}, call {number}: {text}" for text in [*found, *more]]
            if len(wrong) > 20:
                break
        else:
            wrong.append(f"{fault}: {NUMBERS_MAX} calls are not all")
        report[fault] = outcomes
    return {"outcomes": report, "wrong": wrong}


if __name__ == "__main__":
    main()
