"""A driver process that is started before it is needed.

Owns its start, the conditions of its use, and its end. ``entry`` has the code that it runs until it is used.

Invariants:
1. A device has at most one spare process. It is started only after the device has served for ``SERVED_S``: a driver that dies
   sooner has no spare process.
2. It is used only when it is ready, and when a process started now would get the same command line, environment, working
   directory and processors; otherwise it is killed.
3. It is reaped, whether it is used, killed or ends by itself, however often the tasks around it are cancelled.
4. A forked child keeps no copy of its socket: the process ends with the application that started it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

import anyio

from aionn.errors import DeviceUnavailable
from aionn.platform.kernel_timer import sleep_beside_executions
from aionn.platform.loops import finish
from aionn.realtime import Scheduling
from aionn.service.client.supervisor import DriverProcess, StartConditions
from aionn.service.wire.received import close_unread

__all__ = ["Spare"]

SERVED_S = 3.0
"""Time for which a device serves before a spare process is started for it: three times a short life, and long enough for the
application's first compilations.
"""

QUIET_S_MAX = 5.0
"""Limit of the wait for a moment without pending calls after that. A stream never pauses; then the process starts regardless."""

QUIET_PAUSE_S = 0.25
"""Interval between two checks of that."""

READY_S_MAX = 60.0
"""Limit of the time until a spare process is ready: twice the limit of an awaited process, since its priority is low. A module that
hangs while it is imported must not keep one without end.
"""

_logger = logging.getLogger("aionn.service")


class Spare:
    """At most one process, for the next start of a driver.

    Args:
        driver: As ``DriverProcess.start`` takes it.
        name: The same.
        hang_after_s: The same.
        is_quiet: Whether nothing is under way at the device now.
        is_serving: Whether the device's process still serves; no spare process is started when it does not.
        scheduling: As ``DriverProcess.start`` takes it.

    Attributes:
        pid: The process while it is ready and waits; None otherwise.
    """

    def __init__(
        self,
        driver: str,
        name: str,
        hang_after_s: float | None,
        *,
        is_quiet: Callable[[], bool],
        is_serving: Callable[[], bool],
        scheduling: Scheduling | None = None,
    ) -> None:
        self._driver, self._name, self._hang_after_s = driver, name, hang_after_s
        self._is_quiet = is_quiet
        self._is_serving = is_serving
        self._scheduling = scheduling
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._has_begun = False
        self._is_ready = False
        self._is_wanted = False
        self._process: DriverProcess | None = None
        self._conditions: StartConditions | None = None

    @property
    def pid(self) -> int | None:
        """See the class."""
        return self._process.pid if self._process is not None and self._is_ready else None

    async def keep(self) -> None:
        """Starts the process when it is time, and keeps it until it is taken or ends. To be run once, as a task."""
        self._has_begun = True
        try:
            with self._scope:
                await self._wait_for_time()
                if self._is_serving():
                    await self._start()
        finally:
            try:
                if self._process is not None and not self._is_wanted:
                    await self._discard(self._process)
            finally:
                self._is_ready = False
                self._over.set()

    async def _wait_for_time(self) -> None:
        await sleep_beside_executions(SERVED_S)
        limit_s = anyio.current_time() + QUIET_S_MAX
        while not self._is_quiet() and self._is_serving() and anyio.current_time() < limit_s:
            await sleep_beside_executions(QUIET_PAUSE_S)

    async def _start(self) -> None:
        try:
            self._conditions = StartConditions.now(self._driver, self._name, self._hang_after_s)
            process = await DriverProcess.start(
                self._driver,
                self._name,
                hang_after_s=self._hang_after_s,
                is_spare=True,
                scheduling=self._scheduling,
            )
        except (DeviceUnavailable, OSError) as e:
            _logger.debug("no spare process: %s", e)
            return
        self._process = process
        _spares.add(self)
        with anyio.move_on_after(READY_S_MAX):
            self._is_ready = await process.wait_until_ready()
        if self._is_ready:
            _logger.debug("the spare process of %s (pid %d) is ready", self._name, process.pid)
            await process.wait()
        _logger.debug("the spare process of %s (pid %d) is of no use", self._name, process.pid)

    async def _discard(self, process: DriverProcess) -> None:
        process.kill()
        close_unread(process.socket)
        try:
            await process.aclose()
        finally:
            self._process = None

    async def take(self) -> DriverProcess | None:
        """The process, which is the caller's from now on; None without a usable one. Ends the keeping."""
        self._is_wanted = self._is_ready and not self._over.is_set() and self._is_current()
        self._scope.cancel()
        if not self._is_wanted:
            return None  # ``keep`` ends the process; nothing waits for that.
        try:
            await finish(self._over.wait())
        except BaseException:
            if self._process is not None:
                await finish(self._discard(self._process))
            raise
        process, self._process = self._process, None
        return process

    def _is_current(self) -> bool:
        try:
            now = StartConditions.now(self._driver, self._name, self._hang_after_s)
        except OSError:  # The working directory is gone.
            return False
        return now == self._conditions

    async def aclose(self) -> None:
        """Ends the process, unless it was taken, and waits until it is reaped. Idempotent."""
        self._scope.cancel()
        if self._has_begun:
            await self._over.wait()


_spares: weakref.WeakSet[Spare] = weakref.WeakSet()


def _close_in_child() -> None:
    for spare in list(_spares):
        if spare._process is not None:
            # The number alone, as in ``connection``.
            spare._process.socket.close()
    _spares.clear()


os.register_at_fork(after_in_child=_close_in_child)
