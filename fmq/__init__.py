"""Fast message queues between processes: a ring buffer and an event flag in shared memory.

Start with `MessageQueue.create` and send `queue.descriptor` and `queue.fds` to the peer (`fmq.passing`), which calls
`MessageQueue.attach`; await it with the functions of `fmq.aio`. See README.md beside this file.
"""

import sys

if "t" in sys.abiflags:
    raise ImportError(
        "fmq: expected a Python with a global interpreter lock, got a free-threaded build: queues rely on the lock"
    )

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
