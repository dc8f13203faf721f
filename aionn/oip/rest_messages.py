"""The JSON of the Open Inference Protocol, with the extension for binary tensors: requests from bytes, answers as bytes; pure.

A body is JSON, and behind it the raw bytes of the tensors that have a ``binary_data_size``, in order. The header
``Inference-Header-Content-Length`` states the length of the JSON.

The numbers of a tensor stay JSON until the model has accepted the type and the shape. They are converted in chunks, since the
interpreter's lock is kept for each.

Source: kserve/open-inference-protocol, ``inference_rest.md``; Triton, "Binary Tensor Data Extension".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

import aionn
from aionn.oip.grpc_messages import check_tensor_parameters
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

__all__ = ["config_json", "error_json", "model_json", "request_of", "response_of", "server_json"]

CHUNK_BYTES: Final = 64 << 10
"""Bytes of JSON numbers that are converted in one go: half a millisecond."""

CHUNK_ELEMENTS: Final = 8192
"""Elements that are written in one go, for as long."""

_Parameters = dict[str, Parameter]


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters = {}


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: _Parameters = {}
    outputs: list[_Output] = []


_decoder = msgspec.json.Decoder(_Body)
_floats = msgspec.json.Decoder(list[float])
_integers = msgspec.json.Decoder(list[int])
_truths = msgspec.json.Decoder(list[bool | int])


def request_of(body: memoryview, json_bytes: int | None, model: str, version: str) -> Request:
    """The body of a request for an inference.

    Args:
        body: The body.
        json_bytes: The length of its JSON; None for all of it.
        model: Name of the model, from the path.
        version: Its version, from the path; empty without one.

    Raises:
        InvalidArgument: It is damaged, or exceeds a limit.
    """
    if json_bytes is not None and not 0 <= json_bytes <= len(body):
        raise aionn.InvalidArgument(
            f"Inference-Header-Content-Length: expected at most the {len(body)} bytes of the body, got {json_bytes}"
        )
    end = len(body) if json_bytes is None else json_bytes
    try:
        found = _decoder.decode(body[:end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise aionn.InvalidArgument(f"request: {e}") from None
    _check_limits(found)
    raw = body[end:]
    inputs = []
    for one in found.inputs:
        tensor, raw = _input_of(one, raw)
        inputs.append(tensor)
    if len(raw):
        raise aionn.InvalidArgument(f"request: {len(raw)} bytes behind the last binary tensor")
    is_binary = _is_set(found.parameters, "binary_data_output", False)
    return Request(
        model,
        version,
        found.id,
        found.parameters,
        tuple(inputs),
        tuple(_output_of(one, is_binary) for one in found.outputs),
        is_binary,
    )


def _check_limits(body: _Body) -> None:
    tensors: list[_Input | _Output] = [*body.inputs, *body.outputs]
    check_count(len(tensors), TENSORS_MAX, "request, tensors")
    check_count(len(body.id), NAME_BYTES_MAX, "request, letters of the id")
    for parameters in (body.parameters, *(one.parameters for one in tensors)):
        check_count(len(parameters), PARAMETERS_MAX, "request, parameters")
    for one in tensors:
        check_count(len(one.name), NAME_BYTES_MAX, "request, letters of a name")
    for one in body.inputs:
        check_count(len(one.shape), RANK_MAX, f"input {one.name!r:.160}, axes")


def _input_of(given: _Input, raw: memoryview) -> tuple[InputTensor, memoryview]:
    """An input, and the raw bytes behind its own."""
    where = f"input {given.name!r:.160}"
    check_tensor_parameters(given.parameters, where)
    shape = tuple(given.shape)
    size = given.parameters.get("binary_data_size")
    has_data = bool(bytes(given.data))
    if size is None:
        if not has_data:
            raise aionn.InvalidArgument(f"{where}: expected data, or the parameter binary_data_size")

        def load(dtype: np.dtype[Any]) -> Array:
            return from_numbers(_numbers_of(given.data, dtype, where), dtype, shape, where)

        return InputTensor(given.name, given.datatype, shape, load, len(bytes(given.data))), raw
    if has_data:
        raise aionn.InvalidArgument(f"{where}: expected data or binary_data_size, got both")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw):
        raise aionn.InvalidArgument(
            f"{where}, binary_data_size: expected at most the {len(raw)} bytes that are left of the body, got {size!r:.80}"
        )
    own = raw[:size]
    return (
        InputTensor(given.name, given.datatype, shape, lambda dtype: from_raw(own, dtype, shape, where)),
        raw[size:],
    )


def _output_of(given: _Output, is_binary: bool) -> WantedOutput:
    check_tensor_parameters(given.parameters, f"output {given.name!r:.160}")
    return WantedOutput(given.name, _is_set(given.parameters, "binary_data", is_binary))


def _is_set(parameters: _Parameters, name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise aionn.InvalidArgument(f"parameter {name}: expected true or false, got {value!r:.80}")
    return value


def _numbers_of(data: msgspec.Raw, dtype: np.dtype[Any], where: str) -> list[Array]:
    """The numbers of nested or flat JSON arrays, in order."""
    # The text is valid JSON, as it was scanned; without its brackets the numbers are left, with commas between them.
    flat = bytes(data).translate(None, b"[]")
    if dtype.kind == "f":
        decoder: msgspec.json.Decoder[Any] = _floats
        wide: np.dtype[Any] = np.dtype(np.float64)
    elif dtype.kind == "b":
        decoder, wide = _truths, np.dtype(np.bool_)
    else:
        decoder, wide = _integers, np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    parts = [np.empty(0, wide)]
    try:
        for chunk in _chunks(flat):
            parts.append(np.array(decoder.decode(b"[%b]" % chunk), wide))
    except (msgspec.MsgspecError, OverflowError, ValueError) as e:
        raise aionn.InvalidArgument(f"{where}: expected numbers of {dtype}: {e}") from None
    return parts


def _chunks(flat: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(flat):
        end = flat.find(b",", position + CHUNK_BYTES)
        if end < 0:
            end = len(flat)
        elif end + 1 == len(flat):
            raise ValueError("the last number is missing")
        yield flat[position:end]
        position = end + 1


# --- Answers ------------------------------------------------------------------------------------------------------------------


def response_of(answer: Answer) -> tuple[list[Any], int | None]:
    """The pieces of the body of an answer, and the length of its JSON where raw bytes follow it."""
    outputs: list[dict[str, Any]] = []
    contents: list[Any] = []
    for description, array, is_binary in answer.outputs:
        output: dict[str, Any] = {
            "name": description.name,
            "datatype": description.datatype,
            "shape": array.shape,
        }
        if is_binary:
            contents.append(raw_bytes(array))
            output["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            output["data"] = _data_of(array)
        outputs.append(output)
    head: dict[str, Any] = {"model_name": answer.model, "model_version": VERSION}
    if answer.id:
        head["id"] = answer.id
    text = msgspec.json.encode({**head, "outputs": outputs})
    return [text, *contents], len(text) if contents else None


def _data_of(array: Array) -> msgspec.Raw:
    flat = array.reshape(-1)
    chunks = (flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.size, CHUNK_ELEMENTS))
    return msgspec.Raw(b"[%b]" % b",".join(msgspec.json.encode(chunk.tolist())[1:-1] for chunk in chunks))


def error_json(text: str) -> bytes:
    """The body of a refusal."""
    return msgspec.json.encode({"error": text})


def server_json() -> bytes:
    """The metadata of the server."""
    return msgspec.json.encode(
        {"name": SERVER_NAME, "version": aionn.__version__, "extensions": list(EXTENSIONS)}
    )


def model_json(model: ModelDescription) -> bytes:
    """The metadata of a model."""
    return msgspec.json.encode(
        {
            "name": model.name,
            "versions": [VERSION],
            "platform": model.platform,
            "inputs": [_tensor(one) for one in model.inputs],
            "outputs": [_tensor(one) for one in model.outputs],
        }
    )


def config_json(model: ModelDescription) -> bytes:
    """Triton's configuration of a model: no batches, one answer for each request."""

    def tensor(one: TensorDescription) -> dict[str, Any]:
        return {"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": one.shape}

    return msgspec.json.encode(
        {
            "name": model.name,
            "platform": model.platform,
            "max_batch_size": 0,
            "input": [tensor(one) for one in model.inputs],
            "output": [tensor(one) for one in model.outputs],
            "model_transaction_policy": {"decoupled": False},
        }
    )


def _tensor(one: TensorDescription) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": one.shape}
