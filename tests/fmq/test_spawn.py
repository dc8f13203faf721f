"""Queues among the arguments of a process that multiprocessing starts, and what pickling one says."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from multiprocessing import resource_tracker

import pytest

import fmq

LIMIT_S = 60


def answer(requests: fmq.MessageQueue, results: fmq.MessageQueue) -> None:
    with requests, results:
        element = requests.read_blocking()
        assert element is not None
        results.write_blocking(bytes(reversed(element)))


@pytest.mark.forked("any")
def test_spawned_process_gets_endpoints_of_its_own() -> None:
    with fmq.MessageQueue.create(3, 8) as requests, fmq.MessageQueue.create(3, 8) as results:
        child = multiprocessing.get_context("spawn").Process(target=answer, args=(requests, results))
        child.start()
        requests.write(b"abc")
        child.join(LIMIT_S)
        assert child.exitcode == 0
        assert results.read() == b"cba"
        child.close()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # A process that multiprocessing keeps.


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy])
def test_queue_that_is_pickled_says_how_it_is_passed(take: object) -> None:
    words = r"arguments of a multiprocessing.Process, or send it by fmq.passing.send_queue"
    with fmq.MessageQueue.create(1, 64) as queue, pytest.raises(TypeError, match=words):
        take(queue)  # type: ignore[operator]
    with pytest.raises(fmq.ClosedQueue, match="closed, and cannot be passed"):
        pickle.dumps(queue)
