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
            "docs/running/models.md",
            "docs/running/devices.md",
            "docs/running/compilation.md",
            "docs/running/executions.md",
            "docs/running/streams.md",
            "docs/running/live.md",
            "docs/running/memory.md",
            "docs/running/threads.md",
            "docs/running/settings.md",
        ),
    ),
    Section(
        "Speed and deadlines",
        (
            "docs/deadlines/measuring.md",
            "docs/deadlines/latency.md",
            "docs/deadlines/guarantees.md",
            "docs/deadlines/realtime.md",
            "docs/deadlines/testing.md",
        ),
    ),
    Section(
        "In production",
        (
            "docs/production/operating.md",
            "docs/production/traces-and-logs.md",
            "docs/production/watch-page.md",
            "docs/production/faults.md",
            "docs/production/recovery.md",
            "docs/production/troubleshooting.md",
            "docs/production/fleet.md",
            "docs/production/ray.md",
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
        "Engines",
        (
            "docs/engines/litert.md",
            "docs/engines/onnxruntime.md",
            "docs/engines/openvino.md",
            "docs/engines/tflite-operators.md",
            "docs/engines/onnx-operators.md",
        ),
    ),
    Section(
        "Drivers",
        (
            "docs/drivers/writing-a-driver.md",
            "docs/drivers/operations.md",
            "docs/drivers/adding-an-operation.md",
        ),
    ),
    Section(
        "Coming from",
        (
            "docs/coming-from/litert.md",
            "docs/coming-from/onnxruntime.md",
            "docs/coming-from/openvino.md",
            "docs/coming-from/triton.md",
            "docs/coming-from/gstreamer.md",
            "docs/coming-from/mediapipe.md",
            "docs/coming-from/deepstream.md",
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
