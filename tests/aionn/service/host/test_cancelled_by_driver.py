"""A driver that raises CancelledError of its own when its objects are freed: the server and its other clients continue."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.hal import ExecutionPreference, Priority
from aionn.service.host.admission import ClientLimits
from aionn.service.host.session import Session
from aionn.service.wire.protocol import Failed, GetStatus, PrepareModel

ENDED_S_MAX = 10.0


raised: list[str] = []


class Raising:
    """Stands before a prepared model; one of its functions is cancelled by the driver itself."""

    def __init__(self, inner: Any, raising: str) -> None:
        self._inner = inner
        self._raising = raising

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def abandon(self) -> None:
        if self._raising == "abandon":
            raised.append("abandon")
            raise asyncio.CancelledError("of the driver")
        self._inner.abandon()

    async def aclose(self) -> None:
        await self._inner.aclose()
        if self._raising == "aclose":
            raised.append("aclose")
            raise asyncio.CancelledError("of the driver")


@pytest.mark.parametrize("raising", ["abandon", "aclose"])
async def test_driver_that_is_cancelled_while_it_frees_does_not_end_the_server(
    serving: Any, small: Any, monkeypatch: pytest.MonkeyPatch, raising: str
) -> None:
    raised.clear()
    device = ReferenceDevice()
    prepare = device.prepare_model

    async def prepare_raising(*arguments: Any, **options: Any) -> Any:
        return Raising(await prepare(*arguments, **options), raising)

    monkeypatch.setattr(device, "prepare_model", prepare_raising)
    served = await serving(device, limits=ClientLimits(clients=2))
    stays = await served.raw().hello()
    is_over, aclose = anyio.Event(), Session.aclose

    async def noting(session: Session) -> None:
        try:
            await aclose(session)
        finally:
            is_over.set()

    monkeypatch.setattr(Session, "aclose", noting)
    for _ in range(2):
        client = await served.raw().hello()
        assert not isinstance(
            await client.ask(
                2,
                PrepareModel(
                    small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
                ),
            ),
            Failed,
        )
        client.close()
        with anyio.fail_after(ENDED_S_MAX):
            await is_over.wait()
        is_over = anyio.Event()
        await anyio.wait_all_tasks_blocked()
    assert raised == [raising] * 2
    assert not isinstance(await stays.ask(2, GetStatus()), Failed)
    (await served.raw().hello()).close()
    stays.close()
