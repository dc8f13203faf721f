"""The pages of the API reference: which names are on which page. Their text is that of the docstrings."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GROUPS", "MODULES", "Group", "Module", "reference_pages"]


class Group(NamedTuple):
    """Names of ``aionn`` that are used together."""

    title: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "Opening and compiling",
        (
            "open",
            "Runtime",
            "RuntimeDevice",
            "RealtimeReport",
            "Compilation",
            "Placement",
            "TensorSpec",
            "Model",
            "Priority",
            "ExecutionPreference",
        ),
    ),
    Group(
        "Executing",
        (
            "Execution",
            "Result",
            "Burst",
            "LentSlot",
            "Stream",
            "StreamResult",
            "GuaranteedStream",
            "StreamReservation",
            "FleetStreams",
            "PlacedStream",
        ),
    ),
    Group("Writing inputs", ("image_writer", "value_writer")),
    Group("Memory", ("SharedMemory", "ImageMemory", "DeviceMemory")),
    Group("Time and traces", ("after", "now_ns", "section", "trace_context")),
    Group(
        "Errors",
        (
            "Error",
            "InvalidArgument",
            "InvalidModel",
            "MissedDeadline",
            "ResourceExhausted",
            "NotAdmitted",
            "OutputInsufficientSize",
            "DeadObject",
            "DeviceUnavailable",
            "GeneralFailure",
            "ExecutionCancelled",
            "ErrorStatus",
        ),
    ),
)
"""All of ``aionn.__all__``; a test compares them."""

INTERNAL = {
    "Burst": ("check_unreserved", "close_streams", "open_beside", "replace", "was_entered"),
    "Compilation": ("close_streams",),
    "DeviceMemory": ("binding",),
    "ImageMemory": ("binding",),
    "Runtime": ("background", "tasks"),
    "RuntimeDevice": ("forget", "raises_best_effort"),
    "SharedMemory": ("binding",),
}
"""Members that other parts of the runtime call and applications do not, by class: they are not part of the interface."""


class Module(NamedTuple):
    """A module with a page of its own.

    Attributes:
        name: Its full name.
        summary: Its contents, in a sentence.
        elsewhere: Names that it shares with ``aionn``, on whose page they are.
    """

    name: str
    summary: str
    elsewhere: tuple[str, ...] = ()


MODULES = (
    Module("aionn.blocking", "The runtime for threads, without an event loop."),
    Module(
        "aionn.media",
        "Sources of frames and of sound: files, cameras, microphones, network streams, screens, recordings.",
    ),
    Module("aionn.watch", "The figures of running streams, and the page that shows them."),
    Module("aionn.models.builder", "Models written in Python."),
    Module("aionn.models.tflite", "Importing .tflite files."),
    Module("aionn.models.onnx", "Importing .onnx files."),
    Module("aionn.drivers.kit.blocking", "The base classes of drivers around blocking code."),
    Module("aionn.drivers.kit.asynchronous", "The base classes of drivers on the event loop."),
    Module(
        "aionn.hal",
        "The vocabulary of the HAL: operands, models, requests, devices, and their protocols.",
        ("ExecutionPreference", "Model", "Priority"),
    ),
    Module("aionn.testing", "Virtual time, simulated devices, scripted faults."),
    Module("aionn.drivers.simulated.profiles", "Descriptions of simulated devices."),
    Module("aionn.conformance.pytest_suite", "The driver suites as test classes."),
    Module("fences", "Sync fences."),
    Module("fmq", "Fast message queues."),
)


def reference_pages() -> dict[str, str]:
    """Markdown by the name of the page: an overview, one page for ``aionn``, one for each module."""
    rows = "\n".join(f"| [{m.name}]({m.name}.md) | {m.summary} |" for m in MODULES)
    pages = {
        "reference/index": _INDEX.format(rows=rows),
        "reference/aionn": "# aionn\n\n" + "\n".join(_group(group) for group in GROUPS),
    }
    for module in MODULES:
        directive = (
            f".. automodule:: {module.name}\n   :members:\n   :imported-members:\n   :show-inheritance:"
        )
        if module.elsewhere:
            directive += f"\n   :exclude-members: {', '.join(module.elsewhere)}"
        pages[f"reference/{module.name}"] = f"# {module.name}\n\n{module.summary}\n\n{_rst(directive)}"
    return pages


def _group(group: Group) -> str:
    blocks = []
    for name in group.names:
        kind, options = ("class", "\n   :members:") if name[0].isupper() else ("function", "")
        if name in INTERNAL:
            options += f"\n   :exclude-members: {', '.join(INTERNAL[name])}"
        blocks.append(_rst(f".. auto{kind}:: aionn.{name}{options}"))
    return f"## {group.title}\n\n" + "\n".join(blocks)


def _rst(directive: str) -> str:
    return f"```{{eval-rst}}\n{directive}\n```\n"


_INDEX = """# API reference

Signatures and descriptions from the docstrings. Names that are not here are not part of the interface.

| module | contents |
| --- | --- |
| [aionn](aionn.md) | The runtime: devices, compilations, executions, bursts, streams, memories, errors. |
{rows}
"""
