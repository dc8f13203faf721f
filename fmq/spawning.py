"""Queues among the arguments of a process that multiprocessing starts: the child attaches an endpoint of its own.

Owns the form in which multiprocessing carries one, and the refusal of any other pickling, which would lose the descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fmq.descriptor import MQDescriptor
from fmq.errors import ClosedQueue

__all__ = ["reduced"]


def reduced(queue: Any) -> tuple[Any, ...]:
    """The reduction of a ``MessageQueue`` for pickle, while multiprocessing starts a process.

    Raises:
        ClosedQueue: It is closed.
        TypeError: It is pickled for another purpose.
    """
    from multiprocessing.context import get_spawning_popen
    from multiprocessing.reduction import DupFd

    if queue.state == "closed":
        raise ClosedQueue("queue: it is closed, and cannot be passed to another process")
    if get_spawning_popen() is None:
        raise TypeError(
            "queue: descriptors cannot be pickled. Pass it among the arguments of a multiprocessing.Process, or send it by "
            "fmq.passing.send_queue"
        )
    return _attached, (type(queue), queue.descriptor.to_bytes(), tuple(map(DupFd, queue.fds)), queue.dtype)


def _attached(kind: Any, descriptor: bytes, passed: Sequence[Any], dtype: Any) -> Any:
    fds = [one.detach() for one in passed]
    try:
        return kind.attach(MQDescriptor.from_bytes(descriptor), fds, dtype=dtype)
    finally:
        for fd in fds:
            os.close(fd)
