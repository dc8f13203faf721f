"""State that stays in the device: what one execution writes, the next one reads, without a copy.

The model is a leaky sum: state' = 0.5 * state + input. Two device memories take turns as its input and output.
"""

import asyncio

import numpy as np

import aionn
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder


def leaky_sum() -> aionn.Model:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    state = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    half = graph.constant(np.full(4, 0.5, np.float32))
    kept = graph.result(OperationType.MUL, [state, half, 0], like=x)
    return graph.build([graph.result(OperationType.ADD, [kept, x, 0], like=x)])


async def main() -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(leaky_sum())
        now, after = [await runtime.allocate(inputs=[(net, 1)], outputs=[(net, 0)]) for _ in range(2)]
        await now.write(np.zeros(4, np.float32))
        expected = np.zeros(4, np.float32)
        for step in range(20):
            x = np.full(4, step, np.float32)
            await net.execute([x, now], outputs=[after])
            now, after = after, now
            expected = 0.5 * expected + x
        got = await now.read()
        for memory in (now, after):
            await memory.aclose()
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    print("after 20 steps in device memory:", got)


if __name__ == "__main__":
    asyncio.run(main())
