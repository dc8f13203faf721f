"""Messages that are too large for a datagram: a memory of their own, and models in parts.

Owns the datagram that stands for such a message, and its form in its memory: parts, each short to decode, so that
an event loop can decode them one by one and do something else in between; and behind them, as they are, the bytes of the model's
constants, which are read straight into the object that keeps them.

Invariants:
1. Nothing is read before the kind and the sizes have been checked, and nothing is read twice.
2. A part takes no more than some milliseconds to decode, whatever it holds; the contents of all of them are bounded.

In a thread instead, the decoder would hold the interpreter's lock for as long as it takes: seconds for tens of millions of
elements.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence, Set
from typing import TypeVar

import msgspec
import numpy as np

from aionn.errors import GeneralFailure, InvalidArgument, InvalidModel
from aionn.hal import Memory, Model, Operand, Operation, Subgraph
from aionn.service.wire.sizes import WrongTypes, array_length, check_large, kind_of, read_envelope, shortened

__all__ = [
    "MESSAGE_BYTES_MAX",
    "InMemory",
    "Parts",
    "check_answered",
    "in_memory",
    "in_turns",
    "is_large_model",
    "read_parts",
    "without_contents",
    "written",
]

MESSAGE_BYTES_MAX = 256 << 20
"""Largest message: a model without its constants is small; one whose constants are all inline may be this large."""

PART_ELEMENTS_MAX = 64
"""Operands or operations in a part: a fifth of a millisecond to decode."""

PART_BYTES_MAX = 64 << 10
"""Largest part of several elements: 2 milliseconds where each byte is an element of its own."""

HEAD_BYTES_MAX = 32 << 10
"""Largest message without the subgraphs of its model: 240 pools, and the names of extensions."""

ELEMENT_BYTES_MAX = 4 << 20
"""Largest operand or operation: one scale for each of 400 thousand channels."""

MODEL_ELEMENTS_MAX = 1 << 18
"""Operands and operations of a model with all its subgraphs: some 50 MB of objects."""

SUBGRAPHS_MAX = 1 << 12
"""Subgraphs of a model; each loop or branch refers to two."""

VALUES_INLINE_BYTES_MAX = 2 << 10
"""Bytes of a model's constants that a datagram may carry; constants of more than 128 bytes are in a pool as a rule."""

ELEMENTS_INLINE_MAX = 96
"""Operands and operations of a model that may fit into a datagram; for more it is not tried."""

_LENGTH_BYTES = 4
_HEAD, _OPERANDS, _OPERATIONS, _INDEXES = range(4)
_EMPTY = Subgraph((), (), (), ())
_R = TypeVar("_R")
_T = TypeVar("_T")


class InMemory(msgspec.Struct, frozen=True, tag="_InMemory", array_like=True):
    """Stands for a message in the memory whose descriptor came first.

    Attributes:
        kind: The name of the message's kind.
        is_call: Whether it is a call; a reply otherwise.
        id: Its number.
        size_bytes: Size of its parts.
        values_bytes: Size of the constants of its model, behind them.
    """

    kind: str
    is_call: bool
    id: int
    size_bytes: int = 0
    values_bytes: int = 0

    @property
    def heading(self) -> InMemory:
        """The fields of the message itself."""
        return InMemory(self.kind, self.is_call, self.id)

    @property
    def total_bytes(self) -> int:
        return self.size_bytes + self.values_bytes


class _Contents(msgspec.Struct):
    main: msgspec.Raw
    referenced: msgspec.Raw


class _ModelBody(msgspec.Struct):
    model: _Contents


class _ModelMessage(msgspec.Struct):
    body: _ModelBody


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(InMemory)
_CONTENTS_DECODER = msgspec.msgpack.Decoder(_ModelMessage)
_EMPTY_BYTES, _NO_LIST_BYTES = _ENCODER.encode(_EMPTY), _ENCODER.encode(())
_OPERANDS_DECODER = msgspec.msgpack.Decoder(tuple[Operand, ...])
_OPERATIONS_DECODER = msgspec.msgpack.Decoder(tuple[Operation, ...])
_INDEXES_DECODER = msgspec.msgpack.Decoder(tuple[tuple[int, ...], tuple[int, ...]])


def in_memory(payload: bytes) -> InMemory | None:
    """A datagram's description of the message that it stands for; None for one that is the message itself.

    Raises:
        InvalidArgument: The datagram is not a message, or the message is larger than its kind may be.
    """
    if payload[1:11] != b"\xa9_InMemory" or not 0x90 <= payload[0] <= 0x9F:
        return None
    try:
        stands_for = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidArgument(f"message: {e}") from e
    check_large(stands_for.kind, stands_for.size_bytes)
    if stands_for.values_bytes < 0 or stands_for.total_bytes > MESSAGE_BYTES_MAX:
        raise InvalidArgument(
            f"message: expected a memory of at most {MESSAGE_BYTES_MAX} bytes, got {stands_for.total_bytes}"
        )
    return stands_for


async def in_turns(steps: Generator[None, None, _R], next_turn: Callable[[], Awaitable[object]]) -> _R:
    """The result of work in short steps, such as ``decode_parts``, with other tasks of the event loop in between."""
    while True:
        try:
            next(steps)
        except StopIteration as e:
            result: _R = e.value
            return result
        await next_turn()


def check_answered(payload: bytes, stands_for: InMemory | None, answered: Set[str]) -> None:
    """Refuses a call that this end does not answer, before what came with it costs anything.

    Raises:
        GeneralFailure: It is such a call; this is its answer.
        InvalidArgument: It is not a message.
    """
    if stands_for is None:
        envelope, kind = read_envelope(payload), kind_of(payload)
        is_call = envelope is not None and envelope[0]
    else:
        is_call, kind = stands_for.is_call, stands_for.kind
    if is_call and kind not in answered:
        raise GeneralFailure(f"message: this end answers no {shortened(kind)}")


def is_large_model(model: Model) -> bool:
    """Whether a model has to travel in parts, as far as that can be known without encoding it."""
    try:
        return (
            len(model.operand_values) > VALUES_INLINE_BYTES_MAX
            or len(model.main.operands) + len(model.main.operations) > ELEMENTS_INLINE_MAX
        )
    except (AttributeError, TypeError):
        return False  # Its fields are not those of a model: encoding it names them.


def without_contents(model: Model) -> Model:
    """The model as the first part has it: what is left out follows."""
    return msgspec.structs.replace(model, main=_EMPTY, referenced=(), operand_values=b"")


def _model_parts(model: Model) -> Iterator[bytes]:
    """The subgraphs of a model, in parts.

    Raises:
        InvalidArgument: The model has too many operands and operations, or one that is too large.
    """
    subgraphs = (model.main, *model.referenced)
    count = sum(len(s.operands) + len(s.operations) for s in subgraphs)
    if count > MODEL_ELEMENTS_MAX or len(subgraphs) > SUBGRAPHS_MAX:
        raise InvalidArgument(
            f"model: expected at most {MODEL_ELEMENTS_MAX} operands and operations in {SUBGRAPHS_MAX} subgraphs,"
            f" got {count} in {len(subgraphs)}"
        )
    for subgraph in subgraphs:
        yield from _chunks(_OPERANDS, subgraph.operands)
        yield from _chunks(_OPERATIONS, subgraph.operations)
        indexes = _encoded((subgraph.input_indexes, subgraph.output_indexes))
        if len(indexes) > PART_BYTES_MAX:
            raise InvalidArgument("model: its lists of inputs and outputs are too long to be sent")
        yield _part(_INDEXES, indexes)


def _encoded(element: object) -> bytes:
    try:
        return _ENCODER.encode(element)
    except OverflowError as e:
        raise InvalidModel(f"model: expected whole numbers of 64 bits: {e}") from e


def _part(which: int, encoded: bytes) -> bytes:
    return len(encoded).to_bytes(_LENGTH_BYTES, "big") + bytes((which,)) + encoded


def _chunks(which: int, elements: Iterable[Operand | Operation]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size_bytes = 0

    def part() -> bytes:
        return _part(which, b"\xdd" + len(chunk).to_bytes(4, "big") + b"".join(chunk))

    for element in elements:
        encoded = _encoded(element)
        if len(encoded) > ELEMENT_BYTES_MAX - 5:
            raise InvalidArgument(
                f"model: expected operands of at most {ELEMENT_BYTES_MAX} bytes, got {len(encoded)}"
            )
        if chunk and (len(chunk) == PART_ELEMENTS_MAX or size_bytes + len(encoded) > PART_BYTES_MAX - 5):
            yield part()
            chunk, size_bytes = [], 0
        chunk.append(encoded)
        size_bytes += len(encoded)
    if chunk:
        yield part()


def written(heading: InMemory, head: bytes, model: Model | None = None) -> tuple[bytes, Memory]:
    """A message in a memory of its own, and the datagram that stands for it. Takes as long as it is large.

    Args:
        heading: Its kind; see ``InMemory.heading``.
        head: The message, without the contents of the model where there is one.
        model: The model that it speaks of.

    Raises:
        InvalidArgument: It is too large for its kind.
        ResourceExhausted: No memory or descriptor is left.
    """
    if model is not None and len(head) > HEAD_BYTES_MAX:
        raise InvalidArgument(
            f"message {heading.kind}: expected at most {HEAD_BYTES_MAX} bytes besides the model's subgraphs, got {len(head)}"
        )
    values = b"" if model is None else model.operand_values
    structure = b"".join((_part(_HEAD, head), *(() if model is None else _model_parts(model))))
    check_large(heading.kind, len(structure))
    stands_for = msgspec.structs.replace(heading, size_bytes=len(structure), values_bytes=len(values))
    if stands_for.total_bytes > MESSAGE_BYTES_MAX:
        raise InvalidArgument(
            f"message: expected at most {MESSAGE_BYTES_MAX} bytes, got {stands_for.total_bytes}"
        )
    memory = Memory.create(stands_for.total_bytes, name="aionn-message")
    memory.array[: len(structure)] = np.frombuffer(structure, dtype=np.uint8)
    memory.array[len(structure) :] = np.frombuffer(values, dtype=np.uint8)
    return _ENCODER.encode(stands_for), memory


def read_parts(stands_for: InMemory, fds: Sequence[int]) -> tuple[bytes, bytes]:
    """The parts and the bytes of constants of a message: private copies. Takes as long as they are large, without the interpreter's
    lock.

    Raises:
        InvalidArgument: The memory did not come along, is not sealed, or is too small.
        GeneralFailure: It cannot be read.
    """
    if not fds:
        raise InvalidArgument("message: its memory did not come with it")
    fd = fds[0]
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # Not a memory but a file, whose reading may never end.
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("message: its memory is not sealed against shrinking")
    try:
        if os.fstat(fd).st_size < stands_for.total_bytes:
            raise InvalidArgument(f"message: its memory has fewer than {stands_for.total_bytes} bytes")
        structure = os.pread(fd, stands_for.size_bytes, 0)
        values = os.pread(fd, stands_for.values_bytes, stands_for.size_bytes)
    except (OSError, MemoryError) as e:
        raise GeneralFailure(f"message: its memory cannot be read: {e}") from e
    if len(structure) + len(values) != stands_for.total_bytes:
        raise GeneralFailure("message: its memory cannot be read to its end")
    return structure, values


class Parts:
    """The parts of a message, one after the other.

    Args:
        structure: All of them.
    """

    def __init__(self, structure: bytes) -> None:
        self._structure = structure
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._structure)

    def _take(self) -> tuple[int, memoryview]:
        begin = self._at + _LENGTH_BYTES + 1
        length = int.from_bytes(self._structure[self._at : begin - 1], "big")
        if begin + length > len(self._structure):
            raise InvalidArgument("message: a part ends behind its memory")
        self._at = begin + length
        return self._structure[begin - 1], memoryview(self._structure)[begin : self._at]

    def head(self, *, has_model: bool) -> bytes:
        """The message itself.

        Raises:
            InvalidArgument: It is missing; or it belongs to a model, and is too large or has the model's contents in it.
        """
        which, encoded = self._take()
        if which != _HEAD:
            raise InvalidArgument("message: its first part is not a message")
        if has_model:
            if len(encoded) > HEAD_BYTES_MAX:
                raise InvalidArgument(
                    f"message: expected at most {HEAD_BYTES_MAX} bytes besides the model's subgraphs, got {len(encoded)}"
                )
            model = _decoded(_CONTENTS_DECODER, encoded).body.model
            if bytes(model.main) != _EMPTY_BYTES or bytes(model.referenced) != _NO_LIST_BYTES:
                raise InvalidArgument("message: expected the model's subgraphs in parts")
        return bytes(encoded)

    def model(self, head: Model, values: bytes) -> Generator[None, None, Model]:
        """A model from the rest, one part per step.

        Raises:
            InvalidArgument: They are not a model, or too large for one.
        """
        subgraphs: list[Subgraph] = []
        operands: list[Operand] = []
        operations: list[Operation] = []
        count = 0
        while not self.is_over:
            which, encoded = self._take()
            if which in (_OPERANDS, _OPERATIONS):
                count += _checked_count(encoded)
                if count > MODEL_ELEMENTS_MAX:
                    raise InvalidArgument(
                        f"model: expected at most {MODEL_ELEMENTS_MAX} operands and operations"
                    )
                if which == _OPERANDS:
                    more_operands = _decoded(_OPERANDS_DECODER, encoded)
                    operands += more_operands
                else:
                    more_operations = _decoded(_OPERATIONS_DECODER, encoded)
                    operations += more_operations
            elif which == _INDEXES and len(encoded) <= PART_BYTES_MAX and len(subgraphs) < SUBGRAPHS_MAX:
                inputs, outputs = _decoded(_INDEXES_DECODER, encoded)
                subgraphs.append(Subgraph(tuple(operands), tuple(operations), inputs, outputs))
                operands, operations = [], []
            else:
                raise InvalidArgument("model: a part of it is of no known kind, or too large")
            yield
        if not subgraphs or operands or operations:
            raise InvalidArgument("model: a part of it is missing")
        return msgspec.structs.replace(
            head, main=subgraphs[0], referenced=tuple(subgraphs[1:]), operand_values=values
        )


def _checked_count(encoded: memoryview) -> int:
    """Number of elements of a part, before they are decoded."""
    count = array_length(bytes(encoded[:5]))
    limit = ELEMENT_BYTES_MAX if count == 1 else PART_BYTES_MAX
    if not 0 < count <= PART_ELEMENTS_MAX or len(encoded) > limit:
        raise InvalidArgument(
            f"model: expected parts of 1 to {PART_ELEMENTS_MAX} elements and {limit} bytes, got {count} in {len(encoded)}"
        )
    return count


def _decoded(decoder: msgspec.msgpack.Decoder[_T], encoded: memoryview) -> _T:
    try:
        return decoder.decode(encoded)
    except msgspec.ValidationError as e:
        raise WrongTypes(f"message: {e}") from e
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as e:
        raise InvalidArgument(f"message: {e}") from e
