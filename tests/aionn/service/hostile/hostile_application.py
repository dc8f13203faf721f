"""An application with one good device and one hostile one: every way of using both, and what comes of it.

Used by test_hostile_driver.py and by ``python -m benchmarks.hostile --driver``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import numpy as np

from aionn.errors import Error, ErrorStatus
from aionn.hal import (
    BufferDesc,
    BufferRole,
    DataLocation,
    Memory,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from fences import FenceError

UNANSWERED = "unanswered"
"""What comes of a call that did not end within its limit."""

START_S = 20.0
"""How long a call may take that starts the process first."""

LOOK_S = 0.002
"""How often the loop's delay is looked at."""


def sum_model() -> Model:
    """``a + b`` of four float32 numbers."""
    graph = GraphBuilder()
    a, b = (graph.input(OperandType.TENSOR_FLOAT32, (4,)) for _ in range(2))
    return graph.build([graph.result(OperationType.ADD, [a, b, graph.constant(0)], a)])


@contextlib.contextmanager
def _waits_for_a_processor() -> Iterator[Callable[[], float]]:
    """Time for which the kernel has let this thread wait for a processor so far, in seconds; 0 where it does not count that.

    The file stays open, since a hostile driver can take all other descriptors for a moment.
    """
    path = pathlib.Path("/proc/thread-self/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    with path.open("rb") as file:
        yield lambda: int(os.pread(file.fileno(), 200, 0).split()[1]) / 1e9


class Delay:
    """How long the event loop kept a task waiting that wanted a turn, apart from waits for a processor that others use.

    Attributes:
        worst_s: The longest.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        with _waits_for_a_processor() as queued_s:
            while True:
                due_s = time.monotonic() + LOOK_S - queued_s()
                await anyio.sleep(LOOK_S)
                self.worst_s = max(self.worst_s, time.monotonic() - queued_s() - due_s)


class Good:
    """Executions on the good device.

    Attributes:
        wrong: What was wrong.
        latencies_ns: Of each execution.
    """

    def __init__(self, compilation: Any, burst: Any) -> None:
        self._compilation = compilation
        self._burst = burst
        self.wrong: list[str] = []
        self.latencies_ns: list[int] = []

    async def one(self) -> None:
        """Executes once, every other time in a burst, and compares the answer."""
        count = len(self.latencies_ns)
        a, b = np.full(4, count % 1000, np.float32), np.arange(4, dtype=np.float32)
        execute = self._burst.execute if count % 2 else self._compilation.execute
        began_ns = time.monotonic_ns()
        try:
            (outputs,) = ((await execute([a, b])).outputs,)
            if not (outputs[0] == a + b).all():
                self.wrong.append(f"execution {count}: {outputs[0]}")
        except Exception as e:
            self.wrong.append(f"execution {count}: {type(e).__name__}: {e}")
        self.latencies_ns.append(time.monotonic_ns() - began_ns)

    async def go_on(self) -> None:
        """Executes for ever; other tasks have a turn after each."""
        while True:
            await self.one()
            await anyio.sleep(0.001)


@contextlib.asynccontextmanager
async def good_device(runtime: Any) -> AsyncIterator[Good]:
    """Its executions; the device is called ``good``."""
    async with (
        await runtime.compile(sum_model(), devices="good") as compilation,
        compilation.burst() as burst,
    ):
        yield Good(compilation, burst)


class Outcomes:
    """What came of the calls on the hostile device: ``ok``, the name of an error, or ``unanswered``, by the name of the call.

    Args:
        hal: The hostile device.
        call_s: How long a call may take.
        prepare_s: The same of calls that prepare a model; None: as all others.

    Attributes:
        undocumented: What was raised that is no error of the package.
    """

    def __init__(self, hal: Any, call_s: float, prepare_s: float | None = None) -> None:
        self._hal = hal
        self._call_s = call_s
        self._prepare_s = call_s if prepare_s is None else prepare_s
        self.by_call: dict[str, Counter[str]] = {}
        self.undocumented: list[str] = []

    async def of(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Makes a call, and notes what came of it. Returns what it returned; None where it did not."""
        result = None
        # A call that has to start the process first takes longer.
        limit_s = self._prepare_s if name in ("compile", "prepare_model") else self._call_s
        if self._hal.pid is None:
            limit_s = max(limit_s, START_S)
        try:
            with anyio.fail_after(limit_s):
                result = await call()
            outcome = "ok"
        except (Error, FenceError) as e:  # First: a missed deadline is a TimeoutError too.
            outcome = type(e).__name__
        except TimeoutError:
            outcome = UNANSWERED
        except Exception as e:
            outcome = type(e).__name__
            self.undocumented.append(f"{name}: {outcome}: {e}")
        self.by_call.setdefault(name, Counter())[outcome] += 1
        return result

    def __str__(self) -> str:
        return "; ".join(f"{name}: {dict(outcomes)}" for name, outcomes in self.by_call.items())


class Pool:
    """Memory of a request for the sum."""

    def __init__(self) -> None:
        self.memory = Memory.create(48)
        arguments = [RequestArgument(False, DataLocation(0, i * 16, 16)) for i in range(3)]
        self.request = Request((arguments[0], arguments[1]), (arguments[2],), (self.memory,))


async def use_contract(hal: Any, outcomes: Outcomes) -> None:
    """Every call of the driver contract once."""
    of = outcomes.of
    await of("status", hal.status)
    await of("supported_operations", lambda: hal.supported_operations(sum_model()))
    prepared = await of("prepare_model", lambda: hal.prepare_model(sum_model()))
    if prepared is None:
        return
    pool = Pool()
    for _ in range(2):
        await of("execute_synchronously", lambda: prepared.execute_synchronously(pool.request))
    await of("execute", lambda: _launched(prepared, pool))
    await of("execute_fenced", lambda: _fenced(prepared, pool))
    reusable = await of("create_execution", lambda: prepared.create_reusable_execution(pool.request))
    if reusable is not None:
        await of("compute", reusable.execute_synchronously)
    await _use_bursts(prepared, pool, outcomes)
    roles = [BufferRole(0, 0, 1.0)]
    buffer = await of("allocate", lambda: hal.allocate(BufferDesc(), [prepared], roles, []))
    if buffer is not None:
        staging = Memory.create(16)
        await of("copy_from", lambda: buffer.copy_from(staging, (4,)))
        await of("copy_to", lambda: buffer.copy_to(staging))
        await of("free", buffer.aclose)
    await of("close", prepared.aclose)


async def _use_bursts(prepared: Any, pool: Pool, outcomes: Outcomes) -> None:
    bursts = []
    for _ in range(2):
        burst = await outcomes.of("configure_burst", prepared.configure_execution_burst)
        if burst is not None:
            bursts.append(burst)
    for burst in bursts:
        for _ in range(2):
            await outcomes.of("burst", lambda: burst.execute_synchronously(pool.request, [0]))  # noqa: B023
    for burst in bursts:
        await outcomes.of("end_burst", burst.aclose)


async def _launched(prepared: Any, pool: Pool) -> None:
    told = anyio.Event()
    status = await prepared.execute(pool.request, lambda *_: told.set())
    if status == ErrorStatus.NONE:
        await told.wait()


async def _fenced(prepared: Any, pool: Pool) -> None:
    execution = await prepared.execute_fenced(pool.request, [])
    try:
        if execution.fence is not None:
            await execution.fence
        await execution.get_execution_info()
    finally:
        if execution.fence is not None:
            execution.fence.close()


async def use_runtime(runtime: Any, outcomes: Outcomes) -> None:
    """What an application does with a device: compile, execute in every way, stream."""
    of = outcomes.of
    compilation = await of("compile", lambda: runtime.compile(sum_model(), devices="hostile"))
    if compilation is None:
        return
    values = [np.zeros(4, np.float32)] * 2
    await of("run", lambda: compilation.execute(values, measure=True))
    soon_ns = time.monotonic_ns() + 50_000_000
    await of("run, deadline", lambda: compilation.execute(values, deadline=soon_ns))

    async def fenced() -> None:
        execution = compilation.execute_fenced(values)
        await execution

    await of("run, fenced", fenced)
    await of("run, burst", lambda: _burst(compilation, values))
    await of("close compilation", compilation.aclose)


async def _burst(compilation: Any, values: Any) -> None:
    async with compilation.burst() as burst:
        for _ in range(3):
            await burst.execute(values)
