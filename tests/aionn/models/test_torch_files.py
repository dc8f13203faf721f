"""Files that PyTorch's exporters wrote give ONNX Runtime's results: on ort-cpu, on the reference devices, and split between three.

The networks are those that people export, cut small, with random weights (``torch_files/networks.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Device, Model
from aionn.models.onnx import load_onnx
from aionn.models.onnx.schema import read_model
from tests.support.torch_files import CASES, FOLDER, check, drawn, options_of

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

import onnxruntime as ort

from aionn.drivers.onnxruntime.driver import OrtDevice

Array = npt.NDArray[Any]

FILES_BYTES_MAX = 2_500_000

SAMPLE = ("distilbert_program", "gru", "mobilenet_v3_int8", "yolo_with_nms")
"""Files for the routes that the ordinary run takes with a part of the files only."""


OF_ONE_KIND = ("branch", "loop", "loop_over_time", "lstm", "lstm_both_ways", "rnn")
"""Files of so few kinds of operations that one device may take them all."""


def is_sampled(name: str) -> Any:
    return name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long)


def peer_results(name: str, values: Sequence[Array]) -> list[Array]:
    """ONNX Runtime's results."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # Without VNNI its quantised layers saturate; QuantizeLinear and DequantizeLinear alone are the same everywhere.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(str(FOLDER / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    found: list[Array] = session.run(None, dict(zip(names, values, strict=True)))
    return found


async def computed(name: str, devices: Sequence[Device]) -> tuple[list[Array], list[Array], tuple[str, ...]]:
    """ONNX Runtime's results, those of the devices, and the devices that were used, in the order of the steps."""
    values = drawn(name)
    async with aionn.open(devices=list(devices), drivers=[]) as runtime:
        net = await runtime.compile(FOLDER / f"{name}.onnx", **options_of(name, values))
        async with net:
            given = dict(zip([spec.name for spec in net.inputs], values, strict=False))
            if len(net.inputs) != len(values):
                names = [one.name for one in read_model((FOLDER / f"{name}.onnx").read_bytes()).graph.inputs]
                given = dict(zip(names, values, strict=True))
            result = await net.execute([given[spec.name] for spec in net.inputs])
            return peer_results(name, values), list(result.outputs), net.devices


def shared(base: type[Any], share: int, of: int) -> Any:
    """A device that supports a part of the operations that its engine supports: those whose types fall into its share."""

    class Shared(base):  # type: ignore[misc]
        def supports(self, model: Model) -> Sequence[bool]:
            return [
                is_known and zlib.crc32(str(int(operation.type)).encode()) % of in (share, of - 1)
                for is_known, operation in zip(super().supports(model), model.main.operations, strict=True)
            ]

    return Shared


def test_files_are_those_of_the_list_and_small() -> None:
    files = list(FOLDER.glob("*.onnx"))
    assert {file.stem for file in files} == CASES.keys()
    assert len(files) >= 25
    assert sum(file.stat().st_size for file in files) < FILES_BYTES_MAX


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(CASES))
async def test_file_gives_the_peers_results_on_ort_cpu_alone(name: str) -> None:
    async with OrtDevice() as device:
        wanted, got, used = await computed(name, [device])
        check(name, wanted, got)
        assert used == ("ort-cpu",)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [is_sampled(name) for name in sorted(CASES)])
@pytest.mark.thorough
async def test_file_gives_the_peers_results_on_the_reference_devices(name: str) -> None:
    async with ReferenceDevice() as reference, OnnxReferenceDevice() as extension:
        wanted, got, _ = await computed(name, [reference, extension])
        check(name, wanted, got)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [is_sampled(name) for name in sorted(CASES)])
@pytest.mark.thorough
async def test_file_gives_the_peers_results_split_between_three_devices(name: str) -> None:
    litert = pytest.importorskip("aionn.drivers.litert.driver", exc_type=ImportError)
    pytest.importorskip("ai_edge_litert.interpreter", exc_type=ImportError)
    async with (
        shared(litert.LitertDevice, 0, 4)() as first,
        shared(OrtDevice, 1, 4)() as second,
        ReferenceDevice() as reference,
        OnnxReferenceDevice() as extension,
    ):
        wanted, got, used = await computed(name, [first, second, reference, extension])
        check(name, wanted, got)
        assert len(set(used)) > 1 or name in OF_ONE_KIND


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(CASES))
def test_constants_decide_all_shapes_but_those_of_chosen_boxes(name: str) -> None:
    model = load_onnx(FOLDER / f"{name}.onnx", **options_of(name, drawn(name)))
    is_known = [
        argument.dimensions is not None and -1 not in argument.dimensions for argument in model.outputs
    ]
    assert all(is_known) != (name == "yolo_with_nms")
