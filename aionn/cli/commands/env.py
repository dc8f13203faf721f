"""``aionn env``: the environment variables that change what aionn does."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from cyclopts import Parameter

from aionn.cli.output import print_json
from aionn.reports.terminal import print_table
from aionn.runtime.settings import VARIABLES, settings_from

__all__ = ["env"]


def env(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """List the environment variables and their present values; fails if a value is invalid.

    Args:
        json: Print one JSON object instead of a table.
    """
    rows = [
        {**msgspec.to_builtins(variable), "value": os.environ.get(variable.name)} for variable in VARIABLES
    ]
    if json:
        print_json({"variables": rows})
    else:
        print_table(
            "environment",
            ("variable", "value", "default", "option", "meaning"),
            [
                (
                    row["name"],
                    row["value"] or "",
                    row["default"],
                    row["option"],
                    row["meaning"],
                )
                for row in rows
            ],
        )
    settings_from()
    return 0
