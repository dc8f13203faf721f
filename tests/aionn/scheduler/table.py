"""Slots and a ready queue: the least shell that applies decisions, for tests of the pure policy."""

from __future__ import annotations

from aionn.hal import Priority
from aionn.scheduler.job import NEVER_NS, Abort, DeviceSlot, Job, JobState, Start
from aionn.scheduler.planned_queue import PlannedQueue
from aionn.scheduler.planning_policy import decide


class Table:
    """Slots with a ready queue, and the least shell that applies decisions."""

    def __init__(self, slots=1, devices=None, policy=None, **settings):
        devices = devices or list(range(slots))
        self.slots = [DeviceSlot(index, device) for index, device in enumerate(devices)]
        self.queue = PlannedQueue(self.slots, **settings) if policy is None else policy.make_queue(self.slots)
        self._decide = decide if policy is None else policy.decide
        self.now = 0
        self.number = 0

    def job(self, *durations, priority=Priority.MEDIUM, deadline=None, urgent=None):
        job = Job(
            self.number,
            priority=priority,
            deadline_ns=deadline,
            arrival_ns=self.now,
            durations_ns=durations,
            urgent_ns=urgent,
        )
        self.number += 1
        return job

    def add(self, *durations, **settings):
        job = self.job(*durations, **settings)
        assert self.queue.add(job, self.now) is None
        return job

    def decide(self, now=None):
        self.now = self.now if now is None else now
        actions = self._decide(self.now, self.queue, self.slots)
        for action in actions:
            if isinstance(action, Start):
                self.queue.remove(action.job)
                action.job.state = JobState.RUNNING
                action.job.has_run = True
                action.job.device = action.slot.device
                action.slot.job = action.job
                action.slot.ends_ns = self.now + action.job.durations_ns[action.slot.device]
            elif isinstance(action, Abort):
                self.queue.remove(action.job)
                action.job.state = JobState.ENDED
            else:
                action.slot.is_stopping = True
        return actions

    def end(self, slot=0, now=None):
        self.now = self.slots[slot].ends_ns if now is None else now
        job = self.slots[slot].job
        job.state = JobState.ENDED
        self.slots[slot].job = None
        self.slots[slot].is_stopping = False
        return job

    def suspend(self, slot):
        """What runs stops at once, and goes on with what is left of it when its turn comes again."""
        job = slot.job
        slot.job, slot.is_stopping, job.state = None, False, JobState.WAITING
        left = [NEVER_NS] * len(job.durations_ns)
        left[slot.device] = slot.ends_ns - self.now
        job.durations_ns, job.shortest_ns = left, left[slot.device]
        self.queue.add(job, self.now)

    def order(self):
        """Numbers in the order in which one slot runs them."""
        found = []
        while True:
            self.decide()
            if self.slots[0].job is None:
                return found
            found.append(self.end().number)


async def acquire(dispatcher, **terms):
    """Waits for a slot of a dispatcher; returns what ``release`` takes."""
    job = dispatcher.enter(**terms)
    await dispatcher.wait(job)
    return job


def starts(actions):
    return [(a.job.number, a.slot.index) for a in actions if isinstance(a, Start)]
