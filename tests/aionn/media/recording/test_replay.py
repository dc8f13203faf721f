"""Replays: the recorded times in real and in virtual time, files that are cut, damaged or hostile."""

import io
import logging
import os
import random
import struct
import time
import zlib

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import AudioWindow, Frame, has_sound, named_source, replay, replay_audio
from aionn.media.recording.items import (
    ITEM_HEAD,
    VALUES_BYTES_MAX,
    Description,
    ItemReader,
    encoded_head,
    encoded_item,
)
from aionn.testing.clock import VirtualClock, run

MS = 1_000_000
TIMES_MS = [0, 10, 15, 400, 410, 1000]


def frame(index, at_ms, side=4):
    return Frame(
        np.full((side, side, 3), index, np.uint8), 7 * 10**12 + at_ms * MS, index, at_ms / 1e3, clock="driver"
    )


def written(path, items):
    kind = "frames" if isinstance(items[0], Frame) else "windows"
    path.write_bytes(
        encoded_head(kind) + b"".join(bytes(part) for item in items for part in encoded_item(item))
    )
    return path


def raw_item(encoded, content, **lengths):
    """An item whose check sums are right, whatever it holds; the lengths may be others than the right ones."""
    found = {"description": len(encoded), "values": len(content), **lengths}
    check = zlib.crc32(content, zlib.crc32(encoded))
    head = struct.pack("<III", found["description"], found["values"], check)
    return head + struct.pack("<I", zlib.crc32(head)) + encoded + content


def described(**changes):
    usual = Description(0, 0, 0.0, "driver", 0, 0, False, (1, 1, 3))
    return msgspec.msgpack.encode(
        [changes.get(name, getattr(usual, name)) for name in usual.__struct_fields__]
    )


class Cut(io.FileIO):
    """A file in memory, which has a descriptor."""

    def __init__(self, data):
        super().__init__(os.memfd_create("cut"), "r+")
        self.write(data)
        self.seek(0)


async def all_of(source):
    async with source as items:
        return [item async for item in items]


def test_frames_come_at_their_recorded_times(virtually, tmp_path):
    path = written(tmp_path / "a.rec", [frame(i, at) for i, at in enumerate(TIMES_MS)])

    async def body(now):
        start_ns = now()
        async with replay(path, now=now, keep="all") as frames:
            return [((item.captured_at_ns - start_ns) / MS, item) async for item in frames]

    found = virtually(body)
    times = [at for at, _ in found]
    # Virtual time also passes while the thread reads, so that an item may be late, and never early.
    assert all(at >= due for at, due in zip(times, TIMES_MS))
    for index, (_, item) in enumerate(found):
        assert (item.index, item.time_s, item.clock) == (index, TIMES_MS[index] / 1e3, "presented")
        assert (item.data == index).all() and item.data.flags.writeable


def test_virtual_time_of_the_testing_clock_replays_exactly_and_soon(tmp_path):
    """An hour in a moment: reading holds the virtual clock, so that every item is on time."""
    times_ms = [0, 1, 2, 60_000, 3_600_000]
    path = written(tmp_path / "a.rec", [frame(i, at) for i, at in enumerate(times_ms)])
    clock = VirtualClock()

    async def body():
        start_ns = clock.now_ns
        async with replay(path, now=lambda: clock.now_ns) as frames:
            return [(item.captured_at_ns - start_ns) / MS async for item in frames]

    started_s = time.monotonic()
    found = run(body, clock=clock)
    np.testing.assert_allclose(found, times_ms, atol=0.01)
    assert time.monotonic() - started_s < 10


def test_real_time_is_never_earlier_than_recorded(really, tmp_path):
    path = written(tmp_path / "a.rec", [frame(i, 20 * i) for i in range(5)])

    async def body():
        start_ns = time.monotonic_ns()
        async with replay(path, keep="all") as frames:
            return [(item.captured_at_ns - start_ns) / MS async for item in frames]

    found = really(body)
    assert len(found) == 5
    assert all(at >= 20 * index for index, at in enumerate(found))


def test_windows_of_sound_are_replayed(really, tmp_path):
    windows = [AudioWindow(np.full(8, i / 10, np.float32), i * MS, i, i / 10) for i in range(3)]
    found = really(lambda: all_of(replay_audio(written(tmp_path / "a.rec", windows), pace=False)))
    assert [(w.index, w.start_s) for w in found] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    np.testing.assert_array_equal(found[2].samples, windows[2].samples)


def test_frames_are_scaled_to_the_wanted_size(really, tmp_path):
    path = written(tmp_path / "a.rec", [frame(3, 0, side=8)])
    [item] = really(lambda: all_of(replay(path, size=(2, 5), pace=False)))
    assert item.data.shape == (5, 2, 3) and (item.data == 3).all()


def test_time_that_goes_back_is_presented_immediately(virtually, tmp_path):
    path = written(tmp_path / "a.rec", [frame(0, 50), frame(1, 20), frame(2, 70)])

    async def body(now):
        async with replay(path, now=now, keep="all") as frames:
            return [item.captured_at_ns async for item in frames]

    found = virtually(body)
    assert len(found) == 3 and found == sorted(found)


def test_file_that_is_cut_anywhere_has_its_whole_items(tmp_path):
    whole = written(tmp_path / "a.rec", [frame(i, i) for i in range(3)]).read_bytes()
    item = len(whole[12:]) // 3
    for length in range(12, len(whole) + 1):
        with io.BufferedReader(Cut(whole[:length])) as file:
            reader = ItemReader(file, "test")
            found = [one.index for one in iter(reader.read, None)]
        assert found == list(range((length - 12) // item))
        assert reader.is_cut == ((length - 12) % item > 0)


def test_file_that_is_cut_is_replayed_and_the_cut_is_logged(really, tmp_path, caplog):
    path = written(tmp_path / "a.rec", [frame(i, i) for i in range(3)])
    os.truncate(path, path.stat().st_size - 1)
    with caplog.at_level(logging.WARNING, "aionn.media"):
        found = really(lambda: all_of(replay(path, pace=False)))
    assert [item.index for item in found] == [0, 1]
    assert "ends in the middle of item 2; the items before are whole" in caplog.text


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(n, marks=pytest.mark.long) for n in range(30, 400))]
)
def test_damaged_file_gives_whole_items_and_then_an_error(tmp_path, seed):
    """Without the source around it: bytes changed at random; every item that comes is one that went in."""
    chance = random.Random(seed)
    path = written(tmp_path / "a.rec", [frame(i, i) for i in range(4)])
    data = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    path.write_bytes(data)
    found = []
    with open(path, "rb") as file:
        try:
            reader = ItemReader(file, "test")
            while (item := reader.read()) is not None:
                found.append(item)
        except InvalidArgument as error:
            assert "expected" in str(error)
        else:
            pytest.fail("the damage was not noticed")
    for index, item in enumerate(found):
        assert item.index == index and (item.data == index).all()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (raw_item(described(), b"abc", values=VALUES_BYTES_MAX + 1), "bytes"),
        (raw_item(described(), b"abc", values=2**32 - 1), "bytes"),
        (raw_item(described(), b"abc", values=0), "bytes"),
        (raw_item(described(), b"abc", description=2**32 - 1), "bytes"),
        (raw_item(b"", b"abc"), "item 0 to be whole"),
        (raw_item(b"\xc1" * 50, b"abc"), "item 0 to be whole"),
        (raw_item(msgspec.msgpack.encode({}), b"abc"), "item 0 to be whole"),
        (raw_item(b"\x91" * 1000, b"abc"), "item 0 to be whole"),
        (raw_item(described(shape=(2, 2, 3)), b"abc"), "not a picture"),
        (raw_item(described(shape=(3,)), b"abc"), "not a picture"),
        (raw_item(described(shape=(1, 3, 1)), b"abc"), "not a picture"),
        (raw_item(described(shape=(-1, -1, 3)), b"abc"), "item 0 to be whole"),
        (raw_item(described(shape=(2**63 - 1, 2**63 - 1, 3)), b"abc"), "not a picture"),
        (raw_item(described(shape=(2**32, 2**32, 3)), b"abc"), "not a picture"),
        (raw_item(described(shape=(1,) * 500), b"abc"), "item 0 to be whole"),
        (raw_item(described(index=-1), b"abc"), "item 0 to be whole"),
        (raw_item(described(captured_at_ns=2**63), b"abc"), "item 0 to be whole"),
        (raw_item(described(position_s=float("nan")), b"abc"), "not a picture"),
        (raw_item(described(position_s=float("inf")), b"abc"), "not a picture"),
        (raw_item(described(clock="x" * 500), b"abc"), "item 0 to be whole"),
        (bytes(1000), "its head is not whole"),
        (raw_item(described(), b"abc") + raw_item(described(captured_at_ns=2**62), b"abc"), "of the first"),
    ],
)
def test_hostile_file_is_an_error_and_allocates_little(really, tmp_path, item, words):
    path = tmp_path / "a.rec"
    path.write_bytes(encoded_head("frames") + item)

    async def body():
        with pytest.raises(InvalidArgument, match=words) as raised:
            await all_of(replay(path, pace=False))
        assert "a.rec" in str(raised.value)

    really(body)


def test_length_beyond_the_end_of_the_file_allocates_nothing(really, tmp_path):
    path = tmp_path / "a.rec"
    path.write_bytes(encoded_head("frames") + raw_item(described(), b"abc", values=VALUES_BYTES_MAX))
    assert ITEM_HEAD.size == 16
    assert really(lambda: all_of(replay(path, pace=False))) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got an empty file"),
        (b"AIONN", "got another kind of file"),
        (b"RIFF" + bytes(100), "got another kind of file"),
        (b"AIONNREC" + struct.pack("<HH", 2, 1), "got version 2"),
        (b"AIONNREC" + struct.pack("<HH", 1, 3), "kind 3"),
        (encoded_head("windows"), "expected frames, got windows; use aionn.media.replay_audio"),
    ],
)
def test_file_that_is_not_a_recording_of_the_kind_is_an_error(really, tmp_path, content, words):
    path = tmp_path / "a.rec"
    path.write_bytes(content)

    async def body():
        with pytest.raises(InvalidArgument, match=words):
            async with replay(path):
                pass

    really(body)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_anything_but_a_file_is_an_error_and_no_wait(really, tmp_path, kind):
    path = tmp_path / "a.rec"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)

    async def body():
        with pytest.raises(InvalidArgument, match=r"a\.rec"):
            async with replay(path):
                pass
        with pytest.raises(InvalidArgument, match=r"a\.rec"):
            named_source(f"replay:{path}")

    really(body)


def test_recording_has_a_name_as_a_source(really, tmp_path):
    pictures = written(tmp_path / "pictures.rec", [frame(0, 0)])
    sounds = written(tmp_path / "sounds.rec", [AudioWindow(np.zeros(4, np.float32), 0, 0, 0.0)])
    assert not has_sound(f"replay:{pictures}")
    assert has_sound(f"replay:{sounds}")
    [item] = really(lambda: all_of(named_source(f"replay:{pictures}", size=(2, 2))))
    assert item.data.shape == (2, 2, 3)
    assert really(lambda: all_of(named_source(f"replay:{sounds}")))[0].samples.size == 4
    with pytest.raises(InvalidArgument, match="replay:FILE"):
        named_source("replay:")


@pytest.mark.parametrize("arguments", [{"size": (0, 1)}, {"queue_frames_max": 0}, {"keep": "some"}])
def test_impossible_argument_is_rejected(arguments):
    with pytest.raises(InvalidArgument, match=r"aionn\.media\.replay"):
        replay("a.rec", **arguments)
