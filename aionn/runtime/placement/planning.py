"""From a model to a plan: load it, ask every device what it supports, cut it, prepare every step.

Owns the order of this, what a device that fails to answer means, and that nothing heavy runs on the event loop. The rules of the
cut are in ``partition``, ``division`` and ``slicing``.

Invariants:
1. A device that fails to answer what it supports supports nothing; if every device fails, the caller gets the first failure.
2. A device is asked and given only what its feature level can express.
3. A preparation that fails frees those before it.

Source: ``ExecutionPlan`` and ``CompilationBuilder`` of the NN HAL's runtime.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import anyio.to_thread
import msgspec
import numpy as np

from aionn.errors import Error, GeneralFailure, InvalidArgument, class_text
from aionn.hal import (
    ExecutionPreference,
    FeatureLevel,
    Model,
    Operand,
    PreparedModel,
    PreparedModelDefaults,
    Priority,
    check_abilities,
)
from aionn.hal.slicing import Slice
from aionn.interpreter import check_stated_shapes
from aionn.models.importing import NO_OPTIONS, ImportedArgument, ImportOptions, load_file
from aionn.models.operation_names import operation_name
from aionn.observability.tracing import section
from aionn.platform.loops import finish_all
from aionn.platform.real_work import real_work
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions.stepping import PreparedStep
from aionn.runtime.memory.arguments import TensorSpec, declared_spec, tensor_spec
from aionn.runtime.placement.caching import StepCache
from aionn.runtime.placement.control_flow import interpreted_step
from aionn.runtime.placement.division import (
    INTERPRETER,
    Division,
    divide,
    open_references,
    referenced_by,
    subgraph_model,
)
from aionn.runtime.placement.fallback import Fallback, driver_error
from aionn.runtime.placement.levels import expressed_at, expressible_part, operation_levels
from aionn.runtime.placement.partition import Candidate, Step, may_be_chosen, step_model
from aionn.runtime.placement.plan import Placement, Plan
from aionn.runtime.recovery.prepared import Recoverer
from aionn.validation import check_field_types, validate_model

__all__ = [
    "LoadedModel",
    "PlanOptions",
    "identity_of",
    "keep_plan",
    "load_model",
    "make_plan",
    "restore_plan",
]

_logger = logging.getLogger("aionn.compilation")
_model_logger = logging.getLogger("aionn.model")

_T = TypeVar("_T")

LEVEL_OF_ALL = FeatureLevel.LEVEL_7
"""The level that can express every model: level 8 adds none."""

_SUBGRAPH_IN_CACHE = 1 << 31
"""Above every index of an operation."""


class LoadedModel(NamedTuple):
    """A model and what its inputs and outputs are called.

    Attributes:
        model: The model.
        inputs: Descriptions of the inputs.
        outputs: Descriptions of the outputs.
        is_by_hand: Whether it is a model of the application's own, and no file's.
    """

    model: Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    is_by_hand: bool = False


class PlanOptions(NamedTuple):
    """Options of a model's preparation.

    Attributes:
        preference: The aim of the choice of devices, and of their optimisation.
        priority: Of the prepared models.
        deadline_ns: Absolute; None means no deadline.
        cache: Where prepared steps are kept; None means nowhere.
        recoverer: Makes the prepared steps recover from the death of their drivers; None for steps that do not.
    """

    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None = None
    cache: StepCache | None = None
    recoverer: Recoverer | None = None


async def _on_thread(call: Callable[[], _T], what: str) -> _T:
    """The result of a call without side effects. A cancelled caller does not wait: the call ends on its thread, without use."""
    with real_work(what):
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


async def load_model(
    model: Model | str | os.PathLike[str], options: ImportOptions = NO_OPTIONS
) -> LoadedModel:
    """A model as it is, or from a .tflite or .onnx file.

    Raises:
        InvalidArgument: The file cannot be read, or is not a model; a field of the model holds a value of another type; the
            model's inputs or outputs are not its own; or the options are not for such a model.
    """
    if isinstance(model, Model):
        if options.names:
            raise InvalidArgument(
                f"model: expected the path of an .onnx file with the option {options.names[0]}, got a Model"
            )
        await _on_thread(lambda: check_field_types(model, Model, "model"), "checking a model")
        main = model.main
        try:
            inputs = tuple(tensor_spec(operand, f"input{i}") for i, operand in enumerate(main.inputs))
            outputs = tuple(tensor_spec(operand, f"output{i}") for i, operand in enumerate(main.outputs))
        except IndexError:
            validate_model(model)  # Raises the error with the index.
            raise
        return LoadedModel(model, inputs, outputs, is_by_hand=True)
    if not isinstance(model, str | os.PathLike):
        advice = "; export it to a file that ends in .tflite or .onnx, and give its path"
        if isinstance(model, bytes | bytearray | memoryview):
            advice = "; write the bytes to a file (its name ends in .tflite or .onnx) and give its path"
        raise InvalidArgument(f"model: expected a path or a Model, got {class_text(model)}{advice}")
    with section("LR_PP", "load model"):
        loaded = await _on_thread(lambda: load_file(model, options), "loading a model")
    main = loaded.model.main
    facts = (os.fspath(model), len(main.operations), len(main.operands))
    _model_logger.debug("loaded %s: %d operations, %d operands", *facts)
    return LoadedModel(
        loaded.model, _named_specs(main.inputs, loaded.inputs), _named_specs(main.outputs, loaded.outputs)
    )


def _named_specs(
    operands: Sequence[Operand], arguments: Sequence[ImportedArgument]
) -> tuple[TensorSpec, ...]:
    return tuple(
        declared_spec(operand, argument.name, argument.dtype, argument.dimensions)
        for operand, argument in zip(operands, arguments, strict=True)
    )


def identity_of(loaded: LoadedModel, options: ImportOptions) -> bytes:
    """Bytes that differ for imports whose compilations must not be exchanged, in addition to the digest of the model."""
    arrays = {name: np.asarray(value) for name, value in sorted(options.values.items())}
    parts = [
        repr((loaded.inputs, loaded.outputs, sorted(options.dimensions.items()))).encode(),
        repr(sorted((name, tuple(map(int, shape))) for name, shape in options.input_shapes.items())).encode(),
        *(
            repr((name, array.dtype.str, array.shape)).encode() + array.tobytes()
            for name, array in arrays.items()
        ),
    ]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


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
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        _logger.info("the kept plan is not used: %s", e)
        return None
    whole = model if isinstance(model, Model) else kept.model
    by_name = {device.name: device for device in devices}
    if not _is_possible(kept, whole, by_name):
        _logger.info("the kept plan is not used: it is not one of this model on these devices")
        return None
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
            if options.recoverer is not None:
                again = functools.partial(
                    cache.restore, device, operations, options.preference, options.priority, None
                )
                prepared = options.recoverer.recovering(device.name, prepared, again)
            steps.append(PreparedStep(device, prepared, part, step.inputs, step.outputs, step.operations))
    except BaseException:
        await _free(steps)
        raise
    if len(steps) < len(kept.steps):
        await _free(steps)
        return None
    temporaries = _temporaries(whole, steps)
    return Plan(whole, kept.inputs, kept.outputs, temporaries, tuple(steps), kept.placement)


def _is_possible(kept: _PlanOnDisk, whole: Model, devices: Container[str]) -> bool:
    """Whether the steps of a plan name devices and operands that exist: each program that has the model can make the digest."""
    count = len(whole.main.operands)
    return bool(kept.steps) and all(
        step.device in devices and all(0 <= operand < count for operand in (*step.inputs, *step.outputs))
        for step in kept.steps
    )


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
    await finish_all(step.prepared.aclose for step in steps)


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
        fallback_device: Where steps run that fail while executing; None means nowhere.

    Raises:
        InvalidArgument: The model breaks a rule, or some operation is supported by no device.
        Error: A device failed.
    """
    model = loaded.model
    levels = [device.feature_level for device in devices]
    # An importer checks the contracts of what it writes, and a driver the whole model: a level is needed for older devices alone.
    is_checked = not loaded.is_by_hand and min(levels, default=0) >= LEVEL_OF_ALL
    asked, needed = await _ask_about(model, devices, levels, options.preference, is_checked=is_checked)
    if loaded.is_by_hand:
        await _on_thread(lambda: check_stated_shapes(model), "checking a model")
    with section("LR_PC", "partition"):
        divisions = await _on_thread(lambda: divide(model, asked, options.preference), "partitioning a model")
    _log_choices(divisions, devices)
    preparing = _Preparing(loaded, devices, options, fallback_device, divisions, needed)
    try:
        return await preparing.plan(0)
    except BaseException:
        await preparing.undo()
        raise


class _Preparing:
    """Makes the steps of every division ready, those inside of control flow first."""

    def __init__(
        self,
        loaded: LoadedModel,
        devices: Sequence[RuntimeDevice],
        options: PlanOptions,
        fallback_device: RuntimeDevice | None,
        divisions: Mapping[int, Division],
        needed: Mapping[int, int],
    ) -> None:
        self._loaded = loaded
        self._devices = devices
        self._options = options
        self._fallback_device = fallback_device
        self._divisions = divisions
        self._needed = needed
        self._plans: dict[int, Plan] = {}
        self._done: list[PreparedStep] = []

    async def plan(self, number: int) -> Plan:
        """The plan of a subgraph. Raises as ``Device.prepare_model``."""
        if number not in self._plans:
            self._plans[number] = await self._make(number)
        return self._plans[number]

    async def undo(self) -> None:
        """Frees what was prepared."""
        await _free(self._done)

    async def _make(self, number: int) -> Plan:
        division = self._divisions[number]
        model, main = division.model, division.model.main
        parts = await _on_thread(lambda: self._models(number), "making the models of steps")
        steps: list[PreparedStep] = []
        for step, part in zip(division.steps, parts, strict=True):
            if step.is_interpreted:
                inner = referenced_by(self._loaded.model, number, step.operations[0])
                plans = [await self.plan(other) for other in inner]
                ready = interpreted_step(part, step, plans)
            else:
                whole = part.main is main
                prepared = await self._prepare(number, step, part, is_alone=len(parts) == 1)
                reads = main.input_indexes if whole else step.inputs
                writes = main.output_indexes if whole else step.outputs
                device = self._devices[step.candidate]
                ready = PreparedStep(device, prepared, part, reads, writes, step.operations)
            steps.append(ready)
            self._done.append(ready)
        if number:
            inputs = tuple(tensor_spec(o, f"input{i}") for i, o in enumerate(main.inputs))
            outputs = tuple(tensor_spec(o, f"output{i}") for i, o in enumerate(main.outputs))
        else:
            inputs, outputs = self._loaded.inputs, self._loaded.outputs
        fallback = None
        if self._fallback_device is not None:
            recoverer = self._options.recoverer
            fallback = Fallback(
                self._fallback_device,
                (*parts, model),
                self._options.priority,
                None if recoverer is None else recoverer.recovering,
            )
        placement = () if number else _placement(self._divisions, self._devices)
        return Plan(
            model, inputs, outputs, _temporaries(model, steps), tuple(steps), placement, fallback, number
        )

    def _models(self, number: int) -> list[Model]:
        """The model that each step's device gets."""
        division = self._divisions[number]
        model, steps = division.model, division.steps
        levels = [
            FeatureLevel.LEVEL_8 if s.is_interpreted else self._devices[s.candidate].feature_level
            for s in steps
        ]
        # A subgraph's device is not given what it does not read: others may hold that in a memory of their own.
        is_whole = len(steps) == 1 and not steps[0].is_interpreted and not number
        if is_whole and self._needed[number] <= levels[0]:
            return [model]
        return [
            expressed_at(step_model(model, step), level) for step, level in zip(steps, levels, strict=True)
        ]

    async def _prepare(self, number: int, step: Step, part: Model, *, is_alone: bool) -> PreparedModel:
        device, options = self._devices[step.candidate], self._options
        # In the cache's names a step inside of control flow begins with its subgraph.
        operations = None if is_alone and not number else step.operations
        if number:
            operations = (_SUBGRAPH_IN_CACHE | number, *step.operations)

        async def prepare(deadline_ns: int | None = None) -> PreparedModel | None:
            if options.cache is not None:
                return await options.cache.prepare(
                    device, part, operations, options.preference, options.priority, deadline_ns
                )
            return await device.hal.prepare_model(
                part,
                preference=options.preference,
                priority=options.priority,
                deadline_ns=deadline_ns,
            )

        with section("LI_PC", f"prepare on {device.name}"), _errors_of(device):
            prepared = await prepare(options.deadline_ns)
        if prepared is None:
            raise GeneralFailure(f"{device.name}: prepared a model without an error, and gives none")
        check_abilities(prepared, PreparedModelDefaults, device.name)
        if options.recoverer is not None:
            return options.recoverer.recovering(device.name, prepared, prepare)
        return prepared


@contextlib.contextmanager
def _errors_of(device: RuntimeDevice) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        error = driver_error(e, device.name)
        raise error from error.__cause__


def _log_choices(divisions: Mapping[int, Division], devices: Sequence[RuntimeDevice]) -> None:
    if _logger.isEnabledFor(logging.DEBUG):
        for placement in _placement(divisions, devices):
            _logger.debug(
                "subgraph %d, operation %d (%s): %s, %s",
                placement.subgraph,
                placement.operation,
                placement.type,
                placement.device,
                placement.reason,
            )


async def _ask_about(
    model: Model,
    devices: Sequence[RuntimeDevice],
    levels: Sequence[int],
    preference: ExecutionPreference,
    *,
    is_checked: bool,
) -> tuple[dict[int, list[Candidate]], dict[int, int]]:
    """The devices' support, and the level needed, by number of the subgraph: the main one, and those that may be divided."""
    asked: dict[int, list[Candidate]] = {}
    needed: dict[int, int] = {}
    pending = [0]
    while pending:
        number = pending.pop(0)
        part = subgraph_model(model, number)
        with section("LR_PC", "slice"):
            needed[number], questions = await _on_thread(
                functools.partial(_questions, part, levels, is_checked=is_checked), "slicing a model"
            )
        asked[number] = await _ask(part, devices, questions, preference)
        found = open_references(model, number, asked[number], preference)
        pending += [other for other in found if other not in asked and other not in pending]
    return asked, needed


def _questions(model: Model, levels: Sequence[int], *, is_checked: bool) -> tuple[int, list[Slice | None]]:
    """The model's level, or ``LEVEL_OF_ALL`` if it ``is_checked``, and what each device can be asked; None for a device that can be
    asked nothing."""
    level = int(LEVEL_OF_ALL) if is_checked else validate_model(model)
    everything = tuple(range(len(model.main.operations)))
    needed = operation_levels(model) if level > min(levels) else ()
    return level, [
        Slice(model, everything) if level <= own else expressible_part(model, needed, own) for own in levels
    ]


async def _ask(
    model: Model,
    devices: Sequence[RuntimeDevice],
    questions: Sequence[Slice | None],
    preference: ExecutionPreference,
) -> list[Candidate]:
    answers: list[Candidate] = []
    failures: list[Error] = []
    for device, question in zip(devices, questions, strict=True):
        # The reference device is asked always: its process is there then when a step on another device fails.
        is_reference = device.driver == "reference"
        is_asked = is_reference or may_be_chosen(model, device.capabilities, answers, preference)
        supported = [False] * len(model.main.operations)
        if question is not None and is_asked:
            try:
                with section("LI_PC", f"ask {device.name}"):
                    answer = await device.hal.supported_operations(question.model)
                if len(answer) != len(question.operation_indexes):
                    raise GeneralFailure(
                        f"{device.name}: {len(question.operation_indexes)} operations, but {len(answer)} answers about support"
                    )
                for operation, is_supported in zip(question.operation_indexes, answer, strict=True):
                    supported[operation] = bool(is_supported)
            except Exception as e:
                _logger.warning("%s is left out: asked what it supports, it failed: %s", device.name, e)
                failures.append(driver_error(e, device.name))
        answers.append(
            Candidate(
                device.name,
                device.capabilities,
                tuple(supported),
                is_reference=is_reference,
                feature_level=device.feature_level,
                is_asked=is_asked,
            )
        )
    if failures and len(failures) == len(devices):
        raise failures[0]
    return answers


def _placement(divisions: Mapping[int, Division], devices: Sequence[RuntimeDevice]) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            choice.operation,
            operation_name(division.model, division.model.main.operations[choice.operation].type),
            INTERPRETER if choice.is_interpreted else devices[choice.candidate].name,
            choice.reason,
            number,
        )
        for number, division in sorted(divisions.items())
        for choice in division.choices
    )


def _temporaries(model: Model, steps: Sequence[PreparedStep]) -> dict[int, TensorSpec]:
    """The values that one step writes for another, beside the model's own outputs."""
    own = {*model.main.input_indexes, *model.main.output_indexes}
    keys = dict.fromkeys(key for step in steps for key in step.outputs if key not in own)
    return {key: tensor_spec(model.main.operands[key], f"temporary{key}") for key in keys}
