"""The ``aionn`` command: names its subcommands, and turns errors into one sentence and an exit code.

Subcommands are imported when they are called, so that ``aionn --help`` costs no numpy and no engine.

Exit codes: 0 done; 1 it ran, and the answer is no; 2 a mistake of the caller's or a failure, told in one sentence; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import cyclopts

from aionn.errors import Error

__all__ = ["app", "main"]

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


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point; ends it with an exit code."""
    try:
        code = app(arguments, exit_on_error=True, print_error=True)
    except (Error, BaseExceptionGroup) as e:
        error = _first_error(e)
        if error is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(f"aionn: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("aionn: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output went away, as `head` does: nothing to complain about, and nowhere to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _first_error(error: BaseException) -> Error | None:
    """The error to tell: of several that ended a task group together, the first that is ours."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for e in error.exceptions if (found := _first_error(e)) is not None), None)
    return error if isinstance(error, Error) else None
