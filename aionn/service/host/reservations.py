"""The reservations of a served device: the streams of all of its clients in one ledger.

Owns the way from the messages of clients to the ledger (``aionn.scheduler.ledger``), the numbers of each client, the thread that
decides, the notices to clients, and the reservation that each frame is executed under. The frames themselves are ordered by the
queue of the device (``aionn.scheduler.shared_slots``), as all executions are.

Invariants:
1. A client names its own reservations alone: a number is looked up in the table of its connection, and is never used again.
2. The event loop never decides, and never waits for a decision. Decisions run on the one thread for that, for which processes wait
   in turns; the end of a reservation is noted, and takes effect before the next decision.
3. The reservations of a client end with its connection, once its executions have ended; one that is released, once no frame of it
   is in the process.
4. A process holds no more than its share of the device's time, and no more than ``OF_PROCESS_MAX`` reservations; nor do all
   processes of a user hold more than their share, and ``OF_USER_MAX``.
5. No client gets the names of another one's streams and models.
6. A reservation is tested with best effort of its own client alone, since a client states the length of its executions itself. An
   application that holds reservations rejects best effort of its own that is too long for any stream; ``Room`` is that limit.
7. A frame of a reservation that has ended is best effort: its client may not know yet. A number that the client never had is its
   mistake.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import anyio
import anyio.lowlevel

from aionn.errors import (
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NotAdmitted,
    ResourceExhausted,
    status_of,
)
from aionn.hal import TIME_MAX_NS
from aionn.hal.callers import Connection, FrameReport
from aionn.platform.stalls import stalls_of_processors
from aionn.scheduler.admission import DAY_NS, SHARE_PPM
from aionn.scheduler.bandwidth import BandwidthServer
from aionn.scheduler.ledger import Ledger, ReservableSlot, Reservation
from aionn.scheduler.reservations.calls import ExecutingStalls, ReservedCall, reserved_call
from aionn.scheduler.reservations.windows import PhasedServer
from aionn.scheduler.worker_turns import WorkerTurns
from aionn.service.host.accepted import ENDING
from aionn.service.host.asked_time import Asked, checked, reply_of, shown_to
from aionn.service.wire.calls import Pending
from aionn.service.wire.channel import Channel, Handler
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import CallBody, Done, Execute, ExecuteReply, ReplyBody
from aionn.service.wire.scheduling_messages import (
    Change,
    ExecuteReserved,
    ExecuteReservedReply,
    Move,
    MoveReply,
    Refusal,
    Release,
    Reserve,
    ReserveReply,
    Room,
    Withdrawn,
)
from aionn.service.wire.sizes import shortened

__all__ = ["OF_PROCESS_MAX", "OF_USER_MAX", "ClientReservations", "ServedReservations"]

OF_PROCESS_MAX = 256
"""Most reservations of one process: a quarter of those of a ledger, and more streams than an application has."""

OF_USER_MAX = 512
"""Most reservations of the processes of one user: half of those of a ledger, so that one user leaves room for others."""

NOTICE_PAUSE_S = 0.05
"""Pause between two rounds of notices: a client that reserves and releases without a pause would wake all others each time."""

NOTICES_PER_TURN = 8
"""Notices that are sent before other tasks of the loop get their turn: each takes some tens of microseconds."""

_decisions = WorkerTurns("admission of streams", 1)

_ENDED = BandwidthServer(0, slot=0, period_ns=1, deadline_ns=1, jitter_ns=0, duration_ns=1, piece_ns=1)
"""Decides about frames whose reservation has ended."""

_ENDED.is_withdrawn = True

_T = TypeVar("_T")


class ServedReservations:
    """The ledger of a device, for all of its clients.

    Args:
        name: The device's name.
        slot_count: The number of its slots.
        share: The share of the time of all slots that one process may hold, above 0 and at most 1.
        user_share: The same for all processes of one user together.
        delay_ns: See ``ReservableSlot``.
        now: The clock.
    """

    def __init__(
        self,
        name: str,
        slot_count: int,
        *,
        share: float,
        user_share: float = 1.0,
        delay_ns: int = 0,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._slots = range(slot_count)
        slots = [ReservableSlot(f"{name}/{n}", can_preempt=False, delay_ns=delay_ns) for n in self._slots]
        quotas = [int(each * SHARE_PPM) * slot_count for each in (share, user_share)]
        self._ledger = Ledger(slots, quota_ppm=quotas[0], user_quota_ppm=quotas[1])
        self._stolen = stalls_of_processors()
        self._now = now
        self._lock = threading.Lock()  # Held during a decision; the loop never waits for it.
        self._client_count = 0
        self._holders: dict[int, ClientReservations] = {}  # By the ledger's numbers.
        self._ending: deque[Callable[[], bool]] = deque()
        self._notices: deque[tuple[ClientReservations, Withdrawn]] = deque()
        self._room_ns = DAY_NS
        self._rooms_ns = [DAY_NS] * slot_count
        self._has_changed = anyio.Event()

    def client(
        self, process: str | None, peer: Peer, owner: Hashable, *, user: int = 0
    ) -> ClientReservations:
        """The reservations of a new client.

        Args:
            process: Identifies its process, in words: the share is that of all clients in it. None for one that has no number: each
                of its connections counts as one.
            peer: The same, as the time of the event loop is shared.
            owner: Identifies the client itself.
            user: The number of its user.
        """
        self._client_count += 1
        number = self._client_count
        return ClientReservations(
            self, number, process or f"connection {number}", peer, owner, user=str(user)
        )

    def counts(self) -> dict[str, int]:
        """See ``Ledger.counts``."""
        return self._ledger.counts()

    def room_ns(self, slot: int) -> int:
        """The longest best-effort execution that the streams of a slot can wait for. From any thread."""
        return self._rooms_ns[slot]

    # --- On the thread that decides ---

    def reserve(self, client: ClientReservations, asked: Asked, own: int | None) -> ReserveReply:
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
                        user=client.user,
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
                own = client.add(found)
            assert own is not None, "it is new, or was there"
            if not is_new:
                client.changed(own, found)
            self._note_rooms()
        return reply_of(found, own, is_new=is_new)

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
            if found is not None:
                client.moved(own, phase_ns)
        return MoveReply(found is not None)

    def look(self) -> None:
        """Lets what has ended take effect, and sets the limit of best effort."""
        with self._lock:
            self._settle()
            self._note_rooms()
            self._room_ns = min(self._rooms_ns, default=DAY_NS)

    def _note_rooms(self) -> None:
        self._rooms_ns = [
            self._ledger.verdict(slot).room_ns if self._ledger.share_ppm(slot) else DAY_NS
            for slot in self._slots
        ]
        for client in set(self._holders.values()):
            client.limit_best_effort(self._rooms_ns)

    @contextmanager
    def _beside_own_best_effort(self, asked: Asked) -> Iterator[None]:
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
        holders = self._holders.values()
        if sum(holder.process == client.process for holder in holders) >= OF_PROCESS_MAX:
            raise NotAdmitted(f'stream "{name}": this process has {OF_PROCESS_MAX} reservations already')
        if sum(holder.user == client.user for holder in holders) >= OF_USER_MAX:
            raise NotAdmitted(
                f'stream "{name}": the processes of this user have {OF_USER_MAX} reservations already'
            )

    def _end_silent(self, now_ns: int) -> None:
        silent_ns = self._ledger.silent_at_ns()
        if silent_ns is None or silent_ns > now_ns:
            return
        for number, holder in self._holders.items():
            self._ledger.seen(number, holder.seen_ns(number, now_ns))
        for reservation in self._ledger.end_silent(now_ns):
            holder = self._holders.pop(reservation.number)
            self._notices.append((holder, Withdrawn(holder.remove(reservation.number), "silent")))

    def _settle(self) -> None:
        for _ in range(len(self._ending)):
            ending = self._ending.popleft()
            if not ending():
                self._ending.append(ending)

    # --- The end of reservations ---

    def end(self, ending: Callable[[], bool]) -> None:
        """Notes an end, which takes effect before the next decision for which it returns True. Called in the event loop."""
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
            # The next change tries again. Raised further, a shortage would end the connections of all clients.
            with suppress(MemoryError, ResourceExhausted):
                await _decisions.run(None, self.look)
            with suppress(MemoryError):
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


class _Enforced:
    """A reservation, as its frames are executed under it.

    Attributes:
        server: Enforces it, in the queue of the device.
        in_progress: Number of its frames in this process.
        seen_ns: When the last one came, or when it was admitted.
    """

    __slots__ = ("in_progress", "seen_ns", "server")

    def __init__(self, server: BandwidthServer, now_ns: int) -> None:
        self.server = server
        self.in_progress = 0
        self.seen_ns = now_ns


class ClientReservations:
    """The reservations of one client.

    Args:
        shared: Those of all clients.
        number: Its number among the clients.
        process: See ``ServedReservations.client``.
        peer: See there.
        owner: See there.
        user: See there.

    Attributes:
        process: See above.
        user: See above.
    """

    def __init__(
        self,
        shared: ServedReservations,
        number: int,
        process: str,
        peer: Peer,
        owner: Hashable,
        *,
        user: str,
    ) -> None:
        self._shared = shared
        self._number = number
        self.process = process
        self.user = user
        self._room_ns = DAY_NS
        self._room: Pending | None = None
        self._peer = peer
        self._owner = Connection(peer, owner)
        self._channel: Channel | None = None
        self._is_gone = False
        self._last = 0  # The highest number that it was given.
        self._frames = threading.Lock()
        # Changed by the thread that decides alone, or in its place.
        self._enforced: dict[int, _Enforced] = {}
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
            if isinstance(body, ExecuteReserved) and is_greeted():
                return await self._execute(body, channel, handle)
            if isinstance(body, Reserve | Change | Move | Release) and is_greeted():
                if is_ending() and isinstance(body, Reserve | Change):
                    raise DeviceUnavailable(ENDING)
                return await self.handle(body, channel)
            return await handle(body, channel)

        return handle_all

    async def _execute(self, body: ExecuteReserved, channel: Channel, handle: Handler) -> ReplyBody:
        """Executes a frame without a burst. Raises as ``Session.handle``, but where there is a report, with which errors go."""
        limits = body.measure, body.deadline_ns, body.loop_timeout_ns, body.priority
        with self.executing(body.reservation) as report:
            try:
                reply = await handle(Execute(body.prepared, body.request, *limits), channel)
            except MissedDeadline as e:
                found = report()
                if found is None:
                    raise
                return ExecuteReservedReply(status=status_of(e), message=shortened(str(e)), report=found)
        if not isinstance(reply, ExecuteReply):
            raise GeneralFailure(f"service: expected the result of an execution, got {type(reply).__name__}")
        self._peer.executed()
        return ExecuteReservedReply(reply.result, report=report())

    @contextmanager
    def executing(self, own: int) -> Iterator[Callable[[], FrameReport | None]]:
        """See ``aionn.burst.server.Reserving``. From any thread.

        Raises:
            InvalidArgument: The client never had this reservation.
        """
        held = self._enforced.get(own)
        if held is None and not 0 < own <= self._last:
            raise InvalidArgument(f"service: this client has no reservation {own}")
        if held is None:
            call = ReservedCall(_ENDED, DAY_NS)
        else:
            self._count_frame(held, 1)
            call = ReservedCall(held.server, self._shared.room_ns(held.server.slot))
        token = reserved_call.set(call)
        try:
            yield lambda: call.report(self._shared._now())
        finally:
            reserved_call.reset(token)
            if held is not None:
                self._count_frame(held, -1)

    def _count_frame(self, held: _Enforced, change: int) -> None:
        with self._frames:
            held.in_progress += change
            held.seen_ns = self._shared._now()

    async def handle(self, body: Reserve | Change | Move | Release, channel: Channel) -> ReplyBody:
        """Answers a call about reservations.

        Raises:
            InvalidArgument: A value is illegal, or the client has no such reservation.
            ResourceExhausted: Too many calls wait for the thread.
        """
        self._channel = channel
        match body:
            case Reserve():
                return await self._reserve(checked(body.asked, self._number), None)
            case Change():
                return await self._reserve(checked(body.asked, self._number), body.reservation)
            case Move():
                if not 0 <= body.phase_ns <= TIME_MAX_NS:
                    raise InvalidArgument(
                        f"service, phase_ns: expected a time of the monotonic clock, got {body.phase_ns}"
                    )
                return await self._decide(lambda: self._shared.move(self, body.reservation, body.phase_ns))
            case Release():
                self._release(body.reservation)
                return Done()

    async def _reserve(self, asked: Asked, own: int | None) -> ReserveReply:
        try:
            return await self._decide(lambda: self._shared.reserve(self, asked, own))
        except NotAdmitted as e:
            would_fit = e.would_fit
            if would_fit.blocker is not None:
                would_fit = would_fit._replace(blocker=shown_to(self._number, would_fit.blocker))
            message, reason = (shortened(shown_to(self._number, text)) for text in (str(e), e.reason))
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

    def _release(self, own: int) -> None:
        held = self._enforced.get(own)
        if held is not None and own not in self._releasing:
            held.server.is_withdrawn = True
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

    def add(self, found: Reservation) -> int:
        """Takes a reservation; returns its own number for it."""
        own = self._last + 1
        self._numbers[own] = found.number
        self._own_numbers[found.number] = own
        server = found.server()
        server.stalls = ExecutingStalls(server.number, self._shared._stolen)
        self._enforced[own] = _Enforced(server, found.admitted_ns)
        self._last = own
        return own

    def changed(self, own: int, found: Reservation) -> None:
        """A reservation has terms that demand no more."""
        found.change_server(self._enforced[own].server)

    def moved(self, own: int, phase_ns: int) -> None:
        """A reservation has another phase."""
        server = self._enforced[own].server
        assert isinstance(server, PhasedServer), "it has a phase"
        server.move(phase_ns)

    def limit_best_effort(self, rooms_ns: Sequence[int]) -> None:
        """Has frames that are not reserved run where no other stream is lost by them; see ``Ledger.may_run_lower``."""
        for held in self._enforced.values():
            held.server.may_run_lower = held.server.piece_ns <= rooms_ns[held.server.slot]

    def seen_ns(self, number: int, now_ns: int) -> int:
        """When the last frame of a reservation came; now, while it has one in progress."""
        held = self._enforced[self._own_numbers[number]]
        return now_ns if held.in_progress else held.seen_ns

    def remove(self, number: int) -> int:
        """Forgets a reservation; returns its own number for it."""
        own = self._own_numbers.pop(number)
        del self._numbers[own]
        self._enforced.pop(own).server.is_withdrawn = True
        self._releasing.discard(own)
        return own

    def _end_own(self, own: int) -> bool:
        number = self._numbers.get(own)
        if number is None:
            return True  # It has ended by silence.
        if self._enforced[own].in_progress:
            return False
        self.remove(number)
        self._shared.release(number)
        return True

    def _end_all(self) -> bool:
        for number in list(self._own_numbers):
            self.remove(number)
            self._shared.release(number)
        return True
