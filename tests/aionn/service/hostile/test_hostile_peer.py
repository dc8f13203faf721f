"""Whatever a hostile peer does to a served device, a client that behaves well is answered rightly, and nothing of the peer stays.

The attacks are in hostile_attacks.h and hostile_objects.h; how long answers take beside each is what ``python -m
benchmarks.hostile`` measures.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_stage as stage
import pytest

from tests.support.server_scope import server_scope

pytestmark = pytest.mark.forked("any")

HERE = Path(__file__).parent
ATTACK_S = 0.1
ATTACK_LONG_S = 20.0
SAMPLE = 10
"""Of the attacks of a family the ordinary run takes the first, and every so many-th after it."""

REJECTED = re.compile(": (DeviceUnavailable|DeadObject): ")
"""What a client may get from a server that drains, or has ended."""

END_S_MAX = 25.0
"""How long the server may take to end when it is asked to: far less than it may drain."""

SETTLE_S_MAX = 25.0
"""How long what a hostile peer leaves may take to go: garbage is collected every ten seconds, and the machine may be busy."""

THREADS_MORE = 16
"""Idle threads that the server keeps for the next work in threads: those of anyio's limiters and of a device's slots."""

RSS_MORE_KIB = 128 << 10
"""Memory that the allocator keeps after an attack."""

PEAK_KIB = 2 << 20
"""Most memory at once: of a client's constants, a gigabyte may be there, and as much again while it is read."""

FAMILIES = {
    "floods that are read": "flood_pings flood_hello flood_execute flood_execute_fresh_memory flood_replies flood_failed_replies "
    "flood_driver_calls flood_each_kind same_number cancelled_at_once",
    "floods that are not read": "flood_pings_unread flood_hello_unread flood_execute_unread flood_launch_unread "
    "flood_fenced_ready_unread flood_each_kind_unread nothing_is_read",
    "models and memories": "flood_prepare flood_allocate flood_large_models flood_large_models_kept flood_wide_models "
    "flood_sparse_models flood_cached",
    "bytes that are no messages": "flood_garbage flood_bit_flips flood_truncated flood_missing_descriptors flood_oversized",
    "connections": "many_connections_ping many_connections_execute many_connections_ask_first many_connections_say_nothing "
    "many_connections_stay storm_of_connections storm_of_sessions half_messages_with_descriptors",
    "ends in the middle": "exiting_in_the_middle killed_in_the_middle stopped_in_the_middle",
    "questions": "unanswered_questions answered_questions",
    "lies": "wrong_descriptors wrong_sizes handles_of_others",
    "bursts": "flood_bursts flood_polling_bursts rewriting_queue_headers rewriting_queues rewriting_packets "
    "rewriting_polled_queues endless_packets",
    "rewritings": "rewriting_requests rewriting_large_messages rewriting_cache_files rewriting_cached_models",
    "many bursts": "many_bursts_expired many_bursts_odd many_bursts_nested many_bursts_wide many_bursts_unread",
    "cache files": "cache_forged_heads cache_huge_lengths cache_sparse cache_changing cache_saved_sparse",
    "many objects at once": "deadlines_far_ahead memories_of_unknown_shape descriptors_held prepare_beside_flood "
    "many_connections_prepare many_connections_in_turn",
    "fences": "fences_never_signalled fences_with_garbage fences_in_a_chain",
}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program, and the messages that it replays."""
    folder = tmp_path_factory.mktemp("hostile")
    try:
        program = stage.compile_peer(folder)
    except stage.NoCompiler as e:
        pytest.skip(str(e))
    messages = folder / "messages"
    script = str(HERE / "hostile_messages.py")
    subprocess.run([sys.executable, script, str(messages)], check=True, timeout=60, env=stage.environment())
    return program, messages


class Scene:
    """A server, and a client of it that behaves well."""

    def __init__(self, server: Any, client: Any, program: Path, messages: Path) -> None:
        self.server = server
        self._client = client
        self._peer = program, messages

    def wrong_beside(self, attack: str, seconds: float, seed: int) -> list[str]:
        """What is wrong beside an attack or after it."""
        server, client = self.server, self._client
        client.ask("8")
        wrong: list[str] = client.answer()["wrong"]
        before = server.footprint
        server.forget_peak()
        with stage.attacking(*self._peer, server, attack, seconds, seed, nice=19) as process:
            client.ask(f"{seconds}s")
            beside = client.answer()
        did = stage.report_of(process)
        client.ask("8")
        wrong += beside["wrong"] + client.answer()["wrong"]
        if server.process.poll() is not None:
            return [*wrong, f"the server ended with {server.process.returncode}: {server.log()[-2000:]}"]
        if not beside["latencies_ns"]:
            wrong.append("no execution beside it")
        if not did["connected"]:
            wrong.append("it never reached the server")
        after = server.settled(before, SETTLE_S_MAX, THREADS_MORE, RSS_MORE_KIB)
        if after.exceeds(before, THREADS_MORE, RSS_MORE_KIB):
            wrong.append(f"left {after} after {before}: {server.open_files()}")
        if server.peak_rss_kib() > PEAK_KIB:
            wrong.append(f"took {server.peak_rss_kib()} KiB")
        return wrong


@pytest.fixture(scope=server_scope)
def scene(peer: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One server for all attacks: what one leaves, the next ones would meet. With ``--long`` one for each test."""
    server = stage.Server(tmp_path_factory.mktemp("scene"))
    took_s = 0.0
    try:
        with contextlib.closing(stage.WellBehaved(server.path)) as client:
            yield Scene(server, client, *peer)
    finally:
        took_s = server.terminate()
    assert server.process.returncode == 0 and took_s < END_S_MAX, (took_s, server.log()[-2000:])
    assert "Traceback" not in server.log(), server.log()[-4000:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [SAMPLE, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_client_is_served_beside_an_attack_and_nothing_of_it_stays(
    scene: Scene, family: str, step: int
) -> None:
    found = {
        attack: scene.wrong_beside(attack, ATTACK_S, seed)
        for seed, attack in enumerate(FAMILIES[family].split()[::step])
    }
    assert not any(found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("attack", [attack for names in FAMILIES.values() for attack in names.split()])
def test_client_is_served_beside_a_long_attack(scene: Scene, attack: str) -> None:
    assert scene.wrong_beside(attack, ATTACK_LONG_S, 1) == []


@pytest.mark.parametrize(
    "attack",
    [
        "nothing_is_read",
        pytest.param("rewriting_queues", marks=pytest.mark.long),
        pytest.param("many_connections_stay", marks=pytest.mark.long),
    ],
)
def test_server_ends_in_the_middle_of_an_attack(peer: tuple[Path, Path], tmp_path: Path, attack: str) -> None:
    server = stage.Server(tmp_path)
    with contextlib.closing(stage.WellBehaved(server.path)) as client:
        client.ask("16")
        with stage.attacking(*peer, server, attack, 3 * ATTACK_S, 1, nice=19) as process:
            assert client.answer()["wrong"] == []
            took_s = server.terminate()
        stage.report_of(process)
    assert server.process.returncode == 0 and took_s < END_S_MAX, (took_s, server.log()[-2000:])
    assert "Traceback" not in server.log(), server.log()[-4000:]


@pytest.mark.parametrize(
    "attack",
    [
        "many_bursts_expired",
        *(
            pytest.param(attack, marks=pytest.mark.long)
            for attack in ("many_bursts_wide", "many_bursts_unread", "flood_bursts", "prepare_beside_flood")
        ),
    ],
)
def test_client_gets_results_or_the_reason_while_the_server_drains_beside_an_attack(
    peer: tuple[Path, Path], tmp_path: Path, attack: str
) -> None:
    server = stage.Server(tmp_path)
    with contextlib.closing(stage.WellBehaved(server.path)) as client:
        with stage.attacking(*peer, server, attack, 3 * ATTACK_S, 1, nice=19) as process:
            client.ask("16")
            assert client.answer()["wrong"] == []
            client.ask(f"{3 * ATTACK_S}s")
            time.sleep(ATTACK_S)
            took_s = server.terminate()
        stage.report_of(process)
        found = client.answer()
    rejected = [wrong for wrong in found["wrong"] if REJECTED.search(wrong) is None]
    assert rejected == [] and (found["latencies_ns"] or found["wrong"])
    assert server.process.returncode == 0 and took_s < END_S_MAX, (took_s, server.log()[-2000:])
    assert "Traceback" not in server.log(), server.log()[-4000:]


@pytest.mark.thorough
def test_every_attack_is_tried(peer: tuple[Path, Path]) -> None:
    listed = subprocess.run([str(peer[0]), "list"], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(
        ["spin", "own_files", *(a for names in FAMILIES.values() for a in names.split())]
    )
