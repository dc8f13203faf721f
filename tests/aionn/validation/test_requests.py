"""Every rule for requests refuses what breaks it, and says where."""

from mmap import PAGESIZE

import numpy as np
import pytest
from msgspec.structs import replace

from aionn.errors import InvalidArgument
from aionn.hal import (
    BufferToken,
    DataLocation,
    HardwareBufferDesc,
    Memory,
    MemoryKind,
    Operand,
    OperandLifeTime,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from aionn.validation import check_memory_identifiers, validate_request

F32 = OperandType.TENSOR_FLOAT32


@pytest.fixture
def pool():
    memory = Memory.create(4096)
    yield memory
    memory.close()


def at(offset, length, dimensions=(), *, pool=0, padding=0):
    return RequestArgument(location=DataLocation(pool, offset, length, padding), dimensions=dimensions)


def model_of(*shapes, out=None):
    """ADD of two inputs of the given shapes."""
    g = GraphBuilder()
    a, b = (g.input(F32, shape) for shape in shapes)
    return g.build([g.result(OperationType.ADD, [a, b, 0], a, shapes[0] if out is None else out)])


def constant_model(pool, offset, *, is_referenced=False):
    """ADD of an input and three float32 constants that lie in the pool, in the main subgraph or in a branch of an IF."""
    constant = Operand(
        F32,
        (3,),
        lifetime=OperandLifeTime.CONSTANT_REFERENCE,
        location=DataLocation(0, offset, 12),
    )
    g = GraphBuilder()
    x = g.input(F32, (3,))
    model = g.build([g.result(OperationType.ADD, [x, x, 0], x)])
    main = model.main
    changed = replace(
        main,
        operands=(*main.operands, constant),
        operations=tuple(
            replace(o, inputs=(o.inputs[0], len(main.operands), o.inputs[2])) for o in main.operations
        ),
    )
    if is_referenced:
        return replace(model, referenced=(changed,), pools=(pool,))
    return replace(model, main=changed, pools=(pool,))


PLAIN = model_of((2, 3), (2, 3))


def request(pool, inputs=None, outputs=None, pools=None):
    return Request(
        inputs=tuple(inputs if inputs is not None else [at(0, 24), at(64, 24)]),
        outputs=tuple(outputs if outputs is not None else [at(128, 24)]),
        pools=(pool,) if pools is None else pools,
    )


def refused(model, req, text, **options):
    with pytest.raises(InvalidArgument) as caught:
        validate_request(model, req, **options)
    assert text in str(caught.value)


def test_legal_request_gives_the_inputs_shapes(pool):
    assert validate_request(PLAIN, request(pool)) == ((2, 3), (2, 3))


def test_request_fills_in_what_the_model_leaves_open(pool):
    model = model_of((0, 3), ())
    shapes = validate_request(model, request(pool, [at(0, 24, (2, 3)), at(64, 12, (1, 3))]))
    assert shapes == ((2, 3), (1, 3))


def test_scalar_inputs_have_an_empty_shape(pool):
    g = GraphBuilder()
    x, activation = g.input(F32, (2, 3)), g.input(OperandType.INT32)
    model = g.build([g.result(OperationType.ADD, [x, x, activation], x)])
    assert validate_request(model, request(pool, [at(0, 24), at(64, 4)])) == ((2, 3), ())
    refused(
        model,
        request(pool, [at(0, 24), at(64, 4, (1,))]),
        "input 1, dimensions: expected none, as it is a scalar",
    )


def test_left_out_inputs_have_no_shape(pool):
    absent = RequestArgument(has_no_value=True)
    assert validate_request(PLAIN, request(pool, [at(0, 24), absent])) == ((2, 3), None)


@pytest.mark.parametrize(
    "argument",
    [
        RequestArgument(has_no_value=True, location=DataLocation(0, 4, 0)),
        RequestArgument(has_no_value=True, location=DataLocation(0, 0, 4)),
        RequestArgument(has_no_value=True, location=DataLocation(1, 0, 0)),
        RequestArgument(has_no_value=True, location=DataLocation(0, 0, 0, 1)),
        RequestArgument(has_no_value=True, dimensions=(1,)),
    ],
)
def test_left_out_inputs_say_nothing_else(argument, pool):
    refused(PLAIN, request(pool, [at(0, 24), argument]), "input 1, location and dimensions: expected nothing")


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ([at(0, 24)], None, "request, inputs: expected 2, got 1"),
        ([at(0, 24)] * 3, None, "request, inputs: expected 2, got 3"),
        (None, [], "request, outputs: expected 1, got 0"),
        ([at(0, 24), at(0, 24, pool=1)], None, "input 1, pool index: expected an index below 1, got 1"),
        (
            [at(0, 24), at(4080, 24)],
            None,
            "input 1, location: expected an end within the pool's 4096 bytes, got end at byte 4104",
        ),
        ([at(0, 24), at(4072, 24, padding=1)], None, "input 1, location: expected an end within"),
        ([at(0, 24), at(2**32 - 1, 24)], None, "input 1, location: expected an end within"),
        ([at(0, 24), at(-8, 24)], None, "input 1, numbers: expected 0 to 4294967295"),
        ([at(0, 24), at(0, 2**32)], None, "input 1, numbers: expected 0 to 4294967295"),
        ([at(0, 24), at(64, 0)], None, "input 1, length: expected at least 1 byte, got 0"),
        ([at(0, 24), at(64, 20)], None, "input 1, length: expected 24 bytes for shape [2, 3], got 20"),
        ([at(0, 24), at(64, 28)], None, "input 1, length: expected 24 bytes for shape [2, 3], got 28"),
        (
            [at(0, 24), at(64, 24, (3, 2))],
            None,
            "input 1, dimensions: expected what fits the model's [2, 3], got [3, 2]",
        ),
        (
            [at(0, 24), at(64, 24, (6,))],
            None,
            "input 1, dimensions: expected what fits the model's [2, 3], got [6]",
        ),
        (
            [at(0, 24), at(64, 24, (2, 0))],
            None,
            "input 1, dimensions: expected the model's [2, 3], got [2, 0]",
        ),
        ([at(0, 24), at(64, 24, (1,) * 65)], None, "input 1, dimensions: expected at most 64, got 65"),
        (None, [at(128, 20)], "output 0, length: expected 24 bytes for shape [2, 3], got 20"),
    ],
)
def test_broken_argument_is_refused(inputs, outputs, text, pool):
    refused(PLAIN, request(pool, inputs, outputs), text)


def test_input_of_unknown_shape_is_refused(pool):
    model = model_of((0, 3), (1, 3))
    refused(model, request(pool, [at(0, 24), at(64, 12)]), "input 0, shape: expected every extent known")
    refused(
        model, request(pool, [at(0, 24, (0, 3)), at(64, 12)]), "input 0, shape: expected every extent known"
    )


def test_unknown_outputs_are_legal_unless_they_are_forbidden(pool):
    model = model_of((2, 3), (2, 3), out=(0, 3))
    req = request(pool, outputs=[at(128, 100)])
    assert validate_request(model, req) == ((2, 3), (2, 3))
    refused(model, req, "output 0, shape: expected every extent known", allow_unspecified_outputs=False)
    known = request(pool, outputs=[at(128, 24, (2, 3))])
    validate_request(model, known, allow_unspecified_outputs=False)


def test_output_may_not_overlap_anything(pool):
    refused(
        PLAIN, request(pool, outputs=[at(8, 24)]), "request, output 0: expected memory apart from every other"
    )
    refused(PLAIN, request(pool, outputs=[at(0, 24)]), "output 0")
    refused(PLAIN, request(pool, outputs=[at(40, 24, padding=8)]), "shared with output 0")
    # Padding of an input may be read alone, so an output may lie there; touching ends are no overlap.
    validate_request(PLAIN, request(pool, [at(0, 24, padding=8), at(64, 24)], [at(24, 24)]))


def test_outputs_may_not_overlap_each_other(pool):
    g = GraphBuilder()
    x = g.input(F32, (2,))
    model = g.build([g.result(OperationType.ABS, [x], x), g.result(OperationType.NEG, [x], x)])
    refused(model, request(pool, [at(0, 8)], [at(8, 8), at(12, 8)]), "output 1: expected memory apart")
    refused(
        model, request(pool, [at(0, 8)], [at(8, 8, padding=1), at(16, 8)]), "output 1: expected memory apart"
    )
    validate_request(model, request(pool, [at(0, 8)], [at(8, 8), at(16, 8)]))


def test_overlap_is_found_behind_a_long_argument(pool):
    g = GraphBuilder()
    x = g.input(F32, (100,))
    y = g.input(F32, (2,))
    model = g.build([g.result(OperationType.ABS, [y], y)])
    assert x.operand.dimensions == (100,)
    # Input 1 lies inside of input 0, and the output behind input 1 but still inside of input 0.
    refused(model, request(pool, [at(0, 400), at(8, 8)], [at(200, 8)]), "shared with input 0")


def test_inputs_may_share_memory(pool):
    validate_request(PLAIN, request(pool, [at(0, 24), at(0, 24)]))


def test_the_same_memory_in_two_pools_is_recognised(pool):
    req = request(pool, outputs=[at(0, 24, pool=1)], pools=(pool, pool))
    refused(PLAIN, req, "output 0: expected memory apart")


def test_one_file_in_two_memories_is_recognised(pool):
    view = Memory.from_fd(pool.fileno())
    pools = (pool, view)
    refused(PLAIN, request(pool, outputs=[at(0, 24, pool=1)], pools=pools), "shared with input 0")
    refused(PLAIN, request(pool, outputs=[at(80, 24, pool=1)], pools=pools), "shared with input 1")
    validate_request(PLAIN, request(pool, [at(0, 24), at(0, 24, pool=1)], [at(128, 24, pool=1)], pools))
    view.close()


def test_offsets_of_memories_in_one_file_count(tmp_path):
    path = tmp_path / "pools"
    path.write_bytes(bytes(2 * PAGESIZE))
    with path.open("r+b") as file:
        whole = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD)
        second = Memory.from_fd(file.fileno(), kind=MemoryKind.MMAP_FD, offset=PAGESIZE)
    pools = (whole, second)
    inputs = [at(0, 24), at(PAGESIZE, 24)]
    refused(PLAIN, request(whole, inputs, [at(0, 24, pool=1)], pools), "shared with input 1")
    refused(PLAIN, request(whole, inputs, [at(16, 24, pool=1)], pools), "shared with input 1")
    validate_request(PLAIN, request(whole, inputs, [at(24, 24, pool=1)], pools))
    whole.close()
    second.close()


@pytest.mark.parametrize("as_another_memory", [False, True])
@pytest.mark.parametrize("is_referenced", [False, True])
def test_outputs_may_not_overlap_the_models_constants(pool, as_another_memory, is_referenced):
    model = constant_model(pool, 1024, is_referenced=is_referenced)
    other = Memory.create(64)
    own = Memory.from_fd(pool.fileno()) if as_another_memory else pool

    def writing(offset, padding=0):
        return request(other, [at(0, 12)], [at(offset, 12, pool=1, padding=padding)], (other, own))

    for offset, padding in ((1024, 0), (1032, 0), (1016, 0), (1012, 4), (1012, 1)):
        refused(model, writing(offset, padding), "output 0: expected memory apart from the model's constants")
    for offset, padding in ((1012, 0), (1036, 0), (0, 1012)):
        validate_request(model, writing(offset, padding))
    # Reading them is nobody's harm.
    validate_request(model, request(pool, [at(1024, 12)], [at(0, 12)]))
    own.close()
    other.close()


def test_image_and_memory_of_one_file_are_recognised():
    image = Memory.create_hardware_buffer(HardwareBufferDesc(4, 2))
    blob = Memory.from_fd(image.fileno(), kind=MemoryKind.HARDWARE_BUFFER_BLOB)
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_QUANT8_ASYMM, (1, 2, 4, 4), scale=1.0)
    model = g.build([g.result(OperationType.RELU, [x], x)])
    for ends in (([at(0, 0)], [at(0, 32, pool=1)]), ([at(0, 32, pool=1)], [at(0, 0)])):
        refused(model, request(image, *ends, (image, blob)), "output 0: expected memory apart")
    image.close()
    blob.close()


def test_two_pools_do_not_overlap(pool):
    other = Memory.create(64)
    validate_request(PLAIN, request(pool, outputs=[at(0, 24, pool=1)], pools=(pool, other)))
    other.close()


def test_device_memories_have_no_places(pool):
    pools = (pool, BufferToken(3))
    validate_request(PLAIN, request(pool, [at(0, 24), at(0, 0, pool=1)], pools=pools))
    for argument in (at(4, 0, pool=1), at(0, 24, pool=1), at(0, 0, pool=1, padding=4)):
        refused(
            PLAIN,
            request(pool, [at(0, 24), argument], pools=pools),
            "offset, length and padding 0 in a device memory",
        )


def test_device_memory_is_no_output_beside_another_use(pool):
    pools = (pool, BufferToken(3), BufferToken(3))
    both = request(pool, [at(0, 24), at(0, 0, pool=1)], [at(0, 0, pool=2)], pools)
    refused(PLAIN, both, "output 0: expected memory apart")
    validate_request(PLAIN, request(pool, [at(0, 0, pool=1), at(0, 0, pool=2)], [at(0, 24)], pools))


@pytest.mark.parametrize("token", [0, -1])
def test_token_must_be_positive(token, pool):
    refused(PLAIN, request(pool, pools=(pool, BufferToken(token))), "pool 1: expected a positive token")


def test_closed_pool_is_refused(pool):
    pool.close()
    refused(PLAIN, request(pool), "pool 0: expected open memory of at least 1 byte")


def test_memory_identifiers_are_one_per_pool_and_none_for_a_device_memory(pool):
    req = request(pool, pools=(pool, BufferToken(3)))
    for legal in ([-1, -1], [0, -1], [7, -1]):
        check_memory_identifiers(req, legal)
    for illegal, text in (
        ([7], "expected 2 memory identifiers"),
        ([7, -1, -1], "expected 2 memory identifiers"),
        ([-2, -1], "of at least -1"),
        ([7, 0], "expected identifier -1 for a device memory, got 0"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            check_memory_identifiers(req, illegal)


def test_random_requests_never_pass_with_an_output_that_overlaps(pool):
    rng = np.random.default_rng(20240613)
    passed = 0
    for _ in range(2_000):
        a, b, c = (int(v) for v in rng.integers(0, 100, 3))
        legal = not (abs(a - c) < 24 or abs(b - c) < 24)
        try:
            validate_request(PLAIN, request(pool, [at(a, 24), at(b, 24)], [at(c, 24)]))
            passed += 1
            assert legal
        except InvalidArgument:
            assert not legal
    assert passed > 300
