""".onnx files through ``Runtime.compile``: names, declared types and shapes, options, the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import InvalidArgument, InvalidModel
from aionn.models.onnx.encoding import encode_model, node, tensor
from aionn.models.onnx.schema import (
    DataType,
    GraphProto,
    ModelProto,
    OpsetImport,
    TensorProto,
    ValueInfo,
)
from tests.aionn.models.onnx.building import file

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.fixture
def runtime(runtime_of_module: aionn.Runtime) -> aionn.Runtime:
    return runtime_of_module


pytestmark = pytest.mark.asyncio(loop_scope="module")


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Rows of a table by INT64 indexes [batch, time], and the index of the largest row sum [batch]."""
    nodes = [
        node("Gather", ["table", "ids"], ["rows"]),
        node("ReduceSum", ["rows", "last"], ["sums"], keepdims=0),
        node("ArgMax", ["sums"], ["best"], axis=1, keepdims=0),
    ]
    ids = ValueInfo("ids", DataType.INT64, ("batch", "time"))
    data = file(nodes, [ids], ["rows", "best"], {"table": TABLE, "last": np.array([-1])})
    return written(tmp_path / "tokens.onnx", data)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A number of rank 0, a truth value of rank 0, and a value of rank 5."""
    nodes = [
        node("Cast", ["flag"], ["factor"], to=int(DataType.FLOAT)),
        node("Cast", ["count"], ["number"], to=int(DataType.FLOAT)),
        node("Mul", ["x", "factor"], ["h"]),
        node("Add", ["h", "number"], ["y"]),
        node("Not", ["flag"], ["other"]),
    ]
    inputs = [
        ValueInfo("x", DataType.FLOAT, (1, 2, 1, 2, 3)),
        ValueInfo("flag", DataType.BOOL, ()),
        ValueInfo("count", DataType.INT64, ()),
    ]
    return written(tmp_path / "mixed.onnx", file(nodes, inputs, ["y", "other"]))


async def test_names_and_declared_types_are_those_of_the_file(runtime: aionn.Runtime, tokens: Path) -> None:
    async with await runtime.compile(tokens, dimensions={"batch": 2, "time": 3}) as net:
        assert [spec.name for spec in net.inputs] == ["ids"]
        assert [spec.name for spec in net.outputs] == ["rows", "best"]
        assert str(net.inputs[0]) == "ids TENSOR_INT32 2x3 (in the file int64 2x3)"
        ids = np.array([[1, 2, 9], [7, 0, 3]])
        for given in (ids, ids.astype(np.int32), np.asfortranarray(ids), ids.astype(">i8")):
            rows, best = (await net.execute([given])).outputs
            np.testing.assert_array_equal(rows, TABLE[ids])
            assert (best.dtype, best.tolist()) == (np.int64, [2, 0])


async def test_ranks_0_and_5_and_truth_values_have_the_shapes_of_the_file(
    runtime: aionn.Runtime, mixed: Path
) -> None:
    x = np.arange(12, dtype=np.float32).reshape(1, 2, 1, 2, 3)
    async with await runtime.compile(mixed) as net:
        for flag, count in ((True, 7), (np.array(True), np.array(7)), (np.array([True]), np.array([7]))):
            y, other = (await net.execute([x, flag, count])).outputs
            np.testing.assert_array_equal(y, x + 7)
            assert (other.shape, other.dtype, bool(other)) == ((), np.bool_, False)


async def test_bursts_streams_fences_and_reusable_executions_give_declared_results(
    runtime: aionn.Runtime, tokens: Path
) -> None:
    ids = np.array([[1, 2, 9]])

    async def source() -> AsyncIterator[Any]:
        for _ in range(3):
            yield ids

    async with await runtime.compile(tokens, dimensions={"batch": 1, "time": 3}) as net:
        results = [await net.execute_fenced([ids])]
        async with net.burst() as burst:
            results.append(await burst.execute([ids]))
            async for item in burst.stream(source()):
                assert item.outputs[1].dtype == np.int64 and item.outputs[1].tolist() == [2]
        reusable = net.reusable()
        reusable.inputs[0][...] = ids
        results.append(await reusable.execute())
        for result in results:
            assert result.outputs[1].dtype == np.int64 and result.outputs[1].tolist() == [2]
            np.testing.assert_array_equal(result.outputs[0], TABLE[ids])


async def test_results_are_written_into_arrays_of_the_declared_type(
    runtime: aionn.Runtime, tokens: Path
) -> None:
    async with await runtime.compile(tokens, dimensions={"batch": 1, "time": 3}) as net:
        best = np.zeros(1, np.int64)
        result = await net.execute([np.array([[1, 2, 9]])], outputs=[None, best])
        assert result.outputs[1] is best and best.tolist() == [2]
        for wrong in (np.zeros(1, np.int32), np.zeros((1, 1), np.int64)):
            with pytest.raises(
                InvalidArgument, match=r"output 1 \(best\): expected int64 of shape \[1\], got"
            ):
                await net.execute([np.array([[1, 2, 9]])], outputs=[None, wrong])


async def test_number_that_does_not_fit_is_named_with_its_input_and_index(
    runtime: aionn.Runtime, tokens: Path
) -> None:
    async with await runtime.compile(tokens, dimensions={"batch": 1, "time": 3}) as net:
        for number in (2**31, -(2**31) - 1, 2**40):
            with pytest.raises(InvalidArgument, match=rf"input 0 \(ids\), element \[0, 1\].* got {number}"):
                await net.execute([np.array([[1, number, 2]])])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((1, 3), np.float32), "expected element type int64 or int32, got float32"),
        (np.zeros((3,), np.int64), r"expected shape \[1, 3\], got \[3\]"),
        (7, "expected an array or a buffer, got an int"),
        (None, "missing"),
    ],
)
async def test_wrong_inputs_are_rejected_with_the_declared_type(
    runtime: aionn.Runtime, tokens: Path, value: Any, words: str
) -> None:
    async with await runtime.compile(tokens, dimensions={"batch": 1, "time": 3}) as net:
        with pytest.raises(InvalidArgument, match=rf"input 0 \(ids\): {words}"):
            await net.execute([value])


async def test_fraction_is_not_taken_for_a_whole_number_of_rank_0(
    runtime: aionn.Runtime, mixed: Path
) -> None:
    async with await runtime.compile(mixed) as net:
        x = np.zeros((1, 2, 1, 2, 3), np.float32)
        with pytest.raises(
            InvalidArgument, match=r"input 2 \(count\): expected a number of type int64, got 1.5"
        ):
            await net.execute([x, True, 1.5])


async def test_open_extents_are_all_named_in_one_error(runtime: aionn.Runtime, tokens: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await runtime.compile(tokens)
    for words in (str(tokens), "'batch'", "'time'", "dimensions={", "--dimension batch=..."):
        assert words in str(caught.value)
    async with await runtime.compile(tokens, input_shapes={"ids": (1, 4)}) as net:
        assert net.inputs[0].dimensions == (1, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dimensions": {"batch": -1}}, "dimensions, 'batch': expected a whole number of 0 or more, got -1"),
        ({"dimensions": {"batch": 1.5}}, "dimensions, 'batch': expected a whole number"),
        ({"dimensions": 3}, "dimensions: expected a mapping by names, got 3"),
        ({"input_shapes": {"ids": 3}}, "input_shapes, 'ids': expected whole numbers"),
        ({"values": {"ids": "x"}}, "values, 'ids': expected an array of numbers"),
        ({"dimensions": {"bach": 1}}, "dimensions: expected names among"),
    ],
)
async def test_wrong_options_are_rejected(
    runtime: aionn.Runtime, tokens: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await runtime.compile(tokens, **options)


async def test_options_are_rejected_for_other_models(runtime: aionn.Runtime, example_data: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"expected an \.onnx file with the option dimensions, got a \.tflite"
    ):
        await runtime.compile(example_data / "digits_float.tflite", dimensions={"batch": 1})
    model = aionn.models.load_tflite(example_data / "digits_float.tflite").model
    with pytest.raises(InvalidArgument, match="with the option values, got a Model"):
        await runtime.supported_operations(model, values={"x": 1})


async def test_content_counts_before_the_name_of_a_file(
    runtime: aionn.Runtime, example_data: Path, tokens: Path, tmp_path: Path
) -> None:
    renamed = written(tmp_path / "model.onnx", (example_data / "digits_float.tflite").read_bytes())
    async with await runtime.compile(renamed) as net:
        assert len(net.inputs) == 1
    bare = written(tmp_path / "model", tokens.read_bytes())
    async with await runtime.compile(bare, dimensions={"batch": 1, "time": 1}) as net:
        assert net.inputs[0].name == "ids"
    with pytest.raises(InvalidModel, match="onnx"):
        await runtime.compile(written(tmp_path / "damaged.onnx", b"\x08\x08\x3a\xff"))


async def test_inputs_become_constants(runtime: aionn.Runtime, tmp_path: Path) -> None:
    inputs = [ValueInfo("x", DataType.FLOAT, (2, 6)), ValueInfo("shape", DataType.INT64, (2,))]
    path = written(tmp_path / "reshape.onnx", file([node("Reshape", ["x", "shape"], ["y"])], inputs, ["y"]))
    with pytest.raises(InvalidArgument, match=r"no device supports ai\.onnx\.Reshape"):
        await runtime.compile(path)
    async with await runtime.compile(path, values={"shape": np.array([3, 4], np.int32)}) as net:
        assert [spec.name for spec in net.inputs] == ["x"] and net.outputs[0].dimensions == (3, 4)


async def test_every_unknown_operator_is_listed_with_its_count(
    runtime: aionn.Runtime, tmp_path: Path
) -> None:
    nodes = [
        node("Foo", ["x"], ["a"]),
        node("Foo", ["a"], ["b"]),
        node("Bar", ["b"], ["c"], domain="com.acme"),
        node("Relu", ["c"], ["d"]),
    ]
    path = written(tmp_path / "x.onnx", file(nodes, [ValueInfo("x", DataType.FLOAT, (2,))], ["d"]))
    with pytest.raises(aionn.models.UnsupportedOperators) as caught:
        await runtime.compile(path)
    assert "got 3 that it cannot: 2 x Foo: the importer has no conversion" in str(caught.value)
    assert [(each.name, each.count) for each in caught.value.operators] == [("Foo", 2), ("com.acme.Bar", 1)]


async def test_cache_is_used_for_the_same_file_and_options_only(
    runtime: aionn.Runtime, tokens: Path, tmp_path: Path
) -> None:
    async def from_cache(time: int, token: bytes | None = None) -> bool:
        options = {"batch": 1, "time": time}
        async with await runtime.compile(
            tokens, dimensions=options, cache_dir=tmp_path / "cache", cache_token=token
        ) as net:
            ids = np.ones((1, time), np.int64)
            rows, best = (await net.execute([ids])).outputs
            np.testing.assert_array_equal(rows, TABLE[ids])
            assert best.dtype == np.int64 and net.inputs[0].name == "ids"
            return net.from_cache

    for token in (None, bytes(32)):
        found = [await from_cache(time, token) for time in (3, 3, 4, 4, 3)]
        assert found == [False, True, False, True, True]


async def test_cache_notices_changed_external_data(runtime: aionn.Runtime, tmp_path: Path) -> None:
    constant = TensorProto("c", DataType.FLOAT, (2,), external={"location": "weights"})
    graph = GraphProto(
        (node("Add", ["x", "c"], ["y"]),),
        (ValueInfo("x", DataType.FLOAT, (2,)),),
        (ValueInfo("y"),),
        (constant, tensor("unused", np.zeros(1, np.float32))),
    )
    path = written(tmp_path / "x.onnx", encode_model(ModelProto(10, (OpsetImport("", 21),), graph)))
    for number in (1.0, 2.0):
        written(tmp_path / "weights", np.full(2, number, np.float32).tobytes())
        async with await runtime.compile(path, cache_dir=tmp_path / "cache") as net:
            (y,) = (await net.execute([np.zeros(2, np.float32)])).outputs
            assert y.tolist() == [number, number]


async def test_pictures_are_written_into_inputs_with_channels_first(
    runtime: aionn.Runtime, tmp_path: Path
) -> None:
    from aionn.runtime.memory.pictures import image_size, image_writer

    shape = ValueInfo("x", DataType.FLOAT, (1, 3, 4, 6))
    path = written(tmp_path / "x.onnx", file([node("Neg", ["x"], ["y"])], [shape], ["y"]))
    async with await runtime.compile(path) as net:
        assert image_size(net.inputs[0]) == (6, 4)
        picture = np.random.default_rng(1).integers(0, 256, (4, 6, 3), dtype=np.uint8)
        view = np.zeros((1, 3, 4, 6), np.float32)
        image_writer(net.inputs[0])(picture, view)
        np.testing.assert_allclose(view[0], picture.transpose(2, 0, 1) / 255, atol=1e-7)


async def test_numbers_of_64_bits_with_a_fraction_are_computed_in_32(
    runtime: aionn.Runtime, tmp_path: Path
) -> None:
    inputs = [ValueInfo("x", DataType.DOUBLE, (3,))]
    path = written(
        tmp_path / "x.onnx", file([node("Mul", ["x", "c"], ["y"])], inputs, ["y"], {"c": np.array(0.1)})
    )
    async with await runtime.compile(path) as net:
        (y,) = (await net.execute([np.array([1.0, -3.0, np.inf])])).outputs
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, [0.1, -0.3, np.inf], rtol=1e-6)
        with pytest.raises(InvalidArgument, match=r"input 0 \(x\), element \[1\].* got -1e\+300"):
            await net.execute([np.array([1.0, -1e300, 0.0])])
        with pytest.raises(InvalidArgument, match="expected element type float64 or float32, got int64"):
            await net.execute([np.array([1, 2, 3])])
    large = file([node("Mul", ["x", "c"], ["y"])], inputs, ["y"], {"c": np.array(1e300)})
    with pytest.raises(InvalidArgument, match=r"no device supports ai\.onnx\.Mul"):
        await runtime.compile(written(path, large))


async def test_model_of_constants_is_rejected(runtime: aionn.Runtime, tmp_path: Path) -> None:
    inputs = [ValueInfo("x", DataType.FLOAT, (3,))]
    path = written(tmp_path / "x.onnx", file([node("Shape", ["x"], ["y"])], inputs, ["y"]))
    with pytest.raises(InvalidModel, match="expected outputs that depend on inputs, got constants only"):
        await runtime.compile(path)
