"""The suite in several processes: the distribution of tests, and the handling of a process's death.

Owns the worker processes and the lines that go between them and here. ``suite`` runs a test in a worker.

Invariants:
1. Every test has exactly one outcome. A worker that dies or falls silent gives its test a failure, and the rest to a new worker.
2. A worker ends with its parent: its standard input ends.
3. Output of a driver in a worker goes to standard error, never between the lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from aionn.conformance.cts import CtsTest, load_tests, operation_types, test_files
from aionn.conformance.cts.run import Failure
from aionn.conformance.nodes import expectations_of
from aionn.conformance.random_graphs.graphs import draw_plan
from aionn.conformance.random_graphs.suite import RandomSettings, locate, operations_of, run_graph
from aionn.conformance.suite import (
    DeviceUnderTest,
    Isolation,
    Outcome,
    Report,
    Settings,
    Tally,
    open_device_under_test,
    run_test,
    subject_of,
)
from aionn.errors import Error, ErrorStatus, GeneralFailure, InvalidArgument, error_for_status, status_of
from aionn.observability.log_tags import label_lines
from aionn.platform.loops import finish
from aionn.platform.python_process import python_command, python_environment

__all__ = ["Unit", "find_units", "run_random_suite", "run_suite"]

SILENCE_S = 30.0
"""Time beyond the limit of its checks for which a worker may be silent: it closes devices and starts driver processes."""

SHRINKING_LIMITS = 10
"""Time limits of one execution that a random graph may take until it is as small as it gets."""

LINE_BYTES_MAX = 1 << 20
"""Longest line from a worker; a failure with a long message has some kilobytes."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


UNIT_GRAPHS = 50
"""Random graphs that a worker takes at a time: some tenths of a second of work."""


class Unit(msgspec.Struct, frozen=True):
    """Tests that one worker runs.

    Attributes:
        path: The data file; empty where the tests are random graphs.
        names: The tests, in the file's order; the numbers of random graphs.
    """

    path: str
    names: tuple[str, ...]


class _Job(msgspec.Struct, frozen=True):
    driver: str
    isolation: Isolation
    settings: Settings | RandomSettings
    node: str = ""


class _Started(msgspec.Struct, frozen=True, tag=True):
    name: str


class _Finished(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome | None


class _Done(msgspec.Struct, frozen=True, tag=True):
    pass


class _Unable(msgspec.Struct, frozen=True, tag=True):
    status: ErrorStatus
    message: str


_Line = _Started | _Finished | _Done | _Unable
_LINE: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)
_UNIT = msgspec.json.Decoder(Unit)


def find_units(folder: Path, *, contains: str = "") -> tuple[list[Unit], dict[str, CtsTest]]:
    """The tests below a folder whose names contain a text, file by file, and all of them by name.

    Raises:
        InvalidArgument: There are no data, they cannot be read, or no name contains the text.
    """
    units, tests = [], {}
    for path in test_files(folder):
        found = {test.name: test for test in load_tests(path, contains=contains)}
        if found:
            units.append(Unit(str(path), tuple(found)))
        tests.update(found)
    if not tests:
        raise InvalidArgument(f"conformance data: no test in {folder} has {contains!r} in its name")
    return units, tests


async def run_suite(
    driver: str,
    folder: Path,
    *,
    contains: str = "",
    isolation: Isolation = "process",
    node: str = "",
    settings: Settings | None = None,
    jobs: int = 1,
    progress: Callable[[Tally, int], None] | None = None,
) -> Report:
    """Runs the conformance data on a registered driver.

    Args:
        driver: The registered name; of a node ``NODE/DEVICE``.
        folder: Where the data are.
        contains: Only tests with this in their names; empty for all.
        isolation: Whether the driver runs in a process of its own, one for each job.
        node: The node's address; empty for a driver of this machine.
        settings: The settings for all tests; None for the defaults. The driver's own lists are put in.
        jobs: Number of processes that share the tests; 1 runs them in this process.
        progress: Called after every test with the counts, and the number of tests.

    Raises:
        InvalidArgument: No such driver, no data, or no such test.
        DeviceUnavailable: The driver cannot be started, or the node cannot be reached.
    """
    started_s = time.monotonic()
    units, tests = find_units(folder, contains=contains)
    expectations = expectations_of(driver, node)
    settings = msgspec.structs.replace(settings or Settings(), expectations=expectations)
    job = _Job(driver, isolation, settings, node)
    tally = Tally()

    def operations(name: str) -> Iterable[str]:
        return operation_types(tests[name])

    await _run_units(job, units, len(tests), operations, tally, jobs, progress, loaded=tests)
    # A part of the data does not show whether an entry matches anything.
    for pattern in () if contains else expectations.stale(subject_of(test) for test in tests.values()):
        expected = "a pattern of a test that exists"
        tally.add_failure(
            Failure(f"the lists of {driver}", "", settings.mode, "", None, (), expected, repr(pattern))
        )
    return tally.report(time.monotonic() - started_s)


async def run_random_suite(
    driver: str,
    numbers: range,
    *,
    isolation: Isolation = "process",
    node: str = "",
    settings: RandomSettings | None = None,
    jobs: int = 1,
    progress: Callable[[Tally, int], None] | None = None,
) -> Report:
    """Runs random graphs on a registered driver and compares them with the reference.

    Args:
        driver: The registered name; of a node ``NODE/DEVICE``.
        numbers: Which graphs; see ``random_graphs.suite.locate``.
        isolation: Whether the driver runs in a process of its own, one for each job.
        node: The node's address; empty for a driver of this machine.
        settings: The settings for all graphs; None for the defaults. The driver's own list of differences is put in.
        jobs: Number of processes that share the graphs; 1 runs them in this process.
        progress: Is called after every graph with the counts and the number of graphs.

    Raises:
        InvalidArgument: No such driver, set or number.
        DeviceUnavailable: The driver cannot be started, or the node cannot be reached.
    """
    started_s = time.monotonic()
    settings = settings or RandomSettings()
    for number in (numbers[0], numbers[-1]) if numbers else ():
        locate(number, settings.contains)
    settings = msgspec.structs.replace(
        settings, expectations=expectations_of(driver, node), is_reference=driver == "reference"
    )
    tally = Tally()

    def operations(name: str) -> Iterable[str]:
        return operations_of(draw_plan(*locate(int(name), settings.contains)))

    names = [str(number) for number in numbers]
    units = [Unit("", tuple(names[i : i + UNIT_GRAPHS])) for i in range(0, len(names), UNIT_GRAPHS)]
    await _run_units(
        _Job(driver, isolation, settings, node), units, len(names), operations, tally, jobs, progress
    )
    return tally.report(time.monotonic() - started_s)


async def _run_units(
    job: _Job,
    units: Sequence[Unit],
    total: int,
    operations: Callable[[str], Iterable[str]],
    tally: Tally,
    jobs: int,
    progress: Callable[[Tally, int], None] | None,
    *,
    loaded: Mapping[str, CtsTest] | None = None,
) -> None:
    def count(outcome: Outcome | None) -> None:
        if outcome is not None:
            tally.add(outcome)
        if progress is not None:
            progress(tally, total)

    if jobs == 1:
        async with open_device_under_test(job.driver, job.isolation, node=job.node) as device:
            for unit in units:
                for name in unit.names:
                    count(await _run_one(device, name, job.settings, loaded or {}))
    else:
        # The largest first, so that no worker begins a large one when all others are done.
        left = deque(sorted(units, key=lambda unit: -len(unit.names)))
        async with anyio.create_task_group() as group:
            for _ in range(min(jobs, len(units))):
                group.start_soon(_Worker(job, left, operations, count).run)


async def _run_one(
    device: DeviceUnderTest, name: str, settings: Settings | RandomSettings, tests: Mapping[str, CtsTest]
) -> Outcome | None:
    if isinstance(settings, RandomSettings):
        return await run_graph(device, int(name), settings)
    return await run_test(device, tests[name], settings)


class _Worker:
    """One worker process after the other, for as long as units are left."""

    def __init__(
        self,
        job: _Job,
        left: deque[Unit],
        operations: Callable[[str], Iterable[str]],
        count: Callable[[Outcome | None], None],
    ) -> None:
        self._job = job
        self._left = left
        self._operations = operations
        self._count = count
        self._process: anyio.abc.Process | None = None

    async def run(self) -> None:
        try:
            while self._left:
                await self._run_unit(self._left.popleft())
        finally:
            await finish(self._end())

    async def _run_unit(self, unit: Unit) -> None:
        if self._process is None:
            await self._start()
        running: str | None = None
        ended = 0
        try:
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(
                anyio.BrokenResourceError
            ):  # It has ended, after a line with the reason perhaps.
                await self._process.stdin.send(msgspec.json.encode(unit) + b"\n")
            while True:
                match await self._line():
                    case _Started(name):
                        running = name
                    case _Finished(outcome):
                        running, ended = None, ended + 1
                        self._count(outcome)
                    case _Done():
                        return
                    case _Unable(status, message):
                        raise error_for_status(status, message)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError) as e:
            why = "nothing, for too long" if isinstance(e, TimeoutError) else "the end of the process"
            exit_status = await finish(self._end())
            if running is None:
                raise GeneralFailure(
                    f"conformance: a worker ended between tests, with exit status {exit_status}"
                ) from e
            self._count(self._death(running, f"{why} (exit status {exit_status})"))
            if unit.names[ended + 1 :]:
                self._left.appendleft(Unit(unit.path, unit.names[ended + 1 :]))

    def _death(self, name: str, got: str) -> Outcome:
        operations = tuple(sorted(self._operations(name)))
        failure = Failure(
            name, "", self._job.settings.mode, ", ".join(operations), None, (), "an answer", got
        )
        return Outcome(name, operations, "failed", failure=failure)

    async def _start(self) -> None:
        environment = python_environment()
        for variable in _THREAD_VARIABLES:
            environment.setdefault(variable, "1")  # The workers share the cores already.

        async def start() -> None:
            self._process = await anyio.open_process(
                python_command("aionn.conformance.workers", msgspec.json.encode(self._job).decode()),
                stderr=None,
                env=environment,
                start_new_session=True,  # A terminal's Ctrl-C reaches the parent alone.
            )

        await finish(start())  # A start that is broken off would leave a process without an owner.
        assert self._process is not None and self._process.stdout is not None
        self._lines = BufferedByteReceiveStream(self._process.stdout)

    async def _line(self) -> _Line:
        settings = self._job.settings
        # A graph that fails is run again and again to make it smaller, each time within the limit.
        count = SHRINKING_LIMITS if isinstance(settings, RandomSettings) else len(settings.checks)
        with anyio.fail_after(settings.time_limit_s * count + SILENCE_S):
            return _LINE.decode(await self._lines.receive_until(b"\n", LINE_BYTES_MAX))

    async def _end(self) -> int | None:
        """Ends the process and returns its exit status; None without one."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        with contextlib.suppress(anyio.BrokenResourceError):
            await process.stdin.aclose()
        with anyio.move_on_after(SILENCE_S / 10):
            await process.wait()
        if process.returncode is None:
            process.kill()
        status = await process.wait()
        await process.aclose()
        return status


async def _work(job: _Job, lines: BinaryIO) -> None:
    """A worker's life: units in, lines out."""

    def say(line: _Line) -> None:
        lines.write(msgspec.json.encode(line) + b"\n")
        lines.flush()

    units = anyio.wrap_file(sys.stdin.buffer)
    async with open_device_under_test(job.driver, job.isolation, node=job.node) as device:
        while text := await units.readline():
            unit = _UNIT.decode(text)
            tests = {test.name: test for test in load_tests(Path(unit.path))} if unit.path else {}
            for name in unit.names:
                say(_Started(name))
                say(_Finished(await _run_one(device, name, job.settings, tests)))
            say(_Done())


def main(arguments: Sequence[str]) -> None:
    """A worker process's entry point; the only argument is its job."""
    job = msgspec.json.decode(arguments[0], type=_Job)
    label_lines()
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Closing writes the rest, and finds again that there is no reader.
    with contextlib.suppress(BrokenPipeError), lines:
        try:
            anyio.run(_work, job, lines)
        except* BrokenPipeError:
            pass  # The process that started this one has ended, and wants no more lines.
        except* Error as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            assert isinstance(error, Error)
            lines.write(msgspec.json.encode(_Unable(status_of(error), str(error))) + b"\n")
