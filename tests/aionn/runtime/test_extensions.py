"""Which models and drivers may use which vendor extensions."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.drivers.registry import ExtensionPolicy, make_device
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import ExtensionCode, GraphBuilder
from aionn.runtime.settings import settings_from

DOUBLE = "com.acme.double"

DRIVER = """
    import numpy as np
    from aionn import hal
    from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel

    class Doubling(BlockingDevice):
        "Doubles, and says yes to whatever it is asked."

        element_bytes = 8

        def __init__(self, name):
            kinds = (hal.ExtensionOperandType(1, True, self.element_bytes),)
            extensions = (hal.Extension("com.acme.double", kinds), hal.Extension("com.acme.half"))
            level = hal.FeatureLevel.LEVEL_4
            performance = hal.uniform_capabilities(1.0, 1.0)
            super().__init__(hal.DeviceInfo(name, hal.DeviceType.OTHER, "1", level, performance, extensions))

        def supports(self, model):
            return [True for _ in model.main.operations]

        def prepare(self, model, *, priority, **_):
            return Doubled(self, model, priority)

    class Doubled(BlockingPreparedModel):
        def run(self, inputs, outputs, control):
            return [outputs[0].store(inputs[0] * np.float32(2))]

    class Other(Doubling):
        element_bytes = 4
"""


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's module, as this process and driver processes see it."""
    (tmp_path / "doubling_driver.py").write_text(textwrap.dedent(DRIVER))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def doubling(name: str = DOUBLE) -> Model:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (3,))
    y = g.variable(OperandType.TENSOR_FLOAT32, (3,))
    g.operation(ExtensionCode(name, 0), [x], [y])
    return g.build([y])


def plain() -> Model:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (3,))
    return g.build([g.result(OperationType.RELU, [x], x)])


X = np.array([1.0, 2.0, 3.0], np.float32)
DRIVERS = {"acme-double": "doubling_driver:Doubling"}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ("com.acme.double", "com.acme.half")),
        ("*", ("com.acme.double", "com.acme.half")),
        ("com.acme.*", ("com.acme.double", "com.acme.half")),
        ("org.other.x, com.acme.double", ("com.acme.double",)),
        ("com.acme.half", ("com.acme.half",)),
        ("com.acme", ()),
        ("none", ()),
    ],
)
async def test_what_is_not_allowed_is_hidden_and_refused(
    isolation: str, allowed: str | None, names: tuple[str, ...]
) -> None:
    async with aionn.open(drivers=DRIVERS, isolation=isolation, extensions=allowed) as runtime:  # type: ignore[arg-type]
        (device,) = runtime.devices
        assert tuple(extension.name for extension in device.info.extensions) == names
        if DOUBLE in names:
            net = await runtime.compile(doubling())
            np.testing.assert_array_equal((await net.execute([X])).outputs[0], 2 * X)
        else:
            for call in (runtime.compile, runtime.supported_operations):
                with pytest.raises(aionn.InvalidArgument, match="extensions that are allowed"):
                    await call(doubling())
        await runtime.compile(plain())


@pytest.mark.parametrize("isolation", ["in_process", "process"])
async def test_variable_keeps_the_driver_itself_to_the_policy(
    monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """Not the runtime alone: a client that says nothing of extensions meets a driver that has none."""
    monkeypatch.setenv("AIONN_EXTENSIONS", "com.acme.half")
    async with aionn.open(drivers=DRIVERS, isolation=isolation) as runtime:  # type: ignore[arg-type]
        (device,) = runtime.devices
        assert [extension.name for extension in device.hal.info.extensions] == ["com.acme.half"]
        assert await device.hal.supported_operations(doubling()) == (False,)
        with pytest.raises(aionn.InvalidArgument, match="does not support"):
            await device.hal.prepare_model(doubling())
        assert await device.hal.supported_operations(doubling("com.acme.half")) == (True,)


async def test_extension_that_devices_disagree_on_is_used_by_nobody() -> None:
    drivers = {**DRIVERS, "acme-other": "doubling_driver:Other"}
    async with aionn.open(drivers=drivers, isolation="in_process") as runtime:
        with pytest.raises(
            aionn.InvalidArgument, match="agree on its operand types, got acme-double, acme-other"
        ):
            await runtime.compile(doubling())
        await runtime.compile(doubling("com.acme.half"))
    async with aionn.open(
        drivers=DRIVERS | {"acme-two": DRIVERS["acme-double"]}, isolation="in_process"
    ) as runtime:
        await runtime.compile(doubling())


async def test_device_that_was_given_is_kept_to_the_policy_too() -> None:
    device = make_device("doubling_driver:Doubling", "acme-double")
    async with aionn.open(devices=[device], extensions="none") as runtime:
        assert runtime.devices[0].info.extensions == ()
        with pytest.raises(aionn.InvalidArgument, match="allowed"):
            await runtime.compile(doubling())


def test_option_wins_over_the_variable_and_nonsense_is_refused() -> None:
    environment = {"AIONN_EXTENSIONS": "com.acme.*"}
    assert settings_from(environment=environment).extensions.patterns == ("com.acme.*",)
    assert settings_from(environment=environment, extensions="none").extensions == ExtensionPolicy(())
    assert settings_from(environment={}).extensions.allows("any.thing")
    assert settings_from(environment={"AIONN_EXTENSIONS": ""}).extensions.allows("any.thing")
    for text in ("Com.Acme", "com/acme", "a b", "[ab]"):
        with pytest.raises(aionn.InvalidArgument, match="AIONN_EXTENSIONS: expected names"):
            settings_from(environment={"AIONN_EXTENSIONS": text})


async def test_driver_process_with_a_nonsensical_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_EXTENSIONS", "Com Acme")
    with pytest.raises(aionn.InvalidArgument, match="AIONN_EXTENSIONS"):
        make_device("doubling_driver:Doubling", "acme-double")
