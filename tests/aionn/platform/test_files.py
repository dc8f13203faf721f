"""Files that users name: only regular ones are read, and no more than they hold."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.platform.files import MissingFile, check_regular, open_regular, read_regular
from fmq.available import Available

pytestmark = pytest.mark.usefixtures("ends_at_once")


def test_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    (tmp_path / "link").symlink_to(path)
    for name in (path, str(path), tmp_path / "link"):
        assert read_regular(name, "model", 5) == b"bytes"
    with open_regular(path, "model") as file:
        assert not os.get_inheritable(file.fileno())


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(tmp_path / "socket"))
        for name, kind in (
            (tmp_path / "fifo", "a pipe"),
            ("/dev/zero", "a device"),
            ("/dev/null", "a device"),
            (tmp_path, "a directory"),
        ):
            with pytest.raises(InvalidArgument, match=f"^model {name}: expected a regular file, got {kind}$"):
                read_regular(name, "model", 1 << 20)
        with pytest.raises(InvalidArgument, match=r"^model .*/socket: cannot be read: No such device"):
            check_regular(tmp_path / "socket", "model")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "model: the path is empty"),
        ("\0x", r"model '\\x00x': a path has no NUL characters"),
        ("a\ud800", "cannot be read"),
        ("https://a/m.onnx", "an address is not read, download the file first"),
        ("/no/such", "model /no/such: cannot be read: No such file or directory"),
    ],
)
def test_path_that_is_none_is_told(path: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        check_regular(path, "model")


def test_no_descriptor_left_is_a_shortage_and_no_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of the numbers of descriptors: those that are open stay.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(ResourceExhausted, match=f"^model {path}: ") as raised:
            read_regular(path, "model", 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.transient


def test_missing_file_is_python_s_error_as_well() -> None:
    with pytest.raises(MissingFile) as told:
        check_regular("/no/such", "model")
    assert isinstance(told.value, FileNotFoundError) and isinstance(told.value, InvalidArgument)


def test_larger_file_than_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(InvalidArgument, match=rf"expected at most {1 << 31} bytes, got {1 << 40}"):
        read_regular(path, "model", 1 << 31)


def test_file_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 30)
    monkeypatch.setattr("fmq.available.available", lambda: Available(0, 1 << 29))
    with pytest.raises(ResourceExhausted, match="cannot hold") as told:
        read_regular(path, "model", 1 << 31)
    assert not told.value.transient
