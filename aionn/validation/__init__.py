"""The rules for models, requests and descriptions of devices.

Owns every rule that a type cannot express; each check is a pure function that returns its findings or raises an error with the
place, the expected and the actual value. ``aionn.ops`` defines the operations.

- ``validate_model``: a whole model; gives the lowest feature level that can express it.
- ``validate_request``: the arguments of an execution; gives the inputs' final shapes.
- ``check_field_types``: whether a record of Python code holds what its annotations declare.
- ``is_iterable``: whether an argument can be taken for a list.
- ``check_*``: capabilities, extensions, cache files, buffer roles, results.

Source: section "Validation" of the NN HAL 1.3 and of its canonical types.
"""

from __future__ import annotations

from aionn.validation.devices import (
    check_allocation,
    check_buffer_roles,
    check_cache_files,
    check_capabilities,
    check_device_info,
    check_execution_result,
    check_extension,
    check_extensions,
    check_output_shapes,
    check_timing,
)
from aionn.validation.field_types import check_field_types, is_iterable
from aionn.validation.models import needed_inputs, validate_model
from aionn.validation.requests import check_memory_identifiers, validate_request

__all__ = [
    "check_allocation",
    "check_buffer_roles",
    "check_cache_files",
    "check_capabilities",
    "check_device_info",
    "check_execution_result",
    "check_extension",
    "check_extensions",
    "check_field_types",
    "check_memory_identifiers",
    "check_output_shapes",
    "check_timing",
    "is_iterable",
    "needed_inputs",
    "validate_model",
    "validate_request",
]
