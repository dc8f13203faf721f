"""Imports mutated files in a process of its own: `python -m tests.aionn.models.onnx.mutating SEED COUNT`.

Half of the files have mutated bytes, half a mutated structure (a record of the schema, encoded again). The process has
``MEMORY_BYTES`` more of address space than it begins with, and a timer that ends it if an import takes more than ``IMPORT_S`` of
processor time. It writes the number of the file before a crash can happen, and at the end a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np

from aionn.errors import Error
from aionn.models.onnx import encode_model, load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import DataType, ModelProto, ValueInfo, read_model
from aionn.validation import validate_model
from tests.aionn.models.onnx.building import file, info
from tests.aionn.models.onnx.test_control_flow import GOES_ON, NUMBER, X, choice, counted, graph
from tests.support.mutator import mutate, mutate_bytes

MEMORY_BYTES = 1 << 30
IMPORT_S = 5.0

FOLDER = Path(__file__).parents[1] / "torch_files"
BASE_BYTES_MAX = 16 << 10
"""Larger files mostly have more weights, whose bytes mean nothing to the importer."""

QUANTIZED_BYTES_MAX = 32 << 10
"""The same for files of quantised layers, whose scales and zero points do mean something; there is none as small as the others."""


def small_files() -> list[bytes]:
    nodes = [
        node("Conv", ["img", "w", "b"], ["h"], pads=[1, 1, 1, 1], kernel_shape=[3, 3], name="conv"),
        node("Relu", ["h"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Shape", ["p"], ["s"]),
        node("ConstantOfShape", ["s"], ["zeros"]),
        node("Add", ["p", "zeros"], ["q"]),
        node("Reshape", ["q", "shape"], ["f"]),
        node("Gemm", ["f", "g"], ["o"], transB=1),
        node("Softmax", ["o"], ["y"], axis=-1),
    ]
    constants = {
        "w": np.ones((4, 2, 3, 3), np.float32),
        "b": np.zeros(4, np.float32),
        "shape": np.array([1, -1], np.int64),
        "g": np.ones((3, 36), np.float32),
    }
    looped, numbers = counted(3)
    arithmetic = [
        node("Range", ["zero", "n", "one"], ["r"]),
        node("Expand", ["r", "wide"], ["e"]),
        node("Tile", ["e", "times"], ["t"]),
        node("Gather", ["x", "t"], ["g"], axis=0),
        node("NonZero", ["g"], ["z"]),
        node("ReduceSum", ["g"], ["y"], keepdims=0),
    ]
    branches = [graph([node(kind, ["x"], [kind])], [], [kind]) for kind in ("Neg", "Exp")]
    body = graph(
        [
            choice(*branches, "c"),
            node("Add", ["v", "c"], ["next"]),
            node("ReduceMax", ["next"], ["top"]),
            node("Less", ["top", "most"], ["goes"]),
        ],
        [NUMBER, GOES_ON, "v"],
        ["goes", "next"],
    )
    repeated = [node("Loop", ["n", "b", "x"], ["y"], body=body)]
    inputs = [info("x", X), info("b", np.array(True)), info("n", np.array(3))]
    whole = {name: np.array(value) for name, value in (("zero", 0), ("n", 2), ("one", 1))}
    whole |= {"wide": np.array([3, 2]), "times": np.array([2, 1])}
    return [
        file(nodes, [ValueInfo("img", DataType.FLOAT, (1, 2, 6, 6))], ["y"], constants),
        file(looped, [info("x", X)], ["last", "all"], numbers),
        file(arithmetic, [info("x", X)], ["y", "z"], whole),
        file(repeated, inputs, ["y"], {"most": np.float32([[9]])}),
    ]


def is_base(path: Path) -> bool:
    """Whether mutated forms of a file of the exporters are imported."""
    size_max = QUANTIZED_BYTES_MAX if path.stem.endswith("_int8") else BASE_BYTES_MAX
    return path.stat().st_size <= size_max


def mutated(base: bytes, record: ModelProto, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return mutate_bytes(base, rng)
    try:
        return encode_model(mutate(record, rng, changes=rng.choice((1, 1, 2, 4))))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error):
        return mutate_bytes(base, rng)  # The writer takes no such record.


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(seed: int, count: int) -> None:
    bases = [*small_files(), *(p.read_bytes() for p in sorted(FOLDER.glob("*.onnx")) if is_base(p))]
    records = [read_model(base) for base in bases]
    limit = address_space_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = 0
    slowest = (0.0, -1)
    for number in range(seed, seed + count):
        rng = random.Random(number)
        which = rng.randrange(len(bases))
        data = mutated(bases[which], records[which], rng)
        os.pwrite(1, f"{number:10}\n".encode(), 0)
        # The default action of the signal ends the process, whatever it is in the middle of.
        signal.setitimer(signal.ITIMER_PROF, IMPORT_S)
        started = time.process_time()
        try:
            validate_model(load_onnx(data).model)
            read += 1
        except Error as e:
            if "unforeseen" in str(e) and os.environ.get("SHOW_UNFORESEEN"):
                print(number, e, file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, (time.process_time() - started, number))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {
        "bases": len(bases),
        "read": read,
        "slowest_s": slowest[0],
        "slowest": slowest[1],
        "grown_kib": peak - before,
    }
    os.pwrite(1, json.dumps(figures).encode() + b"\n", 11)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
