"""The README tells the truth: its example runs, its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fmq
from fmq.descriptor import plan_layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "fmq/README.md").read_text()
NATIVE = "".join((ROOT / "fmq" / name).read_text() for name in ("_native.c", "_slots.c"))


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[b'fast', b'message', b'queue']\n"


def test_every_call_named_exists() -> None:
    named = set(re.findall(r"`([a-z_.]+)`", section("Which calls there are")))
    assert len(named) > 25
    for name in named:
        bare = name.removeprefix("fmq.aio.")
        assert hasattr(fmq.MessageQueue, bare) or hasattr(fmq.aio, bare) or bare in ("bytes", "spin_ns"), name


def test_every_awaitable_is_named() -> None:
    named = set(re.findall(r"[A-Za-z_]+", section("Which calls there are")))
    assert set(fmq.aio.__all__) - named == {"wait_event_flag"}


def test_every_sync_point_is_in_the_table_and_in_the_code() -> None:
    rows = [line.split("|") for line in section("Ordering").splitlines() if re.match(r"\| [A-Z_]+ \|", line)]
    assert {row[1].strip() for row in rows} == set(
        re.search(r"Sync points \(drawn in README.md\): ([A-Z_, ]+)\.", NATIVE)[1].split(", ")  # type: ignore[index]
    )
    for _, name, release, acquire, orders, _ in rows:
        assert release.strip() and acquire.strip() and orders.strip(), (
            f"{name}: an ordering without a partner"
        )
    for name in ("DATA_READY", "SPACE_FREE", "CLAIM", "EVENT_BITS", "SLOTS"):
        assert f"{name} release" in NATIVE and f"{name} acquire" in NATIVE


def test_every_error_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)`", section("Errors"), re.M)
    assert sorted([*rows, "Error"]) == sorted(fmq.errors.__all__)


def test_the_drawing_shows_where_things_are() -> None:
    descriptor, _ = plan_layout(64, 16, fmq.Flavour.SYNCHRONIZED, event_flag=True, own_ring=False)
    drawn = re.findall(r"^ \| +(\d+) \|.*\| +(\d) ([A-Z_]+)", section("The memory"), re.M)
    assert {(int(index), name): int(offset) for offset, index, name in drawn} == {
        (int(part), part.name): descriptor.grantors[part].offset for part in fmq.Grantor
    }


def test_every_public_name_is_documented() -> None:
    for name in fmq.__all__:
        assert getattr(fmq, name).__doc__, name
    for name in dir(fmq.MessageQueue):
        if not name.startswith("_") and callable(getattr(fmq.MessageQueue, name)):
            assert getattr(fmq.MessageQueue, name).__doc__, name
