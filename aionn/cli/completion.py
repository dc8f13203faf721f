"""``aionn --install-completion``: commands and options on the Tab key."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts.completion.detect import ShellDetectionError

from aionn.cli.commands import app
from aionn.errors import InvalidArgument
from aionn.platform.files import creation_error
from aionn.reports.terminal import print_line

__all__ = ["install_completion"]


def install_completion(
    *, shell: Literal["bash", "zsh", "fish"] | None = None, output: Path | None = None
) -> int:
    """Install the completion of commands and options for your shell.

    Args:
        shell: Which shell; by default the one that runs this command.
        output: A file for the script; by default one that the shell reads, if need be by a line in .bashrc or .zshrc.
    """
    try:
        path = app.install_completion(shell=shell, output=output, add_to_startup=output is None)
    except ShellDetectionError as e:
        raise InvalidArgument("--shell: expected one of bash, zsh, fish; it cannot be determined here") from e
    except OSError as e:
        if output is None:
            raise InvalidArgument(
                f"--install-completion: {e.filename} cannot be written: {e.strerror}; --output FILE names another place"
            ) from e
        raise InvalidArgument(
            f"--output: expected a file that can be written: {output}: {creation_error(output, e)}"
        ) from e
    needed = _missing_in_zsh(path) if output is None else ""
    print_line(f"{path} is written; a new shell completes the commands and options of aionn{needed}")
    return 0


def _missing_in_zsh(script: Path) -> str:
    """The end of the sentence for a zsh that does not load completions by itself; empty for any other shell."""
    startup = Path.home() / ".zshrc"
    if script.parent != Path.home() / ".zsh" / "completions":
        return ""  # Another shell, or a framework that loads what is in its folder.
    if "compinit" in startup.read_text("utf-8", "replace"):
        return ""
    return f" when this line is at the end of {startup}: autoload -Uz compinit && compinit"
