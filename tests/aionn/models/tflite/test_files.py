"""Whole files: the shared models, damaged files, and files that the HAL cannot express."""

import random
import tracemalloc
import warnings

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite
from aionn.models.tflite.rounding import mean_filter
from aionn.ops.numerics.fixed_point import multiply_by_quantized_multiplier, quantize_multiplier
from aionn.validation import validate_model

SEED = 20240611

SMALL = [
    "digits_float",
    "digits_int8",
    "digits_uint8",
    "kws_dscnn_float",
    "kws_dscnn_int8",
    "lstm_asr_float",
    "mobilenet_v1_0.25_128_int8",
    "shapes_float",
    "shapes_int8",
    "shapes_uint8",
]
LARGE = ["mobilenet_v1_0.25_128_float", "mobilenet_v2_1.0_224_float", "mobilenet_v2_1.0_224_int8"]


@pytest.fixture
def load():
    """Imports files; closes their pools afterwards."""
    models = []

    def _load(source):
        imported = load_tflite(source)
        models.append(imported.model)
        return imported

    yield _load
    for model in models:
        for pool in model.pools:
            pool.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SMALL + LARGE)
def test_shared_model_imports_as_a_valid_model(name, shared, load):
    imported = load(shared / "models" / f"{name}.tflite")
    assert 1 <= validate_model(imported.model) <= 6
    assert imported.inputs[0].name == "serve_x:0"
    assert [s.key for s in imported.signatures] == ["serve"]
    assert imported.signatures[0].inputs == (("x", 0),)
    assert imported.signatures[0].outputs == (("output_0", 0),)
    counts = [len(s.operations) for s in (imported.model.main, *imported.model.referenced)]
    assert [len(names) for names in imported.operation_names] == counts


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [*SMALL, pytest.param("mobilenet_v2_1.0_224_int8", marks=pytest.mark.slow)])
def test_shared_model_computes_what_the_reference_kernels_compute(name, shared, load):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    path = shared / "models" / f"{name}.tflite"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = interpreter.Interpreter(
            str(path), experimental_op_resolver_type=interpreter.OpResolverType.BUILTIN_REF
        )
    peer.allocate_tensors()
    (source,), (result,) = peer.get_input_details(), peer.get_output_details()
    ours = Interpreter(load(path).model)
    rng = np.random.default_rng(SEED)
    for _ in range(1 if name.startswith("mobilenet") else 4):
        if source["dtype"] == np.float32:
            x = rng.random(source["shape"], dtype=np.float32)
        else:
            info = np.iinfo(source["dtype"])
            x = rng.integers(info.min, info.max + 1, source["shape"]).astype(source["dtype"])
        peer.set_tensor(source["index"], x)
        peer.invoke()
        want = peer.get_tensor(result["index"])
        (got,) = ours.run([x], RunControl())
        if source["dtype"] == np.float32:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, want)


def test_quantised_arguments_say_how_to_fill_them(shared, load):
    imported = load(shared / "models" / "shapes_uint8.tflite")
    argument = imported.inputs[0].operand
    assert argument.type == OperandType.TENSOR_QUANT8_ASYMM
    assert argument.dimensions == (1, 96, 96, 3)
    assert (argument.scale, argument.zero_point) == (pytest.approx(1 / 255), 0)
    assert argument == imported.model.main.inputs[0]


def test_large_constants_lie_aligned_in_one_pool_and_small_ones_in_the_model(shared, load):
    model = load(shared / "models" / "lstm_asr_float.tflite").model
    assert len(model.pools) == 1
    seen = set()
    for subgraph in (model.main, *model.referenced):
        for operand in subgraph.operands:
            if operand.lifetime == OperandLifeTime.CONSTANT_REFERENCE:
                assert operand.location.length > 128
                assert operand.location.offset % 64 == 0
                seen.add(operand.location)
            elif operand.lifetime == OperandLifeTime.CONSTANT_COPY:
                assert operand.location.length <= 128
    assert sum(location.length for location in seen) <= model.pools[0].size_bytes


def test_values_that_a_loop_does_not_change_are_no_outputs_of_it(shared, load):
    model = load(shared / "models" / "lstm_asr_float.tflite").model
    loops = [o for o in model.main.operations if o.type == OperationType.WHILE]
    assert [(len(o.inputs) - 2, len(o.outputs)) for o in loops] == [(6, 5), (6, 5)]
    assert len(model.referenced) == 4


def test_bytes_and_path_give_the_same_model(shared, load):
    path = shared / "models" / "digits_int8.tflite"
    a, b = load(path), load(memoryview(path.read_bytes()))
    assert a.model.main == b.model.main
    assert a.model.operand_values == b.model.operand_values
    assert bytes(a.model.pools[0].array) == bytes(b.model.pools[0].array)


# Damage


@pytest.mark.parametrize("name", SMALL + LARGE)
def test_truncated_file_is_refused(name, shared):
    data = (shared / "models" / f"{name}.tflite").read_bytes()
    rng = random.Random(f"{SEED}{name}")
    lengths = [*range(0, 80, 3), *(rng.randrange(len(data)) for _ in range(20)), len(data) - 1]
    for length in lengths:
        with pytest.raises(InvalidModel, match="expected"):
            load_tflite(data[:length])


def _damaged(data, rng):
    """Some bytes changed, mostly where the structure lies: constants fill the middle of a file."""
    damaged = bytearray(data)
    tail = min(len(data), 20_000)
    places = (
        lambda: rng.randrange(len(data)),
        lambda: rng.randrange(len(data) - tail, len(data)),
        lambda: rng.randrange(min(len(data), 3_000)),
    )
    place = rng.choice(places)
    for _ in range(rng.choice([1, 1, 2, 4, 16, 64])):
        i = place()
        damaged[i] = rng.choice([rng.randrange(256), 0, 0xFF, 0x7F, damaged[i] ^ (1 << rng.randrange(8))])
    return bytes(damaged)


def _flip(name, shared, count):
    data = (shared / "models" / f"{name}.tflite").read_bytes()
    outcomes = set()
    for number in range(count):
        seed = f"{SEED} {name} {number}"
        try:
            imported = load_tflite(_damaged(data, random.Random(seed)))
        except InvalidModel as e:
            assert "unforeseen" not in str(e), seed
            outcomes.add("refused")
            continue
        except BaseException as e:
            e.add_note(f"seed {seed!r}")
            raise
        outcomes.add("loaded")
        for pool in imported.model.pools:
            pool.close()
    return outcomes


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SMALL)
def test_damaged_file_loads_or_is_refused(name, shared):
    assert _flip(name, shared, 60) == {"refused", "loaded"}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL + LARGE)
def test_damaged_file_loads_or_is_refused_long(name, shared):
    assert _flip(name, shared, 5_000 if name in SMALL else 300) == {"refused", "loaded"}


def test_what_operators_imply_cannot_outgrow_the_file(tflite):
    # A mean over 2 GiB of activations would need a filter of that size.
    t = tflite
    shape = (1, 40_000, 50_000, 1)
    tensors = [
        t.T("int8", shape, scale=0.5, zero_point=-128),
        t.T("int32", value=np.int32([1, 2])),
        t.T("int8", (1, 1), scale=0.4, zero_point=-128),
    ]
    data = t.write(t.Graph(tensors, [t.Op(40, [0, 1], [2], "ReducerOptions")], [0], [2]))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidModel, match="over the file's size"):
            load_tflite(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.thorough
def test_compositions_cannot_unfold_without_end(tflite):
    # 300 running sums over 250 steps each would be 75,000 operations from a file of a few kilobytes.
    t = tflite
    tensors = [t.f32(250), t.T("int32", value=np.int32(0)), *[t.f32(250)] * 300]
    operators = [t.Op(128, [0, 1], [2 + i]) for i in range(300)]
    with pytest.raises(InvalidModel, match="operations each"):
        load_tflite(t.write(t.Graph(tensors, operators, [0], [2])))


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_tflite(tmp_path / "nothing.tflite")


# What cannot be expressed


def test_every_inexpressible_operator_is_listed_with_its_count(tflite):
    t = tflite
    plain = t.T("float32", (2,))
    operators = [
        t.Op(156, [0, 0], [1]),
        t.Op(156, [1, 1], [2]),
        t.Op(32, [2], [3], custom="Magic"),
        t.Op(101, [3], [4]),
        t.Op(80, [4], [5]),
    ]
    with pytest.raises(InvalidModel) as caught:
        load_tflite(t.write(t.Graph([plain] * 6, operators, [0], [5])))
    text = str(caught.value)
    assert "got 4 that it cannot" in text
    assert "2 x ATAN2: " in text and "1 x CUSTOM 'Magic': " in text and "1 x FAKE_QUANT: " in text
    assert "ABS" not in text


def test_operator_after_an_inexpressible_one_is_not_blamed(tflite):
    t = tflite
    tensors = [t.T("float32", (2,)), t.T("int64", (2,)), t.T("int64", (2,)), t.T("int64", (2,))]
    operators = [t.Op(80, [0], [1]), t.Op(101, [1], [2]), t.Op(101, [2], [3])]
    with pytest.raises(InvalidModel, match="got 1 that it cannot: 1 x FAKE_QUANT: "):
        load_tflite(t.write(t.Graph(tensors, operators, [0], [3])))


def test_wide_indexes_become_32_bits(tflite, load):
    t = tflite
    tensors = [
        t.T("float32", (3, 5)),
        t.T("int32", value=np.int32(1)),
        t.T("int64", (3,)),
        t.T("int64", (3, 1)),
    ]
    operators = [t.Op(56, [0, 1], [2]), t.Op(22, [2], [3])]
    model = load(t.write(t.Graph(tensors, operators, [0], [3]))).model
    x = np.random.default_rng(SEED).random((3, 5), dtype=np.float32)
    (got,) = Interpreter(model).run([x], RunControl())
    np.testing.assert_array_equal(got, x.argmax(1).reshape(3, 1))
    assert got.dtype == np.int32


@pytest.mark.parametrize("code", [0, 53])
def test_wide_numbers_that_may_not_fit_are_refused(code, tflite):
    t = tflite
    graph = t.Graph(
        [t.T("float32", (3,)), t.T("int64", (3,))], [t.Op(code, [0] * (2 - code // 53), [1])], [0], [1]
    )
    with pytest.raises(InvalidModel, match="64"):
        load_tflite(t.write(graph))


def test_contract_of_the_hal_decides_what_is_expressible(tflite):
    t = tflite
    graph = t.Graph([t.T("int32", (2,)), t.T("int32", (2,))], [t.Op(47, [0], [1])], [0], [1])
    with pytest.raises(InvalidModel, match=r"1 x EXP: \(EXP\), input 0: expected .*, got TENSOR_INT32"):
        load_tflite(t.write(graph))


def test_state_between_executions_is_refused(tflite):
    t = tflite
    tensors = [t.T("float32", (2,)), t.T("float32", (2,), is_variable=True), t.T("float32", (2,))]
    with pytest.raises(InvalidModel, match="1 x ADD: a variable tensor keeps its value between executions"):
        load_tflite(t.write(t.Graph(tensors, [t.Op(0, [0, 1], [2], "AddOptions")], [0], [2])))


def test_operator_before_its_input_is_refused(tflite):
    t = tflite
    plain = t.T("float32", (2,))
    operators = [t.Op(101, [1], [2]), t.Op(101, [0], [1])]
    with pytest.raises(InvalidModel, match=r"subgraph 0, operator 0 .*ABS.*got tensor 1"):
        load_tflite(t.write(t.Graph([plain] * 3, operators, [0], [2])))


def test_tensor_that_is_written_twice_is_refused(tflite):
    t = tflite
    plain = t.T("float32", (2,))
    operators = [t.Op(101, [0], [1]), t.Op(59, [0], [1])]
    with pytest.raises(InvalidModel, match="a tensor that is written once"):
        load_tflite(t.write(t.Graph([plain] * 2, operators, [0], [1])))


def test_subgraphs_that_refer_to_themselves_are_refused(tflite):
    t = tflite
    flag, plain = t.T("bool", (1,)), t.T("float32", (2,))
    choice = t.Op(118, [0, 1], [2], "IfOptions", {"then_subgraph_index": 1, "else_subgraph_index": 1})
    graph = t.Graph([flag, plain, plain], [choice], [0, 1], [2])
    inner = t.Op(118, [2, 0], [1], "IfOptions", {"then_subgraph_index": 1, "else_subgraph_index": 1})
    branch = t.Graph([plain, plain, t.T("bool", value=np.array([True]))], [inner], [0], [1])
    with pytest.raises(InvalidModel, match="do not refer to themselves"):
        load_tflite(t.write(graph, branch))


def test_shared_bytes_are_stored_once(tflite, load):
    t = tflite
    value = np.arange(100, dtype=np.float32)
    tensors = [t.T("float32", (100,)), t.T("float32", value=value), *[t.T("float32", (100,))] * 2]
    operators = [t.Op(0, [0, 1], [2], "AddOptions"), t.Op(18, [2, 1], [3], "MulOptions")]
    model = load(t.write(t.Graph(tensors, operators, [0], [3]))).model
    assert model.pools[0].size_bytes == 400


def test_open_extents_of_the_main_inputs_take_the_files_default(tflite, load):
    t = tflite
    tensors = [
        t.T("float32", (1, 4), signature=(-1, 4)),
        t.T("float32", (1, 4), signature=(-1, 4)),
    ]
    model = load(t.write(t.Graph(tensors, [t.Op(101, [0], [1])], [0], [1]))).model
    assert model.main.inputs[0].dimensions == (1, 4)
    # The shape rule of the operation tells the rest.
    assert model.main.outputs[0].dimensions == (1, 4)


@pytest.mark.parametrize("zero_point", [-128, 127])
def test_mean_filter_is_exact_for_values_of_one_sign(zero_point):
    rng = np.random.default_rng(SEED)
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    found = 0
    for _ in range(12):
        source = Operand(kind, scale=float(np.float32(rng.uniform(0.01, 0.05))), zero_point=zero_point)
        ratio = rng.uniform(0.2, 1)
        target = Operand(kind, scale=float(np.float32(source.scale * ratio)), zero_point=zero_point)
        found += mean_filter(source, target, int(rng.integers(2, 100))).is_exact
    assert found == 12


def test_mean_filter_equals_the_reference_for_every_sum():
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    source, target = (
        Operand(kind, scale=0.0235, zero_point=-128),
        Operand(kind, scale=0.0113, zero_point=-128),
    )
    rule = mean_filter(source, target, 49)
    assert rule.is_exact and (rule.weight, rule.bias) != (1, 0)
    sums = np.arange(0, 255 * 49 + 1)
    multiplier, shift = quantize_multiplier(0.0235 / 0.0113)
    places = 5  # 32 is the largest power of two in 49.
    reference = multiply_by_quantized_multiplier(sums, (multiplier << places) // 49, shift - places)
    ours = multiply_by_quantized_multiplier(
        sums * rule.weight + rule.bias, *quantize_multiplier(0.0235 * rule.scale / 0.0113)
    )
    np.testing.assert_array_equal(np.clip(ours - 128, -128, 127), np.clip(reference - 128, -128, 127))
