"""Fast message queues between processes: a ring buffer and an event flag in shared memory.

Start with `MessageQueue.create` and send `queue.descriptor` and `queue.fds` to the peer (`fmq.passing`), which calls
`MessageQueue.attach`; await it with the functions of `fmq.aio`. See README.md beside this file.
"""

import importlib
import os
import sys

if "t" in sys.abiflags:
    raise ImportError(
        "fmq: expected a Python with a global interpreter lock, got a free-threaded build: queues rely on the lock"
    )

try:
    importlib.import_module("fmq._native")
except ModuleNotFoundError as e:
    if e.name != "fmq._native":
        raise
    # A program in the root of a clone imports these files and not the installed ones: Python looks beside the program first.
    tree = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    raise ModuleNotFoundError(
        f"fmq: expected its extension _native in {tree}, a source tree that was not built; "
        f"run pip install -e . there, or keep your program in another folder",
        name=e.name,
    ) from None

from fmq import aio, passing
from fmq.answers import Answers, Permit, Slots
from fmq.descriptor import Flavour, Grantor, GrantorDescriptor, MQDescriptor
from fmq.errors import (
    ClosedQueue,
    CorruptQueue,
    Error,
    InterruptedQueue,
    InvalidArgument,
    InvalidDescriptor,
    Overflow,
)
from fmq.event_flag import EventFlag, Notification
from fmq.queue import MessageQueue
from fmq.statistics import Statistics
from fmq.transaction import Transaction

__all__ = [
    "Answers",
    "ClosedQueue",
    "CorruptQueue",
    "Error",
    "EventFlag",
    "Flavour",
    "Grantor",
    "GrantorDescriptor",
    "InterruptedQueue",
    "InvalidArgument",
    "InvalidDescriptor",
    "MQDescriptor",
    "MessageQueue",
    "Notification",
    "Overflow",
    "Permit",
    "Slots",
    "Statistics",
    "Transaction",
    "aio",
    "passing",
]
