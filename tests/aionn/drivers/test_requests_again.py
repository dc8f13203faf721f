"""A request that comes again is bound once, for as long as its owner keeps it and its memory is open."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.drivers.kit import checked, launching
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument

SHAPE, SIZE_BYTES = (2, 3), 24


def filled(small: Any, number: float) -> Any:
    return small.request([np.full(SHAPE, number, np.float32)] * 2, [(SIZE_BYTES, SHAPE)])


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The requests that are bound."""
    found: list[object] = []
    bind = checked.bind

    def counted(model: Any, request: Any, **options: Any) -> Any:
        found.append(id(request))
        return bind(model, request, **options)

    monkeypatch.setattr(checked, "bind", counted)
    return found


async def test_same_request_is_bound_once_and_reads_its_memory_anew(
    small: Any, bindings: list[object]
) -> None:
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        requests = [filled(small, 1), filled(small, 2)]
        for turn in range(3):
            for number, request in enumerate(requests, start=1):
                request.pools[0].array.view(np.float32)[:] = 10 * turn
                await prepared.execute_synchronously(request)
                assert set(small.output(request).tolist()) == {10.0 * turn + number}
        assert len(bindings) == len(requests)
        await prepared.aclose()


async def test_equal_requests_are_bound_each(small: Any, bindings: list[object]) -> None:
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        request = filled(small, 1)
        copy = msgspec.structs.replace(request)
        for each in (request, copy, request, copy):
            await prepared.execute_synchronously(each)
        assert len(bindings) == 2
        await prepared.aclose()


async def test_request_whose_lists_can_change_is_bound_each_time(small: Any, bindings: list[object]) -> None:
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        request = filled(small, 1)
        changing = msgspec.structs.replace(request, pools=list(request.pools))
        await prepared.execute_synchronously(changing)
        other = filled(small, 5)
        changing.pools[0] = other.pools[0]
        await prepared.execute_synchronously(changing)
        assert set(small.output(request).tolist()) == {6.0}
        assert len(bindings) == 2
        await prepared.aclose()


async def test_closed_memory_is_rejected_although_the_request_is_known(small: Any) -> None:
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        request = filled(small, 1)
        await prepared.execute_synchronously(request)
        request.pools[0].close()
        with pytest.raises(InvalidArgument, match="pool 0"):
            await prepared.execute_synchronously(request)
        await prepared.aclose()
        with pytest.raises(InvalidArgument, match="closed"):
            await prepared.execute_synchronously(request)


async def test_dropped_requests_keep_no_memory_and_many_are_bounded(small: Any) -> None:
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        request = filled(small, 1)
        await prepared.execute_synchronously(request)
        view = weakref.ref(request.pools[0].array)
        del request
        gc.collect()
        assert view() is None
        kept = [filled(small, n) for n in range(2 * launching.BOUND_MAX)]
        for each in kept:
            await prepared.execute_synchronously(each)
        assert len(prepared._requests._entries) == launching.BOUND_MAX
        await prepared.aclose()
        assert not prepared._requests._entries
