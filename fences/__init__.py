"""Sync fences for asyncio: awaitable by tasks and threads, chained by plain calls, exportable as file descriptors."""

import sys

if "t" in sys.abiflags:
    raise ImportError(
        "fences: expected a Python with a global interpreter lock, got a free-threaded build: fences rely on the lock"
    )

from fences.chain import Chain
from fences.clock import now_ns, set_clock
from fences.fence import ChainedFence, SyncFence
from fences.merging import first, leaves, merge
from fences.passing import recv_fence, send_fence
from fences.state import (
    FenceError,
    FenceState,
    FenceStateError,
    FenceStatus,
    ForeignFenceError,
    NotAFenceError,
    RemoteCause,
)
from fences.timeline import PointFence, Timeline

__all__ = [
    "Chain",
    "ChainedFence",
    "FenceError",
    "FenceState",
    "FenceStateError",
    "FenceStatus",
    "ForeignFenceError",
    "NotAFenceError",
    "PointFence",
    "RemoteCause",
    "SyncFence",
    "Timeline",
    "first",
    "leaves",
    "merge",
    "now_ns",
    "recv_fence",
    "send_fence",
    "set_clock",
]
