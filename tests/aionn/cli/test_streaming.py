"""The live table of a stream keeps its height while its figures change, at every usual width of a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from aionn.cli.streaming import Account, Recognised, _lines


def account(name: str, labels: tuple[str, ...], count: int, label: int, probability: float) -> Account[Any]:
    made: Account[Any] = Account(name, labels)
    made.on_time = count
    made.latencies_ms = [1.0 + count / 10] * count
    if count:
        made.recognised = [Recognised(0, 0.0, label, probability)]
    return made


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_table_keeps_its_height(width: int) -> None:
    heights = set()
    for count in (0, 9, 99, 600):
        for label, probability in ((0, 0.07), (1, 1.0)):
            accounts = [
                account("video", ("nothing", "triangle"), count, label, probability),
                account("audio", ("background", "two"), count, label, probability),
            ]
            lines = _lines("aionn demo on litert-cpu, driver process 1234    12.3 s", accounts, width)
            assert all(len(line) <= width for line in lines)
            heights.add(len(lines))
    assert len(heights) == 1
