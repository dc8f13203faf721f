"""Faults that the conformance suite must find, and what it must let pass, on devices of a few lines."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from aionn.conformance import cts
from aionn.conformance.computing import MODES, Mode
from aionn.conformance.cts import CtsTest
from aionn.conformance.cts.run import CHECKS, Check
from aionn.conformance.expectations import Expectations
from aionn.conformance.suite import DeviceUnderTest, Outcome, Settings, run_test, run_tests
from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import ErrorStatus, GeneralFailure
from aionn.hal import (
    NO_TIMING,
    CacheFileCounts,
    CacheFiles,
    Device,
    ExecutionCallback,
    ExecutionResult,
    FencedExecution,
    FencedTiming,
    Model,
    OperandType,
    OutputShape,
    PreparedModel,
    Priority,
    Request,
    uniform_capabilities,
)
from aionn.interpreter import RunControl
from fences import SyncFence
from tests.support.conformance_data import vector_test


def add(
    name: str = "add_by_hand",
    kind: str = "TENSOR_FLOAT32",
    values: Sequence[Sequence[float]] = ((1, 2, 3), (10, 20, 30), (11, 22, 33)),
    **fields: Any,
) -> CtsTest:
    """A test of ADD over vectors: two inputs, and what must come out."""
    return vector_test("ADD", values[:2], values[2], name=name, kind=OperandType[kind], **fields)


class Prepared(ReferencePreparedModel):
    """Right in all it does; faults are planted by subclasses."""


class Double(ReferenceDevice):
    """The reference device with a fault in the models that it prepares."""

    def __init__(self, prepared: type[Prepared] = Prepared) -> None:
        super().__init__("double")
        self._prepared = prepared

    def prepare(self, model: Model, **arguments: Any) -> Prepared:
        return self._prepared(self, model, arguments["priority"])


async def run_on(device: Device, test: CtsTest, **settings: Any) -> Outcome:
    async def make() -> Device:
        return device

    outcome = await run_test(DeviceUnderTest(make), test, Settings(**settings))
    assert outcome is not None
    return outcome


async def failure_of(device: Device, test: CtsTest, **settings: Any) -> Any:
    outcome = await run_on(device, test, **settings)
    assert outcome.verdict == "failed" and outcome.failure is not None
    return outcome.failure


@pytest.fixture
async def reference() -> AsyncIterator[Device]:
    async with ReferenceDevice() as device:
        yield device


# --- What is right passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_right_device_passes_each_check_that_applies(reference: Device, mode: Mode) -> None:
    outcome = await run_on(reference, add(kind="TENSOR_QUANT8_ASYMM"), mode=mode)
    expected: set[Check] = {"general", "concurrent", "cache", "dynamic_shape", "signed_coupling"}
    expected |= {"reusable"} if mode in ("sync", "fenced") else set()
    expected |= set() if mode == "fenced" else {"insufficient_size"}
    expected |= set() if mode == "burst" else {"device_memory"}
    assert outcome.verdict == "passed"
    assert outcome.checks == dict.fromkeys((c for c in CHECKS if c in expected), "passed")


@pytest.mark.parametrize("mode", MODES)
async def test_refusing_an_illegal_model_passes(reference: Device, mode: Mode) -> None:
    test = add(values=((1, 2, 3), (1, 2), (1, 2, 3)), expect_failure=True)
    assert (await run_on(reference, test, mode=mode)).verdict == "passed"
    wrong = msgspec.structs.replace(test, expect_failure=False)
    failure = await failure_of(reference, wrong, mode=mode)
    assert failure.got.startswith("INVALID_ARGUMENT")


async def test_tests_to_which_no_check_applies_are_not_counted(reference: Device) -> None:
    async def make() -> Device:
        return reference

    report = await run_tests(DeviceUnderTest(make), [add()], Settings(checks=("signed_coupling",)))
    assert report.passed == report.skipped == 0


async def test_signed_form_has_values_and_zero_points_less_by_128() -> None:
    signed = cts.signed_counterpart(add(kind="TENSOR_QUANT8_ASYMM"))
    assert signed is not None
    assert signed.main.operands == add(kind="TENSOR_QUANT8_ASYMM_SIGNED").main.operands
    assert cts.signed_counterpart(add()) is None


# --- What is wrong is found ---------------------------------------------------------------------------------------------------


class WrongValue(Prepared):
    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        shapes = super().run(inputs, outputs, control)
        # The exponent's lowest bit of the last element.
        outputs[-1].buffer[-2] ^= 0x80
        return shapes


class WrongShape(Prepared):
    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        super().run(inputs, outputs, control)
        return [OutputShape((1, 3))]


class TooLarge(Prepared):
    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        super().run(inputs, outputs, control)
        return [OutputShape((2**40, 3))]


class Raising(Prepared):
    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        raise KeyError("lost")


class Silent(Prepared):
    """Writes nothing, and says that it is done."""

    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        return [OutputShape((3,))]


class OnceOnly(Prepared):
    """Computes the first time alone."""

    done = False

    def run(self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl) -> Sequence[OutputShape]:
        if self.done:
            return [OutputShape((3,))]
        self.done = True
        return super().run(inputs, outputs, control)


class Sprawling(Prepared):
    """Writes behind its output."""

    async def execute_synchronously(self, request: Request, **arguments: Any) -> ExecutionResult:
        location = request.outputs[0].location
        request.pools[1].array[location.offset + location.length] = 0  # type: ignore[union-attr]
        return await super().execute_synchronously(request, **arguments)


class Scribbling(Prepared):
    """Changes its inputs."""

    async def execute_synchronously(self, request: Request, **arguments: Any) -> ExecutionResult:
        result = await super().execute_synchronously(request, **arguments)
        request.pools[0].array[0] ^= 1  # type: ignore[union-attr]
        return result


class Foreign(Prepared):
    """Raises what the contract does not know."""

    async def execute_synchronously(self, request: Request, **arguments: Any) -> ExecutionResult:
        raise ZeroDivisionError("division")


@pytest.mark.parametrize(
    ("fault", "operand", "index", "expected", "got"),
    [
        (WrongValue, 3, (2,), "33.0", "66.0"),
        (WrongShape, 3, (), "shape [3]", "shape [1, 3]"),
        (TooLarge, 3, (), "shape [3]", "shape [1099511627776, 3]"),
        (Raising, None, (), "success", "GENERAL_FAILURE: double: KeyError: 'lost'"),
        (Silent, 3, (0,), "11.0", "-2.8"),
        (
            Sprawling,
            None,
            (),
            "writes to the outputs alone",
            "another value in byte 76 of the pool of the outputs",
        ),
        (Scribbling, None, (), "writes to the outputs alone", "another value in the pool of the inputs"),
        (Foreign, None, (), "success, or one of aionn.errors", "ZeroDivisionError: division"),
    ],
)
async def test_fault_is_found_and_told(
    fault: type[Prepared], operand: int | None, index: tuple[int, ...], expected: str, got: str
) -> None:
    async with Double(fault) as device:
        failure = await failure_of(device, add())
    assert (failure.test, failure.check, failure.mode) == ("add_by_hand", "general", "sync")
    assert failure.operation == ("ADD" if operand is None else "operation 0 (ADD)")
    assert (failure.operand, failure.index, failure.expected) == (operand, index, expected)
    assert failure.got.startswith(got)
    assert (failure.tolerance is None) == (operand is None)
    assert expected in str(failure) and got in str(failure)


@pytest.mark.parametrize("mode", MODES)
async def test_wrong_value_is_found_in_each_mode(mode: Mode) -> None:
    async with Double(WrongValue) as device:
        failure = await failure_of(device, add(), mode=mode)
    assert (failure.mode, failure.index, failure.got) == (mode, (2,), "66.0")


@pytest.mark.parametrize(
    ("mode", "checks"), [("sync", ("reusable",)), ("burst", ("general",)), ("fenced", ("general",))]
)
async def test_repeated_computation_cannot_pass_with_the_results_before(
    mode: Mode, checks: tuple[Check, ...]
) -> None:
    class Second(OnceOnly):
        def run(
            self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl
        ) -> Sequence[OutputShape]:
            if self.done and mode == "fenced":
                raise KeyError("the second")
            return super().run(inputs, outputs, control)

    async with Double(Second) as device:
        await failure_of(device, add(), mode=mode, checks=checks)


@pytest.mark.aionn(virtual_time=True)
async def test_hanging_device_is_given_up_and_replaced() -> None:
    made: list[Device] = []

    class Hanging(Prepared):
        async def execute_synchronously(self, request: Request, **arguments: Any) -> ExecutionResult:
            await anyio.sleep_forever()
            raise AssertionError

    async def make() -> Device:
        made.append(Double(Prepared if made else Hanging))
        return made[-1]

    device = DeviceUnderTest(make)
    report = await run_tests(device, [add("first"), add("second")], Settings())
    await device.aclose()
    for left in made:
        await left.aclose()
    assert (report.passed, report.failed, len(made)) == (1, 1, 2)
    (failure,) = report.failures
    assert (failure.test, failure.expected) == ("first", "an answer within 30 s")


async def test_callback_that_comes_with_shapes_of_a_failure_is_found() -> None:
    class Talkative(Prepared):
        async def execute(self, request: Request, callback: ExecutionCallback, **_: Any) -> ErrorStatus:
            callback(ErrorStatus.GENERAL_FAILURE, (OutputShape((3,)),), NO_TIMING)
            return ErrorStatus.NONE

    async with Double(Talkative) as device:
        failure = await failure_of(device, add(expect_failure=True), mode="async")
    assert failure.expected == "no output shapes with GENERAL_FAILURE"


async def test_second_callback_is_found() -> None:
    class Twice(Prepared):
        async def execute(self, request: Request, callback: ExecutionCallback, **_: Any) -> ErrorStatus:
            callback(ErrorStatus.NONE, (), NO_TIMING)
            callback(ErrorStatus.NONE, (), NO_TIMING)
            return ErrorStatus.NONE

    async with Double(Twice) as device:
        assert (await failure_of(device, add(), mode="async")).got == "2 callbacks"


async def test_information_that_contradicts_the_fence_is_found() -> None:
    async def information() -> tuple[ErrorStatus, FencedTiming]:
        return ErrorStatus.GENERAL_FAILURE, FencedTiming()

    class Lying(Prepared):
        async def execute_fenced(self, request: Request, wait_for: Any, **_: Any) -> FencedExecution:
            return FencedExecution(SyncFence.signalled(), information)

    async with Double(Lying) as device:
        failure = await failure_of(device, add(), mode="fenced")
    assert failure.got == "GENERAL_FAILURE"


async def test_fenced_execution_of_an_empty_output_must_be_refused(reference: Device) -> None:
    empty = add(values=((), (1,), ()))
    operands = tuple(msgspec.structs.replace(o, dimensions=(0,), data=b"") for o in empty.main.operands[3:])
    first = msgspec.structs.replace(empty.main.operands[0], dimensions=(1,), data=bytes(4))
    main = msgspec.structs.replace(empty.main, operands=(first, *empty.main.operands[1:3], *operands))
    test = msgspec.structs.replace(empty, main=main)
    outcome = await run_on(reference, test, mode="fenced", checks=("general",))
    assert (outcome.verdict, outcome.reason[:26]) == ("skipped", "fenced execution allows no")

    async def information() -> tuple[ErrorStatus, FencedTiming]:
        return ErrorStatus.NONE, FencedTiming()

    class Lenient(Prepared):
        async def execute_fenced(self, request: Request, wait_for: Any, **_: Any) -> FencedExecution:
            return FencedExecution(None, information)

    async with Double(Lenient) as device:
        failure = await failure_of(device, test, mode="fenced", checks=("general",))
    assert failure.expected.startswith("INVALID_ARGUMENT") and failure.got == "NONE"
    async with Double(Lenient) as device:
        failure = await failure_of(device, add(), mode="fenced", checks=("dynamic_shape",))
    assert failure.check == "dynamic_shape"


async def test_output_that_is_too_small_must_be_told() -> None:
    class Cramming(Prepared):
        def run(
            self, inputs: Any, outputs: Sequence[OutputArea], control: RunControl
        ) -> Sequence[OutputShape]:
            return [OutputShape(s.dimensions) for s in super().run(inputs, outputs, control)]

    async with Double(Cramming) as device:
        failure = await failure_of(device, add())
    assert (failure.check, failure.got) == ("insufficient_size", "NONE")


class Lawless(Double):
    """Accepts any model and answers anything."""

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        return (True,) * len(model.main.operations)

    async def prepare_model(self, model: Model, **_: Any) -> Any:
        class Anything(Prepared):
            async def execute_synchronously(self, request: Request, **_: Any) -> ExecutionResult:
                return ExecutionResult()

        return Anything(self, model, Priority.MEDIUM)


async def test_accepting_an_illegal_model_is_found() -> None:
    async with Lawless() as device:
        failure = await failure_of(device, add(expect_failure=True))
    assert (failure.expected, failure.got) == ("the model refused, or its execution failed", "NONE")


async def test_endless_loop_must_end_by_its_time_out(reference: Device) -> None:
    test = add("while_infinite_loop", values=((1, 2, 3), (1, 2), (1, 2, 3)), expect_failure=True)
    failure = await failure_of(reference, test)
    assert failure.got.startswith("INVALID_ARGUMENT") and "MISSED_DEADLINE" in failure.expected


@pytest.mark.parametrize("status", [ErrorStatus.DEAD_OBJECT, ErrorStatus.DEVICE_UNAVAILABLE])
async def test_death_of_the_device_is_no_refusal(status: ErrorStatus) -> None:
    class Dying(Prepared):
        async def execute(self, request: Request, callback: ExecutionCallback, **_: Any) -> ErrorStatus:
            callback(status, (), NO_TIMING)
            return status

    async with Double(Dying) as device:
        failure = await failure_of(device, add(expect_failure=True), mode="async")
    assert failure.got == status.name


# --- Support, and the two lists -----------------------------------------------------------------------------------------------


class Poor(Double):
    """Supports no signed tensors, and nothing at all of names."""

    def __init__(self, *missing: str) -> None:
        super().__init__()
        self._missing = missing

    def supports(self, model: Model) -> Sequence[bool]:
        kinds = {operand.type.name for operand in model.main.inputs}  # type: ignore[attr-defined]
        return [not kinds & set(self._missing) for _ in model.main.operations]


async def test_what_the_device_does_not_support_is_skipped() -> None:
    async with Poor("TENSOR_FLOAT32") as device:
        outcome = await run_on(device, add())
    assert (outcome.verdict, outcome.checks) == ("skipped", {"general": "skipped"})
    assert outcome.reason == "the device does not support ADD of TENSOR_FLOAT32 and INT32"


async def test_signed_form_must_be_supported_where_the_unsigned_one_is() -> None:
    test = add(kind="TENSOR_QUANT8_ASYMM")
    async with Poor("TENSOR_QUANT8_ASYMM_SIGNED") as device:
        failure = await failure_of(device, test)
    assert failure.expected == "support, as for the unsigned form"
    async with Poor("TENSOR_QUANT8_ASYMM_SIGNED", "TENSOR_QUANT8_ASYMM") as device:
        assert (await run_on(device, test)).verdict == "skipped"


@pytest.mark.parametrize("pattern", ["add_by_hand", "add_*", "ADD"])
async def test_unsupported_test_is_not_run(pattern: str) -> None:
    lists = Expectations(unsupported={pattern: "no adder"})
    outcome = await run_on(Double(Raising), add(), expectations=lists)
    assert (outcome.verdict, outcome.reason, outcome.checks) == ("skipped", "no adder", {})


async def test_unsupported_check_is_not_made(reference: Device) -> None:
    lists = Expectations(unsupported={"reusable:*": "no"})
    outcome = await run_on(reference, add(), expectations=lists)
    assert (outcome.verdict, outcome.checks["reusable"], outcome.checks["general"]) == (
        "passed",
        "skipped",
        "passed",
    )


async def test_expected_failure_must_fail(reference: Device) -> None:
    lists = Expectations(expected_failures={"ADD": "rounds wrongly"})
    async with Double(WrongValue) as device:
        outcome = await run_on(device, add(), expectations=lists)
    assert (outcome.verdict, outcome.reason, outcome.failure) == ("expected_failure", "rounds wrongly", None)
    failure = await failure_of(reference, add(), expectations=lists)
    assert (failure.expected, failure.got) == (
        "a failure, as EXPECTED_FAILURES declares (rounds wrongly)",
        "success",
    )


async def test_expected_failure_of_a_check_must_fail_there(reference: Device) -> None:
    lists = Expectations(expected_failures={"reusable:add_*": "once only"})
    async with Double(OnceOnly) as device:
        outcome = await run_on(device, add(), checks=("reusable", "dynamic_shape"), expectations=lists)
        assert outcome.checks == {"reusable": "expected_failure", "dynamic_shape": "passed"}
        assert (outcome.verdict, outcome.reason) == ("expected_failure", "once only")
    failure = await failure_of(reference, add(), expectations=lists)
    assert failure.check == "reusable"


def test_entries_that_match_nothing_are_stale() -> None:
    from aionn.conformance.suite import subject_of

    lists = Expectations(
        {"LSTM": "", "add_*": "", "cash:*": ""}, {"cache:ADD": "", "sub_*": "", "basics/*": ""}
    )
    # The one with a slash is the driver suite's to judge.
    assert lists.stale([subject_of(add())]) == ["LSTM", "cash:*", "sub_*"]


# --- The cache ----------------------------------------------------------------------------------------------------------------


class Caching(Double):
    """Keeps what it saved in memory, and puts a mark into the file."""

    def __init__(self, *, forgetful: bool = False) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(
            self.info, cache_files=CacheFileCounts(1, 0), capabilities=uniform_capabilities(1.0, 1.0)
        )
        self._saved: dict[bytes, Model] = {}
        self._forgetful = forgetful

    async def prepare_model(self, model: Model, *, cache: CacheFiles | None = None, **rest: Any) -> Any:
        if cache is not None:
            (descriptor,) = cache.model
            os.pwrite(descriptor, b"saved", 0)
            self._saved[cache.token] = model
        return await super().prepare_model(model, **rest)

    async def prepare_model_from_cache(self, cache: CacheFiles, **_: Any) -> PreparedModel:
        if self._forgetful or os.pread(cache.model[0], 5, 0) != b"saved":
            raise GeneralFailure("cache: not what the token names")
        return await super().prepare_model(self._saved[cache.token])


async def test_saved_compilation_computes_the_same() -> None:
    async with Caching() as device:
        outcome = await run_on(device, add(), checks=("cache",))
    assert outcome.checks == {"cache": "passed"}


async def test_lost_compilation_is_found() -> None:
    async with Caching(forgetful=True) as device:
        failure = await failure_of(device, add())
    assert (failure.check, failure.got) == ("cache", "GENERAL_FAILURE: cache: not what the token names")


# --- Side by side, and device memories ----------------------------------------------------------------------------------------


async def test_refusing_a_second_computation_at_the_same_time_is_found() -> None:
    class Busy(Prepared):
        is_busy = False

        async def execute_synchronously(self, request: Request, **arguments: Any) -> ExecutionResult:
            if self.is_busy:
                raise GeneralFailure("one at a time")
            self.is_busy = True
            try:
                return await super().execute_synchronously(request, **arguments)
            finally:
                self.is_busy = False

    async with Double(Busy) as device:
        failure = await failure_of(device, add())
    assert (failure.check, failure.got) == ("concurrent", "GENERAL_FAILURE: one at a time")


class Forgetful(Double):
    """Device memories that hold something else when they are read."""

    async def allocate(self, *arguments: Any) -> Any:
        buffer = await super().allocate(*arguments)
        copy_to = buffer.copy_to

        async def copy_something(destination: Any) -> None:
            await copy_to(destination)
            destination.array[4:8] = 0

        buffer.copy_to = copy_something  # type: ignore[method-assign]
        return buffer


class Without(Double):
    """No device memories."""

    async def allocate(self, *arguments: Any) -> Any:
        raise GeneralFailure("allocate: none")


async def test_wrong_content_of_a_device_memory_is_found() -> None:
    async with Forgetful() as device:
        failure = await failure_of(device, add())
    assert (failure.check, failure.operand, failure.index, failure.got) == ("device_memory", 3, (1,), "0.0")


async def test_device_without_memories_passes_the_rest() -> None:
    async with Without() as device:
        outcome = await run_on(device, add())
    assert (outcome.verdict, outcome.checks["device_memory"]) == ("passed", "skipped")


async def test_prepared_model_that_cannot_be_closed_is_found() -> None:
    class Clinging(Prepared):
        async def aclose(self) -> None:
            await super().aclose()
            raise GeneralFailure("still in use")

    async with Double(Clinging) as device:
        failure = await failure_of(device, add(), checks=("general",))
    assert (failure.expected, failure.got) == ("success", "GENERAL_FAILURE: still in use")
