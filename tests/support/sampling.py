"""The cases of a parametrised test that the ordinary run takes: the same in each run. The other cases are long forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["chosen"]


def chosen(cases: Sequence[Mapping[str, int]], step: int) -> list[int]:
    """The positions of the cases in the sample: one case in ``step``, and each value of each parameter at least once.

    Args:
        cases: For each case the number of the value of each parameter.
        step: 1 or more.

    A parameter with another value in each case counts as the list of cases, of which one in ``step`` is enough. The values of
    the others occur about as often as each other.
    """
    values = {name: {case[name] for case in cases} for name in (cases[0] if cases else ())}
    names = [name for name in values if len(values[name]) < len(cases)]
    if not names:
        return list(range(0, len(cases), step))
    missing = {(name, value) for name in names for value in values[name]}
    left = {position: [(name, case[name]) for name in names] for position, case in enumerate(cases)}
    used: Counter[tuple[str, int]] = Counter()
    count_min = -(-len(cases) // step)
    while missing or len(cases) - len(left) < count_min:
        best = min(
            left, key=lambda at: (-len(missing.intersection(left[at])), sum(used[v] for v in left[at]), at)
        )
        found = left.pop(best)
        missing.difference_update(found)
        used.update(found)
    return sorted(set(range(len(cases))) - left.keys())
