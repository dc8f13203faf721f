"""The node of a group that is tried first."""

from __future__ import annotations

import random

import pytest

from aionn.scheduler.fleet.candidates import Candidates, Group
from aionn.scheduler.fleet.transfer import NodeLink

MS = 1_000_000


@pytest.mark.parametrize("seed", range(10))
def test_the_emptiest_node_of_a_group_that_is_offered_is_found(seed: int) -> None:
    rng, candidates = random.Random(seed), Candidates()
    groups = [Group.of(kind, NodeLink(latency_ns=latency_ns)) for kind in "ab" for latency_ns in (0, 3 * MS)]
    offered: dict[str, tuple[Group, int]] = {}
    for _ in range(600):
        name = f"n{rng.randrange(40)}"
        if rng.random() < 0.7:
            offered[name] = rng.choice(groups), rng.randrange(50)
            candidates.offer(name, *offered[name])
        else:
            offered.pop(name, None)
            candidates.withdraw(name)
        assert len(candidates) == len(offered)
        assert set(candidates.groups) == {group for group, _ in offered.values()}
        if rng.random() < 0.2:
            for group in groups:
                free = {one: free_ppm for one, (its, free_ppm) in offered.items() if its == group}
                found = candidates.emptiest(group)
                assert candidates.emptiest(group) == found, "a look takes nothing"
                if found is None:
                    assert not free
                else:
                    assert free[found] == max(free.values())


def test_entries_that_are_out_of_date_are_bounded() -> None:
    candidates, group = Candidates(), Group.of("npu", NodeLink())
    for number in range(10_000):
        candidates.offer(f"n{number % 10}", group, number)
    assert len(candidates._heaps[group]) < 200
