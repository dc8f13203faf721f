"""The launches of a burst and the packets that they are sent as, at the client's end. ``controller`` sends and ends them."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from aionn.errors import Error
from aionn.hal import ExecutionResult, LaunchBase, Request
from aionn.hal.callers import ReservedFrame
from fences import SyncFence

__all__ = ["BurstLaunch", "KeptPacket"]


class LaunchEnd(Protocol):
    """The end of a burst that a launch was sent by."""

    def read_on(self) -> None:
        """Has the result read though no task waits for the launch."""
        ...

    def cancelled(self, launch: BurstLaunch) -> None:
        """The result of a launch is not wanted any more."""
        ...

    def received(self, launch: BurstLaunch) -> Coroutine[Any, Any, ExecutionResult]:
        """Waits for a launch, and returns or raises its outcome."""
        ...


class KeptPacket:
    """A request's packet, without its limits.

    Attributes:
        request: The request: as long as it lives nothing else has its identity.
        payload: The bytes.
        launch: A launch of it that has neither ended nor been given to a caller, for the next direct execution; None without one.
    """

    __slots__ = ("launch", "payload", "request")

    def __init__(self, request: Request, payload: bytes) -> None:
        self.request = request
        self.payload = payload
        self.launch: BurstLaunch | None = None


class BurstLaunch(LaunchBase):
    """An execution of a burst.

    Attributes:
        packet: The packet that is sent, or was.
        request: Kept until it is done.
        temporary: The slots that are for this execution alone; empty when they are free again.
        received: Its outcome, once that was read; it is not done before its temporary slots are free.
        frame: The frame of a reservation that it is; None for best effort.
    """

    frame: ReservedFrame | None = None
    received: ExecutionResult | Error | None = None
    temporary: tuple[int, ...] | list[int] = ()

    def __init__(self, burst: LaunchEnd, packet: bytes, request: Request) -> None:
        self._burst = burst
        self.packet = packet
        self.request: Request | None = request

    @property
    def done(self) -> SyncFence:
        """See ``Launch``."""
        fence = super().done
        if not self.is_done:
            self._burst.read_on()
        return fence

    def _ask_to_stop(self) -> None:
        self._burst.cancelled(self)

    def __await__(self) -> Generator[Any, None, ExecutionResult]:
        return self._burst.received(self).__await__()
