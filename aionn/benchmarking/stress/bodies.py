"""The bodies of the stress tests, each in a process of its own that ``task_command`` names.

Owns the bodies, and the liveness check that runs beside each: a small model that must continue being computed, within
``LIVENESS_S_MAX`` each time. A body's end is one JSON object on standard output; its parent process reports the rest.

Invariants:
1. Every body ends soon after its time, whatever the device does.
2. A device that breaks the connection is a CRASH, one that does not answer in time a HANG, any other error a FAILURE.

Source: the crash tests of MLTS, the HAL's own stress suite.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from aionn.benchmarking.paths import draw_inputs
from aionn.errors import DeadObject, Error, InvalidArgument
from aionn.hal import Memory, MemoryKind, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder, Value
from aionn.models.importing import ImportOptions, load_file
from aionn.platform.python_process import python_command, python_environment
from aionn.runtime.compilation import Compilation
from aionn.runtime.runtime import Runtime, open_runtime

__all__ = ["BODIES", "Body", "Ended", "StressTask", "TestName", "run_task", "task_command"]

LIVENESS_S_MAX = 10.0
"""Limit of the known model's execution. Less than what a test gets beyond its time, so that the body can report a hang itself."""

PARALLEL = 8
PROCESSES = 4
COMPILING_PAUSE_S = 0.02
SLOWDOWN_MAX = 0.5
"""Permitted loss of an execution's rate by concurrent compilation; MLTS's number."""
SLOWDOWN_ROUNDS = 5

RANDOM_OPERATIONS_MAX = 40
RANDOM_EXTENT_MAX = 10


class Finding(Error):
    """A finding of a test itself: a wrong answer, a rate, another process's end. It is reported without this class's name."""


class StressTask(msgspec.Struct, frozen=True):
    """The task of a process.

    Attributes:
        body: Which test.
        device: Registered name of the driver.
        model: The .tflite or .onnx file.
        seconds: Its duration.
        seed: Seed of everything that is random.
        dimensions: Open extents of an .onnx file, by name.
        input_shapes: Shapes of inputs of an .onnx file, by name.
    """

    body: str
    device: str
    model: str
    seconds: float
    seed: int
    dimensions: dict[str, int] = {}
    input_shapes: dict[str, tuple[int, ...]] = {}


class Ended(msgspec.Struct, frozen=True):
    """The end of a body.

    Attributes:
        result: SUCCESS, FAILURE, HANG or CRASH.
        message: Why.
        count: Number of executions or compilations.
    """

    result: str
    message: str = ""
    count: int = 0


class Work:
    """The resources of a body.

    Attributes:
        task: The task that was given.
        runtime: Has the device.
        model: The file's model.
        random: Seeded.
        end_s: When to stop, by ``time.monotonic``.
        count: Executions or compilations so far.
        inputs: Random inputs of the model.
    """

    def __init__(self, task: StressTask, runtime: Runtime) -> None:
        self.task = task
        self.runtime = runtime
        self.model = load_file(task.model, ImportOptions(task.dimensions, task.input_shapes)).model
        self.random = random.Random(task.seed)
        self.end_s = time.monotonic() + task.seconds
        self.count = 0
        self.inputs = draw_inputs(self.model, np.random.default_rng(task.seed))

    def goes_on(self) -> bool:
        """Whether there is time left, or nothing was done yet: a test that did nothing would show nothing."""
        return time.monotonic() < self.end_s or self.count == 0

    async def compiled(self, model: Model | None = None) -> Compilation:
        """A compilation on the device alone."""
        chosen = self.model if model is None else model
        return await self.runtime.compile(chosen, devices=self.task.device)

    async def execute(self, net: Compilation) -> None:
        """One execution of the file's model."""
        await net.execute(self.inputs)
        self.count += 1


Body = Callable[[Work], Awaitable[None]]


async def long_inference(work: Work) -> None:
    """One execution after the other through a burst."""
    async with await work.compiled() as net, net.burst() as burst:
        while work.goes_on():
            await burst.execute(work.inputs)
            work.count += 1


async def parallel_inference(work: Work) -> None:
    """Several compilations executed concurrently."""

    async def one() -> None:
        async with await work.compiled() as net:
            await work.execute(net)
            while work.goes_on():
                await work.execute(net)

    async with anyio.create_task_group() as tasks:
        for _ in range(PARALLEL):
            tasks.start_soon(one)


async def load_and_unload(work: Work) -> None:
    """Compiled, executed once and closed, again and again."""
    while work.goes_on():
        async with await work.compiled() as net:
            await work.execute(net)


async def killed_clients(work: Work) -> None:
    """Other processes do the same with drivers of their own; some are killed in the middle, the remaining ones must succeed."""
    seconds = work.task.seconds * 0.6
    survivors: list[Ended] = []

    async def client(index: int, is_killed: bool) -> None:
        task = msgspec.structs.replace(
            work.task, body="parallel_inference", seconds=seconds, seed=work.task.seed + index
        )
        async with await anyio.open_process(
            task_command(task), stderr=None, env=python_environment()
        ) as process:
            if is_killed:
                await anyio.sleep(seconds * work.random.uniform(0.25, 0.5))
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                work.count += 1
                return
            assert process.stdout is not None
            text = b"".join([chunk async for chunk in process.stdout])
            await process.wait()
            survivors.append(_decoded(text))

    async with anyio.create_task_group() as tasks:
        for index in range(PROCESSES):
            tasks.start_soon(client, index, index % 2 == 0)
    for ended in survivors:
        if ended.result != "SUCCESS":
            raise Finding(f"a client that was left alone: {ended.result} {ended.message}")
        work.count += ended.count


def _decoded(text: bytes) -> Ended:
    try:
        return msgspec.json.decode(text.strip().splitlines()[-1], type=Ended)
    except (msgspec.MsgspecError, IndexError):
        return Ended("CRASH", "it printed no result")


async def random_models(work: Work) -> None:
    """Graphs of random operations and shapes; one that the device does not support counts as nothing."""
    while work.goes_on():
        model = random_model(work.random)
        try:
            net = await work.compiled(model)
        except InvalidArgument as e:
            if "no device supports" not in str(e):
                raise
            if time.monotonic() >= work.end_s:
                return  # A device that takes none of them has nothing to fail at.
            await anyio.lowlevel.checkpoint()
            continue
        async with net:
            await net.execute(draw_inputs(model, np.random.default_rng(work.random.randrange(2**32))))
            work.count += 1


_ONE = (
    OperationType.RELU,
    OperationType.RELU6,
    OperationType.TANH,
    OperationType.LOGISTIC,
    OperationType.ABS,
)
_TWO = (OperationType.ADD, OperationType.SUB, OperationType.MUL)


def random_model(chosen: random.Random) -> Model:
    """A graph of float32 operations of one or two inputs, all of one shape."""
    graph = GraphBuilder()
    shape = [chosen.randint(1, RANDOM_EXTENT_MAX) for _ in range(chosen.randint(1, 4))]
    values: list[Value] = [graph.input(OperandType.TENSOR_FLOAT32, shape)]
    none = graph.constant(0)
    for _ in range(chosen.randint(1, RANDOM_OPERATIONS_MAX)):
        last = values[-1]
        if chosen.random() < 0.5:
            values.append(graph.result(chosen.choice(_ONE), [last], last))
        else:
            values.append(graph.result(chosen.choice(_TWO), [last, chosen.choice(values), none], last))
    return graph.build([values[-1]])


async def mapped_models(work: Work) -> None:
    """The constants are in a file that is mapped again for every compilation."""
    with tempfile.TemporaryFile(prefix="aionn-stress-") as file:
        sizes = []
        for pool in work.model.pools:
            file.write(pool.array.tobytes())
            sizes.append(pool.size_bytes)
        file.flush()
        if len(sizes) != 1:
            raise InvalidArgument("stress: expected a model with one pool of constants")
        while work.goes_on():
            pool = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD, writable=False)
            model = msgspec.structs.replace(work.model, pools=(pool,))
            async with await work.compiled(model) as net:
                await work.execute(net)
            pool.close()


async def slowdown(work: Work) -> None:
    """The rate of executions alone, and while another task compiles, alternately: the machine may have other work as well."""
    async with await work.compiled() as net:

        async def rate(seconds: float) -> float:
            before, started_s = work.count, time.monotonic()
            await work.execute(net)
            while time.monotonic() < started_s + seconds:
                await work.execute(net)
            return (work.count - before) / (time.monotonic() - started_s)

        async def keep_compiling() -> None:
            while True:
                await (await work.compiled()).aclose()
                await anyio.sleep(COMPILING_PAUSE_S)

        await work.execute(net)
        part_s = work.task.seconds / (2 * SLOWDOWN_ROUNDS)
        lost = []
        for _ in range(SLOWDOWN_ROUNDS):
            alone = await rate(part_s)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep_compiling)
                lost.append(1 - await rate(part_s) / alone)
                tasks.cancel_scope.cancel()
    usual = statistics.median(lost)
    if usual > SLOWDOWN_MAX:
        raise Finding(
            f"measured: executions are {usual:.0%} slower beside compilations, more than the {SLOWDOWN_MAX:.0%} of the test;"
            " other work of the machine counts too, so measure again on a quiet one"
        )


TestName = Literal[
    "long_inference",
    "parallel_inference",
    "load_and_unload",
    "killed_clients",
    "random_models",
    "mapped_models",
    "slowdown",
]
"""The names of ``BODIES``, for type checkers, and for the completion of the shell."""

BODIES: Mapping[str, Body] = {
    body.__name__: body
    for body in (
        long_inference,
        parallel_inference,
        load_and_unload,
        killed_clients,
        random_models,
        mapped_models,
        slowdown,
    )
}
"""All tests by name, in the order in which they are made."""


async def _stay_alive(work: Work) -> None:
    """Computes a known model over and over; ends when it is cancelled."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    model = graph.build([graph.result(OperationType.ADD, [a, a, graph.constant(0)], a)])
    value = np.array([1, 2, 3, 4], dtype=np.float32)
    with anyio.fail_after(LIVENESS_S_MAX):
        net = await work.compiled(model)
    while True:
        with anyio.fail_after(LIVENESS_S_MAX):
            result = await net.execute([value])
        if result.outputs[0].tolist() != [2, 4, 6, 8]:
            raise Finding(f"liveness: expected [2, 4, 6, 8], got {result.outputs[0].tolist()}")
        await anyio.sleep(0.05)


async def run_task(task: StressTask) -> Ended:
    """Runs a body beside the liveness check, and returns its end."""
    work: Work | None = None
    try:
        async with open_runtime(drivers=[task.device]) as runtime:
            work = Work(task, runtime)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stay_alive, work)
                with anyio.fail_after(task.seconds + LIVENESS_S_MAX):
                    await BODIES[task.body](work)
                tasks.cancel_scope.cancel()
    except (Exception, BaseExceptionGroup) as e:
        return _ending(e, 0 if work is None else work.count)
    return Ended("SUCCESS", count=work.count)


def _ending(error: BaseException, count: int) -> Ended:
    """The worst of what happened: a crash, then a hang, then any other error."""
    errors = list(_leaves(error))
    for kind, result in ((DeadObject, "CRASH"), (TimeoutError, "HANG"), (BaseException, "FAILURE")):
        for one in errors:
            # A missed deadline is a TimeoutError too, but not a hang.
            if isinstance(one, kind) and not (result == "HANG" and isinstance(one, Error)):
                message = str(one) or f"no answer within {LIVENESS_S_MAX:g} s"
                return Ended(
                    result, message if isinstance(one, Finding) else f"{type(one).__name__}: {message}", count
                )
    raise AssertionError("an error is of some kind") from error


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def task_command(task: StressTask) -> list[str]:
    """The command line of a process that runs a task."""
    return python_command(__name__, msgspec.json.encode(task).decode())


def main(arguments: Sequence[str]) -> None:
    """The process's entry point; the only argument is its task."""
    ended = anyio.run(run_task, msgspec.json.decode(arguments[0], type=StressTask))
    os.write(sys.stdout.fileno(), msgspec.json.encode(ended) + b"\n")
