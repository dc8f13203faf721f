"""A device as the runtime sees it: the driver contract's side of it, its slots, and what an application may ask of it."""

from __future__ import annotations

from collections.abc import Hashable

from aionn.hal import (
    CancelCapability,
    Capabilities,
    Device,
    DeviceInfo,
    DeviceStatus,
    DeviceType,
    FeatureLevel,
)
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.clock import clock_of_loop
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.runtime.settings import ExecutionPath
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from aionn.service.client.device import RemoteDevice
from aionn.service.client.reservations import ServedLedger

__all__ = ["REMOTE", "SERVED", "RuntimeDevice"]

SERVED = "served"
"""The driver of a device at a socket."""

REMOTE = "remote"
"""The driver of a device of a node."""


class RuntimeDevice(InThisProcess):
    """A device of a runtime.

    Attributes:
        name: Its name, unique in the runtime.
        driver: Registered name of its driver; ``given`` for a device that the caller made, ``SERVED`` for one at a socket and
            ``REMOTE`` for one of a node, which may have other clients.
        hal: The driver contract's side of it.
        info: The description that never changes for a build of its driver; asked for once.
        dispatcher: Its slots.
        reservations: The time of its slots that streams with a guarantee hold.
        is_asynchronous: Whether executions take the driver's asynchronous call.

    Args:
        name: See above.
        driver: See above.
        hal: See above.
        execution_path: The driver's call that executions take.
        info: See above; None asks ``hal``.
        keeps_slot: Whether a slot is kept from LOW jobs; see ``Dispatcher``.
        ledger: The reservations of a device of a node, with those of its other clients; None for all others.
        delay_ns: The time for which the machine may not run what a slot needs; see ``ReservableSlot``.
    """

    def __init__(
        self,
        name: str,
        driver: str,
        hal: Device,
        execution_path: ExecutionPath = ExecutionPath.SYNC,
        info: DeviceInfo | None = None,
        *,
        keeps_slot: bool = False,
        ledger: ServedLedger | None = None,
        delay_ns: int = 0,
    ) -> None:
        self.is_asynchronous = execution_path == ExecutionPath.ASYNC
        self.name = name
        self.driver = driver
        self.hal = hal
        self.info = hal.info if info is None else info
        can_preempt = self.info.cancel != CancelCapability.NONE
        estimates = Estimates()
        self.dispatcher = Dispatcher(
            self.info.slots,
            now=clock_of_loop(),
            can_preempt=can_preempt,
            keeps_slot=keeps_slot,
            estimates=estimates,
        )
        shared = hal.ledger if isinstance(hal, RemoteDevice) else ledger
        self.reservations = DeviceReservations(
            name, self.info.slots, self.dispatcher, estimates, shared, delay_ns=delay_ns
        )

    @property
    def raises_best_effort(self) -> bool:
        """Whether best effort has the class of reserved frames: streams hold some of its time, and its queue has no other clients,
        who would have to wait."""
        return self.reservations.count > 0 and self.driver not in (SERVED, REMOTE)

    @property
    def type(self) -> DeviceType:
        """The kind of hardware."""
        return self.info.type

    @property
    def version(self) -> str:
        """The driver's version."""
        return self.info.version

    @property
    def feature_level(self) -> FeatureLevel:
        """The highest level that the driver answers for."""
        return self.info.feature_level

    @property
    def capabilities(self) -> Capabilities:
        """Performance by operand type."""
        return self.info.capabilities

    @property
    def pid(self) -> int | None:
        """Its driver process; None when it has none, or none runs."""
        return self.hal.pid if isinstance(self.hal, RemoteDevice) else None

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again. From any thread, also from a finaliser."""
        self.dispatcher.forget(model)
        self.reservations.forget_model(model)

    def explain(self) -> str:
        """The reservations, the jobs that hold its slots, the first waiting ones and the reasons, in lines of text."""
        return "\n".join([*self.reservations.lines(), self.dispatcher.explain()])

    async def status(self) -> DeviceStatus:
        """Asks the driver, and starts it if it does not run. A driver around an engine imports it for the answer.

        Raises:
            DeviceUnavailable: The device cannot be used; the message has the reason.
        """
        return await self.hal.status()

    def _repr_html_(self) -> str:
        from aionn.reports.notebooks import values_html

        values: tuple[tuple[str, object], ...] = (
            ("device", self.name),
            ("type", self.type.name),
            ("driver", f"{self.driver} {self.version}"),
            ("feature level", self.feature_level.name),
            ("slots", self.info.slots),
            ("driver process", self.pid or "none"),
            ("executions that wait", self.dispatcher.statistics().waiting),
        )
        return values_html(values)

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.type.name}, driver {self.driver} {self.version}>"
