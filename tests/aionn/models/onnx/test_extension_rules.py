"""Shape rules of the extension's operations, which a file or a client's record reaches with any attributes and constants."""

import random

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.extension import AttributeTensor, ValueType
from aionn.models.onnx.extension.application import Application
from aionn.models.onnx.extension.attributes import ATTRIBUTE_NAMES
from aionn.models.onnx.extension.contracts import CONTRACTS, output_types
from aionn.models.onnx.schema import DataType, ValueInfo
from tests.aionn.models.onnx.building import file

APPLICATIONS = 30
"""For each operator."""

NUMBERS = (-(2**63), -(2**31), -7, -2, -1, 0, 1, 2, 3, 5, 2**31 - 1, 2**62, 2**63 - 1)
REALS = (-1e300, -1.0, 0.0, 0.5, 2.0, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "NOTSET",
    "SAME_UPPER",
    "VALID",
    "stretch",
    "not_larger",
    "ij,jk->ik",
    "...i->i...",
    "->",
    "i,,j->",
)


def attribute(r: random.Random) -> object:
    return r.choice(
        [
            lambda: r.choice(NUMBERS),
            lambda: r.choice(REALS),
            lambda: r.choice(TEXTS),
            lambda: r.choices(NUMBERS, k=r.randrange(6)),
            lambda: r.choices((0, 1, 2, 3), k=r.randrange(6)),
            lambda: r.choices(REALS, k=r.randrange(1, 6)),
            lambda: r.choices(TEXTS, k=r.randrange(1, 3)),
            lambda: AttributeTensor.of(np.array(r.choices((0, 1, 5), k=r.randrange(3)), np.int64)),
        ]
    )()


def value(r: random.Random) -> ValueType | None:
    if r.random() < 0.1:
        return None
    kind = r.choice([DataType.FLOAT, DataType.INT64, DataType.INT32, DataType.BOOL, DataType.STRING])
    shape = tuple(r.choices((-1, 0, 1, 2, 3, 2**31 - 1), (1, 1, 4, 4, 4, 1), k=r.randrange(6)))
    return ValueType(int(kind), None if r.random() < 0.1 else shape)


def constant(r: random.Random) -> np.ndarray | None:
    shape = r.choice([(), (1,), (2,), (4,), (0,), (2, 2)])
    if r.random() < 0.5:
        return np.array(r.choices(NUMBERS, k=int(np.prod(shape)))).astype(np.int64).reshape(shape)
    if r.random() < 0.5:
        return np.array(r.choices(REALS, k=int(np.prod(shape)))).reshape(shape)
    return None


@pytest.mark.thorough
def test_any_application_of_an_operator_has_output_types_or_is_an_invalid_model(
    pytestconfig: pytest.Config,
) -> None:
    r = random.Random(7)
    for op_type in [
        name for name in CONTRACTS for _ in range(2000 if pytestconfig.getoption("--long") else APPLICATIONS)
    ]:
        least, most = CONTRACTS[op_type].least, min(CONTRACTS[op_type].most, 8)
        names = sorted(ATTRIBUTE_NAMES.get(op_type, ()))
        count = r.randrange(least, most + 1)
        application = Application(
            op_type,
            r.choice([1, 6, 7, 9, 10, 11, 13, 18, 20, 24]),
            {name: attribute(r) for name in r.sample(names, r.randrange(len(names) + 1))},
            [value(r) for _ in range(count)],
            [constant(r) for _ in range(count)],
            r.choice([1, 1, 2, 3]),
        )
        try:
            found = output_types(application)
        except InvalidModel:
            continue
        assert len(found) == application.outputs


@pytest.mark.parametrize(
    ("nodes", "shape", "constants"),
    [
        ([node("Unsqueeze", ["x", "a"], ["y"])], (2, 3), {"a": np.array([0, 0])}),
        ([node("ConstantOfShape", ["x"], ["y"], value=5)], (2,), {}),
    ],
    ids=["axes that repeat", "a number instead of a tensor"],
)
def test_faults_that_a_rule_meets_are_faults_of_the_file(nodes: list, shape: tuple, constants: dict) -> None:
    kind = DataType.INT16 if constants else DataType.INT64
    with pytest.raises(InvalidModel, match="expected") as caught:
        load_onnx(file(nodes, [ValueInfo("x", kind, shape)], ["y"], constants))
    assert "unforeseen" not in str(caught.value)


@pytest.mark.parametrize("count", [33, 1025])
def test_long_list_of_extents_is_rejected_before_it_is_multiplied(count: int) -> None:
    # The product of 65,000 extents takes half a minute.
    extents = np.full(count, 2**62)
    inputs = [ValueType(int(DataType.FLOAT), (2, 3)), ValueType(int(DataType.INT64), (count,))]
    with pytest.raises(InvalidModel, match=r"expected at most .* got"):
        output_types(Application("Reshape", 13, {}, inputs, [None, extents], 1))
    with pytest.raises(InvalidModel, match=r"expected at most .* got"):
        output_types(Application("Reshape", 1, {"shape": extents.tolist()}, inputs[:1], [None], 1))
    with pytest.raises(InvalidModel, match=r"expected at most .* got"):
        given = [ValueInfo("x", DataType.FLOAT, (2, 3))]
        load_onnx(file([node("Reshape", ["x", "a"], ["y"])], given, ["y"], {"a": extents}))
