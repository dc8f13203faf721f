"""Extents that are not known yet: variables with ranges, sums and products of them, and what must hold between them.

Owns the small constraint network that random graphs are drawn from. An operation's signature states how its extents depend on each
other; linking two operations states that extents are equal; ``solve`` then draws numbers for all of them. Knows no operand.

Invariants:
1. Every node has bounds that contain all of its values in every solution: propagation only ever narrows.
2. When all variables have one value, every node has, and every rule holds.
3. A failed ``try_equal`` leaves the network as it was.
4. The work is bounded: ``solve`` ends after ``ORDERS_MAX`` times ``TRIALS_MAX`` guesses. An end without a solution does not prove
   that no solution exists.

Source: the random variable network of the NN HAL's random graph generator; bounds propagation as usual for integer constraints.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["Extent", "Extents"]

TRIALS_MAX = 400
"""Guesses for one order of the variables. A graph of 40 operations needs about one a variable; one that is stuck after this many
is cheaper to begin anew."""

ORDERS_MAX = 5
"""Orders of the variables that one ``solve`` tries."""

_GUESSES_PER_VARIABLE = 24
_VALUE_MAX = 1 << 40


class _Kind(enum.Enum):
    SUM = enum.auto()
    DIFFERENCE = enum.auto()
    PRODUCT = enum.auto()
    QUOTIENT = enum.auto()
    SCALED = enum.auto()
    EQUAL = enum.auto()
    AT_LEAST = enum.auto()


class Extent:
    """A node of the network. Arithmetic with extents and integers makes new nodes."""

    __slots__ = ("index", "network")

    def __init__(self, network: Extents, index: int) -> None:
        self.network = network
        self.index = index

    def __add__(self, other: Extent | int) -> Extent:
        return self.network.derive(_Kind.SUM, self, self.network.extent(other))

    def __sub__(self, other: Extent | int) -> Extent:
        return self.network.derive(_Kind.DIFFERENCE, self, self.network.extent(other))

    def __mul__(self, other: Extent | int) -> Extent:
        return self.network.derive(_Kind.PRODUCT, self, self.network.extent(other))

    def __floordiv__(self, divisor: int) -> Extent:
        return self.network.derive(_Kind.QUOTIENT, self, None, divisor)

    def scaled(self, factor: float) -> Extent:
        """floor(extent * factor), computed in float32."""
        return self.network.derive(_Kind.SCALED, self, None, factor)

    @property
    def value(self) -> int:
        """The number that ``solve`` found."""
        low, high = self.network.bounds(self)
        assert low == high, f"extent {self.index} has no single value yet: {low} to {high}"
        return low

    def __repr__(self) -> str:
        low, high = self.network.bounds(self)
        return f"<Extent {self.index}: {low}>" if low == high else f"<Extent {self.index}: {low} to {high}>"


class Extents:
    """The network.

    Args:
        extent_max: The upper bound of free extents that name none of their own.
    """

    def __init__(self, extent_max: int) -> None:
        self.extent_max = extent_max
        self._low: list[int] = []
        self._high: list[int] = []
        self._free: list[int] = []
        # Of a rule: kind, the node it defines (or the first of a relation), its operands, a constant number.
        self._rules: list[tuple[_Kind, int, int, int, float]] = []
        self._rules_of: list[list[int]] = []
        # The changes of propagation since the last guess, to undo them.
        self._trail: list[tuple[int, int, int]] = []
        self.is_consistent = True

    def _node(self, low: int, high: int) -> Extent:
        self._low.append(low)
        self._high.append(high)
        self._rules_of.append([])
        return Extent(self, len(self._low) - 1)

    def free(self, low: int = 1, high: int | None = None) -> Extent:
        """A new variable."""
        extent = self._node(low, self.extent_max if high is None else high)
        self._free.append(extent.index)
        return extent

    def extent(self, value: Extent | int) -> Extent:
        """A number as a node; a node as it is."""
        return value if isinstance(value, Extent) else self._node(value, value)

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Least and largest value that are not excluded yet."""
        return self._low[extent.index], self._high[extent.index]

    def derive(self, kind: _Kind, a: Extent, b: Extent | None, number: float = 0) -> Extent:
        """A node that depends on others; meant for ``Extent``'s operators."""
        result = self._node(-_VALUE_MAX, _VALUE_MAX)
        self._add_rule((kind, result.index, a.index, -1 if b is None else b.index, number))
        return result

    def _add_rule(self, rule: tuple[_Kind, int, int, int, float]) -> None:
        index = len(self._rules)
        self._rules.append(rule)
        for node in rule[1:4]:
            if node >= 0:
                self._rules_of[node].append(index)
        self.is_consistent = self._propagate({index}) and self.is_consistent

    def require_equal(self, a: Extent, b: Extent | int) -> None:
        """Demands a == b."""
        self._add_rule((_Kind.EQUAL, a.index, self.extent(b).index, -1, 0))

    def require_at_least(self, a: Extent, b: Extent | int) -> None:
        """Demands a >= b."""
        self._add_rule((_Kind.AT_LEAST, a.index, self.extent(b).index, -1, 0))

    def require_product_at_most(self, extents: Sequence[Extent], limit: int) -> None:
        """Demands that the product of the extents is at most ``limit``."""
        if extents:
            product = self.product(extents)
            self.require_at_least(self.extent(limit), product)

    def product(self, extents: Iterable[Extent]) -> Extent:
        """The product; 1 of none."""
        result: Extent | None = None
        for extent in extents:
            result = extent if result is None else result * extent
        return self.extent(1) if result is None else result

    def divided_exactly(self, extent: Extent, divisor: Extent | int) -> Extent:
        """extent / divisor, which must be whole."""
        quotient = self.free(0, _VALUE_MAX)
        # Not a variable to guess: it follows from the extent.
        self._free.pop()
        self.require_equal(quotient * divisor, extent)
        return quotient

    def try_equal(self, pairs: Iterable[tuple[Extent, Extent]]) -> bool:
        """Demands equality of all pairs where their bounds allow it; else changes nothing and returns False."""
        if not self.is_consistent:
            return False
        low, high, rule_count = list(self._low), list(self._high), len(self._rules)
        self._trail.clear()
        for a, b in pairs:
            self._add_rule((_Kind.EQUAL, a.index, b.index, -1, 0))
            if not self.is_consistent:
                break
        else:
            return True
        self._low, self._high = low, high
        for rule in self._rules[rule_count:]:
            for node in rule[1:4]:
                if node >= 0:
                    self._rules_of[node].pop()
        del self._rules[rule_count:]
        self.is_consistent = True
        return False

    # --- propagation

    def _narrow(self, node: int, low: int, high: int, queue: set[int]) -> bool:
        old_low, old_high = self._low[node], self._high[node]
        if low <= old_low and high >= old_high:
            return True
        self._trail.append((node, old_low, old_high))
        self._low[node] = low = max(low, old_low)
        self._high[node] = high = min(high, old_high)
        queue.update(self._rules_of[node])
        return low <= high

    def _propagate(self, queue: set[int]) -> bool:
        """Narrows until nothing changes, which no order of the rules makes differ. False when something has no value left."""
        while queue:
            kind, x, a, b, number = self._rules[queue.pop()]
            if not self._apply(kind, x, a, b, number, queue):
                return False
        return True

    def _apply(self, kind: _Kind, x: int, a: int, b: int, number: float, queue: set[int]) -> bool:
        low, high, narrow = self._low, self._high, self._narrow
        match kind:
            case _Kind.SUM:
                return (
                    narrow(x, low[a] + low[b], high[a] + high[b], queue)
                    and narrow(a, low[x] - high[b], high[x] - low[b], queue)
                    and narrow(b, low[x] - high[a], high[x] - low[a], queue)
                )
            case _Kind.DIFFERENCE:
                return (
                    narrow(x, low[a] - high[b], high[a] - low[b], queue)
                    and narrow(a, low[x] + low[b], high[x] + high[b], queue)
                    and narrow(b, low[a] - high[x], high[a] - low[x], queue)
                )
            case _Kind.PRODUCT:
                # Factors are extents and never negative.
                return (
                    narrow(a, 0, _VALUE_MAX, queue)
                    and narrow(b, 0, _VALUE_MAX, queue)
                    and narrow(x, low[a] * low[b], high[a] * high[b], queue)
                    and self._narrow_factor(x, a, b, queue)
                    and self._narrow_factor(x, b, a, queue)
                )
            case _Kind.QUOTIENT:
                divisor = int(number)
                return narrow(x, low[a] // divisor, high[a] // divisor, queue) and narrow(
                    a, low[x] * divisor, high[x] * divisor + divisor - 1, queue
                )
            case _Kind.SCALED:
                return self._apply_scaled(x, a, number, queue)
            case _Kind.EQUAL:
                return narrow(x, low[a], high[a], queue) and narrow(a, low[x], high[x], queue)
            case _Kind.AT_LEAST:
                return narrow(x, low[a], _VALUE_MAX, queue) and narrow(a, -_VALUE_MAX, high[x], queue)

    def _narrow_factor(self, x: int, factor: int, other: int, queue: set[int]) -> bool:
        low = -(-self._low[x] // self._high[other]) if self._high[other] > 0 else 0
        high = self._high[x] // self._low[other] if self._low[other] > 0 else _VALUE_MAX
        return self._narrow(factor, low, high, queue)

    def _apply_scaled(self, x: int, a: int, factor: float, queue: set[int]) -> bool:
        def scaled(value: int) -> int:
            return math.floor(np.float32(min(max(value, 0), 1 << 24)) * np.float32(factor))

        # Backwards the bounds are loose by one: the exact product of float32 numbers is forwards only.
        low = math.floor(self._low[x] / factor) - 1
        high = math.ceil((self._high[x] + 1) / factor) + 1
        return self._narrow(x, scaled(self._low[a]), scaled(self._high[a]), queue) and self._narrow(
            a, low, high, queue
        )

    # --- solving

    def _undo(self, mark: int) -> None:
        while len(self._trail) > mark:
            node, low, high = self._trail.pop()
            self._low[node], self._high[node] = low, high

    def _guesses(self, node: int, rng: np.random.Generator) -> list[int]:
        """Values to try for a variable, in the order of trying: small ones are as likely as large ones."""
        low, high = self._low[node], self._high[node]
        if high - low < _GUESSES_PER_VARIABLE:
            values = [int(v) for v in rng.permutation(np.arange(low, high + 1))]
        else:
            drawn = np.exp(rng.uniform(math.log(low + 1), math.log(high + 2), _GUESSES_PER_VARIABLE))
            values = list(dict.fromkeys(min(int(v) - 1, high) for v in drawn))
            # The least value is the most likely to fit at all.
            values.append(low)
        values.reverse()
        return values

    def solve(self, rng: np.random.Generator) -> bool:
        """Draws a value for every extent. Returns False when none was found; the bounds are then as before."""
        if not self.is_consistent:
            return False
        return any(self._solve_in_order(rng) for _ in range(ORDERS_MAX))

    def _solve_in_order(self, rng: np.random.Generator) -> bool:
        """One attempt: the variables in a random order, the last guess taken back where nothing fits."""
        self._trail.clear()
        order = [int(node) for node in rng.permutation(np.array(self._free, dtype=np.int64))]
        # One entry a variable that was guessed: its place in the order, the length of the trail, what is left to try.
        guessed: list[tuple[int, int, list[int]]] = []
        place, trials = 0, 0
        while place < len(order):
            node = order[place]
            if self._low[node] == self._high[node]:
                place += 1
                continue
            guessed.append((place, len(self._trail), self._guesses(node, rng)))
            while guessed:
                place, mark, values = guessed[-1]
                if not values:
                    guessed.pop()
                    if guessed:
                        self._undo(guessed[-1][1])
                    continue
                trials += 1
                if trials > TRIALS_MAX:
                    self._undo(0)
                    return False
                value = values.pop()
                queue: set[int] = set()
                if self._narrow(order[place], value, value, queue) and self._propagate(queue):
                    place += 1
                    break
                self._undo(mark)
            else:
                self._undo(0)
                return False
        return True
