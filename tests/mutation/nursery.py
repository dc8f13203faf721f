"""A process that has imported what every run of pytest needs, and forks one run after the other.

Reads one order per line of its standard input, JSON: ``arguments`` for pytest, ``output``, the file that takes what it prints, and
``variables`` of the environment. Answers with two lines: the number of the process that runs it, and, when that has ended, its exit
status, negative for a signal. Its arguments are modules to import beside: of ours, those that do not import what is changed.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import importlib
import json
import os
import resource
import sys

import anyio  # noqa: F401
import hypothesis  # noqa: F401
import msgspec  # noqa: F401
import numpy  # noqa: F401
import pytest
import pytest_asyncio  # noqa: F401

FILE_BYTES_MAX = 1 << 31
"""How large a file, or shared memory, may become: a test of a limit that a mutant has removed would take all of the machine."""

IMPORTED_ALREADY = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"


def main() -> int:
    answers = os.dup(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    for module in sys.argv[1:]:
        importlib.import_module(module)
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            os.close(answers)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.environ.update(order["variables"])
            sys.argv = ["pytest", *order["arguments"]]
            return int(pytest.main(["-W", IMPORTED_ALREADY, *order["arguments"]]))
        os.write(answers, b"%d\n" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, b"%d\n" % status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
