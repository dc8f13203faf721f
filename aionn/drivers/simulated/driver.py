"""Simulated devices: described hardware that takes its time on the event loop's clock, real or virtual.

Owns the life of an execution on such a device: launch, boundaries between operations, preemption, faults. ``profiles`` defines
durations and the draws of a seed; results come from the reference driver's interpreter, or are left out where only time matters.

Invariants:
1. An execution ends at the time that the profile gives for it, to the nanosecond of a virtual clock. In real time it ends later if
   computing its result took longer.
2. It stops only at boundaries that the profile allows, and only when it is late, cancelled, or a higher priority waits.
3. Profile, seed and the order of the starts decide every noise and every fault.
4. A device that died answers DEAD_OBJECT to everything prepared before; preparing again revives it, as a driver process is started
   again. One that hangs keeps its slot until it is closed.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

import fences
from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.kit.asynchronous import AsyncDevice, AsyncPreparedModel
from aionn.drivers.kit.launching import DirectBurst
from aionn.drivers.kit.loop_gate import LoopControl, left_s
from aionn.drivers.simulated.profiles import (
    PROFILES,
    ClockState,
    DeviceProfile,
    Draw,
    Fault,
    clock_share_at,
    draws,
    model_cost,
    operation_durations_ns,
    profile_named,
    run_operations,
    supports_operation,
    unsupported_reason,
)
from aionn.errors import DeadObject, Error, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    CancelCapability,
    Capabilities,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    FeatureLevel,
    Model,
    OperandPerformance,
    OperandType,
    OperationType,
    OutputShape,
    PerformanceInfo,
    Priority,
    dimensions_are_known,
    operand_dtype,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.ops import CONTRACTS
from aionn.platform.numbers import POSITIVE_S_MIN, checked_seconds
from aionn.scheduler.plain_policy import PlainPolicy

__all__ = ["SimulatedDevice", "SimulatedPreparedModel", "SimulatedStatistics", "info_for"]

Array = npt.NDArray[Any]
Results = Literal["computed", "zeros"]

REFERENCE_RATE = 1e9
REFERENCE_POWER_W = 10.0
"""The base of the capabilities' ratios: the order of the reference driver's rate on one core."""

SEED_DEFAULT = 0


class SimulatedStatistics(msgspec.Struct, frozen=True):
    """Counts since the device was made.

    Attributes:
        started: Executions that got a slot.
        finished: Those that gave results.
        failed: Those that ended otherwise.
        preempted: Number of preemptions.
        busy_ns: Time that slots were in use, added up.
        energy_j: The energy of that time.
    """

    started: int = 0
    finished: int = 0
    failed: int = 0
    preempted: int = 0
    busy_ns: int = 0
    energy_j: float = 0.0


def info_for(name: str, profile: DeviceProfile | None = None) -> DeviceInfo:
    """The DeviceInfo of the simulated device of a name before it is made.

    Raises:
        InvalidArgument: No profile was given, and none is ready under that name.
    """
    profile = profile_named(name) if profile is None else profile
    return DeviceInfo(
        name=name,
        type=profile.device_type,
        version="1",
        feature_level=FeatureLevel.LEVEL_7,
        capabilities=_capabilities(profile),
        slots=profile.slots,
        cancel=profile.cancel,
    )


def _capabilities(profile: DeviceProfile) -> Capabilities:
    ratios = {kind: REFERENCE_RATE / rate for kind, rate in profile.rates.items()}
    infos = {
        kind: PerformanceInfo(ratio, max(ratio * profile.power.busy_w / REFERENCE_POWER_W, 1e-9))
        for kind, ratio in ratios.items()
    }
    slowest = max(infos.values(), key=lambda info: info.exec_time)
    relaxed = infos.get("float16", infos.get("float32", slowest))
    by_type = {t: infos.get(_rate_name(t)) for t in sorted(OperandType) if t != OperandType.SUBGRAPH}
    return Capabilities(
        relaxed_float32_to_float16_scalar=relaxed,
        relaxed_float32_to_float16_tensor=relaxed,
        operand_performance=tuple(OperandPerformance(t, i) for t, i in by_type.items() if i is not None),
        if_performance=slowest,
        while_performance=slowest,
    )


def _rate_name(kind: OperandType) -> str:
    dtype = operand_dtype(kind).name
    return dtype if dtype.startswith("float") else "int8"


class SimulatedDevice(AsyncDevice):
    """A device that is not there.

    Args:
        profile: Its description, or the name of a ready one (``phone-npu``, ``edge-cpu`` ...), or, with ``run_time_s``, any name.
        name: Its name; None for the profile's.
        run_time_s: Duration of every execution of any model, in seconds, its operations sharing it equally; None takes the
            profile's.
        seed: Draws noise and faults.
        script: The outcomes in place of drawn ones, one for each start (``aionn.testing.faults.scripted``).
        results: ``computed`` by the reference driver's interpreter, or ``zeros``, which needs output shapes that the model states.
        **changes: Fields of the profile to replace, ``slots=2`` for instance.

    Attributes:
        profile: Its description.
        run_time_ns: See ``run_time_s``.
        results: See above.
        generation: Number of times that it was revived.
        open_bursts: Number of bursts that keep its clock from falling.

    Raises:
        InvalidArgument: There is no such profile, or a number is out of its range.
    """

    # The policy of the application is judged on these devices, so they must not plan themselves.
    policy = PlainPolicy()

    def __init__(
        self,
        profile: DeviceProfile | str,
        *,
        name: str | None = None,
        run_time_s: float | None = None,
        seed: int = SEED_DEFAULT,
        script: Iterator[Draw] | None = None,
        results: Results = "computed",
        **changes: Any,
    ) -> None:
        if results not in ("computed", "zeros"):
            raise InvalidArgument(f"results: expected computed or zeros, got {results!r}")
        if isinstance(profile, str):
            if run_time_s is not None and profile not in PROFILES:
                rates = dict.fromkeys(("float32", "float16", "int8"), REFERENCE_RATE)
                profile = DeviceProfile(
                    name=profile, type="accelerator", rates=rates, memory_bandwidth=REFERENCE_RATE
                )
            else:
                profile = profile_named(profile)
        self.profile = _changed(profile, changes)
        self.run_time_ns = None
        if run_time_s is not None:
            run_time_s = checked_seconds(run_time_s, "run_time_s", least=POSITIVE_S_MIN, most=None)
            self.run_time_ns = round(run_time_s * 1e9)
        super().__init__(info_for(name or self.profile.name, self.profile))
        self.results = results
        self._draws = draws(self.profile, seed) if script is None else script
        self._clocks: list[ClockState | None] = [None] * self.profile.slots
        self._counts = dict.fromkeys(("started", "finished", "failed", "preempted", "busy_ns"), 0)
        self._is_dead = False
        self._running: dict[anyio.CancelScope, None] = {}  # In the order of their starts.
        self.generation = 0
        self.open_bursts = 0

    def supports(self, model: Model) -> Sequence[bool]:
        """The operations of the profile; never extensions. IF and WHILE only with all that their subgraphs contain."""
        cost = model_cost(model)
        each = [o.type in CONTRACTS and supports_operation(self.profile, o) for o in cost.operations]
        main, inner = each[: len(model.main.operations)], each[len(model.main.operations) :]
        return [
            fine and (all(inner) or operation.type not in (OperationType.IF, OperationType.WHILE))
            for fine, operation in zip(main, model.main.operations, strict=True)
        ]

    async def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> SimulatedPreparedModel:
        reason = unsupported_reason(self.profile, model_cost(model))
        if reason is not None:
            raise ResourceExhausted(f"prepare_model: {self.info.name}: the model {reason}", transient=False)
        if self._is_dead:
            self._is_dead = False
            self.generation += 1
        # Decoding constants takes its time: not on the event loop.
        return await self.on_thread(SimulatedPreparedModel, self, model, priority)

    async def status(self) -> DeviceStatus:
        """OFFLINE after a death, until something is prepared again."""
        return DeviceStatus.OFFLINE if self._is_dead else DeviceStatus.AVAILABLE

    def statistics(self) -> SimulatedStatistics:
        """Counts since the device was made."""
        energy_j = self._counts["busy_ns"] / 1e9 * self.profile.power.busy_w
        return SimulatedStatistics(**self._counts, energy_j=energy_j)

    # --- For its prepared models ----------------------------------------------------------------------------------------------

    def die(self) -> None:
        """All that runs, waits or is prepared is lost (DEAD_OBJECT), until something is prepared again."""
        self._is_dead = True
        for scope in list(self._running):
            scope.cancel()

    def check_alive(self, generation: int) -> None:
        """Refuses what was prepared before the last death.

        Raises:
            DeadObject: The device died since.
        """
        if self._is_dead or generation != self.generation:
            raise DeadObject(f"{self.info.name}: the device died; prepare the model again")

    @contextlib.contextmanager
    def alive(self, generation: int) -> Iterator[None]:
        """An execution: counted, and ended immediately by the device's death.

        Raises:
            DeadObject: The device died before or during the call.
        """
        self.check_alive(generation)
        self._counts["started"] += 1
        outcome = "failed"
        with anyio.CancelScope() as scope:
            self._running[scope] = None
            try:
                yield
                outcome = "finished"
            finally:
                del self._running[scope]
                self._counts[outcome] += 1
        self.check_alive(generation)

    def begin(self, control: LoopControl, full_speed_ns: Sequence[int]) -> tuple[Draw, list[int]]:
        """Draws for a start, and returns the ends of the remaining operations."""
        assert control.slot is not None, "only who has a slot begins"
        now_ns, clock = control.now(), self.profile.clock
        draw = next(self._draws)
        share = 1.0
        if self.run_time_ns is None:
            share = clock_share_at(clock, self._clocks[control.slot], now_ns, held=self.open_bursts > 0)
        ends, self._clocks[control.slot] = run_operations(
            self.profile, full_speed_ns, now_ns, share, draw.factor
        )
        return draw, ends

    def count(self, *, busy_ns: int = 0, preempted: int = 0) -> None:
        """Adds to the statistics."""
        self._counts["busy_ns"] += busy_ns
        self._counts["preempted"] += preempted


def _changed(profile: DeviceProfile, changes: dict[str, Any]) -> DeviceProfile:
    try:
        return msgspec.structs.replace(profile, **changes) if changes else profile
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"device {profile.name}: {e}") from e


class SimulatedPreparedModel(AsyncPreparedModel):
    """A model with its durations, and its constants decoded where results are wanted."""

    device: SimulatedDevice

    def __init__(self, device: SimulatedDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        self._generation = device.generation
        self._interpreter = Interpreter(model) if device.results == "computed" else None
        cost = model_cost(model)
        self._durations_ns: Sequence[int]
        if device.run_time_ns is None:
            self._durations_ns = operation_durations_ns(device.profile, cost)
        else:
            count = max(1, len(cost.operations))
            cuts = [device.run_time_ns * index // count for index in range(count + 1)]
            self._durations_ns = [after - before for before, after in itertools.pairwise(cuts)]
        # At full clock, without noise: the duration that a driver of such a device can declare.
        self.expected_duration_ns = sum(self._durations_ns)

    def check_usable(self) -> None:
        """See the base class. Raises also ``DeadObject``: the device died since the preparation."""
        self.device.check_alive(self._generation)
        super().check_usable()

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> DirectBurst:
        """A burst that keeps the device's clock from falling. Raises as ``check_usable``."""
        self.check_usable()
        return _Burst(self)

    async def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: LoopControl
    ) -> Sequence[OutputShape]:
        results: list[Sequence[Array] | Error] = []
        shapes: list[OutputShape] = []
        with self.device.alive(self._generation):
            failure: Error | None = None
            async with anyio.create_task_group() as tasks:
                is_over = threading.Event()
                if self._interpreter is not None:
                    # No other task waits for the result, so the time of its arrival does not affect the order of events.
                    private = [None if array is None else array.copy() for array in inputs]
                    tasks.start_soon(self._compute, private, control, is_over, results)
                try:
                    await self._take_time(control)
                except Error as e:
                    is_over.set()
                    failure = e  # Raised in here, the group would wrap it.
                except BaseException:
                    is_over.set()
                    raise
            if failure is not None:
                raise failure
            result = results[0] if results else [_zeros(area) for area in outputs]
            if isinstance(result, Error):
                raise result
            shapes += [area.store(array) for area, array in zip(outputs, result, strict=True)]
        return shapes

    async def _compute(
        self,
        inputs: list[Array | None],
        control: LoopControl,
        is_over: threading.Event,
        results: list[Sequence[Array] | Error],
    ) -> None:
        assert self._interpreter is not None, "only called where results are wanted"
        # The clock of fences, unlike the loop's, can be read by any thread; both have the same time.
        on_thread = RunControl(
            deadline_ns=control.deadline_ns,
            loop_timeout_ns=control.loop_timeout_ns,
            is_cancelled=lambda: is_over.is_set() or control.was_cancelled,
            now=fences.now_ns,
        )
        try:
            results.append(await anyio.to_thread.run_sync(self._interpreter.run, inputs, on_thread))
        except Error as e:
            results.append(e)

    async def _take_time(self, control: LoopControl) -> None:
        """Passes the time that the execution takes; pauses where it can and must."""
        device, left_ns = self.device, self._durations_ns
        while True:
            started_ns = control.now()
            draw, ends = device.begin(control, left_ns)
            try:
                stopped_ns = await self._pass(control, draw, started_ns, ends)
            finally:
                device.count(busy_ns=control.now() - started_ns)
            if stopped_ns is None:
                return
            left_ns = _left_ns(left_ns, started_ns, ends, stopped_ns)
            device.count(preempted=1)
            await control.pause_if_preempted()

    async def _pass(
        self, control: LoopControl, draw: Draw, started_ns: int, ends: Sequence[int]
    ) -> int | None:
        """Sleeps until the end and returns None, or until a boundary at which it must stop and returns that time.

        Raises:
            MissedDeadline: The deadline passed; this is the first boundary since.
            GeneralFailure: The caller was cancelled; this is the first boundary since. Or a persistent fault.
            ResourceExhausted: A transient fault.
            DeadObject: A fault killed the device.
        """
        struck_ns = None
        if draw.fault is not Fault.NONE:
            struck_ns = started_ns + int((ends[-1] - started_ns) * draw.at_share)
        goal_ns = ends[-1] if struck_ns is None else struck_ns
        if control.deadline_ns is not None:
            goal_ns = min(goal_ns, self._boundary(control.deadline_ns, ends))
        while True:
            stop_ns = goal_ns
            if not await control.sleep_until(goal_ns):
                stop_ns = min(goal_ns, self._boundary(control.now(), ends))
                await anyio.sleep(left_s(stop_ns) or 0.0)
            if stop_ns == struck_ns:
                await self._suffer(draw.fault)
            if stop_ns == ends[-1]:
                return None
            control.check()
            if control.must_stop:
                return stop_ns

    def _boundary(self, time_ns: int, ends: Sequence[int]) -> int:
        """The first time from ``time_ns`` on at which the device can stop."""
        cancel = self.device.info.cancel
        if cancel == CancelCapability.NONE or time_ns >= ends[-1]:
            return ends[-1]
        return time_ns if cancel == CancelCapability.ANYTIME else ends[bisect.bisect_left(ends, time_ns)]

    async def _suffer(self, fault: Fault) -> None:
        name = self.device.info.name
        match fault:
            case Fault.TRANSIENT:
                raise ResourceExhausted(f"{name}: a transient fault", transient=True)
            case Fault.PERSISTENT:
                raise GeneralFailure(f"{name}: a persistent fault")
            case Fault.HANG:
                await anyio.sleep_forever()
            case Fault.DEATH:
                self.device.die()
                raise DeadObject(f"{name}: the device died while executing")


def _left_ns(
    full_speed_ns: Sequence[int], started_ns: int, ends: Sequence[int], stopped_ns: int
) -> Sequence[int]:
    """Durations of the operations that are left after a stop; the rest of one that was stopped in its middle is the first."""
    index = bisect.bisect_left(ends, stopped_ns)
    later = full_speed_ns[index + 1 :]
    if ends[index] == stopped_ns:
        return later
    begun_ns = ends[index - 1] if index else started_ns
    rest_ns = full_speed_ns[index] * (ends[index] - stopped_ns) // (ends[index] - begun_ns)
    return [max(1, rest_ns), *later]


class _Burst(DirectBurst):
    """A burst that counts as open until it is closed."""

    def __init__(self, prepared: SimulatedPreparedModel) -> None:
        super().__init__(prepared)
        self._device: SimulatedDevice | None = prepared.device
        prepared.device.open_bursts += 1

    async def aclose(self) -> None:
        """Lets the clock fall again. Idempotent."""
        device, self._device = self._device, None
        if device is not None:
            device.open_bursts -= 1


def _zeros(area: OutputArea) -> Array:
    if not dimensions_are_known(area.operand.type, area.dimensions):
        raise GeneralFailure(
            "results are left out, so that every output's shape must be stated by the model or the request"
        )
    return np.zeros(area.dimensions, dtype=operand_dtype(area.operand.type))
