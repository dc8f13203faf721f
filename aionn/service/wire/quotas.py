"""Limits for one client of a driver process.

Owns the limits and each client's account; the caller chooses the counted resource. Calls of a client at a limit are rejected with
RESOURCE_EXHAUSTED; other clients are not affected.

Invariant: an account is never below zero nor above its limit, from whatever threads it is used.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.platform.shares import Shares

__all__ = ["Account", "Quotas", "Share", "SharedDescriptors"]


_T = TypeVar("_T")

_OPTIONS = {
    "memory_bytes": "--memory-mib",
    "prepared_models": "--models",
    "bursts": "--bursts",
    "executions": "--executions",
    "descriptors": "--descriptors",
    "mapped_bytes": "--mapped-mib",
}
"""The options of ``aionn serve`` that set a limit; the other limits are fixed."""


class Quotas(msgspec.Struct, frozen=True):
    """Limits for one client; the defaults suit a process that serves one application alone.

    Attributes:
        memory_bytes: Device memories, prepared models (their constants, inline or by reference, and about what their operands and
            operations take), cache files that are read, and the queues of bursts.
        prepared_models: Prepared models.
        buffers: Device memories.
        bursts: Open bursts: each has a thread.
        executions: Executions under way: launched, waiting or running, those of bursts aside.
        fenced: Fenced executions whose information can still be asked for.
        reusable: Reusable executions.
        pools: Memories of requests that are remembered, each a mapping and two descriptors; further ones are mapped anew for each
            request.
        descriptors: Descriptors for what the client sent and this process still has, and for what it has been given: two for a
            memory, one for a pending fence or a cache file, eight for a burst of our clients, two for a fenced execution that is
            pending.
        mapped_bytes: Memories that the client sent and this process still has. Their pages belong to the client, but the device
            adds pages to those without.
    """

    memory_bytes: int = 4 << 30
    prepared_models: int = 1 << 12
    buffers: int = 1 << 12
    bursts: int = 1 << 10
    executions: int = 1 << 16
    fenced: int = 1 << 16
    reusable: int = 1 << 12
    pools: int = 128
    descriptors: int = 1 << 20
    mapped_bytes: int = 1 << 46

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise InvalidArgument(f"quota {name}: expected 0 or more, got {getattr(self, name)}")


class SharedDescriptors:
    """The descriptors for what all clients of a process sent and were given, divided among users and the processes of each: the
    rule is in ``platform.shares``.

    Args:
        count: Number of descriptors for all.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(count)
        self._dropped: collections.deque[tuple[Share, int]] = collections.deque()

    def take(self, share: Share, amount: int) -> None:
        """Takes for a process.

        Raises:
            ResourceExhausted: Too few would be left for others; nothing is taken then.
        """
        with self._lock:
            self._settle()
            if amount > self._shares.left_for(share.user, share.process):
                user_has, process_has = self._shares.had_by(share.user, share.process)
                raise ResourceExhausted(
                    f"service, descriptors: this process has {process_has} and its user {user_has} of "
                    f"{self._shares.amount_max} for all clients, asked for {amount} more; the rest is for others",
                    transient=True,
                )
            self._shares.add(share.user, share.process, amount)

    def drop(self, share: Share, amount: int) -> None:
        """Gives back what was taken; also where the garbage collector runs while this thread holds the lock."""
        self._dropped.append((share, amount))

    def _settle(self) -> None:
        while self._dropped:
            share, amount = self._dropped.popleft()
            self._shares.add(share.user, share.process, -amount)


class Share(NamedTuple):
    """The part of one process in the descriptors for all clients.

    Attributes:
        shared: All of them.
        user: Its user.
        process: Its identity; of a connection, where the process has no number.
    """

    shared: SharedDescriptors
    user: Hashable
    process: Hashable


class Account:
    """The resources of one client.

    Args:
        quotas: Its limits.

    Attributes:
        share: Limits its descriptors further, together with those of other clients; None without others.
    """

    def __init__(self, quotas: Quotas) -> None:
        self.share: Share | None = None
        self._limits: dict[str, int] = msgspec.structs.asdict(quotas)
        self._taken = dict.fromkeys(self._limits, 0)
        self._lock = threading.Lock()
        self._dropped: collections.deque[tuple[str, int]] = collections.deque()

    def limit(self, what: str) -> int:
        """Limit of ``what``, an attribute of ``Quotas``."""
        return self._limits[what]

    def taken(self, what: str) -> int:
        """Present use of ``what``, an attribute of ``Quotas``."""
        with self._lock:
            self._settle()
            return self._taken[what]

    def take(self, what: str, amount: int = 1) -> None:
        """Takes.

        Raises:
            InvalidArgument: The amount is below zero.
            ResourceExhausted: The limit would be exceeded; nothing is taken then. Persistent if the amount alone exceeds it.
        """
        if amount < 0:
            raise InvalidArgument(f"service, {what.replace('_', ' ')}: expected 0 or more, got {amount}")
        with self._lock:
            self._settle()
            total = self._taken[what] + amount
            if total > self._limits[what]:
                name, limit = what.replace("_", " "), str(self._limits[what])
                if what in _OPTIONS:
                    limit += f" (aionn serve {_OPTIONS[what]})"
                raise ResourceExhausted(
                    f"service, {name}: this client may have {limit}, has {self._taken[what]}, asked for {amount} more",
                    transient=amount <= self._limits[what],
                )
            self._taken[what] = total

    @contextmanager
    def taking(self, what: str, amount: int = 1) -> Iterator[None]:
        """Takes, and gives back only if the body raises."""
        self.take(what, amount)
        try:
            yield
        except BaseException:
            self.give_back(what, amount)
            raise

    @contextmanager
    def holding(self, what: str, amount: int = 1) -> Iterator[None]:
        """Takes, and gives back at the end of the body."""
        self.take(what, amount)
        try:
            yield
        finally:
            self.give_back(what, amount)

    def receive(self, make: Callable[[], _T], descriptors: int, mapped_bytes: int = 0) -> _T:
        """The object that ``make`` makes from the client's data; it counts until it is dropped.

        Raises:
            ResourceExhausted: A limit would be exceeded; nothing is made then. Else what ``make`` raises.
        """
        with self.taking("descriptors", descriptors), self.taking("mapped_bytes", mapped_bytes):
            with self._sharing(descriptors):
                made = make()
            weakref.finalize(made, self._drop, descriptors, mapped_bytes).atexit = False
        return made

    def receive_until_over(
        self, make: Callable[[Callable[[], object]], _T], descriptors: int, mapped_bytes: int
    ) -> _T:
        """As ``receive``, for an object that calls the function that ``make`` is given when it is closed."""
        with (
            self.taking("descriptors", descriptors),
            self.taking("mapped_bytes", mapped_bytes),
            self._sharing(descriptors),
        ):
            return make(functools.partial(self._drop, descriptors, mapped_bytes))

    def take_descriptors(self, amount: int) -> None:
        """Takes descriptors that belong to no object.

        Raises:
            ResourceExhausted: A limit would be exceeded; nothing is taken then.
        """
        with self.taking_descriptors(amount):
            pass

    @contextmanager
    def taking_descriptors(self, amount: int) -> Iterator[None]:
        """As ``take_descriptors``; gives back only if the body raises."""
        with self.taking("descriptors", amount), self._sharing(amount):
            yield

    def give_back_descriptors(self, amount: int) -> None:
        """Gives back what ``take_descriptors`` took. From any thread."""
        self._drop(amount, 0)

    def count_descriptors_until_dropped(self, owner: object, amount: int) -> Callable[[], object]:
        """Has what ``take_descriptors`` took given back when its owner is dropped, or earlier by the function returned.

        Returns:
            Gives it back, once, from any thread.
        """
        over = weakref.finalize(owner, self._drop, amount, 0)
        over.atexit = False
        return over

    @contextmanager
    def _sharing(self, descriptors: int) -> Iterator[None]:
        share = self.share
        if share is not None:
            share.shared.take(share, descriptors)
        try:
            yield
        except BaseException:
            if share is not None:
                share.shared.drop(share, descriptors)
            raise

    def take_memory(self, size_bytes: int) -> None:
        """See ``MemoryAccount``."""
        self.take("memory_bytes", size_bytes)

    def give_back_memory(self, size_bytes: int) -> None:
        """See ``MemoryAccount``."""
        self._dropped.append(("memory_bytes", size_bytes))

    def _drop(self, descriptors: int, mapped_bytes: int) -> None:
        # The garbage collector may come while this thread holds the lock.
        self._dropped.append(("descriptors", descriptors))
        self._dropped.append(("mapped_bytes", mapped_bytes))
        if self.share is not None:
            self.share.shared.drop(self.share, descriptors)

    def _settle(self) -> None:
        while self._dropped:
            what, amount = self._dropped.popleft()
            self._taken[what] -= amount

    def give_back(self, what: str, amount: int = 1) -> None:
        """Gives back what was taken."""
        with self._lock:
            self._taken[what] -= amount
            assert self._taken[what] >= 0, f"{what}: more given back than was taken"
