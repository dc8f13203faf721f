"""Claims about lines that nothing waits for: a pipe that is not read keeps neither the log nor native code waiting."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from aionn.observability.lines import write_if_taken
from aionn.observability.log_tags import LinesHandler
from aionn.platform.python_process import module_path, python_command, python_environment
from aionn.service.client.connection import ServedSocket
from aionn.service.client.device import RemoteDevice

LIMIT_S = 60


def fill(pipe: int) -> None:
    """Writes to a pipe until it takes no line any more."""
    while write_if_taken(pipe, b"x" * select.PIPE_BUF):
        pass


@contextmanager
def standard_error() -> Iterator[int]:
    """A pipe in the place of standard error; gives the end that is read, without waiting."""
    # In the test itself: pytest sets a stream of its own between a fixture and the test.
    before = sys.stderr
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4 * select.PIPE_BUF)
    with open(read_end, "rb"), open(write_end, "w", encoding="utf-8") as sys.stderr:
        try:
            yield read_end
        finally:
            sys.stderr = before


def read(pipe: int) -> str:
    return os.read(pipe, 1 << 20).decode()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("aionn.service", logging.WARNING, "", 0, text, None, None)


def test_records_that_are_not_read_are_dropped_and_counted() -> None:
    handler = LinesHandler()
    with standard_error() as pipe:
        fill(sys.stderr.fileno())
        for _ in range(3):
            handler.emit(record("lost"))
        assert set(read(pipe)) == {"x"}
        handler.emit(record("kept"))
        handler.emit(record("next"))
        lines = read(pipe).splitlines()
    assert lines == [
        "aionn.service: 3 records before this were dropped: standard error was not read",
        "kept",
        "next",
    ]


def test_record_that_is_longer_than_a_pipe_takes_at_a_time_is_written_whole() -> None:
    text = "y" * (3 * select.PIPE_BUF - 10)
    with standard_error() as pipe:
        LinesHandler().emit(record(text))
        written = read(pipe)
    assert written == text + "\n"


def test_record_for_a_stream_without_a_descriptor_is_written_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    LinesHandler().emit(record("words"))
    assert capsys.readouterr().err == "words\n"


def test_stream_of_a_notebook_gets_records_though_it_has_a_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Notebook(io.StringIO):
        def fileno(self) -> int:
            return 2  # That of the terminal in which the notebook's server was started.

    notebook = Notebook()
    monkeypatch.setattr(sys, "stderr", notebook)
    LinesHandler().emit(record("words"))
    assert notebook.getvalue() == "words\n"


def test_native_writes_fail_instead_of_waiting_and_the_pipe_of_others_stays_as_it_is() -> None:
    code = (
        "import os, sys\nfrom aionn.observability.lines import never_wait_for_readers\nnever_wait_for_readers()\n"
        "try:\n  while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: os.write(1, b'full')\n"
        "print('dropped', file=sys.stderr, flush=True)\n"
    )
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb") as ours:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {module_path()!r}\n{code}"],
            stdout=subprocess.PIPE,
            stderr=ours,
            timeout=LIMIT_S,
            env=python_environment(),
            check=False,
        )
        assert (done.stdout, done.returncode) == (b"full", 0)
        assert os.get_blocking(ours.fileno())


@pytest.mark.slow
@pytest.mark.forked("any")
async def test_server_whose_log_is_not_read_serves_and_ends(tmp_path: Path) -> None:
    path, (read_end, write_end) = tmp_path / "s.sock", os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    with open(read_end, "rb"), open(write_end, "wb") as log:
        command = python_command(
            "aionn.cli.main", "serve", "reference", "--socket", str(path), "--hello-within", "1"
        )
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=python_environment()
        ) as server:
            try:
                assert server.stdout is not None
                assert b"serving" in await anyio.to_thread.run_sync(server.stdout.readline)
                fill(log.fileno())
                with anyio.fail_after(LIMIT_S):
                    silent = [(await ServedSocket.connect(str(path))).socket for _ in range(3)]
                    for sock in silent:
                        await anyio.wait_readable(sock)  # The reason of its end.
                        sock.close()
                    async with anyio.create_task_group() as tasks:
                        device = RemoteDevice("served", str(path), tasks, path=str(path))
                        await device.connect()
                        assert device.info.type is not None
                        await device.aclose()
                server.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(lambda: server.wait(LIMIT_S)) == 0
            finally:
                server.kill()
