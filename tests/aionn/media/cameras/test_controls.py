"""Controls of a camera: listed, set by name, checked, and set again whenever the camera is opened."""

import errno

import anyio
import pytest

from aionn.errors import InvalidArgument
from aionn.media import Reconnection, SourceUnavailable, camera, camera_controls, set_camera_controls
from aionn.media.cameras import videodev
from aionn.media.cameras.controls import CONTROLS_MAX, name_of
from tests.support.media.fake_camera import FakeControl

SOON = Reconnection(first_s=0.01, most_s=0.05)


@pytest.fixture
def webcam(system):
    """A machine whose camera has the controls of a webcam."""
    system.camera.controls = {
        0x980900: FakeControl("Brightness", minimum=-64, maximum=64, default=0, value=3),
        0x980910: FakeControl("Gain", minimum=10, maximum=100, step=10, value=20),
        0x98090C: FakeControl("White Balance, Automatic", videodev.CTRL_BOOLEAN, maximum=1, value=1),
        0x9A0901: FakeControl(
            "Auto Exposure",
            videodev.CTRL_MENU,
            maximum=3,
            value=3,
            menu={1: "Manual Mode", 3: "Aperture Priority"},
        ),
        0x9A0902: FakeControl(
            "Exposure\x1b[2J Time", flags=videodev.CTRL_FLAG_INACTIVE, maximum=5000, value=150
        ),
        0x9A0903: FakeControl(
            "Frequency", videodev.CTRL_INTEGER_MENU, maximum=1, value=0, menu={0: 50, 1: 60}
        ),
        0x9A0910: FakeControl("Reset", videodev.CTRL_BUTTON, maximum=0),
        0x9A0911: FakeControl("Temperature", flags=videodev.CTRL_FLAG_READ_ONLY, value=40),
        0x9A0912: FakeControl("Off", flags=videodev.CTRL_FLAG_DISABLED),
        0x9A0913: FakeControl("Name", 7),
        0x9A0914: FakeControl("Camera Controls", 6),
    }
    return system


def test_controls_are_listed_with_their_ranges_values_and_choices(really, webcam):
    found = {one.name: one for one in really(lambda: camera_controls(system=webcam))}
    assert list(found) == [
        "brightness", "white_balance_automatic", "gain", "auto_exposure", "exposure_2j_time", "frequency", "reset", "temperature",
    ]  # fmt: skip
    brightness = found["brightness"]
    assert (brightness.minimum, brightness.maximum, brightness.default, brightness.value) == (-64, 64, 0, 3)
    assert found["auto_exposure"].choices == {1: "Manual Mode", 3: "Aperture Priority"}
    assert found["frequency"].choices == {0: "50", 1: "60"}
    assert found["exposure_2j_time"].is_inactive and "\x1b" not in found["exposure_2j_time"].title
    assert found["reset"].value is None and found["temperature"].is_read_only
    assert webcam.camera.fd == -1


def test_controls_are_set_by_name_in_the_given_order(really, webcam):
    wanted = {"auto_exposure": "manual mode", "brightness": -64, "white_balance_automatic": False, "reset": 1}
    found = {one.name: one for one in really(lambda: set_camera_controls(0, wanted, system=webcam))}
    assert (found["auto_exposure"].value, found["brightness"].value) == (1, -64)
    assert found["white_balance_automatic"].value == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zoom": 1}, "expected one of brightness, white_balance_automatic, gain"),
        ({"brightness": 65}, "expected -64 to 64, got 65"),
        ({"gain": 25}, "expected 10 to 100 in steps of 10, got 25"),
        ({"brightness": 1.5}, "brightness: expected an integer, a bool or a text, got 1.5"),
        ({"brightness": "bright"}, "expected a number, got 'bright'"),
        ({"auto_exposure": "sometimes"}, "expected 'Manual Mode', 'Aperture Priority', got 'sometimes'"),
        ({"auto_exposure": 2}, r"expected one of \[1, 3\], got 2"),
        ({"temperature": 20}, "can be read alone"),
    ],
)
def test_value_that_cannot_be_set_is_rejected_before_the_driver_sees_it(really, webcam, values, message):
    before = {number: one.value for number, one in webcam.camera.controls.items()}
    with pytest.raises(InvalidArgument, match=message):
        really(lambda: set_camera_controls(0, values, system=webcam))
    assert {number: one.value for number, one in webcam.camera.controls.items()} == before


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.EBUSY, SourceUnavailable, "cannot be changed while the camera streams"),
        (errno.EINVAL, InvalidArgument, "it rejects 5"),
        (errno.ERANGE, InvalidArgument, "it rejects 5"),
        (errno.EACCES, SourceUnavailable, "this process may not use it"),
        (errno.EIO, SourceUnavailable, "EIO"),
        (errno.ENODEV, SourceUnavailable, "unplugged"),
    ],
)
def test_error_of_the_driver_is_translated(really, webcam, number, kind, message):
    webcam.camera.controls[0x980900].failing = number
    with pytest.raises(kind, match=message):
        really(lambda: set_camera_controls(0, {"brightness": 5}, system=webcam))


def test_controls_are_set_again_when_the_camera_is_plugged_in_again(really, webcam, filming):
    async def body():
        async with (
            camera(system=webcam, controls={"brightness": 7}, reconnect=SOON) as frames,
            filming(webcam.camera),
        ):
            await anext(frames)
            assert webcam.camera.controls[0x980900].value == 7
            webcam.camera.unplug()
            while frames.health().state == "live":
                await anyio.sleep(0.001)
            webcam.camera.controls[0x980900].value = 0  # A camera forgets them without current.
            webcam.camera.plug()
            while not (await anext(frames)).follows_gap:
                pass
            return webcam.camera.controls[0x980900].value

    assert really(body) == 7


def test_camera_that_lacks_a_control_is_not_opened(really, webcam):
    async def body():
        with pytest.raises(InvalidArgument, match="zoom"):
            async with camera(system=webcam, controls={"zoom": 1}):
                pass

    really(body)


def test_driver_that_lists_controls_without_end_is_bounded(really, webcam):
    webcam.camera.controls = {n: FakeControl(f"control {n}") for n in range(1, CONTROLS_MAX + 100)}
    assert len(really(lambda: camera_controls(system=webcam))) == CONTROLS_MAX


def test_names_are_those_of_v4l2_ctl():
    assert name_of("White Balance Temperature, Auto") == "white_balance_temperature_auto"
    assert name_of("Percentage of Dropped Buffers") == "percentage_of_dropped_buffers"
    assert name_of("  (odd) ") == "odd"
