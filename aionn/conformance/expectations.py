"""A driver's declarations for the suites: features that it can never have, and features that it does not have yet.

Owns the lists and how their entries match tests. A driver's module may define them; one without has none:

    UNSUPPORTED: Mapping[str, str]        never; the tests are not run and count as skipped, with the reason
    EXPECTED_FAILURES: Mapping[str, str]  not yet; the tests are run and must fail: one that passes is a failure of the list
    EXPECTED_DIFFERENCES: Mapping[str, str]  random graphs whose results may differ from the reference's by more than the criteria

Each entry is a pattern and its reason. A pattern is an operation's name (``LSTM``: all tests in which it occurs) or a glob over
the names of tests (``conv_quant8_*``). With a check's name and a colon before it (``dynamic_shape:LSTM``, ``cache:*``) it
concerns that check alone.

In ``EXPECTED_DIFFERENCES`` a pattern is compared with the smallest graph that still differs: an operation's name matches a graph
that consists of that operation alone, a glob matches the graph's name, such as ``MEAN_2.TENSOR_FLOAT32+PAD_2.TENSOR_FLOAT32``.

Invariants:
1. The first entry that matches gives the reason.
2. An entry that matches no test at all is a mistake, and ``stale`` names it.

Source: ``TestUnsupported`` and ``TestExpectedFailure`` of IREE's conformance suite.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping

import msgspec

from aionn.drivers import registry
from aionn.errors import InvalidArgument
from aionn.hal import OperationType

__all__ = ["Expectations", "Subject", "driver_expectations"]


class Subject(msgspec.Struct, frozen=True):
    """The names that a pattern is compared with.

    Attributes:
        name: The test's name.
        operations: The operations that occur in it.
        checks: The checks that can be made of it.
    """

    name: str
    operations: frozenset[str]
    checks: frozenset[str]


class Expectations(msgspec.Struct, frozen=True):
    """The lists of one driver: pattern to reason.

    Attributes:
        unsupported: The cases that the driver can never pass.
        expected_failures: The cases that it does not pass yet.
        expected_differences: Which smallest graphs may differ from the reference.
    """

    unsupported: Mapping[str, str] = {}
    expected_failures: Mapping[str, str] = {}
    expected_differences: Mapping[str, str] = {}

    def why_unsupported(self, subject: Subject, check: str | None = None) -> str | None:
        """The reason why a test, or one check of it, is never made; None where it is."""
        return _reason(self.unsupported, subject, check)

    def why_expected_to_fail(self, subject: Subject, check: str | None = None) -> str | None:
        """The reason why a test, or one check of it, fails for now; None where it must pass."""
        return _reason(self.expected_failures, subject, check)

    def why_different(self, subject: Subject) -> str | None:
        """The reason why a smallest graph that differs may do so; None where it must not."""
        named = {
            pattern: reason
            for pattern, reason in self.expected_differences.items()
            if pattern not in OperationType.__members__ or subject.operations == {pattern}
        }
        return _reason(named, subject, None)

    def stale(self, subjects: Iterable[Subject]) -> list[str]:
        """The patterns of the first two lists that match none of the tests. Those with a slash are the driver suite's own."""
        left = {p for p in (*self.unsupported, *self.expected_failures) if "/" not in p}
        for subject in subjects:
            if not left:
                break
            left -= {p for p in left for check in (None, *subject.checks) if _matches(p, subject, check)}
        return sorted(left)


def _reason(entries: Mapping[str, str], subject: Subject, check: str | None) -> str | None:
    return next((reason for pattern, reason in entries.items() if _matches(pattern, subject, check)), None)


def _matches(pattern: str, subject: Subject, check: str | None) -> bool:
    named_check, colon, rest = pattern.rpartition(":")
    if (named_check if colon else None) != check:
        return False
    if rest in OperationType.__members__:
        return rest in subject.operations
    return fnmatch.fnmatchcase(subject.name, rest)


def driver_expectations(driver: str) -> Expectations:
    """The lists that a driver's module defines.

    Raises:
        InvalidArgument: No such driver, or a list of its module is invalid.
        DeviceUnavailable: It cannot be imported.
    """
    factory = registry.load_factory(driver)
    name = getattr(factory, "__module__", None) or ""
    module = sys.modules.get(name)
    return Expectations(*(_list_of(module, f"{name}.{what}", what) for what in _LISTS))


_LISTS = ("UNSUPPORTED", "EXPECTED_FAILURES", "EXPECTED_DIFFERENCES")


def _list_of(module: object, where: str, what: str) -> dict[str, str]:
    try:
        return msgspec.convert(getattr(module, what, {}), dict[str, str])
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{where}: expected patterns and the reasons for them, as texts: {e}") from e
