"""Every message of docs/production/troubleshooting.md is a text of the code, so that the page stays true."""

from __future__ import annotations

import ast
import asyncio
import functools
import pickle
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.arguments import TensorSpec
from aionn.testing.models import identity
from fences import SyncFence
from fmq import MessageQueue
from tests.documentation.pages import ROOT
from tests.test_tidy import PACKAGES, parse, read

PICTURE = TensorSpec("picture", OperandType.TENSOR_FLOAT32, (1, 6, 5, 3))

GAP = "\0"
"""Stands for a value in a text of the code."""


def listed_messages() -> list[str]:
    page = (ROOT / "docs" / "production" / "troubleshooting.md").read_text()
    return re.findall(r"(?m)^\| `(.+?)` \|", page)


@functools.cache
def texts_of(path: str, source: str) -> tuple[str, ...]:
    """Every text of a file with its values as gaps; backquotes, which a page cannot show, are left out."""
    found = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values]
            found.add("".join(parts))
    return tuple(" ".join(text.replace("`", "").split()) for text in found)


def is_text_of(message: str, sources: dict[str, str]) -> bool:
    """Whether a text begins like the message; ``...`` is any value, and a value of the code may be written out.

    Files that have the longest part of the message, or most of its words, are read first, since to parse all of them takes seconds.
    """
    parts = message.split("...")
    longest = max(parts, key=len)
    pattern = re.compile(".*".join(map(re.escape, parts)))
    words = [longest] if any(longest in source for source in sources.values()) else longest.split()
    paths = sorted(sources, key=lambda path: -sum(word in sources[path] for word in words))
    return any(pattern.match(text) for path in paths for text in texts_of(path, sources[path]))


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return read(PACKAGES, (".py",))


@pytest.mark.parametrize("message", listed_messages())
def test_message_is_a_text_of_the_code(message: str, sources: dict[str, str]) -> None:
    assert len(message.replace("...", "").strip(" :,;()")) >= 12, "too few words to be found"
    assert is_text_of(message, sources)


# --- Messages for the mistakes of newcomers -----------------------------------------------------------------------------------

MISTAKES = {
    "deadline: expected nanoseconds on the monotonic clock or None, got ...": "await net.execute([X], deadline=0.033)",
    "...: expected a number of seconds ..., got ...": "aionn.after(33_000_000)",
    "...: the deadline had passed before the start, too late by ...": "await net.execute([X], deadline=aionn.now_ns() - 5)",
    "stream, deadline: expected a function from an item to its deadline, got ...; ...": (
        "burst.stream(once(), deadline=aionn.after(1))"
    ),
    "wait_for: expected a list of fences, got ...": "net.execute_fenced([X], wait_for=SyncFence('one'))",
    "...: expected a picture as a uint8 array, got ...": "aionn.image_writer(PICTURE)(object(), X)",
    "an array or a buffer": "await net.execute([[1.0]])",
    "model: expected a path or a Model, got ...": "await runtime.compile(b'TFL3')",
    "...: cannot be read: ...": "await runtime.compile('absent.onnx')",
    "stream: expected an async iterable, got ...": "burst.stream(x for x in [X])",
    "inputs: expected ..., got ...": "await net.execute([X, X])",
    "inputs: expected a list with ..., got ...": "await net.execute(X)",
    "..., output ...: expected shape ..., which its inputs give, got ...": "await runtime.compile(contradicting_model())",
    "queue: descriptors cannot be pickled. ...": "pickle.dumps(QUEUE)",
    "...: cannot be copied or pickled; ...": "pickle.dumps(runtime.devices[0])",
    "driver ...: expected one of ...": "await aionn.open(drivers=['absent']).__aenter__()",
    "on_late: expected drop or deliver, got ...": "burst.stream(once(), on_late='skip')",
}
"""An entry of the page for each mistake, and the mistake."""


def contradicting_model() -> Any:
    """A model by hand whose only operation states another shape than it gives."""
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 4))
    y = graph.variable(OperandType.TENSOR_FLOAT32, (1, 5))
    graph.operation(OperationType.RELU, [x], [y])
    return graph.build([y])


@pytest.mark.parametrize(("message", "program"), MISTAKES.items())
def test_message_of_a_mistake_is_on_the_page(message: str, program: str) -> None:
    assert message in listed_messages()
    told = anyio.run(mistaken, program)
    assert re.search(".*".join(map(re.escape, message.split("..."))), told), f"{program}: {told}"


# --- Messages of Python -------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "'coroutine' object has no attribute '...'": "net.execute([X]).outputs",
    "'...' object does not support the context manager protocol": "with aionn.open(): pass",
    "object ... can't be used in 'await' expression": "await aionn.open()",
    "'...' object is not iterable": "for result in burst.stream(once()): pass",
    "'async with' outside async function": "exec('async with aionn.open(): pass')",
    "asyncio.run() cannot be called from a running event loop": "asyncio.run(once())",
    "Already running asyncio in this thread": "anyio.run(once)",
    "module 'aionn' has no attribute 'open'": "type(aionn)('aionn').open()",
    "takes 2 positional arguments but 3 were given": "await net.execute(X, X)",
    "'Result' object is not subscriptable": "(await net.execute([X]))[0]",
}
"""A mistake for each message of Python that the page lists."""


async def mistaken(program: str) -> str:
    """The message of a program of one line."""
    X = np.zeros(4, np.float32)

    async def once() -> AsyncIterator[Any]:
        yield X

    names: dict[str, Any] = {"aionn": aionn, "anyio": anyio, "asyncio": asyncio, "pickle": pickle}
    names |= {
        "SyncFence": SyncFence,
        "X": X,
        "once": once,
        "PICTURE": PICTURE,
        "contradicting_model": contradicting_model,
    }
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(identity((4,)))
        with MessageQueue.create(1, 64) as names["QUEUE"]:
            async with net.burst() as burst:
                exec(f"async def mistake(runtime, net, burst):\n    {program}", names)
                # An exception that is kept is part of a cycle with its frames, and AttributeError keeps its object. A
                # coroutine that was never awaited must be freed here: where the collector frees it, the interpreter may
                # be within a named tuple's `__new__`, which has no builtins, and its warning then fails.
                try:
                    await names["mistake"](runtime, net, burst)
                except (TypeError, AttributeError, SyntaxError, RuntimeError, aionn.Error) as error:
                    message = str(error)
                else:
                    pytest.fail(f"{program}: expected an error, got none")
    return message


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_message_of_python_is_what_it_says() -> None:
    page = (ROOT / "docs" / "production" / "troubleshooting.md").read_text()
    listed = re.findall(r"(?m)^\| Python: `(.+?)` \|", page)
    assert listed == list(PROGRAMS)
    for message, program in PROGRAMS.items():
        told = anyio.run(mistaken, program)
        assert re.search(".*".join(map(re.escape, message.split("..."))), told), f"{program}: {told}"


def test_message_that_does_not_exist_is_noticed() -> None:
    source = {"a.py": "raise E(f'{where}: expected a horse, '\n 'got {what!r}')"}
    assert is_text_of("...: expected a horse, got ...", source)
    assert not is_text_of("...: expected a unicorn, got ...", source)
    assert len(listed_messages()) > 50
