"""A workload made ready: its devices, its arrivals under a seed, and the duration of each operation.

Source: every policy that is compared on a workload sees the same scenario.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from aionn.drivers.simulated.profiles import DeviceProfile
from aionn.errors import InvalidArgument
from aionn.hal import CancelCapability
from aionn.scheduler.job import NEVER_NS, DeviceSlot
from aionn.simulation.workload import Arrival, Workload, devices_of, durations_of, generate

__all__ = ["Scenario", "prepare", "slots_of"]


class Scenario(msgspec.Struct, frozen=True):
    """A workload under a seed, made ready: the same for every policy that is compared on it.

    Attributes:
        workload: Where it came from.
        devices: The devices that it runs on.
        arrivals: The requests.
        durations_ns: Per stream and device, those of the operations; None where it cannot run.
        seed: Of the arrivals, the noise and the faults.
    """

    workload: Workload
    devices: tuple[DeviceProfile, ...]
    arrivals: list[Arrival]
    durations_ns: list[tuple[tuple[int, ...] | None, ...]]
    seed: int

    def expected_ns(self, stream_index: int) -> tuple[int, ...]:
        """Whole duration per device at full clock."""
        return tuple(NEVER_NS if d is None else sum(d) for d in self.durations_ns[stream_index])


def prepare(workload: Workload, seed: int, *, folder: Path = Path()) -> Scenario:
    """Makes a workload ready to run.

    Raises:
        InvalidArgument: A file that it names is wrong, or no device can run a model.
    """
    devices = devices_of(workload, folder=folder)
    if len({device.name for device in devices}) != len(devices):
        raise InvalidArgument(f"workload {workload.name}, devices: expected different names")
    durations = durations_of(workload, devices, folder=folder)
    return Scenario(workload, devices, generate(workload, seed, folder=folder), durations, seed)


def slots_of(devices: Sequence[DeviceProfile]) -> list[DeviceSlot]:
    """The slots of all devices, in the order of the devices."""
    devices_of_slots = [index for index, device in enumerate(devices) for _ in range(device.slots)]
    return [
        DeviceSlot(number, index, can_preempt=devices[index].cancel != CancelCapability.NONE)
        for number, index in enumerate(devices_of_slots)
    ]
