"""The cost of a frame on one device, and the network between, from a few executions that were measured there. Pure.

Owns the division of their durations: the part that the device's driver has measured is device time, the rest is the way. The least
rest is the latency of these very frames, the spread is jitter.

Invariants:
1. Latency and jitter together are no less than the longest way that was seen, with the margin for how few there were. A latency
   below ``LATENCY_STEP_NS``, and the remainder of others, count as jitter, so that equal machines on one network are alike for the
   plan.
2. Device time is never less than that of the driver, with the same margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.admission import SlotCost
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.fleet.transfer import WAIT_NS, NodeLink

__all__ = ["DeviceTime", "Execution", "device_time"]

WAIT_FRAMES = 8
"""Frames that one may wait for on a link, in each direction: as many streams come together on a node as a rule has."""


LATENCY_STEP_NS = 500_000
"""Latencies count in steps of half a millisecond: those of equal machines in one room differ by less."""

RATE_MAX = 1_250_000_000
"""Largest rate that counts, in bytes a second, that of ten gigabits: above it the memory of the machines is measured."""


class Execution(NamedTuple):
    """The measured durations of one execution.

    Attributes:
        total_ns: From the device slot to the result.
        in_driver_ns: At the driver; None where it measures nothing.
    """

    total_ns: int
    in_driver_ns: int | None


class DeviceTime(NamedTuple):
    """The time that a frame takes on a device.

    Attributes:
        measured: With the way there and back, as reservations of this application count it.
        cost: At the device alone.
        link: The way.
    """

    measured: Measured
    cost: SlotCost
    link: NodeLink


def device_time(
    executions: Sequence[Execution], *, up_bytes: int, down_bytes: int, bytes_per_s: float
) -> DeviceTime:
    """The time of a frame.

    Args:
        executions: At least one.
        up_bytes: Size of its inputs.
        down_bytes: Size of its outputs.
        bytes_per_s: The rate of large transfers; 0 where it is not known, or there is no network.
    """
    estimates = Estimates(window=len(executions))
    for total_ns, in_driver_ns in executions:
        there_ns = total_ns if in_driver_ns is None else min(in_driver_ns, total_ns)
        estimates.observe("total", total_ns)
        estimates.observe("device", there_ns)
    ways_ns = [total_ns - min(total_ns, in_driver_ns or total_ns) for total_ns, in_driver_ns in executions]
    measured = Measured(estimates.duration_ns("total", 1), len(executions))
    duration_ns = max(1, estimates.duration_ns("device", 1))
    link = _link(ways_ns, measured.duration_ns - duration_ns, up_bytes, down_bytes, int(bytes_per_s))
    return DeviceTime(measured, SlotCost(duration_ns=duration_ns, piece_ns=duration_ns), link)


def _link(
    ways_ns: Sequence[int], upper_ns: int, up_bytes: int, down_bytes: int, bytes_per_s: int
) -> NodeLink:
    rate = min(bytes_per_s, RATE_MAX)
    least_ns, most_ns = min(ways_ns), max(*ways_ns, upper_ns)
    sent_ns = (up_bytes + down_bytes) * 10**9 // rate if rate else 0
    larger_ns = max(up_bytes, down_bytes) * 10**9 // rate if rate else 0
    latency_ns = max(0, least_ns - sent_ns) // 2 // LATENCY_STEP_NS * LATENCY_STEP_NS
    return NodeLink(
        latency_ns=latency_ns,
        jitter_ns=max(0, most_ns - 2 * latency_ns - sent_ns),
        bytes_per_s=rate,
        wait_ns=min(WAIT_NS, WAIT_FRAMES * (larger_ns + 1)) if rate else 0,
    )
