"""The event loop's time, which the processes at the other ends of a socket's connections share.

Owns which of them is next, and how much of the loop's time goes to those that do not wait for their answers. A process with many
connections would have as many turns where another has one, and one that sends without a pause would have a message between any two
steps of another's call.

The rule. A process has a backlog for ``BACKLOG_NS`` after its next messages arrived before the loop had waited for them, after
more than one of its calls was in progress, after a connection of it began or ended, or after more of its fences had finished
together than are read in one turn. A process that waits for each answer before it sends the next call has none. While another
process is served that has had no backlog for ``WAITS_NS``, one message of all that have one, or one part of a large message, is
taken in a turn of the loop, and each of them has its turn; when they have used the loop for some time, it is left to the other
processes ``PAUSE`` times as long. Hence all that have a backlog get a share of ``1 / (1 + PAUSE)`` of it together. If all have
one, none pauses. A thread that checks or prepares models for a process with a backlog sleeps by the same rule between short
pieces of its work: it holds the lock of the interpreter, for which the loop and the threads of executions wait each time that
they continue. There is one such thread for all processes, so while others wait for it, it sleeps no longer than it would for any
of them.

A process whose backlog does not end is a flood. The time that a process uses during its backlogs adds up, and is forgotten in the
time between them. Beyond ``FLOOD_NS`` its turns are among those of the floods, after which the loop is left to the other processes
``FLOOD_PAUSE`` times as long. A client that sends the calls of each frame together stays below this, and one that sends without a
pause exceeds it within some hundredths of a second, unless it does so for executions that succeed: each is worth ``EXECUTION_NS``,
so that a client with many executions in progress keeps its part of the tenth. The use of all processes that connected a short time
ago is added up, so that a process that leaves and returns gains nothing.

Invariants:
1. While a process has more than one connection, one message of them all, or one part of a large one, is taken in each turn of the
   loop, and its connections take turns in the order in which they came.
2. A pause ends ``PAUSE_NS_MAX`` after what was used last, or before; that of a flood, ``FLOOD_PAUSE_NS_MAX`` after it.
3. A flood never delays the turn of any other process.
4. A process that waits until models of others are prepared waits for one of their pauses at most, unless it would pause itself.

A rejected simpler way: equal shares. A client whose calls take half of the loop by themselves waits for most of another's messages
then, and the median of its latency doubles.
"""

from __future__ import annotations

import collections
import resource
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

from aionn.service.wire.load import HELD_PART, Held, Load
from aionn.service.wire.packet_turns import PacketTurn, PacketTurns

__all__ = ["Pace", "Peer", "Peers", "Shares", "UsedBurst"]

PAUSE = 9
"""Time for which the loop is left to the other processes, as a multiple of its use by processes with a backlog."""

FLOOD_PAUSE = 499
"""As ``PAUSE``, of the processes whose backlog does not end. With a fifth of the loop for them, the 99th percentile of the latency
of a client that waits was up to five times as long as alone; with a hundredth up to two and a half times: a piece of a flood met
more than one call of a hundred, since such a call takes half a millisecond."""

FLOOD_NS = 5_000_000
"""Use of the loop during backlogs up to which a process is not counted as a flood: some fifteen executions sent together."""

FLOOD_NS_MAX = 20 * FLOOD_NS
"""More than this is not added up: a flood is forgotten within half a second without a backlog, however long it was."""

FORGOTTEN_PART = 4
"""Each nanosecond of use is forgotten in this many without a backlog: a process that sends calls together for each frame does not
count as a flood while these take less than a fifth of the loop."""

EXECUTION_NS = 500_000
"""Use of the loop that is forgotten for each execution that succeeds: twice that of an execution of a small request."""

NEWCOMER_NS = 1_000_000_000
"""Time for which a process adds to the use of all newcomers, after its first connection began."""

PAUSE_NS_MIN = 1_000_000
"""Shorter pauses are put off until they add up to this: the timers of event loops are a millisecond coarse."""

PAUSE_NS_MAX = 50_000_000
"""The longest pause. A message that is worked on for long must not silence its process for seconds."""

FLOOD_PAUSE_NS_MAX = 200_000_000
"""As ``PAUSE_NS_MAX``, of the floods."""

COMPANY_NS = 100_000_000
"""Time after its last message for which a process counts as served: a camera's client has three frames in that time."""

WAITING_COMPANY_NS = 1_000_000_000
"""As ``COMPANY_NS``, while its call is in progress: longer than others can delay it. One that waits for a long preparation does not
use the loop."""

LOOK_NS = 5_000_000
"""Interval between looks for a process that waits, where none did: looking at all bursts of all processes takes up to 1 ms."""

BACKLOG_NS = 10_000_000
"""Duration of a backlog. A process that sends several calls together, waits for all of them and begins again always has one."""

WAITS_NS = 1_000_000_000
"""Time without a backlog after which a process counts as one that waits for its answers. One that sends a few calls together for
each frame of a camera does not count, and never makes others pause."""

UNAWAITED_MAX = 1
"""Messages in a row that may arrive before the loop has waited for them: a notice that something was freed, and then a call."""

PIECE_NS = 250_000
"""Time of the interpreter that a thread uses for a process between two pauses: with the pause, as long as two executions of a small
model. The delay of an execution that meets a piece is no longer than the piece."""

CLOSING_NS_MIN = 1_000_000
"""Processor time of a closing that is not forgiven: memory that its sender keeps takes some microseconds."""

_T = TypeVar("_T")


class Use:
    """The use of the loop by one process, or by several, during their backlogs. Pure: the time is an argument.

    Attributes:
        is_flood: Whether it exceeds ``FLOOD_NS``.
    """

    __slots__ = ("_backlog_until_ns", "_used_ns")

    def __init__(self) -> None:
        self._used_ns = 0
        self._backlog_until_ns = 0

    @property
    def is_flood(self) -> bool:
        return self._used_ns > FLOOD_NS

    def is_flood_at(self, now_ns: int) -> bool:
        """As ``is_flood``, without what is forgotten until now: that counts only from the next backlog on."""
        return self._left_ns(now_ns) > FLOOD_NS

    def has_backlog(self, now_ns: int) -> None:
        """A backlog begins, or lasts."""
        self._used_ns = self._left_ns(now_ns)
        self._backlog_until_ns = now_ns + BACKLOG_NS

    def _left_ns(self, now_ns: int) -> int:
        return max(0, self._used_ns - max(0, now_ns - self._backlog_until_ns) // FORGOTTEN_PART)

    def executed(self) -> None:
        """An execution has succeeded."""
        self._used_ns = max(0, self._used_ns - EXECUTION_NS)

    def add(self, used_ns: int) -> None:
        """It was used during a backlog."""
        self._used_ns = min(self._used_ns + used_ns, FLOOD_NS_MAX)


class Shares:
    """Beside which processes those with a backlog are served, and how long they pause. Pure: the time is an argument.

    Args:
        another_waits: Whether a process other than this one, or any for None, waits for a call or uses a burst. None if there is no
            other.
    """

    __slots__ = ("_another_waits", "_before", "_free_ns", "_latest")

    def __init__(self, another_waits: Callable[[object | None, int], bool] | None = None) -> None:
        self._another_waits = another_waits
        # The process without a backlog that sent last, and the one that did before it: whether there is another takes no more.
        self._latest: tuple[object, int] | None = None
        self._before: tuple[object, int] | None = None
        self._free_ns = {False: 0, True: 0}

    def received(self, process: object, now_ns: int) -> None:
        """A message of a process without a backlog was received."""
        if self._latest is not None and self._latest[0] is not process:
            self._before = self._latest
        self._latest = (process, now_ns)

    def has_company(self, process: object | None, now_ns: int) -> bool:
        """Whether a process other than this one, or any for None, is served that has no backlog."""
        latest = self._latest
        other = self._before if latest is not None and latest[0] is process else latest
        if other is not None and now_ns - other[1] < COMPANY_NS:
            return True
        return self._another_waits is not None and self._another_waits(process, now_ns)

    def used(self, process: object | None, used_ns: int, now_ns: int, *, is_flood: bool = False) -> None:
        """A process with a backlog has used the loop, until now."""
        if self.has_company(process, now_ns - used_ns):
            free_ns = max(self._free_ns[is_flood], now_ns) + pause_after(used_ns, is_flood)
            self._free_ns[is_flood] = min(free_ns, now_ns + _pause_ns_max(is_flood))

    def pause_ns(self, now_ns: int, *, is_flood: bool = False) -> int:
        """The present pause of processes with a backlog, or of those that are a flood; 0 where one of them may continue."""
        left_ns = self._free_ns[is_flood] - now_ns
        return left_ns if left_ns >= PAUSE_NS_MIN else 0


def pause_after(used_ns: int, is_flood: bool) -> int:
    """The time that is left to others after a use of the loop."""
    return min(used_ns * (FLOOD_PAUSE if is_flood else PAUSE), _pause_ns_max(is_flood))


def _pause_ns_max(is_flood: bool) -> int:
    return FLOOD_PAUSE_NS_MAX if is_flood else PAUSE_NS_MAX


class UsedBurst(Protocol):
    """A burst of a process."""

    def was_used_since(self, since_s: float) -> bool:
        """Whether a packet is under way or was after this time of CLOCK_MONOTONIC. From any thread."""


class _Turns:
    """The turns of all processes of a socket that have a backlog.

    Attributes:
        known: The processes, by their numbers.
        shares: The clients that are served.
        newcomers: The time used by those that came a short time ago.
        preparing: The number of calls in progress that check or prepare models, by process; processes without any are not in it.
        held: The descriptors that all processes have sent and that are not closed.
    """

    __slots__ = ("_locks", "_looked_ns", "_waits", "held", "known", "newcomers", "preparing", "shares")

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[Hashable, Peer] = weakref.WeakValueDictionary()
        self._waits: weakref.ref[Peer] | None = None
        self._looked_ns: int | None = None
        self.shares = Shares(self._another_waits)
        self.newcomers = Use()
        self.preparing: dict[Peer, int] = {}
        self.held = Held(most=resource.getrlimit(resource.RLIMIT_NOFILE)[0] // HELD_PART)
        self._locks = {False: anyio.Lock(), True: anyio.Lock()}

    def _another_waits(self, process: object | None, now_ns: int) -> bool:
        """See ``Shares``. From any thread."""
        latest = None if self._waits is None else self._waits()
        if latest is not None and latest is not process and latest.waits(now_ns):
            return True
        if self._looked_ns is not None and 0 <= now_ns - self._looked_ns < LOOK_NS:
            return False
        for reference in self.known.valuerefs():
            peer = reference()
            if peer is not None and peer is not process and peer.waits(now_ns):
                self._waits = reference
                return True
        self._looked_ns = now_ns
        return False

    async def next(self, *, is_flood: bool = False) -> None:
        """Waits for the turn of one message or connection. Cancelled, it has had none."""
        async with self._locks[is_flood]:  # The one that has waited longest is next.
            await anyio.lowlevel.checkpoint()
            while pause_ns := self.shares.pause_ns(time.monotonic_ns(), is_flood=is_flood):
                await anyio.sleep(pause_ns / 1e9)


class Peer:
    """A process at the other end of connections.

    Args:
        turns: Of the socket whose other clients are served at the same time; None for a process that is served alone.

    Attributes:
        loads: The work in progress for it, by connection.
        bursts: Its bursts whose threads run.
        held: The descriptors that it has sent and that are not closed.
        room: Of its connections, the one that waits until it may send descriptors.
        suspect_until_ns: Time until which it is suspect: it has come just now, or had a message rejected.
    """

    __slots__ = (
        "__weakref__",
        "_backlog_until_ns",
        "_closing_ns",
        "_newcomer_until_ns",
        "_packet_turn",
        "_received_ns",
        "_turn",
        "_turns",
        "_unawaited",
        "_use",
        "_waits_since_ns",
        "bursts",
        "held",
        "loads",
        "room",
        "suspect_until_ns",
    )

    def __init__(self, turns: _Turns | None = None) -> None:
        self.loads: list[Load] = []
        self.bursts: set[UsedBurst] = set()
        self.held = Held(None if turns is None else turns.held)
        self.room = anyio.Lock(fast_acquire=True)
        self._packet_turn = PacketTurn()
        self._closing_ns: collections.deque[int] = collections.deque()
        self._turns = turns
        self._turn = anyio.Lock(fast_acquire=True)
        self._backlog_until_ns = 0
        self._unawaited = 0
        self._received_ns = -WAITING_COMPANY_NS
        self._waits_since_ns = -WAITS_NS
        self._newcomer_until_ns = self.suspect_until_ns = time.monotonic_ns() + NEWCOMER_NS
        self._use = Use()

    @property
    def is_alone(self) -> bool:
        """Whether no other process is served."""
        return self._turns is None

    @property
    def calls(self) -> int:
        """Number of its calls in progress."""
        return sum(load.worked_on for load in self.loads)

    @property
    def takes_turns(self) -> bool:
        """Whether each of its messages waits for ``next_turn``: it has several connections, or is to be paced."""
        return len(self.loads) > 1 or self._is_paced

    @property
    def _is_paced(self) -> bool:
        """Whether it has a backlog, and another process is served that has none."""
        turns = self._turns
        if turns is None:
            return False
        now_ns = time.monotonic_ns()
        return self._has_backlog(now_ns) and turns.shares.has_company(self, now_ns)

    @property
    def may_send_descriptors(self) -> bool:
        """Whether its next message may be received, with any number of descriptors: few that it and others sent are open."""
        return self.held.has_room(is_suspect=self.is_suspect)

    @property
    def is_suspect(self) -> bool:
        """Whether it has come just now, floods, or had a message rejected because of its descriptors."""
        now_ns = time.monotonic_ns()
        return now_ns < self.suspect_until_ns or self._use.is_flood_at(now_ns)

    def received(self, *, has_waited: bool) -> None:
        """A message was received.

        Args:
            has_waited: Whether the loop has waited for it.
        """
        if self._turns is None:
            return
        self._received_ns = now_ns = time.monotonic_ns()
        self._unawaited = 0 if has_waited else self._unawaited + 1
        if self._unawaited > UNAWAITED_MAX or self.calls > 1:
            self._backlog(now_ns)
            self._waits_since_ns = now_ns
        elif now_ns >= max(self._backlog_until_ns, self._waits_since_ns + WAITS_NS):
            self._turns.shares.received(self, now_ns)

    def waits(self, now_ns: int) -> bool:
        """Whether it waits for its one call in progress or uses a burst, and is not to pause itself. From any thread."""
        turns, calls = self._turns, self.calls
        if turns is None or calls > 1 or now_ns < self._waits_since_ns + WAITS_NS:
            return False
        if self._added_to(turns, now_ns).is_flood_at(now_ns):
            return False
        if calls and now_ns - self._received_ns < WAITING_COMPANY_NS:
            return True
        since_s = (now_ns - COMPANY_NS) / 1e9
        return any(burst.was_used_since(since_s) for burst in tuple(self.bursts))

    def pause_after_ns(self, used_ns: int, now_ns: int) -> int:
        """The pause of a thread that has used the interpreter for this process for so long, until now; 0 for none."""
        turns = self._turns
        if turns is None or not self._has_backlog(now_ns) or not turns.shares.has_company(self, now_ns):
            return 0
        return pause_after(used_ns, self._added_to(turns, now_ns).is_flood)

    def pause_after_packet_ns(self, used_ns: int, now_ns: int) -> int:
        """As ``pause_after_ns``, for a packet of a burst that had to be decoded or has failed: that is a backlog. The packets of a
        client that sends frames repeat.
        """
        turns = self._turns
        if turns is None:
            return 0
        self._backlog(now_ns)
        self._added_to(turns, now_ns).add(used_ns)
        return self.pause_after_ns(used_ns, now_ns)

    def closed(self, used_ns: int) -> None:
        """A thread has closed what came from this process, in so much processor time. From any thread."""
        self._closing_ns.append(used_ns)

    def pause_after_closing_ns(self) -> int:
        """As ``pause_after_packet_ns``, for what ``closed`` has added since the last time, less than ``CLOSING_NS_MIN`` aside."""
        used_ns = 0
        while self._closing_ns:
            used_ns += self._closing_ns.popleft()
        return self.pause_after_packet_ns(used_ns, time.monotonic_ns()) if used_ns >= CLOSING_NS_MIN else 0

    def packet_turns(self) -> PacketTurns | None:
        """For the threads of its bursts. None for a process that is served alone."""
        if self._turns is None:
            return None
        return PacketTurns(self._packet_turn, self.pause_after_packet_ns, self.executed)

    def pause_while_preparing_ns(self, used_ns: int, now_ns: int) -> int:
        """As ``pause_after_ns``, of the thread that checks and prepares models: no longer than that of any process that waits for
        the thread. From any thread.
        """
        pause_ns = self.pause_after_ns(used_ns, now_ns)
        if pause_ns and self._turns is not None:
            for other in tuple(self._turns.preparing):  # A copy: the event loop changes it.
                pause_ns = min(pause_ns, other.pause_after_ns(used_ns, now_ns))
        return pause_ns

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A call that checks or prepares a model, or waits for its turn to do so. In the event loop."""
        if self._turns is None:
            yield
            return
        preparing = self._turns.preparing
        preparing[self] = preparing.get(self, 0) + 1
        try:
            yield
        finally:
            preparing[self] -= 1
            if not preparing[self]:
                del preparing[self]

    def pace(self, on_piece: Callable[[float], None] | None = None) -> Pace | None:
        """For one call's work on a model: to be called between short pieces of it. None for a process that is served alone.

        Args:
            on_piece: Called on the thread after each piece, with the seconds for which the thread sleeps then; None if not needed.
        """
        return None if self._turns is None else Pace(self, on_piece)

    def _has_backlog(self, now_ns: int) -> bool:
        return self.calls > 1 or now_ns < self._backlog_until_ns

    def _backlog(self, now_ns: int) -> None:
        self._backlog_until_ns = now_ns + BACKLOG_NS
        if self._turns is not None:
            self._added_to(self._turns, now_ns).has_backlog(now_ns)

    def _added_to(self, turns: _Turns, now_ns: int) -> Use:
        """The sum to which its use is added."""
        return turns.newcomers if now_ns < self._newcomer_until_ns else self._use

    def executed(self) -> None:
        """An execution has succeeded that this process asked for."""
        if self._turns is not None:
            self._added_to(self._turns, time.monotonic_ns()).executed()

    def connects_or_leaves(self) -> None:
        """A connection begins or ends."""
        self._backlog(time.monotonic_ns())

    def charged(self, coroutine: Coroutine[Any, Any, _T]) -> Awaitable[_T]:
        """A coroutine of which each step counts as this process's use of the loop; owned by its awaiter."""
        return coroutine if self._turns is None else _charged(coroutine, self._is_charged, self._charge)

    def _is_charged(self) -> bool:
        return self._has_backlog(time.monotonic_ns())

    def _charge(self, used_ns: int) -> None:
        if self._turns is not None:
            now_ns = time.monotonic_ns()
            use = self._added_to(self._turns, now_ns)
            use.add(used_ns)
            self._turns.shares.used(self, used_ns, now_ns, is_flood=use.is_flood)

    async def next_turn(self) -> None:
        """Lets other tasks of the loop go first, and other connections of this process before them; pauses according to the
        rule.
        """
        async with self._turn:
            turns = self._turns
            if turns is not None and self._is_paced:
                await turns.next(is_flood=self._added_to(turns, time.monotonic_ns()).is_flood)
                self._backlog(time.monotonic_ns())  # It had one until now.
            else:
                await anyio.lowlevel.checkpoint()

    async def next_turn_of_leaving(self) -> None:
        """As ``next_turn``, for the end of a connection: that is a backlog however long it takes."""
        await self.next_turn_of_many()

    async def next_turn_of_many(self) -> None:
        """As ``next_turn``, within work of which more came together than one turn does: that is a backlog."""
        self._backlog(time.monotonic_ns())
        await self.next_turn()


class Pace:
    """Pauses of a thread that works for a process. Of one thread at a time.

    Args:
        peer: The process.
        on_piece: See ``Peer.pace``.
    """

    __slots__ = ("_before_ns", "_due_ns", "_on_piece", "_peer")

    def __init__(self, peer: Peer, on_piece: Callable[[float], None] | None) -> None:
        self._peer = peer
        self._on_piece = on_piece
        self._before_ns: int | None = None
        self._due_ns = time.monotonic_ns()
        """The thread cannot have used the interpreter for a piece before this time."""

    def __call__(self) -> None:
        """Sleeps if the thread has used the interpreter for ``PIECE_NS`` since the last time, and others are to go first."""
        # Processor time is read by a system call, after which the kernel may give the processor to another thread while this one
        # holds the interpreter's lock. The time is read without one.
        time_ns = time.monotonic_ns()
        if time_ns < self._due_ns:
            return
        now_ns = time.thread_time_ns()
        if self._before_ns is None or now_ns < self._before_ns:
            self._before_ns = now_ns  # On a thread of its own, or on another one than before.
        elif now_ns - self._before_ns >= PIECE_NS:
            pause_ns = self._peer.pause_while_preparing_ns(now_ns - self._before_ns, time_ns)
            if self._on_piece is not None:
                self._on_piece(pause_ns / 1e9)
            _sleep(pause_ns)
            self._before_ns = now_ns = time.thread_time_ns()
            time_ns = time.monotonic_ns()
        self._due_ns = time_ns + PIECE_NS - (now_ns - self._before_ns)


def _sleep(pause_ns: int) -> None:
    if pause_ns:
        time.sleep(pause_ns / 1e9)


class Peers:
    """The processes at the other ends of a socket's connections."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._known = self._turns.known

    def of(self, process: Hashable) -> Peer:
        """A process, by its identity; forgotten with its last connection."""
        peer = self._known.get(process)
        if peer is None:
            peer = self._known[process] = Peer(self._turns)
        return peer

    async def next_connection(self) -> None:
        """Lets other tasks of the loop go first; while processes are served, a new connection waits for its turn like a backlog."""
        now_ns = time.monotonic_ns()
        if self._turns.shares.has_company(None, now_ns):
            await self._turns.next(is_flood=self._turns.newcomers.is_flood_at(now_ns))
        else:
            await anyio.lowlevel.checkpoint()

    def charged_to_newcomers(self, coroutine: Coroutine[Any, Any, _T]) -> Awaitable[_T]:
        """As ``Peer.charged``, for a connection whose process is not known yet: that is a backlog."""
        return _charged(coroutine, lambda: True, self._charge_newcomers)

    def _charge_newcomers(self, used_ns: int) -> None:
        now_ns, newcomers = time.monotonic_ns(), self._turns.newcomers
        newcomers.has_backlog(now_ns)
        newcomers.add(used_ns)
        self._turns.shares.used(None, used_ns, now_ns, is_flood=newcomers.is_flood)


@types.coroutine
def _charged(
    coroutine: Coroutine[Any, Any, _T], is_charged: Callable[[], bool], charge: Callable[[int], None]
) -> Generator[Any, Any, _T]:
    """Awaits a coroutine; ``charge`` is called after each of its steps, with the processor time that the step took, where
    ``is_charged`` was true before it: a step may be long.

    The time in which the loop waits for a processor or for the interpreter's lock is caused by others. With it, a client that waits
    for each answer was counted as a flood beside one whose large memories the kernel cleared and freed.
    """
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    while True:
        began_ns = time.thread_time_ns() if is_charged() else None
        try:
            yielded = step(argument)
        except StopIteration as e:
            result: _T = e.value
            return result
        finally:
            argument = None  # An exception would be in a reference cycle with this frame.
            if began_ns is not None:
                charge(time.thread_time_ns() - began_ns)
        try:
            argument = yield yielded
            step = coroutine.send
        except BaseException as e:
            step, argument = coroutine.throw, e
