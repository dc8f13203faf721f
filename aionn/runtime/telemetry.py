"""Reports about compilations, executions and threads, for applications that count them.

Opt-in: no report is built without a listener.

Owns what is reported. A report holds no value of a model and no data: the model is named by a digest of its structure.

Invariants:
1. A listener is called once at the end of each compilation and of each execution, in the event loop; and, with real
   time, after each compilation with the threads of all processes.
2. A listener that raises is logged and changes nothing.

Source: ``Telemetry`` of the NN HAL's runtime.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from aionn.errors import ErrorStatus, InvalidArgument
from aionn.hal import Model, OperandType, OperationType
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.realtime import ProcessThreads
from aionn.validation import is_iterable

if TYPE_CHECKING:
    from aionn.runtime.devices import RuntimeDevice
    from aionn.runtime.executions.results import Result
    from aionn.runtime.placement.plan import Plan
    from aionn.runtime.placement.planning import LoadedModel

__all__ = [
    "Listener",
    "Report",
    "Reporter",
    "checked_listeners",
    "data_class",
    "failure_report_of",
    "has_control_flow",
    "report_of",
    "session_id",
    "session_number",
    "structure_digest",
    "notify",
    "threads_report_of",
]

_logger = logging.getLogger("aionn.manager")

DataClass = Literal["unknown", "other", "float32", "float16", "quant", "mixed"]

_CLASS_BY_TYPE: dict[int, DataClass] = {
    OperandType.TENSOR_FLOAT32: "float32",
    OperandType.FLOAT32: "float32",
    OperandType.TENSOR_FLOAT16: "float16",
    OperandType.FLOAT16: "float16",
    OperandType.TENSOR_QUANT8_ASYMM: "quant",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "quant",
    OperandType.TENSOR_QUANT8_SYMM: "quant",
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "quant",
    OperandType.TENSOR_QUANT16_ASYMM: "quant",
    OperandType.TENSOR_QUANT16_SYMM: "quant",
}


class Report(msgspec.Struct, frozen=True):
    """One compilation or execution, or the threads.

    Attributes:
        kind: Which; the reports of threads have ``processes`` and no model.
        session: A number for this process's session.
        model: Digest of the model's structure, without its constants; empty for a file that could not be loaded.
        devices: ``name=version`` of the devices, sorted; of a compilation that failed, all that could have been used.
        status: The status of its end.
        input_class: The kind of numbers in the inputs.
        output_class: The kind of numbers in the outputs.
        took_ns: From the call to its end.
        on_device_ns: Time measured by the devices; None where they measured none.
        fallback: Whether the reference device stepped in.
        chosen_devices: Whether the application chose the devices.
        from_cache: Whether the compilation came from a cache.
        control_flow: Whether the model has an IF or WHILE.
        dynamic_temporaries: Whether a value between two steps has a size that only executions know.
        processes: The threads of each process with their scheduling; empty in reports of another kind.
    """

    kind: Literal["compilation", "execution", "threads"]
    session: int
    model: str
    devices: tuple[str, ...]
    status: ErrorStatus
    input_class: DataClass
    output_class: DataClass
    took_ns: int
    on_device_ns: int | None = None
    fallback: bool = False
    chosen_devices: bool = False
    from_cache: bool = False
    control_flow: bool = False
    dynamic_temporaries: bool = False
    processes: tuple[ProcessThreads, ...] = ()


Listener = Callable[[Report], None]


def session_id() -> int:
    """The number of this process's session: the same in all its reports, another one in a forked child."""
    return _session_of(os.getpid())


@functools.cache
def _session_of(pid: int) -> int:
    return session_number(pid, time.time_ns() // 1_000_000)


def session_number(pid: int, now_ms: int) -> int:
    """The original's number for a session of a process that began then."""
    return (pid * 123 + now_ms) % 999983


def structure_digest(model: Model) -> str:
    """SHA-256 of operations, types and shapes; equal for models that differ in constants alone."""
    digest = hashlib.sha256()
    for subgraph in (model.main, *model.referenced):
        operands = [(int(o.type), o.dimensions, int(o.lifetime)) for o in subgraph.operands]
        operations = [(int(o.type), o.inputs, o.outputs) for o in subgraph.operations]
        digest.update(repr((operands, operations, subgraph.input_indexes, subgraph.output_indexes)).encode())
    return digest.hexdigest()


def data_class(specs: Iterable[TensorSpec]) -> DataClass:
    """The kind of numbers of all inputs, or of all outputs."""
    classes = {_CLASS_BY_TYPE.get(spec.type, "other") for spec in specs}
    if not classes:
        return "unknown"
    return classes.pop() if len(classes) == 1 else "mixed"


def has_control_flow(model: Model) -> bool:
    """Whether the main subgraph has an IF or WHILE."""
    return any(o.type in (OperationType.IF, OperationType.WHILE) for o in model.main.operations)


def report_of(plan: Plan, from_cache: bool, chosen: bool) -> Report:
    """The report of a compilation that has succeeded, without its time."""
    return Report(
        kind="compilation",
        session=session_id(),
        model=structure_digest(plan.model),
        devices=_named(plan.devices),
        status=ErrorStatus.NONE,
        input_class=data_class(plan.inputs),
        output_class=data_class(plan.outputs),
        took_ns=0,
        fallback=any(placement.reason.startswith("fallback:") for placement in plan.placement),
        chosen_devices=chosen,
        from_cache=from_cache,
        control_flow=has_control_flow(plan.model),
        dynamic_temporaries=any(0 in spec.dimensions for spec in plan.temporaries.values()),
    )


def failure_report_of(
    loaded: LoadedModel | None, candidates: Sequence[RuntimeDevice], chosen: bool, status: ErrorStatus
) -> Report:
    """The report of a compilation that has failed, without its time; None for a model that could not be loaded."""
    return Report(
        kind="compilation",
        session=session_id(),
        model="" if loaded is None else structure_digest(loaded.model),
        devices=_named(candidates),
        status=status,
        input_class=data_class(() if loaded is None else loaded.inputs),
        output_class=data_class(() if loaded is None else loaded.outputs),
        took_ns=0,
        chosen_devices=chosen,
        control_flow=loaded is not None and has_control_flow(loaded.model),
    )


def threads_report_of(processes: tuple[ProcessThreads, ...]) -> Report:
    """The report of the threads of a runtime's processes."""
    return Report(
        kind="threads",
        session=session_id(),
        model="",
        devices=(),
        status=ErrorStatus.NONE,
        input_class="unknown",
        output_class="unknown",
        took_ns=0,
        processes=processes,
    )


def _named(devices: Sequence[RuntimeDevice]) -> tuple[str, ...]:
    return tuple(sorted(f"{device.name}={device.version}" for device in devices))


def checked_listeners(telemetry: Sequence[Listener]) -> tuple[Listener, ...]:
    """The functions that an application gives.

    Raises:
        InvalidArgument: It is not a list of functions.
    """
    if not is_iterable(telemetry) or not all(map(callable, listeners := tuple(telemetry))):
        advice = "; write [function]" if callable(telemetry) else ""
        raise InvalidArgument(f"telemetry: expected a list of functions, got {telemetry!r}{advice}")
    return listeners


class Reporter:
    """Makes the reports of one compilation and of its executions."""

    def __init__(self, listeners: Sequence[Listener], base: Report) -> None:
        self._listeners = listeners
        self._base = base

    def compiled(self, took_ns: int) -> None:
        """Reports the compilation."""
        notify(self._listeners, msgspec.structs.replace(self._base, took_ns=took_ns))

    def executed(self, status: ErrorStatus, result: Result | None, took_ns: int) -> None:
        """Reports an execution that has ended, with its result where it has one."""
        report = msgspec.structs.replace(
            self._base,
            kind="execution",
            status=status,
            took_ns=took_ns,
            on_device_ns=None if result is None else result.timing.time_on_device_ns,
            fallback=result is not None and bool(result.fallback),
        )
        notify(self._listeners, report)


def notify(listeners: Sequence[Listener], report: Report) -> None:
    """Calls every listener."""
    for listener in listeners:
        try:
            listener(report)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # A listener's CancelledError does not cancel the task that reports to it.
            _logger.exception("telemetry: a listener failed")
