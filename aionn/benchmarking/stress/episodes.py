"""The activities of an application whose drivers die: short episodes, each of which compares every answer with the correct one.

Owns the episodes and the judgement of how each call ended. When an episode begins, on which device, and how long it may take, is
``soak``'s.

Invariants:
1. An episode keeps nothing when it is over; objects that it drops on purpose, without closing them, are for the garbage collector.
2. Only a driver that gets killed may answer DEAD_OBJECT, only a call with a deadline may be late. Any other error is a failure.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from aionn.errors import DeadObject, DeviceUnavailable, GeneralFailure, MissedDeadline
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.clock import after
from aionn.runtime.compilation import Compilation
from aionn.runtime.executions.execution import Execution, Result
from aionn.runtime.memory.own import SharedMemory
from aionn.runtime.runtime import Runtime, open_runtime

__all__ = ["COUNTS", "EPISODES", "Actor", "Episode", "Target", "WrongAnswer", "soak_model"]

Floats = npt.NDArray[np.float32]

COUNTS = ("right", "wrong", "dead", "late", "cancelled", "opened", "compiled", "kills", "stops")
"""The counts of a run."""

SIZES = (4, 1024, 65536)
"""Elements of an input: smaller than a message, a few pages, and more than the event loop copies by itself."""

DOUBLINGS = 4
"""Operations of the model, so that there are places at which a device can stop. Doubling is exact, on whatever device."""

PARALLEL_MAX = 6
FRAMES_MAX = 12
CHAIN_MAX = 5

SOON_S = 0.004
"""Cancellations and deadlines come within this time: an execution of the model takes a part of it."""


class WrongAnswer(Exception):
    """An execution succeeded, and its output is not the right one."""


class Target:
    """A device of the run.

    Attributes:
        name: Of the device.
        driver: Registered name of its driver.
        is_mortal: Whether its driver process gets killed.
    """

    def __init__(self, name: str, driver: str, *, is_mortal: bool) -> None:
        self.name = name
        self.driver = driver
        self.is_mortal = is_mortal


def soak_model(size: int) -> Model:
    """A model that multiplies a float32 vector by ``2 ** DOUBLINGS``."""
    graph = GraphBuilder()
    value = first = graph.input(OperandType.TENSOR_FLOAT32, (size,))
    none = graph.constant(0)
    for _ in range(DOUBLINGS):
        value = graph.result(OperationType.ADD, [value, value, none], first)
    return graph.build([value])


class Actor:
    """One of those that do one episode after the other.

    Args:
        runtime: Has the targets.
        models: By the size of their input.
        counts: Where to count, by the names of ``COUNTS``.
        source: Seeded, this actor's own.
        isolation: See ``open_runtime``.
    """

    def __init__(
        self,
        runtime: Runtime,
        models: Mapping[int, Model],
        counts: Counter[str],
        source: random.Random,
        isolation: str = "process",
    ) -> None:
        self.runtime = runtime
        self.source = source
        self.isolation = isolation
        self._models = models
        self._counts = counts
        self._numbers = np.random.default_rng(source.randrange(2**32))

    async def compile(self, target: Target, runtime: Runtime | None = None) -> Compilation:
        """A compilation of a model of random size on a device alone."""
        model = self._models[self.source.choice(SIZES)]
        net = await (runtime or self.runtime).compile(model, devices=target.name)
        self._counts["compiled"] += 1
        return net

    def draw(self, net: Compilation) -> Floats:
        """An input that no other execution has: an answer to another one is recognised."""
        return self._numbers.integers(-1000, 1000, net.inputs[0].dimensions).astype(np.float32)

    def compare(self, given: Floats, output: Floats) -> None:
        """Demands the right answer.

        Raises:
            WrongAnswer: It is another one.
        """
        right = given * 2**DOUBLINGS
        if output.shape != right.shape or not (output == right).all():
            self._counts["wrong"] += 1
            raise WrongAnswer(
                f"expected {right.ravel()[:4]}..., got {output.ravel()[:4]}... ({output.shape})"
            )
        self._counts["right"] += 1

    def count(self, what: str) -> None:
        """Counts one more of the names of ``COUNTS``."""
        self._counts[what] += 1

    async def answered(
        self,
        target: Target,
        given: Floats,
        execute: Callable[[], Awaitable[Result]],
        *,
        may_be_late: bool = False,
    ) -> bool:
        """Executes and compares the answer; the execution may end by the death of its driver, or at its deadline.

        Returns:
            Whether there was an answer.

        Raises:
            WrongAnswer: The answer is another one.
            Error: It failed for another reason.
        """
        try:
            result = await execute()
        except MissedDeadline:
            if not may_be_late:
                raise
            self._counts["late"] += 1
        except (DeadObject, DeviceUnavailable):
            if not target.is_mortal:
                raise
            self._counts["dead"] += 1
        else:
            self.compare(given, result.outputs[0])
            return True
        return False


Episode = Callable[[Actor, Target], Awaitable[None]]


async def one_by_one(actor: Actor, target: Target) -> None:
    """One execution after the other."""
    async with await actor.compile(target) as net:
        for _ in range(actor.source.randint(1, FRAMES_MAX)):
            given = actor.draw(net)
            await actor.answered(target, given, partial(net.execute, [given]))


async def at_once(actor: Actor, target: Target) -> None:
    """Several concurrent executions, some of them fenced."""
    async with await actor.compile(target) as net, anyio.create_task_group() as tasks:
        for _ in range(actor.source.randint(2, PARALLEL_MAX)):
            given = actor.draw(net)
            is_fenced = actor.source.random() < 0.5
            execute = net.execute_fenced if is_fenced else net.execute
            tasks.start_soon(actor.answered, target, given, partial(execute, [given]))


async def chained(actor: Actor, target: Target) -> None:
    """Each execution waits for the fence of the one before."""
    async with await actor.compile(target) as net:
        given = [actor.draw(net) for _ in range(actor.source.randint(2, CHAIN_MAX))]
        executions: list[Execution] = []
        for x in given:
            before = [execution.fence for execution in executions[-1:]]
            executions.append(net.execute_fenced([x], wait_for=before))
        is_whole = True
        for x, execution in zip(given, executions, strict=True):
            try:
                is_whole = await actor.answered(target, x, execution.wait)
            except GeneralFailure:
                if is_whole:
                    raise
                actor.count("dead")  # The one that it waited for has failed.


async def burst(actor: Actor, target: Target) -> None:
    """Frames through a burst, from several tasks."""
    async with await actor.compile(target) as net, net.burst(slots=actor.source.randint(1, 4)) as frames:

        async def some() -> None:
            for _ in range(actor.source.randint(1, FRAMES_MAX)):
                given = actor.draw(net)
                await actor.answered(target, given, partial(frames.execute, [given]))

        async with anyio.create_task_group() as tasks:
            for _ in range(actor.source.randint(1, 3)):
                tasks.start_soon(some)


async def _items(given: Sequence[Floats]) -> AsyncIterator[Floats]:
    for value in given:
        yield value


async def stream(actor: Actor, target: Target) -> None:
    """A stream that is read to its end, or ended or dropped in the middle."""
    async with await actor.compile(target) as net, net.burst(slots=actor.source.randint(1, 4)) as frames:
        given = [actor.draw(net) for _ in range(actor.source.randint(1, FRAMES_MAX))]
        limit_s = actor.source.uniform(0, SOON_S)
        deadline = None if actor.source.random() < 0.7 else lambda _: after(limit_s)
        results = frames.stream(_items(given), deadline=deadline)
        read_count = actor.source.randint(0, len(given))
        for _ in range(read_count):
            result = await anext(results)
            if result.status == "dropped":
                actor.count("late")
            else:
                actor.compare(result.item, result.outputs[0])
        if actor.source.random() < 0.5:
            results.cancel()
        del results
        given.append(actor.draw(net))
        await actor.answered(target, given[-1], partial(frames.execute, [given[-1]]))


async def cancelled(actor: Actor, target: Target) -> None:
    """Executions that are cancelled, natively or by scope, once or twice; later executions are answered."""
    async with await actor.compile(target) as net, net.burst() as frames:
        for _ in range(actor.source.randint(1, FRAMES_MAX // 2)):
            given = actor.draw(net)
            through = actor.source.choice((net.execute, frames.execute))
            is_native = actor.source.random() < 0.5
            times_s = [actor.source.uniform(0, SOON_S) for _ in range(actor.source.randint(1, 2))]
            answering = actor.answered(target, given, partial(through, [given]))
            if is_native:
                await _cancel_natively(asyncio.create_task(answering), times_s)
            else:
                await _cancel_by_scope(answering, times_s)
            actor.count("cancelled")
        given = actor.draw(net)
        await actor.answered(target, given, partial(net.execute, [given]))
        await actor.answered(target, given, partial(frames.execute, [given]))


async def _cancel_natively(task: asyncio.Task[bool], times_s: Sequence[float]) -> None:
    try:
        for time_s in times_s:
            await anyio.sleep(time_s)
            task.cancel()
        await task
    except asyncio.CancelledError:
        if not task.cancelled():  # This task itself is cancelled.
            task.cancel()
            raise


async def _cancel_by_scope(answering: Awaitable[bool], times_s: Sequence[float]) -> None:
    with anyio.move_on_after(times_s[0]), anyio.move_on_after(times_s[-1]):
        await answering


async def late(actor: Actor, target: Target) -> None:
    """Executions with a deadline that some of them miss."""
    async with await actor.compile(target) as net, net.burst() as frames:
        for _ in range(actor.source.randint(1, FRAMES_MAX)):
            given = actor.draw(net)
            through = actor.source.choice((net.execute, frames.execute))
            deadline_ns = after(actor.source.uniform(0, SOON_S))
            execute = partial(through, [given], deadline=deadline_ns)
            await actor.answered(target, given, execute, may_be_late=True)


async def compile_only(actor: Actor, target: Target) -> None:
    """Compilations that are closed, or dropped."""
    for _ in range(actor.source.randint(1, 3)):
        net = await actor.compile(target)
        if actor.source.random() < 0.5:
            await net.aclose()


async def in_memory(actor: Actor, target: Target) -> None:
    """Inputs and outputs in shared memory and in the device's memory, which are closed or dropped."""
    async with await actor.compile(target) as net:
        given = actor.draw(net)
        values = SharedMemory.from_array(given)
        result = await actor.runtime.allocate(outputs=[(net, 0)])
        await net.execute([values], outputs=[result])
        output = result.array.copy() if isinstance(result, SharedMemory) else await result.read()
        actor.compare(given, output)
        if actor.source.random() < 0.5:
            values.close()
            if isinstance(result, SharedMemory):
                result.close()
            else:
                await result.aclose()


async def repeated(actor: Actor, target: Target) -> None:
    """The same execution again and again."""
    async with await actor.compile(target) as net:
        again = net.reusable()
        for _ in range(actor.source.randint(1, FRAMES_MAX)):
            given = actor.draw(net)
            again.inputs[0][...] = given
            await actor.answered(target, given, again.execute)


async def opened(actor: Actor, target: Target) -> None:
    """A runtime of its own: opened, used and closed, or closed immediately."""
    isolation = "in_process" if actor.source.random() < 0.5 or actor.isolation == "in_process" else "process"
    async with open_runtime(
        drivers={target.name: target.driver},
        isolation="in_process" if isolation == "in_process" else "process",
    ) as runtime:
        actor.count("opened")
        if actor.source.random() < 0.7:
            net = await actor.compile(target, runtime)
            given = actor.draw(net)
            await actor.answered(target, given, partial(net.execute, [given]))


EPISODES: Mapping[Episode, int] = {
    one_by_one: 4,
    at_once: 4,
    chained: 3,
    burst: 4,
    stream: 6,
    cancelled: 6,
    late: 4,
    compile_only: 2,
    in_memory: 2,
    repeated: 2,
    opened: 1,
}
"""Episodes, with the relative frequency of each. Opening starts a process, and takes as long as all other episodes together."""
