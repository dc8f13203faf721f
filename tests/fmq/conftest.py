"""Queues that close with the test, second processes that end with it, and the protocol model."""

from __future__ import annotations

import ast
import importlib.util
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fmq
from tests.fmq.answering import Calls, Ends

HERE = Path(__file__).parent
ANSWER_TIMEOUT_S = 30.0


class Peer:
    """A second process that holds endpoints of its own and evaluates expressions over them."""

    def __init__(self, queues: list[fmq.MessageQueue], environment: dict[str, str]) -> None:
        arguments = [f"{q.descriptor.to_bytes().hex()}:{','.join(map(str, q.fds))}" for q in queues]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for queue in queues for fd in queue.fds],
            env={**os.environ, "PYTHONPATH": str(HERE.parent.parent), **environment},
        )
        assert self._line() == "ready"

    def begin(self, expression: str) -> None:
        """Starts an evaluation."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression.encode() + b"\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """The value of the evaluation started last; raises RuntimeError with the peer's exception."""
        line = self._line()
        if line.startswith("!"):
            raise RuntimeError(line[1:])
        return ast.literal_eval(line)

    def ask(self, expression: str) -> Any:
        """Evaluates an expression over there."""
        self.begin(expression)
        return self.finish()

    def _line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIMEOUT_S):
                self.process.kill()
                raise AssertionError("the peer did not answer in time")
        return self.process.stdout.readline().decode().strip()

    def wait_dead(self) -> int:
        """Waits for the end of the process; its return code, negative for a signal."""
        return self.process.wait(ANSWER_TIMEOUT_S)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Starts second processes over given queues."""
    peers: list[Peer] = []

    def start(*queues: fmq.MessageQueue, **environment: str) -> Peer:
        peers.append(Peer(list(queues), environment))
        return peers[-1]

    yield start
    for each in peers:
        each.end()


@pytest.fixture
def make() -> Iterator[Callable[..., fmq.MessageQueue]]:
    """Creates queues that are closed after the test."""
    made: list[fmq.MessageQueue] = []

    def create(quantum_bytes: int, count: int, **options: Any) -> fmq.MessageQueue:
        made.append(fmq.MessageQueue.create(quantum_bytes, count, **options))
        return made[-1]

    yield create
    for queue in made:
        queue.close()


@pytest.fixture
def join() -> Iterator[Callable[..., fmq.MessageQueue]]:
    """Attaches to a queue in this process; closed after the test."""
    made: list[fmq.MessageQueue] = []

    def attach(queue: fmq.MessageQueue, **options: Any) -> fmq.MessageQueue:
        made.append(fmq.MessageQueue.attach(queue.descriptor, queue.fds, **options))
        return made[-1]

    yield attach
    for queue in made:
        queue.close()


class Running:
    """A call in a thread of its own; `result` joins it, with a watchdog."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = call()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(ANSWER_TIMEOUT_S)
        assert not self._thread.is_alive(), "the thread did not come back in time"
        if self._error is not None:
            raise self._error
        return self._value


@pytest.fixture
def background() -> Callable[[Callable[[], Any]], Running]:
    """Runs a call in a thread of its own."""
    return Running


@pytest.fixture
def parked() -> Callable[[fmq.MessageQueue], None]:
    """Waits until somebody in this process has gone to sleep in an endpoint since the last question."""
    seen: dict[int, int] = {}

    def wait(queue: fmq.MessageQueue) -> None:
        before = seen.get(id(queue), 0)
        deadline = threading.Event()
        timer = threading.Timer(ANSWER_TIMEOUT_S, deadline.set)
        timer.start()
        try:
            while queue.statistics().park_count == before:
                os.sched_yield()
                assert not deadline.is_set(), "nobody went to sleep in time"
        finally:
            timer.cancel()
            timer.join()
        seen[id(queue)] = queue.statistics().park_count

    return wait


def module_of(folder: str, name: str) -> ModuleType:
    """A module of one of the folders here, which are not packages."""
    spec = importlib.util.spec_from_file_location(f"fmq_{name}", HERE / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def protocol() -> ModuleType:
    """The model of the protocol, and the explorer it imports."""
    module_of("protocol", "interleavings")
    return module_of("protocol", "protocol_model")


@pytest.fixture(scope="session")
def fuzzer() -> ModuleType:
    """Random descriptors, calls and corruption."""
    return module_of("faults", "fuzzer")


@pytest.fixture
def counters() -> Iterator[Callable[..., Any]]:
    """A map of a queue's own memory: what a hostile peer can write to."""
    import mmap

    maps: list[mmap.mmap] = []

    def view(queue: fmq.MessageQueue) -> mmap.mmap:
        maps.append(mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size))
        return maps[-1]

    yield view
    for each in maps:
        each.close()


@pytest.fixture
def make_ends() -> Iterator[Callable[..., Ends]]:
    """Makes clients and services whose messages C functions answer."""
    made: list[Ends] = []

    def make(**options: Any) -> Ends:
        made.append(Ends(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def calls() -> Calls:
    """A function that counts its calls."""
    return Calls()
