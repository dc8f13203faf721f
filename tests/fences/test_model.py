"""Fences against a small reference model: random fences, dependants, timelines, waiters in two loops, threads, cancellation.

The model knows only what each fence was made from and how the roots were finished; every outcome follows from that. The
real objects must agree after every step, whatever order, loop or thread things happened in.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

import fences
from fences import FenceError, FenceStateError, FenceStatus, SyncFence, Timeline

PENDING = None


class Node:
    """What the model remembers of a fence: how its outcome follows, and the real fence."""

    def __init__(self, fence, kind, *parts, timeline=None, point=0):
        self.fence, self.kind, self.parts, self.timeline, self.point = fence, kind, parts, timeline, point
        self.root_outcome = PENDING  # Of a root: ("ok", time) or ("bad", origin).
        self.settled = PENDING

    def outcome(self):
        """("ok", time or None if the model cannot know it), ("bad", set of possible origins), or PENDING; only that changes."""
        if self.settled is PENDING:
            self.settled = getattr(self, f"_{self.kind}")()
        return self.settled

    def _root(self):
        return self.root_outcome

    def _import(self):
        return self.parts[0].outcome()

    def _point(self):
        value_at, failure = self.timeline.reached.get(self.point), self.timeline.failure
        return ("ok", value_at) if value_at is not None else failure

    def _then(self):
        source = self.parts[0].outcome()
        return ("ok", None) if source is not PENDING and source[0] == "ok" else source

    def _raising(self):
        source = self.parts[0].outcome()
        return ("bad", {self.fence.name}) if source is not PENDING and source[0] == "ok" else source

    def _following(self):
        source = self.parts[0].outcome()
        return self.parts[1].outcome() if source is not PENDING and source[0] == "ok" else source

    def _merge(self):
        outcomes = [part.outcome() for part in self.parts]
        bad = [each[1] for each in outcomes if each is not PENDING and each[0] == "bad"]
        if bad:
            return ("bad", set().union(*bad))
        if PENDING in outcomes:
            return PENDING
        times = [each[1] for each in outcomes]
        return ("ok", None if None in times or not times else max(times))

    def _first(self):
        outcomes = [part.outcome() for part in self.parts]
        if any(each is not PENDING and each[0] == "ok" for each in outcomes):
            return ("ok", None)
        if PENDING in outcomes:
            return PENDING
        return ("bad", set().union(*(each[1] for each in outcomes)))


class ModelTimeline:
    def __init__(self, real):
        self.real, self.value, self.failure = real, 0, PENDING
        self.reached = {}  # Point to time, for the points that fences were made for.
        self.points = set()


class Waiter:
    def __init__(self, node, loop, task):
        self.node, self.loop, self.task = node, loop, task
        self.cancelled = False


class FencesAgainstModel(RuleBasedStateMachine):
    nodes = Bundle("nodes")
    waiters = Bundle("waiters")

    loop_factories = (asyncio.new_event_loop, asyncio.new_event_loop)

    @initialize()
    def start(self):
        self.loops = [factory() for factory in self.loop_factories]
        self.all_nodes, self.all_waiters, self.calls, self.pending_calls = [], [], [], []
        self.timelines = [ModelTimeline(Timeline(f"line {index}")) for index in range(2)]
        self.clock = 0

    def teardown(self):
        if not hasattr(self, "loops"):
            return
        for waiter in self.all_waiters:
            waiter.task.cancel()
        for loop in self.loops:
            self.step(loop)
        for waiter in self.all_waiters:
            assert waiter.task.done()
        for node in self.all_nodes:
            node.fence.close()
        deadline_s = time.monotonic() + 60
        # The thread that watches descriptors may be in the middle of running the last waiters.
        for node in self.all_nodes:
            while node.fence.waiter_count and time.monotonic() < deadline_s:
                time.sleep(0.001)
            assert node.fence.waiter_count == 0
        for loop in self.loops:
            self.step(loop)
            loop.close()

    def step(self, loop):
        async def turns():
            # Enough for a descriptor to be seen, a task to wake, and what waits for that task.
            for _ in range(4):
                await asyncio.sleep(0)

        loop.run_until_complete(turns())

    def add(self, node):
        self.all_nodes.append(node)
        self.check(node)
        return node

    def now(self):
        self.clock += 1
        return self.clock

    # Fences

    @rule(target=nodes)
    def make_root(self):
        return self.add(Node(SyncFence(f"root {len(self.all_nodes)}"), "root"))

    @rule(target=nodes, source=nodes, name=st.sampled_from(["then", "raising"]))
    def chain(self, source, name):
        work = {"then": lambda: None, "raising": lambda: 1 / 0}[name]
        return self.add(Node(source.fence.then(work, f"{name} {len(self.all_nodes)}"), name, source))

    @rule(target=nodes, source=nodes, followed=nodes)
    def chain_to_another(self, source, followed):
        return self.add(Node(source.fence.then(lambda: followed.fence), "following", source, followed))

    @rule(target=nodes, parts=st.lists(nodes, max_size=4))
    def merge(self, parts):
        return self.add(Node(fences.merge(part.fence for part in parts), "merge", *parts))

    @rule(target=nodes, parts=st.lists(nodes, min_size=1, max_size=4))
    def first(self, parts):
        return self.add(Node(fences.first([part.fence for part in parts]), "first", *parts))

    @rule(target=nodes, which=st.integers(0, 1), point=st.integers(0, 12))
    def make_point(self, which, point):
        timeline = self.timelines[which]
        fence = timeline.real.fence(point)
        if point <= timeline.value:
            timeline.reached.setdefault(point, None if point == 0 else fence.signal_time_ns)
            node = Node(fence, "root")
            node.root_outcome = ("ok", fence.signal_time_ns)
            return self.add(node)
        timeline.points.add(point)
        return self.add(Node(fence, "point", timeline=timeline, point=point))

    @rule(target=nodes, source=nodes)
    def cross_a_descriptor(self, source):
        number = source.fence.duplicate()
        imported = SyncFence.from_fd(number)
        os.close(number)
        return self.add(Node(imported, "import", source))

    # Finishing

    @rule(node=nodes, good=st.booleans(), in_thread=st.booleans())
    def finish(self, node, good, in_thread):
        fence = node.fence

        def finish():
            try:
                fence.signal(at_ns) if good else fence.fail("injected", at_ns=at_ns)
            except FenceStateError:
                return
            finished.append(1)

        at_ns, finished = self.now(), []
        if in_thread:
            thread = threading.Thread(target=finish)
            thread.start()
            thread.join()
        else:
            finish()
        assert bool(finished) == (node.kind == "root" and node.root_outcome is PENDING)
        if finished:
            node.root_outcome = ("ok", at_ns) if good else ("bad", {fence.name})

    @rule(which=st.integers(0, 1), point=st.integers(0, 12))
    def advance(self, which, point):
        timeline, at_ns = self.timelines[which], self.now()
        allowed = timeline.failure is PENDING and point > timeline.value
        try:
            timeline.real.advance(point, at_ns)
        except FenceStateError:
            assert not allowed
            return
        assert allowed
        timeline.value = point
        for each in timeline.points:
            if each <= point:
                timeline.reached.setdefault(each, at_ns)

    @rule(which=st.integers(0, 1))
    def fail_timeline(self, which):
        timeline = self.timelines[which]
        try:
            timeline.real.fail("over")
        except FenceStateError:
            assert timeline.failure is not PENDING
            return
        assert timeline.failure is PENDING
        timeline.failure = ("bad", {timeline.real.name})

    # Waiting

    @rule(target=waiters, node=nodes, which=st.integers(0, 1))
    def wait(self, node, which):
        async def wait():
            await node.fence

        waiter = Waiter(node, self.loops[which], self.loops[which].create_task(wait()))
        self.all_waiters.append(waiter)
        return waiter

    @rule(waiter=consumes(waiters))
    def cancel(self, waiter):
        waiter.cancelled = waiter.task.cancel()

    @rule(node=nodes)
    def call_back(self, node):
        seen = []
        node.fence.add_callback(seen.append)
        self.calls.append((node, seen))

    @rule(node=nodes)
    def call_back_and_take_back(self, node):
        def never(_):
            if node.outcome() is PENDING:
                raise AssertionError("called while pending")

        node.fence.add_callback(never)
        # An imported fence may have finished without anybody having looked: then it is called, at the latest now.
        assert (
            node.fence.remove_callback(never) == (node.fence.status is FenceStatus.PENDING)
            or node.outcome() is not PENDING
        )

    @precondition(lambda self: self.all_nodes)
    @rule(data=st.data())
    def look_from_a_thread(self, data):
        node = data.draw(st.sampled_from(self.all_nodes))
        results = []

        def look():
            try:
                results.append(node.fence.wait(0))
            except FenceError:
                results.append("bad")

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        outcome = node.outcome()
        assert self.lags(node) or results == [
            False if outcome is PENDING else True if outcome[0] == "ok" else "bad"
        ]

    @rule()
    def step_both_loops(self):
        self.settle()
        for loop in self.loops:
            self.step(loop)
        for waiter in self.all_waiters:
            outcome = waiter.node.outcome()
            if waiter.cancelled:
                # Cancelling may lose the race against a finish that the task had already seen; never against one that came later.
                assert waiter.task.done()
                if waiter.task.cancelled():
                    continue
            if outcome is PENDING:
                assert not waiter.task.done()
            else:
                assert waiter.task.done()
                error = waiter.task.exception()
                if outcome[0] == "ok":
                    assert error is None
                else:
                    assert isinstance(error, FenceError) and error.origin in outcome[1]

    # Agreement

    def lags(self, node):
        """Whether the real fence may not know yet what the model does: it hangs on a descriptor that a thread is watching."""
        return any(part.kind == "import" or self.lags(part) for part in node.parts) or node.kind == "import"

    def settle(self):
        """Let the thread that watches descriptors catch up: wait for what the model says is finished."""
        for node in self.all_nodes:
            if node.outcome() is not PENDING and self.lags(node):
                try:
                    assert node.fence.wait(60 * 10**9)
                except FenceError:
                    pass

    def check(self, node):
        expected = node.outcome()
        if expected is PENDING:
            assert node.fence.status is FenceStatus.PENDING
            return
        if self.lags(node) and node.fence.status is FenceStatus.PENDING:
            return
        if expected[0] == "ok":
            assert node.fence.status is FenceStatus.SIGNALLED
            assert expected[1] in (None, node.fence.signal_time_ns)
        else:
            assert node.fence.status is FenceStatus.FAILED
            assert node.fence.error.origin in expected[1]

    @invariant()
    def real_fences_agree(self):
        for node in getattr(self, "all_nodes", []):
            self.check(node)
        for node, seen in getattr(self, "calls", []):
            if node.fence.status is FenceStatus.PENDING:
                assert seen == []
            elif not self.lags(node):
                assert seen == [node.fence]
            else:
                assert seen in ([], [node.fence])
        for timeline in getattr(self, "timelines", []):
            assert timeline.real.value == timeline.value


FencesAgainstModel.TestCase.settings = settings(
    max_examples=16,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFencesAgainstModel = FencesAgainstModel.TestCase

MORE_EXAMPLES = [(FencesAgainstModel, 150)]
"""Models, and how many examples of each the long form takes, as repeatable as those of the ordinary run."""


class FencesAgainstModelOnUvloop(FencesAgainstModel):
    pass


try:
    import uvloop
except ImportError:

    def test_model_on_uvloop():
        pytest.skip("uvloop is not installed")

else:
    FencesAgainstModelOnUvloop.loop_factories = (uvloop.new_event_loop, asyncio.new_event_loop)
    FencesAgainstModelOnUvloop.TestCase.settings = settings(
        FencesAgainstModel.TestCase.settings, max_examples=6
    )
    TestFencesAgainstModelOnUvloop = FencesAgainstModelOnUvloop.TestCase
    MORE_EXAMPLES.append((FencesAgainstModelOnUvloop, 50))


def run_with(model, **changes):
    """Runs a model with other settings."""

    class Long(model):
        pass

    Long.TestCase.settings = settings(model.TestCase.settings, **changes)
    Long.TestCase("runTest").runTest()


@pytest.mark.long
@pytest.mark.parametrize(("model", "max_examples"), MORE_EXAMPLES)
def test_model_with_more_examples(model, max_examples):
    run_with(model, max_examples=max_examples)


@pytest.mark.long
def test_model_for_long():
    run_with(
        FencesAgainstModel, max_examples=2000, stateful_step_count=80, derandomize=False, print_blob=True
    )
