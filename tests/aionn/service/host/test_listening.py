"""The socket of a served device appears when clients can connect, and of several processes one serves."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from aionn.errors import DeviceUnavailable
from aionn.service.client.connection import ServedSocket
from aionn.service.host import listening
from aionn.service.host.listening import listen_at, remove_socket

pytestmark = pytest.mark.forked("any")

LIMIT_S = 30


def _stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


async def test_path_appears_when_clients_can_connect(tmp_path: Path) -> None:
    """Looked at after every line that makes the socket."""
    path, seen = tmp_path / "s.sock", []

    def look(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename == listening.__file__ and path.exists():
            seen.append((_connects(path), stat.S_IMODE(path.stat().st_mode)))
        return look

    sys.settrace(look)
    try:
        listener, _ = await listen_at(str(path), 0o640)
    finally:
        sys.settrace(None)
    listener.close()
    assert set(seen) == {(True, 0o640)}


async def test_of_several_that_start_at_once_over_a_stale_socket_one_serves(tmp_path: Path) -> None:
    def start(path: Path, ends: list[Any]) -> None:
        try:
            ends.append(anyio.run(listen_at, str(path), 0o600))
        except DeviceUnavailable as e:
            ends.append(str(e))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(10):
            path = tmp_path / f"{number}.sock"
            _stale(path)
            ends: list[Any] = []
            threads = [threading.Thread(target=start, args=(path, ends), daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            [(listener, identity)] = [end for end in ends if not isinstance(end, str)]
            assert _connects(path)
            remove_socket(listener, str(path), identity)
            listener.close()
            assert ends.count(f"socket {path}: a process serves there already") == 3, ends
    finally:
        sys.setswitchinterval(before)
    assert list(tmp_path.iterdir()) == []


async def test_what_a_process_left_that_was_killed_while_it_made_the_socket_is_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.sock"
    _stale(tmp_path / "s.sock~")
    listener, identity = await listen_at(str(path), 0o640)
    with listener:
        assert _connects(path) and stat.S_IMODE(path.stat().st_mode) == 0o640
        assert list(tmp_path.iterdir()) == [path]
        remove_socket(listener, str(path), identity + 1)
    assert path.exists(), "it is the socket of another process"


async def test_socket_of_the_next_server_is_not_removed_although_its_file_has_the_same_number(
    tmp_path: Path,
) -> None:
    """ext4 gives the number of a file to the next one as soon as the file is gone and its socket closed."""
    path = tmp_path / "s.sock"
    listener, identity = await listen_at(str(path), 0o600)
    remove_socket(listener, str(path), identity)
    assert not path.exists()
    listener.close()
    following, number = await listen_at(str(path), 0o600)
    with following:
        remove_socket(listener, str(path), number)
        assert _connects(path)
        remove_socket(following, str(path), number)
        assert not path.exists()


async def test_path_that_is_too_long_names_its_length_and_the_limit_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 108)
    length = len(os.fsencode(path))
    for attempt in (listen_at(str(path), 0o600), ServedSocket.connect(str(path))):
        with pytest.raises(
            DeviceUnavailable, match=f"path has {length} bytes, and the path of a socket at most 107"
        ):
            await attempt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "warns"), [(0o777, True), (0o1777, False), (0o770, False)])
async def test_folder_in_which_every_user_can_replace_the_socket_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    tmp_path.chmod(mode)
    listener, _ = await listen_at(str(tmp_path / "s.sock"), 0o600)
    listener.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert ("every user may write to its folder" in caplog.text) == warns


@pytest.mark.parametrize("ending", ["s", "~", "\u00e9"])
async def test_path_may_be_as_long_as_the_kernel_allows(tmp_path: Path, ending: str) -> None:
    room = 107 - len(os.fsencode(tmp_path / ending))
    assert room > 0, "the directory of the tests has too long a name"
    path = tmp_path / ("x" * room + ending)
    listener, identity = await listen_at(str(path), 0o600)
    with listener:
        assert _connects(path) and list(tmp_path.iterdir()) == [path]
        remove_socket(listener, str(path), identity)
    with pytest.raises(DeviceUnavailable, match="at most 107"):
        await listen_at(f"{path}x", 0o600)
    assert list(tmp_path.iterdir()) == []


async def test_path_that_stays_locked_ends_the_attempt_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_LOCK_S_MAX", 0.02)
    with (tmp_path / "s.sock~.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeviceUnavailable, match=r"s\.sock: .* kept .*s\.sock~\.lock locked"):
            await listen_at(str(tmp_path / "s.sock"), 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["s.sock~.lock"], "it belongs to the other process"
    listener, _ = await listen_at(str(tmp_path / "s.sock"), 0o600)
    listener.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s.sock"], "that process is gone"


async def test_users_who_may_only_list_the_directory_cannot_prevent_a_start(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        listener, _ = await listen_at(str(tmp_path / "s.sock"), 0o600)
        with listener:
            assert _connects(tmp_path / "s.sock")
    finally:
        os.close(directory)


async def test_socket_that_is_removed_while_it_is_looked_at_delays_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that served there removes it as it ends."""
    path, lstat = tmp_path / "s.sock", os.lstat

    def looked_at(of: Any) -> os.stat_result:
        seen = lstat(of)
        if str(of) == str(path):
            path.unlink()
            monkeypatch.setattr(os, "lstat", lstat)
        return seen

    _stale(path)
    monkeypatch.setattr(os, "lstat", looked_at)
    listener, _ = await listen_at(str(path), 0o600)
    with listener:
        assert _connects(path)


async def test_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(DeviceUnavailable, match="No space left"):
        await listen_at(str(tmp_path / "s.sock"), 0o600)
    assert list(tmp_path.iterdir()) == []


async def test_file_of_a_user_in_the_place_of_the_lock_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "device"
    file = Path(listening._beside(str(path)) + ".lock")
    file.write_text("notes")
    with pytest.raises(
        DeviceUnavailable, match=r"is not a lock, and would be removed: expected an empty file, got 5 bytes"
    ):
        await listen_at(str(path), mode=0o600)
    assert file.read_text() == "notes" and list(tmp_path.iterdir()) == [file]
