"""``aionn run``: execute a model on given or made inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

import aionn
from aionn.benchmarking.figures import spread_of
from aionn.cli import interrupts
from aionn.cli.importing import Dimensions, InputShapes, Values, import_options
from aionn.cli.numbers import DEADLINE_MS_MAX, SEED_MAX, numbers
from aionn.cli.output import check_writable, print_json, replaced
from aionn.drivers.registry import drivers_for
from aionn.hal import check_deadline_ns
from aionn.models.importing import ImportOptions
from aionn.platform.arrays import read_array
from aionn.reports.terminal import print_line
from aionn.runtime.clock import to_ns
from aionn.runtime.executions.results import PriorityName
from aionn.runtime.memory.arguments import Array, TensorSpec

__all__ = ["run"]

COUNT_MAX = 1_000_000
"""Most executions of one call: every latency is kept for the percentiles."""

TOP = 5
"""Number of the largest output values that are shown."""


def run(
    model: Path,
    /,
    *,
    input: Annotated[list[Path] | None, Parameter(name="--input")] = None,
    device: str | None = None,
    seed: Annotated[int, numbers(0, SEED_MAX)] = 0,
    count: Annotated[int, numbers(1, COUNT_MAX)] = 1,
    priority: PriorityName = "medium",
    deadline_ms: Annotated[float | None, numbers(0, DEADLINE_MS_MAX, "ms")] = None,
    output: Path | None = None,
    dimension: Dimensions = None,
    input_shape: InputShapes = None,
    value: Values = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Execute a model and show its outputs and timing.

    Args:
        model: A .tflite or .onnx file.
        input: One .npy file per input; without, inputs are random by the seed.
        device: Which device; by default each operation goes to the quickest.
        seed: Seed of random inputs.
        count: Number of executions, one after the other.
        priority: Which executions go first where several wait.
        deadline_ms: Time allowed for each execution.
        output: An .npz file to write the outputs to.
        dimension: NAME=EXTENT for an open extent of an .onnx file; may be repeated.
        input_shape: NAME=EXTENT,... for the shape of an input of an .onnx file; may be repeated.
        value: NAME=FILE.npy or NAME=NUMBER,... for an input of an .onnx file that becomes a constant; may be repeated.
        json: Print one JSON object.
    """
    within_ns = None if deadline_ms is None else to_ns(deadline_ms / 1e3, what="--deadline-ms")
    check_writable(output)
    imports = import_options(dimension, input_shape, value)
    values = [read_array(path, "--input") for path in input] if input else None
    report, outputs = interrupts.run(_run, model, imports, values, device, seed, count, priority, within_ns)
    if output is not None:
        _save(output, outputs)
    if json:
        print_json(report)
    else:
        _print(report)
    return 0


def _save(path: Path, outputs: Sequence[Array]) -> None:
    with replaced(path) as file:
        np.savez(file, allow_pickle=False, **{f"output{i}": a for i, a in enumerate(outputs)})


def _random(spec: TensorSpec, generator: np.random.Generator) -> Array:
    shape = tuple(extent or 1 for extent in spec.dimensions)
    if spec.dtype.kind == "f":
        return np.asarray(generator.random(shape), dtype=spec.dtype)
    if spec.dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    info = np.iinfo(spec.dtype)
    # Plain integers are often indexes or extents: small ones are likelier to be legal.
    low, high = (int(info.min), int(info.max) + 1) if spec.scale else (0, 2)
    return generator.integers(low, high, shape).astype(spec.dtype)


async def _run(
    model: Path,
    imports: ImportOptions,
    values: list[Array] | None,
    device: str | None,
    seed: int,
    count: int,
    priority: PriorityName,
    within_ns: int | None,
) -> tuple[dict[str, Any], tuple[Array, ...]]:
    async with aionn.open(drivers=drivers_for(device)) as runtime:
        started = time.perf_counter()
        net = await runtime.compile(model, devices=device, priority=priority, **imports.keywords)
        compile_ms = (time.perf_counter() - started) * 1e3
        generator = np.random.default_rng(seed)
        inputs = values if values is not None else [_random(spec, generator) for spec in net.inputs]
        latencies_ms, on_device_ms = [], []
        for _ in range(count):
            deadline = (
                None if within_ns is None else check_deadline_ns(aionn.now_ns() + within_ns, where="run")
            )
            result = await net.execute(inputs, deadline=deadline, measure=True)
            latencies_ms.append(result.total_ns / 1e6)
            if result.timing.time_on_device_ns is not None:
                on_device_ms.append(result.timing.time_on_device_ns / 1e6)
        report = {
            "model": str(model),
            "device": ", ".join(net.devices),
            "compile_ms": round(compile_ms, 3),
            "executions": count,
            "latency_ms": _spread(latencies_ms),
            "device_ms": _spread(on_device_ms),
            "outputs": [_summary(s, a) for s, a in zip(net.outputs, result.outputs, strict=True)],
        }
        return report, result.outputs


def _spread(values: list[float]) -> dict[str, float | None] | None:
    """Quantiles with few samples beyond them are None; so is all where the device measures nothing."""
    if not values:
        return None
    spread = spread_of(values)
    figures = {
        "min": spread.min,
        "max": spread.max,
        "mean": spread.mean,
        "p50": spread.p50,
        "p99": spread.p99,
    }
    return {name: None if value is None else round(value, 3) for name, value in figures.items()}


def _quantiles_text(spread: dict[str, float | None], count: int) -> str:
    """The quantiles that there are; otherwise the mean, which for one execution is its time."""
    known = [name for name in ("p50", "p99") if spread[name] is not None] or ["mean"]
    return ", ".join(
        f"{name} {spread[name]:.2f} ms" if count > 1 else f"{spread[name]:.2f} ms" for name in known
    )


def _summary(spec: TensorSpec, array: Array) -> dict[str, Any]:
    flat = array.reshape(-1)
    real = (flat.astype(np.float64) - spec.zero_point) * spec.scale if spec.scale else flat.astype(np.float64)
    largest = np.argsort(-real, kind="stable")[:TOP]
    return {
        "name": spec.name,
        "type": str(array.dtype),
        "shape": list(array.shape),
        "largest": [{"index": int(i), "value": float(real[i])} for i in largest],
    }


def _print(report: dict[str, Any]) -> None:
    latency, device = report["latency_ms"], report["device_ms"]
    print_line(f"on {report['device']}, compiled in {report['compile_ms']:.1f} ms", lead=report["model"])
    count = report["executions"]
    on_device = "" if device is None else f"; on the device {_quantiles_text(device, count)}"
    print_line(
        f"{count} execution{'s' if count > 1 else ''}: latency {_quantiles_text(latency, count)}{on_device}"
    )
    for output in report["outputs"]:
        print_line(f"output {output['name']} {output['type']} {output['shape']}")
        for entry in output["largest"]:
            print_line(f"  [{entry['index']}] {entry['value']:.6g}")
