"""Programs of single memory steps, explored in every interleaving.

Each process has a store buffer: first in, first out (TSO, as on x86), or draining in any order that releases and barriers
allow, with loads that may return a value from before the last acquire (RELAXED, as on Arm; a load is not delayed past a
later store). A process may die between any two steps; its buffered stores still reach memory.

A program is a list of instructions; names starting with a capital are shared words, the others are the process's own.
`Model.explore` visits every reachable state and raises `Violation` with the run that leads there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Locals = dict[str, int]
TSO, RELAXED = "TSO", "RELAXED"
ANY = -1


class Violation(Exception):
    """A run that breaks the protocol's promise."""


@dataclass(frozen=True)
class Instruction:
    """One step; `kind` decides which fields count."""

    kind: str
    word: str | Callable[[Locals], str] = ""
    value: Callable[[Locals], int] = lambda _: 0
    into: str = ""
    ordered: bool = False
    label: str = ""


def store(word: Any, value: Callable[[Locals], int], release: bool = False) -> Instruction:
    return Instruction("store", word, value, ordered=release)


def load(into: str, word: Any, acquire: bool = False) -> Instruction:
    return Instruction("load", word, into=into, ordered=acquire)


def exchange(into: str, word: str, value: Callable[[Locals], int]) -> Instruction:
    """An atomic read-modify-write, a full fence as well; `value` sees the old value as `old`."""
    return Instruction("exchange", word, value, into)


def fence() -> Instruction:
    return Instruction("fence")


def store_barrier() -> Instruction:
    """A release fence: stores before it reach memory before stores after it."""
    return Instruction("store barrier")


def load_barrier() -> Instruction:
    """An acquire fence: loads after it see nothing older than loads before it."""
    return Instruction("load barrier")


def branch(condition: Callable[[Locals], bool], label: str) -> Instruction:
    return Instruction("branch", value=condition, label=label)


def goto(label: str) -> Instruction:
    return branch(lambda _: True, label)


def mark(label: str) -> Instruction:
    return Instruction("mark", label=label)


def let(into: str, value: Callable[[Locals], int]) -> Instruction:
    return Instruction("let", value=value, into=into)


def check(condition: Callable[[Locals], bool], what: str) -> Instruction:
    return Instruction("check", value=condition, label=what)


def futex_wait(word: str, expected: Callable[[Locals], int] | None) -> Instruction:
    """Sleeps if the word has the expected value; None is the mutation that does not ask."""
    return Instruction("futex wait", word, expected or (lambda _: ANY))


def wake(word: str) -> Instruction:
    return Instruction("wake", word)


def event_wait(word: str) -> Instruction:
    """Waits until the eventfd is readable, and empties it."""
    return Instruction("event wait", word)


LOCAL_KINDS = frozenset({"branch", "mark", "let"})
Process = tuple[int, tuple[tuple[str, int], ...], tuple[tuple[str, int, bool], ...], str, tuple[Any, ...]]
"""Place, own variables, store buffer, state ("run", "done", "dead" or the word slept on), values still visible."""
State = tuple[tuple[tuple[str, int], ...], tuple[Process, ...]]


class Model:
    """Programs over shared words, and what must hold when nothing moves any more."""

    def __init__(
        self,
        programs: list[list[Instruction]],
        words: dict[str, int],
        order: str = TSO,
        may_die: bool = False,
        at_rest: Callable[[dict[str, int], list[str], list[Locals]], str | None] = lambda *_: None,
    ) -> None:
        self.programs = programs
        self.words = words
        self.order = order
        self.may_die = may_die
        self.at_rest = at_rest
        self.labels = [
            {each.label: at for at, each in enumerate(program) if each.kind == "mark"} for program in programs
        ]

    def explore(self, states_max: int = 2_000_000) -> int:
        """Visits every state; the number of states.

        Raises:
            Violation: With the steps of a run that breaks the promise.
        """
        start: State = (
            tuple(sorted(self.words.items())),
            tuple(self._settle(i, 0, {}) for i in range(len(self.programs))),
        )
        parents: dict[State, tuple[State, str] | None] = {start: None}
        todo = [start]
        while todo:
            state = todo.pop()
            try:
                successors = list(self._successors(state))
                if not successors:
                    self._rest(state)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(self._run(parents, state))) from None
            for step, following in successors:
                if following not in parents:
                    parents[following] = (state, step)
                    todo.append(following)
            assert len(parents) <= states_max, (
                "more states than expected: raise states_max or shrink the model"
            )
        return len(parents)

    def _run(self, parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        steps = []
        at = parents[state]
        while at is not None:
            steps.append(at[1])
            at = parents[at[0]]
        return steps[::-1]

    def _rest(self, state: State) -> None:
        processes = state[1]
        states = [p[3] for p in processes]
        own = [dict(p[1]) for p in processes]
        if "dead" not in states and any(s != "done" for s in states):
            raise Violation(f"stuck: {states}")
        complaint = self.at_rest(dict(state[0]), states, own)
        if complaint:
            raise Violation(complaint)

    def _settle(self, index: int, at: int, own: Locals, seen: tuple[Any, ...] = ()) -> Process:
        """Runs the instructions that touch nothing shared."""
        program = self.programs[index]
        while at < len(program) and program[at].kind in LOCAL_KINDS:
            instruction = program[at]
            at += 1
            if instruction.kind == "let":
                own[instruction.into] = instruction.value(own)
            elif instruction.kind == "branch" and instruction.value(own):
                at = self.labels[index][instruction.label]
        return at, tuple(sorted(own.items())), (), "done" if at >= len(program) else "run", seen

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        memory, processes = dict(state[0]), list(state[1])
        alive = all(p[3] != "dead" for p in processes)
        # A slice is long against the draining of a store buffer.
        slices = not alive and all(not p[2] for p in processes)
        for index, process in enumerate(processes):
            yield from self._drains(memory, processes, index)
            if process[3] == "run":
                yield from self._steps(memory, processes, index)
            elif process[3] not in ("done", "dead") and slices:
                # The peer is dead: a slice ends, and the sleeper looks again.
                woken = self._settle(index, process[0] + 1, {**dict(process[1]), "slices": 1}, process[4])
                if dict(process[1]).get("slices", 0) == 0:
                    yield f"{index}: slice over", pack(memory, processes, index, woken)
            if self.may_die and alive and process[3] != "done":
                yield f"{index}: dies", pack(memory, processes, index, (*process[:3], "dead", process[4]))

    def _drains(
        self, memory: dict[str, int], processes: list[Process], index: int
    ) -> Iterator[tuple[str, State]]:
        buffer = processes[index][2]
        for place, (word, value, release) in enumerate(buffer):
            older = buffer[:place]
            if word == "":  # a barrier at the head is over
                if place == 0:
                    yield (
                        f"{index}: barrier over",
                        pack(
                            memory,
                            processes,
                            index,
                            (*processes[index][:2], buffer[1:], *processes[index][3:]),
                        ),
                    )
                break
            blocked = place > 0 and (self.order == TSO or release or any(w == word for w, _, _ in older))
            if not blocked:
                after = dict(memory)
                after[word] = value
                changed = (*processes[index][:2], buffer[:place] + buffer[place + 1 :], *processes[index][3:])
                others = list(processes)
                others[index] = changed
                yield (
                    f"{index}: {word} = {value} reaches memory",
                    self._publish(after, others, index, word, value),
                )

    def _publish(
        self, memory: dict[str, int], processes: list[Process], writer: int, word: str, value: int
    ) -> State:
        """Another's store reaches memory: under RELAXED the old value stays visible to loads not yet ordered."""
        if self.order == RELAXED:
            for index, process in enumerate(processes):
                if index != writer:
                    stale = dict(process[4])
                    stale[word] = (*stale.get(word, ()), replaced(word, value))
                    processes[index] = (*process[:4], tuple(sorted(stale.items())))
        return tuple(sorted(memory.items())), tuple(processes)

    def _steps(
        self, memory: dict[str, int], processes: list[Process], index: int
    ) -> Iterator[tuple[str, State]]:
        at, own_items, buffer, _, stale = processes[index]
        own = dict(own_items)
        instruction = self.programs[index][at]
        word = instruction.word(own) if callable(instruction.word) else instruction.word
        kind = instruction.kind

        def on(
            buffer: tuple[Any, ...] = buffer, stale: tuple[Any, ...] = stale, own: Locals = own
        ) -> Process:
            settled = self._settle(index, at + 1, dict(own), stale)
            return (settled[0], settled[1], buffer, settled[3], settled[4])

        name = f"{index}: {kind} {word}"
        if kind == "check":
            if not instruction.value(own):
                raise Violation(f"{instruction.label}: {own}")
            yield name, pack(memory, processes, index, on())
        elif kind == "store":
            value = instruction.value(own)
            yield (
                f"{name} = {value}",
                pack(memory, processes, index, on(buffer=(*buffer, (word, value, instruction.ordered)))),
            )
        elif kind == "store barrier":
            barrier = (*buffer, ("", 0, True)) if self.order == RELAXED and buffer else buffer
            yield name, pack(memory, processes, index, on(buffer=barrier))
        elif kind == "load barrier":
            yield name, pack(memory, processes, index, on(stale=()))
        elif kind == "load":
            own_store = [value for w, value, _ in buffer if w == word]
            visible = dict(stale)
            values = own_store[-1:] or [
                memory[word],
                *(visible.get(word, ()) if not instruction.ordered else ()),
            ]
            for value in dict.fromkeys(values):
                rest = stale
                if instruction.ordered:
                    rest = ()
                elif value == memory[word] and not own_store:
                    rest = tuple((w, v) for w, v in stale if w != word)  # a word never goes back
                yield (
                    f"{name} -> {value}",
                    pack(memory, processes, index, on(stale=rest, own={**own, instruction.into: value})),
                )
        elif not buffer:  # everything else waits for the store buffer
            yield from self._kernel_steps(memory, processes, index, instruction, word, on)

    def _kernel_steps(
        self,
        memory: dict[str, int],
        processes: list[Process],
        index: int,
        instruction: Instruction,
        word: str,
        on: Callable[..., Process],
    ) -> Iterator[tuple[str, State]]:
        at, own_items, _, _, _ = processes[index]
        own, name = dict(own_items), f"{index}: {instruction.kind} {word}"
        if instruction.kind == "fence":
            yield name, pack(memory, processes, index, on(stale=()))
        elif instruction.kind == "exchange":
            old = memory[word]
            after = {**memory, word: instruction.value({**own, "old": old})}
            others = list(processes)
            others[index] = on(stale=(), own={**own, instruction.into: old})
            yield f"{name}: {old} -> {after[word]}", self._publish(after, others, index, word, after[word])
        elif instruction.kind == "futex wait":
            if instruction.value(own) not in (ANY, memory[word]):
                yield f"{name}: another value", pack(memory, processes, index, on())
            else:
                yield f"{name}: sleeps", pack(memory, processes, index, (at, own_items, (), word, ()))
        elif instruction.kind == "event wait":
            if memory[word]:
                yield f"{name}: readable", pack({**memory, word: 0}, processes, index, on())
            else:
                yield f"{name}: sleeps", pack(memory, processes, index, (at, own_items, (), word, ()))
        elif instruction.kind == "wake":
            others = list(processes)
            others[index] = on()
            after = dict(memory)
            if word.startswith("Event fd"):
                after[word] = 1
            for other, process in enumerate(processes):
                if process[3] == word:
                    if word.startswith("Event fd"):
                        after[word] = 0
                    others[other] = self._settle(other, process[0] + 1, dict(process[1]), process[4])
            yield name, (tuple(sorted(after.items())), tuple(others))


def pack(memory: dict[str, int], processes: list[Process], index: int, changed: Process) -> State:
    others = list(processes)
    others[index] = changed
    return tuple(sorted(memory.items())), tuple(others)


def replaced(word: str, value: int) -> int:
    """The value a store has just replaced: counters and data only count up, parking words and flags toggle."""
    return 1 - min(value, 1) if word[0] in "PE" else value - 1
