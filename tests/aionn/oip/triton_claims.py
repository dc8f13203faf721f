"""The clients of tritonclient against a server: each function is one claim, in a process of its own (see ``grpc_claims``).

``python -m tests.aionn.oip.triton_claims GRPC REST`` takes the addresses of ``aionn serve --oip`` with the models ``digits``
(floats) and ``shapes`` (int8), and prints a JSON object: the traceback of each claim that failed, empty for the others.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_aio
import tritonclient.http as by_http
import tritonclient.http.aio as by_http_aio
from tritonclient.utils import InferenceServerException

GRPC, REST = sys.argv[1:3]
WAIT_S_MAX = 30.0


def random_value(shape: list[int], datatype: str, seed: int = 1) -> Any:
    draw = np.random.default_rng(seed)
    if datatype == "INT8":
        return draw.integers(-128, 128, shape, np.int8)
    return draw.random(shape, np.float32)


def inputs_of(module: Any, client: Any, model: str, **more: Any) -> tuple[list[Any], str]:
    """An input with random values, and the name of the output."""
    metadata = client.get_model_metadata(model)
    if module is by_http:
        (one,), (out,) = metadata["inputs"], metadata["outputs"]
        name, shape, datatype, output = one["name"], one["shape"], one["datatype"], out["name"]
    else:
        (one,), (out,) = metadata.inputs, metadata.outputs
        name, shape, datatype, output = one.name, list(one.shape), one.datatype, out.name
    value = module.InferInput(name, shape, datatype)
    value.set_data_from_numpy(random_value(shape, datatype), **more)
    return [value], output


def scores(model: str = "digits") -> Any:
    """The answer by REST with JSON both ways."""
    with by_http.InferenceServerClient(REST) as client:
        values, output = inputs_of(by_http, client, model, binary_data=False)
        wanted = [by_http.InferRequestedOutput(output, binary_data=False)]
        return client.infer(model, values, outputs=wanted).as_numpy(output)


def claim_grpc_questions_are_answered() -> None:
    with by_grpc.InferenceServerClient(GRPC) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("digits") and client.is_model_ready("digits", "1")
        assert not client.is_model_ready("other") and not client.is_model_ready("digits", "2")
        assert client.get_server_metadata().name == "aionn"
        assert client.get_model_metadata("shapes", as_json=True)["platform"] == "aionn_tflite"
        config = client.get_model_config("digits").config
        assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (0, False)


def claim_grpc_and_rest_give_the_same_numbers() -> None:
    with by_grpc.InferenceServerClient(GRPC) as client:
        for model in ("digits", "shapes"):
            values, output = inputs_of(by_grpc, client, model)
            found = client.infer(model, values, model_version="1", request_id="r7")
            assert found.get_response().id == "r7"
            assert np.array_equal(found.as_numpy(output), scores(model))


def claim_grpc_output_by_name_and_parameters_are_taken() -> None:
    with by_grpc.InferenceServerClient(GRPC) as client:
        values, output = inputs_of(by_grpc, client, "digits")
        found = client.infer(
            "digits",
            values,
            outputs=[by_grpc.InferRequestedOutput(output)],
            priority=1,
            timeout=20_000_000,
            client_timeout=20.0,
            parameters={"aionn_age_us": 5, "aionn_deadline_us": 20_000_000},
        )
        assert np.array_equal(found.as_numpy(output), scores())


def expect(status: str, text: str, call: Any) -> None:
    try:
        call()
    except InferenceServerException as e:
        assert e.status() == status, e
        assert text in e.message(), e
    else:
        raise AssertionError("it succeeded")


def claim_grpc_errors_have_their_codes() -> None:
    with by_grpc.InferenceServerClient(GRPC) as client:
        values, output = inputs_of(by_grpc, client, "digits")
        wrong = by_grpc.InferInput(values[0].name(), [1, 3], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 3), np.float32))
        ranked = [by_grpc.InferRequestedOutput(output, class_count=3)]
        late = {"aionn_age_us": 100_000, "aionn_deadline_us": 50_000}
        for code, text, call in (
            ("NOT_FOUND", "'other' is not served", lambda: client.infer("other", values)),
            ("NOT_FOUND", "version '3'", lambda: client.infer("digits", values, model_version="3")),
            ("INVALID_ARGUMENT", "expected the shape", lambda: client.infer("digits", [wrong])),
            ("INVALID_ARGUMENT", "input 0", lambda: client.infer("digits", [])),
            ("INVALID_ARGUMENT", "classification", lambda: client.infer("digits", values, outputs=ranked)),
            ("INVALID_ARGUMENT", "sequence", lambda: client.infer("digits", values, sequence_id=3)),
            ("DEADLINE_EXCEEDED", "", lambda: client.infer("digits", values, parameters=late)),
            ("DEADLINE_EXCEEDED", "", lambda: client.infer("digits", values, client_timeout=1e-6)),
            ("UNIMPLEMENTED", "", client.get_system_shared_memory_status),
        ):
            expect(f"StatusCode.{code}", text, call)


def claim_grpc_callbacks_are_called() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with by_grpc.InferenceServerClient(GRPC) as client:
        values, output = inputs_of(by_grpc, client, "digits")
        for _ in range(8):
            client.async_infer("digits", values, lambda result, error: answers.put((result, error)))
        for _ in range(8):
            result, error = answers.get(timeout=WAIT_S_MAX)
            assert error is None and np.array_equal(result.as_numpy(output), scores())


def claim_grpc_stream_answers_in_order() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with by_grpc.InferenceServerClient(GRPC) as client:
        values, output = inputs_of(by_grpc, client, "digits")
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(20):
            model = "other" if number == 7 else "digits"
            client.async_stream_infer(
                model, values, request_id=str(number), enable_empty_final_response=number == 3
            )
        expected = scores()
        for number in range(20):
            result, error = answers.get(timeout=WAIT_S_MAX)
            if number == 7:
                assert "'other' is not served" in str(error)
                continue
            assert error is None
            response = result.get_response()
            assert response.id == str(number)
            assert ("triton_final_response" in response.parameters) == (number == 3)
            assert np.array_equal(result.as_numpy(output), expected)
        client.stop_stream()


async def claim_aio_client_infers_and_streams() -> None:
    with by_grpc.InferenceServerClient(GRPC) as other:
        values, output = inputs_of(by_grpc, other, "digits")
    expected = scores()
    async with by_aio.InferenceServerClient(GRPC) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("digits")).name == "digits"
        found = await client.infer("digits", values)
        assert np.array_equal(found.as_numpy(output), expected)

        async def requests() -> Any:
            for number in range(10):
                yield {"model_name": "digits", "inputs": values, "request_id": str(number)}

        count = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None and result.get_response().id == str(count)
            assert np.array_equal(result.as_numpy(output), expected)
            count += 1
        assert count == 10


def claim_http_client_infers_with_json_and_raw_bytes() -> None:
    with by_http.InferenceServerClient(REST) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("digits") and not client.is_model_ready("other")
        assert client.get_server_metadata()["extensions"][0] == "binary_tensor_data"
        assert client.get_model_config("digits")["name"] == "digits"
        for model in ("digits", "shapes"):
            expected = scores(model)
            for sends_raw in (True, False):
                for gets_raw in (True, False):
                    values, output = inputs_of(by_http, client, model, binary_data=sends_raw)
                    wanted = [by_http.InferRequestedOutput(output, binary_data=gets_raw)]
                    found = client.infer(model, values, outputs=wanted, request_id="h")
                    assert found.get_response()["id"] == "h"
                    assert np.array_equal(found.as_numpy(output), expected)
            found = client.infer(model, values, timeout=20_000_000, priority=3)
            assert np.array_equal(found.as_numpy(output), expected)
            found = client.async_infer(model, values).get_result()
            assert np.array_equal(found.as_numpy(output), expected)


def claim_http_errors_have_their_statuses() -> None:
    with by_http.InferenceServerClient(REST) as client:
        values, _ = inputs_of(by_http, client, "digits")
        late = {"aionn_age_us": 100_000, "aionn_deadline_us": 50_000}
        for status, text, call in (
            ("404", "'other' is not served", lambda: client.infer("other", values)),
            ("400", "input 0", lambda: client.infer("digits", [])),
            ("504", "deadline", lambda: client.infer("digits", values, parameters=late)),
            (
                "415",
                "compressed",
                lambda: client.infer("digits", values, request_compression_algorithm="gzip"),
            ),
            ("404", "no such address", client.get_system_shared_memory_status),
        ):
            expect(status, text, call)


async def claim_http_aio_client_infers() -> None:
    with by_http.InferenceServerClient(REST) as other:
        values, output = inputs_of(by_http, other, "digits")
    async with by_http_aio.InferenceServerClient(REST) as client:
        assert await client.is_model_ready("digits")
        found = await client.infer("digits", values)
        assert np.array_equal(found.as_numpy(output), scores())


def main() -> None:
    outcomes = {}
    for name, claim in list(globals().items()):
        if name.startswith("claim_"):
            try:
                if asyncio.iscoroutinefunction(claim):
                    asyncio.run(asyncio.wait_for(claim(), WAIT_S_MAX))
                else:
                    claim()
                outcomes[name] = ""
            except BaseException:
                outcomes[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Of the clients' own packages.
    main()
