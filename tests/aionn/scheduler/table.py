"""A table of lanes before a waiting room: the least shell that applies decisions, for tests of the pure policy."""

from __future__ import annotations

from aionn.hal import Priority
from aionn.scheduler.policy import decide
from aionn.scheduler.queue import WaitingRoom
from aionn.scheduler.work import NEVER_NS, Abort, Lane, Start, Work, WorkState


class Table:
    """Lanes with a waiting room, and the least shell that applies decisions."""

    def __init__(self, lanes=1, devices=None, policy=None, **settings):
        devices = devices or list(range(lanes))
        self.lanes = [Lane(index, device) for index, device in enumerate(devices)]
        self.room = WaitingRoom(self.lanes, **settings) if policy is None else policy.make_queue(self.lanes)
        self._decide = decide if policy is None else policy.decide
        self.now = 0
        self.number = 0

    def work(self, *durations, priority=Priority.MEDIUM, deadline=None, urgent=None):
        work = Work(
            self.number,
            priority=priority,
            deadline_ns=deadline,
            arrival_ns=self.now,
            durations_ns=durations,
            urgent_ns=urgent,
        )
        self.number += 1
        return work

    def add(self, *durations, **settings):
        work = self.work(*durations, **settings)
        assert self.room.add(work, self.now) is None
        return work

    def decide(self, now=None):
        self.now = self.now if now is None else now
        actions = self._decide(self.now, self.room, self.lanes)
        for action in actions:
            if isinstance(action, Start):
                self.room.remove(action.work)
                action.work.state = WorkState.RUNNING
                action.work.has_run = True
                action.work.device = action.lane.device
                action.lane.work = action.work
                action.lane.ends_ns = self.now + action.work.durations_ns[action.lane.device]
            elif isinstance(action, Abort):
                self.room.remove(action.work)
                action.work.state = WorkState.ENDED
            else:
                action.lane.is_stopping = True
        return actions

    def end(self, lane=0, now=None):
        self.now = self.lanes[lane].ends_ns if now is None else now
        work = self.lanes[lane].work
        work.state = WorkState.ENDED
        self.lanes[lane].work = None
        self.lanes[lane].is_stopping = False
        return work

    def give_way(self, lane):
        """What runs stops at once, and goes on with what is left of it when its turn comes again."""
        work = lane.work
        lane.work, lane.is_stopping, work.state = None, False, WorkState.WAITING
        left = [NEVER_NS] * len(work.durations_ns)
        left[lane.device] = lane.ends_ns - self.now
        work.durations_ns, work.shortest_ns = left, left[lane.device]
        self.room.add(work, self.now)

    def order(self):
        """Numbers in the order in which one lane runs them."""
        found = []
        while True:
            self.decide()
            if self.lanes[0].work is None:
                return found
            found.append(self.end().number)


async def acquire(dispatcher, **terms):
    """Waits for a slot of a dispatcher; returns what ``release`` takes."""
    work = dispatcher.enter(**terms)
    await dispatcher.turn(work)
    return work


def starts(actions):
    return [(a.work.number, a.lane.index) for a in actions if isinstance(a, Start)]
