"""Thousands of things that nobody should send: no crash, no hang, no leak, and only the statuses that the contract allows.

Every failure tells its seed; ``SEED`` in the environment starts there. The long form makes a thousand times as many.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aionn.burst.packets import (
    MalformedPacket,
    decode_request,
    decode_result,
    encode_result,
    result_of,
    serialize_request,
)
from aionn.conformance.cts import CtsTest, build_model
from aionn.conformance.cts.arguments import TestArguments as Arguments
from aionn.conformance.vts.case import VtsSubject
from aionn.conformance.vts.models import RequestPools, add_model
from aionn.conformance.vts.packets import packet_burst
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import Error, ErrorStatus, InvalidArgument, ResourceExhausted, status_of
from aionn.hal import ExecutionPreference, ExecutionResult, Model, OutputShape, Priority
from aionn.service.host import process as host
from aionn.service.host.reservations import ServedReservations
from aionn.service.wire import protocol, scheduling_messages
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.peers import Peer
from tests.support.conformance_data import small_sample
from tests.support.mutator import mutate, mutate_bytes

SEED = int(os.environ.get("SEED", "1"))
LONG_FACTOR = 1000
STEP_S = 20.0

MODELS, EXECUTIONS, PACKETS, MESSAGES, DATAGRAMS = 240, 120, 160, 400, 80
"""Cases of an ordinary run by kind."""

NONE = ErrorStatus.NONE
REFUSED = {NONE, ErrorStatus.INVALID_ARGUMENT}
EXECUTED = REFUSED | {
    ErrorStatus.GENERAL_FAILURE,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT,
}


@pytest.fixture(scope="module")
def models(shared: Path) -> list[tuple[CtsTest, Model]]:
    """Small conformance models, one for each operation; their constants copied, so that no memory is kept between tests."""
    chosen = []
    for test in small_sample(shared / "cts"):
        model = build_model(test)
        if not model.pools:
            chosen.append((test, model))
        for pool in model.pools:
            pool.close()
    assert len(chosen) > 80
    return chosen


def seeds(count: int, times: int) -> Iterator[int]:
    return iter(range(SEED, SEED + count * times))


@contextlib.contextmanager
def told(seed: int, what: object) -> Iterator[None]:
    """Names the seed in whatever goes wrong."""
    try:
        yield
    except BaseException as e:
        e.add_note(f"SEED={seed}: {what}")
        raise


async def status_of_mutant(call: Any, allowed: set[ErrorStatus]) -> ErrorStatus:
    """The status of a call, which must be allowed and no disguise of a bug."""
    try:
        await call
    except Error as e:
        cause = e.__cause__
        # A kernel may find at run time what no rule can see before; anything else than an error on purpose is a bug.
        assert cause is None or isinstance(cause, Error), f"{type(cause).__name__}: {cause}"
        assert status_of(e) in allowed, f"{status_of(e).name}: {e}"
        return status_of(e)
    return NONE


# Models and requests


async def fuzz_models(models: Sequence[tuple[CtsTest, Model]], times: int) -> Counter[ErrorStatus]:
    seen: Counter[ErrorStatus] = Counter()
    async with ReferenceDevice() as device:
        for seed in seeds(MODELS, times):
            rng = random.Random(seed)
            test, model = rng.choice(models)
            mutant = mutate(model, rng, changes=rng.choice((1, 1, 2, 3)))
            with told(seed, test.name), anyio.fail_after(STEP_S):
                seen[await status_of_mutant(device.supported_operations(mutant), REFUSED)] += 1
                if seed % 4 == 0:
                    prepared: list[Any] = []

                    async def prepare(mutant: Model = mutant, prepared: list[Any] = prepared) -> None:
                        prepared.append(await device.prepare_model(mutant))

                    seen[await status_of_mutant(prepare(), REFUSED)] += 1
                    for each in prepared:
                        await each.aclose()
    return seen


async def fuzz_requests(models: Sequence[tuple[CtsTest, Model]], times: int) -> Counter[ErrorStatus]:
    """Mutated requests on right models, and right requests on mutated models, executed where they are legal."""
    seen: Counter[ErrorStatus] = Counter()
    async with ReferenceDevice() as device:
        for seed in seeds(EXECUTIONS, times):
            rng = random.Random(seed)
            test, model = rng.choice(models)
            # Constants stay what they are: a shape or a count among them could ask for all of the memory there is.
            mutant = mutate(model, rng, skip=frozenset({"operand_values"})) if rng.random() < 0.5 else model
            with told(seed, test.name), anyio.fail_after(STEP_S):
                try:
                    prepared = await device.prepare_model(mutant)
                except InvalidArgument:
                    seen[ErrorStatus.INVALID_ARGUMENT] += 1
                    continue
                with Arguments(test) as arguments:
                    request = arguments.request
                    if rng.random() < 0.8:
                        request = mutate(request, rng, changes=rng.choice((1, 1, 2)))
                    arguments.reset()
                    call = prepared.execute_synchronously(
                        request, deadline_ns=device.now() + 2_000_000_000, loop_timeout_ns=50_000_000
                    )
                    seen[await status_of_mutant(call, EXECUTED)] += 1
                await prepared.aclose()
    return seen


@pytest.mark.thorough
async def test_mutated_models_are_refused_or_served(models: list[tuple[CtsTest, Model]]) -> None:
    seen = await fuzz_models(models, 1)
    assert seen[NONE] > MODELS // 50 and seen[ErrorStatus.INVALID_ARGUMENT] > MODELS // 2


async def test_mutated_requests_are_refused_or_served(models: list[tuple[CtsTest, Model]]) -> None:
    seen = await fuzz_requests(models, 1)
    assert seen[NONE] > EXECUTIONS // 50 and seen[ErrorStatus.INVALID_ARGUMENT] > EXECUTIONS // 3


# Packets


async def fuzz_packets(times: int) -> Counter[ErrorStatus]:
    seen: Counter[ErrorStatus] = Counter()
    model = add_model()
    async with ReferenceDevice() as device:
        subject = VtsSubject(device)
        async with subject.prepared(model) as prepared, packet_burst(subject, prepared) as burst:
            with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
                await burst.controller.execute_synchronously(pools.request, (0, 1))
                datums = tuple(serialize_request(pools.request, (0, 1), measure=True))
                for seed in seeds(PACKETS, times):
                    rng = random.Random(seed)
                    packet = msgspec.msgpack.encode(mutate(datums, rng, changes=rng.choice((1, 2))))
                    if rng.random() < 0.3:
                        packet = mutate_bytes(packet, rng)
                    with told(seed, packet.hex()), anyio.fail_after(STEP_S):
                        pools.reset()
                        status = (await burst.exchange(packet or b"\0")).status
                        seen[status] += 1
                        # A legal one may say another place; one that is refused must write nowhere.
                        assert status == NONE or (pools.output_pool.array == 0xA5).all()
                pools.reset()
                await burst.controller.execute_synchronously(pools.request, (0, 1))
                assert (pools.output() == 1).all()
    return seen


async def test_mutated_packets_are_answered() -> None:
    seen = await fuzz_packets(1)
    assert set(seen) <= EXECUTED
    assert seen[ErrorStatus.GENERAL_FAILURE] > PACKETS // 2


@given(
    st.binary(max_size=200)
    | st.lists(st.integers(-(2**63), 2**64 - 1) | st.lists(st.integers(0, 9))).map(msgspec.msgpack.encode)
)
@settings(deadline=None, derandomize=True)
def test_any_bytes_are_a_packet_or_refused(payload: bytes) -> None:
    for decode in (decode_request, decode_result):
        with contextlib.suppress(MalformedPacket):
            decode(payload)


@given(
    st.booleans(),
    st.lists(
        st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple), st.booleans()), max_size=8
    ),
)
@settings(deadline=None, derandomize=True)
def test_results_survive_their_packets(measure: bool, shapes: list[tuple[tuple[int, ...], bool]]) -> None:
    whole = all(sufficient for _, sufficient in shapes)
    result = result_of(ExecutionResult(whole, tuple(OutputShape(*shape) for shape in shapes)))
    assert decode_result(encode_result(result)) == result


# Messages


def example_messages() -> list[protocol.Message]:
    """Calls of many kinds, without descriptors but for those of a request's pools."""
    model = add_model()
    preference, priority = ExecutionPreference.LOW_POWER, Priority.HIGH
    asked = scheduling_messages.AskedTime(
        name="gate", period_ns=10**9, deadline_ns=10**9, jitter_ns=10**6, duration_ns=10**6
    )
    bodies: list[Any] = [
        protocol.Hello(protocol.PROTOCOL_VERSION),
        protocol.GetStatus(),
        protocol.SupportedOperations(model),
        protocol.PrepareModel(model, preference, priority, None),
        protocol.FreePreparedModel(1),
        protocol.GetExecutionInfo(1, last=False),
        protocol.FreeMemorySlot(1, 0),
        protocol.EndBurst(1),
        protocol.CancelCall(3),
        scheduling_messages.Reserve(asked),
        scheduling_messages.Change(1, msgspec.structs.replace(asked, phase_ns=2**40, tolerance_ns=1)),
        scheduling_messages.Move(1, 2**40),
        scheduling_messages.Release(1),
        scheduling_messages.Withdrawn(1, "silent"),
        scheduling_messages.Room(1_000),
    ]
    return [protocol.Call(index + 1, body) for index, body in enumerate(bodies)]


def test_mutated_messages_are_decoded_or_refused() -> None:
    messages = example_messages()
    with RequestPools(add_model(), [np.zeros((1, 4), np.float32)]) as pools:
        body = protocol.Execute(1, RequestOnWire.of(pools.request), True, None, None)
        messages.append(protocol.Call(99, body))
        frame = scheduling_messages.ExecuteReserved(1, 1, RequestOnWire.of(pools.request), True, None, None)
        messages.append(protocol.Call(100, frame))
        decoded = 0
        for seed in seeds(MESSAGES, 1):
            rng = random.Random(seed)
            payload, fds, _keep = protocol.encode(rng.choice(messages))
            payload = mutate_bytes(payload, rng)
            with told(seed, payload.hex()), contextlib.suppress(InvalidArgument, ResourceExhausted):
                protocol.decode(payload, fds[: rng.randint(0, len(fds))])
                decoded += 1
        assert 0 < decoded < MESSAGES


@contextlib.asynccontextmanager
async def served(device: ReferenceDevice) -> AsyncIterator[Callable[[], socket.socket]]:
    """A driver's service in this process, and a way to get connections to it."""
    async with anyio.create_task_group() as tasks:
        opened: list[socket.socket] = []
        ledger = ServedReservations(device.info.name, device.info.slots, share=1.0)

        def connect() -> socket.socket:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            opened.append(ours)
            tasks.start_soon(serve, theirs)
            return ours

        async def serve(theirs: socket.socket) -> None:
            await host.serve(device, theirs, reservations=ledger.client(None, Peer(), theirs))

        try:
            yield connect
        finally:
            for sock in opened:
                sock.close()


async def fuzz_datagrams(times: int) -> tuple[int, int]:
    """Mutated messages to a live service. Returns how many were answered, and how many connections were ended for them."""
    answered = ended = 0
    messages = example_messages()
    async with ReferenceDevice() as device, served(device) as connect:
        sock = connect()
        for seed in seeds(DATAGRAMS, times):
            rng = random.Random(seed)
            message = mutate(rng.choice(messages), rng)
            try:
                payload, _, _keep = protocol.encode(message)
            except (InvalidArgument, msgspec.MsgspecError, OverflowError):
                continue
            if rng.random() < 0.3:
                payload = mutate_bytes(payload, rng)
            with told(seed, payload.hex()), anyio.fail_after(STEP_S):
                alive = payload != b"" and await exchange(sock, payload)
                answered += alive
                if not alive:
                    ended += 1
                    sock.close()
                    sock = connect()
                    # The service itself lives on: a new client is greeted.
                    hello, _, _keep = protocol.encode(
                        protocol.Call(1, protocol.Hello(protocol.PROTOCOL_VERSION))
                    )
                    assert await exchange(sock, hello)
    return answered, ended


async def exchange(sock: socket.socket, payload: bytes) -> bool:
    """Sends a datagram, then one that is always answered; whether that answer, or the connection's end, came."""
    ping, _, _keep = protocol.encode(protocol.Call(77_777, protocol.GetStatus()))
    try:
        sock.send(payload)
        sock.send(ping)
        while True:
            await anyio.wait_readable(sock)
            answer = sock.recv(1 << 17)
            if not answer:
                return False
            reply = protocol.decode(answer, ())
            if isinstance(reply, protocol.Reply) and reply.id == 77_777:
                return True
    except OSError:
        return False


async def test_mutated_datagrams_end_a_connection_at_worst() -> None:
    answered, ended = await fuzz_datagrams(1)
    assert answered > DATAGRAMS // 20 and ended > DATAGRAMS // 20


@pytest.mark.long
async def test_a_million_mutants(models: list[tuple[CtsTest, Model]]) -> None:
    await fuzz_models(models, LONG_FACTOR)
    await fuzz_requests(models, LONG_FACTOR)
    await fuzz_packets(LONG_FACTOR)
    await fuzz_datagrams(LONG_FACTOR)
