"""How many tests share a server."""

from __future__ import annotations

from typing import Literal

import pytest


def server_scope(fixture_name: str, config: pytest.Config) -> Literal["function", "module"]:
    """The scope of a fixture that starts a server: all tests of a module share it, and with ``--long`` each has its own.

    A shared server shows what one test leaves for the next ones; one of its own shows that it ends well after each test.
    """
    return "function" if config.getoption("--long") else "module"
