"""The runtime: devices found, models compiled, everything closed at the end.

Owns the devices with their dispatchers, and the task group in which executions and connections live.

Invariants:
1. A driver process is started when its device is first needed, and none is left when the runtime has closed.
2. Closing ends in bounded time: what waits is cancelled, what runs in a driver process ends with it.
3. Closing is complete when it returns or raises, however often its caller is cancelled during it.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

import anyio.abc
import anyio.to_thread

from aionn.errors import DeviceUnavailable, Error, InvalidArgument, shortages_raised, status_of
from aionn.hal import Device, DeviceInfo, ExecutionPreference, Model, Priority
from aionn.models.importing import check_import_options
from aionn.observability.log_tags import choose_tags
from aionn.observability.tracing import section
from aionn.platform.loops import finish, finish_all
from aionn.runtime.background import Background, InThisProcess
from aionn.runtime.clock import check_deadline, now_ns
from aionn.runtime.compilation import Compilation
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.discovery import (
    Discovery,
    Isolation,
    Unavailable,
    devices_given,
    drivers_wanted,
    unknown_name,
)
from aionn.runtime.executions.plan_in_use import Ready
from aionn.runtime.executions.results import PriorityName, flag_of, priority_of
from aionn.runtime.extensions import check_extensions
from aionn.runtime.introspection import Support, ask_support
from aionn.runtime.memory.allocation import allocate
from aionn.runtime.memory.own import DeviceMemory, OwnMemory, SharedMemory, copy
from aionn.runtime.metrics.exposed import RuntimeMetrics, spans_of
from aionn.runtime.metrics.spans import all_of, open_spans
from aionn.runtime.placement.compiling import Compiler
from aionn.runtime.realtime import ProcessThreads, RealtimeReport, RuntimeRealtime
from aionn.runtime.settings import (
    CollectorChoice,
    ExecutionPathChoice,
    PartitionChoice,
    PartitionMode,
    PreferenceName,
    RealtimeChoice,
    Settings,
    preference_of,
    settings_from,
)
from aionn.runtime.telemetry import (
    Listener,
    Reporter,
    checked_listeners,
    failure_report_of,
    notify,
    report_of,
    threads_report_of,
)
from aionn.runtime.traces import begin_trace, end_trace
from aionn.service.client.device import RemoteDevice
from aionn.validation import is_iterable

__all__ = ["Isolation", "Runtime", "Unavailable", "open_runtime"]

THREADS_S = 1.0
"""Longest wait for a driver process's report of its threads: it answers in a millisecond, unless an engine keeps the interpreter's
lock."""

_logger = logging.getLogger("aionn.manager")


def open_runtime(
    *,
    drivers: Mapping[str, str] | Sequence[str] | None = None,
    isolation: Isolation = "process",
    devices: Sequence[Device] = (),
    enabled_devices: str | None = None,
    cpu_only: bool | None = None,
    partition: PartitionChoice | None = None,
    execution_path: ExecutionPathChoice | None = None,
    sockets: Sequence[str | os.PathLike[str]] | None = None,
    fleet: Sequence[str] | None = None,
    burst_controller_polling_us: int | None = None,
    burst_server_polling_us: int | None = None,
    log: str | None = None,
    extensions: str | None = None,
    spare_processes: bool | None = None,
    hang_after_s: float | None = None,
    realtime: RealtimeChoice | None = None,
    collector: CollectorChoice | None = None,
    trace: str | os.PathLike[str] | None = None,
    telemetry: Sequence[Listener] = (),
    metrics: str | None = None,
    spans: Any = None,
) -> Runtime:
    """Opens a runtime; use it with ``async with``.

    Args:
        drivers: Which devices there shall be: device names to driver names, or driver names alone; None takes every registered
            driver, or none where ``devices`` are given.
        isolation: ``process`` runs each driver in a process of its own, so that no crash, hang or GIL-holding engine can hurt the
            application; ``in_process`` runs them here.
        devices: Devices that the caller has made, in this process; they come first, and the runtime closes them.
        enabled_devices: Regular expression; only devices whose whole name it matches are used. None takes ``AIONN_DEVICES``.
        cpu_only: Whether only the reference device is used. None takes ``AIONN_CPU_ONLY``.
        partition: ``none``: whole models, on the reference device; ``with_fallback``: models are cut, and fall back where a
            compilation allows it; ``without_fallback``: they never do. None takes ``AIONN_PARTITION``.
        execution_path: ``sync`` or ``async``: which of the driver's calls executions take. None takes ``AIONN_EXECUTION``.
        sockets: Sockets of ``aionn serve``; their devices are used in addition to other ones, after those of ``devices``. None
            takes ``AIONN_SOCKETS``.
        fleet: Addresses of nodes, such as ``tls://edge2:7463``: see ``docs/production/fleet.md``. None takes ``AIONN_FLEET``.
        burst_controller_polling_us: Microseconds that a burst looks for a result before it sleeps; not for models compiled
            with ``low_power``. None takes ``AIONN_BURST_CONTROLLER_POLLING_US``.
        burst_server_polling_us: The same for the driver's end. None takes ``AIONN_BURST_SERVER_POLLING_US``.
        log: Log tags with commas between them, or ``all``; None takes ``AIONN_LOG``.
        extensions: Vendor extensions that are used, by drivers as well: ``com.acme.*,b.c`` or ``none``; None: ``AIONN_EXTENSIONS``.
        spare_processes: Whether a spare process is kept for each driver process. None takes ``AIONN_SPARE_PROCESSES``.
        hang_after_s: Seconds after which a driver process that has work and makes no progress is ended, and the calls that wait for
            it raise ``DeadObject``; longer than the longest compilation or execution. None takes ``AIONN_HANG_AFTER_S``, and
            without that nothing is ended. Not with ``in_process``.
        realtime: ``required``, ``if_permitted`` or ``off``: whether the thread of the event loop and the threads of driver
            processes get real-time scheduling, and memory of bursts is locked, until the runtime is closed; see
            ``Runtime.realtime``. Where the machine does not permit ``required``, entering raises ``DeviceUnavailable`` with the
            remedy. None takes ``AIONN_REALTIME``, and without that it is off.
        collector: ``ordinary``, ``frozen`` or ``disabled``: Python's garbage collector from the first compilation on, until the
            runtime is closed. ``frozen`` excludes existing objects, ``disabled`` stops automatic collections as well. None takes
            ``AIONN_COLLECTOR``, and without that ``frozen`` with real time, otherwise ``ordinary``.
        trace: A file that a trace of all processes is written to; None takes ``AIONN_TRACE``.
        telemetry: Called with a ``Report`` at the end of each compilation and of each execution.
        metrics: ``HOST:PORT`` at which the figures of the runtime are exposed to a monitoring system, at ``/metrics`` in the text
            format of Prometheus; either part may be left out (127.0.0.1 and 9464), and port 0 takes a free one, see
            ``Runtime.metrics_url``. Any other address than a loopback one lets other machines read them. None counts and exposes
            nothing.
        spans: True makes a span of OpenTelemetry for each execution, by the ``TracerProvider`` of the process; a ``TracerProvider``
            by that one. Needs the extra ``otel``. None makes none.

    Raises:
        InvalidArgument: A name is empty or used twice, there is no such isolation, or a setting makes no sense.
        DeviceUnavailable: The extra for ``spans`` is missing.
    """
    if not isinstance(isolation, str) or isolation not in ("process", "in_process"):
        raise InvalidArgument(f"isolation: expected process or in_process, got {isolation!r}")
    given = devices_given(devices)
    wanted = drivers_wanted(drivers, is_any_given=bool(given))
    names = [*wanted, *(info.name for _, info in given)]
    if not all(names) or len(set(names)) != len(names):
        raise InvalidArgument(f"devices: expected different names that are not empty, got {names}")
    settings = settings_from(
        enabled_devices=enabled_devices,
        cpu_only=cpu_only,
        partition=partition,
        execution_path=execution_path,
        sockets=sockets,
        fleet=fleet,
        burst_controller_polling_us=burst_controller_polling_us,
        burst_server_polling_us=burst_server_polling_us,
        log=log,
        extensions=extensions,
        spare_processes=spare_processes,
        hang_after_s=hang_after_s,
        realtime=realtime,
        collector=collector,
    )
    return Runtime(
        wanted,
        isolation,
        given,
        settings=settings,
        trace=trace,
        telemetry=telemetry,
        metrics=metrics,
        spans=spans,
        is_asked_for=drivers is not None,
    )


class Runtime(InThisProcess):
    """Devices and compilations. Made by ``aionn.open``.

    Attributes:
        devices: The usable devices, in order of preference.
        unavailable: The unavailable devices, with the reasons.
        settings: Its settings; ``discovery`` finds its devices.
    """

    def __init__(
        self,
        drivers: Mapping[str, str],
        isolation: Isolation,
        given: Sequence[tuple[Device, DeviceInfo]] = (),
        *,
        settings: Settings | None = None,
        trace: str | os.PathLike[str] | None = None,
        telemetry: Sequence[Listener] = (),
        metrics: str | None = None,
        spans: Any = None,
        is_asked_for: bool = False,
    ) -> None:
        self._spans = open_spans(spans)
        self._metrics = None if metrics is None else RuntimeMetrics(metrics)
        self._listeners = checked_listeners(telemetry)
        self.settings = Settings() if settings is None else settings
        self._owns_trace = self._was_started = False
        self._drivers, self._given, self._trace = drivers, tuple(given), trace
        self.discovery = Discovery(self.settings, isolation, is_asked_for=is_asked_for)
        self._background, self._compilations = Background(), weakref.WeakSet[Compilation]()
        self._realtime = RuntimeRealtime(self.settings.realtime, self.settings.collector)
        self._background.locks = self._realtime.locks

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self._was_started else "not opened"
        names = ", ".join(device.name for device in self.discovery.devices)
        return f"<Runtime {state}, {names or 'no device'}>"

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """See above."""
        if not self._was_started:
            self._check_open("devices")
        return self.discovery.devices

    @property
    def unavailable(self) -> tuple[Unavailable, ...]:
        """See above."""
        return self.discovery.unavailable

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and is not being closed."""
        return self._background.is_open

    @property
    def metrics_url(self) -> str | None:
        """The address of the metrics; None if they are not exposed."""
        return None if self._metrics is None else self._metrics.url

    @property
    def background(self) -> Background:
        """Where executions live."""
        return self._background

    @property
    def tasks(self) -> anyio.abc.TaskGroup:  # Where connections and streams live.
        return self._background.tasks

    async def start(self) -> Self:
        """Opens the runtime without ``async with``, as a notebook does, where each cell runs by itself; ``aclose`` closes it.

            runtime = await aionn.open().start()

        Raises:
            Error: As for ``async with``: it was opened before, for example.
        """
        return await self.__aenter__()

    @shortages_raised("open")
    async def __aenter__(self) -> Self:
        if self._was_started:
            raise InvalidArgument("open: expected a runtime that was not opened before; use aionn.open again")
        self._background.check_loop()
        self._was_started = True
        choose_tags(self.settings.log)
        self._owns_trace = begin_trace(self._trace)
        try:
            await self._background.start(self._realtime.give_back)
            await finish(self._realtime.open())
            self.discovery.scheduling = self._realtime.scheduling
            with section("LR_PI", "find devices"):
                await self.discovery.find(self._given, self._drivers, self.tasks)
            if self._metrics is not None:
                self._metrics.serve(self._background, lambda: self.devices)
        except BaseException:
            try:
                await finish(self._close())
            finally:
                self._end_trace()
            raise
        self._background.is_open = True
        return self

    def device(self, name: str) -> RuntimeDevice:
        """The device of a name.

        Raises:
            InvalidArgument: No device has this name.
            DeviceUnavailable: There is, but it cannot be used.
        """
        for device in self.devices:
            if isinstance(name, str) and device.name == name:
                return device
        for missing in self.unavailable:
            if isinstance(name, str) and missing.name == name:
                raise DeviceUnavailable(f"device {name!r} is unavailable: {missing.reason}")
        if not self.devices:
            raise InvalidArgument(f"device: no device is available; got {name!r}")
        raise InvalidArgument(unknown_name(name, self.devices))

    @shortages_raised("supported_operations")
    async def supported_operations(
        self,
        model: Model | str | os.PathLike[str],
        *,
        devices: str | Sequence[str] | None = None,
        dimensions: Mapping[str, int] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[Support, ...]:
        """The operations of a model's main subgraph that each device can run. Nothing is compiled.

        Args:
            model: A model, or the path of a .tflite or .onnx file.
            devices: A device's name, or several; None for all.
            dimensions: See ``compile``.
            input_shapes: See ``compile``.
            values: See ``compile``.

        Returns:
            One answer per device, in the order of ``devices``; a device that fails to answer is reported with the reason.

        Raises:
            InvalidArgument: The model or the file is wrong, or a device is named that there is not.
        """
        self._check_open("supported_operations")
        asked = self.devices if devices is None else self._candidates(devices)
        check_extensions(model, self.settings.extensions, [device.info for device in self.devices])
        return await ask_support(model, asked, check_import_options(dimensions, input_shapes, values))

    def _check_open(self, where: str) -> None:
        if not self.is_open:
            raise InvalidArgument(f"{where}: the runtime is not open; use it with async with")
        self._background.home.check(where)

    @shortages_raised("compile")
    async def compile(
        self,
        model: Model | str | os.PathLike[str],
        *,
        devices: str | Sequence[str] | None = None,
        preference: PreferenceName | ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: PriorityName | Priority = Priority.MEDIUM,
        deadline: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_token: bytes | None = None,
        allow_fallback: bool = False,
        recover: bool = False,
        dimensions: Mapping[str, int] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Compilation:
        """Makes a model ready: on one device, or cut into steps where each operation goes to the device that does it best.

        Args:
            model: A model, or the path of a .tflite or .onnx file.
            devices: A device's name, or several; None for all.
            preference: ``low_power``, ``fast_single_answer`` or ``sustained_speed``.
            priority: ``low``, ``medium`` or ``high``, for executions without a priority of their own.
            deadline: Absolute nanoseconds for the compilation itself; None means no deadline.
            cache_dir: Where prepared models are kept, to be ready sooner the next time; None keeps none. Only its owner should be
                able to write there.
            cache_token: 32 bytes that identify the model, if they are known without reading it; None takes a digest of it.
            allow_fallback: Whether the reference device may step in where another device fails, while compiling or executing. Every
                result reports it. Not where ``devices`` are chosen: that is where the caller wants to know.
            recover: Whether the model is prepared again after its driver process has died, a few times in a minute. Executions
                under way raise ``DeadObject`` with ``transient``, later ones wait; streams continue, see ``StreamResult.status``.
                Contents of device memories are lost.
            dimensions: Extents by the names that an .onnx file gives to open ones, such as ``{"batch": 1}``; None means none.
            input_shapes: Shapes by the names of an .onnx file's inputs, for open extents without a name; None means none.
            values: Arrays by the names of an .onnx file's inputs that become constants; None means none.

        Raises:
            InvalidArgument: The model, the file or an argument is wrong, or some operation is supported by no device (all are
                listed).
            MissedDeadline: The deadline passed.
            DeviceUnavailable: The driver cannot be started.
            Error: Any other failure.
        """
        self._check_open("compile")
        deadline = check_deadline(deadline, where="compile")
        wanted_priority = priority_of(priority)
        wanted_preference = preference_of(preference)
        imports = check_import_options(dimensions, input_shapes, values)
        candidates = self._candidates(devices)
        check_extensions(model, self.settings.extensions, [device.info for device in self.devices])
        fallback = self._fallback_device(devices) if flag_of(allow_fallback, "allow_fallback") else None
        compiler = Compiler(
            self._background,
            candidates,
            fallback,
            imports,
            preference=wanted_preference,
            priority=wanted_priority,
            cache_dir=cache_dir,
            recover=flag_of(recover, "recover"),
        )

        async def make_ready(
            model: Model | str | os.PathLike[str], deadline_ns: int | None, token: bytes | None
        ) -> Ready:
            return await self._ready(compiler, model, deadline_ns, token, candidates, devices is not None)

        compilation = Compilation(
            self._background,
            await make_ready(model, deadline, cache_token),
            wanted_priority,
            polling=self.settings.polling(wanted_preference),
            make_ready=make_ready,
            on_close=self._compilations.discard,
        )
        self._compilations.add(compilation)
        self._realtime.compiled()
        await self._report_threads()
        return compilation

    async def _ready(
        self,
        compiler: Compiler,
        model: Model | str | os.PathLike[str],
        deadline_ns: int | None,
        cache_token: bytes | None,
        candidates: Sequence[RuntimeDevice],
        is_chosen: bool,
    ) -> Ready:
        """Makes a model ready, and reports that. Raises as ``compile``."""
        started_ns = now_ns()
        try:
            planned = await compiler.plan(model, deadline_ns=deadline_ns, cache_token=cache_token)
        except Error as e:
            if self._listeners:
                known = (compiler.loaded, candidates, is_chosen, status_of(e))
                failed = await anyio.to_thread.run_sync(failure_report_of, *known)
                Reporter(self._listeners, failed).compiled(now_ns() - started_ns)
            raise
        executed = None
        if self._listeners:
            base = await anyio.to_thread.run_sync(report_of, planned.plan, planned.from_cache, is_chosen)
            reporter = Reporter(self._listeners, base)
            reporter.compiled(now_ns() - started_ns)
            executed = reporter.executed
        figures = None if self._metrics is None else await self._metrics.compilation(model, planned.plan)
        return Ready(*planned, all_of(executed, await spans_of(self._spans, planned.plan, model)), figures)

    def _fallback_device(self, devices: str | Sequence[str] | None) -> RuntimeDevice | None:
        if self.settings.partition == PartitionMode.WITHOUT_FALLBACK:
            return None
        if devices is not None:
            raise InvalidArgument(
                "compile: allow_fallback requires devices=None: devices that are asked for are not replaced"
            )
        return next((device for device in self.devices if device.driver == "reference"), None)

    def _candidates(self, devices: str | Sequence[str] | None) -> list[RuntimeDevice]:
        if devices is None:
            if not self.devices:
                reasons = "; ".join(f"{u.name}: {u.reason}" for u in self.unavailable) or "none is registered"
                raise DeviceUnavailable(f"compile: no device can be used ({reasons})")
            if self.settings.partition == PartitionMode.NONE:
                reference = [device for device in self.devices if device.driver == "reference"]
                if not reference:
                    raise DeviceUnavailable(
                        "compile: partition=none needs the reference device, which is not available"
                    )
                return reference
            return list(self.devices)
        if not is_iterable(devices):
            raise InvalidArgument(f"devices: expected a name or a list of names, got {devices!r}")
        names = [devices] if isinstance(devices, str) else list(devices)
        if not names or len(set(map(repr, names))) != len(names):
            raise InvalidArgument(f"devices: expected different names, at least one, got {names}")
        return [self.device(name) for name in names]

    async def allocate(
        self,
        *,
        inputs: Sequence[tuple[Compilation, int]] = (),
        outputs: Sequence[tuple[Compilation, int]] = (),
        shape: Sequence[int] = (),
    ) -> DeviceMemory | SharedMemory:
        """Memory that executions read and write in place, such as the state of a recurrent model.

        Args:
            inputs: Which inputs it will be: compilation and index.
            outputs: Which outputs it will be.
            shape: Facts about its shape beyond those of its uses.

        Returns:
            A device's memory where all uses are on one device that has memories, else shared memory.

        Raises:
            InvalidArgument: There is no use, one repeats, does not exist or is another runtime's, or they contradict each other.
            GeneralFailure: No device has memory for it, and its size is not known.
        """
        self._check_open("allocate")
        return await allocate(self._background, inputs, outputs, shape)

    async def realtime(self) -> RealtimeReport:
        """Reports the permission of the machine, and thread by thread the scheduling that it has now.

        Asks each driver process that runs; one that does not answer within ``THREADS_S`` has no rows, and the reason in
        ``not_locked``.
        """
        self._check_open("realtime")
        others = []
        for device in self.devices if self._realtime.scheduling is not None else ():
            if isinstance(device.hal, RemoteDevice) and device.pid is not None:
                try:
                    with anyio.fail_after(THREADS_S):
                        reply = await device.hal.threads()
                except TimeoutError:
                    why = f"it did not answer within {THREADS_S:g} s"
                    others.append(ProcessThreads(device.name, device.pid, (), why))
                except Error as e:
                    others.append(ProcessThreads(device.name, device.pid, (), str(e)))
                else:
                    others.append(ProcessThreads(device.name, device.pid, reply.rows, reply.not_locked))
        return self._realtime.report(others)

    async def _report_threads(self) -> None:
        """Reports the threads to the listeners, if real time is in use and they changed."""
        if self._listeners and self._realtime.scheduling is not None:
            notify(self._listeners, threads_report_of((await self.realtime()).processes))

    async def copy(self, source: OwnMemory, destination: OwnMemory) -> None:
        """Copies the values of one memory into another; to itself is nothing.

        Raises:
            InvalidArgument: Type or shape differ.
            GeneralFailure: The source holds no value.
        """
        self._check_open("copy")
        await copy(source, destination)

    def _repr_html_(self) -> str:
        from aionn.reports.notebooks import runtime_html

        devices = (
            (d.name, d.type.name, d.driver, d.version, d.feature_level.name, d.info.slots)
            for d in self.devices
        )
        return runtime_html(self.is_open, devices, ((u.name, u.reason) for u in self.unavailable))

    async def aclose(self) -> None:
        """Closes every compilation, ends every driver process. Idempotent."""
        await self.__aexit__(None, None, None)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_open:
            return
        # A forked child leaves with an error of its own, or with sys.exit: that counts. The runtime is its parent's.
        if value is not None and not self._background.home.is_here:
            return
        self._background.home.check("close")
        self._background.is_open = False
        for compilation in self._compilations:
            compilation.close_streams()
        try:
            with section("LR_PT", "close"):
                await finish(self._close())
        finally:
            self._end_trace()

    def _end_trace(self) -> None:
        owned, self._owns_trace = self._owns_trace, False
        if owned and self._trace is not None:
            end_trace(self._trace)

    async def _close(self) -> None:
        # In reverse: compilations first. A device that cannot be closed, or is slow, does not prevent the closing of others.
        devices = [hal.aclose for hal in (*self.discovery.unused, *(device.hal for device in self.devices))]
        closings: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(functools.partial(_close_compilation, compilation) for compilation in self._compilations),
            self._background.close_dropped,
        ]
        if self._metrics is not None:
            closings.append(self._metrics.aclose)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._realtime.close)
            stack.push_async_callback(self._background.aclose)
            stack.push_async_callback(finish_all, devices)
            stack.push_async_callback(finish_all, closings)


async def _close_compilation(compilation: Compilation) -> None:
    with suppress(Error):  # Its driver is gone, and with it everything that this would have freed.
        await compilation.aclose()
