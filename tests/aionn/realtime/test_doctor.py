"""``aionn doctor`` on this machine: what it says is true where a test may change the setting; in real child processes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aionn.cli.commands.doctor import print_findings
from aionn.realtime.findings import Finding, Severity
from aionn.realtime.reading import TEXT_BYTES_MAX, read_text
from aionn.realtime.threads.slices import read_attributes
from tests.aionn.realtime.children import GET_ATTRIBUTES, as_root, finished_child, without_sys_nice

pytestmark = pytest.mark.forked("any")

DOCTOR = """
from aionn.cli.main import main
sys.argv = ["aionn", "doctor", *sys.argv[1:]]
main(sys.argv[1:])
"""


def doctor(*arguments: str, first: str = "", before: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a child."""
    ended = finished_child(first + DOCTOR, before=before, arguments=[*arguments, "--json"])
    assert ended.stdout.count("\n") == 1, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in report["findings"] if each["name"] == name)
    return found


def test_report_says_what_is_known_of_this_machine() -> None:
    code, report = doctor("--deadline", "100000")
    assert code == 0 and report["expected"] and report["measured"] is None
    assert len(report["findings"]) == 16
    assert f"this process may use {len(os.sched_getaffinity(0))}" in finding(report, "processors")["sentence"]
    swap = Path("/proc/swaps").read_text().count("\n") > 1
    assert (finding(report, "swap")["severity"] == "fine") is not swap


def test_every_check_has_a_line_for_people() -> None:
    ended = finished_child(DOCTOR, arguments=["--deadline", "100000"])
    lines = ended.stdout.splitlines()
    findings = [line for line in lines if line.startswith(("fine", "note", "warning", "severe"))]
    remedies = [line for line in lines if line.lstrip().startswith("remedy: ")]
    assert len(findings) == 16 and len(lines) == 16 + len(remedies) + 1
    assert lines[-1].startswith("verdict: this machine can keep deadlines of 100000 ms")


def test_findings_are_wrapped_on_a_terminal_and_remedies_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = "sysctl kernel.sched_rt_runtime_us=950000 " * 4
    found = [Finding("preemption", Severity.NOTE, "a long sentence " * 12, remedy.strip(), 4.0)]
    monkeypatch.setenv("COLUMNS", "80")
    for is_terminal, count in ((True, 5), (False, 2)):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        print_findings(found)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].strip() == f"remedy: {remedy.strip()}" and len(lines) == count
        assert "(may delay a frame by 4 ms)" in " ".join(" ".join(lines).split())
        assert not is_terminal or max(map(len, lines[:-1])) <= 80


@as_root
@pytest.mark.thorough
def test_process_without_permission_cannot_expect_short_deadlines() -> None:
    code, report = doctor("--deadline", "10", before=without_sys_nice())
    assert code == 1 and not report["expected"]
    assert finding(report, "permission")["severity"] == "severe"
    assert "permission (80 ms)" in report["verdict"]
    assert report["permission"]["remedy"] == finding(report, "permission")["remedy"]


@pytest.mark.skipif(
    not GET_ATTRIBUTES, reason="the number of sched_getattr is known for x86_64 and aarch64 only"
)
@as_root
@pytest.mark.thorough
def test_refused_slices_are_found() -> None:
    first = f"refuse({GET_ATTRIBUTES}, {errno.EPERM})\n"
    _, report = doctor("--deadline", "100000", first=first, before=without_sys_nice())
    found = finding(report, "slices")
    assert found["severity"] == "note" and found["sentence"].endswith("sched_getattr failed with EPERM")


@as_root
@pytest.mark.thorough
def test_slices_are_those_of_this_kernel() -> None:
    _, report = doctor("--deadline", "100000", before=without_sys_nice())
    assert (finding(report, "slices")["severity"] == "fine") == (read_attributes(0).slice_ns > 0)


@as_root
@pytest.mark.thorough
def test_single_processor_and_small_limit_are_found() -> None:
    first = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
"""
    _, report = doctor(first=first, before=without_sys_nice("ipc_lock"))
    assert finding(report, "processors")["severity"] == "warning"
    assert "at most 1 MiB" in finding(report, "locked memory")["sentence"]


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A group of the cpu controller that may use one and a half processors; of cgroup v2 or v1."""
    for parent, file, limit in (
        ("/sys/fs/cgroup", "cpu.max", "150000 100000"),
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "150000"),
    ):
        folder = Path(parent) / f"aionn-test-doctor-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / file).exists():
                (folder / file).write_text(limit)
                yield folder
                return
        finally:
            folder.rmdir()
    pytest.skip("no group with a limit can be made here")


@as_root
def test_limit_of_the_group_is_found(limited_group: Path) -> None:
    first = f"open('{limited_group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
    _, report = doctor(first=first)
    found = finding(report, "cpu group")
    assert found["severity"] in ("warning", "severe")
    assert f"{limited_group} may use 1.5 processors, 150 ms in 100 ms" in found["sentence"]


def test_measuring_counts_timers_wakes_and_gaps() -> None:
    code, report = doctor("--measure", "0.2", "--deadline", "100000")
    measured = report["measured"]
    assert code == 0
    assert (
        measured["timers"]["count"] > 0
        and measured["timers"]["max_us"] >= measured["timers"]["median_us"] > 0
    )
    if len(os.sched_getaffinity(0)) > 1:
        assert measured["wakes"]["count"] > 0
    else:
        assert measured["wakes"] is None
    assert 0 <= measured["gaps"]["share"] <= 1


@pytest.mark.forked("none")
def test_measuring_leaves_the_process_as_it_was() -> None:
    code = """
import gc
from aionn.realtime.measuring import measure
from aionn.realtime.permission import ask
def state():
    return [sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), gc.isenabled(), gc.get_freeze_count(),
            threading.active_count(), len(os.listdir("/proc/self/fd"))]
permission = ask()
before = state()
measure(0.02, permission)
say(is_same=state() == before)
"""
    ended = finished_child(code)
    assert json.loads(ended.stdout) == {"is_same": True}, ended.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "arguments", [["--deadline", "0"], ["--deadline", "nan"], ["--measure", "-1"], ["--measure", "1e9"]]
)
def test_wrong_numbers_are_refused_in_a_sentence(arguments: list[str]) -> None:
    ended = finished_child(DOCTOR, arguments=arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"aionn: {arguments[0]}: expected") and ended.stderr.count("\n") == 1


def test_reading_is_bounded_and_never_fails(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"\xff" + b"x" * (2 * TEXT_BYTES_MAX))
    assert len(read_text(str(large))) == TEXT_BYTES_MAX
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe", "\0"):
        assert read_text(str(path)) == ""
