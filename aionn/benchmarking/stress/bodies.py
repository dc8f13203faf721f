"""The bodies of the stress tests, each in a process of its own that ``task_command`` names.

Owns the bodies, and the liveness check that runs beside each: a small model that must continue being computed, within
``LIVENESS_S_MAX`` each time. A body writes two lines to standard output: ``BEGUN`` when its set-up is over, and its end as a JSON
object; its parent process reports the rest.

Invariants:
1. Every body ends soon after its time, whatever the device does. Its set-up and compilations have limits of their own (``limits``).
2. A device that breaks the connection is a CRASH, one that does not answer in time a HANG, any other error a FAILURE, and so is a
   set-up or a compilation that takes longer than it may.

Source: the crash tests of MLTS, the HAL's own stress suite.
"""

from __future__ import annotations

import os
import random
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
from anyio.abc import ByteReceiveStream

from aionn.benchmarking.paths import draw_inputs
from aionn.benchmarking.stress.limits import LIVENESS_S_MAX, SETUP_S_MAX, Limit
from aionn.errors import DeadObject, Error, InvalidArgument
from aionn.hal import Memory, MemoryKind, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder, Value
from aionn.models.importing import ImportOptions, load_file
from aionn.platform.python_process import python_command, python_environment
from aionn.runtime.compilation import Compilation
from aionn.runtime.runtime import Runtime, open_runtime

__all__ = [
    "BEGUN",
    "BODIES",
    "Body",
    "Ended",
    "StressTask",
    "TestName",
    "read_until_begun",
    "run_task",
    "task_command",
]

BEGUN = b"begun"
"""The line that a process of a task writes when its set-up is over."""

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
        limit: Until when the body may work.
        scope: Of the body; cancelled when it is late.
        has_begun: Set when the set-up is over.
        count: Executions or compilations so far.
        inputs: Random inputs of the model.
    """

    def __init__(
        self, task: StressTask, runtime: Runtime, limit: Limit, on_begun: Callable[[], None]
    ) -> None:
        self.task = task
        self.runtime = runtime
        self.limit = limit
        self.scope = anyio.CancelScope(deadline=limit.deadline_s)
        self.has_begun = anyio.Event()
        self._on_begun = on_begun
        self.model = load_file(task.model, ImportOptions(task.dimensions, task.input_shapes)).model
        self.random = random.Random(task.seed)
        self.count = 0
        self.inputs = draw_inputs(self.model, np.random.default_rng(task.seed))

    def begin(self) -> None:
        """The set-up is over: the body's time begins."""
        self.limit.begin(anyio.current_time())
        self.scope.deadline = self.limit.deadline_s
        self._on_begun()
        self.has_begun.set()

    @property
    def has_time(self) -> bool:
        """Whether there is time left."""
        return anyio.current_time() < self.limit.end_s

    def goes_on(self) -> bool:
        """Whether there is time left, or nothing was done yet: a test that did nothing would show nothing."""
        return self.has_time or self.count == 0

    async def compiled(self, model: Model | None = None) -> Compilation:
        """A compilation on the device alone."""
        chosen = self.model if model is None else model
        self.limit.compiling(anyio.current_time())
        self.scope.deadline = self.limit.deadline_s
        try:
            return await self.runtime.compile(chosen, devices=self.task.device)
        finally:
            if not self.scope.cancel_called:  # Otherwise this compilation may be the one that was late.
                self.limit.compiled(anyio.current_time())
                self.scope.deadline = self.limit.deadline_s

    async def execute(self, net: Compilation) -> None:
        """One execution of the file's model."""
        await net.execute(self.inputs)
        self.count += 1


Body = Callable[[Work], Awaitable[None]]


async def long_inference(work: Work) -> None:
    """One execution after the other through a burst."""
    async with await work.compiled() as net, net.burst() as burst:
        work.begin()
        while work.goes_on():
            await burst.execute(work.inputs)
            work.count += 1


async def parallel_inference(work: Work) -> None:
    """Several compilations executed concurrently."""
    compiled_count = 0

    async def one() -> None:
        nonlocal compiled_count
        async with await work.compiled() as net:
            compiled_count += 1
            if compiled_count == PARALLEL:
                work.begin()
            await work.has_begun.wait()
            await work.execute(net)
            while work.goes_on():
                await work.execute(net)

    async with anyio.create_task_group() as tasks:
        for _ in range(PARALLEL):
            tasks.start_soon(one)


async def load_and_unload(work: Work) -> None:
    """Compiled, executed once and closed, again and again."""
    work.begin()
    while work.goes_on():
        async with await work.compiled() as net:
            await work.execute(net)


async def killed_clients(work: Work) -> None:
    """Other processes do the same with drivers of their own; some are killed in the middle, the remaining ones must succeed."""
    seconds = work.task.seconds * 0.6
    survivors: list[Ended] = []
    set_up_count = 0

    async def client(index: int, is_killed: bool) -> None:
        nonlocal set_up_count
        life_s = seconds * work.random.uniform(0.25, 0.5)
        task = msgspec.structs.replace(
            work.task, body="parallel_inference", seconds=seconds, seed=work.task.seed + index
        )
        async with await anyio.open_process(
            task_command(task), stderr=None, env=python_environment()
        ) as process:
            assert process.stdout is not None
            has_begun, text = await read_until_begun(process.stdout)
            set_up_count += 1
            if set_up_count == PROCESSES:
                work.begin()
            if has_begun and is_killed:
                await anyio.sleep(life_s)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                    work.count += 1
                    return
            text += b"".join([chunk async for chunk in process.stdout])
            await process.wait()
            survivors.append(_decoded(text))

    async with anyio.create_task_group() as tasks:
        for index in range(PROCESSES):
            tasks.start_soon(client, index, index % 2 == 0)
    for ended in survivors:
        if ended.result != "SUCCESS":
            raise Finding(f"a client that was not killed: {ended.result} {ended.message}")
        work.count += ended.count


async def read_until_begun(output: ByteReceiveStream) -> tuple[bool, bytes]:
    """Reads the standard output of a task's process until its set-up is over, or until its end.

    Returns:
        Whether the set-up is over, and all that was read.
    """
    text = b""
    async for chunk in output:
        text += chunk
        if BEGUN in text.splitlines():
            return True, text
    return False, text


def _decoded(text: bytes) -> Ended:
    try:
        return msgspec.json.decode(text.strip().splitlines()[-1], type=Ended)
    except (msgspec.MsgspecError, IndexError):
        return Ended("CRASH", "it printed no result")


async def random_models(work: Work) -> None:
    """Graphs of random operations and shapes; one that the device does not support counts as nothing."""
    work.begin()
    while work.goes_on():
        model = random_model(work.random)
        try:
            net = await work.compiled(model)
        except InvalidArgument as e:
            if "no device supports" not in str(e):
                raise
            if not work.has_time:
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
        work.begin()
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

        work.begin()
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


def _known_model() -> Model:
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    return graph.build([graph.result(OperationType.ADD, [a, a, graph.constant(0)], a)])


async def _stay_alive(known: Compilation) -> None:
    """Computes a known model over and over; ends when it is cancelled."""
    value = np.array([1, 2, 3, 4], dtype=np.float32)
    while True:
        with anyio.fail_after(LIVENESS_S_MAX):
            result = await known.execute([value])
        if result.outputs[0].tolist() != [2, 4, 6, 8]:
            raise Finding(f"liveness: expected [2, 4, 6, 8], got {result.outputs[0].tolist()}")
        await anyio.sleep(0.05)


async def run_task(task: StressTask, on_begun: Callable[[], None] = lambda: None) -> Ended:
    """Runs a body beside the liveness check, and returns its end.

    Args:
        task: Its body, its time and its model.
        on_begun: Called when the set-up is over.
    """
    work: Work | None = None
    limit = Limit(anyio.current_time(), task.seconds)
    try:
        async with open_runtime(drivers=[task.device]) as runtime:
            work = Work(task, runtime, limit, on_begun)
            with work.scope:
                known = await work.compiled(_known_model())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_stay_alive, known)
                    await BODIES[task.body](work)
                    tasks.cancel_scope.cancel()
            if work.scope.cancelled_caught:
                if limit.is_set_up_late(anyio.current_time()):
                    raise Finding(
                        f"set-up took longer than {SETUP_S_MAX:g} s; other work of the machine counts too"
                    )
                raise TimeoutError
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
    output = sys.stdout.fileno()

    def write(line: bytes) -> None:
        os.write(output, line + b"\n")

    task = msgspec.json.decode(arguments[0], type=StressTask)
    write(msgspec.json.encode(anyio.run(run_task, task, lambda: write(BEGUN))))
