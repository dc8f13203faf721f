"""Files that PyTorch's exporters wrote give ONNX Runtime's results: on ort-cpu, on the reference devices, and split between three.

The networks are those that people export, cut small, with random weights (``torch_files/networks.py``).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Device, Model
from aionn.models.onnx import load_onnx
from aionn.models.onnx.constants import ConstantReader
from aionn.models.onnx.schema import read_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

import onnxruntime as ort

from aionn.drivers.onnxruntime.driver import OrtDevice

FOLDER = Path(__file__).parent / "torch_files"
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
Array = npt.NDArray[Any]

FLOAT_MAX = 1e-4
"""Largest difference of float results, relative to the largest result."""

FILES_BYTES_MAX = 2_500_000

STEPS_MAX = 1.01
"""The same for quantised networks, in steps of the scale of their results."""

SAMPLE = ("distilbert_program", "gru", "mobilenet_v3_int8", "swin", "yolo_with_nms")
"""Files for the routes that the ordinary run takes with a part of the files only."""


OF_ONE_KIND = ("branch", "loop", "loop_over_time", "lstm", "lstm_both_ways", "rnn")
"""Files of so few kinds of operations that one device may take them all."""


def is_sampled(name: str) -> Any:
    return name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long)


def drawn(name: str) -> list[Array]:
    """Seeded inputs: pictures and sounds from 0 to 1, numbers of tokens below 60, masks of ones."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values: list[Array] = []
    for shape, dtype in CASES[name]["inputs"]:
        if dtype == "int64":
            is_mask = bool(values)
            values.append(np.ones(shape, np.int64) if is_mask else rng.integers(1, 60, shape))
        else:
            values.append(rng.random(shape).astype(dtype))
    return values


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


def step_of(name: str) -> float:
    """The scale of a quantised network's results: that of the DequantizeLinear that writes them."""
    graph = read_model((FOLDER / f"{name}.onnx").read_bytes()).graph
    (last,) = [one for one in graph.nodes if graph.outputs[0].name in one.outputs]
    assert last.op_type == "DequantizeLinear"
    (scale,) = [one for one in graph.initializers if one.name == last.inputs[1]]
    return float(ConstantReader(None).array(scale))


def check(name: str, wanted: Sequence[Array], got: Sequence[Array]) -> None:
    assert len(wanted) == len(got)
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        assert (have.shape, have.dtype) == (want.shape, want.dtype), f"output {index}"
        if want.dtype.kind == "f":
            most = FLOAT_MAX * float(np.abs(want).max(initial=0))
            if name.endswith("_int8"):
                most = STEPS_MAX * step_of(name)
            np.testing.assert_allclose(have, want, rtol=0, atol=most, err_msg=f"output {index}")
        else:
            np.testing.assert_array_equal(have, want, err_msg=f"output {index}")


def options_of(name: str, values: Sequence[Array]) -> dict[str, Any]:
    """The extents that the file leaves open."""
    if not CASES[name]["open"]:
        return {}
    found = {}
    for info, value in zip(
        read_model((FOLDER / f"{name}.onnx").read_bytes()).graph.inputs, values, strict=True
    ):
        found.update(
            {
                extent: size
                for extent, size in zip(info.shape or (), value.shape, strict=True)
                if isinstance(extent, str)
            }
        )
    return {"dimensions": found}


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


@pytest.mark.parametrize("name", sorted(CASES))
async def test_file_gives_the_peers_results_on_ort_cpu_alone(name: str) -> None:
    async with OrtDevice() as device:
        wanted, got, used = await computed(name, [device])
        check(name, wanted, got)
        assert used == ("ort-cpu",)


@pytest.mark.parametrize("name", [is_sampled(name) for name in sorted(CASES)])
async def test_file_gives_the_peers_results_on_the_reference_devices(name: str) -> None:
    async with ReferenceDevice() as reference, OnnxReferenceDevice() as extension:
        wanted, got, _ = await computed(name, [reference, extension])
        check(name, wanted, got)


@pytest.mark.parametrize("name", [is_sampled(name) for name in sorted(CASES)])
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


@pytest.mark.parametrize("name", sorted(CASES))
def test_constants_decide_all_shapes_but_those_of_chosen_boxes(name: str) -> None:
    model = load_onnx(FOLDER / f"{name}.onnx", **options_of(name, drawn(name)))
    is_known = [
        argument.dimensions is not None and -1 not in argument.dimensions for argument in model.outputs
    ]
    assert all(is_known) != (name == "yolo_with_nms")
