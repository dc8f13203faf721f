"""Large messages: models alone, in parts that are short to decode; whatever else is large is refused before it is read."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import typing
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from aionn.errors import DeadObject, Error, InvalidArgument
from aionn.hal import (
    ExecutionPreference,
    Memory,
    Model,
    OperandType,
    OperationType,
    Priority,
    RequestArgument,
)
from aionn.hal.operand import ChannelQuant
from aionn.models.builder import GraphBuilder
from aionn.scheduler.worker_turns import _Call
from aionn.service.wire import channel as channel_module
from aionn.service.wire import large as large_module
from aionn.service.wire import load as load_module
from aionn.service.wire import sizes as sizes_module
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import PoolOnWire, RequestOnWire
from aionn.service.wire.large import (
    ELEMENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PART_ELEMENTS_MAX,
    InMemory,
    in_memory,
    read_parts,
)
from aionn.service.wire.peers import Peers
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Call,
    CallBody,
    Execute,
    GetMemories,
    Hello,
    PrepareModel,
    Reply,
    ReplyBody,
    SupportedOperations,
    SupportedOperationsReply,
    decode,
    decode_parts,
    encode,
)
from aionn.service.wire.sizes import ARGUMENTS_MAX, INLINE_BYTES_MAX, MODEL_KINDS, WrongTypes, check_large

pytestmark = pytest.mark.forked("any")

WAIT_S_MAX = 60.0
KINDS = [body.__name__ for union in (CallBody, ReplyBody) for body in typing.get_args(union)]
LARGE_KINDS = {*MODEL_KINDS, "HelloReply", "SupportedOperationsReply"}


def chain(count: int) -> Model:
    """A model of ``count`` additions."""
    graph = GraphBuilder()
    first = value = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    for _ in range(count):
        value = graph.result(OperationType.ADD, [value, first, graph.constant(0)], first)
    return graph.build([value])


def prepare(model: Model) -> PrepareModel:
    return PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)


def steps_of(payload: bytes, fds: list[int]) -> tuple[Any, int]:
    """A large message, and how many steps its decoding took."""
    stands_for = in_memory(payload)
    assert stands_for is not None
    steps = decode_parts(stands_for, *read_parts(stands_for, fds), fds)
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value, count
        count += 1


@pytest.mark.parametrize("count", [1, 20, 31, 32, 33, 100, 1000])
def test_models_of_any_size_come_out_as_they_went_in(count: int) -> None:
    model = chain(count)
    for body in (SupportedOperations(model), prepare(model)):
        payload, fds, keep = encode(Call(3, body))
        assert decode(payload, fds) == Call(3, body)
        del keep


def test_model_with_subgraphs_pools_and_constants_comes_out_as_it_went_in() -> None:
    values = random.Random(1).randbytes(100_000)
    other = chain(200).main
    model = msgspec.structs.replace(
        chain(2), referenced=(other, chain(1).main), operand_values=values, pools=(Memory.create(16),)
    )
    payload, fds, keep = encode(Call(3, prepare(model)))
    assert len(fds) == 2
    again: Any = decode(payload, fds)
    assert again.body.model.referenced == model.referenced and again.body.model.main == model.main
    assert again.body.model.operand_values == values
    again.body.model.pools[0].array[0] = 5
    assert model.pools[0].array[0] == 5
    del keep


def test_operand_with_many_channels_is_a_part_of_its_own() -> None:
    model = chain(3)
    scales = tuple(0.5 for _ in range(100_000))
    wide = msgspec.structs.replace(model.main.operands[0], channel_quant=ChannelQuant(scales, 0))
    main = msgspec.structs.replace(model.main, operands=(wide, *model.main.operands[1:]))
    model = msgspec.structs.replace(model, main=main)
    payload, fds, keep = encode(Call(3, SupportedOperations(model)))
    assert decode(payload, fds) == Call(3, SupportedOperations(model))
    too_many = msgspec.structs.replace(wide, channel_quant=ChannelQuant((0.5,) * (ELEMENT_BYTES_MAX // 9), 0))
    main = msgspec.structs.replace(main, operands=(too_many, *main.operands[1:]))
    with pytest.raises(InvalidArgument, match="operands of at most"):
        encode(Call(3, SupportedOperations(msgspec.structs.replace(model, main=main))))
    del keep


@pytest.mark.parametrize("where", ["dimensions", "scales", "inputs"])
@pytest.mark.thorough
def test_lists_of_millions_are_rejected_before_they_are_decoded(where: str) -> None:
    # One byte each: their decoding would keep the event loop for a tenth of a second, without a step in between.
    model, many = chain(1), (1,) * 4_000_000
    operands, operations = list(model.main.operands), list(model.main.operations)
    if where == "inputs":
        operations[0] = msgspec.structs.replace(operations[0], inputs=many)
    elif where == "scales":
        operands[0] = msgspec.structs.replace(operands[0], channel_quant=ChannelQuant(many, 0))
    else:
        operands[0] = msgspec.structs.replace(operands[0], dimensions=many)
    main = msgspec.structs.replace(model.main, operands=tuple(operands), operations=tuple(operations))
    payload, fds, keep = encode(Call(3, prepare(msgspec.structs.replace(model, main=main))))
    with pytest.raises(WrongTypes, match="Expected `array` of length <= "):
        decode(payload, fds)
    del keep


def test_large_model_is_decoded_in_many_steps() -> None:
    model = chain(2000)
    payload, fds, keep = encode(Call(3, SupportedOperations(model)))
    message, steps = steps_of(payload, fds)
    assert message.body.model == model
    least = (len(model.main.operands) + len(model.main.operations)) / PART_ELEMENTS_MAX
    # Parts are as large as they may be: the last of each kind, the indexes and the message itself aside.
    assert least <= steps <= least + 8
    del keep


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_but_a_few_may_be_large(kind: str) -> None:
    sizes = [INLINE_BYTES_MAX + 1, 40_000_000, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1, 2**62, 0, -1]
    for size_bytes in sizes:
        payload = msgspec.msgpack.encode(InMemory(kind, True, 7, size_bytes, 0))
        if kind in LARGE_KINDS and size_bytes == INLINE_BYTES_MAX + 1:
            assert in_memory(payload) is not None
        else:
            with pytest.raises(InvalidArgument, match="expected at most"):
                in_memory(payload)


def test_bytes_of_constants_are_bounded_together_with_the_rest() -> None:
    for values_bytes in (-1, MESSAGE_BYTES_MAX, 2**62):
        with pytest.raises(InvalidArgument, match="expected a memory of at most"):
            in_memory(msgspec.msgpack.encode(InMemory("PrepareModel", True, 7, 100, values_bytes)))


@pytest.mark.thorough
def test_what_is_too_large_to_be_received_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="GetMemories: expected at most"):
        encode(Call(1, GetMemories(1, tuple(range(100_000)))))
    with pytest.raises(InvalidArgument, match="operands and operations"):
        one = chain(1).main
        encode(
            Call(1, SupportedOperations(Model(msgspec.structs.replace(one, operands=one.operands * 100_000))))
        )
    answers = SupportedOperationsReply((True,) * 100_000)
    payload, fds, keep = encode(Reply(1, answers))
    assert decode(payload, fds) == Reply(1, answers)
    del keep


def arguments(count: int) -> RequestOnWire:
    return RequestOnWire((RequestArgument(),) * count, (), (PoolOnWire(None, 1),))


def test_arguments_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, _, _ = encode(Call(1, Execute(1, arguments(ARGUMENTS_MAX), False, None, None)))
    assert isinstance(decode(payload, []), Call)
    with pytest.raises(InvalidArgument, match="inputs"):
        encode(Call(1, Execute(1, arguments(ARGUMENTS_MAX + 1), False, None, None)))
    payload = msgspec.msgpack.encode(Call(1, Execute(1, arguments(3 * ARGUMENTS_MAX), False, None, None)))
    monkeypatch.setattr("aionn.service.wire.protocol._decode", None)  # It must not come to that.
    with pytest.raises(InvalidArgument, match="expected at most 1024 inputs"):
        decode(payload, [])


def test_descriptor_stands_for_one_memory(small: Any) -> None:
    work = small.Sum()
    payload, fds, keep = encode(Call(1, Execute(1, RequestOnWire.of(work.request), False, None, None)))
    before = len(os.listdir("/proc/self/fd"))
    message = msgspec.msgpack.decode(payload)
    message["body"]["request"][2] *= 20  # Each reference would be a mapping and two descriptors.
    with pytest.raises(InvalidArgument, match="twice to one"):
        decode(msgspec.msgpack.encode(message), fds)
    assert len(os.listdir("/proc/self/fd")) == before
    del keep


def parts(*sections: tuple[int, bytes]) -> bytes:
    return b"".join(len(data).to_bytes(4, "big") + bytes((which,)) + data for which, data in sections)


def head_of(model: Model) -> bytes:
    empty = large_module.without_contents(model)
    return msgspec.msgpack.encode(Call(3, SupportedOperations(empty)))


def decoded(structure: bytes, values: bytes = b"", *, message: Call | Reply | None = None) -> Any:
    """Decodes parts that say that they are of this kind; None for a question about a model."""
    kind = "SupportedOperations" if message is None else type(message.body).__name__
    heading = InMemory(kind, not isinstance(message, Reply), 3, len(structure), len(values))
    steps = decode_parts(heading, structure, values, [99])
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value


def listed(elements: Any) -> bytes:
    count = len(elements)
    return b"\xdd" + count.to_bytes(4, "big") + b"".join(msgspec.msgpack.encode(e) for e in elements)


def test_parts_that_are_no_model_are_refused() -> None:
    model = chain(2)
    operands, operations = listed(model.main.operands), listed(model.main.operations)
    head = (0, head_of(model))
    ends = (3, msgspec.msgpack.encode((model.main.input_indexes, model.main.output_indexes)))
    assert decoded(parts(head, (1, operands), (2, operations), ends)).body.model == msgspec.structs.replace(
        model, operand_values=b""
    )
    tiny = b"\x91\x03"
    bad = {
        "no part": b"",
        "no head": parts((1, operands), ends),
        "no end": parts(head, (1, operands)),
        "no subgraph": parts(head),
        "another head": parts(head, head, ends),
        "an unknown part": parts(head, (9, b"\x90"), ends),
        "an empty part": parts(head, (1, b"\x90"), ends),
        "a length behind the end": parts(head) + (1 << 31).to_bytes(4, "big") + b"\x01\x90",
        "half a length": parts(head) + b"\x00\x00",
        "too many elements": parts(head, (1, b"\xdd\x00\x00\xff\xff" + tiny * 65535), ends),
        "too many bytes": parts(head, (1, b"\x92" + 2 * (b"\x92\x03" + listed([1] * 50_000))), ends),
        "a count that is not there": parts(head, (1, b"\xdd\x00\x00\x00\x05" + tiny), ends),
        "no list": parts(head, (1, b"\xc0"), ends),
        "long indexes": parts(head, (3, b"\x92" + listed([1] * 70_000) + b"\x90")),
        "contents in the head": parts((0, msgspec.msgpack.encode(Call(3, SupportedOperations(model)))), ends),
        "another number": parts(
            (0, msgspec.msgpack.encode(Call(4, SupportedOperations(large_module.without_contents(model))))),
            ends,
        ),
        "no model": parts((0, msgspec.msgpack.encode(Call(3, GetMemories(1, ()))))),
        "deep nesting": parts((0, b"\x91" * 30_000)),
    }
    for name, structure in bad.items():
        with pytest.raises(InvalidArgument):
            pytest.fail(f"{name}: {decoded(structure)}")


def test_message_without_a_model_has_neither_further_parts_nor_constants() -> None:
    reply = Reply(3, SupportedOperationsReply((True,) * 4))
    whole = parts((0, msgspec.msgpack.encode(reply)))
    assert decoded(whole, message=reply) == reply
    for structure, values in ((whole, b"x"), (whole + parts((1, b"\x90")), b"")):
        with pytest.raises(InvalidArgument, match="more parts than its kind has"):
            decoded(structure, values, message=reply)


def test_elements_of_a_model_are_bounded_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_module, "MODEL_ELEMENTS_MAX", 200)
    chunk = (1, b"\xdd\x00\x00\x00\x40" + b"\x91\x03" * 64)
    ends = (3, b"\x92\x90\x90")
    head = (0, head_of(chain(1)))
    assert len(decoded(parts(head, *[chunk] * 3, ends)).body.model.main.operands) == 192
    with pytest.raises(InvalidArgument, match="at most 200"):
        decoded(parts(head, *[chunk, ends] * 4))
    monkeypatch.setattr(large_module, "SUBGRAPHS_MAX", 5)
    assert len(decoded(parts(head, *[ends] * 5)).body.model.referenced) == 4
    with pytest.raises(InvalidArgument, match="too large"):
        decoded(parts(head, *[ends] * 6))


def test_message_besides_the_model_may_be_as_large_as_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = chain(1), (3, b"\x92\x90\x90")
    head = head_of(model)
    monkeypatch.setattr(large_module, "HEAD_BYTES_MAX", len(head))
    assert decoded(parts((0, head), ends)).id == 3
    monkeypatch.setattr(large_module, "HEAD_BYTES_MAX", len(head) - 1)
    with pytest.raises(InvalidArgument, match="besides the model's subgraphs"):
        decoded(parts((0, head), ends))


@pytest.mark.parametrize("kind", sorted(LARGE_KINDS))
def test_large_message_may_be_as_large_as_its_kind_allows(kind: str) -> None:
    limit = sizes_module._LARGE_BYTES_MAX[kind]
    check_large(kind, limit)
    for size_bytes in (0, limit + 1):
        with pytest.raises(InvalidArgument, match=f"expected at most {limit} bytes, got {size_bytes}"):
            check_large(kind, size_bytes)


def test_mutated_parts_are_refused_or_are_a_model() -> None:
    rng = random.Random(7)
    model = chain(60)
    payload, fds, keep = encode(Call(3, SupportedOperations(model)))
    stands_for = in_memory(payload)
    assert stands_for is not None
    structure, values = read_parts(stands_for, fds)
    accepted = 0
    for _ in range(2000):
        data = bytearray(structure)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(data))
            if rng.random() < 0.3:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at] = rng.choice((0x00, 0x7F, 0x90, 0xC0, 0xCB, 0xDD, 0xFF, data[at] ^ 1))
        try:
            decoded(bytes(data), values)
            accepted += 1
        except Error as e:
            assert e.status == InvalidArgument.status
    assert 50 < accepted < 1950
    del keep


def test_memory_of_a_message_that_cannot_be_relied_on_is_refused(tmp_path: Any) -> None:
    payload = msgspec.msgpack.encode(InMemory("SupportedOperations", True, 3, 100, 0))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    small = Memory.create(50)
    read_end, write_end = os.pipe()  # Reading it would take for ever.
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for fds in ([], [unsealed], [small.fileno()], [read_end], [file]):
        with pytest.raises(InvalidArgument):
            decode(payload, fds)
    for fd in (unsealed, read_end, write_end, file):
        os.close(fd)


async def test_tasks_have_their_turn_while_a_large_model_is_received_and_order_stays() -> None:
    model = chain(3000)
    seen: list[tuple[str, int]] = []
    turns = 0

    async def handler(body: Any, channel: Channel) -> Any:
        seen.append((type(body).__name__, turns))
        return SupportedOperationsReply((True,))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, handler, peer_name="the peer")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        for body in (GetMemories(1, ()), SupportedOperations(model), GetMemories(2, ())):
            payload, fds, keep = encode(Call(3, body))
            socket.send_fds(theirs, [payload], fds)
            del keep
        with anyio.fail_after(WAIT_S_MAX):
            while len(seen) < 3:
                await anyio.lowlevel.checkpoint()
                turns += 1
        tasks.cancel_scope.cancel()
    assert [kind for kind, _ in seen] == ["GetMemories", "SupportedOperations", "GetMemories"]
    elements = len(model.main.operands) + len(model.main.operations)
    assert seen[1][1] - seen[0][1] >= elements / PART_ELEMENTS_MAX
    channel.release()
    theirs.close()


@pytest.mark.thorough
async def test_processes_take_turns_at_copies_whatever_their_number_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, may_end = channel_module.read_parts, threading.Event()
    start = _Call.start
    order: list[int] = []  # Of their starts: threads that began together may run in another order.
    peers = Peers()

    def recorded(call: Any) -> None:
        order.append(1 if call.owner.process is peers.of(1) else 2)
        start(call)

    def halting(stands_for: Any, fds: Any) -> Any:
        assert may_end.wait(WAIT_S_MAX)
        return copy(stands_for, fds)

    async def handler(body: Any, channel: Channel) -> Any:
        return SupportedOperationsReply((True,))

    monkeypatch.setattr(channel_module, "read_parts", halting)
    monkeypatch.setattr(_Call, "start", recorded)
    copies_max = channel_module.COPIES_AT_ONCE_MAX
    processes = [1] * (10 * copies_max) + [2]
    messages = {process: encode(Call(process, SupportedOperations(chain(1000)))) for process in (1, 2)}
    async with anyio.create_task_group() as tasks:
        with contextlib.ExitStack() as stack:
            channels = []
            try:
                for place, process in enumerate(processes, 1):
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    channels.append(Channel(ours, handler, peer_name="the peer", peer=peers.of(process)))
                    stack.callback(theirs.close)
                    tasks.start_soon(channels[-1].run)
                    payload, fds, _keep = messages[process]
                    socket.send_fds(theirs, [payload], fds)
                    with anyio.fail_after(WAIT_S_MAX):
                        while len(order) + channel_module._copies.waiting_count < place:
                            await anyio.sleep(0.001)
            finally:
                may_end.set()
            with anyio.fail_after(WAIT_S_MAX):
                while any(channel.received_count == 0 for channel in channels):
                    await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
    assert order.index(2) <= 2 * copies_max
    for channel in channels:
        channel.release()


async def test_few_large_messages_are_copied_at_once_whoever_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, may_end, counting = channel_module.read_parts, threading.Event(), threading.Lock()
    copying = most = 0

    def slowly(*arguments: Any) -> Any:
        nonlocal copying, most
        with counting:
            copying += 1
            most = max(most, copying)
        may_end.wait(0.05)
        with counting:
            copying -= 1
        return copy(*arguments)

    async def handler(body: Any, channel: Channel) -> Any:
        return SupportedOperationsReply((True,))

    monkeypatch.setattr(channel_module, "read_parts", slowly)
    payload, fds, keep = encode(Call(3, SupportedOperations(chain(1000))))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(6)]
    channels = [Channel(ours, handler, peer_name="the peer") for ours, _ in pairs]
    async with anyio.create_task_group() as tasks:
        for channel, (_, theirs) in zip(channels, pairs, strict=True):
            tasks.start_soon(channel.run)
            socket.send_fds(theirs, [payload], fds)
        with anyio.fail_after(WAIT_S_MAX):
            while any(channel.received_count == 0 for channel in channels):
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    assert most == channel_module.COPIES_AT_ONCE_MAX
    for channel, (_, theirs) in zip(channels, pairs, strict=True):
        channel.release()
        theirs.close()
    del keep


async def test_reception_of_a_large_model_can_be_cancelled_and_ends_with_the_peer() -> None:
    async def handler(body: Any, channel: Channel) -> Any:
        raise AssertionError("it is not received to its end")

    payload, fds, keep = encode(Call(3, SupportedOperations(chain(2500))))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, handler, peer_name="the peer")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        socket.send_fds(theirs, [payload], fds)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()
    del keep


async def test_large_reply_that_nobody_waits_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.service.wire.channel.read_parts", None)
    payload, fds, keep = encode(Reply(3, SupportedOperationsReply((True,) * 100_000)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def handler(body: Any, channel: Channel) -> Any:
        raise DeadObject("no call comes")

    channel = Channel(ours, handler, peer_name="the peer")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        socket.send_fds(theirs, [payload], fds)
        with anyio.fail_after(WAIT_S_MAX):
            while channel.received_count == 0:
                await anyio.lowlevel.checkpoint()
        assert channel.is_alive
        tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()
    del keep


@pytest.mark.forked("any")
@pytest.mark.thorough
def test_server_that_receives_large_messages_ends_when_it_is_told_to(tmp_path: Any, repository: Any) -> None:
    path = tmp_path / "server.sock"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", str(path)]
    model, fds, keep = encode(Call(3, SupportedOperations(chain(4000))))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None and "serving" in server.stdout.readline()
        clients = []
        for _ in range(4):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(WAIT_S_MAX)
            sock.connect(str(path))
            sock.send(encode(Call(1, Hello(PROTOCOL_VERSION)))[0])
            assert sock.recv(1 << 16)
            socket.send_fds(sock, [model], fds)
            clients.append(sock)
        server.terminate()
        assert server.wait(WAIT_S_MAX) == 0
    for sock in clients:
        sock.close()
    del keep


def test_few_large_models_of_one_client_wait_at_once() -> None:
    """They are decoded faster than they are checked, and the objects of one with 4,000 operations take 3 MB."""
    payload, _, keep = encode(Call(3, SupportedOperations(chain(4000))))
    stands_for = in_memory(payload)
    assert stands_for is not None
    weight = channel_module.STRUCTURE_WEIGHT * stands_for.size_bytes + stands_for.values_bytes
    assert 8 <= load_module.BYTES_AT_ONCE_MAX // weight <= 64
    del keep


async def test_objects_of_large_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, fds, keep = encode(Call(3, SupportedOperations(chain(100))))
    stands_for = in_memory(payload)
    assert stands_for is not None
    weight = channel_module.STRUCTURE_WEIGHT * stands_for.size_bytes + stands_for.values_bytes
    monkeypatch.setattr(load_module, "BYTES_AT_ONCE_MAX", 2 * weight)
    begun: list[Any] = []
    may_end = anyio.Event()

    async def handler(body: Any, channel: Channel) -> Any:
        begun.append(body)
        await may_end.wait()
        return SupportedOperationsReply(())

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, handler, peer_name="the peer")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        for _ in range(5):
            socket.send_fds(theirs, [payload], fds)
        with anyio.fail_after(WAIT_S_MAX):
            while len(begun) < 2:
                await anyio.lowlevel.checkpoint()
            for _ in range(200):
                await anyio.lowlevel.checkpoint()
            assert len(begun) == 2
            may_end.set()
            while len(begun) < 5:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()
    del keep
