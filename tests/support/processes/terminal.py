"""A program on a pseudo terminal, and the text that it showed there."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Sequence

__all__ = ["shown_on_terminal"]


def shown_on_terminal(
    command: Sequence[object],
    *,
    width: int | None,
    status: int = 0,
    limit_s: float = 60,
    is_output_shown: bool = True,
) -> str:
    """The text that a program shows on a terminal, with the control sequences, and with the line ends of files.

    Args:
        command: The program and its arguments.
        width: Columns by the environment; None leaves the width to the terminal.
        status: The exit status that it must have.
        limit_s: Time within which it must end.
        is_output_shown: Whether its standard output is on the terminal as well; its standard error always is.
    """
    main, terminal = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:  # The terminal's last user is gone.
                return
            shown.extend(piece)

    reader = threading.Thread(target=read)
    columns = {} if width is None else {"COLUMNS": str(width)}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=terminal if is_output_shown else subprocess.DEVNULL,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", **columns},
    )
    os.close(terminal)
    reader.start()
    assert process.wait(limit_s) == status
    reader.join()
    os.close(main)
    return shown.decode().replace("\r\n", "\n")
