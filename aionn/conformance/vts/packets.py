"""Cases: bursts, from the outside (``burst``) and packet by packet (``burst_packets``).

Owns the client's end of a burst with its packets in the open, and the mutations of a packet. For a device in a driver process the
packets go into that process's own queue; for one in this process, a real burst server wraps the prepared model.

Invariants:
1. Every packet that was sent is answered by one result packet that is well-formed; one that is not a legal request, by a failure.
2. After each of them a legal request is computed as before.

Source: ``ValidateBurst`` of the NN HAL's VTS 1.2 and 1.3.
"""

from __future__ import annotations

import contextlib
import gc
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np

import fmq
from aionn.burst.controller import QUEUE_BYTES, BurstController
from aionn.burst.packets import (
    NO_LIMIT,
    RESERVATION_MAX,
    BurstResult,
    FmqRequestDatum,
    InputOperandDimensionValue,
    InputOperandInformation,
    MeasureTiming,
    OutputOperandDimensionValue,
    OutputOperandInformation,
    PacketInformation,
    PoolIdentifier,
    ReservedLimits,
    decode_result,
    serialize_request,
)
from aionn.burst.server import Answer, BurstServer
from aionn.conformance.computing import closing
from aionn.conformance.cts import CtsTest
from aionn.conformance.cts.arguments import TestArguments
from aionn.conformance.vts.case import (
    Case,
    CaseSkipped,
    VtsSubject,
    expect_outputs,
    expect_refusal,
    fail,
    status_of_call,
)
from aionn.conformance.vts.models import RequestPools, add_model, has_definite_outputs, model_of, split_model
from aionn.errors import ErrorStatus
from aionn.hal import DataLocation, ExecutionResult, Memory, Model, PreparedModel, Request
from aionn.platform.loops import wait_from_thread
from aionn.service.client.prepared import RemotePreparedModel
from aionn.service.wire.handles import QueueHandle
from aionn.service.wire.protocol import ConfigureBurst, ConfigureBurstReply, EndBurst, FreeMemorySlot

__all__ = ["CASES", "PacketBurst", "packet_burst"]

SMALL_QUEUE_BYTES = 64
"""Room for the answer that the result does not fit, and not for a result of many outputs."""

PACKET_MODELS_MAX = 12
"""Models of a sample whose packets are mutated: their numbers of arguments and pools differ, and nothing else that matters here."""

replace = msgspec.structs.replace
_ENCODER = msgspec.msgpack.Encoder()


class PacketBurst:
    """The client's end of a burst, packet by packet; made by ``packet_burst``.

    Attributes:
        controller: The same end as applications have it, which answers the driver's questions for memories.
    """

    def __init__(
        self,
        controller: BurstController,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        step: Callable[[], None],
    ) -> None:
        self.controller = controller
        self._requests = requests
        self._results = results
        self._step = step

    async def exchange(self, payload: bytes, where: str = "") -> BurstResult:
        """Sends bytes and returns the answer; the case fails if that is not a result packet."""
        self._step()
        if not self._requests.write_message(payload):
            fail("room for a packet in the request queue", "none", where)
        return decode_result(await fmq.aio.read_message(self._results))

    async def exchange_datums(self, datums: Sequence[FmqRequestDatum], where: str = "") -> BurstResult:
        """As ``exchange``, for a list of datums."""
        return await self.exchange(_ENCODER.encode(datums), where)


@contextlib.asynccontextmanager
async def packet_burst(
    subject: VtsSubject, prepared: PreparedModel, *, result_bytes: int = QUEUE_BYTES
) -> AsyncIterator[PacketBurst]:
    """A burst whose packets can be written by hand, in front of the driver process's own server where there is one."""
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(fmq.MessageQueue.create(1, QUEUE_BYTES))
        results = stack.enter_context(fmq.MessageQueue.create(1, result_bytes))
        opened = _remote if isinstance(prepared, RemotePreparedModel) else _local
        async with opened(subject, prepared, requests, results) as controller:
            yield PacketBurst(controller, requests, results, subject.step)


@contextlib.asynccontextmanager
async def _remote(
    subject: VtsSubject, prepared: PreparedModel, requests: fmq.MessageQueue, results: fmq.MessageQueue
) -> AsyncIterator[BurstController]:
    assert isinstance(prepared, RemotePreparedModel), "chosen by the caller"
    channel, bursts = prepared.connection.channel, prepared.connection.bursts
    ours, theirs = (QueueHandle(queue.descriptor, queue.fds) for queue in (requests, results))
    subject.step()
    handle = (await channel.call(ConfigureBurst(prepared.handle, ours, theirs), ConfigureBurstReply)).burst

    async def free_slot(slot: int) -> None:
        await channel.command(FreeMemorySlot(handle, slot))

    async def end() -> None:
        await channel.command(EndBurst(handle))
        bursts.pop(handle, None)

    controller = BurstController(requests, results, free_slot=free_slot, end=end)
    bursts[handle] = controller
    async with closing(controller):
        yield controller


@contextlib.asynccontextmanager
async def _local(
    subject: VtsSubject, prepared: PreparedModel, requests: fmq.MessageQueue, results: fmq.MessageQueue
) -> AsyncIterator[BurstController]:
    async with anyio.from_thread.BlockingPortal() as portal:

        def execute(
            request: Request,
            measure: bool,
            deadline_ns: int | None,
            loop_timeout_ns: int | None,
            answer: Answer,
        ) -> ExecutionResult:
            return wait_from_thread(
                portal,
                lambda: prepared.execute_synchronously(
                    request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
                ),
                "burst: the suite ended before the execution did",
            )

        def get_memories(slots: Sequence[int]) -> Sequence[Memory]:
            return controller.memories(slots)

        server = BurstServer(
            fmq.MessageQueue.attach(requests.descriptor, requests.fds),
            fmq.MessageQueue.attach(results.descriptor, results.fds),
            execute=execute,
            get_memories=get_memories,
            name="aionn-conformance-burst",
        )

        async def free_slot(slot: int) -> None:
            server.free_slot(slot)

        async def end() -> None:
            await anyio.to_thread.run_sync(server.stop)

        controller = BurstController(requests, results, free_slot=free_slot, end=end)
        server.start()
        async with closing(controller):
            yield controller


# Mutations


def foreign_datums() -> tuple[FmqRequestDatum, ...]:
    """One datum of every kind that is illegal wherever it is: limits are those of a reservation that no client has."""
    location = DataLocation(0, 0, 16)
    return (
        PacketInformation(5, 1, 1, 1),
        InputOperandInformation(False, location, 0),
        InputOperandDimensionValue(1),
        OutputOperandInformation(False, location, 0),
        OutputOperandDimensionValue(1),
        PoolIdentifier(0),
        MeasureTiming(False),
        ReservedLimits(NO_LIMIT, NO_LIMIT, RESERVATION_MAX),
    )


def _resized(datums: Sequence[FmqRequestDatum]) -> list[FmqRequestDatum]:
    """The same with a first datum that gives their number, if the first datum has one."""
    first, *others = datums
    if isinstance(first, PacketInformation):
        first = replace(first, packet_size=len(datums))
    return [first, *others]


Mutated = Iterator[tuple[str, list[FmqRequestDatum]]]


def _both(where: str, datums: list[FmqRequestDatum]) -> Mutated:
    yield where, datums
    if datums:
        yield f"{where}, its size corrected", _resized(datums)


def _removed(datums: list[FmqRequestDatum]) -> Mutated:
    for i in range(len(datums)):
        yield from _both(f"without datum {i}", [*datums[:i], *datums[i + 1 :]])


def _inserted(datums: list[FmqRequestDatum]) -> Mutated:
    for i in range(len(datums) + 1):
        for datum in foreign_datums():
            yield from _both(f"{type(datum).__name__} at {i}", [*datums[:i], datum, *datums[i:]])


def _replaced(datums: list[FmqRequestDatum]) -> Mutated:
    for i, before in enumerate(datums):
        for datum in foreign_datums():
            if type(datum) is not type(before):
                yield f"{type(datum).__name__} instead of datum {i}", [*datums[:i], datum, *datums[i + 1 :]]


def _counts(datums: list[FmqRequestDatum]) -> Mutated:
    first, *others = datums
    assert isinstance(first, PacketInformation), "a legal packet"
    for name in ("packet_size", "input_operand_count", "output_operand_count", "pool_count"):
        for value in (-1, 0, getattr(first, name) + 1, 2**31 - 1, 2**31, 2**63 - 1):
            yield f"{name} {value}", [replace(first, **{name: value}), *others]
    for i, datum in enumerate(datums):
        if isinstance(datum, InputOperandInformation | OutputOperandInformation):
            for count in (-1, datum.dimension_count + 1, 2**31 - 1, 2**63 - 1):
                changed = replace(datum, dimension_count=count)
                yield f"datum {i} with {count} dimensions", [*datums[:i], changed, *datums[i + 1 :]]
            for number in (-1, 2**32, 2**63 - 1):
                for field in ("pool_index", "offset", "length", "padding"):
                    changed = replace(datum, location=replace(datum.location, **{field: number}))
                    yield f"datum {i} with {field} {number}", [*datums[:i], changed, *datums[i + 1 :]]


def _slots(datums: list[FmqRequestDatum]) -> Mutated:
    for i, datum in enumerate(datums):
        if isinstance(datum, PoolIdentifier):
            for slot in (2**31 - 1, 2**31, -1, 100):
                yield f"slot {slot}", [*datums[:i], PoolIdentifier(slot), *datums[i + 1 :]]


MUTATIONS: dict[str, Callable[[list[FmqRequestDatum]], Mutated]] = {
    "removed_datum": _removed,
    "inserted_datum": _inserted,
    "replaced_datum": _replaced,
    "wrong_numbers": _counts,
    "unknown_slot": _slots,
}


# Cases


@contextlib.asynccontextmanager
async def _legal(
    subject: VtsSubject,
) -> AsyncIterator[tuple[PacketBurst, RequestPools, list[FmqRequestDatum], PreparedModel]]:
    """A burst, and a packet for it that is legal, extents and all."""
    model = add_model()
    async with subject.prepared(model) as prepared, packet_burst(subject, prepared) as burst:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            request = replace(
                pools.request,
                inputs=tuple(replace(a, dimensions=(1, 4)) for a in pools.request.inputs),
                outputs=tuple(replace(a, dimensions=(1, 4)) for a in pools.request.outputs),
            )
            # Through the ordinary call once: slots 0 and 1 stand for the two pools from then on.
            await burst.controller.execute_synchronously(request, (0, 1))
            yield burst, pools, serialize_request(request, (0, 1), measure=False), prepared


async def _computes(
    burst: PacketBurst, pools: RequestPools, datums: list[FmqRequestDatum], where: str
) -> None:
    pools.reset()
    result = await burst.exchange_datums(datums, where)
    if result.status != ErrorStatus.NONE or (pools.output() != 1).any():
        fail("a legal request computed", f"{result.status.name}, {pools.output().ravel()}", where)


def _refused(result: BurstResult, pools: RequestPools, where: str) -> None:
    if result.status == ErrorStatus.NONE:
        fail("a failure", "NONE", where)
    stray = pools.stray()
    if stray is not None:
        fail("no byte written beside the outputs", f"another {stray}", where)


async def _mutated_packets(subject: VtsSubject, name: str) -> None:
    """Each is answered with a failure, and the burst continues; whatever the model."""
    async with _legal(subject) as (burst, pools, datums, _):
        for where, mutated in MUTATIONS[name](datums):
            _refused(await burst.exchange_datums(mutated, where), pools, where)
            await _computes(burst, pools, datums, f"after {where}")
    for test in filter(has_definite_outputs, subject.spread(PACKET_MODELS_MAX)):
        with contextlib.suppress(CaseSkipped), model_of(test) as model:
            await _mutated_packets_of(subject, name, test, model)


async def _mutated_packets_of(subject: VtsSubject, name: str, test: CtsTest, model: Model) -> None:
    async with subject.prepared(model) as prepared, packet_burst(subject, prepared) as burst:
        with TestArguments(test) as arguments:
            arguments.reset()
            await burst.controller.execute_synchronously(arguments.request, (0, 1))
            datums = serialize_request(arguments.request, (0, 1), measure=False)
            for where, mutated in subject.sample(list(MUTATIONS[name](datums)), name, test.name):
                result = await burst.exchange_datums(mutated, f"{test.name}, {where}")
                if result.status == ErrorStatus.NONE:
                    fail("a failure", "NONE", f"{test.name}, {where}")
            arguments.reset()
            result = await burst.exchange_datums(datums, test.name)
            if result.status != ErrorStatus.NONE:
                fail("a legal request computed", result.status.name, test.name)
            expect_outputs(test, arguments.outputs(result.output_shapes))


async def _no_packets(subject: VtsSubject) -> None:
    """Bytes that are not a packet."""
    async with _legal(subject) as (burst, pools, datums, _):
        packet = _ENCODER.encode(datums)
        bad = [
            b"\x00",
            b"\xc1" * 16,
            b"\x90",
            b"\x91\x90",
            b"\xdd" + struct.pack(">I", 2**32 - 1),
            b"\x91" * 4000,
            _ENCODER.encode({"packet": 1}),
            bytes(4096),
            *(packet[:i] for i in range(1, len(packet), 7)),
            packet + b"\x00",
        ]
        for i, payload in enumerate(bad):
            where = f"bytes {i}: {payload[:8].hex()}"
            _refused(await burst.exchange(payload, where), pools, where)
            await _computes(burst, pools, datums, f"after {where}")


async def _result_queue_too_small(subject: VtsSubject) -> None:
    """A result that does not fit its queue is answered by a short failure, and the burst continues."""
    model = split_model(40)
    async with (
        subject.prepared(model) as prepared,
        packet_burst(subject, prepared, result_bytes=SMALL_QUEUE_BYTES) as burst,
    ):
        with RequestPools(model, [np.zeros((40, 1, 1, 1), np.float32)]) as pools:
            for _ in range(3):
                subject.step()
                call = burst.controller.execute_synchronously(pools.request, (0, 1))
                await expect_refusal(call, allowed=(ErrorStatus.GENERAL_FAILURE,))


async def _memories_are_freed(subject: VtsSubject) -> None:
    """Slots are freed once, twice and unknown, without harm; a freed one is asked for again."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        burst = await prepared.configure_execution_burst()
        async with closing(burst):
            with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
                for identifiers in ((0, 1), (0, 1), (-1, -1), (7, -1)):
                    subject.step()
                    pools.reset()
                    await burst.execute_synchronously(pools.request, identifiers)
                    if (pools.output() != 1).any():
                        fail("0 + 1 = 1", pools.output(), f"identifiers {identifiers}")
                for identifier in (0, 0, 1, 99, -1):
                    subject.step()
                    await burst.release_memory_resource(identifier)
                await expect_refusal(burst.release_memory_resource(-2), "releasing identifier -2")
                with RequestPools(model, [np.ones((1, 4), np.float32)]) as others:
                    await burst.execute_synchronously(others.request, (10, 11))
                    if (others.output() != 2).any():
                        fail("1 + 1 = 2", others.output(), "other memories")


async def _identifiers_are_checked(subject: VtsSubject) -> None:
    """One identifier per pool, none below -1."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        burst = await prepared.configure_execution_burst()
        async with closing(burst):
            with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
                for identifiers in ((), (0,), (0, 1, 2), (0, -2), (-(2**31), 0)):
                    subject.step()
                    call = burst.execute_synchronously(pools.request, identifiers)
                    await expect_refusal(call, f"identifiers {identifiers}")


async def _one_in_flight(subject: VtsSubject) -> None:
    """A second execution while one is in flight is refused, and the first is not disturbed."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        burst = await prepared.configure_execution_burst()
        async with closing(burst):
            with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:

                async def first() -> None:
                    await burst.execute_synchronously(pools.request, (0, 1))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(first)
                    await anyio.lowlevel.checkpoint()  # The first is in flight: it ran up to its first wait.
                    subject.step()
                    await expect_refusal(burst.execute_synchronously(pools.request, (0, 1)))
                if (pools.output() != 1).any():
                    fail("0 + 1 = 1", pools.output())


async def _bursts_are_apart(subject: VtsSubject) -> None:
    """Two bursts of one prepared model know nothing of each other's memories, and closing one leaves the other."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        first, second = [await prepared.configure_execution_burst() for _ in range(2)]
        async with closing(second):
            with (
                RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools,
                RequestPools(model, [np.ones((1, 4), np.float32)]) as others,
            ):
                async with closing(first):
                    for burst, arguments in ((first, pools), (second, others), (first, pools)):
                        subject.step()
                        await burst.execute_synchronously(arguments.request, (0, 1))
                await first.aclose()
                await second.execute_synchronously(others.request, (0, 1))
                if (pools.output() != 1).any() or (others.output() != 2).any():
                    fail("1 and 2", f"{pools.output()} and {others.output()}")


async def _burst_ends_with_its_model(subject: VtsSubject) -> None:
    """A burst keeps its model while only the burst is referenced; one whose model was closed answers, whatever it answers."""
    model = add_model()
    await subject.check_support(model)
    burst = await (await subject.device.prepare_model(model)).configure_execution_burst()
    async with closing(burst):
        gc.collect()
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            subject.step()
            await burst.execute_synchronously(pools.request, (0, 1))
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())
    prepared = await subject.device.prepare_model(model)
    burst = await prepared.configure_execution_burst()
    async with closing(burst):
        await prepared.aclose()
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            subject.step()
            await status_of_call(burst.execute_synchronously(pools.request, (0, 1)))


CASES = (
    *(Case(f"burst_packets/{name}", partial(_mutated_packets, name=name)) for name in MUTATIONS),
    Case("burst_packets/no_packet", _no_packets),
    Case("burst_packets/result_queue_too_small", _result_queue_too_small),
    Case("burst/memories_are_freed", _memories_are_freed),
    Case("burst/identifiers_are_checked", _identifiers_are_checked),
    Case("burst/one_in_flight", _one_in_flight),
    Case("burst/bursts_are_apart", _bursts_are_apart),
    Case("burst/ends_with_its_model", _burst_ends_with_its_model),
)
