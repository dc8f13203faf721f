"""ONNX's own test cases through ``Runtime.compile``: the node tests, which the installed ``onnx`` package generates, the models of
its test data, and its networks.

A case passes if all results have the declared type and shape and the values that it gives. Every other case is on a list with its
reason: those that no device can have, and those whose values differ by rounding. The device ``reference`` alone has to compute
every case that the importer expresses without the extension.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import aionn
from aionn.errors import Error
from aionn.models.onnx import encode_model, load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import DataType, OpsetImport, ValueInfo, read_model
from tests.aionn.models.onnx.backend_cases import FOLDERS, Case, folder_cases, network_cases, node_cases


class Route(NamedTuple):
    """Devices, and how many plain and how many expanded cases pass on them at least, of an onnx package of 1,404 and 480 of them;
    newer packages have more.
    """

    drivers: tuple[str, ...]
    plain_min: int
    expanded_min: int


ROUTES = {
    "reference": Route(("reference",), 670, 350),
    "onnx-reference": Route(("onnx-reference", "reference"), 1300, 455),
    "ort-cpu": Route(("ort-cpu", "onnx-reference"), 1300, 455),
    "openvino-cpu": Route(("openvino-cpu", "onnx-reference", "reference"), 1300, 455),
}

SAMPLE_STEP = 24
"""One of so many plain cases is part of the ordinary run."""

SAMPLE_MIN = 44
"""Cases of the sample that pass."""

CANNOT = {
    "test_string_*": "texts",
    "test_strnormalizer_*": "texts",
    "test_regex_*": "texts",
    "test_equal_string*": "texts",
    "test_ai_onnx_ml_label_encoder_*": "texts",
    "test_ai_onnx_ml_*": "another domain",
    "test_flexattention*": "another domain",
    "test_adagrad*": "another domain",
    "test_adam*": "another domain",
    "test_momentum*": "another domain",
    "test_nesterov_momentum": "another domain",
    "test_image_decoder_*": "image files",
    "test_sequence_*": "sequences",
    "test_split_to_sequence_*": "sequences",
    "test_identity_sequence": "sequences",
    "test_identity_opt": "optional values",
    "test_optional_*": "optional values",
    "test_loop1[36]_seq*": "sequences",
    "test_if_seq": "sequences",
    "test_if_opt": "optional values",
    "test_range_*_expanded": "a trip count that only the execution knows",
    "test_bernoulli*": "random results",
    "test_training_dropout*": "random results",
    "test_bitcast_float64_to_int64": "DOUBLE is held in float32, which has other bits",
    "test_bitcast_int64_to_float64": "numbers beyond 32 bits as inputs",
    "test_bitcast_uint32_to_int32": "numbers beyond 32 bits as inputs",
    "test_causal_conv_with_state_kernel_size_one_expanded": "results without elements",
    "test_shape_start_greater_than_end": "results without elements",
    "test_tri[ul]_zero": "results without elements",
    "test_strnorm_*": "texts",
    "test_gradient_of_*": "another domain",
    "test_sequence_model8/*": "sizes of a sequence as an input",
    "test_operator_add*": "numbers of DOUBLE beyond those of float32, which holds it",
    "test_cast_e8m0_*": "FLOAT8E8M0, which is no type of the extension",
    "test_*_bf16_expanded": "a constant of type BFLOAT16, which the importer reads as float32",
}
"""Cases that are rejected, with the reason."""

CANNOT_ON: dict[str, dict[str, str]] = {
    "ort-cpu": {
        "test_if": "branches of constants alone, which the device reference computes, are a step without inputs"
    },
}
"""The same for routes."""

_FOURIER = "sums of float32, which are rounded in relation to the largest number"

ROUNDED = {
    "test_attention_4d_causal_fp16*": (2**-9, "sums of float16, which are rounded in another order"),
    "test_dft*": (1e-6, _FOURIER),
    "test_stft*": (1e-6, _FOURIER),
}
"""Cases whose results may differ by a share of their largest number, with the reason."""

Array = np.ndarray[Any, Any]

ALONE = "constants only"
"""What the importer says of a model whose outputs depend on no input."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return node_cases()


def is_listed(name: str, lists: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in lists)


def with_an_input(data: bytes) -> bytes:
    """The model with one more input, and an output that depends on it: devices take no model without."""
    model = read_model(data)
    graph = model.graph
    more = msgspec.structs.replace(
        graph,
        nodes=(*graph.nodes, node("Neg", ["more"], ["less"])),
        inputs=(*graph.inputs, ValueInfo("more", DataType.FLOAT, (1,))),
        outputs=(*graph.outputs, ValueInfo("less", DataType.FLOAT, (1,))),
    )
    opsets = (
        model.opsets if any(not one.domain for one in model.opsets) else (*model.opsets, OpsetImport("", 13))
    )
    return encode_model(msgspec.structs.replace(model, graph=more, opsets=opsets))


async def computed(
    runtime: aionn.Runtime, path: Path, given: Mapping[str, Array], fixed: Iterable[str]
) -> list[Array]:
    """The results for these inputs, those that are ``fixed`` as constants."""
    shapes = {name: array.shape for name, array in given.items() if name not in fixed}
    net = await runtime.compile(path, input_shapes=shapes, values={name: given[name] for name in fixed})
    async with net:
        return list((await net.execute([given[spec.name] for spec in net.inputs])).outputs)


async def results_of(runtime: aionn.Runtime, case: Case, path: Path) -> list[Array] | None:
    """The results of a case; None if it is rejected, also with all inputs but the first or the last as constants."""
    graph = read_model(case.data).graph
    constants = {tensor.name for tensor in graph.initializers}
    names = [info.name for info in graph.inputs if info.name not in constants]
    if len(names) != len(case.inputs):
        return None
    path.write_bytes(case.data)
    given = dict(zip(names, case.inputs, strict=True))
    errors = []
    for fixed in dict.fromkeys((frozenset[str](), frozenset(names[1:]), frozenset(names[:-1]))):
        try:
            return await computed(runtime, path, given, fixed)
        except Error as e:
            errors.append(str(e))
    if ALONE in errors[0] or ALONE in errors[-1]:
        path.write_bytes(with_an_input(case.data))
        fixed = names if ALONE not in errors[0] else ()
        try:
            return (await computed(runtime, path, {**given, "more": np.zeros(1, np.float32)}, fixed))[:-1]
        except Error as e:
            errors.append(str(e))
    assert not [error for error in errors if "unforeseen" in error], errors
    return None


def needs_extension(case: Case) -> bool:
    """Whether the importer expresses the case by HAL operations alone neither with nor without constant inputs."""
    graph = read_model(case.data).graph
    names = [info.name for info in graph.inputs]
    given = dict(zip(names, case.inputs, strict=True))
    for fixed in ((), names[1:], names[:-1]):
        shapes = {name: array.shape for name, array in given.items() if name not in fixed}
        try:
            load_onnx(
                case.data,
                input_shapes=shapes,
                values={name: given[name] for name in fixed},
                extensions="none",
            )
        except Error:
            continue
        return False
    return True


def difference(case: Case, results: Sequence[Array]) -> str | None:
    """How the results differ from those that the case gives."""
    largest = ROUNDED.get(next((p for p in ROUNDED if fnmatch.fnmatchcase(case.name, p)), ""), (0.0, ""))[0]
    try:
        for got, expected in zip(results, case.outputs, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            atol = case.atol
            if largest:
                atol = largest * float(np.abs(expected.astype(np.float64)).max())
            np.testing.assert_allclose(got, expected, case.rtol, atol)
    except AssertionError as e:
        return " ".join(str(e).split())[:160]
    return None


async def check_cases(cases: Iterable[Case], route: str, path: Path) -> tuple[int, int, list[str]]:
    """Number of plain and of expanded cases that pass, and a line for each case that does not do what its list says."""
    passed: dict[bool, int] = {True: 0, False: 0}
    failed: list[str] = []
    lists = {**CANNOT, **CANNOT_ON.get(route, {})}
    async with aionn.open(drivers=list(ROUTES[route].drivers), isolation="in_process") as runtime:
        for case in cases:
            results = await results_of(runtime, case, path)
            if results is None:
                if not is_listed(case.name, lists) and not (route == "reference" and needs_extension(case)):
                    failed.append(f"{case.name}: rejected")
            elif (told := difference(case, results)) is not None:
                failed.append(f"{case.name}: {told}")
            else:
                passed[case.is_plain] += 1
    return passed[True], passed[False], failed


def skip_without(route: str) -> None:
    if "ort-cpu" in ROUTES[route].drivers:
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    if "openvino-cpu" in ROUTES[route].drivers:
        pytest.importorskip("openvino", reason="OpenVINO is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("route", ["onnx-reference", "ort-cpu", "openvino-cpu"])
async def test_sample_of_the_node_tests_passes_or_is_listed(
    cases: list[Case], route: str, tmp_path: Path
) -> None:
    skip_without(route)
    sample = [case for case in cases if case.is_plain][::SAMPLE_STEP]
    plain, _, failed = await check_cases(sample, route, tmp_path / "case.onnx")
    assert not failed, "\n".join(failed)
    assert plain >= SAMPLE_MIN


@pytest.mark.long
@pytest.mark.parametrize("route", ["reference", "onnx-reference", "ort-cpu"])
async def test_node_tests_pass_or_are_listed(cases: list[Case], route: str, tmp_path: Path) -> None:
    skip_without(route)
    plain, expanded, failed = await check_cases(cases, route, tmp_path / "case.onnx")
    print(f"{route}: passed {plain} plain cases and {expanded} expanded ones")
    assert not failed, "\n".join(failed)
    assert plain >= ROUTES[route].plain_min and expanded >= ROUTES[route].expanded_min


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("route", ["onnx-reference", "ort-cpu", "openvino-cpu"])
async def test_models_of_the_test_data_pass_or_are_listed(folder: str, route: str, tmp_path: Path) -> None:
    skip_without(route)
    found = list(folder_cases(folder))
    plain, _, failed = await check_cases(found, route, tmp_path / "case.onnx")
    print(f"{route}, {folder}: passed {plain} of {len(found)}")
    assert not failed, "\n".join(failed)
    assert plain >= 0.5 * len(found)


@pytest.mark.long
async def test_networks_pass_on_ort_cpu(tmp_path: Path) -> None:
    skip_without("ort-cpu")
    plain, _, failed = await check_cases(network_cases(), "ort-cpu", tmp_path / "case.onnx")
    assert not failed, "\n".join(failed)
    assert plain == 9


def test_every_pattern_matches_a_case(cases: list[Case]) -> None:
    names = [case.name for case in cases]
    names += [case.name for folder in FOLDERS for case in folder_cases(folder)]
    for pattern in (*CANNOT, *ROUNDED, *(p for patterns in CANNOT_ON.values() for p in patterns)):
        assert fnmatch.filter(names, pattern), pattern
