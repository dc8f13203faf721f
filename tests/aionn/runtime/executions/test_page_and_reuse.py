"""The page of a compilation, and executions that keep their memory."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.testing.models import chain
from tests.support.split import SplitDevice

Values = npt.NDArray[np.float32]
SVG = "{http://www.w3.org/2000/svg}"


async def test_page_is_self_contained_and_coloured_by_device(example_data: Path) -> None:
    devices = [SplitDevice(index, 1) for index in range(3)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(example_data / "shapes_int8.tflite")
        page = net.page(title="<shapes> & more")
    assert "<h1>&lt;shapes&gt; &amp; more</h1>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    drawing = page[page.index("<svg") : page.index("</svg>") + 6]
    svg = ElementTree.fromstring(drawing)
    boxes = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == len(net.placement)
    assert len({box.get("fill") for box in boxes}) == len(net.devices) > 1
    corners = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(corners) == len(boxes), "no box hides another"
    assert net.page() == net.page()


async def test_names_cannot_break_out_of_the_page() -> None:
    hostile = ReferenceDevice('<script>alert("x")</script>')
    async with aionn.open(devices=[hostile]) as runtime:
        page = (await runtime.compile(chain([OperationType.RELU]))).page()
    assert "<script>" not in page


@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_reusable_execution_computes_what_its_inputs_hold(isolation: str) -> None:
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        again = net.reusable(measure=True)
        for value in (-1.0, 2.0, 3.0):
            again.inputs[0][:] = value
            result = await again.execute()
            assert result.outputs[0].tolist() == [max(value, 0.0)] * 3
            assert result.timing.time_on_device_ns is not None
        assert again.outputs[0] is result.outputs[0]
        assert result.valid_until == "the next computation"
        assert not again.outputs[0].flags.writeable
        own = await net.execute([np.ones(3, np.float32)])
        assert own.outputs[0].tolist() == [1.0] * 3 and not own.valid_until


async def test_second_computation_at_once_is_refused(digits: Path) -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        again = (await runtime.compile(digits)).reusable()
        refused = []

        async def compute() -> None:
            try:
                await again.execute()
            except aionn.InvalidArgument as e:
                refused.append(str(e))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compute)
            tasks.start_soon(compute)
        assert refused == ["reusable execution: a computation is under way"]
        await again.execute()


async def test_failed_computation_may_be_repeated(digits: Path) -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(digits)
        again = net.reusable()
        with pytest.raises(aionn.MissedDeadline):
            await again.execute(deadline=1)
        await anyio.sleep(0.01)
        await again.execute()
        await net.aclose()
        with pytest.raises(aionn.InvalidArgument, match="closed"):
            await again.execute()
        with pytest.raises(aionn.InvalidArgument, match="closed"):
            net.reusable()


async def test_line_that_passes_other_operations_keeps_beside_them() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2,))
    first = graph.result(OperationType.ABS, [x], x)
    second = graph.result(OperationType.RELU, [first], x)
    model = graph.build([graph.result(OperationType.ADD, [first, second, 0], x)])
    async with aionn.open(devices=[ReferenceDevice("a")]) as runtime:
        page = (await runtime.compile(model)).page()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    space = "{http://www.w3.org/2000/svg}"
    edge = max(int(r.get("x", 0)) + int(r.get("width", 0)) for r in svg.iter(f"{space}rect"))
    starts = [int(p.get("d", "")[1:].split()[0]) for p in svg.iter(f"{space}path")]
    assert sorted(starts)[-1] == edge and starts.count(edge) == 1 and len(starts) == 3
    assert int(svg.get("width", 0)) > edge
    assert "3 operations in 1 step<" in page


def drawn(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def boxes_of(svg: ElementTree.Element) -> list[tuple[int, int, int, int]]:
    """Left, upper, right and lower edge of each operation's box."""
    found = []
    for box in svg.iter(f"{SVG}rect"):
        x, y, width, height = (int(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    return found


async def test_lines_go_from_what_writes_to_what_reads_and_no_box_meets_another() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2,))
    first = graph.result(OperationType.ABS, [x], x)
    second = graph.result(OperationType.RELU, [first], x)
    beside = graph.result(OperationType.TANH, [first], x)
    both = graph.result(OperationType.ADD, [second, beside, 0], x)
    model = graph.build([graph.result(OperationType.ADD, [first, both, 0], x)])
    async with aionn.open(devices=[ReferenceDevice("a")]) as runtime:
        svg = drawn((await runtime.compile(model)).page())
    boxes = boxes_of(svg)
    assert len(boxes) == 5
    for index, (left, upper, right, lower) in enumerate(boxes):
        for other_left, other_upper, other_right, other_lower in boxes[:index]:
            assert left > other_right or other_left > right or upper > other_lower or other_upper > lower
    middles = [(left + right) // 2 for left, _, right, _ in boxes]
    ends = set()
    for path in svg.iter(f"{SVG}path"):
        numbers = [int(number) for number in path.get("d", "").removeprefix("M").replace("C", " ").split()]
        ends.add((*numbers[:2], *numbers[-2:]))
        assert numbers[1] <= min(numbers[3::2]) and max(numbers[1::2]) == numbers[-1], "it does not turn back"
    straight = {
        (middles[writer], boxes[writer][3], middles[reader], boxes[reader][1])
        for writer, reader in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
    }
    # The first is read by the last as well, past what stands between them: from side to side.
    (_, upper0, right, lower0), (_, upper4, _, lower4) = boxes[0], boxes[4]
    assert ends == {*straight, (right, (upper0 + lower0) // 2, right, (upper4 + lower4) // 2)}


async def test_long_descriptions_are_cut_to_the_width_of_a_box() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (8,))
    parts = [graph.variable(OperandType.TENSOR_FLOAT32, (2,)) for _ in range(4)]
    graph.operation(OperationType.SPLIT, [x, 0, 4], parts)
    async with aionn.open(devices=[ReferenceDevice("a")]) as runtime:
        page = (await runtime.compile(graph.build(parts))).page()
    texts = [text.text for text in drawn(page).iter(f"{SVG}text")]
    assert texts == ["0: SPLIT", "2 FLOAT32, 2 FLOAT32, 2 FLOAT32, 2 …"]


async def test_description_that_just_fits_a_box_is_whole() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (200, 10, 10))
    parts = [graph.variable(OperandType.TENSOR_FLOAT32, (100, 10, 10)) for _ in range(2)]
    graph.operation(OperationType.SPLIT, [x, 0, 2], parts)
    async with aionn.open(devices=[ReferenceDevice("a")]) as runtime:
        page = (await runtime.compile(graph.build(parts))).page()
    assert [text.text for text in drawn(page).iter(f"{SVG}text")][1] == "100x10x10 FLOAT32, 100x10x10 FLOAT32"
