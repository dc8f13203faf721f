"""Every misuse has its error, said in one sentence, and changes nothing: the next right call works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.hal import Operand, OperandLifeTime, OperandType, Operation, OperationType, Subgraph
from aionn.testing.models import chain
from fences import SyncFence

X = np.ones(3, np.float32)


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process") as opened:
        yield opened


@pytest.fixture
async def net(runtime: aionn.Runtime) -> aionn.Compilation:
    return await runtime.compile(chain([OperationType.RELU], (3,)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": []}, "at least one"),
        ({"devices": ["reference", "reference"]}, "different names"),
        ({"devices": ["reference", None]}, "expected one of reference; got None"),
        ({"devices": "none"}, "expected one of reference; got 'none'"),
        ({"preference": "quick"}, "preference: expected one of"),
        ({"preference": 7}, "preference: expected one of"),
        ({"priority": "urgent"}, "priority: expected one of"),
        ({"deadline": -1}, "compile"),
        ({"deadline": 1.5}, "compile"),
    ],
)
async def test_compile(runtime: aionn.Runtime, options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await runtime.compile(chain([OperationType.RELU]), **options)


@pytest.mark.parametrize("model", [None, 5, b"model", ["a"]])
async def test_what_is_no_model(runtime: aionn.Runtime, model: Any) -> None:
    with pytest.raises(aionn.InvalidArgument, match="expected a path or a Model"):
        await runtime.compile(model)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (X, "expected a list with 1 arrays"),
        ([], "expected 1 arrays, got 0"),
        ([X, X], "expected 1 arrays, got 2"),
        ([X.astype(np.float64)], "element type float32, got float64"),
        ([np.ones((3, 1), np.float32)], r"expected shape \[3\]"),
        ([np.ones(4, np.float32)], r"expected shape \[3\]"),
        ([np.ones(0, np.float32)], r"expected"),
        ([object()], "expected an array or a buffer, got a object"),
        (["text"], "expected an array or a buffer, got a str"),
    ],
)
async def test_inputs(net: aionn.Compilation, inputs: Any, words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.execute(inputs)
    with pytest.raises(aionn.InvalidArgument, match=words):
        net.execute_fenced(inputs)
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline": -1}, "execute"),
        ({"deadline": "soon"}, "execute"),
        ({"priority": "urgent"}, "priority"),
        ({"loop_timeout": -0.5}, "loop_timeout"),
        ({"loop_timeout": float("nan")}, "loop_timeout"),
    ],
)
async def test_options_of_an_execution(net: aionn.Compilation, options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.execute([X], **options)
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


async def test_fences(net: aionn.Compilation) -> None:
    failed = SyncFence("failed")
    failed.fail(RuntimeError("planted"))
    with pytest.raises(aionn.InvalidArgument, match="fence 1: has failed already"):
        net.execute_fenced([X], wait_for=[SyncFence("open"), failed])
    with pytest.raises(aionn.InvalidArgument, match="fence 0: expected a SyncFence, got a int"):
        net.execute_fenced([X], wait_for=[3])  # type: ignore[list-item]
    with pytest.raises(aionn.InvalidArgument, match="duration"):
        net.execute_fenced([X], duration=-1.0)


async def test_input_that_must_not_be_left_out(net: aionn.Compilation) -> None:
    with pytest.raises(aionn.InvalidArgument):
        await net.execute([None])


async def test_empty_value_is_no_input(runtime: aionn.Runtime) -> None:
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    model = aionn.Model(Subgraph(operands, (Operation(OperationType.RELU, (0,), (1,)),), (0,), (1,)))
    net = await runtime.compile(model)
    with pytest.raises(aionn.InvalidArgument, match="at least one element"):
        await net.execute([np.ones(0, np.float32)])
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


async def test_burst_is_entered_once_and_used_inside(net: aionn.Compilation) -> None:
    burst = net.burst()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        await burst.execute([X])
    async with burst:
        await burst.execute([X])
        with pytest.raises(aionn.InvalidArgument, match="entered once"):
            await burst.__aenter__()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        await burst.execute([X])


async def test_what_belongs_to_a_closed_runtime_refuses() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
    await runtime.aclose()
    for call in (lambda: net.execute([X]), lambda: runtime.compile(chain([OperationType.RELU]))):
        with pytest.raises(aionn.InvalidArgument, match=r"closed|not open"):
            await call()
    for refused in (lambda: net.execute_fenced([X]), net.burst, net.reusable):
        with pytest.raises(aionn.InvalidArgument, match="closed"):
            refused()
    await net.aclose()


async def test_cancelled_caller_leaves_nothing(net: aionn.Compilation) -> None:
    for _ in range(20):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await net.execute([X])
        assert scope.cancelled_caught
    assert (await net.execute([X])).outputs[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"isolation": "thread"}, "isolation"),
        ({"drivers": ["reference", "reference"]}, "different names"),
        ({"drivers": {"": "reference"}}, "not empty"),
        ({"enabled_devices": "("}, "enabled_devices"),
        ({"partition": "some"}, "partition"),
        ({"execution_path": "fast"}, "execution_path"),
    ],
)
def test_open(options: dict[str, Any], words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        aionn.open(**options)
