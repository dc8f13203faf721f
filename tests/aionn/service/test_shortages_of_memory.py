"""A passing shortage of memory or threads in a served device: it costs at most the newcomer or the call that met it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.cli.commands import serve
from aionn.errors import ErrorStatus
from aionn.service.host import process, reservations
from aionn.service.host.draining import DrainState
from aionn.service.wire import channel
from aionn.service.wire.protocol import Done, Failed, Ping

WATCHDOG_S = 20.0


class OutOfMemory:
    """Raises MemoryError at the first call, and calls through at each later one."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.has_failed = anyio.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.has_failed.is_set():
            self.has_failed.set()
            raise MemoryError
        return self._call(*arguments, **options)


@pytest.mark.parametrize(("kind", "step"), [(process.Credentials, "of"), (process.Admission, "admit")])
async def test_clients_are_served_on_when_there_was_no_memory_for_a_newcomer(
    served: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, step: str
) -> None:
    client = served.client()
    await client.connect()
    failing = OutOfMemory(getattr(kind, step))
    # A function, so that it is a method of the class.
    monkeypatch.setattr(kind, step, lambda *arguments: failing(*arguments))
    newcomer = served.raw()
    assert await newcomer.receive() == b""
    newcomer.close()
    await client.status()
    later = served.client()
    with anyio.fail_after(WATCHDOG_S):
        await later.status()
    for each in (client, later):
        await each.aclose()


@pytest.mark.parametrize("step", ["look", "_send_notices"])
async def test_clients_are_served_on_when_there_was_no_memory_for_notices_of_reservations(
    served: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    kind = reservations.ServedReservations
    original = getattr(kind, step)
    failing = OutOfMemory(original)
    # A function, so that it is a method of the class.
    monkeypatch.setattr(kind, step, lambda self: failing(self))
    monkeypatch.setattr(reservations, "NOTICE_PAUSE_S", 0.0)
    leaving, staying = served.client(), served.client()
    for client in (leaving, staying):
        await client.connect()
    await leaving.aclose()  # The end of its reservations is looked at.
    with anyio.fail_after(WATCHDOG_S):
        await failing.has_failed.wait()
        await staying.status()
    await staying.aclose()


@pytest.mark.parametrize("step", ["decode_inline", "in_memory"])
async def test_call_for_which_there_was_no_memory_is_answered_and_the_connection_continues(
    served: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, step: str
) -> None:
    client = await served.raw().hello()
    request.addfinalizer(client.close)
    monkeypatch.setattr(channel, step, OutOfMemory(getattr(channel, step)))
    reply = await client.ask(2, Ping())
    assert isinstance(reply, Failed) and reply.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert "message: no memory is left" in reply.message
    assert isinstance(await client.ask(3, Ping()), Done)


class Ended(Exception):
    """In the place of the process's end."""


def test_drained_process_ends_with_its_status_where_no_thread_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = []

    def end_process(_: Any, state: DrainState) -> None:
        states.append(state)
        raise Ended

    def start(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(serve._Places, "end_process", end_process)
    monkeypatch.setattr(serve.threading.Thread, "start", start)
    places = serve._Places(Path("/nowhere"), False, 0o600, None, None, None, None)
    with pytest.raises(Ended):
        serve._end_soon(DrainState.DRAINED, "device", places)
    assert states == [DrainState.DRAINED]
