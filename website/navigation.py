"""The order of the pages: which section a page is in, and what the section is for.

A test checks that each page of ``docs`` is here exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SECTIONS", "Section"]


class Section(NamedTuple):
    """A part of the navigation.

    Attributes:
        title: Its heading.
        pages: Their files, relative to the root of the repository, in the order in which they are read.
    """

    title: str
    pages: tuple[str, ...]


SECTIONS = (
    Section("Start", ("docs/installing.md", "docs/tutorial.md", "docs/glossary.md")),
    Section(
        "Run models",
        (
            "docs/models.md",
            "docs/devices.md",
            "docs/fleet.md",
            "docs/ray.md",
            "docs/compilation.md",
            "docs/executions.md",
            "docs/streams.md",
            "docs/live.md",
            "docs/memory.md",
            "docs/threads.md",
            "docs/settings.md",
            "docs/watching.md",
            "docs/watch.md",
            "docs/operating.md",
            "docs/faults.md",
            "docs/recovery.md",
            "docs/troubleshooting.md",
        ),
    ),
    Section(
        "How to",
        (
            "docs/how-to/fastapi.md",
            "docs/how-to/jupyter.md",
            "docs/how-to/service.md",
            "docs/how-to/docker.md",
            "docs/how-to/open-inference-protocol.md",
            "docs/how-to/first-driver.md",
            "docs/how-to/custom-operators.md",
            "docs/how-to/virtual-time.md",
            "docs/how-to/conformance-data.md",
        ),
    ),
    Section(
        "Speed and deadlines",
        ("docs/measuring.md", "docs/latency.md", "docs/guarantees.md", "docs/realtime.md", "docs/testing.md"),
    ),
    Section(
        "Engines and drivers",
        (
            "docs/litert.md",
            "docs/onnxruntime.md",
            "docs/openvino.md",
            "docs/drivers.md",
            "docs/operations.md",
            "docs/tflite-operators.md",
            "docs/onnx-operators.md",
            "docs/adding-an-operation.md",
        ),
    ),
    Section(
        "Coming from",
        (
            "docs/coming-from-litert.md",
            "docs/coming-from-onnxruntime.md",
            "docs/coming-from-openvino.md",
            "docs/coming-from-triton.md",
            "docs/coming-from-gstreamer.md",
            "docs/coming-from-mediapipe.md",
            "docs/coming-from-deepstream.md",
        ),
    ),
    Section(
        "The project",
        (
            "docs/architecture.md",
            "docs/security.md",
            "fmq/README.md",
            "fences/README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        ),
    ),
)
