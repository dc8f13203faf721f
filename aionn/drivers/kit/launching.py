"""The forms of execution of a prepared model, from one: the driver launches.

Owns the synchronous, asynchronous, fenced and reusable execution and the burst of drivers that are made from this package.

Invariants:
1. Callbacks and fences are finished exactly once, in the thread in which the launch ends.
2. A request that is rejected is rejected by every form with the same status, before anything is launched.

Source: obligations in ``aionn.hal.device``.
"""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from aionn.drivers.kit.arguments import Arguments, check_times
from aionn.drivers.kit.checked import CheckedPreparedModel
from aionn.drivers.kit.fenced import FencedLaunch
from aionn.errors import Error, ErrorStatus, InvalidArgument, ResourceExhausted, status_of
from aionn.hal import (
    NO_TIMING,
    BurstByLaunch,
    BurstDefaults,
    ExecutionCallback,
    FencedExecution,
    Launch,
    Memory,
    Model,
    PreparedModel,
    PreparedModelByLaunch,
    Priority,
    Request,
    ResendingExecution,
)
from aionn.validation import check_memory_identifiers
from fences import SyncFence

__all__ = ["BoundRequests", "DirectBurst", "LaunchingPreparedModel"]

_T = TypeVar("_T")

BOUND_MAX = 8
"""Requests that a prepared model remembers with their arguments: as many as a compilation keeps request memories for."""

MEMORIES_MAX = 1 << 16
"""Memories that one burst remembers."""


class BoundRequests(Generic[_T]):
    """Requests with an object made of their bound arguments, for requests that come again as the same objects.

    A request never changes, so that one whose arguments are views of shared memory is checked and mapped once: the engine then
    knows the arrays again as well. A request that its owner drops is forgotten, and with it the views of its memory.

    Args:
        most: Requests that are remembered.
    """

    __slots__ = ("_entries", "_most")

    def __init__(self, most: int = BOUND_MAX) -> None:
        self._most = most
        self._entries: dict[int, tuple[weakref.ref[Request], _T]] = {}

    def find(self, request: Request) -> _T | None:
        """The object that was kept for a request; None where it is not known, or a pool of it was closed."""
        entry = self._entries.get(id(request))
        if entry is None or entry[0]() is not request:
            return None
        for pool in request.pools:
            if not isinstance(pool, Memory) or pool.is_closed:
                return None
        return entry[1]

    def keep(self, request: Request, arguments: Arguments, made: _T) -> None:
        """Remembers a request, in place of the one that was bound first where there are too many.

        Args:
            request: The request.
            arguments: To which it was bound.
            made: An object without a reference to the request.
        """
        if not arguments.is_plain:
            return  # The contents of device memories and images are looked at in each execution.
        if type(request) is not Request or not all(
            type(listed) is tuple for listed in (request.inputs, request.outputs, request.pools)
        ):
            return  # It may change.
        entries, key = self._entries, id(request)
        while len(entries) >= self._most:
            # Other threads may drop entries while this one counts them.
            entries.pop(next(iter(list(entries)), key), None)
        entries[key] = weakref.ref(request, lambda _: entries.pop(key, None)), made

    def clear(self) -> None:
        """Forgets all of them."""
        self._entries.clear()


class LaunchingPreparedModel(PreparedModelByLaunch, CheckedPreparedModel):
    """A model made ready by a driver that launches. Implement ``begin``."""

    takes_priority = True

    def __init__(self, device: Any, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        self._requests: BoundRequests[Arguments] = BoundRequests()

    @abc.abstractmethod
    def begin(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
    ) -> Launch:
        """Launches a bound request, in a thread in which the device calls (``Timers.call``). Never blocks.

        Args:
            arguments: The result of ``bind``. They are settled when the execution ends, and given back where this raises.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            priority: Of this execution; None means the prepared model's.

        Raises:
            Error: The device takes no more.
        """

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
        check_times(deadline_ns, loop_timeout_ns)
        arguments = self._requests.find(request)
        if arguments is None:
            arguments = self.bind(request)
            self._requests.keep(request, arguments, arguments)
        else:
            self.check_usable()
        return self.begin(
            arguments,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            priority=priority,
        )

    async def aclose(self) -> None:
        """See the base class."""
        self._requests.clear()
        await super().aclose()

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ErrorStatus:
        """See ``PreparedModel``. The callback comes from the thread in which the launch ends, or from here when it fails."""
        try:
            launch = self.launch(
                request,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
                priority=priority,
            )
        except Error as e:
            callback(status_of(e), (), NO_TIMING)
            return status_of(e)
        launch.done.add_callback(functools.partial(_notify, callback, launch))
        return ErrorStatus.NONE

    async def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[SyncFence],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        duration_ns: int | None = None,
    ) -> FencedExecution:
        """See ``PreparedModel``."""
        arguments = self.bind_fenced(
            request,
            wait_for,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            duration_ns=duration_ns,
            now_ns=self.device.now(),
        )

        def launch(limit_ns: int | None) -> Launch:
            return self.begin(
                arguments,
                measure=measure,
                deadline_ns=limit_ns,
                loop_timeout_ns=loop_timeout_ns,
                priority=None,
            )

        fenced = FencedLaunch(
            self.device, launch, arguments, measure=measure, deadline_ns=deadline_ns, duration_ns=duration_ns
        )
        self.device.begin_fenced(fenced, wait_for)
        return FencedExecution(fenced.fence, fenced.get_execution_info)

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> DirectBurst:
        """A burst without queues, for a device in this process. A driver process puts queues around ``execute_bound``."""
        self.check_usable()
        return DirectBurst(self)

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> ResendingExecution:
        """See ``PreparedModel``."""
        check_times(None, loop_timeout_ns)
        self.bind(request).give_back()
        return ResendingExecution(self, request, measure, loop_timeout_ns)


def _notify(callback: ExecutionCallback, launch: Launch, done: SyncFence) -> None:
    try:
        result = launch.outcome()
    except BaseException as e:  # Also SystemExit of a driver: the caller waits for the callback.
        callback(status_of(e), (), NO_TIMING)
        return
    enough = result.output_sufficient_size
    status = ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    callback(status, result.output_shapes, result.timing)


class DirectBurst(BurstByLaunch, BurstDefaults):
    """A burst of a device in this process: pools are mapped already, so that an identifier only names its first memory."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared = prepared
        self._memories: dict[int, Memory] = {}
        self._known: tuple[weakref.ref[Request], tuple[int, ...]] | None = None
        self._launch: Launch | None = None

    def in_flight(self) -> Launch | None:
        """See ``Burst``."""
        launch = self._launch
        return None if launch is None or launch.is_done else launch

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """See ``Burst``. The device itself orders an execution after one that was cancelled."""
        known = self._known
        # The frames of a stream come with the same few requests, which do not change.
        is_known = known is not None and known[0]() is request and known[1] == tuple(memory_identifiers)
        if not is_known:
            check_memory_identifiers(request, memory_identifiers)
        last = self._launch
        if last is not None and not last.is_done and not last.is_cancelled:
            raise InvalidArgument("burst: an execution is in flight already")
        if not is_known:
            request = self._with_remembered(request, memory_identifiers)
        self._launch = launch = self._prepared.launch(
            request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
        )
        return launch

    def _with_remembered(self, request: Request, memory_identifiers: Sequence[int]) -> Request:
        """The request on the memories that its identifiers stand for: those that came with their first use."""
        pools = list(request.pools)
        for index, (pool, identifier) in enumerate(zip(pools, memory_identifiers, strict=True)):
            if identifier != -1 and isinstance(pool, Memory):
                if identifier not in self._memories and len(self._memories) >= MEMORIES_MAX:
                    raise ResourceExhausted(f"burst: more than {MEMORIES_MAX} memories", transient=False)
                pools[index] = self._memories.setdefault(identifier, pool)
        if all(a is b for a, b in zip(pools, request.pools, strict=True)):
            if type(request) is Request and type(request.pools) is tuple:
                self._known = weakref.ref(request), tuple(memory_identifiers)
            return request
        return msgspec.structs.replace(request, pools=tuple(pools))

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``Burst``."""
        if memory_identifier < -1:
            raise InvalidArgument(
                f"burst: expected a memory identifier of at least -1, got {memory_identifier}"
            )
        self._known = None
        self._memories.pop(memory_identifier, None)

    async def aclose(self) -> None:
        """Forgets the memories, and the launch when that has ended. Idempotent."""
        self._known = None
        self._memories.clear()
        self._launch = self.in_flight()
