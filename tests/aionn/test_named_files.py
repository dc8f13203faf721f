"""Whatever reads a file that a user names refuses pipes and devices, and says which file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.benchmarking.labelled import load_array
from aionn.conformance.cts import load_tests
from aionn.conformance.random_graphs.suite import load_plan
from aionn.drivers.kit.described import read_described
from aionn.errors import InvalidArgument, InvalidModel
from aionn.media import audio_file, video_file
from aionn.models.importing import load_file
from aionn.models.tflite import load_tflite
from aionn.observability.tracing import start_tracing
from aionn.platform.arrays import read_array
from aionn.runtime import traces
from aionn.simulation import workload

pytestmark = pytest.mark.usefixtures("ends_at_once")


@pytest.mark.parametrize(
    "read",
    [
        load_array,
        load_plan,
        load_tests,
        load_tflite,
        traces.read_trace,
        workload.read_trace,
        workload.read_workload,
        lambda path: read_described(path, dict[str, Any]),
        lambda path: start_tracing(path, process="application"),
    ],
)
def test_pipe_is_refused_and_not_waited_for(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(
        InvalidArgument, match=r"fifo: (expected a regular file, got a pipe|cannot be written)"
    ):
        read(path)


def test_message_names_the_option_and_the_file_once() -> None:
    with pytest.raises(InvalidArgument, match=r"^--input /dev/null: expected a regular file, got a device$"):
        read_array(Path("/dev/null"), "--input")


@pytest.mark.parametrize("source", [audio_file, video_file])
async def test_pipe_is_no_medium(source: Any, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match="fifo', got a pipe"):
        async with source(path) as items:
            async for _ in items:
                pass


@pytest.mark.parametrize("cached", [False, True])
async def test_pipe_and_device_are_no_models(tmp_path: Path, cached: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    options = {"cache_dir": tmp_path / "cache"} if cached else {}
    async with aionn.open(isolation="in_process") as runtime:
        for path, words in (
            (tmp_path / "fifo", "fifo: expected a regular file, got a pipe"),
            ("/dev/null", "/dev/null: expected a regular file, got a device"),
            ("", "model: the path is empty"),
            ("\0x", "NUL"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                await runtime.compile(path, **options)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.tflite", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS; .*git lfs pull"),
        ("a.onnx", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS; .*git lfs pull"),
        ("a.onnx", b"<!DOCTYPE html><html></html>", "a page of HTML; .*download"),
        ("a.xml", b'<?xml version="1.0"?><net/>', "XML, as OpenVINO writes it .*; export"),
        ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG picture; the model comes first"),
        ("a.png", b"\x89PNG\r\n\x1a\n", "a PNG picture; the model comes first"),
        ("a.npy", b"\x93NUMPY\x01\0", "an .npy file; the model comes first"),
        ("a.wav", b"RIFF\x24\0\0\0WAVE", "a WAV or AVI file; the model comes first"),
        ("a.pt", b"PK\x03\x04\x14\0\0\0\0\0", "a zip archive.*; export"),
        ("a.pt", b"\x80\x02\x8a\x0a", "a pickle.*; export"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file.*; convert"),
    ],
)
def test_file_of_another_kind_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match=f"^model {path}: expected a .tflite or .onnx file, got {words}"):
        load_file(path)


def test_text_named_onnx_is_not_an_onnx_file(tmp_path: Path) -> None:
    path = tmp_path / "text.onnx"
    path.write_text("bytes\n")
    with pytest.raises(InvalidModel, match=f"^model {path}: not an ONNX file, or a damaged one: protobuf, "):
        load_file(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: b"", r"not a \.tflite file \(expected at least 8 bytes, got 0\)"),
        (
            lambda data: data[: len(data) // 2],
            r"the file is cut short or damaged \(.* at byte \d+, the file has \d+",
        ),
        (lambda data: b"\0\0\0\x20ftyp" + data[8:], r"not a \.tflite file \(expected .* TFL3, got ftyp\)"),
        (lambda data: b"\0\0\0\x20\0\xff\0\0" + data[8:], r"not a .tflite file .*got 0x00ff0000\)"),
    ],
)
def test_broken_model_is_named(
    example_data: Path, tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    data = change((example_data / "digits_float.tflite").read_bytes())
    path = tmp_path / "broken.tflite"
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match=f"^model {path}: {words}"):
        load_tflite(path)
    with pytest.raises(InvalidModel, match=f"^model: {words}"):
        load_tflite(data)
