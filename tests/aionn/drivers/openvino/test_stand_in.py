"""The whole way of a model to a GPU and an NPU, on a core that has such devices by name and computes on the processor.

The descriptions are those of ``test_terms``. So each line of the driver for such devices runs but OpenVINO's plugins for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.openvino.terms import Description
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.hal import CacheFileCounts, CancelCapability, DeviceType, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from tests.aionn.drivers.openvino.test_terms import GPU, NPU, OLD_NPU

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from aionn.drivers.openvino import driver, engine


class StandIn:
    """OpenVINO's core with a device of a description, whose models are computed on the processor.

    Attributes:
        asked: What was done on the device, with the properties that it was given.
    """

    def __init__(self, core: Any, description: Description) -> None:
        self._core = core
        self._description = description
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.available_devices = ["CPU", description.device]

    def get_property(self, device: str, name: str) -> Any:
        found = self._description
        assert device in (found.device, found.kind)
        listed = dict.fromkeys(found.writable, "RW")
        version = {"NPU": "NPU_DRIVER_VERSION", "GPU": "GPU_DRIVER_VERSION"}[found.kind]
        properties: dict[str, Any] = {
            "SUPPORTED_PROPERTIES": {
                **listed,
                "RANGE_FOR_STREAMS": "RO",
                "FULL_DEVICE_NAME": "RO",
                **({version: "RO"} if found.driver_version else {}),
            },
            "OPTIMIZATION_CAPABILITIES": list(found.capabilities),
            "RANGE_FOR_STREAMS": (1, found.streams_max),
            "FULL_DEVICE_NAME": found.full_name,
            version: found.driver_version,
        }
        return properties[name]

    def _note(self, name: str, device: str, properties: Mapping[str, str]) -> None:
        assert device == self._description.device
        assert properties.keys() <= self._description.writable
        self.asked.append((name, properties))

    def read_model(self, *arguments: Any) -> Any:
        return self._core.read_model(*arguments)

    def query_model(self, model: Any, device: str, properties: Mapping[str, str]) -> Any:
        self._note("query", device, properties)
        return self._core.query_model(model, "CPU", {})

    def compile_model(self, model: Any, device: str, properties: Mapping[str, str]) -> Any:
        self._note("compile", device, properties)
        streams = properties.get("NUM_STREAMS", "1")
        return self._core.compile_model(model, "CPU", {"NUM_STREAMS": streams})

    def import_model(self, blob: Any, device: str, properties: Mapping[str, str]) -> Any:
        self._note("import", device, properties)
        return self._core.import_model(blob, "CPU", {})


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a device by its driver's name, on a core that has the described device."""
    core = engine._core()

    def made(name: str, description: Description) -> tuple[OpenvinoDevice, StandIn]:
        stand_in = StandIn(core, description)
        monkeypatch.setattr(engine, "_core", lambda: stand_in)
        monkeypatch.setattr(driver, "_checked_name", lambda driver_name: description.device)
        return OpenvinoDevice(name, name), stand_in

    return made


def sines(*, is_relaxed: bool) -> Model:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (4, 16))
    model = graph.build([graph.result(OperationType.SIN, [x], x, (4, 16))])
    return msgspec.structs.replace(model, relax_computation_float32_to_float16=is_relaxed)


@pytest.mark.parametrize(
    ("name", "description"), [("openvino-gpu1", GPU), ("openvino-npu", NPU), ("openvino-npu", OLD_NPU)]
)
def test_description_is_the_recorded_one(make: Any, name: str, description: Description) -> None:
    device, _ = make(name, description)
    assert device.description == description
    info = device.info
    assert info.name == name
    assert info.type == (DeviceType.GPU if description is GPU else DeviceType.ACCELERATOR)
    assert info.cancel == CancelCapability.NONE
    assert description.driver_version in info.version


@pytest.mark.parametrize(
    ("name", "description", "precisions"),
    [("openvino-gpu1", GPU, {False: "f32", True: "f16"}), ("openvino-npu", NPU, {True: "f16"})],
)
async def test_model_is_asked_for_compiled_run_and_kept(
    make: Any, tmp_path: Path, name: str, description: Description, precisions: Mapping[bool, str]
) -> None:
    device, stand_in = make(name, description)
    assert device.info.cache_files == CacheFileCounts(1, 1)
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    async with device, aionn.open(devices=[device], drivers=[]) as runtime:
        for is_relaxed, precision in precisions.items():
            model = sines(is_relaxed=is_relaxed)
            for is_kept in (False, True):
                del stand_in.asked[:]
                compiled = await runtime.compile(
                    model, cache_dir=tmp_path, cache_token=bytes([is_relaxed] * 32), priority="high"
                )
                async with compiled as net:
                    assert net.from_cache == is_kept
                    # One compiled model, with a stream for each slot.
                    (properties,) = [p for what, p in stand_in.asked if what != "query"]
                    assert stand_in.asked[-1][0] == ("import" if is_kept else "compile")
                    assert properties["INFERENCE_PRECISION_HINT"] == precision
                    assert properties["MODEL_PRIORITY"] == "HIGH"
                    assert properties["NUM_STREAMS"] == "2"

                    async def one(net: aionn.Compilation = net) -> None:
                        (got,) = (await net.execute([values])).outputs
                        np.testing.assert_allclose(got, np.sin(values), atol=1e-6)

                    async with anyio.create_task_group() as group:
                        for _ in range(2 * device.info.slots):
                            group.start_soon(one)


async def test_compilation_of_another_version_of_the_device_s_driver_is_not_used(
    make: Any, tmp_path: Path
) -> None:
    model = sines(is_relaxed=True)
    for version, is_kept in (("17014", False), ("17014", True), ("17015", False), ("17015", True)):
        device, stand_in = make("openvino-npu", msgspec.structs.replace(NPU, driver_version=version))
        async with (
            device,
            aionn.open(devices=[device], drivers=[]) as runtime,
            await runtime.compile(model, cache_dir=tmp_path, cache_token=bytes(32)) as net,
        ):
            assert net.from_cache == is_kept
        assert ("import" in [what for what, _ in stand_in.asked]) == is_kept


async def test_device_without_float32_refuses_models_that_need_it(make: Any) -> None:
    device, stand_in = make("openvino-npu", NPU)
    async with device:
        assert await device.supported_operations(sines(is_relaxed=False)) == (False,)
        with pytest.raises(InvalidArgument, match="openvino-npu does not support SIN"):
            await device.prepare_model(sines(is_relaxed=False))
        assert stand_in.asked == []
        assert await device.supported_operations(sines(is_relaxed=True)) == (True,)


async def test_device_that_cannot_export_computes_and_keeps_nothing(make: Any, tmp_path: Path) -> None:
    device, stand_in = make("openvino-npu", OLD_NPU)
    model = sines(is_relaxed=True)
    async with device, aionn.open(devices=[device], drivers=[]) as runtime:
        for _ in range(2):
            async with await runtime.compile(model, cache_dir=tmp_path, cache_token=bytes(32)) as net:
                assert not net.from_cache
                values = np.zeros((4, 16), np.float32)
                np.testing.assert_array_equal((await net.execute([values])).outputs[0], values)
    assert "import" not in [what for what, _ in stand_in.asked]


def test_device_whose_driver_fails_is_unavailable_with_the_reason(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StandIn, device: str, name: str) -> Any:
        raise RuntimeError("L0 zeInitDrivers result: ZE_RESULT_ERROR_UNINITIALIZED,\n code 0x78000001")

    monkeypatch.setattr(StandIn, "get_property", fail)
    with pytest.raises(DeviceUnavailable, match="NPU: OpenVINO cannot describe it: L0 zeInitDrivers result"):
        make("openvino-npu", NPU)


async def test_model_that_the_device_s_compiler_rejects_is_refused_and_not_compiled_otherwise(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, stand_in = make("openvino-gpu1", GPU)

    def fail(model: Any, name: str, properties: Mapping[str, str]) -> Any:
        stand_in._note("compile", name, properties)
        raise RuntimeError("[GPU] ProgramBuilder build failed!")

    stand_in.compile_model = fail
    async with device:
        with pytest.raises(InvalidArgument, match="ProgramBuilder build failed"):
            await device.prepare_model(sines(is_relaxed=False))
    assert [what for what, _ in stand_in.asked] == ["query", "compile"]
