"""``aionn inspect``: what is in a model."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import anyio
from cyclopts import Parameter

import aionn
from aionn.cli.output import console, print_json, print_table
from aionn.errors import Error, InvalidArgument
from aionn.hal import Model, operation_type_name
from aionn.models.tflite import load_tflite
from aionn.runtime.arguments import tensor_spec
from aionn.validation import validate_model

__all__ = ["inspect"]


def inspect(model: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Show a model's inputs, outputs, operations, sizes, least feature level, and which device supports what.

    Args:
        model: A .tflite file.
        json: Print one JSON object instead of tables.
    """
    try:
        loaded = load_tflite(model)
    except OSError as e:
        raise InvalidArgument(f"model {model}: cannot be read: {e.strerror}") from e
    report = _describe(loaded.model)
    report["model"] = str(model)
    for key, arguments, operands in (
        ("inputs", loaded.inputs, loaded.model.main.inputs),
        ("outputs", loaded.outputs, loaded.model.main.outputs),
    ):
        report[key] = [str(tensor_spec(o, a.name)) for a, o in zip(arguments, operands, strict=True)]
    report["devices"] = anyio.run(_support, loaded.model)
    if json:
        print_json(report)
    else:
        _print(report)
    return 0


def _describe(model: Model) -> dict[str, Any]:
    subgraphs = (model.main, *model.referenced)
    constants = [o for s in subgraphs for o in s.operands if o.is_constant]
    return {
        "feature_level": validate_model(model),
        "subgraphs": len(subgraphs),
        "operands": sum(len(s.operands) for s in subgraphs),
        "operations": dict(
            sorted(Counter(operation_type_name(o.type) for s in subgraphs for o in s.operations).items())
        ),
        "constant_values": sum(math.prod(o.dimensions) for o in constants),
        "constant_bytes": sum(o.location.length for o in constants),
        "is_relaxed": model.relax_computation_float32_to_float16,
    }


async def _support(model: Model) -> dict[str, Any]:
    support: dict[str, Any] = {}
    async with aionn.open() as runtime:
        for device in runtime.devices:
            try:
                answer = await device.hal.supported_operations(model)
                support[device.name] = {"supported": sum(answer), "of": len(answer)}
            except Error as e:
                support[device.name] = {"error": str(e)}
        for missing in runtime.unavailable:
            support[missing.name] = {"error": missing.reason}
    return support


def _print(report: dict[str, Any]) -> None:
    screen = console()
    screen.print(f"[bold]{report['model']}[/bold]")
    screen.print(
        f"feature level {report['feature_level']}, {report['subgraphs']} subgraph(s), {report['operands']} operands, "
        f"{report['constant_values']:,} constant values in {report['constant_bytes']:,} bytes"
    )
    for key in ("inputs", "outputs"):
        for line in report[key]:
            screen.print(f"{key[:-1]:6} {line}", markup=False)
    print_table("operations", ("type", "count"), list(report["operations"].items()))
    rows = [
        (name, answer.get("error") or f"{answer['supported']} of {answer['of']} operations")
        for name, answer in report["devices"].items()
    ]
    print_table("devices", ("device", "supports"), rows)
