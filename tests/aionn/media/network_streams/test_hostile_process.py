"""What the process that decodes could send if a stream had taken it over: every number is checked before it is used."""

import mmap
import socket

import msgspec
import numpy as np
import pytest

from aionn.media import SourceUnavailable
from aionn.media.network_streams import capture as capture_module
from aionn.media.network_streams import process as process_module
from aionn.media.network_streams.capture import SoundCapture, StreamProcess, VideoCapture
from aionn.media.network_streams.messages import (
    AUDIO_SLOT_SAMPLES,
    Ended,
    Filled,
    Opened,
    Start,
    decode,
    decode_start,
    encode,
)
from aionn.media.windows import WindowPlan

S = 1_000_000_000
NOW = 1_000 * S


class FakeProcess:
    """In place of a process: the other end of its socket is here."""

    pid = 0

    def __init__(self, theirs):
        self.theirs = theirs.dup()

    def kill(self):
        self.theirs.close()

    def poll(self):
        return None

    def wait(self, timeout=None):
        return 0


def start(kind="video", size=None, slots=4):
    return Start("http://127.0.0.1/x", kind, size, 16_000, {}, None, 2.0, 1.0, slots, True, 1 << 30)


@pytest.fixture
def link(monkeypatch):
    """Makes a stream whose process is the test: ``link(first message)`` returns it and the socket of the process."""
    made = []

    def make(first, wishes=None):
        ends = {}

        def started(theirs):
            ends["process"] = FakeProcess(theirs)
            ends["process"].theirs.send(first)
            return ends["process"]

        monkeypatch.setattr(capture_module, "_started", started)
        process = StreamProcess(wishes or start())
        made.append(process)
        process.wait_until_open()
        theirs = ends["process"].theirs
        assert decode_start(theirs.recv(65_536)) == (wishes or start())
        _, descriptors, _, _ = socket.recv_fds(theirs, 16, 1)
        for descriptor in descriptors:
            socket.close(descriptor)
        return process, theirs

    yield make
    for process in made:
        process.close()


GOOD = Opened(64 * 48 * 3, 64, 48, 30.0)


@pytest.mark.parametrize(
    "message",
    [
        Opened(64 * 48 * 3 + 1, 64, 48, 30.0),
        Opened(10, 64, 48, 30.0),
        Opened(0, 0, 0, 30.0),
        Opened(64 * 48 * 3, -64, -48, 30.0),
        Opened(8192 * 8192 * 3, 8192, 8192, 30.0),
        Opened(-1, 64, 48, 30.0),
        Opened(2**62, 2**31, 2**31, 30.0),
        Filled(0, 1, 0, 0, 0, 0),
    ],
    ids=str,
)
def test_impossible_announcement_is_rejected(link, message):
    with pytest.raises(SourceUnavailable, match=r"at fault|give a smaller size|breaks the order"):
        link(encode(message))


def test_announcement_of_another_size_than_was_asked_for_is_rejected(link):
    with pytest.raises(SourceUnavailable, match="expected the size that was asked for"):
        link(encode(GOOD), start(size=(32, 24)))
    with pytest.raises(SourceUnavailable, match="expected the size that was asked for"):
        link(encode(Opened(100, 0, 0, 0.0)), start("audio"))


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x00",
        b"{}",
        b"\x81\xa4type\xa3odd",
        bytes(60_000),
        msgspec.msgpack.encode(["filled", "x"]),
        b"\xff" * 1000,
    ],
    ids=lambda data: str(data[:12]),
)
def test_nonsense_is_rejected(link, data):
    with pytest.raises(SourceUnavailable, match=r"the process that decodes|that process is at fault"):
        link(data)
    with pytest.raises(SourceUnavailable):
        decode(data, "here")


@pytest.mark.parametrize(
    "message",
    [
        Filled(4, 64 * 48 * 3, 0, NOW, 0, 0),
        Filled(-1, 64 * 48 * 3, 0, NOW, 0, 0),
        Filled(2**60, 64 * 48 * 3, 0, NOW, 0, 0),
        Filled(0, 64 * 48 * 3 + 1, 0, NOW, 0, 0),
        Filled(0, 64 * 48 * 3 - 1, 0, NOW, 0, 0),
        Filled(0, 0, 0, NOW, 0, 0),
        Filled(0, -5, 0, NOW, 0, 0),
        Filled(0, 64 * 48 * 3, 0, NOW, -1, 0),
        Filled(0, 64 * 48 * 3, 0, NOW, 0, -1),
        Filled(0, 64 * 48 * 3, 0, NOW, 0, 0, 2**63 - 1),
        Filled(0, 64 * 48 * 3, 0, NOW, 0, 0, -(2**63)),
        Filled(0, 64 * 48 * 3, 0, NOW, 2**62, 0),
        GOOD,
    ],
    ids=str,
)
def test_impossible_item_is_rejected(link, message):
    process, theirs = link(encode(GOOD))
    video = VideoCapture(process, 4)
    theirs.send(encode(message))
    with pytest.raises(SourceUnavailable, match="at fault"):
        video.dequeue(NOW)


def test_slot_that_is_held_cannot_be_filled_again(link):
    process, theirs = link(encode(GOOD))
    video = VideoCapture(process, 4)
    item = encode(Filled(2, 64 * 48 * 3, 0, NOW, 0, 0))
    theirs.send(item)
    grab = video.dequeue(NOW)
    theirs.send(item)
    with pytest.raises(SourceUnavailable, match="at fault"):
        video.dequeue(NOW)
    video.requeue(grab)
    assert theirs.recv(10) == b"\x02"
    theirs.send(item)
    assert video.dequeue(NOW) is not None


@pytest.mark.parametrize("media_ns", [None, 0, -(2**62), 2**62, NOW])
@pytest.mark.parametrize("arrival_ns", [0, -(2**62), 2**62, NOW])
def test_time_of_capture_is_never_in_the_future_whatever_the_process_sends(link, media_ns, arrival_ns):
    process, theirs = link(encode(GOOD))
    video = VideoCapture(process, 4)
    for slot in range(3):
        theirs.send(encode(Filled(slot, 64 * 48 * 3, media_ns, arrival_ns, 0, 0)))
        grab = video.dequeue(NOW)
        assert grab.captured.at_ns <= NOW
        assert video.convert(grab).data.shape == (48, 64, 3)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0, 1e-300, 1e300])
def test_period_of_any_rate_is_sane(link, rate):
    process, _ = link(encode(Opened(64 * 48 * 3, 64, 48, rate)))
    period_ns = VideoCapture(process, 4).period_ns
    assert period_ns is None or 0 < period_ns < 10**13


def test_silent_process_and_closed_socket_are_told_apart(link):
    process, theirs = link(encode(GOOD))
    video = VideoCapture(process, 4)
    assert video.dequeue(NOW) is None
    theirs.send(encode(Ended("no reason " * 1000, False)))
    with pytest.raises(SourceUnavailable, match="lost: no reason") as raised:
        video.dequeue(NOW)
    assert len(str(raised.value)) < 1200
    theirs.close()
    with pytest.raises(SourceUnavailable, match="the process that decodes ended"):
        video.dequeue(NOW)


def test_last_words_of_a_process_arrive_although_it_left_messages_unread(link):
    process, theirs = link(encode(GOOD))
    pictures = VideoCapture(process, 4)
    process.release(0)  # It is never read: the kernel then reports the end as a reset, before the messages.
    theirs.send(encode(Filled(1, 64 * 48 * 3, 0, NOW, 0, 0)))
    theirs.send(encode(Ended("the server ended the stream", False)))
    theirs.close()
    assert pictures.dequeue(NOW).slot == 1
    with pytest.raises(SourceUnavailable, match="the server ended the stream"):
        pictures.dequeue(NOW)


@pytest.mark.parametrize("counted", [0, 1, 255])
def test_picture_is_the_last_if_the_process_has_counted_no_other_and_a_false_count_loses_none(link, counted):
    process, theirs = link(encode(GOOD))
    video = VideoCapture(process, 4)
    process._memory[-1] = counted
    theirs.send(encode(Filled(0, 64 * 48 * 3, None, NOW, 0, 0)))
    theirs.send(encode(Filled(1, 64 * 48 * 3, None, NOW, 0, 0)))
    assert video.dequeue(NOW).is_last == (counted == 1)
    assert video.dequeue(NOW).slot == 1
    assert video.dequeue(NOW) is None


def test_process_counts_an_item_before_it_sends_it():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, mmap.mmap(-1, 2 * 12 + 1) as memory:
        slots = process_module._Slots(theirs, 2)
        outlet = process_module._Outlet(start(slots=2), theirs, memory, 12, slots)
        for number in range(1, 600):
            outlet.put(np.full((2, 6), number % 251, np.uint8), None, None)
            filled = decode(ours.recv(1000), "test")
            assert memory[-1] == number % 256
            assert set(memory[filled.slot * 12 :][:12]) == {number % 251}
            ours.send(bytes([filled.slot]))
        del outlet


def test_sound_whose_announcement_has_a_size_of_pictures_does_no_harm(link):
    process, _ = link(encode(Opened(AUDIO_SLOT_SAMPLES * 4, 5, 7, 0.0)), start("audio"))
    assert process.views[3].shape == (AUDIO_SLOT_SAMPLES * 4,)


def test_sounds_that_are_not_whole_or_not_numbers_do_no_harm(link):
    process, theirs = link(encode(Opened(AUDIO_SLOT_SAMPLES * 4, 0, 0, 0.0)), start("audio"))
    sound = SoundCapture(process, 4, WindowPlan.of(0.01, 0.01, 16_000, "test"))
    np.frombuffer(process.views[0], np.float32)[:] = np.nan
    theirs.send(encode(Filled(0, 640, 0, NOW, 0, 0)))
    grab = sound.dequeue(NOW)
    assert np.all(np.abs(sound.convert(grab).samples) <= 1.0)
    theirs.send(encode(Filled(1, 641, 0, NOW, 0, 0)))
    with pytest.raises(SourceUnavailable, match="whole samples"):
        sound.dequeue(NOW)


def test_memory_has_a_size_that_the_process_cannot_change(link, monkeypatch):
    import fcntl
    import os

    held = []
    original = socket.send_fds
    monkeypatch.setattr(
        capture_module.socket,
        "send_fds",
        lambda s, b, fds: held.append(os.dup(fds[0])) or original(s, b, fds),
    )
    link(encode(GOOD))
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(held[0], 0)
        assert fcntl.fcntl(held[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(held[0])


def test_process_fills_slots_again_that_were_released_and_drops_items_without_one():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        slots = process_module._Slots(theirs, 2)
        assert [slots.take(waits=False) for _ in range(3)] == [0, 1, None]
        ours.send(bytes([1]))
        ours.send(bytes([200, 2]))
        assert slots.take(waits=False) == 1
        assert slots.take(waits=False) is None, "no such slots"
        ours.send(bytes([0, 1]))
        assert [slots.take(waits=True), slots.take(waits=True)] == [0, 1]
