"""Files that TensorFlow's converter wrote give LiteRT's results on the reference device and, where it takes them, on litert-cpu."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aionn
from aionn.errors import InvalidArgument, InvalidModel
from aionn.models.tflite import TfliteModel, load_tflite
from aionn.testing.models import identity

litert = pytest.importorskip(
    "ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError
)

FOLDER = Path(__file__).parent / "tensorflow_files"
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
Array = npt.NDArray[Any]

FLOAT_MAX = 2e-5
"""Largest difference of float results, relative to the largest result where that is above 1: the order of additions differs."""

FILES_BYTES_MAX = 1_500_000


class Difference(NamedTuple):
    """How far results may be from LiteRT's.

    Attributes:
        steps: For integers the most steps, for floats the part of the largest result.
        why: Where it comes from.
    """

    steps: float
    why: str


WITHOUT_REFERENCE = {"activations", "integers", "norms", "one_axis", "segment_sum", "unary"}
"""Files with operators that have no reference kernel (ABS of integers, CEIL, ELU, SEGMENT_SUM), or one that differs from the
ordinary one (LOCAL_RESPONSE_NORMALIZATION)."""

REJECTED: dict[str, str] = {
    "atan2": "the HAL has no such function",
    "bitwise_xor": "the HAL has no operation on bits",
    "bucketize": "no operation of the HAL computes it",
    "custom": "only its author knows what it computes",
    "erf": "only its author knows what it computes",
    "hash_table": "it keeps a resource between executions",
    "int64_add": "the HAL has no tensors of type INT64",
    "random": "results are random",
    "resize_at_run_time": "no operation makes a number of a tensor",
    "rfft": "the HAL has no complex numbers",
    "strings": "only its author knows what it computes",
    "suppression_v4": "each box that is kept takes some 25 operations",
    "suppression_v5": "each box that is kept takes some 25 operations",
    "unique": "no operation that counts or orders",
    "unsorted_segment_max": "no operation that writes to chosen places",
    "variable": "it keeps a resource between executions",
    "volume_transposed": "the HAL convolves over two axes only",
}
"""Files that cannot be imported, and what the message says of the reason."""

_REALS = "16-bit activations are reals here, and LiteRT rounds them after every operator"
_HYBRID = "weights of 8 bits become floats here, and LiteRT quantises the data instead"

DIFFERENT: dict[str, Difference] = {
    "branches_int16x8": Difference(2e-4, _REALS),
    "mobilenet_v2_int16x8": Difference(2e-4, _REALS),
    "transposed_int16x8": Difference(2e-4, _REALS),
    "convnext_dynamic": Difference(0.02, _HYBRID),
    "efficientnet_dynamic": Difference(0.02, _HYBRID),
}
"""Files whose results differ, and how."""

DIFFERENT_ON_LITERT: dict[str, Difference] = {
    "leaky_int8": Difference(
        1, "PRELU, which LEAKY_RELU becomes, is rounded in another way by LiteRT's ordinary kernels"
    ),
}
"""As ``DIFFERENT``, for litert-cpu."""


class Peer:
    """LiteRT on a file, with its reference kernels or, as litert-cpu, with its ordinary ones."""

    def __init__(self, name: str, shapes: list[list[int]], *, is_reference: bool = True) -> None:
        kinds = litert.OpResolverType
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.runner = litert.Interpreter(
                model_path=str(FOLDER / f"{name}.tflite"),
                num_threads=1,
                experimental_op_resolver_type=kinds.BUILTIN_REF if is_reference else kinds.AUTO,
            )
        for details, shape in zip(self.runner.get_input_details(), shapes, strict=False):
            self.runner.resize_tensor_input(details["index"], shape)
        self.runner.allocate_tensors()

    def run(self, values: list[Array]) -> list[Array]:
        for details, value in zip(self.runner.get_input_details(), values, strict=True):
            self.runner.set_tensor(details["index"], value)
        self.runner.invoke()
        return [self.runner.get_tensor(d["index"]) for d in self.runner.get_output_details()]


def drawn(name: str, peer: Peer) -> list[Array]:
    """Seeded inputs, within the ranges that ``make.py`` states."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    ranges = CASES[name]["ranges"]
    values: list[Array] = []
    for index, details in enumerate(peer.runner.get_input_details()):
        dtype, shape = np.dtype(details["dtype"]), details["shape"]
        if dtype.kind == "f":
            low, high = ranges[index] if index < len(ranges) else (-2, 2)
            values.append(rng.uniform(low, high, shape).astype(dtype))
        elif dtype.kind == "b":
            values.append(rng.integers(0, 2, shape).astype(bool))
        elif details["quantization_parameters"]["scales"].size:
            info = np.iinfo(dtype)
            values.append(rng.integers(info.min, info.max + 1, shape).astype(dtype))
        else:
            low, high = ranges[index] if index < len(ranges) else (0, 1)
            values.append(rng.integers(int(low), int(high) + 1, shape).astype(dtype))
    return values


def as_ours(imported: TfliteModel, peer: Peer, values: list[Array]) -> list[Array]:
    """LiteRT's inputs as the imported model takes them: INT64 as INT32, INT16 with a scale as reals, the imported shapes."""
    ours = []
    details = peer.runner.get_input_details()
    for value, argument, detail in zip(values, imported.inputs, details, strict=True):
        if value.dtype == np.int16:
            value = value.astype(np.float32) * np.float32(detail["quantization"][0])
        elif value.dtype == np.int64:
            value = value.astype(np.int32)
        fits = len(argument.operand.dimensions) == value.ndim
        ours.append(value if fits else value.reshape(argument.operand.dimensions))
    return ours


def compare(name: str, peer: Peer, wanted: list[Array], got: list[Array], allowed: Difference | None) -> None:
    assert len(wanted) == len(got)
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        detail = peer.runner.get_output_details()[index]
        assert have.size == want.size, f"{name}, output {index}: {have.shape} instead of {want.shape}"
        have = have.reshape(want.shape)
        if want.dtype == np.int16:
            want = want.astype(np.float32) * np.float32(detail["quantization"][0])
        if want.dtype.kind == "f":
            largest = max(1.0, float(np.abs(want).max(initial=0)))
            part = allowed.steps if allowed is not None else FLOAT_MAX
            np.testing.assert_allclose(have, want, rtol=0, atol=part * largest, err_msg=f"output {index}")
        else:
            steps = np.abs(have.astype(np.int64) - want.astype(np.int64)).max(initial=0)
            most = 0 if allowed is None else allowed.steps
            assert steps <= most, f"{name}, output {index}: {steps} steps apart"


def load(name: str) -> TfliteModel:
    return load_tflite(FOLDER / f"{name}.tflite", input_shapes=CASES[name]["shapes"] or None)


def test_there_are_a_hundred_files_of_every_scheme_and_they_are_small() -> None:
    files = list(FOLDER.glob("*.tflite"))
    assert {file.stem for file in files} == CASES.keys()
    assert len(files) >= 100
    assert sum(file.stat().st_size for file in files) < FILES_BYTES_MAX
    for scheme in ("float16", "dynamic", "int8", "uint8", "int16x8"):
        assert any(scheme in name for name in CASES)


def test_expectations_are_of_files_that_are_there() -> None:
    assert {*REJECTED, *DIFFERENT, *DIFFERENT_ON_LITERT} <= CASES.keys()
    assert not REJECTED.keys() & {*DIFFERENT, *DIFFERENT_ON_LITERT}


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_file_that_cannot_be_expressed_is_rejected_with_its_reason(name: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        load(name)
    assert REJECTED[name] in str(caught.value)
    assert "unforeseen" not in str(caught.value)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime() -> AsyncIterator[aionn.Runtime]:
    """One for all files: opening it takes longer than most of them."""
    async with aionn.open(drivers=["reference", "litert-cpu"], isolation="in_process") as opened:
        for device in opened.devices:  # The first execution on each starts its threads.
            async with await opened.compile(identity(), devices=device.name) as compilation:
                await compilation.execute([np.ones(1, np.float32)])
        yield opened


@pytest.mark.sampled(4)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", sorted(CASES.keys() - REJECTED.keys()))
async def test_file_gives_the_peers_results(name: str, runtime: aionn.Runtime) -> None:
    peer = Peer(name, CASES[name]["shapes"], is_reference=name not in WITHOUT_REFERENCE)
    imported = load(name)
    values = drawn(name, peer)
    wanted, ours = peer.run(values), as_ours(imported, peer, values)
    async with await runtime.compile(imported.model, devices="reference") as compilation:
        result = await compilation.execute(ours)
        compare(name, peer, wanted, list(result.outputs), DIFFERENT.get(name))
    answers = {a.device: a for a in await runtime.supported_operations(imported.model)}
    if all(answers["litert-cpu"].supported) and not answers["litert-cpu"].error:
        async with await runtime.compile(imported.model, devices="litert-cpu") as compilation:
            result = await compilation.execute(ours)
            allowed = DIFFERENT_ON_LITERT.get(name, DIFFERENT.get(name))
            wanted = Peer(name, CASES[name]["shapes"], is_reference=False).run(values)
            compare(name, peer, wanted, list(result.outputs), allowed)
    for pool in imported.model.pools:
        pool.close()


async def test_every_signature_of_a_file_can_be_imported_and_gives_the_peers_results() -> None:
    path = FOLDER / "signatures.tflite"
    keys = load_tflite(path).signature_keys
    assert sorted(keys) == ["decode", "encode"]
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        for key in keys:
            imported = load_tflite(path, signature=key)
            (signature,) = imported.signatures
            assert signature.key == key
            runner = litert.Interpreter(str(path)).get_signature_runner(key)
            rng = np.random.default_rng(7)
            shapes = {n: imported.inputs[at].operand.dimensions for n, at in signature.inputs}
            values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            wanted = runner(**values)
            compilation = await runtime.compile(imported.model)
            names = sorted(signature.inputs, key=lambda entry: entry[1])
            result = await compilation.execute([values[name] for name, _ in names])
            assert wanted.keys() == {name for name, _ in signature.outputs}
            for name, position in signature.outputs:
                np.testing.assert_allclose(result.outputs[position], wanted[name], atol=1e-5)
            for pool in imported.model.pools:
                pool.close()


def test_unknown_signature_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"expected one of \['decode', 'encode'\], got 'train'"):
        load_tflite(FOLDER / "signatures.tflite", signature="train")


@pytest.mark.parametrize("shapes", [[(3,)], [(3, 7)], [(0, 6)], [(-1, 6)], [(2**40, 6)], [], [None, None]])
def test_input_shape_that_does_not_fit_is_refused(shapes: Any) -> None:
    with pytest.raises(InvalidArgument, match="load_tflite"):
        load_tflite(FOLDER / "dynamic_batch.tflite", input_shapes=shapes)


def test_open_extents_take_the_default_shape_or_the_given_one() -> None:
    path = FOLDER / "dynamic_batch.tflite"
    for shapes, batch in ((None, 1), ([None], 1), ([(5, 6)], 5)):
        imported = load_tflite(path, input_shapes=shapes)
        assert imported.inputs[0].dimensions == (0, 6)
        assert imported.model.main.inputs[0].dimensions == (batch, 6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(CASES))
def test_damaged_file_loads_or_is_refused(name: str, load_damaged_bytes: Any) -> None:
    load_damaged_bytes((FOLDER / f"{name}.tflite").read_bytes(), name, 3)
