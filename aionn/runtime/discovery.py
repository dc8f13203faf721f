"""The devices of a runtime: those that were given, those of served sockets, those of nodes, and those of drivers.

Owns the devices' order, the reasons of those that are left out, and the refusal of what is neither a device nor a driver's name.

Invariants:
1. A device that cannot be used, or that takes long to fail, neither hides nor delays another.
2. A device that the caller named and does not get causes a warning in the log; one that is merely absent does not.
3. Every device that was made is in ``devices`` or in ``unused`` from then on, however finding them ends.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from aionn.drivers import registry
from aionn.errors import DeviceUnavailable, Error, InvalidArgument
from aionn.fleet.addresses import NODES_MAX, NodeAddress
from aionn.hal import (
    Device,
    DeviceInfo,
)
from aionn.platform.loops import finish
from aionn.platform.real_work import real_work
from aionn.realtime import Scheduling
from aionn.runtime.devices import REMOTE, SERVED, RuntimeDevice
from aionn.runtime.settings import Settings
from aionn.service.client.device import RemoteDevice
from aionn.service.client.reservations import ServedLedger
from aionn.validation import check_device_info, is_iterable

__all__ = ["Discovery", "Isolation", "Unavailable", "devices_given", "drivers_wanted", "unknown_name"]

Isolation = Literal["process", "in_process"]

_logger = logging.getLogger("aionn.manager")


class _NotEnabled(DeviceUnavailable):
    """The settings leave it out, so its absence is not reported."""

    def __init__(self) -> None:
        super().__init__("not enabled: see enabled_devices and cpu_only")


class Unavailable(msgspec.Struct, frozen=True):
    """A driver that cannot be used.

    Attributes:
        name: The device's name.
        reason: Why.
    """

    name: str
    reason: str


def devices_given(devices: Sequence[Device]) -> list[tuple[Device, DeviceInfo]]:
    """The devices that the caller has made, each with its DeviceInfo.

    Raises:
        InvalidArgument: It is not a list, or one element is not a device.
    """
    if isinstance(devices, str) or not is_iterable(devices):
        raise InvalidArgument(f"devices: expected a list of devices, got {devices!r}")
    given = []
    for device in devices:
        if isinstance(device, str):
            raise InvalidArgument(
                f"devices: expected devices, got the name {device!r}; names belong in drivers= or enabled_devices="
            )
        info = getattr(device, "info", None)
        if not isinstance(info, DeviceInfo):
            raise InvalidArgument(f"devices: expected devices, got {device!r}")
        given.append((device, info))
    return given


def drivers_wanted(
    drivers: Mapping[str, str] | Sequence[str] | None, *, is_any_given: bool
) -> dict[str, str]:
    """Device names to driver names. None stands for every registered driver, or for none where devices are given.

    Raises:
        InvalidArgument: It is neither a list nor a mapping of names, or a name is there twice.
    """
    if drivers is None:
        drivers = () if is_any_given else registry.driver_names()
    if isinstance(drivers, str):
        raise InvalidArgument(
            f"drivers: expected a list or a mapping, got the string {drivers!r}; write [{drivers!r}]"
        )
    if not isinstance(drivers, Collection) or not is_iterable(drivers):
        raise InvalidArgument(f"drivers: expected a list or a mapping, got {drivers!r}")
    pairs = list(drivers.items()) if isinstance(drivers, Mapping) else [(name, name) for name in drivers]
    for name in (name for pair in pairs for name in pair):
        if not isinstance(name, str):
            raise InvalidArgument(f"drivers: expected names, got {name!r}")
    wanted = dict(pairs)
    if len(wanted) != len(pairs):
        raise InvalidArgument(
            f"drivers: expected different names, got {list(drivers)}; give a mapping to name devices"
        )
    return wanted


def unknown_name(name: object, devices: Sequence[RuntimeDevice]) -> str:
    """The message of an error for a name that no device has."""
    if isinstance(name, RuntimeDevice):
        return "device: expected a name, got a RuntimeDevice; write device.name"
    names = [device.name for device in devices]
    on_request = registry.devices_on_request()
    close = difflib.get_close_matches(name, [*names, *on_request], n=1) if isinstance(name, str) else ()
    hint = f"; did you mean {close[0]}?" if close else ""
    if name in on_request:
        hint = f", which aionn.open(drivers=[{name!r}]) adds"
    elif isinstance(name, str) and registry.is_of_family(name):
        hint = f", which aionn.open(drivers=[{name!r}]) adds where it can be used"
    return f"device: expected one of {', '.join(names)}; got {name!r}{hint}"


class _Source(NamedTuple):
    """Where a device comes from.

    Attributes:
        name: The device's name, or the path of the socket or the address of the node where it is served.
        driver: See ``RuntimeDevice``.
        node: The node; None for every other device.
    """

    name: str
    driver: str
    node: NodeAddress | None = None

    @property
    def has_own_name(self) -> bool:
        """Whether the device itself has a name, which is not known before it was reached."""
        return self.driver in (SERVED, REMOTE)


class Discovery:
    """The devices of one runtime.

    Args:
        settings: Which devices are enabled, where others are served, on this machine and on others, and how driver processes are
            kept.
        isolation: Where drivers run.
        is_asked_for: Whether the caller named the drivers.

    Attributes:
        scheduling: The scheduling of the threads of driver processes; to be set before ``find``, None if real time is off.
        devices: The usable devices, in order of preference.
        unavailable: The unavailable devices, with the reasons.
        unused: Objects that were made or given and are not in use, to be closed with the runtime.
    """

    def __init__(self, settings: Settings, isolation: Isolation, *, is_asked_for: bool) -> None:
        self._settings = settings
        self._isolation = isolation
        self._is_asked_for = is_asked_for
        self.scheduling: Scheduling | None = None
        self.devices: tuple[RuntimeDevice, ...] = ()
        self.unavailable: tuple[Unavailable, ...] = ()
        self.unused: tuple[Device, ...] = ()

    async def find(
        self,
        given: Sequence[tuple[Device, DeviceInfo]],
        drivers: Mapping[str, str],
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        """Finds the devices.

        Args:
            given: Those that the caller made; they come first, then those of the settings' sockets and nodes, then those of
                drivers.
            drivers: Device names to driver names. The reference device comes last, wherever it was named.
            tasks: Where connections live.

        Raises:
            InvalidArgument: There is no driver of a name.
        """
        by_rank = sorted(drivers.items(), key=lambda item: item[1] == "reference")
        sources = [
            *(_Source(path, SERVED) for path in self._settings.sockets),
            *(_Source(node.text, REMOTE, node) for node in self._settings.fleet),
            *(_Source(name, driver) for name, driver in by_rank),
        ]
        # Until it is found, a device that was given is closed with the runtime all the same.
        self.unused = tuple(device for device, _ in given)
        for device, info in given:
            try:
                self._add(device, info, info.name, "given")
            except Error as e:
                self._leave_out(info.name, e, is_missed=True)
        outcomes = await self._make_all(sources, tasks)
        for source, made in zip(sources, outcomes, strict=True):
            try:
                if isinstance(made, Error):
                    raise made
                info = made.info
                self._add(made, info, info.name if source.has_own_name else source.name, source.driver)
            except Error as e:
                # A driver that cannot be used, or whose DeviceInfo is invalid, is left out.
                self._leave_out(source.name, e, is_missed=source.has_own_name or self._is_asked_for)

    async def _make_all(self, sources: Sequence[_Source], tasks: anyio.abc.TaskGroup) -> list[Device | Error]:
        """Makes all devices concurrently: one whose process does not answer does not delay another."""
        outcomes: dict[int, Device | Exception] = {}
        importing = anyio.Lock()

        async def make(index: int, source: _Source) -> None:
            try:
                made = outcomes[index] = await self._make(source, tasks, importing)
                self.unused = (*self.unused, made)
            except Exception as e:
                outcomes[index] = e
                if _is_fatal(e):
                    making.cancel_scope.cancel()

        async with anyio.create_task_group() as making:
            for index, source in enumerate(sources):
                making.start_soon(make, index, source)
        for _, outcome in sorted(outcomes.items()):
            if isinstance(outcome, Exception) and _is_fatal(outcome):
                raise outcome
        found: list[Device | Error] = []
        for index in range(len(sources)):
            outcome = outcomes[index]
            assert not isinstance(outcome, Exception) or isinstance(outcome, Error), "others are fatal"
            found.append(outcome)
        return found

    async def _make(self, source: _Source, tasks: anyio.abc.TaskGroup, importing: anyio.Lock) -> Device:
        name, driver, node = source
        limit_s, spare = self._settings.hang_after_s, self._settings.spare_processes
        if driver == SERVED:
            device = RemoteDevice(driver, name, tasks, path=name, hang_after_s=limit_s)
            await device.connect()
            return device
        if node is not None:
            from aionn.fleet.device import (
                NodeDevice,  # Brings the checks of models, which other runtimes leave to drivers.
            )

            remote = NodeDevice(node)
            try:
                await remote.connect()
            except BaseException:
                await finish(remote.aclose())
                raise
            return remote
        if not self._settings.is_enabled(name, driver):
            raise _NotEnabled
        # Engines take long to import, and the first one brings the rules of every operation with it. One after the other: modules
        # that import one another must not be imported by two threads concurrently.
        async with importing:
            with real_work("importing a driver"):
                if self._isolation == "in_process":
                    factory = await anyio.to_thread.run_sync(registry.load_factory, driver)
                else:
                    info = await anyio.to_thread.run_sync(registry.built_in_info, driver, name)
            if self._isolation == "in_process":
                return registry.made_by(factory, driver, name)
            if info is None and driver not in registry.driver_names():
                registry.load_factory(driver)  # raises: names what there is
        device = RemoteDevice(
            driver,
            name,
            tasks,
            info=info,
            spare=spare,
            hang_after_s=limit_s,
            scheduling=self.scheduling,
        )
        if info is None:
            await device.connect()
        return device

    def _add(self, hal: Device, info: DeviceInfo, name: str, driver: str) -> None:
        """Takes a device up.

        Raises:
            Error: Its DeviceInfo is invalid, or it is not wanted.
        """
        check_device_info(info)
        info = self._settings.extensions.restricted(info)
        if any(device.name == name for device in self.devices):
            raise DeviceUnavailable(f"a device is called {name!r} already")
        if not self._settings.is_enabled(name, driver):
            raise _NotEnabled
        # LOW jobs run in the ordinary class then: beside other programs one may hold its slot for several times its duration.
        keeps_slot = self.scheduling is not None and self.scheduling.is_realtime
        path = self._settings.execution_path
        ledger = _ledger_of(hal) if driver == REMOTE else None
        delay_ns = self._settings.reserved_delay_ns
        found = RuntimeDevice(
            name, driver, hal, path, info, keeps_slot=keeps_slot, ledger=ledger, delay_ns=delay_ns
        )
        self.devices = (*self.devices, found)
        self.unused = tuple(other for other in self.unused if other is not hal)
        _logger.debug("found %s: driver %s %s", name, driver, info.version)

    async def add_node(self, node: NodeAddress, tasks: anyio.abc.TaskGroup) -> RuntimeDevice:
        """Takes up the device of a node that joins later, behind those of other nodes.

        Args:
            node: Its address.
            tasks: See ``find``.

        Raises:
            InvalidArgument: There are ``NODES_MAX`` nodes already.
            Error: It cannot be reached, its device cannot be used, or another one has the name.
        """
        if sum(device.driver == REMOTE for device in self.devices) >= NODES_MAX:
            raise InvalidArgument(f"node {node.text}: expected at most {NODES_MAX} nodes")
        made = await self._make(_Source(node.text, REMOTE, node), tasks, anyio.Lock())
        try:
            self._add(made, made.info, made.info.name, REMOTE)
        except BaseException:
            await finish(made.aclose())
            raise
        *others, found = self.devices
        before = sum(device.driver in ("given", SERVED, REMOTE) for device in others)
        self.devices = (*others[:before], found, *others[before:])
        self.unavailable = tuple(other for other in self.unavailable if other.name != node.text)
        return found

    def _leave_out(self, name: str, error: Error, *, is_missed: bool) -> None:
        # The reason is shown beside the name, and need not repeat it.
        reason = str(error).removeprefix(f"device {name!r}: ").removeprefix(f"socket {name}: ")
        reason = reason.removeprefix(f"node {name}: ")
        self.unavailable = (*self.unavailable, Unavailable(name, reason))
        level = logging.WARNING if is_missed and not isinstance(error, _NotEnabled) else logging.DEBUG
        _logger.log(level, "%s is not used: %s", name, reason)


def _ledger_of(hal: Device) -> ServedLedger | None:
    """The ledger of a device of a node."""
    from aionn.fleet.device import NodeDevice  # As above.

    return hal.ledger if isinstance(hal, NodeDevice) else None


def _is_fatal(error: Exception) -> bool:
    """Whether a driver is not at fault: a mistake of the caller's, or a shortage."""
    return isinstance(error, InvalidArgument) or not isinstance(error, Error)
