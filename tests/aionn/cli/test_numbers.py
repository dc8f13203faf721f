"""Numeric options of all commands: each says which numbers it takes, and any other is a mistake that is told in one sentence."""

from __future__ import annotations

import inspect
import typing
import zlib
from collections.abc import Iterator
from typing import Annotated, Any

import cyclopts
import pytest
from cyclopts import Parameter

from aionn.cli.commands import app
from aionn.cli.main import main
from aionn.cli.numbers import Range, numbers

HOSTILE = ("-1", "0", "nan", "inf", "1e308", "9" * 40, "9" * 5000)


def commands(group: cyclopts.App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group:
        if not name.startswith("-"):
            yield from commands(group[name], (*path, name))
    if group.default_command is not None:
        yield path, group.default_command


def numeric_kind(annotation: Any) -> type | None:
    """``int`` or ``float`` where the option is a number, may be one, or is a tuple of them."""
    for part in (annotation, *typing.get_args(annotation)):
        if part in (int, float):
            return typing.cast(type, part)
        if part is not annotation and (found := numeric_kind(part)) is not None:
            return found
    return None


def numeric_options() -> Iterator[Any]:
    for path, command in commands(app):
        hints = typing.get_type_hints(command, include_extras=True)
        needed = [
            word
            for p in inspect.signature(command).parameters.values()
            if p.default is p.empty
            for word in (("nowhere",) if p.kind is p.POSITIONAL_ONLY else (f"--{p.name}", "nowhere"))
        ]
        for name in inspect.signature(command).parameters:
            annotated = hints[name]
            plain = typing.get_args(annotated)[0] if typing.get_origin(annotated) is Annotated else annotated
            if (kind := numeric_kind(plain)) is not None:
                option = f"--{name.replace('_', '-')}"
                count = len(typing.get_args(plain)) if typing.get_origin(plain) is tuple else 1
                yield pytest.param(
                    [*path, *needed, option], kind, count, annotated, id=f"{'-'.join(path)}{option}"
                )


def range_of(annotated: Any) -> Range | None:
    for extra in getattr(annotated, "__metadata__", ()):
        if isinstance(extra, Parameter):
            for validator in typing.cast(Any, extra.validator):
                if isinstance(validator, Range):
                    return validator
    return None


def is_taken(text: str, kind: type, known: Range) -> bool:
    try:
        return known.has(kind(text))
    except ValueError:
        return False


def test_commands_have_numeric_options() -> None:
    assert {p.values[0][0] for p in numeric_options()} >= {"run", "stream", "bench", "stress", "serve"}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("arguments", "kind", "count", "annotated"), list(numeric_options()))
def test_number_that_makes_no_sense_is_refused_with_the_options_name(
    arguments: list[str],
    kind: type,
    count: int,
    annotated: Any,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    known = range_of(annotated)
    assert known is not None, "the option does not say which numbers it takes"
    refused = [text for text in HOSTILE if not is_taken(text, kind, known)]
    assert {"nan", "inf", "1e308", "9" * 40} <= set(refused)
    if not request.config.getoption("--long"):
        # Two for each option, chosen by its name; over all options each is among them.
        first = zlib.crc32(" ".join(arguments).encode())
        refused = [refused[(first + step) % len(refused)] for step in (0, len(refused) // 2)]
    for text in refused:
        with pytest.raises(SystemExit) as end:
            main([*arguments, *[text] * count])
        told = capsys.readouterr()
        assert (end.value.code, told.out) == (2, ""), text
        (line,) = told.err.splitlines()
        assert line.startswith("aionn: ") and arguments[-1] in line
        # The number as it was given, not one that was calculated from it.
        assert text[:40] in line


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("arguments", "kind", "count", "annotated"), [p for p in numeric_options() if p.values[1] is int]
)
def test_fraction_is_no_whole_number(
    arguments: list[str], kind: type, count: int, annotated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("1.5", "-0.5", "2.0001"):
        with pytest.raises(SystemExit) as end:
            main([*arguments, *[text] * count])
        assert end.value.code == 2
        assert f"{arguments[-1]}: expected a whole number, got {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (numbers(1, 256), "from 1 to 256"),
        (numbers(0, 3600.0, "s", is_open=True), "more than 0 and at most 3600 s"),
        (numbers(0, (1 << 63) - 1), "from 0 to 9223372036854775807"),
    ],
)
def test_range_is_told_with_its_unit(limits: Parameter, told: str) -> None:
    (validator,) = typing.cast(Any, limits.validator)
    assert str(validator) == told


def test_ends_of_a_range_are_taken() -> None:
    closed, opened = Range(0, 2), Range(0, 2, is_open=True)
    assert [closed.has(x) for x in (-1, 0, 1, 2, 3, float("nan"))] == [False, True, True, True, False, False]
    assert [opened.has(x) for x in (0, 1e-9, 2)] == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere", "--seed", "abc"], "--seed"),
        (["run", "nowhere", "--seed", "."], "--seed"),
        (["run", "nowhere", "--input", ""], "--input: expected a path, the name is empty"),
        (["run", ""], "MODEL: expected a path, the name is empty"),
        (["trace", "summary", ""], "FILE: expected a path, the name is empty"),
        (["run", "nowhere", "--nosuch"], "--nosuch"),
        (["run"], "MODEL"),
        (["nosuch"], "nosuch"),
        (["stress", "--minutes"], "--minutes"),
    ],
)
def test_mistake_in_the_arguments_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    told = capsys.readouterr()
    assert (end.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert line.startswith("aionn: ") and words in line
