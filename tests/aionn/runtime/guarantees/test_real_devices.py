"""Streams with a guarantee on a real device: the admitted ones lose no frame beside a flood, and refusals are justified."""

import importlib.util
from collections.abc import AsyncIterator

import anyio
import pytest

from benchmarks.capacity.contenders import ENGINES, PACKAGES
from benchmarks.capacity.flood import Opened, admitted_beside_a_flood, opened, refused_and_run

pytestmark = pytest.mark.long

SECONDS = 600.0
TRIALS = 20


@pytest.fixture(params=ENGINES)
async def made(request: pytest.FixtureRequest, tmp_path) -> AsyncIterator[Opened]:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    async with opened(request.param, tmp_path) as found:
        yield found


async def test_admitted_streams_beside_a_flood_lose_no_frame_without_a_label(made: Opened) -> None:
    with anyio.fail_after(2 * SECONDS):
        kept = await admitted_beside_a_flood(made, SECONDS)
    assert kept.streams >= 2 and kept.refusal and kept.flood > 0
    assert kept.frames >= 0.9 * SECONDS * 10 * kept.streams
    assert kept.unexplained == 0, kept


async def test_nine_of_ten_refused_sets_lose_a_frame_when_they_run_all_the_same(made: Opened) -> None:
    with anyio.fail_after(2 * SECONDS):
        refused, losing = await refused_and_run(made, TRIALS)
    assert refused == TRIALS and losing >= 0.9 * TRIALS
