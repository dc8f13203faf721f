"""Claims about failures that are kept: they keep nothing alive, and end nothing that goes on."""

from __future__ import annotations

import asyncio
import traceback
import weakref

from aionn.errors import GeneralFailure
from aionn.runtime.executions.failures import clear_frames


class Held:
    """Something that a frame holds."""


def fail(held: Held) -> None:
    raise GeneralFailure("planted")


async def test_coroutine_that_handed_its_failure_over_goes_on() -> None:
    handed: asyncio.Future[GeneralFailure] = asyncio.get_running_loop().create_future()

    async def handler() -> str:
        try:
            fail(Held())
        except GeneralFailure as e:
            handed.set_result(e)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(handler())
    clear_frames(await handed)
    assert await task == "went on"


def test_what_the_frames_held_is_let_go_and_their_places_stay() -> None:
    held = Held()
    kept = weakref.ref(held)
    try:
        fail(held)
    except GeneralFailure as e:
        error = e
    del held
    clear_frames(error)
    assert kept() is None
    assert "fail" in [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def test_causes_are_cleared_too() -> None:
    held = Held()
    kept = weakref.ref(held)
    try:
        try:
            fail(held)
        except GeneralFailure as e:
            raise GeneralFailure("outer") from e
    except GeneralFailure as e:
        error = e
    del held
    clear_frames(error)
    assert kept() is None
