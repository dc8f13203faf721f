"""The ``aionn`` command: turns errors into one sentence and an exit code.

Modules that take time to import are imported after the handlers of Ctrl-C and SIGTERM are set.

Exit codes: 0 done; 1 it ran, and the answer is no; 2 a mistake of the caller's or a failure, reported in one sentence; 130
interrupted; 143 terminated. The last two may follow a report of the results so far.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from aionn.cli import interrupts
from aionn.cli.overview import TRACEBACK_VARIABLE, print_overview
from aionn.errors import Error

if TYPE_CHECKING:
    from cyclopts import Argument, CycloptsError

__all__ = ["main"]

WORD_MAX = 200
"""Number of characters of a user's word that a message repeats: a path, but not a number of 5,000 digits."""

DESCRIPTORS = 256
"""Number of descriptors that a command may have if the system allows it: enough for some streams on some devices."""

MODEL_SUFFIXES = (".tflite", ".onnx")
"""Endings of files that are given in the place of a command."""

CAUSES_MAX = 1000
"""Number of exceptions that are searched for the cause of a failure."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The process's entry point; ends it with an exit code.

    Args:
        arguments: The words behind the command's name; None takes those of the process, whose SIGINT and SIGTERM are taken over
            then, and whose limit of descriptors is raised if it is low.
    """
    if arguments is None:
        _open_standard_streams()
        interrupts.guard()
        _allow_descriptors()
    try:
        _run(arguments)
    except (Exception, BaseExceptionGroup) as e:
        if os.environ.get(TRACEBACK_VARIABLE) == "1" or not _lacks_descriptors(e):
            raise
        if arguments is None:
            # An event loop that lacks a descriptor raises an error when it is collected.
            sys.unraisablehook = lambda _: None
        # A plain print, since an import needs a descriptor.
        reason = _first_error(e) or "no file descriptor is left"
        print(f"aionn: {reason}; {_advice()}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(arguments: Sequence[str] | None) -> NoReturn:
    try:
        is_done = print_overview(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        _end_unread()
    except Error as e:
        _print_error(str(e))
        raise SystemExit(2) from None
    if is_done:
        raise SystemExit(0)
    if arguments is None:
        from aionn.cli.heap import use_one_heap

        use_one_heap()
        from aionn.observability.log_tags import label_lines

        label_lines()
    _warn_of_variables()
    from cyclopts import CycloptsError

    from aionn.cli.commands import app

    try:
        code = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as e:
        _print_error(_message_of(e))
        raise SystemExit(2) from None
    except (Error, BaseExceptionGroup) as e:
        error = _first_error(e)
        if error is None or _lacks_descriptors(e):
            raise
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            import traceback

            traceback.print_exception(e)
        else:
            _print_error(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if arguments is None:
            # All is closed. At its own end Python gives the signals back to the kernel: a second one would change the exit code.
            interrupts.end_at_once()
        print("aionn: interrupted", file=sys.stderr)
        raise SystemExit(interrupts.INTERRUPTED) from None
    except BrokenPipeError:
        _end_unread()
    if arguments is None and interrupts.is_ending():
        interrupts.end_at_once()  # The command has reported its results so far.
    raise SystemExit(code if isinstance(code, int) else 0)


def _warn_of_variables() -> None:
    """Prints a line for each variable of aionn's that does not exist: without it a mistake in a name has no effect but this one."""
    if any(name.startswith("AIONN_") for name in os.environ):
        from aionn.reports.terminal import report_line
        from aionn.runtime.settings import unknown_variables

        for sentence in unknown_variables():
            report_line(sentence, lead="aionn:", stream=sys.stderr)


def _open_standard_streams() -> None:
    """Opens the null device as each standard stream that the caller has closed: another file would get its number, and prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.
            os.set_inheritable(fd, fd == number)
            setattr(sys, name, os.fdopen(fd, "r+" if number else "r", closefd=False))


def _advice() -> str:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have {allowed} file descriptors (RLIMIT_NOFILE): raise the limit, such as by `ulimit -n 1024`"


def _allow_descriptors() -> None:
    """Raises a low limit of descriptors, as far as the system allows it."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _lacks_descriptors(error: BaseException) -> bool:
    """Whether a failure comes from the limit of descriptors: the error itself, one of its causes, or one of its group."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < CAUSES_MAX:
        e = waiting.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        # The loader of libraries and driver processes give the reason only as text.
        if getattr(e, "errno", None) == errno.EMFILE or os.strerror(errno.EMFILE) in str(e):
            return True
        waiting += [e.__cause__, e.__context__]
        if isinstance(e, BaseExceptionGroup):
            waiting += e.exceptions
    return False


def _end_unread() -> NoReturn:
    """Ends the process when the reader of its output has gone, as `head` does: no mistake, and no place to report one."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0) from None


def _print_error(text: str) -> None:
    from aionn.reports.terminal import print_line

    with contextlib.suppress(OSError, Error):  # The exit code remains.
        print_line(f"aionn: {text}", stream=sys.stderr)


def _message_of(error: CycloptsError) -> str:
    """A mistake in the arguments in one sentence: for a value that is not taken, the option and what is."""
    from cyclopts import (
        CoercionError,
        MissingArgumentError,
        UnknownCommandError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    from aionn.errors import InvalidArgument

    if isinstance(error, UnusedCliTokensError):
        command = " ".join(error.command_chain or ())
        words = " ".join(_shortened(word) for word in error.unused_tokens or ())
        return (
            f"{command}: expected no further argument, got {words}; see the options of aionn {command} --help"
        )
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _wrong_command(*error.unused_tokens)
    if isinstance(error, UnknownOptionError) and "Did you mean" not in str(error):
        return f"{' '.join(str(error).split())} aionn {' '.join(error.command_chain or ())} --help lists the options"
    cause, argument = error.__cause__, error.argument
    if isinstance(error, MissingArgumentError) and argument is not None and not argument.tokens:
        command = " ".join(error.command_chain or ())
        name = error.keyword or argument.name
        kinds = ", a .tflite or .onnx file" if name == "MODEL" else ""
        return f"{command}: expected {name}{kinds}, got none; see aionn {command} --help"
    if isinstance(error, CoercionError) and error.token is not None and error.target_type in (int, float):
        kind = "a number" if error.target_type is float else "a whole number"
        place = error.token.keyword or (argument.name if argument is not None else "")
        return f"{place}: expected {kind}{_unit_of(argument)}, got {_shortened(error.token.value) or chr(34) * 2}"
    if isinstance(cause, InvalidArgument) and argument is not None and argument.tokens:
        given = " ".join(_shortened(token.value) or '""' for token in argument.tokens)
        return f"{argument.tokens[0].keyword or argument.name}: {cause}, got {given}"
    return " ".join(_shortened(word) for word in str(error).split())


def _unit_of(argument: Argument | None) -> str:
    """The unit of an option's numbers, as the end of a phrase; empty for a number without one."""
    from aionn.cli.numbers import Range

    checks = None if argument is None else argument.parameter.validator
    units = [
        check.unit
        for check in (checks if isinstance(checks, tuple) else ())
        if isinstance(check, Range) and check.unit
    ]
    return f" of {units[0]}" if units else ""


def _wrong_command(word: str, *rest: str) -> str:
    """The mistake of a first word that is not a command; ``rest`` are the words behind it."""
    import difflib

    from aionn.cli.overview import DESCRIPTIONS, OPTIONS

    shown = _shortened(word)
    if word.endswith(MODEL_SUFFIXES):
        return f"expected a command, got the model {shown}; did you mean aionn run {shown}?"
    options = [name for names in OPTIONS for name in names.split(", ")]
    is_option = word.startswith("-")
    commands = [place.partition(":")[2] for place in DESCRIPTIONS]
    if is_option and (named := [other for other in rest if other in commands]):
        return f"expected a command, got the option {shown}; options follow the command: aionn {named[0]} {shown}"
    close = difflib.get_close_matches(word, options if is_option else [*commands, "--help"], n=1)
    advice = f"did you mean aionn {close[0]}?" if close else "aionn --help lists all"
    return f"expected {'an option' if is_option else 'a command'}, got {shown}; {advice}"


def _shortened(word: str) -> str:
    return word if len(word) <= WORD_MAX else f"{word[:WORD_MAX]}..."


def _first_error(error: BaseException) -> Error | None:
    """The error to report: of several that ended a task group together, the first of aionn's own."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for e in error.exceptions if (found := _first_error(e)) is not None), None)
    return error if isinstance(error, Error) else None
