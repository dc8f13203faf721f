"""Base classes for drivers around blocking code: write three short methods, get the whole driver contract.

Owns the device (slots and threads, support, preparation, compilation caching) and the launch of its prepared models. Forms of
execution are in ``launching``; the subclass computes.

Invariants:
1. ``supports`` and ``prepare`` are called with validated models, on a thread that holds one of the device's slots; or, where the
   device prepares beside executions, on a thread of its own, one call at a time.
2. ``run`` is called with checked arguments, on a thread that holds one of the device's slots, never on an event loop's.
3. An execution whose deadline has passed before its turn is never started (MISSED_DEADLINE_PERSISTENT).
4. Nothing that is wrong with cache arguments fails a preparation.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import anyio
import numpy.typing as npt

from aionn.drivers.kit import caching
from aionn.drivers.kit.arguments import Arguments, OutputArea
from aionn.drivers.kit.caching import CacheContents, HeldFiles
from aionn.drivers.kit.checked import CheckedDevice
from aionn.drivers.kit.gate import GateControl, SlotGate
from aionn.drivers.kit.interrupting import Interrupts
from aionn.drivers.kit.launching import LaunchingPreparedModel
from aionn.drivers.kit.threads.alarm import Alarm
from aionn.drivers.kit.threads.calls import run_on_gate
from aionn.drivers.kit.threads.classes import (
    EngineThreads,
    class_of_priority,
    computing,
    count_model,
    running_as,
)
from aionn.errors import (
    Error,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
    general_failure_of,
)
from aionn.hal import (
    CacheFiles,
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
    passed_before_start,
)
from aionn.hal.callers import client_of_call
from aionn.hal.pieces import pace_of_call, pausing
from aionn.interpreter import RunControl
from aionn.observability.tracing import section
from aionn.platform.loops import finish
from aionn.platform.real_work import begin_real_work, real_work
from aionn.platform.threads import start_thread
from aionn.realtime import Scheduling, current
from aionn.scheduler.reservations.calls import reserved_call
from fences import SyncFence
from fences import now_ns as fences_now_ns
from fmq import Permit

__all__ = ["BlockingDevice", "BlockingPreparedModel"]

Array = npt.NDArray[Any]

TURN_NS = 5_000_000
"""Time for which a model is checked or prepared before models of other processes have a turn: a hundred times what the change of
threads takes."""

END_PAUSE_S = 0.005
"""Interval between checks of the device's threads if no thread can be started that would wait for their end: a few wake-ups, on a
machine that has no room for a thread.
"""

_logger = logging.getLogger("aionn.driver")
_T = TypeVar("_T")


class BlockingPreparedModel(LaunchingPreparedModel):
    """A model made ready by a blocking driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
        identity: A number that no other prepared model of this process ever has.
        extension_types: The operand types of the device's extensions, by the model's codes.
    """

    device: BlockingDevice

    def __init__(self, device: BlockingDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        weakref.finalize(self, device.gate.forget, self.identity).atexit = False
        self._abandoned = False
        self._permit: Permit | None = None
        self._engine_threads = EngineThreads(f"{device.info.name} engine")
        count_model(self, priority)
        # An engine that was made before real time was in use is called directly: then a whole run has the class of the job.
        self._computing = computing if device.marks_engine_calls and current() is not None else running_as

    @abc.abstractmethod
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        """Computes the outputs.

        Args:
            inputs: One array per input, a view of shared memory that the client can still change: read each value once, and
                believe nothing that was checked before. Rank 0 for scalars, None for an input that is left out.
            outputs: Where the results go. On failure nothing may be assumed about their content.
            control: Deadline, loop time-out and cancellation; call ``control.check()`` as often as the device can stop.

        Returns:
            One shape per output. An output that does not fit is reported as insufficient, not raised.
        """

    def interruptible(
        self, control: RunControl, interrupt: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Lets an engine be stopped while ``run`` is inside one call of it, within the context that this returns.

        Args:
            control: The one that ``run`` was given. Check it when the engine was stopped: it raises the reason.
            interrupt: Called from another thread, at most once, when the execution is cancelled, when its deadline has passed, or
                when the results are not wanted any more; never after the context was left. It must be quick and must not raise.
        """
        return self.device.interrupts.watching(control.deadline_ns, control.is_cancelled, interrupt)

    def run_bound(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> ExecutionResult:
        """Runs on the calling thread, which must hold a slot. Raises as ``PreparedModel.execute_synchronously`` does.

        Device memories among the outputs are initialised afterwards, or uninitialised when this raises.
        """
        try:
            with section("LD_PE", self.device.info.name):
                result = self._run_checked(arguments, measure, deadline_ns, loop_timeout_ns, is_cancelled)
            arguments.settle(result.output_shapes, is_sufficient=result.output_sufficient_size)
        except BaseException:
            arguments.fail()
            raise
        return result

    def _run_checked(
        self,
        arguments: Arguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> ExecutionResult:
        now = self.device.now
        started_ns = now() if measure or deadline_ns is not None else 0
        if deadline_ns is not None and started_ns >= deadline_ns:
            raise passed_before_start("execution", started_ns - deadline_ns)

        control = self.device.gate.control(
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=self._is_abandoned if is_cancelled is None else self._or_abandoned(is_cancelled),
        )
        control.check()  # An execution that was cancelled while it waited for a slot never starts.
        self.begin_run()
        try:
            scheduling = current()
            if scheduling is None:
                shapes = tuple(self.run(arguments.inputs(), arguments.outputs, control))
            else:
                shapes = self._run_classed(scheduling, arguments, control)
        except Error:
            raise
        except (
            BaseException
        ) as e:  # SystemExit of a driver is its failure as well, and would end the thread without an answer.
            raise general_failure_of(e, self.device.info.name) from e
        finally:
            self.end_run()
        sufficient = False not in [shape.is_sufficient for shape in shapes]
        if not (measure and sufficient):
            return ExecutionResult(sufficient, shapes)
        took_ns = now() - started_ns
        return ExecutionResult(True, shapes, Timing(took_ns - control.away_ns, took_ns))

    def _run_classed(
        self, scheduling: Scheduling, arguments: Arguments, control: GateControl
    ) -> tuple[OutputShape, ...]:
        """Computes under the scheduling class of the job."""
        job_class = class_of_priority(self.priority if control.priority is None else control.priority)
        inputs = arguments.inputs()
        with (
            self._engine_threads.found(class_of_priority(self.priority)),
            self._computing(scheduling, job_class),
        ):
            return tuple(self.run(inputs, arguments.outputs, control))

    def _is_abandoned(self) -> bool:
        return self._abandoned

    def _or_abandoned(self, is_cancelled: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: self._abandoned or is_cancelled()

    def execute_bound(
        self,
        arguments: Arguments,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        answer: Callable[[ExecutionResult], None] | None = None,
    ) -> ExecutionResult:
        """Executes on the calling thread when its turn comes; blocks. Raises as ``PreparedModel.execute_synchronously`` does.

        Args:
            arguments: The result of ``bind``; for any number of executions, unless device memories are among its pools.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            answer: Called with the result before the slot is released, so that a client in another process continues sooner;
                None if the caller needs no earlier answer.
        """
        self.check_usable()
        with self.device.gate.slot(self.priority, deadline_ns, owner=self.owner, model=self.identity):
            result = self.run_bound(
                arguments, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )
            if answer is not None:
                answer(result)
        return result

    def permit(self) -> Permit:
        """The permit of this prepared model's ``NativeCall``: its calls are jobs of the device, until it is closed.

        Raises:
            InvalidArgument: It is closed.
            DeviceUnavailable: The device is.
        """
        if self._permit is None:
            self._permit = self.device.gate.permit(self.identity, self.priority, owner=self.owner)
        if (
            self._closed or self._abandoned
        ):  # Asked last: then closing it withdraws the permit that is here already.
            self._permit.withdraw()
        self.check_usable()
        return self._permit

    async def aclose(self) -> None:
        """See the base class. Calls without the interpreter's lock are withdrawn; one that runs keeps what it needs."""
        await super().aclose()
        if self._permit is not None:
            self._permit.withdraw()

    def begin(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
    ) -> Launch:
        """See the base class. From any thread."""
        launch = _GateLaunch(self, arguments, measure, deadline_ns, loop_timeout_ns)
        launch.begin(self.priority if priority is None else priority)
        return launch

    def abandon(self) -> None:
        """The results are not wanted any more: waiting executions never start, running ones end where the device can stop."""
        self._abandoned = True
        if self._permit is not None:
            self._permit.withdraw()
        self.device.interrupts.look()


class _GateLaunch(LaunchBase):
    """An execution on a thread of the device's gate."""

    def __init__(
        self,
        prepared: BlockingPreparedModel,
        arguments: Arguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
    ) -> None:
        self._prepared = prepared
        # Dropped when it has run: the launch may be kept for longer than memories may be.
        self._arguments: Arguments | None = arguments
        self._measure = measure
        self._deadline_ns = deadline_ns
        self._loop_timeout_ns = loop_timeout_ns
        self._fence = SyncFence("execution")
        self._is_frame = reserved_call.get() is not None
        self._outcome: ExecutionResult | Error | None = None
        self._end = begin_real_work(f"work on {prepared.device.gate}")

    def begin(self, priority: Priority) -> None:
        """Enters the device's queue. Without an owner it is work of the client whose call this is.

        Raises:
            Error: There is no execution; see ``SlotGate.submit``.
        """
        prepared = self._prepared
        owner = client_of_call.get() if prepared.owner is None else prepared.owner
        ended = self._ended if self._is_frame else None
        try:
            prepared.device.gate.submit(
                priority, self._deadline_ns, self._run, owner=owner, model=prepared.identity, ended=ended
            )
        except BaseException:
            assert self._arguments is not None
            self._arguments.give_back()
            self._end()
            raise

    def _ask_to_stop(self) -> None:
        self._prepared.device.interrupts.look()

    def _run(self) -> None:
        arguments, self._arguments = self._arguments, None
        assert arguments is not None, "run once"
        outcome: ExecutionResult | Error
        if self.is_cancelled:
            arguments.give_back()  # Others wait for the slot.
            outcome = ExecutionCancelled("execution: it was cancelled before its turn")
        else:
            try:
                outcome = self._prepared.run_bound(
                    arguments,
                    measure=self._measure,
                    deadline_ns=self._deadline_ns,
                    loop_timeout_ns=self._loop_timeout_ns,
                    is_cancelled=lambda: self.is_cancelled,
                )
            except BaseException as e:
                outcome = (
                    e if isinstance(e, Error) else general_failure_of(e, str(self._prepared.device.gate))
                )
        del arguments
        self._outcome = outcome
        del outcome  # It refers to this frame.
        if not self._is_frame:
            self._ended()

    def _ended(self) -> None:
        """Reports the end. That of a frame of a reservation, when its slot was given back: then its label is known."""
        outcome, self._outcome = self._outcome, None
        assert outcome is not None, "it has run"
        self.finish(outcome)
        # Not before the event loop has been woken.
        self._end()
        del outcome


class BlockingDevice(CheckedDevice):
    """A device around blocking code. Set ``info``; implement ``supports`` and ``prepare``.

    Args:
        info: The description that never changes for a build of the driver.
        now: The clock that deadlines are compared with.
        memory_bytes_max: Limit of all device memories together, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        gate: The device's slots.
        preparing: Where models are checked and prepared: the device's slots, or a turn of its own; see ``prepares_beside``.
        alarm: Fails fences on time.
        interrupts: The runs that can be stopped from another thread; see ``BlockingPreparedModel.interruptible``.
        now: See above.
        memories: The device memories; None for a device without.
        is_preemptible: Whether a run may be made to sleep where it looks at its control while more urgent jobs run, perhaps of the
            same prepared model: only where runs share nothing that one of them locks.
        prepares_beside: Whether ``supports`` and ``prepare`` may run beside executions. They then take no slot, and a client that
            sends large models does not delay the executions of others by checking and preparing them.
        marks_engine_calls: Whether a run computes within ``threads.classes.engine_call`` alone, made after the prepared model's
            constructor of this class. With real time the thread has the class of a LOW job only there, where it does not hold the
            interpreter's lock; otherwise during the whole run.
    """

    is_preemptible: ClassVar[bool] = False
    prepares_beside: ClassVar[bool] = False
    marks_engine_calls: ClassVar[bool] = False

    def __init__(
        self,
        info: DeviceInfo,
        *,
        now: Callable[[], int] = fences_now_ns,
        memory_bytes_max: int | None = None,
    ) -> None:
        super().__init__(info, memory_bytes_max=memory_bytes_max)
        self.gate = SlotGate(info.slots, name=info.name, now=now, can_preempt=self.is_preemptible)
        # One works at a time, whatever the slots: processes take turns, also in the middle of a model, and concurrent ones would
        # only share the interpreter's lock.
        self.preparing = (
            SlotGate(1, name=f"{info.name}-preparing", now=now, executes=False)
            if self.prepares_beside
            else self.gate
        )
        self.alarm = Alarm(now, name=f"aionn-{info.name}-alarm")
        self.interrupts = Interrupts(now, name=f"aionn-{info.name}-interrupts")
        self.now = now

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """See ``Timers``."""
        return self.alarm.call_at(time_ns, function)

    def call(self, function: Callable[[], None]) -> None:
        """See ``Timers``: a blocking device launches in any thread."""
        function()

    @abc.abstractmethod
    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        """Makes a validated and supported model ready. Runs on a thread of the device and may take its time."""

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        # Not HIGH, although it is quick as a rule: a client that queries without end would keep the slots from all other clients.
        return await self._in_pieces(Priority.MEDIUM, None, lambda: self._checked_support(model))

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> BlockingPreparedModel:
        """See ``Device``. The compilation is saved if the driver keeps something of it: see ``BlockingPreparedModel.cached``."""
        preference, priority = self._check_terms(preference, priority, deadline_ns, "prepare_model")
        held = self._held(cache)

        def prepare() -> BlockingPreparedModel:
            with section("LD_PC", f"prepare on {self.info.name}"):
                prepared = self._checked_prepare(model, preference, priority, deadline_ns)
                if held is not None:
                    try:
                        self._save(held, prepared)
                    except BaseException:  # The caller cancelled the call, between two blocks.
                        prepared.release()
                        raise
            facts = (self.info.name, len(model.main.operations), preference.name, priority.name)
            _logger.debug("%s: prepared %d operations, %s, priority %s", *facts)
            return prepared

        return await self._in_pieces(priority, deadline_ns, prepare)

    async def _in_pieces(self, priority: Priority, deadline_ns: int | None, call: Callable[[], _T]) -> _T:
        """Runs work on a model where models are prepared. It ends between two pieces when the caller is cancelled."""
        context = contextvars.copy_context()
        # Work that sleeps on a device's slot would hold up the executions that it sleeps for.
        pace = pace_of_call.get() if self.prepares_beside else None

        def run(is_cancelled: Callable[[], bool]) -> _T:
            def pause() -> None:
                check()
                if pace is not None:
                    pace()
                if self.prepares_beside:
                    self.preparing.give_turn_after(TURN_NS)
                    check()  # A job that is withdrawn comes back without a slot.

            def check() -> None:
                if is_cancelled():
                    raise GeneralFailure(f"{self.preparing}: the caller cancelled the call")

            context.run(pausing, pause)
            return context.run(call)

        # An engine that compiles may not be stoppable: its caller is answered at the deadline, and it works on.
        call_at = None if deadline_ns is None or self.now() >= deadline_ns else self.alarm.call_at
        return await run_on_gate(self.preparing, priority, deadline_ns, run, call_at=call_at)

    def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        self._check_time_left(deadline_ns, self.now(), "prepare_model")
        self._check_supported(model, self._checked_support(model))
        with EngineThreads(f"{self.info.name} engine").found(class_of_priority(priority)):
            prepared = self.prepare(model, preference=preference, priority=priority, deadline_ns=deadline_ns)
        if deadline_ns is not None and self.now() >= deadline_ns:
            prepared.release()
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)
        return prepared

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        _, priority = self._check_terms(
            ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns, "prepare_model_from_cache"
        )
        held = self._held_to_load(cache)
        return await self._in_pieces(
            priority, deadline_ns, lambda: self._restore(held, priority, deadline_ns)
        )

    def _restore(self, held: HeldFiles, priority: Priority, deadline_ns: int | None) -> BlockingPreparedModel:
        self._check_time_left(deadline_ns, self.now(), "prepare_model_from_cache")
        loaded = [self._load(held)]
        try:
            with EngineThreads(f"{self.info.name} engine").found(class_of_priority(priority)):
                # The driver may drop the contents as soon as it has taken what it needs.
                return self.restore(loaded.pop(), priority=priority, deadline_ns=deadline_ns)
        except InvalidArgument as e:
            raise self._not_what_was_saved(e) from e

    def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        """Makes ready what ``BlockingPreparedModel.cached`` gave, unchanged. By default that is the model, prepared again.

        A driver that keeps something else overrides both.
        """
        return self._checked_prepare(
            caching.decode_model(contents), ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns
        )

    async def aclose(self) -> None:
        """Lets running work end and joins the device's threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.end_fenced()
        await finish(self._close())

    async def _close(self) -> None:
        done = SyncFence("device close")

        def close() -> None:
            self.preparing.close()
            self.gate.close()
            self.interrupts.close()
            self.alarm.close()
            done.signal()

        # Joining waits for running work, so it must not happen on the event loop's thread.
        closer = threading.Thread(target=close, name=f"aionn-{self.info.name}-close")
        with real_work(f"closing {self.gate}"):
            try:
                start_thread(closer, self.info.name)
            except ResourceExhausted:
                await self._end_threads()
                close()  # There is nothing left to wait for.
                return
            await done
        closer.join()

    async def _end_threads(self) -> None:
        """Lets the device's threads end without another one that joins them."""
        for gate in (self.preparing, self.gate):
            gate.begin_close()
        while not (self.preparing.has_ended and self.gate.has_ended):
            await anyio.sleep(END_PAUSE_S)
