"""One conformance test on one device: made ready, computed and judged in each of the ways that the CTS knows.

Owns the checks and which test each of them applies to. The data are ``cts``'s, the modes ``computing``'s, many tests ``suite``'s.

Invariants:
1. A check either returns or raises ``CheckFailed`` or ``CheckSkipped``; objects that it opened on the device are closed
   with its bench.
2. A check is made against the contract in ``aionn.hal.device`` alone; nothing here knows any driver.

Source: the README beside the data; ``TestGenerated`` of the CTS, ``GeneratedTestHarness`` of the VTS.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, NoReturn, get_args

import anyio
import msgspec
import numpy.typing as npt

from aionn.conformance.computing import Answer, Breach, Compute, Mode, closing, computing, reusable_computing
from aionn.conformance.cts.arguments import NoMemories, TestArguments, device_arguments
from aionn.conformance.cts.data import (
    CtsTest,
    Mismatch,
    build_model,
    check_shapes,
    compare,
    operand_bytes,
    operation_types,
    output_place,
    signed_counterpart,
)
from aionn.conformance.support import unsupported_reason
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    CacheFileCounts,
    CacheFiles,
    Device,
    Memory,
    Model,
    OperandType,
    PreparedModel,
    is_scalar_type,
)

__all__ = ["CHECKS", "Bench", "Check", "CheckFailed", "CheckSkipped", "Failure", "applies"]

Check = Literal[
    "general",
    "reusable",
    "concurrent",
    "device_memory",
    "dynamic_shape",
    "insufficient_size",
    "signed_coupling",
    "cache",
]
"""The checks of a test:

- general: the model as it is; in a burst twice, the second time with remembered memories; fenced twice, one behind the other.
- reusable: one reusable execution, computed twice.
- concurrent: two computations of one prepared model at the same time; by bursts, two bursts.
- device_memory: each argument in a device memory of its own; skipped where the device has none.
- dynamic_shape: the extents of all that operations write unknown, the ranks kept.
- insufficient_size: as dynamic_shape, and the first output's buffer one byte short.
- signed_coupling: unsigned 8-bit tensors turned into signed ones.
- cache: compiled, saved, and restored from the cache.
"""

CONCURRENT_COUNT = 2
"""Number of concurrent computations: two suffice to show a resource that they must not share."""

CHECKS: tuple[Check, ...] = get_args(Check)

LOOP_TIMEOUT_NS = 1_000_000
"""For the tests that never end by themselves; the VTS's number."""

ENDLESS = "while_infinite_loop"
"""The names of the tests that never end by themselves."""

_UNRESOLVED = {"RANK", "IF", "WHILE"}
"""Operations whose results cannot have unknown shapes."""

_NO_FAILURE_OF_THE_MODEL = {
    ErrorStatus.NONE,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
    ErrorStatus.DEVICE_UNAVAILABLE,
    ErrorStatus.DEAD_OBJECT,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
}
"""Statuses that do not concern the model: with these an illegal model has not been rejected."""

_MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}

_OPERATION = re.compile(r"operation \d+ \(\w+\)")


class Failure(msgspec.Struct, frozen=True):
    """Where and how a check failed.

    Attributes:
        test: The test's name.
        check: Which check; empty where the test as a whole is meant.
        mode: The mode of its execution.
        operation: The operation that wrote the wrong output, or what the error names, or all operations of the test.
        operand: Index of the wrong output's operand in the main subgraph; None where no output is at fault.
        index: Index of the wrong element; empty where the shape or no element is at fault.
        expected: The expected result.
        got: The actual result.
        tolerance: The tolerance; None for exact results.
    """

    test: str
    check: str
    mode: str
    operation: str
    operand: int | None
    index: tuple[int, ...]
    expected: str
    got: str
    tolerance: str | None = None

    def __str__(self) -> str:
        place = [self.operation]
        if self.operand is not None:
            place.append(f"operand {self.operand}")
        if self.index:
            place.append(f"element {list(self.index)}")
        allowed = "" if self.tolerance is None else f" (tolerance {self.tolerance})"
        what = f"{self.test}, {self.check} {self.mode}".replace(",  ", ", ")
        return f"{what}: {', '.join(place)}: expected {self.expected}, got {self.got}{allowed}"


class CheckFailed(Exception):
    """A check failed; holds the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class CheckSkipped(Exception):
    """A check cannot be made on this device or in this mode; its words are the reason."""


class _Unsupported(CheckSkipped):
    """The device does not support the model."""


def applies(check: Check, test: CtsTest, mode: Mode, device: Device) -> bool:
    """Whether a check means anything for a test, in a mode, on a device."""
    match check:
        case "general":
            return True
        case "reusable":
            return mode in ("sync", "fenced") and not test.expect_failure
        case "concurrent":
            return not test.expect_failure
        case "device_memory":
            return mode != "burst" and not test.expect_failure and not _has_empty_output(test)
        case "dynamic_shape":
            return _can_be_dynamic(test)
        case "insufficient_size":
            return mode != "fenced" and _can_be_dynamic(test) and _first_output_bytes(test) > 1
        case "signed_coupling":
            return signed_counterpart(test) is not None
        case "cache":
            return not test.expect_failure and device.info.cache_files != CacheFileCounts()


def _has_empty_output(test: CtsTest) -> bool:
    return any(0 in test.main.operands[i].dimensions for i in test.main.output_indexes)


def _can_be_dynamic(test: CtsTest) -> bool:
    return not test.expect_failure and not operation_types(test) & _UNRESOLVED


def _first_output_bytes(test: CtsTest) -> int:
    """Size of the first output as expected; 0 for scalars, whose size is fixed by their type."""
    operand = test.main.operands[test.main.output_indexes[0]]
    return 0 if is_scalar_type(OperandType[operand.type]) else operand_bytes(operand)


class Bench:
    """One test on one device in one mode; each form of its model is prepared once for all checks that use it.

    Args:
        test: The test.
        mode: The mode of executions.
        device: The device that prepares and executes them.
    """

    def __init__(self, test: CtsTest, mode: Mode, device: Device) -> None:
        self.test = test
        self.mode: Mode = mode
        self.device = device
        self.is_endless = test.name.startswith(ENDLESS)
        self._prepared: dict[bool, PreparedModel] = {}
        self._supported: set[bool] = set()
        self._pools: list[Memory] = []

    def model(self, *, dynamic: bool = False) -> Model:
        """The test's model; its memories are closed with the bench."""
        model = build_model(self.test, with_dynamic_outputs=dynamic)
        self._pools += [pool for pool in model.pools if isinstance(pool, Memory)]
        return model

    async def prepared(self, *, dynamic: bool = False) -> PreparedModel:
        """The model, prepared, with all extents that operations write unknown if it is to be ``dynamic``.

        Raises:
            CheckSkipped: The device does not support it.
            Error: As ``Device.supported_operations`` and ``Device.prepare_model``.
        """
        if dynamic not in self._prepared:
            model = self.model(dynamic=dynamic)
            # A device that does not support a model fails it in another way than the test is about.
            if not self.test.expect_failure or self.is_endless:
                await self.check_support(model, dynamic=dynamic)
            self._prepared[dynamic] = await self.device.prepare_model(model)
        return self._prepared[dynamic]

    async def check_support(self, model: Model, *, dynamic: bool = False) -> None:
        """Asks the device, once for each form of the model. Raises as ``prepared``."""
        if dynamic in self._supported:
            return
        supported = await self.device.supported_operations(model)
        if len(supported) != len(model.main.operations):
            raise Breach(f"{len(model.main.operations)} answers about support", f"{len(supported)}")
        reason = unsupported_reason(model, supported, self.device.info.feature_level)
        if reason:
            raise _Unsupported(reason)
        self._supported.add(dynamic)

    async def make(self, check: Check) -> None:
        """Makes one check, which must apply. After one that failed the models are prepared anew.

        Raises:
            CheckFailed: The device did something else than it should.
            CheckSkipped: The device does not support the model, or the mode does not allow its outputs.
        """
        with self._failing_alike(check):
            try:
                if check == "signed_coupling":
                    await self._make_signed()
                else:
                    await _Run(check, self).run()
            except CheckSkipped:
                raise
            except Exception:
                with contextlib.suppress(Exception):  # The first failure is reported.
                    await self._close_all()
                raise

    async def _make_signed(self) -> None:
        signed = signed_counterpart(self.test)
        assert signed is not None, "the check applies"
        bench = Bench(signed, self.mode, self.device)
        try:
            await _Run("signed_coupling", bench).run()
        except _Unsupported as e:
            # Neither form supported is fine; the unsigned one alone is not.
            await self.check_support(self.model())
            raise Breach("support, as for the unsigned form", str(e)) from e
        finally:
            await bench._close_all()

    async def aclose(self) -> None:
        """Closes what was prepared. Idempotent.

        Raises:
            CheckFailed: Something could not be closed.
        """
        with self._failing_alike("general"):
            await self._close_all()

    async def _close_all(self) -> None:
        while self._pools:
            self._pools.pop().close()
        async with contextlib.AsyncExitStack() as stack:
            while self._prepared:
                await stack.enter_async_context(closing(self._prepared.popitem()[1]))

    @contextlib.contextmanager
    def _failing_alike(self, check: Check) -> Iterator[None]:
        """Formats every failure in the same form."""
        try:
            yield
        except Breach as e:
            raise _failed(check, self.test, self.mode, e.expected, e.got) from e
        except (CheckFailed, CheckSkipped):
            raise
        except Error as e:
            got = f"{status_of(e).name}: {e}"
            raise _failed(check, self.test, self.mode, "success", got) from e
        except Exception as e:
            expected = "success, or one of aionn.errors"
            raise _failed(check, self.test, self.mode, expected, f"{type(e).__name__}: {e}") from e


def _failed(
    check: Check, test: CtsTest, mode: Mode, expected: str, got: str, mismatch: Mismatch | None = None
) -> CheckFailed:
    named = _OPERATION.search(got)
    operation = named.group() if named else ", ".join(sorted(operation_types(test)))
    if mismatch is None:
        return CheckFailed(Failure(test.name, check, mode, operation, None, (), expected, got))
    operation, operand = output_place(test, mismatch.output)
    return CheckFailed(
        Failure(test.name, check, mode, operation, operand, mismatch.index, expected, got, mismatch.tolerance)
    )


class _Run:
    """One check of one test."""

    def __init__(self, check: Check, bench: Bench) -> None:
        self.check = check
        self.bench = bench
        self.test = bench.test
        self.mode = bench.mode
        # Through a burst goes no loop time-out; the default ends an endless loop there.
        self.is_endless = bench.is_endless
        self.loop_timeout_ns = LOOP_TIMEOUT_NS if self.is_endless and self.mode != "burst" else None

    async def run(self) -> None:
        match self.check:
            case "general" | "signed_coupling":
                await self._whole()
            case "reusable":
                await self._reusable()
            case "concurrent":
                await self._concurrent()
            case "device_memory":
                await self._device_memory()
            case "dynamic_shape":
                await self._dynamic_shape()
            case "insufficient_size":
                await self._insufficient_size()
            case "cache":
                await self._cache()

    def fail(self, expected: str, got: str, mismatch: Mismatch | None = None) -> NoReturn:
        raise _failed(self.check, self.test, self.mode, expected, got, mismatch)

    async def _whole(self) -> None:
        """Prepares the model and computes it, or demands that either fails."""
        try:
            prepared = await self.bench.prepared()
        except Error as e:
            self._judge_failure(Answer(status_of(e), message=str(e)))
            return
        await self._computes(prepared, times=2 if self.mode == "burst" and not self.is_endless else 1)

    async def _computes(self, prepared: PreparedModel, *, times: int = 1) -> None:
        with TestArguments(self.test) as arguments:
            async with computing(
                prepared, arguments.request, self.mode, loop_timeout_ns=self.loop_timeout_ns
            ) as compute:
                for _ in range(times):
                    await self._judged(arguments, compute)

    async def _judged(self, arguments: TestArguments, compute: Compute) -> None:
        arguments.reset()
        answer = await compute()
        if self.test.expect_failure:
            self._judge_failure(answer)
        elif self.mode == "fenced" and _has_empty_output(self.test):
            self._judge_refusal(answer)
        elif answer.status != ErrorStatus.NONE:
            self._judge_failure(answer)
        else:
            self._judge_outputs(arguments, answer)

    def _judge_failure(self, answer: Answer) -> None:
        """A failure is correct where one was expected, if its status is that of a faulty model."""
        got = answer.status.name + (f": {answer.message}" if answer.message else "")
        if not self.test.expect_failure:
            self.fail("success", got)
        if self.is_endless:
            if answer.status not in _MISSED:
                self.fail("MISSED_DEADLINE_TRANSIENT or _PERSISTENT, by the loop time-out", got)
        elif answer.status in _NO_FAILURE_OF_THE_MODEL:
            self.fail("the model refused, or its execution failed", got)

    def _judge_refusal(self, answer: Answer) -> NoReturn:
        if answer.status != ErrorStatus.INVALID_ARGUMENT:
            self.fail(
                "INVALID_ARGUMENT, as fenced execution allows no empty and no unspecified outputs",
                f"{answer.status.name} {answer.message}".strip(),
            )
        raise CheckSkipped("fenced execution allows no empty and no unspecified outputs")

    def _judge_outputs(self, arguments: TestArguments, answer: Answer) -> None:
        self._judge_shapes(answer)
        self._judge_values(arguments.outputs(answer.shapes))

    def _judge_shapes(self, answer: Answer) -> None:
        """Before the buffers are looked at: a wrong shape does not have to fit them."""
        if answer.shapes and len(answer.shapes) == len(self.test.main.output_indexes):
            mismatch = check_shapes(self.test, [shape.dimensions for shape in answer.shapes])
            if mismatch is not None:
                self.fail(mismatch.expected, mismatch.got, mismatch)

    def _judge_values(self, outputs: Sequence[npt.NDArray[Any]]) -> None:
        mismatch = compare(self.test, outputs)
        if mismatch is not None:
            self.fail(mismatch.expected, mismatch.got, mismatch)

    async def _reusable(self) -> None:
        prepared = await self.bench.prepared()
        with TestArguments(self.test) as arguments:
            compute = await reusable_computing(
                prepared, arguments.request, self.mode, loop_timeout_ns=self.loop_timeout_ns
            )
            for _ in range(2):
                await self._judged(arguments, compute)

    async def _concurrent(self) -> None:
        prepared = await self.bench.prepared()
        problems: list[Exception] = []

        async def compute_once() -> None:
            try:
                await self._computes(prepared)
            except Exception as e:
                problems.append(e)

        async with anyio.create_task_group() as tasks:
            for _ in range(CONCURRENT_COUNT):
                tasks.start_soon(compute_once)
        if problems:
            raise problems[0]

    async def _device_memory(self) -> None:
        prepared = await self.bench.prepared()
        async with contextlib.AsyncExitStack() as stack:
            memories = device_arguments(self.test, self.bench.device, prepared)
            try:
                arguments = await stack.enter_async_context(memories)
            except NoMemories as e:
                raise CheckSkipped("the device has no memories of its own") from e
            async with computing(prepared, arguments.request, self.mode) as compute:
                answer = await compute()
            if answer.status != ErrorStatus.NONE:
                self._judge_failure(answer)
            self._judge_shapes(answer)
            self._judge_values(await arguments.outputs())

    async def _dynamic_shape(self) -> None:
        async with self._dynamic_computing(short_bytes=0) as (arguments, compute):
            if self.mode != "fenced":
                await self._judged(arguments, compute)
                return
            with contextlib.suppress(CheckSkipped):  # Refused, as it must be.
                self._judge_refusal(await compute())

    async def _insufficient_size(self) -> None:
        async with self._dynamic_computing(short_bytes=1) as (arguments, compute):
            arguments.reset()
            answer = await compute()
            if answer.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
                got = f"{answer.status.name} {answer.message}".strip()
                self.fail("OUTPUT_INSUFFICIENT_SIZE with a buffer one byte short", got)
            if len(answer.shapes) != len(self.test.main.output_indexes):
                self.fail(f"{len(self.test.main.output_indexes)} output shapes", f"{len(answer.shapes)}")
            if answer.shapes[0].is_sufficient:
                self.fail("the first output marked as insufficient", "it marked as sufficient")
            mismatch = check_shapes(self.test, [shape.dimensions for shape in answer.shapes])
            if mismatch is not None:
                self.fail(mismatch.expected, mismatch.got, mismatch)

    @contextlib.asynccontextmanager
    async def _dynamic_computing(self, *, short_bytes: int) -> AsyncIterator[tuple[TestArguments, Compute]]:
        prepared = await self.bench.prepared(dynamic=True)
        with TestArguments(self.test, short_bytes=short_bytes) as arguments:
            async with computing(prepared, arguments.request, self.mode) as compute:
                yield arguments, compute

    async def _cache(self) -> None:
        device = self.bench.device
        counts = device.info.cache_files
        token = self.test.name.encode()[-CACHE_TOKEN_BYTES:].ljust(CACHE_TOKEN_BYTES, b"\0")
        with contextlib.ExitStack() as files:

            def descriptors(count: int) -> list[int]:
                made = [os.memfd_create("cache", os.MFD_CLOEXEC) for _ in range(count)]
                for descriptor in made:
                    files.callback(os.close, descriptor)
                return made

            cache = CacheFiles(descriptors(counts.model), descriptors(counts.data), token)
            model = self.bench.model()
            await self.bench.check_support(model)
            prepared = await device.prepare_model(model, cache=cache)
            async with closing(prepared):
                await self._computes(prepared)
            restored = await device.prepare_model_from_cache(cache)
            async with closing(restored):
                await self._computes(restored)
