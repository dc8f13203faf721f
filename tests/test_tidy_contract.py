"""The project's rule about the driver contract: what an object can do is a member of its protocol, and is never looked for.

The rule has a test that feeds it bad snippets; a needless excuse fails as well. Source: aionn/hal/device.py."""

import ast

import pytest

from aionn.hal import Buffer, BufferDefaults, Burst, BurstDefaults, PreparedModel, PreparedModelDefaults
from tests.support.syntax_trees import nodes
from tests.test_tidy import PACKAGES, ROOT, parse, read, report

USERS = (
    "aionn/burst/",
    "aionn/drivers/",
    "aionn/fleet/",
    "aionn/runtime/",
    "aionn/scheduler/",
    "aionn/service/",
)
"""Where devices, prepared models, bursts and device memories are used, which others may have written."""

LOOKED_FOR: dict[str, str] = {
    "__dlpack__": "an application's array of any library: DLPack is a protocol of methods",
    "__file__": "a module without a file, such as a built-in one, lacks it",
    "data": "an application's item, which may be a frame",
    "info": "the application's argument, which may be anything",
    "is_newer_due": "an application's source, which may be any async iterable",
    "loop": "a worker thread of anyio has it, other threads do not",
    "newest_in_place_of": "an application's source, which may be any async iterable",
    "native_token": "anyio's name for the loop, which only some of its versions have",
}
"""``attribute: reason`` for names that these packages may look for on an object."""


def looks(sources: dict[str, str]) -> list[tuple[str, str]]:
    """``(name, place)`` of every getattr and hasattr with a constant name."""
    found = []
    for path, text in sources.items():
        for node in nodes(parse(text)) if path.startswith(USERS) else ():
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" as called),
                    args=[_, ast.Constant(value=str(name)), *_],
                ):
                    found.append((name, f"{path}:{node.lineno}: {called} of {name!r}"))
    return found


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    return looks(read(PACKAGES, (".py",)))


def test_no_ability_is_looked_for(found):
    report([f"{place}: not in the contract" for name, place in found if name not in LOOKED_FOR])


def test_no_excuse_is_needless(found):
    report([f"{name} is excused without need" for name in LOOKED_FOR if name not in dict(found)])


@pytest.mark.parametrize(
    ("protocol", "defaults"),
    [(PreparedModel, PreparedModelDefaults), (Burst, BurstDefaults), (Buffer, BufferDefaults)],
)
def test_every_default_is_a_member_of_its_protocol_and_in_the_documentation(protocol, defaults):
    page = (ROOT / "docs/drivers/writing-a-driver.md").read_text()
    table = page.partition("## Without base classes")[2].partition("```")[0]
    members = {*vars(protocol), *vars(protocol).get("__annotations__", ())}
    for name in vars(defaults):
        if not name.startswith("_"):
            assert name in members, f"{protocol.__name__} has no {name}"
            assert f"`{name}" in table, f"docs/drivers/writing-a-driver.md does not list {name}"


def test_look_rule_catches():
    bad = {
        "aionn/runtime/plan.py": "def f(prepared):\n    return getattr(prepared, 'steal', None)",
        "aionn/service/session.py": "x = 1\nif hasattr(prepared, 'owner'): pass",
        "aionn/drivers/kit/a.py": "getattr(buffer, 'size_bytes')",
    }
    assert looks(bad) == [
        ("steal", "aionn/runtime/plan.py:2: getattr of 'steal'"),
        ("owner", "aionn/service/session.py:2: hasattr of 'owner'"),
        ("size_bytes", "aionn/drivers/kit/a.py:1: getattr of 'size_bytes'"),
    ]
    good = {
        "aionn/hal/device.py": "hasattr(made, 'steal')",
        "aionn/runtime/a.py": "getattr(module, name)\nprepared.steal\nself.getattr('a', 'b')",
    }
    assert looks(good) == []
