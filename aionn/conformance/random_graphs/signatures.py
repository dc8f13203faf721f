"""Descriptions of an operation's random instances: operands, the relations of their extents, their values.

Owns the form (``Signature``, ``Draft``, ``Value``) and the default ranges of values. The operations are in
``signatures_elementwise``, ``signatures_layout`` and ``signatures_layers``.

Invariants:
1. A draft draws only from the generator that it was given: the same seed makes the same operation, whatever else is in the graph.
2. Extents are nodes of a network until the graph is solved; values are made afterwards, when shapes are known.

Source: the operation signatures of the NN HAL's random graph generator.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.conformance.random_graphs.edges import edges_of_floats, edges_of_integers
from aionn.conformance.random_graphs.extents import Extent, Extents
from aionn.hal import OPERAND_TYPE_PROPERTIES, OperandType, OperationType, operand_dtype

__all__ = [
    "BOOL8",
    "F16",
    "F32",
    "FLOATS",
    "I32",
    "Q8",
    "Q8S",
    "Q8SYM",
    "Q16A",
    "Q16S",
    "Array",
    "Draft",
    "Guarantee",
    "Role",
    "Signature",
    "Value",
    "by_level",
]

F32 = OperandType.TENSOR_FLOAT32
F16 = OperandType.TENSOR_FLOAT16
I32 = OperandType.TENSOR_INT32
BOOL8 = OperandType.TENSOR_BOOL8
Q8 = OperandType.TENSOR_QUANT8_ASYMM
Q8S = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
Q8SYM = OperandType.TENSOR_QUANT8_SYMM
Q16A = OperandType.TENSOR_QUANT16_ASYMM
Q16S = OperandType.TENSOR_QUANT16_SYMM
FLOATS = (F32, F16)

ELEMENTS_MAX = 10_000
"""Elements of a tensor, where extents may be large."""

_REAL_MAX = 2.0
"""Real values are uniform in [-2, 2]: their mean is 0 and their mean magnitude 1, so that neither sums nor products run away."""

_INTEGER_MAX = 255

_EDGE_SHARE = 0.5
"""Of the elements of a tensor that has values at the edges of its type."""

Array = npt.NDArray[Any]


class Role(enum.Enum):
    """The use of a value in the model."""

    INPUT = "may be linked, an argument or a constant"
    CONSTANT = "part of the model"
    OMITTED = "left out"
    OUTPUT = "computed"


class Guarantee(enum.Flag):
    """A property of a tensor's real values; an input may require it, an output may provide it."""

    NONE = 0
    NON_NEGATIVE = enum.auto()
    NON_ZERO = enum.auto()


class Value:
    """An operand of a random graph.

    Attributes:
        type: Its operand type.
        dimensions: Its extents; none for a scalar.
        scale: See ``Operand``.
        zero_point: See ``Operand``.
        role: Its use.
        guarantee: The demand of an input, or the promise of an output.
        is_linkable: False where values have a form that no other operation makes, or may overflow.
        is_checked: False where several results are right.
        channel_dim: The axis of per-channel scales, drawn with the values; None for all other types.
        channel_scales: Those scales.
        array: The values, once they are made; None for what is computed or left out.
    """

    __slots__ = (
        "array",
        "channel_dim",
        "channel_scales",
        "dimensions",
        "fill",
        "guarantee",
        "is_checked",
        "is_linkable",
        "role",
        "scale",
        "type",
        "zero_point",
    )

    def __init__(
        self,
        type: OperandType,
        dimensions: Sequence[Extent],
        role: Role,
        *,
        scale: float = 0.0,
        zero_point: int = 0,
        guarantee: Guarantee = Guarantee.NONE,
        is_linkable: bool = True,
        is_checked: bool = True,
        fill: Callable[[], npt.ArrayLike] | None = None,
    ) -> None:
        self.type = type
        self.dimensions = tuple(dimensions)
        self.scale = float(np.float32(scale))
        self.zero_point = zero_point
        self.role = role
        self.guarantee = guarantee
        self.is_linkable = is_linkable
        self.is_checked = is_checked
        self.fill = fill
        self.channel_dim: int | None = None
        self.channel_scales: tuple[float, ...] = ()
        self.array: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents, once the network is solved."""
        return tuple(extent.value for extent in self.dimensions)

    @property
    def has_guaranteed_numbers(self) -> bool:
        """Whether there is a number as it is guaranteed: with the greatest zero point, none is positive."""
        properties = OPERAND_TYPE_PROPERTIES[self.type]
        is_positive = Guarantee.NON_NEGATIVE | Guarantee.NON_ZERO in self.guarantee
        return not (properties.is_quantized and is_positive and self.zero_point == properties.zero_point_max)


class Draft:
    """One operation of a random graph while it is being put together.

    Attributes:
        type: The primary tensor type.
        rank: The primary rank.
        level: The feature level that the signature belongs to.
        rng: The source of all that is random in it.
        inputs: In the contract's order.
        outputs: In the contract's order.
    """

    def __init__(
        self,
        signature: Signature,
        type: OperandType,
        rank: int,
        rng: np.random.Generator,
        extents: Extents,
        *,
        has_edges: bool = False,
    ) -> None:
        self.signature = signature
        self._has_edges = has_edges
        self.type = type
        self.rank = rank
        self.rng = rng
        self.extents = extents
        self.level = signature.level
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        signature.build(self)
        for output in self.outputs:
            for extent in output.dimensions:
                extents.require_at_least(extent, 1)
        if extents.extent_max > 10:
            for value in (*self.inputs, *self.outputs):
                extents.require_product_at_most(value.dimensions, ELEMENTS_MAX)

    @property
    def is_quantized(self) -> bool:
        """Whether the primary type is quantised."""
        return OPERAND_TYPE_PROPERTIES[self.type].is_quantized

    @property
    def real_scalar(self) -> OperandType:
        """The type of real scalars beside the primary type."""
        return OperandType.FLOAT16 if self.type == F16 else OperandType.FLOAT32

    # --- drawing

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(self.rng.integers(low, high, endpoint=True))

    def real(self, low: float, high: float) -> float:
        """A float32 number between low and high."""
        return float(np.float32(self.rng.uniform(low, high)))

    def axis(self, rank: int | None = None) -> int:
        """An axis of the primary rank (or another), counted from either end."""
        count = self.rank if rank is None else rank
        return self.integer(-count, count - 1)

    # --- extents

    def free(self, low: int = 1, high: int | None = None) -> Extent:
        """An unknown extent."""
        return self.extents.free(low, high)

    def frees(self, count: int | None = None) -> list[Extent]:
        """Unknown extents, as many as the primary rank or ``count``."""
        return [self.free() for _ in range(self.rank if count is None else count)]

    def known(self, *values: int) -> list[Extent]:
        """Extents that are known."""
        return [self.extents.extent(value) for value in values]

    # --- operands

    def quantization(self, type: OperandType) -> tuple[float, int]:
        """A random scale and zero point for a type; zeros where it has none."""
        properties = OPERAND_TYPE_PROPERTIES[type]
        if not properties.is_quantized:
            return 0.0, 0
        return self.real(0.1, 2.0), self.integer(properties.zero_point_min, properties.zero_point_max)

    def tensor(
        self,
        dimensions: Sequence[Extent],
        type: OperandType | None = None,
        *,
        like: Value | None = None,
        asks: Guarantee = Guarantee.NONE,
        fill: Callable[[], npt.ArrayLike] | None = None,
        is_linkable: bool = True,
    ) -> Value:
        """Adds an input tensor of uniform values, or what ``fill`` makes of the known extents.

        Args:
            dimensions: Its extents.
            type: None for the primary type.
            like: The value whose quantisation it shares; None for its own.
            asks: The demand on its values.
            fill: Makes the values once the extents are known.
            is_linkable: Whether another operation's output may take its place.
        """
        chosen = self.type if type is None else type
        scale, zero_point = self.quantization(chosen) if like is None else (like.scale, like.zero_point)
        value = Value(
            chosen,
            dimensions,
            Role.INPUT,
            scale=scale,
            zero_point=zero_point,
            guarantee=asks,
            is_linkable=is_linkable,
            fill=fill,
        )
        self.inputs.append(value)
        return value

    def scalar(self, type: OperandType, value: object) -> None:
        """Adds a constant scalar."""
        made = Value(type, (), Role.CONSTANT, fill=lambda: np.array(value))
        self.inputs.append(made)

    def scalar_from(self, fill: Callable[[], int]) -> None:
        """Adds a constant INT32 scalar that is made when the extents are known."""
        self.inputs.append(Value(OperandType.INT32, (), Role.CONSTANT, fill=fill))

    def scalar_extent(self, extent: Extent) -> None:
        """Adds a constant INT32 scalar with the value of an extent."""
        self.scalar_from(lambda: extent.value)

    def integer_scalar(self, low: int, high: int) -> int:
        """Adds a constant INT32 scalar from low to high and returns it."""
        value = self.integer(low, high)
        self.scalar(OperandType.INT32, value)
        return value

    def real_scalar_between(self, low: float, high: float) -> float:
        """Adds a constant real scalar of the type that goes with the primary type, and returns it as that type holds it."""
        value = float(np.float16(self.real(low, high))) if self.type == F16 else self.real(low, high)
        self.scalar(self.real_scalar, value)
        return value

    def flag(self, probability: float = 0.5) -> bool:
        """Adds a constant BOOL scalar and returns it."""
        value = self.chance(probability)
        self.scalar(OperandType.BOOL, value)
        return value

    def activation(self, *, none_only: bool = False) -> None:
        """Adds a fused activation."""
        self.scalar(OperandType.INT32, 0 if none_only else self.integer(0, 3))

    def integers(
        self, dimensions: Sequence[Extent] | int, fill: Callable[[], npt.ArrayLike] | Sequence[int]
    ) -> Value:
        """Adds a constant TENSOR_INT32: an argument of the operation, which nothing is linked to."""
        extents = self.known(dimensions) if isinstance(dimensions, int) else dimensions
        made = fill if callable(fill) else lambda: np.array(fill)
        value = Value(I32, extents, Role.CONSTANT, fill=made)
        self.inputs.append(value)
        return value

    def omitted(self, type: OperandType) -> None:
        """Adds an input that is left out."""
        self.inputs.append(Value(type, (), Role.OMITTED))

    def output(
        self,
        dimensions: Sequence[Extent],
        type: OperandType | None = None,
        *,
        like: Value | None = None,
        quantization: tuple[float, int] | None = None,
        gives: Guarantee = Guarantee.NONE,
        is_linkable: bool = True,
        is_checked: bool = True,
    ) -> Value:
        """Adds an output.

        Args:
            dimensions: Its extents; a tensor that has none left has one element.
            type: None for the primary type.
            like: The value whose quantisation it shares.
            quantization: Scale and zero point; None for random ones, or ``like``'s.
            gives: The known property of its values.
            is_linkable: Whether another operation may take it as an input.
            is_checked: False where several results are right.
        """
        chosen = self.type if type is None else type
        if like is not None:
            scale, zero_point = like.scale, like.zero_point
        elif quantization is not None and OPERAND_TYPE_PROPERTIES[chosen].is_quantized:
            scale, zero_point = quantization
        else:
            scale, zero_point = self.quantization(chosen)
        is_scalar = OPERAND_TYPE_PROPERTIES[chosen].is_scalar
        value = Value(
            chosen,
            dimensions if dimensions or is_scalar else self.known(1),
            Role.OUTPUT,
            scale=scale,
            zero_point=zero_point,
            guarantee=gives,
            is_linkable=is_linkable and not is_scalar,
            is_checked=is_checked,
        )
        self.outputs.append(value)
        return value

    # --- values

    def fill_values(self) -> None:
        """Makes the values of all inputs that no other operation computes. The network must be solved."""
        for value in self.inputs:
            if value.channel_dim is not None:
                count = value.shape[value.channel_dim]
                scales = self.rng.uniform(0.1, 2.0, count).astype(np.float32)
                value.channel_scales = tuple(float(scale) for scale in scales)
            if value.role not in (Role.INPUT, Role.CONSTANT):
                continue
            if value.fill is not None:
                made = np.asarray(value.fill())
            else:
                made = self._uniform(value)
                if self._has_edges:
                    made = self._with_edges(value, made)
            value.array = made.astype(operand_dtype(value.type)).reshape(value.shape)

    def _uniform(self, value: Value) -> Array:
        shape, rng = value.shape, self.rng
        dtype = operand_dtype(value.type)
        if dtype == np.bool_:
            return rng.random(shape) < 0.5
        is_positive = Guarantee.NON_NEGATIVE in value.guarantee
        if dtype.kind == "f":
            drawn = rng.uniform(0.0 if is_positive else -_REAL_MAX, _REAL_MAX, shape).astype(dtype)
            if Guarantee.NON_ZERO in value.guarantee:
                drawn[drawn == 0] = 1
            return np.asarray(drawn)
        info = np.iinfo(np.dtype(dtype.name))
        low, high = int(info.min), int(info.max)
        if value.type in (I32, OperandType.INT32):
            low, high = 0, _INTEGER_MAX
        if is_positive:
            low = max(low, value.zero_point)
        whole = rng.integers(low, high, shape, endpoint=True)
        if Guarantee.NON_ZERO in value.guarantee:
            other = value.zero_point + 1 if value.zero_point < high else value.zero_point - 1
            whole[whole == value.zero_point] = other
        return np.asarray(whole)

    def _with_edges(self, value: Value, drawn: Array) -> Array:
        """Puts values at the edges of the type in some places. Those that are not as it is guaranteed stay as they are."""
        dtype = operand_dtype(value.type)
        if dtype == np.bool_ or (value.type == I32 and self.type != I32):
            return drawn
        zero = value.zero_point
        if dtype.kind == "f":
            edges = edges_of_floats(self.signature.operation, dtype)
        else:
            edges = edges_of_integers(np.dtype(dtype.name), zero)
            if value.type == I32:
                info = np.iinfo(np.int32)
                drawn = self.rng.integers(info.min, info.max, value.shape, endpoint=True)
        placed = self.rng.choice(edges, value.shape)
        mixed = np.where(self.rng.random(value.shape) < _EDGE_SHARE, placed, drawn)
        if Guarantee.NON_NEGATIVE in value.guarantee:
            mixed = np.where(mixed >= zero, mixed, abs(drawn) if value.type == I32 else drawn)
        if Guarantee.NON_ZERO in value.guarantee:
            mixed = np.where(mixed == zero, 1 if value.type == I32 else drawn, mixed)
        return mixed


@dataclass(frozen=True, slots=True)
class Signature:
    """A family of random instances of one operation.

    Attributes:
        name: Unique.
        operation: The operation.
        level: The feature level that has all of these instances, and that none before has.
        types: Primary tensor types.
        ranks: Primary ranks.
        build: Puts an instance together.
    """

    name: str
    operation: OperationType
    level: int
    types: tuple[OperandType, ...]
    ranks: tuple[int, ...]
    build: Callable[[Draft], None]


def by_level(
    operation: OperationType,
    levels: Mapping[int, tuple[OperandType, ...]],
    ranks: Sequence[int],
    build: Callable[[Draft], None],
    variant: str = "",
) -> list[Signature]:
    """Signatures that differ only in the types that each feature level adds.

    Args:
        operation: The operation.
        levels: The types that come with each level.
        ranks: Primary ranks.
        build: Puts an instance together.
        variant: Distinguishes several forms of one operation.
    """
    middle = f"_{variant}" if variant else ""
    return [
        Signature(f"{operation.name}{middle}_{level}", operation, level, types, tuple(ranks), build)
        for level, types in levels.items()
    ]
