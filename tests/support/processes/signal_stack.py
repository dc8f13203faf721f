"""Whether the memory is there that the kernel calls signal handlers of the calling thread on.

A library may give a thread a signal stack of its own, and unmap it while the thread still has it: the next signal ends the process
then, without a dump. OpenVINO does so where two of its cores do not end in the opposite order of their beginning.
"""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["DISABLED", "SignalStack", "is_signal_stack_lost", "set_signal_stack"]

DISABLED = 2
"""The flag of a thread without a signal stack: SS_DISABLE."""

_libc = ctypes.CDLL(None, use_errno=True)


class SignalStack(ctypes.Structure):
    """The kernel's ``stack_t``."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def set_signal_stack(stack: SignalStack) -> None:
    """Gives the calling thread a signal stack."""
    if _libc.sigaltstack(ctypes.byref(stack), None):
        raise OSError(ctypes.get_errno(), "sigaltstack")


def is_signal_stack_lost() -> bool:
    """Whether the calling thread has a signal stack that is not mapped."""
    stack = SignalStack()
    _libc.sigaltstack(None, ctypes.byref(stack))
    if stack.flags & DISABLED:
        return False
    page = ctypes.c_void_p((stack.address or 0) & -mmap.PAGESIZE)
    return bool(_libc.mincore(page, ctypes.c_size_t(1), ctypes.create_string_buffer(1)))
