"""A served device with its defaults, a hostile peer and a client that behaves well: each a real process.

Used by test_hostile_peer.py and by ``python -m benchmarks.hostile``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[3]
START_S_MAX = 30.0
PEER_S_MAX = 20.0
"""How long after its time a hostile peer may take to end: a large message that it is sending, a child that it waits for."""


class NoCompiler(Exception):
    """There is none on this machine."""


def compile_peer(folder: Path) -> Path:
    """The program, compiled as the native module is: by the machine's compiler, or by zig's.

    Raises:
        NoCompiler: There is none.
    """
    chosen = os.environ.get("CC", "").strip()
    names = [shlex.split(chosen)] if chosen else [["cc"], ["gcc"], ["clang"]]
    command = next((name for name in names if shutil.which(name[0])), None)
    if command is None:
        if importlib.util.find_spec("ziglang") is None:
            raise NoCompiler("there is no C compiler: neither $CC, cc, gcc or clang nor the package ziglang")
        command = [sys.executable, "-m", "ziglang", "cc"]
    path = folder / "hostile_peer"
    source = str(HERE / "hostile_peer.c")
    subprocess.run([*command, "-O1", "-o", str(path), source], check=True, timeout=120)
    return path


def environment() -> dict[str, str]:
    """Of every process here: this checkout's packages, and the modules beside this one."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


class Footprint(NamedTuple):
    """What a process has: counts, and KiB."""

    descriptors: int
    threads: int
    memories: int
    rss_kib: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        maps = Path(f"/proc/{pid}/maps").read_text()
        return cls(
            len(os.listdir(f"/proc/{pid}/fd")),
            int(status["Threads"]),
            maps.count("/memfd:"),
            int(status["RssAnon"].split()[0]),
            len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()),
        )

    def exceeds(self, before: Footprint, threads_more: int, rss_more_kib: int) -> bool:
        """Whether it is more than before, a pool's idle threads and the allocator's memory aside."""
        return (
            self.descriptors > before.descriptors
            or self.memories > before.memories
            or self.children > before.children
            or self.threads > before.threads + threads_more
            or self.rss_kib > before.rss_kib + rss_more_kib
        )


class Server:
    """``aionn serve reference`` with its defaults, but that no execution is cut off when it ends.

    Attributes:
        path: Of its socket.
        process: The server.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "device.sock"
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", str(self.path), "--quiet"]
        command += ["--drain-within", "600"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment(), stderr=log, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + START_S_MAX
        while not self.path.exists():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.process.kill()
                self.process.wait()
                raise RuntimeError(f"the server did not start: {self.log()}")
            time.sleep(0.01)

    def log(self) -> str:
        """What it wrote to its standard error."""
        return self._log.read_text(errors="replace")

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.process.pid)

    def peak_rss_kib(self) -> int:
        """Most memory of its own at once, since ``forget_peak``; mapped memories count too."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    def forget_peak(self) -> None:
        """Begins the peak anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def settled(self, before: Footprint, limit_s: float, threads_more: int, rss_more_kib: int) -> Footprint:
        """What it has once that is no more than before, or when the time is over."""
        end_s = time.monotonic() + limit_s
        while (now := self.footprint).exceeds(before, threads_more, rss_more_kib):
            if time.monotonic() > end_s:
                break
            time.sleep(0.01)
        return now

    def open_files(self) -> list[str]:
        """What its descriptors stand for."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        found = []
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
        return sorted(found)

    def terminate(self) -> float:
        """Asks it to end; how many seconds it took. Kills it after ``START_S_MAX``."""
        began_s = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(START_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return time.monotonic() - began_s


class WellBehaved:
    """The client that behaves well."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "well_behaved_client.py"), str(path)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        if self._out.readline() != "ready\n":
            self.close()
            raise RuntimeError("the client did not start")

    def ask(self, how_many: str) -> None:
        """Begins: a number of executions, or of seconds with ``s`` behind it."""
        self._in.write(how_many + "\n")
        self._in.flush()

    def answer(self) -> dict[str, Any]:
        """Waits until it is done; see well_behaved_client.py."""
        line = self._out.readline()
        if not line:
            return {"latencies_ns": [], "wrong": ["the client that behaves well has ended"]}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Lets it end."""
        self._in.close()
        try:
            self._process.wait(PEER_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()


@contextlib.contextmanager
def attacking(
    peer: Path, messages: Path, server: Server, attack: str, seconds: float, seed: int, nice: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Runs an attack beside the body, and waits for its end; what it did is in ``stdout``."""
    command: Sequence[str] = [str(peer), str(messages), str(server.path), attack, str(seconds), str(seed)]
    if nice:
        command = ["nice", "-n", str(nice), *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        try:
            process.wait(seconds + PEER_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def report_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """What an attack did.

    Raises:
        RuntimeError: It failed by itself.
    """
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        said, wrong = process.stdout.read(), process.stderr.read()
    if process.returncode != 0:
        raise RuntimeError(f"the hostile peer ended with {process.returncode}: {wrong}")
    found: dict[str, int] = json.loads(said)
    return found
