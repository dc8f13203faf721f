"""A writer of TensorFlow Lite files for tests, made of the field numbers that the importer reads by."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite
from aionn.models.tflite.graph import stored_shape
from aionn.models.tflite.schema import FIELDS, OPTIONS, Field, TensorType
from aionn.validation import validate_model

SEED = 20240607
DAMAGES = 12

_TYPES = {
    "float32": TensorType.FLOAT32,
    "float16": TensorType.FLOAT16,
    "int32": TensorType.INT32,
    "int64": TensorType.INT64,
    "uint8": TensorType.UINT8,
    "int8": TensorType.INT8,
    "int16": TensorType.INT16,
    "bool": TensorType.BOOL,
}


_PEER_OPTIONS = {
    "SplitOptions": (35, {"num_splits": Field(0, "int32")}),
    "ArgMaxOptions": (40, {"output_type": Field(0, "int8")}),
    "ShapeOptions": (55, {"out_type": Field(0, "int8")}),
    "ArgMinOptions": (57, {"output_type": Field(0, "int8")}),
    "PackOptions": (59, {"values_count": Field(0, "int32"), "axis": Field(1, "int32")}),
    "SplitVOptions": (79, {"num_splits": Field(0, "int32")}),
}
"""Options that the importer has no need of, but LiteRT has."""


class T(NamedTuple):
    """A tensor to write: a constant where it has a value."""

    dtype: str
    shape: tuple[int, ...] = ()
    value: Any = None
    scale: Any = None
    zero_point: Any = 0
    axis: int = 0
    signature: tuple[int, ...] | None = None
    is_variable: bool = False


class Op(NamedTuple):
    """An operator to write: code, options table and options, tensor indexes."""

    code: int
    inputs: Iterable[int]
    outputs: Iterable[int]
    options: str | None = None
    values: dict[str, Any] = {}  # noqa: RUF012
    custom: str = ""
    version: int = 1


class Graph(NamedTuple):
    """A subgraph to write."""

    tensors: list[T]
    operators: list[Op]
    inputs: list[int]
    outputs: list[int]


class _Writer:
    def __init__(self) -> None:
        self.b = flatbuffers.Builder(1024)
        self.buffers: list[bytes] = [b""]
        self.codes: list[tuple[int, str, int]] = []

    def table(self, slots: dict[int, tuple[str, Any]]) -> int:
        self.b.StartObject(max(slots, default=-1) + 1)
        for slot, (kind, value) in slots.items():
            if kind == "offset":
                self.b.PrependUOffsetTRelativeSlot(slot, value, 0)
                continue
            add = {
                "int8": self.b.PrependInt8,
                "uint8": self.b.PrependUint8,
                "bool": self.b.PrependBool,
                "int32": self.b.PrependInt32,
                "uint32": self.b.PrependUint32,
                "float32": self.b.PrependFloat32,
            }[kind]
            add(value)
            self.b.Slot(slot)
        return int(self.b.EndObject())

    def offsets(self, items: list[int]) -> int:
        self.b.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.b.PrependUOffsetTRelative(item)
        return int(self.b.EndVector())

    def array(self, values: Iterable[Any], dtype: str) -> int:
        return int(self.b.CreateNumpyVector(np.array(list(values), dtype=dtype)))

    def tensor(self, tensor: T, index: int) -> int:
        names = FIELDS["Tensor"]
        buffer = 0
        if tensor.value is not None:
            buffer = len(self.buffers)
            self.buffers.append(np.ascontiguousarray(tensor.value, dtype=tensor.dtype).tobytes())
        slots: dict[int, tuple[str, Any]] = {}
        if tensor.scale is not None:
            scales = np.atleast_1d(tensor.scale)
            points = np.broadcast_to(tensor.zero_point, scales.shape)
            q = FIELDS["QuantizationParameters"]
            parts = self.array(scales, "float32"), self.array(points, "int64")
            quant = self.table(
                {
                    q["scale"]: ("offset", parts[0]),
                    q["zero_point"]: ("offset", parts[1]),
                    q["quantized_dimension"]: ("int32", tensor.axis),
                }
            )
            slots[names["quantization"]] = ("offset", quant)
        shape = np.shape(tensor.value) if tensor.value is not None else tensor.shape
        slots[names["shape"]] = ("offset", self.array(shape, "int32"))
        if tensor.signature is not None:
            slots[names["shape_signature"]] = ("offset", self.array(tensor.signature, "int32"))
        slots[names["name"]] = ("offset", self.b.CreateString(f"t{index}"))
        slots[names["type"]] = ("int8", _TYPES[tensor.dtype])
        slots[names["buffer"]] = ("uint32", buffer)
        slots[names["is_variable"]] = ("bool", tensor.is_variable)
        return self.table(slots)

    def operator(self, op: Op) -> int:
        names = FIELDS["Operator"]
        key = (op.code, op.custom, op.version)
        if key not in self.codes:
            self.codes.append(key)
        slots = {
            names["inputs"]: ("offset", self.array(op.inputs, "int32")),
            names["outputs"]: ("offset", self.array(op.outputs, "int32")),
        }
        if op.options is not None:
            code, fields = (OPTIONS | _PEER_OPTIONS)[op.options]
            options = self.table({fields[n].number: (fields[n].kind, v) for n, v in op.values.items()})
            slots[names["builtin_options_type"]] = ("uint8", code)
            slots[names["builtin_options"]] = ("offset", options)
        slots[names["opcode_index"]] = ("uint32", self.codes.index(key))
        return self.table(slots)

    def graph(self, graph: Graph) -> int:
        names = FIELDS["SubGraph"]
        tensors = self.offsets([self.tensor(t, i) for i, t in enumerate(graph.tensors)])
        operators = self.offsets([self.operator(o) for o in graph.operators])
        return self.table(
            {
                names["tensors"]: ("offset", tensors),
                names["inputs"]: ("offset", self.array(graph.inputs, "int32")),
                names["outputs"]: ("offset", self.array(graph.outputs, "int32")),
                names["operators"]: ("offset", operators),
            }
        )

    def operator_code(self, code: int, custom: str, version: int) -> int:
        names = FIELDS["OperatorCode"]
        slots: dict[int, tuple[str, Any]] = {}
        if custom:
            slots[names["custom_code"]] = ("offset", self.b.CreateString(custom))
        slots[names["deprecated_builtin_code"]] = ("int8", min(code, 127))
        slots[names["version"]] = ("int32", version)
        slots[names["builtin_code"]] = ("int32", code)
        return self.table(slots)

    def buffer(self, data: bytes) -> int:
        if not data:
            return self.table({})
        return self.table({FIELDS["Buffer"]["data"]: ("offset", self.b.CreateByteVector(data))})

    def file(self, graphs: tuple[Graph, ...]) -> bytes:
        names = FIELDS["Model"]
        subgraphs = self.offsets([self.graph(g) for g in graphs])
        codes = self.offsets([self.operator_code(*c) for c in self.codes])
        buffers = self.offsets([self.buffer(d) for d in self.buffers])
        model = self.table(
            {
                names["version"]: ("uint32", 3),
                names["operator_codes"]: ("offset", codes),
                names["subgraphs"]: ("offset", subgraphs),
                names["buffers"]: ("offset", buffers),
            }
        )
        self.b.Finish(model, file_identifier=b"TFL3")
        return bytes(self.b.Output())


class Tflite:
    """What tests write files with."""

    T = T
    Op = Op
    Graph = Graph

    @staticmethod
    def write(*graphs: Graph) -> bytes:
        """A file of these subgraphs."""
        return _Writer().file(graphs)

    @staticmethod
    def one(inputs: list[T], outputs: list[T], code: int, options: str | None = None, **values: Any) -> Graph:
        """A graph of one operator; inputs with a value are constants."""
        tensors = [*inputs, *outputs]
        ins = list(range(len(inputs)))
        outs = list(range(len(inputs), len(tensors)))
        op = Op(code, ins, outs, options, values)
        return Graph(tensors, [op], [i for i in ins if inputs[i].value is None], outs)

    @staticmethod
    def f32(*shape: int) -> T:
        """A FLOAT32 tensor."""
        return T("float32", shape)

    @staticmethod
    def weights(shape: tuple[int, ...]) -> Any:
        """INT8 weights."""
        return np.random.default_rng(1).integers(-127, 128, shape).astype(np.int8)

    @staticmethod
    def reals(shape: tuple[int, ...]) -> Any:
        """FLOAT32 weights."""
        return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


@pytest.fixture(scope="session")
def tflite() -> Tflite:
    """Writes TensorFlow Lite files: ``tflite.write(tflite.Graph(...), ...)``."""
    return Tflite()


def _random(rng: np.random.Generator, dtype: Any, shape: Any) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return rng.uniform(-3, 3, shape).astype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.itemsize == 1:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    return rng.integers(-20, 20, shape).astype(dtype)


@pytest.fixture
def load_damaged(tflite: Tflite, load_damaged_bytes: Callable[..., None]) -> Callable[..., None]:
    """As ``load_damaged_bytes``, of a graph's file."""

    def load(graphs: Graph | list[Graph], name: str) -> None:
        load_damaged_bytes(tflite.write(*(graphs if isinstance(graphs, list) else [graphs])), name, DAMAGES)

    return load


@pytest.fixture
def load_damaged_bytes() -> Callable[..., None]:
    """Imports a file many times with bytes changed: it loads or is refused, and nothing else happens."""

    def load(data: bytes, name: str, count: int) -> None:
        rng = random.Random(f"{SEED} {name}")
        for number in range(count):
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
                i = rng.randrange(len(data))
                damaged[i] = rng.choice(
                    [rng.randrange(256), 0, 1, 0xFF, 0x7F, damaged[i] ^ (1 << rng.randrange(8))]
                )
            try:
                imported = load_tflite(damaged)
            except InvalidModel as e:
                # The last resort of the importer; each time that it is needed, a check is missing.
                assert "unforeseen" not in str(e), f"damage {number}: {e}"
                continue
            except BaseException as e:
                e.add_note(f"damage {number} of {name!r}")
                raise
            for pool in imported.model.pools:
                pool.close()

    return load


@pytest.fixture
def compare_with_litert(tflite: Tflite) -> Callable[..., None]:
    """Runs a graph (or several subgraphs) imported and with LiteRT's reference kernels, on the same random input."""
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")

    def compare(graphs: Graph | list[Graph], atol: float, *, is_only_optimized: bool) -> None:
        data = tflite.write(*(graphs if isinstance(graphs, list) else [graphs]))
        # Some operators have no reference kernel, or one that differs from the ordinary one (LOCAL_RESPONSE_NORMALIZATION).
        resolver = "BUILTIN_WITHOUT_DEFAULT_DELEGATES" if is_only_optimized else "BUILTIN_REF"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = interpreter.Interpreter(
                model_content=data, experimental_op_resolver_type=interpreter.OpResolverType[resolver]
            )
        imported = load_tflite(data)
        assert 1 <= validate_model(imported.model) <= 8
        peer.allocate_tensors()
        rng = np.random.default_rng(SEED)
        for _ in range(3):
            inputs = []
            for detail, argument in zip(peer.get_input_details(), imported.inputs, strict=True):
                value = _random(rng, detail["dtype"], detail["shape"])
                peer.set_tensor(detail["index"], value)
                inputs.append(value.reshape(argument.operand.dimensions))
            # What a file's variable tensors hold starts anew at every execution of an imported model.
            peer.reset_all_variables()
            peer.invoke()
            results = Interpreter(imported.model).run(inputs, RunControl())
            for detail, got in zip(peer.get_output_details(), results, strict=True):
                want = peer.get_tensor(detail["index"])
                assert got.dtype == want.dtype
                assert got.shape == stored_shape(want.shape)
                np.testing.assert_allclose(
                    got.reshape(want.shape).astype(np.float64), want.astype(np.float64), rtol=0, atol=atol
                )
        for pool in imported.model.pools:
            pool.close()

    return compare
