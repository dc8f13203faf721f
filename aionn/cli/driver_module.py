"""A driver that a user names as ``MODULE:ATTRIBUTE`` on the command line."""

from __future__ import annotations

import importlib.util
import os
import sys

__all__ = ["find_driver_module"]


def find_driver_module(driver: str) -> None:
    """Lets Python find a module of the working directory that the user has named; does nothing for other drivers.

    The directory comes last on ``sys.path``, so that none of its files replaces a module that Python finds elsewhere, and only if
    the named module is there. The processes that the command starts get the same path (``aionn.platform.python_process``); they
    never look into the working directory by themselves.

    Args:
        driver: A registered name, or ``MODULE:ATTRIBUTE``.
    """
    module, colon, _ = driver.partition(":")
    outermost = module.partition(".")[0]
    if not colon or not outermost.isidentifier():
        return
    folder = os.getcwd()
    here = os.path.join(folder, outermost)
    if (os.path.isfile(f"{here}.py") or os.path.isdir(here)) and not _is_found(outermost):
        sys.path.append(folder)


def _is_found(name: str) -> bool:
    """Whether Python finds a module or package elsewhere; a folder without ``__init__.py`` may have parts in several places."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # It is imported, and has no spec: ``__main__``.
        return True
    return spec is not None and spec.origin is not None
