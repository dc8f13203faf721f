"""The results and the speed of the operations, against LiteRT: every model that is there, the same inputs, the same run.

Ours is the reference driver behind the public interface, in this process. Both have one thread.

How each figure is taken:
- Float models: for each sample the largest difference to LiteRT's default kernels, divided by the output's largest magnitude;
  the worst sample counts. Beside it is the same figure between LiteRT's default kernels and its own reference kernels
  (`BUILTIN_REF`): what the order of additions alone can do.
- Integer models: bytes that differ from LiteRT's reference kernels, over all samples.
- Class: samples whose largest output is another one than that of the kernels above.
- Samples are the test sets beside the models, all of them; for models without one, drawn by a seed.
- Speed: a block is the median of several executions; ours and `BUILTIN_REF` take turns. The time includes copying the
  input in and the output out, for both.

The models are looked for in `../shared/models` and, failing that, in `examples/data`; `--models DIR` names another place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import OpResolverType

import aionn
from benchmarks.engine import Engine
from benchmarks.rows import Report, Row, alternate, at_most, compare, options, single

ROOT = Path(__file__).resolve().parents[1]
SEED = 5
SAMPLES = 16
SAMPLES_QUICK = 4

RELATIVE_MAX = at_most(1e-4)
NONE = at_most(0)
SPEED = {
    "mobilenet_v2_1.0_224_float": at_most(0.3),
    "mobilenet_v2_1.0_224_int8": at_most(0.6),
}
"""Largest ratio to the reference kernels, by model."""

THREADS = "OPENBLAS_NUM_THREADS"

Array = npt.NDArray[Any]
Run = Callable[[Array], Array]


def draw(name: str, shape: tuple[int, ...], count: int) -> Array:
    """Seeded inputs in the range that a model was made for, `[count, *shape]` float32."""
    generator = np.random.default_rng(SEED)
    if name.startswith("shapes"):
        values = generator.random((count, *shape))
    elif name.startswith("digits"):
        values = generator.uniform(np.log(1e-6), 5, (count, *shape))
    elif name.startswith("mobilenet"):
        values = generator.uniform(-1, 1, (count, *shape))
    else:
        values = generator.standard_normal((count, *shape))
    return values.astype(np.float32)


def real_samples(path: Path, shape: tuple[int, ...], count: int) -> Array:
    """The test set beside a model, or `count` seeded samples, as real numbers."""
    test_set = path.with_name(path.name.split("_")[0] + "_test.npz")
    if not test_set.is_file():
        return draw(path.name, shape, count)
    x = np.load(test_set)["x"]
    scale = np.float32(255) if x.dtype == np.uint8 else np.float32(1)
    return (x.astype(np.float32) / scale).reshape(-1, *shape)


def relative(ours: Array, theirs: Array) -> float:
    """The largest difference, as a part of the largest magnitude of `theirs`."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def agreement(report: Report, path: Path, ours: Run, sample_count: int) -> None:
    """The rows that compare the answers with those of LiteRT."""
    reference = Engine(path, OpResolverType.BUILTIN_REF)
    samples = reference.quantised(real_samples(path, reference.input_shape, sample_count))
    is_float = reference.output["dtype"] == np.float32
    default = Engine(path, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES) if is_float else reference
    differences, spreads, byte_count, class_count = [], [], 0, 0
    for x in samples:
        y, expected = ours(x), default(x)
        class_count += int(y.argmax() != expected.argmax())
        if is_float:
            differences.append(relative(y, expected))
            spreads.append(relative(reference(x), expected))
        else:
            byte_count += int(np.count_nonzero(y.view(np.uint8) != expected.view(np.uint8)))
    title = f"{path.stem}, {len(samples)} samples"
    if is_float:
        worst, spread = max(differences), max(spreads)
        met = RELATIVE_MAX.met(worst, worst)
        report.add(
            Row(
                f"{title}: difference",
                worst,
                "rel",
                "its two kernel sets",
                spread,
                goal=RELATIVE_MAX,
                met=met,
            )
        )
    else:
        report.add(single(f"{title}: differing bytes", "bytes", [byte_count], NONE))
    report.add(single(f"{title}: another class", "", [class_count], NONE))


def speed(report: Report, path: Path, ours: Run, *, rounds: int, executions: int) -> None:
    """The row of the speed of a model."""
    theirs = Engine(path, OpResolverType.BUILTIN_REF)
    x = theirs.quantised(draw(path.name, theirs.input_shape, 1))[0]

    def block(run: Run) -> Callable[[], float]:
        def measure() -> float:
            times = []
            for _ in range(executions):
                start = time.perf_counter()
                run(x)
                times.append(time.perf_counter() - start)
            return 1e3 * statistics.median(times)

        return measure

    ours(x), theirs(x)
    blocks = alternate({"ours": block(ours), "peer": block(theirs)}, rounds)
    goal = SPEED.get(path.stem)
    report.add(compare(f"{path.stem}: execution", "ms", blocks["ours"], "BUILTIN_REF", blocks["peer"], goal))


def find_models(folder: Path | None) -> list[Path]:
    """The models of the first place that has any."""
    places = (
        [folder] if folder is not None else [ROOT.parent / "shared" / "models", ROOT / "examples" / "data"]
    )
    for place in places:
        if found := sorted(place.glob("*.tflite")):
            return found
    raise SystemExit(f"no .tflite files in {' or '.join(map(str, places))}")


def main() -> None:
    if os.environ.get(THREADS) != "1":
        # Read when the matrix library is loaded, which has happened: begin again.
        os.environ[THREADS] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.ops", *sys.argv[1:]])
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", type=Path, help="a folder with .tflite files")
    places, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    report = Report(chosen)
    models = find_models(places.models)
    report.note(f"models: {models[0].parent}; peer: LiteRT, one thread")
    with asyncio.Runner() as runner:
        runtime = aionn.open(drivers=["reference"], isolation="in_process")
        runner.run(runtime.__aenter__())
        try:
            for path in models:
                net = runner.run(runtime.compile(path))

                def ours(x: Array, net: aionn.Compilation = net) -> Array:
                    return runner.run(net.execute([x])).outputs[0]

                agreement(report, path, ours, SAMPLES_QUICK if chosen.quick else SAMPLES)
                rounds, executions = (6, 3) if chosen.quick else (20, 5)
                if not chosen.quick or path.stem in SPEED:
                    speed(report, path, ours, rounds=rounds, executions=executions)
        finally:
            runner.run(runtime.aclose())


if __name__ == "__main__":
    main()
