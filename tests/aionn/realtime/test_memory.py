"""Ranges are touched and locked as far as the limit goes, and the collector is afterwards what it was."""

from __future__ import annotations

import errno
import gc
import mmap

import numpy as np
import pytest

from aionn.realtime.collector import Collection, CollectorMode
from aionn.realtime.memory import PAGE, PageFaults, PageLocks, explain_refusal, whole_pages
from tests.aionn.realtime.children import run_child

SIZE = 64 * PAGE


def locked_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmLck:"))


def test_kept_range_is_locked_and_does_not_fault() -> None:
    locks = PageLocks()
    with mmap.mmap(-1, 4 * SIZE) as region:
        view = np.frombuffer(region, np.uint8)
        before = PageFaults.now(of_thread=True)
        view[: 2 * SIZE : PAGE] = 1
        assert (PageFaults.now(of_thread=True) - before).minor >= 100, (
            "each page faults when it is first used"
        )
        held = locked_bytes()
        row = locks.keep(view[2 * SIZE :], "pool")
        assert (row.is_touched, row.is_locked, row.bytes, row.reason) == (True, True, 2 * SIZE, "")
        assert locked_bytes() == held + 2 * SIZE
        before = PageFaults.now(of_thread=True)
        view[2 * SIZE :: PAGE] = 1
        faults = PageFaults.now(of_thread=True) - before
        assert faults.minor < 10 and faults.major == 0
        locks.close()
        assert locked_bytes() == held and locks.report() == []
        del view


def test_contents_stay_when_a_range_is_touched() -> None:
    locks = PageLocks()
    data = bytearray(range(256)) * 64
    copy = bytes(data)
    locks.keep(data, "mine")
    locks.keep(copy, "read-only")
    assert data == copy
    assert len(locks.report()) == 2
    locks.release(copy)
    assert [row.name for row in locks.report()] == ["mine"]
    locks.release(copy)
    locks.close()
    locks.close()


def test_neighbours_on_one_page_do_not_unlock_each_other() -> None:
    locks = PageLocks()
    with mmap.mmap(-1, 3 * PAGE) as region:
        view = memoryview(region)
        held = locked_bytes()
        first, second = view[: PAGE + 10], view[PAGE + 10 :]
        locks.keep(first, "first")
        locks.keep(second, "second")
        assert locked_bytes() == held + 3 * PAGE
        locks.release(first)
        assert locked_bytes() == held + 2 * PAGE
        locks.close()
        assert locked_bytes() == held
        first.release()
        second.release()
        view.release()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("limit", [0, PAGE, 16 * PAGE])
def test_range_beyond_the_limit_works_and_is_told(limit: int) -> None:
    code = f"""
from aionn.realtime.memory import PageLocks, PAGE
import mmap
limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, limits[1]))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
locks = PageLocks()
region = mmap.mmap(-1, 32 * PAGE)
row = locks.keep(region, "pool")
region[5 * PAGE] = 7
small = locks.keep(mmap.mmap(-1, PAGE), "small")
say(is_touched=row.is_touched, is_locked=row.is_locked, reason=row.reason, value=region[5 * PAGE], small=small.is_locked,
    everything=locks.keep_everything())
locks.close()
"""
    found = run_child(code)
    assert found["is_touched"] and not found["is_locked"] and found["value"] == 7
    assert (
        found["reason"] == f"RLIMIT_MEMLOCK is {limit} bytes, 0 are locked, {32 * PAGE} more were requested"
    )
    assert found["small"] is (limit >= PAGE)
    assert found["everything"] == f"RLIMIT_MEMLOCK is {limit} bytes, expected no limit or CAP_IPC_LOCK"


def test_everything_is_locked_where_it_is_permitted_and_let_go_again() -> None:
    code = """
from aionn.realtime.memory import PageLocks, _locked_bytes
locks = PageLocks()
reason = locks.keep_everything()
during = _locked_bytes()
again = locks.keep_everything()
locks.close()
say(reason=reason, during=during, again=again, after=_locked_bytes())
"""
    found = run_child(code)
    if found["reason"]:
        assert found["reason"].startswith("RLIMIT_MEMLOCK is ") and found["during"] == 0
    else:
        assert found["during"] > 1 << 20 and found["again"] == ""
    assert found["after"] == 0


def test_what_offers_no_memory_in_one_piece_is_refused() -> None:
    locks = PageLocks()
    with pytest.raises(TypeError):
        locks.keep(7, "number")
    with pytest.raises(TypeError, match="contiguous"):
        locks.keep(np.zeros((4, 4))[:, ::2], "gaps")
    row = locks.keep(b"", "empty")
    assert (row.is_locked, row.reason) == (False, "it is empty")
    assert locks.report() == []


def test_whole_pages_hold_the_range() -> None:
    assert whole_pages(0, 1, 4096) == (0, 4096)
    assert whole_pages(4095, 2, 4096) == (0, 8192)
    assert whole_pages(8192, 4096, 4096) == (8192, 4096)


def test_refusal_says_limit_or_errno() -> None:
    assert "RLIMIT_MEMLOCK is 8 bytes" in explain_refusal(errno.ENOMEM, 8, 0, 4096)
    assert explain_refusal(errno.ENOMEM, -1, 0, 4096) == "mlock failed with ENOMEM"
    assert "ENOSYS" in explain_refusal(errno.ENOSYS, 8, 0, 4096)


# --- The collector --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("mode", CollectorMode)
def test_collector_is_what_it_was_afterwards(mode: CollectorMode, was_enabled: bool) -> None:
    code = f"""
import gc
from aionn.realtime.collector import Collection, CollectorMode
gc.enable() if {was_enabled} else gc.disable()
assert gc.get_freeze_count() == 0
collection = Collection(CollectorMode("{mode}"))
collection.open()
collection.open()
during = [gc.isenabled(), gc.get_freeze_count() > 1000]
collection.close()
collection.close()
say(during=during, enabled=gc.isenabled(), frozen=gc.get_freeze_count())
"""
    found = run_child(code)
    is_enabled = was_enabled and mode is not CollectorMode.DISABLED
    assert found == {
        "during": [is_enabled, mode is not CollectorMode.ORDINARY],
        "enabled": was_enabled,
        "frozen": 0,
    }


def test_what_was_frozen_before_stays_frozen() -> None:
    # pytest's own process froze what it had collected.
    before = gc.get_freeze_count()
    assert before > 0 and gc.isenabled()
    strict, other = Collection(CollectorMode.DISABLED), Collection(CollectorMode.FROZEN)
    strict.open()
    other.open()
    try:
        assert not gc.isenabled()
        assert strict.collect() >= 0
    finally:
        strict.close()
        assert gc.isenabled(), "the one that is left does not disable"
        other.close()
    assert gc.isenabled() and gc.get_freeze_count() >= before
