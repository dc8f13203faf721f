"""Measures other than latency: correct answers on known data, LoadGen's scenarios, and the share of each operation.

Owns running a prepared model for these. The arithmetic is in ``evaluators``, the files in ``labelled``, the bridge in ``loadgen``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec
import numpy as np

from aionn.benchmarking.accuracy import Array, to_real
from aionn.benchmarking.evaluators import (
    EVALUATORS,
    Evaluation,
    Evaluator,
    evaluate_mel_cepstra,
    evaluate_phones,
    evaluate_top_k,
)
from aionn.benchmarking.labelled import check_sample, find_samples, load_array, read_sample
from aionn.benchmarking.loadgen import (
    SCENARIOS,
    Answer,
    LoadReport,
    LoadSettings,
    Scenario,
    find_largest_rate,
    load_bindings,
    run_load,
)
from aionn.benchmarking.paths import opened
from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, PreparedModel, operation_type_name
from aionn.hal.pooled_request import PooledRequest
from aionn.interpreter import Interpreter, RunControl

__all__ = [
    "KnownData",
    "Load",
    "OperationShare",
    "check_known",
    "evaluate",
    "operation_shares",
    "run_scenarios",
]


class KnownData(msgspec.Struct, frozen=True):
    """Data whose right answers are known.

    Attributes:
        folder: Where they are, see ``labelled``.
        evaluator: The evaluator that judges them.
        pixels: The values of the darkest and the lightest pixel of a picture.
        expected_top1: Share of right first choices that the model is known for, from 0 to 1; None for unknown.
    """

    folder: str
    evaluator: Evaluator = "top-k"
    pixels: tuple[float, float] = (0.0, 1.0)
    expected_top1: float | None = None

    def check(self) -> None:
        """Demands data that can be judged.

        Raises:
            InvalidArgument: They cannot.
        """
        if self.evaluator not in EVALUATORS:
            raise InvalidArgument(
                f"bench, evaluator: expected one of {', '.join(EVALUATORS)}, got {self.evaluator!r}"
            )
        if self.expected_top1 is not None and not 0 <= self.expected_top1 <= 1:
            raise InvalidArgument(
                f"bench, expected top-1: expected a share from 0 to 1, got {self.expected_top1:g}"
            )
        if not np.isfinite(self.pixels).all() or self.pixels[0] == self.pixels[1]:
            raise InvalidArgument(f"bench, pixels: expected two different numbers, got {self.pixels}")
        find_samples(Path(self.folder), self.evaluator)


class Load(msgspec.Struct, frozen=True):
    """The choice of LoadGen's scenarios.

    Attributes:
        scenarios: Which.
        seconds: Duration of each.
        rate_per_s: A server's rate; None looks for the largest that holds the bound.
        bound_ms: Within which 99 % of a server's queries must be answered.
    """

    scenarios: tuple[Scenario, ...] = ()
    seconds: float = 5.0
    rate_per_s: float | None = None
    bound_ms: float = 33.0

    def check(self) -> None:
        """Demands scenarios that exist and that something measures.

        Raises:
            InvalidArgument: They do not.
            DeviceUnavailable: LoadGen is asked for and not installed.
        """
        for scenario in self.scenarios:
            LoadSettings(scenario, self.seconds, self.rate_per_s or 1.0, self.bound_ms).check()
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise InvalidArgument(f"load, rate: expected more than 0, got {self.rate_per_s:g}")
        if self.scenarios:
            load_bindings()


class OperationShare(msgspec.Struct, frozen=True):
    """The share of an execution's time by type of operation.

    Attributes:
        operation: The type's name.
        count: Their number.
        share: Of the time of all, from 0 to 1.
    """

    operation: str
    count: int
    share: float


async def check_known(model: Model, known: KnownData) -> None:
    """Demands data that fit a model, before anything is measured: every file's header and right answer, and the first of each kind.

    Raises:
        InvalidArgument: A file cannot be read or does not fit; the message names it.
        DeviceUnavailable: There are pictures or sounds, and PyAV is missing.
    """
    operand = _only_input(model)
    samples = find_samples(Path(known.folder), known.evaluator)
    for sample in samples:
        await anyio.to_thread.run_sync(check_sample, sample, known.evaluator, operand, model.main.outputs[0])
    firsts = {sample.path.suffix.lower(): sample for sample in reversed(samples)}
    for sample in firsts.values():
        await read_sample(sample, operand, known.pixels)


def _only_input(model: Model) -> Operand:
    if len(model.main.inputs) != 1:
        raise InvalidArgument(
            f"bench: expected a model with one input for labelled data, got {len(model.main.inputs)}"
        )
    return model.main.inputs[0]


async def evaluate(prepared: PreparedModel, model: Model, known: KnownData) -> Evaluation:
    """Runs a model over known data and judges its first output.

    Raises:
        InvalidArgument: A file cannot be read or does not fit.
        Error: The device's answer.
    """
    operand, result = _only_input(model), model.main.outputs[0]
    samples = find_samples(Path(known.folder), known.evaluator)
    outputs: list[Array] = []
    with PooledRequest(model) as arguments:
        async with opened(prepared, arguments.request, "sync") as call:
            for sample in samples:
                value = await read_sample(sample, operand, known.pixels)
                steps = []
                for step in value if sample.expected is not None else value[None]:
                    arguments.write([step])
                    await call()
                    steps.append(arguments.outputs()[0])
                outputs.append(np.stack(steps).reshape(len(steps), -1))
    if known.evaluator == "top-k":
        return evaluate_top_k(outputs, [sample.label for sample in samples], known.expected_top1)
    expected = [load_array(sample.expected) for sample in samples if sample.expected is not None]
    if known.evaluator == "phone-error":
        return evaluate_phones(outputs, expected)
    return evaluate_mel_cepstra([to_real(output, result) for output in outputs], expected)


async def run_scenarios(
    prepared: PreparedModel,
    model: Model,
    inputs: Sequence[Sequence[Array]],
    load: Load,
    *,
    slots: int,
    throughput: float,
    seed: int,
) -> dict[Scenario, LoadReport]:
    """Runs LoadGen's scenarios, a burst for each slot.

    Args:
        prepared: The model on the device.
        model: For the sizes of its arguments.
        inputs: The samples.
        load: Which scenarios.
        slots: Number of executions that the device runs at a time.
        throughput: Executions per second that were measured, to begin from.
        seed: Of LoadGen's schedules.

    Raises:
        Error: The device's answer.
    """
    found: dict[Scenario, LoadReport] = {}
    async with contextlib.AsyncExitStack() as stack:
        answers = [await _slot(stack, prepared, model, inputs) for _ in range(slots)]

        async def run(scenario: Scenario, rate_per_s: float) -> LoadReport:
            settings = LoadSettings(scenario, load.seconds, rate_per_s, load.bound_ms, len(inputs), seed)
            return await run_load(answers, settings)

        for scenario in (s for s in SCENARIOS if s in load.scenarios):
            if scenario == "server" and load.rate_per_s is None:
                _, runs = await find_largest_rate(
                    lambda rate: run("server", rate), throughput / 10, throughput * 1.5
                )
                held = [report for report in runs if report.is_within_bound]
                found[scenario] = max(held or runs, key=lambda report: report.samples_per_s)
            else:
                found[scenario] = await run(scenario, load.rate_per_s or throughput * 1.5)
    return found


async def _slot(
    stack: contextlib.AsyncExitStack, prepared: PreparedModel, model: Model, inputs: Sequence[Sequence[Array]]
) -> Answer:
    arguments = stack.enter_context(PooledRequest(model))
    call = await stack.enter_async_context(opened(prepared, arguments.request, "burst"))

    async def answer(index: int) -> None:
        arguments.write(inputs[index])
        await call()

    return answer


def operation_shares(
    model: Model, inputs: Sequence[Array], runs: int = 3
) -> tuple[OperationShare, ...] | None:
    """The time of each type of operation with the kernels of the reference driver, the largest share first.

    The fastest of ``runs`` counts for each operation. None for a model with control flow: its operations have no fixed number.
    """
    if model.referenced:
        return None
    operations = model.main.operations
    interpreter = Interpreter(model)
    best = np.full(len(operations), np.inf)
    for _ in range(runs):
        # The interpreter asks before each operation whether it is cancelled: that is when the one before it has ended.
        starts_s: list[float] = []

        def stamp(starts_s: list[float] = starts_s) -> bool:
            starts_s.append(time.perf_counter())
            return False

        interpreter.run(inputs, RunControl(is_cancelled=stamp))
        times = np.diff([*starts_s[: len(operations)], time.perf_counter()])
        best = np.minimum(best, times)
    taken: dict[str, list[float]] = {}
    for operation, seconds in zip(operations, best, strict=True):
        taken.setdefault(operation_type_name(operation.type), []).append(float(seconds))
    total = float(best.sum())
    shares = [OperationShare(name, len(times), sum(times) / total) for name, times in taken.items()]
    return tuple(sorted(shares, key=lambda share: -share.share))
