"""Values between two devices whose size only an execution knows, and outputs that are too small for them.

PAD twice on one device, ADD of both results on another: the first result is the caller's and read by the other device, the second
is read by the other device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import aionn
from aionn.hal import FeatureLevel, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from tests.support.split import PickyDevice

Op, T = OperationType, OperandType
FLOAT = T.TENSOR_FLOAT32
X = np.array([3, 5], np.float32)
PADDINGS = np.array([[1, 1]], np.int32)
PADDED = np.array([0, 3, 5, 0], np.float32)
KNOWN, UNKNOWN, RANK_KNOWN = (4,), (), (0,)

Shape = tuple[int, ...]


class Declared(NamedTuple):
    """What the model says of its values: of the caller's result that both devices meet, of the temporary, of the last result."""

    shared: Shape
    temporary: Shape
    last: Shape


def padded_twice(declared: Declared) -> Model:
    graph = GraphBuilder()
    x, paddings = graph.input(FLOAT, (2,)), graph.input(T.TENSOR_INT32, (1, 2))
    shared = graph.result(Op.PAD, [x, paddings], x, declared.shared)
    temporary = graph.result(Op.PAD, [x, paddings], x, declared.temporary)
    return graph.build([shared, graph.result(Op.ADD, [shared, temporary, 0], x, declared.last)])


def devices(level: FeatureLevel = FeatureLevel.LEVEL_7) -> list[PickyDevice]:
    return [PickyDevice("pad", {Op.PAD}, level=level), PickyDevice("add", {Op.ADD}, level=level)]


async def compiled(runtime: aionn.Runtime, declared: Declared) -> aionn.Compilation:
    net = await runtime.compile(padded_twice(declared))
    assert net.steps == (("pad", (0, 1)), ("add", (2,)))
    (temporary,) = net._plan.temporaries.values()
    assert temporary.dimensions == declared.temporary
    return net


def check(outputs: tuple[Any, ...]) -> None:
    for got, expected in zip(outputs, (PADDED, 2 * PADDED), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", [FeatureLevel.LEVEL_7, FeatureLevel.LEVEL_3])
@pytest.mark.parametrize(
    "declared",
    [
        Declared(UNKNOWN, KNOWN, UNKNOWN),
        Declared(UNKNOWN, UNKNOWN, UNKNOWN),
        Declared(RANK_KNOWN, RANK_KNOWN, RANK_KNOWN),
        Declared(KNOWN, UNKNOWN, KNOWN),
        Declared(KNOWN, KNOWN, KNOWN),
    ],
    ids=["outputs unknown", "all unknown", "all of known rank", "temporary unknown", "all known"],
)
async def test_values_of_unknown_size_between_devices(declared: Declared, level: FeatureLevel) -> None:
    async with aionn.open(devices=devices(level), isolation="in_process") as runtime:
        net = await compiled(runtime, declared)
        for _ in range(2):
            check((await net.execute([X, PADDINGS])).outputs)
        wide = np.array([[1, 4000]], np.int32)
        if KNOWN not in declared:
            (first, last) = (await net.execute([X, wide])).outputs
            assert first.shape == last.shape == (4003,) and last[2] == 10


@pytest.mark.parametrize(
    "declared", [Declared(KNOWN, RANK_KNOWN, KNOWN), Declared(RANK_KNOWN, KNOWN, RANK_KNOWN)]
)
async def test_devices_below_level_3_are_not_given_values_of_unknown_size(declared: Declared) -> None:
    """They cannot report a size: with leave to fall back, the reference device takes the whole model."""
    old = devices(FeatureLevel.LEVEL_2)
    async with aionn.open(devices=old, drivers=["reference"], isolation="in_process") as runtime:
        with pytest.raises(aionn.GeneralFailure, match="pad is below level 3"):
            await runtime.compile(padded_twice(declared))
        net = await runtime.compile(padded_twice(declared), allow_fallback=True)
        assert net.devices == ("reference",)
        check((await net.execute([X, PADDINGS])).outputs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic temporary", "static temporary"])
@pytest.mark.parametrize("small", [(0, 1), (0,), (1,)], ids=["both", "first", "last"])
@pytest.mark.parametrize("reference", [True, False], ids=["may fall back", "may not"])
async def test_output_that_is_too_small_is_the_callers_to_hear_of(
    small: tuple[int, ...], is_dynamic: bool, reference: bool
) -> None:
    """In memory of the caller's own nothing can grow; it never falls back, and the shapes are told."""
    declared = Declared(UNKNOWN, UNKNOWN if is_dynamic else KNOWN, UNKNOWN)
    drivers = ["reference"] if reference else []
    async with aionn.open(devices=devices(), drivers=drivers, isolation="in_process") as runtime:
        net = await runtime.compile(padded_twice(declared), allow_fallback=reference)
        memories = [aionn.SharedMemory.create((3 if i in small else 4,), np.float32) for i in range(2)]
        try:
            with pytest.raises(aionn.OutputInsufficientSize, match="does not fit its memory") as e:
                await net.execute([X, PADDINGS], outputs=memories)
            assert (4,) in [tuple(dimensions) for dimensions, _ in e.value.output_shapes]
        finally:
            for memory in memories:
                memory.close()
        room = [aionn.SharedMemory.create((4,), np.float32) for _ in range(2)]
        try:
            check((await net.execute([X, PADDINGS], outputs=room)).outputs)
        finally:
            for memory in room:
                memory.close()
