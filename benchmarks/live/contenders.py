"""The ways from a network camera to a model, each in a process of its own, which prints its figures as JSON.

All peers read in one thread, which keeps the newest picture alone, and infer in another one: the best form of such a loop.

    python -m benchmarks.live.contenders NAME ADDRESS STAMPS MODEL SECONDS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.live.camera import Stamps, number_of

if TYPE_CHECKING:
    from aionn.runtime.discovery import Isolation
    from benchmarks.engine import Engine

__all__ = ["CONTENDERS", "ISOLATIONS", "SPARE_S", "WARM_UP_S", "missing"]

WARM_UP_S = 2.0
"""From the first result to the measurement: the pictures that were queued by then, and the first inferences."""

SPARE_S = 10.0
"""Added for aionn, which starts a spare driver process up to eight seconds after the first one: once, however long it runs."""

Pixels = npt.NDArray[np.uint8]


def missing(name: str) -> str | None:
    """The reason why a contender cannot run here; None if it can."""
    try:
        if name == "opencv":
            import cv2  # noqa: F401
        if name == "pyav":
            import av  # noqa: F401
        if name == "gstreamer":
            import gi

            gi.require_version("Gst", "1.0")
            from gi.repository import Gst

            Gst.init(None)
            for element in (
                "souphttpsrc",
                "multipartdemux",
                "jpegdec",
                "videoconvert",
                "videoscale",
                "appsink",
            ):
                if Gst.ElementFactory.find(element) is None:
                    return f"GStreamer has no element {element}"
    except (ImportError, ValueError) as error:
        remedy = {
            "opencv": "pip install opencv-python-headless",
            "gstreamer": "a Python that has `gi`: packages python3-gi and gstreamer1.0-plugins-good",
        }.get(name, "pip install av")
        return f"{error}; it needs {remedy}"
    return None


def processor_s(pid: int) -> float:
    """Processor time of a process and of its living descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return own + sum(processor_s(child) for child in children)


class Measurement:
    """Ages of results: from the time of capture to the time of the result.

    Args:
        stamps: Times of capture.
        seconds: Length of the measurement, after the warming up.
        warm_up_s: Length of that.
    """

    def __init__(self, stamps: Stamps, seconds: float, warm_up_s: float) -> None:
        self._stamps = stamps
        self._seconds = seconds
        self._warm_up_s = warm_up_s
        self._begin_ns: int | None = None
        self._end_ns = 0
        self._processor_s: list[float] = []
        self._ages_ms: list[float] = []
        self._numbers: list[int] = []

    def add(self, picture: Pixels, finished_ns: int) -> bool:
        """Counts a result; returns whether the measurement has ended."""
        if self._begin_ns is None:
            self._begin_ns = finished_ns + int(self._warm_up_s * 1e9)
            self._end_ns = self._begin_ns + int(self._seconds * 1e9)
        if finished_ns < self._begin_ns:
            return False
        if not self._processor_s:
            self._processor_s.append(processor_s(os.getpid()))
        number = number_of(picture)
        self._ages_ms.append((finished_ns - self._stamps[number]) / 1e6)
        self._numbers.append(number)
        if finished_ns < self._end_ns:
            return False
        self._processor_s.append(processor_s(os.getpid()))  # While the processes are alive.
        return True

    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        begun_s, ended_s = self._processor_s
        return {
            "p50_ms": float(np.percentile(self._ages_ms, 50)),
            "p99_ms": float(np.percentile(self._ages_ms, 99)),
            "processor_ms": (ended_s - begun_s) * 1e3 / len(self._ages_ms),
            "results": len(self._ages_ms),
            "repeated": sum(a == b for a, b in zip(self._numbers, self._numbers[1:])),
        }


class Newest:
    """A place for one picture between two threads; a newer one replaces it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._picture: Pixels | None = None

    def put(self, picture: Pixels) -> None:
        with self._changed:
            self._picture = picture
            self._changed.notify()

    def take(self) -> Pixels:
        with self._changed:
            while self._picture is None:
                if not self._changed.wait(10):
                    raise TimeoutError("no picture within 10 s")
            picture, self._picture = self._picture, None
            return picture


def opencv_pictures(address: str, size: tuple[int, int]) -> Iterator[Pixels]:
    import cv2

    capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG)
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # FFmpeg's backend ignores it; the usual program sets it.
    while True:
        is_whole, picture = capture.read()
        if not is_whole:
            raise RuntimeError("VideoCapture.read failed")
        yield cv2.cvtColor(cv2.resize(picture, size), cv2.COLOR_BGR2RGB)


def pyav_pictures(address: str, size: tuple[int, int]) -> Iterator[Pixels]:
    import av
    from av.video.reformatter import Interpolation, VideoReformatter

    reformatter = VideoReformatter()
    with av.open(address, options={"fflags": "nobuffer"}, timeout=(10, 5)) as container:
        container.streams.video[0].thread_type = "SLICE"
        for picture in container.decode(video=0):
            yield reformatter.reformat(
                picture, *size, "rgb24", interpolation=Interpolation.FAST_BILINEAR, threads=1
            ).to_ndarray()


def gstreamer_pictures(address: str, size: tuple[int, int]) -> Iterator[Pixels]:
    import gi

    gi.require_version("Gst", "1.0")
    from gi.repository import Gst

    Gst.init(None)
    pipeline = Gst.parse_launch(
        f"souphttpsrc location={address} is-live=true do-timestamp=true ! multipartdemux ! jpegdec ! "
        f"videoscale ! videoconvert ! video/x-raw,format=RGB,width={size[0]},height={size[1]} ! "
        "appsink name=sink max-buffers=1 drop=true sync=false"
    )
    sink = pipeline.get_by_name("sink")
    pipeline.set_state(Gst.State.PLAYING)
    while True:
        sample = sink.emit("pull-sample")
        if sample is None:
            raise RuntimeError("the pipeline has ended")
        buffer = sample.get_buffer()
        _, mapped = buffer.map(Gst.MapFlags.READ)
        stride = -(-size[0] * 3 // 4) * 4
        rows = np.frombuffer(mapped.data, np.uint8, stride * size[1]).reshape(size[1], stride)
        picture = rows[:, : size[0] * 3].reshape(size[1], size[0], 3).copy()
        buffer.unmap(mapped)
        yield picture


def preparation(engine: Engine) -> Callable[[Pixels], npt.NDArray[Any]]:
    """The quickest way from a picture to the values of a model's input, as aionn's own: a division, or a bit of each level."""
    values = np.empty(engine.input_shape, engine.input["dtype"])
    if values.dtype == np.float32:
        return lambda picture: np.divide(picture[np.newaxis], np.float32(255), out=values)
    levels = np.arange(256, dtype=np.uint8)
    table = engine.quantised(levels.astype(np.float32) / np.float32(255))
    if values.dtype == np.int8 and np.array_equal(table, (levels ^ 0x80).view(np.int8)):
        bits = values.view(np.uint8)

        def invert(picture: Pixels) -> npt.NDArray[Any]:
            np.bitwise_xor(picture[np.newaxis], 0x80, out=bits)
            return values

        return invert
    return lambda picture: np.take(table, picture[np.newaxis], out=values, mode="clip")


def run_peer(
    read: Callable[[str, tuple[int, int]], Iterator[Pixels]],
    address: str,
    measurement: Measurement,
    model: Path,
) -> None:
    from benchmarks.engine import Engine

    engine = Engine(model)
    _, height, width, _ = engine.input_shape
    prepare = preparation(engine)
    newest = Newest()

    def fill() -> None:
        for picture in read(address, (width, height)):
            newest.put(picture)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        picture = newest.take()
        engine(prepare(picture))
        if measurement.add(picture, time.monotonic_ns()):
            return


async def run_aionn(address: str, measurement: Measurement, model: Path, isolation: Isolation) -> None:
    import aionn
    from aionn.media import network

    async with (
        aionn.open(drivers=["litert-cpu"], isolation=isolation) as runtime,
        await runtime.compile(model) as net,
    ):
        _, height, width, _ = net.inputs[0].dimensions
        write = aionn.image_writer(net.inputs[0])
        # A second slot would write the next picture while this one is executed: more results a second, each older by an inference.
        async with net.burst(slots=1) as burst, network(address, size=(width, height)) as frames:
            results = burst.stream(
                frames,
                into=lambda frame, view: write(frame.data, view),
                deadline=lambda frame: frame.captured_at_ns + 33_000_000,
                on_late="deliver",
            )
            async with results:
                async for result in results:
                    # The time at which the caller has the answer, as for the peers.
                    if measurement.add(result.item.data, time.monotonic_ns()):
                        return


PEERS: dict[str, Callable[[str, tuple[int, int]], Iterator[Pixels]]] = {
    "opencv": opencv_pictures,
    "pyav": pyav_pictures,
    "gstreamer": gstreamer_pictures,
}

ISOLATIONS: dict[str, Isolation] = {"aionn": "process", "aionn in process": "in_process"}
"""With the driver in a process of its own, which is the default, and in the application's, where the peers have their engine."""

CONTENDERS = (*ISOLATIONS, *PEERS)


def main(name: str, address: str, stamps: str, model: str, seconds: str) -> None:
    isolation = ISOLATIONS.get(name)
    warm_up_s = WARM_UP_S + (SPARE_S if isolation == "process" else 0.0)
    measurement = Measurement(Stamps(Path(stamps)), float(seconds), warm_up_s)
    if isolation is not None:

        async def run() -> None:
            await run_aionn(address, measurement, Path(model), isolation)
            print(json.dumps(measurement.figures()), flush=True)

        asyncio.run(run())
        return
    run_peer(PEERS[name], address, measurement, Path(model))
    print(json.dumps(measurement.figures()), flush=True)
    os._exit(0)  # The reading thread cannot be ended.


if __name__ == "__main__":
    main(*sys.argv[1:])
