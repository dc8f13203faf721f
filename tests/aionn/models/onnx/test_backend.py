"""ONNX's own test cases through ``Runtime.compile``: the node tests, which the installed ``onnx`` package generates, the models of
its test data, and its networks.

A case passes if all results have the declared type and shape and the values that it gives. Every other case is on a list with its
reason: those that no device can have, and those whose values differ by rounding. The device ``reference`` alone has to compute
every case of ``TIERS``, and every other case that the importer expresses without the extension.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
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
from tests.aionn.models.onnx.backend_cases import (
    FOLDERS,
    TIERS,
    Case,
    folder_cases,
    network_cases,
    node_cases,
)


class Route(NamedTuple):
    """Devices, and how many plain and how many expanded cases pass on them at least, of an onnx package of 1,404 and 480 of them;
    newer packages have more.
    """

    drivers: tuple[str, ...]
    plain_min: int
    expanded_min: int


ROUTES = {
    "reference": Route(("reference",), 715, 350),
    "onnx-reference": Route(("onnx-reference", "reference"), 1300, 455),
    "ort-cpu": Route(("ort-cpu", "onnx-reference"), 1300, 455),
    "ort-cuda": Route(("ort-cuda", "onnx-reference", "reference"), 1300, 455),
    "openvino-cpu": Route(("openvino-cpu", "onnx-reference", "reference"), 1300, 455),
}

SAMPLE_STEP = 24
"""One of so many plain cases is part of the ordinary run."""

SAMPLE_MIN = 44
"""Cases of the sample that pass."""

TIERS_MIN = {"0": 35, "1": 423, "2": 214, "C": 6}
"""Plain cases of each tier that pass on the device ``reference`` at least."""

TIERS_SAMPLE_MIN = 26
"""Cases of the sample of the tiers that pass."""

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
}
"""Cases that are rejected, with the reason."""

_EMPTY = "results without elements, which the HAL lacks: an extent of 0 means one that is not known"

CANNOT_ON: dict[str, dict[str, str]] = {
    "reference": {
        "test_bitcast_*": "bits under another type, for which the HAL has no operation",
        "test_mod_*float*": "the exact remainder of floats, for which the HAL has no operation",
        "test_pow_types_int*": "powers of whole numbers: POW takes floats, which do not hold all of them",
        "test_roialign_*": "regions beyond the image, which ROI_ALIGN rejects, and the largest instead of the mean of samples",
        "test_constantofshape_int_shape_zero": _EMPTY,
        "test_reduce_sum_empty_set_non_reduced_axis_zero": _EMPTY,
        "test_reshape_allowzero_reordered": _EMPTY,
        "test_slice_start_out_of_bounds": _EMPTY,
        "test_split_zero_size_splits_*": _EMPTY,
    },
    "ort-cpu": {
        "test_if": "branches of constants alone, which the device reference computes, are a step without inputs"
    },
}
"""The same for routes."""

_MASKED = "rows that a mask leaves no element: the largest of minus infinities is another number on CUDA, and does not mark them"

DIFFERS_ON: dict[str, dict[str, str]] = {
    "ort-cuda": {
        "test_attention_23_boolmask_fullymasked_row_nan_robustness_expanded": _MASKED,
        "test_attention_23_fullymasked_qk_matmul_output_mode3_zero_expanded": _MASKED,
        "test_attention_24_fullymasked_qk_matmul_output_mode3_zero_expanded": _MASKED,
        "test_attention_24_qk_matmul_output_mode3_softmax_precision_expanded": _MASKED,
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty_expanded": _MASKED,
        "test_attention_causal_boolmask_nan_robustness_expanded": _MASKED,
        "test_attention_local_window_gqa_rank4_mask_expanded": _MASKED,
    },
}
"""Cases that a route computes otherwise, with the reason, from a run of ONNX Runtime 1.31.1 on CUDA 13."""

_FOURIER = "sums of float32, which are rounded in relation to the largest number"

ROUNDED = {
    "test_attention_4d_fp16": (2**-10, "sums of float16, which are rounded in another order"),
    "test_attention_4d_causal_fp16*": (2**-9, "sums of float16, which are rounded in another order"),
    "test_attention_*_bf16_expanded": (2**-7, "operations of bfloat16, each of which is rounded"),
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
    """The results of a case; None if it is rejected, also with all inputs but the first or the last, or all, as constants."""
    graph = read_model(case.data).graph
    constants = {tensor.name for tensor in graph.initializers}
    names = [info.name for info in graph.inputs if info.name not in constants]
    if len(names) != len(case.inputs):
        return None
    path.write_bytes(case.data)
    given = dict(zip(names, case.inputs, strict=True))
    errors = []
    for fixed in choices_of(names):
        try:
            return await computed(runtime, path, given, fixed)
        except Error as e:
            errors.append(str(e))
        if ALONE in errors[-1]:
            path.write_bytes(with_an_input(case.data))
            try:
                return (await computed(runtime, path, {**given, "more": np.zeros(1, np.float32)}, fixed))[:-1]
            except Error as e:
                errors.append(str(e))
            path.write_bytes(case.data)
    assert not [error for error in errors if "unforeseen" in error], errors
    return None


def choices_of(names: Sequence[str]) -> Iterable[frozenset[str]]:
    """Inputs that may become constants: none, all but the first or the last, and all."""
    return dict.fromkeys((frozenset[str](), frozenset(names[1:]), frozenset(names[:-1]), frozenset(names)))


def needs_extension(case: Case) -> bool:
    """Whether the importer expresses the case by HAL operations alone neither with nor without constant inputs."""
    graph = read_model(case.data).graph
    names = [info.name for info in graph.inputs]
    given = dict(zip(names, case.inputs, strict=True))
    for fixed in choices_of(names):
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


class Verdict(NamedTuple):
    """The result of cases.

    Attributes:
        plain: Number of plain cases that pass.
        expanded: The same of expanded ones.
        failed: A line for each case that does not do what its list says.
        tiers: Number of plain cases that pass, and of those that are on a list, by tier.
    """

    plain: int
    expanded: int
    failed: list[str]
    tiers: dict[str, tuple[int, int]]


async def check_cases(cases: Iterable[Case], route: str, path: Path) -> Verdict:
    passed: dict[bool, int] = {True: 0, False: 0}
    tiers: Counter[tuple[str, bool]] = Counter()
    failed: list[str] = []
    lists = {**CANNOT, **CANNOT_ON.get(route, {})}
    async with aionn.open(drivers=list(ROUTES[route].drivers), isolation="in_process") as runtime:
        for case in cases:
            results = await results_of(runtime, case, path)
            if case.is_plain:
                tiers[case.tier, results is not None] += 1
            if results is None:
                if is_listed(case.name, lists):
                    continue
                is_of_a_tier = case.is_plain and case.tier
                if route != "reference" or is_of_a_tier or not needs_extension(case):
                    failed.append(f"{case.name}: rejected")
            elif (told := difference(case, results)) is not None:
                if is_listed(case.name, DIFFERS_ON.get(route, {})):
                    continue
                failed.append(f"{case.name}: {told}")
            else:
                passed[case.is_plain] += 1
    by_tier = {tier: (tiers[tier, True], tiers[tier, False]) for tier in ("", *TIERS)}
    return Verdict(passed[True], passed[False], failed, by_tier)


def skip_without(route: str, request: pytest.FixtureRequest) -> None:
    if {"ort-cpu", "ort-cuda"} & set(ROUTES[route].drivers):
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    if "ort-cuda" in ROUTES[route].drivers:
        lack = request.getfixturevalue("lack_of_cuda")
        if lack is not None:
            pytest.skip(f"CUDAExecutionProvider cannot be used: {lack}")
    if "openvino-cpu" in ROUTES[route].drivers:
        pytest.importorskip("openvino", reason="OpenVINO is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("route", ["onnx-reference", "ort-cpu", "ort-cuda", "openvino-cpu"])
async def test_sample_of_the_node_tests_passes_or_is_listed(
    cases: list[Case], route: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    skip_without(route, request)
    sample = [case for case in cases if case.is_plain][::SAMPLE_STEP]
    verdict = await check_cases(sample, route, tmp_path / "case.onnx")
    assert not verdict.failed, "\n".join(verdict.failed)
    assert verdict.plain >= SAMPLE_MIN


@pytest.mark.slow
async def test_sample_of_the_tiers_passes_on_the_reference_device(cases: list[Case], tmp_path: Path) -> None:
    sample = [case for case in cases if case.is_plain and case.tier][::SAMPLE_STEP]
    verdict = await check_cases(sample, "reference", tmp_path / "case.onnx")
    assert not verdict.failed, "\n".join(verdict.failed)
    assert verdict.plain >= TIERS_SAMPLE_MIN


@pytest.mark.long
@pytest.mark.parametrize("route", ["reference", "onnx-reference", "ort-cpu", "ort-cuda"])
async def test_node_tests_pass_or_are_listed(
    cases: list[Case], route: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    skip_without(route, request)
    verdict = await check_cases(cases, route, tmp_path / "case.onnx")
    print(f"{route}: passed {verdict.plain} plain cases and {verdict.expanded} expanded ones")
    print(
        "; ".join(f"tier {tier or 'of none'}: {n} pass, {m} listed" for tier, (n, m) in verdict.tiers.items())
    )
    assert not verdict.failed, "\n".join(verdict.failed)
    assert verdict.plain >= ROUTES[route].plain_min and verdict.expanded >= ROUTES[route].expanded_min
    if route == "reference":
        assert all(verdict.tiers[tier][0] >= least for tier, least in TIERS_MIN.items()), verdict.tiers


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("route", ["onnx-reference", "ort-cpu", "ort-cuda", "openvino-cpu"])
async def test_models_of_the_test_data_pass_or_are_listed(
    folder: str, route: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    skip_without(route, request)
    found = list(folder_cases(folder))
    verdict = await check_cases(found, route, tmp_path / "case.onnx")
    print(f"{route}, {folder}: passed {verdict.plain} of {len(found)}")
    assert not verdict.failed, "\n".join(verdict.failed)
    assert verdict.plain >= 0.5 * len(found)


@pytest.mark.long
async def test_networks_pass_on_ort_cpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    skip_without("ort-cpu", request)
    verdict = await check_cases(network_cases(), "ort-cpu", tmp_path / "case.onnx")
    assert not verdict.failed, "\n".join(verdict.failed)
    assert verdict.plain == 9


def test_every_pattern_matches_a_case(cases: list[Case]) -> None:
    names = [case.name for case in cases]
    names += [case.name for folder in FOLDERS for case in folder_cases(folder)]
    by_route = (p for lists in (CANNOT_ON, DIFFERS_ON) for patterns in lists.values() for p in patterns)
    for pattern in (*CANNOT, *ROUNDED, *by_route):
        assert fnmatch.filter(names, pattern), pattern
