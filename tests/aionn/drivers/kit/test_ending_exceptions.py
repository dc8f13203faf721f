"""A driver whose code ends the program (``sys.exit``), or its thread: that is a failure of its call, and the thread goes on."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import anyio
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import GeneralFailure
from aionn.testing.models import identity

ONE = np.ones(1, np.float32)
LIMIT_S = 10.0


class Unprintable(Exception):
    """Its text cannot be made: whoever formats it gets another of the same."""

    def __str__(self) -> str:
        raise Unprintable


ENDING = {
    SystemExit: "SystemExit: planted",
    KeyboardInterrupt: "KeyboardInterrupt: planted",
    GeneratorExit: "GeneratorExit: planted",
    asyncio.CancelledError: "CancelledError: planted",
    Unprintable: "Unprintable, whose text raises Unprintable",
}


@pytest.mark.parametrize("ending", ENDING)
async def test_execution_fails_and_the_next_one_runs(
    ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any) -> NoReturn:
        raise ending("planted")

    async with aionn.open(devices=[ReferenceDevice()]) as runtime:
        net = await runtime.compile(identity())
        reusable = net.reusable()
        async with net.burst() as burst:
            calls = (
                lambda: net.execute([ONE]),
                lambda: burst.execute([ONE]),
                lambda: net.execute_fenced([ONE]).wait(),
                reusable.execute,
            )
            for call in calls:
                with monkeypatch.context() as patched, anyio.fail_after(LIMIT_S):
                    patched.setattr(ReferencePreparedModel, "run", run)
                    with pytest.raises(GeneralFailure, match=ENDING[ending]):
                        await call()
                with anyio.fail_after(LIMIT_S):
                    await call()


@pytest.mark.parametrize("ending", [SystemExit, Unprintable])
@pytest.mark.parametrize("name", ["supports", "prepare"])
async def test_compilation_fails_and_the_next_one_succeeds(
    name: str, ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*arguments: Any, **options: Any) -> NoReturn:
        raise ending("planted")

    device = ReferenceDevice()
    with monkeypatch.context() as patched, anyio.fail_after(LIMIT_S):
        patched.setattr(ReferenceDevice, name, end)
        with pytest.raises(GeneralFailure, match=ENDING[ending]):
            await device.prepare_model(identity())
    with anyio.fail_after(LIMIT_S):
        await (await device.prepare_model(identity())).aclose()
    await device.aclose()
