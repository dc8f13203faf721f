"""A runtime with one driver process, and the small models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import aionn


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"]) as opened:
        yield opened


@pytest.fixture(params=["process", "in_process"])
async def any_runtime(request: pytest.FixtureRequest) -> AsyncIterator[aionn.Runtime]:
    """The same claims hold with the driver in a process of its own and in this one."""
    async with aionn.open(drivers=["reference"], isolation=request.param) as opened:
        yield opened


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture
def silence() -> npt.NDArray[np.float32]:
    return np.full((1, 49, 40, 1), np.log(1e-6), dtype=np.float32)
