"""A soak: hours of work on drivers that are killed and stopped throughout, and the application's resources during it.

Owns who does what when: actors that play episodes, one who kills and stops, one who takes samples; the watch for what hangs; the
verdict. Samples are taken while all actors pause between two episodes: resources held then are held until the runtime is closed.

Invariants:
1. Every episode ends within ``EPISODE_S_MAX``, or is a hang: it is reported with the stacks of all tasks and threads, and
   cancelled.
2. The same seed gives the same choices to each actor; choices by the clock differ.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from aionn.benchmarking.stress.census import Census, growth_since
from aionn.benchmarking.stress.episodes import COUNTS, EPISODES, SIZES, Actor, Episode, Target, soak_model
from aionn.benchmarking.stress.samples import (
    DRIVER_QUANTITIES,
    SAMPLES_MAX,
    Series,
    child_count,
    descriptor_count,
    give_back_free_memory,
    mapping_count,
)
from aionn.benchmarking.stress.slopes import SECONDS_PER_HOUR, WARM_UP_SHARE, Slope
from aionn.benchmarking.stress.watch import MESSAGES_MAX, Pause, Watch
from aionn.drivers import registry
from aionn.errors import DeadObject, DeviceUnavailable, InvalidArgument
from aionn.runtime.runtime import Runtime, open_runtime

__all__ = ["EPISODE_S_MAX", "GROWTH_S_MIN", "SOAK_S_MAX", "SoakProgress", "SoakReport", "soak"]

EPISODE_S_MAX = 60.0
"""Limit of an episode. The longest that is legal starts a driver process again after the longest pause, on a busy machine;
starting alone may take 30 s."""

SOAK_S_MAX = 366 * 86400.0
"""Longest run, a year."""

GROWTH_S_MIN = 600.0
"""Shortest run whose growth is judged. A shorter one is warm-up: threads start, pools and caches find their size, and its slope per
hour is large though nothing leaks."""

PROCESSES_MIN = 3
"""Driver processes that get killed, at least. One alone can be killed some 1,500 times an hour: after a death sooner than a second
after its start there is a pause."""

ACTORS = 4
SAMPLE_S = 4.0
"""Time between two samples, at least; the pause for one takes a tenth of it."""

STOP_S_MAX = 0.2
"""Time for which a process is stopped."""

LIFE_S = (0.9, 1.3)
SHORT_LIFE_S = (0.0, 0.4)
SHORT_LIFE_SHARE = 0.1
"""Life of a started process, and the share that is killed while it starts, or soon after."""

STOP_SHARE = 0.5
"""Stops for each kill."""

SETTLE_S_MAX = 20.0
"""Limit of the time until the runtime's resources are freed when it is closed. It takes milliseconds, and more on a machine with
much other work."""

REVIVALS_MAX = 3
"""Number of calls of a device until it answers: a call on a process that was just killed fails, the next one starts another."""

HEARTBEAT_S = 1.0
"""Time between two heartbeats of the event loop, and between two words about the progress."""

KEEP_TURNS = 3
"""Turns of the loop, and collections, until what was dropped is gone: a finaliser may leave work to the loop."""


class SoakProgress(msgspec.Struct, frozen=True):
    """Progress of a run.

    Attributes:
        seconds: Since the beginning.
        counts: By the names of ``COUNTS``.
        rss_kb: Of the application, at the last sample.
        objects: The same.
        failures: Wrong answers, unexpected errors and hangs so far.
    """

    seconds: float
    counts: dict[str, int]
    rss_kb: int
    objects: int
    failures: int


class SoakReport(msgspec.Struct, frozen=True):
    """The result of a run.

    Attributes:
        drivers: Registered names.
        seed: As given.
        seconds: Its duration.
        counts: By the names of ``COUNTS``.
        kills_per_hour: Kills, over the time.
        samples: Number of samples.
        failure_count: Wrong answers and unexpected errors.
        failures: The first of them, as text.
        hangs: Episodes that took too long, each with the stacks.
        slopes: Growth of what the application holds, and of what the driver process holds that is never killed.
        left_behind: Resources that are held after the runtime was closed and were not held before.
        is_growth_judged: Whether the run was long enough for growth to count.
        growth: Objects of the application that became more since its warm-up, by kind, and modules that were imported since then.
    """

    drivers: tuple[str, ...]
    seed: int
    seconds: float
    counts: dict[str, int]
    kills_per_hour: float
    samples: int
    failure_count: int
    failures: tuple[str, ...]
    hangs: tuple[str, ...]
    slopes: tuple[Slope, ...]
    left_behind: tuple[str, ...]
    is_growth_judged: bool = True
    growth: tuple[str, ...] = ()

    @property
    def is_success(self) -> bool:
        """No wrong answer, no failure, no hang, nothing left behind, and no growth where that is judged."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for a failed run, each as a clause; empty for a success."""
        grown = [slope.quantity for slope in self.slopes if not slope.is_steady and self.is_growth_judged]
        found = (
            (self.failure_count, f"{self.failure_count} wrong answers or unexpected errors"),
            (self.hangs, f"{len(self.hangs)} hangs"),
            (grown, f"these grew: {'; '.join(grown)}"),
            (self.left_behind, f"left behind: {', '.join(self.left_behind)}"),
        )
        return tuple(clause for count, clause in found if count)


class _Soak:
    """One run."""

    def __init__(
        self,
        runtime: Runtime,
        targets: Sequence[Target],
        *,
        seconds: float,
        seed: int,
        isolation: Literal["process", "in_process"],
        watch: Watch,
        progress: Callable[[SoakProgress], None],
        after_episode: Callable[[], object],
        is_ending: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._targets = targets
        self._seconds = seconds
        self._seed = seed
        self._isolation = isolation
        self._progress = progress
        self._after_episode = after_episode
        self._is_ending = is_ending
        self._pause = Pause()
        self._watch = watch
        self._models = {size: soak_model(size) for size in SIZES}
        self._began_s = time.monotonic()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.failures: list[str] = []
        self.failure_count = 0
        self.own = Series("application")
        self.growth: tuple[str, ...] = ()
        self._census: Census | None = None
        self.driver = Series("driver", DRIVER_QUANTITIES)

    @property
    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    def _goes_on(self) -> bool:
        return self.passed_s < self._seconds and not self._is_ending()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(ACTORS):
                tasks.start_soon(self._act, number)
            if self._isolation == "process":
                for number, target in enumerate(t for t in self._targets if t.is_mortal):
                    tasks.start_soon(self._kill, target, random.Random(f"{self._seed} kill {number}"))
                tasks.start_soon(self._stop, random.Random(f"{self._seed} stop"))
            tasks.start_soon(self._heartbeat)
            await self._sample_all()
            tasks.cancel_scope.cancel()

    async def _heartbeat(self) -> None:
        while True:
            self._watch.heartbeat()
            await anyio.sleep(HEARTBEAT_S)

    # --- Work ---

    async def _act(self, number: int) -> None:
        source = random.Random(f"{self._seed} act {number}")
        actor = Actor(self._runtime, self._models, self.counts, source, self._isolation)
        episodes, weights = list(EPISODES), list(EPISODES.values())
        async with self._pause.party():
            while self._goes_on():
                await self._pause.pass_through()
                (episode,) = source.choices(episodes, weights)
                await self._play(number, actor, episode, source.choice(self._targets))
                self._after_episode()

    async def _play(self, number: int, actor: Actor, episode: Episode, target: Target) -> None:
        what = f"{getattr(episode, '__name__', 'episode')} on {target.name}"
        try:
            with anyio.CancelScope() as scope:
                self._watch.begin(number, what, scope)
                await episode(actor, target)
        except (Exception, BaseExceptionGroup) as e:
            for error in _leaves(e):
                if isinstance(error, DeadObject | DeviceUnavailable) and target.is_mortal:
                    self.counts["dead"] += 1
                else:
                    self.failure_count += 1
                    if len(self.failures) < MESSAGES_MAX:
                        self.failures.append(f"{what}: {type(error).__name__}: {error}")
        finally:
            self._watch.end(number)

    # --- Kills and stops ---

    async def _kill(self, target: Target, source: random.Random) -> None:
        device = self._runtime.device(target.name)
        killed: int | None = None
        async with self._pause.party():
            while self._goes_on():
                await self._pause.pass_through()
                pid = device.pid
                if pid is None or pid == killed:
                    await anyio.sleep(0.02)  # The next call to the device starts it.
                    continue
                is_short = source.random() < SHORT_LIFE_SHARE
                await anyio.sleep(source.uniform(*(SHORT_LIFE_S if is_short else LIFE_S)))
                if device.pid == pid:
                    os.kill(pid, signal.SIGKILL)
                    killed = pid
                    self.counts["kills"] += 1
                    await self._revive(target)

    async def _stop(self, source: random.Random) -> None:
        life_s = sum(LIFE_S) / 2
        async with self._pause.party():
            while self._goes_on():
                await self._pause.pass_through()
                await anyio.sleep(source.uniform(0, 2 * life_s) / STOP_SHARE / len(self._targets))
                pid = self._runtime.device(source.choice(self._targets).name).pid
                if pid is None:
                    continue
                try:
                    os.kill(pid, signal.SIGSTOP)
                    self.counts["stops"] += 1
                    await anyio.sleep(source.uniform(0, STOP_S_MAX))
                finally:
                    try:
                        os.kill(pid, signal.SIGCONT)
                    except ProcessLookupError:
                        pass  # It was killed while it was stopped.

    # --- Samples ---

    async def _sample_all(self) -> None:
        every_s = max(SAMPLE_S, self._seconds / (SAMPLES_MAX - 2))
        # A short run has samples, too.
        every_s = min(every_s, self._seconds / 8)
        next_s = 0.0
        while self._goes_on():
            if self.passed_s >= next_s:
                await self._sample()
                next_s = self.passed_s + every_s
            self._progress(self._state())
            await anyio.sleep(max(0.0, min(HEARTBEAT_S, next_s - self.passed_s)))
        await self._sample()

    async def _sample(self) -> None:
        async with self._pause.held():
            for target in self._targets:
                await self._revive(target)
            if not self.own.count:
                gc.collect()
                gc.freeze()  # Objects that exist now stay; searching them would take a tenth of a second each time.
            for _ in range(KEEP_TURNS):
                await anyio.lowlevel.checkpoint()
                gc.collect()
            give_back_free_memory()
            self.own.take(self.passed_s, os.getpid())
            if self._census is not None:
                if not self._goes_on():
                    self.growth = growth_since(self._census, Census.taken())
            elif self.passed_s >= WARM_UP_SHARE * self._seconds:
                self._census = Census.taken()
            for target in self._targets:
                pid = self._runtime.device(target.name).pid
                if not target.is_mortal and pid is not None:
                    self.driver.take(self.passed_s, pid)

    async def _revive(self, target: Target) -> None:
        """Has a process for a device, whatever it takes: samples are of the same state, and kills come as soon as there is one."""
        for _ in range(REVIVALS_MAX):
            try:
                await self._runtime.device(target.name).status()
                return
            except (DeadObject, DeviceUnavailable):
                continue  # Its process was killed, and the call was the first to see that.

    def _state(self) -> SoakProgress:
        return SoakProgress(
            self.passed_s,
            dict(self.counts),
            int(self.own.last("RSS, kB")),
            int(self.own.last("objects")),
            self.failure_count + len(self._watch.hangs),
        )


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _targets(drivers: Sequence[str], isolation: str) -> list[Target]:
    count = max(PROCESSES_MIN, len(drivers))
    is_mortal = isolation == "process"
    found = [
        Target(f"{drivers[i % len(drivers)]}-{i + 1}", drivers[i % len(drivers)], is_mortal=is_mortal)
        for i in range(count)
    ]
    return [*found, Target(f"{drivers[0]}-lasting", drivers[0], is_mortal=False)]


def _held() -> dict[str, int]:
    pid = os.getpid()
    return {
        "descriptors": descriptor_count(pid),
        "shared mappings": mapping_count(pid),
        "child processes": child_count(pid),
    }


async def _left_behind(before: dict[str, int]) -> tuple[str, ...]:
    end_s = time.monotonic() + SETTLE_S_MAX
    while True:
        gc.collect()
        left = [f"{count - before[name]} {name}" for name, count in _held().items() if count > before[name]]
        if not left or time.monotonic() > end_s:
            return tuple(left)
        await anyio.sleep(0.02)


async def soak(
    drivers: Sequence[str],
    seconds: float,
    *,
    seed: int = 0,
    isolation: Literal["process", "in_process"] = "process",
    episode_s_max: float = EPISODE_S_MAX,
    growth_s_min: float = GROWTH_S_MIN,
    progress: Callable[[SoakProgress], None] = lambda _: None,
    on_stuck: Callable[[str], None] = lambda _: None,
    after_episode: Callable[[], object] = lambda: None,
    is_ending: Callable[[], bool] = lambda: False,
) -> SoakReport:
    """Works on drivers that are killed and stopped, and reports the resources that grow.

    Args:
        drivers: Registered names; each has a process that gets killed, at least ``PROCESSES_MIN`` in all. The first has one more,
            which is never killed.
        seconds: Its duration.
        seed: Seed of everything that is random.
        isolation: ``process``; or ``in_process``, with nothing to kill or to stop.
        episode_s_max: Time that an episode may take before it counts as hanging.
        growth_s_min: Shortest run that fails where something grows.
        progress: Is called with the state about every second.
        on_stuck: Is called, from another thread, with a hang that cannot be cancelled: then this never returns by itself.
        after_episode: Is called after each episode; a test plants its leaks there.
        is_ending: Is asked several times a second; once it returns True, the run ends in order, with its report.

    Raises:
        InvalidArgument: There is no such driver, none is named, or the time makes no sense.
        Error: A runtime with these drivers cannot be opened.
    """
    if not drivers:
        raise InvalidArgument("soak: expected at least one driver")
    if not 0 < seconds <= SOAK_S_MAX:
        raise InvalidArgument(f"soak: expected more than 0 s and at most a year, got {seconds:g} s")
    before, is_frozen = _held(), gc.get_freeze_count() > 0
    targets = _targets(drivers, isolation)
    watch = Watch(episode_s_max, on_stuck)
    try:
        async with open_runtime(drivers={t.name: t.driver for t in targets}, isolation=isolation) as runtime:
            for driver in dict.fromkeys(drivers):
                # Episodes open it in this process as well, and an engine that is imported in the middle would look like a leak.
                await anyio.to_thread.run_sync(registry.load_factory, driver)
            run = _Soak(
                runtime,
                targets,
                seconds=seconds,
                seed=seed,
                isolation=isolation,
                watch=watch,
                progress=progress,
                after_episode=after_episode,
                is_ending=is_ending,
            )
            await run.run()
            passed_s = run.passed_s
    finally:
        watch.close()
        if not is_frozen:  # Otherwise others have frozen something, and rely on it.
            gc.unfreeze()
    return SoakReport(
        tuple(drivers),
        seed,
        round(passed_s, 3),
        dict(run.counts),
        run.counts["kills"] / passed_s * SECONDS_PER_HOUR,
        run.own.count,
        run.failure_count,
        tuple(run.failures),
        tuple(watch.hangs),
        (*run.own.slopes(), *run.driver.slopes()),
        await _left_behind(before),
        passed_s >= growth_s_min,
        run.growth,
    )
