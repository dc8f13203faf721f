"""PipeWire without a sound card: the server, its sessions and the programs of PulseAudio, unpacked in a folder.

    python -m tests.sound.assembling FOLDER

downloads the packages by ``apt-get`` and unpacks them in the folder; nothing is installed. Then ``AIONN_SOUND=FOLDER pytest --long
tests/sound`` starts a server of its own with a sink that plays to nobody, whose monitor is the microphone.

Source: the documentation of PipeWire and WirePlumber for the variables that name their folders.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.guest.unpacking import unpack

__all__ = ["PACKAGES", "SoundServer", "assemble", "missing"]

PACKAGES = ("pipewire", "pipewire-pulse", "pipewire-bin", "wireplumber", "pulseaudio-utils", "dbus")

START_S_MAX = 30.0
"""The server is there within a second; this is for a machine that is overloaded."""

BUS = """<busconfig><type>session</type><listen>unix:path={path}</listen>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy>
</busconfig>"""

SINK = "{ factory.name=support.null-audio-sink node.name=aionn media.class=Audio/Sink object.linger=true audio.position=[MONO] }"


def assemble(folder: Path) -> None:
    """Downloads and unpacks the packages, with those that they need and this machine lacks."""
    unpack(PACKAGES, folder)


def missing(folder: Path | None) -> str | None:
    """Why the server cannot be started; None if it can."""
    if folder is None:
        return "AIONN_SOUND names no folder: python -m tests.sound.assembling FOLDER makes one"
    for name in ("pipewire", "pipewire-pulse", "wireplumber", "parec", "pacat", "pactl"):
        if not (folder / "root/usr/bin" / name).exists():
            return f"{folder} has no {name}: python -m tests.sound.assembling {folder}"
    return None


class SoundServer:
    """A sound server of its own, with one sink that plays to nobody. Use it with ``with``.

    Args:
        folder: See `assemble`.
        runtime: An empty folder for its sockets, with a short path.
    """

    def __init__(self, folder: Path, runtime: Path) -> None:
        self._bin = folder / "root/usr/bin"
        self._runtime = runtime
        self._processes: list[subprocess.Popen[bytes]] = []
        root, machine = folder / "root", f"{platform.machine()}-linux-gnu"
        libraries = root / "usr/lib" / machine
        wireplumber = next(iter(sorted(libraries.glob("wireplumber-*"))), libraries)
        bus = runtime / "bus"
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, (libraries, libraries / "pulseaudio", root / "lib" / machine))),
            "XDG_RUNTIME_DIR": str(runtime),
            "HOME": str(runtime),
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={bus}",
            "SPA_PLUGIN_DIR": str(libraries / "spa-0.2"),
            "SPA_DATA_DIR": str(root / "usr/share/spa-0.2"),
            "PIPEWIRE_MODULE_DIR": str(libraries / "pipewire-0.3"),
            "PIPEWIRE_CONFIG_DIR": str(root / "usr/share/pipewire"),
            "WIREPLUMBER_CONFIG_DIR": str(root / "usr/share/wireplumber"),
            "WIREPLUMBER_DATA_DIR": str(root / "usr/share/wireplumber"),
            "WIREPLUMBER_MODULE_DIR": str(wireplumber),
            "PULSE_SERVER": f"unix:{runtime}/pulse/native",
        }  # fmt: skip
        (runtime / "bus.conf").write_text(BUS.format(path=bus))

    def __enter__(self) -> SoundServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def program(self, name: str) -> str:
        """Path of one of its programs; packages that the machine has were not unpacked."""
        path = self._bin / name
        return str(path) if path.exists() else shutil.which(name) or name

    def start(self) -> None:
        """Starts the server and makes the sink, whose monitor becomes the default source."""
        bus = self._runtime / "bus"
        with contextlib.suppress(FileNotFoundError):
            bus.unlink()
        self._begin("dbus-daemon", f"--config-file={self._runtime}/bus.conf", "--nofork", "--nopidfile")
        self._until(bus.exists, "the bus")
        self._begin("pipewire")
        self._until((self._runtime / "pipewire-0").exists, "pipewire")
        self._begin("wireplumber")
        self._begin("pipewire-pulse")
        self._until(lambda: self.control("info")[0] == 0, "pipewire-pulse")
        self.run("pw-cli", "create-node", "adapter", SINK)
        self._until(lambda: "aionn.monitor" in self.control("list", "sources", "short")[1], "the sink")
        self._until(lambda: self.control("set-default-source", "aionn.monitor")[0] == 0, "the default")
        self.control("set-default-sink", "aionn")

    def kill(self) -> None:
        """Ends all of its processes as a crash does."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        shutil.rmtree(self._runtime / "pulse", ignore_errors=True)
        for path in self._runtime.glob("pipewire-0*"):
            path.unlink()

    def run(self, name: str, *arguments: str) -> tuple[int, str]:
        """Runs one of its programs; returns its status and output."""
        done = subprocess.run(
            [self.program(name), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def control(self, *arguments: str) -> tuple[int, str]:
        """Runs ``pactl``."""
        return self.run("pactl", *arguments)

    @contextlib.contextmanager
    def playing(self, samples: bytes) -> Iterator[subprocess.Popen[bytes]]:
        """Plays raw samples, 16 bits at 16 kHz, into the sink while the block runs."""
        command = [
            self.program("pacat"), "--playback", "--device=aionn", "--raw", "--format=s16le", "--rate=16000", "--channels=1",
            "--latency-msec=50",
        ]  # fmt: skip
        source = self._runtime / "played.raw"
        source.write_bytes(samples)
        with source.open("rb") as file:
            process = subprocess.Popen(command, stdin=file, env=self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _begin(self, name: str, *arguments: str) -> None:
        with (self._runtime / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [self.program(name), *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        ends_s = time.monotonic() + START_S_MAX
        while not is_so():
            if time.monotonic() > ends_s:
                logs = "\n".join(path.read_text() for path in self._runtime.glob("*.log"))
                raise TimeoutError(f"expected {what} within {START_S_MAX:g} s, got none: {logs[-3000:]}")
            time.sleep(0.05)


if __name__ == "__main__":
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit("tests.sound.assembling: expected Debian's apt-get and dpkg-deb, got neither or one of them")
    assemble(Path(sys.argv[1]).resolve())
