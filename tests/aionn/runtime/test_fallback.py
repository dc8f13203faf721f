"""Fallback: only where allowed, never for the caller's own mistake, always told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers import registry
from aionn.drivers.arguments import OutputArea
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.hal import Model, OutputShape, uniform_capabilities
from aionn.interpreter import RunControl

Values = npt.NDArray[np.float32]


class Broken(ReferenceDevice):
    """Seems quicker than the reference device, and fails where it is told to.

    Attributes:
        failure: Makes what it raises; a fresh one each time, since a raised exception keeps the frames that it passed.
        where: ``prepare`` or ``run``.
    """

    failure: Callable[[], Exception] = staticmethod(lambda: aionn.GeneralFailure("broken"))
    where = "run"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.info = msgspec.structs.replace(self.info, capabilities=uniform_capabilities(0.5, 0.5))

    def prepare(self, model: Model, **options: Any) -> ReferencePreparedModel:
        if self.where == "prepare":
            raise self.failure()
        return BrokenPreparedModel(self, model, options["priority"])


class BrokenPreparedModel(ReferencePreparedModel):
    def run(
        self, inputs: Sequence[Any], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        device = self.device
        assert isinstance(device, Broken)
        raise device.failure()


@pytest.fixture
async def runtime(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aionn.Runtime]:
    def factory(name: str) -> Callable[[str], ReferenceDevice]:
        return Broken if name == "broken" else ReferenceDevice

    monkeypatch.setattr(registry, "load_factory", factory)
    drivers = {"npu": "broken", "reference": "reference"}
    async with aionn.open(drivers=drivers, isolation="in_process") as opened:
        yield opened


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture
def silence() -> Values:
    return np.full((1, 49, 40, 1), np.log(1e-6), dtype=np.float32)


async def test_failing_step_runs_on_the_reference_device_and_the_result_says_so(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits, allow_fallback=True)
    assert net.devices == ("npu",)
    result = await net.execute([silence])
    assert int(result.outputs[0].argmax()) == 0
    (told,) = result.fallback
    assert "npu failed (broken); ran on reference" in told
    async with net.burst() as burst:
        assert (await burst.execute([silence])).fallback == result.fallback


async def test_without_leave_the_failure_is_the_callers_to_see(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    with pytest.raises(aionn.GeneralFailure, match="broken"):
        await net.execute([silence])


async def test_compile_failure_puts_the_whole_model_on_the_reference_device(
    runtime: aionn.Runtime, digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "where", "prepare")
    with pytest.raises(aionn.GeneralFailure, match="broken"):
        await runtime.compile(digits)
    net = await runtime.compile(digits, allow_fallback=True)
    assert net.devices == ("reference",)
    assert all("compiling failed (broken)" in p.reason for p in net.placement)
    assert (await net.execute([silence])).fallback == ()


@pytest.mark.parametrize(
    "failure",
    [
        aionn.InvalidArgument,
        aionn.MissedDeadline,
        aionn.OutputInsufficientSize,
    ],
)
async def test_mistakes_and_missed_deadlines_never_fall_back(
    runtime: aionn.Runtime,
    digits: Path,
    silence: Values,
    monkeypatch: pytest.MonkeyPatch,
    failure: type[aionn.Error],
) -> None:
    monkeypatch.setattr(Broken, "failure", staticmethod(lambda: failure("planted")))
    net = await runtime.compile(digits, allow_fallback=True)
    with pytest.raises(failure, match="planted"):
        await net.execute([silence])


async def test_chosen_devices_are_not_replaced(runtime: aionn.Runtime, digits: Path) -> None:
    with pytest.raises(aionn.InvalidArgument, match="devices that are asked for are not replaced"):
        await runtime.compile(digits, devices="npu", allow_fallback=True)
