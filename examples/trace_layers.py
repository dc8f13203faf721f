"""A trace over all processes, and where the time went by layer.

Open the file in a trace viewer such as Perfetto to see the timeline.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import aionn
from aionn.runtime.traces import read_trace, summarize

MODEL = Path(__file__).parent / "data" / "digits_float.tflite"


async def main() -> None:
    silence = np.full((1, 49, 40, 1), np.log(1e-6), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        async with aionn.open(drivers=["reference"], trace=path) as runtime:
            net = await runtime.compile(MODEL)
            for _ in range(20):
                await net.execute([silence])
        found = summarize(read_trace(path))
    assert found.executions == 20 and found.processes == 2, found
    for layer, cells in found.rows.items():
        total = cells["Ex. total"]
        print(f"{layer:8}", "n/a" if total is None else f"{total / found.executions:.3f} ms per execution")


if __name__ == "__main__":
    asyncio.run(main())
