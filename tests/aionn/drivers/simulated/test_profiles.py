"""Described devices: durations, clock, draws and files."""

import itertools

import msgspec
import pytest

from aionn.drivers.kit.described import convert_described
from aionn.drivers.simulated.profiles import (
    DEVICE_SETS,
    PROFILES,
    ClockRamp,
    ClockState,
    DeviceProfile,
    FailureRates,
    Fault,
    ModelCost,
    OperationCost,
    clock_share_at,
    draws,
    model_cost,
    model_duration_ns,
    operation_durations_ns,
    profile_named,
    read_profile,
    run_operations,
    unsupported_reason,
)
from aionn.errors import InvalidArgument
from aionn.hal import CancelCapability, DeviceType, OperationType
from aionn.models.tflite import load_tflite

PLAIN = DeviceProfile(name="plain", rates={"int8": 1e9}, memory_bandwidth=1e9)
CONV = int(OperationType.CONV_2D)


def test_duration_is_the_slower_of_arithmetic_and_memory():
    assert operation_durations_ns(PLAIN, ModelCost((OperationCost(CONV, "int8", 500, 100),))) == (500,)
    assert operation_durations_ns(PLAIN, ModelCost((OperationCost(CONV, "int8", 500, 900),))) == (900,)


def test_overheads_are_paid_per_operation_and_per_execution():
    profile = msgspec.structs.replace(PLAIN, operation_overhead_ns=10, launch_overhead_ns=1000)
    cost = ModelCost((OperationCost(CONV, "int8", 5, 0),) * 3)
    assert operation_durations_ns(profile, cost) == (1015, 15, 15)
    assert model_duration_ns(profile, cost, clock_share=0.5) == 1000 + 3 * 20


def test_nothing_takes_no_time_at_all():
    assert operation_durations_ns(PLAIN, ModelCost((OperationCost(CONV, "int8", 0, 0),))) == (1,)
    assert operation_durations_ns(PLAIN, ModelCost(())) == (1,)


def test_unsupported_models_are_told():
    cost = ModelCost((OperationCost(CONV, "float32", 1, 1),), 100)
    assert unsupported_reason(PLAIN, cost) == "operation 0 (CONV_2D, float32) is not supported"
    small = msgspec.structs.replace(PLAIN, memory_bytes_max=99)
    assert unsupported_reason(small, cost) == "needs 100 bytes, the device has 99"
    with pytest.raises(InvalidArgument, match="device plain: the model operation 0"):
        operation_durations_ns(PLAIN, cost)
    only = msgspec.structs.replace(PLAIN, supported_operations=("ADD",))
    assert "CONV_2D" in str(unsupported_reason(only, ModelCost((OperationCost(CONV, "int8", 1, 1),))))


def test_cost_of_a_known_network(example_data, shared):
    model = load_tflite(shared / "models" / "mobilenet_v2_1.0_224_float.tflite").model
    cost = model_cost(model)
    # Published: 300 million multiply-adds, that is 600 million operations, and 3.5 million parameters.
    assert sum(o.arithmetic for o in cost.operations) == pytest.approx(600e6, rel=0.02)
    assert {o.data_type for o in cost.operations} == {"float32"}


def test_clock_rises_while_busy_and_falls_after_a_rest():
    ramp = ClockRamp(0.5, 1000, 100)
    profile = msgspec.structs.replace(PLAIN, clock=ramp)
    assert clock_share_at(ramp, None, 0) == 0.5
    ends, state = run_operations(profile, [500, 500, 500, 500], 0, 0.5)
    gaps = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert gaps[0] == 1000 and gaps == sorted(gaps, reverse=True) and gaps[-1] == 500
    assert state == ClockState(1.0, ends[-1])
    assert clock_share_at(ramp, state, ends[-1] + 100) == 1.0
    assert clock_share_at(ramp, state, ends[-1] + 101) == 0.5
    assert clock_share_at(ramp, state, ends[-1] + 10**9, held=True) == 1.0


def test_draws_follow_the_seed_and_the_rates():
    profile = msgspec.structs.replace(
        PLAIN, noise=0.1, failures=FailureRates(transient=0.1, persistent=0.1, hang=0.1, death=0.1)
    )
    first = list(itertools.islice(draws(profile, 1), 4000))
    assert first == list(itertools.islice(draws(profile, 1), 4000))
    assert first != list(itertools.islice(draws(profile, 2), 4000))
    for fault in Fault:
        share = sum(draw.fault is fault for draw in first) / len(first)
        assert share == pytest.approx(0.6 if fault is Fault.NONE else 0.1, abs=0.03)
    assert all(0 <= draw.at_share <= 1 and draw.factor > 0 for draw in first)
    exact = next(draws(PLAIN, 1))
    assert (exact.factor, exact.fault) == (1.0, Fault.NONE)


def test_ready_profiles_stand_in_sets():
    assert {name for names in DEVICE_SETS.values() for name in names} == set(PROFILES)
    assert profile_named("phone-gpu").device_type == DeviceType.GPU
    assert profile_named("phone-npu").cancel == CancelCapability.BETWEEN_OPERATIONS
    with pytest.raises(InvalidArgument, match="expected one of phone-cpu"):
        profile_named("moon")


TEXT = """\
name = "mine"
type = "accelerator"
slots = 2
memory_bandwidth = 1e9
noise = 0.1
[rates]
int8 = 1e9
[clock]
cold_share = 0.5
[failures]
hang = 0.5
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("slots = 2", "slots = 0", "line 3, slots: expected from 1 to 1024, got 0"),
        ("slots = 2", "slots = 'two'", "line 3, slots: expected a whole number, got a text"),
        ("slots = 2", "slotz = 2", "line 3, slotz: expected one of name, type, slots, "),
        ("slots = 2", "slotz = 2", "; got slotz; did you mean slots?"),
        ("hang = 0.5", "hung = 0.5", "line 11, failures.hung: expected one of "),
        ('"accelerator"', '"brain"', "line 2, type: expected one of cpu"),
        ("int8 = 1e9", "int8 = -1.0", "line 6, rates: expected positive numbers"),
        ("int8 = 1e9", "int4 = 1e9", "line 6, rates: expected one rate or more for float32"),
        ("cold_share = 0.5", "cold_share = 0.0", "line 9, clock.cold_share: expected above 0"),
        ("hang = 0.5", "hang = 1.5", "line 11, failures.hang: expected a probability"),
        ("noise = 0.1", "noise = nan", "line 5, noise: expected at least 0"),
    ],
)
def test_mistake_is_told_with_line_and_field(old, new, told):
    with pytest.raises(InvalidArgument) as caught:
        convert_described(TEXT.replace(old, new), DeviceProfile, where="mine.toml")
    assert str(caught.value).startswith("mine.toml, line ") and told in str(caught.value)


def test_profile_is_read_from_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(TEXT)
    assert read_profile(tmp_path / "mine.toml").slots == 2
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_profile(tmp_path / "other.toml")
