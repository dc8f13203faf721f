"""How often, and by which packets, a request is computed in the modes of the conformance suites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from aionn.conformance.computing import computing
from aionn.conformance.requests import FILL, GuardedRequest
from aionn.errors import ErrorStatus, GeneralFailure
from aionn.hal import NO_TIMING, ExecutionResult, Memory, Request

_PLACE = slice(64, 68)
"""The only output's, behind a guard."""


class _Burst:
    """Fails from a given execution on."""

    def __init__(self, fails_from: int) -> None:
        self.executed: list[Sequence[int]] = []
        self.found: list[set[int]] = []
        self._fails_from = fails_from

    async def execute_synchronously(
        self, request: Request, identifiers: Sequence[int], *, measure: bool
    ) -> ExecutionResult:
        self.executed.append(tuple(identifiers))
        self.found.append(set(cast(Memory, request.pools[1]).array[_PLACE].tolist()))
        cast(Memory, request.pools[1]).array[_PLACE] = len(self.executed)
        if len(self.executed) > self._fails_from:
            raise GeneralFailure("by plan")
        return ExecutionResult(True, (), NO_TIMING)

    async def release_memory_resource(self, identifier: int) -> None: ...

    async def aclose(self) -> None: ...


class _Prepared:
    def __init__(self, burst: _Burst) -> None:
        self.burst = burst

    async def configure_execution_burst(self) -> _Burst:
        return self.burst


@pytest.mark.parametrize(
    ("fails_from", "measure", "count", "status"),
    [
        (9, False, 2, ErrorStatus.NONE),
        (9, True, 1, ErrorStatus.NONE),
        (1, False, 2, ErrorStatus.GENERAL_FAILURE),
        (0, False, 1, ErrorStatus.GENERAL_FAILURE),
    ],
)
async def test_burst_computes_twice_with_the_same_memories(
    fails_from: int, measure: bool, count: int, status: ErrorStatus
) -> None:
    burst = _Burst(fails_from)
    with GuardedRequest([b"1234"], [4]) as guarded:
        async with computing(
            cast(Any, _Prepared(burst)), guarded.request, "burst", measure=measure
        ) as compute:
            answer = await compute()
    assert answer.status is status
    assert burst.executed == [(0, 1)] * count
    assert burst.found == [{FILL}] * count, "nothing old can pass for a result"
