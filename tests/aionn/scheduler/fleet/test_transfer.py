"""The way of frames over a link: the terms at the node, and the waits of streams that share the link."""

from __future__ import annotations

import random

import pytest

from aionn.errors import InvalidArgument
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.fleet.transfer import LinkLoad, NodeLink, Way

MS = 1_000_000


def terms(name: str = "a", *, period_ms: int = 40, deadline_ms: int = 40, jitter_ms: int = 0) -> StreamTerms:
    return StreamTerms(
        name=name, period_ns=period_ms * MS, deadline_ns=deadline_ms * MS, jitter_ns=jitter_ms * MS
    )


def test_a_deadline_is_shorter_at_the_node_by_the_way_and_the_jitter_is_longer():
    link = NodeLink(latency_ns=MS, jitter_ns=2 * MS, bytes_per_s=100_000_000, wait_ns=5 * MS)
    way = Way.over(link, up_bytes=150_000, down_bytes=1_000)
    assert (way.up_ns, way.down_ns) == (1_500_000, 10_000)
    at_node = way.terms(terms(jitter_ms=3))
    # There: 1 ms and 1.5 ms at least, and up to 2 ms and the rest of the 5 ms more. Back: 1 + 2 + 5 ms at most.
    assert at_node == StreamTerms(
        name="a", period_ns=40 * MS, deadline_ns=40 * MS - 2_500_000 - 8 * MS, jitter_ns=3 * MS + 5_500_000
    )


def test_a_link_without_a_bandwidth_has_no_waits():
    link = NodeLink(latency_ns=MS, jitter_ns=MS)
    way = Way.over(link, 10**9, 10**9)
    assert way.terms(terms()) == StreamTerms(
        name="a", period_ns=40 * MS, deadline_ns=37 * MS, jitter_ns=1 * MS
    )
    load = LinkLoad(link)
    for _ in range(1000):
        assert load.has_room(way, terms())
        load.add(way, terms())


def test_a_way_that_takes_the_deadline_leaves_no_terms():
    link = NodeLink(latency_ns=10 * MS, jitter_ns=5 * MS)
    assert Way.over(link, 0, 0).terms(terms(deadline_ms=30)) is None
    assert Way.over(link, 0, 0).terms(terms(deadline_ms=31)) is not None


@pytest.mark.parametrize("field", ["latency_ns", "jitter_ns", "bytes_per_s", "wait_ns"])
@pytest.mark.parametrize("value", [-1, 1.5, True, 1 << 60])
def test_a_link_of_other_numbers_is_rejected(field: str, value: object):
    with pytest.raises(InvalidArgument, match=f"link, {field}: expected an integer from 0 to"):
        NodeLink(**{field: value})


def test_a_stream_that_leaves_frees_its_room():
    link = NodeLink(bytes_per_s=1_000_000, wait_ns=25 * MS)
    way = Way.over(link, 10_000, 0)  # 10 ms each.
    at_node = way.terms(terms())
    assert at_node is not None
    load = LinkLoad(link)
    load.add(way, at_node)
    load.add(way, at_node)
    assert not load.has_room(way, at_node)
    load.remove(way, at_node)
    assert load.has_room(way, at_node)


@pytest.mark.parametrize("seed", range(20))
def test_no_frame_of_a_full_link_waits_longer_than_is_counted_with(seed: int):
    source = random.Random(seed)
    link = NodeLink(bytes_per_s=source.choice((5_000_000, 50_000_000)), wait_ns=source.randrange(4, 15) * MS)
    load, streams = LinkLoad(link), []
    for _ in range(60):
        own = terms(
            period_ms=source.choice((10, 33, 50)), deadline_ms=50, jitter_ms=source.choice((0, 4, 40))
        )
        way = Way.over(link, source.randrange(1000, 60_000), 0)
        at_node = way.terms(own)
        if at_node is not None and load.has_room(way, at_node):
            load.add(way, at_node)
            streams.append((own, way))
    assert streams
    begins = []
    for own, way in streams:
        last_ns = 0
        for number in range(12):
            # The first frame of each is as late as it may be, so that the next ones follow closely.
            late_ns = own.jitter_ns if number == 0 else source.randrange(own.jitter_ns // 4 + 1)
            last_ns = max(last_ns, number * own.period_ns + late_ns - (own.jitter_ns if number else 0))
            begins.append((max(last_ns, number * own.period_ns), way.up_ns))
    free_ns, longest_ns = 0, 0
    for at_ns, up_ns in sorted(begins):
        free_ns = max(free_ns, at_ns) + up_ns
        longest_ns = max(longest_ns, free_ns - at_ns)
    assert 0 < longest_ns <= link.wait_ns
