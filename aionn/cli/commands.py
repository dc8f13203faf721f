"""Names the subcommands; each is imported when it is called, so that ``aionn --help`` costs no numpy and no engine."""

from __future__ import annotations

import cyclopts

__all__ = ["TRACEBACK_VARIABLE", "app"]

TRACEBACK_VARIABLE = "AIONN_TRACEBACK"
"""Set to 1 to see where an error came from."""

app = cyclopts.App(
    name="aionn",
    help="Stream camera and audio frames through neural networks, with deadlines that hold.",
    help_epilogue=f"With {TRACEBACK_VARIABLE}=1 in the environment an error shows its traceback.",
    version="0.1.0",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command("aionn.cli.demo:demo", name="demo")
app.command("aionn.cli.stream:stream", name="stream")
app.command("aionn.cli.run:run", name="run")
app.command("aionn.cli.devices:devices", name="devices")
app.command("aionn.cli.inspect:inspect", name="inspect")
app.command("aionn.cli.env:env", name="env")
app.command("aionn.cli.trace:trace", name="trace")
app.command("aionn.cli.simulate:simulate", name="simulate")
app.command("aionn.cli.serve:serve", name="serve")
app.command("aionn.cli.bench:bench", name="bench")
app.command("aionn.cli.stress:stress_command", name="stress")
app.command("aionn.cli.conformance:conformance", name="conformance")
