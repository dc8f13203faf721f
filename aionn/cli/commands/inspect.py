"""``aionn inspect``: what is in a model, who can run it, and what it looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

import aionn
from aionn.cli import interrupts
from aionn.cli.importing import Dimensions, InputShapes, Values, import_options
from aionn.cli.output import check_writable, print_json, write_report
from aionn.drivers.registry import drivers_for
from aionn.errors import InvalidArgument, InvalidModel
from aionn.models.dot import graph_text
from aionn.models.importing import is_onnx, load_file
from aionn.models.onnx import UnsupportedOperator, UnsupportedOperators
from aionn.models.onnx.summary import OnnxSummary, summarize_onnx
from aionn.ops import CONTRACTS
from aionn.ops.document import contract_text
from aionn.reports.columns import counted
from aionn.reports.terminal import print_line, print_table
from aionn.runtime.introspection import ModelSummary, Support, summarize_model
from aionn.runtime.memory.arguments import declared_spec

__all__ = ["inspect"]


def inspect(
    model: Path,
    /,
    *,
    operations: Annotated[bool, Parameter(negative=())] = False,
    contracts: Annotated[bool, Parameter(negative=())] = False,
    device: Annotated[list[str] | None, Parameter(name="--device")] = None,
    dot: Path | None = None,
    html: Path | None = None,
    dimension: Dimensions = None,
    input_shape: InputShapes = None,
    value: Values = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show a model's inputs, outputs, operations, operands, sizes, least feature level, and the support by device.

    Of an .onnx file it also shows the operators, and all operators that cannot be imported, each with the reason. Exit code 1 means
    that there are such operators.

    Args:
        model: A .tflite or .onnx file.
        operations: List every operation with what it reads and writes, the values of scalars, its level and the devices that
            support it.
        contracts: Print the contract of each type of operation that the model has: formula, inputs, outputs, types and levels.
        device: A device to ask, and to draw on; may be given several times. By default all.
        dot: A file to write the graph to, as Graphviz text.
        html: A file to write a page to that draws the graph, the operations of each device in a colour of their own.
        dimension: NAME=EXTENT for an open extent of an .onnx file; may be repeated.
        input_shape: NAME=EXTENT,... for the shape of an input of an .onnx file; may be repeated.
        value: NAME=FILE.npy or NAME=NUMBER,... for an input of an .onnx file that becomes a constant; may be repeated.
        json: Print one JSON object instead of tables.
    """
    imports = import_options(dimension, input_shape, value)
    check_writable(dot, html)
    content = summarize_onnx(model) if is_onnx(model) else None
    try:
        loaded = load_file(model, imports)
    except InvalidArgument as e:
        if content is None or (isinstance(e, InvalidModel) and not isinstance(e, UnsupportedOperators)):
            raise
        unsupported = e.operators if isinstance(e, UnsupportedOperators) else ()
        if json:
            print_json({"model": str(model), "file": content, "error": str(e), "unsupported": unsupported})
        else:
            _print_content(str(model), content, unsupported)
        if unsupported:
            return 1
        if json:
            return 2
        raise
    summary = summarize_model(loaded.model)
    support, unavailable, page = interrupts.run(_ask, loaded.model, device, html is not None, model.name)
    for path, text in ((dot, graph_text(loaded.model, name=model.name)), (html, page)):
        if path is not None and text is not None:
            write_report(path, text)
    arguments = {
        key: [
            str(declared_spec(o, a.name, a.dtype, a.dimensions)) for a, o in zip(named, operands, strict=True)
        ]
        for key, named, operands in (
            ("inputs", loaded.inputs, loaded.model.main.inputs),
            ("outputs", loaded.outputs, loaded.model.main.outputs),
        )
    }
    if json:
        report = _report(str(model), summary, arguments, support, unavailable)
        print_json(report if content is None else {**report, "file": content})
    else:
        if content is not None:
            _print_content(str(model), content, ())
        _print(
            str(model) if content is None else "imported as",
            summary,
            arguments,
            support,
            unavailable,
            every=operations,
        )
        if contracts:
            _print_contracts(loaded.model)
    return 0


def _print_contracts(model: aionn.Model) -> None:
    """The contracts of the model's operations, those of its other subgraphs included; an extension defines its own."""
    used = {
        operation.type for subgraph in (model.main, *model.referenced) for operation in subgraph.operations
    }
    for contract in CONTRACTS.values():
        if contract.type in used:
            print_line("")
            for line in contract_text(contract).splitlines():
                print_line(line, indent="      ")


def _print_content(name: str, content: OnnxSummary, unsupported: Sequence[UnsupportedOperator]) -> None:
    """The content of an .onnx file as the file declares it, and its operators."""
    print_line("", lead=name)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in content.opsets.items())
    print_line(f"ONNX file, operator sets: {opsets or 'none'}")
    for what, lines in (("input", content.inputs), ("output", content.outputs)):
        for line in lines:
            print_line(f"{what:6} {line}")
    if content.open_extents:
        print_line(f"open extents: {', '.join(content.open_extents)}")
    print_table("operators", ("operator", "count"), list(content.operators.items()))
    if unsupported:
        count = sum(each.count for each in unsupported)
        print_table(
            f"{count} of them cannot be expressed by operations of the HAL",
            ("operator", "count", "reason"),
            [(each.name, each.count, each.reason) for each in unsupported],
        )


async def _ask(
    model: aionn.Model, devices: list[str] | None, draws: bool, name: str
) -> tuple[tuple[Support, ...], dict[str, str], str | None]:
    """Support by device, why others cannot be asked, and the page if it is wanted."""
    async with aionn.open(drivers=drivers_for(devices)) as runtime:
        support = await runtime.supported_operations(model, devices=devices)
        unavailable = {missing.name: missing.reason for missing in runtime.unavailable}
        if not draws:
            return support, unavailable, None
        compilation = await runtime.compile(model, devices=devices)
        return support, unavailable, compilation.page(title=name)


def _count_types(summary: ModelSummary) -> dict[str, int]:
    return dict(sorted(Counter(operation.type for operation in summary.operations).items()))


def _report(
    name: str,
    summary: ModelSummary,
    arguments: dict[str, list[str]],
    support: Sequence[Support],
    unavailable: dict[str, str],
) -> dict[str, Any]:
    devices: dict[str, Any] = {
        answer.device: {"error": answer.error}
        if answer.error
        else {
            "supported": sum(answer.supported),
            "of": len(answer.supported),
            "operations": list(answer.supported),
        }
        for answer in support
    }
    devices |= {missing: {"error": reason} for missing, reason in unavailable.items()}
    built = msgspec.to_builtins(summary)
    built["operation_list"] = built.pop("operations")
    return {
        "model": name,
        **built,
        "operations": _count_types(summary),
        **arguments,
        "devices": devices,
    }


def _print(
    name: str,
    summary: ModelSummary,
    arguments: dict[str, list[str]],
    support: Sequence[Support],
    unavailable: dict[str, str],
    *,
    every: bool,
) -> None:
    print_line("", lead=name)
    print_line(
        f"feature level {summary.feature_level}, {counted(summary.subgraphs, 'subgraph')}, "
        f"{counted(len(summary.operations), 'operation')}, {counted(summary.operands, 'operand')}"
    )
    print_line(
        f"{summary.constant_values:,} constant values in {summary.constant_bytes:,} bytes, "
        f"{summary.temporary_bytes:,} bytes between operations, {summary.unknown_sizes} values of unknown size"
    )
    for key in ("inputs", "outputs"):
        for line in arguments[key]:
            print_line(f"{key[:-1]:6} {line}")
    print_table(
        "operands",
        ("lifetime or type", "count"),
        [
            *summary.operands_by_lifetime.items(),
            *summary.operands_by_type.items(),
        ],
    )
    answering = [answer for answer in support if not answer.error]
    columns = ("operation", "count", "level", *(answer.device for answer in answering))
    print_table(
        "operations, and how many of them each device supports", columns, _by_type(summary, answering)
    )
    if every:
        print_table(
            "every operation",
            ("operation", "type", "level", "reads", "writes", "devices"),
            [
                (
                    f"{o.subgraph}.{o.index}",
                    o.type,
                    o.feature_level or "-",
                    ", ".join(o.inputs),
                    ", ".join(o.outputs),
                    ", ".join(a.device for a in answering if a.supported[o.index])
                    if o.subgraph == 0
                    else "-",
                )
                for o in summary.operations
            ],
        )
    for answer in support:
        if answer.error:
            print_line(f"{answer.device} does not answer: {answer.error}")
    for missing, reason in unavailable.items():
        print_line(f"unavailable: {missing}: {reason}")


def _by_type(summary: ModelSummary, answering: Sequence[Support]) -> list[tuple[object, ...]]:
    """A row per type of the main subgraph's operations, then one for all."""
    main = [operation for operation in summary.operations if operation.subgraph == 0]
    rows: list[tuple[object, ...]] = []
    for kind in sorted({operation.type for operation in main}):
        of_kind = [operation for operation in main if operation.type == kind]
        counts = (sum(answer.supported[o.index] for o in of_kind) for answer in answering)
        rows.append((kind, len(of_kind), max(o.feature_level for o in of_kind), *counts))
    totals = (sum(answer.supported) for answer in answering)
    rows.append(("all", len(main), max((o.feature_level for o in main), default=0), *totals))
    return rows
