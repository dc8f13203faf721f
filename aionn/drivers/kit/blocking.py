"""Base classes for drivers around blocking code: write three short methods, get the whole driver contract.

Owns the device: slots and threads, support, preparation, compilation caching, device memories. Prepared models are in ``prepared``;
the subclass computes.

Invariants:
1. ``supports`` and ``prepare`` are called with validated models, on a thread that holds one of the device's slots; or, where the
   device prepares beside executions, on a thread of its own, one call at a time.
2. Nothing that is wrong with cache arguments fails a preparation.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import ClassVar, TypeVar

import anyio

from aionn.drivers.kit import caching
from aionn.drivers.kit.caching import CacheContents, HeldFiles
from aionn.drivers.kit.checked import CheckedDevice
from aionn.drivers.kit.fenced import Alarm
from aionn.drivers.kit.gate import SlotGate, run_on_gate
from aionn.drivers.kit.prepared import BlockingPreparedModel, DirectBurst
from aionn.errors import GeneralFailure, InvalidArgument, MissedDeadline, ResourceExhausted
from aionn.hal import (
    CacheFiles,
    DeviceInfo,
    ExecutionPreference,
    Model,
    PreparedModel,
    Priority,
)
from aionn.hal.pieces import pace_of_call, pausing
from aionn.observability.tracing import section
from aionn.platform.loops import finish
from aionn.platform.real_work import real_work
from aionn.platform.threads import start_thread
from fences import SyncFence
from fences import now_ns as fences_now_ns

__all__ = ["BlockingDevice", "BlockingPreparedModel", "DirectBurst"]

END_PAUSE_S = 0.005
"""Interval between checks of the device's threads if no thread can be started that would wait for their end: a few wake-ups, on a
machine that has no room for a thread.
"""

_logger = logging.getLogger("aionn.driver")
_T = TypeVar("_T")


class BlockingDevice(CheckedDevice):
    """A device around blocking code. Set ``info``; implement ``supports`` and ``prepare``.

    Args:
        info: What never changes for a build of the driver.
        now: The clock that deadlines are compared with.
        memory_bytes_max: What all device memories together may take, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        gate: The device's slots.
        preparing: Where models are checked and prepared: the device's slots, or a turn of its own; see ``prepares_beside``.
        alarm: Fails fences on time.
        now: See above.
        memories: The device memories; None for a device without.
        is_preemptible: Whether a run may be made to sleep where it looks at its control while more urgent jobs run, perhaps of the
            same prepared model: only where runs share nothing that one of them locks.
        prepares_beside: Whether ``supports`` and ``prepare`` may run beside executions. They then take no slot, and a client that
            sends large models does not delay the executions of others by checking and preparing them.
    """

    is_preemptible: ClassVar[bool] = False
    prepares_beside: ClassVar[bool] = False

    def __init__(
        self,
        info: DeviceInfo,
        *,
        now: Callable[[], int] = fences_now_ns,
        memory_bytes_max: int | None = None,
    ) -> None:
        super().__init__(info, memory_bytes_max=memory_bytes_max)
        self.gate = SlotGate(info.slots, name=info.name, now=now, can_preempt=self.is_preemptible)
        # One at a time, whatever the slots: clients take turns, and concurrent ones would only share the interpreter's lock.
        self.preparing = (
            SlotGate(1, name=f"{info.name}-preparing", now=now) if self.prepares_beside else self.gate
        )
        self.alarm = Alarm(now, name=f"aionn-{info.name}-alarm")
        self.now = now

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
                    self._save(held, prepared)
            told = (self.info.name, len(model.main.operations), preference.name, priority.name)
            _logger.debug("%s: prepared %d operations, %s, priority %s", *told)
            return prepared

        return await self._in_pieces(priority, deadline_ns, prepare)

    async def _in_pieces(self, priority: Priority, deadline_ns: int | None, call: Callable[[], _T]) -> _T:
        """Runs work on a model where models are prepared. It ends between two pieces when the caller is cancelled."""
        context = contextvars.copy_context()
        # Work that sleeps on a device's slot would hold up the executions that it sleeps for.
        pace = pace_of_call.get() if self.prepares_beside else None

        def run(is_cancelled: Callable[[], bool]) -> _T:
            def pause() -> None:
                if is_cancelled():
                    raise GeneralFailure(f"{self.preparing}: the caller cancelled the call")
                if pace is not None:
                    pace()

            context.run(pausing, pause)
            return context.run(call)

        return await run_on_gate(self.preparing, priority, deadline_ns, run)

    def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        self._check_time_left(deadline_ns, self.now(), "prepare_model")
        self._check_supported(model, self._checked_support(model))
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
        contents = self._load(held)
        try:
            return self.restore(contents, priority=priority, deadline_ns=deadline_ns)
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
        await finish(self._close())

    async def _close(self) -> None:
        done = SyncFence("device close")

        def close() -> None:
            self.preparing.close()
            self.gate.close()
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
