"""Compilations kept in a directory: found again, never believed when changed, never a reason to fail."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.kit import caching as kit_caching
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import CacheFileCounts, ExecutionPreference, Model, OperationType, Priority
from aionn.runtime.placement import compiling
from aionn.runtime.placement.caching import StepCache, _Writing, derive_token, file_names
from aionn.testing.models import chain
from tests.support.split import PickyDevice, SplitDevice

Values = npt.NDArray[np.float32]
TOKEN = bytes(range(32))


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process") as opened:
        yield opened


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


async def check(net: aionn.Compilation, silence: Values) -> None:
    result = await net.execute([silence])
    assert int(result.outputs[0].argmax()) == 0


def test_names_are_the_tokens_letters_the_kind_and_the_number() -> None:
    model, data = file_names(bytes([0x00, 0x1F, 0xA0] + [0] * 29), CacheFileCounts(2, 1))
    assert model[0] == "AAPBAK" + "AA" * 29 + "10"
    assert model[1].endswith("11") and data == [model[0][:-2] + "20"]
    assert len(model[0]) == 66


def test_everything_that_matters_takes_part_in_the_token() -> None:
    fixed = {
        "device": "a",
        "version": "1",
        "preference": ExecutionPreference.LOW_POWER,
        "priority": Priority.LOW,
        "operations": (0, 1),
    }
    changes = [
        {},
        {"device": "b"},
        {"version": "2"},
        {"device": "a1", "version": ""},
        {"preference": ExecutionPreference.SUSTAINED_SPEED},
        {"priority": Priority.HIGH},
        {"operations": (1, 0)},
        {"operations": ()},
        {"operations": None},
    ]
    tokens = [derive_token(TOKEN, **{**fixed, **change}) for change in changes]
    tokens.append(derive_token(bytes(32), **fixed))
    assert len(set(tokens)) == len(tokens) and {len(t) for t in tokens} == {32}
    assert derive_token(TOKEN, **fixed) == tokens[0]


async def test_second_compilation_comes_from_the_cache(
    runtime: aionn.Runtime, digits: Path, silence: Values, cache: Path
) -> None:
    first = await runtime.compile(digits, cache_dir=cache)
    assert not first.from_cache
    second = await runtime.compile(digits, cache_dir=cache)
    assert second.from_cache
    assert second.placement == first.placement and second.inputs == first.inputs
    for net in (first, second):
        await check(net, silence)
        async with net.burst() as burst:
            assert int((await burst.execute([silence])).outputs[0].argmax()) == 0
    assert not (await runtime.compile(digits)).from_cache
    assert {oct(p.stat().st_mode & 0o777) for p in cache.iterdir()} == {"0o600"}
    assert oct(cache.stat().st_mode & 0o777) == "0o700"


async def test_other_process_finds_what_this_one_kept(
    runtime: aionn.Runtime, digits: Path, silence: Values, cache: Path
) -> None:
    await runtime.compile(digits, cache_dir=cache)
    async with aionn.open(drivers=["reference"]) as other:
        net = await other.compile(digits, cache_dir=cache)
        assert net.from_cache
        await check(net, silence)


async def test_model_of_ones_own_is_known_by_its_content(runtime: aionn.Runtime, cache: Path) -> None:
    relu, absolute = chain([OperationType.RELU]), chain([OperationType.ABS])
    for model in (relu, absolute):
        assert not (await runtime.compile(model, cache_dir=cache)).from_cache
    for model, expected in ((relu, 0.0), (absolute, 2.0)):
        net = await runtime.compile(model, cache_dir=cache)
        assert net.from_cache and net.model is model
        assert (await net.execute([np.array([-2.0], np.float32)])).outputs[0][0] == expected


@pytest.mark.parametrize("change", ["preference", "priority", "token"])
async def test_other_choice_is_another_compilation(
    runtime: aionn.Runtime, digits: Path, cache: Path, change: str
) -> None:
    options = {"cache_dir": cache, "cache_token": TOKEN}
    await runtime.compile(digits, **options)
    other = {"preference": "low_power", "priority": "high", "token": bytes(32)}[change]
    options["cache_token" if change == "token" else change] = other
    assert not (await runtime.compile(digits, **options)).from_cache
    assert (await runtime.compile(digits, **options)).from_cache


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "swap"])
async def test_changed_file_is_made_anew(
    runtime: aionn.Runtime, digits: Path, silence: Values, cache: Path, damage: str, tmp_path: Path
) -> None:
    await runtime.compile(digits, cache_dir=cache)
    paths = sorted(cache.iterdir())
    assert len(paths) == 3
    for path in paths:
        kept = path.read_bytes()
        content = bytearray(kept)
        if damage == "flip":
            content[len(content) // 2] ^= 1
        elif damage == "cut":
            del content[-1:]
        elif damage == "empty":
            content.clear()
        elif damage == "grow":
            content += b"x"
        else:
            content[:] = paths[0 if path is not paths[0] else 1].read_bytes()
        path.write_bytes(content)
        net = await runtime.compile(digits, cache_dir=cache)
        # A plan that is gone costs time alone: the steps are still good.
        assert (net.from_cache == path.name.endswith("0") and path.name[-2] not in "12") or not net.from_cache
        await check(net, silence)
        assert (await runtime.compile(digits, cache_dir=cache)).from_cache


@pytest.mark.parametrize("change", ["no step", "device", "operand"])
async def test_plan_with_a_right_digest_that_cannot_be_one_of_the_model_is_made_anew(
    runtime: aionn.Runtime,
    digits: Path,
    silence: Values,
    cache: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token is a digest of the model, so that each program that has the model can write such a file."""
    await runtime.compile(digits, cache_dir=cache)
    read_plan = StepCache.read_plan

    async def forged(*arguments: Any) -> bytes | None:
        data = await read_plan(*arguments)
        assert data is not None
        plan = msgspec.msgpack.decode(data)
        (step,) = plan[3]
        if change == "no step":
            plan[3] = []
        elif change == "device":
            step[0] = "another"
        else:
            step[3] = [10_000]
        return msgspec.msgpack.encode(plan)

    monkeypatch.setattr(StepCache, "read_plan", forged)
    net = await runtime.compile(digits, cache_dir=cache)
    assert net.steps
    await check(net, silence)


@pytest.mark.parametrize("obstacle", ["file", "link", "fifo", "directory", "read-only"])
async def test_unusable_directory_or_file_only_costs_the_cache(
    runtime: aionn.Runtime, digits: Path, silence: Values, cache: Path, obstacle: str, tmp_path: Path
) -> None:
    if obstacle == "file":
        cache.write_bytes(b"")
    elif obstacle == "read-only":
        cache = Path("/proc/self/cache")
    else:
        await runtime.compile(digits, cache_dir=cache)
        target = next(p for p in cache.iterdir() if p.name.endswith("10"))
        moved = tmp_path / "moved"
        shutil.move(target, moved)
        if obstacle == "link":
            target.symlink_to(moved)
        elif obstacle == "fifo":
            os.mkfifo(target)
        else:
            target.mkdir()
    net = await runtime.compile(digits, cache_dir=cache)
    assert not net.from_cache
    await check(net, silence)
    leftovers = [p.name for p in cache.iterdir() if "." in p.name] if cache.is_dir() else []
    assert leftovers == []


async def test_every_step_of_a_cut_model_is_kept(cache: Path, example_data: Path) -> None:
    devices = [SplitDevice(index, 1) for index in range(3)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        path = example_data / "shapes_int8.tflite"
        first = await runtime.compile(path, cache_dir=cache)
        assert len(first.devices) > 1
        second = await runtime.compile(path, cache_dir=cache)
        assert second.from_cache and second.placement == first.placement
        value = np.arange(96 * 96 * 3, dtype=np.int64).reshape(1, 96, 96, 3).astype(np.int8)
        expected = (await first.execute([value])).outputs[0]
        np.testing.assert_array_equal((await second.execute([value])).outputs[0], expected)


async def test_new_version_of_a_driver_is_another_device(cache: Path) -> None:
    model = chain([OperationType.RELU])
    for version, is_known in (("1", False), ("2", False), ("2", True)):
        device = ReferenceDevice("own")
        device.info = msgspec.structs.replace(device.info, version=version)
        async with aionn.open(devices=[device]) as runtime:
            assert (await runtime.compile(model, cache_dir=cache)).from_cache == is_known


async def test_new_version_of_aionn_makes_everything_anew(
    runtime: aionn.Runtime, digits: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runtime.compile(digits, cache_dir=cache)
    await runtime.compile(digits, cache_dir=cache, cache_token=TOKEN)
    monkeypatch.setattr(aionn, "__version__", "0.0.0.dev0")
    assert not (await runtime.compile(digits, cache_dir=cache)).from_cache
    assert not (await runtime.compile(digits, cache_dir=cache, cache_token=TOKEN)).from_cache


async def test_file_replaced_before_it_is_imported_is_not_kept_as_the_one_before(
    runtime: aionn.Runtime, digits: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.tflite", digits.with_name("shapes_float.tflite")
    shutil.copy(digits, path)
    before = await runtime.compile(path)
    load_model = compiling.load_model

    async def replaced(model: Any, *options: Any) -> Any:
        shutil.copy(other, tmp_path / "new")
        os.replace(tmp_path / "new", path)
        return await load_model(model, *options)

    monkeypatch.setattr(compiling, "load_model", replaced)
    meanwhile = await runtime.compile(path, cache_dir=cache)
    assert meanwhile.inputs != before.inputs and not meanwhile.from_cache
    monkeypatch.undo()
    shutil.copy(digits, path)
    again = await runtime.compile(path, cache_dir=cache)
    assert not again.from_cache
    assert again.inputs == before.inputs


async def test_device_that_keeps_nothing_gets_no_files(cache: Path) -> None:
    device = ReferenceDevice("own")
    device.info = msgspec.structs.replace(device.info, cache_files=CacheFileCounts())
    async with aionn.open(devices=[device]) as runtime:
        for _ in range(2):
            assert not (await runtime.compile(chain([OperationType.RELU]), cache_dir=cache)).from_cache
    assert not cache.exists()


async def test_leave_to_fall_back_goes_with_the_cache(
    runtime: aionn.Runtime, digits: Path, silence: Values, cache: Path
) -> None:
    for is_known in (False, True):
        net = await runtime.compile(digits, cache_dir=cache, allow_fallback=True)
        assert net.from_cache == is_known
        await check(net, silence)


async def test_deadline_counts_with_the_cache_as_well(
    runtime: aionn.Runtime, digits: Path, cache: Path
) -> None:
    await runtime.compile(digits, cache_dir=cache)
    with pytest.raises(aionn.MissedDeadline):
        await runtime.compile(digits, cache_dir=cache, deadline=time.monotonic_ns() - 1)


@pytest.mark.parametrize("token", [b"", bytes(31), bytes(33), "x" * 32, 5])
async def test_illegal_token_is_refused(
    runtime: aionn.Runtime, digits: Path, cache: Path, token: object
) -> None:
    with pytest.raises(aionn.InvalidArgument, match="cache_token: expected 32 bytes"):
        await runtime.compile(digits, cache_dir=cache, cache_token=token)  # type: ignore[arg-type]


async def test_token_without_a_directory_is_refused(runtime: aionn.Runtime, digits: Path) -> None:
    with pytest.raises(aionn.InvalidArgument, match="expected a cache_dir"):
        await runtime.compile(digits, cache_token=TOKEN)


async def test_nothing_is_lowered_again(cache: Path, digits: Path, silence: Values) -> None:
    """LiteRT's file is what is kept."""
    pytest.importorskip("ai_edge_litert", reason="LiteRT is not installed")
    async with aionn.open(drivers=["litert-cpu"]) as runtime:
        first = await runtime.compile(digits, cache_dir=cache)
        second = await runtime.compile(digits, cache_dir=cache)
        assert second.from_cache
        results = [(await net.execute([silence])).outputs[0] for net in (first, second)]
        np.testing.assert_array_equal(results[0], results[1])


async def test_directory_whose_files_would_have_too_long_paths_fails_no_compilation(
    runtime: aionn.Runtime, tmp_path: Path, digits: Path, silence: Values
) -> None:
    room = os.pathconf(tmp_path, "PC_PATH_MAX") - 1 - len(os.fsencode(tmp_path))
    cache = tmp_path.joinpath(*["d" * 99] * (room // 100))
    for _ in range(2):
        net = await runtime.compile(digits, cache_dir=cache)
        assert not net.from_cache
        await check(net, silence)
    assert list(cache.iterdir()) == []


class Noting(ReferenceDevice):
    """Notes what it is asked for.

    Attributes:
        asked: Call, preference, priority and deadline.
    """

    def __init__(self, *, keeps: bool) -> None:
        super().__init__("own")
        if not keeps:
            self.info = msgspec.structs.replace(self.info, cache_files=CacheFileCounts())
        self.asked: list[tuple[object, ...]] = []

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        self._note("prepare", options)
        return await super().prepare_model(model, **options)

    async def prepare_model_from_cache(self, files: Any, **options: Any) -> Any:
        self._note("from cache", options)
        return await super().prepare_model_from_cache(files, **options)

    def _note(self, call: str, options: dict[str, Any]) -> None:
        self.asked.append((call, *(options.get(name) for name in ("preference", "priority", "deadline_ns"))))


@pytest.mark.parametrize("keeps", [True, False])
async def test_device_is_asked_for_what_the_caller_wants_on_every_way(cache: Path, keeps: bool) -> None:
    device = Noting(keeps=keeps)
    deadline = aionn.after(60)
    options: dict[str, Any] = {"preference": "low_power", "priority": "high", "deadline": deadline}
    async with aionn.open(devices=[device]) as runtime:
        for directory in (None, cache, cache):
            await runtime.compile(chain([OperationType.RELU]), cache_dir=directory, **options)
    anew = ("prepare", ExecutionPreference.LOW_POWER, Priority.HIGH, deadline)
    kept = ("from cache", None, Priority.HIGH, deadline)
    assert device.asked == [anew, anew, kept if keeps else anew]


async def test_plan_is_kept_only_where_every_device_keeps_its_step(cache: Path) -> None:
    keeps = PickyDevice("keeps", [OperationType.RELU])
    forgets = PickyDevice("forgets", [OperationType.ABS])
    forgets.info = msgspec.structs.replace(forgets.info, cache_files=CacheFileCounts())
    model = chain([OperationType.RELU, OperationType.ABS])
    async with aionn.open(devices=[keeps, forgets]) as runtime:
        for _ in range(2):
            net = await runtime.compile(model, cache_dir=cache)
            assert net.devices == ("keeps", "forgets") and not net.from_cache
    assert {path.name[-2] for path in cache.iterdir()} <= {"1", "2"}, "files of a step alone"


@pytest.mark.parametrize("place", ["file", "/proc/nope"])
async def test_directory_that_cannot_be_written_is_one_warning(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(place) if place.startswith("/") else tmp_path / place
    if place == "file":
        path.touch()
    devices = [PickyDevice("a", [OperationType.RELU]), PickyDevice("b", [OperationType.TANH])]
    async with aionn.open(devices=devices) as runtime:
        model = chain([OperationType.RELU, OperationType.TANH], (3,))
        assert len((await runtime.compile(model, cache_dir=path)).steps) == 2
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.name == "aionn.compilation" and str(path) in record.getMessage()


def opened_below(directory: Path) -> list[str]:
    """The open files of this process below a directory."""
    return [path for fd in os.listdir("/proc/self/fd") if str(directory) in (path := opened_path(fd))]


def opened_path(fd: str) -> str:
    """The path of an open file; empty if it has been closed meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("step", ["begin", "keep"])
async def test_cancelled_task_leaves_neither_descriptors_nor_new_files(
    step: str, runtime: aionn.Runtime, cache: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is cancelled while the thread works on the files."""
    real = getattr(_Writing, step)
    reached, goes_on = threading.Event(), threading.Event()

    def work(writing: _Writing) -> object:
        reached.set()
        assert goes_on.wait(60)
        return real(writing)

    monkeypatch.setattr(_Writing, step, work)
    task = asyncio.create_task(runtime.compile(digits, cache_dir=cache))
    await anyio.to_thread.run_sync(reached.wait)
    task.cancel()
    await anyio.lowlevel.checkpoint()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in cache.iterdir() if "." in path.name] == []
    del task
    with anyio.fail_after(10):  # a thread of the device leaves the model's memory after its answer
        while left := opened_below(cache):
            gc.collect()
            await anyio.sleep(0.01)
    assert not left


async def test_file_that_a_driver_cannot_write_is_a_warning(
    runtime: aionn.Runtime,
    cache: Path,
    digits: Path,
    silence: Values,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New files can be created, and no content written: the disk is full."""

    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kit_caching, "write_all", full)
    await check(await runtime.compile(digits, cache_dir=cache), silence)
    (record,) = (record for record in caplog.records if "is not saved: No space" in record.getMessage())
    assert record.levelname == "WARNING"
    assert not any(path.stat().st_size for path in cache.iterdir() if path.name[-1] != "0"), "the plan alone"
