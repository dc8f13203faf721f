"""The language rules that a machine can check, counted over docs, docstrings, comments and messages.

The numbers may only go down. ``python -m tests.test_tidy_words`` prints them, and with a NAME the places of that pattern.
Source: CONTRIBUTING.md, "Language"; docs/glossary.md."""

import ast
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.syntax_trees import nodes
from tests.test_tidy import PACKAGES, ROOT, parse, read, report

SLACK = 5
"""How far a number may be above the count, so that two branches that lower the same number can be merged."""

PLACES_SHOWN_MAX = 12


class Pattern(NamedTuple):
    """A form that the language rules exclude."""

    expression: str  # Matches within one line.
    bad: str  # A passage in which the expression is found once.
    good: str  # The same, said within the rules.
    most: int  # How often the form may occur; 0 excludes it.


PATTERNS: dict[str, Pattern] = {
    # Rule 1: a verb or a noun begins, and no clause is a subject.
    "clause": Pattern(
        r"(?:^|(?<=[.!] )|(?<=[|] ))(?:Who|What|Whose|Whom|Whoever|Whatever)\b(?![^.!\n]*\?)",
        "What a check is, is the suites'.",
        "The suites define the checks.",
        0,
    ),
    "clause of an entry": Pattern(
        r"(?:(?<=\w: )(?:What|Who|How)|(?<=; )what)\b(?![^.!\n]*\?)",
        "Closes them; what is left waits.",
        "Closes them; the other ones wait.",
        0,
    ),
    "how": Pattern(
        r"^(?:How(?! to\b)|Which|Why)\b(?![^.!\n]*\?)",
        "How many calls may wait.",
        "Number of calls that may wait.",
        0,
    ),
    "whoever": Pattern(
        r"\b(?:[Ww]hoever|[Ww]hom)\b",
        "Closes the fence for whoever waits.",
        "Closes the fence for all waiters.",
        0,
    ),
    "who as a noun": Pattern(
        r"(?:\b(?:to|by|for|from|with|and|or|than|of|is|asks?|chooses?|decides?|sees?|knows?|but)|[;:(]) who\b",
        "The policy decides who is next.",
        "The policy chooses the next job.",
        0,
    ),
    "cleft": Pattern(
        r"\b[Ii]t (?:is|was) (?:\w+ ){1,4}(?:that|who|which)\b",
        "It is the driver that checks it.",
        "The driver checks it.",
        0,
    ),
    "is what": Pattern(
        r"\b(?:is|are|was|were) what\b",
        "The reader's end is what a process gets.",
        "A process gets the reader's end.",
        0,
    ),
    # Rule 2: the technical verb.
    "tell": Pattern(
        r"\b(?:[Tt]ell|[Tt]ells|[Tt]old|[Tt]elling)\b",
        "The client is told of it.",
        "The client is notified.",
        0,
    ),
    "say": Pattern(
        r"\b(?:[Ss]ay|[Ss]ays|[Ss]aid|[Ss]aying)\b",
        "A driver that says illegal things of itself is rejected.",
        "A driver whose DeviceInfo is invalid is rejected.",
        0,
    ),
    "hear": Pattern(
        r"\b(?:[Hh]ears?|[Hh]eard)\b",
        "You hear of a missed deadline at the deadline.",
        "MissedDeadline is raised at the deadline.",
        0,
    ),
    "turn away": Pattern(
        r"\b[Tt]urn(?:s|ed|ing)? (?:\w+ )?away\b", "One execution is turned away.", "It is rejected.", 0
    ),
    # Rule 3: the actor is named, and "not" negates.
    "is had": Pattern(
        r"\b(?:is|are|was|were|be|been) (?:had|met|none)\b",
        "Waits until the slot is had.",
        "Waits until the slot is acquired.",
        0,
    ),
    "is somebody's": Pattern(
        r"\b(?:is|are) (?:the |an? )?\w+'s?(?=[.,;:)|]| to |$)",
        "Whether it has failed is the driver's to check.",
        "The driver checks whether it has failed.",
        0,
    ),
    "somebody": Pattern(
        r"\b(?:[Nn]obody|[Ss]omebody|[Ee]verybody|[Aa]nybody)\b",
        "A slot that nobody uses.",
        "An unused slot.",
        0,
    ),
    "nobody's": Pattern(
        r"\b(?:the others|the other's|nobody's|somebody's|anybody's)\b",
        "The late result is nobody's.",
        "The late result is discarded.",
        0,
    ),
    "is no": Pattern(
        r"(?<![Tt]here )\b(?:is|are|was|were) no (?!more\b|longer\b|less\b)\w+",
        "The peer sent what is no message.",
        "The peer sent an invalid message.",
        0,
    ),
    "None for none": Pattern(
        r"\bNone for no(?:ne)?\b", "The deadline; None for none.", "The deadline; None means no deadline.", 0
    ),
    # Rule 4: one reading only.
    "at once": Pattern(r"\b[Aa]t once\b", "Returns at once.", "Returns immediately.", 0),
    "as of": Pattern(r"\b[Aa]s of\b", "Arguments as of ``run``.", "See ``run`` for the arguments.", 0),
    "give up": Pattern(
        r"\b(?:[Gg]iv(?:e|en|es|ing)|[Gg]ave) (?:\w+ ){0,3}up\b",
        "An execution that was given up.",
        "A cancelled execution.",
        0,
    ),
    "make up": Pattern(
        r"\b(?:[Mm]ade|[Mm]akes?|[Mm]aking) up\b", "No report is made up.", "No report is built.", 0
    ),
    "meanwhile": Pattern(r"\b[Mm]eanwhile\b", "Others run meanwhile.", "Other jobs run while it waits.", 0),
    "by turns": Pattern(r"\bby turns\b", "They run by turns.", "They run alternately.", 0),
    "go on": Pattern(
        r"\b(?:[Gg]o|[Gg]oes|[Ww]ent|[Gg]oing) on\b", "The loop goes on.", "The loop continues.", 0
    ),
    "throw away": Pattern(
        r"\b(?:thr[eo]w|thrown|throws|let|lets) (?:\w+ )?(?:away|go)\b",
        "Its result is thrown away.",
        "Its result is discarded.",
        0,
    ),
    "stand": Pattern(
        r"\b(?:[Ss]tands?|stood)\b(?! for)",
        "The reason stands in the table.",
        "The table has the reason.",
        0,
    ),
    "lie": Pattern(
        r"\b(?:lies|lie|lay)\b", "The values lie in a pool.", "The values are stored in a pool.", 0
    ),
    "for ever": Pattern(r"\bfor ever\b", "It waits for ever.", "It waits without a limit.", 0),
    # Rule 5: a term of the trade, one word for one thing.
    "house": Pattern(r"\b[Hh]ouse\b", "The house's rules.", "The project's rules.", 0),
    "a work": Pattern(
        r"\b(?:[Aa]|[Oo]ne|[Ee]ach|[Ee]very|[Aa]nother) work\b(?! of)",
        "A work that waits.",
        "A job that waits.",
        0,
    ),
    "mend": Pattern(r"\b[Mm]end(?:s|ed)?\b", "Mend the model.", "Fix the model.", 0),
}


# --- What is searched ---------------------------------------------------------------------------------------------------------

TOOLS = ("benchmarks", "build_backend", "examples", "release", "website")
"""Folders beside the packages whose words count too."""

Passage = tuple[int, str]
"""``(line, text)``: a docstring, a comment, a message or a paragraph of a page, in one line of text."""

COMMENT = re.compile(r"^\s*#:? ?(?P<whole>.*)$|\S  # (?P<end>.*)$")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def python_passages(text: str) -> Iterator[Passage]:
    """Docstrings, other strings of several words, and comments; comments on neighbouring lines are one passage."""
    for node in nodes(parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            yield node.lineno, in_one_line(node.value)
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = COMMENT.search(line)
        if found and found["whole"] is not None:
            block.append(found["whole"])
            continue
        if block:
            yield number - len(block), in_one_line(" ".join(block))
            block = []
        if found:
            yield number, in_one_line(found["end"])


def page_passages(text: str) -> Iterator[Passage]:
    """Paragraphs and rows of tables; no code and no headings."""
    block: list[str] = []
    is_code = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.startswith("```")
        is_code ^= is_fence
        alone = line.startswith(("|", "- ", "#"))
        if block and (is_fence or is_code or alone or not line.strip()):
            yield number - len(block), in_one_line(" ".join(block))
            block = []
        if not (is_fence or is_code or line.startswith("#")) and line.strip():
            block.append(line.removeprefix("- "))


C_PASSAGE = re.compile(
    r'/\*(?P<block>.*?)\*/|(?P<lines>(?://[^\n]*\n?[ \t]*)+)|(?P<strings>(?:"(?:[^"\\\n]|\\.)*"\s*)+)',
    re.DOTALL,
)
C_MARKS = re.compile(r'(?m)^[ \t]*(?://|\*)|\\n|\\"|"\s*"|"')


def c_passages(text: str) -> Iterator[Passage]:
    """Comments, and strings of several words; comments on neighbouring lines are one passage, and so are strings."""
    for found in C_PASSAGE.finditer(text):
        passage = in_one_line(
            C_MARKS.sub(" " if found["strings"] is None else "", found[found.lastgroup or 0])
        )
        if len(passage.split()) > 1:
            yield text.count("\n", 0, found.start()) + 1, passage


def passages(path: str, text: str) -> Iterator[Passage]:
    if path.endswith((".c", ".h")):
        return c_passages(text)
    return page_passages(text) if path.endswith(".md") else python_passages(text)


def places(texts: dict[str, str]) -> dict[str, list[str]]:
    """``file:line: ...passage...`` for each place of each pattern."""
    expressions = {name: re.compile(pattern.expression, re.MULTILINE) for name, pattern in PATTERNS.items()}
    found: dict[str, list[str]] = {name: [] for name in PATTERNS}
    for path, text in texts.items():
        listed = list(passages(path, text))
        # All passages of a file in one text, one a line: a search in each of them would begin some million times.
        whole = "\n".join(passage for _, passage in listed)
        for name, expression in expressions.items():
            for match in expression.finditer(whole):
                line, passage = listed[whole.count("\n", 0, match.start())]
                begin = match.start() - whole.rfind("\n", 0, match.start()) - 1
                around = passage[max(0, begin - 80) : begin + len(match[0]) + 100]
                found[name].append(f"{path}:{line}: {around}")
    return found


def searched_texts() -> dict[str, str]:
    """Everything that a user, an author of drivers or a reader of figures sees; the rules themselves quote what they exclude."""
    texts = read((*PACKAGES, *TOOLS), (".py", ".pyi", ".c", ".h")) | read(("docs", "fmq", "fences"), (".md",))
    texts |= {name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")}
    del texts["docs/glossary.md"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    return texts | {"CONTRIBUTING.md": re.sub(r"(?ms)^\d\. .*?\n\n|^\|.*?\|$", "", contributing)}


BAD_IDENTIFIER = re.compile(r"(?:^|_)(?:told|tells?)(?:_|$)", re.IGNORECASE)


def bad_identifiers(sources: dict[str, str]) -> list[str]:
    """Names that a file gives, to a function, a class, an argument or a value, with a verb of speech in them."""
    found = []
    for path, text in sources.items():
        for node in nodes(parse(text)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    given = name
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    given = name
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    given = name
                case _:
                    continue
            if BAD_IDENTIFIER.search(given):
                found.append(f"{path}:{node.lineno}: {given}")
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return places(searched_texts())


# --- The rules, applied -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_form_occurs_no_more_often(found: dict[str, list[str]], name: str) -> None:
    count, most = len(found[name]), PATTERNS[name].most
    some = "\n".join(found[name][:PLACES_SHOWN_MAX]) if count > most else ""
    advice = f"{PATTERNS[name].bad!r} is better said {PATTERNS[name].good!r}"
    assert count <= most, f"{name}: {count} places, at most {most}; {advice}; some of them:\n{some}"
    assert count >= most - SLACK, f"{name}: {count} places, {most} allowed: lower the number"


@pytest.mark.thorough
def test_no_name_is_a_verb_of_speech() -> None:
    report(bad_identifiers(read((*PACKAGES, *TOOLS), (".py",))))


# --- The rules, tested --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_catches_its_bad_passage_and_nothing_in_the_good_one(name: str) -> None:
    pattern = PATTERNS[name]
    for text in (f'def f():\n    """{pattern.bad}"""', f"# {pattern.bad}", f"x = 1  # {pattern.bad}"):
        assert len(places({"a.py": text})[name]) == 1
    assert len(places({"a.py": f'raise E("{pattern.bad}")', "a.md": pattern.bad})[name]) == 2
    assert places({"a.py": f'"""{pattern.good}"""', "a.md": pattern.good})[name] == []


def test_identifier_rule_catches() -> None:
    bad = {
        "a.py": "told = 1\ndef tell_why(): pass\nclass Told_Max: pass\ndef f(is_told): self._tell = is_told\n",
        "b.py": "teller = file.tell()\nretold = untold(intelligence)\n",
    }
    found = sorted(place.rpartition(" ")[2] for place in bad_identifiers(bad))
    assert found == ["Told_Max", "_tell", "is_told", "tell_why", "told"]


def test_passages_of_a_page_are_paragraphs_and_rows_without_code_and_headings() -> None:
    text = "# Told\n\none\ntwo\n- three\n  four\n\n```sh\ntold\n```\nfive\n| six |\n| seven |\n"
    assert list(page_passages(text)) == [
        (3, "one two"),
        (5, "three four"),
        (11, "five"),
        (12, "| six |"),
        (13, "| seven |"),
    ]


def test_passages_of_a_module_are_strings_and_blocks_of_comments() -> None:
    text = '"""One\ntwo."""\n# three\n#   four\nx = f(y, "a word")  # five\nz = "word"\n'
    assert sorted(python_passages(text)) == [(1, "One two."), (3, "three four"), (5, "a word"), (5, "five")]


def test_passages_of_c_are_comments_and_strings() -> None:
    text = '/* One\n * two. */\nint a; // three\n  // four\nf("five "\n  "six\\n", "seven");\n#include "x.h"\nint b;\n"a // b"\n'
    assert list(c_passages(text)) == [(1, "One two."), (3, "three four"), (5, "five six"), (9, "a // b")]


if __name__ == "__main__":
    everything = places(searched_texts())
    for name in sys.argv[1:]:
        print("\n".join(everything[name]))
    if not sys.argv[1:]:
        print("\n".join(f"{len(found):5} {name}" for name, found in everything.items()))
        print(f"{sum(map(len, everything.values())):5}")
