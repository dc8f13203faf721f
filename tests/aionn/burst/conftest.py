"""Both ends of a burst, and a memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from aionn.hal import Memory
from tests.aionn.burst.both_ends import Ends


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    both = Ends()
    yield both
    await both.controller.aclose()
    both.server.stop()


@pytest.fixture
def memory() -> Memory:
    return Memory.create(64)
