"""Files that are given in the place of a model: their kinds by their first bytes, in the words of the error.

Owns the table of kinds. The importers ask it when they have rejected a file, so that no file that can be imported is taken for
another one.

Source: the magic numbers in the specifications of the formats; libmagic's for those that have none.
"""

from __future__ import annotations

import codecs

from aionn.errors import InvalidModel

__all__ = ["KINDS", "TFLITE_IDENTIFIER", "error_of_file", "foreign_kind", "shortened"]

TFLITE_IDENTIFIER = b"TFL3"
"""Bytes 4 to 7 of a .tflite file."""

HEAD_BYTES = 512
"""Bytes that are looked at: the first lines of a text, and the header of a tar archive."""

TEXT_SHOWN = 1000
"""Characters of an error about a file that repeat names in it; a name may be as long as the file."""

_EXPORT = "export the model as .onnx or .tflite"
_MODEL_FIRST = "the model comes first, and {} are inputs"
_PICTURE, _ARRAY, _RECORDING, _VIDEO = (
    _MODEL_FIRST.format(inputs) for inputs in ("pictures", "arrays", "recordings", "videos")
)

KINDS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs", "a pointer of Git LFS; git lfs pull fetches the model"),
    (0, b"<?xml", "XML, as OpenVINO writes it beside a .bin file; export the model as .onnx or .tflite"),
    (0, b"<net", "XML, as OpenVINO writes it beside a .bin file; export the model as .onnx or .tflite"),
    (0, b"<", "a page of HTML; the download failed"),
    (0, b"\xff\xd8\xff", f"a JPEG picture; {_PICTURE}"),
    (0, b"\x89PNG", f"a PNG picture; {_PICTURE}"),
    (0, b"GIF8", f"a GIF picture; {_PICTURE}"),
    (0, b"\x93NUMPY", f"an .npy file; {_ARRAY}"),
    (8, b"WAVE", f"a WAV recording; {_RECORDING}"),
    (8, b"AVI ", f"an AVI video; {_VIDEO}"),
    (8, b"WEBP", f"a WebP picture; {_PICTURE}"),
    (0, b"OggS", f"an Ogg recording; {_RECORDING}"),
    (0, b"fLaC", f"a FLAC recording; {_RECORDING}"),
    (0, b"ID3", f"an MP3 recording; {_RECORDING}"),
    (4, b"ftyp", f"an MP4 video or recording; {_VIDEO}"),
    (0, b"\x1aE\xdf\xa3", f"a Matroska or WebM video; {_VIDEO}"),
    (0, b"PK\x03\x04", f"a zip archive, as PyTorch and Keras write them; {_EXPORT}"),
    (0, b"\x80", "a pickle, as PyTorch writes them; export the model as .onnx"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes them; convert the model to .tflite"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it first"),
    (257, b"ustar", "a tar archive; unpack it first"),
    (0, b"GGUF", "a GGUF file, as llama.cpp reads them; its language models cannot be imported"),
    (8, b'{"', "a file of safetensors, which has weights alone; export the model as .onnx"),
    (0, b"\x7fELF", "a program or a library of ELF; the model comes first"),
    # ONNX has the same fields under these numbers for a file of its version 1, which no exporter wrote.
    (
        0,
        b"\x08\x01\x12",
        "a saved_model.pb of TensorFlow; convert the folder to .tflite, or export it as .onnx",
    ),
)
"""Kinds of files by the bytes at an offset; the first entry that fits is the kind."""


def foreign_kind(head: bytes) -> str | None:
    """The kind of a file, with the advice for it; None where it is not known.

    Args:
        head: Its first ``HEAD_BYTES``, or all of a shorter one.
    """
    if not head:
        return "an empty file; the download failed, or the disk was full"
    for offset, magic, words in KINDS:
        if head.startswith(magic, offset):
            return words
    return "a text file; the model comes first" if _is_text(head) else None


def _is_text(head: bytes) -> bool:
    # Incremental, since the head may end within a character.
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(c.isprintable() or c in "\t\n\r\f" for c in text)


def shortened(text: str, limit: int = TEXT_SHOWN) -> str:
    """A text without its middle if it is longer than ``limit``."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def error_of_file(where: str, data: bytes, error: InvalidModel) -> InvalidModel:
    """The error of a file that an importer has rejected: its kind where that is known, otherwise the importer's reason.

    Args:
        where: Names the file.
        data: Its content, or its first ``HEAD_BYTES``.
        error: The importer's.
    """
    # A .tflite file begins with an offset, whose bytes may be those of any kind.
    kind = None if data[4:8] == TFLITE_IDENTIFIER else foreign_kind(data[:HEAD_BYTES])
    return InvalidModel(
        f"{where}: {shortened(str(error))}"
        if kind is None
        else f"{where}: expected a .tflite or .onnx file, got {kind}"
    )
