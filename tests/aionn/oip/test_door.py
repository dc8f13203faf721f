"""Admission, conversion and drain of a door, without a transport."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.oip.door import Door, DoorState
from aionn.oip.models import (
    ENVELOPE_BYTES,
    MESSAGE_BYTES_MAX,
    UNKNOWN_BYTES_MAX,
    ServedModel,
    find_models,
    message_bytes_max,
    served,
)
from aionn.oip.refusals import NotServed, Unavailable
from aionn.oip.requests import WantedOutput
from aionn.testing.clock import run
from tests.aionn.oip.conftest import HeldNet, request_for, served_model

NOW = 1_000_000_000


def door_of(net: HeldNet, executions_max: int = 2) -> Door:
    return Door({"double": served_model(net)}, executions_max=executions_max)


async def test_request_is_executed_with_its_terms() -> None:
    net = HeldNet()
    request = request_for(
        np.arange(4, dtype=np.float32).reshape(1, 4), id="r", parameters={"timeout": 9, "priority": 1}
    )
    answer = await door_of(net).infer(request, NOW, None)
    ((description, value, _),) = answer.outputs
    assert (answer.model, answer.id, description.name) == ("double", "r", "y")
    assert value.tolist() == [[0, 2, 4, 6]]
    assert net.asked == [(NOW + 9_000, aionn.Priority.HIGH)]


def test_places_are_bounded_and_given_back() -> None:
    door = door_of(HeldNet())
    first, _ = door.enter(), door.enter()
    with pytest.raises(aionn.ResourceExhausted, match="2 requests are under way") as raised:
        door.enter()
    assert raised.value.transient
    first.leave()
    first.leave()
    with door.enter():
        assert door.under_way == 2
    assert door.under_way == 1


def test_drain_ends_with_the_last_answer_and_refuses_new_requests() -> None:
    async def body() -> None:
        door = door_of(HeldNet())
        place = door.enter()
        ended: list[bool] = []

        async def drain() -> None:
            ended.append(await door.drain(8.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            await anyio.sleep(3)
            assert (door.state, door.is_ready, ended) == (DoorState.DRAINING, False, [])
            assert not door.is_model_ready("double", "")
            with pytest.raises(Unavailable):
                door.enter()
            place.leave()
        assert ended == [True]

    run(body)


def test_drain_ends_at_its_limit() -> None:
    async def body() -> None:
        door = door_of(HeldNet())
        door.enter()
        began_s = anyio.current_time()
        assert not await door.drain(8.0)
        assert anyio.current_time() - began_s == pytest.approx(8.0)

    run(body)


async def test_large_work_is_done_in_another_thread() -> None:
    door = door_of(HeldNet())
    here = threading.get_ident()
    assert await door.convert(32 << 10, threading.get_ident) == here
    assert await door.convert((32 << 10) + 1, threading.get_ident) != here


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "z"}, "input 'z': expected one of 'x'"),
        ({"values": np.ones((1, 4), np.int32)}, "expected the datatype FP32, got 'INT32'"),
        ({"values": np.ones((4,), np.float32)}, r"expected the shape \[1, 4\], got \[4\]"),
        ({"values": np.ones((1, 5), np.float32)}, r"expected the shape \[1, 4\], got \[1, 5\]"),
        ({"parameters": {"priority": -1}}, "priority"),
    ],
)
async def test_request_that_does_not_fit_is_refused_before_it_is_executed(
    change: dict[str, object], text: str
) -> None:
    net = HeldNet()
    with pytest.raises(aionn.InvalidArgument, match=text):
        await door_of(net).infer(request_for(**change), NOW, None)  # type: ignore[arg-type]
    assert net.asked == []


async def test_other_model_or_version_is_not_served() -> None:
    door = door_of(HeldNet())
    for request in (request_for(model="other"), request_for(version="2")):
        with pytest.raises(NotServed):
            await door.infer(request, NOW, None)
    assert door.is_model_ready("double", "1")
    assert not door.is_model_ready("double", "2")
    assert not door.is_model_ready("other", "")
    assert (await door.infer(request_for(version="1"), NOW, None)).model == "double"


def test_input_is_given_once_and_outputs_by_name() -> None:
    model = served_model(HeldNet())
    tensor = request_for().inputs[0]
    with pytest.raises(aionn.InvalidArgument, match="twice"):
        model.check_inputs([tensor, tensor])
    assert model.wanted([WantedOutput("y", True)], False) == [(0, True)]
    assert model.wanted([], True) == [(0, True)]
    with pytest.raises(aionn.InvalidArgument, match="output 'n': expected one of 'y'"):
        model.wanted([WantedOutput("n")], False)


def test_open_extents_take_any_size_and_names_are_made() -> None:
    class Open(HeldNet):
        inputs = (
            aionn.TensorSpec("", HeldNet.inputs[0].type, (0, 2)),
            aionn.TensorSpec("", HeldNet.inputs[0].type, (1,)),
        )

    model = served_model(Open())
    assert [(one.name, one.shape) for one in model.description.inputs] == [
        ("input_0", (-1, 2)),
        ("input_1", (1,)),
    ]
    for shape, fits in (
        ((7, 2), True),
        ((0, 2), False),
        ((10**30, 2), False),
        ((-1, 2), False),
        ((2,), False),
    ):
        tensor = request_for(np.ones((1, 1), np.float32), name="input_0").inputs[0]
        given = type(tensor)(tensor.name, tensor.datatype, shape, tensor.load)
        if fits:
            assert [index for index, *_ in model.check_inputs([given])] == [0]
        else:
            with pytest.raises(aionn.InvalidArgument, match="expected the shape"):
                model.check_inputs([given])


async def test_models_beyond_the_bursts_of_a_client_are_executed_without_one() -> None:
    class Net(HeldNet):
        """A compilation whose second burst is rejected."""

        bursts = 0

        async def __aenter__(self) -> Net:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        def burst(self, *, slots: int) -> Net:
            assert slots == 64
            Net.bursts += 1
            if Net.bursts == 2:
                raise aionn.ResourceExhausted("quota bursts: 1")
            return self

    class Runtime:
        async def compile(self, path: str) -> Net:
            return Net()

    runtime: Any = Runtime()
    async with served(runtime, {"a": "a.tflite", "b": "b.ONNX"}) as found:
        door = Door(found)
        for name in ("a", "b"):
            answer = await door.infer(request_for(model=name), NOW, None)
            assert answer.outputs[0][1].tolist() == [[2, 2, 2, 2]]
        assert [one.description.platform for one in found.values()] == ["aionn_tflite", "aionn_onnx"]


def test_largest_message_follows_from_the_models() -> None:
    def with_shape(*shape: int) -> ServedModel:
        class Shaped(HeldNet):
            inputs = (aionn.TensorSpec("x", HeldNet.inputs[0].type, shape),)

        return served_model(Shaped())

    small = with_shape(1, 4)
    assert message_bytes_max([]) == ENVELOPE_BYTES
    assert message_bytes_max([small]) == ENVELOPE_BYTES + 4 * 32
    assert message_bytes_max([small, with_shape(0)]) == UNKNOWN_BYTES_MAX
    assert message_bytes_max([with_shape(1 << 30)]) == MESSAGE_BYTES_MAX


def test_models_are_named_by_the_command_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a.tflite", "b.ONNX", "readme.txt", "k=v.onnx"):
        (folder / name).touch()
    assert find_models([f"cat={folder / 'a.tflite'}"]) == {"cat": folder / "a.tflite"}
    assert find_models([str(folder / "a.tflite")]) == {"a": folder / "a.tflite"}
    with pytest.raises(aionn.InvalidArgument, match="expected a name"):
        find_models([str(folder)])
    (folder / "k=v.onnx").unlink()
    assert list(find_models([str(folder)])) == ["a", "b"]


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (["{}/none.tflite"], "no such file"),
        (["x={}/none.tflite"], "no such file"),
        (["x={}"], "is a folder"),
        (["{}/empty"], "no file of the folder"),
        (["{}/a.tflite", "a={}/b.tflite"], "two models have the name 'a'"),
        (["a/b={}/a.tflite"], "expected a name"),
        (["={}/a.tflite", "a={}/b.tflite"], "two models have the name 'a'"),
        (["..={}/a.tflite"], "expected a name"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    tmp_path_factory: pytest.TempPathFactory, places: list[str], text: str
) -> None:
    folder = tmp_path_factory.mktemp("models")
    (folder / "empty").mkdir()
    (folder / "a.tflite").touch()
    (folder / "b.tflite").touch()
    with pytest.raises(aionn.InvalidArgument, match=text):
        find_models([place.format(folder) for place in places])
