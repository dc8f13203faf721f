"""The commands with their descriptions, and the pages that need nothing else: ``aionn --help`` and ``aionn --version``.

Both are written here, without the parser of the command line, whose import alone takes longer than they may.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn import __version__

__all__ = ["DESCRIPTIONS", "OPTIONS", "PURPOSE", "TRACEBACK_VARIABLE", "print_overview"]

TRACEBACK_VARIABLE = "AIONN_TRACEBACK"
"""Set to 1 to see where an error came from."""

PURPOSE = "Stream camera and audio frames through neural networks, with deadlines that hold."

DESCRIPTIONS = {
    "aionn.cli.commands.demo:demo": """
Recognise shapes in a video and digits in a recording, both live, and show how late and how right the answers were.
""",
    "aionn.cli.commands.stream:stream": """
Stream a video, a recording or a live source through a model and show how late the answers are and what was recognised.
""",
    "aionn.cli.commands.watch:watch": """
Show a camera, a network stream or a video in a browser: the picture, its age, losses and the source's health.

aionn stream MODEL --source SOURCE --watch shows it with the answers of a model.
""",
    "aionn.cli.commands.run:run": """
Execute a model and show its outputs and timing.
""",
    "aionn.cli.commands.devices:devices": """
List the devices with type, version, feature level and status, those that are used only where they are named, and the
drivers that cannot be used, with the reason.
""",
    "aionn.cli.commands.devices:fleet": """
Ask the nodes of a network for their devices, their distance in time, and their load.

Exit code 1 means that a node cannot be reached.
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
    "aionn.cli.commands.plan:plan": """
Find how many streams with a guarantee fit on described devices, what limits that, and the cheapest change.

Exit code 1 means that a stream does not fit, or that the check in virtual time lost a frame.
""",
    "aionn.cli.commands.simulate:simulate": """
Run a workload's requests through a scheduler on simulated devices, and report the requests that ended on time.
""",
    "aionn.cli.commands.serve:serve": """
Serve a device to every application that may write to a socket, or to other machines, until interrupted.

Clients cannot see or disturb one another: each has objects and limits of its own, and its objects are freed when it disconnects.

At SIGTERM the process drains, so that nothing new is accepted, accepted executions end, and the exit status is 0. A second SIGTERM
ends it immediately.
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
"""The function of each command, and its help: the function's docstring, which cannot be read without importing the command."""

OPTIONS = {
    "--install-completion": "Install the completion of commands and options for your shell.",
    "--help, -h": "Show this text; after a command, its options.",
    "--version": "Show the version.",
}

HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])
VERSION = (["--version"],)

GAP = 2
"""Blanks before and behind the names."""


def print_overview(arguments: Sequence[str]) -> bool:
    """Prints the version, or all commands and what each does; False if the arguments ask for neither."""
    from aionn.reports.terminal import print_line

    asked = list(arguments)
    if asked in VERSION:
        print_line(__version__)
        return True
    if asked not in HELP:
        return False
    print_line("aionn COMMAND [OPTIONS]", lead="Usage:")
    print_line("")
    print_line(PURPOSE, indent="")
    commands = {place.partition(":")[2]: text for place, text in sorted(DESCRIPTIONS.items())}
    for title, texts in (("Commands:", commands), ("Options:", OPTIONS)):
        print_line("")
        print_line(title)
        width = max(map(len, texts))
        for name, text in texts.items():
            first = " ".join(text.strip().partition("\n\n")[0].split())
            print_line(first, lead=f"{'':{GAP}}{name:{width + GAP - 1}}", indent=" " * (width + 2 * GAP))
    print_line("")
    print_line("aionn COMMAND --help shows the options of a command.")
    print_line(f"With {TRACEBACK_VARIABLE}=1 in the environment an error shows its traceback.")
    return True
