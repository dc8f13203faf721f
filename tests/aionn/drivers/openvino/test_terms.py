"""What devices of OpenVINO promise, by descriptions of a processor, GPUs and NPUs, and which of them a machine has.

The description of the processor is what OpenVINO 2026.4 reports of one; those of GPUs and NPUs follow its documentation: no machine
of these tests has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aionn.drivers import registry
from aionn.drivers.openvino import hardware
from aionn.drivers.openvino.driver import described_info
from aionn.drivers.openvino.hardware import found_names, openvino_name, saturates
from aionn.drivers.openvino.terms import Description, properties_for, terms_of
from aionn.errors import DeviceUnavailable
from aionn.hal import CacheFileCounts, CancelCapability, DeviceType, Priority
from aionn.validation import check_device_info

COMMON = ("PERFORMANCE_HINT", "EXECUTION_MODE_HINT", "INFERENCE_PRECISION_HINT", "NUM_STREAMS")
PROCESSOR = Description(
    "CPU",
    "AMD EPYC",
    ("FP32", "INT8", "BIN", "BF16", "EXPORT_IMPORT"),
    frozenset((*COMMON, "INFERENCE_NUM_THREADS", "ENABLE_CPU_PINNING", "DYNAMIC_QUANTIZATION_GROUP_SIZE")),
    2,
)
PROCESSOR_WITH_FLOAT16 = Description(
    "CPU", "Intel(R) Xeon(R) 6", ("FP32", "FP16", "INT8", "BF16", "EXPORT_IMPORT"), PROCESSOR.writable, 32
)
GPU = Description(
    "GPU.1",
    "Intel(R) Arc(TM) A770 Graphics (dGPU)",
    ("FP32", "BIN", "FP16", "INT8", "GPU_HW_MATMUL", "EXPORT_IMPORT"),
    frozenset((*COMMON, "MODEL_PRIORITY", "GPU_QUEUE_PRIORITY", "DYNAMIC_QUANTIZATION_GROUP_SIZE")),
    2,
)
NPU = Description(
    "NPU",
    "Intel(R) AI Boost",
    ("FP16", "INT8", "EXPORT_IMPORT"),
    frozenset((*COMMON, "MODEL_PRIORITY", "NPU_TURBO")),
    4,
    "17014",
)
OLD_NPU = Description(
    "NPU", "Intel(R) AI Boost", ("FP16", "INT8"), frozenset(("PERFORMANCE_HINT",)), 1, "1000"
)
ALL = (PROCESSOR, PROCESSOR_WITH_FLOAT16, GPU, NPU, OLD_NPU)


def chosen(
    description: Description, *, is_relaxed: bool = False, priority: Priority = Priority.MEDIUM
) -> Any:
    return properties_for(description, is_relaxed=is_relaxed, thread_count=3, priority=priority)


@pytest.mark.parametrize("description", ALL, ids=lambda d: d.device + d.driver_version)
def test_device_info_is_valid_and_names_the_driver_s_version(description: Description) -> None:
    info = described_info("name", description)
    check_device_info(info)
    assert info.name == "name"
    assert description.driver_version in info.version


@pytest.mark.parametrize("description", ALL, ids=lambda d: d.device + d.driver_version)
def test_only_writable_properties_are_set(description: Description) -> None:
    assert chosen(description).keys() <= description.writable


def test_processor_stops_between_operations_and_others_do_not_promise_it() -> None:
    assert terms_of(PROCESSOR).cancel == CancelCapability.BETWEEN_OPERATIONS
    for description in (GPU, NPU):
        assert terms_of(description).cancel == CancelCapability.NONE


def test_types_follow_the_kind() -> None:
    assert [terms_of(d).type for d in (PROCESSOR, GPU, NPU)] == [
        DeviceType.CPU,
        DeviceType.GPU,
        DeviceType.ACCELERATOR,
    ]


def test_floats_are_float32_unless_the_model_allows_less_and_the_device_has_float16() -> None:
    hint = "INFERENCE_PRECISION_HINT"
    for description in (PROCESSOR, PROCESSOR_WITH_FLOAT16, GPU):
        assert chosen(description)[hint] == "f32"
    # Bfloat16 has fewer digits than the HAL's relaxed flag allows.
    assert chosen(PROCESSOR, is_relaxed=True)[hint] == "f32"
    for description in (PROCESSOR_WITH_FLOAT16, GPU, NPU):
        assert chosen(description, is_relaxed=True)[hint] == "f16"


def test_device_without_float32_takes_relaxed_models_alone() -> None:
    assert [terms_of(d).needs_relaxed for d in ALL] == [False, False, False, True, True]


def test_processor_has_one_stream_for_a_model_and_threads_that_are_bound_to_no_core() -> None:
    found = chosen(PROCESSOR)
    assert terms_of(PROCESSOR).model_count == 2
    assert (found["NUM_STREAMS"], found["INFERENCE_NUM_THREADS"]) == ("1", "3")
    assert found["ENABLE_CPU_PINNING"] == "NO"
    assert found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"


def test_priorities_reach_devices_that_have_them() -> None:
    assert "MODEL_PRIORITY" not in chosen(PROCESSOR)
    for priority, name in ((Priority.LOW, "LOW"), (Priority.MEDIUM, "MEDIUM"), (Priority.HIGH, "HIGH")):
        assert chosen(GPU, priority=priority)["MODEL_PRIORITY"] == name


def test_gpu_has_a_stream_for_each_slot() -> None:
    assert terms_of(GPU).model_count == 1
    assert chosen(GPU)["NUM_STREAMS"] == "2"


def test_slots_are_no_more_than_the_device_has_streams() -> None:
    assert [terms_of(d).slots for d in (PROCESSOR, GPU, NPU, OLD_NPU)] == [2, 2, 2, 1]


def test_device_that_cannot_export_caches_nothing() -> None:
    assert described_info("a", NPU).cache_files == CacheFileCounts(1, 1)
    assert described_info("a", OLD_NPU).cache_files == CacheFileCounts()


# Names and hardware


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("openvino-cpu", "CPU"),
        ("openvino-gpu", "GPU"),
        ("openvino-gpu1", "GPU.1"),
        ("openvino-gpu12", "GPU.12"),
        ("openvino-npu", "NPU"),
        ("openvino-gpu0", None),
        ("openvino-npu1", None),
        ("openvino-", None),
    ],
)
def test_names_are_openvino_s(driver: str, name: str | None) -> None:
    assert openvino_name(driver) == name


def machine(root: Path, *devices: tuple[str, str, str]) -> Path:
    for kind, name, vendor in devices:
        folder = root / "class" / kind / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
    return root


def test_machine_without_such_hardware_has_none(tmp_path: Path) -> None:
    assert found_names(tmp_path) == []
    others = machine(tmp_path, ("drm", "renderD128", "0x10de"), ("accel", "accel0", "0x1da3"))
    assert found_names(others) == []


def test_laptop_has_a_gpu_and_an_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = machine(
        tmp_path,
        ("drm", "renderD128", "0x8086"),
        ("drm", "renderD129", "0x8086"),
        ("drm", "renderD130", "0x10de"),
        ("accel", "accel0", "0x8086"),
    )
    (laptop / "class" / "drm" / "renderD131").mkdir()  # It went away meanwhile.
    assert found_names(laptop) == ["openvino-gpu", "openvino-gpu1", "openvino-npu"]
    monkeypatch.setattr(hardware.found_names, "__defaults__", (laptop,))
    names = {"openvino-gpu", "openvino-gpu1", "openvino-npu"}
    assert names <= set(registry.names_on_request())
    assert not names & set(registry.driver_names())


def test_unknown_name_is_reported() -> None:
    with pytest.raises(DeviceUnavailable, match="openvino-tpu: expected openvino-cpu, openvino-gpu"):
        registry.built_in_info("openvino-tpu", "openvino-tpu")


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("flags\t\t: fpu avx2 avx_vnni\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", False),
        ("", False),
    ],
)
def test_processors_whose_sums_of_products_saturate(tmp_path: Path, text: str, does: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert saturates(tmp_path / "cpuinfo") == does
    assert not saturates(tmp_path / "absent")


def test_quantised_layers_are_computed_with_floats_where_sums_saturate() -> None:
    assert "LP_TRANSFORMS_MODE" not in chosen(PROCESSOR)
    assert chosen(msgspec.structs.replace(PROCESSOR, saturates=True))["LP_TRANSFORMS_MODE"] == "NO"
