"""A frame of an admitted stream that is lost since a process did not run in time: that of the served device, or that of the
application."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.platform.stalls import NO_STALLS
from aionn.runtime.guarantees.arrivals import FrameArrival, Measured
from aionn.runtime.guarantees.guarantee import StreamGuarantee
from tests.aionn.service.reservations.served_process import LIMIT_S, begun, serving, until_served
from tests.support.mortal_driver import doubled_model

pytestmark = pytest.mark.forked("any")

# The jitter is the time that this machine may take to the device.
TERMS: dict[str, Any] = {"guarantee": True, "period": 2.0, "deadline": 0.5, "jitter": 0.4}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams count with a device time that no machine changes, and a stall of the machine is no cause."""

    async def measured(self: StreamGuarantee) -> Measured:
        return Measured(5_000_000, 16)

    monkeypatch.setattr(StreamGuarantee, "_measured", measured)
    monkeypatch.setattr("aionn.runtime.guarantees.guarantee.stalls_of_loop", lambda: NO_STALLS)


async def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops a process, and waits until it does not run."""
    process.send_signal(signal.SIGSTOP)
    with anyio.fail_after(LIMIT_S):
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            await anyio.sleep(0.001)


async def until(condition: Any) -> None:
    with anyio.fail_after(LIMIT_S):
        while not condition():
            await anyio.sleep(0.002)


@pytest.mark.parametrize("continues", [True, False])
async def test_frame_that_a_stopped_process_did_not_serve_is_unserved_or_withdrawn_if_it_never_does(
    tmp_path: Path, continues: bool
) -> None:
    with serving(tmp_path) as server:
        path = await until_served(tmp_path)

        async def camera() -> AsyncIterator[Any]:
            await stop(server)
            yield np.full(1, 1, np.float32)
            await anyio.sleep_forever()

        async with aionn.open(drivers=[], sockets=[path]) as runtime:
            net = await runtime.compile(doubled_model(), recover=True)
            async with net.burst() as burst, burst.stream(camera(), **TERMS) as results:
                result = await anext(results)
                assert (result.status, result.label) == ("dropped", None), "the cause is not known yet"
                if continues:
                    server.send_signal(signal.SIGCONT)
                    await until(lambda: results.statistics().unserved)
                    text, label = "1 frames, 1 unserved", "unserved"
                else:
                    server.kill()
                    await until(lambda: results.statistics().withdrawn)
                    text, label = "1 frames, 1 withdrawn; withdrawn", "withdrawn"
                assert text in results.explain()
                if continues:
                    assert text in runtime.devices[0].explain()
                labels = runtime.devices[0].reservations.labels
                assert {each.value: count for each, count in labels.items() if count} == {label: 1}
                assert begun(tmp_path) == [], "it was too late, and was not begun"


async def test_frame_whose_answer_the_loop_of_the_application_reads_late_is_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is blocked from before the answer until after the deadline."""
    sent = anyio.Event()
    note = FrameArrival.sent

    def noted(self: FrameArrival, now_ns: int) -> None:
        note(self, now_ns)
        sent.set()

    monkeypatch.setattr(FrameArrival, "sent", noted)
    with serving(tmp_path) as server:
        path = await until_served(tmp_path)

        async def camera() -> AsyncIterator[Any]:
            await stop(server)
            late_s = time.monotonic() + TERMS["deadline"] + 0.05
            yield np.full(1, 2, np.float32)
            await sent.wait()
            # The process continues while the loop does not, so that the answer cannot be read before.
            server.send_signal(signal.SIGCONT)
            time.sleep(max(0.0, late_s - time.monotonic()))

        async with aionn.open(drivers=[], sockets=[path]) as runtime:
            net = await runtime.compile(doubled_model())
            async with net.burst() as burst:
                # The process knows the memories from now on: it would ask the blocked loop for them otherwise.
                await burst.execute([np.full(1, 1, np.float32)])
                async with burst.stream(camera(), **TERMS) as results:
                    statuses = [result.status async for result in results]
                    assert statuses in (["late"], ["dropped"]), statuses
                    assert results.statistics().unread == 1 and "1 frames, 1 unread" in results.explain()
                assert begun(tmp_path) == [1, 2]
