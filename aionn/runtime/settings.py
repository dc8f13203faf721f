"""Settings: options of ``aionn.open``, and the variables that replace options that are not given.

Owns the names, meanings and checks. An option that is given wins over its variable, a variable over the default.

Invariants:
1. Every variable that the packages read is in ``VARIABLES``; ``aionn env`` lists them.
2. A value that makes no sense is refused where the runtime is opened, with the name of the variable or option.

Source: the NN HAL runtime's properties (``debug.nn.*``).
"""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np

from aionn.burst.session import POLLING_US_MAX
from aionn.drivers.registry import EXTENSIONS_VARIABLE, ExtensionPolicy
from aionn.errors import InvalidArgument
from aionn.fleet.addresses import NodeAddress, parse_nodes
from aionn.hal import ExecutionPreference
from aionn.observability.log_tags import LOG_VARIABLE, TAGS, parse_tags
from aionn.observability.tracing import TRACE_VARIABLE
from aionn.realtime import CollectorMode, Mode
from aionn.realtime.delay import DELAY_VARIABLE, reserved_delay_ns
from aionn.service.progress import check_hang_after_s
from aionn.validation import is_iterable

__all__ = [
    "VARIABLES",
    "CollectorChoice",
    "ExecutionPath",
    "ExecutionPathChoice",
    "PartitionChoice",
    "PartitionMode",
    "PreferenceName",
    "RealtimeChoice",
    "Settings",
    "preference_of",
    "Variable",
    "settings_from",
    "unknown_variables",
]


class PartitionMode(enum.StrEnum):
    """The permitted divisions of a model."""

    NONE = "none"
    WITH_FALLBACK = "with_fallback"
    WITHOUT_FALLBACK = "without_fallback"


class ExecutionPath(enum.StrEnum):
    """The driver's call that an execution takes."""

    SYNC = "sync"
    ASYNC = "async"


PartitionChoice = Literal["none", "with_fallback", "without_fallback"] | PartitionMode
"""A division of models by its name or itself; this type and those below are for type checkers and editors."""

ExecutionPathChoice = Literal["sync", "async"] | ExecutionPath
"""A path of executions by its name or itself."""

RealtimeChoice = Literal["required", "if_permitted", "off"] | Mode
"""A setting of real time by its name or itself."""

CollectorChoice = Literal["ordinary", "frozen", "disabled"] | CollectorMode
"""A setting of the garbage collector by its name or itself."""

PreferenceName = Literal["low_power", "fast_single_answer", "sustained_speed"]
"""A preference by its name."""


PREFIX = "AIONN_"
"""The beginning of the names of variables; drivers outside of this distribution have names of their own."""


class Variable(msgspec.Struct, frozen=True):
    """An environment variable.

    Attributes:
        name: Its name.
        default: The value that holds without it.
        meaning: Its effect.
        option: The option of ``aionn.open`` that wins over it; empty for none.
    """

    name: str
    default: str
    meaning: str
    option: str = ""


VARIABLES = (
    Variable(
        "AIONN_DEVICES",
        ".*",
        "regular expression; only devices whose whole name it matches are used",
        "enabled_devices",
    ),
    Variable("AIONN_CPU_ONLY", "0", "1: only the CPU reference device is used", "cpu_only"),
    Variable(
        "AIONN_PARTITION",
        "with_fallback",
        "none (0): whole models on the reference device; with_fallback (1): cut, falling back where a compilation allows it; "
        "without_fallback (2): cut, never falling back",
        "partition",
    ),
    Variable(
        "AIONN_EXECUTION", "sync", "sync or async: the driver's call that executions take", "execution_path"
    ),
    Variable(
        "AIONN_SOCKETS",
        "",
        f"sockets of aionn serve, with {os.pathsep} between them; their devices are used as well",
        "sockets",
    ),
    Variable(
        "AIONN_FLEET",
        "",
        "addresses of nodes (aionn serve --listen), with blanks between them; their devices are used as well",
        "fleet",
    ),
    Variable(
        "AIONN_BURST_CONTROLLER_POLLING_US",
        "0",
        "microseconds that a burst looks for a result in the application before it sleeps; not with low_power",
        "burst_controller_polling_us",
    ),
    Variable(
        "AIONN_BURST_SERVER_POLLING_US",
        "0",
        "microseconds that a burst looks for a request in the driver process before it sleeps; not with low_power",
        "burst_server_polling_us",
    ),
    Variable(
        "AIONN_SPARE_PROCESSES",
        "1",
        "0: no process of a driver waits for the case that the one in use dies",
        "spare_processes",
    ),
    Variable(
        "AIONN_HANG_AFTER_S",
        "",
        "seconds without progress after which a driver process that has work is ended; none for no watch",
        "hang_after_s",
    ),
    Variable(
        "AIONN_REALTIME",
        "off",
        "required, if_permitted or off: real-time scheduling of the event loop's thread and of driver processes",
        "realtime",
    ),
    Variable(
        DELAY_VARIABLE,
        "0",
        "microseconds for which the machine may not run what a slot of a device needs: streams with a guarantee are admitted with"
        " so much time to spare",
    ),
    Variable(
        "AIONN_COLLECTOR",
        "",
        "ordinary, frozen or disabled: Python's garbage collector after a compilation; frozen with real time, ordinary without",
        "collector",
    ),
    Variable(
        EXTENSIONS_VARIABLE,
        "*",
        "vendor extensions that may be used, with commas between them: names, in which * stands for any text; none for none",
        "extensions",
    ),
    Variable(TRACE_VARIABLE, "", "file that a trace of all processes is written to", "trace"),
    Variable(LOG_VARIABLE, "", f"log tags, or all: {', '.join(TAGS)}", "log"),
    Variable(
        "AIONN_NATIVE", "0", "1: bursts of drivers around engines call these without Python where they can"
    ),
    Variable("AIONN_LITERT_THREADS", "1", "threads of each LiteRT interpreter"),
    Variable("AIONN_ORT_THREADS", "1", "threads of each execution on ONNX Runtime"),
    Variable("AIONN_OPENVINO_THREADS", "1", "threads of each execution on OpenVINO's CPU device"),
    Variable(
        "AIONN_ORT_PROVIDERS",
        "",
        "further devices on ONNX Runtime's execution providers, with commas between them: NAME=PROVIDER or "
        "NAME=PROVIDER:OPTION=VALUE, where NAME begins with ort-",
    ),
    Variable("AIONN_TRACEBACK", "0", "1: the command line shows where an error came from"),
    Variable("AIONN_CONFORMANCE_DATA", "", "folder of the conformance data"),
)


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about variables that begin with ``AIONN_`` and are not in ``VARIABLES``: mistakes in their names, most likely.

    Args:
        environment: The variables; None takes the process's.
    """
    names = {variable.name.removeprefix(PREFIX): variable.name for variable in VARIABLES}
    found = []
    for name in sorted(os.environ if environment is None else environment):
        word = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and word not in names:
            close = difflib.get_close_matches(word, names, n=1)
            advice = f"did you mean {names[close[0]]}?" if close else "aionn env lists all"
            found.append(f"{name}: there is no such variable, it has no effect; {advice}")
    return found


class Settings(msgspec.Struct, frozen=True):
    """The settings of a runtime.

    Attributes:
        enabled_devices: Regular expression for whole device names.
        cpu_only: Whether only the reference device is used.
        partition: The permitted divisions of a model.
        execution_path: The driver's call that an execution takes.
        sockets: Where served devices are.
        fleet: Where nodes are.
        burst_controller_polling_us: Microseconds for which a burst looks for a result before it sleeps.
        burst_server_polling_us: Microseconds for which the driver's end looks for a request before it sleeps.
        log: Log tags; None leaves them to the variable.
        extensions: Vendor extensions that may be used.
        spare_processes: Whether a spare process is kept for each driver process that has served for a while.
        hang_after_s: Seconds without progress after which a driver process that has work is ended; None means no watch.
        realtime: Whether real-time scheduling is required, used if permitted, or off.
        collector: The setting of Python's garbage collector after a compilation.
        reserved_delay_ns: The time for which the machine may not run what a slot of a device needs; admission counts with it.
    """

    enabled_devices: str = ".*"
    cpu_only: bool = False
    partition: PartitionMode = PartitionMode.WITH_FALLBACK
    execution_path: ExecutionPath = ExecutionPath.SYNC
    sockets: tuple[str, ...] = ()
    fleet: tuple[NodeAddress, ...] = ()
    burst_controller_polling_us: int = 0
    burst_server_polling_us: int = 0
    log: str | None = None
    extensions: ExtensionPolicy = ExtensionPolicy()
    spare_processes: bool = True
    hang_after_s: float | None = None
    realtime: Mode = Mode.OFF
    collector: CollectorMode = CollectorMode.ORDINARY
    reserved_delay_ns: int = 0

    def polling(self, preference: ExecutionPreference) -> Mapping[str, int]:
        """The polling windows of a compilation's bursts, as ``configure_execution_burst`` takes them; empty for none."""
        if preference == ExecutionPreference.LOW_POWER:
            return {}
        windows = {
            "controller_polling_us": self.burst_controller_polling_us,
            "server_polling_us": self.burst_server_polling_us,
        }
        return windows if any(windows.values()) else {}

    def is_enabled(self, name: str, driver: str) -> bool:
        """Whether a device is used."""
        if self.cpu_only and driver != "reference":
            return False
        return re.fullmatch(self.enabled_devices, name) is not None


def settings_from(
    *,
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
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from options and variables.

    Args:
        enabled_devices: See ``Settings``; None takes the variable's, as for all options.
        cpu_only: See ``Settings``.
        partition: See ``Settings``.
        execution_path: See ``Settings``.
        sockets: See ``Settings``.
        fleet: Addresses as in the variable, in a list.
        burst_controller_polling_us: See ``Settings``.
        burst_server_polling_us: See ``Settings``.
        log: See ``Settings``.
        extensions: As in the variable.
        spare_processes: See ``Settings``.
        hang_after_s: See ``Settings``.
        realtime: See ``Settings``.
        collector: See ``Settings``; without a variable it is frozen with real time, and ordinary without.
        environment: The variables; None takes the process's.

    Raises:
        InvalidArgument: A value makes no sense.
    """
    variables = os.environ if environment is None else environment

    def value(given: str | None, option: str, name: str, default: str) -> tuple[str, str]:
        if given is not None and not isinstance(given, str):
            advice = "; write names as 'a|b'" if option == "enabled_devices" and is_iterable(given) else ""
            raise InvalidArgument(f"{option}: expected a text, got {given!r}{advice}")
        return (given, option) if given is not None else (variables.get(name, "") or default, name)

    pattern, where = value(enabled_devices, "enabled_devices", "AIONN_DEVICES", ".*")
    try:
        re.compile(pattern)
    except re.error as e:
        raise InvalidArgument(f"{where}: expected a regular expression, got {pattern!r}: {e}") from e
    cpu = _switch(cpu_only, "cpu_only", "0", variables)
    spares = _switch(spare_processes, "spare_processes", "1", variables)
    mode_text, where = value(partition, "partition", "AIONN_PARTITION", "with_fallback")
    mode_text = dict(zip("012", PartitionMode, strict=True)).get(mode_text, mode_text)
    mode = _member(PartitionMode, mode_text, where)
    path_text, where = value(execution_path, "execution_path", "AIONN_EXECUTION", "sync")
    path = _member(ExecutionPath, path_text, where)
    tags_text, where = value(log, "log", LOG_VARIABLE, "")
    if unknown := parse_tags(tags_text)[1]:
        raise InvalidArgument(f"{where}: expected some of {', '.join(TAGS)}, got {', '.join(unknown)}")
    windows = (
        _window(burst_controller_polling_us, "burst_controller_polling_us", variables),
        _window(burst_server_polling_us, "burst_server_polling_us", variables),
    )
    policy = ExtensionPolicy.parse(*value(extensions, "extensions", EXTENSIONS_VARIABLE, "*"))
    found = _sockets(sockets, variables)
    limit_s = _hang_after_s(hang_after_s, variables)
    if realtime is not None and not isinstance(realtime, str):
        Mode.parse(realtime, "realtime")  # Raises.
    realtime_mode = Mode.parse(*value(realtime, "realtime", "AIONN_REALTIME", "off"))
    usual = CollectorMode.ORDINARY if realtime_mode is Mode.OFF else CollectorMode.FROZEN
    collector_mode = _member(CollectorMode, *value(collector, "collector", "AIONN_COLLECTOR", usual))
    return Settings(
        pattern,
        cpu,
        mode,
        path,
        found,
        parse_nodes(fleet, variables),
        *windows,
        log,
        policy,
        spares,
        limit_s,
        realtime_mode,
        collector_mode,
        reserved_delay_ns(variables),
    )


def _switch(given: bool | None, option: str, default: str, variables: Mapping[str, str]) -> bool:
    name = f"AIONN_{option.upper()}"
    if given is not None and (not isinstance(given, int | np.bool_) or given not in (0, 1)):
        raise InvalidArgument(f"{option}: expected 0 or 1, got {given!r}")
    text, where = (
        (str(int(given)), option) if given is not None else (variables.get(name, "") or default, name)
    )
    if text not in ("0", "1"):
        raise InvalidArgument(f"{where}: expected 0 or 1, got {text!r}")
    return text == "1"


def _sockets(given: Sequence[str | os.PathLike[str]] | None, variables: Mapping[str, str]) -> tuple[str, ...]:
    where = "AIONN_SOCKETS" if given is None else "sockets"
    if given is None:
        given = [path for path in variables.get(where, "").split(os.pathsep) if path]
    if isinstance(given, str | os.PathLike) or not is_iterable(given):
        raise InvalidArgument(f"sockets: expected a list of paths, got {given!r}")
    given = list(given)
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise InvalidArgument(f"sockets: expected paths, got {path!r}")
    paths = tuple(os.fspath(path) for path in given)
    if not all(paths) or len(set(paths)) != len(paths):
        raise InvalidArgument(f"{where}: expected different paths, got {list(paths)}")
    return paths


def _window(given: int | None, option: str, variables: Mapping[str, str]) -> int:
    name = f"AIONN_{option.upper()}"
    text, where = (str(given), option) if given is not None else (variables.get(name, "") or "0", name)
    if not text.isdecimal() or int(text) > POLLING_US_MAX:
        raise InvalidArgument(f"{where}: expected from 0 to {POLLING_US_MAX} microseconds, got {text}")
    return int(text)


def _hang_after_s(given: float | None, variables: Mapping[str, str]) -> float | None:
    name, value = "hang_after_s", given
    if given is None:
        name = "AIONN_HANG_AFTER_S"
        text = variables.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise InvalidArgument(f"{name}: expected a number of seconds, got {text!r}") from None
    check_hang_after_s(value, where=name)
    return value


_E = TypeVar("_E", bound=enum.StrEnum)


def _member(kind: type[_E], text: str, where: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgument(f"{where}: expected one of {', '.join(kind)}, got {text!r}") from None


def preference_of(value: str | ExecutionPreference) -> ExecutionPreference:
    """A preference by its name or itself.

    Raises:
        InvalidArgument: No entry has that name.
    """
    try:
        return ExecutionPreference[value.upper()] if isinstance(value, str) else ExecutionPreference(value)
    except (KeyError, ValueError):
        names = ", ".join(p.name.lower() for p in ExecutionPreference)
        raise InvalidArgument(f"preference: expected one of {names}, got {value!r}") from None
