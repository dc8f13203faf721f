"""The JSON of REST, and its binary tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.oip import rest_messages as messages
from aionn.oip.requests import Answer, ModelDescription, Request, TensorDescription
from aionn.oip.tensors import DATATYPES


def request_with(data: Any = None, raw: bytes = b"", **tensor: Any) -> Request:
    given = {"name": "x", "datatype": "FP32", "shape": [2, 2], **tensor}
    if data is not None:
        given["data"] = data
    text = json.dumps({"id": "r", "inputs": [given]}).encode()
    return messages.request_of(memoryview(text + raw), len(text) if raw else None, "m", "")


def only_array(request: Request) -> Any:
    (tensor,) = request.inputs
    return tensor.load(DATATYPES[tensor.datatype])


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("FP32", [[1.5, -2], [3e5, 4]]),
        ("FP16", [[1.5, -2], [3, 4]]),
        ("FP64", [[1e300, 0.1], [3, 4]]),
        ("INT8", [[-128, 127], [0, 1]]),
        ("UINT64", [[0, 2**64 - 1], [0, 1]]),
        ("INT64", [[-(2**63), 2**63 - 1], [0, 1]]),
        ("BOOL", [[True, False], [False, True]]),
        ("BOOL", [[1, 0], [0, 1]]),
    ],
)
def test_numbers_are_read_nested_and_flat(datatype: str, data: list[list[Any]]) -> None:
    for given in (data, [*data[0], *data[1]]):
        array = only_array(request_with(given, datatype=datatype))
        assert array.dtype == DATATYPES[datatype]
        assert array.tolist() == data


def test_many_numbers_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(500).reshape(5, 100)
    for chunk in (1, 7, 64):
        monkeypatch.setattr(messages, "CHUNK_BYTES", chunk)
        found = only_array(request_with(data.tolist(), datatype="INT32", shape=[5, 100]))
        assert np.array_equal(found, data)


@pytest.mark.parametrize(
    ("data", "datatype", "text"),
    [
        ([1, 2, 3], "FP32", "expected 4 numbers .* got 3"),
        ([[1, 2], [3, "4"]], "FP32", "expected numbers of float32"),
        ([[1, 2], [3, None]], "FP32", "expected numbers of float32"),
        ([[1, 2], [3, 4.5]], "INT8", "expected numbers of int8"),
        ([[1, 2], [3, 300]], "INT8", "expected numbers from -128 to 127"),
        ([[1, 2], [3, 2**64]], "INT64", "expected numbers of int64"),
        ([[1, 2], [3, 10**400]], "FP64", "expected numbers of float64"),
        ([[1, 2], [3, {}]], "FP32", "expected numbers of float32"),
        ("1,2,3,4", "FP32", "expected numbers of float32"),
        (7, "FP32", "expected 4 numbers .* got 1"),
        ([[], [1, 2, 3]], "FP32", "expected numbers of float32"),
        ([], "FP32", "expected 4 numbers .* got 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(data: Any, datatype: str, text: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=text):
        only_array(request_with(data, datatype=datatype))


def test_float_beyond_the_type_becomes_infinite_without_a_warning() -> None:
    assert only_array(request_with([1e300, -1e300, 0, 1])).tolist() == [[np.inf, -np.inf], [0, 1]]


def test_binary_tensors_are_read_in_order_without_a_copy() -> None:
    one, two = np.arange(4, dtype="<f4"), np.array([7, 8], "<i2")
    text = json.dumps(
        {
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}},
                {"name": "b", "datatype": "FP32", "shape": [1], "data": [5]},
                {"name": "c", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}},
            ],
            "outputs": [{"name": "o", "parameters": {"binary_data": False}}, {"name": "p"}],
            "parameters": {"binary_data_output": True, "timeout": 5},
        }
    ).encode()
    body = text + one.tobytes() + two.tobytes()
    request = messages.request_of(memoryview(body), len(text), "m", "1")
    arrays = [tensor.load(DATATYPES[tensor.datatype]) for tensor in request.inputs]
    assert [array.tolist() for array in arrays] == [[0, 1, 2, 3], [5], [7, 8]]
    assert np.shares_memory(arrays[0], np.frombuffer(body, np.uint8))
    assert [(output.name, output.is_binary) for output in request.outputs] == [("o", False), ("p", True)]
    assert (request.is_binary, request.parameters["timeout"]) == (True, 5)


@pytest.mark.parametrize(
    ("tensor", "raw", "text"),
    [
        ({"parameters": {"binary_data_size": 16}}, b"", "at most the 0 bytes that are left"),
        ({"parameters": {"binary_data_size": 16}}, b"x" * 15, "at most the 15 bytes that are left"),
        ({"parameters": {"binary_data_size": -1}}, b"x", "binary_data_size"),
        ({"parameters": {"binary_data_size": True}}, b"x", "binary_data_size"),
        ({"parameters": {"binary_data_size": 1.0}}, b"x", "binary_data_size"),
        ({"parameters": {"binary_data_size": 16}}, b"x" * 17, "1 bytes behind the last binary tensor"),
        ({"parameters": {"binary_data_size": 4}, "data": [1]}, b"xxxx", "got both"),
        ({}, b"", "expected data, or the parameter binary_data_size"),
        ({"data": [1] * 4}, b"x", "1 bytes behind the last binary tensor"),
        ({"parameters": {"shared_memory_region": "r"}}, b"", "shared memory is not supported"),
        ({"shape": [1] * 33, "data": [1]}, b"", "axes: expected at most 32, got 33"),
        ({"shape": ["1"], "data": [1]}, b"", "request: Expected `int`"),
        ({"shape": [1e300], "data": [1]}, b"", "request: Expected `int`"),
        ({"name": "n" * 2000, "data": [1]}, b"", "letters of a name"),
        ({"parameters": {f"{n}": n for n in range(65)}, "data": [1]}, b"", "parameters: expected at most 64"),
        ({"parameters": {"deep": [1]}, "data": [1]}, b"", "request: "),
    ],
)
def test_tensor_that_is_wrong_is_refused(tensor: dict[str, Any], raw: bytes, text: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=text):
        request_with(raw=raw, **tensor)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b"", None),
        (b"{}", None),
        (b"[1]", None),
        (b'{"inputs": 5}', None),
        (b'{"inputs": []', None),
        (b'{"inputs": []}', 99),
        (b'{"inputs": []}', 3),
        (b"\xff\xfe", None),
        (b'{"inputs":[{"name":"\xff","shape":[],"datatype":"FP32","data":[1]}]}', None),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000, None),
        (b'{"parameters":{"a":' + b'{"a":' * 100_000, None),
        (b"[" * 100_000, None),
    ],
)
def test_damaged_body_is_refused(body: bytes, length: int | None) -> None:
    with pytest.raises(aionn.InvalidArgument):
        messages.request_of(memoryview(body), length, "m", "")


def test_deep_brackets_are_numbers_or_refused() -> None:
    text = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":%b1%b}]}'
    for depth in (100, 100_000):
        body = text % (b"[" * depth, b"]" * depth)
        try:
            assert only_array(messages.request_of(memoryview(body), None, "m", "")).tolist() == [1]
        except aionn.InvalidArgument:
            assert depth > 100


def test_answer_has_numbers_and_raw_bytes() -> None:
    names = list(DATATYPES)
    outputs = tuple(
        (TensorDescription(name, name, (2, 1)), np.array([[0], [1]], DATATYPES[name]), index % 2 == 1)
        for index, name in enumerate(names)
    )
    pieces, length = messages.response_of(Answer("m", "r", outputs))
    body = b"".join(bytes(piece) for piece in pieces)
    assert length is not None
    head, raw = json.loads(body[:length]), body[length:]
    assert (head["model_name"], head["model_version"], head["id"]) == ("m", "1", "r")
    for (_, array, is_binary), output in zip(outputs, head["outputs"], strict=True):
        assert output["shape"] == [2, 1]
        if is_binary:
            size = output["parameters"]["binary_data_size"]
            assert raw[:size] == array.tobytes()
            raw = raw[size:]
        else:
            assert output["data"] == array.reshape(-1).tolist()
    assert raw == b""


def test_answer_of_many_numbers_is_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNK_ELEMENTS", 7)
    array = np.arange(50, dtype=np.int16).reshape(5, 10)
    pieces, length = messages.response_of(
        Answer("m", "", ((TensorDescription("o", "INT16", (5, 10)), array, False),))
    )
    assert length is None
    assert json.loads(bytes(pieces[0]))["outputs"][0]["data"] == list(range(50))


def test_values_that_json_lacks_are_null() -> None:
    array = np.array([np.nan, np.inf, 1], np.float32)
    pieces, _ = messages.response_of(Answer("m", "", ((TensorDescription("o", "FP32", (3,)), array, False),)))
    assert json.loads(bytes(pieces[0]))["outputs"][0]["data"] == [None, None, 1]


def test_descriptions_are_json() -> None:
    model = ModelDescription(
        "m",
        "aionn_tflite",
        (TensorDescription("i", "UINT8", (-1, 3)),),
        (TensorDescription("o", "FP32", ()),),
    )
    assert json.loads(messages.model_json(model)) == {
        "name": "m",
        "versions": ["1"],
        "platform": "aionn_tflite",
        "inputs": [{"name": "i", "datatype": "UINT8", "shape": [-1, 3]}],
        "outputs": [{"name": "o", "datatype": "FP32", "shape": []}],
    }
    assert json.loads(messages.config_json(model))["input"] == [
        {"name": "i", "data_type": "TYPE_UINT8", "dims": [-1, 3]}
    ]
    assert json.loads(messages.server_json())["extensions"] == ["binary_tensor_data", "model_configuration"]
