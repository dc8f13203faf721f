"""A client of a node that fails by itself, as without memory: what it has begun ends, and is not waited for without end."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aionn.errors import DeadObject, GeneralFailure
from aionn.fleet.addresses import parse_node
from aionn.fleet.data_connection import BoundArguments
from aionn.fleet.device import NodeDevice
from tests.aionn.fleet.conftest import Served
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.forked("any")

ANSWER_S_MAX = 30.0


def planted(*arguments: Any, **more: Any) -> Any:
    raise MemoryError("planted")


async def test_execution_whose_inputs_cannot_be_taken_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    prepared = await device.prepare_model(sum_model())
    frame = Sum()
    with monkeypatch.context() as patched:
        patched.setattr(BoundArguments, "body", planted)
        with anyio.fail_after(ANSWER_S_MAX), pytest.raises(GeneralFailure, match="planted"):
            await prepared.execute_synchronously(frame.request)
    with anyio.fail_after(ANSWER_S_MAX):
        await prepared.execute_synchronously(frame.request)
    assert frame.is_right
    await device.aclose()


async def test_reply_that_cannot_be_read_ends_its_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    await device.prepare_model(sum_model())
    with monkeypatch.context() as patched:
        patched.setattr("aionn.fleet.control.decoded", planted)
        with anyio.fail_after(ANSWER_S_MAX), pytest.raises(DeadObject, match="planted"):
            await device.prepare_model(sum_model())
    await device.aclose()
