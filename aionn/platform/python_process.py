"""With which command line and environment a Python process of ours starts.

Owns the module path of such a process, and nothing else of its life. Every process that the product starts (drivers, workers of the
conformance suite, tasks of the stress test) is started with these two.

Invariants:
1. The process imports what this one could import, in the same order: it gets this process's ``sys.path``. Entries that were added
   to the environment's ``PYTHONPATH`` come before it.
2. The working directory is on its module path only where an entry of ``sys.path`` names it. ``python -m`` and ``python -c`` would
   put it first, and a file there that is named like a module of the standard library would be executed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["module_path", "python_command", "python_environment", "start_over"]

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

_FLAGS = (("ignore_environment", "-E"), ("no_user_site", "-s"), ("no_site", "-S"))
"""Of ``sys.flags``: what keeps modules out of this process keeps them out of its processes."""


def module_path() -> list[str]:
    """The ``sys.path`` of a process that is started now.

    This process's own, after the folders that ``PYTHONPATH`` has gained since this process started. The empty entry of an
    interactive interpreter, which stands for any working directory, is left out. Other relative entries are made absolute. The
    folder of this package comes last where no entry names it.
    """
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str) and entry]
    gained = [] if sys.flags.ignore_environment else [e for e in _absolute_python_path() if e not in path]
    path = [*gained, *path]
    return path if _PACKAGE_ROOT in path else [*path, _PACKAGE_ROOT]


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that calls ``main(arguments)`` of a module of ours.

    Args:
        module: Its full name.
        arguments: The arguments of ``main``, as a list.
    """
    # Not by PYTHONPATH, which comes before the standard library whatever place an entry has here, and which the process's own
    # processes inherit, in which another Python may run.
    code = f"import sys; sys.path[:] = {module_path()!r}; from {module} import main; main(sys.argv[1:])"
    flags = [flag for name, flag in _FLAGS if getattr(sys.flags, name)]
    return [sys.executable, "-P", *flags, "-c", code, *arguments]


def start_over(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by one with a command line from ``python_command``, such as its own."""
    os.execve(sys.executable, list(command), environment)


def python_environment() -> dict[str, str]:
    """This process's environment, in which ``PYTHONPATH`` names no folder relative to the working directory.

    An interpreter looks there while it starts, before ``python_command`` sets the path.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if absolute := _absolute_python_path():
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    return environment


def _absolute_python_path() -> list[str]:
    return [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(e)]
