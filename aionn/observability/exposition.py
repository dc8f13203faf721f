"""Figures as text for Prometheus and whatever reads its format; pure.

Owns the format, not the names of the figures. Source: the text exposition format, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from aionn.observability.durations import Durations, SignedDurations

__all__ = ["CONTENT_TYPE", "Family", "Sample", "exposition", "exposition_parts"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PART_LINES = 64
"""Lines after which a thread that writes the text lets others have the interpreter's lock: some 0.1 ms."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Family(NamedTuple):
    """A metric.

    Attributes:
        kind: ``counter``, ``gauge`` or ``histogram``.
        help: A sentence.
    """

    kind: str
    help: str


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        name: The metric's.
        labels: By name; their values are bounded in number.
        value: A number; durations for a histogram, which are exposed in seconds.
    """

    name: str
    labels: Mapping[str, str]
    value: float | Durations | SignedDurations


def exposition(families: Mapping[str, Family], samples: Iterable[Sample]) -> str:
    """The text of all samples, those of a metric together; metrics without a sample are left out."""
    return "".join(exposition_parts(families, samples))


def exposition_parts(families: Mapping[str, Family], samples: Iterable[Sample]) -> Iterator[str]:
    """The same text in parts of about ``PART_LINES`` lines."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines: list[str] = []
    for name, found in by_name.items():
        kind, text = families[name]
        lines += [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]
        for sample in found:
            lines += _lines(sample)
            if len(lines) >= PART_LINES:
                yield "".join(lines)
                lines.clear()
    yield "".join(lines)


def _lines(sample: Sample) -> Iterator[str]:
    name, labels, value = sample
    pairs = ",".join([f'{key}="{_escaped(text)}"' for key, text in labels.items()])
    own = f"{{{pairs}}}" if pairs else ""
    if not isinstance(value, Durations | SignedDurations):
        yield f"{name}{own} {_number(value)}\n"
        return
    begin = f"{name}_bucket{{{pairs}{',' if pairs else ''}le="
    for bound_ns, count in value.cumulative():
        yield f'{begin}"{bound_ns / 1e9:.9g}"}} {count}\n'
    count = value.count
    yield f'{begin}"+Inf"}} {count}\n'
    yield f"{name}_sum{own} {_number(value.total_ns / 1e9)}\n"
    yield f"{name}_count{own} {count}\n"


def _number(value: float) -> str:
    """All digits of a number: a rate is the difference of two values, and a counter grows for months."""
    return str(value) if isinstance(value, float) and not value.is_integer() else str(int(value))


def _escaped(text: str) -> str:
    """A label's value. A file's name may have bytes that are not text, which the format cannot have: each becomes ``?``."""
    return text.encode("utf-8", "replace").decode().translate(_ESCAPES)
