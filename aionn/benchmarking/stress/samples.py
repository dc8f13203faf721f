"""Samples of a process's resources: memory, objects, descriptors, threads, tasks, mappings, children.

Owns reading these from the kernel and from Python, the table of samples with the tolerated growth, and the room for samples, which
is allocated before the first one: the observer of growth must not grow.

Source: proc(5); ``gc`` of the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aionn.benchmarking.stress.slopes import Slope, slope_of

__all__ = [
    "DRIVER_QUANTITIES",
    "OWN_QUANTITIES",
    "READINGS_MAX",
    "SAMPLES_MAX",
    "Series",
    "child_count",
    "child_pids",
    "descriptor_count",
    "give_back_free_memory",
    "mapping_count",
    "resident_kb",
    "thread_count",
]

READINGS_MAX = 16
"""Most readings of the kernel's lists of children until two agree: a process that starts and reaps others all the time must not
make its reader wait without a limit."""

SAMPLES_MAX = 4096
"""Most samples of a run: one every 20 s for a day; an hour has some 700."""


def resident_kb(pid: int) -> int:
    """Resident memory of a process in kB, shared pages included.

    Raises:
        OSError: There is no such process.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1])
    return 0  # It has ended and is not reaped yet.


def descriptor_count(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def mapping_count(pid: int) -> int:
    """Mappings of shared memory of a process: what a memory that was forgotten keeps. Others come and go with the allocator."""
    return sum("/memfd:" in line or "/dev/shm/" in line for line in _maps(pid))


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def child_pids(pid: int) -> set[int]:
    """Child processes, those that were not reaped included."""
    before, now = None, _listed_children(pid)
    # While a child is reaped, or the thread that started it ends, the kernel's lists can miss others.
    for _ in range(READINGS_MAX - 1):
        before, now = now, _listed_children(pid)
        if now == before:
            break
    return now


def _listed_children(pid: int) -> set[int]:
    pids: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                pids.update(map(int, file.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has ended by now; another one of the process is the parent of its children.
    return pids


def child_count(pid: int) -> int:
    """Number of child processes, those that were not reaped included."""
    return len(child_pids(pid))


def give_back_free_memory() -> None:
    """Has the C library give back the pages that it keeps for later, where it can: what is resident then is held."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _object_count(_pid: int) -> int:
    # Without what was frozen when the run began: looking through all modules takes a tenth of a second.
    return len(gc.get_objects())


def _block_count(_pid: int) -> int:
    return sys.getallocatedblocks()


DRIVER_QUANTITIES: Mapping[str, tuple[Callable[[int], int], float]] = {
    "RSS, kB": (resident_kb, 4096.0),
    "descriptors": (descriptor_count, 4.0),
    "threads": (thread_count, 4.0),
    "shared mappings": (mapping_count, 4.0),
}
"""The samples of a driver process, and the tolerated growth per hour.

4 MB an hour are 100 MB in a day, and about the least that an hour's run can distinguish from the allocator's noise. A descriptor
that leaks in one of a thousand kills, at 2,000 an hour, stays below 4.
"""

OWN_QUANTITIES: Mapping[str, tuple[Callable[[int], int], float]] = {
    **DRIVER_QUANTITIES,
    "objects": (_object_count, 200.0),
    "blocks": (_block_count, 2000.0),
    "children": (child_count, 4.0),
}
"""The same of the application. Objects are those that the garbage collector tracks, blocks all of Python's small allocations: one
object that leaks in ten kills is noticed.
"""


class Series:
    """Samples of one process.

    Args:
        name: Of the process.
        quantities: The quantities to sample: how each is counted, and the growth per hour that does not matter.
    """

    def __init__(
        self, name: str, quantities: Mapping[str, tuple[Callable[[int], int], float]] = OWN_QUANTITIES
    ) -> None:
        self.name = name
        self._quantities = quantities
        # Ones, since the kernel gives memory when it is written to.
        self._values: npt.NDArray[np.float64] = np.ones((SAMPLES_MAX, len(quantities) + 1))
        self.count = 0

    def take(self, now_s: float, pid: int) -> None:
        """Samples a process; beyond ``SAMPLES_MAX`` nothing is kept.

        Raises:
            OSError: There is no such process.
        """
        if self.count == SAMPLES_MAX:
            return
        row = self._values[self.count]
        row[0] = now_s
        for column, (count, _) in enumerate(self._quantities.values(), 1):
            row[column] = count(pid)
        self.count += 1

    def last(self, quantity: str) -> float:
        """The latest value."""
        column = 1 + list(self._quantities).index(quantity)
        return float(self._values[self.count - 1, column])

    def slopes(self) -> tuple[Slope, ...]:
        """The growth of each quantity; nothing without a sample."""
        if not self.count:
            return ()
        kept = self._values[: self.count]
        return tuple(
            slope_of(f"{self.name}: {quantity}", kept[:, 0].tolist(), kept[:, column].tolist(), bound)
            for column, (quantity, (_, bound)) in enumerate(self._quantities.items(), 1)
        )
