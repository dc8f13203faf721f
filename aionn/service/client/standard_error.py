"""The standard error of a driver process, as records of loggers.

Owns lines and their limits; no I/O. A process writes as fast as it can, and the application's handlers may write each record to a
disk: what exceeds the limits is counted and not logged, and the number is.

Invariants:
1. Every line within the limits becomes one record, in order; of a longer line its beginning does. An empty one
   becomes none, and counts.
2. Suppressed lines are reported: immediately, then once in ``REPORT_S`` while there are more, and at the end.
3. The work for a chunk comes in steps of at most ``LINES_PER_STEP`` records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from aionn.observability.log_tags import relayed

__all__ = ["StandardError"]

LINE_BYTES_MAX = 4096
"""Longest logged part of a line: longer than any line of a traceback, and than a person reads."""

LINES_BURST = 2000
"""Lines that are logged in one burst: all tracebacks of a process that ends, or the output of an engine's start."""

LINES_PER_S = 500
"""Lines that are logged over time: less than a hundredth of a core, and each execution of a stream may print a line."""

BYTES_BURST, BYTES_PER_S = 1 << 20, 128 << 10
"""The same limits in bytes, for long lines."""

LINES_PER_STEP = 16
"""Records that are made before other tasks get their turn: some tenths of a millisecond."""

REPORT_S = 5.0
"""Interval between two reports of the number of suppressed lines while there are more."""

_GREETINGS = ("INFO", "I0000")
"""First words of lines that engines write without a fault."""


class StandardError:
    """The standard error of one process.

    Args:
        name: The device's name.
        pid: The process.
        now_s: The time of its start.
    """

    def __init__(self, name: str, pid: int, *, now_s: float) -> None:
        self._logger = logging.getLogger(f"aionn.driver.{name}")
        self._pid = pid
        self._partial = b""
        self._is_cut = False
        self._lines_left, self._bytes_left = float(LINES_BURST), float(BYTES_BURST)
        self._filled_s = now_s
        self._reported_s = now_s - REPORT_S
        self._suppressed_lines = self._suppressed_bytes = 0

    @property
    def is_over_limit(self) -> bool:
        """Whether what comes next is suppressed, as far as is known."""
        return self._lines_left < 1 or self._bytes_left < 1

    def take(self, chunk: bytes, now_s: float) -> Iterator[None]:
        """Logs what came; each step is short. An empty chunk is the end."""
        self._fill(now_s)
        if self.is_over_limit:
            self._suppress(self._partial + chunk)
        else:
            *lines, rest = chunk.split(b"\n")
            for index, line in enumerate(lines):
                if self.is_over_limit:
                    self._suppress(self._partial + b"\n".join([*lines[index:], rest]))
                    break
                self._end_line(line)
                if index % LINES_PER_STEP == LINES_PER_STEP - 1:
                    yield
            else:
                self._keep(rest)
        if not chunk and self._partial:
            self._end_line(b"")
        if self._suppressed_bytes and (not chunk or now_s - self._reported_s >= REPORT_S):
            self._report(now_s)
        yield

    def _suppress(self, written: bytes) -> None:
        self._suppressed_lines += written.count(b"\n")
        self._suppressed_bytes += len(written)
        self._partial, self._is_cut = b"", not written.endswith(b"\n")

    def _end_line(self, rest: bytes) -> None:
        line, self._partial = self._partial + rest, b""
        if self._is_cut:
            self._suppressed_bytes += len(line)
        else:
            self._log_line(line)
        self._is_cut = False

    def _keep(self, rest: bytes) -> None:
        """Remembers the beginning of a line that continues."""
        if self._is_cut:
            self._suppressed_bytes += len(rest)
            return
        self._partial += rest
        if len(self._partial) > LINE_BYTES_MAX:
            self._log_line(self._partial)
            self._partial, self._is_cut = b"", True

    def _fill(self, now_s: float) -> None:
        passed_s = max(now_s - self._filled_s, 0.0)
        self._filled_s = now_s
        self._lines_left = min(LINES_BURST, self._lines_left + passed_s * LINES_PER_S)
        self._bytes_left = min(BYTES_BURST, self._bytes_left + passed_s * BYTES_PER_S)

    def _log_line(self, line: bytes) -> None:
        self._lines_left -= 1
        self._bytes_left -= len(line)
        if not line.strip():
            return
        text = line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()
        self._suppressed_bytes += max(len(line) - LINE_BYTES_MAX, 0)
        said = relayed(text)
        if said is not None:
            logging.getLogger(said[0]).debug("%s (driver process %d)", said[1], self._pid)
        else:
            level = logging.INFO if text.startswith(_GREETINGS) else logging.WARNING
            self._logger.log(level, "%s", text)

    def _report(self, now_s: float) -> None:
        self._logger.warning(
            "standard error of driver process %d: %d lines (%d bytes) were suppressed since the last such message;"
            " at most %d lines and %d bytes per second are logged, and %d bytes of a line",
            self._pid,
            self._suppressed_lines,
            self._suppressed_bytes,
            LINES_PER_S,
            BYTES_PER_S,
            LINE_BYTES_MAX,
        )
        self._suppressed_lines = self._suppressed_bytes = 0
        self._reported_s = now_s
