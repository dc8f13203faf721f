"""The layout of the kernel's structures, against its header where this machine has it and a compiler."""

import ctypes
import pathlib
import shutil
import subprocess

import pytest

from aionn.media.cameras import videodev

STRUCTURES = {
    "v4l2_capability": videodev.Capability,
    "v4l2_fmtdesc": videodev.FormatDescription,
    "v4l2_pix_format": videodev.PixFormat,
    "v4l2_format": videodev.Format,
    "v4l2_requestbuffers": videodev.RequestBuffers,
    "v4l2_buffer": videodev.Buffer,
    "v4l2_streamparm": videodev.StreamParameters,
    "v4l2_frmsizeenum": videodev.FrameSize,
    "v4l2_frmivalenum": videodev.FrameInterval,
    "v4l2_queryctrl": videodev.QueryControl,
    "v4l2_querymenu": videodev.QueryMenu,
    "v4l2_control": videodev.Control,
}
REQUESTS = [
    "QUERYCAP", "ENUM_FMT", "S_FMT", "REQBUFS", "QUERYBUF", "QBUF", "DQBUF", "STREAMON", "STREAMOFF", "G_PARM", "S_PARM", "S_INPUT",
    "ENUM_FRAMESIZES", "ENUM_FRAMEINTERVALS", "G_CTRL", "S_CTRL", "QUERYCTRL", "QUERYMENU",
]  # fmt: skip
FIELDS = {
    "v4l2_buffer": ["bytesused", "flags", "timestamp", "sequence", "memory", "m", "length", "request_fd"],
    "v4l2_capability": ["card", "bus_info", "capabilities", "device_caps"],
    "v4l2_format": ["fmt"],
    "v4l2_pix_format": ["bytesperline", "sizeimage", "colorspace", "ycbcr_enc", "quantization"],
    "v4l2_fmtdesc": ["flags", "pixelformat"],
    "v4l2_frmsizeenum": ["type"],
    "v4l2_frmivalenum": ["type"],
    "v4l2_queryctrl": ["name", "minimum", "default_value", "flags"],
    "v4l2_querymenu": ["index", "reserved"],
}


def test_layout_is_that_of_the_kernels_header(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None or not pathlib.Path("/usr/include/linux/videodev2.h").exists():
        pytest.skip("there is no C compiler, or the kernel's headers are missing")
    lines = [f'printf("sizeof {name} %zu\\n", sizeof(struct {name}));' for name in STRUCTURES]
    lines += [
        f'printf("{name} {field} %zu\\n", offsetof(struct {name}, {field}));'
        for name in FIELDS
        for field in FIELDS[name]
    ]
    lines += [f'printf("VIDIOC {name} %lu\\n", (unsigned long)VIDIOC_{name});' for name in REQUESTS]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <sys/time.h>\n#include <linux/videodev2.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "layout")], check=True, timeout=60)
    answer = subprocess.run(
        [str(tmp_path / "layout")], check=True, capture_output=True, text=True, timeout=60
    )
    for line in answer.stdout.splitlines():
        first, second, number = line.split()
        if first == "sizeof":
            assert ctypes.sizeof(STRUCTURES[second]) == int(number), second
        elif first == "VIDIOC":
            assert getattr(videodev, second) == int(number), second
        else:
            assert getattr(STRUCTURES[first], second).offset == int(number), (first, second)


def test_numbers_are_those_of_the_usual_machines():
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        pytest.skip("the numbers of a machine with 32 bits differ")
    assert videodev.QUERYCAP == 0x80685600
    assert videodev.S_FMT == 0xC0D05605
    assert videodev.DQBUF == 0xC0585611
    assert videodev.STREAMON == 0x40045612


def test_names_of_formats_are_their_four_characters():
    assert videodev.fourcc("YUYV") == 0x56595559
    assert videodev.fourcc_name(videodev.fourcc("NV12")) == "NV12"
    assert videodev.fourcc_name(0x80000000 | videodev.fourcc("Y16")) == "Y16"
    assert videodev.fourcc_name(0xFFFFFFFF) == ""
