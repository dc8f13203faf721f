"""Memory of the application's own: read and written in place, used only as it was meant, carried from execution to execution."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aionn
from aionn.conformance import cts
from aionn.drivers.kit.memories import DeviceBuffer
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import (
    BufferRole,
    HardwareBufferDesc,
    HardwareBufferFormat,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.own import copy
from aionn.service.client.prepared import RemoteBuffer
from aionn.testing.models import chain

STEPS = 100
X = np.array([-1.0, 2.0, -3.0], np.float32)
RELU = np.array([0.0, 2.0, 0.0], np.float32)


@pytest.fixture
def runtime(any_shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return any_shared_runtime


@pytest_asyncio.fixture(loop_scope="module")
async def net(runtime: aionn.Runtime) -> AsyncIterator[aionn.Compilation]:
    async with await runtime.compile(chain([OperationType.RELU], (3,))) as net:
        yield net


# Shared memory


@pytest.mark.thorough
async def test_shared_memory_is_read_and_written_in_place(net: aionn.Compilation) -> None:
    with aionn.SharedMemory.from_array(X) as source, aionn.SharedMemory.create((3,), np.float32) as target:
        result = await net.execute([source], outputs=[target])
        np.testing.assert_array_equal(target.array, RELU)
        assert np.shares_memory(result.outputs[0], target.array)
        source.array[0] = 7.0
        await net.execute([source], outputs=[target])
        assert target.array[0] == 7.0
        # Nothing of it stays behind: the next execution has arrays of its own.
        np.testing.assert_array_equal((await net.execute([X])).outputs[0], RELU)
        assert target.array[0] == 7.0


async def test_memory_of_a_descriptor_is_mapped_where_it_says(net: aionn.Compilation, tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(bytes(64) + X.tobytes())
    fd = os.open(path, os.O_RDWR)
    try:
        memory = aionn.SharedMemory.from_fd(fd, (3,), np.float32, offset=64, is_file=True)
    finally:
        os.close(fd)
    with memory:
        np.testing.assert_array_equal((await net.execute([memory])).outputs[0], RELU)


@pytest.mark.parametrize("change", ["shape", "dtype", "closed"])
@pytest.mark.parametrize("side", ["input", "output"])
async def test_memory_that_does_not_fit_is_refused(net: aionn.Compilation, change: str, side: str) -> None:
    shape, dtype = ((4,) if change == "shape" else (3,)), (np.int32 if change == "dtype" else np.float32)
    with aionn.SharedMemory.create(shape, dtype) as memory:
        if change == "closed":
            memory.close()
        with pytest.raises(aionn.InvalidArgument, match=f"{side} 0"):
            if side == "input":
                await net.execute([memory])
            else:
                await net.execute([X], outputs=[memory])
    np.testing.assert_array_equal((await net.execute([X])).outputs[0], RELU)


async def test_read_only_memory_takes_no_output(net: aionn.Compilation, tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(X.tobytes())
    fd = os.open(path, os.O_RDONLY)
    try:
        memory = aionn.SharedMemory.from_fd(fd, (3,), np.float32, is_file=True, writable=False)
    finally:
        os.close(fd)
    with memory, pytest.raises(aionn.InvalidArgument, match="read-only"):
        await net.execute([X], outputs=[memory])


@pytest.mark.parametrize("is_sealed", [True, False])
def test_descriptor_that_permits_no_writing_is_a_wrong_argument(is_sealed: bool) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if is_sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        else:
            fd, writable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), fd
            os.close(writable)
        with pytest.raises(aionn.InvalidArgument, match="needs writable=False"):
            aionn.SharedMemory.from_fd(fd, (3,), np.float32)
        with pytest.raises(aionn.InvalidArgument, match="needs writable=False"):
            aionn.ImageMemory.from_fd(fd, HardwareBufferDesc(2, 2, 1, HardwareBufferFormat.R8G8B8A8_UNORM))
        aionn.SharedMemory.from_fd(fd, (3,), np.float32, writable=False).close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
@pytest.mark.parametrize("writable", [True, False])
def test_folder_is_a_wrong_argument(flags: int, writable: bool, tmp_path: Path) -> None:
    fd = os.open(tmp_path, flags | os.O_CLOEXEC)
    try:
        with pytest.raises(aionn.InvalidArgument):
            aionn.SharedMemory.from_fd(fd, (3,), np.int8, is_file=True, writable=writable)
    finally:
        os.close(fd)


async def test_wrong_list_of_outputs_is_refused(net: aionn.Compilation) -> None:
    with pytest.raises(aionn.InvalidArgument, match="outputs: expected 1 entry, got 2"):
        await net.execute([X], outputs=[None, None])
    with pytest.raises(aionn.InvalidArgument, match="expected a memory, an array or a buffer, got an object"):
        await net.execute([X], outputs=[object()])


async def test_outputs_are_copied_to_arrays_of_the_applications_own(net: aionn.Compilation) -> None:
    class OnlyDlpack:
        def __dlpack__(self, **keywords: object) -> object:
            return behind.__dlpack__(**keywords)

        def __dlpack_device__(self) -> object:
            return behind.__dlpack_device__()

    plain, behind, buffer = (np.zeros(3, np.float32) for _ in range(3))
    result = await net.execute([X], outputs=[plain])
    assert result.outputs[0] is plain
    await net.execute([X], outputs=[memoryview(buffer)])
    await net.execute_fenced([X], outputs=[OnlyDlpack()])
    for array in (plain, buffer, behind):
        np.testing.assert_array_equal(array, RELU)
    # Nothing of it stays behind: the next execution has arrays of its own.
    await net.execute([-X])
    np.testing.assert_array_equal(plain, RELU)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (np.zeros(3, np.float64), "element type float32, got float64"),
        (np.zeros(4, np.float32), r"expected shape \[3\], got \[4\]"),
        (np.zeros((3, 1), np.float32), r"expected shape \[3\]"),
        (bytes(12), "read-only"),
        ("text", "expected a memory, an array or a buffer"),
    ],
)
async def test_array_that_takes_no_output_is_refused(net: aionn.Compilation, target: Any, words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=f"output 0.*{words}"):
        await net.execute([X], outputs=[target])
    with pytest.raises(aionn.InvalidArgument, match=f"output 0.*{words}"):
        net.execute_fenced([X], outputs=[target])


async def test_array_of_another_size_than_an_unknown_output_gets_is_told(runtime: aionn.Runtime) -> None:
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(tensor, (0,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    main = Subgraph(operands, (Operation(OperationType.RELU, (0,), (1,)),), (0,), (1,))
    net = await runtime.compile(aionn.Model(main))
    target = np.zeros(5, np.float32)
    with pytest.raises(aionn.OutputInsufficientSize, match=r"shape \[3\], its array \[5\]") as told:
        await net.execute([X], outputs=[target])
    assert [tuple(shape) for shape, _ in told.value.output_shapes] == [(3,)]
    assert not target.any()
    await net.execute([np.ones(5, np.float32)], outputs=[target])
    assert target.all()


@pytest.mark.parametrize(("shape", "offset"), [((3,), -4), ((0,), 0), ((100_000,), 0), ((3,), 1 << 40)])
def test_values_outside_of_the_memory_are_refused(shape: tuple[int, ...], offset: int) -> None:
    fd = os.memfd_create("short")
    try:
        os.ftruncate(fd, 64)
        with pytest.raises(aionn.InvalidArgument):
            aionn.SharedMemory.from_fd(fd, shape, np.float32, offset=offset, is_file=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((-1,), "at least 1, got -1"),
        ((2, 0), "at least 1, got 0"),
        ((-2, -3), "at least 1, got -2"),
        ((1.5,), "a sequence of integers"),
        (3, "a sequence of integers"),
    ],
)
def test_shape_that_is_none_is_refused(shape: Any, words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=f"^shape: expected .*{words}"):
        aionn.SharedMemory.create(shape, np.float32)


@pytest.mark.parametrize("count", [1 << 45, 1 << 62])
def test_shared_memory_larger_than_the_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("pages were asked for"))
    with pytest.raises(aionn.ResourceExhausted, match=rf"{4 * count} bytes: only \d+ bytes") as told:
        aionn.SharedMemory.create((count,), np.float32)
    assert not told.value.transient


# Device memory


async def test_device_memory_goes_from_output_to_input(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    memory = await runtime.allocate(inputs=[(net, 0)], outputs=[(net, 0)])
    assert isinstance(memory, aionn.DeviceMemory) and memory.device == "reference"
    async with memory:
        with pytest.raises(aionn.GeneralFailure, match=r"(?i)before a successful write|GENERAL_FAILURE"):
            await net.execute([memory])
        result = await net.execute([X], outputs=[memory])
        assert result.outputs[0].size == 0
        np.testing.assert_array_equal(await memory.read(), RELU)
        np.testing.assert_array_equal((await net.execute([memory])).outputs[0], RELU)
        await memory.write(X)
        np.testing.assert_array_equal((await net.execute([memory])).outputs[0], RELU)
    with pytest.raises(aionn.InvalidArgument, match="closed"):
        await net.execute([memory])


async def test_memory_is_for_compilations_of_its_runtime(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    async with aionn.open(isolation="in_process") as other:
        with pytest.raises(aionn.InvalidArgument, match="role 0: expected a compilation of this runtime"):
            await other.allocate(inputs=[(net, 0)])
    for role in ((net,), (net, "0"), (None, 0), 3):
        with pytest.raises(aionn.InvalidArgument, match="role 1: expected a compilation and an index"):
            await runtime.allocate(inputs=[(net, 0)], outputs=[role])  # type: ignore[list-item]


async def test_memories_are_copied_into_each_other(runtime: aionn.Runtime, net: aionn.Compilation) -> None:
    a = await runtime.allocate(inputs=[(net, 0)])
    b = await runtime.allocate(inputs=[(net, 0)])
    with aionn.SharedMemory.from_array(X) as shared:
        with pytest.raises(aionn.GeneralFailure):
            await copy(a, b)
        await copy(a, a)
        await copy(shared, a)
        await copy(a, b)
        await copy(b, shared)
        np.testing.assert_array_equal(await b.read(), X)
    with aionn.SharedMemory.create((4,), np.float32) as other, pytest.raises(aionn.InvalidArgument):
        await copy(other, a)
    await a.aclose()
    await b.aclose()


async def test_memory_is_used_only_as_it_was_meant(runtime: aionn.Runtime, net: aionn.Compilation) -> None:
    other = await runtime.compile(chain([OperationType.ABS], (3,)))
    memory = await runtime.allocate(inputs=[(net, 0)])
    async with memory:
        with pytest.raises(aionn.InvalidArgument, match="output 0: the device memory was not made for this"):
            await net.execute([X], outputs=[memory])
        with pytest.raises(aionn.InvalidArgument, match="input 0: the device memory was not made for this"):
            await other.execute([memory])


async def test_illegal_roles_are_refused(runtime: aionn.Runtime, net: aionn.Compilation) -> None:
    wide = await runtime.compile(chain([OperationType.RELU], (4,)))
    closed = await runtime.compile(chain([OperationType.RELU], (3,)))
    await closed.aclose()
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "at least one role"),
        ({"inputs": [(net, 0), (net, 0)]}, "every role once"),
        ({"inputs": [(net, 1)]}, "input index below 1"),
        ({"outputs": [(net, -1)]}, "output index below 1"),
        ({"inputs": [(net, 0), (wide, 0)]}, "fits shape"),
        ({"inputs": [(net, 0)], "shape": (4,)}, "fits shape"),
        ({"inputs": [(closed, 0)]}, "closed"),
    ]
    for roles, words in cases:
        with pytest.raises(aionn.InvalidArgument, match=words):
            await runtime.allocate(**roles)


async def test_use_on_several_devices_gets_shared_memory() -> None:
    devices = [ReferenceDevice("a"), ReferenceDevice("b")]
    async with aionn.open(devices=devices) as runtime:
        nets = [await runtime.compile(chain([OperationType.RELU], (3,)), devices=d) for d in "ab"]
        memory = await runtime.allocate(outputs=[(nets[0], 0)], inputs=[(nets[1], 0)])
        assert isinstance(memory, aionn.SharedMemory)
        with memory:
            await nets[0].execute([X], outputs=[memory])
            np.testing.assert_array_equal((await nets[1].execute([memory])).outputs[0], RELU)


# State


@pytest.mark.sampled(2)
async def test_lstm_state_stays_in_device_memory(
    runtime: aionn.Runtime, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 steps with the state in two pairs of device memories equal 100 steps with it in arrays; nobody copies it."""
    if not (shared / "cts").is_dir():
        pytest.skip("the conformance data are not beside the repository")
    test = next(
        t
        for t in cts.iterate_tests(shared / "cts", contains="lstm")
        if [o.type for o in t.main.operations] == ["LSTM"]
    )
    net = await runtime.compile(cts.build_model(test))
    inputs = cts.main_inputs(test)
    read = {test.main.operands[index].name: i for i, index in enumerate(test.main.input_indexes)}
    written = {test.main.operands[index].name: i for i, index in enumerate(test.main.output_indexes)}
    states = [(read[f"{s}_state_in"], written[f"{s}_state_out"]) for s in ("output", "cell")]
    generator = np.random.default_rng(7)
    first = inputs[read["input"]]
    assert first is not None
    frames: list[npt.NDArray[Any]] = [
        generator.normal(size=first.shape).astype(first.dtype) for _ in range(STEPS)
    ]

    expected = []
    values = list(inputs)
    for frame in frames:
        values[read["input"]] = frame
        outputs = (await net.execute(values)).outputs
        expected.append(outputs[-1])
        for into, out in states:
            values[into] = outputs[out]

    pairs = [
        [await runtime.allocate(inputs=[(net, into)], outputs=[(net, out)]) for _ in range(2)]
        for into, out in states
    ]
    for pair, (into, _) in zip(pairs, states, strict=True):
        await pair[0].write(np.asarray(inputs[into]))

    def refuse(*_: object) -> None:
        raise AssertionError("the state was copied")

    for buffer in (DeviceBuffer, RemoteBuffer):
        monkeypatch.setattr(buffer, "copy_to", refuse)
        monkeypatch.setattr(buffer, "copy_from", refuse)
    arguments: list[Any] = list(inputs)
    for number, frame in enumerate(frames):
        arguments[read["input"]] = frame
        targets: list[Any] = [None] * len(written)
        for pair, (into, out) in zip(pairs, states, strict=True):
            arguments[into], targets[out] = pair[number % 2], pair[1 - number % 2]
        outputs = (await net.execute(arguments, outputs=targets)).outputs
        np.testing.assert_array_equal(outputs[-1], expected[number])
    for pair in pairs:
        for memory in pair:
            await memory.aclose()


async def test_memories_and_arrays_may_stand_beside_each_other(runtime: aionn.Runtime) -> None:
    graph = GraphBuilder()
    values = [graph.input(OperandType.TENSOR_FLOAT32, (3,)) for _ in range(2)]
    net = await runtime.compile(graph.build([graph.result(OperationType.SUB, [*values, 0], values[0])]))
    with aionn.SharedMemory.from_array(X) as memory:
        for inputs in ([memory, RELU], [X, memory], [memory, memory]):
            expected = X - (RELU if inputs[1] is RELU else X)
            np.testing.assert_array_equal((await net.execute(inputs)).outputs[0], expected)


async def test_what_lies_elsewhere_takes_no_room_beside_it(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(chain([OperationType.RELU], (1 << 16,)))
    size_bytes = 4 << 16
    source, target = (aionn.SharedMemory.create((1 << 16,), np.float32) for _ in range(2))
    with source, target:
        await net.execute([source], outputs=[target])
        assert [area.memories[0].size_bytes < size_bytes for area in net._areas] == [True]
        await net.execute([source])
        assert [area.memories[0].size_bytes < 2 * size_bytes for area in net._areas] == [True]


async def test_device_is_told_what_its_memory_is_for(
    net: aionn.Compilation, runtime: aionn.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    hal, asked = runtime.devices[0].hal, []
    allocate = hal.allocate

    async def noted(description: Any, prepared: Any, inputs: Any, outputs: Any) -> Any:
        asked.append(([*inputs], [*outputs]))
        return await allocate(description, prepared, inputs, outputs)

    monkeypatch.setattr(hal, "allocate", noted)
    role = BufferRole(0, 0)
    for roles, told in (
        ({"inputs": [(net, 0)]}, ([role], [])),
        ({"outputs": [(net, 0)]}, ([], [role])),
        ({"inputs": [(net, 0)], "outputs": [(net, 0)]}, ([role], [role])),
    ):
        async with await runtime.allocate(**roles):  # type: ignore[arg-type, union-attr]
            assert asked.pop() == told
