"""The time that a client asks the ledger of a served device for, checked; and the names of the ledger, which has the streams of all
clients.

Owns the check of each value, the answer, and which names a client gets to see. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from aionn.errors import InvalidArgument
from aionn.scheduler.admission import DAY_NS, STREAM_NAME_CHARACTERS_MAX, SlotCost, StreamTerms
from aionn.scheduler.ledger import Reservation
from aionn.scheduler.reservations.ways import WAY_NS
from aionn.service.wire.scheduling_messages import AskedTime, Reserved, ReserveReply

__all__ = ["Asked", "checked", "reply_of", "shown_to"]

_OWNED_NAME = re.compile("\x01([0-9]+)\x02([^\x03]*)\x03")
"""A name in the ledger: with the number of its client, by characters that no name of a client has."""


class Asked(NamedTuple):
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


def checked(asked: AskedTime, client: int) -> Asked:
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
    shorter_ns = terms.deadline_ns if terms.phase_ns is None else min(terms.deadline_ns, terms.period_ns)
    jitter_ns = min(terms.jitter_ns + WAY_NS, shorter_ns - 2 * terms.tolerance_ns - 1)
    terms = msgspec.structs.replace(terms, jitter_ns=jitter_ns)
    cost = SlotCost(duration_ns=asked.duration_ns, piece_ns=asked.duration_ns)
    blocker = _name_in_ledger("blocker", asked.blocker, client, least=0)
    return Asked(terms, cost, asked.chooses_phase, blocker if asked.blocker else "", asked.blocker_ns)


def _name_in_ledger(field: str, name: str, client: int, *, least: int) -> str:
    if not least <= len(name) <= STREAM_NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidArgument(
            f"reservation, {field}: expected {least} to {STREAM_NAME_CHARACTERS_MAX} printable characters, got"
            f" {name[:STREAM_NAME_CHARACTERS_MAX]!r}"
        )
    return f"\x01{client}\x02{name}\x03"


def shown_to(client: int, text: str) -> str:
    """A text of the ledger for one client: the names of others are left out."""

    def shown(found: re.Match[str]) -> str:
        return found[2] if int(found[1]) == client else "(of another client)"

    return _OWNED_NAME.sub(shown, text)


def reply_of(found: Reservation, own: int, *, is_new: bool) -> ReserveReply:
    """The answer to a client; ``own`` is its number for the reservation."""
    verdict = found.verdict
    return ReserveReply(
        Reserved(own, is_new, found.slot, found.terms.phase_ns, verdict.slack_ns, verdict.at_ns)
    )
