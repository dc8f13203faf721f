"""The check after each test that finds a signal stack whose memory is gone."""

from __future__ import annotations

import ctypes
import mmap
import threading

from tests.support.processes.signal_stack import DISABLED, SignalStack, is_signal_stack_lost, set_signal_stack


def test_signal_stack_is_lost_once_its_memory_is_unmapped() -> None:
    """In a thread of its own: each has its own signal stack."""
    found = []

    def look() -> None:
        found.append(is_signal_stack_lost())
        memory = mmap.mmap(-1, 1 << 16)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        set_signal_stack(SignalStack(address, 0, 1 << 16))
        found.append(is_signal_stack_lost())
        memory.close()
        found.append(is_signal_stack_lost())
        set_signal_stack(SignalStack(None, DISABLED, 0))
        found.append(is_signal_stack_lost())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False, False, True, False]
