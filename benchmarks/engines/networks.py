"""The two networks, written as ONNX files with random weights: a small CNN, and MobileNetV2 1.0 for 224 x 224 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from aionn.models.onnx.encoding import encode_model, node, tensor
from aionn.models.onnx.schema import (
    DataType,
    GraphProto,
    ModelProto,
    NodeProto,
    OpsetImport,
    TensorProto,
    ValueInfo,
)

__all__ = ["mobilenet_v2", "small_cnn"]

OPSET, IR_VERSION = 17, 8

# Expansion, channels, repetitions and stride of MobileNetV2's blocks.
BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _Network:
    def __init__(self, channels: int, size: int) -> None:
        self._rng = np.random.default_rng(7)
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []
        self._input = ValueInfo("x", DataType.FLOAT, (1, channels, size, size))
        self.channels = channels
        self.value = "x"

    def _constant(self, array: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants.append(tensor(name, np.asarray(array, np.float32)))
        return name

    def add(self, kind: str, *others: str, **attributes: Any) -> None:
        """A node that reads the last value, and other ones."""
        name = f"v{len(self._nodes)}"
        self._nodes.append(node(kind, [self.value, *others], [name], **attributes))
        self.value = name

    def convolve(self, channels: int, size: int = 3, stride: int = 1, *, groups: int = 1) -> None:
        shape = (channels, self.channels // groups, size, size)
        weights = self._rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        bias = self._rng.standard_normal(channels) * 0.1
        self.add(
            "Conv", self._constant(weights), self._constant(bias), kernel_shape=[size, size], group=groups,
            strides=[stride, stride], pads=[size // 2] * 4,
        )  # fmt: skip
        self.channels = channels

    def clip(self) -> None:
        self.add("Clip", self._constant(0.0), self._constant(6.0))

    def classify(self, classes: int) -> None:
        self.add("GlobalAveragePool")
        self.add("Flatten", axis=1)
        weights = self._rng.standard_normal((classes, self.channels)) / np.sqrt(self.channels)
        self.add("Gemm", self._constant(weights), self._constant(np.zeros(classes)), transB=1)

    def encoded(self) -> bytes:
        output = ValueInfo(self.value, DataType.FLOAT, (1, 1000) if len(self._nodes) > 50 else (1, 10))
        graph = GraphProto(
            tuple(self._nodes), (self._input,), (output,), tuple(self._constants), name="network"
        )
        return encode_model(ModelProto(IR_VERSION, (OpsetImport("", OPSET),), graph))


def small_cnn() -> bytes:
    """Three convolutions on 96 x 96 pixels, a mean, a product and a softmax."""
    network = _Network(3, 96)
    for channels in (8, 16, 32):
        network.convolve(channels, stride=2)
        network.add("Relu")
    network.classify(10)
    network.add("Softmax", axis=-1)
    return network.encoded()


def mobilenet_v2() -> bytes:
    """MobileNetV2 1.0 for 224 x 224 pixels and 1,000 classes: 14 MB."""
    network = _Network(3, 224)
    network.convolve(32, stride=2)
    network.clip()
    for expansion, channels, count, stride in BLOCKS:
        for index in range(count):
            before, entry = network.channels, network.value
            if expansion > 1:
                network.convolve(before * expansion, 1)
                network.clip()
            network.convolve(network.channels, stride=stride if index == 0 else 1, groups=network.channels)
            network.clip()
            network.convolve(channels, 1)
            if index:
                network.add("Add", entry)
    network.convolve(1280, 1)
    network.clip()
    network.classify(1000)
    return network.encoded()
