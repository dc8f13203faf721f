"""Values of wrong types in each field of each record that a driver is given: an error of aionn's or a right answer, and the driver
process lives on. Python code that constructs a record is not checked by msgspec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.errors import Error, InvalidArgument
from aionn.hal import (
    BufferDesc,
    BufferRole,
    CacheFileCounts,
    CacheFiles,
    Capabilities,
    ChannelQuant,
    Device,
    DeviceInfo,
    DeviceType,
    Extension,
    ExtensionNameAndPrefix,
    ExtensionOperandType,
    FeatureLevel,
    FencedExecution,
    HardwareBufferDesc,
    HardwareBufferFormat,
    Memory,
    MemoryKind,
    OperandPerformance,
    OperandType,
    PerformanceInfo,
    Request,
)
from aionn.testing.models import identity
from aionn.validation import check_device_info

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD: list[Any] = [
    None,
    True,
    1,
    -1,
    2**64,
    10**30,
    1.5,
    float("nan"),
    np.int64(1),
    np.float64(1.5),
    "x",
    "\ud800",
    b"x",
    bytearray(b"x"),
    [],
    [1],
    ["x"],
    (),
    (1.5,),
    ("x",),
    (None,),
    ((1,),),
    {},
    {"x": 1},
    set(),
    object(),
    np.array([1, 2]),
    OperandType.INT32,
]

MODEL = identity((4,))
SAMPLE_STEP = 13
"""Each thirteenth case is of the ordinary run; no divisor of the number of odd values, so that each field meets others."""

X = np.arange(4, dtype=np.float32)


def _variants(record: Any) -> Iterator[tuple[str, Any]]:
    """A record with one odd value in one field, for each field of it and of the records in it."""
    if isinstance(record, tuple):
        for index, element in enumerate(record):
            for place, other in _variants(element):
                yield f"[{index}]{place}", (*record[:index], other, *record[index + 1 :])
            for value in ODD:
                yield f"[{index}]={value!r}", (*record[:index], value, *record[index + 1 :])
    elif isinstance(record, msgspec.Struct):
        for field in msgspec.structs.fields(record):
            own = getattr(record, field.name)
            for place, other in _variants(own):
                yield f".{field.name}{place}", msgspec.structs.replace(record, **{field.name: other})
            for value in ODD:
                yield f".{field.name}={value!r}", msgspec.structs.replace(record, **{field.name: value})


def _models() -> Iterator[tuple[str, Any]]:
    full = msgspec.structs.replace(MODEL, extension_name_to_prefix=(ExtensionNameAndPrefix("a.b", 1),))
    scaled = msgspec.structs.replace(MODEL.main.operands[0], channel_quant=ChannelQuant((1.0,), 0))
    main = msgspec.structs.replace(MODEL.main, operands=(scaled, MODEL.main.operands[1]))
    yield from _variants(full)
    yield from _variants(msgspec.structs.replace(MODEL, main=main))
    yield from _variants(msgspec.structs.replace(MODEL, referenced=(MODEL.main,)))
    # So large that it travels in parts.
    for place, model in _variants(MODEL):
        if isinstance(getattr(model, "operand_values", None), bytes):
            yield f"large{place}", msgspec.structs.replace(model, operand_values=bytes(4096))
    yield from (("model", value) for value in ODD)


def _is_own(error: Error) -> bool:
    """Whether its text is aionn's own, and not that of an exception which nobody expected."""
    return not any(f"{name}Error:" in str(error) for name in ("Type", "Attribute", "Value", "Key", "Index"))


def _pid(device: Device) -> int | None:
    return getattr(device, "pid", None)


async def _executed(prepared: Any, request: Any, small: Any) -> None:
    await prepared.execute_synchronously(request)
    assert np.array_equal(small.output(request), X)


def _request(small: Any) -> Request:
    request: Request = small.request([X], [(16, (4,))])
    return request


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    return 1 if request.config.getoption("--long") else SAMPLE_STEP


@pytest.mark.sampled(3)
async def test_odd_models_are_refused_by_name(device: Device, small: Any, step: int) -> None:
    pid = _pid(device)
    for place, model in islice(_models(), 0, None, step):
        for call in (device.supported_operations, device.prepare_model):
            try:
                answer = await call(model)
            except InvalidArgument as e:
                assert _is_own(e)
            except BaseException as e:
                e.add_note(f"{call.__name__}: {place}")
                raise
            else:
                if not isinstance(answer, tuple):
                    if all(o.dimensions == (4,) for o in (*model.main.inputs, *model.main.outputs)):
                        await _executed(answer, _request(small), small)
                    await answer.aclose()
        assert _pid(device) == pid, place


@pytest.mark.sampled(3)
async def test_odd_requests_are_refused_by_name(device: Device, small: Any, step: int) -> None:
    pid = _pid(device)
    prepared = await device.prepare_model(MODEL)
    burst = await prepared.configure_execution_burst()
    fine = _request(small)
    token = msgspec.structs.replace(fine, pools=(*fine.pools, aionn.hal.BufferToken(1)))
    cases = (*_variants(fine), *_variants(token), *(("request", value) for value in ODD))
    for place, request in cases[::step]:
        for call in (
            lambda given: prepared.execute_synchronously(given),
            lambda given: prepared.launch(given),
            lambda given: prepared.execute_fenced(given, []),
            lambda given: prepared.create_reusable_execution(given),
            lambda given: burst.execute_synchronously(given, [0] * len(fine.pools)),
        ):
            try:
                answer = await call(request)
                if isinstance(answer, FencedExecution) and answer.fence is not None:
                    await answer.fence
                    answer.fence.close()
            except Error as e:
                assert _is_own(e)
            except BaseException as e:
                e.add_note(f"{place}")
                raise
        assert _pid(device) == pid, place
    await burst.aclose()
    await _executed(prepared, fine, small)
    await prepared.aclose()


async def test_odd_allocations_are_refused_by_name(device: Device, small: Any) -> None:
    pid = _pid(device)
    prepared = await device.prepare_model(MODEL)
    fine = (BufferDesc((4,)), (prepared,), (BufferRole(0, 0),), (BufferRole(0, 0),))
    for index in range(4):
        others = [value for _, value in _variants(fine[index])] + ODD
        for other in others:
            try:
                buffer = await device.allocate(*fine[:index], other, *fine[index + 1 :])  # type: ignore[arg-type]
            except Error as e:
                assert _is_own(e)
            except BaseException as e:
                e.add_note(f"argument {index}: {other!r}")
                raise
            else:
                await buffer.aclose()
            assert _pid(device) == pid, other
    await prepared.aclose()


@pytest.mark.sampled(3)
async def test_odd_cache_files_are_refused_by_name(device: Device, small: Any) -> None:
    pid = _pid(device)
    fine = CacheFiles((), (), bytes(32))
    odd = [fine._replace(**{name: value}) for name in fine._fields for value in ODD]
    for cache in (*odd, *ODD):
        with pytest.raises(Error) as caught:
            await device.prepare_model_from_cache(cache)
        assert _is_own(caught.value)
        if cache is not None:
            prepared = await device.prepare_model(MODEL, cache=cache)
            await _executed(prepared, _request(small), small)
            await prepared.aclose()
        assert _pid(device) == pid, cache


def _refused_or_fine(call: Callable[[Any], object], value: Any, place: str) -> None:
    try:
        call(value)
    except InvalidArgument as e:
        assert _is_own(e), place
    except BaseException as e:
        e.add_note(place)
        raise


async def test_odd_descriptions_of_images_are_refused_by_name() -> None:
    def made(image: Any) -> None:
        Memory.create_hardware_buffer(image).close()

    fine = HardwareBufferDesc(3, 2, 1, HardwareBufferFormat.R8_UNORM, 4)
    with contextlib.closing(Memory.create_hardware_buffer(fine)) as own:

        def imported(image: Any) -> None:
            Memory.from_fd(own.fileno(), kind=MemoryKind.HARDWARE_BUFFER, image=image).close()

        for place, image in (*_variants(fine), *((f"={value!r}", value) for value in ODD)):
            _refused_or_fine(made, image, place)
            _refused_or_fine(imported, image, place)
        with pytest.raises(InvalidArgument, match="image: expected HardwareBufferDesc, got int 1"):
            imported(1)
        with pytest.raises(InvalidArgument, match="image, width: expected int, got str 'x'"):
            imported(HardwareBufferDesc("x", 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fd", "size_bytes", "offset", "kind"])
async def test_odd_imports_of_memory_are_refused_by_name(name: str) -> None:
    with contextlib.closing(Memory.create(64)) as own:

        def imported(value: Any) -> None:
            arguments = {"fd": own.fileno(), name: value}
            Memory.from_fd(**arguments).close()

        for value in ODD:
            _refused_or_fine(imported, value, repr(value))


async def test_odd_descriptions_of_devices_are_refused_by_name() -> None:
    performance = PerformanceInfo(1.0, 1.0)
    entry = OperandPerformance(OperandType.TENSOR_FLOAT32, performance)
    capabilities = Capabilities(performance, performance, (entry,), performance, performance)
    extension = Extension("com.vendor", (ExtensionOperandType(1, True, 4),))
    fine = DeviceInfo(
        "acme-npu",
        DeviceType.ACCELERATOR,
        "1",
        FeatureLevel.LEVEL_5,
        capabilities,
        (extension,),
        CacheFileCounts(1, 1),
    )
    check_device_info(fine)

    def sent(info: Any) -> None:
        check_device_info(info)
        msgspec.msgpack.encode(info)

    for place, info in (*_variants(fine), *((f"={value!r}", value) for value in ODD)):
        _refused_or_fine(sent, info, place)
    with pytest.raises(InvalidArgument, match=r"device\.slots: expected int, got str 'x'"):
        check_device_info(msgspec.structs.replace(fine, slots="x"))
