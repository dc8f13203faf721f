"""The matrix library below numpy, which sums in another order with other numbers of threads.

Owns the way to its number of threads: while any run that multiplies matrices is under way it is 1, so that a result is the same in
every process and environment. It is one number for the process: numpy calls of the application that overlap a run have one thread
as well. Libraries other than OpenBLAS, which numpy's wheels bring, keep their threads.

Invariant: the number is restored when the last of overlapping runs is over.

Source: OpenBLAS' C interface.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["one_thread", "thread_count"]

_PREFIXES = ("scipy_", "")
_SUFFIXES = ("64_", "")


class _Functions(NamedTuple):
    get: Callable[[], int]
    set: Callable[[int], Any]


@functools.cache
def _functions() -> _Functions | None:
    """OpenBLAS' functions; None where numpy uses another library."""
    # A symbol is looked for in the libraries that an extension module brings with it, too.
    core = getattr(np, "_core", None) or np.core  # The name before numpy 2.
    module = ctypes.CDLL(core._multiarray_umath.__file__)
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            try:
                get = module[f"{prefix}openblas_get_num_threads{suffix}"]
                set_ = module[f"{prefix}openblas_set_num_threads{suffix}"]
            except AttributeError:
                continue
            get.argtypes, get.restype = (), ctypes.c_int
            set_.argtypes, set_.restype = (ctypes.c_int,), None
            return _Functions(get, set_)
    return None


def thread_count() -> int | None:
    """Number of threads that a product of matrices may use now; None where the library is not OpenBLAS."""
    functions = _functions()
    return None if functions is None else functions.get()


class _OneThread:
    """Entered by each run, by any number concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before = 1

    def __enter__(self) -> None:
        functions = _functions()
        if functions is None:
            return
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._before = functions.get()
                if self._before != 1:
                    functions.set(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        functions = _functions()
        if functions is None:
            return
        with self._lock:
            self._runs -= 1
            if not self._runs and self._before != 1:
                functions.set(self._before)


one_thread = _OneThread()
"""``with one_thread:`` products of matrices use one thread."""
