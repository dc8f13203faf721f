"""MessageQueue: one endpoint of a ring in shared memory.

Owns the endpoint's file descriptors and its place among the parts of the package: creating and attaching, transactions,
blocking calls with notification bits, closing. The calls that take no detour through Python (`read`, `write`, the
messages, the waits) are inherited from `_native.Ring`.

Invariants:
1. An endpoint owns duplicates of everything it keeps; the caller's descriptors stay the caller's.
2. A failed construction leaves no descriptor and no mapping behind.
3. Construction is the only place that checks a descriptor; afterwards the shared words are checked at every use.
4. One endpoint writes and one reads in the synchronized flavour; an endpoint takes up a role at its first use of it.

Source: libfmq's MessageQueue. Where this differs: an overflow raises instead of returning false, timeouts of None wait without a
limit and of 0 do not wait, and plain writes and reads wake a peer that waits.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fmq._native import Ring
from fmq.descriptor import Flavour, Grantor, MQDescriptor, check_descriptor, plan_layout
from fmq.errors import ClosedQueue, InvalidArgument, InvalidDescriptor
from fmq.event_flag import EventFlag, Notification
from fmq.region import check_eventfd, check_memory, create_memory, duplicate, map_memory
from fmq.spawning import reduced
from fmq.statistics import Statistics
from fmq.transaction import Transaction

if TYPE_CHECKING:
    import numpy
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import Buffer

    from fmq.watch import LoopWatch

__all__ = ["MessageQueue"]


POKES_MAX = 2**63
"""Number of wakes an eventfd starts with: each takes one away, and at a thousand million a second they last for 292 years. Half of
what it can hold, so that there is always room, which pollers of it see."""

_closing = threading.Lock()
"""Guards the one moment in which an endpoint turns from open to closed."""


class MessageQueue(Ring):
    """An endpoint: writes to, or reads from, a ring shared with other processes.

    Made by `create` or `attach`. A context manager; `close` is idempotent and may be called from any thread, also
    while another thread waits in this endpoint (that call then raises ClosedQueue). After a fork the child's copy
    refuses use: attach a new one there with `descriptor` and `fds`.

    Attributes:
        descriptor: To be sent to the peer, with `fds` beside it.
        fds: This endpoint's own descriptors in the descriptor's order: memory, the caller's ring if there is one, the
            eventfds of reader and writer. They are closed by `close`.
        flavour: Synchronized or unsynchronized.
        dtype: The element type of `read_array` and `read_available_array`; None where none was given.
    """

    descriptor: MQDescriptor
    fds: tuple[int, ...]
    flavour: Flavour
    dtype: numpy.dtype[Any] | None

    _process: int = 0
    _watches: dict[bool, LoopWatch]
    _event_flag: EventFlag | None = None
    _flag_piece: memoryview | None = None
    _open_write: Transaction | None = None
    _open_read: Transaction | None = None
    _closed: bool = False

    def __init__(
        self,
        descriptor: MQDescriptor,
        fds: list[int],
        *,
        reset: bool,
        dtype: DTypeLike | None = None,
        spin_ns: int = 0,
    ) -> None:
        # Takes the descriptors out of the caller's list, who closes what is still in it, wherever construction fails.
        self.fds = tuple(fds)
        fds.clear()
        self.descriptor = descriptor
        try:
            self._watches = {}
            self._process = os.getpid()
            needed = check_descriptor(descriptor, len(self.fds))
            self.flavour = Flavour(descriptor.flavour)
            self.dtype = _check_dtype(dtype, descriptor.quantum_bytes)
            if spin_ns < 0:
                raise InvalidArgument(f"queue: spin_ns: expected at least 0, got {spin_ns}")
            pieces, readonly = self._map(needed)
            reader, writer = descriptor.reader_event_index, descriptor.writer_event_index
            # A peer's queue without parking words is waited for by the bits of its event flag alone.
            self._by_flag = (
                self.flavour is Flavour.SYNCHRONIZED and len(descriptor.grantors) == Grantor.READER_PARK
            )
            self._flag_piece = pieces[Grantor.EVFLAG]
            super().__init__(
                pieces,
                descriptor.quantum_bytes,
                descriptor.count,
                descriptor.flavour,
                reset,
                readonly,
                self.fds[reader] if reader >= 0 else -1,
                self.fds[writer] if writer >= 0 else -1,
                # Spinning on the only processor keeps the peer from doing what is waited for.
                spin_ns if len(os.sched_getaffinity(0)) > 1 else 0,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        quantum_bytes: int,
        count: int,
        *,
        flavour: Flavour = Flavour.SYNCHRONIZED,
        event_flag: bool = True,
        dtype: DTypeLike | None = None,
        ring_fd: int | None = None,
        spin_ns: int = 0,
    ) -> Self:
        """Makes a new queue, empty, and an endpoint of it.

        Args:
            quantum_bytes: Size of one element.
            count: Capacity in elements; a power of two of bytes is quickest.
            flavour: Synchronized or unsynchronized.
            event_flag: Whether the queue can be waited for (blocking calls, asyncio, the event flag's bits).
            dtype: The element type of arrays; its item size must be the quantum.
            ring_fd: Memory of the caller's for the ring, sealed against shrinking and growing and at least `count`
                times `quantum_bytes` large. It is duplicated and stays the caller's to close.
            spin_ns: Time for which a blocking call watches the ring before it sleeps, if that has been enough of late;
                0 sleeps immediately. Without effect where the process may use only one processor.

        Raises:
            InvalidArgument: A size of zero, less, or more than fits.
            InvalidDescriptor: `ring_fd` is not such a memory.
            OSError: No memory or no descriptors left.
        """
        descriptor, size = plan_layout(
            quantum_bytes, count, Flavour(flavour), event_flag=event_flag, own_ring=ring_fd is not None
        )
        waits = descriptor.reader_event_index >= 0
        fds = [-1] * (1 + (ring_fd is not None) + 2 * waits)  # of full length: growing could fail
        try:
            fds[0] = create_memory("fmq", size)
            if ring_fd is not None:
                fds[1] = duplicate(ring_fd)
            if waits:
                for index in (-2, -1):
                    fds[index] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
                    os.eventfd_write(fds[index], POKES_MAX)
            return cls(descriptor, fds, reset=True, dtype=dtype, spin_ns=spin_ns)
        except BaseException:
            _close_all(fds)
            raise

    @classmethod
    def attach(
        cls,
        descriptor: MQDescriptor,
        fds: Sequence[int],
        *,
        reset: bool = False,
        quantum_bytes: int | None = None,
        flavour: Flavour | None = None,
        dtype: DTypeLike | None = None,
        spin_ns: int = 0,
    ) -> Self:
        """Makes an endpoint of a queue that another process, or this one, has made.

        Args:
            descriptor: As it came; not trusted.
            fds: The descriptors that came with it, in order. They are duplicated and stay the caller's to close.
            reset: Whether to zero both counters; only one side may, and before anything is written.
            quantum_bytes: The caller's expectation; None takes any.
            flavour: The caller's expectation; None takes either.
            dtype: As in `create`.
            spin_ns: As in `create`.

        Raises:
            InvalidDescriptor: A number of the descriptor is impossible, not the expected one, or does not fit what
                the file descriptors are.
            OSError: No memory or no descriptors left.
        """
        if quantum_bytes is not None and descriptor.quantum_bytes != quantum_bytes:
            raise InvalidDescriptor(
                f"descriptor: quantum: expected {quantum_bytes} bytes, got {descriptor.quantum_bytes}"
            )
        if flavour is not None and descriptor.flavour != flavour:
            raise InvalidDescriptor(f"descriptor: flavour: expected {int(flavour)}, got {descriptor.flavour}")
        check_descriptor(descriptor, len(fds))
        own = [-1] * len(fds)
        try:
            for index, fd in enumerate(fds):
                own[index] = duplicate(fd)
            return cls(descriptor, own, reset=reset, dtype=dtype, spin_ns=spin_ns)
        except BaseException:
            _close_all(own)
            raise

    def _map(self, needed: dict[int, int]) -> tuple[Any, bool]:
        """Maps each memory once and cuts the parts out; the views alone keep the mappings alive."""
        descriptor = self.descriptor
        may_be_readonly = descriptor.flavour == Flavour.UNSYNCHRONIZED
        for index in (descriptor.reader_event_index, descriptor.writer_event_index):
            if index >= 0:
                check_eventfd(self.fds[index])
        for index, size_bytes in needed.items():
            check_memory(self.fds[index], size_bytes)
        maps = {i: map_memory(self.fds[i], n, may_be_readonly=may_be_readonly) for i, n in needed.items()}
        pieces: list[memoryview | None] = [
            memoryview(maps[g.fd_index][0])[g.offset : g.offset + g.extent] for g in descriptor.grantors
        ]
        pieces += [None] * (len(Grantor) - len(pieces))
        return tuple(pieces), any(readonly for _, readonly in maps.values())

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin_write(self, count: int) -> Transaction | None:
        """Opens the next `count` elements for writing in place; None when they do not fit now.

        Nothing is published before `commit_write`; a begun write that is not committed leaves no trace (in the
        unsynchronized flavour readers lose what it may have overwritten). Beginning again drops the earlier one.

        Raises:
            InvalidArgument: `count` is more than the capacity.
        """
        return self._begun_write(self._begin_write(count), count, self.quantum_bytes)

    def commit_write(self, count: int) -> None:
        """Publishes the first `count` elements of the begun write, which ends.

        Raises:
            InvalidArgument: No write is begun, or a shorter one; nothing is published.
        """
        self._commit_write(count)
        self._end(write=True)

    def begin_read(self, count: int) -> Transaction | None:
        """Opens the next `count` elements for reading in place; None when there are fewer.

        Raises:
            InvalidArgument: `count` is more than the capacity.
            Overflow: Unsynchronized, and the writer was faster.
        """
        return self._begun_read(self._begin_read(count), count, self.quantum_bytes)

    def commit_read(self, count: int) -> None:
        """Gives back the first `count` elements of the begun read, which ends.

        Raises:
            InvalidArgument: No read is begun, or a shorter one; nothing is given back.
            Overflow: Unsynchronized, and the writer has overwritten what was read: do not use it.
        """
        try:
            self._commit_read(count)
        except InvalidArgument:
            raise
        except BaseException:
            self._end(write=False)
            raise
        self._end(write=False)

    def reserve_message(self, size_bytes: int) -> Transaction | None:
        """Opens room for a message's payload to be written in place; None when it does not fit now.

        Raises:
            InvalidArgument: It could never fit, or the quantum is not 1.
        """
        return self._begun_write(self._reserve_message(size_bytes), size_bytes, 1)

    def commit_message(self, size_bytes: int | None = None) -> None:
        """Publishes the reserved message, or only its first `size_bytes`.

        Raises:
            InvalidArgument: No message is reserved, or a shorter one.
        """
        if size_bytes is None:
            size_bytes = self._open_write.count if self._open_write is not None else 0
        self._commit_message(size_bytes)
        self._end(write=True)

    def peek_message(self) -> Transaction | None:
        """Opens the next message's payload for reading in place; None without one."""
        regions = self._peek_message()
        return self._begun_read(regions, sum(map(len, regions)) if regions else 0, 1)

    def release_message(self) -> None:
        """Takes the peeked message out of the queue.

        Raises:
            InvalidArgument: No message was peeked.
            Overflow: Unsynchronized, and the writer has overwritten it: do not use what was read.
        """
        try:
            self._release_message()
        except InvalidArgument:
            raise
        except BaseException:
            self._end(write=False)
            raise
        self._end(write=False)

    def _begun_write(
        self, regions: tuple[memoryview, ...] | None, count: int, quantum: int
    ) -> Transaction | None:
        if regions is None:
            return None
        if self._open_write is not None:
            self._open_write.release()
        self._open_write = Transaction(regions, count, quantum)
        return self._open_write

    def _begun_read(
        self, regions: tuple[memoryview, ...] | None, count: int, quantum: int
    ) -> Transaction | None:
        if regions is None:
            return None
        if self._open_read is not None:
            self._open_read.release()
        self._open_read = Transaction(regions, count, quantum)
        return self._open_read

    def _end(self, *, write: bool) -> None:
        transaction = self._open_write if write else self._open_read
        if transaction is not None:
            transaction.release()
        if write:
            self._open_write = None
        else:
            self._open_read = None

    # -- blocking calls ----------------------------------------------------------------------------------------------

    @property
    def event_flag(self) -> EventFlag:
        """The flag over the queue's own word; closed with the queue.

        Raises:
            InvalidArgument: The queue was made without one.
            ClosedQueue: The endpoint is closed.
        """
        if self._closed:
            raise ClosedQueue("queue: the endpoint is closed")
        if self._event_flag is None:
            if self._flag_piece is None:
                raise InvalidArgument(
                    "queue: blocking calls need an event flag, got a queue made without one"
                )
            self._event_flag = EventFlag(self._flag_piece)
        return self._event_flag

    def write_blocking(
        self,
        elements: Buffer,
        timeout_ns: int | None = None,
        *,
        read_notification: int | None = None,
        write_notification: int | None = None,
        event_flag: EventFlag | None = None,
    ) -> bool:
        """Appends all elements of a buffer, waiting for room; all or nothing.

        Without notification bits any read of the peer ends the wait. With them this is libfmq's long form: the wait is
        for `read_notification` bits, which the peer's blocking reads set, and `write_notification` bits are set
        afterwards (0 or None: none).

        Args:
            elements: Whole elements, at most the capacity.
            timeout_ns: None waits without a limit, 0 does not wait.
            read_notification: Bits to wait for; None for the short form.
            write_notification: Bits to set after writing.
            event_flag: A flag other than the queue's own.

        Returns:
            False if there was no room until the timeout.

        Raises:
            InvalidArgument: More than the capacity, no event flag, the unsynchronized flavour, or no bit to wait for.
            InterruptedQueue, ClosedQueue, CorruptQueue: See there.
        """
        if (read_notification, write_notification, event_flag) == (None, None, None) and not self._by_flag:
            if self.write_many(elements):
                return True
            size_bytes = memoryview(elements).nbytes
            if not self.wait_writable(size_bytes // self.quantum_bytes, timeout_ns):
                return False
            return self.write_many(elements)
        flag, wait_bits, wake_bits = self._long_form(
            read_notification, write_notification, event_flag, (Notification.NOT_FULL, Notification.NOT_EMPTY)
        )
        deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        while not self.write_many(elements):
            left_ns = _remaining(deadline_ns)
            # Set bits beat an expired timeout, and a peer can set them without end.
            if flag.wait(wait_bits, left_ns) == 0 or left_ns == 0:
                if not self.write_many(elements):
                    return False
                break
        flag.wake(wake_bits)
        return True

    def read_blocking(
        self,
        count: int = 1,
        timeout_ns: int | None = None,
        *,
        read_notification: int | None = None,
        write_notification: int | None = None,
        event_flag: EventFlag | None = None,
    ) -> bytes | None:
        """Takes exactly `count` elements, waiting for them; all or nothing.

        The mirror of `write_blocking`: the long form waits for `write_notification` bits and sets `read_notification`
        bits.

        Returns:
            The elements, or None if there were fewer until the timeout.

        Raises:
            As `write_blocking`.
        """
        if (read_notification, write_notification, event_flag) == (None, None, None) and not self._by_flag:
            if not self.wait_readable(count, timeout_ns):
                return None
            return self.read_many(count)
        flag, wait_bits, wake_bits = self._long_form(
            write_notification, read_notification, event_flag, (Notification.NOT_EMPTY, Notification.NOT_FULL)
        )
        deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        while (taken := self.read_many(count)) is None:
            left_ns = _remaining(deadline_ns)
            if flag.wait(wait_bits, left_ns) == 0 or left_ns == 0:
                taken = self.read_many(count)
                if taken is None:
                    return None
                break
        flag.wake(wake_bits)
        return taken

    def _long_form(
        self,
        wait_bits: int | None,
        wake_bits: int | None,
        event_flag: EventFlag | None,
        default: tuple[int, int],
    ) -> tuple[EventFlag, int, int]:
        """The flag, the bits to wait for and the bits to set; libfmq's own where the caller names none."""
        if self.flavour is not Flavour.SYNCHRONIZED:
            raise InvalidArgument(
                "queue: blocking calls need the synchronized flavour, got the unsynchronized one"
            )
        if wait_bits is None and wake_bits is None:
            wait_bits, wake_bits = default
        if not wait_bits:
            raise InvalidArgument("queue: expected at least one notification bit to wait for, got 0")
        return event_flag if event_flag is not None else self.event_flag, wait_bits, wake_bits or 0

    # -- arrays ------------------------------------------------------------------------------------------------------

    def read_array(self, count: int) -> NDArray[Any] | None:
        """Takes exactly `count` elements as a new array of shape [count] and the queue's dtype; None when fewer.

        Raises:
            InvalidArgument: The queue has no dtype, or `count` is more than the capacity.
        """
        array = self._new_array(count)
        return array if self.read_many_into(array.view("V1").data) else None

    def read_available_array(self, count_max: int | None = None) -> NDArray[Any]:
        """Takes what there is, at most `count_max` elements (None: all), as an array of shape [taken].

        Raises:
            InvalidArgument: The queue has no dtype, or `count_max` is more than the capacity.
        """
        there = self.available_to_read()
        if count_max is not None and not 0 <= count_max <= self.count:
            raise InvalidArgument(f"queue: expected a count of 0 to {self.count} elements, got {count_max}")
        array = self._new_array(min(there, self.count if count_max is None else count_max))
        if len(array) and not self.read_many_into(array.view("V1").data):
            return array[:0]
        return array

    def _new_array(self, count: int) -> NDArray[Any]:
        import numpy

        if self.dtype is None:
            raise InvalidArgument("queue: expected a queue made with a dtype, got one without")
        if not 0 <= count <= self.count:
            raise InvalidArgument(f"queue: expected a count of 0 to {self.count} elements, got {count}")
        return numpy.empty(count, self.dtype)

    # -- state -------------------------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Counts of this endpoint and its view of the queue; zeros for a closed one."""
        is_open = self.state == "open"
        return Statistics(
            *self._counters(),
            self.available_to_read() if is_open else 0,
            self.available_to_write() if is_open else 0,
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Gives everything back; waiting calls in other threads and tasks raise ClosedQueue. Idempotent."""
        with _closing:
            if self._closed:
                return
            self._closed = True
        self._release()
        if self._event_flag is not None:
            self._event_flag.close()
        self._flag_piece = None
        for transaction in (self._open_write, self._open_read):
            if transaction is not None:
                transaction.release()
        self._open_write = self._open_read = None
        fds = list(self.fds)
        watches = getattr(self, "_watches", {})
        if self._process != os.getpid():
            watches.clear()  # a forked child shares no loop with its parent
        for reader, watch in watches.items():
            index = self.descriptor.reader_event_index if reader else self.descriptor.writer_event_index
            fds.remove(self.fds[index])
            watch.stop(self.fds[index])
        watches.clear()
        _close_all(fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process != os.getpid():
            self.close()  # a forked child's copy; the parent has the endpoint
        elif not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was dropped open", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """As multiprocessing passes it to a process that it starts; TypeError for any other purpose."""
        return reduced(self)

    def __repr__(self) -> str:
        if self.state != "open":
            return f"<fmq.MessageQueue {self.state}>"
        return (
            f"<fmq.MessageQueue {self.flavour.name.lower()}, {self.count} x {self.quantum_bytes} bytes, "
            f"{self.available_to_read()} to read>"
        )


def _check_dtype(dtype: DTypeLike | None, quantum_bytes: int) -> numpy.dtype[Any] | None:
    if dtype is None:
        return None
    import numpy

    checked = numpy.dtype(dtype)
    if checked.itemsize != quantum_bytes or checked.hasobject:
        raise InvalidArgument(
            f"queue: dtype: expected {quantum_bytes} bytes an item and no Python objects, "
            f"got {checked} of {checked.itemsize} bytes"
        )
    return checked


def _remaining(deadline_ns: int | None) -> int | None:
    return None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns())


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
