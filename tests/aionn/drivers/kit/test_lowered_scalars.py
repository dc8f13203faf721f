"""A lowering reads each scalar of a model once, which may be in memory that a client changes meanwhile."""

from collections import Counter

import pytest

from aionn.drivers.kit.engines.known import Known
from aionn.drivers.kit.onnx.lowering import lower
from aionn.hal import is_scalar_type
from aionn.models.onnx import load_onnx
from tests.aionn.models.onnx.test_numbers import convolutions


def test_each_scalar_is_read_once_after_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_onnx(convolutions()).model
    after = Counter[int]()
    value, made = Known.value, Known.__init__

    def counted(self: Known, index: int) -> object:
        if is_scalar_type(model.main.operands[index].type):
            after[index] += self in finished
        return value(self, index)

    finished: list[Known] = []

    def noted(self: Known, *given: object, **more: object) -> None:
        made(self, *given, **more)  # type: ignore[arg-type]
        finished.append(self)

    monkeypatch.setattr(Known, "value", counted)
    monkeypatch.setattr(Known, "__init__", noted)
    assert lower(model).file
    assert max(after.values()) == 1
