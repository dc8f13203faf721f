"""What waits for room in a socket leaves in its order, or is over with the connection."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import anyio
import pytest

from aionn.service.wire.outbox import Outbox, Outgoing

WAIT_S_MAX = 10.0


class Ends:
    """An outbox, the peer's socket, why the connection ended, and which messages are over."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.why: list[str] = []
        self.over: list[tuple[int, OSError | None]] = []
        self.outbox = Outbox(self.ours, self._end)

    def _end(self, why: str) -> None:
        self.why.append(why)
        self.outbox.close()

    def put(self, number: int) -> bool:
        def over(why: OSError | None) -> None:
            self.over.append((number, why))

        return self.outbox.put(Outgoing(number.to_bytes(4, "big"), on_over=over))

    def fill(self) -> int:
        """Puts messages until some wait; how many were put."""
        number = 0
        while len(self.outbox) < 3:
            self.put(number)
            number += 1
        return number


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.ours.close()
    made.theirs.close()


def test_message_that_cannot_be_sent_ends_the_connection_and_says_why(ends: Ends) -> None:
    ends.theirs.close()
    assert ends.put(0)
    assert ends.why == [os.strerror(errno.EPIPE)]
    assert ends.over == [(0, None)]
    assert ends.put(1) and ends.over == [(0, None), (1, None)]


async def test_messages_that_wait_leave_in_their_order_when_there_is_room(ends: Ends) -> None:
    count = ends.fill()
    received = []
    with anyio.fail_after(WAIT_S_MAX):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ends.outbox.run)
            while len(received) < count:
                try:
                    received.append(int.from_bytes(ends.theirs.recv(16), "big"))
                except BlockingIOError:
                    await anyio.wait_readable(ends.theirs)
            tasks.cancel_scope.cancel()
    assert received == list(range(count))
    assert ends.over == [(number, None) for number in range(count)]


async def test_messages_that_wait_are_over_when_the_connection_has_ended(ends: Ends) -> None:
    count = ends.fill()
    ends.theirs.close()
    with anyio.fail_after(WAIT_S_MAX):
        await ends.outbox.run()
    assert len(ends.outbox) == 0 and len(ends.why) == 1
    assert sorted(number for number, _ in ends.over) == list(range(count))
    assert {why for _, why in ends.over} == {None}
