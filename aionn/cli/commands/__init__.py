"""Names the subcommands; each is imported when it is called, so that ``aionn --help`` costs no numpy and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts.help import DefaultFormatter, HelpPanel, PlainFormatter

from aionn import __version__
from aionn.cli.overview import DESCRIPTIONS, OPTIONS, PURPOSE, TRACEBACK_VARIABLE
from aionn.errors import InvalidArgument

__all__ = ["app"]


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:
        return False  # cyclopts rejects text that is not a number.


def _converted(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """The value of an option or of a place. The name is added later.

    Raises:
        InvalidArgument: cyclopts would make another value of it without a word: a whole number of 1.5, a path "." of none.
    """
    for token in tokens:
        if kind is int and _is_fraction(token.value):
            raise InvalidArgument("expected a whole number")
        if kind in (Path, list[Path]) and not token.value:
            raise InvalidArgument("expected a path, the name is empty")
    return cyclopts.convert(kind, tokens)


def _in_paragraphs(text: str) -> str:
    """The text without the breaks of its lines: the terminal has its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


class _Unbroken(DefaultFormatter):
    """Prints the texts of options without the breaks of docstrings: on a terminal in boxes, elsewhere each in one line."""

    def __init__(self) -> None:
        super().__init__()
        self._plain = PlainFormatter()

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if text is not None:
                text.plain = " ".join(text.plain.split())
        if console.file.isatty():
            super().__call__(console, options, panel)
        else:
            self._plain(*_unlimited(console), panel)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        if console.file.isatty():
            super().render_usage(console, options, usage)
        else:
            self._plain.render_usage(*_unlimited(console), usage)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        if console.file.isatty():
            super().render_description(console, options, description)
        else:
            self._plain.render_description(*_unlimited(console), description)


def _unlimited(console: Any) -> tuple[Any, Any]:
    """A console for the same file in which no text is too long for a line, and its options."""
    from aionn.reports.terminal import unlimited_console

    wide = unlimited_console(console.file)
    return wide, wide.options


_USAGES = {
    "fleet": "Usage: aionn fleet [OPTIONS] [ADDRESSES]",
    "watch": "Usage: aionn watch [OPTIONS] [SOURCE]",
}
"""Of the commands with arguments that may be left out: cyclopts has no names for these."""

app = cyclopts.App(
    default_parameter=cyclopts.Parameter(converter=_converted, negative_iterable=()),
    name="aionn",
    help=PURPOSE,
    help_format="plaintext",
    help_formatter=_Unbroken(),
    help_epilogue=f"With {TRACEBACK_VARIABLE}=1 in the environment an error shows its traceback.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for _place, _description in DESCRIPTIONS.items():
    _name = _place.partition(":")[2]
    _usage = {"usage": _USAGES[_name]} if _name in _USAGES else {}
    app.command(_place, name=_name, help=_in_paragraphs(_description), **_usage)
app.command(
    "aionn.cli.completion:install_completion",
    name="--install-completion",
    help=OPTIONS["--install-completion"],
)
