"""Recordings: what goes in comes out again, and a disk that is full, slow or gone costs the stream nothing."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import anyio
import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import AudioWindow, Frame, record, replay, synthetic_audio, synthetic_video
from aionn.media.recording.items import ItemReader
from aionn.media.recording.recorder import QUEUE_ITEMS_MAX, RecordingFile


def frame(index, side=4, **marks):
    data = np.full((side, side, 3), index % 256, np.uint8)
    return Frame(data, 10**9 + index * 10**7, index, index / 100, **marks)


def items_of(path):
    with open(path, "rb") as file:
        reader = ItemReader(file, "test")
        return list(iter(reader.read, None)), reader.is_cut


def assert_equal(one, two):
    for name in one.__struct_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)


@pytest.mark.parametrize(
    "items",
    [
        [frame(0), frame(3, lost_before=2, clock="driver", uncertainty_ns=77), frame(9, follows_gap=True)],
        [Frame(np.arange(60, dtype=np.uint8).reshape(5, 4, 3)[::-2, :, ::-1], 5, 0, 0.0)],
        [AudioWindow(np.linspace(-1, 1, 160, dtype=np.float32), 10**9, 4, 0.25, clock="arrival")],
        [AudioWindow(np.linspace(-1, 1, 160, dtype=np.float32)[::3], 2**63 - 1, 0, 0.0)],
    ],
    ids=["frames", "view", "windows", "limits"],
)
def test_what_went_in_is_in_the_file(really, tmp_path, items):
    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            for item in items:
                recorder.add(item)
        return recorder.statistics()

    account = really(body)
    assert (account.added, account.written, account.left_out, account.queued, account.problem) == (
        *[len(items)] * 2, 0, 0, "",
    )  # fmt: skip
    assert account.bytes == (tmp_path / "a.rec").stat().st_size
    found, is_cut = items_of(tmp_path / "a.rec")
    assert not is_cut
    for one, two in zip(items, found, strict=True):
        assert_equal(one, two)
    assert (tmp_path / "a.rec").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_items_pass_through_as_they_are(really, tmp_path, kind):
    async def body():
        source = (
            synthetic_video(size=(16, 12), frames=20, pace=False)
            if kind == "video"
            else synthetic_audio(duration_s=1.5, pace=False)
        )
        async with source, record(tmp_path / "a.rec") as recorder:
            return [item async for item in recorder.through(source)]

    went_in = really(body)
    found, _ = items_of(tmp_path / "a.rec")
    assert len(found) >= 5
    for one, two in zip(went_in, found, strict=True):
        assert_equal(one, two)


def test_full_disk_ends_the_recording_and_the_stream_continues(really, tmp_path, caplog):
    """A limit of the process for the length of files is a real disk that takes no more."""
    path = tmp_path / "a.rec"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def body():
        async with record(path) as recorder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            try:
                for index in range(20):
                    recorder.add(frame(index, 300))
                    while recorder.statistics().queued:
                        await anyio.sleep(0.001)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            recorder.add(frame(20, 300))
            return recorder.statistics()

    with caplog.at_level(logging.WARNING, "aionn.media"):
        account = really(body)
    # 270 kB each: three are whole within a MiB.
    assert (account.added, account.written, account.left_out) == (21, 3, 18)
    assert account.problem == "File too large"
    assert [record.getMessage() for record in caplog.records] == [
        f"recording {str(path)!r}: ended after 3 items: File too large; the stream continues"
    ]
    found, is_cut = items_of(path)
    assert [item.index for item in found] == [0, 1, 2] and not is_cut
    assert path.stat().st_size == account.bytes


def test_device_without_space_is_an_error_of_every_item(tmp_path):
    file = RecordingFile(os.open("/dev/full", os.O_WRONLY), str(tmp_path / "absent"))
    with pytest.raises(OSError, match="No space left on device"):
        file.append(frame(0))
    with pytest.raises(OSError, match="an earlier item"):
        file.append(frame(1))
    assert (file.written, file.bytes) == (0, 0)
    file.close()


@pytest.mark.parametrize("large", [False, True], ids=["many", "large"])
def test_slow_disk_leaves_items_out_and_never_makes_the_stream_wait(
    really, tmp_path, monkeypatch, caplog, large
):
    goes_on = threading.Event()
    append = RecordingFile.append

    def slow(self, item):
        assert goes_on.wait(20)
        append(self, item)

    monkeypatch.setattr(RecordingFile, "append", slow)
    monkeypatch.setattr("aionn.media.recording.recorder.QUEUE_BYTES_MAX", 10_000 if large else 1 << 26)

    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            for index in range(1000):
                recorder.add(frame(index, 30))
            account = recorder.statistics()
            assert account.queued == (3 if large else QUEUE_ITEMS_MAX)
            assert account.added == account.written + account.left_out + account.queued == 1000
            goes_on.set()
        return recorder.statistics()

    with caplog.at_level(logging.WARNING, "aionn.media"):
        account = really(body)
    assert account.queued == 0 and account.written == (3 if large else QUEUE_ITEMS_MAX)
    assert len(caplog.records) == 1 and "slower than the stream" in caplog.text


def test_item_larger_than_the_bound_is_recorded_alone(really, tmp_path, monkeypatch):
    monkeypatch.setattr("aionn.media.recording.recorder.QUEUE_BYTES_MAX", 100)

    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            recorder.add(frame(0, 30))
        return recorder.statistics()

    assert really(body).written == 1


def test_disk_that_does_not_answer_does_not_keep_the_recorder_open(really, tmp_path, monkeypatch):
    monkeypatch.setattr("aionn.media.recording.recorder.CLOSE_S_MAX", 0.05)
    goes_on = threading.Event()
    append = RecordingFile.append

    def stuck(self, item):
        goes_on.wait(20)
        append(self, item)

    monkeypatch.setattr(RecordingFile, "append", stuck)

    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            recorder.add(frame(0))
        assert recorder.statistics().queued == 1
        goes_on.set()
        while (tmp_path / "a.rec").stat().st_size == 0:
            await anyio.sleep(0.001)

    really(body)


@pytest.mark.parametrize("turns", range(6))
def test_cancelled_twice_while_it_opens_leaves_no_file_and_no_thread(really, tmp_path, turns):
    async def body():
        async def use():
            async with record(tmp_path / "a.rec"):
                await anyio.sleep(20)

        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    really(body)
    assert os.listdir(tmp_path) == []


def test_cancelled_twice_while_it_closes_writes_what_was_added(really, tmp_path):
    async def body():
        are_added = asyncio.Event()

        async def use():
            async with record(tmp_path / "a.rec") as recorder:
                for index in range(50):
                    recorder.add(frame(index, 100))
                are_added.set()
                await anyio.sleep(20)

        task = asyncio.create_task(use())
        await are_added.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    really(body)
    assert len(items_of(tmp_path / "a.rec")[0]) == 50


def test_cancelled_wait_through_a_recorder_loses_nothing(really, tmp_path):
    class Slow:
        def __init__(self):
            self.items = asyncio.Queue()

        def __aiter__(self):
            return self

        async def __anext__(self):
            return await self.items.get()

    async def body():
        source = Slow()
        async with record(tmp_path / "a.rec") as recorder:
            items = recorder.through(source)
            for index in range(5):
                waiting = asyncio.ensure_future(anext(items))
                await asyncio.sleep(0)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                source.items.put_nowait(frame(index))
                assert (await anext(items)).index == index

    really(body)
    assert len(items_of(tmp_path / "a.rec")[0]) == 5


def test_recording_without_items_leaves_no_file(really, tmp_path):
    async def body():
        async with record(tmp_path / "a.rec"):
            assert (tmp_path / "a.rec").exists()

    really(body)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_recording_without_items_removes_no_file_but_its_own(really, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.rec").write_bytes(b"precious")

    async def body():
        async with record("a.rec"):
            os.rename("a.rec", "moved.rec")
            async with record("a.rec") as second:
                second.add(frame(0))
        async with record("b.rec"):
            os.chdir("other")
        async with record(tmp_path / "c.rec"):
            os.unlink(tmp_path / "c.rec")

    really(body)
    assert len(items_of(tmp_path / "a.rec")[0]) == 1
    assert (tmp_path / "other" / "a.rec").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.rec", "moved.rec", "other"]


def test_recording_of_a_process_that_is_killed_is_replayed_up_to_its_last_whole_item(repository, tmp_path):
    program = """
import asyncio, sys
import numpy as np
from aionn.media import Frame, record
async def main():
    async with record(sys.argv[1]) as recorder:
        for index in range(10**6):
            recorder.add(Frame(np.full((200, 200, 3), index % 256, np.uint8), index, index, 0.0))
            if index == 20:
                print("running", flush=True)
            await asyncio.sleep(0.0005)
asyncio.run(main())
"""
    path = tmp_path / "a.rec"
    process = subprocess.Popen([sys.executable, "-c", program, path], cwd=repository, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"running\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        process.stdout.close()
    found, _ = items_of(path)
    assert [item.index for item in found] == list(range(len(found))) and len(found) >= 1
    assert all((item.data == item.index % 256).all() for item in found)


def test_impossible_use_is_rejected(really, tmp_path):
    (tmp_path / "old").write_bytes(b"precious")

    async def body():
        for path, words in (
            (tmp_path / "old", "expected a new file"),
            (tmp_path / "no" / "a.rec", "cannot be created: its folder does not exist$"),
            (tmp_path, "expected a new file"),
            ("a\0b", "null"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                async with record(path):
                    pass
        recorder = record(tmp_path / "a.rec")
        with pytest.raises(InvalidArgument, match="inside its `async with`"):
            recorder.add(frame(0))
        async with recorder:
            for item, words in (
                (b"frame", "got bytes"),
                (Frame(np.zeros((2, 2, 4), np.uint8), 0, 0, 0.0), r"got uint8 \[2, 2, 4\]"),
                (Frame(np.zeros((2, 2, 3), np.float32), 0, 0, 0.0), "got float32"),
                (Frame(np.zeros((0, 2, 3), np.uint8), 0, 0, 0.0), r"got uint8 \[0, 2, 3\]"),
                (AudioWindow(np.zeros(3), 0, 0, 0.0), "got float64"),
                (AudioWindow([0.5], 0, 0, 0.0), "got a list"),
                (Frame([[[0, 0, 0]]], 0, 0, 0.0), "got a list"),
            ):
                with pytest.raises(InvalidArgument, match=words):
                    recorder.add(item)
            assert recorder.statistics().added == 0
        with pytest.raises(InvalidArgument, match="can be entered once"):
            async with recorder:
                pass

    really(body)
    assert (tmp_path / "old").read_bytes() == b"precious"


def test_items_of_another_kind_end_the_recording(really, tmp_path, caplog):
    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            recorder.add(frame(0))
            recorder.add(AudioWindow(np.zeros(3, np.float32), 0, 0, 0.0))
        return recorder.statistics()

    account = really(body)
    assert (account.written, account.left_out) == (1, 1)
    assert "expected frames, as before, got windows" in account.problem
    assert len(items_of(tmp_path / "a.rec")[0]) == 1


@pytest.mark.parametrize(
    "marks",
    [
        {"captured_at_ns": -1},
        {"captured_at_ns": 2**63},
        {"captured_at_ns": 2**64},
        {"captured_at_ns": None},
        {"captured_at_ns": np.int64(1)},
        {"index": -1},
        {"time_s": float("nan")},
        {"clock": "c" * 33},
        {"clock": "\udcff"},
        {"lost_before": -1},
        {"follows_gap": 1},
    ],
    ids=str,
)
def test_item_that_no_reader_accepts_ends_the_recording_before_it(really, tmp_path, caplog, marks):
    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            recorder.add(frame(0))
            recorder.add(msgspec.structs.replace(frame(1), **marks))
        return recorder.statistics()

    account = really(body)
    assert (account.written, account.left_out) == (1, 1)
    assert "expected an item that can be replayed" in account.problem
    found, is_cut = items_of(tmp_path / "a.rec")
    assert [item.index for item in found] == [0] and not is_cut


def test_recording_can_be_replayed_while_it_is_written(really, tmp_path):
    async def body():
        async with record(tmp_path / "a.rec") as recorder:
            recorder.add(frame(0))
            while recorder.statistics().queued:
                await anyio.sleep(0.001)
            async with replay(tmp_path / "a.rec", pace=False) as frames:
                return [item.index async for item in frames]

    assert really(body) == [0]
