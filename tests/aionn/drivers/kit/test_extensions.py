"""Vendor extensions: codes, sizes, several in one model, and what a device that lacks one answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.extensions import extension_code, extension_types
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    BufferDesc,
    BufferRole,
    DataLocation,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    Extension,
    ExtensionOperandType,
    FeatureLevel,
    Memory,
    Model,
    OperandLifeTime,
    OperandType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
    uniform_capabilities,
)
from aionn.interpreter import RunControl
from aionn.models.builder import ExtensionCode, GraphBuilder

ONE, TWO, UNKNOWN = "com.example.one", "com.example.two", "com.example.unknown"
WIDE, PAIR = ExtensionCode(ONE, 7), ExtensionCode(TWO, 7)
COPY = {name: ExtensionCode(name, 3) for name in (ONE, TWO, UNKNOWN)}
EXTENSIONS = (
    Extension(ONE, (ExtensionOperandType(7, True, 8), ExtensionOperandType(8, False, 16))),
    Extension(TWO, (ExtensionOperandType(7, True, 2),)),
)


class Copying(BlockingDevice):
    """Every operation copies its first input; says yes to everything."""

    def __init__(self) -> None:
        super().__init__(
            DeviceInfo(
                "copying",
                DeviceType.OTHER,
                "1",
                FeatureLevel.LEVEL_4,
                uniform_capabilities(1.0, 1.0),
                EXTENSIONS,
            ),
            memory_bytes_max=1 << 20,
        )
        self.codes: list[tuple[str, int] | None] = []

    def supports(self, model: Model) -> Sequence[bool]:
        self.codes = [extension_code(model, o.type) for o in model.main.operations]
        return [True] * len(model.main.operations)

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        return CopyingModel(self, model, priority)


class CopyingModel(BlockingPreparedModel):
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        value = inputs[0]
        assert value is not None
        return [area.store(value) for area in outputs]


@pytest.fixture
async def copying() -> Any:
    async with Copying() as device:
        yield device


def copy_model(*steps: tuple[ExtensionCode, ExtensionCode], dimensions: tuple[int, ...] = (3,)) -> Model:
    """Operations one after the other, each with the type of its output."""
    graph = GraphBuilder()
    value = graph.input(steps[0][1], dimensions)
    for operation, kind in steps:
        output = graph.variable(kind, dimensions)
        graph.operation(operation, [value], [output])
        value = output
    return graph.build([value])


def request_for(size_in: int, size_out: int) -> Request:
    pools = (Memory.create(64), Memory.create(64))
    pools[0].array[:] = np.arange(64)
    return Request(
        (RequestArgument(False, DataLocation(0, 0, size_in)),),
        (RequestArgument(False, DataLocation(1, 0, size_out)),),
        pools,
    )


async def test_operations_of_several_extensions_in_one_model(copying: Copying) -> None:
    model = copy_model((COPY[ONE], WIDE), (COPY[TWO], WIDE), (COPY[ONE], WIDE))
    assert await copying.supported_operations(model) == (True, True, True)
    assert copying.codes == [(ONE, 3), (TWO, 3), (ONE, 3)]
    prepared = await copying.prepare_model(model)
    request = request_for(24, 24)
    await prepared.execute_synchronously(request)
    assert isinstance(request.pools[1], Memory)
    assert request.pools[1].array[:24].tolist() == list(range(24))


def test_prefixes_are_the_models_own() -> None:
    forward = copy_model((COPY[ONE], WIDE), (COPY[TWO], WIDE))
    backward = msgspec.structs.replace(
        forward,
        extension_name_to_prefix=tuple(
            msgspec.structs.replace(entry, prefix=3 - entry.prefix)
            for entry in forward.extension_name_to_prefix
        ),
    )
    code = forward.main.operations[0].type
    assert extension_code(forward, code) == (ONE, 3)
    assert extension_code(backward, code) == (TWO, 3)
    assert extension_code(forward, OperandType.TENSOR_FLOAT32) is None
    wide = forward.main.operands[0].type
    assert extension_types(forward, EXTENSIONS)[wide].byte_size == 8
    assert extension_types(backward, EXTENSIONS)[wide].byte_size == 2


async def test_what_the_device_lacks_is_unsupported_whatever_the_driver_says(copying: Copying) -> None:
    model = copy_model((COPY[ONE], WIDE), (COPY[UNKNOWN], WIDE), (COPY[ONE], ExtensionCode(ONE, 99)))
    assert await copying.supported_operations(model) == (True, False, False)
    with pytest.raises(InvalidArgument, match="does not support"):
        await copying.prepare_model(model)


async def test_reference_device_supports_no_extension(reference: ReferenceDevice) -> None:
    model = copy_model((COPY[ONE], WIDE))
    assert await reference.supported_operations(model) == (False,)


@pytest.mark.parametrize(("size_in", "size_out"), [(23, 24), (24, 23), (16, 24), (24, 32), (8, 8)])
async def test_arguments_have_the_size_of_type_and_shape(
    copying: Copying, size_in: int, size_out: int
) -> None:
    prepared = await copying.prepare_model(copy_model((COPY[ONE], WIDE)))
    with pytest.raises(InvalidArgument, match="length: expected 24 bytes"):
        await prepared.execute_synchronously(request_for(size_in, size_out))


async def test_sizes_of_open_shapes_come_from_the_request(copying: Copying) -> None:
    prepared = await copying.prepare_model(copy_model((COPY[TWO], PAIR), dimensions=(0,)))
    request = request_for(10, 10)
    result = await prepared.execute_synchronously(
        msgspec.structs.replace(
            request, inputs=(msgspec.structs.replace(request.inputs[0], dimensions=(5,)),)
        )
    )
    assert result.output_sufficient_size
    with pytest.raises(InvalidArgument, match="expected 8 bytes"):
        await prepared.execute_synchronously(
            msgspec.structs.replace(
                request, inputs=(msgspec.structs.replace(request.inputs[0], dimensions=(4,)),)
            )
        )


def _with_operand(model: Model, index: int, **changes: Any) -> Model:
    operands = list(model.main.operands)
    operands[index] = msgspec.structs.replace(operands[index], **changes)
    return msgspec.structs.replace(model, main=msgspec.structs.replace(model.main, operands=tuple(operands)))


async def test_constants_have_the_size_of_type_and_shape(copying: Copying) -> None:
    for data, is_right in ((bytes(24), True), (bytes(23), False), (bytes(8), False)):
        graph = GraphBuilder()
        a = graph.input(WIDE, (3,))
        b = graph.constant(data, WIDE, dimensions=(3,))
        out = graph.variable(WIDE, (3,))
        graph.operation(COPY[ONE], [a, b], [out])
        model = graph.build([out])
        if is_right:
            await copying.prepare_model(model)
        else:
            with pytest.raises(InvalidArgument, match="length: expected 24 bytes"):
                await copying.prepare_model(model)


async def test_scalars_of_extensions_have_no_dimensions(copying: Copying) -> None:
    scalar = ExtensionCode(ONE, 8)
    await copying.prepare_model(copy_model((COPY[ONE], scalar), dimensions=()))
    with pytest.raises(InvalidArgument, match="no dimensions for a scalar"):
        await copying.prepare_model(copy_model((COPY[ONE], scalar), dimensions=(1,)))


async def test_prefix_that_the_model_does_not_name_is_refused(copying: Copying) -> None:
    model = copy_model((COPY[ONE], WIDE))
    unnamed = msgspec.structs.replace(model, extension_name_to_prefix=())
    with pytest.raises(InvalidArgument, match="prefix"):
        await copying.supported_operations(unnamed)
    data_on_base = _with_operand(
        model,
        0,
        type=OperandType.TENSOR_FLOAT32,
        extension_data=b"x",
        lifetime=OperandLifeTime.SUBGRAPH_INPUT,
    )
    with pytest.raises(InvalidArgument, match="extension data"):
        await copying.supported_operations(data_on_base)


async def test_extension_data_reach_the_driver(copying: Copying) -> None:
    model = _with_operand(copy_model((COPY[ONE], WIDE)), 0, extension_data=b"\x01\x02")
    prepared = await copying.prepare_model(model)
    assert prepared.model.main.operands[0].extension_data == b"\x01\x02"


async def test_device_memory_of_an_extensions_type_is_a_general_failure(copying: Copying) -> None:
    prepared = await copying.prepare_model(copy_model((COPY[ONE], WIDE)))
    with pytest.raises(GeneralFailure):
        await copying.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
