"""The list of cameras, and the calls on the real kernel."""

import os
import threading

import anyio
import pytest

from aionn.media import SourceUnavailable, camera, list_cameras
from aionn.media.cameras.listing import Identity, resolve
from aionn.media.cameras.system import System
from tests.support.media.fake_camera import FakeCamera, FakeSystem, Listed


def test_cameras_are_listed_with_names_and_those_that_cannot_be_asked_with_the_reason(really):
    metadata = FakeCamera("Metadata")
    metadata.capabilities = 0x04800000
    evil = FakeCamera("Evil\x1b[2J", "usb-\xff"[:4])
    evil.listed = [Listed("MJPG", 640, 480), Listed("H264", 640, 480)]
    system = FakeSystem(
        {
            "/dev/video0": FakeCamera("Front"),
            "/dev/video1": metadata,
            "/dev/video2": FakeCamera("Locked"),
            "/dev/video3": evil,
        }
    )
    system.forbidden = {"/dev/video2"}

    async def body():
        return await list_cameras(system=system)

    front, locked, last = really(body)
    assert (front.path, front.name, front.driver, front.formats, front.problem) == (
        "/dev/video0",
        "Front",
        "fake",
        ("YUYV",),
        "",
    )
    assert locked.path == "/dev/video2" and "EACCES" in locked.problem
    assert last.name == "Evil?[2J"
    assert all(one.holds_nothing for one in system.cameras.values())


def test_driver_that_does_not_answer_ends_the_list_in_time(really, monkeypatch):
    monkeypatch.setattr("aionn.media.cameras.opening.OPEN_S_MAX", 0.05)
    system = FakeSystem()
    system.camera.blocks_open = threading.Event()

    async def body():
        with pytest.raises(SourceUnavailable, match=r"within 0\.05 s"):
            await list_cameras(system=system)
        system.camera.blocks_open.set()
        while not (system.camera.opened and system.camera.holds_nothing):
            await anyio.sleep(0.001)

    really(body)


def test_name_is_a_number_a_path_or_a_part_of_a_name():
    system = FakeSystem(
        {"/dev/video0": FakeCamera("Front C920", "a"), "/dev/video4": FakeCamera("Back C270", "b")}
    )
    assert resolve(system, 4, None) == "/dev/video4"
    assert resolve(system, "4", None) == "/dev/video4"
    assert resolve(system, "/dev/video7", None) == "/dev/video7"
    assert resolve(system, "c270", None) == "/dev/video4"
    assert resolve(system, 0, Identity("Back C270", "b")) == "/dev/video4"
    assert resolve(system, 0, Identity("Gone", "c")) == "/dev/video0"


def test_system_of_this_machine_answers(really):
    system = System()
    nodes = system.video_nodes()
    assert all(node.startswith("/dev/video") for node in nodes)
    assert isinstance(system.stable_names(), dict)
    fd = os.open("/dev/full", os.O_RDONLY)
    try:
        own = f"this program (pid {os.getpid()})"
        assert own in system.users_of("/dev/full")
        assert own not in system.users_of("/dev/full", fd)
    finally:
        os.close(fd)
    really(list_cameras)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/video250", "ENOENT"),
        (os.devnull, "not a Video4Linux device"),
        ("/dev", "EISDIR|EACCES"),
        ("/dev/null/x", "ENOTDIR"),
    ],
)
def test_real_file_that_is_not_a_camera_is_an_error(really, path, words):
    async def body():
        with pytest.raises(SourceUnavailable, match=words):
            async with camera(path):
                pass

    really(body)


def test_camera_of_this_machine_delivers(really):
    nodes = System().video_nodes()
    if not nodes:
        pytest.skip("this machine has no camera, and no vivid or v4l2loopback: modprobe vivid")

    async def body():
        try:
            async with camera(nodes[0], size=(96, 96)) as source:
                frames = [await anext(source) for _ in range(10)]
        except SourceUnavailable as e:
            pytest.skip(f"the camera of this machine cannot be used: {e}")
        return frames

    frames = really(body)
    stamps = [frame.captured_at_ns for frame in frames]
    assert stamps == sorted(set(stamps))
