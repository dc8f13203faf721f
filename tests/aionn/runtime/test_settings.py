"""Options and variables: which wins, what they do, and that every variable is listed."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.cli.main import main
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import CACHE_FILES_MAX, CacheFileCounts, uniform_capabilities
from aionn.observability.log_tags import TAGS, choose_tags, chosen_tags, parse_tags
from aionn.runtime.settings import VARIABLES, Settings, settings_from, unknown_variables

Values = npt.NDArray[np.float32]


def quick(name: str) -> ReferenceDevice:
    device = ReferenceDevice(name)
    device.info = msgspec.structs.replace(device.info, capabilities=uniform_capabilities(0.1, 0.1))
    return device


def open_with(*names: str, **options: object) -> aionn.Runtime:
    devices = [quick(name) for name in names]
    return aionn.open(devices=devices, drivers=["reference"], isolation="in_process", **options)  # type: ignore[arg-type]


def test_option_wins_over_variable_and_variable_over_default() -> None:
    variables = {
        "AIONN_DEVICES": "b",
        "AIONN_CPU_ONLY": "1",
        "AIONN_PARTITION": "2",
        "AIONN_EXECUTION": "async",
    }
    windows = {"AIONN_BURST_CONTROLLER_POLLING_US": "20", "AIONN_BURST_SERVER_POLLING_US": "50"}
    chosen = settings_from(burst_server_polling_us=0, environment=windows)
    assert (chosen.burst_controller_polling_us, chosen.burst_server_polling_us) == (20, 0)
    assert settings_from(sockets=[], environment={"AIONN_SOCKETS": "/a"}).sockets == ()
    limit = {"AIONN_HANG_AFTER_S": "2.5"}
    assert settings_from(environment=limit).hang_after_s == 2.5
    assert settings_from(hang_after_s=1, environment=limit).hang_after_s == 1
    assert settings_from(environment={}) == Settings()
    assert settings_from(environment=variables) == Settings("b", True, "without_fallback", "async")  # type: ignore[arg-type]
    assert settings_from(
        enabled_devices="a",
        cpu_only=False,
        partition="none",
        execution_path="sync",
        environment=variables,
    ) == Settings("a", False, "none", "sync")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIONN_DEVICES", "("),
        ("AIONN_CPU_ONLY", "yes"),
        ("AIONN_PARTITION", "3"),
        ("AIONN_LOG", "model,bogus"),
        ("AIONN_EXECUTION", "both"),
        ("AIONN_SOCKETS", "/a:/a"),
        ("AIONN_BURST_CONTROLLER_POLLING_US", "-1"),
        ("AIONN_BURST_SERVER_POLLING_US", "501"),
        ("AIONN_BURST_SERVER_POLLING_US", "some"),
        ("AIONN_HANG_AFTER_S", "0"),
        ("AIONN_HANG_AFTER_S", "soon"),
        ("AIONN_HANG_AFTER_S", "nan"),
        ("AIONN_HANG_AFTER_S", "inf"),
    ],
)
def test_senseless_variable_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=name):
        settings_from(environment={name: value})


async def test_pattern_must_match_the_whole_name() -> None:
    async with open_with("npu0", "npu10", enabled_devices="npu.|reference") as runtime:
        assert [d.name for d in runtime.devices] == ["npu0", "reference"]
        (missing,) = runtime.unavailable
        assert missing.name == "npu10" and "not enabled" in missing.reason


async def test_cpu_only_leaves_the_reference_device(digits: Path) -> None:
    async with open_with("npu", cpu_only=True) as runtime:
        assert [d.name for d in runtime.devices] == ["reference"]
        assert (await runtime.compile(digits)).devices == ("reference",)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("none", ("reference",)), ("with_fallback", ("npu",)), ("without_fallback", ("npu",))],
)
async def test_partition_mode(digits: Path, mode: str, expected: tuple[str, ...]) -> None:
    async with open_with("npu", partition=mode) as runtime:
        net = await runtime.compile(digits, allow_fallback=True)
        assert net.devices == expected
        assert (net._plan.fallback is not None) == (mode != "without_fallback")
        assert (await runtime.compile(digits, devices="npu")).devices == ("npu",)


async def test_reference_device_is_last_wherever_it_was_named() -> None:
    drivers = {"first": "reference", "phone-npu": "simulated"}
    async with aionn.open(drivers=drivers, isolation="in_process") as runtime:
        assert [d.name for d in runtime.devices] == ["phone-npu", "first"]


@pytest.mark.parametrize("execution_path", ["sync", "async"])
@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_both_calls_of_the_driver_give_the_answer(
    digits: Path, silence: Values, execution_path: str, isolation: str
) -> None:
    async with aionn.open(
        drivers=["reference"], isolation=isolation, execution_path=execution_path
    ) as runtime:
        net = await runtime.compile(digits)
        result = await net.execute([silence], measure=True)
        assert int(result.outputs[0].argmax()) == 0
        assert result.timing.time_on_device_ns is not None
        with pytest.raises(aionn.MissedDeadline):
            await net.execute([silence], deadline=1)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_files": CacheFileCounts(CACHE_FILES_MAX + 1, 0)},
        {"cache_files": CacheFileCounts(0, CACHE_FILES_MAX + 1)},
        {"slots": 0},
        {"version": ""},
        {"capabilities": uniform_capabilities(-1.0, 1.0)},
    ],
)
async def test_device_that_says_what_cannot_be_is_left_out_with_the_reason(
    change: dict[str, object],
) -> None:
    odd = ReferenceDevice("odd")
    odd.info = msgspec.structs.replace(odd.info, **change)
    async with aionn.open(devices=[odd], drivers=["reference"], isolation="in_process") as runtime:
        assert [d.name for d in runtime.devices] == ["reference"]
        assert runtime.unavailable[0].name == "odd" and "expected" in runtime.unavailable[0].reason
        with pytest.raises(aionn.DeviceUnavailable, match="odd"):
            runtime.device("odd")


# Log tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("1", TAGS),
        ("all", TAGS),
        ("driver model", ("model", "driver")),
        ("memory:execution,,  model", ("model", "execution", "memory")),
    ],
)
def test_tags_are_chosen(text: str, expected: Sequence[str]) -> None:
    assert parse_tags(text) == (expected, ())


def test_unknown_tag_is_told_and_the_others_apply() -> None:
    assert parse_tags("driver nonsense") == (("driver",), ("nonsense",))


async def test_chosen_tags_speak_and_others_do_not(
    digits: Path, own_log_tags: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_with("npu") as runtime:
        await runtime.compile(digits)
    assert not caplog.records
    choose_tags("compilation manager")
    async with open_with("npu") as runtime:
        net = await runtime.compile(digits)
        await net.aclose()
    said = {record.name for record in caplog.records}
    assert said == {"aionn.compilation", "aionn.manager"}
    assert "npu" in caplog.text


def test_choice_replaces_the_one_before(own_log_tags: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def levels() -> list[int]:
        return [logging.getLogger(f"aionn.{tag}").level for tag in ("compilation", "manager", "memory")]

    monkeypatch.delenv("AIONN_LOG", raising=False)
    logging.getLogger("aionn.compilation").setLevel(logging.ERROR)
    choose_tags("compilation manager")
    choose_tags("manager memory")
    assert levels() == [logging.ERROR, logging.DEBUG, logging.DEBUG]
    choose_tags()
    assert levels() == [logging.ERROR, logging.DEBUG, logging.DEBUG]
    assert set(chosen_tags()) == {
        "manager",
        "memory",
    }  # What driver processes that start from now on are given.
    choose_tags("")
    assert levels() == [logging.ERROR, logging.NOTSET, logging.NOTSET]
    assert chosen_tags() == ()


@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_every_tag_says_what_its_part_does(
    digits: Path, silence: Values, own_log_tags: None, caplog: pytest.LogCaptureFixture, isolation: str
) -> None:
    """With the driver in a process of its own, what that says comes back to the same loggers."""
    async with aionn.open(drivers=["reference"], isolation=isolation, log="all") as runtime:  # type: ignore[arg-type]
        net = await runtime.compile(digits)
        (memory,) = [await runtime.allocate(inputs=[(net, 0)])]
        await net.execute([silence])
        await memory.aclose()
    said = {tag: [r.getMessage() for r in caplog.records if r.name == f"aionn.{tag}"] for tag in TAGS}
    assert all(said.values()), [tag for tag in TAGS if not said[tag]]
    assert any("digits_float" in line for line in said["model"])
    assert any("NONE" in line and "reference" in line for line in said["execution"])
    assert len(said["cpuexe"]) == len(net.model.main.operations)
    assert any("prepared" in line for line in said["driver"])
    assert any("device memory" in line for line in said["memory"])
    assert any("request memory" in line for line in said["memory"])
    assert all(("driver process" in line) == (isolation == "process") for line in said["cpuexe"])


def test_unknown_tag_of_an_option_is_refused() -> None:
    with pytest.raises(aionn.InvalidArgument, match=r"log: expected some of model, .*got nonsense"):
        aionn.open(log="model,nonsense")


def test_unknown_tag_is_an_error_line(own_log_tags: None, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_tags("nonsense") == ()
    assert "unknown: nonsense" in caplog.text


# The list


def test_every_variable_that_is_read_is_listed(repository: Path) -> None:
    read = {
        name
        for path in (repository / "aionn").rglob("*.py")
        for name in re.findall(r"\bAIONN_[A-Z_]+\b", path.read_text())
    }
    assert read == {variable.name for variable in VARIABLES}


def test_variable_that_does_not_exist_is_named_with_the_nearest_one() -> None:
    environment = {
        "AIONN_DEVCES": "x",
        "AIONN_DEVICES": "x",
        "AIONN_Q": "",
        "OTHER": "1",
        "aionn_devces": "x",
    }
    assert unknown_variables(environment) == [
        "AIONN_DEVCES: there is no such variable, it has no effect; did you mean AIONN_DEVICES?",
        "AIONN_Q: there is no such variable, it has no effect; aionn env lists all",
    ]


def test_command_warns_once_of_a_variable_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIONN_DEVCES", "x")
    for arguments in (["env", "--json"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr().err
        assert ended.value.code == 0
        sentence = f"aionn: {unknown_variables()[0]}\n"
        assert told == ("" if arguments == ["--help"] else sentence)
        assert "did you mean AIONN_DEVICES?" in sentence


def test_command_lists_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_PARTITION", "none")
    with pytest.raises(SystemExit) as ended:
        main(["env", "--json"])
    assert ended.value.code == 0
    listed = {v["name"]: v for v in msgspec.json.decode(capsys.readouterr().out)["variables"]}
    assert listed["AIONN_PARTITION"]["value"] == "none" and len(listed) == len(VARIABLES)
    monkeypatch.setenv("AIONN_PARTITION", "nonsense")
    with pytest.raises(SystemExit) as ended:
        main(["env"])
    assert ended.value.code == 2 and "AIONN_PARTITION" in capsys.readouterr().err
