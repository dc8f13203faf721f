"""The guarantee of one stream: asked for once, changed, and ended; and the execution of its frames under it.

Owns when the device is measured, and the reservation that the stream has now. ``reservations`` owns the time of the device,
``stream`` the results.

Invariants:
1. Nothing is reserved before ``admit`` returns, and nothing after ``end``, once no frame of the slot is in progress.
2. A change that is not admitted leaves everything as it was.
3. A device that fails under a frame loses all of its reservations; its next admission measures it first.
4. A reservation whose frames overrun grows to what was learnt of them, if that fits: a device is slower beside other work than when
   it was measured, and the event loop notices ends later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from aionn.errors import DeadObject, DeviceUnavailable, Error, InvalidArgument, NotAdmitted, ResourceExhausted
from aionn.hal import duration_text
from aionn.platform.loops import finish
from aionn.platform.stalls import NO_STALLS
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.results import Result
from aionn.runtime.executions.slot_pool import FrameBuffer
from aionn.runtime.guarantees.arrivals import FrameArrival, Held, Measured, described
from aionn.runtime.guarantees.loop_time import LoopParts, loop_ledger, loop_ran_ns
from aionn.runtime.guarantees.measuring import COLD_EXECUTIONS, TIMINGS_MIN, measure
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.runtime.guarantees.stalls import stalls_of_frames, stalls_of_loop
from aionn.runtime.guarantees.terms import at_phase
from aionn.scheduler.admission import SHARE_PPM, StreamTerms
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.reservations.event_loop import NO_LOOP_COST, USUAL_LOOP_COST, LoopLedger
from aionn.scheduler.reservations.windows import PhasedServer
from aionn.service.client.reservations import ServedReservation

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["RunFrame", "StreamGuarantee", "StreamReservation"]


PACE_S = 0.004
"""Pause before each execution of a warm-up where the time of the event loop is measured: some 70 ms for all, and the caches lose
what they lose between frames."""

RENEWAL_FRAMES = TIMINGS_MIN
"""Frames that overran until their duration is looked at again: with fewer timings a single slow one would reserve more for good."""


class StreamReservation(msgspec.Struct, frozen=True):
    """The time that a stream has reserved.

    Attributes:
        slot: The device slot, as ``npu/0``.
        duration_ns: The device time of a frame: what takes longer overruns. The 0.99 quantile of the timings, with a margin for how
            few they are.
        timings: Their number; 0 where the duration that the driver declares counts, since the frame could not be measured.
        piece_ns: The longest part of it that cannot be interrupted.
        share: The share of the slot's time, from 0 to 1.
        period_ns: Least time between two captures.
        deadline_ns: From a frame's capture to its result.
        jitter_ns: Longest time from a frame's capture to its arrival.
        slack_ns: The time that was left at the tightest point when it was admitted.
        at_ns: That point: the time since all streams began together.
        end: Why it has ended: ``released``, ``withdrawn`` (the device has failed), ``silent`` (no frame came for half a minute, and
            another stream asked for the time), ``astray`` (the source has left its phase, and there is no room where it is now);
            empty while it is in force.
        phase_ns: With ``guarantee="phased"``: the time of a capture on the monotonic clock, not before now; all others are whole
            periods away. It follows the source. None without a phase.
        tolerance_ns: The most that a capture may be before or after its time.
        loop_before_ns: The processor time of the event loop's thread for a frame before the device; 0 where it does not count.
        loop_after_ns: That after the device.
    """

    slot: str
    duration_ns: int
    timings: int
    piece_ns: int
    share: float
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    slack_ns: int
    at_ns: int
    end: str = ""
    phase_ns: int | None = None
    tolerance_ns: int = 0
    loop_before_ns: int = 0
    loop_after_ns: int = 0

    def __str__(self) -> str:
        origin = f"0.99 quantile of {self.timings} timings" if self.timings else "declared by its driver,"
        text = (
            f"{self.slot}: {duration_text(self.duration_ns)} ({origin} with margin) every"
            f" {duration_text(self.period_ns)}, piece {duration_text(self.piece_ns)}, share {self.share:.3f}, slack"
            f" {duration_text(self.slack_ns)} at t = {duration_text(self.at_ns)}"
        )
        if self.phase_ns is not None:
            text += f", captures within {duration_text(self.tolerance_ns)} of their phase"
        if loop_ns := self.loop_before_ns + self.loop_after_ns:
            text += f", {duration_text(loop_ns)} of the event loop"
        return f"{text}; {self.end}" if self.end else text


class RunFrame(Protocol):
    """Executes what is in a buffer, as a frame of a reservation or as best effort."""

    def __call__(
        self,
        buffer: FrameBuffer,
        deadline_ns: int | None,
        *,
        arrival: FrameArrival | None,
    ) -> Coroutine[Any, Any, Result]: ...


class StreamGuarantee:
    """See the module.

    Args:
        reservations: Those of the device.
        model: The key by which the device's time for a frame is learnt.
        declared_ns: The duration of a frame that the driver declares; None if it declares none.
        terms: The stream's promises and demands.
        is_best: Whether the stream runs as best effort where it is not admitted.
        run: Executes a frame.
        warm_up: Executes once, in a buffer of the burst.
        check: Raises ``InvalidArgument`` where the burst has too few buffers for terms.
        chooses_phase: Whether the phase of the terms is replaced by one that fits.
        threads: Gives the threads that execute the frames, as far as they are known; another process may execute them later.

    Attributes:
        terms: The terms as they are now.
        refusal: Why there is no reservation, where that is allowed.
        held: The reservation; None before the admission, and where it was refused.
        known: The device time by another burst of the same model on the same device; None where it was not measured there.
        arrivals: The frame that is in each buffer, by the buffer's identifier.
    """

    def __init__(
        self,
        reservations: DeviceReservations,
        model: Hashable,
        terms: StreamTerms,
        *,
        declared_ns: int | None,
        is_best: bool,
        run: RunFrame,
        warm_up: Callable[[], Awaitable[Result]],
        check: Callable[[StreamTerms], None],
        chooses_phase: bool = False,
        threads: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        if reservations.stalls is NO_STALLS:
            reservations.stalls = stalls_of_loop()
        if reservations.loop is None:
            reservations.loop = loop_ledger()
        self._reservations = reservations
        self._model = model
        self._declared_ns = declared_ns
        self._is_best = is_best
        self._run = run
        self._warm_up = warm_up
        self._check = check
        self._chooses_phase = chooses_phase
        self._threads = threads
        self._lock = anyio.Lock()
        self._was_asked = False
        self._is_over = False
        self._overran_count = 0
        self.known: Measured | None = None
        self.terms = terms
        self.refusal: NotAdmitted | None = None
        self.held: Held | None = None
        self.arrivals: dict[int, FrameArrival] = {}

    @property
    def loop(self) -> LoopLedger | None:
        """The ledger of the event loop; None where its time does not count."""
        return self._reservations.loop

    @property
    def is_asked(self) -> bool:
        """Whether the stream was admitted, or may run without."""
        return self._was_asked

    def reservation(self) -> StreamReservation | None:
        """The reservation; None before the admission, and where it was refused."""
        held = self.held
        if held is None:
            return None
        reservation, verdict = held.reservation, held.reservation.verdict
        loop = NO_LOOP_COST if held.on_loop is None else held.on_loop.cost
        phase_ns = reservation.terms.phase_ns
        if phase_ns is not None:
            phase_ns += (
                max(0, -((phase_ns - now_ns()) // reservation.terms.period_ns)) * reservation.terms.period_ns
            )
        return StreamReservation(
            slot=reservation.slot_name,
            duration_ns=reservation.cost.duration_ns,
            timings=held.measured.timings,
            piece_ns=reservation.cost.piece_ns,
            share=reservation.demand.share_ppm / SHARE_PPM,
            period_ns=reservation.terms.period_ns,
            deadline_ns=reservation.terms.deadline_ns,
            jitter_ns=reservation.terms.jitter_ns,
            slack_ns=verdict.slack_ns,
            at_ns=verdict.at_ns,
            end=held.end,
            phase_ns=phase_ns,
            tolerance_ns=reservation.terms.tolerance_ns,
            loop_before_ns=loop.before_ns,
            loop_after_ns=loop.after_ns,
        )

    # --- Admission ---

    async def admit(self) -> None:
        """Asks for the reservation, once; measures the device before if its time is not known.

        Raises:
            NotAdmitted: There is no room.
            InvalidArgument: The stream has ended.
            Error: The device could not be measured.
        """
        if self._was_asked:
            return
        async with self._lock:
            if self._was_asked:
                return
            measured = self._with_loop_cost(await self._measured_for(self.terms))
            self._check_open()
            try:
                self._hold(await self._admitted(self.terms, measured))
            except NotAdmitted as e:
                if not self._is_best:
                    raise
                self.refusal = e
            self._was_asked = True

    async def change(self, terms: StreamTerms) -> None:
        """Asks for other terms; the old reservation ends when the new one is there.

        Raises:
            NotAdmitted: There is no room for them; the old reservation is as before.
            InvalidArgument: The stream has ended, or the burst has too few buffers.
            Error: The device could not be measured.
        """
        self._check(terms)
        await self.admit()
        async with self._lock:
            measured = self._with_loop_cost(await self._measured_for(terms))
            self._check_open()
            if self.held is None:
                self._hold(await self._admitted(terms, measured))
                self._take_terms(terms)
            elif self._reservations.shared is None:
                self._change(self.held, terms, measured)
                self._take_terms(terms)
            else:
                # As a whole: a change that the server has made, and this end has not, would leave two different terms.
                await finish(self._ask_to_change(self.held, terms, measured))

    def _take_terms(self, terms: StreamTerms) -> None:
        self.terms = terms
        self.refusal = None

    async def _admitted(self, terms: StreamTerms, measured: Measured) -> Held:
        """A new reservation; on a served device, its ledger is asked first."""
        chooses_phase = self._chooses_phase
        granted = await self._granted(terms, measured, None, chooses_phase=chooses_phase)
        try:
            self._check_open()
            return self._reservations.admit(
                terms, measured, self._model, now_ns=now_ns(), chooses_phase=chooses_phase, granted=granted
            )
        except Error:
            self._give_back(granted)
            raise

    async def _granted(
        self, terms: StreamTerms, measured: Measured, old: Held | None, *, chooses_phase: bool
    ) -> ServedReservation | None:
        """The time that the ledger of a served device grants; None on other devices."""
        reservations = self._reservations
        if reservations.shared is None:
            return None
        asked = reservations.asked(terms, measured, self._model, now_ns=now_ns(), chooses_phase=chooses_phase)
        grant = None if old is None else old.grant
        with reservations.refusals_counted():
            return await reservations.shared.reserve(asked, grant, slot_count=reservations.slot_count)

    def _give_back(self, granted: ServedReservation | None) -> None:
        if granted is not None and self._reservations.shared is not None:
            self._reservations.shared.release(granted)

    async def _ask_to_change(self, old: Held, terms: StreamTerms, measured: Measured) -> None:
        terms_there, chooses_phase = self._at_phase_of_source(old, terms)
        granted = await self._granted(terms_there, measured, old, chooses_phase=chooses_phase)
        try:
            self._check_open()
            self._change(old, terms, measured, granted)
        except Error:
            if granted is not old.grant:
                self._give_back(granted)
            raise
        self._take_terms(terms)

    def _change(
        self, old: Held, terms: StreamTerms, measured: Measured, granted: ServedReservation | None = None
    ) -> None:
        terms, chooses_phase = self._at_phase_of_source(old, terms)
        found = self._reservations.change(
            old, terms, measured, now_ns=now_ns(), chooses_phase=chooses_phase, granted=granted
        )
        if found is not old:
            found.server.counts = old.server.counts  # Of the stream, whatever its terms were.
            self._reservations.end(old)
            self._hold(found)

    def _hold(self, found: Held) -> None:
        found.server.stalls = stalls_of_frames(self._reservations.stalls, self._threads())
        self.held = found

    def _at_phase_of_source(self, old: Held, terms: StreamTerms) -> tuple[StreamTerms, bool]:
        """The terms at the phase that the source has, and whether a phase is to be chosen."""
        chooses_phase = self._chooses_phase
        if terms.phase_ns is not None:
            # At the phase that the source has; with another period, where there is room, and the first frame shows it.
            seen_ns = old.server.captured_ns if isinstance(old.server, PhasedServer) else None
            held_terms = old.reservation.terms
            if terms.period_ns != held_terms.period_ns:
                chooses_phase = True
            elif not old.end and held_terms.phase_ns is not None:
                terms, chooses_phase = at_phase(terms, held_terms.phase_ns), False
            elif seen_ns is not None:
                terms, chooses_phase = at_phase(terms, seen_ns), False
        return terms, chooses_phase

    def overran(self) -> None:
        """The consumer gets a frame that overran. Every ``RENEWAL_FRAMES`` such frames the reservation takes the duration that was
        learnt since, where it is longer and there is room for it."""
        self._overran_count += 1
        held = self.held
        if self._overran_count % RENEWAL_FRAMES or held is None or held.end or self._lock.locked():
            return
        learnt = self._reservations.learnt(self._model, TIMINGS_MIN)
        if learnt is not None and learnt.duration_ns > held.reservation.cost.duration_ns:
            shared = self._reservations.shared
            if shared is not None:
                shared.begin(lambda: self._renew(held, learnt))
                return
            with suppress(NotAdmitted):  # As before then.
                self._change(held, self.terms, self._with_loop_cost(learnt))

    async def _renew(self, held: Held, learnt: Measured) -> None:
        """As ``overran``, on a served device, while the consumer continues."""
        async with self._lock:
            if not held.end and held is self.held:
                with suppress(Error):
                    await finish(self._ask_to_change(held, self.terms, self._with_loop_cost(learnt)))

    def _check_open(self) -> None:
        if self._is_over:
            raise InvalidArgument("stream: ended while it asked for a reservation")

    async def _measured_for(self, terms: StreamTerms) -> Measured:
        """The device time of a frame; no stream is refused for stalls of the machine that are in what is known."""
        measured = await self._measured()
        if measured.has_stalls and not self._reservations.would_fit(terms, measured):
            return await self._warmed_up()
        return measured

    async def _measured(self) -> Measured:
        reservations = self._reservations
        known = reservations.device_time(self._model, TIMINGS_MIN)
        known = known or reservations.learnt(self._model, TIMINGS_MIN) or self.known
        is_loop_known = (
            reservations.loop is None or self.known is not None or self._model in reservations.loop_costs
        )
        if known is not None and reservations.is_up and is_loop_known:
            return known
        return await self._warmed_up()

    def _with_loop_cost(self, measured: Measured) -> Measured:
        """With the time of the event loop for an execution, where that counts."""
        if self._reservations.loop is None:
            return measured
        return measured._replace(loop=self._reservations.loop_costs.get(self._model, USUAL_LOOP_COST))

    async def _warmed_up(self) -> Measured:
        loop, parts = self._reservations.loop, LoopParts()
        execute = self._warm_up if loop is None else lambda: self._paced(parts)
        try:
            measured = await measure(
                execute,
                lambda: stalls_of_frames(stalls_of_loop(), self._threads()),
                lambda held_ns, stalled_ns: self._reservations.observe(self._model, held_ns, stalled_ns),
            )
        except ResourceExhausted:
            # It takes longer than reserved frames can wait, which is known of models that ran, or whose driver declares a duration.
            expected = self._reservations.expected(self._model, self._declared_ns)
            if expected is None:
                raise
            return expected
        self._reservations.restore()
        if loop is not None:
            self._reservations.loop_costs[self._model] = parts.cost(COLD_EXECUTIONS)
            loop.restart(now_ns(), loop_ran_ns())  # The warm-up is not a part of any frame.
        return measured

    async def _paced(self, parts: LoopParts) -> Result:
        """An execution as frames have it: one that follows another without a pause takes a third of the loop's time, since the
        caches still have all of it."""
        await anyio.sleep(PACE_S)
        return await parts.measured(self._warm_up())

    def end(self) -> None:
        """Ends the reservation. Idempotent."""
        self._is_over = True
        self.arrivals.clear()
        if self.held is not None:
            self._reservations.end(self.held)

    # --- Frames ---

    def execute(self, buffer: FrameBuffer, deadline_ns: int | None) -> Coroutine[Any, Any, Result]:
        """Executes what is in a buffer, as a frame of the reservation if there is one."""
        held = self.held
        if held is None:
            return self._run(buffer, deadline_ns, arrival=None)
        loop = self._reservations.loop
        if loop is not None and held.on_loop is not None:
            loop.ran(held.on_loop.measured, now_ns(), loop_ran_ns)
        arrival = FrameArrival(self._reservations, held)
        self.arrivals[buffer.identifier] = arrival
        return self._run_reserved(buffer, deadline_ns, arrival)

    def never_came(self) -> FrameArrival | None:
        """A frame had no buffer until its deadline; None without a reservation."""
        if self.held is None:
            return None
        arrival = FrameArrival(self._reservations, self.held)
        arrival.never_came(now_ns())
        arrival.ended()
        return arrival

    async def _run_reserved(
        self, buffer: FrameBuffer, deadline_ns: int | None, arrival: FrameArrival
    ) -> Result:
        try:
            return await self._run(buffer, deadline_ns, arrival=arrival)
        except (DeadObject, DeviceUnavailable):
            if arrival.frame is not None:
                arrival.frame.note(Label.WITHDRAWN)
            # Only one that is in force concerns the device as it is now: others may have been made since it was revived.
            if not arrival.held.end:
                self._reservations.withdraw()
            raise

    def counts(self) -> dict[Label, int]:
        """Numbers of frames with each label so far."""
        return dict.fromkeys(Label, 0) if self.held is None else dict(self.held.server.counts)

    def explain(self) -> str:
        """The reservation with the counts of its frames, or the refusal, in a line of text."""
        if self.held is not None:
            return described(self.held)
        return "not asked yet" if self.refusal is None else f"best effort: {self.refusal}"
