"""Lets the n-th allocation of a queue's whole life fail, for every n until the life passes untouched.

Run as a script by test_allocations.py. The hook is CPython's own, of its test suite.
"""

from __future__ import annotations

import _testcapi  # type: ignore[import-not-found]
import gc
import os
import sys
import warnings
from pathlib import Path

import fmq


def life() -> None:
    with (
        fmq.MessageQueue.create(1, 256) as writer,
        fmq.MessageQueue.attach(writer.descriptor, writer.fds) as reader,
    ):
        assert writer.write_message(b"message")
        assert reader.read_message() == b"message"
        written = writer.begin_write(4)
        assert written is not None
        written.copy_to(b"abcd")
        writer.commit_write(4)
        read = reader.begin_read(4)
        assert read is not None
        assert read.copy_from() == b"abcd"
        reader.commit_read(4)
        writer.event_flag.wake(1)
        assert writer.event_flag.wait(1, 0) == 1
        writer.statistics()
        repr(writer)


def footprint() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:fmq")


def main() -> None:
    life()
    before = footprint()
    gc.freeze()  # What is there stays: no collection need look at it.
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda *_: None
    number = failures = untouched = 0
    while untouched < 5:  # the freelists of the interpreter move the count a little from run to run
        number += 1
        _testcapi.set_nomemory(number, number + 1)
        try:
            life()
            untouched += 1
        except (MemoryError, RuntimeError):  # a lock says "can't allocate lock" by the latter
            untouched = 0
            failures += 1
        finally:
            _testcapi.remove_mem_hooks()
        if footprint() != before:
            raise SystemExit(
                f"allocation {number} failed and left something behind: {before} -> {footprint()}"
            )
    print(failures)


if __name__ == "__main__":
    main()
