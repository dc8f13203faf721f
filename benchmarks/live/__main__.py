"""From the capture of a picture to the model's answer, behind a network camera: aionn against the loops that people write.

Peers, in the same run, each in a process of its own: OpenCV's `VideoCapture` and LiteRT, PyAV and LiteRT, GStreamer's `appsink`
(`max-buffers=1 drop=true`) and LiteRT, all with a thread that reads and keeps the newest picture. A peer that is not installed, or
fails, is left out, and the reason is printed. aionn has one slot, since the age of results is measured; it runs twice, with the
driver in a process of its own, as by default, and with `isolation="in_process"`, which has the engine where the peers have it.

How each figure is taken:
- The camera is a process that sends Motion JPEG, 640 x 480 pixels, over HTTP. Each picture carries its number, and the camera
  writes down when it began to send it. The age of a result is the time from there to the model's answer, whatever clock a
  library has.
- Fast model: the shapes model (int8), which takes a millisecond, at 30 pictures a second.
- Slow model: MobileNetV2 1.0 in float32 at 60 pictures a second, which is more than one thread can do. Left out where the file
  is missing (`../shared/models`).
- A block is one run of a contender after two seconds of warming up (aionn with a driver process: twelve, for its spare one). It
  yields the median and the 99th percentile of the ages, and the processor time of its processes by result (the clock of this figure
  ticks every 10 ms).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.live.contenders import CONTENDERS, ISOLATIONS, SPARE_S, WARM_UP_S, missing
from benchmarks.rows import Report, alternating, at_most, compare, options, single

ROOT = Path(__file__).resolve().parents[2]

FAST = ROOT / "examples" / "data" / "shapes_int8.tflite"
SLOW = ROOT.parent / "shared" / "models" / "mobilenet_v2_1.0_224_float.tflite"

FIGURES = (
    ("p50_ms", "p50", "ms"),
    ("p99_ms", "p99", "ms"),
    ("processor_ms", "processor time a result", "ms"),
)

START_S_MAX = 60.0
"""Start of a contender's process, of a driver and of a decoder, on a busy machine."""


@contextlib.contextmanager
def camera(rate: float, folder: Path) -> Iterator[tuple[str, Path]]:
    """The address of a running camera, and its file of times."""
    stamps = folder / f"stamps-{rate:g}"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.live.camera", str(rate), str(stamps)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}/camera.mjpg", stamps
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def block(name: str, address: str, stamps: Path, model: Path, seconds: float) -> dict[str, Any]:
    """One run of a contender.

    Raises:
        RuntimeError: It failed.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.live.contenders",
        name,
        address,
        str(stamps),
        str(model),
        str(seconds),
    ]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_S_MAX + WARM_UP_S + SPARE_S + seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_all(
    report: Report, title: str, names: list[str], model: Path, rate: float, rounds: int, seconds: float
) -> None:
    """Rows of one model at one rate."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, camera(rate, Path(folder)) as (address, stamps):
        for name in alternating(names, rounds):
            if name in failed:
                continue
            try:
                figures = block(name, address, stamps, model, seconds)
            except RuntimeError as e:
                if name in ISOLATIONS:
                    raise
                failed[name] = str(e)
                continue
            found[name].append(figures)
            print(
                f"{title}: {name:16} p50 {figures['p50_ms']:7.1f} p99 {figures['p99_ms']:7.1f} ms, "
                f"{figures['processor_ms']:5.2f} ms a result, {figures['results'] / seconds:5.1f} a second, "
                f"{figures['repeated']} repeated, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )
    for name, reason in failed.items():
        report.note(f"{title}: {name}: left out: {reason}")
    peers = [name for name in names if name not in failed and name not in ISOLATIONS]
    for ours in ISOLATIONS:
        where = title if ours == "aionn" else f"{title}, driver in process"
        for key, label, unit in FIGURES:
            values = [figures[key] for figures in found[ours]]
            if not peers:
                report.add(single(f"{where}: {label}", unit, values))
            for name in peers:
                others = [figures[key] for figures in found[name]]
                report.add(compare(f"{where}: {label}", unit, values, name, others, at_most(1.0)))


def main() -> None:
    chosen = options(__doc__)
    report = Report(chosen)
    names = []
    for name in CONTENDERS:
        reason = missing(name)
        if reason is None:
            names.append(name)
        else:
            report.note(f"{name}: left out: {reason}")
    rounds, seconds = (1, 4.0) if chosen.quick else (6, 20.0)
    compare_all(report, "fast model, 30 a second", names, FAST, 30.0, rounds, seconds)
    if SLOW.exists():
        compare_all(report, "slow model, 60 a second", names, SLOW, 60.0, rounds, seconds)
    else:
        report.note(f"slow model: left out: there is no {SLOW.name} in ../shared/models")


if __name__ == "__main__":
    main()
