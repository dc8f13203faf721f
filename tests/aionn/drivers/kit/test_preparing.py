"""Checking and preparing models beside executions: who waits for whom on a device that several clients share."""

import contextlib
import gc
import threading
import weakref

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit import blocking, gate
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.gate import SlotGate
from aionn.drivers.kit.threads.calls import run_on_gate
from aionn.drivers.litert.driver import LitertDevice
from aionn.drivers.reference import INFO, ReferenceDevice
from aionn.errors import DeviceUnavailable, MissedDeadline
from aionn.hal import Model, OutputShape, Priority
from aionn.hal.callers import Connection, client_of_call
from aionn.hal.pieces import pace_of_call
from aionn.hal.pooled_request import PooledRequest
from aionn.testing import models

WAIT_S = 10.0
MODEL = models.identity((4,))
ZEROS = [np.zeros(4, np.float32)]


class Halting:
    """Holds a device in one of its methods until it is let go."""

    def __init__(self):
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.is_on = False

    def halt(self):
        if self.is_on:
            self.entered.set()
            assert self.may_end.wait(WAIT_S)

    async def wait(self):
        assert await anyio.to_thread.run_sync(self.entered.wait, WAIT_S)


class HaltingDevice:
    """A device that halts while it looks at a model: what every preparation does as well."""

    def __init__(self):
        super().__init__()
        self.halting = Halting()

    def supports(self, model):
        self.halting.halt()
        return super().supports(model)


class HaltingReference(HaltingDevice, ReferenceDevice):
    """With one slot."""


class HaltingLitert(HaltingDevice, LitertDevice):
    """With slots of which two clients could have both."""


async def _ask(device, how):
    if how == "support":
        await device.supported_operations(MODEL)
    else:
        await (await device.prepare_model(MODEL)).aclose()


@pytest.mark.parametrize("kind", [HaltingReference, HaltingLitert])
@pytest.mark.parametrize("how", ["support", "prepare"])
def test_execution_does_not_wait_for_the_check_or_the_preparation_of_a_model(kind, how):
    if kind is HaltingLitert:
        pytest.importorskip("ai_edge_litert")

    async def main():
        async with kind() as device, anyio.create_task_group() as tasks:
            prepared = await device.prepare_model(MODEL)
            device.halting.is_on = True
            for _ in range(device.info.slots):
                tasks.start_soon(_ask, device, how)
            await device.halting.wait()
            try:
                with anyio.fail_after(WAIT_S / 2):
                    await prepared.execute_synchronously(request_for(MODEL, ZEROS))
                    burst = await prepared.configure_execution_burst()
                    await burst.execute_synchronously(request_for(MODEL, ZEROS), [0])
            finally:
                device.halting.may_end.set()

    anyio.run(main)


def test_clients_take_turns_at_preparing():
    """Each of four models of one client would go before the other's only one, in the order in which they came."""
    order = []

    class Noting(HaltingReference):
        def prepare(self, model, **terms):
            order.append(client_of_preparing[id(model)])
            return super().prepare(model, **terms)

    client_of_preparing = {}
    kept = []

    async def main():
        async with Noting() as device, anyio.create_task_group() as tasks:

            async def prepare(client):
                client_of_call.set(client)
                model = models.identity((4,))
                kept.append(model)
                client_of_preparing[id(model)] = client
                await device.prepare_model(model)

            device.halting.is_on = True
            tasks.start_soon(prepare, "first")
            await device.halting.wait()
            for client in ("a", "a", "a", "a", "b"):
                tasks.start_soon(prepare, client)
            await anyio.wait_all_tasks_blocked()
            device.halting.may_end.set()

    anyio.run(main)
    assert order[0] == "first"
    assert order.index("b") <= 2


@pytest.mark.parametrize("kind", [ReferenceDevice, LitertDevice])
def test_large_models_of_others_delay_a_small_one_by_a_turn_of_each(monkeypatch, kind):
    """Each of four processes would go before the small one with all of its large models, and with one of them at least."""
    if kind is LitertDevice:
        pytest.importorskip("ai_edge_litert")
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    large = models.identity((4,), operations=300)
    pieces = dict.fromkeys(["a", "b", "c", "small"], 0)
    small_ended_after = []

    async def main():
        async with kind() as device, anyio.create_task_group() as tasks:

            async def prepare(process, model):
                client_of_call.set(Connection(process, object()))
                pace_of_call.set(lambda: pieces.update({process: pieces[process] + 1}))
                prepared = await device.prepare_model(model)
                if process == "small":
                    small_ended_after.extend(pieces[other] for other in "abc")
                if process == "a":
                    with PooledRequest(model) as pooled:
                        pooled.write([np.full(4, 1.5, np.float32)])
                        await prepared.execute_synchronously(pooled.request)
                        assert pooled.outputs()[0].tolist() == [1.0] * 4
                await prepared.aclose()

            for process in "abc":
                for _ in range(3):
                    tasks.start_soon(prepare, process, large)
            tasks.start_soon(prepare, "small", MODEL)

    anyio.run(main)
    # Each piece of the small one waits for one of each other process; those that ended before it came are not many.
    assert max(small_ended_after) <= 3 * pieces["small"] < min(pieces[other] for other in "abc") / 10


async def test_many_processes_have_one_turn_each_before_a_small_model_and_their_threads_end(monkeypatch):
    """Those of which the jobs could not sleep would run to their end, each, while the small one waits."""
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    large = models.identity((4,), operations=60)
    pieces = dict.fromkeys([*range(40), "small"], 0)
    small_ended_after = []

    def threads():
        return [t for t in threading.enumerate() if t.name.startswith("aionn-reference-preparing")]

    async with ReferenceDevice() as device:

        async def prepare(process, model):
            client_of_call.set(Connection(process, process))
            pace_of_call.set(lambda: pieces.update({process: pieces[process] + 1}))
            await (await device.prepare_model(model)).aclose()
            if process == "small":
                small_ended_after.extend(pieces[other] for other in range(40))

        async with anyio.create_task_group() as tasks:
            for process in range(40):
                tasks.start_soon(prepare, process, large)
            tasks.start_soon(prepare, "small", MODEL)
        # Those that ended before it came are not many.
        assert sorted(small_ended_after)[-3] <= 3 * pieces["small"] < 60
        with anyio.move_on_after(WAIT_S / 2):
            while len(threads()) > 1 + gate.SPARE_MAX:
                await anyio.sleep(0.005)
        assert 1 <= len(threads()) <= 1 + gate.SPARE_MAX
        await (await device.prepare_model(MODEL)).aclose()


async def test_turns_need_a_thread_for_each_job_and_a_device_ends_all_of_them(monkeypatch):
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    monkeypatch.setattr(gate, "TURNS_MAX", 4)
    most = 0

    def count():
        nonlocal most
        names = [thread.name for thread in threading.enumerate()]
        most = max(most, sum(name.startswith("aionn-reference-preparing") for name in names))

    async with ReferenceDevice() as device, anyio.create_task_group() as tasks:

        async def prepare(process):
            client_of_call.set(Connection(process, process))
            pace_of_call.set(count)
            await (await device.prepare_model(models.identity((4,), operations=50))).aclose()

        for process in range(10):
            tasks.start_soon(prepare, process)
    assert 2 <= most <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aionn-reference")]


def test_device_that_does_not_say_so_prepares_with_a_slot():
    """An engine that may be entered only once at a time is not entered by a preparation while it executes."""
    halting = Halting()
    entered = []

    class Prepared(BlockingPreparedModel):
        def run(self, inputs, outputs, control):
            entered.append("run")
            halting.halt()
            entered.append("ran")
            return [OutputShape((4,), True) for _ in outputs]

    class Device(BlockingDevice):
        def supports(self, model):
            entered.append("supports")
            return [True for _ in model.main.operations]

        def prepare(self, model, *, preference, priority, deadline_ns):
            return Prepared(self, model, priority)

    async def main():
        async with Device(INFO) as device, anyio.create_task_group() as tasks:
            prepared = await device.prepare_model(MODEL)
            entered.clear()
            halting.is_on = True
            tasks.start_soon(prepared.execute_synchronously, request_for(MODEL, ZEROS))
            await halting.wait()
            tasks.start_soon(device.supported_operations, MODEL)
            while not device.gate.waiting_count:
                await anyio.lowlevel.checkpoint()
            halting.may_end.set()

    anyio.run(main)
    assert entered == ["run", "ran", "supports"]


def test_preparation_whose_deadline_passes_before_its_turn_is_missed():
    async def main():
        async with HaltingReference() as device, anyio.create_task_group() as tasks:
            device.halting.is_on = True
            tasks.start_soon(_ask, device, "prepare")
            await device.halting.wait()
            missed = []

            async def late():
                with pytest.raises(MissedDeadline) as e:
                    await device.prepare_model(MODEL, deadline_ns=device.now() + 1)
                missed.append(e.value)

            tasks.start_soon(late)
            await anyio.wait_all_tasks_blocked()
            device.halting.may_end.set()
        assert len(missed) == 1

    anyio.run(main)


def test_caller_is_answered_at_the_deadline_although_the_engine_works_on():
    async def main():
        async with HaltingReference() as device, anyio.create_task_group() as tasks:
            device.halting.is_on = True
            missed = anyio.Event()

            async def ask():
                with pytest.raises(MissedDeadline, match="while preparing"):
                    # As long as a busy machine takes to begin.
                    await device.prepare_model(MODEL, deadline_ns=device.now() + 500_000_000)
                missed.set()

            tasks.start_soon(ask)
            await device.halting.wait()
            with anyio.fail_after(20):
                await missed.wait()
            # It prepares still; the next preparation waits for its end, and is not harmed by it.
            device.halting.is_on = False
            device.halting.may_end.set()
            await (await device.prepare_model(MODEL)).aclose()

    anyio.run(main)


def test_closing_waits_for_what_is_prepared_and_refuses_more():
    async def main():
        device = HaltingReference()
        device.halting.is_on = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_ask, device, "support")
            await device.halting.wait()
            tasks.start_soon(device.aclose)
            while not device.preparing._closed:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(DeviceUnavailable):
                await device.prepare_model(MODEL, priority=Priority.HIGH)
            device.halting.may_end.set()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("aionn-reference")]

    anyio.run(main)


@pytest.mark.parametrize(("kind", "looks"), [(ReferenceDevice, 4), (LitertDevice, 5)])
def test_work_on_a_model_is_paced_on_a_thread_of_the_device_between_any_two_operations(kind, looks):
    """Validation and preparation look at each operation several times: between two looks there is a piece's end."""
    if kind is LitertDevice:
        pytest.importorskip("ai_edge_litert")
    threads = []

    def pieces_of(operations):
        async def main():
            async with kind() as device:
                pace_of_call.set(lambda: threads.append(threading.current_thread().name))
                await device.prepare_model(models.identity((4,), operations=operations))

        threads.clear()
        anyio.run(main)
        return len(threads)

    # An operand and an operation more, which are checked; its place in the order is checked; it becomes a step, or is folded or not
    # and lowered.
    assert pieces_of(20) - pieces_of(10) >= 10 * looks
    assert len(set(threads)) == 1 and threads[0].endswith("-preparing")


def test_work_that_takes_a_slot_is_not_paced():
    """It would keep the slot from the executions that it sleeps for."""

    class OnSlots(ReferenceDevice):
        prepares_beside = False

    paced = []

    async def main():
        async with OnSlots() as device:
            pace_of_call.set(lambda: paced.append(True))
            await device.prepare_model(MODEL)

    anyio.run(main)
    assert not paced


@pytest.mark.parametrize("kind", [ReferenceDevice, LitertDevice])
def test_work_on_a_model_ends_with_the_piece_in_which_its_caller_is_cancelled(kind):
    if kind is LitertDevice:
        pytest.importorskip("ai_edge_litert")
    entered, may_continue = threading.Event(), threading.Event()
    pieces = []

    def pace():
        pieces.append(True)
        if len(pieces) == 3:
            entered.set()
            assert may_continue.wait(WAIT_S)

    async def main():
        async with kind() as device:
            async with anyio.create_task_group() as tasks:

                async def prepare():
                    pace_of_call.set(pace)
                    await device.prepare_model(models.identity((4,), operations=50))

                tasks.start_soon(prepare)
                assert await anyio.to_thread.run_sync(entered.wait, WAIT_S)
                tasks.cancel_scope.cancel()
            may_continue.set()
            assert await device.supported_operations(MODEL) == (True,)  # After it, on the same thread.

    anyio.run(main)
    assert len(pieces) == 3


class KeptModel(Model, frozen=True, weakref=True):
    """A model of which can be seen that nothing keeps it."""


def _kept(operations=1):
    model = models.identity((4,), operations=operations)
    return KeptModel(**{name: getattr(model, name) for name in model.__struct_fields__})


class Keeping:
    """Work that keeps the turn, between two of its pieces, from the time at which it is asked to until it is let go."""

    def __init__(self):
        self.must, self.keeps, self.may_end = threading.Event(), threading.Event(), threading.Event()

    def __call__(self):
        if self.must.is_set():
            self.keeps.set()
            assert self.may_end.wait(WAIT_S)

    async def wait(self):
        assert await anyio.to_thread.run_sync(self.keeps.wait, WAIT_S)


async def _prepare(device, process, model, pace, priority=Priority.MEDIUM, **terms):
    client_of_call.set(Connection(process, process))
    pace_of_call.set(pace)
    await (await device.prepare_model(model, priority=priority, **terms)).aclose()


async def _is_gone(reference):
    with anyio.move_on_after(WAIT_S / 2):
        while reference() is not None:
            gc.collect()
            await anyio.sleep(0.005)
    return reference() is None


@pytest.mark.parametrize("with_deadline", [False, True])
async def test_cancelled_preparation_that_waits_keeps_no_model(with_deadline):
    """A client would have as many models of others' memory as calls that it cancels, none of them counted any more."""
    keeping = Keeping()
    keeping.must.set()
    async with ReferenceDevice() as device, anyio.create_task_group() as tasks:
        tasks.start_soon(_prepare, device, "other", models.identity((4,)), keeping)
        await keeping.wait()
        model = _kept()
        reference = weakref.ref(model)
        terms = {"deadline_ns": device.now() + 20_000_000} if with_deadline else {}
        try:
            with anyio.move_on_after(WAIT_S if with_deadline else 0.02), contextlib.suppress(MissedDeadline):
                await _prepare(device, "cancelled", model, lambda: None, **terms)
            del model
            assert await _is_gone(reference)
            assert device.preparing.waiting_count == 0
        finally:
            keeping.may_end.set()


@pytest.mark.parametrize("kind", [ReferenceDevice, LitertDevice])
async def test_cancelled_preparation_that_has_given_its_turn_ends_at_once(monkeypatch, kind):
    """It keeps a thread and a part of a lowered model, and none of the places for jobs that sleep is left for others."""
    if kind is LitertDevice:
        pytest.importorskip("ai_edge_litert")
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    keeping, pieces = Keeping(), []
    async with kind() as device, anyio.create_task_group() as tasks:
        model = _kept(operations=200)
        reference = weakref.ref(model)
        cancelled = anyio.CancelScope()

        async def prepare(model):
            with cancelled:
                await _prepare(device, "cancelled", model, lambda: pieces.append(None))

        tasks.start_soon(prepare, model)
        tasks.start_soon(
            _prepare, device, "other", models.identity((4,), operations=200), keeping, Priority.HIGH
        )
        keeping.must.set()
        await keeping.wait()
        del model
        begun = len(pieces)
        try:
            cancelled.cancel()
            assert await _is_gone(reference)
            assert begun
            assert len(pieces) == begun, "it works no further"
            assert device.preparing.waiting_count == 0
        finally:
            keeping.may_end.set()
    assert device.preparing.learnt_count == 0


async def test_call_whose_deadline_has_come_is_not_kept_until_a_thread_is_free():
    """It was started without a slot, to fail, while the only thread works for another one."""
    now_ns, begun, may_end = 0, threading.Event(), threading.Event()
    gate = SlotGate(1, name="gate", now=lambda: now_ns, executes=False)

    def hold(is_cancelled):
        begun.set()
        assert may_end.wait(WAIT_S)

    class Call:
        def __call__(self, is_cancelled):
            raise AssertionError("called after it was cancelled")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_on_gate, gate, Priority.MEDIUM, None, hold)
        assert await anyio.to_thread.run_sync(begun.wait, WAIT_S)
        call, scope = Call(), anyio.CancelScope()
        reference = weakref.ref(call)

        async def wait(call):
            with scope:
                await run_on_gate(gate, Priority.MEDIUM, 10, call)

        tasks.start_soon(wait, call)
        del call
        await anyio.wait_all_tasks_blocked()
        now_ns = 20
        tasks.start_soon(run_on_gate, gate, Priority.MEDIUM, None, lambda is_cancelled: None)
        await anyio.wait_all_tasks_blocked()
        try:
            assert gate.waiting_count == 1, "only the last one waits"
            scope.cancel()
            assert await _is_gone(reference)
        finally:
            may_end.set()
    gate.close()
