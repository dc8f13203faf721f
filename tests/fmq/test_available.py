"""Memory that cannot fit is refused before it gets a page. No test here allocates what it asks for."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmq import available as module
from fmq.available import (
    CHECKED_BYTES_MIN,
    MARGIN_BYTES,
    Available,
    MemoryShortage,
    available,
    check_available,
)
from fmq.region import check_memory, create_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:          102400 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"


@pytest.fixture(autouse=True)
def net() -> Iterator[None]:
    """Keeps the machine alive should a check be missing: no file of this process becomes larger than 1 GiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB of which 8 are available, without control groups."""
    put(tmp_path, {"proc/meminfo": MEMINFO})
    return tmp_path


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_machine_alone_leaves_what_it_has_available_less_the_margin(root: Path) -> None:
    assert available(root) == (8 * GIB - MARGIN_BYTES, 16 * GIB - MARGIN_BYTES)


def test_figures_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    assert available(tmp_path) == (sys.maxsize - MARGIN_BYTES, sys.maxsize - MARGIN_BYTES)
    put(tmp_path, {"proc/meminfo": "MemTotal:\nMemAvailable: many\n\n", "proc/self/cgroup": "x\n0:\n::\n"})
    assert available(tmp_path).now_bytes == sys.maxsize - MARGIN_BYTES


def test_every_group_from_the_processs_upwards_limits(root: Path) -> None:
    top = "sys/fs/cgroup"
    put(
        root,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{top}/outer/inner/memory.max": "max\n",
            f"{top}/outer/inner/memory.current": f"{GIB}\n",
            f"{top}/outer/memory.max": f"{4 * GIB}\n",
            f"{top}/outer/memory.current": f"{3 * GIB}\n",
        },
    )
    assert available(root) == (GIB - MARGIN_BYTES, 4 * GIB - MARGIN_BYTES)


def test_pages_of_files_do_not_count_as_used_by_a_group(root: Path) -> None:
    top = "sys/fs/cgroup"
    put(
        root,
        {
            "proc/self/cgroup": "0::/\n",
            f"{top}/memory.max": f"{4 * GIB}\n",
            f"{top}/memory.current": f"{4 * GIB}\n",
            f"{top}/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem {GIB}\n",
        },
    )
    assert available(root).now_bytes == 2 * GIB - MARGIN_BYTES


def test_groups_of_version_1_limit(root: Path) -> None:
    top = "sys/fs/cgroup/memory"
    put(
        root,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
            f"{top}/a/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{top}/a/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{top}/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
            f"{top}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{top}/memory.usage_in_bytes": f"{10 * GIB}\n",
        },
    )
    assert available(root) == (GIB - MARGIN_BYTES, 2 * GIB - MARGIN_BYTES)


def test_container_that_sees_its_machines_path_is_limited_by_its_mounts_root(root: Path) -> None:
    top = "sys/fs/cgroup"
    put(
        root,
        {
            "proc/self/cgroup": "0::/../../docker/0123\n",
            f"{top}/memory.max": f"{GIB}\n",
            f"{top}/memory.current": "0\n",
        },
    )
    assert available(root).now_bytes == GIB - MARGIN_BYTES


def test_group_above_its_limit_leaves_nothing(root: Path) -> None:
    put(
        root,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "4096\n",
            "sys/fs/cgroup/memory.current": "8192\n",
        },
    )
    assert available(root) == (0, 0)


def test_small_memories_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: pytest.fail("figures were read"))
    check_available(CHECKED_BYTES_MIN - 1)


@pytest.mark.parametrize(
    ("size_bytes", "transient"), [(3 * GIB, True), (4 * GIB, True), (4 * GIB + 1, False)]
)
def test_shortage_is_transient_where_the_memory_may_fit_later(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, transient: bool
) -> None:
    monkeypatch.setattr(module, "available", lambda: Available(2 * GIB, 4 * GIB))
    check_available(2 * GIB)
    with pytest.raises(MemoryShortage, match=f"only {2 * GIB} bytes") as told:
        check_available(size_bytes)
    assert told.value.transient is transient and told.value.errno == errno.ENOMEM


def test_this_machine_has_figures() -> None:
    now_bytes, ever_bytes = available()
    assert 0 <= now_bytes <= ever_bytes < 1 << 45


@pytest.mark.parametrize("size_bytes", [1 << 45, 1 << 62, 1 << 70])
def test_memory_that_cannot_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("a memory was made"))
    with pytest.raises(MemoryShortage, match="available"):
        create_memory("huge", size_bytes)


def test_sparse_memory_of_a_peer_is_refused_before_it_gets_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, GIB)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        monkeypatch.setattr(module, "available", lambda: Available(CHECKED_BYTES_MIN, GIB))
        with pytest.raises(MemoryShortage):
            check_memory(fd, GIB)
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)
