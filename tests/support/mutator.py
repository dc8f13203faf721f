"""A seeded mutator: takes any record of the HAL's vocabulary and gives one that differs in a few places.

Owns the places and forms of changes to a record; not the driver's required answer. Types stay what they are, since the contract is
typed: an index becomes another integer, however absurd, and never a text.

Invariants:
1. The same record, seed and number of changes give the same result.
2. The record itself is never changed; what is not changed is shared with it.
3. Memory, fences and other objects with identity are left out, put twice or exchanged with each other, and never changed.

Source: the structure-aware fuzzers of the NN HAL (``libneuralnetworks_fuzzer``, ``driver_fuzzer``).
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

__all__ = ["mutate", "mutate_bytes"]

_T = TypeVar("_T")
Path = tuple[Any, ...]

_INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    -(2**63),
)
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    1e-45,
    1e-8,
    3.4e38,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)


def mutate(record: _T, rng: random.Random, *, changes: int = 1, skip: frozenset[str] = frozenset()) -> _T:
    """The record with some places changed.

    Args:
        record: A ``msgspec.Struct``, a tuple of such, or a plain value.
        rng: Decides.
        changes: How many places; one that cannot be changed, such as a memory, counts.
        skip: Names of fields that stay as they are.
    """
    value: Any = record
    for _ in range(changes):
        places = list(_places(value, (), skip))
        value = _changed_at(value, rng.choice(places), rng)
    return value  # type: ignore[no-any-return]


def _places(value: Any, path: Path, skip: frozenset[str]) -> Iterator[Path]:
    """All places in a record: every field and item, and every tuple as a whole."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in skip:
                yield from _places(getattr(value, name), (*path, name), skip)
        if not value.__struct_fields__:
            yield path
        return
    yield path
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _places(item, (*path, index), skip)


def _changed_at(value: Any, path: Path, rng: random.Random) -> Any:
    if not path:
        return _changed(value, rng)
    key, *rest = path
    if isinstance(value, msgspec.Struct):
        inner = _changed_at(getattr(value, key), tuple(rest), rng)
        try:
            return msgspec.structs.replace(value, **{key: inner})
        except (ValueError, TypeError):
            return value  # A record that refuses the value by itself.
    items = list(value)
    items[key] = _changed_at(items[key], tuple(rest), rng)
    return type(value)(items)


def _changed(value: Any, rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case enum.IntEnum():
            # Codes that no enumerator has come from the wire as well.
            return rng.choice([*type(value), *type(value), rng.choice(_INTEGERS)])
        case int():
            return rng.choice(
                (rng.choice(_INTEGERS), value + rng.choice((-2, -1, 1, 2)), value * 2, rng.randrange(16))
            )
        case float():
            return rng.choice(_FLOATS)
        case str():
            return rng.choice(("", value[:-1], value + "\0", value * 100, "\ud7ff", value.upper()))
        case bytes():
            return mutate_bytes(value, rng)
        case None:
            return None
        case tuple() | list():
            return type(value)(_rearranged(list(value), rng))
        case _:
            return value


def _rearranged(items: list[Any], rng: random.Random) -> list[Any]:
    if not items:
        return items  # Of what type its items would be cannot be seen.
    i, j = rng.randrange(len(items)), rng.randrange(len(items))
    match rng.randrange(6):
        case 0:
            return items[:i] + items[i + 1 :]
        case 1:
            return [*items[:i], items[j], *items[i:]]
        case 2:
            items[i], items[j] = items[j], items[i]
            return items
        case 3:
            return items[:i]
        case 4:
            return items * 2
        case _:
            return items[::-1]


def mutate_bytes(value: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut off, put in or repeated."""
    content = bytearray(value)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1 if content:
                content[at % len(content)] = rng.choice(
                    (0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xDD, 0xDF, 0xFF)
                )
            case 2:
                content[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del content[at : at + rng.randint(1, 8)]
            case _:
                content[at:at] = content[: rng.randint(0, 16)]
    return bytes(content)
