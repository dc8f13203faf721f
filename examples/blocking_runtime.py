"""The runtime without an event loop: the same calls from ordinary threads.

Four threads share one compilation; a stream reads its frames from a plain generator.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import aionn
import aionn.blocking

MODEL = Path(__file__).parent / "data" / "digits_float.tflite"


def main() -> None:
    silence = np.full((1, 49, 40, 1), np.log(1e-6), np.float32)
    with aionn.blocking.open(drivers=["reference"]) as runtime:
        net = runtime.compile(MODEL)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: net.execute([silence]), range(8)))
        labels = {int(result.outputs[0].argmax()) for result in results}
        with net.burst() as burst:
            frames = (silence for _ in range(5))
            statuses = [r.status for r in burst.stream(frames, deadline=lambda _: aionn.after(5))]
    assert labels == {0}, labels
    assert statuses == ["on_time"] * 5, statuses
    print("8 executions from 4 threads and 5 frames agree: silence")


if __name__ == "__main__":
    main()
