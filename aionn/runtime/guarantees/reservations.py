"""The reservations of one device in this application: admission, the frames in progress, withdrawal, the limit of best effort.

Owns the step from the ledger to the dispatcher: each reservation's server, the longest best-effort executions that a new one
counts with, and the release of a reservation when no frame of its slot is in progress. Pure: ``now`` is an argument.

As long as time is reserved on a device, it is sent one execution per slot, in the order of the dispatcher. So each frame is one
piece, also where the device can preempt: the device's own queue knows no reserved frames.

Invariants:
1. A reservation that has ended covers no frame, and its time is free when no reserved frame of its slot is in progress: until then
   frames that it has delayed may need the time that admission has left to them.
2. Servers know after each change of the ledger whether their other frames may run as best effort.
3. As long as time is reserved, best effort runs in the class of the device's threads that reserved frames have, unless the device
   has other clients: they wait for it.
4. Models that were timed on the device count with their longest execution, except those of streams with a guarantee, whose frames
   count already; a longer best-effort execution is rejected by the dispatcher.
5. On a served device nothing is reserved here that its ledger has not granted, and each grant is given back once. Frames are sent
   there immediately, and its queue orders them; the labels that it reports count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager

import msgspec

from aionn.errors import NotAdmitted
from aionn.platform.stalls import NO_STALLS, Stalls
from aionn.runtime.guarantees.arrivals import Held, Measured, OnLoop, described
from aionn.runtime.guarantees.granted import as_granted, asked_time, loop_allowance_ns, with_verdict
from aionn.runtime.guarantees.measuring import DeviceTimes
from aionn.scheduler.admission import DAY_NS, SHARE_PPM, SlotCost, StreamTerms
from aionn.scheduler.bandwidth import Frame, Label
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.ledger import (
    RESERVATIONS_MAX,
    Ledger,
    ReservableSlot,
    Reservation,
)
from aionn.scheduler.reservations.changes import terms_demand_no_more
from aionn.scheduler.reservations.event_loop import LoopCost, LoopLedger
from aionn.scheduler.reservations.windows import PhasedServer
from aionn.service.client.reservations import ServedLedger, ServedReservation
from aionn.service.wire.scheduling_messages import AskedTime

__all__ = ["DeviceReservations"]


class _Counts(dict[Label, int]):
    """The counts of a stream, each of which is one of the device as well.

    Args:
        device: Those of the device.
    """

    __slots__ = ("_device",)

    def __init__(self, device: dict[Label, int]) -> None:
        super().__init__(dict.fromkeys(Label, 0))
        self._device = device

    def __setitem__(self, label: Label, count: int) -> None:
        self._device[label] += count - self[label]
        super().__setitem__(label, count)


class DeviceReservations:
    """The reservations of one device.

    Args:
        name: The device's name; slots are named ``name/0``.
        slot_count: The number of its slots.
        dispatcher: Runs the frames.
        estimates: The timings of models on it.
        shared: The ledger of a served device, where other applications reserve; None for a device of this application alone.
        delay_ns: See ``ReservableSlot``.

    Attributes:
        ledger: The reservations of its slots in this application.
        shared: See above.
        slot_count: See above.
        is_up: Whether the device works, as far as its reservations know.
        refusals: Number of refusals by reason: ``no_time``, ``device_down``, ``too_many`` (of one ledger),
            ``event_loop`` (without which there would be time).
        labels: Number of frames with each label, of all reservations so far.
        stalls: The machine's stalls of the event loop; ``Runtime`` passes those of its loop.
        loop: The ledger of the event loop, where its time counts; None where it does not.
        loop_costs: The processor time of the loop's thread for an execution, by the key of the model.
    """

    def __init__(
        self,
        name: str,
        slot_count: int,
        dispatcher: Dispatcher,
        estimates: Estimates,
        shared: ServedLedger | None = None,
        *,
        delay_ns: int = 0,
    ) -> None:
        self.slot_count = slot_count
        self._slots = range(slot_count)
        self._dispatcher = dispatcher
        self.shared = shared
        if shared is not None:
            shared.on_room = self._limit_shared
            dispatcher.passes_frames = True
        self._shared_room_ns = DAY_NS
        self._estimates = estimates
        self._device_times = DeviceTimes()
        self.ledger = Ledger(
            [ReservableSlot(f"{name}/{slot}", can_preempt=False, delay_ns=delay_ns) for slot in self._slots]
        )
        self._held: dict[int, Held] = {}
        self._models: dict[Hashable, str] = {}
        self._counted: dict[str, int] = {}
        self._ending: dict[int, Held] = {}  # Those that have ended, and count until their slot is idle.
        self._moving: dict[int, Held] = {}  # Sources that were seen at another phase.
        self.is_up = True
        self.refusals = dict.fromkeys(("no_time", "device_down", "too_many", "event_loop"), 0)
        self.labels = dict.fromkeys(Label, 0)
        self.stalls: Stalls = NO_STALLS
        self.loop: LoopLedger | None = None
        self.loop_costs: dict[Hashable, LoopCost] = {}

    # --- Models ---

    def add_model(self, key: Hashable, name: str) -> None:
        """Registers a model of the device by the key of its timings."""
        self._models[key] = name

    def forget_model(self, key: Hashable) -> None:
        """A model is not executed by this key any more. Idempotent; from any thread, also from a finaliser."""
        self._models.pop(key, None)
        self.loop_costs.pop(key, None)
        self._device_times.forget(key)

    def observe(self, key: Hashable, held_ns: int, stalled_ns: int) -> None:
        """Learns the device time of a model from an execution whose stalls were measured; see ``DeviceTimes``."""
        self._device_times.observe(key, held_ns, stalled_ns)

    def device_time(self, key: Hashable, count_min: int) -> Measured | None:
        """The device time of a model, without stalls of the machine that are rare; None where they were measured in fewer than
        ``count_min`` executions."""
        return self._device_times.measured(key) if self._device_times.count(key) >= count_min else None

    def learnt(self, key: Hashable, count_min: int) -> Measured | None:
        """The time for which a model has had a slot, stalls included; None where fewer than ``count_min`` timings are known."""
        count = self._estimates.count(key)
        if count < count_min:
            return None
        return Measured(self._estimates.warm_ns(key, 1), count, has_stalls=True)

    def would_fit(self, terms: StreamTerms, measured: Measured) -> bool:
        """Whether a stream has room on a slot, as far as this application knows."""
        return self.ledger.slot_that_fits(terms, self._costs(measured, None)) is not None

    def expected(self, key: Hashable, declared_ns: int | None) -> Measured | None:
        """The device time of a model by its timings, or by the duration that its driver declares; None without both."""
        count = self._estimates.count(key)
        if not count and declared_ns is None:
            return None
        return Measured(self._dispatcher.expected_ns(key, declared_ns), count)

    # --- Admission and end ---

    def admit(
        self,
        terms: StreamTerms,
        measured: Measured,
        model: Hashable,
        *,
        now_ns: int,
        chooses_phase: bool = False,
        granted: ServedReservation | None = None,
    ) -> Held:
        """Reserves time for a stream on the first slot with room; ``chooses_phase`` as for ``Ledger.admit``.

        Args:
            terms: The stream.
            measured: The device time of a frame.
            model: The key of the model that its frames execute.
            now_ns: The time.
            chooses_phase: As for ``Ledger.admit``.
            granted: On a served device, the time that its ledger has granted.

        Raises:
            NotAdmitted: No slot has; with the reason and what would fit.
        """
        self._prepare_admission(model, now_ns)
        admitted = self._admitted(terms, measured, now_ns, chooses_phase, granted)
        return self._begin(*admitted, measured, model, granted)

    def _admitted(
        self,
        terms: StreamTerms,
        measured: Measured,
        now_ns: int,
        chooses_phase: bool,
        granted: ServedReservation | None,
    ) -> tuple[Reservation, OnLoop | None]:
        terms, chooses_phase = as_granted(terms, granted, chooses_phase=chooses_phase)
        costs = self._costs(measured, granted)
        return self._with_loop(
            terms,
            measured,
            granted,
            costs,
            lambda: self.ledger.admit(terms, costs, now_ns=now_ns, chooses_phase=chooses_phase),
        )

    def change(
        self,
        old: Held,
        terms: StreamTerms,
        measured: Measured,
        *,
        now_ns: int,
        chooses_phase: bool = False,
        granted: ServedReservation | None = None,
    ) -> Held:
        """Reserves time for new terms, before the old reservation ends: the caller ends it. Where the new terms demand no more, the
        old reservation has them from now on, and is returned.

        Raises:
            NotAdmitted: As for ``admit``; the old reservation is as before.
        """
        self._prepare_admission(old.model, now_ns, keep=old)
        if old.end:
            admitted = self._admitted(terms, measured, now_ns, chooses_phase, granted)
            return self._begin(*admitted, measured, old.model, granted)
        number = old.reservation.number
        terms, chooses_phase = as_granted(terms, granted, chooses_phase=chooses_phase)
        costs = self._costs(measured, granted)

        def changed() -> Reservation:
            return self.ledger.change(number, terms, costs, now_ns=now_ns, chooses_phase=chooses_phase)

        is_less = terms_demand_no_more(terms, old.reservation.terms)
        if self.loop is None or old.on_loop is None or not is_less:
            reservation, on_loop = self._with_loop(terms, measured, granted, costs, changed)
        else:
            with self.refusals_counted():
                reservation = changed()
            # The stream has its frames once, whatever the number of its reservations.
            on_loop, old.on_loop = old.on_loop, None
            self.loop.change(on_loop.number, terms)
        if reservation.number != number:
            if old.grant is granted:
                old.grant = None  # The new one has it.
            return self._begin(reservation, on_loop, measured, old.model, granted)
        self._leave_loop(old)
        old.on_loop = on_loop
        if old.grant is not granted:
            self._give_back(old)
            self._take(old, granted)
        old.reservation = with_verdict(reservation, granted)
        reservation.change_server(old.server)
        self._changed()
        return old

    def _costs(self, measured: Measured, granted: ServedReservation | None) -> dict[int, SlotCost]:
        cost = SlotCost(duration_ns=measured.duration_ns, piece_ns=measured.duration_ns)
        if granted is not None:
            return {granted.reserved.slot: cost}
        if self.loop is None or not measured.loop.total_ns:
            return dict.fromkeys(self._slots, cost)
        # The emptiest first: a full slot has no room for the loop's parts of frames on other slots.
        return dict.fromkeys(sorted(self._slots, key=self.ledger.share_ppm), cost)

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Counts a refusal within it."""
        try:
            yield
        except NotAdmitted as e:
            reason = "no_time"
            if e.is_by_event_loop:
                reason = "event_loop"
            elif not self.is_up:
                reason = "device_down"
            elif self.count >= RESERVATIONS_MAX:
                reason = "too_many"
            self.refusals[reason] += 1
            raise

    def _with_loop(
        self,
        terms: StreamTerms,
        measured: Measured,
        granted: ServedReservation | None,
        costs: Mapping[int, SlotCost],
        admit: Callable[[], Reservation],
    ) -> tuple[Reservation, OnLoop | None]:
        """Reserves the time of the event loop for a stream together with that of the device."""
        loop = self.loop
        with self.refusals_counted():
            if loop is None or not measured.loop.total_ns:
                return admit(), None
            cost = measured.loop.times(loop.factor)
            allowance_ns = None if granted is None else loop_allowance_ns(terms)
            number, found = loop.reserve(
                self, terms, cost, admit, costs=costs, allowance_ns=allowance_ns, measured=measured.loop
            )
            return found, OnLoop(number, cost, measured.loop)

    def _leave_loop(self, held: Held) -> None:
        on_loop, held.on_loop = held.on_loop, None
        if on_loop is not None and self.loop is not None:
            self.loop.release(on_loop.number)

    def loop_changed(self) -> None:
        """See ``LoopUser``."""
        if self._held:
            self._changed()

    def _begin(
        self,
        reservation: Reservation,
        on_loop: OnLoop | None,
        measured: Measured,
        model: Hashable,
        granted: ServedReservation | None,
    ) -> Held:
        reservation = with_verdict(reservation, granted)
        held = self._held[reservation.number] = Held(reservation, measured, model)
        held.on_loop = on_loop
        held.server.counts = _Counts(self.labels)
        held.server.stalls = self.stalls
        self._changed()
        self._take(held, granted)
        return held

    # --- The ledger of a served device ---

    def asked(
        self, terms: StreamTerms, measured: Measured, model: Hashable, *, now_ns: int, chooses_phase: bool
    ) -> AskedTime:
        """The time that a stream asks of the ledger of a served device, with the longest best effort of this application."""
        self._prepare_admission(model, now_ns)
        if self.loop is not None and measured.loop.total_ns:
            # The way through the loop, in both directions, is as jitter to the device.
            terms = msgspec.structs.replace(terms, jitter_ns=terms.jitter_ns + loop_allowance_ns(terms))
        return asked_time(terms, measured.duration_ns, self._counted, chooses_phase=chooses_phase)

    def _take(self, held: Held, granted: ServedReservation | None) -> None:
        held.grant = granted
        if granted is None:
            return
        granted.on_end = lambda why: self._ended_by_server(held, why)
        if granted.end:
            self._ended_by_server(held, granted.end)  # Before this end was ready for the notice.

    def _give_back(self, held: Held) -> None:
        grant, held.grant = held.grant, None
        if grant is not None and self.shared is not None:
            self.shared.release(grant)

    def _ended_by_server(self, held: Held, why: str) -> None:
        """The ledger of the served device has ended a reservation, or its process is gone."""
        held.grant = None
        if why == "withdrawn":
            self.withdraw()
            return
        if held.reservation.number in self._held:
            self.ledger.release(held.reservation.number)
            self._drop(held, why)
            self._changed()

    def _limit_shared(self, room_ns: int) -> None:
        self._shared_room_ns = room_ns
        if self._held:
            self._changed()

    def _prepare_admission(self, model: Hashable, now_ns: int, keep: Held | None = None) -> None:
        """Ends reservations without frames, and has the ledger know the best-effort models of the device."""
        if keep is not None:
            self.seen(keep, now_ns)
        silent = self.ledger.end_silent(now_ns)
        for reservation in silent:
            self._drop(self._held[reservation.number], "silent")
        if silent:
            self._changed()
        pieces: dict[str, int] = {}
        guaranteed = {held.model for held in self._held.values()} | {model}
        for key in list(self._models):  # A finaliser may remove one at any time.
            name = self._models.get(key)
            if name is not None and key not in guaranteed and self._estimates.count(key):
                pieces[name] = max(pieces.get(name, 0), self._estimates.warm_ns(key, 1))
        self._forget_all_but(pieces.keys())
        for slot in self._slots:
            for name, piece_ns in pieces.items():
                self.ledger.allow_lower(slot, name, piece_ns)
        self._counted = pieces

    def _forget_all_but(self, names: Set[str]) -> None:
        for name in self._counted.keys() - names:
            for slot in self._slots:
                self.ledger.forget_lower(slot, name)

    def end(self, held: Held, why: str = "released") -> None:
        """Ends a reservation: it covers no further frame. Its time is free when no frame of its slot is in progress: those that
        came before have counted with it, and one that is admitted now would come on top. Idempotent."""
        if held.end:
            return
        held.end = why
        held.server.is_withdrawn = True
        self._ending[held.reservation.number] = held
        self._settle(held.reservation.slot)

    def _drop(self, held: Held, why: str) -> None:
        """Forgets a reservation that the ledger has ended, whose frames are not waited for."""
        for table in (self._held, self._ending, self._moving):
            table.pop(held.reservation.number, None)
        held.end = held.end or why
        held.server.is_withdrawn = True
        self._leave_loop(held)
        if why == "withdrawn":
            for arrival in list(held.undecided):
                arrival.withdrawn()
        self._give_back(held)

    def frame_ended(self, held: Held) -> None:
        """Neither the dispatcher nor the device has a frame any more."""
        if self._ending or self._moving:
            self._settle(held.reservation.slot)

    def _settle(self, slot: int) -> None:
        """Frees the time of reservations that have ended, and moves phases, if no reserved frame of a slot is in progress."""
        if any(held.in_progress for held in self._held.values() if held.reservation.slot == slot):
            return
        ended = [held for held in self._ending.values() if held.reservation.slot == slot]
        for held in ended:
            number = held.reservation.number
            del self._ending[number], self._held[number]
            if held.end == "astray":
                self.ledger.lose(number)
            else:
                self.ledger.release(number)
            self._give_back(held)
            self._leave_loop(held)
        if ended:
            self._changed()
        for held in [held for held in self._moving.values() if held.reservation.slot == slot]:
            del self._moving[held.reservation.number]
            if isinstance(held.server, PhasedServer) and not held.end:
                self._move(held, held.server)

    # --- Phases ---

    def look(self, held: Held, now_ns: int, deadline_ns: int | None) -> None:
        """A frame of a reservation comes: with a phase, its capture is looked at, and the first one may move the phase."""
        server = held.server
        if not isinstance(server, PhasedServer) or held.end:
            return
        is_first = server.captured_ns is None
        server.look(now_ns, deadline_ns)
        if server.wanted_ns is None:
            return
        if is_first:
            self._move(held, server)
        else:
            self._moving[held.reservation.number] = held

    def _move(self, held: Held, server: PhasedServer) -> None:
        """Has a reservation follow its source; where there is no room, and the source has left its windows, it ends."""
        if server.wanted_ns is None:
            return
        phase_ns = server.wanted_ns % server.period_ns
        if self.shared is None:
            self._moved(held, server, phase_ns, has_moved=True)
        elif held.grant is not None and not held.is_asking:
            held.is_asking = True
            self.shared.move(
                held.grant, phase_ns, lambda has_moved: self._answered(held, server, phase_ns, has_moved)
            )

    def _answered(self, held: Held, server: PhasedServer, phase_ns: int, has_moved: bool) -> None:
        held.is_asking = False
        if not held.end:
            self._moved(held, server, phase_ns, has_moved=has_moved)

    def _moved(self, held: Held, server: PhasedServer, phase_ns: int, *, has_moved: bool) -> None:
        found = self.ledger.move(held.reservation.number, phase_ns) if has_moved else None
        if found is not None:
            held.reservation = found
            server.move(phase_ns)
            self._changed()
        elif server.is_astray or (has_moved and self.shared is not None):
            self.end(held, "astray")  # On a served device, the two ledgers would differ otherwise.

    # --- The end by the device ---

    def withdraw(self) -> None:
        """The device has failed: all reservations end, and none is made until ``restore``."""
        self.is_up = False
        for slot in self._slots:
            for reservation in self.ledger.withdraw(slot):
                self._drop(self._held[reservation.number], "withdrawn")
        self._changed()

    def restore(self) -> None:
        """The device works again. Idempotent."""
        self.is_up = True
        for slot in self._slots:
            self.ledger.restore(slot)

    def overran(self, held: Held, held_ns: int) -> None:
        """A served device has measured the time of a frame that overran."""
        self._estimates.observe(held.model, held_ns)
        self._device_times.observe(held.model, held_ns, 0)

    def took(self, held: Held, frame: Frame, *, is_whole: bool) -> None:
        """A frame that had a slot has ended; ``is_whole``: with a result in time."""
        times, held_ns, stalled_ns = self._device_times, frame.held_ns, frame.stalled_ns
        if is_whole and stalled_ns and held_ns - stalled_ns == held.server.duration_ns:
            times.observe_excused(held.model, held_ns, stalled_ns)
        else:
            times.observe(held.model, held_ns, stalled_ns, is_whole=is_whole)

    def seen(self, held: Held, now_ns: int) -> None:
        """A frame of a reservation has come."""
        self.ledger.seen(held.reservation.number, now_ns)

    def _changed(self) -> None:
        # One test of each slot, whatever the number of its streams.
        slots = {held.reservation.slot for held in self._held.values()}
        rooms_ns = {slot: self.ledger.verdict(slot).room_ns for slot in slots}
        for held in self._held.values():
            reservation = held.reservation
            # As ``Ledger.may_run_lower``.
            held.server.may_run_lower = reservation.cost.piece_ns <= rooms_ns[reservation.slot]
        room_ns = min(rooms_ns.values(), default=None)
        if room_ns is not None:
            room_ns = min(room_ns, self._shared_room_ns)
        self._dispatcher.limit_best_effort(room_ns)

    # --- What is held ---

    @property
    def count(self) -> int:
        """Number of reservations, those included that have ended while frames of their slot are in progress."""
        return len(self._held)

    def counts(self) -> dict[str, int]:
        """See ``Ledger.counts``."""
        return self.ledger.counts()

    def shares(self) -> list[float]:
        """The share of each slot that is reserved."""
        return [self.share(slot) for slot in self._slots]

    def share(self, slot: int) -> float:
        """The share of a slot that is reserved."""
        return self.ledger.share_ppm(slot) / SHARE_PPM

    def lines(self) -> list[str]:
        """The reservations, each in a line of text."""
        return [described(held) for held in self._held.values()]
