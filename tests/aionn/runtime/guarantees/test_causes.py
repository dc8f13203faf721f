"""Every frame of an admitted stream that is lost has a label with the cause, in virtual time; and what reserved frames wait for
runs in their class."""

import gc
import weakref

import anyio
import pytest

import aionn
from aionn.drivers.simulated.profiles import Draw, Fault
from aionn.hal import Priority
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.admission import StreamTerms
from tests.aionn.runtime.guarantees.test_guaranteed_streams import WARM_UP
from tests.aionn.runtime.guarantees.trial import Trial, X, camera, gate, npu, read


def slow_after_the_warm_up(factors):
    yield from [Draw()] * WARM_UP
    yield from (Draw(factor=factor) for factor in factors)
    while True:
        yield Draw()


def test_frame_that_waits_for_best_effort_that_takes_ten_times_as_long_was_blocked():
    async def main(trial):
        async with (
            trial.net.burst(slots=3) as burst,
            gate(burst, camera(3, 0.1, first_s=0.001), period=0.1, jitter=0) as results,
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trial.net.execute, [X])
                seen = await read(results)
            assert seen == [("dropped", "blocked"), ("on_time", None), ("on_time", None)]
            assert results.statistics().blocked == 1 and "3 frames, 1 blocked" in results.explain()
        assert trial.held.labels[aionn.scheduler.bandwidth.Label.BLOCKED] == 1

    Trial(npu(script=slow_after_the_warm_up([10.0]))).play(main)


def test_frame_behind_one_of_another_stream_that_overran_was_blocked():
    async def main(trial):
        seen = {}

        async def watch(name, first_s):
            async with trial.net.burst(slots=3) as burst:
                source = camera(3, 0.1, first_s=first_s)
                async with gate(burst, source, period=0.1, jitter=0, name=name) as results:
                    await both.wait()
                    seen[name] = await read(results)

        async with trial.net.burst() as burst:
            for _ in range(WARM_UP):
                await burst.execute([X])
        both = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, "first", 0.0)
            tasks.start_soon(watch, "second", 0.001)
            while trial.held.count < 2:
                await anyio.sleep(0.01)
            both.set()
        assert seen["second"] == [("dropped", "blocked"), ("on_time", None), ("on_time", None)]
        assert seen["first"][0] == ("dropped", "overran")

    def script():
        yield from [Draw()] * (3 * WARM_UP)
        yield Draw(factor=10.0)
        while True:
            yield Draw()

    Trial(npu(script=script())).play(main)


@pytest.mark.parametrize("slots", [2, 3])
def test_frame_without_a_buffer_was_delayed_by_its_consumer(slots):
    async def main(trial):
        async with trial.net.burst(slots=slots) as burst, gate(burst, camera(12, 0.04)) as results:
            seen = []
            async for result in results:
                seen.append((result.status, result.label))
                if len(seen) == 1:
                    await anyio.sleep(0.3)
            assert ("dropped", "delayed") in seen
            assert all(label is not None for status, label in seen if status != "on_time")
            assert results.statistics().delayed == [label for _, label in seen].count("delayed")

    Trial(npu()).play(main)


@pytest.mark.parametrize(
    ("driver", "meanwhile"), [("given", Priority.HIGH), ("served", Priority.LOW), ("remote", Priority.LOW)]
)
def test_best_effort_runs_in_the_class_of_reserved_frames_on_a_device_of_this_application(
    monkeypatch, driver, meanwhile
):
    """The queue of a server or a node has other clients, who would wait for it."""
    seen = []

    async def main(trial):
        trial.runtime.devices[0].driver = driver
        prepared = type(trial.net._plan.steps[0].prepared)
        launch = prepared.launch

        def launched(self, request, *, priority=None, **more):
            if priority is not None:
                seen.append(priority)
            return launch(self, request, priority=priority, **more)

        monkeypatch.setattr(prepared, "launch", launched)
        await trial.net.execute([X], priority="low")
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(0, 1)):
            await trial.net.execute([X], priority="low")
        await trial.net.execute([X], priority="low")
        assert seen == [Priority.LOW, meanwhile, Priority.LOW]
        monkeypatch.undo()

    Trial(npu()).play(main)


class AlwaysStalled:
    """A machine of which every measurement says that it has just stood still."""

    def look(self, now_ns):
        pass

    def since(self, then_ns, now_ns, began_ns=None):
        return 1_000_000_000


def test_error_of_the_driver_is_no_loss_that_the_machine_caused():
    def script():
        yield from [Draw()] * WARM_UP
        yield Draw(fault=Fault.PERSISTENT)

    async def main(trial):
        trial.held.stalls = AlwaysStalled()
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(1, 0.04), jitter=0) as results:
            with pytest.raises(aionn.Error):
                await read(results)
            assert results.statistics().stalled == 0
            assert results._guarantee.held.server.frame_count == 1

    Trial(npu(script=script())).play(main)


def test_device_with_reservations_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        device = RuntimeDevice("npu", "given", npu())
        gone = weakref.ref(device)
        device.reservations.admit(
            StreamTerms(name="s", period_ns=1000, deadline_ns=1000, jitter_ns=0),
            Measured(1, 16),
            "m",
            now_ns=0,
        )
        assert device.raises_best_effort
        del device
        assert gone() is None
    finally:
        gc.enable()
