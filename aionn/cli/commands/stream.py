"""``aionn stream``: a camera, a microphone, a network stream or a file through any model, at its natural pace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import numpy as np
from cyclopts import Parameter

import aionn
from aionn.cli import interrupts
from aionn.cli.importing import Dimensions, InputShapes, Values, import_options
from aionn.cli.numbers import DEADLINE_MS_MAX, numbers
from aionn.cli.output import print_json
from aionn.cli.realtime import RealtimeOption, realtime_sentence
from aionn.cli.watched_streams import (
    classifier,
    dropped_count,
    latency_of,
    presented_count,
    print_recording,
    recording_report,
    recording_to,
    served_page,
    show_live,
    stream_and_count,
    warm_up,
    watch_address,
)
from aionn.drivers.registry import drivers_for
from aionn.errors import InvalidArgument
from aionn.media import (
    LiveStatistics,
    audio_file,
    has_sound,
    log_mel,
    named_source,
    shown_name,
    video_file,
)
from aionn.models.importing import ImportOptions
from aionn.platform.files import TEXT_BYTES_MAX, read_regular
from aionn.reports.terminal import print_line, print_table
from aionn.runtime.clock import to_ns
from aionn.runtime.executions.results import PriorityName
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.memory.pictures import image_size, image_writer
from aionn.runtime.memory.real_values import Writer, value_writer
from aionn.watch import Collector, WatchedStream

__all__ = ["stream"]

LOG_MEL_SHAPE = (49, 40)
"""An input of this many values is taken to want the log-mel energies of one second."""

SECONDS_MAX = 31_622_400
"""A leap year, as for deadlines."""

LABELS_SHOWN = 10
"""Labels of the report, the most frequent ones."""

LEVEL_MAX = 1e6
"""The largest magnitude of black and white: beyond the range of all element types of a picture."""


def stream(
    model: Path,
    /,
    *,
    video: Path | None = None,
    audio: Path | None = None,
    camera: str | None = None,
    source: str | None = None,
    seconds: Annotated[float | None, numbers(0, SECONDS_MAX, "seconds", is_open=True)] = None,
    device: str | None = None,
    priority: PriorityName = "high",
    deadline_ms: Annotated[float, numbers(0, DEADLINE_MS_MAX, "ms")] = 33.0,
    on_late: Literal["drop", "deliver"] = "drop",
    keep: Literal["latest", "all", "oldest"] = "latest",
    labels: Path | None = None,
    low: Annotated[float, numbers(-LEVEL_MAX, LEVEL_MAX)] = 0.0,
    high: Annotated[float, numbers(-LEVEL_MAX, LEVEL_MAX)] = 1.0,
    dimension: Dimensions = None,
    input_shape: InputShapes = None,
    value: Values = None,
    realtime: RealtimeOption = None,
    watch: Annotated[bool, Parameter(negative=())] = False,
    watch_at: str | None = None,
    record: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Stream a video, a recording or a live source through a model and show how late the answers are and what was recognised.

    Args:
        model: A .tflite or .onnx file with one input: a picture, or one second of sound (samples or 49 x 40 log-mel energies).
        video: A video file.
        audio: A recording.
        camera: 0 or /dev/video0, or a part of the camera's name such as C920; aionn devices --sources lists them.
        source: 0 or /dev/video0, a camera; camera:NAME; microphone:; rtsp://... or another address; screen:, this display;
            replay:FILE, a recording; pattern:, a test picture.
        seconds: Ends the stream after so long; by default it ends with its source, or by Ctrl-C, with its report.
        device: Which device; by default each operation goes to the quickest.
        priority: Which executions go first where several wait.
        deadline_ms: An answer is on time this long after its capture.
        on_late: Drop what is late, or deliver it late.
        keep: The frames that a slow device gets: the latest one, all of them, or the oldest.
        labels: A text file with one class name a line.
        low: The value of a black pixel.
        high: The value of a white pixel.
        dimension: NAME=EXTENT for an open extent of an .onnx file; may be repeated.
        input_shape: NAME=EXTENT,... for the shape of an input of an .onnx file; may be repeated.
        value: NAME=FILE.npy or NAME=NUMBER,... for an input of an .onnx file that becomes a constant; may be repeated.
        realtime: Real-time scheduling: required, used if the machine permits it, or off; by default AIONN_REALTIME, or off.
        watch: Serve a page that shows the pictures with the answers, the latencies and the losses; prints its address.
        watch_at: HOST:PORT of the page, 127.0.0.1:8470 by default; another host lets other machines connect.
        record: A new file for the items that go into the model, with their times; --source replay:FILE presents them again.
        json: Print one JSON object.
    """
    sources = {"--video": video, "--audio": audio, "--camera": camera, "--source": source}
    given = [option for option, value_given in sources.items() if value_given is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"stream: expected one of {', '.join(sources)}; got {' and '.join(given) or 'none'}"
        )
    if camera is not None:
        source = f"camera:{camera}"
    within_ns = to_ns(deadline_ms / 1e3, what="--deadline-ms")
    names = _labels(labels)
    imports = import_options(dimension, input_shape, value)
    report = interrupts.run(
        _stream,
        model,
        imports,
        video,
        audio,
        source,
        seconds,
        device,
        priority,
        within_ns,
        on_late,
        keep,
        names,
        (low, high),
        watch_address(watch, watch_at),
        record,
        not json,
        realtime,
    )
    if json:
        print_json(report)
    else:
        _print(report)
    return 0


def _labels(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return read_regular(path, "--labels", TEXT_BYTES_MAX).decode().splitlines()
    except UnicodeDecodeError as e:
        raise InvalidArgument(f"--labels {path}: expected UTF-8 text: {e.reason}") from e


def _sound_writer(spec: TensorSpec) -> Writer:
    write = value_writer(spec)
    size = int(np.prod(spec.dimensions))
    if size == LOG_MEL_SHAPE[0] * LOG_MEL_SHAPE[1]:
        return lambda window, view: write(log_mel(window.samples), view)
    return lambda window, view: write(window.samples[:size], view)


def _picture_writer(spec: TensorSpec, levels: tuple[float, float]) -> Writer:
    write = image_writer(spec, low=levels[0], high=levels[1])
    return lambda frame, view: write(frame.data, view)


def _source(
    spec: TensorSpec, video: Path | None, audio: Path | None, named: str | None, keep: Any, is_sound: bool
) -> Any:
    if is_sound and spec.dimensions and len(spec.dimensions) == 4 and spec.dimensions[3] == 3:
        extents = "x".join(map(str, spec.dimensions))
        given = "--audio" if audio is not None else "--source"
        raise InvalidArgument(
            f"stream: the model takes a picture ({spec.name}, {extents}), and {given} is sound; use --video or a camera"
        )
    if audio is not None:
        return audio_file(audio, keep=keep)
    if named is not None and is_sound:
        return named_source(named, keep=keep)
    size = image_size(spec)
    return (
        video_file(video, size=size, keep=keep)
        if video is not None
        else named_source(named or "", size=size, keep=keep)
    )


def _losses(source: Any) -> dict[str, int]:
    """Counts that live sources alone have."""
    counts = source.statistics()
    if not isinstance(counts, LiveStatistics):
        return {}
    return {"lost": counts.lost, "corrupt": counts.corrupt, "reconnections": counts.reconnections}


async def _stream(
    model: Path,
    imports: ImportOptions,
    video: Path | None,
    audio: Path | None,
    named: str | None,
    seconds: float | None,
    device: str | None,
    priority: PriorityName,
    within_ns: int,
    on_late: str,
    keep: Any,
    names: list[str],
    levels: tuple[float, float],
    at: str | None,
    record: Path | None,
    live: bool,
    realtime: RealtimeOption,
) -> dict[str, Any]:
    async with aionn.open(drivers=drivers_for(device), realtime=realtime) as runtime:
        net = await runtime.compile(model, devices=device, priority=priority, **imports.keywords)
        if len(net.inputs) != 1:
            raise InvalidArgument(f"stream: expected a model with one input, got {len(net.inputs)}")
        is_sound = audio is not None or has_sound(named or "")
        source = _source(net.inputs[0], video, audio, named, keep, is_sound)
        collector = Collector(f"{model.name} on {', '.join(net.devices)}")
        collector.add_devices(d for d in runtime.devices if d.name in net.devices)
        watched = collector.add_stream("audio" if is_sound else "video", within_ns=within_ns, source=source)
        into = _sound_writer(net.inputs[0]) if is_sound else _picture_writer(net.inputs[0], levels)
        async with recording_to(record) as recorder, served_page(collector, at), net.burst() as burst:
            await warm_up(burst, net.inputs[0])
            granted = realtime_sentence(await runtime.realtime())
            finished = anyio.Event()
            async with anyio.create_task_group() as tasks:
                if live:
                    tasks.start_soon(lambda: show_live(collector, finished=finished.is_set))
                try:
                    with (
                        interrupts.ends_early(),
                        anyio.move_on_after(math.inf if seconds is None else seconds),
                    ):
                        await stream_and_count(
                            watched,
                            source,
                            burst,
                            into=into,
                            describe=classifier(net.outputs, names),
                            within_ns=within_ns,
                            on_late=on_late,
                            measure=at is not None,
                            recorder=recorder,
                        )
                finally:
                    finished.set()
        figures = watched.figures
        return {
            "model": str(model),
            "source": str(video or audio or (shown_name(named) if named else "")),
            "device": ", ".join(net.devices),
            "items": presented_count(watched),
            "on_time": figures.counts["on_time"],
            "late": figures.counts["late"],
            "dropped": dropped_count(watched),
            **_losses(source),
            "per_second": round(figures.per_second, 2),
            "latency_ms": latency_of(watched),
            **recording_report(record, recorder),
            "realtime": granted,
            "recognised": _counted(watched),
        }


def _counted(stream: WatchedStream) -> list[dict[str, Any]]:
    """The most frequent labels."""
    found = stream.figures.labels.most_common(LABELS_SHOWN)
    return [{"label": label, "count": count} for label, count in found]


def _print(report: dict[str, Any]) -> None:
    if report.get("lost") or report.get("corrupt") or report.get("reconnections"):
        print_line(
            f"lost before it arrived {report['lost']}, damaged {report['corrupt']}, opened again {report['reconnections']} times"
        )
    print_line(
        f"through {report['model']} on {report['device']}: "
        f"{report['items']} items, "
        f"{report['on_time']} on time, {report['late']} late, {report['dropped']} dropped, {report['per_second']:.1f} per s, "
        f"latency {report['latency_ms']}",
        lead=report["source"],
    )
    print_recording(report)
    if report["realtime"]:
        print_line(report["realtime"], lead="real time")
    if report["recognised"]:
        print_table(
            "recognised", ("label", "count"), [(r["label"], r["count"]) for r in report["recognised"]]
        )
