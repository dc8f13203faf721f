"""Small files that describe large values: what the import makes of them is charged before it takes memory or time."""

import tracemalloc

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx, writer
from aionn.models.onnx.encoding import node
from aionn.models.onnx.graph import Functions, inner_nodes, resolve
from aionn.models.onnx.schema import DataType, GraphProto, ValueInfo, read_model
from tests.aionn.models.onnx.building import file

BUDGET_BYTES = 1 << 20
PEAK_BYTES_MAX = 8 * BUDGET_BYTES
"""Temporary values of an operator may be some times as large as its result."""

LARGE = 1 << 24
"""Elements of values that no test has memory for: 64 times the budget and more."""

FLOAT, WHOLE = np.float32, np.int64


def x(*shape: int, kind: DataType = DataType.FLOAT) -> ValueInfo:
    return ValueInfo("x", kind, shape)


IMAGE = x(1, 1, 4, 4)
EXPAND = node("Expand", ["one", "shape"], ["w"])
"""A constant that repeats one number: a view, which takes no memory by itself."""

CASES = {
    "Resize to sizes": ([node("Resize", ["x", "", "", "s"], ["y"])], IMAGE, {"s": np.array([1, 1, 4, LARGE], WHOLE)}),
    "Resize by scales": ([node("Resize", ["x", "", "s"], ["y"])], IMAGE, {"s": np.array([1, 1, 1, LARGE / 4], FLOAT)}),
    "OneHot": (
        [node("OneHot", ["x", "d", "v"], ["y"])],
        x(1, kind=DataType.INT64),
        {"d": np.array(LARGE, WHOLE), "v": np.array([0, 1], FLOAT)},
    ),
    "Hardmax": ([node("Hardmax", ["x"], ["y"])], x(1, LARGE), {}),
    "Concat of whole numbers": (
        [node("Concat", ["x", "x"], ["y"], axis=0)],
        x(LARGE // 2, kind=DataType.INT32),
        {},
    ),
    "DepthToSpace": (
        [node("DepthToSpace", ["x"], ["y"], blocksize=2, mode="CRD")],
        x(1, LARGE, 1, 1),
        {},
    ),
    "Transpose of whole numbers": (
        [node("Transpose", ["x"], ["y"], perm=[1, 0])],
        x(LARGE // 8, 8, kind=DataType.INT32),
        {},
    ),
    "Transpose of six axes": (
        [node("Transpose", ["x"], ["y"], perm=[5, 3, 1, 0, 2, 4])],
        x(LARGE // 32, 2, 2, 2, 2, 2),
        {},
    ),
    "Expand of many axes": (
        [node("Expand", ["x", "s"], ["y"])],
        x(LARGE // 16, 1, 2, 1, 2, 1, 2),
        {"s": np.array([LARGE // 16, 2, 2, 2, 2, 2, 2], WHOLE)},
    ),
    "DequantizeLinear": (
        [node("DequantizeLinear", ["x", "s"], ["y"], axis=0, block_size=LARGE)],
        x(2, kind=DataType.UINT8),
        {"s": np.array([1], FLOAT)},
    ),
    "QuantizeLinear": (
        [node("QuantizeLinear", ["x", "s"], ["y"], axis=0, block_size=LARGE)],
        x(2),
        {"s": np.array([1], FLOAT)},
    ),
    "BatchNormalization": (
        [EXPAND, node("BatchNormalization", ["x", "w", "w", "w", "w"], ["y"])],
        x(1, LARGE),
        {"one": np.ones(1, FLOAT), "shape": np.array([LARGE], WHOLE)},
    ),
    "a view of 2**40 elements": (
        [EXPAND, node("Add", ["x", "w"], ["y"])],
        x(1),
        {"one": np.ones(1, FLOAT), "shape": np.array([1 << 40], WHOLE)},
    ),
    "Gather by a view": (
        [EXPAND, node("Gather", ["x", "w"], ["y"])],
        x(8),
        {"one": np.ones(1, WHOLE), "shape": np.array([LARGE], WHOLE)},
    ),
    "GatherND by a view": (
        [EXPAND, node("GatherND", ["x", "w"], ["y"])],
        x(8),
        {"one": np.zeros((1, 1), WHOLE), "shape": np.array([LARGE, 1], WHOLE)},
    ),
    "many Gather by the same numbers": (
        [
            *(node("Gather", ["x", "i"], [f"y{n}"]) for n in range(40)),
            node("Concat", [f"y{n}" for n in range(40)], ["y"], axis=0),
        ],
        x(8),
        {"i": np.zeros(1 << 16, WHOLE)},
    ),
    "Cast of a view": (
        [EXPAND, node("Cast", ["w"], ["c"], to=int(DataType.DOUBLE)), node("Where", ["x", "c", "c"], ["y"])],
        x(1, kind=DataType.BOOL),
        {"one": np.ones(1, bool), "shape": np.array([BUDGET_BYTES], WHOLE)},
    ),
    "Max of one constant many times": (
        [EXPAND, node("Max", ["w"] * 100, ["m"]), node("Add", ["x", "m"], ["y"])],
        x(1),
        {"one": np.ones(1, FLOAT), "shape": np.array([BUDGET_BYTES // 16], WHOLE)},
    ),
    "windows": (
        [
            *(node("HannWindow", ["s"], [f"w{n}"]) for n in range(4)),
            node("Sum", ["x", *(f"w{n}" for n in range(4))], ["y"]),
        ],
        x(1),
        {"s": np.array(BUDGET_BYTES // 16, WHOLE)},
    ),
    "Trilu": (
        [EXPAND, node("Trilu", ["w"], ["t"]), node("Add", ["x", "t"], ["y"])],
        x(1),
        {"one": np.ones(1, np.float64), "shape": np.array([512, 512], WHOLE)},
    ),
    "Range": (
        [node("Range", ["a", "n", "b"], ["r"]), node("Add", ["x", "r"], ["y"])],
        x(1, kind=DataType.INT16),
        {"a": np.array(0, np.int16), "b": np.array(1, np.int16), "n": np.array(1 << 14, np.int16)},
    ),
}  # fmt: skip
for op_type, names in {
    "Expand": ["x", "w"],
    "Reshape": ["x", "w"],
    "Tile": ["x", "w"],
    "Slice": ["x", "w", "w"],
    "Pad": ["x", "w"],
    "Unsqueeze": ["x", "w"],
    "ReduceSum": ["x", "w"],
    "Split": ["x", "w"],
    "CenterCropPad": ["x", "w"],
    "Resize": ["x", "", "", "w"],
    "AffineGrid": ["x", "w"],
    "MaxUnpool": ["x", "x", "w"],
    "OneHot": ["x", "w", "x"],
}.items():
    CASES[f"{op_type} by a view"] = (
        [EXPAND, node(op_type, names, ["y"])],
        x(2, 3),
        {"one": np.ones(1, WHOLE), "shape": np.array([LARGE], WHOLE)},
    )
ACCEPTED = {"Range"}


@pytest.mark.parametrize("name", CASES)
def test_large_values_of_small_files_are_charged_before_they_take_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, given, constants = CASES[name]
    data = file(nodes, [given], ["y"], constants)
    monkeypatch.setattr(writer, "CONSTANT_BYTES_MAX", BUDGET_BYTES)
    tracemalloc.start()
    try:
        if name in ACCEPTED:
            load_onnx(data)
        else:
            with pytest.raises(InvalidModel, match="expected"):
                load_onnx(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES_MAX


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_bounds_of_a_constant_that_repeats_one_number_take_no_time(dtype: type) -> None:
    """Four gigabytes of elements, each of which is the same: a look at all would take seconds for each of many nodes."""
    count = (1 << 32) // np.dtype(dtype).itemsize - 1
    nodes = [
        *(node("ConstantOfShape", ["s"], [f"w{n}"], value=np.ones(1, dtype)) for n in range(100)),
        *(node("Shape", [f"w{n}"], [f"s{n}"]) for n in range(100)),
        node("Sum", ["x", *(f"s{n}" for n in range(100))], ["y"]),
    ]
    model = load_onnx(file(nodes, [x(1, kind=DataType.INT64)], ["y"], {"s": np.array([count], WHOLE)}))
    assert model.outputs[0].dimensions == (1,)


def test_names_outside_of_a_branch_are_not_gone_through() -> None:
    """A file may have as many branches as names: a pass over all names for each would take minutes for some megabytes."""

    class Names:
        """Answers whether it has a name, and cannot be gone through."""

        def __contains__(self, name: object) -> bool:
            return name in ("x", "c")

    branch = GraphProto((node("Add", ["x", "c"], ["r"]),), (), (ValueInfo("r"), ValueInfo("x")))
    outer = resolve(read_model(file([node("Add", ["x", "x"], ["y"])], [x(1)], ["y"]))).nodes[0]
    (inner,) = inner_nodes(branch, outer, Functions({}), [Names()])
    assert inner.op_type == "Add"
    with pytest.raises(InvalidModel, match="got 'z'"):
        inner_nodes(
            GraphProto((node("Add", ["x", "z"], ["r"]),), (), (ValueInfo("r"),)),
            outer,
            Functions({}),
            [Names()],
        )
    with pytest.raises(InvalidModel, match="'c' again"):
        inner_nodes(
            GraphProto((node("Add", ["x", "x"], ["c"]),), (), (ValueInfo("c"),)),
            outer,
            Functions({}),
            [Names()],
        )
