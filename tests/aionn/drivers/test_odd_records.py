"""Values of wrong types in each field of each record that a driver is given: an error of aionn's or a right answer, and the driver
process lives on. Python code that constructs a record is not checked by msgspec.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    CacheFiles,
    ChannelQuant,
    Device,
    ExtensionNameAndPrefix,
    FencedExecution,
    OperandType,
    Request,
)
from aionn.testing.models import identity

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
SAMPLE_STEP = 5
"""Each fifth case is of the ordinary run; no divisor of the number of odd values, so that each field meets others."""

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
