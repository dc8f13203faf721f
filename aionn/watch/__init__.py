"""The figures of running streams, and a page in the browser that shows them with the newest pictures.

Owns the collector, the page and its server. Refuses to own streams: they run the same, watched or not::

    collector = Collector()
    stream = collector.add_stream("camera", within_ns=33_000_000)
    async with WatchPage(collector) as page:
        print(page.url)
        async for result in burst.stream(frames, into=stream.writer(write), deadline=...):
            stream.add(result)

The page needs the extra ``watch``; the collector needs nothing.
"""

from aionn.watch.app import WatchApp
from aionn.watch.collector import Collector, Snapshot
from aionn.watch.detections import (
    Finding,
    best_class,
    center_boxes,
    labelled,
    non_maximum_suppression,
    postprocessed_boxes,
)
from aionn.watch.metrics import metrics_text
from aionn.watch.server import WatchPage
from aionn.watch.streams import WatchedStream

__all__ = [
    "Collector",
    "Finding",
    "Snapshot",
    "WatchApp",
    "WatchPage",
    "WatchedStream",
    "best_class",
    "center_boxes",
    "labelled",
    "metrics_text",
    "non_maximum_suppression",
    "postprocessed_boxes",
]
