"""An odd value for an input is either computed correctly or refused with the input, what it takes, and what was given."""

from __future__ import annotations

import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.arguments import TensorSpec, check_inputs
from aionn.runtime.memory.declared import Declared, number_of
from aionn.testing import SimulatedDevice, models, run

X = np.array([1.0, -2.0, 3.0, 4.0], np.float32)
LENGTH = 4
SPEC = TensorSpec("x", OperandType.TENSOR_FLOAT32, (4,))


def read_only() -> Any:
    x = X.copy()
    x.flags.writeable = False
    return x


RIGHT: dict[str, Callable[[], Any]] = {
    "big-endian": lambda: X.astype(">f4"),
    "negative strides": lambda: X[::-1].copy()[::-1],
    "strided": lambda: np.repeat(X, 2)[::2],
    "read-only": read_only,
    "masked array without masked elements": lambda: np.ma.masked_array(X),
    "buffer": lambda: array.array("f", X),
    "record array's field": lambda: np.array([(x, 0) for x in X], "f4,i4")["f0"],
}

WRONG: dict[str, Callable[[], Any]] = {
    "number": lambda: 1.0,
    "numpy's number": lambda: np.float32(1),
    "rank 0": lambda: np.array(1, np.float32),
    "list of arrays of rank 0": lambda: [np.array(x) for x in X],
    "ragged list": lambda: [[1.0], [2.0, 3.0]],
    "object array": lambda: np.array([1, None, "a", []], dtype=object),
    "string": lambda: "1234",
    "bytes": lambda: b"1234",
    "array of strings": lambda: np.array(list("1234")),
    "structured": lambda: np.zeros(4, "f4,i4"),
    "complex": lambda: X.astype(np.complex64),
    "dates": lambda: np.zeros(4, "M8[s]"),
    "generator": lambda: (x for x in X),
    "set": lambda: {1.0, 2.0},
    "dictionary": lambda: {"x": X},
    "no elements": lambda: np.zeros(0, np.float32),
    "masked elements": lambda: np.ma.masked_array(X, [True, False, False, False]),
    "big-endian of another type": lambda: X.astype(">f8"),
}


async def execute(net: aionn.Compilation, value: Any) -> Any:
    return (await net.execute([value])).outputs[0]


async def execute_fenced(net: aionn.Compilation, value: Any) -> Any:
    return (await net.execute_fenced([value])).outputs[0]


async def in_a_burst(net: aionn.Compilation, value: Any) -> Any:
    async with net.burst() as burst:
        return (await burst.execute([value])).outputs[0]


async def in_a_stream(net: aionn.Compilation, value: Any) -> Any:
    async def one() -> AsyncIterator[Any]:
        yield value

    async with net.burst() as burst:
        async for result in burst.stream(one()):
            return result.outputs[0].copy()
    raise AssertionError("the stream gave nothing")


WAYS = {"execute": execute, "fenced": execute_fenced, "burst": in_a_burst, "stream": in_a_stream}


def tried(way: Callable[..., Any], value: Any) -> Any:
    async def main() -> Any:
        device = SimulatedDevice("npu", run_time_s=0.001, results="computed")
        async with aionn.open(devices=[device]) as runtime:
            return await way(await runtime.compile(models.identity((LENGTH,))), value)

    return run(main)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", RIGHT)
def test_unusual_array_gives_the_right_answer(way: str, value: str) -> None:
    assert tried(WAYS[way], RIGHT[value]()).tolist() == X.tolist()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", WRONG)
def test_wrong_value_is_refused_with_what_the_input_takes(way: str, value: str) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"input 0 \(.*: expected .*, got .*float32 of shape \[4\]"
    ):
        tried(WAYS[way], WRONG[value]())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", WRONG)
def test_blocking_call_refuses_it_likewise(value: str) -> None:
    with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
        net = runtime.compile(models.identity((LENGTH,)))
        with pytest.raises(aionn.InvalidArgument, match=r"input 0 \(.*: expected .*float32 of shape \[4\]"):
            net.execute([WRONG[value]()])
        with net.burst() as burst:
            with pytest.raises(aionn.InvalidArgument, match=r"input 0 \("):
                burst.execute([WRONG[value]()])
            with pytest.raises(aionn.InvalidArgument, match=r"input 0 \("):
                next(iter(burst.stream([WRONG[value]()])))


@pytest.mark.parametrize("inputs", [(x for x in [X]), {0: X}, {1.0}, "x", X])
def test_inputs_that_are_not_a_list_are_refused(inputs: Any) -> None:
    with pytest.raises(aionn.InvalidArgument, match="expected a list with 1 array"):
        check_inputs([SPEC], inputs)


SCALARS = {
    "bool": OperandType.BOOL,
    "int32": OperandType.INT32,
    "uint32": OperandType.UINT32,
    "float16": OperandType.FLOAT16,
    "float32": OperandType.FLOAT32,
}


def specs_of_a_number(dtype: str) -> list[TensorSpec]:
    """A scalar of the HAL, and an input that a file declares to have rank 0."""
    declared = TensorSpec("count", OperandType.TENSOR_FLOAT32, (1,), declared=Declared(dtype, ()))
    return [TensorSpec("count", SCALARS[dtype], ()), declared]


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("bool", 2),
        ("int32", 2**40),
        ("int32", -(2**40)),
        ("int32", 1.5),
        ("int32", float("nan")),
        ("int32", float("inf")),
        ("uint32", -1),
        ("float16", 1e5),
        ("float32", 1e300),
        ("float32", 10**400),
        pytest.param("int32", 10**5000, id="int32-5001 digits"),
    ],
)
def test_number_that_a_scalar_cannot_hold_is_refused(dtype: str, number: float) -> None:
    for spec in specs_of_a_number(dtype):
        with pytest.raises(
            aionn.InvalidArgument, match=rf"input 0 \(count\): expected a number of type {dtype}"
        ):
            check_inputs([spec], [number])


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("bool", 1),
        ("bool", False),
        ("int32", -5),
        ("uint32", 2**32 - 1),
        ("float16", 7),
        ("float32", float("-inf")),
    ],
)
def test_number_that_a_scalar_can_hold_is_taken(dtype: str, number: float) -> None:
    (array,) = check_inputs([specs_of_a_number(dtype)[0]], [number])
    assert array is not None and (array.dtype.name, array.shape, array.item()) == (dtype, (), number)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
def test_number_for_an_input_that_a_file_declares_to_have_rank_0_is_taken(dtype: str) -> None:
    assert number_of(5, dtype, "x").tolist() == 5


@pytest.mark.parametrize("value", [[[1.0], [2.0, 3.0]], ["a"] * 4, {"x": X}, X.astype(complex), [None] * 4])
def test_writer_of_values_refuses_what_is_not_real_numbers(value: Any) -> None:
    with pytest.raises(aionn.InvalidArgument, match="x: expected 4 real numbers, got a"):
        aionn.value_writer(SPEC)(value, X.copy())


MASKED = np.ma.masked_array(np.zeros((2, 2), np.uint8), [[True, False], [False, False]])


@pytest.mark.parametrize(
    "take",
    [
        lambda: aionn.value_writer(SPEC)(MASKED, X.copy()),
        lambda: aionn.SharedMemory.from_array(MASKED),
        lambda: aionn.ImageMemory.from_array(MASKED),
    ],
    ids=["writer of values", "shared memory", "image"],
)
def test_masked_elements_are_refused_wherever_an_array_is_copied(take: Callable[[], object]) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match="expected an array without masked elements, got masked ones"
    ):
        take()


async def test_outputs_that_overlap_are_refused_and_those_that_touch_are_right() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (LENGTH,))
    outputs = [graph.result(kind, [x], x) for kind in (OperationType.RELU, OperationType.ABS)]
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(graph.build(outputs))
        room = np.zeros(2 * LENGTH, np.float32)
        with pytest.raises(
            aionn.InvalidArgument, match="output 1: expected an array of its own, got one that overlaps"
        ):
            await net.execute([X], outputs=[room[:LENGTH], room[LENGTH - 1 : -1]])
        for targets in ([room[:LENGTH], room[LENGTH:]], [room[::2], room[1::2]]):
            await net.execute([X], outputs=targets)
            np.testing.assert_array_equal(targets, [np.maximum(X, 0), np.abs(X)])
