"""Rules for the names of extensions.

Owns the rule for an extension's name: lower-case letters, digits, underscores and periods, with a period at least; in practice a
reversed domain name and the extension's own. Knows nothing of prefixes.

Source: the canonical types of the NN HAL.
"""

from __future__ import annotations

import re

__all__ = ["is_extension_name"]

_NAME = re.compile(r"[a-z0-9_.]*\.[a-z0-9_.]*")


def is_extension_name(name: str) -> bool:
    """Whether an extension may have this name."""
    return _NAME.fullmatch(name) is not None
