"""Workloads: which requests come when, for which model, with which priority and deadline.

Owns the description of a workload (a small TOML file), the ready models that stand for common networks, and the generator that
turns a description and a seed into arrivals. Refuses to own devices' timing (``aionn.drivers.simulated.profiles``) and
what becomes of the requests.

Invariants:
1. The same description and seed give the same arrivals on every Python and under every hash seed; streams draw from generators of
   their own, so adding one does not change the rest.
2. Arrivals are sorted by time; ties are in the order of the streams in the file.
3. A mistake in a file is reported with its line and field.

Source: generators after those that serving systems are compared with: periodic, Poisson, Gamma gaps by coefficient of variation,
and recorded traces scaled in time. Arithmetic of the ready models is of the order of the published counts.
"""

from __future__ import annotations

import csv
import datetime
import heapq
import io
import math
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from aionn.drivers.kit.described import convert_described, described_text
from aionn.drivers.simulated.profiles import (
    DEVICE_SETS,
    PROFILES,
    DeviceProfile,
    ModelCost,
    OperationCost,
    model_cost,
    operation_durations_ns,
    profile_named,
    read_profile,
    unsupported_reason,
)
from aionn.errors import InvalidArgument
from aionn.hal import OperationType, Priority
from aionn.models.importing import load_file
from aionn.platform.files import open_regular
from aionn.platform.numbers import DAY_S, POSITIVE_S_MIN, checked_seconds

__all__ = [
    "ARRIVALS_MAX",
    "READY_MODELS",
    "Arrival",
    "DescribedModel",
    "Stream",
    "Workload",
    "devices_of",
    "durations_of",
    "generate",
    "read_trace",
    "read_workload",
    "workload_from_text",
]

ARRIVALS_MAX = 5_000_000
"""Most requests of one run: some 2 GB; more is a mistake in a rate."""

DATA_TYPES = ("float32", "float16", "int8")
ARRIVALS = ("periodic", "poisson", "gamma", "trace")
PRIORITIES = {priority.name.lower(): priority for priority in Priority}


class DescribedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model by its numbers, or from a file.

    Attributes:
        name: The name by which streams refer to it.
        file: Path of a .tflite or .onnx file, relative to the workload's; None for a model by numbers.
        operations: Number of operations of equal size.
        arithmetic: Multiplications and additions of one execution, counted singly.
        size_bytes: Bytes moved by one execution.
        memory_bytes: Constants and temporaries together.
        data_type: ``float32``, ``float16`` or ``int8``.
    """

    name: str
    file: str | None = None
    operations: int = 1
    arithmetic: float = 0.0
    size_bytes: float = 0.0
    memory_bytes: int = 0
    data_type: str = "float32"

    def __post_init__(self) -> None:
        _check("name", bool(self.name), "a name", self.name)
        _check("operations", 1 <= self.operations <= 100_000, "from 1 to 100000", self.operations)
        for field, amount in (("arithmetic", self.arithmetic), ("size_bytes", self.size_bytes)):
            _check(field, math.isfinite(amount) and amount >= 0, "a number of at least 0", amount)
        _check("memory_bytes", self.memory_bytes >= 0, "at least 0", self.memory_bytes)
        _check("data_type", self.data_type in DATA_TYPES, f"one of {', '.join(DATA_TYPES)}", self.data_type)

    def cost(self, folder: Path) -> ModelCost:
        """The cost of one execution.

        Raises:
            InvalidArgument: The file cannot be read, or is not a model.
        """
        if self.file is not None:
            path = folder / self.file
            try:
                return model_cost(load_file(path).model)
            except InvalidArgument as e:
                raise InvalidArgument(f"model {self.name}: {e}") from e
        share = 1.0 / self.operations
        operation = OperationCost(
            int(OperationType.CONV_2D), self.data_type, self.arithmetic * share, self.size_bytes * share
        )
        return ModelCost((operation,) * self.operations, self.memory_bytes)


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one kind.

    Attributes:
        name: Its name.
        model: Name of a model of the file, or of a ready one.
        priority: ``low``, ``medium`` or ``high``.
        arrivals: ``periodic``, ``poisson``, ``gamma`` or ``trace``.
        rate_per_s: Mean rate; for a trace the rate that it is scaled to, 0 for its own.
        cv: Coefficient of variation of the gaps, for ``gamma``.
        jitter_s: Most that a periodic arrival is late, drawn evenly.
        trace: Path of a CSV file whose column TIMESTAMP holds the arrivals, relative to the workload's.
        deadline_s: From arrival to deadline; None means no deadline.
        start_s: No arrival before.
        end_s: No arrival from here on; None for the workload's end.
        after: Name of a stream: a request of this stream arrives when one of that stream is done, and fails with it. ``deadline_s``
            then counts from the arrival of the chain's first. Its ``arrivals`` and ``rate_per_s`` are not used.
        burst: Requests that arrive together.
        guarantee: Whether the stream asks for a reservation. Its deadlines then count from the captures, which ``jitter_s`` delays.
            ``phased``: one that counts with its phase.
        period_s: Least time between captures that it promises; None means that of its rate.
        phase_s: Time of the first periodic arrival after ``start_s``; None means drawn.
    """

    name: str
    model: str
    priority: str = "medium"
    arrivals: str = "periodic"
    rate_per_s: float = 0.0
    cv: float = 1.0
    jitter_s: float = 0.0
    trace: str | None = None
    deadline_s: float | None = None
    start_s: float = 0.0
    end_s: float | None = None
    after: str | None = None
    burst: int = 1
    guarantee: bool | Literal["phased"] = False
    period_s: float | None = None
    phase_s: float | None = None

    def __post_init__(self) -> None:
        _check("name", bool(self.name), "a name", self.name)
        _check("priority", self.priority in PRIORITIES, f"one of {', '.join(PRIORITIES)}", self.priority)
        _check("arrivals", self.arrivals in ARRIVALS, f"one of {', '.join(ARRIVALS)}", self.arrivals)
        needs_rate = self.after is None and self.arrivals != "trace"
        fine = math.isfinite(self.rate_per_s) and (
            self.rate_per_s > 0 if needs_rate else self.rate_per_s >= 0
        )
        _check("rate_per_s", fine, "a positive number", self.rate_per_s)
        _check("cv", math.isfinite(self.cv) and self.cv > 0, "a positive number", self.cv)
        checked_seconds(self.jitter_s, "jitter_s", most=None)
        checked_seconds(self.start_s, "start_s", most=None)
        is_trace = self.after is None and self.arrivals == "trace"
        _check("trace", (self.trace is not None) == is_trace, "a path, for arrivals of a trace", self.trace)
        for field, value in (("deadline_s", self.deadline_s), ("end_s", self.end_s)):
            if value is not None:
                checked_seconds(value, field, least=POSITIVE_S_MIN, most=None)
        _check("burst", 1 <= self.burst <= ARRIVALS_MAX, f"from 1 to {ARRIVALS_MAX}", self.burst)
        if self.guarantee:
            _check("deadline_s", self.deadline_s is not None, "a deadline, since it is guaranteed", None)
            _check("after", self.after is None, "no stream to follow, for one with a guarantee", self.after)
            fine = self.arrivals == "periodic" or self.period_s is not None
            _check("period_s", fine, "the period that a stream promises, unless it is periodic", None)
            self._check_reserved_times()
        if self.guarantee == "phased":
            fine = self.arrivals == "periodic"
            _check("arrivals", fine, "periodic, for a guarantee by phases", self.arrivals)
        for field, value in (("period_s", self.period_s), ("phase_s", self.phase_s)):
            if value is not None:
                checked_seconds(value, field, most=None)

    def _check_reserved_times(self) -> None:
        """Checks the times of a reservation, a day at most, so that the message has the field in seconds and its line."""
        deadline_s = checked_seconds(self.deadline_s, "deadline_s", least=POSITIVE_S_MIN)
        checked_seconds(self.jitter_s, "jitter_s")
        _check(
            "jitter_s",
            self.jitter_s < deadline_s,
            f"less than the deadline of {deadline_s:g} s",
            self.jitter_s,
        )
        if self.period_s is not None:
            checked_seconds(self.period_s, "period_s", least=POSITIVE_S_MIN)
        else:
            fine = self.rate_per_s * DAY_S >= 1
            _check("rate_per_s", fine, "one frame a day or more, for one with a guarantee", self.rate_per_s)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload, as its file describes it.

    Attributes:
        name: Its name.
        duration_s: Arrivals stop here; the jobs that have arrived run to their end.
        devices: A ready set's name, or names of ready or described devices, or paths of their files.
        stream: The kinds of requests.
        model: Models beside the ready ones.
        device: Devices beside the ready ones.
        cap: The share of each slot that may be reserved.
        loop_s: For ``aionn plan``: the processor time of the application's event loop for a frame; 0 does not count it.
    """

    name: str
    duration_s: float
    devices: str | tuple[str, ...] = "phone"
    stream: tuple[Stream, ...]
    model: tuple[DescribedModel, ...] = ()
    device: tuple[DeviceProfile, ...] = ()
    cap: float = 0.95
    loop_s: float = 0.0

    def __post_init__(self) -> None:
        _check("cap", 0 < self.cap <= 1, "above 0 and at most 1", self.cap)
        _check("loop_s", 0 <= self.loop_s <= 1, "seconds from 0 to 1", self.loop_s)
        checked_seconds(self.duration_s, "duration_s", least=POSITIVE_S_MIN, most=None)
        _check("stream", bool(self.stream), "one stream or more", self.stream)
        names: set[str] = set()
        models = {*READY_MODELS, *(model.name for model in self.model)}
        for index, stream in enumerate(self.stream):
            # A stream may follow only an earlier one: so there are no circles.
            fine = stream.after is None or stream.after in names
            _check(f"stream.{index}.after", fine, "the name of a stream above", stream.after)
            _check(f"stream.{index}.name", stream.name not in names, "a new name", stream.name)
            _check(
                f"stream.{index}.model",
                stream.model in models,
                f"one of {', '.join(sorted(models))}",
                stream.model,
            )
            names.add(stream.name)
        devices = {*PROFILES, *(device.name for device in self.device)}
        wanted = (self.devices,) if isinstance(self.devices, str) else self.devices
        for device in wanted:
            fine = device in devices or device in DEVICE_SETS or device.endswith(".toml")
            known = ", ".join([*DEVICE_SETS, *sorted(devices)])
            _check("devices", fine, f"a device's file, or one of {known}", device)


def _check(field: str, is_fine: bool, expected: str, got: object) -> None:
    # msgspec turns the ValueError into a ValidationError with the path of the table; described.py adds the field and the line.
    if not is_fine:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")


def _ready(
    name: str, operations: int, arithmetic: float, size_bytes: float, data_type: str
) -> DescribedModel:
    return DescribedModel(
        name=name,
        operations=operations,
        arithmetic=arithmetic,
        size_bytes=size_bytes,
        memory_bytes=int(size_bytes),
        data_type=data_type,
    )


READY_MODELS: Mapping[str, DescribedModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            _ready("keyword-int8", 14, 5.3e6, 0.4e6, "int8"),
            _ready("sound-float", 28, 0.14e9, 20e6, "float32"),
            _ready("classify-int8", 69, 0.6e9, 11e6, "int8"),
            _ready("classify-float16", 69, 0.6e9, 21e6, "float16"),
            _ready("detect-int8", 112, 2.4e9, 28e6, "int8"),
            _ready("segment-int8", 76, 5.6e9, 60e6, "int8"),
            _ready("pose-float16", 120, 1.2e9, 25e6, "float16"),
            _ready("embed-int8", 75, 8.2e9, 46e6, "int8"),
            _ready("enhance-float16", 40, 12e9, 150e6, "float16"),
            _ready("text-float", 210, 2.6e9, 60e6, "float32"),
        )
    }
)
"""Networks of common kinds by their numbers, ready for any workload."""


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request.

    Attributes:
        at_ns: When it arrives; for one that follows another, when the chain's first arrives.
        stream_index: Which kind it is.
        deadline_ns: Absolute; None means no deadline.
        after_index: The arrival that it follows, by index in the sequence; None means no such arrival.
        scale: Multiplies the model's durations.
    """

    at_ns: int
    stream_index: int
    deadline_ns: int | None
    after_index: int | None = None
    scale: float = 1.0


def generate(workload: Workload, seed: int, *, folder: Path = Path()) -> list[Arrival]:
    """The arrivals of a workload under a seed.

    Raises:
        InvalidArgument: A trace cannot be read, or there would be more than ``ARRIVALS_MAX``.
    """
    sources = [
        _times(workload, index, seed, folder) for index, s in enumerate(workload.stream) if s.after is None
    ]
    followers: dict[str, list[int]] = {}
    for index, stream in enumerate(workload.stream):
        if stream.after is not None:
            followers.setdefault(stream.after, []).append(index)
    arrivals: list[Arrival] = []

    def add(at_ns: int, captured_ns: int, index: int, after_index: int | None) -> None:
        stream = workload.stream[index]
        since_ns = captured_ns if stream.guarantee else at_ns
        deadline_ns = None if stream.deadline_s is None else since_ns + round(stream.deadline_s * 1e9)
        own = len(arrivals)
        arrivals.append(Arrival(at_ns, index, deadline_ns, after_index))
        for follower in followers.get(stream.name, ()):
            add(at_ns, captured_ns, follower, own)

    for at_ns, index, captured_ns in heapq.merge(*sources):
        for _ in range(workload.stream[index].burst):
            add(at_ns, captured_ns, index, None)
        if len(arrivals) > ARRIVALS_MAX:
            raise InvalidArgument(f"workload {workload.name}: more than {ARRIVALS_MAX} requests")
    return arrivals


def _times(workload: Workload, index: int, seed: int, folder: Path) -> Iterator[tuple[int, int, int]]:
    """``(arrival, stream, capture)`` of each request."""
    stream = workload.stream[index]
    source = random.Random(f"{seed}/{stream.name}")
    end_s = min(workload.duration_s, math.inf if stream.end_s is None else stream.end_s)
    for at_s, captured_s in _seconds(stream, source, folder):
        if at_s >= end_s:
            return
        if at_s >= stream.start_s:
            yield round(at_s * 1e9), index, round(captured_s * 1e9)


def _phase_s(stream: Stream, source: random.Random) -> float:
    return source.random() / stream.rate_per_s if stream.phase_s is None else stream.phase_s


def first_capture_ns(stream: Stream, seed: int) -> int:
    """When a periodic stream captures its first frame under a seed."""
    return round((stream.start_s + _phase_s(stream, random.Random(f"{seed}/{stream.name}"))) * 1e9)


def _seconds(stream: Stream, source: random.Random, folder: Path) -> Iterator[tuple[float, float]]:
    """Times of arrival and of capture."""
    if stream.arrivals == "trace":
        assert stream.trace is not None, "checked by the stream"
        try:
            times = read_trace(folder / stream.trace)
        except InvalidArgument as e:
            raise InvalidArgument(f"stream {stream.name}, trace: {e}") from e
        span_s = times[-1] - times[0]
        scale = len(times) / span_s / stream.rate_per_s if stream.rate_per_s and span_s else 1.0
        # Another seed looks at another part of the trace; the end wraps to the beginning.
        first = source.randrange(len(times))
        offset_s = 0.0
        while True:
            for at_s in times[first:]:
                moved_s = (at_s - times[first]) * scale + offset_s
                yield moved_s, moved_s
            offset_s += (times[-1] - times[first]) * scale + span_s * scale / len(times)
            first = 0
    at_s = stream.start_s
    if stream.arrivals == "periodic":
        period_s = 1.0 / stream.rate_per_s
        at_s += _phase_s(stream, source)
        number = 0
        while True:
            captured_s = at_s + number * period_s
            yield captured_s + (source.random() * stream.jitter_s if stream.jitter_s else 0.0), captured_s
            number += 1
    # Gaps of a Gamma distribution with shape 1 / cv^2 have the mean and variation asked for; shape 1 is Poisson.
    shape = 1.0 if stream.arrivals == "poisson" else 1.0 / stream.cv**2
    while True:
        at_s += source.gammavariate(shape, 1.0 / (stream.rate_per_s * shape))
        yield at_s, at_s


_TRACES: dict[Path, list[float]] = {}
"""Traces by path: one run of a benchmark reads the same file for every seed."""


def read_trace(path: Path) -> list[float]:
    """Arrival times of a CSV file in seconds from its first, sorted. The column TIMESTAMP holds ISO dates or seconds.

    Raises:
        InvalidArgument: The file cannot be read, has no such column, or a row is wrong; the line is named.
    """
    if path in _TRACES:
        return _TRACES[path]
    try:
        with io.TextIOWrapper(open_regular(path, "trace"), newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames is None or "TIMESTAMP" not in rows.fieldnames:
                raise InvalidArgument(f"{path}, line 1, TIMESTAMP: the column is missing")
            times = [_seconds_of(row["TIMESTAMP"], path, rows.line_num) for row in rows]
    except InvalidArgument:
        raise  # One of them is an OSError as well.
    except OSError as e:
        raise InvalidArgument(f"{path}: cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise InvalidArgument(f"{path}: expected UTF-8 text: {e.reason}") from e
    if len(times) < 2:
        raise InvalidArgument(f"{path}: expected two arrivals or more, got {len(times)}")
    times.sort()
    _TRACES[path] = [at_s - times[0] for at_s in times]
    return _TRACES[path]


def _seconds_of(text: str, path: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # Seven digits of a second, as some traces have, are one more than Python reads.
        whole, _, fraction = text.partition(".")
        moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise InvalidArgument(
            f"{path}, line {line}, TIMESTAMP: expected a date or seconds, got {text!r}"
        ) from None


def devices_of(workload: Workload, *, folder: Path = Path()) -> tuple[DeviceProfile, ...]:
    """The devices that a workload runs on.

    Raises:
        InvalidArgument: A device's file is wrong.
    """
    own = {device.name: device for device in workload.device}
    wanted = (workload.devices,) if isinstance(workload.devices, str) else workload.devices
    found: list[DeviceProfile] = []
    for name in wanted:
        if name in own:
            found.append(own[name])
        elif name in DEVICE_SETS:
            found += [profile_named(member) for member in DEVICE_SETS[name]]
        elif name in PROFILES:
            found.append(profile_named(name))
        else:
            found.append(read_profile(folder / name))
    return tuple(found)


def durations_of(
    workload: Workload, devices: tuple[DeviceProfile, ...], *, folder: Path = Path()
) -> list[tuple[tuple[int, ...] | None, ...]]:
    """Per stream and device the durations of the operations at full clock; None where the device cannot run the model.

    Raises:
        InvalidArgument: No device can run a stream's model.
    """
    described = {**READY_MODELS, **{model.name: model for model in workload.model}}
    costs = {name: described[name].cost(folder) for name in {stream.model for stream in workload.stream}}
    table = []
    for stream in workload.stream:
        cost = costs[stream.model]
        reasons = [unsupported_reason(device, cost) for device in devices]
        if None not in reasons:
            text = "; ".join(f"{d.name}: {reason}" for d, reason in zip(devices, reasons, strict=True))
            raise InvalidArgument(f"stream {stream.name}: no device can run model {stream.model}: {text}")
        table.append(
            tuple(
                operation_durations_ns(device, cost) if reason is None else None
                for device, reason in zip(devices, reasons, strict=True)
            )
        )
    return table


def read_workload(path: str | os.PathLike[str]) -> Workload:
    """Reads a workload's file.

    Raises:
        InvalidArgument: The file cannot be read or has a mistake; the message names its line and field.
    """
    return workload_from_text(described_text(path, "workload"), where=os.fspath(path))


def workload_from_text(text: str, *, where: str = "workload") -> Workload:
    """Reads a workload from TOML text.

    Raises:
        InvalidArgument: As for ``read_workload``.
    """
    return convert_described(text, Workload, where=where)
