"""The cases of a parametrised test that the ordinary run takes: the same in each run. The other cases are long forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["chosen"]


def chosen(cases: Sequence[Mapping[str, int]], step: int) -> list[int]:
    """The positions of the cases in the sample: one case in ``step``, and each value of each parameter at least once.

    Args:
        cases: For each case the number of the value of each parameter.
        step: 1 or more.

    A parameter with another value in each case counts as the list of cases, of which one in ``step`` is enough.
    """
    values = {name: {case[name] for case in cases} for name in (cases[0] if cases else ())}
    covered = {name: set[int]() for name in values if len(values[name]) < len(cases)}
    positions = []
    for position, case in enumerate(cases):
        if position % step == 0 or any(case[name] not in seen for name, seen in covered.items()):
            positions.append(position)
            for name, seen in covered.items():
                seen.add(case[name])
    return positions
