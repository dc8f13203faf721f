"""A hostile driver: what an application's runtime starts as a driver process, and what then says what it likes.

``hostile_driver:ATTACK`` names a driver. Its factory takes the process over: it speaks the service protocol itself over the
inherited socket, rightly where the attack does not say otherwise, and never returns. The attacks are in hostile_driver_attacks.py
and hostile_driver_lies.py.

Importing this module does nothing, since the application imports it too, to see whether there is such a driver.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

NICE = "HOSTILE_NICE"
"""The variable that says how nice the process is; 0 where it is not set."""

SECONDS = "HOSTILE_SECONDS"
"""The variable that says after how many seconds an attack ends its process, if nobody else has: a test that failed leaves none."""

SECONDS_DEFAULT = 60.0

ATTACKS: dict[str, Callable[[Driver], None]] = {}
"""By name: each changes how the driver answers, or has a thread of it send beside the answers; then the driver serves."""


def attack(function: Callable[[Driver], None]) -> Callable[[Driver], None]:
    """Registers an attack under the function's name."""
    ATTACKS[function.__name__] = function
    return function


def __getattr__(name: str) -> Callable[[str], Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def factory(device_name: str) -> Any:
        import hostile_driver_lies  # noqa: F401

        take_over(ATTACKS[name], device_name)

    return factory


def take_over(attack: Callable[[Driver], None], device_name: str) -> None:
    """Runs the attack in this process, which ends with it."""
    os.nice(int(os.environ.get(NICE, "0")))
    watch = threading.Timer(float(os.environ.get(SECONDS, SECONDS_DEFAULT)), os._exit, (7,))
    watch.daemon = True
    watch.start()
    threading.excepthook = lambda _: None  # What rewrites a queue's memory breaks its own end as well.
    status = 0
    try:
        driver = Driver(int(sys.argv[sys.argv.index("--fd") + 1]), device_name)
        attack(driver)
        driver.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # The application has let go.
    except BaseException:
        traceback.print_exc()
        status = 3
    os._exit(status)


class Driver:
    """The driver's end of the connection: one thread that serves, and others that attack.

    Attributes:
        fd: The socket's number.
        sock: The same, as an object; it blocks.
        name: Of the device.
        answers: By kind of message what is answered: a body, or None for nothing. It is given the call.
        info: What it says of itself.
        model: The first model that was prepared.
    """

    def __init__(self, fd: int, name: str) -> None:
        from aionn.drivers.reference import ReferenceDevice

        self.fd = fd
        self.sock = socket.socket(fileno=os.dup(fd))
        self.sock.setblocking(True)
        self.name = name
        self.info = ReferenceDevice(name).info
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.before: Callable[[Any], None] = lambda call: None
        self._next = 0
        self._sending = threading.Lock()
        self._calls = 1 << 20
        self.queues: list[tuple[Any, Any]] = []
        self.on_request: Callable[[Any, Any, bytes], None] = _answer_rightly

    def number(self) -> int:
        """A handle that no other object has."""
        self._next += 1
        return self._next

    # What it says

    def send_bytes(self, payload: bytes, fds: tuple[int, ...] | list[int] = ()) -> None:
        """One datagram."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([payload], ancillary)

    def reply(self, number: int, body: Any, more_fds: tuple[int, ...] = ()) -> None:
        """Answers a call."""
        from aionn.service.wire.protocol import Reply, encode

        payload, fds, keep = encode(Reply(number, body))
        self.send_bytes(payload, [*fds, *more_fds])
        del keep

    def call(self, body: Any, number: int | None = None) -> None:
        """Calls the application; its answer is ignored."""
        from aionn.service.wire.protocol import Call, encode

        self._calls += 1
        payload, fds, keep = encode(Call(self._calls if number is None else number, body))
        self.send_bytes(payload, fds)
        del keep

    def flood(self, send: Callable[[int], None]) -> None:
        """Has a thread send for ever, beside what is answered, once the application has been greeted."""
        greeted = threading.Event()
        before = self.before

        def beside() -> None:
            greeted.wait()
            index = 0
            try:
                while True:
                    send(index)
                    index += 1
            except OSError:
                os._exit(0)
            except Exception:
                traceback.print_exc()
                os._exit(3)

        def first(call: Any) -> None:
            if type(call.body).__name__ != "Hello":
                greeted.set()
            before(call)

        threading.Thread(target=beside, daemon=True).start()
        self.before = first

    # What it hears

    def receive(self) -> Any:
        """The next call; None at the end of the connection."""
        from aionn.service.wire.large import in_memory, read_parts
        from aionn.service.wire.protocol import Call, decode_inline, decode_parts

        while True:
            payload, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 253)
            if not payload:
                return None
            try:
                stands_for = in_memory(payload)
                if stands_for is None:
                    message = decode_inline(payload, fds)
                else:
                    steps = decode_parts(stands_for, *read_parts(stands_for, fds), fds)
                    message = _last(steps)
            finally:
                for fd in fds:
                    os.close(fd)
            if isinstance(message, Call):
                return message

    def serve(self) -> None:
        """Answers until the application lets go."""
        while (call := self.receive()) is not None:
            self.before(call)
            body = self.answer(call)
            if body is not None:
                self.reply(call.id, body)

    def answer(self, call: Any) -> Any:
        """What is answered: what the attack says, or what is right."""
        kind = type(call.body).__name__
        said = self.answers.get(kind)
        return self.right_answer(call) if said is None else said(call)

    def right_answer(self, call: Any) -> Any:
        """What a driver that behaves well would answer, though it computes nothing."""
        from aionn.errors import ErrorStatus
        from aionn.hal import NO_TIMING, DeviceStatus, ExecutionResult, FencedTiming
        from aionn.service.wire import protocol, repetition
        from fences import SyncFence

        body = call.body
        match type(body).__name__:
            case "Hello":
                return protocol.HelloReply(protocol.PROTOCOL_VERSION, os.getpid(), self.info, 64)
            case "GetStatus":
                return protocol.StatusReply(DeviceStatus.AVAILABLE)
            case "SupportedOperations":
                return protocol.SupportedOperationsReply((True,) * len(body.model.main.operations))
            case "PrepareModel" | "PrepareModelFromCache":
                return protocol.PrepareModelReply(self.number())
            case "Execute" | "Compute":
                return protocol.ExecuteReply(ExecutionResult())
            case "Launch":
                self.reply(call.id, protocol.LaunchReply(ErrorStatus.NONE))
                self.call(protocol.Notify(body.launch, ErrorStatus.NONE, (), NO_TIMING))
                return None
            case "ExecuteFenced" | "ComputeFenced":
                return protocol.ExecuteFencedReply(self.number(), SyncFence.finished(1))
            case "GetExecutionInfo":
                return protocol.ExecutionInfoReply(ErrorStatus.NONE, FencedTiming())
            case "CreateExecution":
                return repetition.CreateExecutionReply(self.number())
            case "Allocate":
                number = self.number()
                return protocol.AllocateReply(number, number)
            case "ConfigureBurst":
                return self.burst(body)
            case "CancelCall":
                return None
        return protocol.Done()

    def burst(self, body: Any) -> Any:
        """Makes a burst whose thread answers each request as ``on_request`` does."""
        from aionn.service.wire.protocol import ConfigureBurstReply

        requests, results = body.requests.attach(), body.results.attach()
        self.queues.append((requests, results))

        def listen() -> None:
            while True:
                packet = requests.read_message_blocking(1_000_000_000)
                if packet is not None:
                    self.on_request(requests, results, packet)

        threading.Thread(target=listen, daemon=True).start()
        return ConfigureBurstReply(self.number())


def _answer_rightly(requests: Any, results: Any, packet: bytes) -> None:
    from aionn.burst.packets import encode_result, result_of
    from aionn.hal import ExecutionResult

    results.write_message(encode_result(result_of(ExecutionResult())))


def _last(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value
