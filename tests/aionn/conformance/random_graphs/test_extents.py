"""Claims about the network of unknown extents."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from aionn.conformance.random_graphs.extents import Extents


def solved(extents: Extents, seed: int = 0) -> bool:
    return extents.solve(np.random.default_rng(seed))


def test_free_extents_take_values_in_their_range() -> None:
    seen = set()
    for seed in range(60):
        extents = Extents(1000)
        small, large = extents.free(2, 4), extents.free()
        assert solved(extents, seed)
        assert 2 <= small.value <= 4
        assert 1 <= large.value <= 1000
        seen.add(small.value)
    assert seen == {2, 3, 4}


def test_same_seed_gives_the_same_values() -> None:
    def values() -> list[int]:
        extents = Extents(1000)
        free = [extents.free() for _ in range(5)]
        extents.require_product_at_most(free, 10_000)
        assert solved(extents, 7)
        return [extent.value for extent in free]

    assert values() == values()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_equations_hold(seed: int) -> None:
    extents = Extents(1000)
    a, b, c = extents.free(), extents.free(), extents.free()
    total, difference, product, quotient = a + b, a - c, a * b, (a + 5) // 3
    factor = a.scaled(1.7)
    half = extents.divided_exactly(b, 2)
    extents.require_at_least(difference, 1)
    extents.require_product_at_most([a, b, c], 10_000)
    assert solved(extents, seed)
    assert total.value == a.value + b.value
    assert difference.value == a.value - c.value >= 1
    assert product.value == a.value * b.value
    assert quotient.value == (a.value + 5) // 3
    assert factor.value == math.floor(np.float32(a.value) * np.float32(1.7))
    assert 2 * half.value == b.value
    assert a.value * b.value * c.value <= 10_000


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_equal_products_are_found(seed: int) -> None:
    extents = Extents(1000)
    first, second = [extents.free() for _ in range(3)], [extents.free() for _ in range(3)]
    extents.require_product_at_most(first, 10_000)
    extents.require_equal(extents.product(first), extents.product(second))
    assert solved(extents, seed)
    assert math.prod(e.value for e in first) == math.prod(e.value for e in second) <= 10_000


def test_product_of_nothing_is_one() -> None:
    extents = Extents(10)
    assert extents.product([]).value == 1


def test_contradiction_has_no_solution() -> None:
    extents = Extents(10)
    a = extents.free()
    extents.require_at_least(a, 11)
    assert not extents.is_consistent
    assert not solved(extents)


def test_refused_equality_changes_nothing() -> None:
    extents = Extents(1000)
    a, b, c = extents.free(1, 10), extents.free(5, 20), extents.free(100, 200)
    assert not extents.try_equal([(a, b), (b, c)])
    assert [extents.bounds(e) for e in (a, b, c)] == [(1, 10), (5, 20), (100, 200)]
    assert extents.try_equal([(a, b)])
    assert extents.bounds(a) == extents.bounds(b) == (5, 10)
    assert solved(extents)
    assert a.value == b.value


def test_refused_equality_leaves_a_contradiction_known() -> None:
    extents = Extents(1000)
    free, fixed = extents.free(), extents.extent(3)
    extents.require_at_least(fixed, 4)
    assert not extents.try_equal([(free, fixed)])
    assert not solved(extents)


def test_failed_solving_changes_nothing() -> None:
    extents = Extents(1000)
    a, b = extents.free(2, 100), extents.free(2, 100)
    # 9973 is prime, which bounds alone do not tell.
    extents.require_equal(a * b, 9973)
    before = extents.bounds(a), extents.bounds(b)
    assert not solved(extents)
    assert (extents.bounds(a), extents.bounds(b)) == before


def test_value_before_solving_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="no single value yet"):
        _ = Extents(10).free().value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_solving_agrees_with_trying_everything(seed: int) -> None:
    rng = np.random.default_rng(seed)
    extents = Extents(6)
    free = [extents.free() for _ in range(3)]
    numbers = [int(n) for n in rng.integers(1, 6, 4)]

    def results(a: Any, b: Any, c: Any) -> list[tuple[Any, int]]:
        return [(a * b + c, numbers[0] * 5), ((b + c) // 2 - a, -numbers[1]), (a + b + c, numbers[2] * 2)]

    wanted = results(*free)[: 1 + seed % 3]
    for extent, number in wanted:
        extents.require_equal(extent, number)
    solutions = {
        values
        for values in itertools.product(range(1, 7), repeat=3)
        if all(result == number for result, number in results(*values)[: len(wanted)])
    }
    if solved(extents, seed):
        assert tuple(extent.value for extent in free) in solutions
    else:
        assert not solutions
