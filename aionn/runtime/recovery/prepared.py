"""Prepared models and bursts that outlive their driver process: the shell around ``states``.

Owns the driver's objects of the moment, the task that makes new ones, and the executions that wait for these. Each step
of a compilation has one such object in place of the driver's, all made by its ``Recoverer``; an execution costs one call more.

Invariants:
1. An execution that was under way when its driver died is never repeated: it may be what killed it. It raises ``DeadObject``, with
   ``transient`` where the next one may succeed.
2. An execution that arrives later waits until the model is ready again, until its deadline, or until it is abandoned.
3. A request with a device memory of the process that died never reaches the new process, where its token may mean another memory.
4. A preparation ends in bounded time, and with its compilation; a model made too late is freed.

Source: ``ResilientPreparedModel``, ``ResilientBurst`` and ``ResilientBuffer`` of the NN HAL's runtime.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import anyio

from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import (
    BufferToken,
    Burst,
    BurstByLaunch,
    BurstDefaults,
    Execution,
    ExecutionCallback,
    ExecutionResult,
    FencedExecution,
    Launch,
    LaunchBase,
    PreparedModel,
    PreparedModelByLaunch,
    PreparedModelDefaults,
    Priority,
    Request,
    ask_to_stop,
    check_abilities,
)
from aionn.platform.loops import finish
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.placement.fallback import driver_error
from aionn.runtime.recovery.states import PREPARATIONS_MAX, Recovery, RecoveryState
from fences import SyncFence

__all__ = ["Recoverer", "RecoveringBurst", "RecoveringPreparedModel", "drivers_own"]

PREPARE_S_MAX: Final = 120.0
"""Limit of one preparation: a large engine takes tens of seconds; a driver that takes longer hangs."""

_logger = logging.getLogger("aionn.compilation")

_Prepare = Callable[[], Coroutine[Any, Any, PreparedModel | None]]


class Recoverer:
    """Makes the prepared models of one compilation recover.

    Args:
        background: Where preparations run.

    Attributes:
        count: Number of times that a prepared model of the compilation has been prepared again.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.count = 0

    def recovering(
        self, device_name: str, prepared: PreparedModel, prepare: _Prepare
    ) -> RecoveringPreparedModel:
        """A prepared model that recovers.

        Args:
            device_name: Names the device in messages.
            prepared: The driver's.
            prepare: Prepares it again. Raises as ``Device.prepare_model``.
        """
        return RecoveringPreparedModel(self._background, device_name, prepared, prepare, self._recovered)

    def _recovered(self) -> None:
        self.count += 1


class RecoveringPreparedModel(PreparedModelByLaunch, PreparedModelDefaults):
    """A prepared model that is prepared again after the death of its driver. Made by ``Recoverer``.

    Attributes:
        current: The driver's prepared model: the last one, while a new one is being prepared.
    """

    def __init__(
        self,
        background: Background,
        device_name: str,
        prepared: PreparedModel,
        prepare: _Prepare,
        on_recovered: Callable[[], None],
    ) -> None:
        self.current = prepared
        self.background = background
        self.takes_priority = prepared.takes_priority
        self.expected_duration_ns = prepared.expected_duration_ns
        self._device_name = device_name
        self._prepare = prepare
        self._on_recovered = on_recovered
        self._recovery = Recovery()
        self._tokens: set[int] = set()
        self._waiting: dict[
            _WaitingLaunch, None
        ] = {}  # In their order; bounded by the executions that have a slot of the device.
        self._bursts: weakref.WeakSet[RecoveringBurst] = weakref.WeakSet()
        self._scope: anyio.CancelScope | None = None
        self._ended: anyio.Event | None = None
        self._why = ""

    @property
    def state(self) -> RecoveryState:
        """Whether it is ready, being prepared again, or abandoned."""
        return self._recovery.state

    @property
    def is_lost(self) -> bool:
        """Whether the driver of ``current`` is known to have died; ``over`` waits for the next one."""
        state = self._recovery.state
        return state is RecoveryState.PREPARING or (state is RecoveryState.READY and self.current.is_gone)

    @property
    def deaths(self) -> int:
        """Number of deaths of its driver. A death takes with it whatever was made for ``current`` before."""
        return self._recovery.deaths

    # Deaths

    def lost(self, error: DeadObject | DeviceUnavailable, launched_ns: int = 2**63 - 1) -> bool:
        """An execution that was asked for at ``launched_ns`` has failed since its driver died, or its server is ending. Begins the
        preparation.

        Returns:
            Whether a later execution may succeed.
        """
        if not self.background.is_open:
            return False
        now = now_ns()
        deaths = self._recovery.deaths
        begins_ns = self._recovery.died(now, launched_ns)
        if self._recovery.deaths != deaths:
            self._why = str(error)
            self._tokens.clear()
        if begins_ns is not None:
            _logger.warning("%s: %s; the model is prepared again", self._device_name, error)
            self._ended = anyio.Event()
            self.background.tasks.start_soon(self._prepare_until_ready, begins_ns, self._ended)
        elif self._recovery.state is RecoveryState.ABANDONED:
            self._abandon()
        return self._recovery.state in (RecoveryState.READY, RecoveryState.PREPARING)

    async def _prepare_until_ready(self, begins_ns: int, ended: anyio.Event) -> None:
        scope = self._scope = anyio.CancelScope()
        try:
            with scope:
                next_ns: int | None = begins_ns
                while next_ns is not None and self._recovery.state is RecoveryState.PREPARING:
                    await anyio.sleep(max(0, next_ns - now_ns()) / 1e9)
                    next_ns = await self._try_to_prepare()
        finally:
            self._scope = None
            ended.set()
            if self._recovery.state is not RecoveryState.READY:
                self._abandon()

    async def _try_to_prepare(self) -> int | None:
        """Returns when to try again; None for never: it is ready, abandoned or closed."""
        recovery, started_ns = self._recovery, now_ns()
        prepared: PreparedModel | None = None
        bursts: list[tuple[RecoveringBurst, Burst]] = []
        try:
            with anyio.fail_after(PREPARE_S_MAX):
                prepared = await self._prepare()
                if prepared is None:
                    raise GeneralFailure(f"{self._device_name}: the model is not prepared")
                check_abilities(prepared, PreparedModelDefaults, self._device_name)
                for burst in list(self._bursts):
                    bursts.append((burst, await burst.open_at(prepared)))
        except Exception as e:
            await finish(_free(prepared, bursts))
            self._why = f"{type(e).__name__}: {e}"
            is_transient = _is_transient(e)
            _logger.warning("%s: preparing the model again failed: %s", self._device_name, self._why)
            return recovery.failed(now_ns(), is_transient=is_transient)
        except BaseException:
            await finish(_free(prepared, bursts))
            raise
        if not recovery.prepared(now_ns()):
            await finish(_free(prepared, bursts))
            return None
        before, self.current = self.current, prepared
        self.expected_duration_ns = prepared.expected_duration_ns
        for burst, new in bursts:
            burst.replace(new)
        self.background.close_soon(functools.partial(_closed, before.aclose))
        self._on_recovered()
        took_ms = (recovery.ready_ns - started_ns) / 1e6
        _logger.warning("%s: the model is ready again, after %.0f ms", self._device_name, took_ms)
        waiting, self._waiting = self._waiting, {}
        for launch in waiting:
            launch.begin()
        return None

    def _abandon(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for launch in waiting:
            launch.finish(self._gone())

    def _gone(self) -> DeadObject:
        if self._recovery.state is RecoveryState.ABANDONED:
            count = self._recovery.preparations
            limit = f" (at most {PREPARATIONS_MAX} in a minute)" if count >= PREPARATIONS_MAX else ""
            words = f"its driver died, and preparing the model again was abandoned after {count} tries{limit}"
            return DeadObject(f"{self._device_name}: {words}: {self._why}; compile again")
        return DeadObject(f"{self._device_name}: its driver died, and the compilation was closed")

    # Executions

    def _check_memories_if_lost(self, request: Request) -> None:
        """Refuses a device memory of a process that has died.

        Raises:
            DeadObject: The request has one.
        """
        if not self._recovery.deaths:
            return
        for pool in request.pools:
            if isinstance(pool, BufferToken) and pool.token not in self._tokens:
                raise DeadObject(
                    f"{self._device_name}: a device memory of the request was lost when the driver died; allocate it again"
                )

    def owns(self, token: int) -> None:
        """A device memory was allocated for ``current``."""
        self._tokens.add(token)

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """See ``PreparedModel``."""

        def begin() -> Launch:
            return self.current.launch(
                request,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
                priority=priority,
            )

        return self.begun(request, deadline_ns, begin)

    def begun(self, request: Request, deadline_ns: int | None, begin: Callable[[], Launch]) -> Launch:
        """Begins a launch now, or when the model is ready again."""
        recovery = self._recovery
        self._check_memories_if_lost(request)
        if recovery.state is RecoveryState.READY:
            try:
                launch = begin()
            except (DeadObject, DeviceUnavailable) as e:
                self.lost(e)
            else:
                if not launch.is_done:
                    return launch
                # As a rule it was never sent, because the driver had died before: nothing of it has run.
                try:
                    launch.outcome()
                except (DeadObject, DeviceUnavailable) as e:
                    self.lost(e)
                except Exception:
                    return launch
                else:
                    return launch
        if recovery.state is not RecoveryState.PREPARING:
            raise self._gone()
        self._check_memories_if_lost(request)
        waiting = _WaitingLaunch(self, deadline_ns, begin)
        self._waiting[waiting] = None
        return waiting

    def forget(self, launch: _WaitingLaunch) -> None:
        """A launch does not wait any more."""
        self._waiting.pop(launch, None)

    async def execute(self, request: Request, callback: ExecutionCallback, **options: Any) -> Any:
        """See ``PreparedModel``. Waits as ``over``."""
        await self.over()
        self._check_memories_if_lost(request)
        return await self.current.execute(request, callback, **options)

    async def execute_fenced(
        self, request: Request, wait_for: Sequence[SyncFence], **options: Any
    ) -> FencedExecution:
        """See ``PreparedModel``. Waits as ``over``."""
        await self.over()
        self._check_memories_if_lost(request)
        return await self.current.execute_fenced(request, wait_for, **options)

    async def create_reusable_execution(self, request: Request, **options: Any) -> Execution:
        """See ``PreparedModel``. It belongs to the driver process of the moment, and does not recover."""
        await self.over()
        return await self.current.create_reusable_execution(request, **options)

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> RecoveringBurst:
        """See ``PreparedModel``. Waits for a preparation that is under way, and begins one where the driver has died."""
        burst = RecoveringBurst(self, controller_polling_us, server_polling_us)
        for _ in range(PREPARATIONS_MAX):
            await self.over()
            deaths = self._recovery.deaths
            try:
                opened = await burst.open_at(self.current)
            except (DeadObject, DeviceUnavailable) as e:
                if self._recovery.deaths == deaths and not self.lost(e):
                    raise self._gone() from e
                continue
            if self._recovery.deaths == deaths:
                burst.replace(opened)
                self._bursts.add(burst)
                return burst
            self.background.close_soon(functools.partial(_closed, opened.aclose))
        words = f"its driver died {PREPARATIONS_MAX} times while a burst was opened"
        raise DeadObject(f"{self._device_name}: {words}: {self._why}", transient=True)

    def forget_burst(self, burst: RecoveringBurst) -> None:
        """A burst was closed, and is not opened again."""
        self._bursts.discard(burst)

    async def over(self) -> None:
        """Waits for a preparation that is under way, and begins one where the driver is known to have died.

        Raises:
            DeadObject: Preparing it again was abandoned, or the runtime is closed.
        """
        if self.is_lost and not self.lost(DeadObject("its driver process is gone")):
            raise self._gone()
        while self._recovery.state is RecoveryState.PREPARING and self._ended is not None:
            await self._ended.wait()
        if self._recovery.state is RecoveryState.ABANDONED:
            raise self._gone()

    async def aclose(self) -> None:
        """See ``PreparedModel``. Ends a preparation that is under way."""
        self._recovery.close()
        if self._scope is not None:
            self._scope.cancel()
        await finish(self._close())

    async def _close(self) -> None:
        if self._ended is not None and self._scope is not None:
            await self._ended.wait()
        self._abandon()
        await self.current.aclose()


class RecoveringBurst(BurstByLaunch, BurstDefaults):
    """A burst that is opened again with its prepared model."""

    def __init__(
        self, owner: RecoveringPreparedModel, controller_polling_us: int, server_polling_us: int
    ) -> None:
        self._owner = owner
        self._polling = {
            "controller_polling_us": controller_polling_us,
            "server_polling_us": server_polling_us,
        }
        self._current: Burst | None = None
        self._is_closed = False

    async def open_at(self, prepared: PreparedModel) -> Burst:
        """A burst of another prepared model with the same options. Raises as ``configure_execution_burst``."""
        burst = await prepared.configure_execution_burst(**self._polling)
        check_abilities(burst, BurstDefaults, "burst")
        return burst

    def replace(self, burst: Burst) -> None:
        """Uses another burst of the driver from now on."""
        before, self._current = self._current, burst
        self.thread_id = burst.thread_id
        background = self._owner.background
        if before is not None:
            background.close_soon(functools.partial(_closed, before.aclose))
        if self._is_closed:
            background.close_soon(functools.partial(_closed, burst.aclose))

    @property
    def current(self) -> Burst:
        """The driver's burst of the moment."""
        assert self._current is not None, "opened before it is given out"
        return self._current

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """See ``Burst``."""

        def begin() -> Launch:
            return self.current.launch(
                request,
                memory_identifiers,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
            )

        return self._owner.begun(request, deadline_ns, begin)

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``Burst``."""
        await self.current.release_memory_resource(memory_identifier)

    async def aclose(self) -> None:
        """See ``Burst``."""
        self._is_closed = True
        self._owner.forget_burst(self)
        await self.current.aclose()


class _WaitingLaunch(LaunchBase):
    """A launch that begins when the model is ready again."""

    def __init__(
        self, owner: RecoveringPreparedModel, deadline_ns: int | None, begin: Callable[[], Launch]
    ) -> None:
        self._owner = owner
        self._begin: Callable[[], Launch] | None = begin
        self._launch: Launch | None = None
        self._timer = None if deadline_ns is None else owner.background.at(deadline_ns, self._expire)

    def finish(self, outcome: ExecutionResult | Error) -> None:
        """See ``LaunchBase``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._begin = self._launch = None
        super().finish(outcome)

    def _expire(self) -> None:
        if self._launch is None:
            self._owner.forget(self)
            self.finish(MissedDeadline("execution: the deadline passed while the model was prepared again"))

    def _ask_to_stop(self) -> None:
        if self._launch is not None:
            ask_to_stop(self._launch)
            return
        self._owner.forget(self)
        self.finish(ExecutionCancelled("execution: it was cancelled before it began"))

    def begin(self) -> None:
        """The model is ready."""
        assert self._begin is not None, "begun once, and not after its end"
        try:
            launch = self._launch = self._begin()
        except Exception as e:
            self.finish(driver_error(e, "execution"))
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        launch.done.add_callback(self._done)

    def _done(self, done: SyncFence) -> None:
        # In-process drivers finish launches in threads of their own.
        self._owner.background.run_in_loop(self._land)

    def _land(self) -> None:
        launch = self._launch
        if launch is None:
            return
        try:
            self.finish(launch.outcome())
        except Exception as e:
            if isinstance(e, DeadObject):
                self._owner.lost(
                    e
                )  # The execution was asked for before, and launched after the last preparation.
            self.finish(driver_error(e.with_traceback(None), "execution"))


def drivers_own(prepared: PreparedModel) -> PreparedModel:
    """The driver's prepared model behind one that recovers, or the same."""
    return prepared.current if isinstance(prepared, RecoveringPreparedModel) else prepared


def _is_transient(error: Exception) -> bool:
    if isinstance(error, ResourceExhausted | MissedDeadline):
        return error.transient
    if isinstance(error, InvalidArgument):
        return False
    return isinstance(error, DeadObject | DeviceUnavailable | TimeoutError)


async def _free(prepared: PreparedModel | None, bursts: Iterable[tuple[RecoveringBurst, Burst]]) -> None:
    for _, burst in bursts:
        await _closed(burst.aclose)
    if prepared is not None:
        await _closed(prepared.aclose)


async def _closed(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        await close()
    except Exception as e:
        _logger.debug("an object of the driver that died could not be closed: %s", e)
