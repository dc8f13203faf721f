"""The deprecated OEM operation and types: legal in every model, bytes to everybody, supported by drivers that know them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    BufferDesc,
    BufferRole,
    DataLocation,
    ExecutionPreference,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    OperationType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
)
from aionn.interpreter import RunControl
from aionn.models.builder import GraphBuilder
from aionn.validation import validate_model

OEM = b"vendor"


def oem_model() -> Model:
    """Bytes go in beside a value whose size nobody knows; bytes come out."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_OEM_BYTE, (4,))
    y = g.input(OperandType.OEM, ())
    out = g.variable(OperandType.TENSOR_OEM_BYTE, (4,))
    g.operation(OperationType.OEM_OPERATION, [x, y], [out])
    return g.build([out])


class OemDevice(ReferenceDevice):
    """Adds the length of the vendor's value to each byte."""

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type == OperationType.OEM_OPERATION for operation in model.main.operations]

    def prepare(self, model: Model, *, preference: ExecutionPreference, priority: Priority, **_: Any) -> Any:
        return OemModel(self, model, priority)


class OemModel(ReferencePreparedModel):
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        x, y = inputs
        assert x is not None and y is not None
        return [outputs[0].store(x + np.uint8(y.size))]


def request(value: bytes, size: int = 4) -> tuple[Request, Memory]:
    pool = Memory.create(256)
    pool.array[:size] = 7
    pool.array[64 : 64 + len(value)] = np.frombuffer(value, np.uint8)
    arguments = [
        RequestArgument(location=DataLocation(0, offset, length))
        for offset, length in ((0, size), (64, len(value)), (128, 4))
    ]
    return Request((arguments[0], arguments[1]), (arguments[2],), (pool,)), pool


def test_oem_operation_is_legal_at_every_level() -> None:
    assert validate_model(oem_model()) == 1


@pytest.mark.parametrize("value", [OEM, b"1", bytes(60)], ids=len)
async def test_driver_that_knows_it_gets_bytes(value: bytes) -> None:
    async with OemDevice() as device:
        assert await device.supported_operations(oem_model()) == (True,)
        prepared = await device.prepare_model(oem_model())
        arguments, pool = request(value)
        await prepared.execute_synchronously(arguments)
        assert pool.array[128:132].tolist() == [7 + len(value)] * 4
        wrong, _ = request(value, size=5)
        with pytest.raises(InvalidArgument, match="input 0, length: expected 4 bytes"):
            await prepared.execute_synchronously(wrong)


async def test_vendors_value_has_no_device_memory() -> None:
    async with OemDevice() as device:
        prepared = await device.prepare_model(oem_model())
        with pytest.raises(GeneralFailure, match="a vendor's values"):
            await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 1)], [])


async def test_driver_that_does_not_refuses_it(device: Any) -> None:
    assert await device.supported_operations(oem_model()) == (False,)
    with pytest.raises(InvalidArgument, match="does not support OEM_OPERATION"):
        await device.prepare_model(oem_model())


async def test_value_of_unknown_size_that_nobody_uses_is_no_fault(device: Any) -> None:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1,))
    g.input(OperandType.OEM, ())
    model = g.build([g.result(OperationType.RELU, [x], x)])
    place = DataLocation(0, len(model.operand_values), len(OEM))
    constant = Operand(OperandType.OEM, lifetime=OperandLifeTime.CONSTANT_COPY, location=place)
    main = msgspec.structs.replace(model.main, operands=(*model.main.operands, constant))
    values = model.operand_values + OEM
    model = msgspec.structs.replace(model, main=main, operand_values=values)
    prepared = await device.prepare_model(model)
    arguments, pool = request(OEM)
    pool.array[:4] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    await prepared.execute_synchronously(arguments)
    assert pool.array[128:132].copy().view(np.float32) == 2.5


async def test_runtime_falls_back_for_no_oem_operation() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        with pytest.raises(InvalidArgument, match="OEM_OPERATION"):
            await runtime.compile(oem_model(), allow_fallback=True)
