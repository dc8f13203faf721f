"""The reservations of a set of device slots: which stream of which client holds how much of which slot.

Owns admission over several slots by first fit, the shares of clients, the cap of each slot, changes, and the end of reservations:
by their holder, with their client, with their slot, or after a silence. Pure: ``now`` is an argument, nothing waits, and a call
that raises changes nothing. The enforcement, frame by frame, is ``aionn.scheduler.bandwidth``'s and the policy's.

Invariants:
1. The streams of each slot pass ``SlotTest`` together, with the longest piece of each best-effort model that the slot may run.
2. A change admits the new reservation before the old one ends; where it is not admitted, the old one is as before.
3. No client holds more than its quota, nor do all clients of a user hold more than theirs; and all hold at most
   ``RESERVATIONS_MAX`` reservations.

Source: partitioned scheduling with first fit (Lopez et al. 2000), which needs no promise about migration.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted, WouldFit
from aionn.scheduler.admission import (
    CAP_PPM,
    DAY_NS,
    SHARE_PPM,
    Demand,
    Piece,
    SlotCost,
    SlotTest,
    StreamTerms,
    Verdict,
)
from aionn.scheduler.bandwidth import BandwidthServer
from aionn.scheduler.reservations.changes import demands_no_more
from aionn.scheduler.reservations.offers import counter_offers, fitting_phase, offers_text, reason_text
from aionn.scheduler.reservations.windows import PhasedServer

__all__ = [
    "RESERVATIONS_MAX",
    "SILENCE_NS",
    "Ledger",
    "Reservation",
    "ReservableSlot",
]

NAMES_SHOWN_MAX = 4
"""Streams that the message about a reached quota lists: a reader finds the one to end among them."""

RESERVATIONS_MAX = 1024
"""Most reservations of one ledger: far more streams than fit, and the memory that clients can cause is some 100 KB."""

SILENCE_NS = 30_000_000_000
"""Time without a frame after which a reservation ends: cameras that reconnect take less, and a client that reserves and sends
nothing must not keep others out."""


class ReservableSlot(msgspec.Struct, frozen=True):
    """A device slot, as admission sees it.

    Attributes:
        name: Named in messages, as ``npu/0``.
        can_preempt: Whether the device stops at boundaries; otherwise each frame is one piece.
        cap_ppm: The share of it that may be reserved, in millionths.
        delay_ns: The longest time for which the machine may not run what the slot needs; see ``SlotTest``.
    """

    name: str
    can_preempt: bool = True
    cap_ppm: int = CAP_PPM
    delay_ns: int = 0


class Reservation(msgspec.Struct, frozen=True):
    """A stream that was admitted.

    Attributes:
        number: Its number in the ledger, never used again.
        client: The client that holds it.
        terms: The terms that were promised.
        cost: The device time of a frame on its slot.
        slot: The index of its slot.
        slot_name: The slot's name.
        verdict: The result of the test when it was admitted: the tightest time and the slack there.
        admitted_ns: When that was.
        user: The user that the client belongs to.
    """

    number: int
    client: str
    terms: StreamTerms
    cost: SlotCost
    slot: int
    slot_name: str
    verdict: Verdict
    admitted_ns: int
    user: str = ""

    @property
    def demand(self) -> Demand:
        """The stream on its slot."""
        return Demand(self.terms, self.cost)

    def server(self) -> BandwidthServer:
        """A new server that enforces it."""
        terms, times = self.terms, {"slot": self.slot, **self._times()}
        if terms.phase_ns is None:
            return BandwidthServer(self.number, **times)
        return PhasedServer(self.number, phase_ns=terms.phase_ns, tolerance_ns=terms.tolerance_ns, **times)

    def change_server(self, server: BandwidthServer) -> None:
        """Has the server of the stream enforce these terms from now on, which demand no more than its own."""
        server.change(**self._times())

    def _times(self) -> dict[str, int]:
        return {
            "period_ns": self.terms.period_ns,
            "deadline_ns": self.terms.deadline_ns,
            "jitter_ns": self.terms.jitter_ns,
            "duration_ns": self.cost.duration_ns,
            "piece_ns": self.cost.piece_ns,
        }


class Ledger:
    """The reservations of some slots.

    Args:
        slots: The slots; their indexes are those of the device slots of the policy.
        quota_ppm: The share that one client may hold, in millionths of a slot, summed over all slots; None means no limit.
        user_quota_ppm: The same for all clients of one user together.
    """

    def __init__(
        self,
        slots: Sequence[ReservableSlot],
        *,
        quota_ppm: int | None = None,
        user_quota_ppm: int | None = None,
    ) -> None:
        for slot in slots:
            if not 0 < slot.cap_ppm <= SHARE_PPM:
                raise InvalidArgument(
                    f"ledger, {slot.name}: cap_ppm must be from 1 to {SHARE_PPM}, got {slot.cap_ppm}"
                )
            if not 0 <= slot.delay_ns <= DAY_NS:
                raise InvalidArgument(
                    f"ledger, {slot.name}: delay_ns must be from 0 to {DAY_NS}, got {slot.delay_ns}"
                )
        for name, quota in (("quota_ppm", quota_ppm), ("user_quota_ppm", user_quota_ppm)):
            if quota is not None and quota < 0:
                raise InvalidArgument(f"ledger: {name} must be at least 0, got {quota}")
        self._slots = tuple(slots)
        self._quota_ppm = quota_ppm
        self._user_quota_ppm = user_quota_ppm
        self._numbers = itertools.count(1)
        self._held: list[dict[int, Reservation]] = [{} for _ in slots]
        self._is_up = [True for _ in slots]
        # Kept while a slot does not change: a test lists its points once.
        self._tests: list[SlotTest | None] = [None for _ in slots]
        self._lower: list[dict[str, int]] = [{} for _ in slots]
        self._beside: tuple[Demand, ...] = ()
        self._more_delay_ns = 0
        self._seen_ns: dict[int, int] = {}
        self._counts = dict.fromkeys(("admitted", "refused", "released", "withdrawn", "silent"), 0)

    # --- Admission ---

    def admit(
        self,
        terms: StreamTerms,
        costs: Mapping[int, SlotCost],
        *,
        now_ns: int,
        client: str = "",
        user: str = "",
        elsewhere: Mapping[int, SlotCost] | None = None,
        chooses_phase: bool = False,
    ) -> Reservation:
        """Reserves time on the first slot on which a stream fits.

        Args:
            terms: The stream.
            costs: The device time of a frame by slot, in the order in which the slots are tried.
            now_ns: The time.
            client: The client that holds it.
            user: The user that it belongs to.
            elsewhere: The same for slots that are named in the counter-offer alone.
            chooses_phase: Whether the phase of the terms may be replaced: the reservation has the one that was chosen.

        Raises:
            NotAdmitted: It fits on no slot, with the reason and what would fit; the quota of the client or of its user is reached;
                or too many reservations exist.
            InvalidArgument: No slot is named, or one that the ledger does not have.
        """
        self._check_slots((*costs, *(elsewhere or ())))
        if not costs:
            raise InvalidArgument(f'stream "{terms.name}": expected one slot or more')
        try:
            terms, slot, verdict = self._first_fit(
                terms, costs, (client, user), elsewhere or {}, chooses_phase=chooses_phase
            )
        except NotAdmitted:
            self._counts["refused"] += 1
            raise
        self._counts["admitted"] += 1
        found = Reservation(
            next(self._numbers),
            client,
            terms,
            self._cost_on(slot, costs[slot]),
            slot,
            self._slots[slot].name,
            verdict,
            now_ns,
            user,
        )
        self._held[slot][found.number] = found
        self._changed(slot)
        self._seen_ns[found.number] = now_ns
        return found

    def slot_that_fits(self, terms: StreamTerms, costs: Mapping[int, SlotCost]) -> int | None:
        """The first slot on which a stream fits, whatever the quotas; None if no slot does. Reserves nothing, and costs a part
        of a refusal, which states a reason and counter-offers.

        Args:
            terms: The stream.
            costs: As for ``admit``.
        """
        self._check_slots(tuple(costs))
        for slot, cost in costs.items():
            if self._is_up[slot] and self._test(slot).fits(Demand(terms, self._cost_on(slot, cost))):
                return slot
        return None

    def shortages(
        self, terms: StreamTerms, costs: Mapping[int, SlotCost]
    ) -> list[tuple[SlotCost, Verdict]] | None:
        """Of each slot on which a stream does not fit, the cost of a frame and the result of ``SlotTest.shortage``; without
        slots whose devices are gone. None where ``slot_that_fits`` has a slot.

        Args:
            terms: The stream.
            costs: As for ``admit``.
        """
        self._check_slots(tuple(costs))
        found = []
        for slot, cost in costs.items():
            if self._is_up[slot]:
                cost = self._cost_on(slot, cost)
                short = self._test(slot).shortage(Demand(terms, cost))
                if short is None:
                    return None
                found.append((cost, short))
        return found

    def change(
        self,
        number: int,
        terms: StreamTerms,
        costs: Mapping[int, SlotCost],
        *,
        now_ns: int,
        chooses_phase: bool = False,
    ) -> Reservation:
        """Reserves time for new terms of a stream, beside the old reservation, which the caller releases when the stream has
        changed.

        Terms that demand no more than the old ones, on the same slot, replace them immediately and need no room beside them: the
        old number is then the number of the result.

        Raises:
            NotAdmitted: As for ``admit``; the old reservation is as before.
            InvalidArgument: There is no such reservation, or as for ``admit``.
        """
        old = self._reservation(number)
        cost = costs.get(old.slot)
        if cost is not None and demands_no_more(Demand(terms, self._cost_on(old.slot, cost)), old.demand):
            found = msgspec.structs.replace(old, terms=terms, cost=self._cost_on(old.slot, cost))
            self._held[old.slot][number] = found
            self._changed(old.slot)
            verdict = self._test(old.slot).verdict()
            found = self._held[old.slot][number] = msgspec.structs.replace(found, verdict=verdict)
            return found
        return self.admit(
            terms, costs, now_ns=now_ns, client=old.client, user=old.user, chooses_phase=chooses_phase
        )

    def move(self, number: int, phase_ns: int) -> Reservation | None:
        """Gives a reservation another phase, if it fits there; None, and nothing has changed, where it does not.

        The caller sees to it that no frame of the slot's reservations is in progress, or that this one has had none: otherwise a
        frame at the old phase and the next one at the new phase may demand more than either phase.

        Raises:
            InvalidArgument: There is no such reservation, or it has no phase.
        """
        old = self._reservation(number)
        if old.terms.phase_ns is None:
            raise InvalidArgument(f"ledger: reservation {number} has no phase")
        terms = msgspec.structs.replace(old.terms, phase_ns=phase_ns)
        others = [held.demand for held in self._held[old.slot].values() if held.number != number]
        verdict = self._new_test(old.slot, others).verdict(Demand(terms, old.cost))
        if not verdict.fits:
            return None
        found = msgspec.structs.replace(old, terms=terms, verdict=verdict)
        self._held[old.slot][number] = found
        self._changed(old.slot)
        return found

    def _first_fit(
        self,
        terms: StreamTerms,
        costs: Mapping[int, SlotCost],
        holder: tuple[str, str],
        elsewhere: Mapping[int, SlotCost],
        *,
        chooses_phase: bool,
    ) -> tuple[StreamTerms, int, Verdict]:
        if sum(map(len, self._held)) >= RESERVATIONS_MAX:
            raise NotAdmitted(f'stream "{terms.name}": {RESERVATIONS_MAX} reservations exist already')
        closest: tuple[int, Verdict] | None = None
        quota_left_ppm, over_quota_text = self._quota_left(*holder)
        is_over_quota = False
        for slot, cost in costs.items():
            if not self._is_up[slot]:
                continue
            new = Demand(terms, self._cost_on(slot, cost))
            if quota_left_ppm is not None and new.share_ppm > quota_left_ppm:
                is_over_quota = True
                continue
            placed = fitting_phase(self._test(slot), new) if chooses_phase else None
            if placed is not None:
                new = Demand(placed, new.cost)
            verdict = self._test(slot).verdict(new)
            if verdict.fits:
                return new.terms, slot, verdict
            if closest is None or _shortage(verdict) < _shortage(closest[1]):
                closest = slot, verdict
        if closest is None:
            reason = over_quota_text if is_over_quota else "all slots that could run it are down"
            reason = f'stream "{terms.name}": {reason}'
            offers = self._offers_within(terms, costs, quota_left_ppm or 0)
            if offers.period_ns is None:
                raise NotAdmitted(reason)
            raise NotAdmitted(f"{reason}. {offers_text(offers)}.", reason=reason, would_fit=offers)
        slot, verdict = closest
        new = Demand(terms, self._cost_on(slot, costs[slot]))
        offers = counter_offers(self._test(slot), new, verdict, tries_phases=not chooses_phase)
        offers = offers._replace(slots=self._slots_that_fit(terms, elsewhere))
        reason = reason_text(terms, self._slots[slot].name, verdict)
        raise NotAdmitted(f"{reason}. {offers_text(offers)}.", reason=reason, would_fit=offers)

    def _offers_within(self, terms: StreamTerms, costs: Mapping[int, SlotCost], left_ppm: int) -> WouldFit:
        """The period with which a stream fits what is left of a quota, where it fits a slot then."""
        for slot, cost in costs.items() if left_ppm > 0 else ():
            period_ns = -(-self._cost_on(slot, cost).duration_ns * SHARE_PPM // left_ppm)
            if self._is_up[slot] and terms.period_ns < period_ns <= DAY_NS:
                longer = Demand(
                    msgspec.structs.replace(terms, period_ns=period_ns), self._cost_on(slot, cost)
                )
                if longer.share_ppm <= left_ppm and self._test(slot).verdict(longer).fits:
                    return WouldFit(period_ns=period_ns)
        return WouldFit()

    def _quota_left(self, client: str, user: str) -> tuple[int | None, str]:
        """The share that a client may still get, None for any; and the reason for which it gets no more."""
        left_ppm, text = None, ""
        for quota_ppm, holder, held_ppm in (
            (self._quota_ppm, self._streams_of(client), self.client_ppm(client)),
            (self._user_quota_ppm, f"all processes of the user {user} hold", self.user_ppm(user)),
        ):
            if quota_ppm is not None and (left_ppm is None or quota_ppm - held_ppm < left_ppm):
                left_ppm = quota_ppm - held_ppm
                held, quota = held_ppm / SHARE_PPM, quota_ppm / SHARE_PPM
                text = f"{holder} a share of {held:.3f} of a slot and may hold {quota:.3f}; this stream needs more than the rest"
        return left_ppm, text

    def _streams_of(self, client: str) -> str:
        """The streams of a client as the subject of a sentence to it; another one does not get their names."""
        names = [f'"{r.terms.name}"' for r in self.reservations() if r.client == client]
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        return f"the streams of this process ({', '.join(names[:NAMES_SHOWN_MAX]) or 'none yet'}{more}) hold"

    def _slots_that_fit(self, terms: StreamTerms, elsewhere: Mapping[int, SlotCost]) -> tuple[str, ...]:
        found = []
        for slot, cost in elsewhere.items():
            new = Demand(terms, self._cost_on(slot, cost))
            if self._is_up[slot] and self._test(slot).verdict(new).fits:
                found.append(self._slots[slot].name)
        return tuple(found)

    def _cost_on(self, slot: int, cost: SlotCost) -> SlotCost:
        if self._slots[slot].can_preempt:
            return cost
        return SlotCost(duration_ns=cost.duration_ns, piece_ns=cost.duration_ns)

    def verdict(self, slot: int) -> Verdict:
        """The result of the test for what a slot holds."""
        return self._test(slot).verdict()

    def curve(self, slot: int) -> list[tuple[int, int, int]]:
        """See ``SlotTest.curve``, for what a slot holds."""
        return self._test(slot).curve()

    def _test(self, slot: int) -> SlotTest:
        test = self._tests[slot]
        if test is None:
            held = [reservation.demand for reservation in self._held[slot].values()]
            test = self._tests[slot] = self._new_test(slot, held)
        return test

    def _changed(self, slot: int) -> None:
        self._tests[slot] = None

    def _new_test(self, slot: int, held: Sequence[Demand]) -> SlotTest:
        lower = [Piece(name, piece_ns) for name, piece_ns in self._lower[slot].items()]
        found = self._slots[slot]
        return SlotTest(
            (*held, *self._beside),
            cap_ppm=found.cap_ppm,
            lower=lower,
            delay_ns=found.delay_ns + self._more_delay_ns,
        )

    def late(self) -> tuple[str, Verdict] | None:
        """The name of the first slot whose streams do not fit with what counts beside them, and the result of
        ``SlotTest.shortage``; None without one."""
        for slot, held in enumerate(self._held):
            short = self._test(slot).shortage() if held else None
            if short is not None:
                return self._slots[slot].name, short
        return None

    def count_beside(self, demands: tuple[Demand, ...], delay_ns: int) -> None:
        """Counts with other demands on each slot from now on, which are not of its streams, and with more delay; see
        ``aionn.scheduler.reservations.event_loop``."""
        if (demands, delay_ns) != (self._beside, self._more_delay_ns):
            self._beside, self._more_delay_ns = demands, delay_ns
            self._tests = [None for _ in self._slots]

    def _check_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < len(self._slots):
                raise InvalidArgument(f"ledger: expected a slot from 0 to {len(self._slots) - 1}, got {slot}")

    # --- Best effort ---

    def allow_lower(self, slot: int, name: str, piece_ns: int) -> bool:
        """Whether best-effort jobs of a model may run on a slot; if so, later admissions count with them.

        Args:
            slot: The slot.
            name: The model.
            piece_ns: Its longest time without a boundary; its whole duration where the device cannot preempt.

        Returns:
            False, and nothing has changed, where a reservation could be broken by it.
        """
        self._check_slots([slot])
        old_ns = self._lower[slot].get(name)
        if old_ns != piece_ns:
            self._lower[slot][name] = piece_ns
            self._changed(slot)
        if not self._held[slot] or self._test(slot).verdict().fits:
            return True
        if old_ns is None:
            del self._lower[slot][name]
        else:
            self._lower[slot][name] = old_ns
        self._changed(slot)
        return False

    def may_run_lower(self, number: int) -> bool:
        """Whether frames of a reservation that are not reserved may run as best effort on its slot: whether every deadline there
        bears a piece of theirs. It may change with each admission, change and end of a reservation on that slot.

        Raises:
            InvalidArgument: There is no such reservation.
        """
        held = self._reservation(number)
        return held.cost.piece_ns <= self._test(held.slot).verdict().room_ns

    def forget_lower(self, slot: int, name: str) -> None:
        """Best-effort jobs of a model do not run on a slot any more."""
        if self._lower[slot].pop(name, None) is not None:
            self._changed(slot)

    # --- The end of reservations ---

    def release(self, number: int) -> Reservation | None:
        """Ends a reservation; None where it has ended already."""
        return self._end(number, "released")

    def lose(self, number: int) -> Reservation | None:
        """Ends a reservation whose source has left its phase; None where it has ended already."""
        return self._end(number, "withdrawn")

    def _end(self, number: int, count: str) -> Reservation | None:
        for slot, held in enumerate(self._held):
            found = held.pop(number, None)
            if found is not None:
                self._changed(slot)
                self._seen_ns.pop(number, None)
                self._counts[count] += 1
                return found
        return None

    def release_client(self, client: str) -> tuple[Reservation, ...]:
        """Ends all reservations of a client that is gone; returns them."""
        found = tuple(reservation for reservation in self.reservations() if reservation.client == client)
        for reservation in found:
            self.release(reservation.number)
        return found

    def withdraw(self, slot: int) -> tuple[Reservation, ...]:
        """Ends all reservations of a slot whose device is gone; returns them. Nothing is admitted there until ``restore``."""
        self._check_slots([slot])
        found = tuple(self._held[slot].values())
        self._held[slot].clear()
        self._changed(slot)
        self._is_up[slot] = False
        for reservation in found:
            self._seen_ns.pop(reservation.number, None)
        self._counts["withdrawn"] += len(found)
        return found

    def restore(self, slot: int) -> None:
        """The device of a slot is back; withdrawn reservations must be admitted anew."""
        self._check_slots([slot])
        self._is_up[slot] = True

    def seen(self, number: int, now_ns: int) -> None:
        """A frame of a reservation has come."""
        if number in self._seen_ns:
            self._seen_ns[number] = now_ns

    def end_silent(self, now_ns: int) -> tuple[Reservation, ...]:
        """Ends the reservations without a frame for ``SILENCE_NS``; returns them."""
        found = tuple(r for r in self.reservations() if now_ns - self._seen_ns[r.number] >= SILENCE_NS)
        for reservation in found:
            self._end(reservation.number, "silent")
        return found

    def silent_at_ns(self) -> int | None:
        """When ``end_silent`` has something to do, unless frames come; None where nothing is reserved."""
        return min(self._seen_ns.values()) + SILENCE_NS if self._seen_ns else None

    # --- What is held ---

    def reservations(self, slot: int | None = None) -> tuple[Reservation, ...]:
        """The reservations of a slot, or of all, in the order of their admission."""
        if slot is not None:
            return tuple(self._held[slot].values())
        return tuple(sorted((r for held in self._held for r in held.values()), key=lambda r: r.number))

    def share_ppm(self, slot: int) -> int:
        """The share of a slot that is reserved, in millionths."""
        return sum(reservation.demand.share_ppm for reservation in self._held[slot].values())

    def client_ppm(self, client: str) -> int:
        """The share that a client holds over all slots, in millionths of one."""
        return sum(r.demand.share_ppm for held in self._held for r in held.values() if r.client == client)

    def user_ppm(self, user: str) -> int:
        """The share that the clients of a user hold over all slots, in millionths of one."""
        return sum(r.demand.share_ppm for held in self._held for r in held.values() if r.user == user)

    def counts(self) -> dict[str, int]:
        """Numbers of reservations that were ``admitted``, ``refused``, ``released``, ``withdrawn``, or ended as ``silent``."""
        return dict(self._counts)

    def _reservation(self, number: int) -> Reservation:
        for held in self._held:
            if number in held:
                return held[number]
        raise InvalidArgument(f"ledger: there is no reservation {number}")


def _shortage(verdict: Verdict) -> tuple[bool, int, int]:
    """The order in which refusals are explained: the slot that lacks the least comes first."""
    return verdict.limit != "demand", -verdict.slack_ns, verdict.share_ppm
