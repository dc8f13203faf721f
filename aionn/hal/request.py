"""Requests and results: what an execution is given and what it gives back.

Owns the records. A request's values are in pools, by location; nothing is copied here.

Source: ``Request``, ``RequestArgument``, ``OutputShape``, ``Timing`` of the NN HAL 1.3; ``ExecutionResult`` of its AIDL form, in
which an output that is too small is an ordinary return with a flag.
"""

from __future__ import annotations

import msgspec

from aionn.hal.memory import Memory
from aionn.hal.operand import DataLocation

__all__ = [
    "NO_TIMING",
    "BufferToken",
    "ExecutionResult",
    "FencedTiming",
    "OutputShape",
    "Request",
    "RequestArgument",
    "Timing",
]


class RequestArgument(msgspec.Struct, frozen=True, array_like=True):
    """The place of one input or output.

    Attributes:
        has_no_value: True for an optional input that is left out; the rest is then zero and empty.
        location: Place in the request's pools; offset and length are 0 for a pool that is a device memory.
        dimensions: Refinement of the operand's; empty where the model's hold.
    """

    has_no_value: bool = False
    location: DataLocation = DataLocation()
    dimensions: tuple[int, ...] = ()


class BufferToken(msgspec.Struct, frozen=True, tag=True):
    """A device memory, by the token that ``allocate`` gave; positive."""

    token: int


class Request(msgspec.Struct, frozen=True, weakref=True):
    """The arguments of one execution.

    Attributes:
        inputs: One per input of the model's main subgraph.
        outputs: One per output of the model's main subgraph.
        pools: Memory that the locations refer to.
    """

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[Memory | BufferToken, ...]


class OutputShape(msgspec.Struct, frozen=True, array_like=True):
    """The actual shape of an output.

    Attributes:
        dimensions: Its extents; 0 for one that is unknown since the execution did not get that far.
        is_sufficient: Whether its buffer was large enough.
    """

    dimensions: tuple[int, ...]
    is_sufficient: bool = True


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """The timing of an execution; None where it was not measured.

    Attributes:
        time_on_device_ns: On the hardware.
        time_in_driver_ns: In the driver, the hardware included; never less than ``time_on_device_ns``.
    """

    time_on_device_ns: int | None = None
    time_in_driver_ns: int | None = None


NO_TIMING = Timing()
"""The timing that is reported if nothing was measured or the execution failed."""


class FencedTiming(msgspec.Struct, frozen=True, array_like=True):
    """Timings of a fenced execution: from its launch, and from the moment that its last dependency signalled."""

    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING


class ExecutionResult(msgspec.Struct, frozen=True, array_like=True):
    """The report of an execution that did not fail.

    Attributes:
        output_sufficient_size: False when some output's buffer was too small; nothing may then be assumed about any output.
        output_shapes: One per output; may be empty when every output has the shape that the model states.
        timing: None entries unless measurement was asked for and all outputs were large enough.
    """

    output_sufficient_size: bool = True
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
