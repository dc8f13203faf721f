"""The limits of a client of a node, by its name: over all of its connections, from however many processes and addresses they come.

Owns the quotas, their text on the command line, and the account of each name that has clients. Pure. A name is that of the client's
certificate, or its address where the node demands no certificate: ``aionn.fleet.tls.client_name``.

Invariants:
1. An account is never below zero nor above its quotas: a call that raises takes nothing.
2. There is an account for each name that has a client, and for no other: strangers cost no memory.
3. A client that has left has nothing, whatever it had not given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted, ResourceExhausted, WouldFit
from aionn.scheduler.admission import DAY_NS, SHARE_PPM
from aionn.service.wire.scheduling_messages import AskedTime
from aionn.service.wire.sizes import shortened

__all__ = ["OTHERS", "ClientAccount", "ClientQuotas", "Names", "quotas_of", "share_ppm"]

OTHERS = "*"
"""Means, on the command line, each name that has no quotas of its own."""

COUNT_MAX = 1 << 20
"""Largest number of a quota, as for the quotas of a socket's clients."""

MIB = 1 << 20

MIB_MAX = 1 << 27
"""Most memory of one name in MiB: the address space of a process."""

_N = TypeVar("_N", int, float)

_OPTION = "--client-quota"


class ClientQuotas(msgspec.Struct, frozen=True):
    """The quotas of one name.

    Attributes:
        clients: Applications that are connected: the processes of one machine.
        memory_bytes: Values in transit, the memory for those of executions, and the contents of calls and of prepared models.
        models: Prepared models.
        connections: Data connections: each has a burst at the device, and that a thread.
        executions: Executions that have arrived and are not answered.
        reservations: Streams with a guarantee.
        reserved_share: The share of the time of all device slots that those may reserve, above 0 and at most 1. All clients of the
            network together hold no more than one process of the node's machine.
    """

    clients: int = 16
    memory_bytes: int = 2 << 30
    models: int = 1024
    connections: int = 256
    executions: int = 256
    reservations: int = 256
    reserved_share: float = 1.0


_SHARE = "reserved_ppm"

_COUNTS = ("clients", "models", "connections", "executions", "reservations")


def quotas_of(texts: Sequence[str]) -> dict[str, ClientQuotas]:
    """The quotas of a command line, by name; those of ``OTHERS`` are always there.

    Args:
        texts: Each ``NAME:QUOTA=NUMBER,...``, with the attributes of ``ClientQuotas`` in the spelling of options, and
            ``memory-mib`` for the memory. A quota that a text does not contain is that of ``OTHERS``.

    Raises:
        InvalidArgument: A text cannot be read, or a name comes twice.
    """
    given: dict[str, dict[str, int | float]] = {}
    for text in texts:
        name, colon, values = text.rpartition(":")
        if not colon or not name:
            raise InvalidArgument(f"{_OPTION}: expected NAME:QUOTA=NUMBER,..., got {text!r}")
        if name in given:
            raise InvalidArgument(f"{_OPTION}: {name} comes twice")
        given[name] = dict(_quota(name, part) for part in values.split(","))
    others = msgspec.structs.replace(ClientQuotas(), **given.pop(OTHERS, {}))
    return {OTHERS: others} | {
        name: msgspec.structs.replace(others, **values) for name, values in given.items()
    }


def _quota(name: str, text: str) -> tuple[str, int | float]:
    key, _, value = text.partition("=")
    what = key.strip().replace("-", "_")
    place = f"{_OPTION} {name}"
    if what == "reserved_share":
        share = _number(float, value, f"{place}: {key}")
        if not 0 < share <= 1:
            raise InvalidArgument(f"{place}: {key}: expected more than 0 and at most 1, got {value!r}")
        return what, share
    if what not in (*_COUNTS, "memory_mib"):
        known = ", ".join(one.replace("_", "-") for one in (*_COUNTS, "memory_mib", "reserved_share"))
        raise InvalidArgument(f"{place}: expected one of {known}, got {key!r}")
    most = MIB_MAX if what == "memory_mib" else COUNT_MAX
    number = _number(int, value, f"{place}: {key}")
    if not 1 <= number <= most:
        raise InvalidArgument(f"{place}: {key}: expected 1 to {most}, got {value!r}")
    return ("memory_bytes", number * MIB) if what == "memory_mib" else (what, number)


def _number(of: Callable[[str], _N], value: str, place: str) -> _N:
    try:
        return of(value)
    except ValueError:
        raise InvalidArgument(f"{place}: expected a number, got {value!r}") from None


def share_ppm(asked: AskedTime) -> int:
    """The share of a slot that a stream asks for, in millionths, rounded up. Values that the ledger rejects count as nothing."""
    if not 0 < asked.period_ns <= DAY_NS or not 0 < asked.duration_ns <= DAY_NS:
        return 0
    return -(-asked.duration_ns * SHARE_PPM // asked.period_ns)


class _Account:
    """The holdings of all clients of one name."""

    def __init__(self, name: str, quotas: ClientQuotas) -> None:
        self.name = name
        self.quotas = quotas
        self.taken: Counter[str] = Counter()

    def left(self, what: str, slots: int = 1) -> int:
        if what == _SHARE:
            return int(self.quotas.reserved_share * SHARE_PPM) * slots - self.taken[what]
        quota: int = getattr(self.quotas, what)
        return quota - self.taken[what]


class ClientAccount:
    """The holdings of one client, within the quotas of its name.

    Args:
        of_name: The holdings of all clients of the name.
    """

    def __init__(self, of_name: _Account) -> None:
        self._of_name = of_name
        self._taken: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """The name of the client."""
        return self._of_name.name

    def taken(self, what: str) -> int:
        """Present use of ``what``, an attribute of ``ClientQuotas``, by this client."""
        return self._taken[what]

    def take(self, what: str, amount: int = 1) -> None:
        """Takes.

        Args:
            what: An attribute of ``ClientQuotas`` other than the share.
            amount: As much.

        Raises:
            ResourceExhausted: The quota would be exceeded; nothing is taken then. Persistent if the amount alone exceeds it.
        """
        # With few calls: each execution takes one.
        of_name = self._of_name
        quota = getattr(of_name.quotas, what)
        if amount > quota - of_name.taken[what]:
            raise ResourceExhausted(
                f"node, {what.replace('_', ' ')}: the clients of {self.name} may have {quota}, have {of_name.taken[what]}, "
                f"asked for {amount} more ({_OPTION})",
                transient=amount <= quota,
            )
        of_name.taken[what] += amount
        self._taken[what] += amount

    def give_back(self, what: str, amount: int = 1) -> None:
        """Undoes ``take``."""
        self._of_name.taken[what] -= amount
        self._taken[what] -= amount
        assert self._taken[what] >= 0, f"{what}: more is given back than was taken"

    def _add(self, what: str, amount: int) -> None:
        self._taken[what] += amount
        self._of_name.taken[what] += amount

    def reserve(self, asked: AskedTime, slots: int) -> int:
        """Takes a reservation, before the ledger is asked for it.

        Args:
            asked: The stream.
            slots: The number of slots of the device.

        Returns:
            Its share of a slot in millionths, for ``release``.

        Raises:
            NotAdmitted: The name would have too many, or too large a share of the device's time. Nothing is taken then.
        """
        name, ppm = shortened(asked.name), share_ppm(asked)
        try:
            self.take("reservations")
        except ResourceExhausted as e:
            raise NotAdmitted(f'stream "{name}": {e}') from None
        left_ppm = self._of_name.left(_SHARE, slots)
        if ppm > left_ppm:
            self.give_back("reservations")
            held = self._of_name.taken[_SHARE] / SHARE_PPM
            reason = (
                f'stream "{name}": the streams of {self.name} hold a share of {held:.3f} of a slot and may hold '
                f"{held + left_ppm / SHARE_PPM:.3f} ({_OPTION}); this stream needs {ppm / SHARE_PPM:.3f}"
            )
            raise NotAdmitted(reason, would_fit=_longer(asked, left_ppm))
        self._add(_SHARE, ppm)
        return ppm

    def change(self, old_ppm: int, new_ppm: int) -> None:
        """The ledger has replaced the terms of a reservation by others that demand no more."""
        self._add(_SHARE, new_ppm - old_ppm)
        assert self._taken[_SHARE] >= 0, "more is given back than was taken"

    def release(self, ppm: int) -> None:
        """Undoes ``reserve``."""
        self.give_back("reservations")
        self.change(ppm, 0)

    def give_back_all(self) -> None:
        """Gives back all that it has."""
        for what, amount in list(self._taken.items()):
            self._add(what, -amount)


def _longer(asked: AskedTime, left_ppm: int) -> WouldFit:
    period_ns = -(-asked.duration_ns * SHARE_PPM // left_ppm) if left_ppm > 0 else 0
    return WouldFit(period_ns=period_ns) if 0 < period_ns <= DAY_NS else WouldFit()


class Names:
    """The accounts of all names.

    Args:
        quotas: By name, and of ``OTHERS``; see ``quotas_of``.
    """

    def __init__(self, quotas: Mapping[str, ClientQuotas]) -> None:
        self._quotas = dict(quotas)
        self._others = self._quotas.pop(OTHERS, ClientQuotas())
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def joined(self, name: str) -> ClientAccount:
        """The account of a further client of a name.

        Raises:
            ResourceExhausted: The name has as many clients as it may.
        """
        of_name = self._accounts.get(name) or _Account(name, self._quotas.get(name, self._others))
        client = ClientAccount(of_name)
        client.take("clients")
        self._accounts[name] = of_name
        return client

    def left(self, client: ClientAccount) -> None:
        """A client is gone."""
        client.give_back_all()
        if not self._accounts[client.name].taken["clients"]:
            del self._accounts[client.name]
