"""A folder of frames over a Ray cluster by plain tasks, where throughput counts and there are no deadlines.

Each task gets the paths of some frames, and each process of Ray opens one runtime for all of its tasks. The folder is on storage
that all machines of the cluster have; here it is made first. Needs `pip install 'aionn[ray]'`; `RAY_ADDRESS` names a cluster, and
without it one is started on this machine.
"""

import tempfile
from pathlib import Path

import numpy as np
import ray

import aionn.blocking

MODEL = Path(__file__).resolve().parents[1] / "data" / "digits_float.tflite"
FRAMES, FRAMES_PER_TASK = 24, 6


nets: list[
    aionn.blocking.Compilation
] = []  # The model, once for each process; aionn closes the runtime at its end.


def labels(paths: list[Path]) -> list[int]:
    if not nets:
        nets.append(aionn.blocking.open(drivers=["reference"]).start().compile(MODEL))
    return [int(nets[0].execute([np.load(path)]).outputs[0].argmax()) for path in paths]


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number:04}.npy" for number in range(FRAMES)]
        for path in paths:
            np.save(path, rng.normal(-5, 3, (1, 49, 40, 1)).astype(np.float32))
        ray.init(log_to_driver=False)
        task = ray.remote(num_cpus=1)(labels)
        parts = [paths[first : first + FRAMES_PER_TASK] for first in range(0, FRAMES, FRAMES_PER_TASK)]
        found = [label for part in ray.get([task.remote(part) for part in parts]) for label in part]
        ray.shutdown()
        assert found == labels(paths), "as in this process"
    print(f"{FRAMES} frames in {len(parts)} tasks: {sorted(set(found))}")


if __name__ == "__main__":
    main()
