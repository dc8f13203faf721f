"""One fenced launch and those that would end it: result, deadline, failed dependency."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus
from fences import FenceStatus, SyncFence

A = np.arange(6, dtype=np.float32).reshape(2, 3)


class Interrupted(SyncFence):
    """Whoever looks whether it is pending is told so, and is then too late: the other one ended it meanwhile."""

    meanwhile: Any = None

    @property
    def status(self) -> FenceStatus:
        seen = super().status
        if self.meanwhile is not None and seen == FenceStatus.PENDING:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return seen


@pytest.mark.parametrize("first", ["result", "deadline"])
async def test_information_agrees_with_the_fence_whoever_comes_first(
    reference: ReferenceDevice, small: Any, first: str
) -> None:
    prepared = await reference.prepare_model(small.sum_model())
    request = small.request([A, A], [(A.nbytes, (2, 3))])
    arguments = prepared.bind(request, allow_unspecified_outputs=False)
    terms: dict[str, Any] = {"deadline_ns": None, "loop_timeout_ns": None, "duration_ns": None}
    launch = FencedLaunch(prepared, arguments, measure=False, **terms)
    fence = launch.fence = Interrupted("launch")
    result, deadline = (lambda: launch._run(None)), (lambda: launch._expire("deadline"))
    ends = [result, deadline] if first == "result" else [deadline, result]
    # The other one comes while the first has looked at the fence and has not yet finished it.
    fence.meanwhile = ends[1]
    ends[0]()
    ends[1]()
    status, _ = await launch.get_execution_info()
    fence.meanwhile = None
    assert fence.status != FenceStatus.PENDING
    assert (status == ErrorStatus.NONE) == (fence.status == FenceStatus.SIGNALLED)
