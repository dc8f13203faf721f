"""Cases: images as arguments of executions (``images``).

A driver need not take them. One that declares it computes with their pixels, and touches nothing between them; one that does not
answers GENERAL_FAILURE. Neither takes constants of a model from them.

Source: memory of kind ``hardware_buffer`` of the NN HAL 1.2; the rule by which pixels are a tensor is
``aionn.drivers.kit.images``'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from aionn.conformance.requests import FILL
from aionn.conformance.vts.case import Case, CaseSkipped, VtsSubject, expect_refusal, expect_status, fail
from aionn.conformance.vts.paths import PATHS, Path, executing, expect_refused
from aionn.errors import ErrorStatus
from aionn.hal import (
    DataLocation,
    HardwareBufferDesc,
    HardwareBufferFormat,
    Memory,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder

__all__ = ["CASES"]

WIDTH, HEIGHT, STRIDE = 5, 3, 8
FORMATS = [f for f in HardwareBufferFormat if f != HardwareBufferFormat.BLOB]


def _description(format: HardwareBufferFormat) -> HardwareBufferDesc:
    return HardwareBufferDesc(WIDTH, HEIGHT, 1, format, STRIDE)


def _identity_model(description: HardwareBufferDesc) -> Model:
    """The output equals the input: with a zero point of 0, RELU changes no value."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_QUANT8_ASYMM, description.shape, scale=1.0, zero_point=0)
    return g.build([g.result(OperationType.RELU, [x], x)])


@contextlib.contextmanager
def _images(format: HardwareBufferFormat) -> Iterator[tuple[Memory, Memory, Request]]:
    """An image with values, one to write into, and the request for both."""
    source, target = (Memory.create_hardware_buffer(_description(format)) for _ in range(2))
    with contextlib.closing(source), contextlib.closing(target):
        source.array[:] = FILL
        target.array[:] = FILL
        source.pixels[...] = np.arange(source.pixels.size).reshape(source.pixels.shape)
        inputs = RequestArgument(location=DataLocation(0))
        outputs = RequestArgument(location=DataLocation(1))
        yield source, target, Request((inputs,), (outputs,), (source, target))


async def _computes(subject: VtsSubject, path: Path, format: HardwareBufferFormat) -> None:
    """Pixels come through a model that changes nothing, and nothing is written beside them."""
    takes = subject.device.info.takes_images
    model = _identity_model(_description(format))
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with _images(format) as (source, target, request):
            before = source.array.copy()
            answer = await executor.execute(request)
            allowed = [ErrorStatus.NONE if takes else ErrorStatus.GENERAL_FAILURE]
            expect_status(answer.status, answer.message, allowed, "an image as input and output")
            wanted = np.full_like(target.array, FILL)
            if takes:
                mine = Memory.create_hardware_buffer(_description(format))
                with contextlib.closing(mine):
                    mine.array[:] = FILL
                    mine.pixels[...] = source.pixels
                    wanted = mine.array.copy()
            if (target.array != wanted).any() or (source.array != before).any():
                where = np.flatnonzero(target.array != wanted)[:1]
                fail("the pixels, and no byte beside them", f"another byte {where.tolist()}")


async def _refuses_parts(subject: VtsSubject, path: Path) -> None:
    """A place in an image is all of it: offset and length are 0."""
    _check_takes(subject)
    format = HardwareBufferFormat.R8_UNORM
    model = _identity_model(_description(format))
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with _images(format) as (_, _, request):
            for changes in ({"offset": 1}, {"length": WIDTH * HEIGHT}, {"padding": 1}):
                for what in ("inputs", "outputs"):
                    (argument,) = getattr(request, what)
                    place = msgspec.structs.replace(argument.location, **changes)
                    changed = (msgspec.structs.replace(argument, location=place),)
                    where = f"{what[:-1]} with {changes}"
                    await expect_refused(executor, msgspec.structs.replace(request, **{what: changed}), where)


async def _refuses_other_shapes(subject: VtsSubject, path: Path) -> None:
    """An image of another size than the operand's is refused, as input and as output."""
    _check_takes(subject)
    model = _identity_model(_description(HardwareBufferFormat.R8G8B8_UNORM))
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with (
            _images(HardwareBufferFormat.R8G8B8_UNORM) as (source, target, request),
            _images(HardwareBufferFormat.R8_UNORM) as (other, _, _),
        ):
            for where, pools in (("input", (other, target)), ("output", (source, other))):
                await expect_refused(executor, msgspec.structs.replace(request, pools=pools), where)


async def _hold_no_constants(subject: VtsSubject) -> None:
    """A model whose constants are in an image is rejected, by drivers that take images and by those that do not."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1, 1024))
    y = g.constant(np.ones((1, 1024), np.float32), OperandType.TENSOR_FLOAT32)
    model = g.build([g.result(OperationType.ADD, [x, y, 0], x)])
    sizes = [pool.size_bytes for pool in model.pools]
    if not sizes:
        raise CaseSkipped("the suite's model has no constants in memory")
    images = tuple(
        Memory.create_hardware_buffer(HardwareBufferDesc(size, 1, 1, HardwareBufferFormat.R8_UNORM))
        for size in sizes
    )
    try:
        changed = msgspec.structs.replace(model, pools=images)
        subject.step()
        await expect_refusal(subject.device.supported_operations(changed), "supported_operations")
        subject.step()
        await expect_refusal(subject.device.prepare_model(changed), "prepare_model")
    finally:
        for pool in (*images, *model.pools):
            pool.close()


def _check_takes(subject: VtsSubject) -> None:
    if not subject.device.info.takes_images:
        raise CaseSkipped("the device takes no images")


CASES = (
    *(
        Case(f"images/computes[{format.name},{path}]", partial(_computes, path=path, format=format))
        for format in FORMATS
        for path in PATHS
    ),
    *(
        Case(f"images/{name}[{path}]", partial(check, path=path))
        for name, check in (
            ("refuses_parts", _refuses_parts),
            ("refuses_other_shapes", _refuses_other_shapes),
        )
        for path in PATHS
    ),
    Case("images/hold_no_constants", _hold_no_constants),
)
