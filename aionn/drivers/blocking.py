"""Base classes for drivers around blocking code: write three short methods, get the whole driver contract.

Owns the device: slots and threads, support, preparation, compilation caching, device memories. Prepared models are in ``prepared``;
what a model computes is the subclass's.

Invariants:
1. ``supports`` and ``prepare`` are called with validated models, on a thread that holds one of the device's slots.
2. Nothing that is wrong with cache arguments fails a preparation.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from aionn.drivers import caching
from aionn.drivers.caching import CacheContents, HeldFiles
from aionn.drivers.extensions import check_extension_constants, uses_known_extensions
from aionn.drivers.fenced import Alarm
from aionn.drivers.gate import SlotGate, run_on_gate
from aionn.drivers.memories import MemoryTable, Role
from aionn.drivers.prepared import BlockingPreparedModel, DirectBurst
from aionn.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import (
    Buffer,
    BufferDesc,
    BufferRole,
    CacheFileCounts,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    Model,
    PreparedModel,
    Priority,
    check_deadline_ns,
    operation_type_name,
)
from aionn.hal.real_work import real_work
from aionn.hal.tracing import section
from aionn.validation import check_buffer_roles, check_cache_files, validate_model
from fences import SyncFence
from fences import now_ns as fences_now_ns

__all__ = ["BlockingDevice", "BlockingPreparedModel", "DirectBurst"]

_logger = logging.getLogger("aionn.drivers")


class BlockingDevice(abc.ABC):
    """A device around blocking code. Set ``info``; implement ``supports`` and ``prepare``.

    Args:
        info: What never changes for a build of the driver.
        now: The clock that deadlines are compared with.
        memory_bytes_max: What all device memories together may take, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        gate: The device's slots.
        alarm: Fails fences on time.
        now: See above.
        memories: The device memories; None for a device without.
    """

    def __init__(
        self,
        info: DeviceInfo,
        *,
        now: Callable[[], int] = fences_now_ns,
        memory_bytes_max: int | None = None,
    ) -> None:
        self.info = info
        self.gate = SlotGate(info.slots, name=info.name)
        self.alarm = Alarm(now, name=f"aionn-{info.name}-alarm")
        self.now = now
        self.memories = None if memory_bytes_max is None else MemoryTable(memory_bytes_max)
        self._closed = False

    @abc.abstractmethod
    def supports(self, model: Model) -> Sequence[bool]:
        """Which operations of the main subgraph the device can run. The model has been validated. If unsure: False."""

    @abc.abstractmethod
    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        """Makes a validated and supported model ready. Runs on a thread of the device and may take its time."""

    async def status(self) -> DeviceStatus:
        """AVAILABLE; a driver whose hardware can go away overrides this."""
        return DeviceStatus.AVAILABLE

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        return await run_on_gate(self.gate, Priority.HIGH, None, lambda _: self._checked_support(model))

    def _checked_support(self, model: Model) -> tuple[bool, ...]:
        validate_model(model)
        extensions = self.info.extensions
        check_extension_constants(model, extensions)
        answer = tuple(bool(supported) for supported in self.supports(model))
        assert len(answer) == len(model.main.operations), "one answer per operation of the main subgraph"
        if not model.extension_name_to_prefix:
            return answer
        return tuple(
            supported and uses_known_extensions(model, operation, extensions)
            for supported, operation in zip(answer, model.main.operations, strict=True)
        )

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
        try:
            preference, priority = ExecutionPreference(preference), Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"prepare_model: {e}") from e
        check_deadline_ns(deadline_ns, where="prepare_model")
        held = self._held(cache) if cache is not None else None

        def prepare(_: Callable[[], bool]) -> BlockingPreparedModel:
            with section("LD_PC", f"prepare on {self.info.name}"):
                prepared = self._checked_prepare(model, preference, priority, deadline_ns)
                if held is not None:
                    self._save(held, prepared)
            return prepared

        return await run_on_gate(self.gate, priority, deadline_ns, prepare)

    def _held(self, cache: CacheFiles) -> HeldFiles | None:
        """The files to save into; None if anything is wrong with them, which never fails a preparation."""
        try:
            check_cache_files(cache, self.info.cache_files)
            return HeldFiles(cache) if cache.model else None
        except (OSError, TypeError, ValueError) as e:
            _logger.info("%s: the compilation is not saved: %s", self.info.name, e)
            return None

    def _save(self, held: HeldFiles, prepared: BlockingPreparedModel) -> None:
        try:
            contents = prepared.cached()
            if contents is not None:
                caching.save(held.files, contents, driver=self._driver)
        except (OSError, ValueError) as e:
            _logger.info("%s: the compilation is not saved: %s", self.info.name, e)

    @property
    def _driver(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__} {self.info.version}"

    def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        if deadline_ns is not None and self.now() >= deadline_ns:
            raise MissedDeadline("prepare_model: the deadline had passed before the start", transient=False)
        answer = self._checked_support(model)
        if not all(answer):
            refused = sorted(
                {
                    operation_type_name(o.type)
                    for o, ok in zip(model.main.operations, answer, strict=True)
                    if not ok
                }
            )
            raise InvalidArgument(f"prepare_model: {self.info.name} does not support {', '.join(refused)}")
        prepared = self.prepare(model, preference=preference, priority=priority, deadline_ns=deadline_ns)
        if deadline_ns is not None and self.now() >= deadline_ns:
            prepared.release()
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)
        return prepared

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        where = "prepare_model_from_cache"
        try:
            priority = Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"{where}: {e}") from e
        check_deadline_ns(deadline_ns, where=where)
        if self.info.cache_files == CacheFileCounts():
            check_cache_files(cache)
            raise GeneralFailure(f"{where}: {self.info.name} does not cache compilations")
        check_cache_files(cache, self.info.cache_files)
        try:
            held = HeldFiles(cache)
        except OSError as e:
            raise ResourceExhausted(f"{where}: no descriptor is left: {e.strerror}") from e
        return await run_on_gate(
            self.gate, priority, deadline_ns, lambda _: self._restore(held, priority, deadline_ns)
        )

    def _restore(self, held: HeldFiles, priority: Priority, deadline_ns: int | None) -> BlockingPreparedModel:
        where = "prepare_model_from_cache"
        if deadline_ns is not None and self.now() >= deadline_ns:
            raise MissedDeadline(f"{where}: the deadline had passed before the start", transient=False)
        contents = caching.load(held.files, driver=self._driver)
        try:
            return self.restore(contents, priority=priority, deadline_ns=deadline_ns)
        except InvalidArgument as e:
            # What was saved came through these checks once: the files are not what they were.
            raise GeneralFailure(f"{where}: {e}") from e

    def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        """Makes ready what ``BlockingPreparedModel.cached`` gave, unchanged. By default that is the model, prepared again.

        A driver that keeps something else overrides both.
        """
        return self._checked_prepare(
            caching.decode_model(contents), ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns
        )

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """See ``Device``."""
        prepared = [self._own(index, p) for index, p in enumerate(prepared_models)]
        # One view per prepared model: roles are compared by it, and two prepared models may share a model.
        views = {p.identity: msgspec.structs.replace(p.model) for p in prepared}
        operand = check_buffer_roles(
            description, [views[p.identity] for p in prepared], input_roles, output_roles
        )
        if self.memories is None:
            raise GeneralFailure(f"allocate: {self.info.name} has no device memories")
        roles = frozenset(
            Role(prepared[role.model_index].identity, is_output, role.io_index)
            for is_output, of_kind in ((False, input_roles), (True, output_roles))
            for role in of_kind
        )
        return self.memories.allocate(operand, roles)

    def _own(self, index: int, prepared: PreparedModel) -> BlockingPreparedModel:
        if not isinstance(prepared, BlockingPreparedModel) or prepared.device is not self or prepared._closed:
            raise InvalidArgument(f"allocate, model {index}: expected a prepared model of {self.info.name}")
        return prepared

    async def aclose(self) -> None:
        """Lets running work end and joins the device's threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        done = SyncFence("device close")

        def close() -> None:
            self.gate.close()
            self.alarm.close()
            done.signal()

        # Joining waits for running work, so it must not happen on the event loop's thread.
        closer = threading.Thread(target=close, name=f"aionn-{self.info.name}-close")
        with real_work(f"closing {self.gate}"):
            closer.start()
            await done
        closer.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
