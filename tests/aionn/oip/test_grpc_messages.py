"""The messages of gRPC: against the generated classes of tritonclient, and damaged in every byte."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.oip import grpc_messages as messages
from aionn.oip import protobuf as pb
from aionn.oip.requests import Answer, ModelDescription, Request, TensorDescription
from aionn.oip.tensors import DATATYPES

MODEL = ModelDescription(
    "m",
    "aionn_onnx",
    tuple(TensorDescription(f"i{name}", name, (-1, 3)) for name in DATATYPES),
    (TensorDescription("o", "FP32", (1, 1000)),),
)

DAMAGES = 400
"""Messages of one test that are damaged in a random place."""


@pytest.fixture(scope="module")
def pb2() -> Any:
    """The generated classes."""
    reason = "tritonclient is not installed"
    pytest.importorskip("tritonclient", reason=reason)
    pytest.importorskip("google.protobuf", reason=reason)
    pytest.importorskip("grpc", reason=reason)
    from tritonclient.grpc import service_pb2

    return service_pb2


CONTENTS = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 0, 127]),
    "INT16": ("int_contents", [-32768, 1, 32767]),
    "INT32": ("int_contents", [-(2**31), 5, 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), -1, 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 128, 255]),
    "UINT16": ("uint_contents", [0, 300, 65535]),
    "UINT32": ("uint_contents", [0, 1, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**63, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, -1e30, float("inf")]),
    "FP64": ("fp64_contents", [1e300, -0.1, 0.0]),
}


def typed(pb2: Any, datatype: str, numbers: list[Any], field: str) -> Any:
    request = pb2.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=[1, len(numbers)])
    getattr(tensor.contents, field).extend(numbers)
    return request


def only_array(request: Request) -> Any:
    (tensor,) = request.inputs
    return tensor.load(DATATYPES[tensor.datatype])


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_are_read_as_they_were_written(pb2: Any, datatype: str) -> None:
    field, numbers = CONTENTS[datatype]
    array = only_array(messages.request_of(typed(pb2, datatype, numbers, field).SerializeToString()))
    assert (array.dtype, array.shape) == (DATATYPES[datatype], (1, 3))
    assert array.tolist() == [pytest.approx(numbers) if datatype == "FP32" else numbers]


@pytest.mark.parametrize(
    ("datatype", "field", "numbers", "text"),
    [
        ("INT8", "int_contents", [1, 128], "expected numbers from -128 to 127, got 1 to 128"),
        ("UINT8", "uint_contents", [256], "expected numbers from 0 to 255"),
        ("INT32", "int64_contents", [1], "expected int_contents for int32, got int64_contents"),
        ("FP32", "fp64_contents", [1.0], "expected fp32_contents for float32, got fp64_contents"),
        ("FP16", "fp32_contents", [1.0], "float16 has no typed contents"),
    ],
)
def test_typed_contents_that_do_not_fit_are_refused(
    pb2: Any, datatype: str, field: str, numbers: list[Any], text: str
) -> None:
    request = messages.request_of(typed(pb2, datatype, numbers, field).SerializeToString())
    with pytest.raises(aionn.InvalidArgument, match=text):
        only_array(request)


def test_number_of_typed_contents_is_that_of_the_shape(pb2: Any) -> None:
    message = typed(pb2, "FP32", [1.0, 2.0], "fp32_contents")
    message.inputs[0].shape[1] = 1 << 40
    with pytest.raises(aionn.InvalidArgument, match=r"expected 1099511627776 numbers .* got 2"):
        only_array(messages.request_of(message.SerializeToString()))


def whole_request(pb2: Any) -> Any:
    request = pb2.ModelInferRequest(model_name="m", model_version="1", id="frame-7")
    request.parameters["b"].bool_param = True
    request.parameters["n"].int64_param = -5
    request.parameters["s"].string_param = "text"
    request.parameters["d"].double_param = 0.25
    request.parameters["u"].uint64_param = 2**64 - 1
    request.parameters["none"].Clear()
    request.inputs.add(name="a", datatype="FP32", shape=[2, 2])
    request.inputs.add(name="b", datatype="INT64", shape=[1])
    request.outputs.add(name="o")
    request.raw_input_contents.append(np.arange(4, dtype="<f4").tobytes())
    request.raw_input_contents.append(np.array([-9], "<i8").tobytes())
    return request


def test_whole_request_is_read_without_copying_its_values(pb2: Any) -> None:
    message = whole_request(pb2).SerializeToString()
    request = messages.request_of(message)
    assert (request.model, request.version, request.id) == ("m", "1", "frame-7")
    assert request.parameters == {
        "b": True,
        "n": -5,
        "s": "text",
        "d": 0.25,
        "u": 2**64 - 1,
        "none": None,
    }
    assert [one.name for one in request.outputs] == ["o"]
    first, second = request.inputs
    array = first.load(DATATYPES["FP32"])
    assert array.tolist() == [[0, 1], [2, 3]]
    assert np.shares_memory(array, np.frombuffer(message, np.uint8))
    assert second.load(DATATYPES["INT64"]).tolist() == [-9]
    assert [one.work_bytes for one in request.inputs] == [0, 0]


def test_other_orders_of_fields_and_unpacked_numbers_are_read() -> None:
    """As an encoder of proto2, or one that appends, writes them."""
    shape = pb.number_field(3, 1) + pb.number_field(3, 2)
    content = b"".join(bytes([6 << 3 | 5]) + np.float32(value).tobytes() for value in (1.5, 2.5))
    tensor = b"".join([*pb.view_field(5, content), shape, *pb.view_field(2, "FP32"), *pb.view_field(1, "x")])
    message = b"".join([*pb.view_field(5, tensor), *pb.view_field(99, b"later"), *pb.view_field(1, "m")])
    request = messages.request_of(message)
    assert request.model == "m"
    assert only_array(request).tolist() == [[1.5, 2.5]]


def test_answer_is_read_by_the_generated_class(pb2: Any) -> None:
    outputs = tuple(
        (TensorDescription(f"o{name}", name, (2, 1)), np.array([[0], [1]], dtype), False)
        for name, dtype in DATATYPES.items()
    )
    answer = Answer("m", "id", outputs, {"b": True, "n": -2, "d": 0.5, "s": "x"})
    for found in (
        pb2.ModelInferResponse.FromString(messages.answer_message(answer)),
        pb2.ModelStreamInferResponse.FromString(messages.stream_message(answer)).infer_response,
    ):
        assert (found.model_name, found.model_version, found.id) == ("m", "1", "id")
        assert [(one.name, one.datatype, list(one.shape)) for one in found.outputs] == [
            (description.name, description.datatype, [2, 1]) for description, *_ in outputs
        ]
        assert list(found.raw_output_contents) == [array.tobytes() for _, array, _ in outputs]
        assert found.parameters["b"].bool_param is True
        assert found.parameters["n"].int64_param == -2
        assert found.parameters["d"].double_param == 0.5
        assert found.parameters["s"].string_param == "x"


def test_error_of_a_stream_is_read_by_the_generated_class(pb2: Any) -> None:
    message = messages.stream_message(None, "too late", model="m", id="7")
    found = pb2.ModelStreamInferResponse.FromString(message)
    assert (found.error_message, found.infer_response.id) == ("too late", "7")


def test_descriptions_are_read_by_the_generated_classes(pb2: Any) -> None:
    metadata = pb2.ModelMetadataResponse.FromString(messages.model_message(MODEL))
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("m", ["1"], "aionn_onnx")
    assert [(one.name, one.datatype, tuple(one.shape)) for one in metadata.inputs] == [
        (one.name, one.datatype, one.shape) for one in MODEL.inputs
    ]
    config = pb2.ModelConfigResponse.FromString(messages.config_message(MODEL)).config
    names = [pb2.model__config__pb2.DataType.Name(one.data_type) for one in config.input]
    assert names == [f"TYPE_{one.datatype}" for one in MODEL.inputs]
    assert [tuple(one.dims) for one in config.output] == [(1, 1000)]
    assert config.HasField("model_transaction_policy") and not config.model_transaction_policy.decoupled
    server = pb2.ServerMetadataResponse.FromString(messages.server_message())
    assert (server.name, server.version) == ("aionn", aionn.__version__)
    assert "binary_tensor_data" in server.extensions
    for is_set in (True, False):
        assert pb2.ServerReadyResponse.FromString(messages.flag_message(is_set)).ready is is_set
    named = pb2.ModelReadyRequest(name="m", version="2").SerializeToString()
    assert messages.model_of(named) == ("m", "2")


def load_all(message: bytes) -> None:
    request = messages.request_of(message)
    for tensor in request.inputs:
        if tensor.datatype in DATATYPES:
            tensor.load(DATATYPES[tensor.datatype])


def test_every_damage_is_refused_or_read(pb2: Any) -> None:
    """Cut at every byte, and changed in random ones: nothing but ``InvalidArgument`` is ever raised."""
    draw = random.Random(1)
    wholes = [
        whole_request(pb2).SerializeToString(),
        typed(pb2, "INT64", [-1, 1, 2**40], "int64_contents").SerializeToString(),
    ]
    refused = 0
    for whole in wholes:
        damaged = [whole[:end] for end in range(len(whole))]
        for _ in range(DAMAGES):
            changed = bytearray(whole)
            for _ in range(draw.randint(1, 3)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            damaged.append(bytes(changed))
        for message in damaged:
            try:
                load_all(message)
            except aionn.InvalidArgument:
                refused += 1
    assert refused > DAMAGES


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\x0a\x05abc", "has 5 bytes, but the message has 3 more"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes, but the message has 0 more"),
        (b"\xff" * 11, "a number at byte 0 does not end"),
        (b"\x0a", "a number at byte 1 does not end"),
        (b"\x00\x01", "expected a field from 1 on"),
        (b"\x0b\x01", "the unknown wire type 3"),
        (b"\x0a\x01\xff", "expected UTF-8"),
        (b"\x08\x01", "expected a text, got a number"),
        (b"\x28\x01", "expected a message, got a number"),
        (b"".join(pb.view_field(1, "n" * 2000)), "a text of at most 1024 bytes, got 2000"),
        (b"".join(pb.view_field(7, b"")), "raw_input_contents for all 0 inputs or none, got 1"),
        (b"\x98\x06\x01" * 5000, "expected at most 4096 fields"),
        (b"".join(pb.view_field(6, b"")) * 1100, "tensors: expected at most 1024, got 1025"),
        (
            b"".join(b"".join(pb.view_field(4, b"".join(pb.view_field(1, f"{n}")))) for n in range(70)),
            "parameters: expected at most 64, got 65",
        ),
        (
            b"".join(pb.view_field(5, pb.packed_field(3, [1] * 33))),
            "axes: expected at most 32, got 33",
        ),
    ],
)
def test_damaged_message_is_refused_with_the_place(message: bytes, text: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=text):
        messages.request_of(message)


def test_shared_memory_and_classification_are_refused(pb2: Any) -> None:
    for name in ("shared_memory_region", "classification"):
        request = pb2.ModelInferRequest(model_name="m")
        output = request.outputs.add(name="o")
        output.parameters[name].int64_param = 1
        with pytest.raises(aionn.InvalidArgument, match="is not supported"):
            messages.request_of(request.SerializeToString())


def test_packed_numbers_match_those_that_were_written() -> None:
    draw = random.Random(2)
    numbers = [draw.getrandbits(draw.randint(1, 64)) for _ in range(300)]
    content = memoryview(pb.packed_field(1, numbers))[3:]
    assert pb.packed_varints(content, "").tolist() == numbers
    for damaged in (b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"):
        with pytest.raises(aionn.InvalidArgument, match="does not end"):
            pb.packed_varints(memoryview(damaged), "")


def test_inputs_that_come_again_are_read_anew_with_their_values() -> None:
    def message(values: bytes, shape: tuple[int, ...] = (1,), name: str = "a") -> bytes:
        tensor = [*pb.view_field(1, name), *pb.view_field(2, "FP32"), pb.packed_field(3, shape)]
        return b"".join([*pb.view_field(5, b"".join(tensor)), *pb.view_field(7, values)])

    for value in (1.0, 2.0):
        for name, shape in (("a", (1,)), ("b", (1,)), ("a", (1, 1))):
            raw = np.array([value], "<f4").tobytes()
            (tensor,) = messages.request_of(message(raw, shape, name)).inputs
            assert (tensor.name, tensor.shape) == (name, shape)
            loaded = tensor.load(np.dtype(np.float32))
            assert loaded.shape == shape and loaded.ravel()[0] == value
    for _ in range(2):
        typed = b"".join(
            [*pb.view_field(5, b"".join(pb.view_field(5, b"\x32\x04abcd"))), *pb.view_field(7, b"abcd")]
        )
        with pytest.raises(aionn.InvalidArgument, match="got both"):
            messages.request_of(typed)
