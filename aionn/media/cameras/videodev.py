"""The structures and request numbers of the kernel's Video4Linux2 interface that a capture needs.

Owns their layout. Refuses to own any decision and any call.

Source: ``include/uapi/linux/videodev2.h`` and ``asm-generic/ioctl.h`` of the kernel; the tests compare sizes and numbers with
    the header
where the machine has it.
"""

from __future__ import annotations

import ctypes

__all__ = [
    "BUF_FLAG_ERROR",
    "BUF_FLAG_TIMESTAMP_MASK",
    "BUF_FLAG_TIMESTAMP_MONOTONIC",
    "Buffer",
    "CAP_DEVICE_CAPS",
    "CAP_STREAMING",
    "CAP_TIMEPERFRAME",
    "CAP_VIDEO_CAPTURE",
    "Capability",
    "Control",
    "FIELD_NONE",
    "FMT_FLAG_EMULATED",
    "Format",
    "FormatDescription",
    "FrameInterval",
    "FrameSize",
    "MEMORY_MMAP",
    "MEMORY_USERPTR",
    "QueryControl",
    "QueryMenu",
    "RequestBuffers",
    "StreamParameters",
    "TYPE_DISCRETE",
    "VIDEO_CAPTURE",
    "fourcc",
    "fourcc_name",
]

VIDEO_CAPTURE = 1
MEMORY_MMAP = 1
MEMORY_USERPTR = 2
FIELD_NONE = 1
TYPE_DISCRETE = 1

CAP_VIDEO_CAPTURE = 0x00000001
CAP_STREAMING = 0x04000000
CAP_DEVICE_CAPS = 0x80000000
CAP_TIMEPERFRAME = 0x1000
FMT_FLAG_EMULATED = 0x2

BUF_FLAG_ERROR = 0x00000040
BUF_FLAG_TIMESTAMP_MASK = 0x0000E000
BUF_FLAG_TIMESTAMP_MONOTONIC = 0x00002000

CTRL_INTEGER, CTRL_BOOLEAN, CTRL_MENU, CTRL_BUTTON, CTRL_BITMASK, CTRL_INTEGER_MENU = 1, 2, 3, 4, 8, 9
CTRL_FLAG_DISABLED, CTRL_FLAG_READ_ONLY, CTRL_FLAG_INACTIVE, CTRL_FLAG_WRITE_ONLY = 0x1, 0x4, 0x10, 0x40
CTRL_FLAG_NEXT = 0x80000000

U32 = ctypes.c_uint32


class Fraction(ctypes.Structure):
    """``struct v4l2_fract``."""

    _fields_ = [("numerator", U32), ("denominator", U32)]


class Capability(ctypes.Structure):
    """``struct v4l2_capability``."""

    _fields_ = [
        ("driver", ctypes.c_char * 16),
        ("card", ctypes.c_char * 32),
        ("bus_info", ctypes.c_char * 32),
        ("version", U32),
        ("capabilities", U32),
        ("device_caps", U32),
        ("reserved", U32 * 3),
    ]


class FormatDescription(ctypes.Structure):
    """``struct v4l2_fmtdesc``."""

    _fields_ = [
        ("index", U32),
        ("type", U32),
        ("flags", U32),
        ("description", ctypes.c_char * 32),
        ("pixelformat", U32),
        ("mbus_code", U32),
        ("reserved", U32 * 3),
    ]


class PixFormat(ctypes.Structure):
    """``struct v4l2_pix_format``."""

    _fields_ = [
        ("width", U32),
        ("height", U32),
        ("pixelformat", U32),
        ("field", U32),
        ("bytesperline", U32),
        ("sizeimage", U32),
        ("colorspace", U32),
        ("priv", U32),
        ("flags", U32),
        ("ycbcr_enc", U32),
        ("quantization", U32),
        ("xfer_func", U32),
    ]


class _FormatUnion(ctypes.Union):
    # Other members of the union have pointers, which set its alignment.
    _fields_ = [("pix", PixFormat), ("raw_data", ctypes.c_uint8 * 200), ("_aligned", ctypes.c_void_p)]


class Format(ctypes.Structure):
    """``struct v4l2_format``."""

    _fields_ = [("type", U32), ("fmt", _FormatUnion)]


class RequestBuffers(ctypes.Structure):
    """``struct v4l2_requestbuffers``."""

    _fields_ = [
        ("count", U32),
        ("type", U32),
        ("memory", U32),
        ("capabilities", U32),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 3),
    ]


class TimeValue(ctypes.Structure):
    """``struct timeval``."""

    _fields_ = [("tv_sec", ctypes.c_long), ("tv_usec", ctypes.c_long)]


class _BufferUnion(ctypes.Union):
    _fields_ = [
        ("offset", U32),
        ("userptr", ctypes.c_ulong),
        ("planes", ctypes.c_void_p),
        ("fd", ctypes.c_int32),
    ]


class Buffer(ctypes.Structure):
    """``struct v4l2_buffer``."""

    _fields_ = [
        ("index", U32),
        ("type", U32),
        ("bytesused", U32),
        ("flags", U32),
        ("field", U32),
        ("timestamp", TimeValue),
        ("timecode", U32 * 4),
        ("sequence", U32),
        ("memory", U32),
        ("m", _BufferUnion),
        ("length", U32),
        ("reserved2", U32),
        ("request_fd", ctypes.c_int32),
    ]


class _CaptureParameters(ctypes.Structure):
    _fields_ = [
        ("capability", U32),
        ("capturemode", U32),
        ("timeperframe", Fraction),
        ("extendedmode", U32),
        ("readbuffers", U32),
        ("reserved", U32 * 4),
    ]


class _ParametersUnion(ctypes.Union):
    _fields_ = [("capture", _CaptureParameters), ("raw_data", ctypes.c_uint8 * 200)]


class StreamParameters(ctypes.Structure):
    """``struct v4l2_streamparm``."""

    _fields_ = [("type", U32), ("parm", _ParametersUnion)]


class _SizeStepwise(ctypes.Structure):
    _fields_ = [
        ("min_width", U32),
        ("max_width", U32),
        ("step_width", U32),
        ("min_height", U32),
        ("max_height", U32),
        ("step_height", U32),
    ]


class _SizeDiscrete(ctypes.Structure):
    _fields_ = [("width", U32), ("height", U32)]


class _SizeUnion(ctypes.Union):
    _fields_ = [("discrete", _SizeDiscrete), ("stepwise", _SizeStepwise)]


class FrameSize(ctypes.Structure):
    """``struct v4l2_frmsizeenum``."""

    _fields_ = [
        ("index", U32),
        ("pixel_format", U32),
        ("type", U32),
        ("size", _SizeUnion),
        ("reserved", U32 * 2),
    ]


class _IntervalStepwise(ctypes.Structure):
    _fields_ = [("min", Fraction), ("max", Fraction), ("step", Fraction)]


class _IntervalUnion(ctypes.Union):
    _fields_ = [("discrete", Fraction), ("stepwise", _IntervalStepwise)]


class FrameInterval(ctypes.Structure):
    """``struct v4l2_frmivalenum``."""

    _fields_ = [
        ("index", U32),
        ("pixel_format", U32),
        ("width", U32),
        ("height", U32),
        ("type", U32),
        ("interval", _IntervalUnion),
        ("reserved", U32 * 2),
    ]


class QueryControl(ctypes.Structure):
    """``struct v4l2_queryctrl``."""

    _fields_ = [
        ("id", U32),
        ("type", U32),
        ("name", ctypes.c_char * 32),
        ("minimum", ctypes.c_int32),
        ("maximum", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("default_value", ctypes.c_int32),
        ("flags", U32),
        ("reserved", U32 * 2),
    ]


class _MenuUnion(ctypes.Union):
    _pack_ = 1
    _fields_ = [("name", ctypes.c_char * 32), ("value", ctypes.c_int64)]


class QueryMenu(ctypes.Structure):
    """``struct v4l2_querymenu``."""

    _pack_ = 1
    _fields_ = [("id", U32), ("index", U32), ("entry", _MenuUnion), ("reserved", U32)]


class Control(ctypes.Structure):
    """``struct v4l2_control``."""

    _fields_ = [("id", U32), ("value", ctypes.c_int32)]


def _number(direction: int, number: int, kind: type[ctypes._CData]) -> int:
    """A request number, as ``_IOC`` of the kernel makes it on x86, arm and RISC-V."""
    return direction << 30 | ctypes.sizeof(kind) << 16 | ord("V") << 8 | number


WRITE, READ, BOTH = 1, 2, 3

QUERYCAP = _number(READ, 0, Capability)
ENUM_FMT = _number(BOTH, 2, FormatDescription)
S_FMT = _number(BOTH, 5, Format)
REQBUFS = _number(BOTH, 8, RequestBuffers)
QUERYBUF = _number(BOTH, 9, Buffer)
QBUF = _number(BOTH, 15, Buffer)
DQBUF = _number(BOTH, 17, Buffer)
STREAMON = _number(WRITE, 18, ctypes.c_int)
STREAMOFF = _number(WRITE, 19, ctypes.c_int)
G_PARM = _number(BOTH, 21, StreamParameters)
S_PARM = _number(BOTH, 22, StreamParameters)
G_CTRL = _number(BOTH, 27, Control)
S_CTRL = _number(BOTH, 28, Control)
QUERYCTRL = _number(BOTH, 36, QueryControl)
QUERYMENU = _number(BOTH, 37, QueryMenu)
S_INPUT = _number(BOTH, 39, ctypes.c_int)
ENUM_FRAMESIZES = _number(BOTH, 74, FrameSize)
ENUM_FRAMEINTERVALS = _number(BOTH, 75, FrameInterval)


def fourcc(name: str) -> int:
    """The number of a pixel format from its four characters, filled up with spaces."""
    return int.from_bytes(name.ljust(4).encode("ascii"), "little")


def fourcc_name(number: int) -> str:
    """The four characters of a pixel format; others than letters, digits and spaces are shown as ``?``."""
    letters = (chr(byte) for byte in (number & 0x7FFF_FFFF).to_bytes(4, "little"))
    return "".join(letter if letter.isascii() and letter.isalnum() else "?" for letter in letters).rstrip("?")
