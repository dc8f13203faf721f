"""A vendor extension in one driver: Fibonacci numbers in a tensor type of 64 bits; its scale and zero point are extension data."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import anyio
import msgspec
import numpy as np

import aionn
from aionn import hal
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.extensions import extension_code
from aionn.models.builder import ExtensionCode, GraphBuilder

NAME = "com.example.fibonacci"
TENSOR_QUANT64 = ExtensionCode(NAME, 0)
FIBONACCI, DEQUANTIZE64 = ExtensionCode(NAME, 0), ExtensionCode(NAME, 1)  # numbered apart from types
EXTENSION = hal.Extension(NAME, (hal.ExtensionOperandType(TENSOR_QUANT64.number, True, 8),))


class FibonacciDevice(BlockingDevice):
    def __init__(self, name: str) -> None:
        performance = hal.uniform_capabilities(1.0, 1.0)
        level = hal.FeatureLevel.LEVEL_4
        super().__init__(hal.DeviceInfo(name, hal.DeviceType.OTHER, "1", level, performance, (EXTENSION,)))

    def supports(self, model: hal.Model) -> Sequence[bool]:
        return [extension_code(model, o.type) in (FIBONACCI, DEQUANTIZE64) for o in model.main.operations]

    def prepare(self, model: hal.Model, *, priority: hal.Priority, **_: object) -> FibonacciModel:
        return FibonacciModel(self, model, priority)


class FibonacciModel(BlockingPreparedModel):
    def run(self, inputs, outputs, control):  # type: ignore[no-untyped-def]
        main = self.model.main
        values = dict(zip(main.input_indexes, inputs, strict=True))
        for operation in main.operations:
            control.check()  # Deadlines and cancellation, as often as the device can stop.
            (source,), (target,) = operation.inputs, operation.outputs
            is_fibonacci = extension_code(self.model, operation.type) == FIBONACCI
            data = main.operands[target if is_fibonacci else source].extension_data
            scale, zero_point = struct.unpack("<dq", data)
            if is_fibonacci:
                numbers = np.array([fibonacci(int(n)) for n in values[source]], np.float64)
                values[target] = np.round(numbers / scale).astype(np.int64) + zero_point
            else:
                values[target] = ((values[source] - zero_point) * scale).astype(np.float32)
        return [area.store(values[i]) for area, i in zip(outputs, main.output_indexes, strict=True)]


def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(min(max(n, 0), 90)):  # Inputs are not trusted.
        a, b = b, a + b
    return a


async def main() -> None:
    graph = GraphBuilder()
    indexes = graph.input(hal.OperandType.TENSOR_INT32, (5,))
    wide = graph.variable(TENSOR_QUANT64, (5,))
    wide.operand = msgspec.structs.replace(wide.operand, extension_data=struct.pack("<dq", 0.5, 10))
    result = graph.variable(hal.OperandType.TENSOR_FLOAT32, (5,))
    graph.operation(FIBONACCI, [indexes], [wide])
    graph.operation(DEQUANTIZE64, [wide], [result])
    async with aionn.open(devices=[FibonacciDevice("example-fibonacci")]) as runtime:
        net = await runtime.compile(graph.build([result]))
        numbers = (await net.execute([np.array([0, 1, 10, 50, 90], np.int32)])).outputs[0]
    print("Fibonacci numbers:", numbers.astype(int).tolist())
    assert numbers.tolist() == [np.float32(n) for n in (0, 1, 55, 12586269025, 2880067194370816120)]


if __name__ == "__main__":
    anyio.run(main)
