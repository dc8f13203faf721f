"""Requests of both transports on their way to a device: admission, terms, conversion, execution, and the end in order.

Owns the number of requests under way and the states of the door. ``grpc_server`` and ``rest_app`` bring requests and take answers.

Invariants:
1. At most ``EXECUTIONS_MAX`` requests are under way, from their arrival until the transport has taken the answer; another one is
   refused immediately. None waits outside of the scheduler, where deadlines would not count.
2. A request that was accepted before the drain began is answered, as far as the limit of the drain allows; later ones are refused.
3. Large values are converted in threads, a bounded number of them.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar

import anyio
import anyio.to_thread

import aionn
from aionn.oip.models import EXECUTIONS_MAX, ServedModel
from aionn.oip.refusals import NotServed, Unavailable
from aionn.oip.requests import VERSION, Answer, Request
from aionn.oip.tensors import Array
from aionn.oip.terms import terms_of

__all__ = ["Door", "DoorState", "Place"]

_logger = logging.getLogger("aionn.manager")

_T = TypeVar("_T")

LARGE_BYTES: Final = 32 << 10
"""Bytes that are converted one by one in the event loop: a quarter of a millisecond of JSON. More are converted in a thread."""

CONVERTERS_MAX: Final = 2
"""Threads that convert values: they share the interpreter's lock with the event loop, which needs its turn."""


class DoorState(enum.Enum):
    """Whether requests are accepted."""

    SERVING = "serving"
    DRAINING = "draining"


class Place:
    """The place of one request among those under way; use it with ``with``, or leave it."""

    def __init__(self, door: Door) -> None:
        self._door: Door | None = door

    def leave(self) -> None:
        """Makes room for another request. Idempotent."""
        door, self._door = self._door, None
        if door is not None:
            door._left()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()


class Door:
    """The models of one server.

    Args:
        models: By name.
        executions_max: Requests under way at the same time.
    """

    def __init__(self, models: Mapping[str, ServedModel], *, executions_max: int = EXECUTIONS_MAX) -> None:
        self.models = dict(models)
        self.state = DoorState.SERVING
        self._executions_max = executions_max
        self._under_way = 0
        self._idle = anyio.Event()
        self._converters = anyio.CapacityLimiter(CONVERTERS_MAX)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state is DoorState.SERVING

    @property
    def under_way(self) -> int:
        """Number of requests that were accepted and whose answer the transport has not taken."""
        return self._under_way

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether requests for a model are accepted; False for one that is not served."""
        return self.is_ready and name in self.models and version in ("", VERSION)

    def model(self, name: str, version: str) -> ServedModel:
        """A model.

        Raises:
            NotServed: No model has this name and version.
        """
        found = self.models.get(name)
        if found is None:
            raise NotServed(f"model {name!r:.160} is not served")
        found.check_version(version)
        return found

    def enter(self) -> Place:
        """A place for a request that has arrived.

        Raises:
            Unavailable: The door drains.
            ResourceExhausted: Too many requests are under way; transient.
        """
        if self.state is not DoorState.SERVING:
            raise Unavailable("the server is ending: it accepts nothing new")
        if self._under_way >= self._executions_max:
            raise aionn.ResourceExhausted(
                f"server: {self._under_way} requests are under way, no more are accepted", transient=True
            )
        self._under_way += 1
        return Place(self)

    def _left(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def infer(self, request: Request, arrived_ns: int, remaining_ns: int | None) -> Answer:
        """Executes one request, whose place the caller has.

        Args:
            request: The request.
            arrived_ns: When it arrived.
            remaining_ns: The time that its transport leaves; None for any.

        Raises:
            NotServed: There is no such model.
            InvalidArgument: The request does not fit the model.
            Error: As ``Burst.execute``.

        Cancelled, the execution is cancelled.
        """
        model = self.model(request.model, request.version)
        deadline_ns, priority = terms_of(request.parameters, arrived_ns, remaining_ns)
        wanted = model.wanted(request.outputs, request.is_binary)
        checked = model.check_inputs(request.inputs)

        def load() -> dict[int, Array]:
            return {index: tensor.load(dtype) for index, tensor, dtype in checked}

        values = await self.convert(sum(tensor.work_bytes for tensor in request.inputs), load)
        found = await model.execute(values, deadline_ns, priority)
        descriptions = model.description.outputs
        return Answer(
            model.name,
            request.id,
            tuple((descriptions[index], found[index], is_binary) for index, is_binary in wanted),
        )

    async def convert(self, work_bytes: int, work: Callable[[], _T]) -> _T:
        """Calls a function that converts so many bytes one by one: here, or in a thread where they are many."""
        if work_bytes <= LARGE_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._converters)

    async def drain(self, limit_s: float) -> bool:
        """Accepts nothing new, and waits until the accepted requests are answered.

        Args:
            limit_s: Limit of the wait.

        Returns:
            Whether all were answered.
        """
        self.state = DoorState.DRAINING
        with anyio.move_on_after(limit_s):
            while self._under_way:
                self._idle = anyio.Event()
                await self._idle.wait()
        if self._under_way:
            _logger.warning("oip: %d requests were cut off at the end", self._under_way)
        return not self._under_way
