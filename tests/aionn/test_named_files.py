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
from aionn.models.onnx.summary import summarize_onnx
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
        ("a.xml", b'<net name="x" version="11">', "XML, as OpenVINO writes it .*; export"),
        ("a.wav", b"RIFF\x24\0\0\0WAVE", "a WAV recording; the model comes first"),
        ("a.avi", b"RIFF\x24\0\0\0AVI ", "an AVI video; the model comes first"),
        (
            "a.mp4",
            b"\0\0\0\x20ftypisom",
            "an MP4 video or recording; the model comes first, and videos are inputs",
        ),
        ("a.onnx", b"\0\0\0\x20ftypisom", "an MP4 video or recording; the model comes first"),
        ("a.gguf", b"GGUF\x03\0\0\0", "a GGUF file"),
        ("a.tflite.gz", b"\x1f\x8b\x08\0\0\0\0\0", "a gzip archive; unpack it first"),
        ("a.tar", b"a".ljust(257, b"\0") + b"ustar\0", "a tar archive; unpack it first"),
        ("a.safetensors", b'\x10\0\0\0\0\0\0\0{"w": {}}', "a file of safetensors"),
        ("saved_model.pb", b"\x08\x01\x12\x9b\x04\n\x8e\x04", "a saved_model.pb of TensorFlow; convert"),
        ("README.md", b"\n# gr\xc3\xbcn\n", "a text file; the model comes first"),
        ("a.onnx", b"[project]\nname = 1\n", "a text file; the model comes first"),
        ("long.md", "\u20ac".encode() * 400, "a text file; the model comes first"),
        ("a.tflite", b"", "an empty file; the download failed"),
        ("a.onnx", b"", "an empty file; the download failed"),
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
    load = summarize_onnx if name.endswith(".onnx") else load_tflite
    with pytest.raises(InvalidModel, match=f"^model {path}: expected a .tflite or .onnx file, got {words}"):
        load(path)


@pytest.mark.parametrize("offset", [ord("<"), 0x80])
def test_tflite_file_is_never_taken_for_another_kind(offset: int, tmp_path: Path) -> None:
    # Its first byte is that of a page, or of a pickle.
    path = tmp_path / "a.tflite"
    path.write_bytes(offset.to_bytes(4, "little") + b"TFL3" + bytes(8))
    with pytest.raises(InvalidModel, match=f"^model {path}: the file is cut short or damaged"):
        load_file(path)


def test_bytes_named_onnx_are_not_an_onnx_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes.onnx"
    path.write_bytes(b"bytes\xff")
    with pytest.raises(InvalidModel, match=f"^model {path}: not an ONNX file, or a damaged one: protobuf, "):
        load_file(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: b"\0", r"not a \.tflite file \(expected at least 8 bytes, got 1\)"),
        (
            lambda data: data[: len(data) // 2],
            r"the file is cut short or damaged \(.* at byte \d+, the file has \d+",
        ),
        (lambda data: b"\0\0\0\x20TFL2" + data[8:], r"not a \.tflite file \(expected .* TFL3, got TFL2\)"),
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
