"""Base classes for drivers that work on the event loop: write three methods, get the whole driver contract.

The counterpart of ``blocking``, for devices that wait in the loop: simulated ones, and engines with asynchronous interfaces.
Owns deadlines, timing and the launch of prepared models; forms of execution are in ``launching``, and ``checked`` owns what is
checked, saved and allocated. All times come from the loop, so such a device works in real and in virtual time alike.

Invariants:
1. ``run`` holds one of the device's slots until it returns, even if its caller was cancelled.
2. An execution whose deadline has passed before its start is never started (MISSED_DEADLINE_PERSISTENT).
3. Callbacks and fences are finished exactly once, whatever ``run`` does; closing the device finishes all of them.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import numpy.typing as npt

from aionn.drivers.kit import caching
from aionn.drivers.kit.arguments import Arguments, OutputArea
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.kit.checked import CheckedDevice
from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.kit.launching import LaunchingPreparedModel
from aionn.drivers.kit.loop_gate import LoopControl, LoopGate, loop_now_ns
from aionn.errors import DeviceUnavailable, Error, InvalidArgument, MissedDeadline, general_failure_of
from aionn.hal import (
    NO_TIMING,
    CacheFiles,
    CancelCapability,
    DeviceInfo,
    ExecutionPreference,
    ExecutionResult,
    Launch,
    LaunchBase,
    Model,
    OutputShape,
    PreparedModel,
    Priority,
    Timing,
)
from aionn.hal.callers import client_of_call
from aionn.platform.loops import finish
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.ready_queue import Policy
from aionn.scheduler.worker_turns import BESIDE_MAX, WorkerTurns
from fences import SyncFence

__all__ = ["AsyncDevice", "AsyncPreparedModel"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")

_calls = WorkerTurns("calls of a driver beside the event loop", BESIDE_MAX)


class AsyncPreparedModel(LaunchingPreparedModel):
    """A model made ready by an asynchronous driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
    """

    device: AsyncDevice

    def __init__(self, device: AsyncDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        weakref.finalize(self, device.slots.forget, self.identity).atexit = False

    @abc.abstractmethod
    async def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: LoopControl
    ) -> Sequence[OutputShape]:
        """Computes the outputs.

        Args:
            inputs: One array per input, a view of shared memory that the client can still change: read each value once, and
                believe nothing that was checked before. Rank 0 for scalars, None for an input that is left out.
            outputs: Where the results go. On failure nothing may be assumed about their content.
            control: Deadline, loop time-out, cancellation and preemption: between two steps call ``control.check()`` and then
                ``await control.pause_if_preempted()`` as often as the device can stop.

        Returns:
            One shape per output. An output that does not fit is reported as insufficient, not raised.

        It is cancelled only when the device is closed.
        """

    def check_usable(self) -> None:
        """See the base class. Raises also ``DeviceUnavailable``: the device is closed."""
        super().check_usable()
        self.device.check_open()

    def _control(
        self, deadline_ns: int | None, loop_timeout_ns: int | None, priority: Priority | None = None
    ) -> LoopControl:
        return LoopControl(
            self.device.slots,
            priority=self.priority if priority is None else priority,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            owner=self.owner,
            model=self.identity,
        )

    async def _run_with(self, arguments: Arguments, control: LoopControl, measure: bool) -> ExecutionResult:
        # Device memories among the outputs are initialised afterwards, or uninitialised when this raises.
        try:
            result = await self._run(arguments, control, measure)
            arguments.settle(result.output_shapes, is_sufficient=result.output_sufficient_size)
        except BaseException:
            arguments.fail()
            raise
        return result

    async def _run(self, arguments: Arguments, control: LoopControl, measure: bool) -> ExecutionResult:
        await self.device.slots.acquire(control)
        try:
            started_ns = control.now()
            self.begin_run()
            try:
                shapes = tuple(await self.run(arguments.inputs(), arguments.outputs, control))
            finally:
                self.end_run()
            took_ns = control.now() - started_ns
        finally:
            self.device.slots.release(control)
        sufficient = all(shape.is_sufficient for shape in shapes)
        return ExecutionResult(
            sufficient, shapes, Timing(took_ns, took_ns) if measure and sufficient else NO_TIMING
        )

    def begin(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
    ) -> Launch:
        """See the base class."""
        control = self._control(deadline_ns, loop_timeout_ns, priority)
        launch = _TaskLaunch(control)
        self.device.start(self._run_with(arguments, control, measure), launch.finish)
        return launch


class _TaskLaunch(LaunchBase):
    """An execution in a task of the device."""

    def __init__(self, control: LoopControl) -> None:
        self._control = control

    def _ask_to_stop(self) -> None:
        self._control.cancel()


class AsyncDevice(CheckedDevice):
    """A device on the event loop. Set ``info``; implement ``supports`` and ``prepare``. To be used on one loop.

    Args:
        info: The description that never changes for a build of the driver.
        memory_bytes_max: Limit of all device memories together, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        memories: The device memories; None for a device without.
        slots: The device's slots.
        policy: The order of its jobs, over all clients.
    """

    policy: ClassVar[Policy] = PlanPolicy()

    def __init__(self, info: DeviceInfo, *, memory_bytes_max: int | None = None) -> None:
        super().__init__(info, memory_bytes_max=memory_bytes_max)
        self.slots = LoopGate(
            info.slots,
            name=info.name,
            policy=self.policy,
            can_preempt=info.cancel != CancelCapability.NONE,
        )
        self._tasks: dict[asyncio.Task[Any], None] = {}  # In the order of their starts.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.now = loop_now_ns

    @abc.abstractmethod
    async def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        """Makes a validated and supported model ready."""

    def check_open(self) -> None:
        """Refuses a call that comes too late.

        Raises:
            DeviceUnavailable: The device is closed.
        """
        if self._closed:
            raise DeviceUnavailable(f"{self.info.name}: the device is closed")

    def begin_fenced(self, fenced: FencedLaunch, wait_for: Sequence[SyncFence]) -> None:
        """See the base class."""
        self._loop = asyncio.get_running_loop()
        super().begin_fenced(fenced, wait_for)

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """See ``Timers``."""
        timer = asyncio.get_running_loop().call_later(max(0, time_ns - self.now()) / 1e9, function)
        return timer.cancel

    def call(self, function: Callable[[], None]) -> None:
        """See ``Timers``: in the event loop in which fenced executions were asked for."""
        loop = self._loop
        assert loop is not None, "set by the first fenced execution"
        if asyncio._get_running_loop() is loop:
            function()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def start(self, call: Coroutine[Any, Any, _T], finish: Callable[[_T | Error], None]) -> None:
        """Runs a coroutine that outlives its caller, until the device is closed.

        Args:
            call: The coroutine to run.
            finish: Called exactly once with what it returned or raised, also when it never got to begin.
        """

        def ended(task: asyncio.Task[_T]) -> None:
            del self._tasks[task]
            finish(self._outcome_of(task))

        # A task group would have to be left by the task that entered it, and a device has no such task.
        task = asyncio.create_task(call, name=f"aionn-{self.info.name}")
        self._tasks[task] = None
        task.add_done_callback(ended)

    def _outcome_of(self, task: asyncio.Task[_T]) -> _T | Error:
        if task.cancelled():
            return DeviceUnavailable(f"{self.info.name}: the device was closed")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, Error):
            return error
        return general_failure_of(error, self.info.name)

    @staticmethod
    async def on_thread(call: Callable[..., _T], *arguments: object) -> _T:
        """Calls what takes long on a thread and returns what that returns; the processes of a device's clients take turns.

        Raises:
            ResourceExhausted: No thread is left, or too many calls wait.
        """
        return await _calls.run(client_of_call.get(), call, *arguments)

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        self.check_open()
        # A large model takes milliseconds to check: not on the event loop.
        return await self.on_thread(self._checked_support, model)

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> AsyncPreparedModel:
        """See ``Device``. The compilation is saved if the driver keeps something of it: see ``AsyncPreparedModel.cached``."""
        self.check_open()
        preference, priority = self._check_terms(preference, priority, deadline_ns, "prepare_model")
        held = self._held(cache)
        prepared = await self._checked_prepare(model, preference, priority, deadline_ns)
        if held is not None:
            await self.on_thread(self._save, held, prepared)
        return prepared

    async def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        self._check_time_left(deadline_ns, loop_now_ns(), "prepare_model")
        self._check_supported(model, await self.supported_operations(model))
        prepared = await self.prepare(
            model, preference=preference, priority=priority, deadline_ns=deadline_ns
        )
        if deadline_ns is not None and loop_now_ns() >= deadline_ns:
            await prepared.aclose()
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)
        return prepared

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        where = "prepare_model_from_cache"
        self.check_open()
        _, priority = self._check_terms(ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns, where)
        held = self._held_to_load(cache)
        self._check_time_left(deadline_ns, loop_now_ns(), where)
        contents = await self.on_thread(self._load, held)
        try:
            return await self.restore(contents, priority=priority, deadline_ns=deadline_ns)
        except InvalidArgument as e:
            raise self._not_what_was_saved(e) from e

    async def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        """Makes ready what ``AsyncPreparedModel.cached`` gave, unchanged. By default that is the model, prepared again.

        A driver that keeps something else overrides both.
        """
        model = await self.on_thread(caching.decode_model, contents)
        return await self._checked_prepare(
            model, ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns
        )

    async def aclose(self) -> None:
        """Ends what runs and what waits (DEVICE_UNAVAILABLE). Idempotent."""
        self._closed = True
        self.end_fenced()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await finish(_ended(tasks))


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
