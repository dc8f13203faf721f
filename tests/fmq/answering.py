"""Both ends of queues whose messages C functions answer, and such functions: of the C library, or held by a test."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import fmq

SECOND_NS = 1_000_000_000
WAIT_S = 20.0
MESSAGE, ANSWER = b"a message of some words", b"its answer"
NO_TIME = b"\xff" * 8

Function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 6)
_library = ctypes.CDLL(None)


def address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class Calls:
    """A semaphore of the C library that counts its calls."""

    def __init__(self) -> None:
        self._semaphore = (ctypes.c_char * 64)()
        _library.sem_init(self._semaphore, 0, 0)
        self.function = address_of(_library.sem_post)
        self.words = (ctypes.addressof(self._semaphore),)

    @property
    def count(self) -> int:
        value = ctypes.c_int()
        _library.sem_getvalue(self._semaphore, ctypes.byref(value))
        return value.value


class Kept:
    """What a call keeps alive."""


class Ends:
    """A client, and a thread that serves: natively, and by answering ``python`` to what is left."""

    def __init__(
        self,
        *,
        slots: int = 2,
        request_bytes: int = 1 << 12,
        result_bytes: int = 1 << 12,
        reports: bool = False,
        spin_ns: int = 0,
    ) -> None:
        self.requests = fmq.MessageQueue.create(1, request_bytes)
        self.results = fmq.MessageQueue.create(1, result_bytes)
        self.reader = fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds, spin_ns=spin_ns)
        self.writer = fmq.MessageQueue.attach(self.results.descriptor, self.results.fds)
        self.slots = fmq.Slots(slots)
        self.slot_count = slots
        self.slots.open()
        self.permit = fmq.Permit(self.slots, 7)
        self.answers = fmq.Answers(reports=reports)
        self.events: list[Any] = []
        self.left: list[bytes] = []
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while True:
                event = self.answers.serve(self.reader, self.writer)
                if event is not None:
                    self.events.append(event)
                    if event[2]:
                        self.writer.write_message(b"failed")
                    continue
                message = self.reader.read_message_blocking(None)
                assert message is not None
                self.left.append(message)
                self.writer.write_message(b"python")
        except (fmq.InterruptedQueue, fmq.ClosedQueue):
            pass
        except BaseException as e:
            self.failure = e

    def add(
        self, calls: Any, message: bytes = MESSAGE, answer: bytes = ANSWER, call: object = None, **times: Any
    ) -> bool:
        words = (calls.words,) * self.slot_count
        return self.answers.add(message, answer, calls.function, words, self.permit, call, **times)

    def ask(self, message: bytes) -> bytes | None:
        assert self.requests.write_message(message)
        return self.results.read_message_blocking(int(WAIT_S * SECOND_NS))

    def close(self) -> None:
        self.reader.interrupt()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the thread that serves did not end"
        for queue in (self.requests, self.results, self.reader, self.writer):
            queue.close()
        if self.failure is not None:
            raise self.failure


class Gate:
    """A function of Python that a test holds, with its result."""

    def __init__(self, status: int = 0) -> None:
        self.entered, self.may_end = threading.Semaphore(0), threading.Event()
        self.status = status
        self.words = (1, 2)
        self.got: list[tuple[int, ...]] = []
        self._callback = Function(self._run)
        self.function = address_of(self._callback)

    def _run(self, *words: int) -> int:
        self.got.append(words)
        self.entered.release()
        self.may_end.wait(WAIT_S)
        return self.status
