"""The messages of ``inference.GRPCInferenceService``: requests from bytes, answers as bytes; pure.

Owns the numbers of the fields. Messages are read and written here and not by generated classes, since those tie everything that is
installed beside them to one major version of protobuf, and copy each tensor once more; ``raw_input_contents`` stays a view of the
message. The price is this file; tests compare it with the generated classes of tritonclient.

Source: kserve/open-inference-protocol, ``open_inference_grpc.proto``; Triton, ``grpc_service.proto`` (ModelConfig,
ModelStreamInfer).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

import aionn
from aionn.oip import protobuf as pb
from aionn.oip.requests import (
    EXTENSIONS,
    NAME_BYTES_MAX,
    PARAMETERS_MAX,
    RANK_MAX,
    SERVER_NAME,
    TENSORS_MAX,
    VERSION,
    Answer,
    InputTensor,
    ModelDescription,
    Parameter,
    Request,
    TensorDescription,
    WantedOutput,
    check_count,
)
from aionn.oip.tensors import Array, from_numbers, from_raw, raw_bytes

__all__ = [
    "answer_message",
    "check_tensor_parameters",
    "config_message",
    "flag_message",
    "model_message",
    "model_of",
    "request_of",
    "server_message",
    "stream_message",
]

_REQUEST: Final = "ModelInferRequest"

KEPT_MAX: Final = 256
"""Messages that are kept in each direction, decoded or encoded: the inputs or outputs of some dozens of models."""

KEPT_BYTES_MAX: Final = 256
"""Largest message of an input that is kept: a name and a shape; so hostile clients fill 64 KiB."""

_Parts = list[Array]

_CONFIG_TYPES: Final = {
    "BOOL": 1,
    "UINT8": 2,
    "UINT16": 3,
    "UINT32": 4,
    "UINT64": 5,
    "INT8": 6,
    "INT16": 7,
    "INT32": 8,
    "INT64": 9,
    "FP16": 10,
    "FP32": 11,
    "FP64": 12,
}
"""``DataType`` of Triton's ``model_config.proto``."""


# --- Requests -----------------------------------------------------------------------------------------------------------------


def request_of(message: bytes) -> Request:
    """A ``ModelInferRequest``.

    Raises:
        InvalidArgument: The message is damaged, or exceeds a limit.
    """
    texts = {1: "", 2: "", 3: ""}
    parameters: dict[str, Parameter] = {}
    inputs: list[memoryview] = []
    outputs: list[memoryview] = []
    raw: list[memoryview] = []
    for number, _, value in pb.fields(memoryview(message), _REQUEST):
        if number in texts:
            texts[number] = pb.text_of(value, f"{_REQUEST}, field {number}", NAME_BYTES_MAX)
        elif number == 4:
            _add_parameter(parameters, _message(value, _REQUEST), _REQUEST)
        elif number in (5, 6, 7):
            group = (inputs, outputs, raw)[number - 5]
            group.append(_message(value, _REQUEST))
            check_count(len(group), TENSORS_MAX, f"{_REQUEST}, tensors")
    if raw and len(raw) != len(inputs):
        raise aionn.InvalidArgument(
            f"{_REQUEST}: expected raw_input_contents for all {len(inputs)} inputs or none, got {len(raw)}"
        )
    return Request(
        texts[1],
        texts[2],
        texts[3],
        parameters,
        tuple(_input_of(one, raw[index] if raw else None) for index, one in enumerate(inputs)),
        tuple(_output_of(one) for one in outputs),
    )


def model_of(message: bytes) -> tuple[str, str]:
    """Name and version of the model that a request for metadata names.

    Raises:
        InvalidArgument: The message is damaged.
    """
    texts = {1: "", 2: ""}
    for number, _, value in pb.fields(memoryview(message), "request"):
        if number in texts:
            texts[number] = pb.text_of(value, f"request, field {number}", NAME_BYTES_MAX)
    return texts[1], texts[2]


def _message(value: int | memoryview, where: str) -> memoryview:
    if isinstance(value, int):
        raise aionn.InvalidArgument(f"{where}: expected a message, got a number")
    return value


class _Input(NamedTuple):
    """The message of an input.

    Attributes:
        name: See ``InputTensor``, as for the next two.
        datatype: See there.
        extents: See there.
        contents: Its typed contents; None without any.
        where: Names it in errors.
    """

    name: str
    datatype: str
    extents: tuple[int, ...]
    contents: memoryview | None
    where: str


def _input_of(message: memoryview, raw: memoryview | None) -> InputTensor:
    if raw is not None and len(message) <= KEPT_BYTES_MAX:
        one = _kept_input(bytes(message))
    else:
        one = _read_input(message)
    extents, where = one.extents, one.where
    if raw is not None:
        if one.contents is not None and len(one.contents):
            raise aionn.InvalidArgument(f"{where}: expected contents or raw_input_contents, got both")
        return InputTensor(
            one.name, one.datatype, extents, lambda dtype: from_raw(raw, dtype, extents, where)
        )
    typed = memoryview(b"") if one.contents is None else one.contents

    def load(dtype: np.dtype[Any]) -> Array:
        return from_numbers(_numbers_of(typed, dtype, where), dtype, extents, where)

    return InputTensor(one.name, one.datatype, extents, load, len(typed))


@functools.lru_cache(KEPT_MAX)
def _kept_input(message: bytes) -> _Input:
    """As ``_read_input``: a client sends the same name, datatype and shape with each request."""
    return _read_input(memoryview(message))


def _read_input(message: memoryview) -> _Input:
    where = f"{_REQUEST}, input"
    name = datatype = ""
    shape: list[int] = []
    contents: memoryview | None = None
    for number, wire, value in pb.fields(message, where):
        if number == 1:
            name = pb.text_of(value, where, NAME_BYTES_MAX)
            where = f"input {name!r:.160}"
        elif number == 2:
            datatype = pb.text_of(value, where, NAME_BYTES_MAX)
        elif number == 3:
            shape += _extents(wire, value, where)
            check_count(len(shape), RANK_MAX, f"{where}, axes")
        elif number == 4:
            _refuse_shared_memory(value, where)
        elif number == 5:
            contents = _message(value, where)
    return _Input(name, datatype, tuple(shape), contents, where)


def _extents(wire: int, value: int | memoryview, where: str) -> list[int]:
    if isinstance(value, int):
        return [pb.signed(value)]
    if wire != pb.LENGTH:
        raise aionn.InvalidArgument(f"{where}: expected a shape of integers")
    check_count(len(value), RANK_MAX * 10, f"{where}, bytes of the shape")
    return [pb.signed(int(one)) for one in pb.packed_varints(value, where)]


def _output_of(message: memoryview) -> WantedOutput:
    where = f"{_REQUEST}, output"
    name = ""
    for number, _, value in pb.fields(message, where):
        if number == 1:
            name = pb.text_of(value, where, NAME_BYTES_MAX)
        elif number == 2:
            _refuse_shared_memory(value, f"output {name!r:.160}")
    return WantedOutput(name)


def _refuse_shared_memory(value: int | memoryview, where: str) -> None:
    parameters: dict[str, Parameter] = {}
    _add_parameter(parameters, _message(value, where), where)
    check_tensor_parameters(parameters, where)


def check_tensor_parameters(parameters: Mapping[str, Parameter], where: str) -> None:
    """Refuses parameters of a tensor that would change the answer.

    Raises:
        InvalidArgument: There is one.
    """
    if any(name.startswith("shared_memory") for name in parameters):
        raise aionn.InvalidArgument(f"{where}: shared memory is not supported; send the values")
    if parameters.get("classification") not in (None, 0, False):
        raise aionn.InvalidArgument(f"{where}: classification is not supported; ask for the values")


def _add_parameter(parameters: dict[str, Parameter], entry: memoryview, where: str) -> None:
    """Adds an entry of a map from names to ``InferParameter``."""
    name, content = "", memoryview(b"")
    for number, _, value in pb.fields(entry, where):
        if number == 1:
            name = pb.text_of(value, where, NAME_BYTES_MAX)
        elif number == 2:
            content = _message(value, where)
    parameters[name] = _parameter_of(content, f"{where}, parameter {name!r:.160}")
    check_count(len(parameters), PARAMETERS_MAX, f"{where}, parameters")


def _parameter_of(message: memoryview, where: str) -> Parameter:
    found: Parameter = None
    for number, wire, value in pb.fields(message, where):
        if number == 3:
            found = pb.text_of(value, where, NAME_BYTES_MAX)
        elif number == 4:
            if isinstance(value, int) or wire != pb.FIXED64:
                raise aionn.InvalidArgument(f"{where}: expected a double")
            found = float(np.frombuffer(value, "<f8")[0])
        elif number in (1, 2, 5):
            if not isinstance(value, int):
                raise aionn.InvalidArgument(f"{where}: expected an integer")
            found = bool(value) if number == 1 else pb.signed(value) if number == 2 else value
    return found


# --- Typed contents -----------------------------------------------------------------------------------------------------------


def _unsigned(content: memoryview, where: str) -> Array:
    return pb.packed_varints(content, where)


def _signed(content: memoryview, where: str) -> Array:
    return pb.packed_varints(content, where).view(np.int64)


def _fixed(kind: str) -> Callable[[memoryview, str], Array]:
    dtype = np.dtype(kind)

    def read(content: memoryview, where: str) -> Array:
        if len(content) % dtype.itemsize:
            raise aionn.InvalidArgument(
                f"{where}: packed numbers of {dtype.itemsize} bytes end in the middle"
            )
        return np.frombuffer(content, dtype)

    return read


_CONTENTS: Final[Mapping[int, tuple[str, int, Callable[[memoryview, str], Array], Array]]] = {
    1: ("bool_contents", pb.VARINT, _unsigned, np.empty(0, np.uint64)),
    2: ("int_contents", pb.VARINT, _signed, np.empty(0, np.int64)),
    3: ("int64_contents", pb.VARINT, _signed, np.empty(0, np.int64)),
    4: ("uint_contents", pb.VARINT, _unsigned, np.empty(0, np.uint64)),
    5: ("uint64_contents", pb.VARINT, _unsigned, np.empty(0, np.uint64)),
    6: ("fp32_contents", pb.FIXED32, _fixed("<f4"), np.empty(0, np.float32)),
    7: ("fp64_contents", pb.FIXED64, _fixed("<f8"), np.empty(0, np.float64)),
}
"""Name, wire type of one number, reader of packed numbers and an empty array by the field of ``InferTensorContents``."""

_FIELD_BY_KIND: Final = {
    **dict.fromkeys(("bool",), 1),
    **dict.fromkeys(("int8", "int16", "int32"), 2),
    "int64": 3,
    **dict.fromkeys(("uint8", "uint16", "uint32"), 4),
    "uint64": 5,
    "float32": 6,
    "float64": 7,
}


def _numbers_of(contents: memoryview, dtype: np.dtype[Any], where: str) -> _Parts:
    """The numbers of an ``InferTensorContents``, of the field that the datatype has."""
    wanted = _FIELD_BY_KIND.get(dtype.name)
    if wanted is None:
        raise aionn.InvalidArgument(f"{where}: {dtype} has no typed contents; send raw_input_contents")
    name, single, read, empty = _CONTENTS[wanted]
    parts: _Parts = [empty]
    for number, wire, value in pb.fields(contents, where):
        if number != wanted:
            other = _CONTENTS[number][0] if number in _CONTENTS else f"field {number}"
            raise aionn.InvalidArgument(f"{where}: expected {name} for {dtype}, got {other}")
        if wire == pb.LENGTH and not isinstance(value, int):
            parts.append(read(value, where))
        elif wire != single:
            raise aionn.InvalidArgument(f"{where}: {name} has the wrong wire type {wire}")
        elif isinstance(value, int):
            one = np.array([value], np.uint64)
            parts.append(one.view(empty.dtype) if empty.dtype == np.int64 else one)
        else:
            parts.append(read(value, where))
    return parts if len(parts) == 1 else parts[1:]


# --- Answers ------------------------------------------------------------------------------------------------------------------


def answer_message(answer: Answer) -> bytes:
    """A ``ModelInferResponse``, with raw contents."""
    return b"".join(_answer_pieces(answer))


def _answer_pieces(answer: Answer) -> list[Any]:
    pieces = [*pb.view_field(1, answer.model), *pb.view_field(2, VERSION)]
    if answer.id:
        pieces += pb.view_field(3, answer.id)
    for name, value in answer.parameters.items():
        pieces += pb.view_field(4, b"".join([*pb.view_field(1, name), *pb.view_field(2, _parameter(value))]))
    contents: list[Any] = []
    for description, array, _ in answer.outputs:
        shaped = TensorDescription(description.name, description.datatype, array.shape)
        pieces += pb.view_field(5, _tensor(shaped))
        contents += pb.view_field(6, raw_bytes(array))
    return pieces + contents


def stream_message(answer: Answer | None, error: str = "", *, model: str = "", id: str = "") -> bytes:
    """A ``ModelStreamInferResponse``: an answer, or the text of an error with the id of its request."""
    if answer is not None:
        pieces = _answer_pieces(answer)
        # Joined once, with the head before them.
        return b"".join([pb.head(2, sum(map(len, pieces))), *pieces])
    response = b"".join([*pb.view_field(1, model), *pb.view_field(3, id)])
    return b"".join([*pb.view_field(1, error), *pb.view_field(2, response)])


def flag_message(is_set: bool) -> bytes:
    """``ServerLiveResponse``, ``ServerReadyResponse`` and ``ModelReadyResponse``."""
    return pb.number_field(1, 1) if is_set else b""


def server_message() -> bytes:
    """``ServerMetadataResponse``."""
    pieces = [*pb.view_field(1, SERVER_NAME), *pb.view_field(2, aionn.__version__)]
    for extension in EXTENSIONS:
        pieces += pb.view_field(3, extension)
    return b"".join(pieces)


def model_message(model: ModelDescription) -> bytes:
    """``ModelMetadataResponse``."""
    pieces = [*pb.view_field(1, model.name), *pb.view_field(2, VERSION), *pb.view_field(3, model.platform)]
    for number, group in ((4, model.inputs), (5, model.outputs)):
        for one in group:
            pieces += pb.view_field(number, _tensor(one))
    return b"".join(pieces)


def config_message(model: ModelDescription) -> bytes:
    """``ModelConfigResponse`` of Triton: no batches, no sequences, one answer for each request."""
    pieces = [*pb.view_field(1, model.name), *pb.view_field(2, model.platform)]
    for number, dims, group in ((5, 4, model.inputs), (6, 3, model.outputs)):
        for one in group:
            kind = pb.number_field(2, _CONFIG_TYPES[one.datatype])
            tensor = [*pb.view_field(1, one.name), kind, pb.packed_field(dims, one.shape)]
            pieces += pb.view_field(number, b"".join(tensor))
    pieces += pb.view_field(19, b"")  # ModelTransactionPolicy, not decoupled.
    return b"".join(pb.view_field(1, b"".join(pieces)))


@functools.lru_cache(KEPT_MAX)
def _tensor(tensor: TensorDescription) -> bytes:
    return b"".join(
        [
            *pb.view_field(1, tensor.name),
            *pb.view_field(2, tensor.datatype),
            pb.packed_field(3, tensor.shape),
        ]
    )


def _parameter(value: Parameter) -> bytes:
    if isinstance(value, bool):
        return pb.number_field(1, int(value))
    if isinstance(value, int):
        return pb.number_field(2, value)
    if isinstance(value, float):
        return pb.double_field(4, value)
    return b"".join(pb.view_field(3, value or ""))
