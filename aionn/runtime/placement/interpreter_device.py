"""The pseudo-device of the steps that the runtime itself runs: an IF or WHILE that no device takes.

Presents the interpreter as a device: a name, no memories, and unlimited slots, since its steps wait for slots of devices, which
order them.

Source: the interpreter pseudo-device of the NN HAL's runtime (``ExecutionPlan``).
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn, cast

from aionn.errors import GeneralFailure
from aionn.hal import Device, DeviceInfo, DeviceType, FeatureLevel, Priority, uniform_capabilities
from aionn.runtime.clock import now_ns
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.placement.division import INTERPRETER
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.job import Job, JobState

__all__ = ["interpreter_device"]


def interpreter_device() -> RuntimeDevice:
    """A device for the step of one IF or WHILE."""
    device = RuntimeDevice(INTERPRETER, INTERPRETER, cast(Device, _InterpreterDevice()))
    device.dispatcher = _Everybody()
    return device


class _InterpreterDevice:
    """The properties of a step's device that the runtime uses: its description, and whether it has memories."""

    info = DeviceInfo(
        INTERPRETER, DeviceType.OTHER, "1", FeatureLevel.LEVEL_8, uniform_capabilities(1.0, 1.0)
    )

    async def allocate(self, *arguments: object) -> NoReturn:
        """See ``Device``."""
        raise GeneralFailure(f"{INTERPRETER}: has no memories of its own")


class _Everybody(Dispatcher):
    """Unlimited slots: a step that holds one waits for slots of devices, which order the steps."""

    def __init__(self) -> None:
        super().__init__(1, now=now_ns)
        self._given = itertools.count()

    def enter(self, *, priority: Priority, deadline_ns: int | None, **told: Any) -> Job:
        """See ``Dispatcher``."""
        job = Job(
            next(self._given),
            priority=priority,
            deadline_ns=deadline_ns,
            arrival_ns=now_ns(),
            durations_ns=(1,),
        )
        job.state = JobState.RUNNING
        return job

    async def wait(self, job: Job) -> None:
        """See ``Dispatcher``: its turn has come."""

    def leave(self, job: Job) -> None:
        """See ``Dispatcher``."""
        job.state = JobState.ENDED

    def release(self, job: Job, **told: Any) -> int:
        """See ``Dispatcher``."""
        job.state = JobState.ENDED
        return now_ns()
