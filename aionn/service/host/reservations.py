"""The reservations of a served device: the streams of all of its clients in one ledger.

Owns the way from the messages of clients to the ledger (``aionn.scheduler.ledger``), the numbers of each client, the thread that
decides, and the notices to clients. The frames themselves are ordered by the queue of the device, as all executions are.

Invariants:
1. A client names its own reservations alone: a number is looked up in the table of its connection, and is never used again.
2. The event loop never decides, and never waits for a decision. Decisions run on the one thread for that, for which processes wait
   in turns; the end of a reservation is noted, and takes effect before the next decision.
3. The reservations of a client end with its connection, once its executions have ended.
4. A process holds no more than its share of the device's time, and no more than ``OF_PROCESS_MAX`` reservations.
5. No client gets the names of another one's streams and models.
6. A reservation is tested with best effort of its own client alone, since a client states the length of its executions itself. An
   application that holds reservations rejects best effort of its own that is too long for any stream; ``Room`` is that limit.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import anyio
import anyio.lowlevel

from aionn.errors import DeviceUnavailable, Error, InvalidArgument, NotAdmitted, ResourceExhausted
from aionn.hal import TIME_MAX_NS
from aionn.hal.callers import Connection
from aionn.scheduler.admission import (
    DAY_NS,
    SHARE_PPM,
    STREAM_NAME_CHARACTERS_MAX,
    SlotCost,
    StreamTerms,
)
from aionn.scheduler.ledger import SILENCE_NS, Ledger, ReservableSlot, Reservation
from aionn.scheduler.worker_turns import WorkerTurns
from aionn.service.host.accepted import ENDING
from aionn.service.wire.calls import Pending
from aionn.service.wire.channel import Channel, Handler
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import CallBody, Done, Execute, ExecuteFenced, Launch, ReplyBody
from aionn.service.wire.repetition import Compute, ComputeFenced
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    Move,
    MoveReply,
    Refusal,
    Release,
    Reserve,
    Reserved,
    ReserveReply,
    Room,
    Withdrawn,
)
from aionn.service.wire.sizes import shortened

__all__ = ["OF_PROCESS_MAX", "ClientReservations", "ServedReservations"]

OF_PROCESS_MAX = 256
"""Most reservations of one process: a quarter of those of a ledger, and more streams than an application has."""

NOTICE_PAUSE_S = 0.05
"""Pause between two rounds of notices: a client that reserves and releases without a pause would wake all others each time."""

NOTICES_PER_TURN = 8
"""Notices that are sent before other tasks of the loop get their turn: each takes some tens of microseconds."""

_decisions = WorkerTurns("admission of streams", 1)

_Executing = Execute | Launch | ExecuteFenced | Compute | ComputeFenced

_T = TypeVar("_T")

_OWNED_NAME = re.compile("\x01([0-9]+)\x02([^\x03]*)\x03")
"""A name in the ledger: with the number of its client, by characters that no name of a client has."""


class _Asked(NamedTuple):
    """The terms of a client, checked.

    Attributes:
        terms: The stream, with a name of the ledger.
        cost: The device time of a frame.
        chooses_phase: See ``Ledger.admit``.
        blocker: The name in the ledger of its longest best-effort model; empty for none.
        blocker_ns: The duration of that.
    """

    terms: StreamTerms
    cost: SlotCost
    chooses_phase: bool
    blocker: str
    blocker_ns: int


class ServedReservations:
    """The ledger of a device, for all of its clients.

    Args:
        name: The device's name.
        slot_count: The number of its slots.
        share: The share of the time of all slots that one process may hold, above 0 and at most 1.
        now: The clock.
    """

    def __init__(
        self, name: str, slot_count: int, *, share: float, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        slots = [ReservableSlot(f"{name}/{slot}", can_preempt=False) for slot in range(slot_count)]
        self._ledger = Ledger(slots, quota_ppm=int(share * SHARE_PPM) * slot_count)
        self._slots = range(slot_count)
        self._now = now
        self._lock = threading.Lock()  # Held during a decision; the loop never waits for it.
        self._clients = itertools.count(1)
        self._holders: dict[int, ClientReservations] = {}  # By the ledger's numbers.
        self._ending: deque[Callable[[], None]] = deque()
        self._notices: deque[tuple[ClientReservations, Withdrawn]] = deque()
        self._room_ns = DAY_NS
        self._has_changed = anyio.Event()

    def client(self, process: str | None, peer: Peer, owner: Hashable) -> ClientReservations:
        """The reservations of a new client.

        Args:
            process: Identifies its process, in words: the share is that of all clients in it. None for one that has no number: each
                of its connections counts as one.
            peer: The same, as the time of the event loop is shared.
            owner: Identifies the client itself.
        """
        number = next(self._clients)
        return ClientReservations(self, number, process or f"connection {number}", peer, owner)

    def counts(self) -> dict[str, int]:
        """See ``Ledger.counts``."""
        return self._ledger.counts()

    # --- On the thread that decides ---

    def reserve(self, client: ClientReservations, asked: _Asked, own: int | None) -> ReserveReply:
        """Reserves time for a stream; ``own`` is the client's number of the reservation that changes, None for a new one.

        Raises:
            NotAdmitted: There is no room, or the client's process holds too much.
            InvalidArgument: The client has no such reservation, or has gone.
        """
        with self._lock:
            now_ns = self._now()
            self._settle()
            self._end_silent(now_ns)
            client.check()
            old = None if own is None else client.ledger_number(own)
            self._check_count(client, asked.terms.name)
            costs = dict.fromkeys(self._slots, asked.cost)
            with self._beside_own_best_effort(asked):
                if old is None:
                    found = self._ledger.admit(
                        asked.terms,
                        costs,
                        now_ns=now_ns,
                        client=client.process,
                        chooses_phase=asked.chooses_phase,
                    )
                else:
                    self._ledger.seen(old, now_ns)
                    found = self._ledger.change(
                        old, asked.terms, costs, now_ns=now_ns, chooses_phase=asked.chooses_phase
                    )
            is_new = found.number != old
            if is_new:
                self._holders[found.number] = client
                own = client.add(found.number)
            assert own is not None, "it is new, or was there"
        return _reply(found, own, is_new=is_new)

    def move(self, client: ClientReservations, own: int, phase_ns: int) -> MoveReply:
        """See ``Ledger.move``.

        Raises:
            InvalidArgument: The client has no such reservation, or it has no phase.
        """
        with self._lock:
            self._settle()
            number = client.ledger_number(own)
            try:
                found = self._ledger.move(number, phase_ns)
            except InvalidArgument:
                raise InvalidArgument(f"service: reservation {own} has no phase") from None
        return MoveReply(found is not None)

    def look(self) -> None:
        """Lets what has ended take effect, and sets the limit of best effort."""
        with self._lock:
            self._settle()
            rooms_ns = [
                self._ledger.verdict(slot).room_ns for slot in self._slots if self._ledger.share_ppm(slot)
            ]
            self._room_ns = min(rooms_ns, default=DAY_NS)

    @contextmanager
    def _beside_own_best_effort(self, asked: _Asked) -> Iterator[None]:
        """Has the test count with the best effort of the client that asks."""
        if not asked.blocker:
            yield
            return
        for slot in self._slots:
            self._ledger.allow_lower(slot, asked.blocker, asked.blocker_ns)
        try:
            yield
        finally:
            for slot in self._slots:
                self._ledger.forget_lower(slot, asked.blocker)

    def _check_count(self, client: ClientReservations, name: str) -> None:
        count = sum(holder.process == client.process for holder in self._holders.values())
        if count >= OF_PROCESS_MAX:
            raise NotAdmitted(f'stream "{name}": this process has {OF_PROCESS_MAX} reservations already')

    def _end_silent(self, now_ns: int) -> None:
        silent_ns = self._ledger.silent_at_ns()
        if silent_ns is None or silent_ns > now_ns:
            return
        since_ns = now_ns - SILENCE_NS
        active = {client for client in set(self._holders.values()) if client.was_active_since(since_ns)}
        for number, holder in self._holders.items():
            if holder in active:
                self._ledger.seen(number, now_ns)
        for reservation in self._ledger.end_silent(now_ns):
            holder = self._holders.pop(reservation.number)
            self._notices.append((holder, Withdrawn(holder.remove(reservation.number), "silent")))

    def _settle(self) -> None:
        while self._ending:
            self._ending.popleft()()

    # --- The end of reservations ---

    def end(self, ending: Callable[[], None]) -> None:
        """Notes an end, which takes effect before the next decision. Called in the event loop."""
        self._ending.append(ending)
        self.wake()

    def release(self, number: int) -> None:
        """Ends one reservation, by the ledger's number. Called with the lock held."""
        del self._holders[number]
        self._ledger.release(number)

    # --- Notices ---

    def wake(self) -> None:
        """Has notices sent that are due. Called in the event loop."""
        self._has_changed.set()

    async def notify(self) -> None:
        """Sends the notices, until the task is cancelled."""
        while True:
            await self._has_changed.wait()
            self._has_changed = anyio.Event()
            with suppress(ResourceExhausted):  # The next change tries again.
                await _decisions.run(None, self.look)
            await self._send_notices()
            await anyio.sleep(NOTICE_PAUSE_S)

    async def _send_notices(self) -> None:
        sent = 0
        while self._notices:
            client, notice = self._notices.popleft()
            client.post(notice)
            sent += 1
            if sent % NOTICES_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
        for client in set(self._holders.copy().values()):
            if client.send_room(self._room_ns):
                sent += 1
                if sent % NOTICES_PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()


class ClientReservations:
    """The reservations of one client.

    Args:
        shared: Those of all clients.
        number: Its number among the clients.
        process: See ``ServedReservations.client``.
        peer: See there.
        owner: See there.

    Attributes:
        process: See above.
    """

    def __init__(
        self, shared: ServedReservations, number: int, process: str, peer: Peer, owner: Hashable
    ) -> None:
        self._shared = shared
        self._number = number
        self.process = process
        self._room_ns = DAY_NS
        self._room: Pending | None = None
        self._peer = peer
        self._owner = Connection(peer, owner)
        self._channel: Channel | None = None
        self._is_gone = False
        self._executed_ns = 0
        self._handles = itertools.count(1)
        # Changed by the thread that decides alone, or in its place.
        self._numbers: dict[int, int] = {}
        self._own_numbers: dict[int, int] = {}
        self._releasing: set[int] = set()

    def before(
        self, handle: Handler, is_greeted: Callable[[], bool], is_ending: Callable[[], bool]
    ) -> Handler:
        """A handler of calls that answers those about reservations, and has others answered.

        Args:
            handle: Answers all others, and everything before Hello.
            is_greeted: Whether the client has sent Hello.
            is_ending: Whether the process accepts nothing new.
        """

        async def handle_all(body: CallBody, channel: Channel) -> ReplyBody:
            if isinstance(body, _Executing):
                self._executed_ns = time.monotonic_ns()
            elif isinstance(body, Reserve | Change | Move | Release) and is_greeted():
                if is_ending() and isinstance(body, Reserve | Change):
                    raise DeviceUnavailable(ENDING)
                return await self.handle(body, channel)
            return await handle(body, channel)

        return handle_all

    async def handle(self, body: Reserve | Change | Move | Release, channel: Channel) -> ReplyBody:
        """Answers a call about reservations.

        Raises:
            InvalidArgument: A value is illegal, or the client has no such reservation.
            ResourceExhausted: Too many calls wait for the thread.
        """
        self._channel = channel
        match body:
            case Reserve():
                return await self._reserve(_checked(body.asked, self._number), None)
            case Change():
                return await self._reserve(_checked(body.asked, self._number), body.reservation)
            case Move():
                if not 0 <= body.phase_ns <= TIME_MAX_NS:
                    raise InvalidArgument(
                        f"service, phase_ns: expected a time of the monotonic clock, got {body.phase_ns}"
                    )
                return await self._decide(lambda: self._shared.move(self, body.reservation, body.phase_ns))
            case Release():
                self._release(body.reservation)
                return Done()

    async def _reserve(self, asked: _Asked, own: int | None) -> ReserveReply:
        try:
            return await self._decide(lambda: self._shared.reserve(self, asked, own))
        except NotAdmitted as e:
            would_fit = e.would_fit
            if would_fit.blocker is not None:
                would_fit = would_fit._replace(blocker=self._shown(would_fit.blocker))
            message, reason = (shortened(self._shown(text)) for text in (str(e), e.reason))
            return ReserveReply(refusal=Refusal(message, reason, would_fit))

    async def _decide(self, decide: Callable[[], _T]) -> _T:
        pace = self._peer.pace()

        def decide_on_thread() -> _T:
            if pace is not None:
                pace()  # Its clock begins on this thread.
            try:
                return decide()
            finally:
                if pace is not None:
                    pace()

        try:
            with self._peer.preparing():
                return await _decisions.run(self._owner, decide_on_thread)
        finally:
            self._shared.wake()

    def _shown(self, text: str) -> str:
        """A text of the ledger for this client: other clients' names are left out."""

        def shown(found: re.Match[str]) -> str:
            return found[2] if int(found[1]) == self._number else "(of another client)"

        return _OWNED_NAME.sub(shown, text)

    def _release(self, own: int) -> None:
        if own in self._numbers and own not in self._releasing:
            self._releasing.add(own)
            self._shared.end(lambda: self._end_own(own))

    def leave(self) -> None:
        """The client is gone, and its executions have ended. Idempotent."""
        if not self._is_gone:
            self._is_gone = True
            self._channel = None
            self._shared.end(self._end_all)

    def post(self, notice: Withdrawn) -> None:
        """Sends a notice, unless the client is gone."""
        if self._channel is not None:
            self._channel.post(notice)

    def send_room(self, room_ns: int) -> bool:
        """Notifies it of another limit of best effort; returns whether it did. One that has not answered gets no further one, and
        the last limit when it answers: what waits for a client that does not read is bounded."""
        if room_ns == self._room_ns or self._channel is None:
            return False
        if self._room is not None and not self._room.is_over:
            self._room.on_over = lambda _: self._shared.wake()
            return False
        with suppress(Error):  # It is gone.
            self._room = self._channel.begin(Room(room_ns))
            self._room_ns = room_ns
        return True

    def was_active_since(self, then_ns: int) -> bool:
        """Whether its process has executed anything since a time. From any thread."""
        bursts = tuple(self._peer.bursts)
        return self._executed_ns >= then_ns or any(burst.was_used_since(then_ns / 1e9) for burst in bursts)

    # --- With the lock of the ledger held ---

    def check(self) -> None:
        """Raises ``InvalidArgument`` if the client is gone: nothing would release what it reserves."""
        if self._is_gone:
            raise InvalidArgument("service: the client is gone")

    def ledger_number(self, own: int) -> int:
        """The ledger's number of one of its reservations.

        Raises:
            InvalidArgument: It has none with that number.
        """
        number = self._numbers.get(own)
        if number is None:
            raise InvalidArgument(f"service: this client has no reservation {own}")
        return number

    def add(self, number: int) -> int:
        """Takes a reservation; returns its own number for it."""
        own = next(self._handles)
        self._numbers[own] = number
        self._own_numbers[number] = own
        return own

    def remove(self, number: int) -> int:
        """Forgets a reservation; returns its own number for it."""
        own = self._own_numbers.pop(number)
        del self._numbers[own]
        self._releasing.discard(own)
        return own

    def _end_own(self, own: int) -> None:
        number = self._numbers.get(own)
        if number is not None:  # Unless it has ended by silence.
            self.remove(number)
            self._shared.release(number)

    def _end_all(self) -> None:
        for number in list(self._own_numbers):
            self.remove(number)
            self._shared.release(number)


def _reply(found: Reservation, own: int, *, is_new: bool) -> ReserveReply:
    verdict = found.verdict
    return ReserveReply(
        Reserved(own, is_new, found.slot, found.terms.phase_ns, verdict.slack_ns, verdict.at_ns)
    )


def _checked(asked: AskedTime, client: int) -> _Asked:
    """Checks a client's values.

    Raises:
        InvalidArgument: One is out of its range, or disagrees with another.
    """
    name = _name_in_ledger("name", asked.name, client, least=1)
    terms = StreamTerms(
        name=name,
        period_ns=asked.period_ns,
        deadline_ns=asked.deadline_ns,
        jitter_ns=asked.jitter_ns,
        phase_ns=asked.phase_ns,
        tolerance_ns=asked.tolerance_ns,
    )
    if asked.chooses_phase and asked.phase_ns is None:
        raise InvalidArgument("reservation, chooses_phase: expected a phase_ns to replace, got none")
    if not 0 <= asked.blocker_ns <= DAY_NS:
        raise InvalidArgument(
            f"reservation, blocker_ns: expected from 0 to {DAY_NS} ns (a day), got {asked.blocker_ns}"
        )
    cost = SlotCost(duration_ns=asked.duration_ns, piece_ns=asked.duration_ns)
    blocker = _name_in_ledger("blocker", asked.blocker, client, least=0)
    return _Asked(terms, cost, asked.chooses_phase, blocker if asked.blocker else "", asked.blocker_ns)


def _name_in_ledger(field: str, name: str, client: int, *, least: int) -> str:
    if not least <= len(name) <= STREAM_NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidArgument(
            f"reservation, {field}: expected {least} to {STREAM_NAME_CHARACTERS_MAX} printable characters, got"
            f" {name[:STREAM_NAME_CHARACTERS_MAX]!r}"
        )
    return f"\x01{client}\x02{name}\x03"
