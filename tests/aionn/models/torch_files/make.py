"""Writes the files of this folder with PyTorch's own exporters.

Run it in an environment of its own, outside of the source tree; nothing else needs PyTorch::

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch torchvision transformers onnx onnxscript onnxruntime
    /tmp/torch/bin/python tests/aionn/models/torch_files/make.py [NAME ...]

Without names every file is written, and ``cases.json``, which says for each what its inputs and open extents are. Weights are
seeded by the network's name, so that a file is the same whenever the same versions of the packages write it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import networks  # noqa: F401 - fills the list
import numpy as np
import onnx
import torch
from cases import CASES, Case, scattered

FOLDER = Path(__file__).parent
FILE_BYTES_MAX = 118 << 10
"""A file says what the exporter writes, not what a network knows."""

SCHEMES = ("_int8", "_open", "_program")


def seed_of(name: str) -> int:
    for scheme in SCHEMES:
        name = name.removesuffix(scheme)
    return zlib.crc32(name.encode())


def export(name: str, one: Case, path: Path) -> None:
    torch.manual_seed(seed_of(name))
    net = scattered(one.make().eval(), torch.Generator().manual_seed(seed_of(name)))
    inputs = one.inputs()
    names = [f"x{i}" for i in range(len(inputs))]
    outputs = [f"y{i}" for i in range(one.count)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if one.exporter == "script":
            torch.onnx.export(
                net, inputs, str(path), opset_version=one.opset, input_names=names, output_names=outputs,
                dynamic_axes={key: dict(axes) for key, axes in one.open.items()} or None, dynamo=False,
            )  # fmt: skip
        else:
            torch.onnx.export(
                net, inputs, str(path), opset_version=one.opset, input_names=names, output_names=outputs,
                dynamo=True, external_data=False,
            )  # fmt: skip


def quantize(name: str, one: Case, source: Path, target: Path) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            self._left = self._drawn()

        def _drawn(self) -> Iterator[dict[str, Any]]:
            rng = np.random.default_rng(seed_of(name))
            for _ in range(8):
                yield {
                    f"x{i}": rng.random(x.shape, np.float32).astype(np.float32)
                    for i, x in enumerate(one.inputs())
                }

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    ready = source.with_suffix(".ready.onnx")
    quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
    quantize_static(
        str(ready), str(target), Samples(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip


def renamed(graph: Any, names: dict[str, str]) -> None:
    """Gives inner values short names, in the graph and in the graphs within its nodes, and takes the names of nodes away."""
    for value in [*graph.initializer]:
        value.name = names.setdefault(value.name, f"v{len(names)}")
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        for listed in (node.input, node.output):
            listed[:] = [name and names.setdefault(name, f"v{len(names)}") for name in listed]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for value in attribute.g.input:
                    value.name = names.setdefault(value.name, f"v{len(names)}")
                renamed(attribute.g, names)
                for value in attribute.g.output:
                    value.name = names.setdefault(value.name, f"v{len(names)}")
                del attribute.g.value_info[:]


def bare(path: Path) -> bytes:
    """The file without what only a reader of the exporter wants: names, sources of nodes, shapes of inner values."""
    model = onnx.load(str(path))
    renamed(model.graph, {value.name: value.name for value in [*model.graph.input, *model.graph.output]})
    for value in [*model.graph.input, *model.graph.output, *model.graph.initializer]:
        del value.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        del function.value_info[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
    del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
    model.doc_string = ""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def write(name: str) -> None:
    one = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        export(name, one, path)
        if one.is_quantized:
            source, path = path, Path(folder) / "quantized.onnx"
            quantize(name, one, source, path)
        data = bare(path)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, more than {FILE_BYTES_MAX}")
    (FOLDER / f"{name}.onnx").write_bytes(data)


def writes(name: str) -> bool:
    """Writes a file in a process of its own, since the exporter's crashes are not exceptions; says whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = 1
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        write(name)
        code = 0
    except BaseException as e:
        print(f"{name}: {type(e).__name__}: {str(e)[:600]}", file=sys.stderr)
    os._exit(code)


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    # The exporters have no operator for the joined kernel of attention.
    torch.backends.mha.set_fastpath_enabled(False)
    failed = [name for name in names or sorted(CASES) if not writes(name)]
    listed = {
        name: {
            "inputs": [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in one.inputs()],
            "open": sorted({extent for axes in one.open.values() for extent in axes.values()}),
        }
        for name, one in sorted(CASES.items())
        if (FOLDER / f"{name}.onnx").exists()
    }
    (FOLDER / "cases.json").write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    total = sum(file.stat().st_size for file in FOLDER.glob("*.onnx"))
    print(f"{len(listed)} files, {total} bytes; {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
