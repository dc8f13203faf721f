"""Every rule for models refuses what breaks it, and says where."""

import enum

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.hal import (
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    Memory,
    MemoryKind,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
)
from aionn.models.builder import ExtensionCode, GraphBuilder
from aionn.validation import validate_model

F32 = OperandType.TENSOR_FLOAT32
Life = OperandLifeTime


def refused(model, text):
    with pytest.raises(InvalidModel) as caught:
        validate_model(model)
    assert text in str(caught.value)


def test_legal_models_have_the_least_level(plain, quantized, branching, looping):
    assert [validate_model(m) for m in (plain, quantized, branching, looping)] == [3, 1, 4, 4]


def test_enumerators_of_an_extension_are_numbers(plain):
    class Vendor(enum.IntEnum):
        OWN = (5 << 16) | 1

    extended = msgspec.structs.replace(
        plain,
        main=msgspec.structs.replace(
            plain.main,
            operations=tuple(msgspec.structs.replace(one, type=Vendor.OWN) for one in plain.main.operations),
        ),
    )
    refused(extended, "expected a prefix of the model's extensions [], got 5")


# Operands

OPERAND_BREACHES = [
    ({"type": 99}, "operand 0 (0x63), type: expected a type of the spec, got 99"),
    ({"type": 0x10001}, "type: expected a prefix of the model's extensions [], got 1"),
    ({"lifetime": 7}, "operands[0].lifetime: expected OperandLifeTime, got int 7"),
    ({"lifetime": Life.SUBGRAPH}, "lifetime: expected another than SUBGRAPH, got SUBGRAPH"),
    ({"dimensions": (2, -1)}, "dimensions: expected extents from 0 to 4294967295, got [2, -1]"),
    ({"dimensions": (2**32,)}, "dimensions: expected extents from 0 to 4294967295"),
    ({"dimensions": (2**32, 0)}, "dimensions: expected extents from 0 to 4294967295"),
    ({"dimensions": (65536, 65536)}, "dimensions: expected at most 4294967295 bytes"),
    ({"dimensions": (2,) * 65}, "dimensions: expected at most 64, got 65"),
    ({"scale": 0.5}, "(TENSOR_FLOAT32), scale: expected 0, got 0.5"),
    ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ({"zero_point": 1}, "zero point: expected 0, got 1"),
    ({"channel_quant": ChannelQuant((1.0,), 0)}, "channel quantisation: expected none, got 1 scales"),
    ({"extension_data": b"x"}, "extension data: expected none, got 1 bytes"),
    ({"location": DataLocation(0, 4, 0)}, "location: expected 0 for lifetime SUBGRAPH_INPUT"),
    ({"location": DataLocation(0, 0, 0, 4)}, "location: expected no padding, got 4"),
    ({"location": DataLocation(0, -4, 0)}, "location: expected numbers from 0"),
    ({"consumer_count": 2}, "operand 0, consumer count: expected 1, got 2"),
]


@pytest.mark.parametrize(("changes", "text"), OPERAND_BREACHES)
def test_broken_input_operand_is_refused(changes, text, plain, change):
    refused(change.operand(plain, 0, **changes), text)


CONSTANT_BREACHES = [
    ({"dimensions": ()}, "a known shape, as it is a constant, got []"),
    ({"dimensions": (0,)}, "a known shape, as it is a constant, got [0]"),
    ({"dimensions": (41,)}, "length: expected 164 bytes, got 160"),
    ({"location": DataLocation(1, 0, 160)}, "location: expected a pool index below 1, got 1"),
    ({"location": DataLocation(0, 4, 160)}, "bytes inside of pool 0 (160 bytes), got 160 bytes at 4"),
    ({"location": DataLocation(0, 2**32 - 1, 160)}, "bytes inside of pool 0"),
    (
        {"lifetime": Life.CONSTANT_COPY, "location": DataLocation(1, 0, 160)},
        "location: expected pool index 0, got 1",
    ),
    (
        {"lifetime": Life.CONSTANT_COPY, "location": DataLocation(0, 0, 160)},
        "bytes inside of the model's values (4 bytes)",
    ),
]


@pytest.mark.parametrize(("changes", "text"), CONSTANT_BREACHES)
def test_broken_constant_is_refused(changes, text, plain, change):
    refused(change.operand(plain, 1, **changes), text)


def test_scalar_with_dimensions_is_refused(plain, change):
    refused(
        change.operand(plain, 2, dimensions=(1,)), "(INT32), dimensions: expected none, as it is a scalar"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scale": 0.0}, "scale: expected a positive number, got 0.0"),
        ({"scale": -1.0}, "scale: expected a positive number, got -1.0"),
        ({"scale": float("inf")}, "scale: expected a finite number, got inf"),
        ({"zero_point": 256}, "zero point: expected 0 to 255, got 256"),
        ({"zero_point": -1}, "zero point: expected 0 to 255, got -1"),
        ({"type": OperandType.TENSOR_QUANT8_ASYMM_SIGNED}, "zero point: expected -128 to 127, got 128"),
        ({"type": OperandType.TENSOR_QUANT16_SYMM}, "zero point: expected 0, got 128"),
        ({"type": OperandType.TENSOR_INT32}, "zero point: expected 0, got 128"),
        ({"type": OperandType.TENSOR_INT32, "zero_point": 0, "scale": -0.5}, "scale: expected 0 or more"),
    ],
)
def test_broken_quantisation_is_refused(changes, text, quantized, change):
    refused(change.operand(quantized, 0, **changes), text)


@pytest.mark.parametrize(
    ("quant", "text"),
    [
        (None, "channel quantisation: expected scales and an axis, got none"),
        (ChannelQuant((1.0,), 4), "channel axis: expected an axis below 4, got 4"),
        (ChannelQuant((1.0,), -1), "channel axis: expected an axis below 4, got -1"),
        (ChannelQuant((1.0, 1.0), 0), "channel scales: expected 3, got 2"),
        (ChannelQuant((1.0, 0.0, 1.0), 0), "channel scales: expected positive finite numbers, got 0.0"),
        (
            ChannelQuant((1.0, float("nan"), 1.0), 0),
            "channel scales: expected positive finite numbers, got nan",
        ),
    ],
)
def test_broken_channel_scales_are_refused(quant, text, models, change):
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (1, 1, 1, 1), scale=0.5)
    filter_ = g.constant(
        np.ones((3, 1, 1, 1), np.int8),
        OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
        channel_quant=ChannelQuant((1.0, 2.0, 3.0), 0),
    )
    y = g.result(OperationType.CONV_2D, [x, filter_, g.constant([0, 0, 0]), 1, 1, 1, 0], x, (1, 1, 1, 3))
    model = models(g.build([y]))
    assert validate_model(model) == 4
    refused(change.operand(model, 1, channel_quant=quant), text)


# Operations and graph


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"inputs": (0, 1, 5)},
            "subgraph 0, operation 0 (ADD), input 2: expected an operand index below 5, got 5",
        ),
        ({"inputs": (0, 1, -1)}, "input 2: expected an operand index below 5, got -1"),
        ({"outputs": (9,)}, "output 0: expected an operand index below 5, got 9"),
        (
            {"outputs": (1,)},
            "output 0: expected lifetime TEMPORARY_VARIABLE or SUBGRAPH_OUTPUT, got CONSTANT_REFERENCE",
        ),
        (
            {"outputs": (0,)},
            "output 0: expected lifetime TEMPORARY_VARIABLE or SUBGRAPH_OUTPUT, got SUBGRAPH_INPUT",
        ),
        ({"inputs": (0, 1)}, "operation 0 (ADD), number of inputs: expected 3, got 2"),
        ({"type": 106}, "expected an operation of the spec, got 0x6a"),
        ({"type": 0x20001}, "type: expected a prefix of the model's extensions [], got 2"),
        (
            {"inputs": (3, 1, 2)},
            "operation 0 (ADD), input 0: expected a value that is written before, got operand 3",
        ),
        (
            {"outputs": (4,)},
            "operation 1 (ABS), input 0: expected a value that is written before, got operand 3",
        ),
    ],
)
def test_broken_operation_is_refused(changes, text, plain, change):
    refused(change.operation(plain, 0, **changes), text)


def test_wrong_execution_order_is_refused(plain, change):
    turned = tuple(reversed(plain.main.operations))
    refused(
        change.subgraph(plain, operations=turned),
        "operation 0 (ABS), input 0: expected a value that is written before",
    )


def test_second_writer_is_refused(plain, change):
    again = (*plain.main.operations, plain.main.operations[1])
    refused(
        change.subgraph(plain, operations=again),
        "operation 2 (ABS), output 0: expected an operand that is written once",
    )


def test_operand_without_a_writer_is_refused(plain, change):
    operands = (*plain.main.operands, Operand(F32, (2,)))
    refused(change.subgraph(plain, operands=operands), "operand 5: expected to be written by an operation")


def test_left_out_input_is_refused_where_the_operation_needs_it(plain, change):
    absent = change.operand(plain, 1, lifetime=Life.NO_VALUE, location=DataLocation(), dimensions=(40,))
    refused(absent, "operation 0 (ADD), input 1: expected a value, got an operand that is left out")


@pytest.mark.parametrize("what", ["operands", "operations"])
def test_empty_subgraph_is_refused(what, plain, change):
    refused(change.subgraph(plain, **{what: ()}), f"subgraph 0, {what}: expected at least one, got none")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_indexes": ()}, "operand 0: expected to be among the inputs, got lifetime SUBGRAPH_INPUT"),
        ({"input_indexes": (0, 0)}, "inputs: expected every operand once, got operand 0 repeated"),
        ({"input_indexes": (0, 1)}, "input 1: expected lifetime SUBGRAPH_INPUT, got CONSTANT_REFERENCE"),
        ({"input_indexes": (7,)}, "input 0: expected an operand index below 5, got 7"),
        ({"output_indexes": ()}, "operand 4: expected to be among the outputs"),
        ({"output_indexes": (4, 4)}, "outputs: expected every operand once"),
        ({"output_indexes": (3,)}, "output 0: expected lifetime SUBGRAPH_OUTPUT, got TEMPORARY_VARIABLE"),
    ],
)
def test_broken_interface_is_refused(changes, text, plain, change):
    refused(change.subgraph(plain, **changes), text)


def test_stated_consumer_counts_are_accepted_when_they_are_right(plain, change):
    model = plain
    for index, count in enumerate([1, 1, 1, 1, 0]):
        model = change.operand(model, index, consumer_count=count)
    assert validate_model(model) == 3


# Control flow


@pytest.mark.parametrize(
    ("index", "changes", "text"),
    [
        (0, {"dimensions": (2,)}, "operation 0 (IF), input 0: expected extent 1 on axis 0"),
        (
            1,
            {"dimensions": (3,)},
            "input 1: branch input 0: expected TENSOR_FLOAT32 [3], got TENSOR_FLOAT32 [2]",
        ),
        (
            4,
            {"dimensions": (3,)},
            "input 1: branch output 0: expected TENSOR_FLOAT32 [3], got TENSOR_FLOAT32 [2]",
        ),
        (1, {"type": OperandType.TENSOR_FLOAT16}, "input 1: branch input 0: expected TENSOR_FLOAT16 [2]"),
        (
            2,
            {"location": DataLocation(0, 2, 0)},
            "operand 2 (SUBGRAPH), subgraph: expected an index below 2, got 2",
        ),
        (
            2,
            {"location": DataLocation(0, 0, 4)},
            "location: expected a subgraph index as the offset and else 0",
        ),
        (2, {"lifetime": Life.SUBGRAPH_INPUT}, "lifetime: expected SUBGRAPH, got SUBGRAPH_INPUT"),
    ],
)
def test_if_that_does_not_fit_its_branches_is_refused(index, changes, text, branching, change):
    refused(
        change.operand(
            branching,
            branching.main.operations[0].inputs[0] if index == 0 else index_of(branching, index),
            **changes,
        ),
        text,
    )


def index_of(model, role):
    """Roles of the ``branching`` fixture: 0 condition, 1 value, 2 first subgraph, 4 output."""
    condition, first, _, value = model.main.operations[0].inputs
    return {0: condition, 1: value, 2: first, 4: model.main.operations[0].outputs[0]}[role]


def test_unknown_extents_fit_any(branching, change):
    model = change.operand(branching, index_of(branching, 1), dimensions=(0,))
    assert validate_model(model) == 4
    model = change.operand(branching, index_of(branching, 1), dimensions=())
    assert validate_model(model) == 4
    for dimensions in ((), (0,)):
        assert validate_model(change.operand(branching, index_of(branching, 0), dimensions=dimensions)) == 4


def test_branch_with_other_counts_is_refused(branching, change):
    operation = branching.main.operations[0]
    fewer = change.operation(branching, 0, inputs=operation.inputs[:3])
    refused(fewer, "input 1: branch inputs: expected 0, got 1")


def test_branch_with_other_quantisation_is_refused(models, change):
    def branch():
        g = GraphBuilder()
        x = g.input(OperandType.TENSOR_QUANT8_ASYMM, (2,), scale=0.5)
        return g.finish([g.result(OperationType.RELU, [x], x)])

    g = GraphBuilder()
    flag = g.input(OperandType.TENSOR_BOOL8, (1,))
    x = g.input(OperandType.TENSOR_QUANT8_ASYMM, (2,), scale=0.5)
    model = models(g.build([g.result(OperationType.IF, [flag, g.graph(branch()), g.graph(branch()), x], x)]))
    assert validate_model(model) == 4
    refused(
        change.operand(model, model.main.operations[0].inputs[3], scale=0.25),
        "branch input 0: expected TENSOR_QUANT8_ASYMM [2] with scale 0.25 and zero point 0",
    )


def test_loop_whose_condition_is_no_boolean_is_refused(looping, change):
    # The condition returns its counter instead.
    inner = looping.referenced[0]
    flag = inner.output_indexes[0]
    model = change.operand(looping, flag, subgraph=1, dimensions=(2,))
    model = change.operand(model, inner.operations[0].inputs[0], subgraph=1, dimensions=(2,))
    refused(
        model,
        "operation 0 (WHILE), input 0: condition input 0: expected TENSOR_INT32 [1], got TENSOR_INT32 [2]",
    )


def test_loop_whose_condition_returns_several_values_is_refused(looping, change):
    # Unknown extents keep LESS from telling, so that the loop's own rule must.
    inner = looping.referenced[0]
    model = change.operand(looping, inner.output_indexes[0], subgraph=1, dimensions=(2,))
    for index in inner.operations[0].inputs:
        if not inner.operands[index].is_constant:
            model = change.operand(model, index, subgraph=1, dimensions=(0,))
    refused(model, "condition output 0: expected TENSOR_BOOL8 of shape [1], got TENSOR_BOOL8 [2]")


def test_loop_whose_body_changes_a_shape_is_refused(looping, change):
    body = looping.referenced[1]
    model = change.operand(looping, body.output_indexes[1], subgraph=2, dimensions=(3,))
    refused(
        model,
        "operation 0 (WHILE), input 1: body output 1: expected TENSOR_FLOAT32 [2], got TENSOR_FLOAT32 [3]",
    )


def test_loop_with_more_outputs_than_its_body_is_refused(looping, change):
    body = looping.referenced[1]
    last = body.output_indexes[1]
    model = change.operand(looping, last, subgraph=2, lifetime=Life.TEMPORARY_VARIABLE)
    model = change.subgraph(model, subgraph=2, output_indexes=body.output_indexes[:1])
    refused(model, "input 1: body outputs: expected 2 to 2, got 1")


def test_circle_of_references_is_refused(branching, change):
    # The first branch gets an IF that refers to the second, which refers to the first.
    def with_if(model, subgraph, target):
        graph = model.referenced[subgraph - 1]
        count = len(graph.operands)
        operands = (
            *graph.operands,
            Operand(OperandType.SUBGRAPH, lifetime=Life.SUBGRAPH, location=DataLocation(0, target, 0)),
        )
        assert count == 2
        return change.subgraph(model, subgraph=subgraph, operands=operands)

    model = with_if(with_if(branching, 1, 1), 2, 0)
    refused(model, "subgraph 1 -> subgraph 2 -> subgraph 1: expected no circle of references")


def test_long_chain_of_references_needs_no_deep_stack(models):
    def link(inner):
        """IF over one graph in both branches, with the same inputs as that."""
        g = GraphBuilder()
        flag, x = g.input(OperandType.TENSOR_BOOL8, (1,)), g.input(F32, (2,))
        same = g.graph(inner)
        return g.finish([g.result(OperationType.IF, [flag, same, same, flag, x], x)])

    last = GraphBuilder()
    last.input(OperandType.TENSOR_BOOL8, (1,))
    x = last.input(F32, (2,))
    last.finish([last.result(OperationType.ABS, [x], x)])
    model = models(link(link(last)).build())
    end, step = model.referenced
    chain = []
    for position in range(1_500):  # Python's stack takes 1,000 calls.
        operands = tuple(
            msgspec.structs.replace(o, location=DataLocation(0, position + 1, 0))
            if o.lifetime == Life.SUBGRAPH
            else o
            for o in step.operands
        )
        chain.append(msgspec.structs.replace(step, operands=operands))
    main = msgspec.structs.replace(
        model.main,
        operands=tuple(
            msgspec.structs.replace(o, location=DataLocation()) if o.lifetime == Life.SUBGRAPH else o
            for o in model.main.operands
        ),
    )
    long = msgspec.structs.replace(model, main=main, referenced=(*chain, end))
    assert validate_model(long) == 4


# Pools, extensions, levels


def test_model_pool_of_opaque_buffers_holds_no_constants(plain):
    class Opaque(Memory):
        def __init__(self) -> None:
            pass

        kind = MemoryKind.HARDWARE_BUFFER
        size_bytes = 160
        is_closed = False

    model = msgspec.structs.replace(plain, pools=(Opaque(),))
    refused(
        model,
        "operand 1 (TENSOR_FLOAT32), location: expected a pool that can hold constants, got one of kind hardware_buffer",
    )


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_pool_without_bytes_is_refused(plain, size_bytes):
    class Empty(Memory):
        def __init__(self) -> None:
            pass

        kind = MemoryKind.ASHMEM
        is_closed = False

    Empty.size_bytes = size_bytes
    refused(
        msgspec.structs.replace(plain, pools=(Empty(),)),
        f"pool 0: expected at least 1 byte, got {size_bytes}",
    )


def test_closed_pool_is_refused(plain):
    plain.pools[0].close()
    refused(plain, "pool 0: expected an open descriptor, got a closed pool")


def test_hardware_buffers_need_level_3(models):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    model = g.build([g.result(OperationType.FLOOR, [x], x)])
    assert validate_model(model) == 1
    pool = Memory.create(64, kind=MemoryKind.HARDWARE_BUFFER_BLOB)
    model = models(msgspec.structs.replace(model, pools=(pool,)))
    assert validate_model(model) == 3


def test_unknown_rank_needs_level_3(models, change):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    model = g.build([g.result(OperationType.FLOOR, [x], x)])
    assert validate_model(change.operand(model, 1, dimensions=(0,))) == 1
    assert validate_model(change.operand(model, 1, dimensions=())) == 3


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([("", 1)], "extension 0, name: expected lower-case words joined by periods, got ''"),
        ([("nodots", 1)], "extension 0, name"),
        ([("org.Example", 1)], "extension 0, name"),
        ([("org.example", 0)], "extension 0, prefix: expected 1 to 32767, got 0"),
        ([("org.example", 32768)], "extension 0, prefix: expected 1 to 32767, got 32768"),
        ([("org.example", 1), ("org.example", 2)], "extensions, name: expected no repetition"),
        ([("org.example", 1), ("org.other", 1)], "extensions, prefix: expected no repetition"),
    ],
)
def test_broken_extension_names_are_refused(entries, text, plain):
    named = tuple(ExtensionNameAndPrefix(name, prefix) for name, prefix in entries)
    refused(msgspec.structs.replace(plain, extension_name_to_prefix=named), text)


def test_extension_names_and_relaxed_computation_need_their_levels(models):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    model = models(g.build([g.result(OperationType.FLOOR, [x], x)]))
    relaxed = msgspec.structs.replace(model, relax_computation_float32_to_float16=True)
    named = tuple(ExtensionNameAndPrefix(f"org.example{prefix}", prefix) for prefix in (1, 32767))
    named = msgspec.structs.replace(model, extension_name_to_prefix=named)
    assert [validate_model(m) for m in (model, relaxed, named)] == [1, 2, 3]


def test_largest_extent_is_legal(models, change):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    model = models(g.build([g.result(OperationType.FLOOR, [x], x)]))
    for index in range(2):
        model = change.operand(model, index, dimensions=(2**32 - 1, 0))
    assert validate_model(model) == 1


def test_repeated_input_is_told_by_its_own_index(quantized, change):
    refused(
        change.subgraph(quantized, input_indexes=(0, 1, 1)),
        "inputs: expected every operand once, got operand 1 repeated",
    )


def test_extension_operations_and_types_are_accepted_by_their_prefix(models):
    g = GraphBuilder()
    x = g.input(ExtensionCode("org.example.x", 1))
    y = g.result(
        ExtensionCode("org.example.x", 2), [x, g.constant(b"abc", ExtensionCode("org.example.x", 3))], x
    )
    assert validate_model(models(g.build([y]))) == 3


def test_oem_operation_is_accepted_without_inspection():
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_OEM_BYTE, (2,))
    out = g.variable(OperandType.TENSOR_OEM_BYTE, (2,))
    g.operation(OperationType.OEM_OPERATION, [x], [out])
    assert validate_model(g.build([out])) == 1


def test_operation_codes_read_as_plain_numbers_are_recognised(plain, change):
    operations = tuple(Operation(int(o.type), o.inputs, o.outputs) for o in plain.main.operations)
    assert validate_model(change.subgraph(plain, operations=operations)) == 3
