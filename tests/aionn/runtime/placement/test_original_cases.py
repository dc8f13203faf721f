"""The 46 partitioning cases of the original runtime (``TestPartitioning``), and which of our tests claims the same.

Source: ``runtime/test/TestPartitioning.cpp`` of the NN HAL's runtime: 11 of partitioning, 10 of dynamic temporaries (one of them
disabled there), 14 of cache tokens, 1 of performance, 6 of control flow, 4 of memory roles.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

TABLE = """
PartitioningTest
    SimpleModel: partition one_device_gives_one_step
    SimpleModel: levels ready_operations_of_a_device_join_its_step
    SliceModel: levels slice_has_what_the_level_can_express
    SliceModel: levels slice_makes_inputs_and_outputs_of_what_was_cut
    SliceModelToEmpty: levels nothing_is_left_of_a_model_above_the_level
    Cpu: partition_plans what_only_the_reference_device_does_stands_between_two_steps_of_a_device
    SetPartitioning: partition_plans failing_partition_by_mode
    ModelOutputAsStepModelInput: levels output_that_a_later_step_reads_is_the_callers_as_well
    OemOperations: levels oem_operation_goes_to_who_knows_it_or_nobody
    RelaxedFP: partition relaxed_models_use_the_relaxed_entries
    Perf: partition_plans score_is_of_the_first_inputs_type
    ZeroInputStepModel: partition_plans step_that_no_driver_can_be_given_puts_the_whole_model_on_the_reference_device
    ZeroOutputStepModel: partition_plans step_that_no_driver_can_be_given_puts_the_whole_model_on_the_reference_device
DynamicTemporariesTest
    ModelOutputsSufficientSize: dynamic_temporaries values_of_unknown_size_between_devices
    DISABLED_ModelOutputsSufficientSize_V1_1: dynamic_temporaries devices_below_level_3_are_not_given_values_of_unknown_size
    DynamicTemporariesUnspecifiedOutputs: dynamic_temporaries values_of_unknown_size_between_devices
    DynamicTemporariesSpecifiedOutputs: dynamic_temporaries values_of_unknown_size_between_devices
    DynamicTemporariesSpecifiedOutputs_V1_2: dynamic_temporaries values_of_unknown_size_between_devices
    DynamicTemporariesSpecifiedOutputs_V1_1: dynamic_temporaries devices_below_level_3_are_not_given_values_of_unknown_size
    ModelOutputsInsufficientSizeWithDynamicTemporary: dynamic_temporaries output_that_is_too_small_is_the_callers_to_hear_of
    ModelOutputsInsufficientSizeWithoutDynamicTemporary: dynamic_temporaries output_that_is_too_small_is_the_callers_to_hear_of
    ModelOutput2InsufficientSizeWithoutDynamicTemporary: dynamic_temporaries output_that_is_too_small_is_the_callers_to_hear_of
    ModelOutput4InsufficientSizeWithoutDynamicTemporary: dynamic_temporaries output_that_is_too_small_is_the_callers_to_hear_of
CacheTest
    CacheTokenNoneSimpleBody: partition_plans no_token_no_cache
    CacheTokenDifferentDeviceNamesSimpleBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentDeviceVersionStringsSimpleBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentPreferencesSimpleBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentPrioritiesSimpleBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentTokensSimpleBody: partition_plans token_of_a_step_depends_on
    CacheTokenNoneCompoundBody: partition_plans no_token_no_cache
    CacheTokenDifferentDeviceNamesCompoundBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentDeviceVersionStringsCompoundBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentPreferencesCompoundBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentPrioritiesCompoundBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentTokensCompoundBody: partition_plans token_of_a_step_depends_on
    CacheTokenDifferentPartitionsCompoundBody: partition_plans token_of_a_step_depends_on_the_partition
    CacheTokenDifferentReferenceModelPartitions: partition_plans token_of_a_step_depends_on_its_subgraph
PerfTest
    Lookup: hal/vocabulary performance_lookup_checks_equality
    Lookup: partition_plans performance_is_looked_up_by_type
ControlFlowPartitioningTest
    IF_Interpreted: control_flow if_is_interpreted_where_devices_support_only_its_branches
    WHILE_Interpreted: control_flow while_is_interpreted_and_its_condition_goes_where_it_is_supported
    IF_SimplePlan: control_flow device_that_supports_all_gets_it_as_a_whole
    WHILE_SimplePlan: control_flow device_that_supports_all_gets_it_as_a_whole
    IF_UnknownSize: partition_plans control_flow_with_any_unknown_size_is_the_reference_devices
    WHILE_UnknownSize: partition_plans control_flow_with_any_unknown_size_is_the_reference_devices
MemoryStepRoleTest
    NoControlFlow: partition_plans roles_of_values_between_steps
    InterpretedIf: partition_plans roles_of_values_of_an_interpreted_if
    InterpretedWhile: partition_plans roles_of_values_of_an_interpreted_while
    NestedInterpretedControlFlow: partition_plans roles_of_values_of_nested_interpreted_control_flow
"""
"""Per suite a line for each case: its name, then the file and the name of our test; a case may have several lines."""


def counterparts() -> list[tuple[str, str, str]]:
    """Case, file and test."""
    found, suite = [], ""
    for line in TABLE.strip().splitlines():
        if not line.startswith(" "):
            suite = line
            continue
        case, place = line.strip().split(": ")
        file, name = place.split()
        folder = "" if "/" in file else "runtime/placement/"
        path = Path(folder + file)
        found.append((f"{suite}.{case}", f"{path.parent}/test_{path.name}.py", f"test_{name}"))
    return found


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_case_of_the_original_is_listed() -> None:
    cases = {case for case, _, _ in counterparts()}
    assert len(cases) == 46
    per_suite = Counter(case.split(".")[0] for case in cases)
    assert sorted(per_suite.values()) == [1, 4, 6, 10, 11, 14]


@pytest.mark.parametrize(("case", "file", "test"), counterparts())
def test_case_of_the_original_has_a_counterpart(case: str, file: str, test: str, repository: Path) -> None:
    assert test in functions_of(repository / "tests" / "aionn" / file), f"{case}: {file} has no {test}"
