"""``merge`` and ``first``: one fence for all of some fences, or for any of them.

Owns: the flattening of what is combined, the two kinds of combined fence. Refuses to own: waiting and state, which are
those of any fence.

Flattened as the kernel flattens merged sync files: a merge of small merges waits for the leaves; and of all points of one
timeline one entry is enough, the last for ``merge`` and the earliest for ``first``. A large merge stays one part: merging the
last merge with one more fence, again and again, would otherwise copy all leaves every time, and each leaf would hold every merge.

Invariants:
1. A combined fence holds only parts that are pending. Those combined in the same way have more than ``FLATTENED_PARTS_MAX`` parts
   of their own; of the remaining ones at most one belongs to each timeline.
2. Combining m fences on t timelines takes O(m) steps, however deep they are nested, and the result holds at most t entries for
   them.
3. Once it has finished it is attached to no part, so a part that lives long does not gather the merges that are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fences.fence import SyncFence, package_lock
from fences.state import Failure, Outcome
from fences.timeline import PointFence, Timeline

FLATTENED_PARTS_MAX = 32
"""Of a combined fence that is combined again: with more parts it is a part itself. More than frames and executions have together as
a rule, and few enough that copying them costs about as much as one link of a chain."""


class CombinedFence(SyncFence):
    """The fence that :func:`merge` and :func:`first` return; finished by its parts alone."""

    __slots__ = ("_parts",)

    _finisher = "it is finished by the fences it combines"

    def __init__(self, parts: dict[SyncFence, None], name: str | None) -> None:
        super().__init__(name)
        self._parts = parts

    @property
    def parts(self) -> tuple[SyncFence, ...]:
        """The fences it still waits for; among them may be combined ones that have parts themselves."""
        return tuple(self._parts)

    def _attach_to_parts(self) -> None:
        try:
            for part in tuple(self._parts):
                if self._outcome is not None:
                    return
                part._follow_with(self._part_finished)
        except BaseException:
            self._let_go()
            raise

    def _part_finished(self, part: SyncFence) -> None:
        raise NotImplementedError

    def _finish(self, outcome: Outcome) -> bool:
        if not super()._finish(outcome):
            return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        while self._parts:
            try:
                part, _ = self._parts.popitem()
            except KeyError:  # Another thread took the last one.
                return
            part._detach(self._part_finished)


class MergedFence(CombinedFence):
    """Signalled when all its parts are, at the time of the latest; fails as soon as one fails, with that one's origin."""

    __slots__ = ("_latest_ns",)

    def __init__(self, parts: dict[SyncFence, None], latest_ns: int, name: str | None) -> None:
        super().__init__(parts, name)
        self._latest_ns = latest_ns

    def _part_finished(self, part: SyncFence) -> None:
        outcome = part._outcome
        assert outcome is not None
        if isinstance(outcome, Failure):
            self._finish(outcome)
            return
        with package_lock:  # Parts may finish in several threads concurrently.
            self._parts.pop(part, None)
            self._latest_ns = max(self._latest_ns, outcome)
            complete = not self._parts
        if complete:
            self._finish(self._latest_ns)


class FirstFence(CombinedFence):
    """Signalled when one of its parts is, at that time; fails once all have failed, as the one that failed last."""

    __slots__ = ()

    def _part_finished(self, part: SyncFence) -> None:
        outcome = part._outcome
        assert outcome is not None
        with package_lock:
            self._parts.pop(part, None)
            over = not self._parts
        if over or not isinstance(outcome, Failure):
            self._finish(outcome)


def merge(fences: Iterable[SyncFence], name: str | None = None) -> SyncFence:
    """A fence that is signalled once all of some fences are, at the time of the latest.

    It fails as soon as one of them fails, with that one's origin and cause. Fences that have finished already leave no
    entry; of no fences at all the result is signalled, now.

    Args:
        fences: The fences, in any order, repeated or not, merges among them.
        name: Name of the result in errors.
    """
    parts: dict[SyncFence, None] = {}
    points: dict[Timeline, PointFence] = {}
    latest_ns = -1
    for fence in _leaves(fences, MergedFence):
        outcome = fence._outcome
        if outcome is None:
            if isinstance(fence, PointFence):
                known = points.get(fence.timeline)
                if known is None or known.point < fence.point:
                    points[fence.timeline] = fence
            else:
                parts[fence] = None
        elif isinstance(outcome, Failure):
            return SyncFence.finished(outcome, name)
        else:
            latest_ns = max(latest_ns, outcome)
    parts.update(dict.fromkeys(points.values()))
    if not parts:
        return SyncFence.signalled(None if latest_ns < 0 else latest_ns, name)
    merged = MergedFence(parts, latest_ns, name)
    merged._attach_to_parts()
    return merged


def first(fences: Iterable[SyncFence], name: str | None = None) -> SyncFence:
    """A fence that is signalled once any of some fences is, at that time.

    A fence that fails is left out; the result fails when all have failed, with the origin and cause of the last. If some
    are signalled already, it is signalled at the time of the earliest.

    Args:
        fences: At least one fence, in any order, repeated or not, results of ``first`` among them.
        name: Name of the result in errors.

    Raises:
        ValueError: there are no fences.
    """
    parts: dict[SyncFence, None] = {}
    points: dict[Timeline, PointFence] = {}
    earliest_ns = -1
    failure: Failure | None = None
    for fence in _leaves(fences, FirstFence):
        outcome = fence._outcome
        if outcome is None:
            if isinstance(fence, PointFence):
                known = points.get(fence.timeline)
                if known is None or known.point > fence.point:
                    points[fence.timeline] = fence
            else:
                parts[fence] = None
        elif isinstance(outcome, Failure):
            failure = outcome
        else:
            earliest_ns = outcome if earliest_ns < 0 else min(earliest_ns, outcome)
    if earliest_ns >= 0:
        return SyncFence.signalled(earliest_ns, name)
    parts.update(dict.fromkeys(points.values()))
    if not parts:
        if failure is None:
            raise ValueError("first: expected at least one fence, got none")
        return SyncFence.finished(failure, name)
    combined = FirstFence(parts, name)
    combined._attach_to_parts()
    return combined


def leaves(fence: SyncFence) -> Iterator[SyncFence]:
    """The fences for which a combined fence waits that are not combined themselves, each once; of any other fence itself."""
    left, seen = [fence], {fence}
    while left:
        each = left.pop()
        if not isinstance(each, CombinedFence):
            yield each
            continue
        inner = [part for part in each.parts if part not in seen]
        seen.update(inner)
        left.extend(reversed(inner))


def _leaves(fences: Iterable[SyncFence], kind: Callable[..., CombinedFence]) -> Iterable[SyncFence]:
    """The fences, with small pending ones of the same kind replaced by their parts."""
    for fence in fences:
        if not isinstance(fence, SyncFence):
            raise TypeError(f"expected fences, got {type(fence).__name__}")
        if (
            type(fence) is kind and fence._outcome is None and len(fence._parts) <= FLATTENED_PARTS_MAX  # type: ignore[attr-defined]
        ):
            # A merge that has lost its last part at this moment is about to finish: then it stands for itself.
            parts = tuple(fence._parts)  # type: ignore[attr-defined]
            yield from parts or (fence,)
            if type(fence) is MergedFence and fence._latest_ns >= 0:
                yield SyncFence.signalled(fence._latest_ns)
        else:
            fence._poll_descriptor()
            yield fence
