"""Rules for what devices say, allocate, cache and report."""

import os

import msgspec
import pytest

from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument
from aionn.hal import (
    BufferDesc,
    BufferRole,
    CacheFileCounts,
    CacheFiles,
    DeviceInfo,
    DeviceType,
    ExecutionResult,
    Extension,
    ExtensionOperandType,
    FeatureLevel,
    OperandPerformance,
    OperandType,
    OperationType,
    OutputShape,
    PerformanceInfo,
    Timing,
    uniform_capabilities,
)
from aionn.models.builder import GraphBuilder
from aionn.validation import (
    check_buffer_roles,
    check_cache_files,
    check_capabilities,
    check_device_info,
    check_execution_result,
    check_extension,
    check_extensions,
    check_output_shapes,
    check_timing,
)

F32 = OperandType.TENSOR_FLOAT32
GOOD = uniform_capabilities(1.0, 1.0)


def refused(call, *args, text, error=InvalidArgument, **options):
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert text in str(caught.value)


def entry(kind, time=1.0, power=1.0):
    return OperandPerformance(kind, PerformanceInfo(time, power))


def test_uniform_capabilities_are_legal():
    check_capabilities(GOOD)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ((entry(F32), entry(F32)), "TENSOR_FLOAT32: expected types in rising order"),
        (
            (entry(OperandType.BOOL), entry(F32)),
            "TENSOR_FLOAT32: expected types in rising order, got it after BOOL",
        ),
        ((entry(OperandType.SUBGRAPH),), "SUBGRAPH: expected IF and WHILE performance instead"),
        ((entry(F32, 0.0),), "execution time: expected a positive finite ratio, got 0.0"),
        ((entry(F32, 1.0, -1.0),), "power usage: expected a positive finite ratio, got -1.0"),
        ((entry(F32, float("inf")),), "execution time: expected a positive finite ratio, got inf"),
        ((entry(F32, float("nan")),), "execution time: expected a positive finite ratio, got nan"),
    ],
)
def test_broken_operand_performance_is_refused(entries, text):
    refused(check_capabilities, msgspec.structs.replace(GOOD, operand_performance=entries), text=text)


@pytest.mark.parametrize(
    "name",
    [
        "relaxed_float32_to_float16_scalar",
        "relaxed_float32_to_float16_tensor",
        "if_performance",
        "while_performance",
    ],
)
def test_broken_other_performance_is_refused(name):
    bad = msgspec.structs.replace(GOOD, **{name: PerformanceInfo(1.0, 0.0)})
    refused(check_capabilities, bad, text="power usage: expected a positive finite ratio")


@pytest.mark.parametrize(
    ("extension", "text"),
    [
        (Extension(""), "expected a name of lower-case words"),
        (Extension("vendor"), "expected a name of lower-case words"),
        (Extension("com.Vendor"), "expected a name of lower-case words"),
        (
            Extension("com.vendor", (ExtensionOperandType(1, True, 0),)),
            "expected 1 to 4294967295 bytes, got 0",
        ),
        (Extension("com.vendor", (ExtensionOperandType(0x10000, True, 1),)), "expected a number of 16 bits"),
        (Extension("com.vendor", (ExtensionOperandType(1, True, 1),) * 2), "expected every type once"),
    ],
)
def test_broken_extension_is_refused(extension, text):
    refused(check_extension, extension, text=text)


def test_extension_types_have_16_bits():
    ends = tuple(ExtensionOperandType(number, True, 1) for number in (0, 0xFFFF))
    check_extension(Extension("com.vendor", ends))


def test_extensions_have_different_names():
    check_extensions([Extension("com.a"), Extension("com.b")])
    refused(check_extensions, [Extension("com.a"), Extension("com.a")], text="expected every name once")


def test_device_info_is_checked_as_a_whole():
    info = DeviceInfo("acme-npu", DeviceType.ACCELERATOR, "1", FeatureLevel.LEVEL_5, GOOD)
    check_device_info(info)
    check_device_info(msgspec.structs.replace(info, slots=1, cache_files=CacheFileCounts(32, 32)))
    for changes, text in (
        ({"name": ""}, "name: expected a text"),
        ({"version": ""}, "version: expected a text"),
        ({"name": "n" * 257}, "name: expected a printable text"),
        ({"version": "v" * 257}, "version: expected a printable text"),
        ({"version": "1\x1b[2J"}, "version: expected a printable text"),
        ({"version": "1\n2"}, "version: expected a printable text"),
        ({"slots": 0}, "slots: expected 1 to 1024, got 0"),
        ({"slots": 2**62}, "slots: expected 1 to 1024, got 4611686018427387904"),
        ({"cache_files": CacheFileCounts(33, 0)}, "model cache files: expected 0 to 32, got 33"),
        ({"cache_files": CacheFileCounts(0, -1)}, "data cache files: expected 0 to 32, got -1"),
        ({"extensions": (Extension("x"),)}, "expected a name"),
    ):
        refused(check_device_info, msgspec.structs.replace(info, **changes), text=text)


def test_cache_files_are_counted_and_open(tmp_path):
    fd = os.open(tmp_path / "cache", os.O_RDWR | os.O_CREAT)
    token = bytes(32)
    check_cache_files(CacheFiles([fd], [], token))
    check_cache_files(CacheFiles([fd], [fd], token), CacheFileCounts(1, 1))
    for cache, counts, text in (
        (CacheFiles([fd], [], bytes(31)), None, "cache token: expected 32 bytes, got 31"),
        (CacheFiles([fd] * 33, [], token), None, "model cache files: expected at most 32, got 33"),
        (CacheFiles([], [fd] * 33, token), None, "data cache files: expected at most 32, got 33"),
        (CacheFiles([fd], [], token), CacheFileCounts(2, 0), "model cache files: expected 2, got 1"),
        (CacheFiles([fd], [fd], token), CacheFileCounts(1, 0), "data cache files: expected 0, got 1"),
        (CacheFiles([-1], [], token), None, "model cache file 0: expected an open descriptor, got -1"),
    ):
        refused(check_cache_files, cache, counts, text=text)
    os.close(fd)
    refused(check_cache_files, CacheFiles([fd], [], token), text=f"expected an open descriptor, got {fd}")


def model_of(shape, scale=0.0, kind=F32, zero_point=0):
    g = GraphBuilder()
    x = g.input(kind, shape, scale=scale, zero_point=zero_point)
    flag = g.input(OperandType.INT32)
    return g.build([g.result(OperationType.ADD, [x, x, flag], x)])


def test_buffer_roles_combine_their_shapes():
    first, second = model_of((0, 3)), model_of((2, 0))
    operand = check_buffer_roles(
        BufferDesc((0, 0)), [first, second], [BufferRole(0, 0)], [BufferRole(1, 0, 0.5)]
    )
    assert (operand.type, operand.dimensions) == (F32, (2, 3))


@pytest.mark.parametrize(
    ("dimensions", "inputs", "outputs", "text"),
    [
        ((), [], [], "expected at least one prepared model and one role"),
        ((), [BufferRole(1, 0)], [], "input role 0: expected a model index below 1, got 1"),
        ((), [BufferRole(-1, 0)], [], "expected a model index below 1, got -1"),
        ((), [BufferRole(0, 2)], [], "input role 0: expected an input index below 2, got 2"),
        ((), [], [BufferRole(0, 1)], "output role 0: expected an output index below 1, got 1"),
        ((), [BufferRole(0, 0, 0.0)], [], "expected a probability in (0, 1], got 0.0"),
        ((), [BufferRole(0, 0, -0.5)], [], "expected a probability"),
        ((), [BufferRole(0, 0, 10.0)], [], "expected a probability"),
        ((), [BufferRole(0, 0, float("nan"))], [], "expected a probability"),
        ((), [BufferRole(0, 0), BufferRole(0, 0)], [], "input role 1: expected every role once"),
        ((3, 3), [BufferRole(0, 0)], [], "input role 0, dimensions: expected what fits [3, 3], got [2, 3]"),
        ((2,), [BufferRole(0, 0)], [], "dimensions: expected what fits [2]"),
        ((-1,), [BufferRole(0, 0)], [], "expected extents of 0 or more"),
        ((1,) * 65, [BufferRole(0, 0)], [], "expected at most 64 dimensions, got 65"),
        ((), [BufferRole(0, 0), BufferRole(0, 1)], [], "input role 1, type: expected"),
        ((1,), [BufferRole(0, 1)], [], "expected no dimensions for a scalar, got [1]"),
    ],
)
def test_broken_buffer_roles_are_refused(dimensions, inputs, outputs, text):
    refused(check_buffer_roles, BufferDesc(dimensions), [model_of((2, 3))], inputs, outputs, text=text)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"scale": 0.25}, "scale: expected 0.5 as the first role, got 0.25"),
        ({"scale": 0.5, "zero_point": 1}, "zero_point: expected 0 as the first role, got 1"),
    ],
)
def test_roles_must_agree_on_quantisation(other, text):
    kind = OperandType.TENSOR_QUANT8_ASYMM
    models = [model_of((2,), 0.5, kind), model_of((2,), kind=kind, **other)]
    refused(check_buffer_roles, BufferDesc(), models, [BufferRole(0, 0), BufferRole(1, 0)], [], text=text)


def test_a_role_is_one_of_a_prepared_model_and_not_of_its_model():
    model, equal = model_of((2,)), model_of((2,))
    roles = [BufferRole(0, 0), BufferRole(1, 0)]
    for identities in (None, [7, 8]):
        for models in ([model, model], [model, equal]):
            operand = check_buffer_roles(BufferDesc(), models, roles, [], identities=identities)
            assert operand.dimensions == (2,)
    with pytest.raises(InvalidArgument, match="expected every role once"):
        check_buffer_roles(BufferDesc(), [model, equal], roles, [], identities=[7, 7])


def test_timings_are_ordered():
    check_timing(Timing())
    check_timing(Timing(5, 5))
    check_timing(Timing(None, 5))
    refused(
        check_timing, Timing(6, 5), text="no longer than the driver (5 ns), got 6 ns", error=GeneralFailure
    )
    refused(check_timing, Timing(-1, 5), text="device: expected 0 ns or more", error=GeneralFailure)


MAIN = model_of((2, 0)).main


@pytest.mark.parametrize(
    ("status", "shapes"),
    [
        (ErrorStatus.NONE, []),
        (ErrorStatus.NONE, [OutputShape((2, 3))]),
        (ErrorStatus.NONE, [OutputShape((2, 0))]),
        (ErrorStatus.GENERAL_FAILURE, []),
        (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [OutputShape((2, 3), False)]),
        (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [OutputShape((), False)]),
    ],
)
def test_output_shapes_that_fit_are_accepted(status, shapes):
    check_output_shapes(status, shapes, MAIN)


@pytest.mark.parametrize(
    ("status", "shapes", "text"),
    [
        (ErrorStatus.GENERAL_FAILURE, [OutputShape((2, 3))], "expected none with status GENERAL_FAILURE"),
        (ErrorStatus.NONE, [OutputShape((2, 3))] * 2, "expected 1, got 2"),
        (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, [], "expected 1, got 0"),
        (ErrorStatus.NONE, [OutputShape((2, 3), False)], "contradict status NONE"),
        (
            ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
            [OutputShape((2, 3))],
            "contradict status OUTPUT_INSUFFICIENT_SIZE",
        ),
        (ErrorStatus.NONE, [OutputShape((3, 3))], "expected what fits [2, 0], got [3, 3]"),
        (ErrorStatus.NONE, [OutputShape((2, -3))], "expected extents of 0 or more"),
        (ErrorStatus.NONE, [OutputShape((1,) * 65)], "expected at most 64 dimensions, got 65"),
        (ErrorStatus.NONE, [OutputShape(())], "expected a known rank with status NONE"),
    ],
)
def test_output_shapes_that_contradict_are_the_drivers_fault(status, shapes, text):
    refused(check_output_shapes, status, shapes, MAIN, text=text, error=GeneralFailure)


def test_one_insufficient_output_of_two_is_enough_for_the_status():
    g = GraphBuilder()
    x = g.input(F32, (2, 0))
    main = g.build([g.result(OperationType.FLOOR, [x], x), g.result(OperationType.ABS, [x], x)]).main
    shapes = [OutputShape((2, 3)), OutputShape((2, 3), False)]
    for both in (shapes, shapes[::-1]):
        check_output_shapes(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, both, main)
        refused(
            check_output_shapes,
            ErrorStatus.NONE,
            both,
            main,
            text="contradict status NONE",
            error=GeneralFailure,
        )


def test_timing_that_nobody_asked_for_is_the_drivers_fault():
    result = ExecutionResult(timing=Timing(1, 2))
    check_execution_result(MAIN, result, measure=True)
    refused(
        check_execution_result,
        MAIN,
        result,
        measure=False,
        text="timing: expected none",
        error=GeneralFailure,
    )
    short = ExecutionResult(False, (OutputShape((2, 3), False),), Timing(1, 2))
    refused(
        check_execution_result, MAIN, short, measure=True, text="timing: expected none", error=GeneralFailure
    )


def test_the_quick_way_for_whole_shapes_accepts_what_the_other_way_accepts():
    values = [(2, 3), (2, 0), (3, 3), (2,), (), (2, -3)]
    compared = 0
    for stated in [(2, 3), (2, 0)]:
        main = model_of(stated).main
        for dimensions in values:
            for is_sufficient in (True, False):
                for whole in (True, False):
                    shapes = (OutputShape(dimensions, is_sufficient),)
                    status = ErrorStatus.NONE if whole else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
                    found = []
                    for check in (
                        lambda: check_output_shapes(status, shapes, main),  # noqa: B023
                        lambda: check_execution_result(main, ExecutionResult(whole, shapes), measure=False),  # noqa: B023
                    ):
                        try:
                            check()
                            found.append("")
                        except GeneralFailure as e:
                            found.append(str(e))
                    assert found[0] == found[1]
                    compared += 1
    assert compared == 2 * 6 * 4
