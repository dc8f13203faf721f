"""The common part of all drivers of this package around their own code, whether that blocks or awaits.

Owns the checks of models, requests, roles and cache files, what is saved of a compilation, and the table of device memories. The
base classes for blocking drivers (``blocking``) and for those on the event loop (``asynchronous``) own where work runs, and when.

Invariants:
1. A driver's own code sees validated models alone, and of extensions only what it has declared.
2. Nothing that is wrong with cache files fails a preparation, and none that were not saved so are restored.
3. A memory is allocated only for prepared models of this device, and a role is one of a prepared model, not of its model.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec

from aionn.drivers.kit import caching
from aionn.drivers.kit.arguments import Arguments, bind, check_times
from aionn.drivers.kit.caching import CacheContents, HeldFiles
from aionn.drivers.kit.extensions import check_extension_constants, extension_types, uses_known_extensions
from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.kit.memories import MemoryTable, Role
from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted
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
    PreparedModelDefaults,
    Priority,
    Request,
    Subgraph,
    check_deadline_ns,
    check_duration_ns,
    check_fences,
    operation_type_name,
    passed_before_start,
)
from aionn.validation import check_allocation, check_buffer_roles, check_cache_files, validate_model
from fences import FenceStatus, SyncFence

__all__ = ["CheckedDevice", "CheckedPreparedModel"]

ONE_FILE_EACH = CacheFileCounts(1, 1)

_logger = logging.getLogger("aionn.driver")

_identities: Iterator[int] = itertools.count(1)
_NOTHING = Subgraph((), (), (), ())


class CheckedPreparedModel(PreparedModelDefaults, abc.ABC):
    """A model made ready, for what does not depend on how it runs.

    Attributes:
        device: The device that prepared it.
        model: The model, validated; without its content when it is closed and nothing runs.
        priority: Relative to other prepared models of the device.
        identity: A number that no other prepared model of this process ever has.
        extension_types: The operand types of the device's extensions, by the model's codes.
    """

    device: CheckedDevice

    def __init__(self, device: Any, model: Model, priority: Priority) -> None:
        self.device = device
        self.model = model
        self.priority = priority
        self.identity = next(_identities)
        self.extension_types = extension_types(model, device.info.extensions)
        self._closed = False
        # Runs begin and end on the device's threads, and closing comes from the event loop's. An append and a pop are one step for
        # other threads, and cost less than a lock around a number.
        self._runs: list[None] = []
        self._release_lock = threading.Lock()
        self._is_released = False

    def cached(self) -> CacheContents | None:
        """The content of the cache files, one piece per file of ``DeviceInfo.cache_files``; None means nothing. By default the
        model, for a device with one model file and one data file."""
        return caching.encode_model(self.model) if self.device.info.cache_files == ONE_FILE_EACH else None

    def release(self) -> None:
        """Frees what the prepared model holds. Called once, when it is closed and nothing runs: on the thread of the last run, or
        by the one who closes it."""

    def begin_run(self) -> None:
        """Keeps what the prepared model holds until ``end_run``.

        Raises:
            InvalidArgument: It was closed while the execution waited for its turn.
        """
        self._runs.append(None)
        if self._closed:  # Asked last: a close that comes now finds this run.
            self.end_run()
            CheckedPreparedModel.check_usable(self)

    def end_run(self) -> None:
        """Undoes ``begin_run``; frees the prepared model's resources if it was closed during the run and nothing else runs."""
        self._runs.pop()
        if self._closed:
            try:
                self._release_if_unused()
            except Exception:  # The execution has its result, and does not wait for this.
                _logger.exception("%s: a prepared model cannot be freed", self.device.info.name)

    def _release_if_unused(self) -> None:
        """For a closed one."""
        with self._release_lock:
            if self._runs or self._is_released:
                return
            self._is_released = True
        self.release()
        # A fenced execution that waits for its fences, perhaps without end, refers to the prepared model.
        self.model = msgspec.structs.replace(
            self.model, main=_NOTHING, referenced=(), operand_values=b"", pools=()
        )

    def check_usable(self) -> None:
        """Refuses a call that comes too late.

        Raises:
            InvalidArgument: The prepared model is closed.
        """
        if self._closed:
            raise InvalidArgument("execution: the prepared model is closed")

    def bind(
        self, request: Request, *, allow_unspecified_outputs: bool = True, is_ready: bool = True
    ) -> Arguments:
        """Checks a request against the model and maps it. See ``aionn.drivers.kit.arguments.bind`` for the arguments and errors."""
        self.check_usable()
        return bind(
            self.model,
            request,
            allow_unspecified_outputs=allow_unspecified_outputs,
            memories=self.device.memories,
            prepared=self.identity,
            extension_types=self.extension_types,
            takes_images=self.device.info.takes_images,
            is_ready=is_ready,
        )

    def bind_fenced(
        self,
        request: Request,
        wait_for: Sequence[SyncFence],
        *,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        duration_ns: int | None,
        now_ns: int,
    ) -> Arguments:
        """As ``bind``, for a fenced execution, of which everything is checked.

        Raises:
            InvalidArgument: An argument is illegal, or a fence has failed already.
            MissedDeadline: The deadline has passed.
        """
        check_times(deadline_ns, loop_timeout_ns)
        check_duration_ns(duration_ns, where="fenced execution")
        check_fences(wait_for, where="fenced execution")
        is_ready = all(fence.status != FenceStatus.PENDING for fence in wait_for)
        arguments = self.bind(request, allow_unspecified_outputs=False, is_ready=is_ready)
        if deadline_ns is not None and now_ns >= deadline_ns:
            arguments.fail()
            raise passed_before_start("fenced execution", now_ns - deadline_ns)
        return arguments

    async def aclose(self) -> None:
        """Refuses further executions, those that wait for their turn too, and frees the prepared model when what runs has ended.

        Does not wait for that. Idempotent.
        """
        self._closed = True
        self._release_if_unused()


class CheckedDevice(abc.ABC):
    """A device, for what does not depend on how it works.

    Args:
        info: The description that never changes for a build of the driver.
        memory_bytes_max: Limit of all device memories together, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        memories: The device memories; None for a device without.
        now: The clock of its deadlines.
    """

    now: Callable[[], int]

    def __init__(self, info: DeviceInfo, *, memory_bytes_max: int | None = None) -> None:
        self.info = info
        self.memories = None if memory_bytes_max is None else MemoryTable(memory_bytes_max)
        self._closed = False
        self._fenced: weakref.WeakSet[FencedLaunch] = weakref.WeakSet()

    @abc.abstractmethod
    def supports(self, model: Model) -> Sequence[bool]:
        """Whether the device can run each operation of the main subgraph. The model has been validated. If unsure: False."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Ends the device. Idempotent."""

    async def status(self) -> DeviceStatus:
        """AVAILABLE; a driver whose hardware can go away overrides this."""
        return DeviceStatus.AVAILABLE

    # Fenced executions

    @abc.abstractmethod
    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """See ``Timers``."""

    @abc.abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """See ``Timers``."""

    def begin_fenced(self, fenced: FencedLaunch, wait_for: Sequence[SyncFence]) -> None:
        """Begins a fenced execution, which the end of the device ends."""
        self._fenced.add(fenced)
        fenced.begin(wait_for)

    def end_fenced(self) -> None:
        """Ends the fenced executions: the device is closed."""
        for fenced in list(self._fenced):
            fenced.close()

    # Models

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

    def _check_supported(self, model: Model, answer: Sequence[bool]) -> None:
        operations = zip(model.main.operations, answer, strict=True)
        refused = sorted({operation_type_name(o.type) for o, is_supported in operations if not is_supported})
        if refused:
            raise InvalidArgument(f"prepare_model: {self.info.name} does not support {', '.join(refused)}")

    @staticmethod
    def _check_terms(
        preference: ExecutionPreference, priority: Priority, deadline_ns: int | None, where: str
    ) -> tuple[ExecutionPreference, Priority]:
        try:
            preference, priority = ExecutionPreference(preference), Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"{where}: {e}") from e
        check_deadline_ns(deadline_ns, where=where)
        return preference, priority

    @staticmethod
    def _check_time_left(deadline_ns: int | None, now_ns: int, where: str) -> None:
        if deadline_ns is not None and now_ns >= deadline_ns:
            raise passed_before_start(where, now_ns - deadline_ns)

    # Compilation caching

    @property
    def _driver(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__} {self.info.version}"

    def _held(self, cache: CacheFiles | None) -> HeldFiles | None:
        """The files to save into; None if anything is wrong with them, which never fails a preparation."""
        if cache is None:
            return None
        try:
            check_cache_files(cache, self.info.cache_files)
            return HeldFiles(cache) if cache.model else None
        except (OSError, TypeError, ValueError) as e:
            _logger.info("%s: the compilation is not saved: %s", self.info.name, e)
            return None

    def _save(self, held: HeldFiles, prepared: CheckedPreparedModel) -> None:
        try:
            contents = prepared.cached()
            if contents is not None:
                caching.save(held.files, contents, driver=self._driver)
        except OSError as e:
            _logger.warning("%s: the compilation is not saved: %s", self.info.name, e.strerror or e)
        except ValueError as e:
            _logger.info("%s: the compilation is not saved: %s", self.info.name, e)

    def _held_to_load(self, cache: CacheFiles) -> HeldFiles:
        where = "prepare_model_from_cache"
        if self.info.cache_files == CacheFileCounts():
            check_cache_files(cache)
            raise GeneralFailure(f"{where}: {self.info.name} does not cache compilations")
        check_cache_files(cache, self.info.cache_files)
        try:
            return HeldFiles(cache)
        except OSError as e:
            raise ResourceExhausted(f"{where}: no descriptor is left: {e.strerror}") from e

    def _load(self, held: HeldFiles) -> CacheContents:
        return caching.load(held.files, driver=self._driver)

    @staticmethod
    def _not_what_was_saved(error: InvalidArgument) -> GeneralFailure:
        # The saved model passed these checks before: the files have changed.
        return GeneralFailure(f"prepare_model_from_cache: {error}")

    # Device memories

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """See ``Device``."""
        check_allocation(description, prepared_models, input_roles, output_roles)
        prepared = [self._own(index, p) for index, p in enumerate(prepared_models)]
        identities = [p.identity for p in prepared]
        operand = check_buffer_roles(
            description, [p.model for p in prepared], input_roles, output_roles, identities=identities
        )
        if self.memories is None:
            raise GeneralFailure(f"allocate: {self.info.name} has no device memories")
        roles = frozenset(
            Role(identities[role.model_index], is_output, role.io_index)
            for is_output, of_kind in ((False, input_roles), (True, output_roles))
            for role in of_kind
        )
        return self.memories.allocate(operand, roles)

    def _own(self, index: int, prepared: PreparedModel) -> CheckedPreparedModel:
        is_own = isinstance(prepared, CheckedPreparedModel) and prepared.device is self
        if not isinstance(prepared, CheckedPreparedModel) or not is_own or prepared._closed:
            raise InvalidArgument(f"allocate, model {index}: expected a prepared model of {self.info.name}")
        return prepared

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
