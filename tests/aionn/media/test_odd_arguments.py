"""Every argument of every public function of ``aionn.media`` gets every odd value: those that the docstring allows are accepted,
and every other one is an `InvalidArgument` in one sentence when the function is called, before anything is opened.
"""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Callable, Generator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn import media
from aionn.media.arguments import checked_number, checked_whole
from aionn.media.cameras.system import System
from aionn.media.live.reconnection import Reconnection
from aionn.media.windows import WindowPlan


class OwnNumber(int):
    """A whole number of a class of its own."""


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class AsyncItems:
    """A source that gives nothing."""

    def __aiter__(self) -> AsyncItems:
        return self

    async def __anext__(self) -> Any:
        raise StopAsyncIteration


class Touched(Exception):
    """The arguments were accepted, and the device would be opened now."""


class UntouchedSystem(System):
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            raise Touched
        return super().__getattribute__(name)


def nothing() -> Generator[Any, None, None]:
    yield from ()


ODD: dict[str, Any] = {
    "none": None,
    "true": True,
    "np_true": np.True_,
    "minus": -1,
    "five": 5,
    "half": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus_inf": float("-inf"),
    "huge": 2**80,
    "vast": 10**5000,
    "minus_vast": -(10**5000),
    "np_int": np.int64(5),
    "np_float": np.float32(0.5),
    "np_nan": np.float32("nan"),
    "own": OwnNumber(5),
    "decimal": Decimal(5),
    "fraction": Fraction(1, 2),
    "vast_fraction": Fraction(10**5000, 3),
    "complex": 5 + 0j,
    "zero_d": np.array(5),
    "zero_d_float": np.array(0.5),
    "pair_array": np.array([5, 5]),
    "float_array": np.zeros(16_000),
    "rows": np.zeros((5, 5), np.uint8),
    "text": "x",
    "number_text": "5",
    "empty_text": "",
    "null": "a\0b",
    "surrogate": "\ud800",
    "bytes": b"x",
    "two_bytes": b"xy",
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"xxxx").cast("B", (2, 2)),
    "path": Path("x"),
    "empty_list": [],
    "pair_list": [5, 5],
    "pair": (5, 5),
    "one": (5,),
    "four": (5, 5, 5, 5),
    "floats": (5.0, 5.0),
    "bools": (True, True),
    "texts": ("x", "x"),
    "pairs": {5: 5, 6: 6},
    "set": {5, 6},
    "empty_mapping": {},
    "mapping": {"x": "x"},
    "number_mapping": {"x": 5},
    "float_mapping": {"x": 0.5},
    "object": object(),
    "unshowable": Unshowable(),
    "function": lambda *_: 0,
    "class": OwnNumber,
    "source": AsyncItems(),
    "reconnection": Reconnection(),
}

WHOLE = "five np_int own zero_d"
ANY_WHOLE = f"{WHOLE} huge vast"
NUMBER = "five half np_int np_float own fraction"
FINITE = f"{NUMBER} huge"
FLAG = "true np_true"
TEXT = "text number_text"
PATH = f"{TEXT} path"
SIZE = "pair pair_list pair_array"
FUNCTION = "function class"
CHOICE = ""
NAME = f"{TEXT} {WHOLE}"
CONTROLS = "empty_mapping mapping number_mapping"
RECONNECT = "none reconnection"
EVERY_TEXT = f"{TEXT} empty_text null surrogate"

PACED = {"pace": FLAG, "keep": CHOICE, "now": FUNCTION}
WINDOWS = {"window_s": NUMBER, "hop_s": NUMBER, "sample_rate_hz": WHOLE}
NETWORK = {
    "url": CHOICE,
    "transport": CHOICE,
    "clock": CHOICE,
    "format": f"none {TEXT}",
    "options": "none empty_mapping mapping",
    "keep": CHOICE,
    "reconnect": RECONNECT,
    "open_s_max": NUMBER,
}

TABLE: dict[str, dict[str, str]] = {
    "CameraWatch": {"system": "none"},
    "CaptureMemory": {"arrays": CHOICE},
    "LiveSource": {
        "opener": CHOICE,
        "name": TEXT,
        "keep": CHOICE,
        "queue_max": WHOLE,
        "reconnect": RECONNECT,
        "unused": f"none {FUNCTION}",
        "is_held": f"none {FUNCTION}",
        "arrivals": f"none {FUNCTION}",
        "now": FUNCTION,
        "rng": FUNCTION,
    },
    "LogMel": {
        "sample_rate_hz": WHOLE,
        "frame_samples": WHOLE,
        "hop_samples": ANY_WHOLE,
        "bands": WHOLE,
        "low_hz": "half np_float fraction",
        "high_hz": NUMBER,
    },
    "Reconnection": {
        "first_s": NUMBER,
        "most_s": NUMBER,
        "calm_s": FINITE,
        "end_after_s": f"none {FINITE}",
        "from_start": FLAG,
    },
    "Source": {"items": CHOICE, "name": TEXT, "queue_max": WHOLE, "blocking": FLAG, **PACED},
    "audio_file": {"path": PATH, "queue_windows_max": WHOLE, **WINDOWS, **PACED},
    "camera": {
        "name": NAME,
        "size": f"none {SIZE}",
        "rate": f"none {NUMBER}",
        "capture_size": f"none {SIZE}",
        "pixel_format": "none",
        "keep": CHOICE,
        "queue_frames_max": WHOLE,
        "reconnect": RECONNECT,
        "input_index": f"none {WHOLE}",
        "controls": f"none {CONTROLS}",
        "into": "none",
        "system": "none",
    },
    "camera_controls": {"name": NAME, "system": "none"},
    "has_sound": {"name": EVERY_TEXT},
    "joined": {
        "first": "source",
        "second": "source",
        "tolerance_s": NUMBER,
        "wait_s": f"none {NUMBER}",
        "stamp": FUNCTION,
        "now": FUNCTION,
    },
    "list_cameras": {"system": "none"},
    "list_microphones": {},
    "log_mel": {"samples": "float_array"},
    "microphone": {
        "device": f"none {TEXT}",
        "recorder": CHOICE,
        "keep": CHOICE,
        "queue_windows_max": WHOLE,
        "reconnect": RECONNECT,
        **WINDOWS,
    },
    "named_source": {"name": TEXT, "size": f"none {SIZE}", "keep": CHOICE},
    "network": {"size": f"none {SIZE}", "queue_frames_max": WHOLE, **NETWORK},
    "network_audio": {"queue_windows_max": WHOLE, **WINDOWS, **NETWORK},
    "raw_audio": {
        "source": f"{PATH} {WHOLE}",
        "sample_format": CHOICE,
        "channels": WHOLE,
        "keep": CHOICE,
        "queue_windows_max": WHOLE,
        "reconnect": RECONNECT,
        **WINDOWS,
    },
    "record": {"path": PATH},
    "replay": {"path": PATH, "size": f"none {SIZE}", "queue_frames_max": WHOLE, **PACED},
    "replay_audio": {"path": PATH, "queue_windows_max": WHOLE, **PACED},
    "screen": {
        "display": "none",
        "size": f"none {SIZE}",
        "rate": NUMBER,
        "region": "none four",
        "has_pointer": FLAG,
        "keep": CHOICE,
        "queue_frames_max": WHOLE,
        "reconnect": RECONNECT,
    },
    "set_camera_controls": {"name": NAME, "values": CONTROLS, "system": "none"},
    "shown_name": {"name": EVERY_TEXT},
    "synthetic_audio": {
        "duration_s": NUMBER,
        "seed": ANY_WHOLE,
        "queue_windows_max": WHOLE,
        **WINDOWS,
        **PACED,
    },
    "synthetic_video": {
        "size": SIZE,
        "fps": NUMBER,
        "frames": ANY_WHOLE,
        "seed": ANY_WHOLE,
        "queue_frames_max": WHOLE,
        **PACED,
    },
    "tee": {"source": "source"},
    "video_file": {
        "path": PATH,
        "size": f"none {SIZE}",
        "queue_frames_max": WHOLE,
        "interpolation": CHOICE,
        **PACED,
    },
}
"""The odd values that are right, by function and parameter; every other one is wrong."""


class Opener:
    limit_s = 1.0

    def open(self) -> Any:
        raise Touched

    def cancel(self) -> None:
        pass


RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "LiveSource": lambda: {"opener": Opener(), "name": "x", "reconnect": None},
    "LogMel": lambda: {"low_hz": 0, "high_hz": 1, "sample_rate_hz": 16_000},
    "Reconnection": dict,
    "Source": lambda: {"items": nothing(), "name": "x"},
    "audio_file": lambda: {"path": "x", "hop_s": 1},
    "camera_controls": lambda: {"system": UntouchedSystem()},
    "joined": lambda: {"first": AsyncItems(), "second": AsyncItems(), "tolerance_s": 1},
    "list_cameras": lambda: {"system": UntouchedSystem()},
    "microphone": lambda: {"hop_s": 1},
    "named_source": lambda: {"name": "x"},
    "network": lambda: {"url": "rtsp://camera/"},
    "network_audio": lambda: {"url": "rtsp://camera/", "hop_s": 1},
    "raw_audio": lambda: {"source": "x", "hop_s": 1},
    "replay": lambda: {"path": "x"},
    "replay_audio": lambda: {"path": "x"},
    "set_camera_controls": lambda: {"name": 0, "values": {}, "system": UntouchedSystem()},
    "synthetic_audio": lambda: {"hop_s": 1},
    "video_file": lambda: {"path": "x"},
}
"""The other arguments of a function: those that it needs, and some for which every odd value that is right is in its range."""

METHODS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "portaudio": (lambda device: media.microphone(device, recorder="portaudio"), {"device": f"none {NAME}"}),
    "branch_keep": (lambda keep: media.tee(AsyncItems()).branch(keep=keep), {"keep": CHOICE}),
    "branch_queue": (
        lambda queue_max: media.tee(AsyncItems()).branch(queue_max=queue_max),
        {"queue_max": WHOLE},
    ),
    "through": (lambda items: media.record("x").through(items), {"through": "source"}),
    "energies": (lambda samples: media.LogMel()(samples), {"samples": "float_array"}),
    "frame_number": (lambda frame: _memory().number(frame), {"frame": CHOICE}),
    "frame_release": (lambda frame: _memory().release(frame), {"frame": CHOICE}),
}


def _memory() -> media.CaptureMemory:
    return media.CaptureMemory([np.zeros((2, 2, 3), np.uint8) for _ in range(3)])


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a file is opened or a process started."""

    def touch(*_: Any, **__: Any) -> Any:
        raise Touched

    monkeypatch.setattr(subprocess, "Popen", touch)
    monkeypatch.setattr(os, "open", touch)


async def _outcome(call: Callable[[], Any]) -> str:
    """The message of a call that is rejected; empty for one that is accepted."""
    try:
        result = call()
        if inspect.isawaitable(result):
            await result
    except aionn.InvalidArgument as e:
        return str(e)
    except Touched:
        return ""
    return ""


async def _check(call: Callable[[Any], Any], parameter: str, right: str) -> None:
    accepted = set()
    for name, odd in ODD.items():
        try:
            message = await _outcome(lambda odd=odd: call(odd))  # type: ignore[misc]
        except Exception as e:
            pytest.fail(f"{parameter}, {name}: raised {e!r}")
        if not message:
            accepted.add(name)
            continue
        assert message.startswith(("aionn.media.", "joined: ", "recording ", "x: ")), (name, message)
        assert "expected" in message and "\n" not in message and len(message) < 300, (name, message)
        assert parameter in message or "path: " in message, (name, message)
    assert accepted == set(right.split())


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("function", "parameter"), [(name, parameter) for name, row in TABLE.items() for parameter in row]
)
async def test_odd_argument_is_rejected_when_the_function_is_called(function: str, parameter: str) -> None:
    def call(odd: Any) -> Any:
        given = RIGHT.get(function, dict)()
        # A coroutine opens its device when it is awaited, unless the system calls are those that count.
        return getattr(media, function)(**{**given, parameter: odd})

    await _check(call, parameter, TABLE[function][parameter])


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("method", list(METHODS))
async def test_odd_argument_of_a_method_is_rejected(method: str) -> None:
    call, row = METHODS[method]
    [(parameter, right)] = row.items()
    await _check(call, parameter, right)


def test_every_parameter_of_every_public_function_is_in_the_table() -> None:
    made_by_functions = {"Branch", "Joined", "Recorder", "Tee"}
    for name in media.__all__:
        found = getattr(media, name)
        is_record = isinstance(found, type) and issubclass(found, Exception | msgspec.Struct)
        if not callable(found) or name in made_by_functions or (is_record and name != "Reconnection"):
            continue
        if getattr(found, "__module__", "") == "typing":
            continue
        assert set(TABLE[name]) == set(inspect.signature(found).parameters), name


@pytest.mark.parametrize(
    "call",
    [
        lambda: media.network(b"rtsp://user:hunter2@camera/"),  # type: ignore[arg-type]
        lambda: media.network("rtsp://user:hunter2@camera/\0"),
        lambda: media.network("rtsp://user:hunter2@camera/", options={"token": b"hunter2"}),  # type: ignore[dict-item]
        lambda: media.named_source(b"rtsp://user:hunter2@camera/"),  # type: ignore[arg-type]
        lambda: media.shown_name(b"rtsp://user:hunter2@camera/"),  # type: ignore[arg-type]
        lambda: media.camera("rtsp://user:hunter2@camera/"),
        lambda: media.video_file(b"rtsp://user:hunter2@camera/"),  # type: ignore[arg-type]
        lambda: media.screen(b"user:hunter2@:0"),  # type: ignore[arg-type]
    ],
)
def test_message_about_an_address_of_another_type_holds_no_credentials(call: Callable[[], Any]) -> None:
    with pytest.raises(aionn.InvalidArgument) as raised:
        call()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("number", [5, np.int8(5), np.uint64(5), OwnNumber(5), np.array(5)])
def test_whole_number_of_any_class_becomes_that_of_python(number: Any) -> None:
    assert checked_whole(number, 0, None, "here") == 5
    assert type(checked_whole(number, 0, None, "here")) is int


@pytest.mark.parametrize("number", [0.5, np.float64(0.5), np.float16(0.5), Fraction(1, 2)])
def test_number_of_any_class_becomes_that_of_python(number: Any) -> None:
    assert checked_number(number, 0, 1, "here") == 0.5
    assert type(checked_number(number, 0, 1, "here")) is float


def test_numbers_of_numpy_make_the_same_windows_and_delays() -> None:
    assert WindowPlan.of(np.float32(0.5), np.float64(0.25), np.int32(16_000), "here") == WindowPlan.of(  # type: ignore[arg-type]
        0.5, 0.25, 16_000, "here"
    )
    # In numpy's own arithmetic two seconds are more nanoseconds than a float16 can hold.
    assert Reconnection(first_s=np.float16(2)).delay_ns(0, 0.5) == Reconnection(first_s=2).delay_ns(0, 0.5)  # type: ignore[arg-type]


async def test_list_and_array_are_sizes_as_well() -> None:
    async def first(size: Any) -> media.Frame:
        async with media.synthetic_video(size=size, frames=1, pace=False) as frames:
            return await anext(aiter(frames))

    expected = await first((6, 4))
    for size in ([6, 4], np.array([6, 4]), (np.int64(6), np.int64(4))):
        np.testing.assert_array_equal((await first(size)).data, expected.data)
