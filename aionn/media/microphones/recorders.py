"""The ways to a microphone: the sound server's recorder as a subprocess, PortAudio, a pipe.

Owns how each is opened and freed. Refuses to own samples (`samples.py`).

``parec`` comes first: it serves PipeWire and PulseAudio, shows the server's own devices and resamples; its pipe can be
awaited, and if it
fails, a process ends and nothing else. PortAudio is for machines without a sound server, and for cards by their number.

Invariant: a failed opening leaves no process, no thread and no descriptor.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from typing import Any

from aionn.errors import DeviceUnavailable
from aionn.media.live.capture import SourceUnavailable
from aionn.media.microphones.samples import SampleLayout, SamplesCapture
from aionn.media.windows import WindowPlan

__all__ = ["load_sounddevice", "open_parec", "open_pipe", "open_portaudio"]

BLOCKS_PER_S = 50
"""Blocks of 20 ms: shorter ones fell silent on PulseAudio, longer ones are latency."""

PARTING_S_MAX = 1.0
"""A recorder ends within milliseconds of SIGTERM; it is killed then."""

INPUTS_SHOWN_MAX = 8
"""Microphones that a message lists: ALSA has some ten names for each card."""

STDERR_BYTES_MAX = 4096
"""The part of a recorder's error output that is shown."""


WITHOUT_A_MICROPHONE = (
    "aionn.media.audio_file, replay_audio and synthetic_audio are sources of sound without a microphone"
)
"""Ends the message about a microphone that is not there."""


def open_parec(device: str | None, plan: WindowPlan) -> SamplesCapture:
    """Records by ``parec`` at the wanted rate, mono.

    Args:
        device: Name of a source of the server; None means its default.
        plan: The windows.

    Raises:
        SourceUnavailable: There is no ``parec``, or it cannot be started.
    """
    program = shutil.which("parec")
    if program is None:
        raise SourceUnavailable(
            "microphone: expected the recorder of PipeWire or PulseAudio, got no `parec`: install a package such "
            "as pulseaudio-utils; on a machine without a sound server use recorder='portaudio'; "
            + WITHOUT_A_MICROPHONE,
            is_permanent=True,
        )
    rate = plan.sample_rate_hz
    command = [
        program,
        "--raw",
        "--format=s16le",
        f"--rate={rate}",
        "--channels=1",
        f"--latency-msec={1000 // BLOCKS_PER_S}",
    ]
    if device is not None:
        # Without the property PipeWire records from its default source where there is no such device, or it was unplugged.
        command += [f"--device={device}", "--property=node.dont-reconnect=true"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal is for the application, which ends the recorder in order.
            process_group=0,
        )
    except OSError as e:
        raise SourceUnavailable(f"microphone: {program} cannot be started: {e}") from e
    assert process.stdout is not None and process.stderr is not None
    output, errors = process.stdout, process.stderr
    # Its words are read at its end alone; the pipe holds more than it ever writes.
    os.set_blocking(output.fileno(), False)
    os.set_blocking(errors.fileno(), False)

    def reason() -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PARTING_S_MAX)
        words = (errors.read(STDERR_BYTES_MAX) or b"").decode(errors="replace").strip()
        return (
            f"parec ended with status {process.poll()}: {words or 'no reason named'}; is a sound server running, with a "
            f"source of that name (`aionn devices --sources`)? {WITHOUT_A_MICROPHONE}"
        )

    def release() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PARTING_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PARTING_S_MAX)
        output.close()
        errors.close()

    name = f"microphone {device or 'default'} (parec)"
    layout = SampleLayout("s16le", 1, rate)
    return SamplesCapture(name, output.fileno(), layout, plan, reason=reason, release=release)


def load_sounddevice() -> Any:
    """Returns the module ``sounddevice``.

    Raises:
        DeviceUnavailable: It is not installed, or PortAudio's library is missing.
    """
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # OSError where the library of PortAudio is missing.
        raise DeviceUnavailable(
            f"microphone: needs sounddevice, which cannot be loaded here ({error}): pip install "
            f"'aionn[microphone]', and install a package "
            f"such as libportaudio2; {WITHOUT_A_MICROPHONE}"
        ) from error
    return sounddevice


def _inputs(sounddevice: Any) -> str:
    """The microphones that PortAudio has, for a message."""
    try:
        devices = list(sounddevice.query_devices())
    except Exception:  # PortAudioError is not a class that can be named without the module.
        return "PortAudio cannot list its devices"
    names = [f"{i} {d['name']!r}" for i, d in enumerate(devices) if d["max_input_channels"] > 0]
    more = f" and {len(names) - INPUTS_SHOWN_MAX} more" if len(names) > INPUTS_SHOWN_MAX else ""
    return f"PortAudio has {', '.join(names[:INPUTS_SHOWN_MAX]) or 'no microphone'}{more}"


def open_portaudio(device: str | int | None, plan: WindowPlan, sounddevice: Any = None) -> SamplesCapture:
    """Records by PortAudio at the wanted rate, mono.

    Its callback runs in a thread of PortAudio and does no more than writing into a pipe, which the event loop reads.

    Args:
        device: Number or part of a name in PortAudio's list; None means its default.
        plan: The windows.
        sounddevice: The module; None loads it.

    Raises:
        SourceUnavailable: The device cannot be opened.
        DeviceUnavailable: sounddevice is missing.
    """
    module = load_sounddevice() if sounddevice is None else sounddevice
    rate = plan.sample_rate_hz
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    lost_blocks = 0

    def take(data: Any, frames: int, time: Any, status: Any) -> None:
        nonlocal lost_blocks
        if status and getattr(status, "input_overflow", False):
            lost_blocks += 1
        block = bytes(data)
        try:
            written = os.write(writing, block)
        except OSError:  # The pipe is full: the event loop was busy for two seconds.
            lost_blocks += 1
            return
        lost_blocks += written < len(block)

    stream = None
    try:
        stream = module.RawInputStream(
            samplerate=rate,
            channels=1,
            dtype="int16",
            blocksize=rate // BLOCKS_PER_S,
            device=device,
            callback=take,
        )
        stream.start()
    except Exception as e:  # PortAudioError is not a class that can be named without the module.
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()
        os.close(reading)
        os.close(writing)
        raise SourceUnavailable(
            f"microphone {device if device is not None else 'default'} (PortAudio): expected {rate} samples per s, mono, got: {e}; "
            f"{_inputs(module)}; {WITHOUT_A_MICROPHONE}"
        ) from e

    def release() -> None:
        with contextlib.suppress(Exception):
            stream.close()  # The callback has ended when this returns.
        os.close(reading)
        os.close(writing)

    name = f"microphone {device if device is not None else 'default'} (PortAudio)"
    layout = SampleLayout("s16le", 1, rate)
    return SamplesCapture(
        name,
        reading,
        layout,
        plan,
        reason=lambda: "PortAudio has ended",
        release=release,
        overruns=lambda: lost_blocks,
    )


def open_pipe(path: str | int, layout: SampleLayout, plan: WindowPlan) -> SamplesCapture:
    """Reads raw samples from a named pipe, or from a descriptor of a pipe or a socket, which is duplicated.

    A named pipe is opened without waiting for a writer, and stays open when one leaves: there may be a next one.

    Raises:
        SourceUnavailable: It cannot be opened, or is neither a pipe nor a socket.
    """
    try:
        # For writing as well, so that the end of one writer is not the end of the pipe.
        fd = (
            os.dup(path) if isinstance(path, int) else os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        )
    except OSError as e:
        raise SourceUnavailable(f"samples of {path!r}: expected a pipe, got: {e.strerror}") from e
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        os.close(fd)
        raise SourceUnavailable(
            f"samples of {path!r}: expected a pipe or a socket, got another kind of file; "
            "aionn.media.audio_file reads recordings",
            is_permanent=True,
        )
    os.set_blocking(fd, False)
    return SamplesCapture(
        f"samples of {path!r}",
        fd,
        layout,
        plan,
        reason=lambda: "the writer has closed it",
        release=lambda: os.close(fd),
    )
