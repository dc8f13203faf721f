"""Virtual time for asyncio: a clock that jumps to the next timer when nothing can run, and does not advance during real work.

Owns the clock, its pins, and the event loop that drives it. Refuses to own time elsewhere: ``time.monotonic``, threads and other
processes keep real time.

Invariants:
1. Time moves only when no callback is ready, no descriptor is ready, and nothing holds a pin; and then exactly to the next timer.
2. Real work pins: jobs of executors, worker threads of anyio, subprocesses, watched descriptors (by default), and work that was
   announced with ``pin`` (``aionn.platform.real_work`` for drivers).
3. No wait is without end: nothing to wait for is a ``Deadlock``, a pin older than the limit is a ``StuckPin``, both by name.
4. The order of callbacks depends on the program alone: timers of the same time run in the order in which they were set.

Source: trio's ``MockClock`` for the rule of the jump. uvloop cannot do this: its timers and its waiting are in C.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import selectors
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from types import FrameType
from typing import Any, Self, TypeVar

import fences
from aionn.hal import TIME_MAX_NS
from aionn.platform.numbers import checked_seconds
from aionn.platform.real_work import set_pinner
from aionn.runtime.clock import to_ns

__all__ = ["Deadlock", "Pin", "StuckPin", "VirtualClock", "VirtualClockLoop", "new_loops", "run"]

_T = TypeVar("_T")
_Events = list[tuple[selectors.SelectorKey, int]]
_Poll = Callable[[float | None], _Events]

STUCK_S_DEFAULT = 10.0
"""Real seconds that a pin may be held: far above any step of a test, far below the patience of a person who waits for it."""

LOOK_AGAIN_S = 0.001
"""Interval between checks of worker threads while they work: a thread that becomes idle wakes no loop."""

TASKS_NAMED_MAX = 20
"""Tasks that a ``Deadlock`` names; the first few show the cause."""


class Deadlock(RuntimeError):
    """Nothing can run, no timer is set, nothing is pinned: on a real clock this would never end."""


class StuckPin(RuntimeError):
    """Something has held the clock still for longer than the limit. The message names it."""


class Pin:
    """A hold on a clock. A context manager, to be used once; left by any thread, idempotently."""

    __slots__ = ("_clock", "name", "since_s")

    def __init__(self, clock: VirtualClock, name: str) -> None:
        self._clock = clock
        self.name = name
        self.since_s = time.monotonic()

    def __enter__(self) -> Self:
        self._clock._pins[self] = None
        self.since_s = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets go. Idempotent."""
        if self._clock._pins.pop(self, self) is None:
            self._clock._wake()


class VirtualClock:
    """A time of its own, which begins at 0 and is moved by a ``VirtualClockLoop``.

    Args:
        start_s: The time at the beginning, in seconds.
        stuck_s: Real seconds after which a pin is named as stuck.
        pin_descriptors: Whether a descriptor that is watched (``add_reader``, sockets, pipes) holds the clock, since anything
            outside may make it ready. False where all of them are served by tasks of the loop itself, or are watched though
            nothing is expected.

    Attributes:
        jump_count: Number of times that time has moved.
        run_count: Number of times that a loop began to run on this clock.

    Raises:
        ValueError: A number is negative or not finite.
    """

    def __init__(
        self,
        *,
        start_s: float = 0.0,
        stuck_s: float = STUCK_S_DEFAULT,
        pin_descriptors: bool = True,
    ) -> None:
        for name, value in (("start_s", start_s), ("stuck_s", stuck_s)):
            checked_seconds(value, name, most=None)
        self.stuck_s = stuck_s
        self.pin_descriptors = pin_descriptors
        self.jump_count = 0
        self.run_count = 0
        self._now_s = float(start_s)
        self._pins: dict[Pin, None] = {}
        self._loop: VirtualClockLoop | None = None

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self._now_s

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds, the nearest integer."""
        return round(self._now_s * 1e9)

    def after(self, seconds: float) -> int:
        """The deadline ``seconds`` from now: absolute nanoseconds, as every ``deadline=`` expects.

        Raises:
            ValueError: ``seconds`` is negative or no number.
        """
        return min(self.now_ns + to_ns(seconds, what="after"), TIME_MAX_NS)

    def pin(self, name: str) -> Pin:
        """Holds time still while work continues that the loop cannot see: ``with clock.pin("decoder thread"): ...``.

        Args:
            name: The worker and its work, for the message when it never ends.
        """
        return Pin(self, name)

    @property
    def pins(self) -> tuple[str, ...]:
        """The present pins, the oldest first."""
        return tuple(pin.name for pin in list(self._pins))

    def _wake(self) -> None:
        """Called after a pin is released: a loop that is held by it must check again."""
        loop = self._loop
        if loop is not None and loop._is_standing:
            with contextlib.suppress(RuntimeError):  # Closed by now: there is no watcher any more.
                loop.call_soon_threadsafe(_nothing)

    def __repr__(self) -> str:
        pinned = f", pinned by {', '.join(self.pins)}" if self._pins else ""
        return f"<VirtualClock at {self._now_s:g} s{pinned}>"


def _nothing() -> None:
    pass


class _Timer(asyncio.TimerHandle):
    """A timer that keeps its place among those of the same time: a heap alone does not."""

    __slots__ = ("_sequence",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
        sequence: int,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._sequence = sequence

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        mine, its = self.when(), other.when()
        return mine < its or (mine == its and self._sequence < other._sequence)


class _Selector(selectors.EpollSelector):
    """Where a loop waits: this one asks the loop what waiting means."""

    loop: VirtualClockLoop | None = None

    def select(self, timeout: float | None = None) -> _Events:
        if self.loop is None or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        return self.loop._wait(super().select)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock. Usable wherever a loop factory is: ``asyncio.Runner``, ``anyio.run``, pytest-asyncio.

    While it runs, fences take their signal times from its clock.

    Args:
        clock: The clock; None for one of its own. Several loops may use one clock after another.

    Attributes:
        clock: The clock.
    """

    _clock_resolution: float
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self._timers = itertools.count()
        self._is_standing = False
        self._seen_since_s: dict[object, float] = {}
        self._held: dict[Pin, None] = {}
        selector = _Selector()
        super().__init__(selector)
        self._set_resolution()
        self._own_descriptors = set(selector.get_map())
        self._selector_keys = selector.get_map()
        selector.loop = self

    def time(self) -> float:
        """The clock's time in seconds."""
        return self.clock._now_s

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's; timers of the same time run in the order of the calls."""
        if when is None:
            raise TypeError("call_at: expected a time, got None")
        self._check_closed()  # type: ignore[attr-defined]
        timer = _Timer(when, callback, args, self, context, next(self._timers))
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_forever(self) -> None:
        """As asyncio's.

        Raises:
            Deadlock: Nothing can ever happen.
            StuckPin: The clock was held for too long.
            RuntimeError: Another virtual clock runs in this process, or another loop on this clock.
        """
        with _driving(self):
            super().run_forever()

    # --- Waiting --------------------------------------------------------------------------------------------------------------

    def _wait(self, poll: _Poll) -> _Events:
        """Called when nothing is ready to run: real events first, then a jump."""
        while True:
            # The holders are counted before the descriptors are looked at: work hands over its result first and then releases the
            # clock, so a holder that released it before the count has its result in the descriptors.
            self._is_standing = True
            holders = self._holders()
            events = poll(self._patience_s(holders) if holders else 0)
            self._is_standing = False
            if events:
                for key, _ in events:
                    self._seen_since_s.pop(key.fd, None)
                return events
            if not holders:
                self._jump()
                return []

    def _jump(self) -> None:
        # asyncio requests at most a day; the timer itself has the time.
        when = self._scheduled[0].when() if self._scheduled else math.inf
        if when == math.inf:
            raise Deadlock(self._describe_deadlock())
        clock = self.clock
        clock._now_s = max(clock._now_s, when)
        clock.jump_count += 1
        self._set_resolution()

    def _set_resolution(self) -> None:
        """Timers closer than this run together. asyncio's own choice depends on the machine, and a loop whose time is so large
        that adding it changes nothing would never run its timers."""
        self._clock_resolution = max(1e-9, math.ulp(self.clock._now_s))

    def _holders(self) -> dict[object, tuple[float, str]]:
        """The oldest holder of the clock: real time of its start, and its name."""
        clock = self.clock
        seen: dict[object, str] = {}
        if clock.pin_descriptors and len(self._selector_keys) > len(self._own_descriptors):
            for fd, key in self._selector_keys.items():
                if fd not in self._own_descriptors:
                    seen[fd] = f"descriptor {fd}, watched by {_watcher_of(key)}"
        if threading.active_count() > 1:
            for thread in self._busy_workers():
                seen[thread] = f"a worker thread of anyio{_place_of_thread(thread)}"
        if seen or self._seen_since_s:
            now_s = time.monotonic()
            self._seen_since_s = {key: self._seen_since_s.get(key, now_s) for key in seen}
        holders = {key: (self._seen_since_s[key], name) for key, name in seen.items()}
        if clock._pins:
            holders |= {pin: (pin.since_s, pin.name) for pin in list(clock._pins)}
        return holders

    def _busy_workers(self) -> list[threading.Thread]:
        kind = getattr(sys.modules.get("anyio._backends._asyncio"), "WorkerThread", None)
        # A worker marks its item as done after it has handed over the result.
        return [
            thread
            for thread in threading.enumerate()
            if kind is not None
            and isinstance(thread, kind)
            and thread.loop is self
            and thread.queue.unfinished_tasks
        ]

    def _patience_s(self, holders: dict[object, tuple[float, str]]) -> float:
        """Real seconds to wait for an event before the holders are looked at again."""
        now_s = time.monotonic()
        left_s = min(since_s for since_s, _ in holders.values()) + self.clock.stuck_s - now_s
        if left_s <= 0:
            named = "; ".join(f"{name} (for {now_s - since_s:.3g} s)" for since_s, name in holders.values())
            # The cleanup after this gets the same limit again.
            for pin in list(self.clock._pins):
                pin.since_s = now_s
            self._seen_since_s = dict.fromkeys(self._seen_since_s, now_s)
            raise StuckPin(
                f"virtual time stopped at {self.clock.now:g} s, held for more than {self.clock.stuck_s:g} real seconds by: "
                f"{named}. A pin is for real work alone, and is released when that is done; watched descriptors hold no clock with "
                "pin_descriptors=False"
            )
        is_working = any(isinstance(key, threading.Thread) for key in holders)
        return min(left_s, LOOK_AGAIN_S) if is_working else left_s

    def _describe_deadlock(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"  {task.get_name()}: {_place_of_task(task)}" for task in tasks[:TASKS_NAMED_MAX]]
        if len(tasks) > TASKS_NAMED_MAX:
            lines.append(f"  and {len(tasks) - TASKS_NAMED_MAX} more")
        first = (
            f"virtual time {self.clock.now:g} s: nothing can run, no timer is set and nothing is pinned, so this would never "
            "end. Hold clock.pin(name) around work of other threads and processes. Tasks:"
        )
        return "\n".join([first, *(lines or ["  none"])])

    # --- Work that pins by itself ---------------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """As asyncio's; the job holds the clock until its result is here."""
        release = self._hold(f"executor job {getattr(func, '__qualname__', func)!s}")
        try:
            future: asyncio.Future[_T] = super().run_in_executor(executor, func, *args)
        except BaseException:
            release()
            raise
        future.add_done_callback(lambda _: release())
        return future

    def _hold(self, name: str) -> Callable[[], None]:
        """Pins the clock for work of this loop, which cannot outlive it; returns the function that releases it."""
        pin = self.clock.pin(name).__enter__()
        self._held[pin] = None

        def release() -> None:
            self._held.pop(pin, None)
            pin.release()

        return release

    def close(self) -> None:
        """As asyncio's; the pins of this loop are released."""
        for pin in self._held:
            pin.release()
        self._held.clear()
        super().close()

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        """As asyncio's; its time-out is not reached as long as threads end."""
        with self.clock.pin("shutdown of the default executor"):
            await super().shutdown_default_executor(*args, **options)

    async def subprocess_exec(self, protocol_factory: Callable[[], Any], *args: Any, **options: Any) -> Any:
        """As asyncio's; the process holds the clock until its end is known."""
        with self._pinned_process(protocol_factory, args[0] if args else "?") as factory:
            return await super().subprocess_exec(factory, *args, **options)

    async def subprocess_shell(self, protocol_factory: Callable[[], Any], cmd: Any, **options: Any) -> Any:
        """As asyncio's; the process holds the clock until its end is known."""
        with self._pinned_process(protocol_factory, cmd) as factory:
            return await super().subprocess_shell(factory, cmd, **options)

    @contextlib.contextmanager
    def _pinned_process(
        self, protocol_factory: Callable[[], Any], program: object
    ) -> Iterator[Callable[[], Any]]:
        release = self._hold(f"process {program!s}")

        def factory() -> Any:
            protocol = protocol_factory()
            exited = protocol.process_exited

            def process_exited() -> None:
                release()
                exited()

            protocol.process_exited = process_exited
            return protocol

        try:
            yield factory
        except BaseException:
            release()
            raise


_driving_lock = threading.Lock()


@contextlib.contextmanager
def _driving(loop: VirtualClockLoop) -> Iterator[None]:
    """While a loop runs: fences and drivers of this process go by its clock."""
    clock = loop.clock
    # Signal times and pins are the whole process's, so a second virtual clock beside this one would have the wrong time.
    if not _driving_lock.acquire(blocking=False):
        raise RuntimeError("a loop on a virtual clock runs already in this process; only one can at a time")
    try:
        clock._loop = loop
        clock.run_count += 1
        clock_before = fences.set_clock(lambda: clock.now_ns)
        pinner_before = set_pinner(lambda name: clock.pin(name).__enter__().release)
        try:
            yield
        finally:
            set_pinner(pinner_before)
            fences.set_clock(clock_before)
            clock._loop = None
    finally:
        _driving_lock.release()


@contextlib.contextmanager
def new_loops(clock: VirtualClock | None) -> Iterator[None]:
    """While inside, a loop that is made without a factory of its own (``asyncio.run``, ``asyncio.Runner``, test plugins) is one on
    this clock; with None as without this function, which undoes an outer ``new_loops``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Policies go away with Python 3.16.
        policy = asyncio.get_event_loop_policy()
    before = vars(policy).get("new_event_loop")
    if clock is not None:
        vars(policy)["new_event_loop"] = lambda: VirtualClockLoop(clock)
    else:
        vars(policy).pop("new_event_loop", None)
    try:
        yield
    finally:
        if before is not None:
            vars(policy)["new_event_loop"] = before
        else:
            vars(policy).pop("new_event_loop", None)


def _watcher_of(key: selectors.SelectorKey) -> str:
    """The callback of a descriptor's readiness."""
    handle = next((handle for handle in key.data if handle is not None), None) if key.data else None
    callback = getattr(handle, "_callback", None)
    return str(getattr(callback, "__qualname__", callback))


def _place_of_frame(frame: FrameType) -> str:
    code = frame.f_code
    return f"in {code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


def _place_of_thread(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident) if thread.ident is not None else None
    return f" {_place_of_frame(frame)}" if frame is not None else ""


_MACHINERY = {"asyncio", "anyio", "fences"}
"""Packages whose frames do not show the waiter and the cause."""


def _place_of_task(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the innermost frame of what it awaits that is not the machinery's."""
    waiting: Any = task.get_coro()
    frames: list[FrameType] = []
    # Coroutines, generators and asynchronous generators name their frame and what they wait for differently.
    while (kind := next((k for k in ("cr", "gi", "ag") if hasattr(waiting, f"{k}_frame")), None)) is not None:
        frame = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            frames.append(frame)
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    if not frames:
        return "at its end"
    own = [f for f in frames if f.f_globals.get("__name__", "").partition(".")[0] not in _MACHINERY]
    return _place_of_frame((own or frames)[-1])


def run(main: Callable[..., Coroutine[Any, Any, _T]], *args: Any, clock: VirtualClock | None = None) -> _T:
    """Runs ``main(*args)`` under virtual time and returns its result: ``anyio.run`` without the waiting.

    Args:
        main: A coroutine function.
        *args: The arguments of the call.
        clock: The clock; None for a new one that begins at 0.

    Raises:
        Deadlock: Nothing can ever happen.
        StuckPin: The clock was held for too long.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(clock)) as runner:
        return runner.run(main(*args))
