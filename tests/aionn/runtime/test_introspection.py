"""What a model is and who supports what of it, told without compiling anything."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import FeatureLevel, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.introspection import summarize_model
from aionn.testing.models import chain

Command = Callable[..., "subprocess.CompletedProcess[str]"]


class Level1(ReferenceDevice):
    """A device of the first level, that notes what it is shown."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.info = msgspec.structs.replace(self.info, feature_level=FeatureLevel.LEVEL_1)
        self.shown: list[list[int]] = []

    def supports(self, model: Model) -> Sequence[bool]:
        self.shown.append([operation.type for operation in model.main.operations])
        return super().supports(model)


class Mute(ReferenceDevice):
    """A device that does not answer."""

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        raise aionn.GeneralFailure("planted")


class Short(ReferenceDevice):
    """A device that forgets an answer."""

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        return (await super().supported_operations(model))[:-1]


async def test_each_device_answers_for_the_whole_model_in_its_order() -> None:
    model = chain([OperationType.RELU, OperationType.ABS, OperationType.RELU], (3,))  # ABS came with level 3
    old = Level1("old")
    async with aionn.open(devices=[old, Mute("mute"), Short("short"), ReferenceDevice("new")]) as runtime:
        answers = {a.device: a for a in await runtime.supported_operations(model)}
        assert list(answers) == ["old", "mute", "short", "new"]
        assert answers["old"].supported == (True, False, True)
        assert old.shown == [[OperationType.RELU, OperationType.RELU]]
        assert answers["mute"].supported == (False, False, False) and "planted" in answers["mute"].error
        assert "3 operations, but 2 answers" in answers["short"].error
        assert answers["new"].supported == (True, True, True) and not answers["new"].error
        (only,) = await runtime.supported_operations(model, devices="new")
        assert only == answers["new"]


async def test_misuse_is_refused(tmp_path: Path) -> None:
    model = chain([OperationType.RELU], (3,))
    runtime = aionn.open(devices=[ReferenceDevice("a")])
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        await runtime.supported_operations(model)
    async with runtime:
        for devices, words in (
            (["a", "a"], "different names"),
            ([], "at least one"),
            ("b", "expected one of a"),
        ):
            with pytest.raises(aionn.InvalidArgument, match=words):
                await runtime.supported_operations(model, devices=devices)
        with pytest.raises(aionn.InvalidArgument, match="cannot be read"):
            await runtime.supported_operations(tmp_path / "absent.tflite")
        broken = msgspec.structs.replace(
            model, main=msgspec.structs.replace(model.main, output_indexes=(99,))
        )
        with pytest.raises(aionn.InvalidModel):
            await runtime.supported_operations(broken)


def test_summary_counts_what_is_there() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    weight = graph.constant(np.ones((2, 3), np.float32))
    total = graph.result(OperationType.ADD, [x, weight, 0], x)
    summary = summarize_model(graph.build([graph.result(OperationType.ABS, [total], x)]))
    assert (summary.feature_level, summary.subgraphs, summary.operands) == (3, 1, 5)
    assert summary.operands_by_lifetime == {
        "CONSTANT_COPY": 2,
        "SUBGRAPH_INPUT": 1,
        "SUBGRAPH_OUTPUT": 1,
        "TEMPORARY_VARIABLE": 1,
    }
    assert summary.operands_by_type == {"INT32": 1, "TENSOR_FLOAT32": 4}
    assert (summary.constant_values, summary.constant_bytes) == (7, 28)
    assert (summary.temporary_bytes, summary.unknown_sizes) == (24, 0)
    assert [(o.type, o.feature_level) for o in summary.operations] == [("ADD", 1), ("ABS", 3)]
    assert summary.operations[0].outputs == ("TENSOR_FLOAT32 2x3",)


def test_summary_shows_scalars_and_small_whole_numbers_with_their_values() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2, 3))
    weight = graph.constant(np.ones((2, 3), np.float32))
    total = graph.result(OperationType.ADD, [x, weight, 1], x)
    shape = graph.constant(np.array([3, 2], np.int32))
    model = graph.build([graph.result(OperationType.RESHAPE, [total, shape], x, (3, 2))])
    add, reshape = summarize_model(model).operations
    assert add.inputs == ("TENSOR_FLOAT32 2x3", "TENSOR_FLOAT32 2x3", "INT32 scalar = 1")
    assert reshape.inputs == ("TENSOR_FLOAT32 2x3", "TENSOR_INT32 2 = [3, 2]")


def test_command_writes_the_graph_and_the_page(digits: Path, tmp_path: Path, aionn_here: Command) -> None:
    dot, html = tmp_path / "digits.dot", tmp_path / "digits.html"
    finished = aionn_here("inspect", digits, "--device", "reference", "--dot", dot, "--html", html, "--json")
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    operations = sum(told["operations"].values())
    assert told["devices"] == {
        "reference": {"supported": operations, "of": operations, "operations": [True] * operations}
    } | {name: answer for name, answer in told["devices"].items() if "error" in answer}
    assert told["operands"] == sum(told["operands_by_lifetime"].values())
    assert [o["type"] for o in told["operation_list"]].count("CONV_2D") == told["operations"]["CONV_2D"]
    assert dot.read_text().count("shape=box") == operations
    assert html.read_text().count("<rect") == operations and "reference" in html.read_text()


def test_command_shows_every_operation_and_device(digits: Path, aionn_here: Command) -> None:
    finished = aionn_here("inspect", digits, "--operations", "--device", "reference")
    assert finished.returncode == 0, finished.stderr
    assert "every operation" in finished.stdout and "TEMPORARY_VARIABLE" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "absent"), "expected one of"),
        (("--dot", "/no/such/folder/x.dot"), "expected a file that can be written"),
        (("--html", "/no/such/folder/x.html"), "expected a file that can be written"),
    ],
)
def test_command_tells_mistakes_in_a_sentence(
    digits: Path, arguments: tuple[str, ...], words: str, aionn_here: Command
) -> None:
    finished = aionn_here("inspect", digits, *arguments)
    assert finished.returncode == 2 and words in finished.stderr and "Traceback" not in finished.stderr


def test_command_lists_scalars_and_prints_contracts(digits: Path, aionn_here: Command) -> None:
    finished = aionn_here("inspect", digits, "--device", "reference", "--operations", "--contracts")
    assert finished.returncode == 0, finished.stderr
    assert "INT32 scalar = " in finished.stdout
    assert "\nCONV_2D, operation 3\n    out[b, y, x, o] = activation(" in finished.stdout
    assert "LSTM, operation" not in finished.stdout
