"""Burst packets: what goes in comes out, and every mutation of the spec's order is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aionn.burst import packets
from aionn.burst.packets import (
    DATUMS_MAX,
    PACKET_BYTES_MAX,
    BurstRequest,
    BurstResult,
    MalformedPacket,
    decode_request,
    decode_result,
    deserialize_request,
    deserialize_result,
    encode_limits,
    encode_request,
    encode_result,
    failed_result,
    fits_packets,
    serialize_request,
    serialize_result,
    split_limits,
)
from aionn.errors import ErrorStatus
from aionn.hal import NO_TIMING, RANK_MAX, DataLocation, OutputShape, Request, RequestArgument, Timing

REQUEST = Request(
    inputs=(
        RequestArgument(False, DataLocation(0, 0, 24), (2, 3)),
        RequestArgument(True),
        RequestArgument(False, DataLocation(1, 64, 4)),
    ),
    outputs=(
        RequestArgument(False, DataLocation(1, 128, 8), (2,)),
        RequestArgument(False, DataLocation(0, 32, 4)),
    ),
    pools=(),
)
SLOTS = (7, 3)
RESULT = BurstResult(ErrorStatus.NONE, (OutputShape((2, 3)), OutputShape(())), Timing(1_000, 2_000))

REQUEST_KINDS: list[Any] = [
    packets.PacketInformation(10, 1, 1, 1),
    packets.InputOperandInformation(False, DataLocation(0, 0, 4), 0),
    packets.InputOperandDimensionValue(1),
    packets.OutputOperandInformation(False, DataLocation(0, 0, 4), 0),
    packets.OutputOperandDimensionValue(1),
    packets.PoolIdentifier(0),
    packets.MeasureTiming(True),
    packets.ExecutionLimits(1, 2),
]
RESULT_KINDS: list[Any] = [
    packets.ResultPacketInformation(5, 0, 1),
    packets.ResultOperandInformation(True, 0),
    packets.ResultOperandDimensionValue(1),
    packets.ExecutionTiming(NO_TIMING),
]


def test_request_survives_the_wire() -> None:
    got = decode_request(encode_request(REQUEST, SLOTS, measure=True))
    assert got == BurstRequest(REQUEST.inputs, REQUEST.outputs, SLOTS, True)


@pytest.mark.parametrize("wrong", [-1, 2**31])
@pytest.mark.parametrize("place", [0, 1])
def test_one_wrong_slot_among_right_ones_is_refused(wrong: int, place: int) -> None:
    slots = list(SLOTS)
    slots[place] = wrong
    with pytest.raises(MalformedPacket, match="expected slots from 0"):
        decode_request(encode_request(REQUEST, slots, measure=False))


def test_result_survives_the_wire() -> None:
    assert decode_result(encode_result(RESULT)) == RESULT
    failed = failed_result(ErrorStatus.INVALID_ARGUMENT)
    assert decode_result(encode_result(failed)) == failed


@pytest.mark.parametrize("deadline_ns", [None, 0, 2**63 - 1])
@pytest.mark.parametrize("loop_timeout_ns", [None, 0, 1_000])
def test_limits_survive_the_wire_at_the_end_of_a_packet(
    deadline_ns: int | None, loop_timeout_ns: int | None
) -> None:
    head = encode_request(REQUEST, SLOTS, measure=True, with_limits=True)
    packet = head + encode_limits(deadline_ns, loop_timeout_ns)
    expected = BurstRequest(REQUEST.inputs, REQUEST.outputs, SLOTS, True, True, deadline_ns, loop_timeout_ns)
    assert decode_request(packet) == expected
    assert split_limits(packet) == (head, deadline_ns, loop_timeout_ns, None)
    assert split_limits(encode_request(REQUEST, SLOTS, measure=True)) is None


def test_limits_out_of_range_and_packets_cut_before_them_are_refused() -> None:
    head = encode_request(REQUEST, SLOTS, measure=True, with_limits=True)
    for deadline_ns, loop_timeout_ns in ((2**63, None), (None, 2**64 - 2)):
        packet = head + encode_limits(deadline_ns, loop_timeout_ns)
        for read in (decode_request, split_limits):
            with pytest.raises(MalformedPacket, match="63 bits"):
                read(packet)
    with pytest.raises(MalformedPacket):
        decode_request(head)
    for short in (b"", b"\x93\x07"):
        assert split_limits(short) is None


def test_packet_size_counts_the_datums() -> None:
    datums = serialize_request(REQUEST, SLOTS, measure=False)
    # 2 + inputs + outputs + pools + extents
    assert datums[0].packet_size == len(datums) == 2 + 3 + 2 + 2 + 3  # type: ignore[union-attr]


def test_tags_are_the_specs() -> None:
    tags = [datum[0] for datum in msgspec.msgpack.decode(encode_request(REQUEST, SLOTS, measure=True))]
    assert tags == [0, 1, 2, 2, 1, 1, 3, 4, 3, 5, 5, 6]
    assert [d[0] for d in msgspec.msgpack.decode(encode_result(RESULT))] == [0, 1, 2, 2, 1, 3]


@pytest.mark.parametrize("is_request", [True, False], ids=["request", "result"])
def test_every_removal_insertion_and_replacement_is_refused_or_says_the_same_kind(is_request: bool) -> None:
    datums: list[Any] = list(
        serialize_request(REQUEST, SLOTS, measure=True) if is_request else serialize_result(RESULT)
    )
    kinds = REQUEST_KINDS if is_request else RESULT_KINDS
    deserialize: Any = deserialize_request if is_request else deserialize_result
    refused = 0
    for index in range(len(datums)):
        mutations = [datums[:index] + datums[index + 1 :]]
        mutations += [[*datums[:index], kind, *datums[index:]] for kind in kinds]
        mutations += [
            [*datums[:index], kind, *datums[index + 1 :]]
            for kind in kinds
            if type(kind) is not type(datums[index])
        ]
        for mutation in mutations:
            with pytest.raises(MalformedPacket):
                deserialize(mutation)
            refused += 1
    assert refused > 100 if is_request else refused > 40


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\x90",
        b"\x91\x91\x09",
        b"\xc1" * 100,
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgspec.msgpack.encode([[0, 2, 0, 0, 0]]),
        msgspec.msgpack.encode([[0, 2, 2**40, 0, 0], [6, True]]),
        msgspec.msgpack.encode([[0, 3, 0, 0, 1], [5, -1], [6, True]]),
        msgspec.msgpack.encode([[0, 3, 1, 0, 0], [1, False, [0, -1, 4, 0], 0], [6, True]]),
        msgspec.msgpack.encode([[0, 3, 1, 0, 0], [1, False, [0, 0, 4, 0], 2**31], [6, True]]),
    ],
)
def test_bytes_that_are_no_request_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedPacket):
        decode_request(payload)


def test_failed_result_with_shapes_or_timing_is_refused() -> None:
    with_shapes = BurstResult(ErrorStatus.GENERAL_FAILURE, (OutputShape((1,)),), NO_TIMING)
    with_timing = BurstResult(ErrorStatus.GENERAL_FAILURE, (), Timing(1, 2))
    contradiction = BurstResult(ErrorStatus.NONE, (OutputShape((1,), False),), NO_TIMING)
    unknown_status = serialize_result(failed_result(ErrorStatus.GENERAL_FAILURE))
    unknown_status[0] = packets.ResultPacketInformation(2, 77, 0)
    for result in (with_shapes, with_timing, contradiction):
        with pytest.raises(MalformedPacket):
            deserialize_result(serialize_result(result))
    with pytest.raises(MalformedPacket):
        deserialize_result(unknown_status)


def test_extents_of_any_legal_count_and_size_survive_the_wire() -> None:
    for extents in ((), (0,), (2**32 - 1, 0), tuple(range(RANK_MAX))):
        argument = RequestArgument(False, DataLocation(0, 0, 4), extents)
        request = Request((argument,), (argument,), ())
        got = decode_request(encode_request(request, (0,), measure=False))
        assert (got.inputs, got.outputs) == ((argument,), (argument,))
        result = BurstResult(ErrorStatus.NONE, (OutputShape(extents),), NO_TIMING)
        assert decode_result(encode_result(result)) == result
    for extents in ((2**32,), (-1,), tuple(range(RANK_MAX + 1))):
        argument = RequestArgument(False, DataLocation(0, 0, 4), extents)
        with pytest.raises(MalformedPacket):
            decode_request(encode_request(Request((argument,), (), ()), (0,), measure=False))


def test_one_insufficient_output_of_two_is_a_legal_result() -> None:
    shapes = (OutputShape((2,)), OutputShape((3,), False))
    for both in (shapes, shapes[::-1]):
        result = BurstResult(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, both, NO_TIMING)
        assert decode_result(encode_result(result)) == result
        with pytest.raises(MalformedPacket, match="contradicts the output shapes"):
            deserialize_result(serialize_result(BurstResult(ErrorStatus.NONE, both, NO_TIMING)))


def test_packet_that_ends_too_soon_is_refused_though_it_counts_its_datums_right() -> None:
    for datums, deserialize in (
        (serialize_request(REQUEST, SLOTS, measure=True), deserialize_request),
        (serialize_result(RESULT), deserialize_result),
    ):
        for count in range(1, len(datums)):
            cut: list[Any] = datums[:count]
            cut[0] = msgspec.structs.replace(cut[0], packet_size=count)
            with pytest.raises(MalformedPacket):
                deserialize(cut)


@pytest.mark.parametrize("count", [DATUMS_MAX - 1, DATUMS_MAX, DATUMS_MAX + 1, 20_000])
def test_packet_of_too_many_datums_is_refused_before_it_is_decoded(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_count = count - 2
    datums = [
        packets.PacketInformation(count, 0, 0, pool_count),
        *(packets.PoolIdentifier(0) for _ in range(pool_count)),
        packets.MeasureTiming(False),
    ]
    packet = msgspec.msgpack.encode(datums)
    assert len(packet) < PACKET_BYTES_MAX
    if count <= DATUMS_MAX:
        assert len(decode_request(packet).slots) == pool_count
        return
    monkeypatch.setattr(packets, "_REQUEST_DECODER", None)
    for payload in (packet, b"\xdd" + count.to_bytes(4, "big") + packet[3:]):
        with pytest.raises(MalformedPacket, match=f"at most {DATUMS_MAX} datums, got {count}"):
            decode_request(payload)


def test_packet_that_no_queue_of_a_client_of_ours_holds_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(MalformedPacket, match=f"at most {PACKET_BYTES_MAX} bytes"):
        decode_request(bytes(PACKET_BYTES_MAX + 1))


@pytest.mark.parametrize("rank", [0, 3])
def test_packets_fit_up_to_the_datums_that_are_decoded(rank: int) -> None:
    argument = RequestArgument(False, DataLocation(0, 0, 4), (1,) * rank)
    count = (DATUMS_MAX - 3) // (1 + rank)
    for number in (count, count + 1):
        request = Request((argument,) * number, (), ())
        packet = encode_request(request, (), measure=False, with_limits=True) + encode_limits(None, None)
        assert fits_packets(request) is (number == count)
        if number > count:
            with pytest.raises(MalformedPacket, match="at most"):
                decode_request(packet)
        elif len(packet) <= PACKET_BYTES_MAX:
            assert len(decode_request(packet).inputs) == number


def test_packets_fit_whose_result_is_decoded() -> None:
    for number, rank in ((800, 4), (4000, 0), (500, 9)):
        output = RequestArgument(False, DataLocation(0, 0, 4), (1,) * rank)
        assert fits_packets(Request((), (output,) * number, ())) is (rank == 4)
