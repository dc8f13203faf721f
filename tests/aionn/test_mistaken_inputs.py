"""What a newcomer gives in the place of an input, a picture, a file or an address: each answer says what to write instead."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.hal import OperandType
from aionn.media import Frame, camera, video_file
from aionn.runtime.memory.arguments import TensorSpec, check_inputs
from aionn.runtime.memory.declared import Declared
from aionn.testing.models import identity

X = np.ones(4, np.float32)


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process") as opened:
        yield opened


FLOATS = TensorSpec("x", OperandType.TENSOR_FLOAT32, (1, 6, 5, 3))
BYTES = TensorSpec("x", OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (1, 6, 5, 3), 0.5, 0)


@pytest.mark.parametrize(
    ("spec", "value", "remedy"),
    [
        (
            FLOATS,
            np.zeros((1, 6, 5, 3)),
            "expected element type float32, got float64 .*; types are not converted, write array.astype(numpy.float32)",
        ),
        (
            FLOATS,
            np.zeros((6, 5, 3), np.uint8),
            "; aionn.image_writer makes the function that writes a picture into it",
        ),
        (
            BYTES,
            np.zeros((1, 6, 5, 3), np.float32),
            "; aionn.value_writer makes the function that writes real values into it",
        ),
        (FLOATS, np.zeros((6, 5, 3), np.float32), "; did you mean array[numpy.newaxis]?"),
        (FLOATS, np.zeros((1, 1, 6, 5, 3), np.float32), "; did you mean array[0]?"),
        (FLOATS, np.zeros((1, 3, 6, 5), np.float32), "; did you mean array.transpose(0, 2, 3, 1)?"),
        (FLOATS, np.zeros((3, 6, 5), np.float32), "; did you mean array.transpose(1, 2, 0)[numpy.newaxis]?"),
        (
            FLOATS,
            np.zeros((1, 7, 5, 3), np.float32),
            "expected shape [1, 6, 5, 3], got [1, 7, 5, 3] (it takes float32 of shape [1, 6, 5, 3])",
        ),
    ],
)
def test_array_of_another_type_or_shape(spec: TensorSpec, value: Any, remedy: str) -> None:
    with pytest.raises(aionn.InvalidArgument) as caught:
        check_inputs([spec], [value])
    assert re.search(".*".join(map(re.escape, remedy.split(".*"))) + "$", str(caught.value)), caught.value


def test_array_for_an_input_whose_declared_type_numpy_lacks() -> None:
    spec = TensorSpec("x", OperandType.TENSOR_FLOAT32, (2,), declared=Declared("bfloat16", (2,)))
    with pytest.raises(aionn.InvalidArgument, match=r"write array.astype\(numpy.float32\)$"):
        check_inputs([spec], [np.zeros(2, np.int16)])


def test_array_for_an_input_whose_declared_type_a_package_has_added_to_numpy() -> None:
    pytest.importorskip(
        "ml_dtypes"
    )  # Its import gives numpy a type by the name bfloat16, which numpy has no attribute for.
    test_array_for_an_input_whose_declared_type_numpy_lacks()


def test_array_for_an_input_of_truth_values(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bool = {name: value for name, value in vars(np).items() if name != "bool"}  # As numpy 1.26 is.
    monkeypatch.setattr("aionn.runtime.memory.remedies.np", SimpleNamespace(**without_bool))
    with pytest.raises(aionn.InvalidArgument, match=r"write array.astype\(numpy.bool_?\)$"):
        check_inputs([TensorSpec("x", OperandType.TENSOR_BOOL8, (2,))], [np.zeros(2, np.int16)])


FRAME = Frame(np.zeros((6, 5, 3), np.uint8), 0, 0, 0.0)


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (FRAME, r"got a Frame; write frame.data$"),
        (
            np.zeros((8, 8, 3), np.uint8),
            r"got uint8 \[8, 8, 3\]; open the source with size=\(5, 6\), or see fit= of image_writer$",
        ),
        (
            np.zeros((6, 5, 3), np.float32),
            r"got float32 \[6, 5, 3\]; aionn.value_writer writes real numbers$",
        ),
        (np.zeros((1, 6, 5, 3), np.uint8), r"got uint8 \[1, 6, 5, 3\]; write array\[0\]$"),
    ],
)
def test_other_value_in_a_writer_of_pictures(picture: Any, words: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=words):
        aionn.image_writer(FLOATS)(picture, np.zeros((1, 6, 5, 3), np.float32))


def test_view_and_picture_in_the_wrong_order() -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"expected a uint8 picture of shape \[6, 5, 3\], got float32"
    ):
        aionn.image_writer(FLOATS)(np.zeros((1, 6, 5, 3), np.float32), FRAME.data)


async def test_frames_without_into(runtime: aionn.Runtime) -> None:
    async def frames() -> AsyncIterator[Frame]:
        yield FRAME

    async with await runtime.compile(identity((1, 6, 5, 3))) as net, net.burst() as burst:
        with pytest.raises(
            aionn.InvalidArgument,
            match=r"got a Frame .*, which into= of a stream writes: see aionn.image_writer$",
        ):
            await anext(burst.stream(frames()))


def test_size_that_is_one_number() -> None:
    with pytest.raises(aionn.InvalidArgument, match=r"video_file: size: expected \(width, height\), got 96$"):
        video_file("clip.mp4", size=96)  # type: ignore[arg-type]


def test_unknown_argument_of_open_names_open() -> None:
    with pytest.raises(TypeError, match=r"^open\(\) got an unexpected keyword argument 'driver'"):
        aionn.open(driver="litert-cpu")  # type: ignore[call-arg]


def test_address_of_a_network_stream_for_a_camera() -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"got the address 'rtsp://camera/1'; use aionn.media.network$"
    ):
        camera("rtsp://camera/1")


async def test_address_and_missing_file_as_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, words in (
        ("https://host/clip.mp4", r"; aionn.media.network opens an address$"),
        ("clip.mp4", rf"No such file or directory \(in {tmp_path}\)$"),
        ("~/clip.mp4", r"; ~ is a home directory in shells alone, see pathlib.Path.expanduser$"),
    ):
        with pytest.raises(aionn.InvalidArgument, match=words):
            async with video_file(path):
                pass


async def test_path_of_a_missing_model(
    runtime: aionn.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, words in (
        (
            "model.tflite",
            rf"^model model.tflite: cannot be read: No such file or directory \(in {tmp_path}\)$",
        ),
        ("~/model.tflite", r"; ~ is a home directory in shells alone, see pathlib.Path.expanduser$"),
        (tmp_path / "model.tflite", r"No such file or directory$"),
    ):
        with pytest.raises(aionn.InvalidArgument, match=words):
            await runtime.compile(path)


async def test_what_is_closed_says_what_to_do(runtime: aionn.Runtime) -> None:
    async with await runtime.compile(identity((4,))) as net:
        async with net.burst() as burst:
            await burst.execute([X])
        with pytest.raises(aionn.InvalidArgument, match=r"^burst: closed; .* call net.burst\(\) again$"):
            await burst.execute([X])
        with pytest.raises(
            aionn.InvalidArgument, match=r"^burst: can be entered once; call net.burst\(\) again$"
        ):
            await burst.__aenter__()
    with pytest.raises(aionn.InvalidArgument, match=r"^compilation: closed; .* or compile again$"):
        await net.execute([X])
