"""A machine with one fake camera, and pictures that come at a pace."""

import contextlib

import anyio
import pytest

from tests.support.media.fake_camera import FakeSystem


@pytest.fixture
def system():
    """A machine with one camera. Its buffers are unmapped and its descriptor closed when the test has ended."""
    machine = FakeSystem()
    yield machine
    for camera in machine.cameras.values():
        assert camera.holds_nothing


@pytest.fixture
def filming():
    """``async with filming(camera)``: a picture every 5 ms, whenever it streams."""

    @contextlib.asynccontextmanager
    async def film(camera, period_s=0.005, **picture):
        async def run():
            while True:
                if camera.is_plugged:
                    camera.fill(**picture)
                await anyio.sleep(period_s)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield
            tasks.cancel_scope.cancel()

    return film
