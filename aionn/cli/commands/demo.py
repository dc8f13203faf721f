"""``aionn demo``: a video and a recording at the same time, at their natural pace, through two bursts into a driver process.

Owns the demo's ground truth and its summary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import anyio
import msgspec
from cyclopts import Parameter

import aionn
from aionn.cli import interrupts
from aionn.cli.example_data import example_data
from aionn.cli.output import print_json
from aionn.cli.realtime import RealtimeOption, realtime_sentence
from aionn.cli.watched_streams import (
    Describe,
    Latency,
    classifier,
    dropped_count,
    latency_of,
    presented_count,
    served_page,
    show_live,
    stream_and_count,
    warm_up,
    watch_address,
)
from aionn.drivers.registry import drivers_for
from aionn.errors import InvalidArgument
from aionn.media import AudioWindow, Frame, audio_file, log_mel, video_file
from aionn.platform.files import TEXT_BYTES_MAX, read_regular
from aionn.reports.terminal import print_line
from aionn.runtime.executions.burst import Burst
from aionn.runtime.memory.arguments import Array
from aionn.runtime.memory.pictures import image_writer
from aionn.runtime.memory.real_values import Writer, value_writer
from aionn.watch import Collector, Finding, WatchedStream

__all__ = ["demo", "run_demo"]

VIDEO_WITHIN_NS = 33_000_000
"""A frame is on time when its answer is there before the next frame is."""

AUDIO_WITHIN_NS = 100_000_000
"""A window is on time when its answer is there before the next window is."""

CENTRED_S = 0.2
"""A window belongs to a word when their middles are at most this far apart."""

PROBABILITY_MIN = 0.5
"""A word counts as recognised above this probability."""


_T = TypeVar("_T")


class Recognised(msgspec.Struct, frozen=True):
    """The best class of one item.

    Attributes:
        index: The item's number in its source.
        time_s: Its position in the medium.
        label: The class.
        probability: Its score.
    """

    index: int
    time_s: float
    label: str
    probability: float


class Shapes(msgspec.Struct, frozen=True):
    """Ground truth of the video."""

    fps: float
    classes: tuple[str, ...]
    labels: tuple[str, ...]


class Word(msgspec.Struct, frozen=True):
    """One spoken word."""

    word: str
    start_s: float
    end_s: float


class Digits(msgspec.Struct, frozen=True):
    """Ground truth of the recording."""

    classes: tuple[str, ...]
    words: tuple[Word, ...]


class VideoReport(msgspec.Struct, frozen=True):
    """Results of the video stream; ``classes`` has each recognised class once, in the order of their first frames, and ``accuracy``
    is None where no frame was answered.
    """

    frames: int
    on_time: int
    late: int
    dropped: int
    accuracy: float | None
    fps: float
    latency_ms: Latency
    classes: tuple[str, ...] = ()


class AudioReport(msgspec.Struct, frozen=True):
    """Results of the audio stream; ``words`` has those that were found, in their order."""

    windows: int
    on_time: int
    late: int
    dropped: int
    words_expected: int
    words_found: int
    latency_ms: Latency
    words: tuple[str, ...] = ()


class DemoReport(msgspec.Struct, frozen=True):
    """The demo's result."""

    video: VideoReport
    audio: AudioReport
    driver_pids: tuple[int, ...]
    device: str
    realtime: str = ""


def demo(
    *,
    device: str | None = None,
    precision: Literal["float", "int8", "uint8"] = "int8",
    data: Path | None = None,
    realtime: RealtimeOption = None,
    watch: Annotated[bool, Parameter(negative=())] = False,
    watch_at: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Recognise shapes in a video and digits in a recording, both live, and show how late and how right the answers were.

    Args:
        device: Which device runs the models; by default the quickest that there is.
        precision: Which form of the models.
        data: Folder with the models and media; by default those that aionn brings.
        realtime: Real-time scheduling: required, used if the machine permits it, or off; by default AIONN_REALTIME, or off.
        watch: Serve a page that shows the pictures with the answers, and the latencies; prints its address.
        watch_at: HOST:PORT of the page, 127.0.0.1:8470 by default; another host lets other machines connect.
        json: Print one JSON object instead of tables.
    """
    at = watch_address(watch, watch_at)
    report = interrupts.run(
        run_demo, device, precision, data or example_data("--data"), not json, at, realtime
    )
    if json:
        print_json(report)
    else:
        _print_summary(report)
    return 0


async def run_demo(
    device: str | None,
    precision: str,
    data: Path,
    live: bool,
    at: str | None = None,
    realtime: RealtimeOption = None,
) -> DemoReport:
    """Runs the demo.

    Raises:
        InvalidArgument: A file is missing or not what it should be.
        Error: The device fails.
    """
    shapes = _read(data / "shapes.json", Shapes)
    digits = _read(data / "digits.json", Digits)
    async with aionn.open(drivers=drivers_for(device), realtime=realtime) as runtime:
        seeing = await runtime.compile(data / f"shapes_{precision}.tflite", devices=device, priority="high")
        hearing = await runtime.compile(
            data / f"digits_{precision}.tflite", devices=device, priority="medium"
        )
        names = dict.fromkeys((*seeing.devices, *hearing.devices))
        used = ", ".join(names)
        collector = Collector(f"aionn demo on {used}")
        collector.add_devices(device for device in runtime.devices if device.name in names)
        video = _Answers(collector.add_stream("video", within_ns=VIDEO_WITHIN_NS))
        audio = _Answers(collector.add_stream("audio", within_ns=AUDIO_WITHIN_NS))
        _, height, width, _ = seeing.inputs[0].dimensions
        write_picture = image_writer(seeing.inputs[0])
        write_values = value_writer(hearing.inputs[0])

        def write_frame(frame: Frame, view: Array) -> None:
            write_picture(frame.data, view)

        def write_features(window: AudioWindow, view: Array) -> None:
            write_values(log_mel(window.samples), view)

        async with served_page(collector, at), seeing.burst() as seen, hearing.burst() as heard:
            await warm_up(seen, seeing.inputs[0])
            await warm_up(heard, hearing.inputs[0])
            pids = tuple(d.pid for d in runtime.devices if d.name in names and d.pid is not None)
            granted = realtime_sentence(await runtime.realtime())
            collector.title += f", driver process {', '.join(map(str, pids)) or 'none'}"
            running = 2

            async def follow(
                answers: _Answers, source: Any, burst: Burst, into: Writer, describe: Describe
            ) -> None:
                nonlocal running
                within_ns = answers.stream.figures.within_ns
                assert within_ns is not None
                await stream_and_count(
                    answers.stream,
                    source,
                    burst,
                    into=into,
                    describe=describe,
                    within_ns=within_ns,
                    on_late="deliver",
                    measure=at is not None,
                    on_answer=answers.add,
                )
                running -= 1

            frames = video_file(data / "shapes.mp4", size=(width, height), keep="latest")
            windows = audio_file(data / "digits.wav", keep="latest")
            shown = classifier(seeing.outputs, shapes.classes)
            spoken = classifier(hearing.outputs, digits.classes)
            with interrupts.ends_early():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(follow, video, frames, seen, write_frame, shown)
                    tasks.start_soon(follow, audio, windows, heard, write_features, spoken)
                    if live:
                        tasks.start_soon(lambda: show_live(collector, finished=lambda: running == 0))
    return DemoReport(_video_report(video, shapes), _audio_report(audio, digits), pids, used, granted)


class _Answers:
    """The best class of each item of a stream, to be compared with the truth; the demo's media are short."""

    def __init__(self, stream: WatchedStream) -> None:
        self.stream = stream
        self.recognised: list[Recognised] = []

    def add(self, item: Frame | AudioWindow, finding: Finding) -> None:
        time_s = item.time_s if isinstance(item, Frame) else item.start_s
        self.recognised.append(Recognised(item.index, time_s, finding.label, finding.score))


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        read = read_regular(path, "demo:", TEXT_BYTES_MAX)
    except InvalidArgument as e:
        raise InvalidArgument(f"{e}; --data names the folder of the demo's data") from e
    try:
        return msgspec.json.decode(read, type=kind)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise InvalidArgument(f"demo: {path}: {e}") from e


def _video_report(answers: _Answers, truth: Shapes) -> VideoReport:
    recognised, figures = answers.recognised, answers.stream.figures
    right = sum(r.label == truth.labels[r.index] for r in recognised if r.index < len(truth.labels))
    return VideoReport(
        frames=presented_count(answers.stream),
        on_time=figures.counts["on_time"],
        late=figures.counts["late"],
        dropped=dropped_count(answers.stream),
        accuracy=round(right / len(recognised), 4) if recognised else None,
        fps=round(figures.per_second, 2),
        latency_ms=latency_of(answers.stream),
        classes=tuple(dict.fromkeys(r.label for r in recognised if r.probability > PROBABILITY_MIN)),
    )


def _audio_report(answers: _Answers, truth: Digits) -> AudioReport:
    figures = answers.stream.figures
    found = [word.word for word in truth.words if _is_found(word, answers.recognised)]
    return AudioReport(
        windows=presented_count(answers.stream),
        on_time=figures.counts["on_time"],
        late=figures.counts["late"],
        dropped=dropped_count(answers.stream),
        words_expected=len(truth.words),
        words_found=len(found),
        latency_ms=latency_of(answers.stream),
        words=tuple(found),
    )


def _is_found(word: Word, windows: list[Recognised]) -> bool:
    """Whether the most confident of the windows that are centred on the word is of its class."""
    middle_s = (word.start_s + word.end_s) / 2
    centred = [w for w in windows if abs(w.time_s + 0.5 - middle_s) <= CENTRED_S]
    best = max(centred, key=lambda w: w.probability, default=None)
    return best is not None and best.probability > PROBABILITY_MIN and best.label == word.word


def _print_summary(report: DemoReport) -> None:
    video, audio = report.video, report.audio
    pids = ", ".join(map(str, report.driver_pids)) or "none"
    print_line(f"{report.device}, driver process {pids}", lead="device")
    if report.realtime:
        print_line(report.realtime, lead="real time")
    print_line(
        f"{video.frames} frames at {video.fps:.1f}/s: {video.on_time} on time (33 ms), {video.late} late, "
        f"{video.dropped} dropped; accuracy {'-' if video.accuracy is None else f'{video.accuracy:.1%}'}; "
        f"latency {video.latency_ms}",
        lead="video",
    )
    print_line(
        f"{audio.windows} windows: {audio.on_time} on time (100 ms), {audio.late} late, "
        f"{audio.dropped} dropped; accuracy {audio.words_found} of {audio.words_expected} words; "
        f"latency {audio.latency_ms}",
        lead="audio",
    )
    print_line(", ".join(video.classes) or "none", lead="classes")
    print_line(", ".join(audio.words) or "none", lead="words")
