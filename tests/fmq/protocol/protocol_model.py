"""The queue's protocol, step for step as `fmq/_native.c` has it, as programs for the explorer in interleavings.py.

What is modelled: the ring with its parking words, the event flag, the claim of the unsynchronized flavour, and the slots that
native calls take by themselves (`fmq/_answers.c` with `aionn/drivers/kit/gate.py`). The mutations are the same programs with one
fence, re-check or order taken away; each must lead to a violation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmq_interleavings import (
    RELAXED,
    TSO,
    Instruction,
    Locals,
    Model,
    Violation,
    branch,
    check,
    event_wait,
    exchange,
    fence,
    futex_wait,
    goto,
    let,
    load,
    load_barrier,
    mark,
    store,
    store_barrier,
    wake,
)

# ---- the ring with its parking words ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Which steps of the ring's protocol are there; each False is a mutation."""

    capacity: int = 1
    messages: int = 2
    event_reader: bool = False
    publisher_fence: bool = True
    sleeper_fence: bool = True
    reader_looks_again: bool = True
    writer_looks_again: bool = True
    release: bool = True
    acquire: bool = True
    data_before_counter: bool = True
    read_before_freeing: bool = True
    wake_after_publish: bool = True
    clear_before_wake: bool = True
    wakes: bool = True
    expected_value: bool = True


def _wake(m: Ring, word: str, event: bool) -> list[Instruction]:
    """wake_if_parked of `_native.c`."""
    target = f"Event fd of {word}" if event else word
    steps = [fence()] if m.publisher_fence else []
    steps += [load("parked", word), branch(lambda own: own["parked"] == 0, f"awake {word}")]
    if m.clear_before_wake:
        steps += [
            exchange("parked", word, lambda _: 0),
            branch(lambda own: own["parked"] == 0, f"awake {word}"),
        ]
    if m.wakes:
        steps += [wake(target)]
    if not m.clear_before_wake:
        steps += [exchange("parked", word, lambda _: 0)]
    return [*steps, mark(f"awake {word}")]


def _park(
    m: Ring, word: str, event: bool, look: list[Instruction], ready: Any, again: bool
) -> list[Instruction]:
    """park of `_native.c`: declare, look again, sleep; the caller loops."""
    steps = [exchange("_", word, lambda _: 1)] if m.sleeper_fence else [store(word, lambda _: 1)]
    if again:
        steps += [*look, branch(ready, f"unpark {word}")]
    if event:
        steps += [event_wait(f"Event fd of {word}")]
    else:
        steps += [futex_wait(word, (lambda _: 1) if m.expected_value else None)]
    return [*steps, mark(f"unpark {word}"), exchange("_", word, lambda _: 0)]


def ring(m: Ring, order: str = TSO, may_die: bool = False) -> Model:
    """A writer of `messages` numbers and a reader that checks each, parking whenever there is nothing to do."""

    def slot(own: Locals) -> str:
        return f"Data {own['at'] % m.capacity}"

    def full(own: Locals) -> bool:
        return own["at"] - own["peer"] >= m.capacity

    def room(own: Locals) -> bool:
        return not full(own)

    def some(own: Locals) -> bool:
        return own["peer"] > own["at"]

    data = store(slot, lambda own: own["at"] + 1)
    counter = store("Write", lambda own: own["at"] + 1, release=m.release)
    publish = [data, counter] if m.data_before_counter else [counter, data]
    wake_reader = _wake(m, "Park reader", m.event_reader)
    look_for_space = [load("peer", "Read", acquire=True)]
    look_for_data = [load("peer", "Write", acquire=m.acquire)]
    writer = [
        let("at", lambda _: 0),
        let("peer", lambda _: 0),
        mark("next"),
        branch(lambda own: own["at"] == m.messages, "end"),
        mark("look"),
        branch(room, "put"),
        *look_for_space,
        branch(room, "put"),
        branch(lambda own: own.get("slices", 0) == 1, "end"),
        *_park(m, "Park writer", False, look_for_space, room, m.writer_looks_again),
        *look_for_space,
        goto("look"),
        mark("put"),
        *([] if m.wake_after_publish else wake_reader),
        *publish,
        *(wake_reader if m.wake_after_publish else []),
        let("at", lambda own: own["at"] + 1),
        goto("next"),
        mark("end"),
    ]
    take = load("got", slot)
    free = store("Read", lambda own: own["at"] + 1, release=True)
    reader = [
        let("at", lambda _: 0),
        let("peer", lambda _: 0),
        mark("next"),
        branch(lambda own: own["at"] == m.messages, "end"),
        mark("look"),
        branch(some, "take"),
        *look_for_data,
        branch(some, "take"),
        branch(lambda own: own.get("slices", 0) == 1, "end"),
        *_park(m, "Park reader", m.event_reader, look_for_data, some, m.reader_looks_again),
        *look_for_data,
        goto("look"),
        mark("take"),
        *([take, free] if m.read_before_freeing else [free, take]),
        check(lambda own: own["got"] == own["at"] + 1, "reader: expected the next number"),
        *_wake(m, "Park writer", False),
        let("at", lambda own: own["at"] + 1),
        goto("next"),
        mark("end"),
    ]

    def at_rest(words: dict[str, int], states: list[str], own: list[Locals]) -> str | None:
        if states[1] == "done" and own[1]["at"] < words["Write"]:
            return f"published {words['Write']} but the reader gave up at {own[1]['at']}"
        if "dead" not in states and own[1]["at"] != m.messages:
            return "messages lost"
        if any(s not in ("done", "dead") for s in states):
            return f"no answer for the survivor: {states}"
        return None

    words = {"Write": 0, "Read": 0, "Park reader": 0, "Park writer": 0, "Event fd of Park reader": 0}
    words.update({f"Data {i}": 0 for i in range(m.capacity)})
    return Model([writer, reader], words, order, may_die, at_rest)


RING_MUTATIONS = {
    "no fence after publishing": (Ring(publisher_fence=False), TSO),
    "no fence after declaring sleep": (Ring(sleeper_fence=False), TSO),
    "reader does not look again": (Ring(reader_looks_again=False), TSO),
    "writer does not look again": (Ring(writer_looks_again=False), TSO),
    "counter before data": (Ring(data_before_counter=False), TSO),
    "space freed before the data is read": (Ring(read_before_freeing=False), TSO),
    "wake before publishing": (Ring(wake_after_publish=False), TSO),
    "parking word cleared after the wake": (Ring(clear_before_wake=False, messages=3), TSO),
    "nobody wakes": (Ring(wakes=False), TSO),
    "counter published without release": (Ring(release=False), RELAXED),
    "counter read without acquire": (Ring(acquire=False), RELAXED),
    "sleep whatever the word says": (Ring(expected_value=False), TSO),
}


# ---- the event flag -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """Which steps of the event flag's protocol are there."""

    rounds: int = 2
    set_before_wake: bool = True
    wakes: bool = True
    expected_value: bool = True
    consumes: bool = True


def event_flag(m: Flag, may_die: bool = False) -> Model:
    """A waker that sets bit 1 so often, each time after the waiter has taken the one before, and the waiter."""
    set_bit = [exchange("old bits", "Event word", lambda own: own["old"] | 1)]
    new_bits = [branch(lambda own: own["old bits"] & 1 == 1, "quiet")]
    waking = [wake("Event word")] if m.wakes else []
    waker = [
        let("n", lambda _: 0),
        mark("next"),
        branch(lambda own: own["n"] == m.rounds, "end"),
        *([*set_bit, *new_bits, *waking] if m.set_before_wake else [*waking, *set_bit]),
        mark("quiet"),
        let("n", lambda own: own["n"] + 1),
        mark("taken?"),
        load("taken", "Taken", acquire=True),
        branch(lambda own: own.get("slices", 0) == 1, "end"),
        branch(lambda own: own["taken"] >= own["n"], "next"),
        futex_wait("Taken", lambda own: own["taken"]),
        goto("taken?"),
        mark("end"),
    ]
    looking = exchange("bits", "Event word", lambda own: own["old"] & ~1 if m.consumes else own["old"])
    waiter = [
        let("n", lambda _: 0),
        let("bits", lambda _: 0),
        mark("next"),
        branch(lambda own: own["n"] == m.rounds, "end"),
        mark("look"),
        looking,
        branch(lambda own: own["bits"] & 1 == 1, "got"),
        branch(lambda own: own.get("slices", 0) == 1, "end"),
        futex_wait("Event word", (lambda own: own["bits"]) if m.expected_value else None),
        goto("look"),
        mark("got"),
        let("bits", lambda _: 0),
        let("n", lambda own: own["n"] + 1),
        exchange("_", "Taken", lambda own: own["n"]),
        wake("Taken"),
        goto("next"),
        mark("end"),
    ]

    def at_rest(words: dict[str, int], states: list[str], own: list[Locals]) -> str | None:
        if "dead" not in states and words["Event word"] & 1:
            return "a bit was left over: taken twice, or not taken"
        if any(s not in ("done", "dead") for s in states):
            return f"no answer for the survivor: {states}"
        return None

    return Model([waker, waiter], {"Event word": 0, "Taken": 0}, TSO, may_die, at_rest)


FLAG_MUTATIONS = {
    "wake before the bit is set": Flag(set_before_wake=False),
    "nobody is woken": Flag(wakes=False),
    "bits are not consumed": Flag(consumes=False),
    "sleep whatever the word says": Flag(expected_value=False),
}


# ---- the claim of the unsynchronized flavour ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """Which steps of the overwriting writer's and the checking reader's protocol are there."""

    capacity: int = 1
    messages: int = 2
    claims: bool = True
    claim_first: bool = True
    store_barrier: bool = True
    load_barrier: bool = True
    checks_after: bool = True
    acquire: bool = True


def claim(m: Claim, order: str = TSO, may_die: bool = False) -> Model:
    """A writer that overwrites elements of two words each; what the reader accepts must be whole and of its number."""

    def first(own: Locals) -> str:
        return f"First {own['at'] % m.capacity}"

    def second(own: Locals) -> str:
        return f"Second {own['at'] % m.capacity}"

    def number(own: Locals) -> int:
        return own["at"] + 1

    claiming = [store("Claim", number)] + ([store_barrier()] if m.store_barrier else [])
    element = [store(first, number), store(second, number)]
    writer = [
        let("at", lambda _: 0),
        mark("next"),
        branch(lambda own: own["at"] == m.messages, "end"),
        *([] if not m.claims else [*claiming, *element] if m.claim_first else [*element, *claiming]),
        *([] if m.claims else element),
        store("Write", number, release=True),
        let("at", lambda own: own["at"] + 1),
        goto("next"),
        mark("end"),
    ]
    overtaken = "Claim" if m.claims else "Write"
    checking = [*([load_barrier()] if m.load_barrier else []), load("claim", overtaken)]
    reader = [
        let("at", lambda _: 0),
        let("tries", lambda _: 0),
        mark("next"),
        branch(lambda own: own["tries"] == m.messages + 1, "end"),
        let("tries", lambda own: own["tries"] + 1),
        load("write", "Write", acquire=m.acquire),
        branch(lambda own: own["write"] - own["at"] > m.capacity, "lost"),
        branch(lambda own: own["write"] <= own["at"], "next"),
        load("one", first),
        load("two", second),
        *(checking if m.checks_after else [let("claim", lambda _: 0)]),
        branch(lambda own: own["claim"] - own["at"] > m.capacity, "lost"),
        check(
            lambda own: own["one"] == own["two"] == own["at"] + 1, "reader: torn or stale element accepted"
        ),
        let("at", number),
        goto("next"),
        mark("lost"),
        load("write", "Write", acquire=True),
        let("at", lambda own: own["write"]),
        goto("next"),
        mark("end"),
    ]
    words = {"Write": 0, "Claim": 0}
    words.update({f"{part} {i}": 0 for part in ("First", "Second") for i in range(m.capacity)})
    return Model([writer, reader], words, order, may_die)


CLAIM_MUTATIONS = {
    "no claim, the write counter is checked": (Claim(claims=False), TSO),
    "claim after the data": (Claim(claim_first=False), TSO),
    "no check after copying": (Claim(checks_after=False), TSO),
    "no barrier after the claim": (Claim(store_barrier=False), RELAXED),
    "no barrier before the check": (Claim(load_barrier=False), RELAXED),
    "counter read without acquire": (Claim(acquire=False), RELAXED),
}

# ---- the slots of native calls ---------------------------------------------------------------------------------------


CLOSED = 2
"""The bit of the word that the gate sets; bit 0 is the one slot of this device."""


@dataclass(frozen=True)
class NativeSlots:
    """Which steps of taking, giving, closing and opening are there."""

    calls: int = 2
    holders: int = 1
    sees_closed: bool = True
    takes_atomically: bool = True
    gives_after_the_call: bool = True
    reports: bool = True
    adopts: bool = True
    waits_for_reports: bool = True


def native_slots(m: NativeSlots, order: str = TSO) -> Model:
    """Threads that make native calls in one slot, and a gate that closes it, runs a job of its own there, and opens it again.

    `Inside` counts who uses the engine of the slot, `Output` is what they write without any order of their own, `Reported` is the
    gate's record of calls that ended after it had closed the word.
    """
    use = [
        exchange("others", "Inside", lambda own: own["old"] + 1),
        check(lambda own: own["others"] == 0, "two use the engine of a slot"),
        load("engine", "Output"),
        store("Output", lambda own: own["engine"] + 1),
        exchange("_", "Inside", lambda own: own["old"] - 1),
    ]

    def taken(own: Locals) -> int:
        return own["old"] | 1 if own["old"] == 0 or (not m.sees_closed and not own["old"] & 1) else own["old"]

    def is_refused(own: Locals) -> bool:
        return bool(own["before"] & 1) or (m.sees_closed and bool(own["before"] & CLOSED))

    take = (
        [exchange("before", "Slots", taken)]
        if m.takes_atomically
        else [
            load("before", "Slots", acquire=True),
            branch(is_refused, "python"),
            exchange("_", "Slots", lambda own: own["old"] | 1),
        ]
    )
    give = [exchange("before", "Slots", lambda own: own["old"] & ~1)]
    report = [exchange("_", "Reported", lambda own: own["old"] + 1), wake("Reported")] if m.reports else []
    holder = [
        let("n", lambda _: 0),
        let("done", lambda _: 0),
        mark("next"),
        branch(lambda own: own["n"] == m.calls, "end"),
        let("n", lambda own: own["n"] + 1),
        *take,
        branch(is_refused, "python"),
        *([*use, *give] if m.gives_after_the_call else [*give, *use]),
        let("done", lambda own: own["done"] + 1),
        branch(lambda own: not own["before"] & CLOSED, "next"),
        *report,
        mark("python"),
        goto("next"),
        mark("end"),
    ]
    waiting = [
        mark("ended?"),
        load("reported", "Reported", acquire=True),
        branch(lambda own: own["reported"] >= own["adopted"], "mine"),
        futex_wait("Reported", lambda own: own["reported"]),
        goto("ended?"),
    ]
    gate = [
        let("n", lambda _: 0),
        let("adopted", lambda _: 0),
        let("done", lambda _: 0),
        mark("next"),
        branch(lambda own: own["n"] == m.calls, "end"),
        let("n", lambda own: own["n"] + 1),
        exchange("before", "Slots", lambda own: own["old"] | CLOSED),
        *([let("adopted", lambda own: own["adopted"] + (own["before"] & 1))] if m.adopts else []),
        *(waiting if m.waits_for_reports else []),
        mark("mine"),
        *use,
        let("done", lambda own: own["done"] + 1),
        exchange("_", "Slots", lambda own: own["old"] & ~CLOSED),
        goto("next"),
        mark("end"),
    ]

    def at_rest(words: dict[str, int], states: list[str], own: list[Locals]) -> str | None:
        if words["Slots"] or words["Inside"]:
            return f"a slot stays taken, or closed: {words}"
        if words["Reported"] != own[-1]["adopted"]:
            return "not every holder was reported once"
        if words["Output"] != sum(each["done"] for each in own):
            return "what a call wrote was not seen by the next one"
        return None

    words = {"Slots": 0, "Inside": 0, "Output": 0, "Reported": 0}
    return Model([holder] * m.holders + [gate], words, order, at_rest=at_rest)


SLOTS_MUTATIONS = {
    "a closed word is not seen": NativeSlots(sees_closed=False),
    "looked at and taken in two steps": NativeSlots(takes_atomically=False),
    "given before the call": NativeSlots(gives_after_the_call=False),
    "the end of a call is not reported": NativeSlots(reports=False),
    "the gate does not adopt holders": NativeSlots(adopts=False),
    "the gate does not wait for holders": NativeSlots(waits_for_reports=False),
}


__all__ = [
    "CLAIM_MUTATIONS",
    "FLAG_MUTATIONS",
    "RELAXED",
    "RING_MUTATIONS",
    "SLOTS_MUTATIONS",
    "TSO",
    "Claim",
    "Flag",
    "Model",
    "NativeSlots",
    "Ring",
    "Violation",
    "claim",
    "event_flag",
    "native_slots",
    "ring",
]
