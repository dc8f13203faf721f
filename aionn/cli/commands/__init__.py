"""Names the subcommands; each is imported when it is called, so that ``aionn --help`` costs no numpy and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cyclopts

from aionn.errors import InvalidArgument

__all__ = ["TRACEBACK_VARIABLE", "app"]

TRACEBACK_VARIABLE = "AIONN_TRACEBACK"
"""Set to 1 to see where an error came from."""


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:
        return False  # cyclopts rejects text that is not a number.


def _converted(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """The value of an option or of a place. The name is added later.

    Raises:
        InvalidArgument: cyclopts would make another value of it without a word: a whole number of 1.5, a path "." of none.
    """
    for token in tokens:
        if kind is int and _is_fraction(token.value):
            raise InvalidArgument("expected a whole number")
        if kind in (Path, list[Path]) and not token.value:
            raise InvalidArgument("expected a path, the name is empty")
    return cyclopts.convert(kind, tokens)


app = cyclopts.App(
    default_parameter=cyclopts.Parameter(converter=_converted),
    name="aionn",
    help="Stream camera and audio frames through neural networks, with deadlines that hold.",
    help_epilogue=f"With {TRACEBACK_VARIABLE}=1 in the environment an error shows its traceback.",
    version="0.1.0",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
_DESCRIPTIONS = {
    "aionn.cli.commands.demo:demo": """
Recognise shapes in a video and digits in a recording, both live, and show how late and how right the answers were.
""",
    "aionn.cli.commands.stream:stream": """
Stream a video or a recording through a model and show how late the answers are and what was recognised.
""",
    "aionn.cli.commands.run:run": """
Execute a model and show its outputs and timing.
""",
    "aionn.cli.commands.devices:devices": """
List the devices with type, version, feature level and status, and the drivers that cannot be used, with the reason.
""",
    "aionn.cli.commands.inspect:inspect": """
Show a model's inputs, outputs, operations, operands, sizes, least feature level, and the support by device.

Of an .onnx file it also shows the operators, and all operators that cannot be imported, each with the reason. Exit code 1 means
that there are such operators.
""",
    "aionn.cli.commands.env:env": """
List the environment variables and their present values; fails if a value is invalid.
""",
    "aionn.cli.commands.doctor:doctor": """
Check the settings of this machine that delay frames, and print the remedies.

Exit code 1 means that this machine cannot keep deadlines of this length when it is busy.
""",
    "aionn.cli.commands.trace:trace": """
Summarise a trace file that AIONN_TRACE or aionn.open(trace=...) wrote.
""",
    "aionn.cli.commands.simulate:simulate": """
Run a workload's requests through a scheduler on simulated devices, and report the requests that ended on time.
""",
    "aionn.cli.commands.serve:serve": """
Serve a device to every application that may write to a socket, until interrupted.

Clients cannot see or disturb one another: each has objects and limits of its own, and its objects are freed when it disconnects.
""",
    "aionn.cli.commands.bench:bench": """
Measure latency, throughput, compilation, memory and accuracy of a model.

Exit code 1 means that a device failed, or that its answers on labelled data are beyond a limit.
""",
    "aionn.cli.commands.stress:stress": """
Load a device for long, with many clients and clients that die.

Each test ends as SUCCESS, FAILURE, HANG or CRASH. Exit code 1 means that a test did not end as SUCCESS.

With --soak one run on all devices together replaces the tests: their processes are killed and stopped throughout, every answer is
checked, and exit code 1 means that an answer was wrong or never came, or that a resource grows.
""",
    "aionn.cli.commands.conformance:conformance": """
Compare a device's results with the specification, or test whether its driver keeps the contract.

Exit code 1 means that a test failed.
""",
}
"""The help of each command: the docstring of its function, which cannot be read without importing the command."""

for _place, _description in _DESCRIPTIONS.items():
    app.command(_place, name=_place.partition(":")[2], help=_description.strip())
