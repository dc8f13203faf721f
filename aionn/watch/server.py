"""The page's server as an application sees it: a process of its own, started, answered and ended.

Owns the process and the answers to its questions. ``process`` is the other end.

A process, not a thread: a thread that serves tabs holds the interpreter's lock for milliseconds again and again, and every frame of
the application's event loop would wait for it. The process has a lower priority than the application, and encodes the pictures.

Invariants:
1. While no tab asks, the application sends nothing and copies nothing.
2. No call here waits for the process once it runs: an answer that the socket does not take is discarded, and asked for again.
3. The stream continues when the process ends, and the process ends when the application does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import logging
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import DeviceUnavailable, GeneralFailure, InvalidArgument
from aionn.media.live.readable import until_readable
from aionn.observability.access import is_loopback
from aionn.platform.forking import close_at_fork
from aionn.platform.loops import finish
from aionn.platform.python_process import python_command, python_environment
from aionn.watch.collector import Collector
from aionn.watch.messages import MESSAGE_BYTES_MAX, QUESTION_FIGURES, Answer, Ready, Start
from aionn.watch.streams import Shot, WatchedStream

__all__ = ["PORT", "WatchPage"]

_logger = logging.getLogger("aionn.manager")

PORT = 8470
"""The usual port, always the same, so that it can be forwarded and kept as a bookmark."""

BACKLOG = 32
"""Connections that wait to be accepted."""

START_S_MAX = 20.0
"""Python and its packages are imported in a second; this is for a machine that is overloaded."""

REAP_S_MAX = 2.0
"""A killed process is gone in milliseconds."""

QUESTIONS_MAX = 64
"""Questions that are answered in one turn of the loop; the process has at most one for each stream."""

WAIT_S = 3600.0
"""Longest wait for a question, after which it is waited for again."""


class WatchPage:
    """Serves a page with the figures of a collector: ``async with WatchPage(collector) as page: print(page.url)``.

    Args:
        collector: Has the figures.
        host: An address of this machine, or ``localhost``. Anything but a loopback address lets other machines connect, without
            encryption.
        port: 0 takes a free one.
        token: The token that the address must have; None makes one.
        hosts: Names by which the page is reached, besides ``localhost``, such as that of a proxy.

    Attributes:
        url: The address of the page, with the token; valid from ``async with`` on.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self._collector = collector
        self._address = _checked_address(host)
        if not 0 <= port <= 65535:
            raise InvalidArgument(f"watch: expected a port from 0 to 65535, got {port}")
        if token is not None and (not token.isascii() or not token.isalnum()):
            raise InvalidArgument("watch: expected a token of letters and digits")
        self._port = port
        self._token = secrets.token_hex(16) if token is None else token
        self._hosts = tuple(hosts)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        """Starts the server and waits until it serves.

        Raises:
            InvalidArgument: The port is used, or not this user's to use, or the address is not one of this machine.
            DeviceUnavailable: A package of the extra ``watch`` is missing.
            GeneralFailure: The process cannot be started.
        """
        _check_packages()
        with _listener(self._address, self._port) as listener:
            port = listener.getsockname()[1]
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            close_at_fork(listener, ours, theirs)
            self._link = ours
            ours.setblocking(False)
            try:
                with theirs:
                    self._process = await anyio.to_thread.run_sync(_started, theirs, listener)
                await self._await_ready(ours)
            except BaseException:
                await self.aclose()
                raise
        shown = f"[{self._address}]" if ":" in self._address else self._address
        self.url = f"http://{shown}:{port}/?token={self._token}"
        self._task = asyncio.get_running_loop().create_task(self._answer_all(ours), name="aionn-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the server and its process. Idempotent. Cancelled, it is ended all the same before the cancellation is raised."""
        await finish(self._close())

    @property
    def is_serving(self) -> bool:
        """Whether the process runs. If it has ended by itself, the reason is logged, and the streams continue."""
        return self._task is not None and not self._task.done()

    @property
    def pid(self) -> int | None:
        """The process; None before and after."""
        return None if self._process is None else self._process.pid

    async def _await_ready(self, link: socket.socket) -> None:
        is_remote = not is_loopback(self._address)
        try:
            link.send(msgspec.json.encode(Start(self._token, self._hosts, is_remote)))
            is_here = await until_readable(link.fileno(), START_S_MAX)
            answer = link.recv(MESSAGE_BYTES_MAX) if is_here else b""
        except OSError as e:
            raise GeneralFailure(f"watch: the process that serves the page has ended: {e}") from e
        if not is_here:
            raise GeneralFailure(
                f"watch: expected the process that serves the page within {START_S_MAX:g} s, got none"
            )
        try:
            problem = msgspec.json.decode(answer, type=Ready).problem
        except msgspec.MsgspecError:
            problem = "it ended while it started"
        if problem:
            raise GeneralFailure(f"watch: the page cannot be served: {problem}")

    async def _answer_all(self, link: socket.socket) -> None:
        while True:
            await until_readable(link.fileno(), WAIT_S)
            for _ in range(QUESTIONS_MAX):
                try:
                    question = link.recv(16)
                except BlockingIOError:
                    break
                except OSError:  # It was reset: the process ended with answers unread.
                    question = b""
                if not question:
                    _logger.warning(
                        "watch: the process that serves the page has ended; the streams continue without it"
                    )
                    return
                try:
                    self._answer(question[0])
                except Exception:  # A source of the application that cannot count must not end the page.
                    _logger.exception("watch: the figures cannot be collected")

    def _answer(self, question: int) -> None:
        if question == QUESTION_FIGURES:
            self._send(Answer("figures"), msgspec.json.encode(self._collector.snapshot()))
        elif question < len(self._collector.streams):
            watched: WatchedStream = self._collector.streams[question]

            def deliver(pixels: npt.NDArray[np.uint8], shot: Shot) -> None:
                height, width, _ = pixels.shape
                self._send(
                    Answer("picture", question, height, width, shot), np.ascontiguousarray(pixels).data
                )

            watched.request_picture(deliver)

    def _send(self, answer: Answer, content: Any) -> None:
        link = self._link
        if link is None:
            return
        # Written, not mapped: without memory that is an error here, and not a signal.
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("aionn-watch", os.MFD_CLOEXEC)
            try:
                os.write(descriptor, content)
                socket.send_fds(link, [msgspec.json.encode(answer)], [descriptor])
            finally:
                os.close(descriptor)

    async def _close(self) -> None:
        for stream in self._collector.streams:
            stream.request_picture(None)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        link, self._link = self._link, None
        if link is not None:
            link.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await anyio.to_thread.run_sync(_reap, process)


def _checked_address(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        raise InvalidArgument(
            f"watch: expected an address of this machine such as 127.0.0.1, or localhost, got {host!r}"
        ) from None


def _check_packages() -> None:
    missing = [name for name in ("uvicorn", "websockets") if importlib.util.find_spec(name) is None]
    if missing:
        raise DeviceUnavailable(
            f"watch: needs {' and '.join(missing)}, which cannot be found: pip install 'aionn[watch]'"
        )


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise InvalidArgument(f"watch: {_bind_problem(e, address, port)}") from e
    return listener


def _bind_problem(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {address} is used by another program; choose another one, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"this user may not use port {port}; choose one from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is not an address of this machine"
    return f"{address} port {port} cannot be used: {error.strerror}"


def _started(theirs: socket.socket, listener: socket.socket) -> subprocess.Popen[bytes]:
    descriptors = theirs.fileno(), listener.fileno()
    environment = {**python_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            python_command("aionn.watch.process", *map(str, descriptors)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
            # Ctrl-C in a terminal is for the application, which ends this process in order.
            process_group=0,
        )
    except OSError as e:
        raise GeneralFailure(f"watch: the process that serves the page cannot be started: {e}") from e


def _reap(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S_MAX)
