"""Cases: a device's description (``basics``), its results (``generated``), and its forms of execution (``executions``).

Owns the claims that hold for every device, whatever it is asked. Values of the whole conformance data are ``cts.run``'s; a sample
of them is run here in each of its kinds.

Source: ``BasicTests`` and ``GeneratedTestHarness`` of the NN HAL's VTS 1.3; section "generated kinds" of the spec's suites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
import numpy as np

from aionn.conformance.cts import CtsTest
from aionn.conformance.cts.run import Bench, Check, CheckFailed, CheckSkipped, applies
from aionn.conformance.vts.case import (
    Case,
    CaseFailed,
    CaseSkipped,
    VtsSubject,
    expect_refusal,
    expect_status,
    fail,
)
from aionn.conformance.vts.models import (
    RequestPools,
    add_model,
    chain_model,
    endless_model,
    has_definite_outputs,
    model_of,
    split_model,
)
from aionn.conformance.vts.paths import PATHS, Path, compute_tests, executing
from aionn.errors import Error, ErrorStatus
from aionn.fleet.device import NodeDeviceInfo
from aionn.hal import DeviceStatus, DeviceType, ExecutionPreference, MemoryKind
from aionn.validation import check_device_info
from fences import FenceError, SyncFence

__all__ = ["CASES"]

GENERATED_MAX = 40
"""Conformance models of a sample that are computed in each mode; ``--suite cts`` computes all."""


async def _info_is_legal(subject: VtsSubject) -> None:
    """Names, numbers, sorted and unique capabilities, file counts, extensions."""
    info = subject.device.info
    try:
        check_device_info(info)
    except Error as e:
        fail("legal information", e)
    if info.type == DeviceType.UNKNOWN:
        fail("a type that the device knows", info.type.name)
    # A device of a node has two names, each of which is one of a device.
    device = info.name.partition("/")[2] if isinstance(info, NodeDeviceInfo) else info.name
    if info.name.lower() != info.name or "/" in device:
        fail("a name of lower-case letters", info.name)


async def _info_does_not_change(subject: VtsSubject) -> None:
    before = subject.device.info
    async with subject.prepared(add_model()):
        pass
    if subject.device.info != before:
        fail(f"{before}", subject.device.info)


async def _status_is_available(subject: VtsSubject) -> None:
    subject.step()
    status = await subject.device.status()
    if status not in (DeviceStatus.AVAILABLE, DeviceStatus.BUSY):
        fail("AVAILABLE or BUSY", getattr(status, "name", status))


async def _support_has_one_answer_each(subject: VtsSubject) -> None:
    """One answer per operation of the main subgraph, and the same every time."""
    for model in (add_model(), chain_model(5), split_model(3), endless_model()):
        subject.step()
        answers = [await subject.device.supported_operations(model) for _ in range(2)]
        if len(answers[0]) != len(model.main.operations):
            fail(f"{len(model.main.operations)} answers", f"{len(answers[0])}")
        if answers[0] != answers[1]:
            fail(f"{answers[0]} again", answers[1])


async def _unsupported_is_refused(subject: VtsSubject) -> None:
    """``prepare_model`` rejects a model that ``supported_operations`` denies, and prepares one that it grants."""

    for test in subject.tests:
        with model_of(test) as model:
            try:
                subject.step()
                supported = all(await subject.device.supported_operations(model))
                subject.step()
                if supported:
                    await (await subject.device.prepare_model(model)).aclose()
                else:
                    await expect_refusal(subject.device.prepare_model(model), test.name)
            except Error as e:
                expected = "a prepared model, as every operation is supported"
                raise CaseFailed(expected, f"{e}", test.name) from e


async def _preference_is_taken(subject: VtsSubject, preference: ExecutionPreference) -> None:
    model = add_model()
    await subject.check_support(model)
    prepared = await subject.device.prepare_model(model, preference=preference)
    try:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            await prepared.execute_synchronously(pools.request)
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())
    finally:
        await prepared.aclose()


# Generated kinds


async def _computes(subject: VtsSubject, check: Check, path: Path) -> None:
    """A sample of the conformance data, in one of its kinds."""
    await _make(subject, _generated(subject), check, path)


async def _fails_as_expected(subject: VtsSubject, path: Path) -> None:
    """Examples of the data that must fail do so, and report neither shapes nor times."""
    await _make(subject, subject.failing_tests, "general", path)


async def _make(subject: VtsSubject, tests: Iterable[CtsTest], check: Check, path: Path) -> None:
    made = 0
    for test in tests:
        subject.step()
        if not applies(check, test, path, subject.device):
            continue
        bench = Bench(test, path, subject.device)
        try:
            await bench.make(check)
            made += 1
        except CheckSkipped:
            continue
        except CheckFailed as e:
            f = e.failure
            raise CaseFailed(f.expected, f.got, f"{f.test}, {f.operation}") from e
        finally:
            await bench.aclose()
    _demand_some(made)


async def _computes_in_blobs(subject: VtsSubject, path: Path) -> None:
    """As in plain memory, with inputs and outputs in hardware buffers of the blob format."""
    tests = [
        test
        for test in _generated(subject)
        if has_definite_outputs(test) or (path != "fenced" and test.tolerance.multinomial is None)
    ]
    _demand_some(await compute_tests(subject, tests, path, kind=MemoryKind.HARDWARE_BUFFER_BLOB))


def _demand_some(made: int) -> None:
    if not made:
        raise CaseSkipped("no model of the sample is supported, or none has this kind")


GENERATED: Mapping[Check, tuple[Path, ...]] = {
    "general": PATHS,
    "reusable": ("sync", "fenced"),
    "concurrent": PATHS,
    "device_memory": ("sync", "async", "fenced"),
    "dynamic_shape": PATHS,
    "insufficient_size": ("sync", "async", "burst"),
    "signed_coupling": PATHS,
}
"""Kinds of a conformance test, and the paths that have them; caching has cases of its own."""


def _generated(subject: VtsSubject) -> list[CtsTest]:
    return subject.spread(GENERATED_MAX)


async def _endless_loop_times_out(subject: VtsSubject, path: Path) -> None:
    """A WHILE that never ends by itself is ended by its time-out, and reported as a missed deadline."""
    model = endless_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.ones(1, np.float32)]) as pools:
            answer = await executor.execute(pools.request, loop_timeout_ns=1_000_000)
            missed = (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
            expect_status(answer.status, answer.message, missed)


# Executions


async def _writes_outputs_alone(subject: VtsSubject, path: Path) -> None:
    """Not a byte beside the outputs is written, and no byte of the inputs."""
    model = split_model(5)
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.arange(5, dtype=np.float32).reshape(5, 1, 1, 1)]) as pools:
            for _ in range(3):
                pools.reset()
                answer = await executor.execute(pools.request)
                expect_status(answer.status, answer.message, [ErrorStatus.NONE])
                stray = pools.stray()
                if stray is not None:
                    fail("writes to the outputs alone", f"another {stray}")
                got = [float(pools.output(i).item()) for i in range(5)]
                if got != [0.0, 1.0, 2.0, 3.0, 4.0]:
                    fail("0, 1, 2, 3, 4", got)


async def _takes_blobs(subject: VtsSubject, path: Path) -> None:
    """Request memory may be hardware buffers of the blob format."""
    model = add_model()
    kind = MemoryKind.HARDWARE_BUFFER_BLOB
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)], kind=kind) as pools:
            answer = await executor.execute(pools.request)
            expect_status(answer.status, answer.message, [ErrorStatus.NONE])
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())


async def _failure_is_followed_by_success(subject: VtsSubject, path: Path) -> None:
    """A call that fails changes nothing that a later call can see."""
    model = add_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.arange(4, dtype=np.float32).reshape(1, 4)]) as pools:
            for _ in range(3):
                bad = msgspec.structs.replace(pools.request, outputs=())
                answer = await executor.execute(bad)
                expect_status(answer.status, answer.message, [ErrorStatus.INVALID_ARGUMENT])
                pools.reset()
                answer = await executor.execute(pools.request)
                expect_status(answer.status, answer.message, [ErrorStatus.NONE])
                if pools.output().ravel().tolist() != [1.0, 2.0, 3.0, 4.0]:
                    fail("1, 2, 3, 4", pools.output().ravel().tolist())


async def _notifies_once(subject: VtsSubject) -> None:
    """A callback comes exactly once, for launches that succeed and for those that fail."""

    model = add_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, "async") as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            for _ in range(4):
                await executor.execute(pools.request)
                await executor.execute(msgspec.structs.replace(pools.request, outputs=()))
                # Another execution behind them: a second notification has had its time.
                await prepared.execute_synchronously(pools.request)


async def _times_are_measured(subject: VtsSubject, path: Path) -> None:
    """Times come only when asked for, and the device's is not longer than the driver's."""
    model = chain_model(20)
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            for measure in (False, True):
                answer = await executor.execute(pools.request, measure=measure)
                expect_status(answer.status, answer.message, [ErrorStatus.NONE])
                times = (answer.timing.time_on_device_ns, answer.timing.time_in_driver_ns)
                if any(t is not None and t < 0 for t in times):
                    fail("times of 0 or more", times)


async def _waits_for_fences(subject: VtsSubject) -> None:
    """A fenced execution starts behind its fences: until then the outputs are untouched and the information is a failure."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools, SyncFence("start") as start:
            subject.step()
            launched = await prepared.execute_fenced(pools.request, [start])
            if launched.fence is None:
                fail("a fence, as the execution cannot have been done", "none")
            # An execution on another path has its turn before that.
            with RequestPools(model, [np.zeros((1, 4), np.float32)]) as others:
                await prepared.execute_synchronously(others.request)
            status, _ = await launched.get_execution_info()
            if status != ErrorStatus.GENERAL_FAILURE:
                fail("GENERAL_FAILURE before completion", status.name)
            if (pools.output().view(np.uint8) != 0xA5).any():
                fail("untouched outputs before the fences have signalled", "a result")
            start.signal()
            subject.step()
            await launched.fence
            status, _ = await launched.get_execution_info()
            expect_status(status, "", [ErrorStatus.NONE])
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())
            launched.fence.close()


async def _failed_wait_fails_the_fence(subject: VtsSubject) -> None:
    """A fence that fails after the launch fails the returned one, and the information reports it."""

    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools, SyncFence("start") as start:
            subject.step()
            launched = await prepared.execute_fenced(pools.request, [start])
            assert launched.fence is not None
            start.fail("a failure of the suite")
            subject.step()
            try:
                await launched.fence
            except FenceError:
                pass
            else:
                fail("a failed fence", "one that signalled")
            status, _ = await launched.get_execution_info()
            if status == ErrorStatus.NONE:
                fail("a failure", status.name)
            if (pools.output().view(np.uint8) != 0xA5).any():
                fail("outputs as they were", "other bytes")
            launched.fence.close()


CASES = (
    Case("basics/info_is_legal", _info_is_legal),
    Case("basics/info_does_not_change", _info_does_not_change),
    Case("basics/status_is_available", _status_is_available),
    Case("basics/support_has_one_answer_each", _support_has_one_answer_each),
    Case("basics/support_agrees_with_preparation", _unsupported_is_refused),
    *(
        Case(
            f"basics/preference_is_taken[{preference.name.lower()}]",
            partial(_preference_is_taken, preference=preference),
        )
        for preference in ExecutionPreference
    ),
    *(
        Case(f"generated/{check}[{path}]", partial(_computes, check=check, path=path))
        for check, paths in GENERATED.items()
        for path in paths
    ),
    *(
        Case(f"generated/infinite_loop_timeout[{path}]", partial(_endless_loop_times_out, path=path))
        for path in PATHS
    ),
    *(
        Case(f"generated/{name}[{path}]", partial(check, path=path))
        for name, check in (("in_blobs", _computes_in_blobs), ("expected_failure", _fails_as_expected))
        for path in PATHS
    ),
    *(
        Case(f"executions/{name}[{path}]", partial(check, path=path))
        for name, check in (
            ("writes_outputs_alone", _writes_outputs_alone),
            ("takes_hardware_buffer_blobs", _takes_blobs),
            ("failure_is_followed_by_success", _failure_is_followed_by_success),
            ("times_are_measured", _times_are_measured),
        )
        for path in PATHS
    ),
    Case("executions/callback_comes_once", _notifies_once),
    Case("executions/waits_for_fences", _waits_for_fences),
    Case("executions/failed_wait_fails_the_fence", _failed_wait_fails_the_fence),
)
