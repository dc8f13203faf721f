"""A model on the devices of several nodes, and streams that run on one of them each.

Owns the compilation on each device, the measurement there, and the way back of a device that was lost. ``places`` decides;
``placed`` has the streams.

Invariants:
1. A device gets streams only when the model is prepared and measured there: a stream that moves waits for neither.
2. Objects of a lost device are closed when the last stream has left them.
3. A lost device is asked again every ``RETRY_S`` until it is back, or this object is closed.
4. Where all devices are lost, a stream that needs one waits for the first that is back, at most ``ALL_LOST_S_MAX``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import AsyncIterable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio
import numpy as np

from aionn.errors import DeadObject, DeviceUnavailable, Error, InvalidArgument, NotAdmitted, ResourceExhausted
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.hal import Model, Priority
from aionn.platform.loops import finish, finish_all
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.background import Task
from aionn.runtime.clock import now_ns
from aionn.runtime.compilation import Compilation
from aionn.runtime.devices import REMOTE, RuntimeDevice
from aionn.runtime.executions.results import PriorityName, Result
from aionn.runtime.executions.writing import ViewsWriter
from aionn.runtime.fleet.measured import DeviceTime, Execution, device_time
from aionn.runtime.fleet.placed import Leg, PlacedStream, StreamRequest
from aionn.runtime.fleet.places import Drained, StreamPlaces
from aionn.runtime.fleet.relay import Feed
from aionn.runtime.guarantees.measuring import COLD_EXECUTIONS, measure
from aionn.runtime.guarantees.terms import Seconds
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.memory.real_values import Writer
from aionn.runtime.runtime import Runtime

__all__ = ["FleetStreams"]

_T = TypeVar("_T")

RETRY_S = 1.0
"""Pause between attempts to reach a lost device: a machine starts in many seconds, and an attempt may take five."""

ATTEMPTS_PER_DEVICE = 2
"""Most attempts to begin a stream, for each device: one may refuse it, and one that was lost may be back in that time."""

ALL_LOST_S_MAX = 10.0
"""Longest wait for a device while all are lost: an attempt to reach one begins after a second and takes up to five, and then the
model is prepared and measured there."""

_logger = logging.getLogger("aionn.manager")


class PreparedDevice:
    """The model on one device.

    Attributes:
        device: The device.
        net: The model there.
        time: The time of a frame.
        users: Number of streams with a burst there.
        is_retired: Whether the device was lost: it is closed when there is no user any more.
    """

    def __init__(self, device: RuntimeDevice, net: Compilation, time: DeviceTime) -> None:
        self.device = device
        self.net = net
        self.time = time
        self.users = 0
        self.is_retired = False


class FleetStreams(InThisProcess):
    """Streams of one model over the devices of several nodes; use it with ``async with``.

    The model is compiled on each device, and measured there by some executions; a device that cannot run it is in ``unavailable``.
    Each stream has a reservation on one device. When that is lost, or drains, the stream is admitted elsewhere and continues.

    Args:
        runtime: Has the devices.
        model: A model, or the path of a .tflite or .onnx file. Its shapes must be known.
        devices: Names of devices; None takes the devices of nodes.
        priority: For its executions.
        options: As for ``Runtime.compile``: ``preference``, ``dimensions``, ``input_shapes``, ``values``.

    Attributes:
        unavailable: The devices that are not used, with the reasons.
        background: Where its tasks live.
    """

    INSTEAD = "each process opens its own"

    def __init__(
        self,
        runtime: Runtime,
        model: Model | str | os.PathLike[str],
        *,
        devices: Sequence[str] | None = None,
        priority: PriorityName | Priority = Priority.MEDIUM,
        **options: Any,
    ) -> None:
        if not isinstance(runtime, Runtime):
            raise InvalidArgument(f"FleetStreams: expected a runtime, got {runtime!r}")
        if excluded := [name for name in ("deadline", "recover", "allow_fallback") if name in options]:
            raise InvalidArgument(
                f"FleetStreams: {excluded[0]} cannot be an option of the streams of a fleet"
            )
        self._runtime = runtime
        self.background = runtime.background
        self._compile = functools.partial(runtime.compile, model, priority=priority, **options)
        self._names = None if devices is None else tuple(devices)
        self._places = StreamPlaces()
        self._prepared: dict[str, PreparedDevice] = {}
        self._retired: set[PreparedDevice] = set()
        self._streams: dict[str, PlacedStream[Any]] = {}
        self._returns: dict[str, tuple[Task, anyio.Event]] = {}
        self._state: Literal["new", "open", "closed"] = "new"
        self._waiting: set[anyio.Event] = set()
        self._joining: set[str] = set()
        self.unavailable: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<FleetStreams {self._state}, {len(self._streams)} streams on {', '.join(self._prepared) or 'no device'}>"

    # --- Devices ---

    async def __aenter__(self) -> Self:
        """Prepares the model on all devices, concurrently.

        Raises:
            InvalidArgument: The model or a name is wrong, or it was opened before.
            DeviceUnavailable: No device can run it; with the reason of each.
        """
        if self._state != "new":
            raise InvalidArgument("FleetStreams: can be opened once; make another one")
        devices = self._wanted()
        self._state = "open"
        try:
            async with anyio.create_task_group() as tasks:
                for device in devices:
                    tasks.start_soon(self._join, device)
            if not self._prepared:
                reasons = "; ".join(f"{name}: {why}" for name, why in self.unavailable.items())
                raise DeviceUnavailable(
                    f"FleetStreams: no device can run the model ({reasons or 'none is there'})"
                )
        except BaseException:
            await finish(self.aclose())
            raise
        return self

    def _wanted(self) -> list[RuntimeDevice]:
        if self._names is not None:
            return [self._runtime.device(name) for name in self._names]
        return [device for device in self._runtime.devices if device.driver == REMOTE]

    async def join(self, node: str) -> str:
        """Takes up a node that was not there before: the runtime has its device from now on. Streams that are placed or moved later
        may run there.

        Args:
            node: Its address, or the name of a device of the runtime that is not used yet.

        Returns:
            The name of the device.

        Raises:
            InvalidArgument: It is neither, or the device is used already.
            DeviceUnavailable: The node cannot be reached, or another device has the name of its device.
            Error: The device cannot run the model.
        """
        self._check_open()
        device = next((one for one in self._runtime.devices if one.name == node), None)
        if device is None:
            discovery = self._runtime.discovery
            device = await discovery.add_node(parse_node(node, "FleetStreams.join"), self._runtime.tasks)
        name = device.name
        if name in self._prepared or name in self._joining or self._is_returning(name):
            raise InvalidArgument(f"FleetStreams: {name} is used already")
        self._joining.add(name)
        try:
            prepared = await self._prepare(device)
        finally:
            self._joining.discard(name)
        if self._state != "open":
            await finish(_closed(prepared.net.aclose))
            self._check_open()
        self._joined(prepared)
        return name

    def _is_returning(self, name: str) -> bool:
        return name in self._returns and not self._returns[name][1].is_set()

    async def _join(self, device: RuntimeDevice) -> None:
        try:
            prepared = await self._prepare(device)
        except Error as e:
            self.unavailable[device.name] = str(e)
        else:
            self._joined(prepared)

    def _joined(self, prepared: PreparedDevice) -> None:
        name = prepared.device.name
        self.unavailable.pop(name, None)
        self._prepared[name] = prepared
        net, slots = prepared.net, prepared.device.info.slots
        sizes = _bytes(net.inputs), _bytes(net.outputs)
        self._places.join(name, prepared.time, slots=slots, sizes=sizes)
        self._wake()

    async def _prepare(self, device: RuntimeDevice) -> PreparedDevice:
        net = await self._compile(devices=device.name)
        try:
            return PreparedDevice(device, net, await self._measured(net, device))
        except BaseException:
            await finish(_closed(net.aclose))
            raise

    async def _measured(self, net: Compilation, device: RuntimeDevice) -> DeviceTime:
        inputs = [np.zeros(spec.dimensions, spec.dtype) for spec in net.inputs]
        executions: list[Execution] = []

        async def execute() -> Result:
            result = await burst.execute(inputs, priority="high", measure=True)
            executions.append(Execution(result.total_ns - result.queued_ns, result.timing.time_in_driver_ns))
            return result

        async with net.burst(slots=1) as burst:
            await measure(execute)
        device.reservations.restore()
        rate = device.hal.bytes_per_s if isinstance(device.hal, NodeDevice) else 0.0
        return device_time(
            executions[COLD_EXECUTIONS:],
            up_bytes=_bytes(net.inputs),
            down_bytes=_bytes(net.outputs),
            bytes_per_s=rate,
        )

    def _lost(self, prepared: PreparedDevice, error: Error) -> None:
        """A device is lost, as a stream has noticed: all of its streams get new places. Idempotent."""
        name = prepared.device.name
        if self._prepared.get(name) is not prepared:
            return  # It was noticed before, and may be back.
        del self._prepared[name]
        _logger.warning("%s is lost, and its streams move: %s", name, error)
        self.unavailable[name] = str(error)
        self._places.lose(name, now_ns())
        prepared.is_retired = True
        self._retired.add(prepared)
        self._close_unused(prepared)
        if self._state == "open":
            ended = anyio.Event()
            task = self.background.start_execution(self._return(prepared.device), lambda _: ended.set())
            self._returns[name] = task, ended

    async def _return(self, device: RuntimeDevice) -> None:
        while self._state == "open":
            await anyio.sleep(RETRY_S)
            try:
                prepared = await self._prepare(device)
            except Error as e:
                self.unavailable[device.name] = str(e)
                continue
            self._joined(prepared)
            _logger.info("%s is back", device.name)
            return

    def _close_unused(self, prepared: PreparedDevice) -> None:
        if prepared.is_retired and not prepared.users and prepared in self._retired:
            self._retired.discard(prepared)
            self.background.close_soon(functools.partial(_closed, prepared.net.aclose))

    # --- Streams ---

    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        period: Seconds,
        deadline: Seconds | None = None,
        jitter: Seconds | None = None,
        name: str,
        on_late: Literal["drop", "deliver"] = "drop",
        measure: bool = False,
    ) -> PlacedStream[_T]:
        """A stream with a guarantee on one of the devices; arguments as for ``Burst.stream``, ``guarantee=True``.

        Args:
            source: Gives the items. It is read on when the stream moves.
            into: See ``Burst.stream``.
            period: Least seconds between the captures of two items.
            deadline: Seconds from a capture to its result here; None means the period.
            jitter: See ``Burst.stream``.
            name: Names the stream: no two have the same name.
            on_late: See ``Burst.stream``.
            measure: Whether ``timing`` is wanted.

        Raises:
            InvalidArgument: An argument is illegal, or another stream has the name.
        """
        self._check_open()
        if name in self._streams:
            raise InvalidArgument(f'FleetStreams: there is a stream "{name}" already')
        request = StreamRequest(
            source, into, period, deadline, jitter, name, on_late=on_late, measure=measure
        )
        stream = self._streams[name] = PlacedStream[_T](self, request)
        return stream

    def _check_open(self) -> None:
        if self._state != "open":
            raise InvalidArgument("FleetStreams: use it with async with")

    @property
    def places(self) -> Mapping[str, str]:
        """The device of each stream that has a place."""
        return self._places.devices

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that can be used now."""
        return tuple(self._prepared)

    @property
    def has_device(self) -> bool:
        """Whether a device can be used now: not all are lost."""
        return bool(self._prepared)

    async def begin(self, stream: PlacedStream[Any], *, waits: bool = True) -> Leg:
        """Has a stream admitted on a device, and its burst open there.

        Args:
            stream: The stream.
            waits: Whether it waits for the return of a device where all are lost.

        Raises:
            NotAdmitted: No device has room, with the reason of the last one that was asked; or all are lost.
            Error: Any other failure.
        """
        name = stream.request.name
        self._places.begin(stream.request.terms)
        until_s = anyio.current_time() + (ALL_LOST_S_MAX if waits else 0.0)
        for _ in range(ATTEMPTS_PER_DEVICE * max(1, len(self._runtime.devices))):
            if stream.is_over:
                raise InvalidArgument("stream: has ended")
            device = await self._next_device(stream, until_s)
            prepared = self._prepared[device]
            try:
                leg = await self._begun(prepared, stream)
            except NotAdmitted as e:
                self._places.refused(name, e)
                continue
            except (DeadObject, DeviceUnavailable) as e:
                self._lost(prepared, e)
                continue
            except Exception:
                self._places.release(name)
                raise
            if self._places.device_of(name) == device:
                return leg
            await finish(self.end(leg))  # The device was lost, or drains, in the meantime.
        self._places.release(name)
        raise ResourceExhausted(
            f'stream "{name}": devices are lost and come back all the time', transient=True
        )

    async def _next_device(self, stream: PlacedStream[Any], until_s: float) -> str:
        """The device that is to be asked for a stream; where all are lost, the first that is back by a time of the loop."""
        name = stream.request.name
        while True:
            try:
                return self._places.next(name, now_ns())
            except NotAdmitted:
                if self.has_device:
                    raise
            with anyio.move_on_after(max(0.0, until_s - anyio.current_time())):
                await self._returned(stream)
            if stream.is_over:
                raise InvalidArgument("stream: has ended")
            if not self.has_device:
                reasons = "; ".join(f"{device}: {why}" for device, why in self.unavailable.items())
                raise NotAdmitted(
                    f'stream "{name}": all devices are lost, and none was back within {ALL_LOST_S_MAX:g} s ({reasons})'
                )

    async def _returned(self, stream: PlacedStream[Any]) -> None:
        """Waits until a device can be used, or the stream has ended."""
        while not (self.has_device or stream.is_over):
            changed = anyio.Event()
            self._waiting.add(changed)
            try:
                await changed.wait()
            finally:
                self._waiting.discard(changed)

    def _wake(self) -> None:
        for changed in self._waiting:
            changed.set()

    async def _begun(self, prepared: PreparedDevice, stream: PlacedStream[Any]) -> Leg:
        request = stream.request
        prepared.users += 1
        burst = prepared.net.burst(slots=request.buffers)
        try:
            await burst.__aenter__()
            feed = Feed(stream.relay)
            inner = burst.stream(
                feed,
                into=request.into,
                period=request.period,
                deadline=request.deadline,
                jitter=request.jitter,
                name=request.name,
                on_late=request.on_late,
                measure=request.measure,
                guarantee=True,
            )
            inner.measured_before(prepared.time.measured)
            await inner.admit()
        except BaseException:
            await finish(_closed(burst.aclose))
            self._left(prepared)
            raise
        left, lost = functools.partial(self._left, prepared), functools.partial(self._lost, prepared)
        return Leg(prepared.device.name, burst, inner, feed, left, lost)

    def _left(self, prepared: PreparedDevice) -> None:
        prepared.users -= 1
        self._close_unused(prepared)

    async def end(self, leg: Leg) -> None:
        """Ends a stream's part on a device."""
        leg.stream.cancel()
        await _closed(leg.burst.aclose)
        leg.left()

    def end_soon(self, leg: Leg) -> None:
        """As ``end``, without a wait."""
        leg.stream.cancel()
        self.background.close_soon(functools.partial(self.end, leg))

    def forget(self, stream: PlacedStream[Any]) -> None:
        """A stream has ended. Idempotent."""
        name = stream.request.name
        if self._streams.get(name) is stream:
            del self._streams[name]
            self._places.release(name)
            self._wake()

    # --- Drain ---

    async def drain(self, device: str) -> Drained:
        """A device gets no further streams, and those that it has continue elsewhere: each was admitted there before it leaves, at
        its next result, and no frame is lost. A stream for which no other device has room stays until it ends.

        Returns:
            The new device of each stream that moves, and the reason of each that stays.

        Raises:
            InvalidArgument: There is no such device.
        """
        self._check_device(device)
        drained = self._places.drain(device, now_ns())
        for name in tuple(drained.placed):
            stream = self._streams.get(name)
            if stream is None:
                continue
            try:
                moved = await stream.move()
            except NotAdmitted as e:
                del drained.placed[name]
                drained.refused[name] = e
            else:
                drained.placed[name] = moved
        return drained

    def restore(self, device: str) -> None:
        """A device that was drained gets streams again.

        Raises:
            InvalidArgument: There is no such device.
        """
        self._check_device(device)
        self._places.restore(device)

    def _check_device(self, device: str) -> None:
        if device not in self._prepared:
            raise InvalidArgument(
                f"FleetStreams: expected one of {', '.join(self._prepared) or 'no device'}, got {device!r}"
            )

    # --- The end ---

    async def aclose(self) -> None:
        """Ends all streams and closes the compilations. Idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        for stream in list(self._streams.values()):
            stream.cancel()
        for task, _ in self._returns.values():
            task.cancel()
        for _, ended in self._returns.values():
            await finish(ended.wait())
        prepared, self._prepared = [*self._prepared.values(), *self._retired], {}
        self._retired.clear()
        closings: list[Callable[[], Coroutine[Any, Any, None]]] = [
            functools.partial(_closed, one.net.aclose) for one in prepared
        ]
        await finish_all(closings)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(math.prod(spec.dimensions) * spec.dtype.itemsize for spec in specs)


async def _closed(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with contextlib.suppress(Error):  # The device is gone, and with it everything that this would have freed.
        await close()
