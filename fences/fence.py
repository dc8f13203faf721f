"""``SyncFence``: pending, signalled or failed; awaited by tasks and threads, chained by plain calls, exported when asked.

Owns: the state of a fence in memory, the list of those who wait for it, chains. Refuses to
own: how a task or thread sleeps (``waiting``), the descriptor form (``descriptor``), combining fences (``merging``),
points in order (``timeline``).

Behaviour after the Linux sync framework (one-shot, sticky error, a time of signalling) and IREE's semaphores (waiters
run with no lock held and may finish further fences; a failure reaches all present and future waiters).

Invariants:
1. The outcome is stored once and never changes; status, time and error are read from that one slot.
2. A waiter that was attached runs exactly once, in the thread that finishes the fence, after the outcome is visible.
3. Waiters never nest: a fence finished inside a waiter has its own waiters run after that waiter returned, by the
   outermost call in this thread. So a chain of any length needs constant stack, and no turn of any loop.
4. No lock is held while a waiter runs.

Agreement of two threads without a lock in the hot path. Deleting a slot (``del fence._vacant``) is one step under the
interpreter's lock: of two threads, one succeeds and the other gets AttributeError. That is the claim for the place of
the sole waiter, for a waiter itself and for the work of a chained fence. The finisher stores the outcome and then
looks for waiters; an attaching thread stores the waiter and then looks at the outcome. So at least one of them sees the
other, and the claim makes sure that only one acts. A lock around each link would cost more than the rest of the link.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from fences import running
from fences.clock import checked_duration, checked_time, now_ns
from fences.descriptor import Port, create_port, import_port
from fences.running import Waiter
from fences.state import (
    Failure,
    FenceError,
    FenceState,
    FenceStateError,
    FenceStatus,
    ForeignFenceError,
    NotAFenceError,
    Outcome,
    failure_of,
    outcome_of,
    state_of,
)
from fences.waiting import LoopWaiters, pin_in_loop, wait_in_loop, wait_in_thread

# Reentrant: a signal handler or finaliser may finish a fence at any moment.
package_lock = _lock = threading.RLock()
_FINISHED: Generator[Any, None, None] = iter(())  # type: ignore[assignment]
next(_FINISHED, None)  # Exhausted it has no state left, so every await of a finished fence can share it.


class SyncFence:
    """A one-shot event that is pending, signalled or failed, for any number of tasks, threads and processes.

    ``await fence`` returns None once it is signalled and raises :class:`FenceError` if it fails; a fence that is
    signalled does not suspend the task. Cancelling one waiter leaves the fence and all other waiters as they were. A
    fence costs no descriptor until ``fileno``, ``duplicate`` or sending asks for one. It is a context manager:
    leaving it closes it.

    Args:
        name: Its name in errors; None for a name made from its address.
    """

    __slots__ = ("__weakref__", "_more", "_name", "_next", "_outcome", "_port", "_vacant")

    _finisher: ClassVar[str] = ""
    """The only owner that may finish fences of this class; empty for all code in this process."""

    def __init__(self, name: str | None = None) -> None:
        self._outcome: Outcome | None = None
        self._vacant = True
        self._next: Waiter | None = None
        self._more: dict[Waiter, None] | None = None
        self._port: Port | None = None
        self._name = name

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied, or pickled as an argument of a process: no code could finish the copy, and a waiter would hang."""
        raise TypeError(
            f"{type(self).__name__}: a fence cannot be copied or pickled; fences.send_fence sends it to a process"
        )

    @classmethod
    def signalled(cls, at_ns: int | None = None, name: str | None = None) -> SyncFence:
        """A fence that was signalled at ``at_ns`` (None: now)."""
        return SyncFence.finished(now_ns() if at_ns is None else checked_time(at_ns), name)

    @classmethod
    def finished(cls, outcome: Outcome, name: str | None = None) -> SyncFence:
        """A fence that has finished with a known outcome."""
        fence = SyncFence(name)
        fence._outcome = outcome
        return fence

    @classmethod
    def from_fd(
        cls,
        fd: int,
        name: str | None = None,
        *,
        reads_record: bool = True,
        closing: Callable[[int], object] | None = None,
    ) -> SyncFence:
        """A fence over a duplicate of a descriptor that another process exported; ``fd`` stays the caller's.

        Args:
            fd: The descriptor.
            name: Name of the fence in errors here; None for a name of its own.
            reads_record: Whether its record is read: when it was signalled, or why it has failed. False where another holder of a
                duplicate is not trusted: it can delay each reader in the kernel (``fences.descriptor``). Then the time is that
                of looking, and the error of a failure has no text of its cause.
            closing: Called once, in the place of os.close, with the duplicate's number, in whatever thread closes the fence. For a
                holder that is not trusted: closing a socket waits where a network socket that lingers was sent into it. None
                closes it in place.

        Raises:
            NotAFenceError: ``fd`` is something else: a file, a directory, an eventfd, another socket.
            OSError: EBADF if ``fd`` is closed, EMFILE if no descriptor is free; nothing is left open.
        """
        fence = SyncFence(name)
        fence._port = import_port(fd, reads_record=reads_record, closing=closing)
        fence._poll_descriptor()
        return fence

    @classmethod
    def from_state(
        cls,
        state: FenceState,
        fd: int | None,
        name: str | None = None,
        *,
        reads_record: bool = True,
        closing: Callable[[int], object] | None = None,
    ) -> SyncFence:
        """The other side of :meth:`export`: a fence from a record and, if its status is pending, a descriptor, which the caller
        keeps.

        Raises:
            NotAFenceError: record or descriptor do not belong to a fence, or the record is pending without a descriptor.
            OSError: as :meth:`from_fd`.
        """
        outcome = outcome_of(state)
        if outcome is None:
            if fd is None:
                raise NotAFenceError("fence record: pending, but no descriptor came with it")
            return cls.from_fd(fd, name, reads_record=reads_record, closing=closing)
        return SyncFence.finished(outcome, name)

    # State

    @property
    def name(self) -> str:
        """The name of this fence in errors."""
        return self._name if self._name is not None else f"{type(self).__name__} {id(self):#x}"

    @property
    def status(self) -> FenceStatus:
        """The state now. An imported fence looks at its descriptor, without waiting."""
        outcome = self._outcome
        if outcome is None:
            if self._port is None or not self._poll_descriptor():
                return FenceStatus.PENDING
            outcome = self._outcome
        return FenceStatus.SIGNALLED if isinstance(outcome, int) else FenceStatus.FAILED

    @property
    def signal_time_ns(self) -> int | None:
        """When it was signalled, in ns of CLOCK_MONOTONIC or the clock that was set; None if it was not (yet)."""
        if self._outcome is None and self._port is not None:
            self._poll_descriptor()
        return self._outcome if isinstance(self._outcome, int) else None

    @property
    def error(self) -> FenceError | None:
        """The reason of its failure, as a new exception with ``origin`` and ``__cause__``; None unless it has."""
        if self._outcome is None and self._port is not None:
            self._poll_descriptor()
        return self._outcome.error() if isinstance(self._outcome, Failure) else None

    @property
    def imported(self) -> bool:
        """Whether it is pending, when last looked at, and only another process can finish it."""
        return self._foreign_port() is not None

    @property
    def waiter_count(self) -> int:
        """Number of its waiters in this process: tasks, threads, callbacks and dependent fences."""
        sole = getattr(self, "_next", None)
        waiters = ([] if sole is None else [sole]) + list(self._more or ())
        return sum(len(waiter) if isinstance(waiter, LoopWaiters) else 1 for waiter in waiters)

    def __repr__(self) -> str:
        outcome = self._outcome
        if outcome is None:
            state = "pending"
        elif isinstance(outcome, int):
            state = f"signalled at {outcome} ns"
        else:
            state = f"failed at {outcome.origin!r}: {outcome.message}"
        return f"<{self.name}: {state}{'' if self._port is None else ', with a descriptor'}>"

    # Finishing

    def signal(self, at_ns: int | None = None) -> None:
        """Signal the fence and run its waiters.

        Args:
            at_ns: The time to record, in ns; None means now.

        Raises:
            FenceStateError: it has finished already, or is finished by its chain, merge or timeline; nothing is changed.
            ForeignFenceError: it belongs to another process; nothing is changed.
        """
        self._check_finisher("signal")
        if not self._finish(now_ns() if at_ns is None else checked_time(at_ns)):
            raise FenceStateError(f"cannot signal a fence twice: {self!r}")

    def try_signal(self, at_ns: int | None = None) -> bool:
        """As :meth:`signal`, for those who race to finish it: False, and nothing changed, if it has finished already."""
        self._check_finisher("signal")
        return self._finish(now_ns() if at_ns is None else checked_time(at_ns))

    def fail(
        self, cause: BaseException | str, *, origin: str | None = None, at_ns: int | None = None
    ) -> None:
        """Put the fence into its failed state, permanently, and run its waiters.

        Args:
            cause: Why. Of a :class:`FenceError` the origin, message and cause are taken over: it is the same failure.
            origin: Where the failure began; None for this fence (or the origin of ``cause``).
            at_ns: The time to record, in ns; None means now.

        Raises:
            FenceStateError, ForeignFenceError: as :meth:`signal`.
        """
        self._check_finisher("fail")
        if not self._finish(self._failure(cause, origin, at_ns)):
            raise FenceStateError(f"cannot fail a fence that has finished: {self!r}")

    def try_fail(
        self, cause: BaseException | str, *, origin: str | None = None, at_ns: int | None = None
    ) -> bool:
        """As :meth:`fail`, for those who race to finish it: False, and nothing changed, if it has finished already."""
        self._check_finisher("fail")
        return self._finish(self._failure(cause, origin, at_ns))

    # Waiting

    def __await__(self) -> Generator[Any, None, None]:
        outcome = self._outcome
        if type(outcome) is int:
            return _FINISHED
        if outcome is None:
            if self._port is None or not self._poll_descriptor():
                return self._wait()
            outcome = self._outcome
        if isinstance(outcome, Failure):
            raise outcome.error()
        return _FINISHED

    def wait(self, timeout_ns: int | None = None) -> bool:
        """Block this thread until the fence is signalled: True, or False if the time is over first.

        Args:
            timeout_ns: Longest wait, in ns of CLOCK_MONOTONIC; 0 only looks; None waits without limit.

        Raises:
            FenceError: the fence failed.
            ValueError: the timeout is negative.
            RuntimeError: an event loop runs in this thread, and would be blocked: await the fence there.
        """
        if timeout_ns is not None:
            checked_duration(timeout_ns, "timeout_ns")
        if self.status is FenceStatus.PENDING and timeout_ns != 0:
            wait_in_thread(self, self._foreign_port(), timeout_ns)
        # Looked at after the time is over: a signal that is there beats an expired timer.
        status = self.status
        if status is FenceStatus.FAILED:
            error = self.error
            assert error is not None
            raise error
        return status is FenceStatus.SIGNALLED

    def add_callback(self, callback: Callable[[SyncFence], object]) -> None:
        """Have ``callback(fence)`` called when the fence finishes, immediately if it has.

        It is called exactly once, in the thread that finishes the fence, after the callbacks added before it; it must
        not block. An exception from it is logged and stops no other waiter. On an imported fence the event loop running
        in this thread watches the descriptor, or a background thread without one.

        Raises:
            ValueError: the same callback is waiting already.
        """
        if getattr(self, "_next", None) == callback or (self._more is not None and callback in self._more):
            raise ValueError(f"callback {callback!r}: is waiting for this fence already")
        self._follow_with(callback)

    def remove_callback(self, callback: Callable[[SyncFence], object]) -> bool:
        """Undo :meth:`add_callback`: True if it will not be called; False if it was, is about to be, or was never added."""
        return self._detach(callback)

    def then(self, work: Callable[[], SyncFence | None], name: str | None = None) -> ChainedFence:
        """A fence for work that depends on this one: ``work()`` is called when this fence is signalled, immediately if it is.

        The new fence is signalled when ``work`` returns None; follows the fence that ``work`` returns; fails if
        ``work`` raises. If this fence fails, the new one fails with the same origin and cause and ``work`` is not
        called.

        Args:
            work: Called at most once, as a plain call in the thread that finishes this fence; must not block.
            name: Name of the new fence in errors.
        """
        chained = ChainedFence(work, name)
        if self._port is None:
            # The first half of `_attach` again: the call would be a third of what this costs.
            try:
                del self._vacant
            except AttributeError:
                pass
            else:
                self._next = chained
                if self._outcome is not None:
                    self._next = None
                    # Its claim sees to it that it runs once, should the finisher have found it too.
                    running.run(chained, self)
                return chained
        self._follow_with(chained)
        return chained

    # Descriptor

    def fileno(self) -> int:
        """The fence's pollable descriptor, made when first asked for: readable once the fence has finished, in whatever way.

        It belongs to the fence and lives until :meth:`close`, so that the number stays valid for ``select``,
        ``epoll`` and others. Reading or writing it is not allowed; look at the fence instead.

        Raises:
            OSError: EMFILE and others; the fence works on without, and asking again later may succeed.
        """
        with _lock:
            port = self._exported()
            port.handed_out = True
            return port.fileno()

    def duplicate(self) -> int:
        """A new close-on-exec descriptor for another process or runtime; it belongs to the caller. Raises as :meth:`fileno`."""
        with _lock:
            made = self._port is None
            port = self._exported()
            try:
                number = port.duplicate()
            except BaseException:
                if made:
                    self._port = None
                    port.close()
                raise
            if self._outcome is not None:
                self._retire(port)
            return number

    def export(self) -> tuple[FenceState, int | None]:
        """The fence for another protocol's message: a record of its state and, while pending, a descriptor to send
        beside it.

        The descriptor belongs to the caller. A finished fence needs no descriptor: its record is complete. The other side calls
        :meth:`from_state`. Raises as :meth:`fileno`.
        """
        if self.status is not FenceStatus.PENDING:
            return state_of(self._outcome), None
        return state_of(None), self.duplicate()  # It may have finished: the descriptor reports that.

    def close(self) -> None:
        """Close the descriptor; idempotent. A pending fence fails, everywhere if it belongs to this process: it could not be
        finished any more.
        """
        if self._outcome is None:
            self._finish(Failure(self.name, "closed while pending", now_ns()))
        with _lock:
            port, self._port = self._port, None
        if port is not None:
            port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The rest is for this package.

    def _check_finisher(self, verb: str) -> None:
        if self._finisher:
            raise FenceStateError(f"cannot {verb} {self.name}: {self._finisher}")
        port = self._foreign_port()
        if port is not None:
            raise ForeignFenceError(f"cannot {verb} {self.name}: it belongs to {port.origin()}")

    def _failure(self, cause: BaseException | str, origin: str | None, at_ns: int | None) -> Failure:
        return failure_of(cause, self.name, origin, now_ns() if at_ns is None else checked_time(at_ns))

    def _finish(self, outcome: Outcome) -> bool:
        """Store the outcome, send it to the descriptor, run the waiters. False, and nothing changed, if it had finished."""
        with _lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
        port = self._port
        if port is None:
            self._run_waiters()
            return True
        port.publish(outcome)  # First: the way into another process is longer than ours.
        self._run_waiters()
        self._retire(port)
        return True

    def _run_waiters(self) -> None:
        try:
            sole = self._next
            if not self._more:
                if sole is None:
                    return
                if type(sole) is LoopWaiters:  # It runs no code of others, so nothing can nest.
                    del self._next
                    sole(self)
                    return
        except AttributeError:  # Another thread is just taking the sole waiter back.
            pass
        running.run(None, self)

    def _retire(self, port: Port) -> None:
        """The outcome was sent: close this end, and the other one too unless the caller got its number."""
        port.retire()
        with _lock:
            if not port.handed_out and self._port is port:
                self._port = None
                port.close()

    def _wait(self) -> Generator[Any, None, None]:
        yield from wait_in_loop(self, self._foreign_port())
        outcome = self._outcome
        if isinstance(outcome, Failure):
            raise outcome.error()
        assert outcome is not None

    def _foreign_port(self) -> Port | None:
        port = self._port
        return port if port is not None and port.imported and self._outcome is None else None

    def _follow_with(self, waiter: Waiter) -> None:
        """Attach a dependant other than a task, with a watcher of the descriptor; run it immediately if the fence has finished."""
        if self._port is not None and self._outcome is None:
            self._poll_descriptor()
        if not self._attach(waiter):
            running.run(waiter, self)
            return
        port = self._foreign_port()
        if port is not None:
            try:
                pin_in_loop(self, port)
            except BaseException:
                self._detach(waiter)
                raise

    def _attach(self, waiter: Waiter) -> bool:
        if self._outcome is not None:
            return False
        try:
            del self._vacant
        except AttributeError:
            with _lock:
                if self._more is None:
                    self._more = {}
            self._more[waiter] = None
            return self._outcome is None or self._more.pop(waiter, self) is self
        self._next = waiter
        if self._outcome is not None:
            return not self._vacate()
        return True

    def _detach(self, waiter: Waiter) -> bool:
        if self._outcome is not None:
            return False
        with _lock:
            if getattr(self, "_next", None) == waiter and self._vacate():
                return True
            return self._more is not None and self._more.pop(waiter, self) is None

    def _vacate(self) -> bool:
        """Take the sole waiter back; False if the finisher has it."""
        try:
            del self._next
        except AttributeError:
            return False
        self._next = None
        if self._outcome is None:
            self._vacant = True
        return True

    def _group_of(self, loop: object) -> LoopWaiters | None:
        sole = getattr(self, "_next", None)
        if type(sole) is LoopWaiters and sole.loop is loop:
            return sole
        for waiter in list(self._more or ()):
            if type(waiter) is LoopWaiters and waiter.loop is loop:
                return waiter
        return None

    def _poll_descriptor(self, is_reported: bool = False) -> bool:
        port = self._port  # Once: another thread may finish the fence and take it away.
        if self._outcome is None and port is not None and port.imported:
            outcome = port.peek(now_ns, is_reported=is_reported)
            if outcome is not None:
                self._finish(outcome)
        return self._outcome is not None

    def _exported(self) -> Port:
        """The port, created if missing; of a finished fence it holds the record. Called with the lock held."""
        port = self._port
        if port is None:
            self._port = port = create_port()
        if self._outcome is not None:  # Checked after the port is visible to the finishing thread.
            port.publish(self._outcome)
            port.retire()
        return port


class ChainedFence(SyncFence):
    """The fence of work that runs when another fence is signalled; made by :meth:`SyncFence.then`."""

    __slots__ = ("_work",)

    _finisher = "it is finished by the work it was chained for"

    def __init__(self, work: Callable[[], SyncFence | None], name: str | None = None) -> None:
        # The parent's lines again: a call of its __init__ would be a fifth of what a link costs.
        self._outcome = None
        self._vacant = True
        self._next = None
        self._more = None
        self._port = None
        self._name = name
        self._work = work  # Deleting it is the claim to finish this fence.

    def __call__(self, source: SyncFence) -> None:
        """Never called: the method only makes a chained fence a waiter for the type checker. ``running`` runs it in place."""
        raise AssertionError("a chained fence is run by running.drain")

    def _finish(self, outcome: Outcome) -> bool:
        try:
            del self._work
        except AttributeError:
            return False
        return super()._finish(outcome)

    def _adopt(self, result: SyncFence) -> None:
        """The work continues elsewhere: follow the fence that it returned."""
        if not isinstance(result, SyncFence) or result is self:
            error = TypeError(f"work of {self.name}: expected None or another SyncFence, got {result!r}")
            super()._finish(Failure(self.name, error, now_ns()))
            return
        self._work = _no_work  # Open again to be claimed: by `_follow`, or by `close`.
        try:
            result._follow_with(self._follow)
        except Exception as error:
            self._finish(Failure(self.name, error, now_ns()))

    def _follow(self, result: SyncFence) -> None:
        assert result._outcome is not None
        self._finish(result._outcome)


def _no_work() -> None:
    raise AssertionError("the work of a chained fence runs once")


running.chained_type = ChainedFence
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
