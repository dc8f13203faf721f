"""What the hostile driver does by numbers, ends and silence: one function for each attack.

See hostile_driver_lies.py for the others.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

import msgspec
from hostile_driver import Driver, attack

from aionn.errors import ErrorStatus
from aionn.hal import (
    NO_TIMING,
    Memory,
    OutputShape,
    Priority,
)
from aionn.service.wire import protocol
from aionn.service.wire.repetition import RecallMemories
from fences import SyncFence

UNEXPECTED = 1 << 30
"""The number of a call that nobody made."""

HUGE = 2**62

# Control


@attack
def spin(driver: Driver) -> None:
    """Says nothing beside its answers, and keeps a core busy."""

    def busy() -> None:
        while True:
            pass

    threading.Thread(target=busy, daemon=True).start()


@attack
def nothing(driver: Driver) -> None:
    """Behaves well, apart from the values of its outputs."""


# Floods


@attack
def flood_replies(driver: Driver) -> None:
    """Replies that nobody awaits."""
    driver.flood(lambda i: driver.reply(UNEXPECTED + i, protocol.Done()))


@attack
def flood_replies_with_handles(driver: Driver) -> None:
    """The same, each of which speaks of an object that the application then frees."""
    driver.flood(lambda i: driver.reply(UNEXPECTED + i, protocol.PrepareModelReply(i)))


@attack
def flood_replies_with_fences(driver: Driver) -> None:
    """The same with fences that are pending."""
    fence = SyncFence()
    fence.fileno()
    driver.flood(lambda i: driver.reply(UNEXPECTED + i, protocol.ExecuteFencedReply(i, fence)))


@attack
def flood_replies_with_memories(driver: Driver) -> None:
    """The same with memories."""
    memory = Memory.create(1 << 20)
    driver.flood(lambda i: driver.reply(UNEXPECTED + i, protocol.GetMemoriesReply((memory,) * 8)))


@attack
def flood_notices(driver: Driver) -> None:
    """Notices of executions that nobody launched, with shapes."""
    shapes = (OutputShape((1, 2, 3)),) * 16
    driver.flood(lambda i: driver.call(protocol.Notify(HUGE + i, ErrorStatus.NONE, shapes, NO_TIMING)))


@attack
def flood_pings(driver: Driver) -> None:
    """Questions that an application does not answer; the answers are read by the thread that serves."""
    driver.flood(lambda i: driver.call(protocol.Ping()))


@attack
def flood_questions(driver: Driver) -> None:
    """Questions for memories, which it knows or not."""
    driver.flood(
        lambda i: driver.call(
            RecallMemories(tuple(range(i % 240))) if i % 2 else protocol.GetMemories(1, (0,) * (i % 240))
        )
    )


@attack
def flood_burst_ends(driver: Driver) -> None:
    """Bursts that end, with a long reason."""
    driver.flood(lambda i: driver.call(protocol.BurstEnded(i % 5, "x" * 500)))


@attack
def flood_unknown_kinds(driver: Driver) -> None:
    """A message of a kind that there is not."""
    body = {"type": "Reply", "id": UNEXPECTED, "body": {"type": "Ransom", "sum": 10**6}}
    driver.flood(lambda i: driver.send_bytes(msgspec.msgpack.encode(body)))


@attack
def flood_garbage(driver: Driver) -> None:
    """Bytes."""
    chance = random.Random(1)
    driver.flood(lambda i: driver.send_bytes(chance.randbytes(1 + i % 900)))


@attack
def flood_oversized(driver: Driver) -> None:
    """Datagrams that are longer than any may be."""
    driver.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    driver.flood(lambda i: driver.send_bytes(b"\x83" + bytes(100_000)))


@attack
def flood_descriptors(driver: Driver) -> None:
    """As many descriptors as a message carries, which no message speaks of."""
    fds = (os.open("/dev/null", os.O_RDONLY),) * 253
    payload = protocol.encode(protocol.Reply(UNEXPECTED, protocol.Done()))[0]
    driver.flood(lambda i: driver.send_bytes(payload, fds))


@attack
def flood_models(driver: Driver) -> None:
    """Calls with models that are as large as they may be: an application prepares none."""
    from hostile_application import sum_model

    model = msgspec.structs.replace(sum_model(), operand_values=bytes(64 << 20))
    body = protocol.PrepareModel(model, *_preference(), None)
    driver.flood(lambda i: driver.call(body))


def _preference() -> tuple[Any, Priority]:
    from aionn.hal import ExecutionPreference

    return ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM


@attack
def flood_memories(driver: Driver) -> None:
    """Calls with memories of a terabyte: an application copies none."""
    fd = os.memfd_create("large", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 40)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = Memory.from_fd(fd, size_bytes=1 << 40)
    driver.flood(lambda i: driver.call(protocol.CopyTo(1, memory)))


@attack
def flood_fences(driver: Driver) -> None:
    """Calls with fences: an application executes nothing for its driver."""
    from aionn.service.wire.repetition import ComputeFenced

    fence = SyncFence()
    fence.fileno()
    driver.flood(lambda i: driver.call(ComputeFenced(1, (fence,), None, None)))


@attack
def flood_stderr(driver: Driver) -> None:
    """Lines of standard error."""
    driver.flood(lambda i: _write(2, b"something is not as it was\n" * 1000))


@attack
def flood_stderr_blank(driver: Driver) -> None:
    """Lines that are empty."""
    driver.flood(lambda i: _write(2, b"\n" * 60_000))


@attack
def flood_stderr_endless(driver: Driver) -> None:
    """A line that does not end."""
    driver.flood(lambda i: _write(2, b"x" * 60_000))


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# Descriptors


@attack
def lingering_sockets(driver: Driver) -> None:
    """Sockets whose closing waits for a peer that reads nothing: whoever closes the last descriptor waits."""
    kept = _lingering()
    payload = protocol.encode(protocol.Reply(UNEXPECTED, protocol.Done()))[0]

    def send(index: int) -> None:
        fd = _lingering_client(kept)
        driver.send_bytes(payload, (fd,))
        os.close(fd)

    driver.flood(send)


@attack
def lingering_unread(driver: Driver) -> None:
    """The same in messages that nobody reads any more, because the first one is none."""
    kept = _lingering()
    done = protocol.encode(protocol.Reply(UNEXPECTED, protocol.Done()))[0]

    def said(call: Any) -> Any:
        fds = [_lingering_client(kept) for _ in range(3)]
        driver.send_bytes(b"\xc1")
        for fd in fds:
            driver.send_bytes(done, (fd,))
            os.close(fd)

    driver.answers["PrepareModel"] = said


def _lingering() -> list[socket.socket]:
    return [socket.create_server(("127.0.0.1", 0))]


def _lingering_client(kept: list[socket.socket]) -> int:
    client = socket.create_connection(kept[0].getsockname())
    kept.append(kept[0].accept()[0])
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
    return client.detach()


@attack
def wrong_descriptors(driver: Driver) -> None:
    """Descriptors that are not what the message says."""
    kinds = (
        os.open("/dev/zero", os.O_RDWR),
        os.eventfd(0),
        os.pipe()[0],
        socket.socket().detach(),
        os.open("/", os.O_RDONLY),
        os.pidfd_open(os.getpid()),
        os.open("/dev/full", os.O_RDWR),
    )
    fence = SyncFence()
    fence.fileno()
    fenced = protocol.encode(protocol.Reply(UNEXPECTED, protocol.ExecuteFencedReply(1, fence)))[0]
    memories = protocol.encode(protocol.Reply(UNEXPECTED, protocol.GetMemoriesReply((Memory.create(64),))))[0]

    def said(call: Any) -> Any:
        payload = memories if call.id % 2 else fenced
        fd = kinds[call.id % len(kinds)]
        driver.send_bytes(payload.replace(struct.pack(">I", UNEXPECTED), struct.pack(">I", call.id)), (fd,))

    for kind in ("Execute", "ExecuteFenced", "Allocate"):
        driver.answers[kind] = said


# Storms


@attack
def dies_at_hello(driver: Driver) -> None:
    """Ends before it has said who it is."""
    driver.answers["Hello"] = _exit


@attack
def dies_at_each_call(driver: Driver) -> None:
    """Ends at each call but those before the first execution."""
    for kind in ("Execute", "Launch", "ExecuteFenced", "ConfigureBurst", "Allocate", "CreateExecution"):
        driver.answers[kind] = _exit


@attack
def dies_in_each_burst(driver: Driver) -> None:
    """Ends when a request is in the queue."""
    driver.on_request = lambda *_: os._exit(0)


@attack
def dies_in_the_middle_of_answers(driver: Driver) -> None:
    """Answers, and ends in the same moment."""

    def said(call: Any) -> Any:
        driver.reply(call.id, driver.right_answer(call))
        os._exit(0)

    for kind in ("Execute", "ExecuteFenced", "ConfigureBurst", "CreateExecution"):
        driver.answers[kind] = said


@attack
def closes_the_socket(driver: Driver) -> None:
    """Lets go of the socket and goes on living."""

    def said(call: Any) -> Any:
        driver.sock.shutdown(socket.SHUT_RDWR)
        os.close(driver.fd)
        time.sleep(60)

    driver.answers["Execute"] = said


@attack
def shuts_one_direction(driver: Driver) -> None:
    """Reads on, and can say nothing any more; or the reverse."""

    def said(call: Any) -> Any:
        driver.sock.shutdown(socket.SHUT_WR if call.id % 2 else socket.SHUT_RD)
        time.sleep(60)

    driver.answers["Execute"] = said


def _exit(call: Any) -> Any:
    os._exit(0)


# Silences


@attack
def never_says_hello(driver: Driver) -> None:
    """Reads what comes, and answers nothing."""
    driver.before = lambda call: driver.answers.update({type(call.body).__name__: lambda call: None})


@attack
def says_hello_alone(driver: Driver) -> None:
    """Answers Hello and nothing else."""

    def before(call: Any) -> None:
        if type(call.body).__name__ != "Hello":
            while driver.receive() is not None:
                pass
            os._exit(0)

    driver.before = before


@attack
def reads_nothing(driver: Driver) -> None:
    """Greets, and reads nothing any more."""
    driver.answers["SupportedOperations"] = lambda call: time.sleep(60)


@attack
def reads_nothing_after_preparing(driver: Driver) -> None:
    """Prepares, and reads nothing any more."""
    driver.answers["Execute"] = lambda call: time.sleep(60)


@attack
def stops_itself(driver: Driver) -> None:
    """By SIGSTOP."""
    driver.answers["Execute"] = lambda call: os.kill(os.getpid(), signal.SIGSTOP)


@attack
def never_ends(driver: Driver) -> None:
    """Becomes another program that knows no end."""

    def said(call: Any) -> Any:
        os.set_inheritable(driver.fd, True)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    driver.answers["Execute"] = said


@attack
def answers_pings_alone(driver: Driver) -> None:
    """Seems to be there, and answers no execution."""
    for kind in ("Execute", "ExecuteFenced", "Compute", "CreateExecution", "Allocate", "EndBurst"):
        driver.answers[kind] = lambda call: None
    driver.answers["Launch"] = lambda call: protocol.LaunchReply(ErrorStatus.NONE)
    driver.on_request = lambda *_: None


@attack
def frees_nothing(driver: Driver) -> None:
    """Answers no call that frees or ends an object."""
    for kind in ("FreePreparedModel", "FreeBuffer", "EndBurst", "ForgetExecution", "FreeMemorySlot"):
        driver.answers[kind] = lambda call: None
