"""From a model to a plan: load it, ask every device what it supports, cut it, prepare every step.

Owns the order of this, what a device that fails to answer means, and that nothing heavy runs on the event loop. The rules of the
cut are in ``partition`` and ``slicing``.

Invariants:
1. A device that fails to answer what it supports supports nothing; if every device fails, the first failure is the caller's to see.
2. A device is asked and given only what its feature level can express.
3. A preparation that fails frees those before it.

Source: ``ExecutionPlan`` and ``CompilationBuilder`` of the NN HAL's runtime.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio.to_thread
import msgspec

from aionn.errors import Error, GeneralFailure, InvalidArgument
from aionn.hal import ExecutionPreference, Model, PreparedModel, Priority, operation_type_name
from aionn.hal.real_work import real_work
from aionn.hal.tracing import section
from aionn.models.tflite import load_tflite
from aionn.runtime.arguments import TensorSpec, tensor_spec
from aionn.runtime.caching import StepCache
from aionn.runtime.compilation import Placement, Plan, PreparedStep
from aionn.runtime.fallback import Fallback
from aionn.runtime.partition import Candidate, Choice, Step, choose_devices, make_steps, step_model
from aionn.runtime.slicing import Slice, expressed_at, operation_levels, slice_model
from aionn.validation import validate_model

if TYPE_CHECKING:
    from aionn.runtime.runtime import RuntimeDevice

__all__ = ["LoadedModel", "PlanOptions", "keep_plan", "load_model", "make_plan", "restore_plan"]

_logger = logging.getLogger("aionn.compilation")

_T = TypeVar("_T")


class LoadedModel(NamedTuple):
    """A model and what its inputs and outputs are called.

    Attributes:
        model: The model.
        inputs: What it takes.
        outputs: What it gives.
    """

    model: Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class PlanOptions(NamedTuple):
    """How a model is made ready.

    Attributes:
        preference: What the devices are chosen for, and optimise for.
        priority: Of the prepared models.
        deadline_ns: Absolute; None for none.
        cache: Where prepared steps are kept; None for nowhere.
    """

    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None = None
    cache: StepCache | None = None


async def _on_thread(call: Callable[[], _T], what: str) -> _T:
    with real_work(what):
        return await anyio.to_thread.run_sync(call)


async def load_model(model: Model | str | os.PathLike[str]) -> LoadedModel:
    """A model as it is, or from a .tflite file.

    Raises:
        InvalidArgument: The file cannot be read, or is no model.
    """
    if isinstance(model, Model):
        main = model.main
        inputs = tuple(tensor_spec(operand, f"input{i}") for i, operand in enumerate(main.inputs))
        outputs = tuple(tensor_spec(operand, f"output{i}") for i, operand in enumerate(main.outputs))
        return LoadedModel(model, inputs, outputs)
    if not isinstance(model, str | os.PathLike):
        raise InvalidArgument(f"model: expected a path or a Model, got a {type(model).__name__}")
    with section("LR_PP", "load model"):
        try:
            loaded = await _on_thread(lambda: load_tflite(Path(model)), "loading a model")
        except OSError as e:
            raise InvalidArgument(f"model {os.fspath(model)}: cannot be read: {e.strerror}") from e
    main = loaded.model.main
    inputs = tuple(tensor_spec(o, s.name) for s, o in zip(loaded.inputs, main.inputs, strict=True))
    outputs = tuple(tensor_spec(o, s.name) for s, o in zip(loaded.outputs, main.outputs, strict=True))
    return LoadedModel(loaded.model, inputs, outputs)


class _StepOnDisk(msgspec.Struct, frozen=True, array_like=True):
    device: str
    model: Model | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[int, ...]


class _PlanOnDisk(msgspec.Struct, frozen=True, array_like=True):
    """A plan whose prepared steps are kept beside it; models are without pools, None stands for the whole model."""

    model: Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[_StepOnDisk, ...]
    placement: tuple[Placement, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_PlanOnDisk)


async def restore_plan(
    model: Model | str | os.PathLike[str], devices: Sequence[RuntimeDevice], options: PlanOptions
) -> Plan | None:
    """The plan that was made before, with every step from the cache; None if any of it is not there.

    A model that was given by its path is not read: the plan's has the structure and small constants, and no pools.

    Raises:
        MissedDeadline: The deadline passed.
    """
    cache = options.cache
    if cache is None:
        return None
    data = await cache.read_plan(devices, (options.preference, options.priority))
    if data is None:
        return None
    try:
        kept = await _on_thread(lambda: _DECODER.decode(data), "decoding a plan")
    except (msgspec.MsgspecError, ValueError) as e:
        _logger.info("the kept plan is not used: %s", e)
        return None
    whole = model if isinstance(model, Model) else kept.model
    by_name = {device.name: device for device in devices}
    steps: list[PreparedStep] = []
    try:
        for step in kept.steps:
            device = by_name[step.device]
            part = whole if step.model is None else step.model
            operations = None if len(kept.steps) == 1 else step.operations
            prepared = await cache.restore(
                device, operations, options.preference, options.priority, options.deadline_ns
            )
            if prepared is None:
                break
            steps.append(PreparedStep(device, prepared, part, step.inputs, step.outputs, step.operations))
    except BaseException:
        await _free(steps)
        raise
    if len(steps) < len(kept.steps):
        await _free(steps)
        return None
    temporaries = _temporaries(whole, steps)
    return Plan(whole, kept.inputs, kept.outputs, temporaries, tuple(steps), kept.placement)


async def keep_plan(plan: Plan, devices: Sequence[RuntimeDevice], options: PlanOptions) -> None:
    """Keeps a plan in the cache, if there is one and every step's device keeps something."""
    cache = options.cache
    if cache is None or not all(step.device.info.cache_files.model for step in plan.steps):
        return

    def encoded() -> bytes:
        steps = tuple(
            _StepOnDisk(
                step.device.name,
                None if step.model is plan.model else _bare(step.model),
                step.inputs,
                step.outputs,
                step.operations,
            )
            for step in plan.steps
        )
        kept = _PlanOnDisk(_bare(plan.model), plan.inputs, plan.outputs, steps, plan.placement)
        return _ENCODER.encode(kept)

    data = await _on_thread(encoded, "encoding a plan")
    await cache.write_plan(devices, (options.preference, options.priority), data)


def _bare(model: Model) -> Model:
    return msgspec.structs.replace(model, pools=())


async def _free(steps: Sequence[PreparedStep]) -> None:
    for step in steps:
        await step.prepared.aclose()


async def make_plan(
    loaded: LoadedModel,
    devices: Sequence[RuntimeDevice],
    options: PlanOptions,
    fallback_device: RuntimeDevice | None = None,
) -> Plan:
    """Cuts a model over devices and prepares every step.

    Args:
        loaded: The model.
        devices: In the order of preference.
        options: See ``PlanOptions``.
        fallback_device: Where steps run that fail while executing; None for nowhere.

    Raises:
        InvalidArgument: The model breaks a rule, or some operation is supported by no device.
        Error: A device failed.
    """
    model = loaded.model
    levels = [device.feature_level for device in devices]
    with section("LR_PC", "slice"):
        level, questions = await _on_thread(lambda: _questions(model, levels), "slicing a model")
    candidates = [
        Candidate(device.name, device.capabilities, supported, is_reference=device.driver == "reference")
        for device, supported in zip(devices, await _ask(model, devices, questions), strict=True)
    ]
    with section("LR_PC", "partition"):
        choices, steps, models = await _on_thread(
            lambda: _cut(model, level, levels, candidates, options.preference), "partitioning a model"
        )
    if _logger.isEnabledFor(logging.DEBUG):
        for choice in choices:
            kind = operation_type_name(model.main.operations[choice.operation].type)
            _logger.debug(
                "operation %d (%s): %s, %s",
                choice.operation,
                kind,
                devices[choice.candidate].name,
                choice.reason,
            )
    whole = len(steps) == 1 and models[0].main is model.main
    prepared: list[PreparedStep] = []
    try:
        for step, part in zip(steps, models, strict=True):
            device = devices[step.candidate]
            with section("LI_PC", f"prepare on {device.name}"):
                ready = await _prepare(device, part, options, None if len(steps) == 1 else step.operations)
            reads = model.main.input_indexes if whole else step.inputs
            writes = model.main.output_indexes if whole else step.outputs
            prepared.append(PreparedStep(device, ready, part, reads, writes, step.operations))
    except BaseException:
        await _free(prepared)
        raise
    fallback = None
    if fallback_device is not None:
        fallback = Fallback(fallback_device, (*models, model), options.priority)
    return Plan(
        model,
        loaded.inputs,
        loaded.outputs,
        _temporaries(model, prepared),
        tuple(prepared),
        _placement(model, choices, devices),
        fallback,
    )


def _questions(model: Model, levels: Sequence[int]) -> tuple[int, list[Slice | None]]:
    """The model's level, and what each device can be asked; None for a device that can be asked nothing."""
    level = validate_model(model)
    everything = tuple(range(len(model.main.operations)))
    needed = operation_levels(model) if level > min(levels) else ()
    return level, [
        Slice(model, everything) if level <= own else slice_model(model, needed, own) for own in levels
    ]


async def _ask(
    model: Model, devices: Sequence[RuntimeDevice], questions: Sequence[Slice | None]
) -> list[tuple[bool, ...]]:
    answers: list[tuple[bool, ...]] = []
    failures: list[Error] = []
    for device, question in zip(devices, questions, strict=True):
        supported = [False] * len(model.main.operations)
        if question is not None:
            try:
                with section("LI_PC", f"ask {device.name}"):
                    answer = await device.hal.supported_operations(question.model)
                if len(answer) != len(question.operations):
                    raise GeneralFailure(
                        f"{device.name}: {len(question.operations)} operations, but {len(answer)} answers about support"
                    )
                for operation, is_supported in zip(question.operations, answer, strict=True):
                    supported[operation] = bool(is_supported)
            except Error as e:
                _logger.warning("%s is left out: asked what it supports, it failed: %s", device.name, e)
                failures.append(e)
        answers.append(tuple(supported))
    if failures and len(failures) == len(devices):
        raise failures[0]
    return answers


def _cut(
    model: Model,
    level: int,
    levels: Sequence[int],
    candidates: Sequence[Candidate],
    preference: ExecutionPreference,
) -> tuple[tuple[Choice, ...], tuple[Step, ...], list[Model]]:
    choices = choose_devices(model, candidates, preference)
    steps = make_steps(model, choices)
    if len(steps) == 1 and level <= levels[steps[0].candidate]:
        return choices, steps, [model]
    parts = [expressed_at(step_model(model, step), levels[step.candidate]) for step in steps]
    return choices, steps, parts


async def _prepare(
    device: RuntimeDevice, part: Model, options: PlanOptions, operations: tuple[int, ...] | None
) -> PreparedModel:
    if options.cache is not None:
        return await options.cache.prepare(
            device, part, operations, options.preference, options.priority, options.deadline_ns
        )
    return await device.hal.prepare_model(
        part, preference=options.preference, priority=options.priority, deadline_ns=options.deadline_ns
    )


def _placement(
    model: Model, choices: Sequence[Choice], devices: Sequence[RuntimeDevice]
) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            choice.operation,
            operation_type_name(model.main.operations[choice.operation].type),
            devices[choice.candidate].name,
            choice.reason,
        )
        for choice in choices
    )


def _temporaries(model: Model, steps: Sequence[PreparedStep]) -> dict[int, TensorSpec]:
    """The values that one step writes for another, beside the model's own outputs."""
    own = {*model.main.input_indexes, *model.main.output_indexes}
    keys = dict.fromkeys(key for step in steps for key in step.outputs if key not in own)
    return {key: tensor_spec(model.main.operands[key], f"temporary{key}") for key in keys}
