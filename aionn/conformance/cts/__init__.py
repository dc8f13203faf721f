"""The public conformance data: single tests with their inputs and expected outputs, and the ways to run them on a device."""

from __future__ import annotations

from aionn.conformance.cts.data import (
    CtsOperand,
    CtsOperation,
    CtsSubgraph,
    CtsTest,
    CtsTolerance,
    Mismatch,
    build_model,
    check_shapes,
    compare,
    iterate_tests,
    load_tests,
    main_inputs,
    operand_bytes,
    operation_types,
    output_place,
    signed_counterpart,
    test_files,
)

__all__ = [
    "CtsOperand",
    "CtsOperation",
    "CtsSubgraph",
    "CtsTest",
    "CtsTolerance",
    "Mismatch",
    "build_model",
    "check_shapes",
    "compare",
    "iterate_tests",
    "load_tests",
    "main_inputs",
    "operand_bytes",
    "operation_types",
    "output_place",
    "signed_counterpart",
    "test_files",
]
