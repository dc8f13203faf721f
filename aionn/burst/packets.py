"""Burst packets: requests and results as lists of datums, and back.

Owns the datums (with the spec's tags), their order, their MessagePack form and all checks of what a peer sent. No I/O.

Invariants:
1. All bytes read here are a private copy, not shared memory.
2. A packet is either wholly well-formed or rejected with ``MalformedPacket``; a count in it is compared with the number of datums
   before anything is allocated for it.
3. A result that fails carries no shapes and no timing.

Source: ``FmqRequestDatum``, ``FmqResultDatum`` of the NN HAL 1.2 and the order of the datums in its burst protocol. One
packet is one MessagePack array of datums, published by one commit; the spec's unions, with their padding to clear, do not
arise. The spec's packets have no limits of time, the bursts of its later AIDL form do: a request with limits has one datum more,
``ExecutionLimits``, of fixed length, so that a stream's packets differ in their last bytes alone. A frame of a reservation has
``ReservedLimits`` in its place, which are five bytes longer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from aionn.errors import Error, ErrorStatus, InvalidArgument, traceback_of, words_of
from aionn.hal import (
    NO_TIMING,
    RANK_MAX,
    TIME_MAX_NS,
    DataLocation,
    ExecutionResult,
    OutputShape,
    Request,
    RequestArgument,
    Timing,
)
from aionn.hal.callers import FrameReport

__all__ = [
    "LIMITS_BYTES",
    "PACKET_BYTES_MAX",
    "RESERVATION_MAX",
    "TEXT_CHARACTERS_MAX",
    "BurstRequest",
    "BurstResult",
    "ExecutionLimits",
    "FailureTexts",
    "FmqRequestDatum",
    "FmqResultDatum",
    "MalformedPacket",
    "decode_request",
    "decode_result",
    "deserialize_request",
    "deserialize_result",
    "encode_limits",
    "encode_request",
    "encode_reserved_limits",
    "encode_result",
    "failed_result",
    "fits_packets",
    "limits_at",
    "plain_limits",
    "serialize_request",
    "serialize_result",
    "split_limits",
]

PACKET_BYTES_MAX = 1 << 16
"""Largest packet that is looked at, which is all that the queues of our clients hold: a request of 1,024 datums, the spec's users'
queue length, takes some 20 KiB."""

DATUMS_MAX = 4096
"""Most datums of a packet: four times the spec's users' queue length. Decoding them holds the interpreter's lock for some 2 ms."""

OUTPUT_RANK = 4
"""The rank that is assumed for an output whose request does not give it: images have this one."""

TEXT_CHARACTERS_MAX = 1000
"""Longest message of an error in a result: with a traceback it fits every queue of a burst several times."""

_UINT32_MAX = 2**32 - 1
_D = TypeVar("_D")
_K = TypeVar("_K")


class MalformedPacket(InvalidArgument):
    """The peer sent bytes that are not a packet."""


class PacketInformation(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First datum of a request. ``packet_size`` counts datums, itself included."""

    packet_size: int
    input_operand_count: int
    output_operand_count: int
    pool_count: int


class InputOperandInformation(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One input; its dimension values follow."""

    has_no_value: bool
    location: DataLocation
    dimension_count: int


class InputOperandDimensionValue(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One extent of the input before it."""

    value: int


class OutputOperandInformation(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """One output; its dimension values follow."""

    has_no_value: bool
    location: DataLocation
    dimension_count: int


class OutputOperandDimensionValue(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One extent of the output before it."""

    value: int


class PoolIdentifier(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The memory slot of one pool."""

    slot: int


class MeasureTiming(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Last datum of a request without limits."""

    measure: bool


class ExecutionLimits(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Last datum of a request with limits: its deadline, and what each WHILE may take; ``NO_LIMIT`` for none."""

    deadline_ns: int
    loop_timeout_ns: int


class ReservedLimits(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Last datum of a request for a frame of a reservation: as ``ExecutionLimits``, with the number of the reservation."""

    deadline_ns: int
    loop_timeout_ns: int
    reservation: int


NO_LIMIT = 2**64 - 1
"""The spec's word for no deadline."""

RESERVATION_MAX = 2**32 - 1
"""Largest number of a reservation in a packet: more than a connection can ask for in a lifetime of the machine."""

_LIMITS = struct.Struct(">2sBQBQ")
"""``ExecutionLimits`` in MessagePack, with both numbers at their longest."""

_LIMITS_START = b"\x93\x07"
_RESERVED = struct.Struct(">2sBQBQBI")
"""The same of ``ReservedLimits``."""

_RESERVED_START = b"\x94\x08"
_UINT64 = 0xCF
_UINT32 = 0xCE

LIMITS_BYTES = _LIMITS.size
"""Length of the limits at the end of a packet."""

FmqRequestDatum = (
    PacketInformation
    | InputOperandInformation
    | InputOperandDimensionValue
    | OutputOperandInformation
    | OutputOperandDimensionValue
    | PoolIdentifier
    | MeasureTiming
    | ExecutionLimits
    | ReservedLimits
)


class ResultPacketInformation(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First datum of a result."""

    packet_size: int
    error_status: int
    operand_count: int


class ResultOperandInformation(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One output; its dimension values follow."""

    is_sufficient: bool
    dimension_count: int


class ResultOperandDimensionValue(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One extent of the output before it."""

    value: int


class ExecutionTiming(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Last datum of a result that has no texts."""

    timing: Timing


class FailureTexts(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Last datum of a failed result, which the HAL's packets do not have: the error's message, and the driver's traceback if there
    is one.
    """

    message: str
    traceback: str = ""


FmqResultDatum = (
    ResultPacketInformation
    | ResultOperandInformation
    | ResultOperandDimensionValue
    | ExecutionTiming
    | FailureTexts
    | FrameReport
)


class BurstRequest(NamedTuple):
    """The content of a request packet.

    Attributes:
        inputs: One per input of the model.
        outputs: One per output of the model.
        slots: The memory slot of each pool.
        measure: Whether timings are wanted.
        has_limits: Whether it came with limits.
        deadline_ns: Absolute; None means no deadline.
        loop_timeout_ns: For every WHILE; None for the default.
        reservation: The number of the reservation that it is a frame of; None for best effort.
    """

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int, ...]
    measure: bool
    has_limits: bool = False
    deadline_ns: int | None = None
    loop_timeout_ns: int | None = None
    reservation: int | None = None


class BurstResult(NamedTuple):
    """The content of a result packet; shapes and timing are empty unless ``status`` allows them, and so are ``texts``. A frame of a
    reservation has a ``report``."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing
    texts: FailureTexts | None = None
    report: FrameReport | None = None


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST_DECODER = msgspec.msgpack.Decoder(list[FmqRequestDatum])
_RESULT_DECODER = msgspec.msgpack.Decoder(list[FmqResultDatum])


def serialize_request(request: Request, slots: Sequence[int], *, measure: bool) -> list[FmqRequestDatum]:
    """A request without limits as datums; ``slots`` has one memory slot per pool."""
    datums: list[FmqRequestDatum] = []
    for argument in request.inputs:
        dimensions = argument.dimensions
        datums.append(InputOperandInformation(argument.has_no_value, argument.location, len(dimensions)))
        datums.extend(InputOperandDimensionValue(extent) for extent in dimensions)
    for argument in request.outputs:
        dimensions = argument.dimensions
        datums.append(OutputOperandInformation(argument.has_no_value, argument.location, len(dimensions)))
        datums.extend(OutputOperandDimensionValue(extent) for extent in dimensions)
    datums.extend(PoolIdentifier(slot) for slot in slots)
    datums.append(MeasureTiming(measure))
    information = PacketInformation(len(datums) + 1, len(request.inputs), len(request.outputs), len(slots))
    return [information, *datums]


def deserialize_request(datums: Sequence[FmqRequestDatum]) -> BurstRequest:
    """A request from datums.

    Raises:
        MalformedPacket: A datum is missing, too many, of the wrong kind or out of range.
    """
    reader = _Reader(datums)
    information = reader.next(PacketInformation)
    reader.check_size(information.packet_size)
    reader.check_count("inputs", information.input_operand_count)
    reader.check_count("outputs", information.output_operand_count)
    reader.check_count("pools", information.pool_count)
    inputs = tuple(
        reader.argument(InputOperandInformation, InputOperandDimensionValue)
        for _ in range(information.input_operand_count)
    )
    outputs = tuple(
        reader.argument(OutputOperandInformation, OutputOperandDimensionValue)
        for _ in range(information.output_operand_count)
    )
    slots = tuple(reader.next(PoolIdentifier).slot for _ in range(information.pool_count))
    if any(not 0 <= slot < 2**31 for slot in slots):
        raise MalformedPacket(f"burst request: expected slots from 0 to 2**31 - 1, got {list(slots)}")
    measure = reader.next(MeasureTiming).measure
    if reader.is_at_end:
        return BurstRequest(inputs, outputs, slots, measure)
    reservation: int | None = None
    limits: ExecutionLimits | ReservedLimits
    if reader.is_at(ReservedLimits):
        limits = reader.next(ReservedLimits)
        reservation = limits.reservation
        if not 0 <= reservation <= RESERVATION_MAX:
            raise MalformedPacket(f"burst request: expected a reservation of 32 bits, got {reservation}")
    else:
        limits = reader.next(ExecutionLimits)
    reader.end()
    times = _limit(limits.deadline_ns), _limit(limits.loop_timeout_ns)
    return BurstRequest(inputs, outputs, slots, measure, True, *times, reservation)


def _limit(value_ns: int) -> int | None:
    if value_ns == NO_LIMIT:
        return None
    if not 0 <= value_ns <= TIME_MAX_NS:
        raise MalformedPacket(f"burst request: expected a time of 63 bits, got {value_ns} ns")
    return value_ns


def serialize_result(result: BurstResult) -> list[FmqResultDatum]:
    """A result as datums."""
    datums: list[FmqResultDatum] = []
    for shape in result.output_shapes:
        datums.append(ResultOperandInformation(shape.is_sufficient, len(shape.dimensions)))
        datums.extend(ResultOperandDimensionValue(extent) for extent in shape.dimensions)
    datums.append(ExecutionTiming(result.timing))
    datums.extend(datum for datum in (result.texts, result.report) if datum is not None)
    information = ResultPacketInformation(len(datums) + 1, int(result.status), len(result.output_shapes))
    return [information, *datums]


def deserialize_result(datums: Sequence[FmqResultDatum]) -> BurstResult:
    """A result from datums.

    Raises:
        MalformedPacket: A datum is missing, too many, of the wrong kind or out of range, or shapes or timing are present although
            the status forbids them.
    """
    reader = _Reader(datums)
    information = reader.next(ResultPacketInformation)
    reader.check_size(information.packet_size)
    reader.check_count("outputs", information.operand_count)
    try:
        status = ErrorStatus(information.error_status)
    except ValueError as e:
        raise MalformedPacket(f"burst result: {e}") from e
    shapes = []
    for _ in range(information.operand_count):
        operand = reader.next(ResultOperandInformation)
        dimensions = reader.dimensions(ResultOperandDimensionValue, operand.dimension_count)
        shapes.append(OutputShape(dimensions, operand.is_sufficient))
    timing = reader.next(ExecutionTiming).timing
    texts = report = None
    if reader.is_at(FailureTexts) and status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        texts = reader.next(FailureTexts)
    if reader.is_at(FrameReport):
        report = reader.next(FrameReport)
    reader.end()
    if status != ErrorStatus.NONE and timing != NO_TIMING:
        raise MalformedPacket(f"burst result: expected no timing with status {status.name}, got {timing}")
    if shapes and status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        raise MalformedPacket(
            f"burst result: expected no shapes with status {status.name}, got {len(shapes)}"
        )
    if (status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE) != any(not s.is_sufficient for s in shapes):
        raise MalformedPacket(f"burst result: status {status.name} contradicts the output shapes")
    return BurstResult(status, tuple(shapes), timing, texts, report)


def fits_packets(request: Request) -> bool:
    """Whether the datums of a request with limits, and those of its result, are no more than a packet may have."""
    arguments = (*request.inputs, *request.outputs)
    datums = 3 + len(arguments) + sum(len(argument.dimensions) for argument in arguments) + len(request.pools)
    result_datums = 3 + sum(1 + (len(output.dimensions) or OUTPUT_RANK) for output in request.outputs)
    return max(datums, result_datums) <= DATUMS_MAX


def encode_request(
    request: Request, slots: Sequence[int], *, measure: bool, with_limits: bool = False
) -> bytes:
    """A request packet's bytes; with limits those before the limits, which ``encode_limits`` gives."""
    datums = serialize_request(request, slots, measure=measure)
    if not with_limits:
        return _ENCODER.encode(datums)
    first = datums[0]
    assert isinstance(first, PacketInformation), "the first datum of every packet"
    datums[0] = msgspec.structs.replace(first, packet_size=first.packet_size + 1)
    return _ENCODER.encode([*datums, ExecutionLimits(NO_LIMIT, NO_LIMIT)])[:-LIMITS_BYTES]


def encode_limits(deadline_ns: int | None, loop_timeout_ns: int | None) -> bytes:
    """The end of a request packet with limits."""
    return _LIMITS.pack(
        _LIMITS_START,
        _UINT64,
        NO_LIMIT if deadline_ns is None else deadline_ns,
        _UINT64,
        NO_LIMIT if loop_timeout_ns is None else loop_timeout_ns,
    )


def encode_reserved_limits(deadline_ns: int | None, loop_timeout_ns: int | None, reservation: int) -> bytes:
    """The end of the packet of a frame of a reservation. The bytes before it are those of a packet with limits."""
    return _RESERVED.pack(
        _RESERVED_START,
        _UINT64,
        NO_LIMIT if deadline_ns is None else deadline_ns,
        _UINT64,
        NO_LIMIT if loop_timeout_ns is None else loop_timeout_ns,
        _UINT32,
        reservation,
    )


def split_limits(payload: bytes) -> tuple[bytes, int | None, int | None, int | None] | None:
    """A packet's bytes before the limits, deadline, loop time-out, reservation; None if it does not end like limits.

    Any bytes may end like that: the caller must know that the bytes before are those of a packet with limits.

    Raises:
        MalformedPacket: The limits are out of range.
    """
    if len(payload) < LIMITS_BYTES:
        return None
    start, first, deadline_ns, second, loop_timeout_ns = _LIMITS.unpack_from(
        payload, len(payload) - LIMITS_BYTES
    )
    if start == _LIMITS_START and first == _UINT64 and second == _UINT64:
        return payload[:-LIMITS_BYTES], _limit(deadline_ns), _limit(loop_timeout_ns), None
    if len(payload) < _RESERVED.size:
        return None
    start, first, deadline_ns, second, loop_timeout_ns, third, reservation = _RESERVED.unpack_from(
        payload, len(payload) - _RESERVED.size
    )
    if start != _RESERVED_START or first != _UINT64 or second != _UINT64 or third != _UINT32:
        return None
    return payload[: -_RESERVED.size], _limit(deadline_ns), _limit(loop_timeout_ns), reservation


def plain_limits(head: bytes) -> bytes:
    """The packet with limits, of no reservation and without a deadline, that begins with these bytes."""
    return head + encode_limits(None, None)


def limits_at(payload: bytes) -> tuple[int, int]:
    """Where the 8 bytes of the deadline and those of the loop time-out begin in a packet that ``split_limits`` can split."""
    return len(payload) - 17, len(payload) - 8


def encode_result(result: BurstResult) -> bytes:
    """A result packet's bytes."""
    return _ENCODER.encode(serialize_result(result))


def decode_request(payload: bytes) -> BurstRequest:
    """A request from a packet's bytes.

    Raises:
        MalformedPacket: The bytes are not a request packet.
    """
    return deserialize_request(_decode(_REQUEST_DECODER, payload))


def decode_result(payload: bytes) -> BurstResult:
    """A result from a packet's bytes.

    Raises:
        MalformedPacket: The bytes are not a result packet.
    """
    return deserialize_result(_decode(_RESULT_DECODER, payload))


def failed_result(status: ErrorStatus, error: BaseException | None = None) -> BurstResult:
    """A result without shapes and timing, with the texts of an error where there is one."""
    if error is None or status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        return BurstResult(status, (), NO_TIMING)
    message = str(error) if isinstance(error, Error) else words_of(error, "burst")
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")[:TEXT_CHARACTERS_MAX]
    return BurstResult(status, (), NO_TIMING, FailureTexts(message, traceback_of(error)))


def result_of(result: ExecutionResult) -> BurstResult:
    """An execution's result as a packet's content."""
    status = ErrorStatus.NONE if result.output_sufficient_size else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    return BurstResult(status, result.output_shapes, result.timing)


def _decode(decoder: msgspec.msgpack.Decoder[list[_D]], payload: bytes) -> list[_D]:
    if len(payload) > PACKET_BYTES_MAX:
        raise MalformedPacket(f"burst packet: expected at most {PACKET_BYTES_MAX} bytes, got {len(payload)}")
    # The length of an array of more than 15 items is a number of 16 or 32 bits after its first byte.
    if payload[:1] in (b"\xdc", b"\xdd"):
        count = int.from_bytes(payload[1 : 3 if payload[0] == 0xDC else 5], "big")
        if count > DATUMS_MAX:
            raise MalformedPacket(f"burst packet: expected at most {DATUMS_MAX} datums, got {count}")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise MalformedPacket(f"burst packet: {e}") from e


class _Reader(Generic[_D]):
    """A cursor over datums that demands kinds."""

    def __init__(self, datums: Sequence[_D]) -> None:
        self._datums = datums
        self._position = 0

    def next(self, kind: type[_K]) -> _K:
        if self._position >= len(self._datums):
            raise MalformedPacket(f"burst packet: expected {kind.__name__} at {self._position}, got the end")
        datum = self._datums[self._position]
        if not isinstance(datum, kind):
            raise MalformedPacket(
                f"burst packet: expected {kind.__name__} at {self._position}, got {type(datum).__name__}"
            )
        self._position += 1
        return datum

    def is_at(self, kind: type) -> bool:
        """Whether the next datum is of a kind."""
        return self._position < len(self._datums) and isinstance(self._datums[self._position], kind)

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._datums)

    def check_size(self, claimed: int) -> None:
        if claimed != len(self._datums):
            raise MalformedPacket(f"burst packet: claims {claimed} datums, has {len(self._datums)}")

    def check_count(self, what: str, count: int) -> None:
        if not 0 <= count < len(self._datums):
            raise MalformedPacket(f"burst packet: claims {count} {what} in {len(self._datums)} datums")

    def dimensions(
        self,
        kind: type[InputOperandDimensionValue]
        | type[OutputOperandDimensionValue]
        | type[ResultOperandDimensionValue],
        count: int,
    ) -> tuple[int, ...]:
        if not 0 <= count <= RANK_MAX:
            raise MalformedPacket(f"burst packet: expected from 0 to {RANK_MAX} dimensions, got {count}")
        values = tuple(self.next(kind).value for _ in range(count))
        if any(not 0 <= value <= _UINT32_MAX for value in values):
            raise MalformedPacket(f"burst packet: expected extents of 32 bits, got {list(values)}")
        return values

    def argument(
        self,
        kind: type[InputOperandInformation] | type[OutputOperandInformation],
        dimension_kind: type[InputOperandDimensionValue] | type[OutputOperandDimensionValue],
    ) -> RequestArgument:
        information = self.next(kind)
        location = information.location
        numbers = (location.pool_index, location.offset, location.length, location.padding)
        if any(not 0 <= number <= _UINT32_MAX for number in numbers):
            raise MalformedPacket(f"burst packet: expected a location of 32-bit numbers, got {list(numbers)}")
        return RequestArgument(
            information.has_no_value, location, self.dimensions(dimension_kind, information.dimension_count)
        )

    def end(self) -> None:
        if self._position != len(self._datums):
            raise MalformedPacket(f"burst packet: expected {self._position} datums, got {len(self._datums)}")
